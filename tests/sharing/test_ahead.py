"""First layers that came with an answer: readable before anything was fetched, and never believed unseen."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace

import pytest

from kvservice.caches import Cache
from kvservice.model.errors import UnavailableError
from kvservice.model.plan import Outcome
from kvservice.peers.routes import Router
from kvservice.peers.routes_log import Medium
from kvservice.sharing.place import Offer, Place, Question
from kvservice.sharing.routed import AHEAD_BYTES_FIRST, AHEAD_BYTES_MAX, RoutedPlace
from kvservice.storage.buffer import Bytes
from kvservice.storage.remote.contract import RemoteRecord
from tests.server.builders import Client, cache_of, equal_planes
from tests.sharing.shelf import SharingWorld, Shelf
from tests.sharing.test_bringing import IDENTITY, META, PLANES, filled
from tests.sharing.test_routed import Way

ALL = 1 << 30


class Ahead:
    """What a place offers, with its first ``layers``; ``change``: spoils what comes."""

    def __init__(self, place: Place, shelf: Shelf, layers: int, change: Callable[[Bytes], None]) -> None:
        self.asked_bytes: list[int] = []
        self._find, self._shelf, self._layers, self._change = place.find, shelf, layers, change
        place.find = self._found  # type: ignore[method-assign]

    async def _found(self, questions: Sequence[Question], ahead_bytes: int = 0) -> list[Offer | None]:
        self.asked_bytes.append(ahead_bytes)
        offers = await self._find(questions, ahead_bytes)
        return [one and Offer(self._with(one.record), one.master and self._with(one.master)) for one in offers]

    def _with(self, record: RemoteRecord) -> RemoteRecord:
        layout = record.head.layout
        ends = (*layout.section_offsets[1:], layout.record_bytes)
        ahead = self._shelf.records[record.name][0][: ends[self._layers - 1]].copy()
        self._change(ahead)
        return dataclasses.replace(record, ahead=ahead)


def _as_it_is(_: Bytes) -> None:
    return


@asynccontextmanager
async def reading(
    *shelves: Shelf, layers: int = 1, change: Callable[[Bytes], None] = _as_it_is
) -> AsyncIterator[tuple[SharingWorld, Ahead]]:
    """A world whose first shelf holds META, and sends first layers along."""
    await filled(*shelves)
    async with SharingWorld(*shelves, push="off") as world:
        assert world.node.sharing is not None
        place = world.node.sharing.directory.everywhere()[0]
        yield world, Ahead(place, shelves[0], layers, change)
        await world.arrived()
        world.check()


def layers_of(world: SharingWorld) -> int:
    """Of META, that are readable while it is on its way."""
    cache = cache_of(world, META)
    assert isinstance(cache, Cache)
    return world.node.catalog.arriving[cache].layers


async def check_bytes(client: Client) -> None:
    found, _ = await client.find(META)
    assert found.outcome == Outcome.HIT
    assert equal_planes(client.world.read(IDENTITY, found), PLANES)


async def until(holds: Callable[[], bool]) -> None:
    for _ in range(2000):
        if holds():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it does not come to that")


async def test_the_first_layer_is_readable_before_anything_was_fetched() -> None:
    shelf = Shelf()
    async with reading(shelf) as (world, _):
        shelf.gate.clear()
        client = world.client()
        found, _ = await client.find(META)
        assert found.outcome == Outcome.HIT
        await until(lambda: layers_of(world) == 1)
        shelf.gate.set()
        await world.arrived()
        (name,) = shelf.records
        assert shelf.fetched == [(name, shelf.record(name).head.layout.section_offsets[1])]
        await check_bytes(client)


async def test_of_what_came_whole_nothing_is_fetched() -> None:
    shelf = Shelf()
    async with reading(shelf, layers=len(PLANES)) as (world, _):
        client = world.client()
        assert (await client.find(META))[0].outcome == Outcome.HIT
        await world.arrived()
        assert not shelf.fetched
        await check_bytes(client)


@pytest.mark.parametrize("at", [0, 100, -1])
async def test_what_lies_comes_from_another_place(at: int) -> None:
    """A byte of the prefix, of the header, of the layer."""

    def spoil(ahead: Bytes) -> None:
        ahead[at] ^= 1

    first, second = Shelf(), Shelf()
    async with reading(first, second, change=spoil) as (world, _):
        client = world.client()
        assert (await client.find(META))[0].outcome == Outcome.HIT
        await world.arrived()
        assert second.fetched[0][1] == 0, "from the start"
        await check_bytes(client)
        assert world.node.counters.corrupt["remote"] == 1


async def test_what_lies_and_is_nowhere_else_is_a_miss() -> None:
    shelf = Shelf()
    async with reading(shelf, change=lambda ahead: ahead.fill(7)) as (world, _):
        await world.client().find(META)
        await world.arrived()
        assert cache_of(world, META) is None


async def test_a_place_that_fails_behind_it_is_followed_by_another_behind_it() -> None:
    first, second = Shelf(), Shelf()
    async with reading(first, second) as (world, _):
        first.gate.clear()
        client = world.client()
        assert (await client.find(META))[0].outcome == Outcome.HIT
        await until(lambda: layers_of(world) == 1)
        first.fault = UnavailableError("it went away")
        first.gate.set()
        await world.arrived()
        (name,) = second.records
        assert second.fetched[0][1] >= second.record(name).head.layout.section_offsets[1]
        await check_bytes(client)


async def test_a_node_that_stops_waits_until_nothing_is_written_any_more() -> None:
    shelf = Shelf()
    async with reading(shelf) as (world, _):
        shelf.gate.clear()
        await world.client().find(META)
        assert world.node.sharing is not None
        stopping = asyncio.ensure_future(world.node.sharing.fetches.stop())
        with suppress(asyncio.CancelledError):
            await stopping
        assert not world.node.catalog.arriving
        assert cache_of(world, META) is None


# How much


async def test_a_lookup_asks_for_them_and_a_repeated_question_does_not() -> None:
    shelf = Shelf()
    async with reading(shelf) as (world, ahead):
        await world.client().find(META)
        assert ahead.asked_bytes == [AHEAD_BYTES_FIRST]


def test_no_more_is_asked_for_than_comes_soon_and_came_before() -> None:
    now_s = [0.0]
    router = Router(lambda: now_s[0])
    place = RoutedPlace(router, {Medium.STREAM: Way("stream", now_s)})
    assert place.ahead_bytes == AHEAD_BYTES_FIRST, "how fast it is was not seen yet"
    place._moved.add(1 << 20)
    assert place.ahead_bytes == 1 << 20
    place._moved.add(ALL)
    assert place.ahead_bytes == AHEAD_BYTES_MAX
    for _ in range(20):
        router.measured(place.name, Medium.STREAM, 1 << 20, 1.0)
    assert place.ahead_bytes < 16 << 10, "a slow link: 10 ms"


def test_of_a_node_whose_memory_is_read_nothing_is_asked_for() -> None:
    """Its first layer is a copy away."""
    now_s = [0.0]
    place = RoutedPlace(Router(lambda: now_s[0]), {Medium.STREAM: Way("stream", now_s)})
    place.add_way(Medium.SHARED_MEMORY, Way("local", now_s))
    assert place.ahead_bytes == 0


async def test_after_a_question_failed_with_them_none_come_until_a_record_came() -> None:
    """How fast the way is seems to be wrong; nothing else would tell."""
    now_s = [0.0]
    way = Way("stream", now_s, UnavailableError("too slow"))
    place = RoutedPlace(Router(lambda: now_s[0]), {Medium.STREAM: way}, lambda: now_s[0])
    with pytest.raises(UnavailableError):
        await place.find([], place.ahead_bytes)
    assert place.ahead_bytes == 0
    way._error = None
    await place.fetch(SimpleNamespace(record_bytes=100, name=SimpleNamespace(namespace=b"")), None, lambda *_: None)  # type: ignore[arg-type]
    assert place.ahead_bytes == AHEAD_BYTES_FIRST
