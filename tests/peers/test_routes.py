"""Routes: what is predicted, when it is changed, what a trial may cost, and that every choice is explained."""

import random
from collections import Counter
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvservice.model.errors import UnavailableError
from kvservice.peers.routes import GUESSES, PEERS_MAX, RouteLimits, Router, size_class
from kvservice.peers.routes_estimate import Estimate, Speed
from kvservice.peers.routes_log import KEPT_MAX, Choice, Medium, Why
from tests.peers.members import ManualClock

STREAM, FLIGHT, COLD, SHARED = Medium.STREAM, Medium.FLIGHT, Medium.COLD, Medium.SHARED_MEMORY
MIB = 1 << 20
Links = dict[Medium, Callable[[int], float]]


def link(latency_s: float, bytes_per_s: float, noise: Callable[[], float] = lambda: 1.0) -> Callable[[int], float]:
    """Seconds that so many bytes take."""
    return lambda count: noise() * (latency_s + count / bytes_per_s)


def fast() -> Links:
    return {STREAM: link(2e-4, 2e9), FLIGHT: link(1e-3, 1e9), COLD: link(2e-2, 2e8)}


class World:
    """Links with a router before them: transfers of one size, one every ``every_s``."""

    def __init__(self, links: Links, limits: RouteLimits | None = None) -> None:
        self.links, self.clock = links, ManualClock()
        self.router = Router(self.clock, limits)

    def transfer(self, count: int = 4 * MIB, every_s: float = 0.1) -> Choice:
        choice = self.router.choose("peer", count, list(self.links))
        self.router.done(choice, self.links[choice.medium](count))
        self.clock.pass_(every_s)
        return choice

    def run(self, seconds: float, count: int = 4 * MIB, every_s: float = 0.1) -> list[Choice]:
        return [self.transfer(count, every_s) for _ in range(round(seconds / every_s))]


# Estimates


@pytest.mark.parametrize("truth", [Speed(1e-4, 5e9), Speed(5e-3, 1e8), Speed(0.2, 1e7), Speed(1e-3, 1e6)])
def test_latency_and_bandwidth_are_told_apart_by_transfers_of_all_sizes(truth: Speed) -> None:
    draw, estimate = random.Random(3), Estimate(GUESSES[STREAM])
    for number in range(400):
        count = draw.choice([0, 4096, MIB, 64 * MIB])
        estimate.note(count, truth.latency_s + count / truth.bytes_per_s, number * 0.1)
    for count in (0, MIB, 64 * MIB):
        assert estimate.seconds(count) == pytest.approx(truth.latency_s + count / truth.bytes_per_s, rel=0.05)


def test_the_first_transfers_replace_the_guess() -> None:
    estimate = Estimate(Speed(0.02, 5e7))
    for number in range(4):
        estimate.note(MIB, 1e-3, number * 0.1)
    assert estimate.seconds(MIB) == pytest.approx(1e-3, rel=0.6)


def test_one_hiccup_is_not_the_truth_and_several_are() -> None:
    estimate = Estimate(GUESSES[STREAM])
    for number in range(50):
        estimate.note(MIB, 1e-3, number * 0.1)
    estimate.note(MIB, 1.0, 5.0)
    assert estimate.seconds(MIB) < 3e-3
    for number in range(30):
        estimate.note(MIB, 1.0, 5.1 + number * 0.1)
    assert estimate.seconds(MIB) == pytest.approx(1.0, rel=0.1)


def test_a_transfer_after_a_long_time_counts_for_more() -> None:
    def after(pause_s: float) -> float:
        estimate = Estimate(GUESSES[STREAM])
        for number in range(20):
            estimate.note(MIB, 1e-3, number * 0.1)
        estimate.note(MIB, 4e-3, 2.0 + pause_s)
        return estimate.seconds(MIB)

    assert after(0.1) < 1.3e-3 < 1.8e-3 < after(30.0) < 4e-3


@given(st.lists(st.tuples(st.integers(0, 1 << 40), st.floats(0, 1e6), st.floats(0, 1e5)), max_size=40))
def test_whatever_is_measured_an_estimate_stays_a_speed(transfers: list[tuple[int, float, float]]) -> None:
    estimate, now_s = Estimate(GUESSES[FLIGHT]), 0.0
    for count, seconds, pause_s in transfers:
        now_s += pause_s
        estimate.note(count, seconds, now_s)
        assert 0 < estimate.latency_s <= 600
        assert 1e3 <= estimate.bytes_per_s <= 1e13


