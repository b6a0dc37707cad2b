"""Demotion: records of the host arena are written to the slab, and what nobody needs any more is erased from it.

The data first, then its index entry, then the catalog; masters before their mirrors. A cache is held while a thread
reads it. Nothing here may fail a client: what cannot be written stays where it is, and is counted by reason.
"""

import asyncio
import logging
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from kvservice.caches import Cache, Space, group_of
from kvservice.catalog import Catalog, Removal
from kvservice.index_writer import IndexWriter
from kvservice.killpoints import Killer, KillPoint
from kvservice.limits import NodeLimits
from kvservice.model.cache import Extent
from kvservice.model.errors import CorruptError, DiskError, DiskFullError
from kvservice.model.identity import Namespace
from kvservice.slab_jobs import erase_all, write_record
from kvservice.stats.counters import Counters, Room
from kvservice.storage.admission import Admission, NotAdmitted
from kvservice.storage.host_tier import HostTier
from kvservice.storage.slab import Slab
from kvservice.storage.slab_format import Note, NoteKind
from kvservice.storage.ssd_index import Change, PutNote, PutRecord, RemoveNote, RemoveRecord
from kvservice.tenant_room import TenantRoom
from kvservice.tombstones import Burial, Tombstones, name_of
from kvservice.worker import Worker

_LOG = logging.getLogger(__name__)
REMOVALS_MAX = 64
"""Records that are erased before their index entries go in one batch."""


class _Numbers(NamedTuple):
    """Sequence numbers of a record and of the tombstone that it needs; 0: none."""

    record: int
    tombstone: int


@dataclass(frozen=True, slots=True)
class _Departure:
    """A record that goes, and the tombstone that goes after it. ``is_kept_out``: its place is not used again."""

    removal: Removal
    note: Note | None
    is_kept_out: bool


