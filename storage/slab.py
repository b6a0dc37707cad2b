"""The slab: records and notes on one preallocated file, so written that it says itself what on it is whole.

    slab.kv := superblock (extent | free)*         blocks of 4096 bytes; grammar of their bytes: slab_format.py

A record moves straight between an arena and the file. Nothing here holds on to payload or decides what to keep.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from uuid import UUID, uuid4

import numpy as np

from kvservice.model.cache import Extent
from kvservice.model.errors import CapacityError, ConfigError, DiskError, InvalidInputError
from kvservice.storage.arena import ExtentAllocator
from kvservice.storage.buffer import Bytes
from kvservice.storage.disk import BLOCK_BYTES, Disk, File, block_buffer
from kvservice.storage.slab_format import (
    FOOTER_BYTES,
    SUPERBLOCK_BYTES,
    Found,
    FoundNote,
    FoundRecord,
    Lost,
    Note,
    NoteKind,
    Stamp,
    Superblock,
    footer_bytes,
    note_bytes,
    read_superblock,
    require_stamp,
    superblock_bytes,
    taken_bytes,
    tombstone_of_payload,
    tombstone_payload,
)
from kvservice.storage.slab_scan import SlabScan
from kvservice.storage.tier import not_reserved, require_length

__all__ = [
    "PIECE_BYTES",
    "SLAB_NAME",
    "Found",
    "FoundNote",
    "FoundRecord",
    "Lost",
    "Note",
    "NoteKind",
    "Slab",
    "SlabScan",
    "Stamp",
    "taken_bytes",
    "tombstone_of_payload",
    "tombstone_payload",
]

SLAB_NAME = "slab.kv"
PIECE_BYTES = 2 << 20
"""What one call to the disk moves of a record: enough for the device's full rate, little enough to share it."""
SLAB_BYTES_MIN = 2 * BLOCK_BYTES

_ZEROS = block_buffer(BLOCK_BYTES)
_ZEROS.flags.writeable = False


