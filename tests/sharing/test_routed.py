"""A place with two ways: one that fails is left in mid-record, and transfers side by side share the link."""

import asyncio
from collections.abc import Iterable, Sequence

import numpy as np
import pytest

from kvservice.caches import Space
from kvservice.model.errors import UnavailableError
from kvservice.model.segment import CacheKey
from kvservice.peers.routes import Router
from kvservice.peers.routes_log import Medium
from kvservice.sharing.place import Offer, Parcel, Question
from kvservice.sharing.routed import RoutedPlace
from kvservice.storage.buffer import Bytes
from kvservice.storage.record import read_head
from kvservice.storage.remote.contract import OnPiece, RemoteName, RemoteRecord
from tests.server.builders import FakeClock, make_identity, make_meta, make_planes
from tests.sharing.shelf import SharingWorld, Shelf

PIECE = 512


class Way:
    """Gives a record's bytes a piece at a time; ``breaks_at``: where it fails, once."""

    name = "somebody"

    def __init__(self, clock: FakeClock, view: Bytes, piece_s: float = 0.0, breaks_at: int | None = None) -> None:
        self._clock, self._view, self._piece_s, self._breaks_at = clock, view, piece_s, breaks_at
        self.starts: list[int] = []

    async def fetch(self, record: RemoteRecord, target: Bytes, on_piece: OnPiece, start: int = 0) -> None:
        self.starts.append(start)
        for first in range(start, len(self._view), PIECE):
            if self._breaks_at is not None and first >= self._breaks_at:
                raise UnavailableError("cut")
            end = min(first + PIECE, len(self._view))
            target[first:end] = self._view[first:end]
            self._clock.now_s += self._piece_s
            on_piece(first, end)
            await asyncio.sleep(0)

    async def find(self, questions: Sequence[Question]) -> list[Offer | None]:
        raise NotImplementedError

    def let_go(self, records: Iterable[RemoteRecord]) -> None:
        raise NotImplementedError

    async def store(self, parcel: Parcel) -> bool:
        raise NotImplementedError

    async def delete(self, space: Space, keys: Sequence[CacheKey] | None) -> int:
        raise NotImplementedError

    async def close(self) -> None:
        return


async def a_record() -> tuple[RemoteRecord, Bytes]:
    shelf = Shelf()
    async with SharingWorld(shelf) as world:
        await world.client().store(make_meta(make_identity()), make_planes())
        await world.pushed()
    name, (view, _) = next(iter(shelf.records.items()))
    return RemoteRecord(RemoteName(*name), read_head(view)), view


async def test_another_way_goes_on_where_the_first_one_broke() -> None:
    record, view = await a_record()
    clock, told = FakeClock(), list[tuple[int, int]]()
    broken, whole = Way(clock, view, breaks_at=3 * PIECE), Way(clock, view)
    place = RoutedPlace(Router(clock), {Medium.STREAM: broken, Medium.FLIGHT: whole}, clock)
    target = np.zeros(len(view), np.uint8)
    await place.fetch(record, target, lambda start, end: told.append((start, end)))
    assert np.array_equal(target, view)
    assert (broken.starts, whole.starts) == ([0], [3 * PIECE])
    assert [start for start, _ in told] == list(range(0, len(view), PIECE)), "no byte twice"


async def test_where_all_ways_fail_the_place_cannot_be_reached() -> None:
    record, view = await a_record()
    clock = FakeClock()
    ways = {medium: Way(clock, view, breaks_at=PIECE) for medium in (Medium.STREAM, Medium.FLIGHT)}
    place = RoutedPlace(Router(clock), ways, clock)
    with pytest.raises(UnavailableError):
        await place.fetch(record, np.zeros(len(view), np.uint8), lambda *_: None)


async def test_transfers_side_by_side_are_not_taken_for_a_slow_link() -> None:
    record, view = await a_record()
    clock = FakeClock()
    router, seconds = Router(clock), 1e-3 * -(-len(view) // PIECE)
    place = RoutedPlace(router, {Medium.STREAM: Way(clock, view, piece_s=1e-3)}, clock)
    targets = [np.zeros(len(view), np.uint8) for _ in range(8)]
    for _ in range(16):
        await asyncio.gather(*(place.fetch(record, target, lambda *_: None) for target in targets))
    speed = place.speed
    assert speed.latency_s + len(view) / speed.bytes_per_s == pytest.approx(seconds, rel=0.5)
