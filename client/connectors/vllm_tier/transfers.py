"""Copies of chunks between vLLM's host memory and the service's, on threads: rows go straight from one to the other.

A job is finished when none of its rows is touched any more, and not before: vLLM gives their memory to others then.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvservice.client.connectors.breaker import BreakerState
from kvservice.client.connectors.vllm.link import LOST, PROBE_S
from kvservice.client.connectors.vllm.metrics import Counts
from kvservice.client.connectors.vllm_tier.lookups import Promise
from kvservice.client.connectors.vllm_tier.rows import RowStore
from kvservice.client.opaque import FoundRows
from kvservice.model.errors import CorruptError, KVServiceError, UnavailableError
from kvservice.storage.buffer import Bytes

SLICE_ROWS = 8
"""Rows of a load that one thread takes at once: the others help with a large load, and small ones come in between."""
FLUSH_TIMEOUT_S = 3.0
"""How long a shutdown waits for what is under way; vLLM kills its processes after some seconds."""
STOP_TIMEOUT_S = 5.0

log = logging.getLogger("vllm.kvservice")

Rows = Callable[[int], Bytes]
"""The row of a chunk in vLLM's memory, by chunk id."""


@dataclass(frozen=True, slots=True)
class Order:
    """What vLLM wants copied: its number for it, whose request, and per row the key and the chunk id."""

    number: int
    request: str
    keys: Sequence[bytes]
    chunks: Sequence[int]


@dataclass(eq=False, slots=True)
class Job:
    """An order under way. ``promises``: a load's, one a row. ``is_done``: per row, set by the thread that copied it."""

    order: Order
    is_load: bool
    promises: Sequence[Promise | None]
    began_s: float
    is_done: list[bool]
    slices: int = 1
    seconds: float = 0.0
    is_told: bool = False
    """The breaker knows that the service failed it: one trouble, however many rows."""

    @property
    def done(self) -> list[bytes]:
        """Keys of the rows that were copied."""
        return [key for key, is_done in zip(self.order.keys, self.is_done, strict=True) if is_done]

    @property
    def failed(self) -> list[bytes]:
        """Keys of the others."""
        return [key for key, is_done in zip(self.order.keys, self.is_done, strict=True) if not is_done]

    @property
    def is_good(self) -> bool:
        """True if every row was copied."""
        return all(self.is_done)


