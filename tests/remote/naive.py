"""The plainest engine: a dict. It misbehaves when told to: hangs, fails, or answers slowly."""

import asyncio
from collections.abc import AsyncGenerator, Sequence

import numpy as np

from kvservice.model.errors import CorruptError, KVServiceError, StaleEpochError
from kvservice.model.identity import Namespace
from kvservice.model.segment import ContextId, SegmentId
from kvservice.storage.buffer import Bytes
from kvservice.storage.remote.contract import RemoteFeatures, RemoteName, RemoteRecord
from kvservice.storage.remote.label import LABEL_BYTES, Label, boxed, read_label
from kvservice.storage.remote.objects import FirstBytes
from kvservice.storage.remote.pieces import Landing, cut

PIECE_BYTES = 1 << 20


class DictObjects:
    """``hangs``: calls never end. ``fails``: what every call raises. ``pauses``: what a fetch takes for every piece."""

    name = "dict"

    def __init__(self, record_bytes_max: int = 1 << 30) -> None:
        self.kept: dict[RemoteName, Bytes] = {}
        self.features = RemoteFeatures(True, True, True, False, record_bytes_max)
        self.hangs = False
        self.fails: KVServiceError | None = None
        self.pauses: asyncio.Semaphore | None = None
        self.calls: list[str] = []
        self.was_called = asyncio.Event()

    async def first_bytes(self, names: Sequence[RemoteName], most: int) -> list[FirstBytes | None]:
        await self._called("first_bytes")
        found = [self.kept.get(name) for name in names]
        return [None if one is None else FirstBytes(one[:most].copy(), len(one)) for one in found]

    async def contexts(self, namespace: Namespace, segment: SegmentId, most: int) -> list[ContextId]:
        await self._called("contexts")
        newest_first = [name.context for name in reversed(self.kept) if name[:2] == (namespace, segment)]
        return newest_first[:most]

    async def read(self, record: RemoteRecord, landing: Landing, start: int) -> None:
        await self._called("read")
        found = self.kept.get(record.name)
        if found is None:
            raise StaleEpochError("gone")
        if read_label(found[:LABEL_BYTES].tobytes()).version != record.version:
            raise CorruptError("another object lies there by now")
        for begin, end in cut(start, len(found) - LABEL_BYTES, PIECE_BYTES):
            if self.pauses is not None:
                await self.pauses.acquire()
            await landing.put(begin, np.array(found[LABEL_BYTES + begin : LABEL_BYTES + end]))

    async def create(self, name: RemoteName, label: Label, record: Bytes) -> bool:
        await self._called("create")
        return self.kept.setdefault(name, box := boxed(label, record)) is box

    async def delete(self, name: RemoteName) -> bool:
        await self._called("delete")
        return self.kept.pop(name, None) is not None

    async def delete_all(self, namespace: Namespace) -> AsyncGenerator[int]:
        await self._called("delete_all")
        for name in [one for one in self.kept if one.namespace == namespace]:
            yield self.kept.pop(name, None) is not None

    async def close(self) -> None:
        await self._called("close")

    async def _called(self, what: str) -> None:
        self.calls.append(what)
        self.was_called.set()
        if self.hangs:
            await asyncio.Event().wait()
        if self.fails is not None:
            raise self.fails