class Demotion:
    """Writes caches to the slab, one group member after the other, and erases. Owned by the loop.

    ``writing``: caches that are being written, each by a task that goes on to its end whoever waits for it.
    ``is_index_true``: no removal failed half way, so the index names nothing that is not there.
    """

    def __init__(
        self,
        slab: Slab,
        index: IndexWriter,
        catalog: Catalog,
        tier: HostTier,
        admission: Admission,
        worker: Worker,
        limits: NodeLimits,
        counters: Counters,
        killer: Killer,
        clock: Callable[[], float],
        room: TenantRoom,
    ) -> None:
        self.writing: dict[Cache, asyncio.Task[bool]] = {}
        self.identities: set[Namespace] = set()
        self.is_index_true = True
        self.tombstones = Tombstones()
        self.admission = admission
        self._slab = slab
        self._index = index
        self._catalog = catalog
        self._tier = tier
        self._worker = worker
        self._limits = limits
        self._counters = counters
        self._killer = killer
        self._clock = clock
        self._room = room
        self._removals: deque[_Departure] = deque()
        self._stuck: list[_Departure] = []  # what failed; tried again once the index takes changes
        self._unerased: dict[bytes, Cache] = {}  # by name: what may still lie on the slab, whole
        self._removing: asyncio.Task[None] | None = None
        self._identity_turn = asyncio.Lock()

    # Writing

    async def write(self, cache: Cache, *, is_required: bool = False) -> bool:
        """Bring a cache, and before it the master it stands on, to the slab. Is it there now?

        ``is_required``: admission's questions of use and budget are not asked.
        """
        if cache.is_on_ssd:
            return True
        if cache not in self.writing:
            tombstone = self._catalog.hidden.get(cache, 0)
            if (cache.is_hidden and not (tombstone and cache.mirrors)) or not self._catalog.is_whole(cache):
                return False
            # The order of numbers is that of decisions: a tombstone buries what began to be written before.
            numbers = _Numbers(tombstone - 1 if tombstone else self._slab.next_sequence(), tombstone)
            self._catalog.hold(cache)
            work = self._write_held(cache, numbers, is_required=is_required)
            self.writing[cache] = asyncio.get_running_loop().create_task(work)
        return await asyncio.shield(self.writing[cache])

    async def _write_held(self, cache: Cache, numbers: "_Numbers", *, is_required: bool) -> bool:
        try:
            return await self._write_in_order(cache, numbers, is_required=is_required)
        finally:
            del self.writing[cache]
            self._catalog.unhold(cache)

    async def _write_in_order(self, cache: Cache, numbers: "_Numbers", *, is_required: bool) -> bool:
        is_required = is_required or cache in self._catalog.superseded
        if cache.master is not None:
            if not await self.write(cache.master, is_required=is_required):
                return False
            self._killer.reach(KillPoint.AFTER_MASTER)
            is_required = True  # a fortieth of what is there already
        if not self._is_admitted(cache, is_required=is_required):
            return False
        try:
            return await self._write_admitted(cache, numbers)
        except CorruptError:
            self._counters.corrupt["host"] += 1
            self._counters.demotions.dropped += 1
            self._catalog.condemn(cache)
        except DiskFullError:
            self.admission.refuse(NotAdmitted.NO_ROOM)
        except DiskError as error:
            _LOG.warning("cache %s could not be written to SSD, it stays in memory: %s", cache, error)
            self._counters.demotions.failed += 1
            self.admission.refuse(NotAdmitted.DISK_ERROR)
        return False

    def _is_admitted(self, cache: Cache, *, is_required: bool) -> bool:
        if cache.record_bytes > self._slab.record_bytes_max:
            self.admission.refuse(NotAdmitted.TOO_LARGE)
            return False
        return self.admission.decide(cache.record_bytes, group_of(cache).uses, is_required=is_required) is None

    async def _write_admitted(self, cache: Cache, numbers: "_Numbers") -> bool:
        await self._ensure_identity(cache.family.space)
        if not numbers.tombstone:
            return await self._write_record(cache, numbers.record)
        await self._put_tombstone([cache], numbers.tombstone)
        try:
            return await self._write_record(cache, numbers.record)
        finally:
            await self._drop_idle_tombstone(cache)

    async def _write_record(self, cache: Cache, sequence: int) -> bool:
        extent = await self._reserve(cache)
        if extent is None:
            return False
        started_s, view, failed_syncs = self._clock(), self._tier.view(cache.extent), self._index.failed_syncs
        try:
            job = partial(write_record, self._slab, extent, view, sequence, cache.generation)
            entry = await self._worker.run(partial(job, cache.prefill_s))
            self._killer.reach(KillPoint.AFTER_DATA)
            await self._index.apply(PutRecord(entry))
        except BaseException:
            await self._give_back(extent, cache)
            raise
        self._killer.reach(KillPoint.AFTER_INDEX)
        if self._index.failed_syncs != failed_syncs:
            self.remove(Removal(cache, extent))
            raise DiskError(f"cache {cache}: a sync failed while it was written, so it may not outlast a power failure")
        self.admission.note_written(cache.record_bytes)
        return self._conclude(cache, extent, self._clock() - started_s)

    def _conclude(self, cache: Cache, extent: Extent, seconds: float) -> bool:
        demotions = self._counters.demotions
        if cache.is_hidden and not cache.mirrors:
            demotions.dropped += 1
            self.remove(Removal(cache, extent))
            return False
        demotions.written += 1
        demotions.record_bytes += cache.record_bytes
        demotions.seconds += seconds
        self._room.forget_moving(extent)
        self._catalog.set_ssd(cache, extent.offset)
        return True

    async def _reserve(self, cache: Cache) -> Extent | None:
        """A place on the slab, made by evicting groups; None, and counted, if what is held, or its tenant's quota,
        leaves none."""
        room, tenant = self._room, cache.family.space.identity.tenant
        for _ in range(self._limits.evictions_per_reserve_max):
            if not room.has_ssd_room(tenant, cache.record_bytes):
                could_fit = room.could_have_ssd_room(tenant, cache.record_bytes)
                if not (could_fit and (room.evict_from_ssd(tenant, Room.RECORD) or self._is_removing)):
                    room.refuse("ssd")
                    break
                await self.settle()
                continue
            extent = self._slab.reserve(cache.record_bytes)
            if extent is not None:
                room.note_moving(extent, tenant)
                return extent
            evicted = self._catalog.evict_ssd()
            if evicted is None:
                break
            self._counters.ssd_evictions.count(Room.RECORD, *evicted)
            await self.settle()
        self.admission.refuse(NotAdmitted.NO_ROOM)
        return None

    @property
    def _is_removing(self) -> bool:
        return self._removing is not None and not self._removing.done()

    async def _give_back(self, extent: Extent, cache: Cache | None = None) -> None:
        """A place that was not written to its end. Without its first block no scan finds what did get there."""
        failed_syncs, is_erased = self._index.failed_syncs, False
        try:
            await self._worker.run(partial(self._slab.erase, extent))
            is_erased = True
            if cache is not None:
                await self._index.sync_since(failed_syncs)
        except DiskError as error:
            self._unerased |= {} if cache is None else {name_of(cache): cache}
            if not is_erased:
                self._keep_out(extent, error)
                return
        self._free(extent)

    async def _ensure_identity(self, space: Space) -> None:
        if space.namespace in self.identities:
            return
        payload = space.identity.canonical_json().encode()
        async with self._identity_turn:
            if space.namespace not in self.identities:
                await self._write_note(NoteKind.IDENTITY, payload)
                self.identities.add(space.namespace)

    async def _write_note(self, kind: NoteKind, payload: bytes, sequence: int | None = None) -> Note:
        note = self._slab.reserve_note(kind, payload, sequence)
        for _ in range(self._limits.evictions_per_reserve_max):
            if note is not None:
                break
            evicted = self._catalog.evict_ssd()
            if evicted is None:
                raise DiskFullError(f"no room on the slab for a note of {len(payload)} bytes: all of it is held")
            self._counters.ssd_evictions.count(Room.NOTE, *evicted)
            await self.settle()
            note = self._slab.reserve_note(kind, payload, sequence)
        assert note is not None
        failed_syncs = self._index.failed_syncs
        try:
            await self._worker.run(partial(self._slab.put_note, note))
            await self._index.apply(PutNote(note))
        except BaseException:
            await self._give_back(note.extent)
            raise
        if self._index.failed_syncs != failed_syncs:
            self.is_index_true = False
            await self._give_back(note.extent)
            await self._index.apply(RemoveNote(note.extent.offset))
            raise DiskError("a sync failed while a note was written, so it may not outlast a power failure; try again")
        return note

    # Removing

    def remove(self, removal: Removal, *, is_kept_out: bool = False) -> None:
        """Erase a record from the slab and the index, soon, and then its tombstone; its place is free after that."""
        if not is_kept_out:
            self._room.note_moving(removal.extent, removal.cache.family.space.identity.tenant)
        self._removals.append(_Departure(removal, self.tombstones.release(removal.cache), is_kept_out))
        if self._removing is None or self._removing.done():
            self._removing = asyncio.get_running_loop().create_task(self._drain_removals())

    async def settle(self) -> None:
        """Wait until all that was to be removed is."""
        if self._removing is not None:
            await asyncio.shield(self._removing)

    async def _drain_removals(self) -> None:
        while self._removals:
            batch = [self._removals.popleft() for _ in range(min(len(self._removals), REMOVALS_MAX))]
            try:
                await self._remove_batch(batch)
            except Exception:  # noqa: BLE001  a task's top: places that are not given back are room lost, no wrong byte
                self.is_index_true = False
                self._stuck += batch
                _LOG.exception("removing %d records from SSD failed; it is tried again behind others", len(batch))
            else:
                self._removals += self._stuck
                self._stuck.clear()

    async def _remove_batch(self, batch: Sequence["_Departure"]) -> None:
        """Tombstones go after all records; where one cannot be erased, its key's tombstone stays."""
        records, failed_syncs = [one.removal.extent for one in batch], self._index.failed_syncs
        failures = await self._worker.run(partial(erase_all, self._slab, records))
        self._killer.reach(KillPoint.AFTER_ERASE)
        left = {name_of(one.removal.cache) for one in batch if one.removal.extent in failures}
        doubtful = self._doubt(batch, left)
        notes = [one.note.extent for one in batch if one.note is not None and one.note.payload not in left]
        if notes:
            await self._index.sync_since(
                failed_syncs
            )  # the device must not take their end before that of what they bury
            failures |= await self._worker.run(partial(erase_all, self._slab, notes))
        changes: list[Change] = [_without(one.removal) for one in batch]
        await self._index.apply(*changes, *(RemoveNote(extent.offset) for extent in notes))
        if self._index.failed_syncs == failed_syncs:
            for name in doubtful:
                self._unerased.pop(name, None)
        kept_out = {one.removal.extent for one in batch if one.is_kept_out}
        for extent in (*records, *notes):
            if extent in kept_out:
                continue
            if extent in failures:
                self._keep_out(extent, failures[extent])
            else:
                self._free(extent)
                self._counters.demotions.erased += 1

    def _doubt(self, batch: Sequence["_Departure"], left: set[bytes]) -> set[bytes]:
        """Note what may still be found by a start; returns the names that are cleared if all of it is synced."""
        names = {name_of(one.removal.cache): one.removal.cache for one in batch}
        doubtful = names.keys() - left - self._unerased.keys() if self._index.is_durable else set[bytes]()
        self._unerased |= {name: cache for name, cache in names.items() if name in left or name in doubtful}
        return doubtful

    def _free(self, extent: Extent) -> None:
        self._slab.free(extent)
        self._room.forget_moving(extent)

    def _keep_out(self, extent: Extent, error: DiskError) -> None:
        self._room.forget_moving(extent)
        self.is_index_true = False  # it may hold a whole record that the index does not name: the next start must look
        self._counters.quarantined_bytes += extent.length
        _LOG.warning("%s of the slab could not be erased, it stays out of use until the next start: %s", extent, error)

    async def quarantine(self, cache: Cache, extent: Extent) -> None:
        """Never read this place again in this boot: erased and out of the index, but its room is not given away."""
        self._counters.quarantined_bytes += extent.length
        self.remove(Removal(cache, extent), is_kept_out=True)
        await self.settle()

    # Deleting

    def burials(self, caches: Iterable[Cache], is_meant: Callable[[Cache], bool]) -> list[Burial]:
        """What is to be done for caches that were just hidden for good, and for all that is out of sight and meant.

        Call it before anything else happens: what is stored anew from now on must not be buried.
        """
        named = defaultdict[bytes, dict[Cache, None]](dict)
        out_of_sight = (*self._catalog.hidden, *self._catalog.superseded.old, *self.writing)
        for one in (*caches, *(one for one in out_of_sight if one.is_hidden and is_meant(one))):
            named[name_of(one)][one] = None
        for name, one in self._unerased.items():
            if is_meant(one):
                named.setdefault(name, {})
        found = []
        for name, ones in named.items():
            self._slab.next_sequence()  # of a record that is written later: see write
            tombstone = self._slab.next_sequence()
            self._catalog.hidden.update((one, tombstone) for one in ones if one in self._catalog.hidden)
            found.append(Burial(name, tombstone, tuple(ones)))
        return found

    async def unearth(self, burial: Burial) -> None:
        """Have erased, soon, what nothing stands on; what is being written goes when that ends."""
        for cache in burial.caches:
            if cache in self.writing:
                await asyncio.wait([self.writing[cache]])
            self._catalog.drop_superseded(cache)
            if cache.is_on_ssd and not cache.mirrors and cache not in self._catalog.arriving:
                self._catalog.drop_ssd(cache)

    async def bury(self, burial: Burial) -> None:
        """Mark by a tombstone what stays: others stand on it, or it cannot be erased. Raises DiskError.

        When all removals have settled and this returns, no restart brings the key back.
        """
        staying = [one for one in burial.caches if self._is_on_slab(one) and one not in self.tombstones]
        if staying:
            await self._put_tombstone(staying, burial.tombstone)
            for one in staying:
                await self._drop_idle_tombstone(one)
        if burial.name in self._unerased:  # it stays there: of several such records this may not bury the last
            await self._write_note(NoteKind.TOMBSTONE, burial.name, burial.tombstone)

    def _is_on_slab(self, cache: Cache) -> bool:
        return cache.is_on_ssd or cache in self._catalog.superseded.old

    async def _put_tombstone(self, caches: Sequence[Cache], sequence: int) -> None:
        """One for all that is on the slab of one key, or is about to be."""
        note = await self._write_note(NoteKind.TOMBSTONE, name_of(caches[0]), sequence)
        for cache in caches:
            self.tombstones.add(cache, note)

    async def _drop_idle_tombstone(self, cache: Cache) -> None:
        """Its record is not on the slab, or went while the tombstone was written."""
        if cache not in self.tombstones or self._is_on_slab(cache):
            return
        await self.settle()  # the record goes first
        await self._index.sync_since(self._index.failed_syncs)
        is_needed = self._is_on_slab(cache) or name_of(cache) in self._unerased
        note = None if is_needed else self.tombstones.release(cache)
        if note is not None:
            await self._give_back(note.extent)
            await self._index.apply(RemoveNote(note.extent.offset))


def _without(removal: Removal) -> RemoveRecord:
    return RemoveRecord(removal.cache.family.space.namespace, removal.cache.key, removal.extent.offset)
