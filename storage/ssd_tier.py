"""The SSD tier: whole records on a slab. Reads and writes are I/O, straight to and from the array if it is aligned."""

import struct

from kvservice.model.cache import Extent
from kvservice.storage.buffer import Bytes
from kvservice.storage.record import PREFIX_BYTES
from kvservice.storage.slab import Slab, Stamp
from kvservice.storage.tier import require_length


class SsdTier:
    """A slab as a tier. Threads and errors: see Tier; DiskError where the disk fails. Does not close the slab."""

    name = "ssd"

    def __init__(self, slab: Slab) -> None:
        self.slab = slab
        self.capacity_bytes = slab.capacity_bytes

    @property
    def used_bytes(self) -> int:
        """See Tier. Footers are included."""
        return self.slab.used_bytes

    def reserve(self, length: int) -> Extent | None:
        """See Tier. At most ``slab.record_bytes_max``."""
        return self.slab.reserve(length)

    def write(self, extent: Extent, source: Bytes) -> None:
        """See Tier. Whoever knows more of the record than its bytes writes it with ``slab.write``."""
        require_length(extent, source)
        self.slab.write(extent, source, Stamp(self.slab.next_sequence(), _said_checksum(source), 0.0))

    def read(self, extent: Extent, target: Bytes) -> None:
        """See Tier."""
        require_length(extent, target)
        for start, end in self.slab.pieces(extent):
            self.slab.read_piece(extent, start, end, target[start:end])

    def free(self, extent: Extent) -> None:
        """See Tier. Writes one block: what was freed is never found again."""
        self.slab.erase(extent)
        self.slab.free(extent)


def _said_checksum(record: Bytes) -> int:
    """What a record's prefix gives as its header's checksum; what it means is the reader's matter."""
    if len(record) < PREFIX_BYTES:
        return 0
    return int(struct.unpack("<Q", record[PREFIX_BYTES - 8 : PREFIX_BYTES].tobytes())[0])
