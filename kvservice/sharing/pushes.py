"""What is new here is given to the places where it belongs, in the background. What cannot be given stays here.

noted --settled--> a lane for each place where it belongs --its turn--> given
      |                                          `--refused--> stays --belongs elsewhere by now (wake)--> noted
      `--nowhere to give it to now--> homeless --somebody is there (wake)--> a lane for each place
"""

import asyncio
import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from typing import Any

from kvservice.caches import Cache, Space, group_of
from kvservice.catalog import Catalog
from kvservice.loads import Load
from kvservice.model.errors import UnavailableError
from kvservice.model.segment import CacheKey
from kvservice.sharing.giving import Giving, Verdict
from kvservice.sharing.lanes import Errand, Lanes
from kvservice.sharing.place import HOT_USES, Directory, Place
from kvservice.stats.counters import PushCounters
from kvservice.storage.host_tier import HostTier

QUEUE_MAX = 65536
REFUSED_MAX = 16384
"""Caches that are remembered as refused; of more the oldest stay here."""
SETTLE_S = 0.2
"""A new cache waits so long: a dense one may be folded meanwhile, and its mirror goes instead."""
ROUTES_MAX = 256
"""Caches whose owners are looked up before other calls are let in: 1.5 us a cache and member."""
TICK_S = 0.25
"""How often lanes that wait are looked at."""
_NOT_TAKEN = (Verdict.NOWHERE, Verdict.REFUSED, Verdict.UNREACHABLE, Verdict.FAILED)
_LOG = logging.getLogger(__name__)


