"""A place whose stream can pack rows as 8 bits: when records come and go that way, and what happens if that fails."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from kvservice.model.errors import CapacityError, KVServiceError, UnavailableError
from kvservice.model.identity import Namespace
from kvservice.peers.call import SilentError, UnsettledError
from kvservice.peers.routes import Router
from kvservice.peers.routes_log import Choice, Medium, Why
from kvservice.sharing.routed import AT_ONCE_S, RoutedPlace
from kvservice.sharing.shares import Shares
from kvservice.storage.buffer import Bytes
from kvservice.storage.remote.contract import OnPiece
from tests.peers.members import ManualClock
from tests.sharing.test_routed import Way

STREAM, INT8, FLIGHT, SHARED = Medium.STREAM, Medium.INT8_STREAM, Medium.FLIGHT, Medium.SHARED_MEMORY
MIB = 1 << 20
EXACT, LOSSY = Namespace(b"exact"), Namespace(b"lossy")
TARGET = np.zeros(MIB, np.uint8)


def record(namespace: Namespace) -> Any:
    return SimpleNamespace(record_bytes=MIB, name=SimpleNamespace(namespace=namespace))


def parcel(namespace: Namespace) -> Any:
    return SimpleNamespace(view=TARGET, name=SimpleNamespace(namespace=namespace))


@dataclass(eq=False)
class Link:
    """A way of so many bytes a second; or one that fails, after ``fails_at`` bytes of a record and ``seconds``."""

    clock: ManualClock
    bytes_per_s: float
    error: KVServiceError | None = None
    fails_at: int = 0
    seconds: float = 0.0
    is_new: bool = True
    starts: list[int] = field(default_factory=list)
    stored: int = 0
    name: str = "peer"

    async def fetch(self, record: Any, target: Bytes, on_piece: OnPiece, start: int = 0) -> None:
        self.starts.append(start)
        end = record.record_bytes if self.error is None else self.fails_at
        if end > start:
            on_piece(start, end)
        self._take(end - start)

    async def store(self, parcel: Any) -> bool:
        self.stored += 1
        self._take(len(parcel.view))
        return self.is_new

    def _take(self, count: int) -> None:
        if self.error is not None:
            self.clock.pass_(self.seconds)
            raise self.error
        self.clock.pass_(count / self.bytes_per_s)


class World:
    """A peer's stream, as it is and packed, and more ways if a test adds some."""

    def __init__(self, stream: float = 1e8, packed: float = 1.9e8) -> None:
        self.clock = ManualClock()
        self.stream, self.packed = Link(self.clock, stream), Link(self.clock, packed)
        self.router, self.given = Router(self.clock), Router(self.clock, direction="to")
        self.place = RoutedPlace(
            self.router,
            {STREAM: cast("Any", self.stream)},
            self.clock,
            packed=cast("Any", self.packed),
            given=self.given,
            is_lossy=lambda namespace: namespace == LOSSY,
        )

    def knows(self, router: Router, bytes_per_s: float) -> None:
        for _ in range(5):
            router.measured("peer", STREAM, MIB, MIB / bytes_per_s)

    async def fetch(self, namespace: Namespace, on_piece: OnPiece = lambda *_: None) -> Choice:
        await self.place.fetch(record(namespace), TARGET, on_piece)
        return self.router.log.last(1)[0]

    async def store(self, namespace: Namespace) -> Choice:
        await self.place.store(parcel(namespace))
        return self.given.log.last(1)[0]


# What comes


async def test_a_lossy_record_comes_packed_over_a_slow_link_and_an_exact_one_never() -> None:
    world = World()
    world.knows(world.router, 1e8)
    lossy, exact = await world.fetch(LOSSY), await world.fetch(EXACT)
    assert (lossy.medium, lossy.bytes, set(lossy.predicted)) == (INT8, MIB, {STREAM, INT8})
    assert (exact.medium, set(exact.predicted), exact.why) == (STREAM, {STREAM}, Why.ONLY)
    assert lossy.actual_s == pytest.approx(MIB / 1.9e8)
    assert (world.packed.starts, world.stream.starts) == ([0], [0])
    assert world.place.brought_bytes == 2 * MIB


