"""Saves: rows of finished chunks, gathered on the engine's thread into memory of ours, stored by a thread afterwards.

Once ``gather`` has returned the engine may do with its blocks what it likes. What finds no room is not saved, and what
is under way when the service goes is dropped: a cache that was not stored is a miss, no error.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kvservice.client.connectors.breaker import BreakerState
from kvservice.client.connectors.vllm.link import Link
from kvservice.client.connectors.vllm.metadata import SaveOrder
from kvservice.client.connectors.vllm.metrics import Counts
from kvservice.client.session import Session
from kvservice.model.cache import CacheMeta
from kvservice.model.errors import KVServiceError
from kvservice.model.identity import Identity
from kvservice.storage.buffer import Bytes, StorageBits
from kvservice.storage.record import RecordLayout, RecordWriter, master_layout
from kvservice.storage.record_layout import RowSizes
from kvservice.wire.v1 import cache_pb2 as wire

IDLE_BUFFERS_MAX = 16
FLUSH_TIMEOUT_S = 3.0
"""How long a shutdown waits for what is under way; vLLM kills its workers after 5 s."""

log = logging.getLogger("vllm.kvservice")

_EXPONENT = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F800000}


class Staging:
    """Memory for rows that wait to be stored: never more than ``bytes_max``. Safe from any thread.

    Buffers are kept for the next chunk: memory that was never used costs 0.25 ms a MiB to touch for the first time.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._lock = threading.Lock()
        self._used_bytes = 0
        self._idle: list[Bytes] = []

    @property
    def used_bytes(self) -> int:
        """Bytes that are handed out."""
        return self._used_bytes

    def take(self, length: int) -> Bytes | None:
        """A buffer of ``length`` bytes, whatever is in it; None if there is no room."""
        with self._lock:
            if self._used_bytes + length > self._bytes_max:
                return None
            self._used_bytes += length
            for index, buffer in enumerate(self._idle):
                if len(buffer) == length:
                    return self._idle.pop(index)
            if self._used_bytes + sum(map(len, self._idle)) > self._bytes_max:
                self._idle.clear()
        return np.empty(length, np.uint8)

    def give_back(self, buffer: Bytes) -> None:
        """The buffer may be used again."""
        with self._lock:
            self._used_bytes -= len(buffer)
            if len(self._idle) < IDLE_BUFFERS_MAX:
                self._idle.append(buffer)


@dataclass(eq=False, slots=True)
class Draft:
    """One chunk on its way: what it is, and its rows, ``planes[layer][plane]``, views of ``buffer``."""

    order: SaveOrder
    buffer: Bytes
    planes: list[list[StorageBits]]
    prefill_s: float = 0.0


