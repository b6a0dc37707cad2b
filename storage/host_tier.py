"""The host tier: extents of the arena that clients map. A copy here is one np.copyto; a view is none."""

import numpy as np

from kvservice.model.cache import Extent
from kvservice.storage.arena import Arena, ExtentAllocator
from kvservice.storage.buffer import Bytes
from kvservice.storage.tier import not_reserved, require_length


class HostTier:
    """An allocator over an arena. Threads and errors: see Tier. Does not close the arena."""

    name = "host"

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.allocator = ExtentAllocator(arena.bytes)
        self.capacity_bytes = self.allocator.capacity_bytes

    @property
    def used_bytes(self) -> int:
        """See Tier."""
        return self.allocator.used_bytes

    def reserve(self, length: int) -> Extent | None:
        """See Tier. The extent starts on a page."""
        return self.allocator.allocate(length)

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
        self.allocator.free(extent)

    def view(self, extent: Extent) -> Bytes:
        """The extent's bytes in place: writable uint8, no copy. Raises InvalidInputError if it is not reserved."""
        if not self.allocator.holds(extent):
            raise not_reserved(extent, self.name)
        return self.arena.slice(extent)
