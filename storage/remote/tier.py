"""A remote tier over any engine: what the engine says is verified here, and every call has its deadline and breaker."""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvservice.model.errors import (
    CorruptError,
    InvalidInputError,
    KVServiceError,
    RecordFormatError,
    RecordTooLargeError,
    UnavailableError,
)
from kvservice.model.identity import Namespace
from kvservice.storage.buffer import Bytes
from kvservice.storage.record import read_head
from kvservice.storage.remote.breaker import Breaker
from kvservice.storage.remote.contract import OnPiece, RemoteFeatures, RemoteName, RemoteRecord, Wanted
from kvservice.storage.remote.label import LABEL_BYTES, label_of, read_label
from kvservice.storage.remote.objects import HEAD_READ_BYTES, FirstBytes, Objects
from kvservice.storage.remote.pieces import Landing, together
from kvservice.storage.remote.workers import Workers

_log = logging.getLogger(__name__)
_COPY_THREADS = 2
_FETCHES_MAX, _STORES_MAX = 8, 4
"""Records on their way at once. A fetch never waits behind a store; what is sent needs memory of its own."""
_FORGOTTEN_MAX = 8
"""Lies that one call removes; the next call meets the others."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """How long a call may take: ``call_s``, and for payload what it takes at ``bytes_s_min`` on top.

    A fetch also fails when nothing arrives for ``call_s``.
    """

    call_s: float
    bytes_s_min: float

    def of(self, payload_bytes: int) -> float:
        """Seconds for a call that moves so many bytes."""
        return self.call_s + payload_bytes / self.bytes_s_min


@dataclass(slots=True)
class RemoteCounts:
    """What became of calls to a place, for metrics. ``corrupt``: objects that were not what their names say."""

    found: int = 0
    absent: int = 0
    fetched: int = 0
    fetched_bytes: int = 0
    stored: int = 0
    stored_bytes: int = 0
    taken: int = 0
    deleted: int = 0
    corrupt: int = 0
    failed: int = 0
    timed_out: int = 0
    refused_by_breaker: int = 0


@dataclass(slots=True)
class _Watch:
    """The deadline of a running call. For a fetch it moves on, up to ``last_s``, whenever something arrives."""

    loop: asyncio.AbstractEventLoop
    timeout: asyncio.Timeout
    call_s: float
    last_s: float
    is_over: bool = False

    def stall(self) -> None:
        """End the call unless something arrives within ``call_s``."""
        if not self.is_over and not self.timeout.expired():
            self.timeout.reschedule(min(self.last_s, self.loop.time() + self.call_s))

    def arrived(self) -> None:
        """Something did; called in any thread."""
        self.loop.call_soon_threadsafe(self.stall)


class _Landed:
    """What arrived of a fetch. Told from worker threads."""

    def __init__(self, on_piece: OnPiece) -> None:
        self._on_piece = on_piece
        self.watch: _Watch | None = None
        self.lengths: list[int] = []
        self.lie: CorruptError | None = None

    def on_piece(self, start: int, end: int) -> None:
        self.lengths.append(end - start)
        if self.watch is not None:
            self.watch.arrived()
        try:
            self._on_piece(start, end)
        except CorruptError as error:
            self.lie = error
            raise


class ObjectTier:
    """Implements contract.RemoteTier. ``place``: what messages call it, without credentials."""

    def __init__(self, objects: Objects, place: str, deadline: Deadline, breaker: Breaker | None = None) -> None:
        self._objects = objects
        self._place = place
        self._deadline = deadline
        self._fetches = asyncio.Semaphore(_FETCHES_MAX)
        self._stores = asyncio.Semaphore(_STORES_MAX)
        self._workers = Workers(f"kvservice-{objects.name}-copy", _COPY_THREADS)
        self._is_closed = False
        self.breaker = breaker or Breaker(time.monotonic)
        self.counts = RemoteCounts()

    @property
    def name(self) -> str:
        """One word, for metrics and messages."""
        return self._objects.name

    @property
    def place(self) -> str:
        """Where it is, without credentials."""
        return self._place

    @property
    def features(self) -> RemoteFeatures:
        """What it can do."""
        return self._objects.features

    async def find(self, wanted: Sequence[Wanted]) -> list[list[RemoteRecord]]:
        """See contract.RemoteTier. Objects that lie are forgotten, so that their names can be stored again."""
        async with self._call("find", 0):
            listing = [at for at, one in enumerate(wanted) if one.others_max > 0]
            others = dict(zip(listing, await together(self._listed(wanted[at]) for at in listing), strict=True))
            names = [
                [*(RemoteName(one.namespace, one.segment, context) for context in one.contexts), *others.get(at, ())]
                for at, one in enumerate(wanted)
            ]
            known = await self._records(dict.fromkeys(name for several in names for name in several))
        answers = [[known[name] for name in several if name in known] for several in names]
        self.counts.found += len(known)
        self.counts.absent += sum(not answer for answer in answers)
        return answers

    async def fetch(self, record: RemoteRecord, target: Bytes, on_piece: OnPiece, start: int = 0) -> None:
        """See contract.RemoteTier."""
        if len(target) != record.record_bytes or not 0 <= start <= len(target):
            raise InvalidInputError(
                f"{record.name.segment.hex()[:12]}: a record of {record.record_bytes} bytes from {start} on "
                f"does not go into {len(target)}"
            )
        wanted_bytes = len(target) - start
        landed = _Landed(on_piece)
        try:
            async with self._turn(self._fetches, wanted_bytes), self._call("fetch", wanted_bytes) as watch:
                watch.stall()
                landed.watch = watch
                await self._objects.read(record, Landing(target, landed.on_piece, self._workers), start)
        except CorruptError as error:
            if landed.lie is not None:
                await self._forget_after_fetch(record.name, error)
            raise
        if sum(landed.lengths) != wanted_bytes:
            raise CorruptError(f"{self._place}: {_short(record.name)} ended after {sum(landed.lengths)} bytes")
        self.counts.fetched += 1
        self.counts.fetched_bytes += wanted_bytes

    async def store(self, name: RemoteName, record: Bytes, prefill_s: float) -> bool:
        """See contract.RemoteTier. Raises InvalidInputError if the record is not the one that ``name`` says."""
        head = read_head(record)
        if name != (head.meta.namespace, head.meta.key.segment, head.meta.key.context):
            raise InvalidInputError(f"record of {head.meta.key}: it is stored under its own name only")
        if len(record) != head.layout.record_bytes:
            raise InvalidInputError(f"record of {head.meta.key}: {head.layout.record_bytes} bytes, not {len(record)}")
        if len(record) > self.features.record_bytes_max:
            raise RecordTooLargeError(
                f"record of {head.meta.key}: {len(record)} bytes, {self._place} keeps up to "
                f"{self.features.record_bytes_max}"
            )
        label = label_of(head, prefill_s if math.isfinite(prefill_s) and prefill_s > 0 else 0.0)
        async with self._turn(self._stores, len(record)), self._call("store", len(record)):
            is_new = await self._objects.create(name, label, record)
        self.counts.stored += is_new
        self.counts.stored_bytes += len(record) * is_new
        self.counts.taken += not is_new
        return is_new

    async def delete(self, name: RemoteName) -> bool:
        """See contract.RemoteTier."""
        async with self._call("delete", 0):
            was_there = await self._objects.delete(name)
        self.counts.deleted += was_there
        return was_there

    async def delete_all(self, namespace: Namespace) -> int:
        """See contract.RemoteTier."""
        total = 0
        async with contextlib.aclosing(self._objects.delete_all(namespace)) as batches:
            while True:
                async with self._call("delete", 0):
                    count = await anext(batches, None)
                if count is None:
                    return total
                total += count
                self.counts.deleted += count

    async def close(self) -> None:
        """See contract.RemoteTier. Takes no longer than a call."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            async with asyncio.timeout(self._deadline.call_s):
                await self._objects.close()
        except TimeoutError:
            _log.warning("%s did not close within %.1f s; left behind", self._place, self._deadline.call_s)
        finally:
            self._workers.close()

    @contextlib.asynccontextmanager
    async def _call(self, what: str, payload_bytes: int) -> AsyncIterator[_Watch]:
        """One call's deadline; the breaker hears of it."""
        if self._is_closed:
            raise UnavailableError(f"{self._place} was closed")
        if not self.breaker.allows():
            self.counts.refused_by_breaker += 1
            raise UnavailableError(f"{self._place} does not answer; it is not asked for a while")
        loop, seconds = asyncio.get_running_loop(), self._deadline.of(payload_bytes)
        timeout = asyncio.timeout(seconds)
        watch = _Watch(loop, timeout, self._deadline.call_s, loop.time() + seconds)
        try:
            async with timeout:
                yield watch
        except TimeoutError as error:
            self.breaker.timed_out()
            self.counts.timed_out += 1
            raise UnavailableError(f"{self._place}: no answer to a {what} in time, {seconds:.1f} s at most") from error
        except UnavailableError:
            self.breaker.failed()
            self.counts.failed += 1
            raise
        except KVServiceError:
            self.breaker.succeeded()  # it answered, if only to say no
            raise
        finally:
            watch.is_over = True
        self.breaker.succeeded()

    @contextlib.asynccontextmanager
    async def _turn(self, turns: asyncio.Semaphore, payload_bytes: int) -> AsyncIterator[None]:
        """Payload calls take turns. Waiting too long is nobody's failure but ours: the breaker does not hear of it."""
        try:
            async with asyncio.timeout(self._deadline.of(payload_bytes)):
                await turns.acquire()
        except TimeoutError as error:
            raise UnavailableError(f"{self._place}: too many records are on their way already") from error
        try:
            yield
        finally:
            turns.release()

    async def _listed(self, wanted: Wanted) -> list[RemoteName]:
        most = wanted.others_max + len(wanted.contexts)
        found = await self._objects.contexts(wanted.namespace, wanted.segment, most)
        others = [context for context in found if context not in wanted.contexts]
        return [RemoteName(wanted.namespace, wanted.segment, context) for context in others[: wanted.others_max]]

    async def _records(self, names: Iterable[RemoteName]) -> dict[RemoteName, RemoteRecord]:
        """The records under these names, verified. One that lies twice is no record, counted and removed."""
        found = await self._verified(list(names))
        lies = [name for name, record in found.items() if isinstance(record, CorruptError)]
        if lies:  # once more: what the way here damaged is whole the second time, and stays
            again = await self._verified(lies)
            found.update(again)
            await self._forget({name: lie for name, lie in again.items() if isinstance(lie, CorruptError)})
        return {name: record for name, record in found.items() if isinstance(record, RemoteRecord)}

    async def _verified(self, names: Sequence[RemoteName]) -> dict[RemoteName, RemoteRecord | CorruptError | None]:
        if not names:
            return {}
        found = dict(zip(names, await self._objects.first_bytes(names, HEAD_READ_BYTES), strict=True))
        short = [name for name, first in found.items() if first is not None and _head_bytes(first) > len(first.data)]
        if short:
            most = max(_head_bytes(found[name]) for name in short)
            found.update(zip(short, await self._objects.first_bytes(short, most), strict=True))
        return {name: None if first is None else _verified(name, first) for name, first in found.items()}

    async def _forget(self, lies: Mapping[RemoteName, CorruptError]) -> None:
        self.counts.corrupt += len(lies)
        for name, reason in list(lies.items())[:_FORGOTTEN_MAX]:
            _log.warning("%s: %s is not what its name says, forgotten: %s", self._place, _short(name), reason)
            try:
                await self._objects.delete(name)
            except KVServiceError as error:
                _log.warning("%s: %s could not be forgotten: %s", self._place, _short(name), error)

    async def _forget_after_fetch(self, name: RemoteName, reason: CorruptError) -> None:
        """Else it would be found and refused again and again, and its name could not be stored anew."""
        try:
            async with self._call("delete", 0):
                await self._forget({name: reason})
        except KVServiceError as error:
            _log.warning("%s: %s could not be forgotten: %s", self._place, _short(name), error)