async def test_over_a_fast_link_it_comes_as_it_is() -> None:
    world = World(4e9, 1e9)
    world.knows(world.router, 4e9)
    assert (await world.fetch(LOSSY)).medium is STREAM


async def test_if_packing_fails_the_stream_goes_on_behind_what_is_there() -> None:
    world, pieces = World(), list[tuple[int, int]]()
    world.knows(world.router, 1e8)
    world.packed.error, world.packed.fails_at = UnavailableError("broke"), 300_000
    await world.fetch(LOSSY, lambda first, end: pieces.append((first, end)))
    assert pieces == [(0, 300_000), (300_000, MIB)]
    assert world.stream.starts == [300_000]
    packed, stream = reversed(world.router.log.last(2))
    assert (packed.medium, packed.has_failed) == (INT8, True)
    assert (stream.medium, stream.why, stream.bytes) == (STREAM, Why.FALLBACK, MIB - 300_000)
    world.packed.error = None
    assert (await world.fetch(LOSSY)).medium is STREAM, "it is left alone for a while"
    world.clock.pass_(5.0)
    for _ in range(300):
        last = await world.fetch(LOSSY)
        world.clock.pass_(0.1)
    assert last.medium is INT8
    assert (await world.fetch(EXACT)).why is Why.ONLY


async def test_a_silent_link_is_not_waited_for_twice() -> None:
    """Packed or not, it is the same link."""
    world, flight = World(), Link(ManualClock(), 1e9)
    world.knows(world.router, 1e8)
    world.packed.error = SilentError("said nothing for a whole deadline")
    with pytest.raises(SilentError):
        await world.fetch(LOSSY)
    assert world.stream.starts == []
    world.clock.pass_(10.0)
    world.place.add_way(FLIGHT, cast("Any", flight))
    for _ in range(5):
        world.router.measured("peer", FLIGHT, MIB, 1.0)
    await world.fetch(LOSSY)
    assert (world.packed.starts, world.stream.starts, flight.starts) == ([0, 0], [], [0])


async def test_what_the_stream_does_not_bring_does_not_come_packed_either() -> None:
    world, flight = World(4e9, 1e9), Link(ManualClock(), 1e9)
    world.knows(world.router, 4e9)
    world.place.add_way(FLIGHT, cast("Any", flight))
    world.stream.error = UnavailableError("lost")
    await world.fetch(LOSSY)
    assert (world.packed.starts, flight.starts) == ([], [0])


async def test_without_a_stream_among_the_ways_nothing_is_packed() -> None:
    clock = ManualClock()
    place = RoutedPlace(
        Router(clock), {FLIGHT: Way("flight", [0.0])}, clock, packed=Way("packed", [0.0]), is_lossy=lambda _: True
    )
    await place.fetch(record(LOSSY), TARGET, lambda *_: None)
    assert place.media == [FLIGHT]


# How fast it is


def test_for_lossy_namespaces_the_faster_of_both_counts_and_for_others_the_stream() -> None:
    world = World()
    world.knows(world.router, 1e8)
    exact, lossy = world.place.speed_of(EXACT), world.place.speed_of(LOSSY)
    assert exact == world.router.speed("peer", STREAM)
    assert lossy == world.router.speed("peer", INT8)
    assert lossy.bytes_per_s > 1.9 * exact.bytes_per_s
    world.knows(world.router, 4e9)
    assert world.place.speed_of(LOSSY) == world.place.speed_of(EXACT)
    assert world.place.media == [STREAM, INT8]


# What goes


async def test_what_is_given_is_packed_where_that_was_measured_to_be_faster() -> None:
    world = World()
    for _ in range(5):
        assert (await world.store(EXACT)).medium is STREAM
    first = await world.store(LOSSY)
    assert (first.medium, first.why, first.direction) == (INT8, Why.FIRST, "to")
    assert first.actual_s == pytest.approx(MIB / 1.9e8)
    assert (world.packed.stored, world.stream.stored) == (1, 5)
    assert (world.place.given, world.place.given_bytes) == (6, 6 * MIB)
    assert world.given.speed("peer", STREAM).bytes_per_s == pytest.approx(1e8, rel=0.1)
    assert not world.router.log.kept, "what comes has speeds of its own"