class Slab:
    """Extents of a file. ``Extent.offset`` is a place in the file, ``Extent.length`` the record's bytes.

    One thread owns it: whatever takes a place or gives it back is called there, and ``scan``. Any thread may call
    ``write``, ``read_piece``, ``erase``, ``put_note``, ``punch``, ``sync`` and what only looks, at the same time for
    different extents; the caller keeps two of them off one extent. They block, release the GIL while bytes move, and
    raise InvalidInputError for an extent that is not reserved here, DiskError where the disk fails.
    """

    def __init__(self, file: File, superblock: Superblock, *, can_punch: bool) -> None:
        """Takes over ``file``. Everything behind the superblock is free, whatever lies there: see ``adopt``."""
        self.uuid: UUID = superblock.slab_uuid
        self.slab_bytes = superblock.slab_bytes
        self._file, self._can_punch = file, can_punch
        self._allocator = ExtentAllocator(superblock.slab_bytes)
        self._allocator.allocate_at(0, BLOCK_BYTES)
        self._sequence, self._sequence_lock = 0, threading.Lock()

    @classmethod
    def create(cls, disk: Disk, slab_bytes: int) -> "Slab":
        """A new slab of ``slab_bytes``, rounded down to whole blocks. DiskError if there is a file of its name.

        It starts as a slab of one block and grows: whenever the process dies, ``open`` takes it from there.
        """
        wanted = _whole_blocks(slab_bytes)
        with _closed_on_error(disk.open(SLAB_NAME, BLOCK_BYTES)) as file:
            return cls._fitted(disk, file, _new_superblock(file), wanted)

    @classmethod
    def open(cls, disk: Disk, slab_bytes: int) -> "Slab":
        """The slab that is there, grown to ``slab_bytes`` if those are more. Changes nothing else.

        Raises ConfigError, which says what to do, if the file is no slab of this version, has another size than its
        superblock says, or is larger than ``slab_bytes``; DiskFullError if it cannot grow.
        """
        wanted = _whole_blocks(slab_bytes)
        with _closed_on_error(disk.open(SLAB_NAME)) as file:
            superblock = _found_superblock(disk.folder / SLAB_NAME, file)
            return cls._fitted(disk, file, superblock or _new_superblock(file), wanted)

    @classmethod
    def _fitted(cls, disk: Disk, file: File, superblock: Superblock, wanted: int) -> "Slab":
        grown = _grow(disk.folder / SLAB_NAME, file, superblock, wanted)
        return cls(file, grown, can_punch=disk.facts.can_punch)

    @property
    def capacity_bytes(self) -> int:
        """Bytes for extents, their footers and rounding included."""
        return self._allocator.capacity_bytes - BLOCK_BYTES

    @property
    def used_bytes(self) -> int:
        """Bytes taken by extents, their footers and rounding included."""
        return self._allocator.used_bytes - BLOCK_BYTES

    @property
    def record_bytes_max(self) -> int:
        """The largest record that an empty slab has room for."""
        return self.capacity_bytes - FOOTER_BYTES

    def physical_bytes(self) -> int:
        """Bytes that the file takes on its file system."""
        return self._file.physical_bytes()

    def next_sequence(self) -> int:
        """A number above all that were given or found before. Any thread."""
        with self._sequence_lock:
            self._sequence += 1
            return self._sequence

    def continue_behind(self, sequence: int) -> None:
        """Never give ``sequence`` or a lower number again. ``scan`` does this for all that it finds. Any thread."""
        with self._sequence_lock:
            self._sequence = max(self._sequence, sequence)

    def reserve(self, record_bytes: int) -> Extent | None:
        """A place for a record of so many bytes, or None if no free stretch is long enough."""
        if record_bytes < 1:
            raise InvalidInputError(f"an extent has 1 byte or more, not {record_bytes}")
        taken = self._allocator.allocate(record_bytes + FOOTER_BYTES)
        return None if taken is None else Extent(taken.offset, record_bytes)

    def adopt(self, extent: Extent) -> None:
        """Reserve exactly this place, which a scan or the index named. InvalidInputError if part of it is taken."""
        if extent.length < 1:
            raise InvalidInputError(f"an extent has 1 byte or more, not {extent.length}")
        self._allocator.allocate_at(extent.offset, extent.length + FOOTER_BYTES)

    def adopt_all(self, extents: Iterable[Extent]) -> None:
        """As ``adopt``, all or none, in a seventh of the time."""
        given = list(extents)
        if any(extent.length < 1 for extent in given):
            raise InvalidInputError("an extent has 1 byte or more")
        self._allocator.allocate_all([_with_footer(extent) for extent in given])

    def holds(self, extent: Extent) -> bool:
        """Is this very extent reserved? Any thread."""
        return extent.offset >= BLOCK_BYTES and self._allocator.holds(_with_footer(extent))

    def free(self, extent: Extent) -> None:
        """Give the place back. What lies there is found by a scan until it is overwritten: ``erase`` it first."""
        self._require(extent)
        self._allocator.free(_with_footer(extent))

    def write(self, extent: Extent, record: Bytes, stamp: Stamp) -> None:
        """Write a whole record; not on the device before ``sync``. Fastest from a page boundary, as in an arena.

        The piece with the footer goes first and the one with the head last: if the process dies meanwhile, no scan
        finds the record. If it raises, the record may be there or not: ``erase`` the place before you free it.
        """
        self._require(extent)
        require_length(extent, record)
        require_stamp(stamp)
        tail = _tail(record, footer_bytes(self.uuid, extent.length, stamp))
        whole = extent.length // BLOCK_BYTES * BLOCK_BYTES
        stand_in = _stand_in(record)
        for start, end in reversed(_pieces(0, whole) or [(0, 0)]):
            sources = [stand_in(record[start:end])] if start < end else []
            self._file.write_from(extent.offset + start, [*sources, tail] if end == whole else sources)

    def pieces(self, extent: Extent) -> list[tuple[int, int]]:
        """(start, end) in the record of the pieces that ``read_piece`` is best asked for, in order."""
        return _pieces(0, extent.length)

    def read_piece(self, extent: Extent, start: int, end: int, target: Bytes) -> None:
        """Fill ``target`` with the record's bytes [start, end). Fastest into a page boundary, as in an arena.

        ``start``: on a block. Nothing is checked: the record's own checksums say whether these are its bytes.
        """
        self._require(extent)
        _require_piece(extent, start, end, target)
        if _is_on_blocks(target):
            self._read_blocks(extent.offset + start, target)
            return
        spare = block_buffer(min(PIECE_BYTES, end - start))
        for piece_start, piece_end in _pieces(start, end):
            piece = spare[: piece_end - piece_start]
            self._read_blocks(extent.offset + piece_start, piece)
            np.copyto(target[piece_start - start : piece_end - start], piece)

    def erase(self, extent: Extent) -> None:
        """Zero the first block, so that no scan ever finds a record or note here."""
        self._require(extent)
        self._file.write_from(extent.offset, [_ZEROS])

    def reserve_note(self, kind: NoteKind, payload: bytes, sequence: int | None = None) -> Note | None:
        """A place for a note, which is not written yet; None if there is no room. ``sequence``: given before."""
        sequence = self.next_sequence() if sequence is None else sequence
        extent = self.reserve(len(note_bytes(self.uuid, sequence, kind, payload)))
        return None if extent is None else Note(extent, sequence, kind, payload)

    def put_note(self, note: Note) -> None:
        """Write a reserved note; any thread. If it raises, no scan finds the note once its place is erased."""
        self._require(note.extent)
        data = note_bytes(self.uuid, note.sequence, note.kind, note.payload)
        blocks = block_buffer(taken_bytes(len(data)))
        blocks[: len(data)] = np.frombuffer(data, np.uint8)
        self._file.write_from(note.extent.offset, [blocks])

    def write_note(self, kind: NoteKind, payload: bytes) -> Note:
        """Reserve a place and write a note there; blocks. CapacityError if there is no room for it.

        If the disk fails, the place is given back if it could be erased; otherwise it stays taken until a restart.
        """
        note = self.reserve_note(kind, payload)
        if note is None:
            raise CapacityError(f"no room on the slab for a note of {len(payload)} bytes; evict a record, or grow it")
        try:
            self.put_note(note)
        except DiskError:
            with suppress(DiskError):
                self.erase(note.extent)
                self.free(note.extent)
            raise
        return note

    def scan(self, known: Mapping[int, Extent]) -> SlabScan:
        """Read what is on the slab; ``known``: extents by offset that must be there. See SlabScan for what it yields.

        Reads the file only: adopt what you keep, before anything is reserved. Sequence numbers that were found are
        not given again.
        """
        return SlabScan(self._file, self.uuid, known, self.continue_behind)

    def claim_free(self, start: int = 0) -> Extent | None:
        """Reserve the first free stretch from ``start`` on, for ``punch``; None if no more can be given back."""
        stretches = self._allocator.free_stretches() if self._can_punch else iter(())
        found = next((one for one in stretches if one[0] >= start), None)
        if found is None:
            return None
        extent = Extent(found[0], found[1] - FOOTER_BYTES)
        self.adopt(extent)
        return extent

    def punch(self, extent: Extent) -> None:
        """Give a reserved place back to the file system; any thread. Blocks (0.14 ms a MiB).

        A later write there needs room again and may raise DiskFullError: the extent then stays reserved and holds no
        record.
        """
        self._require(extent)
        self._file.punch(extent.offset, taken_bytes(extent.length))

    def punch_free(self) -> int:
        """Give all free stretches back to the file system; returns by how many bytes the file shrank there. Blocks."""
        before, extent = self._file.physical_bytes(), self.claim_free()
        while extent is not None:
            try:
                self.punch(extent)
            finally:
                self.free(extent)
            extent = self.claim_free(extent.end)
        return max(0, before - self._file.physical_bytes())

    def sync(self) -> None:
        """Return when all writes and erasures that returned before are on the device."""
        self._file.sync()

    def close(self) -> None:
        """Close the file. No call may be under way."""
        self._file.close()

    def _require(self, extent: Extent) -> None:
        if not self.holds(extent):
            raise not_reserved(extent, "ssd")

    def _read_blocks(self, offset: int, target: Bytes) -> None:
        """``target`` starts on a block; its last part of a block comes through a block of our own."""
        whole = len(target) // BLOCK_BYTES * BLOCK_BYTES
        targets = [target[:whole]] if whole else []
        if whole == len(target):
            self._file.read_into(offset, targets)
            return
        tail = block_buffer(BLOCK_BYTES)
        self._file.read_into(offset, [*targets, tail])
        np.copyto(target[whole:], tail[: len(target) - whole])


