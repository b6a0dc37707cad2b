"""Rates of late: half of what is old after every half-life, and no clock makes them wild."""

import pytest

from kvservice.stats.recent import Recent

HALF_LIFE_S = 100.0


class World:
    def __init__(self) -> None:
        self.now_s, self.count = 0.0, 0.0
        self.recent = Recent(lambda: (self.count,), lambda: self.now_s, HALF_LIFE_S)

    def go(self, seconds: int, a_second: float) -> float:
        for _ in range(seconds):
            self.now_s += 1.0
            self.count += a_second
            self.recent.note()
        return self.recent.rates()[0]


def test_a_steady_rate_is_told_from_the_first_second_on() -> None:
    world = World()
    assert world.recent.rates() == (0.0,)
    assert world.go(1, 7.0) == pytest.approx(7.0)
    assert world.go(1000, 7.0) == pytest.approx(7.0)


def test_what_was_counts_half_after_a_half_life() -> None:
    world = World()
    world.go(2000, 10.0)
    assert world.go(100, 0.0) == pytest.approx(5.0, rel=0.01)
    assert world.go(900, 0.0) < 0.02, "a lifetime's mean would say 6.7"


@pytest.mark.parametrize("jump_s", [-7200.0, 7200.0])
def test_a_clock_that_jumps_makes_no_rate_negative_or_endless(jump_s: float) -> None:
    world = World()
    world.go(500, 10.0)
    world.now_s += jump_s
    assert 0.0 <= world.recent.rates()[0] <= 10.0
    assert 9.0 < world.go(1000, 10.0) < 11.0
