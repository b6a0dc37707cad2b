"""Promotion: records that a lookup found on SSD are read into the arena while the client already restores them.

The state is the loop's; pieces are read and verified on I/O threads. A cache on its way is held until all pieces are
done, whatever becomes of the lease, since threads write into its extent.
"""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Protocol

from kvservice.allocation import Allocation
from kvservice.caches import Cache
from kvservice.catalog import Catalog
from kvservice.loads import Load
from kvservice.lookup import FROM_SSD
from kvservice.model.cache import Extent, MasterReference
from kvservice.model.errors import CorruptError, DiskError, KVServiceError
from kvservice.stats.counters import Counters
from kvservice.storage.arrival import RecordArrival
from kvservice.storage.buffer import Bytes
from kvservice.worker import OrderedWork, Worker

TURNS_A_PIECE = 4
"""A lookup's second pieces come after the first ones of the four lookups behind it: none starves, none hogs."""


class PieceReader(Protocol):
    """Where records are read from, piece by piece; storage.slab.Slab is one. Any thread may read."""

    def pieces(self, extent: Extent) -> list[tuple[int, int]]:
        """(start, end) in the record."""

    def read_piece(self, extent: Extent, start: int, end: int, target: Bytes) -> None:
        """Fill ``target`` with the record's bytes [start, end). Raises DiskError."""


class Promotion:
    """Loads from SSD. ``quarantine`` takes the place of a record that could not be read off the slab."""

    def __init__(
        self,
        source: PieceReader,
        catalog: Catalog,
        allocation: Allocation,
        worker: Worker,
        counters: Counters,
        clock: Callable[[], float],
        quarantine: Callable[[Cache, Extent], Awaitable[None]],
    ) -> None:
        self._source = source
        self._catalog = catalog
        self._allocation = allocation
        self._pieces = OrderedWork(worker)
        self._counters = counters
        self._clock = clock
        self._quarantine = quarantine
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, cache: Cache, turn: int = 0) -> Load | None:
        """Read a held cache's record into the arena, or join the load that does; None if leases leave no room.

        ``turn``: the lookup's number. All first pieces of one lookup are read before its second ones, since a restore
        writes layer after layer of all records; a later lookup waits for the earlier one's, a little.
        """
        arriving = self._catalog.arriving
        if cache in arriving:
            return arriving[cache]
        extent = self._allocation.take_for_load(cache)
        if extent is None:
            return None
        self._catalog.hold(cache)
        self._catalog.set_host(cache, extent.offset)
        load = arriving[cache] = Load(cache, FROM_SSD, turn)
        self._counters.loads.begun += 1
        self._counters.loads.staged += extent.offset >= self._allocation.tier.staging_offset
        task = asyncio.get_running_loop().create_task(self._run(load, cache.ssd_extent))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return load

    async def _run(self, load: Load, extent: Extent) -> None:
        cache, counters, started_s = load.cache, self._counters.loads, self._clock()
        error: KVServiceError | None = None
        try:
            error = await self._read(load, extent)
        finally:
            del self._catalog.arriving[cache]
            if error is None and load.layers < cache.family.space.geometry.layers:
                error = DiskError(f"cache {cache}: reading it was given up, the node is stopping")
                self._catalog.condemn(cache)
            counters.done += 1
            counters.record_bytes += cache.record_bytes
            counters.seconds += self._clock() - started_s
            quarantined = None if error is None else self._condemn(cache, error)
            load.finish(error)
            self._catalog.unhold(cache)
        if quarantined is not None:
            await self._quarantine(cache, quarantined)

    async def _read(self, load: Load, extent: Extent) -> KVServiceError | None:
        """The first thing that went wrong; reading is over, on every thread, when this returns."""
        cache, source = load.cache, self._source
        view = self._allocation.tier.view(cache.extent)
        master = cache.master
        reference = None if master is None else MasterReference(master.context, master.generation)
        arrival = RecordArrival(view, cache.family.space.namespace, cache.key, cache.generation, reference)

        async def read(index: int, start: int, end: int) -> None:
            job = partial(_read_piece, source, extent, start, end, view, arrival)
            load.advance(await self._pieces.run(load.turn + index * TURNS_A_PIECE, job))

        pieces = enumerate(source.pieces(extent))
        results = await asyncio.gather(*(read(index, *piece) for index, piece in pieces), return_exceptions=True)
        for result in results:
            if isinstance(result, KVServiceError):
                return result
            if isinstance(result, BaseException):
                raise result
        return None

    def _condemn(self, cache: Cache, error: KVServiceError) -> Extent | None:
        """Nothing of the record is ever read again, whether its bytes are wrong or the disk does not give them."""
        self._counters.loads.failed += 1
        if cache in self._catalog.condemned:
            return None  # not read to its end, and not known to be wrong
        self._counters.corrupt["ssd"] += isinstance(error, CorruptError)
        extent = self._catalog.quarantine_ssd(cache) if cache.is_on_ssd else None
        self._catalog.hide_with_mirrors(cache)
        return extent

    async def stop(self) -> None:
        """Wait for the threads; what is not whole then is dropped with its leases."""
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _read_piece(source: PieceReader, extent: Extent, start: int, end: int, view: Bytes, arrival: RecordArrival) -> int:
    source.read_piece(extent, start, end, view[start:end])
    return arrival.arrived(start, end)
