"""Finds what is whole on a slab whose index is not simply believed, and marks its places as taken. Reads only."""

import heapq
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from operator import attrgetter, itemgetter

from xxhash import xxh3_64

from kvservice.model.cache import CacheMeta, Extent
from kvservice.model.errors import CorruptError, DiskError
from kvservice.model.geometry import Geometry
from kvservice.model.identity import Namespace
from kvservice.storage.buffer import Bytes
from kvservice.storage.disk import block_buffer
from kvservice.storage.record import RecordHead
from kvservice.storage.record_writer import padding_of
from kvservice.storage.slab import PIECE_BYTES, Slab
from kvservice.storage.slab_format import FoundNote, FoundRecord, Lost, Note
from kvservice.storage.ssd_entry import SsdEntry

log = logging.getLogger(__name__)

Thing = SsdEntry | Note

VERIFIED_MAX = 64
"""Records that the index does not name are read in full, the last written first, up to so many: those of the last
moments. Older ones reached the device, or a reader will find that they did not: it verifies every layer."""


@dataclass(slots=True)
class FoundThings:
    """What lies on a slab, in places that do not overlap and are reserved. ``torn``: written, but not to the end.

    ``lost``: how many things of the index are not there. ``verified``: records read in full.
    """

    records: list[SsdEntry] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    torn: list[SsdEntry] = field(default_factory=list)
    lost: int = 0
    verified: int = 0
    scanned_bytes: int = 0
    unreadable_blocks: int = 0


def search_slab(slab: Slab, entries: Iterable[SsdEntry], notes: Iterable[Note]) -> FoundThings:
    """Look for what the index says, ``entries`` and ``notes``, and for what it does not say. Blocks.

    What differs from the index in anything counts as not named by it, and as it is on the slab.
    """
    things: list[Thing] = [*entries, *notes]
    said = {thing.extent.offset: thing for thing in sorted(things, key=attrgetter("sequence"))}
    scan = slab.scan({offset: thing.extent for offset, thing in said.items()})
    found, shared, unnamed = FoundThings(), _Shared(), _Newest(VERIFIED_MAX)
    for one in scan:
        match one:
            case Lost():
                log.info("the index names %s, and the slab does not have it: %s", one.extent, one.reason)
                found.lost += 1
            case FoundNote(note):
                found.notes.append(note)
            case FoundRecord():
                entry, is_named = _entry(one, said.get(one.extent.offset), shared)
                found.records.append(entry)
                if not is_named:
                    unnamed.add(entry, one.head)
    found.scanned_bytes, found.unreadable_blocks = scan.read_bytes, scan.unreadable_blocks
    reserve_all(slab, found.records, found.notes)
    _set_torn_apart(slab, found, unnamed)
    return found


def reserve_all(slab: Slab, records: Iterable[SsdEntry], notes: Iterable[Note]) -> None:
    """Reserve the places of all. InvalidInputError, and none is, if two overlap or one is no place on the slab."""
    slab.adopt_all([*(record.extent for record in records), *(note.extent for note in notes)])


def verify_record(slab: Slab, extent: Extent, head: RecordHead) -> None:
    """Read a record and raise CorruptError unless every section has its checksum and all padding is zero. Blocks.

    ``head``: verified already. Needs one piece of memory, whatever the record's size. Raises DiskError.
    """
    buffer, sections = block_buffer(PIECE_BYTES), _Sections(head)
    for start, end in slab.pieces(extent):
        piece = buffer[: end - start]
        slab.read_piece(extent, start, end, piece)
        sections.feed(start, piece)
    assert sections.layer == len(head.layout.section_bytes), (sections.layer, extent)


class _Sections:
    """Checksums the sections of a record whose bytes come in order, in pieces."""

    def __init__(self, head: RecordHead) -> None:
        self.layer = 0
        self._head, self._hasher, self._padding = head, xxh3_64(), padding_of(head.layout)

    def feed(self, start: int, piece: Bytes) -> None:
        """The bytes of the record from ``start`` on, which is where the last piece ended. Raises CorruptError."""
        layout, end = self._head.layout, start + len(piece)
        while self.layer < len(layout.section_bytes):
            first = layout.section_offsets[self.layer]
            behind = first + layout.section_bytes[self.layer]
            self._hasher.update(_part(start, piece, first, behind).data)
            if behind > end:
                break
            self._close_layer()
        for first, behind in self._padding:
            if _part(start, piece, first, behind).any():
                raise CorruptError(f"cache {self._head.meta.key}: padding at {first} is not zero")

    def _close_layer(self) -> None:
        found, said = self._hasher.intdigest(), self._head.section_checksums[self.layer]
        if found != said:
            raise CorruptError(
                f"cache {self._head.meta.key}, layer {self.layer}: checksum {found:016x}, the header says {said:016x}"
            )
        self._hasher.reset()
        self.layer += 1


class _Shared:
    """One object for equal geometries and namespaces: a hundred thousand of them would take 200 MB."""

    def __init__(self) -> None:
        self._geometries: dict[Geometry, Geometry] = {}
        self._namespaces: dict[Namespace, Namespace] = {}

    def of(self, meta: CacheMeta) -> CacheMeta:
        """An equal meta."""
        geometry = self._geometries.setdefault(meta.geometry, meta.geometry)
        namespace = self._namespaces.setdefault(meta.namespace, meta.namespace)
        return replace(meta, geometry=geometry, namespace=namespace)


class _Newest:
    """Of the records that it is given, the ``limit`` that were written last."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._heap: list[tuple[int, int, SsdEntry, RecordHead]] = []

    def add(self, entry: SsdEntry, head: RecordHead) -> None:
        """Consider one more."""
        heapq.heappush(self._heap, (entry.sequence, entry.extent.offset, entry, head))
        if len(self._heap) > self._limit:
            heapq.heappop(self._heap)

    def all(self) -> list[tuple[SsdEntry, RecordHead]]:
        """Those, the last written first."""
        return [(entry, head) for _, _, entry, head in sorted(self._heap, key=itemgetter(0, 1), reverse=True)]


def _entry(found: FoundRecord, said: Thing | None, shared: _Shared) -> tuple[SsdEntry, bool]:
    """The entry of a found record; is it exactly what the index says?"""
    stamp = found.stamp
    entry = SsdEntry(
        found.head.meta,
        found.extent,
        found.head.generation,
        stamp.header_checksum,
        stamp.sequence,
        stamp.prefill_s,
    )
    if isinstance(said, SsdEntry) and replace(entry, is_deleted=said.is_deleted) == said:
        return said, True
    return replace(entry, meta=shared.of(entry.meta)), False


def _set_torn_apart(slab: Slab, found: FoundThings, unnamed: _Newest) -> None:
    for entry, head in unnamed.all():
        found.verified += 1
        try:
            verify_record(slab, entry.extent, head)
        except (CorruptError, DiskError) as error:
            log.warning("a record was not written to its end, or cannot be read: %s", error)
            found.torn.append(entry)
    places = {entry.extent.offset for entry in found.torn}
    found.records = [entry for entry in found.records if entry.extent.offset not in places]


def _part(start: int, piece: Bytes, first: int, behind: int) -> Bytes:
    """What of the record's bytes [first, behind) is in a piece that starts at ``start``."""
    return piece[max(first - start, 0) : max(behind - start, 0)]