async def test_over_a_fast_link_it_goes_as_it_is() -> None:
    world = World(4e9, 1e9)
    for _ in range(5):
        await world.store(EXACT)
    assert (await world.store(LOSSY)).medium is STREAM


async def test_what_is_there_already_tells_nothing() -> None:
    world = World()
    world.knows(world.given, 1e8)
    world.packed.is_new = False
    choice = await world.store(LOSSY)
    assert (choice.medium, choice.actual_s, choice.has_failed) == (INT8, None, False)
    assert world.place.given == 0


async def test_if_packing_fails_at_once_the_stream_is_asked_and_then_the_others() -> None:
    world, flight = World(), Link(ManualClock(), 1e9)
    world.knows(world.given, 1e8)
    world.place.add_way(FLIGHT, cast("Any", flight))
    world.packed.error = UnavailableError("left alone")
    stream = await world.store(LOSSY)
    assert (stream.medium, stream.why) == (STREAM, Why.FALLBACK)
    assert (world.packed.stored, world.stream.stored, flight.stored) == (1, 1, 0)
    world.stream.error = UnavailableError("left alone")
    await world.store(LOSSY)
    assert (world.packed.stored, world.stream.stored, flight.stored) == (1, 2, 1)
    world.place.remove_way(FLIGHT)
    with pytest.raises(UnavailableError):
        await world.store(LOSSY)


@pytest.mark.parametrize(
    ("error", "seconds"), [(UnsettledError("broke behind GO"), 0.0), (SilentError("silent"), 2 * AT_ONCE_S)]
)
async def test_what_may_have_been_done_or_took_a_deadline_is_not_asked_again(
    error: KVServiceError, seconds: float
) -> None:
    world, flight = World(), Link(ManualClock(), 1e9)
    world.knows(world.given, 1e8)
    world.place.add_way(FLIGHT, cast("Any", flight))
    world.packed.error, world.packed.seconds = error, seconds
    with pytest.raises(type(error)):
        await world.store(LOSSY)
    assert (world.stream.stored, flight.stored) == (0, 0)
    assert world.given.log.last(1)[0].has_failed


async def test_what_the_place_says_is_said_once() -> None:
    world = World()
    world.knows(world.given, 1e8)
    world.packed.error = CapacityError("full")
    with pytest.raises(CapacityError):
        await world.store(LOSSY)
    assert world.stream.stored == 0
    assert not world.given.log.last(1)[0].has_failed


async def test_what_is_read_in_shared_memory_is_not_measured() -> None:
    world, local = World(), Link(ManualClock(), 1e9)
    world.place.add_way(SHARED, cast("Any", local))
    await world.place.store(parcel(LOSSY))
    assert (local.stored, world.packed.stored, world.stream.stored) == (1, 0, 0)
    assert not world.given.log.kept
    assert world.place.given_media == []
    world.place.remove_way(SHARED)
    assert world.place.given_media == [STREAM]
    await world.store(LOSSY)
    assert world.place.given_media == [STREAM, INT8], "such are given"


# What shares a link


async def test_pushes_that_run_together_had_the_link_for_a_share_of_the_time() -> None:
    world, gates = World(), [asyncio.Event() for _ in range(2)]
    waiting = iter(gates)

    async def store(_: Any) -> bool:
        await next(waiting).wait()
        return True

    world.stream.store = store  # type: ignore[method-assign,assignment]
    tasks = [asyncio.ensure_future(world.place.store(parcel(EXACT))) for _ in gates]
    await asyncio.sleep(0)
    for gate, seconds in zip(gates, (2.0, 0.5), strict=True):
        world.clock.pass_(seconds)
        gate.set()
        await asyncio.sleep(0)
    await asyncio.gather(*tasks)
    assert [one.actual_s for one in world.given.log.kept] == [1.0, 1.5]


def test_shares_add_up_to_the_time_in_which_anything_ran() -> None:
    clock = ManualClock()
    shares = Shares(clock)
    pass_: Callable[[float], None] = clock.pass_
    pass_(100.0)
    first = shares.begin()
    pass_(1.0)
    second = shares.begin()
    pass_(2.0)
    took = [shares.now() - first]
    shares.end()
    pass_(3.0)
    took.append(shares.now() - second)
    shares.end()
    pass_(100.0)
    assert took == [2.0, 4.0]
    assert shares.begin() == shares.now()
