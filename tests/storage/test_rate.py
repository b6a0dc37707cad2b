"""Background work keeps to its bytes a second."""

import random

import pytest

from kvservice.storage.rate import ByteRate


class Clock:
    """Seconds that pass when told."""

    def __init__(self) -> None:
        self.now_s = 50.0

    def __call__(self) -> float:
        return self.now_s


def test_the_first_piece_waits_for_nothing_and_the_next_for_the_first() -> None:
    rate = ByteRate(100, clock=Clock())
    assert [rate.take(50), rate.take(200), rate.take(1), rate.take(1)] == pytest.approx([0.0, 0.5, 2.5, 2.51])


def test_time_that_passes_counts() -> None:
    clock = Clock()
    rate = ByteRate(100, clock=clock)
    assert rate.take(100) == 0.0
    clock.now_s += 0.75
    assert rate.take(100) == 0.25


def test_idle_time_is_not_saved_up() -> None:
    clock = Clock()
    rate = ByteRate(100, clock=clock)
    clock.now_s += 1e6
    assert [rate.take(100), rate.take(100)] == [0.0, 1.0]


@pytest.mark.parametrize("seed", range(5))
def test_whoever_waits_as_told_never_moves_more_than_the_rate_and_one_piece(seed: int) -> None:
    rng, clock = random.Random(seed), Clock()
    rate, start_s, moved, piece_max = ByteRate(1000, clock=clock), clock.now_s, 0, 500
    for _ in range(500):
        count = rng.randint(1, piece_max)
        clock.now_s += rate.take(count) + rng.choice([0.0, 0.01, 0.3])
        moved += count
        assert moved <= 1000 * (clock.now_s - start_s) + piece_max + 1e-6


def test_no_rate_is_a_bug() -> None:
    with pytest.raises(AssertionError):
        ByteRate(0, clock=Clock())
