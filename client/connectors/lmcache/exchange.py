"""What both doors do: store, look up and lock, load, unlock, each on threads of ours, answered by a callback.

Nothing here blocks its caller, raises into it, or leaves it without an answer:

    lookup, load   answered by their deadlines; a load whose copy is under way ends first, since memory must not be
                   written after the answer
    store          answered when it is done, since memory must not change before; at once when it will not be done

A lock is a lease. One that is lost makes a load fail; it never makes it load other bytes.
"""

import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from kvservice.client.connectors.breaker import BreakerState, Clock
from kvservice.client.connectors.lmcache.alarms import Alarms
from kvservice.client.connectors.lmcache.holds import Holds
from kvservice.client.connectors.lmcache.options import LMCacheOptions
from kvservice.client.connectors.lmcache.vault import Named, Place, Room, Stored, Vault
from kvservice.client.connectors.vllm.link import LOST
from kvservice.client.connectors.vllm.metrics import Counts
from kvservice.client.opaque import FoundRows
from kvservice.model.cache import Tier
from kvservice.model.errors import CorruptError, KVServiceError, UnavailableError

COUNTERS = (
    "lookups", "lookups_failed", "lookups_late", "objects_asked", "objects_hit", "objects_hit_ssd",
    "loads", "loads_late", "objects_loaded", "objects_load_failed", "objects_corrupt", "bytes_loaded",
    "stores", "stores_failed", "objects_stored", "objects_existed", "objects_refused", "bytes_stored",
    "objects_deleted", "tasks_refused", "locks_reaped", "hook_errors",
)  # fmt: skip
ROOM_AGE_S = 5.0
"""The service is asked no more often than this how full it is."""
REAP_S = 2.0
"""How often locks are looked at whose time may be over."""

log = logging.getLogger("kvservice.lmcache")

T = TypeVar("T")
Prepare = Callable[[], Sequence[Named]]
"""Names the objects of a task, in order; called on a thread of ours."""
Fail = Callable[[KVServiceError], None]


