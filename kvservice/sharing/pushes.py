"""What is new here is given to the places where it belongs, in the background: the master first, then its mirrors.

Nothing waits for this. What cannot be given stays here, and is counted.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable

from kvservice.caches import Cache, group_of
from kvservice.catalog import Catalog
from kvservice.model.cache import MasterReference
from kvservice.model.errors import KVServiceError, UnavailableError
from kvservice.model.identity import Namespace
from kvservice.model.segment import ContextId, SegmentId
from kvservice.sharing.place import Directory, Parcel, Place
from kvservice.stats.counters import PushCounters
from kvservice.storage.host_tier import HostTier
from kvservice.storage.record import read_head
from kvservice.storage.remote.contract import RemoteName

QUEUE_MAX = 65536
GIVEN_MAX = 65536
TRIES_MAX = 4
SETTLE_S = 0.2
"""A new cache waits so long: a dense one may be folded meanwhile, and its mirror goes instead."""
PUSHERS = 4
"""Records on their way out at a time."""
_LOG = logging.getLogger(__name__)
_Given = tuple[str, Namespace, SegmentId, ContextId, int]


class Pushes:
    """The queue, and who works on it. Owned by the loop; ``clock``: monotonic seconds."""

    def __init__(
        self,
        catalog: Catalog,
        tier: HostTier,
        directory: Directory,
        counters: PushCounters,
        clock: Callable[[], float],
        settle_s: float = SETTLE_S,
    ) -> None:
        self.queue: dict[Cache, tuple[float, int]] = {}  # when it is due, and which try it is
        self._catalog = catalog
        self._tier = tier
        self._directory = directory
        self._counters = counters
        self._clock = clock
        self._settle_s = settle_s
        self._has_work = asyncio.Event()
        self._progress = asyncio.Event()
        self._running: dict[Cache, bool] = {}  # was it deleted on its way?
        self._tasks: list[asyncio.Task[None]] = []
        self._given: dict[_Given, None] = {}

    @property
    def is_idle(self) -> bool:
        """Is nothing left to give away?"""
        return not self.queue and not self._running

    async def finish(self) -> None:
        """Return once nothing is left to give away."""
        while not self.is_idle:
            self._progress.clear()
            await self._progress.wait()

    def start(self) -> None:
        """Begin to give, in the running loop."""
        self._tasks = [asyncio.create_task(self._push_forever()) for _ in range(PUSHERS)]

    async def stop(self) -> None:
        """Finish what is on its way; what waits stays here."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []

    def note(self, cache: Cache) -> None:
        """A cache is new, or used often enough to belong somewhere else too."""
        if cache in self.queue:
            return
        if len(self.queue) >= QUEUE_MAX:
            self._counters.dropped += 1
            return
        self.queue[cache] = (self._clock() + self._settle_s, 0)
        self._has_work.set()

    async def push_now(self, caches: Iterable[Cache]) -> None:
        """Give these away now, all at once, instead of in their turn."""
        wanted = [cache for cache in caches if self.queue.pop(cache, None) is not None]
        await asyncio.gather(*(self._push_one(cache, 0) for cache in wanted))

    def withdraw(self, is_meant: Callable[[Cache], bool]) -> None:
        """Caches were deleted: those that wait are not given, those on their way are deleted where they went."""
        self.queue = {cache: turn for cache, turn in self.queue.items() if not is_meant(cache)}
        self._running |= {cache: True for cache in self._running if is_meant(cache)}

    async def _push_forever(self) -> None:
        while True:
            if not self.queue:
                self._has_work.clear()
                await self._has_work.wait()
                continue
            cache, (due_s, tries) = next(iter(self.queue.items()))
            wait_s = due_s - self._clock()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
                continue
            del self.queue[cache]
            await self._push_one(cache, tries)

    async def _push_one(self, cache: Cache, tries: int) -> None:
        self._running[cache] = False
        try:
            await self._push(cache, tries)
        except Exception:  # noqa: BLE001  a task's top: the cache stays here
            _LOG.exception("giving cache %s to its place failed. Please report this", cache)
        finally:
            del self._running[cache]
            self._progress.set()

    async def _push(self, cache: Cache, tries: int) -> None:
        for place in self._directory.homes(cache.family.segment, group_of(cache).uses):
            if cache.is_hidden or not self._catalog.is_readable(cache):
                self._counters.dropped += 1
                return
            try:
                await self._give(cache, place)
                if self._running[cache]:
                    await place.delete(cache.family.space, [cache.key])
            except UnavailableError as error:
                self._try_again(cache, tries, place, error)
            except KVServiceError as error:
                self._counters.refused += 1
                _LOG.info("%s did not take cache %s: %s", place.name, cache, error)

    def _try_again(self, cache: Cache, tries: int, place: Place, error: UnavailableError) -> None:
        self._counters.failed += 1
        if tries + 1 >= TRIES_MAX:
            _LOG.warning("cache %s stays here only, %s was not reached: %s", cache, place.name, error)
        elif cache not in self.queue:
            self.queue[cache] = (self._clock() + self._settle_s * 4 ** (tries + 1), tries + 1)

    async def _give(self, cache: Cache, place: Place) -> None:
        """A mirror without its master is of no use to anybody, so that goes first."""
        for one in (cache,) if cache.master is None else (cache.master, cache):
            key = (place.name, one.family.space.namespace, one.family.segment, one.context, one.generation)
            if key not in self._given:
                await self._give_one(one, place)
                self._remember(key)

    def _remember(self, key: _Given) -> None:
        """So that a master is not offered again with each of its mirrors. Forgetting costs a question."""
        if len(self._given) >= GIVEN_MAX:
            del self._given[next(iter(self._given))]
        self._given[key] = None

    async def _give_one(self, cache: Cache, place: Place) -> None:
        catalog, counters, started_s = self._catalog, self._counters, self._clock()
        catalog.hold(cache)
        try:
            is_new = await place.store(self._parcel(cache))
        finally:
            catalog.unhold(cache)
        counters.seconds += self._clock() - started_s
        counters.stored += is_new
        counters.existed += not is_new
        counters.record_bytes += cache.record_bytes if is_new else 0

    def _parcel(self, cache: Cache) -> Parcel:
        space, view, master = cache.family.space, self._tier.view(cache.extent), cache.master
        reference = None if master is None else MasterReference(master.context, master.generation)
        name = RemoteName(space.namespace, cache.family.segment, cache.context)
        return Parcel(space, name, view, read_head(view).header_checksum, reference, cache.prefill_s)
