"""The slab's own bytes: superblock, footers behind records, notes. What is read here is hostile until it was checked.

    superblock := magic:"KVSSLAB\\n" version:u16 0:u16 block_bytes:u32 slab_bytes:u64 slab_uuid:16 checksum:u64 zeros
    extent     := (record zeros footer) | (note zeros)             takes round_up(bytes + 64, 4096) bytes of the file
    footer     := magic:"KVSEND\\r\\n" slab_uuid:16 sequence:u64 record_bytes:u64 header_checksum:u64 prefill_s:f64
                  checksum:u64                                      the last 64 bytes of its extent
    note       := magic:"KVSNOTE\\n" version:u16 kind:u16 payload_bytes:u32 slab_uuid:16 sequence:u64 checksum:u64
                  payload

Little endian. Checksums are XXH3-64 over all other bytes of their structure. FORMAT.md has the reasons.
"""

import enum
import math
import struct
from dataclasses import dataclass
from uuid import UUID

from xxhash import xxh3_64_intdigest

from kvservice.model.cache import Extent
from kvservice.model.errors import ConfigError, CorruptError, InvalidInputError, RecordFormatError
from kvservice.model.identity import Namespace
from kvservice.model.segment import DIGEST_BYTES, CacheKey, ContextId, SegmentId
from kvservice.storage.buffer import Bytes, round_up
from kvservice.storage.disk import BLOCK_BYTES
from kvservice.storage.record import RecordHead

SLAB_VERSION = 1
NOTE_VERSION = 1
SUPERBLOCK_MAGIC, FOOTER_MAGIC, NOTE_MAGIC = b"KVSSLAB\n", b"KVSEND\r\n", b"KVSNOTE\n"
CHECKSUM = struct.Struct("<Q")
SUPERBLOCK = struct.Struct("<8sHHIQ16s")
FOOTER = struct.Struct("<8s16sQQQd")
NOTE = struct.Struct("<8sHHI16sQ")
SUPERBLOCK_BYTES = SUPERBLOCK.size + CHECKSUM.size
FOOTER_BYTES = FOOTER.size + CHECKSUM.size
NOTE_BYTES = NOTE.size + CHECKSUM.size
NOTE_PAYLOAD_BYTES_MAX = 16 << 20
"""An identity of 1 Mi characters that all need an escape has 12 MiB."""
SEQUENCE_MAX = (1 << 63) - 1
TOMBSTONE_BYTES = 3 * DIGEST_BYTES

assert FOOTER_BYTES == 64
assert NOTE_BYTES == 48
assert SUPERBLOCK_BYTES <= 512, "a device writes a sector whole or not at all"


class NoteKind(enum.IntEnum):
    """The numbers are on disk; never change them."""

    IDENTITY = 1
    TOMBSTONE = 2


@dataclass(frozen=True, slots=True)
class Superblock:
    """What the first block says of the slab. ``slab_bytes``: size of the file, this block included."""

    slab_uuid: UUID
    slab_bytes: int


@dataclass(frozen=True, slots=True)
class Stamp:
    """What the footer says of the write of a record.

    ``sequence`` rises with every write over the slab's whole life. ``header_checksum``: the record's. ``prefill_s``:
    seconds that computing the cache took, 0 if nobody said.
    """

    sequence: int
    header_checksum: int
    prefill_s: float


@dataclass(frozen=True, slots=True)
class Note:
    """A small text on the slab. ``extent.length`` is that of the whole note, its head included."""

    extent: Extent
    sequence: int
    kind: NoteKind
    payload: bytes


@dataclass(frozen=True, slots=True)
class FoundRecord:
    """A record that was written to its end: head and footer are whole and agree. Its sections were not read."""

    extent: Extent
    head: RecordHead
    stamp: Stamp


@dataclass(frozen=True, slots=True)
class FoundNote:
    """A whole note of this slab."""

    note: Note


