"""Which chunks the service has: asked for by the engine chunk by chunk, looked up once a step, on one thread.

    ask --not asked yet--> LATER --flush, answered--> HIT, held until taken or forgotten
                                                  --> MISS
        --deadline-->  MISS                  what comes of the lookup afterwards is let go

An answer belongs to one request: another that asks for the same chunk later gets an answer of its own time.
"""

import enum
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvservice.client.connectors.breaker import BreakerState
from kvservice.client.connectors.vllm.link import PROBE_S
from kvservice.client.connectors.vllm.metrics import Counts
from kvservice.client.connectors.vllm_tier.rows import RowStore
from kvservice.client.opaque import FoundRows
from kvservice.model.cache import Tier
from kvservice.model.errors import KVServiceError

BATCHES_WAITING_MAX = 256
"""Lookups that wait for the thread; what is asked beyond is a miss at once. One takes 0.1 ms and some us a chunk."""
STOP_TIMEOUT_S = 5.0

log = logging.getLogger("vllm.kvservice")


class Verdict(enum.Enum):
    """What a question was answered."""

    HIT = enum.auto()
    MISS = enum.auto()
    LATER = enum.auto()


@dataclass(frozen=True, slots=True)
class Answer:
    """What the thread found: per key the rows that hold it and the index in them, or None. ``rows``: all of them."""

    places: tuple[tuple[FoundRows, int] | None, ...]
    rows: tuple[FoundRows, ...] = ()


@dataclass(eq=False, slots=True)
class Batch:
    """One step's questions. ``holds``: how many still want to know, or rely on what was found; the engine's thread
    counts. ``answer``: set once, by the lookups' thread."""

    asked_s: float
    index: dict[bytes, int] = field(default_factory=dict)
    holds: int = 0
    is_sent: bool = False
    is_late: bool = False
    answer: Answer | None = None


@dataclass(frozen=True, slots=True)
class Promise:
    """A chunk that was answered HIT, and is leased until ``Lookups.let_go`` of it."""

    batch: Batch
    found: FoundRows
    index: int