# Choosing


def test_the_lowest_prediction_is_taken_first_and_kept() -> None:
    world = World(fast())
    choices = world.run(60)
    assert choices[0].why is Why.FIRST
    assert {one.medium for one in choices if one.why in (Why.FIRST, Why.KEPT)} == {STREAM}
    assert {one.why for one in choices} <= {Why.FIRST, Why.KEPT, Why.TRIAL}


def test_sizes_have_media_of_their_own() -> None:
    world = World({STREAM: link(1e-4, 1e8), FLIGHT: link(5e-3, 2e9)})
    for _ in range(300):
        world.transfer(4096)
        world.transfer(64 * MIB)
    assert world.transfer(4096).medium is STREAM
    assert world.transfer(64 * MIB).medium is FLIGHT
    assert [size_class(count) for count in (0, 1, 16384, 16385, 1 << 18, 1 << 22, 1 << 26, 1 << 40)] == [
        *(0, 0, 0, 1, 1, 2, 3, 4),
    ]


def test_a_link_that_degrades_is_left_within_seconds_and_taken_again_when_it_mends() -> None:
    world = World(fast())
    world.run(60)
    world.links[STREAM] = link(5e-2, 5e7)
    after = []
    for _ in range(60):
        after += world.run(1)
        world.router.measured("peer", STREAM, 0, 5e-2)  # a ping
    left = next(index for index, one in enumerate(after) if one.why is Why.SWITCHED)
    assert left * 0.1 <= 7.0
    assert after[left].medium is FLIGHT
    assert {one.medium for one in after[left:] if one.why is not Why.TRIAL} == {FLIGHT}
    held = [one for one in after[:left] if one.why is Why.HELD]
    assert after[left].at_s - held[0].at_s >= 4.5
    world.links[STREAM] = link(2e-4, 2e9)
    for _ in range(20):
        world.router.measured("peer", STREAM, 0, 2e-4)
        world.run(1)
    assert world.transfer().medium is STREAM


def test_a_link_that_mends_is_found_out_by_trials_alone() -> None:
    world = World(fast())
    world.run(60)
    world.links[STREAM] = link(2e-3, 3e8)
    assert world.run(60)[-1].medium is FLIGHT
    world.links[STREAM] = link(2e-4, 2e9)
    assert world.run(60)[-1].medium is STREAM


def test_a_little_better_is_not_enough() -> None:
    world = World({STREAM: link(1e-4, 1e9), FLIGHT: link(1e-4, 1.15e9)})
    world.run(60)
    assert world.router.log.reasons[Why.SWITCHED] == 0


@pytest.mark.parametrize("seed", range(8))
def test_noisy_links_that_are_equal_in_the_mean_do_not_make_routes_swing(seed: int) -> None:
    draw = random.Random(seed)

    def noise() -> float:
        return draw.lognormvariate(0.0, 0.5) if draw.random() > 0.02 else 10.0

    world = World({STREAM: link(2e-4, 1e9, noise), FLIGHT: link(2e-4, 1e9, noise)})
    world.run(600)
    assert world.router.log.reasons[Why.SWITCHED] <= 2, f"seed {seed}"


@pytest.mark.parametrize("seed", range(4))
def test_a_noisy_link_that_is_clearly_better_in_the_mean_is_found(seed: int) -> None:
    draw = random.Random(seed)

    def noise() -> float:
        return draw.lognormvariate(0.0, 0.5)

    world = World({STREAM: link(2e-4, 5e8, noise), FLIGHT: link(2e-4, 2e9, noise)})
    world.run(60)
    late = Counter(one.medium for one in world.run(60))
    assert late[FLIGHT] > 0.9 * late.total(), f"seed {seed}"


def test_trials_cost_a_small_share_of_all() -> None:
    world = World({STREAM: link(2e-4, 1e9), COLD: link(2e-2, 1e8)})
    choices = world.run(600)
    trials = [one for one in choices if one.why is Why.TRIAL]
    assert trials
    extra_s = sum((one.actual_s or 0.0) - min(one.predicted.values()) for one in trials)
    spent_s = sum(one.actual_s or 0.0 for one in choices)
    assert extra_s <= 0.05 * spent_s
    assert all(later.at_s - one.at_s >= 5.0 for one, later in pairwise(trials))


