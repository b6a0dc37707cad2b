"""Superblock, footer and note: golden bytes, and nothing believed that was changed."""

from uuid import UUID

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvservice.model.cache import Extent
from kvservice.model.errors import ConfigError, CorruptError, InvalidInputError, RecordFormatError
from kvservice.model.identity import Namespace
from kvservice.model.segment import CacheKey, ContextId, SegmentId
from kvservice.storage.buffer import Bytes
from kvservice.storage.disk import BLOCK_BYTES
from kvservice.storage.record import RecordHead, read_head
from kvservice.storage.slab_format import (
    FOOTER,
    FOOTER_BYTES,
    FOOTER_MAGIC,
    NOTE_BYTES,
    NOTE_MAGIC,
    NOTE_PAYLOAD_BYTES_MAX,
    SEQUENCE_MAX,
    SUPERBLOCK_MAGIC,
    Note,
    NoteKind,
    Stamp,
    Superblock,
    footer_bytes,
    note_bytes,
    note_length,
    read_footer,
    read_note,
    read_superblock,
    sealed,
    superblock_bytes,
    taken_bytes,
    tombstone_of_payload,
    tombstone_payload,
)
from tests.storage.slab_builders import make_record

SLAB, OTHER = UUID(int=0x0123456789ABCDEF), UUID(int=1)
HEAD = read_head(make_record())
STAMP = Stamp(77, HEAD.header_checksum, 1.5)
REFUSED = (CorruptError, RecordFormatError)
GOLDEN = {
    "superblock": "4b5653534c41420a0100000000100000000000000001000000000000000000000123456789abcdef3225cb92c499d534",
    "footer": (
        "4b5653454e440d0a00000000000000000123456789abcdef070000000000000000100000000000008877665544332211"
        "000000000000e03f662bbc7f352d77a3"
    ),
    "note": "4b56534e4f54450a010001000200000000000000000000000123456789abcdef09000000000000002065e885be9d15f87b7d",
}


def block_of(data: bytes) -> Bytes:
    block = np.zeros(BLOCK_BYTES, np.uint8)
    block[: len(data)] = np.frombuffer(data, np.uint8)
    return block


def note_of(data: bytes, slab_uuid: UUID = SLAB) -> Note:
    """As a scan reads it: a length, then that many bytes."""
    length = note_length(block_of(data[:BLOCK_BYTES]), slab_uuid)
    return read_note(8192, data[:length].ljust(length, b"\0"))


def footer_of(data: bytes, head: RecordHead = HEAD, slab_uuid: UUID = SLAB) -> Stamp:
    return read_footer(data, slab_uuid, head)


def flipped(data: bytes) -> list[bytes]:
    whole = int.from_bytes(data, "little")
    return [(whole ^ 1 << bit).to_bytes(len(data), "little") for bit in range(8 * len(data))]


def test_the_bytes_are_these() -> None:
    assert superblock_bytes(Superblock(SLAB, 1 << 40)).hex() == GOLDEN["superblock"]
    assert footer_bytes(SLAB, 4096, Stamp(7, 0x1122334455667788, 0.5)).hex() == GOLDEN["footer"]
    assert note_bytes(SLAB, 9, NoteKind.IDENTITY, b"{}").hex() == GOLDEN["note"]


def test_what_was_written_is_read() -> None:
    assert read_superblock(block_of(superblock_bytes(Superblock(SLAB, 1 << 40)))) == Superblock(SLAB, 1 << 40)
    assert footer_of(footer_bytes(SLAB, HEAD.layout.record_bytes, STAMP)) == STAMP
    for payload in (b"{}", bytes(5000)):
        data = note_bytes(SLAB, 3, NoteKind.IDENTITY, payload)
        assert note_of(data) == Note(Extent(8192, NOTE_BYTES + len(payload)), 3, NoteKind.IDENTITY, payload)


def test_a_tombstone_names_one_cache() -> None:
    key = CacheKey(SegmentId(b"s" * 32), ContextId(b"c" * 32))
    payload = tombstone_payload(Namespace(b"n" * 32), key)
    assert tombstone_of_payload(payload) == (b"n" * 32, key)
    assert note_of(note_bytes(SLAB, 1, NoteKind.TOMBSTONE, payload)).payload == payload


@pytest.mark.parametrize(("length", "blocks"), [(1, 1), (4032, 1), (4033, 2), (4096, 2), (8128, 2), (8129, 3)])
def test_a_place_is_whole_blocks_with_room_for_a_footer(length: int, blocks: int) -> None:
    assert taken_bytes(length) == blocks * 4096


def test_every_flipped_bit_is_noticed() -> None:
    for data in flipped(superblock_bytes(Superblock(SLAB, 1 << 40))):
        with pytest.raises(ConfigError):
            read_superblock(block_of(data))
    for data in flipped(footer_bytes(SLAB, HEAD.layout.record_bytes, STAMP)):
        with pytest.raises(CorruptError):
            footer_of(data)
    for data in flipped(note_bytes(SLAB, 3, NoteKind.IDENTITY, b'{"model":"m"}')):
        with pytest.raises(REFUSED):
            note_of(data)


