"""What threads do at the slab for demotion: write a verified record, erase places. They touch bytes and no state."""

from collections.abc import Iterable

from kvservice.model.cache import Extent
from kvservice.model.errors import CorruptError, DiskError
from kvservice.storage.buffer import Bytes
from kvservice.storage.record import RecordReader
from kvservice.storage.slab import Slab
from kvservice.storage.slab_format import Stamp
from kvservice.storage.ssd_entry import SsdEntry


def write_record(slab: Slab, extent: Extent, view: Bytes, sequence: int, generation: int, prefill_s: float) -> SsdEntry:
    """Verify a record where it lies, and write it. Raises CorruptError before the first byte is written."""
    reader = RecordReader(view)
    reader.verify()
    if reader.generation != generation:
        raise CorruptError(f"{reader}: generation {reader.generation:016x} where {generation:016x} was committed")
    slab.write(extent, view, Stamp(sequence, reader.header_checksum, prefill_s))
    return SsdEntry(reader.meta, extent, generation, reader.header_checksum, sequence, prefill_s)


def erase_all(slab: Slab, extents: Iterable[Extent]) -> dict[Extent, DiskError]:
    """Those that could not be erased, and why."""
    failures: dict[Extent, DiskError] = {}
    for extent in extents:
        try:
            slab.erase(extent)
        except DiskError as error:
            failures[extent] = error
    return failures
