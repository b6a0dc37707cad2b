"""The stream as 8 bits: taken for what the stream is known to be, until it is measured; nothing to exact transfers."""

from collections.abc import Iterator

import pytest

from kvservice.peers.routes import GUESSES, INT8_BYTES_PER_S, INT8_PRICE, INT8_SHARE, Router
from kvservice.peers.routes_estimate import Speed
from kvservice.peers.routes_log import Choice, Medium, Why
from tests.peers.members import ManualClock

STREAM, INT8, FLIGHT = Medium.STREAM, Medium.INT8_STREAM, Medium.FLIGHT
MIB = 1 << 20
FAST, SLOW = 4e9, 5e7
LATENCY_S = 2e-4


class World:
    """One link, of which a packed transfer takes half the bytes and the work of a core; one transfer every tenth."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self.clock = ManualClock()
        self.router = Router(self.clock)

    def transfer(self, *media: Medium, count: int = 4 * MIB) -> Choice:
        choice = self.router.choose("peer", count, media or (STREAM, INT8), may_pack=INT8 in media or not media)
        is_packed = choice.medium is INT8
        rate = min(self.bytes_per_s / INT8_SHARE, INT8_BYTES_PER_S) if is_packed else self.bytes_per_s
        self.router.done(choice, LATENCY_S + count / rate)
        self.clock.pass_(0.1)
        return choice

    def run(self, seconds: float, *media: Medium) -> list[Choice]:
        return [self.transfer(*media) for _ in range(round(seconds * 10))]


def reasons(choices: list[Choice], medium: Medium) -> set[Why]:
    return {one.why for one in choices if one.medium is medium}


# Before it was measured


@pytest.mark.parametrize("bytes_per_s", [1e7, 2e8, 4e9])
def test_it_is_taken_for_what_the_stream_is_known_to_be(bytes_per_s: float) -> None:
    world = World(bytes_per_s)
    world.run(2, STREAM)
    stream, packed = world.router.speed("peer", STREAM), world.router.speed("peer", INT8)
    assert packed == Speed(stream.latency_s, min(stream.bytes_per_s / INT8_SHARE, INT8_BYTES_PER_S))
    world.bytes_per_s /= 10
    world.run(2, STREAM)
    assert world.router.speed("peer", INT8).bytes_per_s < packed.bytes_per_s
    documents = {one["medium"]: one for one in world.router.document()}
    assert documents[INT8]["transfers"] == 0
    assert documents[INT8]["bytes_per_s"] == world.router.speed("peer", INT8).bytes_per_s


def test_what_was_measured_is_what_counts_then() -> None:
    world = World(SLOW)
    world.run(2, STREAM)
    guessed = world.router.speed("peer", INT8)
    world.router.measured("peer", INT8, 64 * MIB, 64.0)
    assert world.router.speed("peer", INT8).bytes_per_s < 0.1 * guessed.bytes_per_s
    assert world.router.speed("another", INT8).bytes_per_s == INT8_BYTES_PER_S, "of others nothing is known"


def test_of_a_peer_that_nothing_is_known_of_the_stream_is_taken_as_it_is() -> None:
    assert GUESSES[STREAM].bytes_per_s >= INT8_BYTES_PER_S
    first = World(FAST).transfer()
    assert (first.medium, first.why) == (STREAM, Why.FIRST)


# Choosing


def test_a_fast_link_keeps_the_stream() -> None:
    world = World(FAST)
    world.run(1, STREAM)
    choices = world.run(60)
    assert choices[0].medium is STREAM
    assert reasons(choices, STREAM) <= {Why.FIRST, Why.KEPT}
    assert reasons(choices, INT8) <= {Why.TRIAL}
    assert sum(one.medium is INT8 for one in choices) <= 0.02 * len(choices)


def test_a_link_that_is_known_to_be_slow_is_packed_at_once() -> None:
    world = World(SLOW)
    world.run(2, STREAM)
    choices = world.run(60)
    assert (choices[0].medium, choices[0].why) == (INT8, Why.FIRST)
    assert choices[0].predicted[INT8] == pytest.approx(INT8_SHARE * choices[0].predicted[STREAM], rel=0.05)
    assert reasons(choices, INT8) <= {Why.FIRST, Why.KEPT}
    assert reasons(choices, STREAM) <= {Why.TRIAL}


def test_a_link_that_turns_slow_is_packed_after_a_while_and_not_any_more_when_it_is_fast_again() -> None:
    world = World(FAST)
    world.run(60)
    world.bytes_per_s = SLOW
    after = world.run(60)
    switched = next(index for index, one in enumerate(after) if one.why is Why.SWITCHED)
    assert world.router.limits.better_for_s - 0.1 <= after[switched].at_s - after[0].at_s <= 8.0
    assert after[switched].medium is INT8
    assert reasons(after[switched + 1 :], INT8) <= {Why.KEPT, Why.HELD}
    assert reasons(after[switched + 1 :], STREAM) <= {Why.TRIAL}
    world.bytes_per_s = FAST
    back = world.run(60)
    assert (back[-1].medium, back[-1].why) == (STREAM, Why.KEPT)
    assert [one.medium for one in back if one.why is Why.SWITCHED] == [STREAM]


def test_where_both_are_about_as_fast_the_stream_is_used_whatever_was_in_use() -> None:
    """Packing costs both ends CPU: it has to be worth it."""
    world = World(SLOW)
    world.run(2, STREAM)
    assert {one.medium for one in world.run(10)[-20:]} == {INT8}
    world.bytes_per_s = 1.15 * INT8_BYTES_PER_S
    assert world.run(60)[-1].medium is STREAM
    world.bytes_per_s = 0.85 * INT8_BYTES_PER_S
    again = world.run(60)
    assert not reasons(again, INT8) - {Why.TRIAL}


@pytest.mark.parametrize("of_stream", [0.85, 0.99])
def test_trials_of_what_is_not_worth_its_price_are_paid_for(of_stream: float) -> None:
    world = World(FAST)
    chosen = []
    for _ in range(400):
        choice = world.router.choose("peer", 4 * MIB, (STREAM, INT8), may_pack=True)
        seconds = LATENCY_S + 4 * MIB / 9e8
        world.router.done(choice, seconds * (of_stream if choice.medium is INT8 else 1.0))
        world.clock.pass_(6.0)
        chosen.append(choice.medium)
    extra = of_stream * INT8_PRICE - 1
    assert chosen[100:].count(INT8) * extra < 1.25 * world.router.limits.trial_share * 300


def test_what_was_in_use_and_is_gone_is_replaced_and_all_others_are_tried_again() -> None:
    shared, world = Medium.SHARED_MEMORY, World(FAST)

    def run(count: int, rates: dict[Medium, float]) -> list[Choice]:
        done = []
        for _ in range(count):
            done.append(world.router.choose("peer", 4 * MIB, tuple(rates), may_pack=True))
            world.router.done(done[-1], LATENCY_S + 4 * MIB / rates[done[-1].medium])
            world.clock.pass_(0.5)
        return done

    assert run(20, {STREAM: 1e9, shared: 5e9, INT8: 9e8})[-1].medium is shared
    run(20, {STREAM: 5e7, INT8: 2e7})
    later = run(400, {STREAM: 5e7, INT8: 9.8e7})
    assert (later[-1].medium, later[-1].why) == (INT8, Why.KEPT)


def test_exact_transfers_tell_how_fast_the_link_is_again() -> None:
    world = World(SLOW)
    world.run(2, STREAM)
    world.run(60)
    world.bytes_per_s = FAST
    for _ in range(100):
        world.transfer(STREAM)
        last = world.transfer()
    assert last.medium is STREAM


# Exact and lossy transfers to one peer


def both(world: World, seconds: float) -> Iterator[tuple[Choice, Choice]]:
    for _ in range(round(seconds * 5)):
        yield world.transfer(STREAM, FLIGHT), world.transfer(STREAM, FLIGHT, INT8)


def test_exact_transfers_are_never_packed_and_not_disturbed() -> None:
    world = World(SLOW)
    pairs = list(both(world, 120))
    exact, lossy = [one for one, _ in pairs], [one for _, one in pairs]
    assert all(INT8 not in one.predicted for one in exact)
    assert {one.why for one in exact} <= {Why.FIRST, Why.KEPT, Why.TRIAL, Why.HELD}
    assert lossy[-1].medium is INT8
    assert Why.FALLBACK not in world.router.log.reasons


def test_a_failed_one_falls_back_to_the_stream_and_comes_back() -> None:
    world = World(SLOW)
    world.run(2, STREAM)
    world.run(2)
    world.router.failed(world.router.choose("peer", 4 * MIB, [STREAM, INT8], may_pack=True))
    rest = world.router.choose("peer", 4 * MIB, [STREAM], may_pack=True)
    assert (rest.medium, rest.why) == (STREAM, Why.FALLBACK)
    world.router.done(rest, 0.1)
    assert world.transfer(STREAM).why is Why.ONLY
    left = world.transfer()
    assert (left.medium, left.why) == (STREAM, Why.FALLBACK)
    choices = world.run(30)
    assert choices[-1].medium is INT8


def test_a_router_of_what_is_given_says_so() -> None:
    router = Router(ManualClock(), direction="to")
    assert "1 bytes to peer by int8_stream (only)" in str(router.choose("peer", 1, [INT8], may_pack=True))
