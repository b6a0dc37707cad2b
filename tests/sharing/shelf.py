"""A remote tier in this process's memory, whole but for its durability; and worlds of nodes that share it."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvservice.access.quotas import Quota, Quotas, QuotaTable
from kvservice.limits import NodeLimits
from kvservice.model.errors import KVServiceError, NotListedError, UnavailableError
from kvservice.model.identity import Namespace
from kvservice.model.segment import SegmentId
from kvservice.peers.routes import Router
from kvservice.peers.routes_log import Medium
from kvservice.sharing.cold import ColdPlace
from kvservice.sharing.place import Place
from kvservice.sharing.routed import RoutedPlace
from kvservice.storage.buffer import Bytes
from kvservice.storage.record import read_head
from kvservice.storage.remote.contract import OnPiece, RemoteFeatures, RemoteName, RemoteRecord, Wanted
from tests.server.builders import World

PIECE_BYTES = 512


class Shelf:
    """``fault``: raised by every call while it is set. ``gate``: a fetch waits for it before every piece but its first.

    ``change``: called with every piece on its way, so that a test may spoil it.
    """

    name = "shelf"
    features = RemoteFeatures(
        reads_ranges=True, creates_once=True, lists_segments=True, is_durable=False, record_bytes_max=1 << 30
    )

    def __init__(self) -> None:
        self.records: dict[RemoteName, tuple[Bytes, float]] = {}
        self.fault: KVServiceError | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.change: Callable[[int, Bytes], None] = _leave
        self.asked = 0
        self.fetched: list[tuple[RemoteName, int]] = []

    async def find(self, wanted: Sequence[Wanted]) -> list[list[RemoteRecord]]:
        self._go()
        self.asked += 1
        return [self._find(one) for one in wanted]

    def _find(self, wanted: Wanted) -> list[RemoteRecord]:
        names = [RemoteName(wanted.namespace, wanted.segment, context) for context in wanted.contexts]
        others = [name for name in reversed(self.records) if name[:2] == wanted[:2] and name not in names]
        found = [name for name in names if name in self.records] + others[: wanted.others_max]
        return [self.record(name) for name in found]

    def record(self, name: RemoteName) -> RemoteRecord:
        view, prefill_s = self.records[name]
        return RemoteRecord(name, read_head(view), prefill_s)

    async def fetch(self, record: RemoteRecord, target: Bytes, on_piece: OnPiece, start: int = 0) -> None:
        self._go()
        self.fetched.append((record.name, start))
        view = self.records[record.name][0]
        for first in range(start, len(view), PIECE_BYTES):
            end = min(first + PIECE_BYTES, len(view))
            np.copyto(target[first:end], view[first:end])
            self.change(first, target[first:end])
            on_piece(first, end)
            await asyncio.sleep(0)
            await self.gate.wait()
            self._go()

    async def store(self, name: RemoteName, record: Bytes, prefill_s: float) -> bool:
        self._go()
        if name in self.records:
            return False
        self.records[name] = (record.copy(), prefill_s)
        return True

    async def delete(self, name: RemoteName) -> bool:
        self._go()
        return self.records.pop(name, None) is not None

    async def delete_all(self, namespace: Namespace) -> int:
        self._go()
        if not self.features.lists_segments:
            raise NotListedError("the shelf cannot list what it holds")
        names = [name for name in self.records if name.namespace == namespace]
        return sum(self.records.pop(name, None) is not None for name in names)

    async def close(self) -> None:
        self.fault = UnavailableError("the shelf is closed")

    def _go(self) -> None:
        if self.fault is not None:
            raise self.fault


def _leave(_: int, __: Bytes) -> None:
    return


def _opened(shelf: Shelf, quotas: Quotas | None) -> ColdPlace:
    async def open_tier() -> Shelf:
        return shelf

    place = ColdPlace(shelf.name, open_tier, quotas)
    place._tier = shelf
    return place


class Shelves:
    """A directory of places in this order, for every segment."""

    def __init__(self, *shelves: Shelf, quotas: Quotas | None = None) -> None:
        router = Router(lambda: 0.0)
        self.places: list[Place] = [RoutedPlace(router, {Medium.COLD: _opened(shelf, quotas)}) for shelf in shelves]

    def sources(self, _: SegmentId) -> Sequence[Place]:
        return self.places

    def behind(self, _: SegmentId) -> Sequence[Place]:
        return self.places

    def storages(self) -> Sequence[Place]:
        return self.places

    def homes(self, _: SegmentId, __: int) -> Sequence[Place]:
        return self.places[:1]

    def everywhere(self) -> Sequence[Place]:
        return self.places


class SharingWorld(World):
    """``async with SharingWorld(shelf) as world``: a node that shares what it has through shelves."""

    def __init__(
        self,
        *shelves: Shelf,
        push: str = "back",
        arena_bytes: int = 1 << 20,
        limits: NodeLimits | None = None,
        is_gated: bool = False,
    ) -> None:
        super().__init__(arena_bytes=arena_bytes, limits=limits)
        self.quotas = Quotas()
        self.node.share(Shelves(*shelves, quotas=self.quotas), push, is_gated=is_gated)

    def limit_cold(self, tenant: str, remote_bytes: int) -> None:
        """What the tenant may have on the shelves."""
        self.quotas.table = QuotaTable({tenant: Quota(remote_bytes=remote_bytes)})

    async def __aenter__(self) -> "SharingWorld":
        self.node.start()
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self.node.stop()

    async def pushed(self) -> None:
        """Until all that is due was given away, or was not."""
        assert self.node.sharing is not None
        for _ in range(500):
            if self.node.sharing.pushes.is_idle:
                return
            self.clock.now_s += 10
            await asyncio.sleep(0.01)
        raise AssertionError("what waits to be given away does not become less")

    async def arrived(self) -> None:
        """Until nothing is on its way here."""
        for _ in range(5000):
            if not self.node.catalog.arriving:
                return
            await asyncio.sleep(0)
        raise AssertionError("what is on its way does not arrive")