@dataclass(frozen=True, slots=True)
class Lost:
    """A place that was said to hold a record or a note, and does not. ``reason`` is for people."""

    extent: Extent
    reason: str


Found = FoundRecord | FoundNote | Lost


def taken_bytes(length: int) -> int:
    """Bytes of the file that a record or note of ``length`` bytes takes, footer and rounding included."""
    return round_up(length + FOOTER_BYTES, BLOCK_BYTES)


def superblock_bytes(superblock: Superblock) -> bytes:
    """The bytes in front of the zeros that fill the block."""
    fields = (SUPERBLOCK_MAGIC, SLAB_VERSION, 0, BLOCK_BYTES, superblock.slab_bytes, superblock.slab_uuid.bytes)
    return sealed(SUPERBLOCK.pack(*fields))


def read_superblock(block: Bytes) -> Superblock:
    """What the first block of a file says. Raises ConfigError, without a file's name, if it is none of this version."""
    data = block[:SUPERBLOCK_BYTES].tobytes()
    if len(block) != BLOCK_BYTES or not data.startswith(SUPERBLOCK_MAGIC):
        raise ConfigError(f"not a slab: it starts with {data[: len(SUPERBLOCK_MAGIC)]!r}")
    _, version, zero, block_bytes, slab_bytes, slab_uuid = SUPERBLOCK.unpack_from(data)
    if version != SLAB_VERSION:
        raise ConfigError(f"a slab of format version {version}; this program reads {SLAB_VERSION}")
    if not _is_sealed(data) or zero or block[SUPERBLOCK_BYTES:].any():
        raise ConfigError("its first block is damaged: the checksum differs")
    if block_bytes != BLOCK_BYTES or slab_bytes < BLOCK_BYTES or slab_bytes % BLOCK_BYTES:
        raise ConfigError(f"a slab of {slab_bytes} bytes in blocks of {block_bytes}; this program has {BLOCK_BYTES}")
    return Superblock(UUID(bytes=slab_uuid), slab_bytes)


def require_stamp(stamp: Stamp) -> None:
    """Raise InvalidInputError for a stamp that the format has no room for."""
    if not _is_possible(stamp):
        raise InvalidInputError(f"{stamp}: a sequence is 0 to {SEQUENCE_MAX}, a checksum u64, seconds finite from 0 on")


def footer_bytes(slab_uuid: UUID, record_bytes: int, stamp: Stamp) -> bytes:
    """The 64 bytes at the end of a record's extent."""
    fields = (slab_uuid.bytes, stamp.sequence, record_bytes, stamp.header_checksum, stamp.prefill_s)
    return sealed(FOOTER.pack(FOOTER_MAGIC, *fields))


def read_footer(data: bytes, slab_uuid: UUID, head: RecordHead) -> Stamp:
    """The stamp in the 64 bytes at the end of an extent. Raises CorruptError unless it is of this slab and ``head``."""
    if len(data) != FOOTER_BYTES or not data.startswith(FOOTER_MAGIC) or not _is_sealed(data):
        raise CorruptError("no footer at its end: it was not written to the end, or was overwritten")
    _, uuid_bytes, sequence, record_bytes, header_checksum, prefill_s = FOOTER.unpack_from(data)
    if uuid_bytes != slab_uuid.bytes:
        raise CorruptError(f"the footer is of slab {UUID(bytes=uuid_bytes)}, not of this one")
    if (record_bytes, header_checksum) != (head.layout.record_bytes, head.header_checksum):
        raise CorruptError("the footer is of another record")
    stamp = Stamp(sequence, header_checksum, prefill_s)
    if not _is_possible(stamp):
        raise CorruptError(f"the footer is intact, but no writer may write {stamp}")
    return stamp