class Pushes:
    """Who waits, and who is on the way. Owned by the loop; ``clock``: monotonic seconds; ``begin_load``: see Giving."""

    def __init__(
        self,
        catalog: Catalog,
        tier: HostTier,
        directory: Directory,
        counters: PushCounters,
        clock: Callable[[], float],
        begin_load: Callable[[Cache], Load | None],
        settle_s: float = SETTLE_S,
    ) -> None:
        self._new: OrderedDict[Cache, tuple[float, bool]] = OrderedDict()  # when it is settled; is it but a copy?
        self._homeless: dict[Cache, None] = {}
        self._refused: OrderedDict[Cache, Place] = OrderedDict()  # by whom: full, or draining and not known to be yet
        self._lanes = Lanes()
        self._giving = Giving(catalog, tier, counters, clock, begin_load, self._delete_later)
        self._directory = directory
        self._counters = counters
        self._clock = clock
        self._settle_s = settle_s
        self._has_work = asyncio.Event()
        self._progress = asyncio.Event()
        self._ahead = 0  # given before their turn, now
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def waiting(self) -> int:
        """How many wait: to be settled, for their turn, or for a place to go to."""
        return len(self._new) + len(self._homeless) + self._lanes.waiting

    @property
    def is_idle(self) -> bool:
        """Is nothing left that can be given away now?"""
        return not (self._new or self._ahead or self._lanes.waiting or self._lanes.running)

    @property
    def has_places(self) -> bool:
        """Does this node know any place besides itself, there or not?"""
        return bool(self._directory.everywhere())

    async def finish(self) -> None:
        """Return once nothing is left that can be given away now."""
        while not self.is_idle:
            self._progress.clear()
            await self._progress.wait()

    def start(self) -> None:
        """Begin to give, in the running loop."""
        self._do(self._push_forever())

    async def stop(self) -> None:
        """End what is on its way; what waits stays here."""
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    # What happens

    def note(self, cache: Cache, *, is_copy: bool = False) -> None:
        """A cache is new. ``is_copy``: it is used often enough to belong somewhere else too."""
        if cache in self._new:
            self._new[cache] = self._new[cache][0], self._new[cache][1] and is_copy
        elif self.waiting >= QUEUE_MAX:
            self._counters.dropped += 1
        else:
            self._new[cache] = self._clock() + self._settle_s, is_copy
            self._has_work.set()

    async def push_now(self, caches: Iterable[Cache]) -> None:
        """Give these away now, all at once, instead of in their turn; later what does not get through now."""
        wanted = [cache for cache in caches if self._new.pop(cache, None) is not None]
        await asyncio.gather(*(self._push_now(cache) for cache in wanted))

    async def give_now(self, cache: Cache) -> Verdict:
        """Give one away, to all places where it belongs, whether or not it waits for its turn; what became of it where
        it went worst. What none of them takes goes to storage, if there is any."""
        worst, homes = Verdict.NOWHERE, self._homes(cache)
        for place in homes:
            verdict = await self._give_ahead(cache, place)
            worst = verdict if worst in (Verdict.NOWHERE, Verdict.GIVEN) else worst
        for place in self._directory.storages():
            if worst in _NOT_TAKEN and place not in homes:
                verdict = await self._give_ahead(cache, place)
                worst = verdict if verdict is Verdict.GIVEN or worst is Verdict.NOWHERE else worst
        self._progress.set()
        return worst

    def withdraw(self, is_meant: Callable[[Cache], bool]) -> None:
        """Caches were deleted: those that wait are not given, those on their way are deleted where they went."""
        waits: tuple[dict[Cache, Any], ...] = (self._new, self._homeless, self._refused)
        for waiting in waits:
            for cache in [one for one in waiting if is_meant(one)]:
                del waiting[cache]
        self._lanes.withdraw([cache for cache in dict.fromkeys(self._lanes.caches()) if is_meant(cache)])
        self._giving.withdraw(is_meant)
        self._progress.set()

    def wake(self) -> None:
        """Members have changed: who had no place may have one, who was lost may be there, or have lost what it had, and
        what one refused may belong to another one."""
        self._giving.forget()
        self._lanes.hurry()
        homeless, self._homeless = self._homeless, {}
        self._refused = OrderedDict((cache, place) for cache, place in self._refused.items() if not cache.is_hidden)
        for cache in (*homeless, *self._refused):
            self._new[cache] = -math.inf, False
            self._new.move_to_end(cache, last=False)
        self._has_work.set()

    # Who works on it

    async def _push_forever(self) -> None:
        while True:
            self._has_work.clear()
            try:
                wait_s = self._begin_due()
            except Exception:  # noqa: BLE001  a task's top: those that it did not come to stay here
                _LOG.exception("beginning to give caches away failed. Please report this")
                wait_s = TICK_S
            await asyncio.sleep(0)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._has_work.wait(), None if wait_s == math.inf else wait_s)

    def _begin_due(self) -> float:
        """Begin what may begin; seconds until it is worth looking again."""
        now_s = self._clock()
        for _ in range(ROUTES_MAX):
            cache, (due_s, is_copy) = next(iter(self._new.items()), (None, (math.inf, False)))
            if cache is None or due_s > now_s:
                break
            del self._new[cache]
            self._route(cache, is_copy=is_copy)
        else:
            self._has_work.set()
        for errand in self._lanes.due(now_s):
            self._do(self._run(errand))
        self._progress.set()
        return TICK_S if self._lanes.waiting else self._settle_s if self._new else math.inf

    def _route(self, cache: Cache, *, is_copy: bool = False) -> None:
        """To the lanes of the places where it belongs now."""
        homes = self._homes(cache, is_copy=is_copy)
        refused_by = None if is_copy else self._refused.pop(cache, None)
        if refused_by is not None and refused_by in homes and not cache.is_hidden:
            self._refused[cache] = refused_by
            homes = [place for place in homes if place is not refused_by]
        elif not homes and not is_copy and not cache.is_hidden:
            self._homeless[cache] = None
        for place in homes:
            self._lanes.add(Errand(place, cache.family.space, cache.key, cache, is_copy))

    def _homes(self, cache: Cache, *, is_copy: bool = False) -> Sequence[Place]:
        """Of a copy only those where it belongs since it is hot: none, unless this node is the first of its owners."""
        segment = cache.family.segment
        if not is_copy:
            return self._directory.homes(segment, group_of(cache).uses)
        cold = self._directory.homes(segment, 0)
        return [place for place in self._directory.homes(segment, HOT_USES) if place not in cold]

    async def _run(self, errand: Errand) -> None:
        try:
            is_reached = await self._do_errand(errand)
        except UnavailableError as error:
            self._counters.failed += 1
            if not self._lanes.failed(errand, self._clock()):
                _LOG.warning("cache %s stays here only, %s was not reached: %s", errand.key, errand.place.name, error)
            return
        except Exception:  # noqa: BLE001  a task's top: the cache stays here
            _LOG.exception("an errand to %s about cache %s failed. Please report this", errand.place.name, errand.key)
            self._lanes.ended(errand, is_reached=False)
        except asyncio.CancelledError:
            self._lanes.ended(errand, is_reached=False)
            raise
        else:
            self._lanes.ended(errand, is_reached=is_reached)
        finally:
            self._has_work.set()
            self._progress.set()

    async def _do_errand(self, errand: Errand) -> bool:
        """Was its place reached? Raises UnavailableError. What belongs somewhere else by now goes there."""
        cache, place = errand.cache, errand.place
        if cache is None:
            if place in self._directory.everywhere():
                await self._giving.delete(place, errand.space, errand.key)
            return place in self._directory.everywhere()
        if place in self._homes(cache, is_copy=errand.is_copy):
            verdict = await self._giving.give(cache, place)
            if verdict is Verdict.REFUSED and not errand.is_copy:
                self._note_refused(cache, place)
            return verdict in (Verdict.GIVEN, Verdict.REFUSED)
        self._route(cache, is_copy=errand.is_copy)
        return False

    def _note_refused(self, cache: Cache, place: Place) -> None:
        """It stays here, unless it belongs somewhere else by now; or until then."""
        if len(self._refused) >= REFUSED_MAX:
            self._refused.popitem(last=False)
        self._refused[cache] = place
        if place not in self._homes(cache):
            self._route(cache)

    def _delete_later(self, place: Place, space: Space, key: CacheKey) -> None:
        """It was deleted on its way to a place that is not reached."""
        self._counters.failed += 1
        self._lanes.add_failed(Errand(place, space, key), self._clock())
        self._has_work.set()

    async def _push_now(self, cache: Cache) -> None:
        homes = self._homes(cache)
        try:
            results = await asyncio.gather(*(self._give_ahead(cache, place) for place in homes))
        except asyncio.CancelledError:  # who commits is gone, the cache is not
            self.note(cache)
            raise
        for place, verdict in zip(homes, results, strict=True):
            if verdict is Verdict.UNREACHABLE:
                self._lanes.add_failed(Errand(place, cache.family.space, cache.key, cache), self._clock())
            if verdict is Verdict.REFUSED:
                self._note_refused(cache, place)
        if not homes:
            self._route(cache)
        self._has_work.set()
        self._progress.set()

    async def _give_ahead(self, cache: Cache, place: Place) -> Verdict:
        self._ahead += 1
        try:
            return await self._giving.give(cache, place)
        except UnavailableError as error:
            self._counters.failed += 1
            _LOG.info("cache %s was not given: %s", cache, error)
            return Verdict.UNREACHABLE
        except Exception:  # noqa: BLE001  whoever commits it has it here
            _LOG.exception("giving cache %s to %s failed. Please report this", cache, place.name)
            return Verdict.FAILED
        finally:
            self._ahead -= 1

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
