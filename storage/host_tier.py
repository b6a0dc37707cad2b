"""The host tier: extents of the arena that clients map. A copy here is one np.copyto; a view is none."""

import sys

import numpy as np

from kvservice.model.cache import Extent
from kvservice.storage.arena import Arena, ExtentAllocator
from kvservice.storage.buffer import Bytes
from kvservice.storage.tier import not_reserved, require_length


class HostTier:
    """An allocator over an arena. Threads and errors: see Tier. Does not close the arena.

    The last ``staging_bytes`` of the arena are for records on their way through: no reservation takes them, so that a
    load finds room however full the tier is. Extents there start at ``staging_offset`` or behind;
    without such a part none does.
    """

    name = "host"

    def __init__(self, arena: Arena, staging_bytes: int = 0) -> None:
        self.arena = arena
        self.allocator = ExtentAllocator(arena.bytes - staging_bytes)
        self.capacity_bytes = self.allocator.capacity_bytes
        self.staging_offset = self.capacity_bytes if staging_bytes else sys.maxsize
        self.staging = ExtentAllocator(staging_bytes) if staging_bytes else None

    @property
    def used_bytes(self) -> int:
        """See Tier."""
        return self.allocator.used_bytes

    def reserve(self, length: int) -> Extent | None:
        """See Tier. The extent starts on a page."""
        return self.allocator.allocate(length)

    def reserve_staging(self, length: int) -> Extent | None:
        """An extent for a record on its way through; None if there is no room."""
        found = None if self.staging is None else self.staging.allocate(length)
        return None if found is None else Extent(found.offset + self.staging_offset, length)

    def write(self, extent: Extent, source: Bytes) -> None:
        """See Tier."""
        require_length(extent, source)
        np.copyto(self.view(extent), source)

    def read(self, extent: Extent, target: Bytes) -> None:
        """See Tier."""
        require_length(extent, target)
        np.copyto(target, self.view(extent))

    def free(self, extent: Extent) -> None:
        """See Tier. Drop views of it first: the bytes will be another record's."""
        if self.staging is not None and extent.offset >= self.staging_offset:
            self.staging.free(self._in_staging(extent))
        else:
            self.allocator.free(extent)

    def holds(self, extent: Extent) -> bool:
        """Is this very extent reserved, in the tier or in its staging? Any thread may ask."""
        if self.staging is not None and extent.offset >= self.staging_offset:
            return self.staging.holds(self._in_staging(extent))
        return self.allocator.holds(extent)

    def view(self, extent: Extent) -> Bytes:
        """The extent's bytes in place: writable uint8, no copy. Raises InvalidInputError if it is not reserved."""
        if not self.holds(extent):
            raise not_reserved(extent, self.name)
        return self.arena.slice(extent)

    def _in_staging(self, extent: Extent) -> Extent:
        return Extent(extent.offset - self.staging_offset, extent.length)