class Saves:
    """The thread that stores, and what waits for it. ``begin``, ``hand_over``, ``drop``: for the engine's thread."""

    def __init__(
        self,
        link: Link,
        identity: Identity,
        rank: int,
        bytes_max: int,
        counts: Counts,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._link = link
        self._identity = identity
        self._rank = rank
        self._namespace = identity.namespace()
        self._counts = counts
        self._clock = clock
        self.staging = Staging(bytes_max)
        """Room for all rows that wait to be stored, whoever gathers them."""
        self._rows = RowSizes.of(identity.geometry)
        self._waiting: queue.Queue[list[Draft] | None] = queue.Queue()
        self._settled: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def bytes_waiting(self) -> int:
        """Bytes gathered and not stored yet."""
        return self.staging.used_bytes

    def begin(self, order: SaveOrder) -> Draft | None:
        """Room for a chunk's rows; None if there is none, or nobody to store them."""
        if self._link.breaker.state is BreakerState.OPEN:
            self._counts.add("saves_dropped")
            self._settle(order)
            return None
        geometry, tokens = self._identity.geometry, order.chunk.tokens
        buffer = self.staging.take(tokens * geometry.token_bytes)
        if buffer is None:
            self._counts.add("saves_no_room")
            self._settle(order)
            return None
        step = tokens * geometry.token_layer_bytes
        counts = [tokens] * len(geometry.planes)
        layers = range(geometry.layers)
        planes = [self._rows.split(buffer[layer * step : (layer + 1) * step], counts) for layer in layers]
        return Draft(order, buffer, planes)

    def hand_over(self, drafts: Sequence[Draft]) -> None:
        """Have gathered chunks stored, in this order; returns at once."""
        if not drafts:
            return
        self._waiting.put(list(drafts))
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="kvservice-saves", daemon=True)
            thread.start()
            self._thread = thread

    def drop(self, drafts: Sequence[Draft]) -> None:
        """Forget chunks that must not be stored."""
        for draft in drafts:
            self.staging.give_back(draft.buffer)
            self._counts.add("saves_dropped")
            self._settle(draft.order)

    def take_settled(self) -> tuple[str, ...]:
        """Requests of awaited chunks that are stored, or will not be, since the last call; one entry a chunk."""
        return tuple(self._settled.get() for _ in range(self._settled.qsize()))

    def _settle(self, order: SaveOrder) -> None:
        if order.is_awaited:
            self._settled.put(order.request_id)

    def close(self) -> None:
        """Store what waits, within some seconds, and end the thread."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._waiting.put(None)
            thread.join(FLUSH_TIMEOUT_S)
        self._link.close()

    def _run(self) -> None:
        while True:
            try:
                drafts = self._waiting.get(timeout=self._link.probe_interval_s)
            except queue.Empty:
                self._link.probe()
                continue
            if drafts is None:
                return
            self._store_all(drafts)

    def _store_all(self, drafts: Sequence[Draft]) -> None:
        began_s = self._clock()
        try:
            good = [draft for draft in drafts if self._is_finite(draft)]
            self._link.run(lambda session: self._store(session, good))
        except KVServiceError as error:
            log.info("kvservice: %d chunks were not stored: %s", len(drafts), error)
            self._counts.add("saves_dropped", len(drafts))
        except Exception:  # a thread's top: the next chunks may do better
            log.exception("kvservice: %d chunks were not stored", len(drafts))
            self._counts.add("hook_errors")
        for draft in drafts:
            self.staging.give_back(draft.buffer)
            self._settle(draft.order)
        self._counts.add("save_seconds", self._clock() - began_s)
        self._counts.set("save_bytes_waiting", self.staging.used_bytes)

    def _store(self, session: Session, drafts: Sequence[Draft]) -> None:
        whole = [draft for draft in drafts if draft.order.prompt is None]
        if whole:
            self._store_whole(session, whole)
        brought = [draft for draft in drafts if draft.order.prompt is not None]
        if brought:
            from kvservice.client.connectors.vllm.segment_store import store_segments

            store_segments(session, self._identity, brought, self._counts)

    def _store_whole(self, session: Session, drafts: Sequence[Draft]) -> None:
        """Reserve, write, commit. What the service has already is not written."""
        metas = [self._meta(draft) for draft in drafts]
        layouts = [master_layout(meta) for meta in metas]
        items = [self._reserve_item(draft, layout.record_bytes) for draft, layout in zip(drafts, layouts, strict=True)]
        began_s = self._clock()
        outcomes = session.reserve(items)
        self._link.breaker.succeeded(self._clock() - began_s)
        commits: list[tuple[wire.CommitItem, int]] = []
        try:
            for draft, meta, layout, outcome in zip(drafts, metas, layouts, outcomes, strict=True):
                if outcome.HasField("reserved"):
                    commits.append((self._write(session, outcome.reserved, draft, meta, layout), layout.record_bytes))
                else:
                    self._count_unwritten(outcome)
        except BaseException:
            session.abort([one.reserved.id for one in outcomes if one.HasField("reserved")])
            raise
        self._commit(session, commits)

    def _write(
        self, session: Session, reserved: wire.Reservation, draft: Draft, meta: CacheMeta, layout: RecordLayout
    ) -> wire.CommitItem:
        writer = RecordWriter(session.write_view(reserved.extent), meta, layout)
        for layer, planes in enumerate(draft.planes):
            for target, rows in zip(writer.master_planes(layer), planes, strict=True):
                np.copyto(target, rows)
        written = writer.finish()
        return wire.CommitItem(reservation_id=reserved.id, header_checksum=written.header_checksum)

    def _commit(self, session: Session, commits: Sequence[tuple[wire.CommitItem, int]]) -> None:
        if not commits:
            return
        outcomes = session.commit([item for item, _ in commits])
        for (_, record_bytes), outcome in zip(commits, outcomes, strict=True):
            if outcome.HasField("error"):
                log.info("kvservice: a chunk was refused: %s", outcome.error.message)
                self._counts.add("saves_refused")
            else:
                self._counts.add("chunks_saved")
                self._counts.add("bytes_saved", record_bytes)

    def _count_unwritten(self, outcome: wire.ReserveOutcome) -> None:
        if outcome.exists:
            self._counts.add("chunks_existed")
        else:
            log.info("kvservice: a chunk was refused: %s", outcome.error.message)
            self._counts.add("saves_refused")

    def _meta(self, draft: Draft) -> CacheMeta:
        chunk = draft.order.chunk
        return CacheMeta(
            namespace=self._namespace,
            key=chunk.keys[self._rank],
            position=chunk.start,
            tokens=chunk.tokens,
            geometry=self._identity.geometry,
            provenance=chunk.provenance,
            preceding=chunk.marks[self._rank],
        )

    def _reserve_item(self, draft: Draft, record_bytes: int) -> wire.ReserveItem:
        key = draft.order.chunk.keys[self._rank]
        return wire.ReserveItem(
            namespace=self._namespace,
            key=wire.CacheKey(segment=key.segment, context=key.context),
            record_bytes=record_bytes,
            prefill_s=draft.prefill_s,
        )

    def _is_finite(self, draft: Draft) -> bool:
        """False for a chunk that holds an infinity or a NaN: it would poison every request that finds it."""
        exponent = _EXPONENT[self._identity.geometry.dtype]
        for layer, planes in enumerate(draft.planes):
            for rows in planes:
                if ((rows & exponent) == exponent).any():
                    log.warning("kvservice: layer %d of a chunk holds NaN or infinity; it is not stored", layer)
                    self._counts.add("saves_refused")
                    return False
        return True
