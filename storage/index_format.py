"""The index's own bytes: keys and values of records and of notes. What is read here is hostile until it was checked.

    key   := "r" namespace:32 segment:32 context:32 offset:u64      value := SsdRecord checksum
           | "n" offset:u64                                         value := SsdNote checksum
    checksum := XXH3-64 over key and message, u64 little endian; offsets are big endian, so that they sort

The messages: proto/kvservice/wire/v1/ssd.proto. The offset is part of a record's key because a deleted record, which
lives on for its mirrors, and a newer one may have the same cache key.
"""

import struct
from collections.abc import Iterable
from contextlib import suppress
from typing import TypeVar

from google.protobuf.message import DecodeError, Message
from xxhash import xxh3_64_intdigest

from kvservice.model.cache import CacheMeta, Extent, MasterReference
from kvservice.model.errors import CorruptError, InvalidIdentityError
from kvservice.model.geometry import Geometry
from kvservice.model.identity import Namespace, identity_from_json
from kvservice.model.segment import (
    DIGEST_BYTES,
    MARK_BYTES,
    PRECEDING_MAX,
    SEGMENT_TOKENS_MAX,
    CacheKey,
    ContextId,
    SegmentId,
)
from kvservice.storage.slab_format import TOMBSTONE_BYTES, Note, NoteKind
from kvservice.storage.ssd_entry import SsdEntry
from kvservice.wire.v1.ssd_pb2 import SsdNote, SsdRecord

CHECKSUM = struct.Struct("<Q")
OFFSET = struct.Struct(">Q")
RECORD_KEY, NOTE_KEY = b"r", b"n"
RECORD_KEY_BYTES = 1 + 3 * DIGEST_BYTES + OFFSET.size
NOTE_KEY_BYTES = 1 + OFFSET.size

Geometries = dict[bytes, tuple[Namespace, Geometry]]
"""By namespace. The namespace is in the value too, so that all entries share one object."""
MessageT = TypeVar("MessageT", bound=Message)

_MASTER_BYTES = (0, DIGEST_BYTES)
_MARKS = {MARK_BYTES * count: struct.Struct(f"{MARK_BYTES}s" * count) for count in range(PRECEDING_MAX + 1)}
"""Cuts so many bytes into marks, three times as fast as slices do."""


class CorruptIndexError(CorruptError):
    """The index cannot be believed: it does not open, a checksum differs, or it says what cannot be. Make it anew."""


def record_key(namespace: Namespace, key: CacheKey, offset: int) -> bytes:
    """The index's key of a record."""
    encoded = b"".join((RECORD_KEY, namespace, key.segment, key.context, OFFSET.pack(offset)))
    assert len(encoded) == RECORD_KEY_BYTES, (namespace, key)
    return encoded


def note_key(offset: int) -> bytes:
    """The index's key of a note."""
    return NOTE_KEY + OFFSET.pack(offset)


def encode_entry(entry: SsdEntry) -> tuple[bytes, bytes]:
    """Key and value of a record. Its geometry is left out: it is that of the namespace's identity."""
    meta = entry.meta
    message = SsdRecord(
        record_bytes=entry.extent.length,
        generation=entry.generation,
        header_checksum=entry.header_checksum,
        sequence=entry.sequence,
        prefill_s=entry.prefill_s,
        is_deleted=entry.is_deleted,
        provenance=meta.provenance,
        position=meta.position,
        tokens=meta.tokens,
        preceding=b"".join(meta.preceding),
    )
    if meta.master is not None:
        message.master_context, message.master_generation = meta.master.context, meta.master.generation
    return _sealed(record_key(meta.namespace, meta.key, entry.extent.offset), message.SerializeToString())


def encode_note(note: Note) -> tuple[bytes, bytes]:
    """Key and value of a note."""
    message = SsdNote(kind=note.kind, extent_bytes=note.extent.length, sequence=note.sequence, payload=note.payload)
    return _sealed(note_key(note.extent.offset), message.SerializeToString())


def decode_entry(key: bytes, value: bytes, geometries: Geometries) -> SsdEntry:
    """The record that a key and its value say. Raises CorruptIndexError."""
    message = _opened(SsdRecord, key, value, RECORD_KEY_BYTES)
    try:
        namespace, geometry = geometries[key[1:33]]
    except KeyError:
        raise CorruptIndexError(f"namespace {key[1:9].hex()} has records, but no identity") from None
    master, preceding, record_bytes = message.master_context, message.preceding, message.record_bytes
    is_possible = len(master) in _MASTER_BYTES and len(preceding) in _MARKS
    if not (is_possible and 0 < message.tokens <= SEGMENT_TOKENS_MAX and record_bytes):
        raise CorruptIndexError(f"what the index says under {key[:9].hex()} is intact, but cannot be")
    meta = CacheMeta(
        namespace,
        CacheKey(SegmentId(key[33:65]), ContextId(key[65:97])),
        message.position,
        message.tokens,
        geometry,
        message.provenance,
        _MARKS[len(preceding)].unpack(preceding),
        MasterReference(ContextId(master), message.master_generation) if master else None,
    )
    return SsdEntry(
        meta,
        Extent(int.from_bytes(key[97:], "big"), record_bytes),
        message.generation,
        message.header_checksum,
        message.sequence,
        message.prefill_s,
        message.is_deleted,
    )


def decode_note(key: bytes, value: bytes) -> Note:
    """The note that a key and its value say. Raises CorruptIndexError."""
    message = _opened(SsdNote, key, value, NOTE_KEY_BYTES)
    try:
        kind = NoteKind(message.kind)
    except ValueError as error:
        raise CorruptIndexError(f"a note of an unknown kind: {error}") from error
    if kind is NoteKind.TOMBSTONE and len(message.payload) != TOMBSTONE_BYTES:
        raise CorruptIndexError(f"a tombstone of {len(message.payload)} bytes, {TOMBSTONE_BYTES} are right")
    extent = Extent(int.from_bytes(key[1:], "big"), message.extent_bytes)
    return Note(extent, message.sequence, kind, message.payload)


def geometries_of(notes: Iterable[Note]) -> Geometries:
    """The geometry of every namespace that ``notes`` hold an identity of. One that cannot be read is left out."""
    found: Geometries = {}
    for note in notes:
        if note.kind is NoteKind.IDENTITY:
            with suppress(InvalidIdentityError, UnicodeDecodeError):
                identity = identity_from_json(note.payload.decode())
                found[identity.namespace()] = identity.namespace(), identity.geometry
    return found


def _sealed(key: bytes, message: bytes) -> tuple[bytes, bytes]:
    return key, message + CHECKSUM.pack(xxh3_64_intdigest(key + message))


def _opened(kind: type[MessageT], key: bytes, value: bytes, key_bytes: int) -> MessageT:
    message, said = value[: -CHECKSUM.size], value[-CHECKSUM.size :]
    if len(key) != key_bytes or CHECKSUM.pack(xxh3_64_intdigest(key + message)) != said:
        raise CorruptIndexError(f"the checksum of what the index says under {key[:9].hex()} differs")
    try:
        return kind.FromString(message)
    except DecodeError as error:
        raise CorruptIndexError(f"what the index says under {key[:9].hex()} is no {kind.__name__}: {error}") from error