def _with_footer(extent: Extent) -> Extent:
    """The extent as the allocator knows it."""
    return Extent(extent.offset, extent.length + FOOTER_BYTES)


def _pieces(start: int, end: int) -> list[tuple[int, int]]:
    return [(at, min(at + PIECE_BYTES, end)) for at in range(start, end, PIECE_BYTES)]


def _is_on_blocks(array: Bytes) -> bool:
    return array.flags.c_contiguous and array.ctypes.data % BLOCK_BYTES == 0


def _stand_in(record: Bytes) -> Callable[[Bytes], Bytes]:
    """Gives what the disk can take in place of a piece of ``record``: the piece itself, if its address allows it."""
    if _is_on_blocks(record):
        return lambda piece: piece
    spare = block_buffer(PIECE_BYTES)

    def copied(piece: Bytes) -> Bytes:
        np.copyto(spare[: len(piece)], piece)
        return spare[: len(piece)]

    return copied


def _tail(record: Bytes, footer: bytes) -> Bytes:
    """The blocks at the end of an extent: the record's last part of a block, zeros, the footer."""
    whole = len(record) // BLOCK_BYTES * BLOCK_BYTES
    tail = block_buffer(taken_bytes(len(record)) - whole)
    np.copyto(tail[: len(record) - whole], record[whole:])
    tail[-FOOTER_BYTES:] = np.frombuffer(footer, np.uint8)
    return tail


