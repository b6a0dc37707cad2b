"""Loads: what orders name, from the service's arena into the engine's blocks, on threads of their own.

Every load ends within its deadline, well or not, and says so exactly once; nothing is written to its blocks afterwards.
A load within a step tells of every layer, so that the engine may start on the first while the last ones come.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvservice.client.arrivals import Arrivals
from kvservice.client.connectors.vllm.chunks import Chunk
from kvservice.client.connectors.vllm.link import Link
from kvservice.client.connectors.vllm.lookups import query
from kvservice.client.connectors.vllm.metadata import LoadOrder
from kvservice.client.connectors.vllm.metrics import Counts
from kvservice.client.connectors.vllm.paged import EnginePaged, Place
from kvservice.client.connectors.vllm.records import ChunkReader, FoundRecord, Scratch
from kvservice.client.session import NO_LEASE, Session
from kvservice.model.errors import CorruptError, DiskError, InvalidInputError, KVServiceError
from kvservice.model.identity import Identity
from kvservice.model.lease import Lease
from kvservice.model.plan import Outcome

THREADS = 2
"""Loads that run at a time. One is bound by memory; the second uses the time that one waits for a disk."""
WAITING_MAX = 1024
"""Loads that wait for a thread; one more fails at once. vLLM runs 1,024 requests at a time by default."""
STOP_TIMEOUT_S = 5.0

log = logging.getLogger("vllm.kvservice")


class LoadLateError(KVServiceError):
    """A load ran into its deadline. It says nothing of the session, which other loads use."""

    code = "LOAD_LATE"


@dataclass(frozen=True, eq=False, slots=True)
class _Part:
    """Rows ``[first, first + len(place))`` of a chunk, and where they go."""

    chunk: Chunk
    first: int
    place: Place


class Load:
    """One order under way. The engine's thread waits and reads the result; a loading thread does the rest."""

    def __init__(self, order: LoadOrder, layers: int, deadline_s: float, fence: Callable[[], None]) -> None:
        self.order = order
        self.deadline_s = deadline_s
        self.fence = fence
        """To be called before the first write: blocks may have been another request's a moment ago."""
        self.good_end = order.end
        """Tokens up to here are in place once the load is done."""
        self._layers = layers
        self._done_layers = 0
        self._is_over = False
        self._changed = threading.Condition()
        self._writing = threading.Lock()

    @property
    def is_failed(self) -> bool:
        """True if not all of it is in place; final once it is over."""
        return self.good_end < self.order.end

    def bad_blocks(self, block_size: int) -> set[int]:
        """Blocks of the order that hold at least one token which is not in place."""
        if not self.is_failed:
            return set()
        return set(self.order.block_ids[max(self.good_end - self.order.start, 0) // block_size :])

    def wait_for_layer(self, layer: int, timeout_s: float) -> bool:
        """True once the layer is in place or the load is over; False when it takes longer."""
        with self._changed:
            return self._changed.wait_for(lambda: self._is_over or self._done_layers > layer, timeout_s)

    def write(self, work: Callable[[], None]) -> None:
        """Do ``work``, which writes to the engine's blocks, unless the load was given up. Raises LoadLateError then."""
        with self._writing:
            if self._is_over:
                raise LoadLateError("it was given up: its deadline was over")
            work()

    def layer_done(self, layer: int) -> None:
        """The layer is in place as far as the load is good."""
        with self._changed:
            self._done_layers = layer + 1
            self._changed.notify_all()

    def spoil(self, end: int) -> None:
        """Tokens from ``end`` on will not be in place."""
        self.good_end = max(min(self.good_end, end), self.order.start)

    def wait(self, timeout_s: float) -> bool:
        """True once the load is over; False when it takes longer."""
        with self._changed:
            return self._changed.wait_for(lambda: self._is_over, timeout_s)

    def end(self) -> None:
        """It is over; nothing is written any more once this returns. Safe to call twice and from any thread."""
        with self._writing, self._changed:
            if not self._is_over and self._done_layers < self._layers:
                self.good_end = self.order.start
            self._is_over = True
            self._changed.notify_all()


class Loads:
    """The threads and the loads they work on. ``submit`` and ``take`` are called on the engine's thread."""

    def __init__(
        self,
        link: Link,
        identity: Identity,
        rank: int,
        paged: EnginePaged,
        deadline_s: float,
        counts: Counts,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._link = link
        self._identity = identity
        self._namespace = identity.namespace()  # takes 1.5 ms
        self._rank = rank
        self._paged = paged
        self._deadline_s = deadline_s
        self._counts = counts
        self._clock = clock
        self._waiting: queue.Queue[Load | None] = queue.Queue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Condition()
        self._ended: list[Load] = []
        self._begun = 0
        self._finished = 0

    def submit(self, order: LoadOrder) -> Load:
        """Begin a load; returns at once. One that cannot begin has failed already."""
        self._begun += 1
        load = Load(order, len(self._paged.caches), self._clock() + self._deadline_s, self._paged.fence())
        if not order.chunks or self._waiting.qsize() >= WAITING_MAX:
            self._finish(load)
        else:
            self._start_threads()
            self._waiting.put(load)
        return load

    def wait_for_end(self, timeout_s: float) -> None:
        """Return when a load has ended that was not taken yet, at once if none is under way."""
        if self._begun != self._finished and not self._ended:
            with self._lock:
                self._lock.wait_for(lambda: bool(self._ended), timeout_s)

    def take(self) -> list[Load]:
        """Loads that ended since the last call."""
        if not self._ended:
            return []
        with self._lock:
            ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        """End the threads, after the loads that they are at."""
        for _ in self._threads:
            self._waiting.put(None)
        for thread in self._threads:
            thread.join(STOP_TIMEOUT_S)
        self._link.close()

    def _start_threads(self) -> None:
        if len(self._threads) < THREADS:
            name = f"kvservice-load-{len(self._threads)}"
            thread = threading.Thread(target=self._run, name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def _run(self) -> None:
        scratch = Scratch()
        while (load := self._waiting.get()) is not None:
            began_s = self._clock()
            try:
                self._load(load, scratch)
            except KVServiceError as error:
                log.info("kvservice: request %s is computed, its load failed: %s", load.order.request_id, error)
            except Exception:  # a thread's top: the engine must hear of the load's end whatever happens
                log.exception("kvservice: request %s is computed, its load failed", load.order.request_id)
                self._counts.add("hook_errors")
            self._finish(load)
            self._counts.add("load_seconds", self._clock() - began_s)

    def _finish(self, load: Load) -> None:
        load.end()
        tokens = load.good_end - load.order.start
        if load.is_failed:
            self._counts.add("loads_failed")
        if tokens > 0:
            self._counts.add("loads")
            self._counts.add("tokens_loaded", tokens)
            self._counts.add("bytes_loaded", tokens * self._identity.geometry.token_bytes)
        with self._lock:
            self._ended.append(load)
            self._finished += 1
            self._lock.notify_all()

    def _load(self, load: Load, scratch: Scratch) -> None:
        with self._link.session() as session:
            lease, readers = self._find(session, load)
            try:
                load.fence()
                self._write_layers(session, lease, load, readers, scratch)
            finally:
                if lease.id != NO_LEASE and self._link.is_current(session):
                    session.let_go(lease.id)

    def _find(self, session: Session, load: Load) -> tuple[Lease, list[tuple[ChunkReader, _Part]]]:
        """Look up and lease what the order names. What is not there spoils the rest: KV is of use without gaps only."""
        chunks = load.order.chunks[: session.limits.lookup_segments_max]
        began_s = self._clock()
        reply, lease = session.lookup([query(self._namespace, self._rank, chunks)])
        self._link.breaker.succeeded(self._clock() - began_s)
        arrivals = Arrivals(session, lease)
        readers = []
        for chunk, found in zip(load.order.chunks, reply.prompts[0].segments, strict=False):
            if found.outcome != Outcome.HIT:
                break
            record = FoundRecord.of(chunk.keys[self._rank], chunk.tokens, found)
            readers.append(
                (ChunkReader(session, self._identity, self._namespace, arrivals, record), self._part(load.order, chunk))
            )
        if len(readers) < len(load.order.chunks):
            load.spoil(load.order.chunks[len(readers)].start)
        return lease, readers

    def _part(self, order: LoadOrder, chunk: Chunk) -> _Part:
        start, end = max(chunk.start, order.start), min(chunk.end, order.end)
        place = self._paged.place(order.block_ids, start - order.start, end - start)
        return _Part(chunk, start - chunk.start, place)

    def _write_layers(
        self,
        session: Session,
        lease: Lease,
        load: Load,
        readers: list[tuple[ChunkReader, _Part]],
        scratch: Scratch,
    ) -> None:
        for layer in range(len(self._paged.caches)):
            for reader, part in list(readers):
                self._check_time(load)
                try:
                    self._write(load, layer, reader, part, scratch)
                except (CorruptError, DiskError, InvalidInputError) as error:
                    self._report(session, part.chunk, error)
                    load.spoil(part.chunk.start)
                    readers[:] = [(one, other) for one, other in readers if other.chunk.start < part.chunk.start]
                    break
            if not readers:
                return
            self._paged.finish()
            session.check_lease(lease)  # what was read after the lease was lost must not count
            load.layer_done(layer)

    def _write(self, load: Load, layer: int, reader: ChunkReader, part: _Part, scratch: Scratch) -> None:
        planes = reader.planes(layer, scratch, lambda: load.deadline_s - self._clock())
        last = part.first + len(part.place)
        rows = [plane[part.first : last] for plane in planes]
        load.write(lambda: self._paged.scatter(layer, part.place, rows))

    def _check_time(self, load: Load) -> None:
        if self._clock() >= load.deadline_s:
            raise LoadLateError(f"it took longer than load_deadline_s ({self._deadline_s:g} s)")

    def _report(self, session: Session, chunk: Chunk, error: KVServiceError) -> None:
        log.warning("kvservice: tokens %d to %d of a request are computed: %s", chunk.start, chunk.end, error)
        if isinstance(error, CorruptError):
            self._counts.add("chunks_corrupt")
            session.verify(self._namespace, [chunk.keys[self._rank]])