def note_bytes(slab_uuid: UUID, sequence: int, kind: NoteKind, payload: bytes) -> bytes:
    """A whole note. Raises InvalidInputError for a payload that its kind does not have."""
    if not _is_payload(kind, len(payload)):
        raise InvalidInputError(f"a note of kind {kind.name} does not have a payload of {len(payload)} bytes")
    head = NOTE.pack(NOTE_MAGIC, NOTE_VERSION, kind, len(payload), slab_uuid.bytes, sequence)
    return head + CHECKSUM.pack(xxh3_64_intdigest(head + payload)) + payload


def note_length(block: Bytes, slab_uuid: UUID) -> int:
    """Bytes of the note that starts with ``block``, as it says; not verified, but in the limits.

    Raises RecordFormatError or CorruptError if it cannot be a note of this slab.
    """
    data = block[: NOTE.size].tobytes()
    if len(data) < NOTE.size or not data.startswith(NOTE_MAGIC):
        raise RecordFormatError(f"not a note: it starts with {data[: len(NOTE_MAGIC)]!r}")
    _, version, kind, payload_bytes, uuid_bytes, _ = NOTE.unpack(data)
    if version != NOTE_VERSION or kind not in set(NoteKind):
        raise RecordFormatError(f"a note of version {version} and kind {kind}; this program reads {NOTE_VERSION}")
    if uuid_bytes != slab_uuid.bytes:
        raise CorruptError(f"the note is of slab {UUID(bytes=uuid_bytes)}, not of this one")
    if not _is_payload(NoteKind(kind), payload_bytes):
        raise CorruptError(f"a note of kind {kind} that says it has {payload_bytes} bytes")
    return NOTE_BYTES + int(payload_bytes)


def read_note(offset: int, data: bytes) -> Note:
    """The note that ``data`` is, of the length that ``note_length`` gave. Raises CorruptError if it was changed."""
    _, _, kind, payload_bytes, _, sequence = NOTE.unpack_from(data)
    payload = data[NOTE_BYTES:]
    (said,) = CHECKSUM.unpack_from(data, NOTE.size)
    if xxh3_64_intdigest(data[: NOTE.size] + payload) != said or len(payload) != payload_bytes:
        raise CorruptError(f"the note's checksum differs from its {len(data)} bytes")
    if sequence > SEQUENCE_MAX:
        raise CorruptError(f"the note is intact, but no writer may write sequence {sequence}")
    return Note(Extent(offset, len(data)), sequence, NoteKind(kind), payload)


def tombstone_payload(namespace: Namespace, key: CacheKey) -> bytes:
    """What a TOMBSTONE note says: this cache was deleted; its record lives on only for its mirrors."""
    return namespace + key.segment + key.context


def tombstone_of_payload(payload: bytes) -> tuple[Namespace, CacheKey]:
    """Whose tombstone it is. Notes that were read have a payload of the right length."""
    assert len(payload) == TOMBSTONE_BYTES, len(payload)
    namespace, segment, context = (payload[at : at + DIGEST_BYTES] for at in range(0, TOMBSTONE_BYTES, DIGEST_BYTES))
    return Namespace(namespace), CacheKey(SegmentId(segment), ContextId(context))


def sealed(data: bytes) -> bytes:
    """``data`` and its checksum."""
    return data + CHECKSUM.pack(xxh3_64_intdigest(data))


def _is_payload(kind: NoteKind, length: int) -> bool:
    if kind is NoteKind.TOMBSTONE:
        return length == TOMBSTONE_BYTES
    return 0 < length <= NOTE_PAYLOAD_BYTES_MAX


def _is_possible(stamp: Stamp) -> bool:
    is_time = math.isfinite(stamp.prefill_s) and stamp.prefill_s >= 0
    return is_time and 0 <= stamp.sequence <= SEQUENCE_MAX and 0 <= stamp.header_checksum < 1 << 64


def _is_sealed(data: bytes) -> bool:
    content, said = data[: -CHECKSUM.size], data[-CHECKSUM.size :]
    return CHECKSUM.pack(xxh3_64_intdigest(content)) == said