def _require_piece(extent: Extent, start: int, end: int, target: Bytes) -> None:
    if start % BLOCK_BYTES or not 0 <= start < end <= extent.length:
        raise InvalidInputError(f"[{start}, {end}) is no piece of {extent}: it starts on a block and lies inside")
    require_length(Extent(extent.offset + start, end - start), target)
    if not target.flags.writeable:
        raise InvalidInputError(f"the target for {extent} is read-only")


def _whole_blocks(slab_bytes: int) -> int:
    whole = slab_bytes // BLOCK_BYTES * BLOCK_BYTES
    if whole < SLAB_BYTES_MIN:
        raise ConfigError(f"a slab of {slab_bytes} bytes holds nothing; give at least {SLAB_BYTES_MIN}")
    return whole


@contextmanager
def _closed_on_error(file: File) -> Iterator[File]:
    try:
        yield file
    except BaseException:
        file.close()
        raise


def _new_superblock(file: File) -> Superblock:
    """Make a slab of one block out of a file that holds nothing yet."""
    if file.size_bytes < BLOCK_BYTES:
        file.resize(BLOCK_BYTES)
    superblock = Superblock(uuid4(), BLOCK_BYTES)
    _write_superblock(file, superblock)
    return superblock


def _found_superblock(path: Path, file: File) -> Superblock | None:
    """What the file says, or None for one whose making was interrupted: it holds not a single byte yet."""
    if file.size_bytes == 0:
        return None
    block = block_buffer(BLOCK_BYTES)
    if file.size_bytes >= BLOCK_BYTES:
        file.read_into(0, [block])
    if file.size_bytes == BLOCK_BYTES and not block.any():
        return None
    try:
        return read_superblock(block)
    except ConfigError as error:
        raise ConfigError(
            f"{path} cannot be used: {error}. Put the right file there, or remove the folder and lose its caches"
        ) from error


def _grow(path: Path, file: File, superblock: Superblock, wanted: int) -> Superblock:
    """Make the slab ``wanted`` bytes long: first the file, then what the superblock says."""
    said, found = superblock.slab_bytes, file.size_bytes
    if not said <= found <= max(said, wanted):
        also = f", start with at least {found}," if found > said else ""
        raise ConfigError(
            f"{path} has {found} bytes, its first block says {said}: something outside changed its size. "
            f"Put it back (truncate --size {said}){also} or remove the folder and lose its caches"
        )
    if wanted < said:
        raise ConfigError(
            f"{path} has {said} bytes, {wanted} are asked for, and a slab does not shrink: give at least {said}, "
            "or remove the folder and lose its caches"
        )
    if wanted == said:
        return superblock
    file.resize(wanted)
    grown = replace(superblock, slab_bytes=wanted)
    _write_superblock(file, grown)
    return grown


def _write_superblock(file: File, superblock: Superblock) -> None:
    block = block_buffer(BLOCK_BYTES)
    block[:SUPERBLOCK_BYTES] = np.frombuffer(superblock_bytes(superblock), np.uint8)
    file.write_from(0, [block])
    file.sync()
