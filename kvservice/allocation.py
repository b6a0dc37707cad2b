"""Room for records: extents of the host tier, made by evicting groups where none is free. State only."""

from kvservice.catalog import Catalog
from kvservice.limits import NodeLimits
from kvservice.model.cache import Extent
from kvservice.model.errors import CapacityError, InvalidInputError, RecordTooLargeError
from kvservice.stats.counters import Counters
from kvservice.storage.host_tier import HostTier


class Allocation:
    """Hands out extents. ``unpublished`` are those that no cache has: reserved, being verified, or being folded."""

    def __init__(self, tier: HostTier, catalog: Catalog, limits: NodeLimits, counters: Counters) -> None:
        self.tier = tier
        self.unpublished: dict[int, Extent] = {}
        self.unpublished_bytes = 0
        self._catalog = catalog
        self._limits = limits
        self._counters = counters

    def take(self, length: int) -> Extent:
        """An unpublished extent. Evicts idle groups, oldest first, until it fits; raises CapacityError otherwise.

        Evicts nothing if what is held leaves too little room whatever goes.
        """
        if length < 1:
            raise InvalidInputError(f"a record has 1 byte or more, not {length}")
        capacity = self.tier.capacity_bytes
        if length > capacity:
            raise RecordTooLargeError(f"a record of {length} bytes never fits in a tier of {capacity}; cut the segment")
        held = self._catalog.totals.held_bytes + self.unpublished_bytes
        extent = None
        if length <= capacity - held:
            extent = self._evict_until_it_fits(length)
        if extent is None:
            raise CapacityError(
                f"no room for {length} bytes: of {capacity}, {held} are leased or being written. "
                "Retry when leases are released, or give the host tier more bytes"
            )
        self.unpublished[extent.offset] = extent
        self.unpublished_bytes += length
        return extent

    def _evict_until_it_fits(self, length: int) -> Extent | None:
        for _ in range(self._limits.evictions_per_reserve_max):
            extent = self.tier.reserve(length)
            if extent is not None:
                return extent
            evicted = self._catalog.evict_oldest()
            if evicted is None:
                return None
            self._counters.evicted_groups += 1
            self._counters.evicted_caches += evicted.caches
            self._counters.evicted_bytes += evicted.record_bytes
        return None

    def hand_over(self, extent: Extent) -> None:
        """The extent now belongs to a published cache."""
        del self.unpublished[extent.offset]
        self.unpublished_bytes -= extent.length

    def give_back(self, extent: Extent) -> None:
        """Free an unpublished extent."""
        self.hand_over(extent)
        self.tier.free(extent)
