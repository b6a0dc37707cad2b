"""Keys and values of the index: what is put comes back, any changed bit is seen, and the bytes are pinned."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from kvservice.model.cache import CacheMeta, Extent, MasterReference
from kvservice.model.segment import CacheKey, ContextId, SegmentId
from kvservice.storage.index_format import (
    CorruptIndexError,
    decode_entry,
    decode_note,
    encode_entry,
    encode_note,
    geometries_of,
)
from kvservice.storage.slab_format import Note
from kvservice.storage.ssd_entry import SsdEntry
from kvservice.wire.v1.ssd_pb2 import SsdNote, SsdRecord
from tests.storage.recovery_builders import IDENTITY, OTHER, make_entry, make_identity_note, make_tombstone

GEOMETRIES = geometries_of([make_identity_note(), make_identity_note(OTHER)])
U64 = st.integers(0, (1 << 64) - 1)
DIGESTS = st.binary(min_size=32, max_size=32)


@st.composite
def entries(draw: st.DrawFn) -> SsdEntry:
    identity = draw(st.sampled_from([IDENTITY, OTHER]))
    master = draw(st.none() | st.builds(MasterReference, DIGESTS.map(ContextId), U64))
    key = CacheKey(SegmentId(draw(DIGESTS)), ContextId(draw(DIGESTS)))
    marks = tuple(draw(st.lists(st.binary(min_size=8, max_size=8), max_size=32)))
    position, tokens = draw(st.integers(0, (1 << 32) - 1)), draw(st.integers(1, 1 << 20))
    provenance = draw(st.text(max_size=20))
    meta = CacheMeta(identity.namespace(), key, position, tokens, identity.geometry, provenance, marks, master)
    extent = Extent(draw(st.integers(0, 1 << 50)), draw(st.integers(1, 1 << 50)))
    seconds = draw(st.floats(0, 1e9))
    return SsdEntry(meta, extent, draw(U64), draw(U64), draw(U64), seconds, draw(st.booleans()))


@given(entry=entries())
def test_an_entry_comes_back_as_it_was(entry: SsdEntry) -> None:
    assert decode_entry(*encode_entry(entry), GEOMETRIES) == entry


@pytest.mark.parametrize("note", [make_identity_note(), make_tombstone(1, 2, offset=8192, sequence=9)])
def test_a_note_comes_back_as_it_was(note: Note) -> None:
    assert decode_note(*encode_note(note)) == note


@pytest.mark.parametrize("entry", [make_entry(), make_entry(master=(1, 2), is_deleted=True)])
def test_any_flipped_bit_of_a_record_is_seen(entry: SsdEntry) -> None:
    key, value = encode_entry(entry)
    for changed_key, changed_value in flipped(key, value):
        with pytest.raises(CorruptIndexError):
            decode_entry(changed_key, changed_value, GEOMETRIES)


def test_any_flipped_bit_of_a_note_is_seen() -> None:
    key, value = encode_note(make_tombstone(1, 2, offset=8192, sequence=9))
    for changed_key, changed_value in flipped(key, value):
        with pytest.raises(CorruptIndexError):
            decode_note(changed_key, changed_value)


def flipped(key: bytes, value: bytes) -> list[tuple[bytes, bytes]]:
    both = key + value
    changed = []
    for bit in range(len(both) * 8):
        data = bytearray(both)
        data[bit // 8] ^= 1 << bit % 8
        changed.append((bytes(data[: len(key)]), bytes(data[len(key) :])))
    return changed


def test_any_cut_value_is_refused() -> None:
    key, value = encode_entry(make_entry())
    for length in range(len(value)):
        with pytest.raises(CorruptIndexError):
            decode_entry(key, value[:length], GEOMETRIES)


def test_a_value_under_another_records_key_is_refused() -> None:
    key, _ = encode_entry(make_entry(context=1))
    _, value = encode_entry(make_entry(context=2))
    with pytest.raises(CorruptIndexError, match="checksum"):
        decode_entry(key, value, GEOMETRIES)


@pytest.mark.parametrize(
    "lie",
    [
        {"tokens": 0},
        {"tokens": (1 << 20) + 1},
        {"record_bytes": 0},
        {"preceding": b"7 bytes"},
        {"preceding": bytes(8 * 33)},
        {"master_context": b"short"},
    ],
)
def test_a_record_that_cannot_be_is_refused_under_a_right_checksum(lie: dict[str, object]) -> None:
    key, value = encode_entry(make_entry())
    message = SsdRecord.FromString(value[:-8])
    for name, one in lie.items():
        setattr(message, name, one)
    with pytest.raises(CorruptIndexError, match="cannot be"):
        decode_entry(key, sealed(key, message.SerializeToString()), GEOMETRIES)


@pytest.mark.parametrize("message", [SsdNote(kind=3), SsdNote(kind=2, payload=b"short")])
def test_a_note_that_cannot_be_is_refused_under_a_right_checksum(message: SsdNote) -> None:
    key, _ = encode_note(make_identity_note())
    with pytest.raises(CorruptIndexError, match=r"note of an unknown kind|tombstone of 5 bytes"):
        decode_note(key, sealed(key, message.SerializeToString()))


def test_what_is_no_message_is_refused_under_a_right_checksum() -> None:
    key, _ = encode_entry(make_entry())
    with pytest.raises(CorruptIndexError, match="no SsdRecord"):
        decode_entry(key, sealed(key, b"\xff\xff\xff"), GEOMETRIES)


def sealed(key: bytes, message: bytes) -> bytes:
    return message + xxh3_64_intdigest(key + message).to_bytes(8, "little")


def test_a_record_without_its_identity_is_refused() -> None:
    with pytest.raises(CorruptIndexError, match="no identity"):
        decode_entry(*encode_entry(make_entry()), geometries_of([make_identity_note(OTHER)]))


def test_an_identity_that_cannot_be_read_gives_no_geometry() -> None:
    note = make_identity_note()
    broken = [replace(note, payload=payload) for payload in (b"\xff", b"{}", note.payload[:-1])]
    assert geometries_of([*broken, make_tombstone(0, 0, offset=0, sequence=0)]) == {}


def test_entries_of_a_namespace_share_its_objects() -> None:
    pairs = [encode_entry(make_entry(context=context)) for context in range(2)]
    first, second = (decode_entry(*pair, GEOMETRIES).meta for pair in pairs)
    assert first.namespace is second.namespace
    assert first.geometry is second.geometry


def test_a_field_of_a_later_writer_is_ignored() -> None:
    key, value = encode_entry(make_entry())
    later = value[:-8] + bytes([15 << 3 | 0, 1])
    assert decode_entry(key, sealed(key, later), GEOMETRIES) == make_entry()


def test_the_bytes_are_pinned() -> None:
    entry = make_entry(master=(1, 2), sequence=9, is_deleted=True)
    key, value = encode_entry(entry)
    assert key[:1] + key[97:] == b"r" + (4096).to_bytes(8, "big")
    assert key[1:97] == entry.meta.namespace + entry.meta.key.segment + entry.meta.key.context
    assert entry.meta.master is not None
    said = (
        "0864 110700000000000000 190b00000000000000 2009 29000000000000e03f 3001 4003 4805"
        f" 5208{b'8 bytes.'.hex()} 5a20{entry.meta.master.context.hex()} 610200000000000000"
    )
    assert value[:-8].hex() == said.replace(" ", "")
    assert value[-8:] == xxh3_64_intdigest(key + value[:-8]).to_bytes(8, "little")
