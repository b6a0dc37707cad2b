"""One cache is given to one place: its master first, each record whole, and nothing that was deleted.

What is on SSD only is read for it. A delete that comes while a record is on its way is carried there behind it.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from kvservice.caches import Cache, Space
from kvservice.catalog import Catalog
from kvservice.loads import Load
from kvservice.model.cache import MasterReference
from kvservice.model.errors import KVServiceError, MasterGoneError, UnavailableError
from kvservice.model.segment import CacheKey
from kvservice.sharing.place import Parcel, Place
from kvservice.stats.counters import PushCounters
from kvservice.storage.host_tier import HostTier
from kvservice.storage.record import read_head
from kvservice.storage.remote.contract import RemoteName

GIVEN_MAX = 65536
_LOG = logging.getLogger(__name__)


class Verdict(StrEnum):
    """What became of giving a cache away."""

    GIVEN = "given"
    GONE = "gone from here meanwhile"
    ORPHAN = "its master was deleted"
    NO_ROOM = "on SSD, and no room in memory to read it"
    REFUSED = "refused"
    UNREACHABLE = "not reached"
    FAILED = "failed, see the log"
    NOWHERE = "no node to give it to"


@dataclass(slots=True, eq=False)
class _Move:
    """A record on its way to a place. ``is_deleted``: it was deleted meanwhile; ``over``: it has ended."""

    is_deleted: bool = False
    over: asyncio.Event = field(default_factory=asyncio.Event)


class Giving:
    """Owned by the loop. ``clock``: monotonic seconds. ``begin_load``: brings a held cache from SSD, None: no room.

    ``on_undeleted`` is told of a key that a place may hold though it was deleted, since the place was not reached.
    """

    def __init__(
        self,
        catalog: Catalog,
        tier: HostTier,
        counters: PushCounters,
        clock: Callable[[], float],
        begin_load: Callable[[Cache], Load | None],
        on_undeleted: Callable[[Place, Space, CacheKey], None],
    ) -> None:
        self._catalog = catalog
        self._tier = tier
        self._counters = counters
        self._clock = clock
        self._begin_load = begin_load
        self._on_undeleted = on_undeleted
        self._moving: dict[tuple[Place, Cache], _Move] = {}
        self._given: OrderedDict[tuple[Place, Cache], None] = OrderedDict()
        """Masters that a place took, so that none is offered again with each of its mirrors. What is stored again after
        a delete is another Cache, and no mirror goes with one that was deleted."""

    async def give(self, cache: Cache, place: Place) -> Verdict:
        """What became of it. Raises UnavailableError: the place was not reached."""
        verdict = self._why_not(cache)
        if verdict is not None:
            return self._count(cache, verdict)
        self._catalog.hold(cache)
        try:
            return self._count(cache, await self._give_again(cache, place))
        finally:
            self._catalog.unhold(cache)

    async def delete(self, place: Place, space: Space, key: CacheKey) -> None:
        """Delete there what was deleted here. Raises UnavailableError; a place that refuses is not asked again."""
        try:
            await place.delete(space, [key])
        except UnavailableError:
            raise
        except KVServiceError as error:
            self._counters.refused += 1
            _LOG.warning("%s did not delete cache %s, which was deleted on its way there: %s", place.name, key, error)

    def withdraw(self, is_meant: Callable[[Cache], bool]) -> None:
        """Caches were deleted: those on their way are deleted where they went."""
        for (_, cache), move in self._moving.items():
            move.is_deleted = move.is_deleted or is_meant(cache)

    def forget(self) -> None:
        """Places may have lost what they took. Forgetting costs a question."""
        self._given.clear()

    # The steps

    async def _give_again(self, cache: Cache, place: Place) -> Verdict:
        """Once more if the place lost the master that it took."""
        try:
            try:
                return await self._give(cache, place)
            except MasterGoneError:
                self._given.pop((place, cache.head), None)
                return await self._give(cache, place)
        except UnavailableError:
            raise
        except KVServiceError as error:
            _LOG.info("%s did not take cache %s: %s", place.name, cache, error)
            return Verdict.REFUSED

    async def _give(self, cache: Cache, place: Place) -> Verdict:
        """A mirror without its master is of no use to anybody, so that goes first."""
        for one in (cache,) if cache.master is None else (cache.master, cache):
            await self._until_over(one, place)
            if one is not cache and (place, one) in self._given:
                continue
            await self._bring(one)
            verdict = self._why_not(cache)
            if verdict is None and not self._catalog.is_whole(one):
                verdict = Verdict.NO_ROOM if one.is_on_ssd else Verdict.GONE
            if verdict is not None:
                return verdict
            await self._store(one, place)
        return self._why_not(cache) or Verdict.GIVEN

    def _why_not(self, cache: Cache) -> Verdict | None:
        if cache.is_hidden:
            return Verdict.GONE
        return Verdict.ORPHAN if cache.master is not None and cache.master.is_hidden else None

    async def _until_over(self, cache: Cache, place: Place) -> None:
        """One at a time: who comes second would be told that it is there, before it is."""
        while (move := self._moving.get((place, cache))) is not None:
            await move.over.wait()

    async def _bring(self, cache: Cache) -> None:
        """Have a held record in memory, if there is room; loads end in bounded time."""
        load = self._catalog.arriving.get(cache)
        if load is None and not cache.is_on_host and cache.is_on_ssd:
            load = self._begin_load(cache)
        if load is not None:
            await load.over.wait()

    async def _store(self, cache: Cache, place: Place) -> None:
        key, space, started_s = (place, cache), cache.family.space, self._clock()
        await self._until_over(cache, place)
        move = self._moving[key] = _Move()
        try:
            is_new = await place.store(self._parcel(cache))
        except UnavailableError:
            if not move.is_deleted:
                raise
            self._on_undeleted(place, space, cache.key)  # it may have got there all the same
            return
        finally:
            del self._moving[key]
            move.over.set()
        self._count_stored(cache, is_new, started_s)
        if move.is_deleted:
            try:
                await self.delete(place, space, cache.key)
            except UnavailableError:
                self._on_undeleted(place, space, cache.key)
        elif cache.master is None:
            self._remember(key)

    def _remember(self, key: tuple[Place, Cache]) -> None:
        if len(self._given) >= GIVEN_MAX:
            self._given.popitem(last=False)
        self._given[key] = None

    def _count_stored(self, cache: Cache, is_new: bool, started_s: float) -> None:
        counters = self._counters
        counters.seconds += self._clock() - started_s
        counters.stored += is_new
        counters.existed += not is_new
        counters.record_bytes += cache.record_bytes if is_new else 0

    def _count(self, cache: Cache, verdict: Verdict) -> Verdict:
        self._counters.refused += verdict is Verdict.REFUSED
        if verdict in (Verdict.GONE, Verdict.ORPHAN, Verdict.NO_ROOM):
            is_folded = cache.is_hidden and cache.family.space.find(cache.family.segment, cache.context) is not None
            self._counters.dropped += not is_folded  # of a folded one the mirror goes instead
        return verdict

    def _parcel(self, cache: Cache) -> Parcel:
        space, view, master = cache.family.space, self._tier.view(cache.extent), cache.master
        reference = None if master is None else MasterReference(master.context, master.generation)
        name = RemoteName(space.namespace, cache.family.segment, cache.context)
        return Parcel(space, name, view, read_head(view).header_checksum, reference, cache.prefill_s)
