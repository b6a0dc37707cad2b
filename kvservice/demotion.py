"""Demotion: records of the host arena are written to the slab, and what nobody needs any more is erased from it.

The data first, then its index entry, then the catalog; masters before their mirrors. A cache is held while a thread
reads it. Nothing here may fail a client: what cannot be written stays where it is, and is counted by reason.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from kvservice.caches import Cache, Space, group_of
from kvservice.catalog import Catalog, Removal
from kvservice.index_writer import IndexWriter
from kvservice.killpoints import Killer, KillPoint
from kvservice.limits import NodeLimits
from kvservice.model.cache import Extent
from kvservice.model.errors import CorruptError, DiskError, DiskFullError
from kvservice.model.identity import Namespace
from kvservice.stats.counters import Counters
from kvservice.storage.admission import Admission, NotAdmitted
from kvservice.storage.buffer import Bytes
from kvservice.storage.host_tier import HostTier
from kvservice.storage.record import RecordReader
from kvservice.storage.slab import Slab
from kvservice.storage.slab_format import Note, NoteKind, Stamp, tombstone_payload
from kvservice.storage.ssd_entry import SsdEntry
from kvservice.storage.ssd_index import Change, PutNote, PutRecord, RemoveNote, RemoveRecord
from kvservice.worker import Worker

_LOG = logging.getLogger(__name__)
REMOVALS_MAX = 64
"""Records that are erased before their index entries go in one batch."""


class Demotion:
    """Writes caches to the slab, one group member after the other, and erases. Owned by the loop.

    ``writing``: caches that are being written, each with the future of its end. ``is_index_true``: no removal failed
    half way, so the index names nothing that is not there.
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
    ) -> None:
        self.writing: dict[Cache, asyncio.Future[bool]] = {}
        self.identities: set[Namespace] = set()
        self.is_index_true = True
        self.tombstones: dict[Cache, Note] = {}
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
        self._removals: deque[Removal] = deque()
        self._removing: asyncio.Task[None] | None = None
        self._identity_turn = asyncio.Lock()

    # Writing

    async def write(self, cache: Cache, *, is_required: bool = False) -> bool:
        """Bring a cache, and before it the master it stands on, to the slab. Is it there now?

        ``is_required``: admission's questions of use and budget are not asked.
        """
        if cache.is_on_ssd:
            return True
        if cache in self.writing:
            return await asyncio.shield(self.writing[cache])
        if cache.is_hidden or not self._catalog.is_readable(cache):
            return False
        done = self.writing[cache] = asyncio.get_running_loop().create_future()
        self._catalog.hold(cache)
        is_there = False
        try:
            is_there = await self._write_held(cache, is_required=is_required)
        finally:
            del self.writing[cache]
            done.set_result(is_there)
            self._catalog.unhold(cache)
        return is_there

    async def _write_held(self, cache: Cache, *, is_required: bool) -> bool:
        is_required = is_required or cache in self._catalog.superseded
        if cache.master is not None:
            if not await self.write(cache.master, is_required=is_required):
                return False
            self._killer.reach(KillPoint.AFTER_MASTER)
            is_required = True  # a fortieth of what is there already
        if not self._is_admitted(cache, is_required=is_required):
            return False
        try:
            return await self._write_admitted(cache)
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
        if cache.record_bytes > self._slab.capacity_bytes:
            self.admission.refuse(NotAdmitted.TOO_LARGE)
            return False
        return self.admission.decide(cache.record_bytes, group_of(cache).uses, is_required=is_required) is None

    async def _write_admitted(self, cache: Cache) -> bool:
        await self._ensure_identity(cache.family.space)
        extent = await self._reserve(cache.record_bytes)
        if extent is None:
            self.admission.refuse(NotAdmitted.NO_ROOM)
            return False
        started_s, view = self._clock(), self._tier.view(cache.extent)
        try:
            job = partial(_write, self._slab, extent, view, self._slab.next_sequence(), cache.generation)
            entry = await self._worker.run(partial(job, cache.prefill_s))
            self._killer.reach(KillPoint.AFTER_DATA)
            await self._index.apply(PutRecord(entry))
        except BaseException:
            await self._give_back(extent)
            raise
        self._killer.reach(KillPoint.AFTER_INDEX)
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
        self._catalog.set_ssd(cache, extent.offset)
        return True

    async def _reserve(self, record_bytes: int) -> Extent | None:
        """A place on the slab, made by evicting groups; None if what is held leaves none."""
        for _ in range(self._limits.evictions_per_reserve_max):
            extent = self._slab.reserve(record_bytes)
            if extent is not None:
                return extent
            evicted = self._catalog.evict_ssd()
            if evicted is None:
                return None
            self._counters.ssd_evictions.count(evicted.caches, evicted.record_bytes, evicted.lost)
            await self.settle()
        return None

    async def _give_back(self, extent: Extent) -> None:
        """A place that was not written to its end. Without its first block no scan finds what did get there."""
        try:
            await self._worker.run(partial(self._slab.erase, extent))
        except DiskError as error:
            self._keep_out(extent, error)
        else:
            self._slab.free(extent)

    async def _ensure_identity(self, space: Space) -> None:
        if space.namespace in self.identities:
            return
        payload = space.identity.canonical_json().encode()
        async with self._identity_turn:
            if space.namespace not in self.identities:
                await self._write_note(NoteKind.IDENTITY, payload)
                self.identities.add(space.namespace)

    async def _write_note(self, kind: NoteKind, payload: bytes) -> Note:
        note = self._slab.reserve_note(kind, payload)
        for _ in range(self._limits.evictions_per_reserve_max):
            if note is not None:
                break
            if self._catalog.evict_ssd() is None:
                raise DiskFullError(f"no room on the slab for a note of {len(payload)} bytes: all of it is held")
            await self.settle()
            note = self._slab.reserve_note(kind, payload)
        assert note is not None
        try:
            await self._worker.run(partial(self._slab.put_note, note))
            await self._index.apply(PutNote(note))
        except BaseException:
            await self._give_back(note.extent)
            raise
        return note

    # Removing

    def remove(self, removal: Removal) -> None:
        """Erase a record from the slab and the index, soon; its place is free after that."""
        self._removals.append(removal)
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
                _LOG.exception("removing records from SSD failed; their room is lost until the next start")

    async def _remove_batch(self, batch: Sequence[Removal]) -> None:
        notes = {one.cache: self.tombstones.pop(one.cache) for one in batch if one.cache in self.tombstones}
        extents = [*(one.extent for one in batch), *(note.extent for note in notes.values())]
        failures = await self._worker.run(partial(_erase_all, self._slab, extents))
        self._killer.reach(KillPoint.AFTER_ERASE)
        changes: list[Change] = [
            RemoveRecord(one.cache.family.space.namespace, one.cache.key, one.extent.offset) for one in batch
        ]
        await self._index.apply(*changes, *(RemoveNote(note.extent.offset) for note in notes.values()))
        for extent in extents:
            if extent in failures:
                self._keep_out(extent, failures[extent])
            else:
                self._slab.free(extent)
                self._counters.demotions.erased += 1

    def _keep_out(self, extent: Extent, error: DiskError) -> None:
        self._counters.quarantined_bytes += extent.length
        _LOG.warning("%s of the slab could not be erased, it stays out of use until the next start: %s", extent, error)

    async def quarantine(self, cache: Cache, extent: Extent) -> None:
        """Never read this place again in this boot: erased and out of the index, but its room is not given away."""
        self._counters.quarantined_bytes += extent.length
        await self._worker.run(partial(_erase_all, self._slab, [extent]))
        await self._index.apply(RemoveRecord(cache.family.space.namespace, cache.key, extent.offset))

    async def bury(self, cache: Cache) -> None:
        """A cache was deleted. Return when no restart brings it back.

        A master that mirrors stand on stays, marked by a tombstone; what is being read or written goes when that ends.
        """
        if cache in self.writing:
            await asyncio.shield(self.writing[cache])
        self._catalog.drop_superseded(cache)
        if not cache.is_on_ssd or cache in self._catalog.arriving:
            return
        if not cache.mirrors:
            self._catalog.drop_ssd(cache)
        elif cache not in self.tombstones:
            payload = tombstone_payload(cache.family.space.namespace, cache.key)
            note = await self._write_note(NoteKind.TOMBSTONE, payload)
            if cache.is_on_ssd:
                self.tombstones[cache] = note
            else:  # the last mirror went meanwhile
                await self._give_back(note.extent)
                await self._index.apply(RemoveNote(note.extent.offset))


def _write(slab: Slab, extent: Extent, view: Bytes, sequence: int, generation: int, prefill_s: float) -> SsdEntry:
    """Verify a record where it lies, and write it. Raises CorruptError before the first byte is written."""
    reader = RecordReader(view)
    reader.verify()
    if reader.generation != generation:
        raise CorruptError(f"{reader}: generation {reader.generation:016x} where {generation:016x} was committed")
    slab.write(extent, view, Stamp(sequence, reader.header_checksum, prefill_s))
    return SsdEntry(reader.meta, extent, generation, reader.header_checksum, sequence, prefill_s)


def _erase_all(slab: Slab, extents: Iterable[Extent]) -> dict[Extent, DiskError]:
    """Those that could not be erased, and why."""
    failures: dict[Extent, DiskError] = {}
    for extent in extents:
        try:
            slab.erase(extent)
        except DiskError as error:
            failures[extent] = error
    return failures