class Transfers:
    """Runs loads and stores. ``load``, ``store``, ``take_finished``: for the engine's thread, and they do not block.

    ``rows``: views of vLLM's memory; none is kept longer than a copy takes.
    """

    def __init__(
        self,
        rows: Rows,
        loads: RowStore,
        stores: RowStore,
        counts: Counts,
        *,
        load_deadline_s: float,
        load_threads: int,
        store_threads: int,
        stores_waiting_max: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rows = rows
        self._loads, self._stores = loads, stores
        self._counts = counts
        self._load_deadline_s = load_deadline_s
        self._stores_waiting_max = stores_waiting_max
        self._clock = clock
        self._changed = threading.Condition()
        self._waiting = {True: 0, False: 0}  # rows of unfinished loads, of unfinished stores
        self._unfinished = 0
        self._finished: list[Job] = []
        self._is_cancelling = False
        self._load_slices: queue.SimpleQueue[tuple[Job, range] | None] = queue.SimpleQueue()
        self._store_jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._kinds = [(self._run_loads, "loads")] * load_threads + [(self._run_stores, "stores")] * store_threads
        self._threads: list[threading.Thread] = []

    def load(self, order: Order, promises: Sequence[Promise | None]) -> None:
        """Copy chunks from the service. What holds no promise is looked up first."""
        job = self._enter(Job(order, True, promises, self._clock(), [False] * len(order.keys)))
        slices = list(_slices(promises))
        job.slices = max(len(slices), 1)
        if not slices:
            self._finish(job)
        for part in slices:
            self._load_slices.put((job, part))

    def store(self, order: Order) -> None:
        """Copy chunks to the service; dropped at once when it is away or too many wait."""
        is_full = self._waiting[False] + len(order.keys) > self._stores_waiting_max
        if is_full or self._stores.breaker.state is BreakerState.OPEN:
            self._counts.add("rows_store_dropped", len(order.keys))
            self.refuse(order, is_load=False)
        else:
            self._store_jobs.put(self._enter(Job(order, False, (), self._clock(), [False] * len(order.keys))))

    def refuse(self, order: Order, *, is_load: bool) -> None:
        """End an order at once, with no row copied."""
        self._finish(self._enter(Job(order, is_load, (), self._clock(), [False] * len(order.keys))))

    def take_finished(self) -> list[Job]:
        """Jobs that ended since the last call."""
        if not self._finished:
            return []
        with self._changed:
            finished, self._finished = self._finished, []
        return finished

    @property
    def rows_waiting(self) -> int:
        """Rows of jobs that have not ended."""
        return self._waiting[True] + self._waiting[False]

    def drain(self, timeout_s: float | None = None) -> bool:
        """Block until no row is touched; loads that have not begun fail. False if that took longer than the limit."""
        self._is_cancelling = True
        try:
            with self._changed:
                return self._changed.wait_for(lambda: not self._unfinished, timeout_s)
        finally:
            self._is_cancelling = False

    def close(self) -> bool:
        """Store what waits, within some seconds; then end sessions and threads. False if a row is still touched.

        A session that ends makes the calls fail that wait for it.
        """
        self.drain(FLUSH_TIMEOUT_S)
        self._is_cancelling = True
        self._stores.close()
        self._loads.close()
        for run, _ in self._kinds if self._threads else ():
            (self._load_slices if run == self._run_loads else self._store_jobs).put(None)
        for thread in self._threads:
            thread.join(STOP_TIMEOUT_S)
        is_over = not any(thread.is_alive() for thread in self._threads)
        self._threads = []
        return is_over

    # ------------------------------------------------------------------ any thread

    def _enter(self, job: Job) -> Job:
        if not self._threads:
            threads = [
                threading.Thread(target=run, name=f"kvservice-tier-{name}", daemon=True) for run, name in self._kinds
            ]
            for thread in threads:
                thread.start()
            self._threads = threads
        with self._changed:
            self._unfinished += 1
            self._waiting[job.is_load] += len(job.order.keys)
        return job

    def _finish(self, job: Job) -> None:
        with self._changed:
            job.slices -= 1
            if job.slices > 0:
                return
            job.seconds = self._clock() - job.began_s
            self._unfinished -= 1
            self._waiting[job.is_load] -= len(job.order.keys)
            self._finished.append(job)
            self._changed.notify_all()

    # ------------------------------------------------------------------ loads

    def _run_loads(self) -> None:
        while (work := self._load_slices.get()) is not None:
            job, part = work
            try:
                self._load_slice(job, part)
            except Exception:  # a thread's top: the job must end whatever happens
                log.exception("kvservice: a load failed in a way nobody expected; the chunks are computed")
                self._counts.add("hook_errors")
            self._finish(job)

    def _load_slice(self, job: Job, part: range) -> None:
        if job.promises[part.start] is not None:
            for index in part:
                promise = job.promises[index]
                assert promise is not None, "slices do not mix rows with and without a promise"
                self._load_row(job, index, promise.found, promise.index)
            return
        try:
            found = self._loads.find([job.order.keys[index] for index in part])
        except KVServiceError as error:
            log.debug("kvservice: %d chunks to load were not found again: %s", len(part), error)
            return
        for rows, places in found:
            with rows:
                for place, is_present in zip(places, rows.present, strict=True):
                    if is_present:
                        self._load_row(job, part[place], rows, place - places.start)

    def _load_row(self, job: Job, index: int, found: FoundRows, place: int) -> None:
        left_s = job.began_s + self._load_deadline_s - self._clock()
        if left_s <= 0 or self._is_cancelling:
            return
        try:
            found.read(place, self._rows(job.order.chunks[index]), timeout_s=left_s)
        except KVServiceError as error:
            self._note_failure(job, error)
        else:
            job.is_done[index] = True

    def _note_failure(self, job: Job, error: KVServiceError) -> None:
        if isinstance(error, CorruptError):
            self._counts.add("rows_corrupt")
            log.warning("kvservice: a chunk's bytes are not what was stored; it is computed: %s", error)
            return
        log.debug("kvservice: a chunk was not loaded: %s", error)
        if isinstance(error, UnavailableError) and not job.is_told:
            job.is_told = True
            self._loads.breaker.failed()

    # ------------------------------------------------------------------ stores

    def _run_stores(self) -> None:
        while True:
            try:
                job = self._store_jobs.get(timeout=PROBE_S)
            except queue.Empty:
                if self._stores.probe_interval_s is not None:
                    self._stores.probe()
                continue
            if job is None:
                return
            try:
                self._store_all(job)
            except Exception:  # a thread's top: the job must end whatever happens
                log.exception("kvservice: a store failed in a way nobody expected")
                self._counts.add("hook_errors")
            self._finish(job)

    def _store_all(self, job: Job) -> None:
        rows = [(key, self._rows(chunk)) for key, chunk in zip(job.order.keys, job.order.chunks, strict=True)]
        try:
            verdicts = self._stores.put(rows)
        except LOST as error:
            log.debug("kvservice: %d chunks were not stored: %s", len(rows), error)
            self._counts.add("rows_store_dropped", len(rows))
            return
        except KVServiceError as error:
            verdicts = [error] * len(rows)
        job.is_done[:] = [verdict is None for verdict in verdicts]
        refused = [verdict for verdict in verdicts if verdict is not None]
        if refused:
            log.info("kvservice: %d of %d chunks were not stored: %s", len(refused), len(rows), refused[0])
            self._counts.add("rows_store_failed", len(refused))


def _slices(promises: Sequence[Promise | None]) -> Iterator[range]:
    """Runs of rows that all hold a promise, or all hold none, of at most so many rows."""
    start = 0
    for index in range(1, len(promises) + 1):
        is_end = index == len(promises) or (promises[index] is None) != (promises[start] is None)
        if is_end or index - start == SLICE_ROWS:
            yield range(start, index)
            start = index
