"""The scrubber: reads what lies in the tiers once more, slowly, and looks whether it still is what was committed.

A wrong copy is never found again. Where the other tier has a right one, that is what lookups get, and the slab's is
written anew from memory.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from functools import partial

import numpy as np

from kvservice.caches import Cache
from kvservice.catalog import Catalog
from kvservice.demotion import Demotion
from kvservice.model.cache import Extent, MasterReference
from kvservice.model.errors import CorruptError, DiskError, InvalidInputError, RecordFormatError
from kvservice.promotion import PieceReader
from kvservice.stats.counters import Counters
from kvservice.storage.arrival import RecordArrival
from kvservice.storage.buffer import Bytes, round_up
from kvservice.storage.disk import BLOCK_BYTES, block_buffer
from kvservice.storage.host_tier import HostTier
from kvservice.storage.rate import ByteRate
from kvservice.storage.record import RecordReader
from kvservice.worker import Worker

_LOG = logging.getLogger(__name__)
IDLE_S = 60.0
"""After a pass, and while there is nothing to look at."""


class Scrubber:
    """Goes through all caches again and again, at ``rate`` bytes a second. Owned by the loop; reads on the worker.

    Without ``source`` and ``demotion`` there is only the host tier. Without ``rate`` it only checks when asked.
    ``held``: the caches that are being looked at.
    """

    def __init__(
        self,
        source: PieceReader | None,
        demotion: Demotion | None,
        catalog: Catalog,
        tier: HostTier,
        worker: Worker,
        rate: ByteRate | None,
        counters: Counters,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.held: list[Cache] = []
        self._source = source
        self._catalog = catalog
        self._tier = tier
        self._demotion = demotion
        self._worker = worker
        self._rate = rate
        self._counters = counters
        self._pause = pause
        self._buffer = np.empty(0, np.uint8)

    async def run_forever(self) -> None:
        """Until cancelled. A failed pass is logged and begun anew."""
        while True:
            try:
                await self.run_once()
            except Exception:  # noqa: BLE001  a task's top: without the scrubber reads still verify
                _LOG.exception("a pass of the scrubber failed. Please report this")
            await self._pause(IDLE_S)

    async def run_once(self) -> None:
        """One pass over what is held."""
        for cache in self._held():
            assert self._rate is not None, "only a scrubber with a rate runs"
            await self._pause(self._rate.take(cache.record_bytes * (cache.is_on_host + cache.is_on_ssd)))
            if not cache.is_hidden or cache.mirrors:  # it may have gone since the pass began
                await self.check(cache)
        self._counters.scrub_passes += 1

    def _held(self) -> Iterator[Cache]:
        """All caches, and those that come meanwhile or not. A million families are listed in 10 ms, once a pass."""
        for space in list(self._catalog.spaces.values()):
            for family in list(space.families.values()):
                yield from list(family.members.values())
        yield from list(self._catalog.hidden)  # deleted masters that mirrors stand on

    async def check(self, cache: Cache) -> bool:
        """Look at every copy of one cache; was all of it right? Raises nothing for what is wrong."""
        self._catalog.hold(cache)
        self.held.append(cache)
        try:
            is_host_right = await self._check_host(cache)
            is_ssd_right = await self._check_ssd(cache)
        finally:
            self.held.remove(cache)
            self._catalog.unhold(cache)
        self._counters.scrubbed_caches += 1
        if not is_ssd_right and is_host_right and self._demotion is not None:
            await self._demotion.write(cache, is_required=True)
        return is_host_right and is_ssd_right

    async def _check_host(self, cache: Cache) -> bool:
        if not self._catalog.is_whole(cache):
            return True
        view = self._tier.view(cache.extent)
        self._counters.scrubbed_bytes += cache.record_bytes
        if await self._worker.run(partial(_is_intact, view, cache.generation)):
            return True
        self._counters.corrupt["host"] += 1
        self._catalog.condemn(cache)
        return False

    async def _check_ssd(self, cache: Cache) -> bool:
        if self._source is None or not cache.is_on_ssd:
            return True
        extent = cache.ssd_extent
        self._counters.scrubbed_bytes += cache.record_bytes
        try:
            await self._worker.run(partial(self._read, self._source, cache, extent))
        except (CorruptError, DiskError, InvalidInputError) as error:
            if cache.ssd_offset != extent.offset:
                return True  # it went while it was read
            _LOG.warning("scrubbing found a wrong record on SSD, it is quarantined: %s", error)
            self._counters.corrupt["ssd"] += isinstance(error, CorruptError)
            await self._lose(cache)
            return False
        return True

    async def _lose(self, cache: Cache) -> None:
        extent = self._catalog.quarantine_ssd(cache)
        if not self._catalog.is_whole(cache):
            self._catalog.hide_with_mirrors(cache)
        assert self._demotion is not None, "nothing is on a slab that is not there"
        await self._demotion.quarantine(cache, extent)

    def _read(self, source: PieceReader, cache: Cache, extent: Extent) -> None:
        """Raise CorruptError or DiskError unless the record on the slab is what was committed; on the worker."""
        if len(self._buffer) < extent.length:
            self._buffer = block_buffer(round_up(extent.length, BLOCK_BYTES))
        target = self._buffer[: extent.length]
        master = cache.master
        reference = None if master is None else MasterReference(master.context, master.generation)
        arrival = RecordArrival(target, cache.family.space.namespace, cache.key, cache.generation, reference)
        for start, end in source.pieces(extent):
            source.read_piece(extent, start, end, target[start:end])
            arrival.arrived(start, end)


def _is_intact(view: Bytes, generation: int) -> bool:
    try:
        reader = RecordReader(view)
        reader.verify()
    except (CorruptError, RecordFormatError):
        return False
    return reader.generation == generation