def test_what_is_of_another_slab_or_record_is_refused() -> None:
    footer = footer_bytes(SLAB, HEAD.layout.record_bytes, STAMP)
    with pytest.raises(CorruptError, match=f"of slab {SLAB}"):
        footer_of(footer, slab_uuid=OTHER)
    with pytest.raises(CorruptError, match="another record"):
        footer_of(footer, read_head(make_record(seed=1)))
    with pytest.raises(CorruptError, match="another record"):
        footer_of(footer_bytes(SLAB, HEAD.layout.record_bytes + 64, STAMP))
    with pytest.raises(CorruptError, match=f"of slab {SLAB}"):
        note_of(note_bytes(SLAB, 1, NoteKind.IDENTITY, b"{}"), OTHER)


@pytest.mark.parametrize(
    ("sequence", "prefill_s"), [(SEQUENCE_MAX + 1, 0.0), (1, -1.0), (1, float("nan")), (1, float("inf"))]
)
def test_footers_that_no_writer_writes_are_refused_under_a_right_checksum(sequence: int, prefill_s: float) -> None:
    fields = (SLAB.bytes, sequence, HEAD.layout.record_bytes, HEAD.header_checksum, prefill_s)
    with pytest.raises(CorruptError, match="no writer may write"):
        footer_of(sealed(FOOTER.pack(FOOTER_MAGIC, *fields)))


def test_a_note_that_no_writer_writes_is_refused_under_a_right_checksum() -> None:
    assert note_of(note_bytes(SLAB, SEQUENCE_MAX, NoteKind.IDENTITY, b"{}")).sequence == SEQUENCE_MAX
    with pytest.raises(CorruptError, match="no writer may write"):
        note_of(note_bytes(SLAB, SEQUENCE_MAX + 1, NoteKind.IDENTITY, b"{}"))


@pytest.mark.parametrize("slab_bytes", [0, 4095, 4097, (1 << 64) - 1])
def test_sizes_that_no_slab_has_are_refused_under_a_right_checksum(slab_bytes: int) -> None:
    with pytest.raises(ConfigError, match=f"a slab of {slab_bytes} bytes"):
        read_superblock(block_of(superblock_bytes(Superblock(SLAB, slab_bytes))))


def test_sizes_of_notes_that_lie_are_refused_before_they_are_used() -> None:
    data = note_bytes(SLAB, 1, NoteKind.IDENTITY, b"{}")
    for payload_bytes in (0, NOTE_PAYLOAD_BYTES_MAX + 1, (1 << 32) - 1):
        with pytest.raises(CorruptError, match=f"says it has {payload_bytes} bytes"):
            note_of(data[:12] + payload_bytes.to_bytes(4, "little") + data[16:])
    with pytest.raises(CorruptError, match="kind 2"):
        note_of(data[:10] + b"\2\0" + data[12:])
    with pytest.raises(RecordFormatError, match="kind 3"):
        note_of(data[:10] + b"\3\0" + data[12:])
    with pytest.raises(RecordFormatError, match="version 2"):
        note_of(data[:8] + b"\2\0" + data[10:])


def test_notes_that_cannot_be_written_are_refused() -> None:
    for kind, payload in [(NoteKind.IDENTITY, bytes(NOTE_PAYLOAD_BYTES_MAX + 1)), (NoteKind.TOMBSTONE, bytes(97))]:
        with pytest.raises(InvalidInputError, match=kind.name):
            note_bytes(SLAB, 1, kind, payload)


@settings(deadline=None, max_examples=300)
@given(noise=st.binary(max_size=200), cut=st.integers(0, 120))
def test_noise_and_pieces_are_refused(noise: bytes, cut: int) -> None:
    note = note_bytes(SLAB, 1, NoteKind.TOMBSTONE, bytes(range(1, 97)))
    footer = footer_bytes(SLAB, HEAD.layout.record_bytes, STAMP)
    superblock = superblock_bytes(Superblock(SLAB, 1 << 40))
    for start in (b"", NOTE_MAGIC, note[:cut]):
        with pytest.raises(REFUSED):
            note_of(start + noise)
    for start in (b"", FOOTER_MAGIC, footer[: min(cut, FOOTER_BYTES - 8)]):
        with pytest.raises(CorruptError):
            footer_of((start + noise)[:FOOTER_BYTES].ljust(FOOTER_BYTES, b"\0"))
        with pytest.raises(CorruptError):
            footer_of(start)
    for start in (b"", SUPERBLOCK_MAGIC, superblock[: min(cut, len(superblock) - 8)]):
        with pytest.raises(ConfigError):
            read_superblock(block_of(start + noise + b"\1"))
