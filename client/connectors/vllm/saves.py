"""Saves: rows of finished chunks, gathered on the engine's thread into memory of ours, stored by a thread afterwards.

Once ``gather`` has returned the engine may do with its blocks what it likes. What finds no room is not saved, and what
is under way when the service goes is dropped: a cache that was not stored is a miss, no error.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from kvservice.client.connectors.breaker import BreakerState
from kvservice.client.connectors.vllm.link import LOST, Link
from kvservice.client.connectors.vllm.metadata import SaveOrder
from kvservice.client.connectors.vllm.metrics import Counts
from kvservice.client.connectors.vllm.staging import Draft, Gathered, Staging
from kvservice.client.rounding import round_planes
from kvservice.client.session import Session
from kvservice.model.cache import CacheMeta
from kvservice.model.errors import KVServiceError
from kvservice.model.identity import Identity
from kvservice.storage.record import RecordLayout, RecordWriter, master_layout
from kvservice.wire.v1 import cache_pb2 as wire

FLUSH_TIMEOUT_S = 3.0
"""How long a shutdown waits for what is under way; vLLM kills its workers after 5 s."""

log = logging.getLogger("vllm.kvservice")

_EXPONENT = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F800000}


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
        self._waiting: queue.Queue[Gathered | None] = queue.Queue()
        self._settled: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def bytes_waiting(self) -> int:
        """Bytes gathered and not stored yet."""
        return self.staging.used_bytes

    def begin(self, orders: Sequence[SaveOrder]) -> Gathered | None:
        """Room for rows of a step's chunks, as many as find room; None if there is none, or nobody to store them."""
        is_open = self._link.breaker.state is BreakerState.OPEN
        taken, length = [], 0
        for order in orders:
            needed = order.chunk.tokens * self._identity.geometry.token_bytes
            if is_open or length + needed > self.staging.free_bytes:
                self._counts.add("saves_dropped" if is_open else "saves_no_room")
                self._settle(order)
            else:
                taken.append(order)
                length += needed
        buffer = self.staging.take(length) if taken else None
        if buffer is None:
            return None
        return Gathered.of(taken, self._identity.geometry, buffer)

    def hand_over(self, gathered: Gathered) -> None:
        """Have gathered chunks stored, in this order; returns at once."""
        self._waiting.put(gathered)
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="kvservice-saves", daemon=True)
            thread.start()
            self._thread = thread

    def drop(self, gathered: Gathered) -> None:
        """Forget chunks that must not be stored."""
        self._counts.add("saves_dropped", len(gathered.drafts))
        self._let_go(gathered)

    def take_settled(self) -> tuple[str, ...]:
        """Requests of awaited chunks that are stored, or will not be, since the last call; one entry a chunk."""
        return tuple(self._settled.get() for _ in range(self._settled.qsize()))

    def _let_go(self, gathered: Gathered) -> None:
        self.staging.give_back(gathered.buffer)
        for draft in gathered.drafts:
            self._settle(draft.order)

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
                gathered = self._waiting.get(timeout=self._link.probe_interval_s)
            except queue.Empty:
                self._link.probe()
                continue
            if gathered is None:
                return
            self._store_all(gathered)

    def _store_all(self, gathered: Gathered) -> None:
        began_s, drafts = self._clock(), gathered.drafts
        try:
            good = [draft for draft in drafts if self._is_finite(draft)]
            self._link.run(lambda session: self._store(session, good))
        except KVServiceError as error:
            level = logging.DEBUG if isinstance(error, LOST) else logging.INFO  # that it is away is told once
            log.log(level, "kvservice: %d chunks were not stored: %s", len(drafts), error)
            self._counts.add("saves_dropped", len(drafts))
        except Exception:  # a thread's top: the next chunks may do better
            log.exception("kvservice: %d chunks were not stored", len(drafts))
            self._counts.add("hook_errors")
        self._let_go(gathered)
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
            targets = writer.master_planes(layer)
            for target, rows in zip(targets, planes, strict=True):
                np.copyto(target, rows)
            round_planes(self._identity, targets)
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