class _Once:
    """The right to answer a task: one thread gets it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_taken = False

    @property
    def is_taken(self) -> bool:
        return self._is_taken

    def claim(self) -> bool:
        with self._lock:
            is_ours, self._is_taken = not self._is_taken, True
            return is_ours


def _once(done: Callable[[T], None]) -> Callable[[T], None]:
    """``done``, of which only the first call counts."""
    once = _Once()

    def answer(result: T) -> None:
        if once.claim():
            done(result)

    return answer


class Exchange:
    """Safe from any thread. ``done`` is called once a task, with one entry an object, from a thread of ours or before
    the call returns; it must not block."""

    def __init__(self, vault: Vault, options: LMCacheOptions, clock: Clock = time.monotonic) -> None:
        self.counts = Counts(COUNTERS, ())
        self.holds = Holds()
        self._vault = vault
        self._options = options
        self._clock = clock
        self._alarms = Alarms(clock)
        self._lock = threading.Lock()
        self._waiting = 0
        self._is_probing = False
        self._room, self._room_s = Room(), -ROOM_AGE_S
        self._lookups = ThreadPoolExecutor(1, thread_name_prefix="kvservice-lookups")
        self._loads = ThreadPoolExecutor(options.load_threads, thread_name_prefix="kvservice-loads")
        self._stores = ThreadPoolExecutor(options.store_threads, thread_name_prefix="kvservice-stores")
        self._reap()

    def lookup(
        self,
        names: Sequence[Hashable],
        prepare: Prepare,
        done: Callable[[list[bool]], None],
        *,
        lock_s: float | None = None,
    ) -> None:
        """Which objects are there; those are locked under ``names`` until ``unlock``, ``lock_s`` seconds at most."""
        once, nothing = _Once(), [False] * len(names)

        def fail(error: KVServiceError) -> None:
            if once.claim():
                self.counts.add("lookups_failed")
                log.debug("kvservice: a lookup failed: %s", error)
                done(nothing)

        def late() -> None:
            if once.claim():
                self.counts.add("lookups_late")
                self._vault.breaker.failed()
                done(nothing)

        def work() -> None:
            if once.is_taken:
                return
            places = self._vault.find(prepare())
            if not once.claim():
                _close(place.found for place in places if place is not None)
                return
            deadline_s = self._clock() + (self._options.lock_s if lock_s is None else lock_s)
            held = [(name, place) for name, place in zip(names, places, strict=True) if place is not None]
            self.holds.add(held, deadline_s)
            self._count_found(places)
            done([place is not None for place in places])

        if self._vault.breaker.state is BreakerState.OPEN:  # behind the call that hangs, perhaps
            fail(UnavailableError("the service failed or was slow several times; it is tried again in some seconds"))
            self._probe()
            return
        self._alarms.set(self._clock() + self._options.lookup_deadline_s, late)
        self._begin(self._lookups, work, fail)

    def unlock(self, names: Iterable[Hashable]) -> None:
        """Give one lock of each name back. What is not locked (any more) is no error."""
        self._let_go(self.holds.drop(names))

    def load(self, items: Sequence[tuple[Hashable, Any]], done: Callable[[list[bool]], None]) -> None:
        """Copy locked objects to (name, buffer)'s buffers; False for one that must be computed."""
        deadline_s = self._clock() + self._options.load_deadline_s
        loaded, answer = [False] * len(items), _once(done)

        def work() -> None:
            for index, (name, buffer) in enumerate(items):
                left_s = deadline_s - self._clock()
                if left_s <= 0:
                    self.counts.add("loads_late")
                    break
                loaded[index] = self._load_one(name, buffer, left_s)
            self.counts.add("loads")
            self.counts.add("objects_load_failed", loaded.count(False))
            answer(loaded)

        def fail(_: KVServiceError) -> None:
            self.counts.add("objects_load_failed", len(items))
            answer([False] * len(items))

        self._begin(self._loads, work, fail)

    def store(self, prepare: Prepare, buffers: Sequence[Any], done: Callable[[list[Stored]], None]) -> None:
        """Store objects; what became of each. The buffers must not change until ``done``."""
        answer = _once(done)

        def work() -> None:
            stored = self._vault.put(list(zip(prepare(), buffers, strict=True)))
            self._count_stored(buffers, stored)
            answer(stored)

        def fail(error: KVServiceError) -> None:
            self.counts.add("stores_failed")
            log.info("kvservice: %d chunks were not stored: %s", len(buffers), error)
            answer([Stored(error)] * len(buffers))

        self._begin(self._stores, work, fail)

    def delete(self, prepare: Prepare, done: Callable[[bool], None]) -> None:
        """Delete objects; whether the service did."""
        answer = _once(done)

        def work() -> None:
            self.counts.add("objects_deleted", self._vault.delete(prepare()))
            answer(True)

        def fail(error: KVServiceError) -> None:
            log.warning("kvservice: chunks were not deleted: %s", error)
            answer(False)

        self._begin(self._stores, work, fail)

    def room(self) -> Room:
        """How full the service was some seconds ago; all zero until it answered. Asks on another thread."""
        with self._lock:
            is_old, now_s = self._clock() - self._room_s >= ROOM_AGE_S, self._clock()
            self._room_s = now_s if is_old else self._room_s
            known = self._room
        if is_old:
            self._begin(self._lookups, self._ask_room, lambda _: None)
        return known

    def ping(self, done: Callable[[bool], None]) -> None:
        """Whether the service answers."""
        answer = _once(done)

        def work() -> None:
            self._ask_room()
            answer(True)

        self._begin(self._lookups, work, lambda _: answer(False))

    def status(self) -> dict[str, object]:
        """What an operator wants to see: where the breaker stands, and the counts."""
        breaker = self._vault.breaker
        figures = {name: int(value) for name, value in self.counts.totals().items()}
        state = {"breaker": breaker.state.name.lower(), "breaker_opened": breaker.opened, "locks": len(self.holds)}
        return {"address": self._options.address, **state, **figures}

    def close(self) -> None:
        """Answer what waits as failed, let what runs end, and end the session with every lease."""
        self._alarms.close()
        for pool in (self._lookups, self._loads, self._stores):
            pool.shutdown(wait=True, cancel_futures=True)
        self._vault.close()

    # ------------------------------------------------------------------ on threads of ours

    def _load_one(self, name: Hashable, buffer: Any, left_s: float) -> bool:
        with self.holds.reading(name) as place:
            if place is None:
                return False
            try:
                place.found.read(place.index, buffer, timeout_s=left_s)
            except KVServiceError as error:
                self.counts.add("objects_corrupt", isinstance(error, CorruptError))
                if isinstance(error, LOST):
                    self._vault.breaker.failed()
                log.info("kvservice: a chunk was not loaded and is computed: %s", error)
                return False
        self.counts.add("objects_loaded")
        self.counts.add("bytes_loaded", memoryview(buffer).nbytes)
        return True

    def _probe(self) -> None:
        """Find out whether the service is back, if the breaker thinks it is time; once at a time."""
        with self._lock:
            if self._is_probing:
                return
            self._is_probing = True

        def work() -> None:
            self._vault.link.probe()
            end(None)

        def end(_: object) -> None:
            self._is_probing = False

        self._begin(self._lookups, work, end)

    def _ask_room(self) -> None:
        self._room = self._vault.room()

    def _count_found(self, places: Sequence[Place | None]) -> None:
        found = [place for place in places if place is not None]
        self.counts.add("lookups")
        self.counts.add("objects_asked", len(places))
        self.counts.add("objects_hit", len(found))
        self.counts.add("objects_hit_ssd", sum(place.found.tiers[place.index] is Tier.SSD for place in found))

    def _count_stored(self, buffers: Sequence[Any], stored: Sequence[Stored]) -> None:
        refused = [one.error for one in stored if one.error is not None]
        if refused:
            log.warning("kvservice: %d of %d chunks were refused, first: %s", len(refused), len(buffers), refused[0])
        new = [buffer for buffer, one in zip(buffers, stored, strict=True) if one.error is None and not one.existed]
        self.counts.add("stores")
        self.counts.add("objects_refused", len(refused))
        self.counts.add("objects_existed", sum(one.existed for one in stored))
        self.counts.add("objects_stored", len(new))
        self.counts.add("bytes_stored", sum(memoryview(buffer).nbytes for buffer in new))

    def _reap(self) -> None:
        late = self.holds.reap(self._clock())
        if late:
            self.counts.add("locks_reaped", len(late))
            self._let_go(late)
        self._alarms.set(self._clock() + REAP_S, self._reap)

    def _let_go(self, leases: Sequence[FoundRows]) -> None:
        """End leases, on our thread: telling the service may wait for a socket."""
        if not leases:
            return
        try:
            self._lookups.submit(_close, leases)
        except RuntimeError:  # closed: they went with the session
            return

    def _begin(
        self, pool: ThreadPoolExecutor, work: Callable[[], None], fail: Callable[[KVServiceError], None]
    ) -> None:
        """Run ``work`` on a pool; ``fail`` with the reason when that cannot be, or when it raises."""
        with self._lock:
            is_full = self._waiting >= self._options.waiting_max
            self._waiting += not is_full
        if is_full:
            self.counts.add("tasks_refused")
            fail(UnavailableError(f"{self._options.waiting_max} tasks wait already"))
            return

        def end(future: "Future[None]") -> None:
            with self._lock:
                self._waiting -= 1
            if future.cancelled():
                fail(UnavailableError("the connection to the service is being closed"))

        try:
            future = pool.submit(self._guarded, work, fail)
        except RuntimeError:
            with self._lock:
                self._waiting -= 1
            fail(UnavailableError("the connection to the service is closed"))
            return
        future.add_done_callback(end)

    def _guarded(self, work: Callable[[], None], fail: Fail) -> None:
        try:
            work()
        except KVServiceError as error:
            fail(error)
        except Exception as error:  # a thread's top: whoever asked must get an answer whatever happens
            log.exception("kvservice: a task failed in a way nobody expected; its chunks are computed")
            self.counts.add("hook_errors")
            fail(UnavailableError(f"an error nobody expected: {error}"))


def _close(leases: Iterable[FoundRows]) -> None:
    for found in {id(one): one for one in leases}.values():
        found.close()
