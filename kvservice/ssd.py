"""The SSD tier of a node, put together: what was recovered goes into the catalog, what is new goes to the slab.

Owned by the loop. It decides when; promotion, demotion and scrubbing do the work on threads of their own.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from kvservice.allocation import Allocation
from kvservice.caches import Cache, group_of
from kvservice.catalog import Catalog
from kvservice.demotion import Demotion
from kvservice.index_writer import IndexWriter
from kvservice.killpoints import Killer
from kvservice.limits import NodeLimits
from kvservice.loads import Load
from kvservice.model.errors import DiskError, KVServiceError
from kvservice.model.identity import Namespace
from kvservice.model.segment import ContextId, SegmentId
from kvservice.promotion import Promotion
from kvservice.scrubbing import Scrubber
from kvservice.stats.counters import Counters
from kvservice.storage.admission import Admission
from kvservice.storage.disk import Disk
from kvservice.storage.rate import ByteRate
from kvservice.storage.recovery import Opened, mark_clean
from kvservice.storage.slab_format import NoteKind, tombstone_payload
from kvservice.tombstones import Burial
from kvservice.worker import ThreadWorker, Worker

_LOG = logging.getLogger(__name__)
AHEAD_GROUPS_MAX = 256
"""Groups next to be evicted that one look ahead goes through."""
AHEAD_SHARE = 1 / 16
"""Of the host tier: as much as this is kept free or already on SSD, so that an eviction loses nothing."""


@dataclass(frozen=True, slots=True)
class SsdPolicy:
    """How the tier is used; see the settings of the same names."""

    is_write_through: bool = True
    is_durable: bool = False
    write_budget_bytes: int = 0
    free_floor_bytes: int = 0
    scrub_bytes_per_s: int = 0
    threads: int = 2
    flush_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Workers:
    """Threads by what they do, so that none waits for another kind: loads must not starve behind writes."""

    reads: Worker
    writes: Worker
    index: Worker
    scrub: Worker

    @classmethod
    def threads(cls, count: int) -> "Workers":
        """``count`` threads that read, as many that write."""
        return cls(ThreadWorker(count), ThreadWorker(count), ThreadWorker(1), ThreadWorker(1))

    def close(self) -> None:
        """Wait for all."""
        for worker in (self.reads, self.writes, self.index, self.scrub):
            worker.close()


class Ssd:
    """The slab and its index in the service of one catalog.

    ``queue``: caches that wait to be written, the oldest first; what finds no place in it is written when it is about
    to be evicted.
    """

    def __init__(
        self,
        disk: Disk,
        opened: Opened,
        policy: SsdPolicy,
        catalog: Catalog,
        allocation: Allocation,
        limits: NodeLimits,
        counters: Counters,
        killer: Killer,
        clock: Callable[[], float],
        workers: Workers | None = None,
    ) -> None:
        self.opened = opened
        self._disk = disk
        self.slab = opened.slab
        self.policy = policy
        self.queue: dict[Cache, None] = {}
        self.began_with_caches = bool(opened.entries)
        self._catalog = catalog
        self._tier = allocation.tier
        self._limits = limits
        self._counters = counters
        self._workers = workers or Workers.threads(policy.threads)
        self._has_work = asyncio.Event()
        self._is_upkeep_due = True
        self._looked_at_bytes = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._unburied: dict[Burial, None] = {}
        self._burials: set[asyncio.Task[None]] = set()
        self._burial_turn = asyncio.Lock()
        sync = self.slab.sync if policy.is_durable else None
        self.index = IndexWriter(opened.index, self._workers.index, sync)
        self.admission = Admission(policy.write_budget_bytes, clock=clock)
        self.demotion = Demotion(
            self.slab, self.index, catalog, self._tier, self.admission, self._workers.writes, limits, counters, killer,
            clock, allocation.room,
        )  # fmt: skip
        self.promotion = Promotion(
            self.slab, catalog, allocation, self._workers.reads, counters, clock, self.demotion.quarantine
        )
        rate = ByteRate(policy.scrub_bytes_per_s, clock=clock) if policy.scrub_bytes_per_s else None
        self.scrubber = Scrubber(self.slab, self.demotion, catalog, self._tier, self._workers.scrub, rate, counters)

    # Start and stop

    def restore(self) -> None:
        """Put what was recovered into the catalog; before the first call. Masters come first."""
        spaces = {name: self._catalog.space_of(identity) for name, identity in self.opened.identities.items()}
        self.demotion.identities.update(spaces)
        masters: dict[tuple[Namespace, SegmentId, ContextId, int], Cache] = {}
        deleted = defaultdict[bytes, dict[Cache, int]](dict)
        for entry in self.opened.entries:
            meta, base = entry.meta, entry.meta.master
            master = masters[meta.namespace, meta.key.segment, base.context, base.generation] if base else None
            cache = self._catalog.restore(spaces[meta.namespace], entry, master)
            if base is None:
                masters[meta.namespace, meta.key.segment, meta.key.context, entry.generation] = cache
            if entry.is_deleted:
                deleted[tombstone_payload(meta.namespace, meta.key)][cache] = entry.sequence
        self._bury_again(deleted)
        for space in spaces.values():
            self._catalog.drop_if_unused(space)
        self.opened.entries.clear()

    def _bury_again(self, deleted: Mapping[bytes, Mapping[Cache, int]]) -> None:
        """``deleted``: by key the hidden caches, and the sequence numbers of their records."""
        for note in self.opened.notes:
            for cache, sequence in deleted[note.payload].items() if note.kind is NoteKind.TOMBSTONE else ():
                if sequence < note.sequence:
                    self.demotion.tombstones.add(cache, note)
                    self._catalog.hidden[cache] = note.sequence
        for cache in (cache for caches in deleted.values() for cache in caches):
            self._catalog.settle(cache)

    def start(self) -> None:
        """Begin to write and to scrub, in the running loop."""
        writers = [self._write_forever() for _ in range(self.policy.threads)]
        self._tasks = [asyncio.create_task(work) for work in (*writers, self._keep_up())]
        if self.policy.scrub_bytes_per_s:
            self._tasks.append(asyncio.create_task(self.scrubber.run_forever()))

    async def stop(self) -> None:
        """Bring what is only in memory to the slab, as far as time allows, and leave the mark of a clean stop."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        try:
            await self.promotion.stop()
            async with asyncio.timeout(self.policy.flush_s):
                await self._flush()
        except TimeoutError:
            _LOG.warning("stopped after %g s with caches in memory that are not on SSD", self.policy.flush_s)
        except Exception:  # noqa: BLE001  a stop ends whatever happens; what was not written is a miss later
            _LOG.exception("bringing memory's caches to SSD failed. Please report this")
        finally:
            await asyncio.gather(*self._burials, *self.demotion.writing.values(), return_exceptions=True)
            await self.demotion.settle()
            await self.index.stop()
            self._workers.close()
            self._close()

    def _close(self) -> None:
        """Mark the stop as clean, unless the index may name what is not there; the next start then looks."""
        opened = self.opened
        try:
            if self.demotion.is_index_true:
                mark_clean(self._disk, opened.slab, opened.index, opened.boot_epoch)
        except KVServiceError as error:
            _LOG.warning("the next start reads every head on SSD, for this stop left no mark: %s", error)
        opened.index.close()
        opened.slab.close()

    async def _flush(self) -> None:
        self.queue = dict.fromkeys(self._dirty())
        await asyncio.gather(*(self._write_queued(is_required=True) for _ in range(self.policy.threads)))

    def _dirty(self) -> Iterator[Cache]:
        for space in self._catalog.spaces.values():
            for family in space.families.values():
                yield from (cache for cache in family.members.values() if not cache.is_on_ssd)

    # What the node tells

    def begin_load(self, cache: Cache) -> Load | None:
        """What brings a held cache's record into the arena; None if leases leave no room."""
        return self.promotion.begin(cache, self._counters.lookups.calls)

    def note_published(self, cache: Cache) -> None:
        """A cache is new in memory."""
        is_wanted = self.policy.is_write_through or cache in self._catalog.superseded
        if is_wanted and len(self.queue) < self._limits.ssd_queue_max:
            self.queue[cache] = None
        self._has_work.set()

    def note_used(self, cache: Cache) -> None:
        """A lookup found a cache: on a second touch it is admitted where a budget kept it out at first."""
        if self.policy.write_budget_bytes and not cache.is_on_ssd and cache not in self.demotion.writing:
            self.note_published(cache)

    async def bury(self, caches: Iterable[Cache], is_meant: Callable[[Cache], bool] = lambda _: False) -> None:
        """Caches were hidden for good. Return when no restart brings any of them back, nor one of an earlier call.

        ``is_meant``: is a cache of a deleted key, should it be found on the slab? It goes on to its end whoever waits
        for it. Raises DiskError; the next call then tries those again.
        """
        self._unburied |= dict.fromkeys(self.demotion.burials(caches, is_meant))
        work = asyncio.create_task(self._bury_all())
        self._burials.add(work)
        work.add_done_callback(self._end_burial)
        await asyncio.shield(work)

    def _end_burial(self, work: "asyncio.Task[None]") -> None:
        self._burials.discard(work)
        if not work.cancelled():
            work.exception()  # seen: whoever asked may have gone

    async def _bury_all(self) -> None:
        async with self._burial_turn:
            burials, errors = list(self._unburied), list[DiskError]()
            for burial in burials:
                await self._until_arrived(burial)
                await self.demotion.unearth(burial)
            await self.demotion.settle()
            for burial in burials:
                try:
                    await self.demotion.bury(burial)
                    del self._unburied[burial]
                except DiskError as error:
                    errors.append(error)
            if errors:
                raise errors[0]

    async def _until_arrived(self, burial: Burial) -> None:
        """What is being read cannot be erased; what others stand on may go on being read."""
        for cache in burial.caches:
            load = None if cache.mirrors else self._catalog.arriving.get(cache)
            if load is not None:
                await load.over.wait()

    # Writing

    async def _write_forever(self) -> None:
        while True:
            await self._has_work.wait()
            self._has_work.clear()
            try:
                await self._write_all()
            except Exception:  # noqa: BLE001  a task's top: caches stay in memory, and the next one may do better
                _LOG.exception("writing to SSD failed. Please report this")

    async def _write_all(self) -> None:
        """Write what waits, then what would be evicted next and is in memory only, so that evictions lose nothing."""
        if len(self.queue) > 1:
            self._has_work.set()  # wakes one more writer
        await self._write_queued()
        if self._is_look_due():
            for cache in self._next_to_go():
                await self.demotion.write(cache)

    def _is_look_due(self) -> bool:
        """Once an upkeep, or when a part of what the last look made ready has been filled: a look takes 0.5 ms."""
        filled = self._counters.published_bytes + self._counters.loads.record_bytes
        step = self._tier.capacity_bytes * AHEAD_SHARE / 4
        if not self._is_upkeep_due and filled - self._looked_at_bytes < step:
            return False
        self._is_upkeep_due, self._looked_at_bytes = False, filled
        return True

    async def _write_queued(self, *, is_required: bool = False) -> None:
        while self.queue:
            cache = next(iter(self.queue))
            del self.queue[cache]
            await self.demotion.write(cache, is_required=is_required)

    def _next_to_go(self) -> list[Cache]:
        wanted = int(self._tier.capacity_bytes * AHEAD_SHARE)
        room, dirty = self._tier.capacity_bytes - self._tier.used_bytes, list[Cache]()
        if room >= wanted:
            return dirty
        for head in self._catalog.orders.first_of_host(AHEAD_GROUPS_MAX):
            if room >= wanted:
                break
            room += group_of(head).host_bytes
            dirty += [one for one in reversed([*head.members()]) if one.is_on_host and not one.is_on_ssd]
        return dirty

    async def _keep_up(self) -> None:
        while True:
            try:
                await self._watch_floor()
            except (KVServiceError, OSError) as error:
                _LOG.warning("the room on the file system of the SSD tier is not known: %s; trying again", error)
            self._is_upkeep_due = True
            self._has_work.set()
            await asyncio.sleep(self._limits.upkeep_interval_s)

    async def _watch_floor(self) -> None:
        """Below the floor nothing more is admitted, and free places of the slab go back to the file system."""
        is_below = self._disk.free_bytes() < self.policy.free_floor_bytes
        was_below, self.admission.is_below_floor = self.admission.is_below_floor, is_below
        extent = self.slab.claim_free() if is_below and not was_below else None
        while extent is not None:
            try:
                await self._workers.writes.run(partial(self.slab.punch, extent))
            finally:
                self.slab.free(extent)
            extent = self.slab.claim_free(extent.end)