def test_what_never_was_as_good_is_tried_rarely_and_what_was_is_tried_often() -> None:
    world = World({STREAM: link(1e-4, 1e9), FLIGHT: link(1e-3, 8e8)})
    choices = world.run(600)
    trials = [one for one in choices if one.why is Why.TRIAL][3:]
    assert trials
    assert all(later.at_s - one.at_s >= 60.0 for one, later in pairwise(trials))
    world.links[STREAM] = link(2e-3, 6e8)
    assert world.run(60)[-1].medium is FLIGHT
    assert sum(one.medium is STREAM for one in world.run(60)) >= 5, "it was better once, and may be again"


def test_what_was_never_tried_and_may_be_better_is_found_out() -> None:
    world = World({STREAM: link(2e-4, 1e8), FLIGHT: link(1e-3, 1e9)})
    world.run(60)
    assert world.transfer().medium is FLIGHT


# Failing, going


def test_a_medium_that_fails_is_left_at_once_for_a_while_and_tried_again() -> None:
    world = World(fast())
    world.run(10)
    choice = next(one for one in (world.transfer(MIB) for _ in range(9)) if one.medium is STREAM)
    world.router.failed(choice)
    assert choice.has_failed
    after = world.router.choose("peer", MIB, [STREAM, FLIGHT])
    assert (after.medium, after.why) == (FLIGHT, Why.FALLBACK)
    assert world.router.choose("peer", MIB, [STREAM]).medium is STREAM, "there is nothing else"
    world.clock.pass_(5.0)
    assert world.run(30, MIB)[-1].medium is STREAM


def test_a_medium_that_is_not_offered_is_not_chosen_and_no_medium_is_an_error() -> None:
    world = World(fast())
    world.run(10)
    choice = world.router.choose("peer", 4 * MIB, [COLD, FLIGHT])
    assert (choice.medium, choice.why) == (FLIGHT, Why.FALLBACK)
    assert world.router.choose("peer", 4 * MIB, [COLD]).why is Why.FALLBACK
    assert world.router.choose("another", 4 * MIB, [COLD]).why is Why.ONLY
    assert world.transfer().medium is STREAM, "it is there again, and was in use"
    with pytest.raises(UnavailableError, match="nothing leads to peer now"):
        world.router.choose("peer", MIB, [])


def test_shared_memory_beats_all_others_from_the_start() -> None:
    router = Router(ManualClock())
    for count in (0, 4096, MIB, 256 * MIB):
        assert router.choose("near", count, [STREAM, SHARED, FLIGHT, COLD]).medium is SHARED


def test_peers_are_bounded_and_forgotten() -> None:
    router = Router(ManualClock())
    for number in range(PEERS_MAX + 5):
        router.measured(f"peer {number}", STREAM, 0, 1e-4)
    assert len(router.document()) == PEERS_MAX
    router.forget("peer 50")
    assert len(router.document()) == PEERS_MAX - 1
    router.forget("peer 50")


# Explanations


def test_every_choice_is_explained_and_counted() -> None:
    world = World(fast())
    choices = world.run(30)
    world.router.failed(world.router.choose("peer", MIB, [STREAM]))
    assert world.router.log.last(2)[1] is choices[-1]
    document = world.router.log.document()
    assert sum(document["reasons"].values()) == len(choices) + 1
    assert set(document["reasons"]) == set(Why)
    stream = document["media"]["stream"]
    done = [one for one in choices if one.medium is STREAM]
    assert (stream["choices"], stream["failures"]) == (len(done) + 1, 1)
    assert stream["bytes"] == sum(one.bytes for one in done)
    assert stream["actual_s"] == pytest.approx(sum(one.actual_s or 0 for one in done))
    assert stream["predicted_s"] == pytest.approx(sum(one.predicted_s for one in done))
    assert 0 < stream["error_share"] < 0.1
    text = str(choices[0])
    assert "from peer by stream (first): predicted 4.39 ms, actual 2.30 ms; others: flight" in text
    assert "others: none" in str(world.router.log.last(1)[0])
    assert "under way" in str(world.router.choose("peer", 1, [STREAM]))


def test_the_ring_is_bounded_and_the_counters_go_on() -> None:
    world = World({STREAM: link(1e-4, 1e9)})
    world.run((KEPT_MAX + 100) * 0.1)
    assert len(world.router.log.kept) == KEPT_MAX
    assert world.router.log.document()["media"]["stream"]["choices"] == KEPT_MAX + 100