class Lookups:
    """Answers questions. All methods but the thread's own are for one thread, the engine's, and none blocks but close.

    ``tokens_of``: tokens of a key's chunk, for the counts.
    """

    def __init__(
        self,
        rows: RowStore,
        deadline_s: float,
        counts: Counts,
        tokens_of: Callable[[bytes], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rows = rows
        self._deadline_s = deadline_s
        self._counts = counts
        self._tokens_of = tokens_of
        self._clock = clock
        self._requests: dict[str, dict[bytes, Batch | Promise | None]] = {}  # None: a miss
        self._filling: Batch | None = None
        self._notes: queue.SimpleQueue[Batch | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def ask(self, request: str, key: bytes) -> Verdict:
        """Whether the service has a chunk. Costs some microseconds."""
        known = self._requests.setdefault(request, {})
        if key not in known:
            known[key] = self._enter(key)
            return self._missed(key) if known[key] is None else Verdict.LATER
        state = known[key]
        if isinstance(state, Batch):
            state = known[key] = self._settled(state, key)
            if isinstance(state, Batch):
                return Verdict.LATER
            return self._missed(key) if state is None else self._hit(state, key)
        if state is None:
            return Verdict.MISS
        if self._is_good(state.found):
            return Verdict.HIT
        self.mark_missed(request, [key])
        return Verdict.MISS

    def flush(self) -> None:
        """Send the step's questions. Called once a step, after the last question."""
        batch, self._filling = self._filling, None
        if batch is not None and batch.holds:
            batch.is_sent = True
            self._put(batch)

    def take(self, request: str, keys: Sequence[bytes]) -> list[Promise | None]:
        """Hand promises over to a load, which lets go of them; None for a chunk that holds none."""
        known = self._requests.get(request, {})
        taken = [state if isinstance(state := known.get(key), Promise) else None for key in keys]
        for key, promise in zip(keys, taken, strict=True):
            if promise is not None:
                del known[key]
        return taken

    def let_go(self, promises: Iterable[Promise | None]) -> None:
        """The load of these ended."""
        for promise in promises:
            if promise is not None:
                self._drop(promise.batch)

    def mark_missed(self, request: str, keys: Iterable[bytes]) -> None:
        """A load of these failed: the request must not be told again that they are there. A request that has ended is
        not remembered."""
        known = self._requests.get(request)
        if known is None:
            return
        for key in keys:
            self._drop_state(known.get(key))
            known[key] = None

    def forget(self, request: str) -> None:
        """The request ended, or runs: it asks for nothing more, or anew. Doing it twice is no error."""
        for state in self._requests.pop(request, {}).values():
            self._drop_state(state)

    def forget_all(self) -> None:
        """Nothing that was found counts any more."""
        for request in list(self._requests):
            self.forget(request)

    def close(self) -> None:
        """End the thread and the session, and with it every lease."""
        self.forget_all()
        thread, self._thread = self._thread, None
        if thread is not None:
            self._notes.put(None)
            thread.join(STOP_TIMEOUT_S)
        self._rows.close()

    # ------------------------------------------------------------------ the engine's thread

    def _enter(self, key: bytes) -> Batch | None:
        """The batch that will answer; None if there is nobody to ask."""
        if self._rows.breaker.state is BreakerState.OPEN or self._notes.qsize() >= BATCHES_WAITING_MAX:
            self._wake()
            return None
        if self._filling is None:
            self._filling = Batch(self._clock())
        self._filling.index.setdefault(key, len(self._filling.index))
        self._filling.holds += 1
        return self._filling

    def _settled(self, batch: Batch, key: bytes) -> "Batch | Promise | None":
        answer = batch.answer
        if answer is not None:
            place = answer.places[batch.index[key]]
            if place is not None and self._is_good(place[0]):
                return Promise(batch, *place)
            self._drop(batch)
            return None
        if self._clock() - batch.asked_s < self._deadline_s:
            return batch
        if batch.is_sent and not batch.is_late:  # once a batch: it was one call that did not come back
            batch.is_late = True
            self._counts.add("lookups_late")
            self._rows.breaker.failed()
        self._drop(batch)
        return None

    def _missed(self, key: bytes) -> Verdict:
        self._count(key)
        self._counts.add("rows_missed")
        return Verdict.MISS

    def _hit(self, promise: Promise, key: bytes) -> Verdict:
        self._count(key)
        is_on_ssd = promise.found.tiers[promise.index] is Tier.SSD
        self._counts.add("rows_hit_ssd" if is_on_ssd else "rows_hit_host")
        return Verdict.HIT

    def _count(self, key: bytes) -> None:
        self._counts.add("rows_asked")
        self._counts.add("tokens_asked", self._tokens_of(key))

    def _is_good(self, found: FoundRows) -> bool:
        """True if what was found is leased still. Asks nobody."""
        try:
            found.check()
        except KVServiceError:
            return False
        return True

    def _drop_state(self, state: "Batch | Promise | None") -> None:
        if isinstance(state, Promise):
            self._drop(state.batch)
        elif state is not None:
            self._drop(state)

    def _drop(self, batch: Batch) -> None:
        batch.holds -= 1
        assert batch.holds >= 0, "a hold was given up twice"
        if not batch.holds and batch.is_sent:
            self._put(batch)

    def _put(self, batch: Batch) -> None:
        self._wake()
        self._notes.put(batch)

    def _wake(self) -> None:
        """The thread runs: it also finds out whether a service that was given up is back."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvservice-tier-lookups", daemon=True)
            self._thread.start()

    # ------------------------------------------------------------------ its own thread

    def _run(self) -> None:
        notes = self._notes
        while True:
            try:
                batch = notes.get(timeout=PROBE_S)
            except queue.Empty:
                if self._rows.probe_interval_s is not None:
                    self._rows.probe()
                continue
            if batch is None:
                return
            try:
                self._serve(batch)
            except Exception:  # a thread's top: the engine must get an answer whatever happens
                log.exception("kvservice: a lookup failed in a way nobody expected; the chunks are computed")
                self._counts.add("hook_errors")
                batch.answer = batch.answer or _nothing(batch)

    def _serve(self, batch: Batch) -> None:
        """A batch comes a first time to be looked up, and a second time when nobody holds it any more."""
        if batch.answer is None:
            batch.answer = self._look_up(batch) if batch.holds else _nothing(batch)
        if not batch.holds:
            for rows in batch.answer.rows:
                rows.close()

    def _look_up(self, batch: Batch) -> Answer:
        began_s = self._clock()
        try:
            found = self._rows.find(list(batch.index))
        except KVServiceError as error:
            self._counts.add("lookups_failed")
            log.debug("kvservice: a lookup of %d chunks failed: %s", len(batch.index), error)
            return _nothing(batch)
        self._counts.add("lookups")
        self._counts.add("lookup_seconds", self._clock() - began_s)
        places = [
            (rows, place) if is_present else None
            for rows, part in found
            for place, is_present in zip(range(len(part)), rows.present, strict=True)
        ]
        return Answer(tuple(places), tuple(rows for rows, _ in found))


def _nothing(batch: Batch) -> Answer:
    return Answer((None,) * len(batch.index))