def _head_bytes(first: FirstBytes | None) -> int:
    """How many first bytes hold label and head; 0 if there is no label."""
    try:
        return 0 if first is None else LABEL_BYTES + read_label(first.data[:LABEL_BYTES].tobytes()).head_bytes
    except CorruptError:
        return 0


def _verified(name: RemoteName, first: FirstBytes) -> RemoteRecord | CorruptError:
    try:
        label = read_label(first.data[:LABEL_BYTES].tobytes())
        head = read_head(first.data[LABEL_BYTES:])
    except (CorruptError, RecordFormatError) as error:
        return CorruptError(str(error))
    record = RemoteRecord(name, head, label.prefill_s, first.version or label.version)
    found = RemoteName(head.meta.namespace, head.meta.key.segment, head.meta.key.context)
    if found != name:
        return CorruptError(f"the record of {head.meta.key} lies there")
    if label[:2] != (label_of(head, 0.0).head_bytes, record.record_bytes):
        return CorruptError("label and record disagree about its size")
    if first.object_bytes not in (-1, LABEL_BYTES + record.record_bytes):
        return CorruptError(f"{first.object_bytes} bytes, label and record have {LABEL_BYTES + record.record_bytes}")
    return record


def _short(name: RemoteName) -> str:
    return f"{name.segment.hex()[:12]}@{name.context.hex()[:12]}"
