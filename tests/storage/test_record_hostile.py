"""What a reader must refuse: every flipped bit, every cut, and headers that lie under a right checksum."""

import struct
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from kvservice.model.errors import CorruptError, RecordFormatError
from kvservice.storage.buffer import Bytes
from kvservice.storage.record import PREFIX_BYTES, RecordReader, parse_header
from kvservice.wire.v1.record_pb2 import RecordHeader

if TYPE_CHECKING:
    from tests.storage.conftest import RecordBuilder

REFUSED = (CorruptError, RecordFormatError)
PREFIX = struct.Struct("<8sHHIQQ")


def read_all(buffer: Bytes) -> None:
    """Read as a restore does: head, checksums, then every row."""
    reader = RecordReader(buffer)
    reader.verify()
    for layer in range(reader.meta.geometry.layers):
        if reader.meta.master is None:
            reader.master_planes(layer)
        else:
            reader.mirror(layer)


def seal(record: Bytes, header: bytes, **changes: int) -> Bytes:
    """``record`` with another header, whose checksum is right. ``changes``: fields of the prefix."""
    magic, version, kind, old_bytes, *_ = PREFIX.unpack(record[:PREFIX_BYTES].tobytes())
    payload = record[-(-(PREFIX_BYTES + old_bytes) // 64) * 64 :].tobytes()
    padding = bytes(-(PREFIX_BYTES + len(header)) % 64)
    fields = {"version": version, "kind": kind, "header_bytes": len(header)} | {
        "record_bytes": PREFIX_BYTES + len(header) + len(padding) + len(payload)
    }
    fields |= changes
    start = PREFIX.pack(magic, *fields.values(), 0)[:24]
    checksum = struct.pack("<Q", xxh3_64_intdigest(start + header))
    return np.frombuffer(start + checksum + header + padding + payload, np.uint8)


def header_of(record: Bytes) -> RecordHeader:
    return parse_header(record[PREFIX_BYTES : PREFIX_BYTES + RecordReader(record).layout.header_bytes].tobytes())


@pytest.mark.parametrize("kind", ["master", "mirror"])
def test_every_flipped_bit_is_found(build: "RecordBuilder", kind: str) -> None:
    record = build.master(build.meta()) if kind == "master" else build.small_mirror()
    for position in range(len(record) * 8):
        record[position // 8] ^= 1 << position % 8
        with pytest.raises(REFUSED):
            read_all(record)
        record[position // 8] ^= 1 << position % 8
    read_all(record)


@pytest.mark.parametrize("kind", ["master", "mirror"])
def test_every_truncated_record_is_refused(build: "RecordBuilder", kind: str) -> None:
    record = build.master(build.meta()) if kind == "master" else build.small_mirror()
    for length in range(len(record)):
        with pytest.raises(REFUSED):
            RecordReader(record[:length])


@settings(deadline=None)
@given(noise=st.binary(max_size=400))
def test_noise_is_refused(noise: bytes) -> None:
    for prefix in (b"", b"KVSREC\r\n", b"KVSREC\r\n\x01\x00\x01\x00"):
        with pytest.raises(REFUSED):
            RecordReader(np.frombuffer(prefix + noise, np.uint8))


@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_damaged_headers_under_a_right_checksum_never_crash_the_reader(
    build: "RecordBuilder", data: st.DataObject
) -> None:
    """They may be refused or, where they still make sense, read; nothing else."""
    record = data.draw(st.sampled_from([build.master(build.meta()), build.small_mirror()]))
    header = bytearray(header_of(record).SerializeToString())
    for _ in range(data.draw(st.integers(1, 3))):
        header[data.draw(st.integers(0, len(header) - 1))] = data.draw(st.integers(0, 255))
    try:
        read_all(seal(record, bytes(header)))
    except REFUSED:
        return


def test_other_versions_and_kinds_are_refused(build: "RecordBuilder") -> None:
    record = build.master(build.meta())
    header = header_of(record).SerializeToString()
    with pytest.raises(RecordFormatError, match="version 2"):
        RecordReader(seal(record, header, version=2))
    for kind in (0, 2, 3):
        with pytest.raises(CorruptError, match="kind"):
            RecordReader(seal(record, header, kind=kind))


def test_sizes_that_lie_are_refused_before_they_are_used(build: "RecordBuilder") -> None:
    record = build.master(build.meta())
    header = header_of(record).SerializeToString()
    for changes in [
        {"header_bytes": 2**32 - 1},
        {"header_bytes": 1 << 16},
        {"record_bytes": 2**64 - 1},
        {"record_bytes": 0},
        {"record_bytes": len(record) + 64},
        {"record_bytes": len(record) - 64},
    ]:
        with pytest.raises(CorruptError, match=r"bytes said|a header of"):
            RecordReader(seal(record, header, **changes))


def test_headers_above_the_limit_are_refused_however_right(build: "RecordBuilder") -> None:
    record = build.master(build.meta())
    header = header_of(record).SerializeToString() + b"\xfa\x01\x80\x80\x04" + bytes(1 << 16)  # a field of 64 KiB
    with pytest.raises(CorruptError, match="a header of"):
        RecordReader(seal(record, header))


def test_a_record_without_its_last_layer_is_refused(build: "RecordBuilder") -> None:
    record = build.small_mirror()
    header = header_of(record)
    del header.section_bytes[-1]
    cut = seal(record[:-128], header.SerializeToString())
    with pytest.raises(CorruptError, match="1 sections, 2 checksums, 2 layers"):
        RecordReader(cut)


def _no_layers(header: RecordHeader) -> None:
    header.geometry.layers = 0


def _many_layers(header: RecordHeader) -> None:
    header.geometry.layers = 2**32 - 1


def _unknown_dtype(header: RecordHeader) -> None:
    header.geometry.dtype = "int3"


def _no_planes(header: RecordHeader) -> None:
    del header.geometry.planes[:]


def _huge_plane(header: RecordHeader) -> None:
    header.geometry.planes[0].heads = 2**32 - 1
    header.geometry.planes[0].head_size = 2**32 - 1


def _odd_rotary(header: RecordHeader) -> None:
    header.geometry.planes[0].rotary_size = 3


def _no_tokens(header: RecordHeader) -> None:
    header.tokens = 0


def _more_tokens(header: RecordHeader) -> None:
    header.tokens += 1


def _many_tokens(header: RecordHeader) -> None:
    header.tokens = 2**32 - 1


def _short_namespace(header: RecordHeader) -> None:
    header.namespace = b"n"


def _half_mark(header: RecordHeader) -> None:
    header.preceding = b"half"


def _huge_section(header: RecordHeader) -> None:
    header.section_bytes[0] = 2**32 - 1


def _missing_section(header: RecordHeader) -> None:
    del header.section_bytes[-1]


def _spare_checksum(header: RecordHeader) -> None:
    header.section_checksums.append(1)


def _becomes_a_mirror(header: RecordHeader) -> None:
    header.master.context = b"m" * 32


FORMAT, CORRUPT = RecordFormatError, CorruptError


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (_no_layers, FORMAT),
        (_unknown_dtype, FORMAT),
        (_no_planes, FORMAT),
        (_odd_rotary, FORMAT),
        (_no_tokens, FORMAT),
        (_many_tokens, FORMAT),
        (_short_namespace, FORMAT),
        (_half_mark, FORMAT),
        (_many_layers, CORRUPT),
        (_huge_plane, CORRUPT),
        (_more_tokens, CORRUPT),
        (_huge_section, CORRUPT),
        (_missing_section, CORRUPT),
        (_spare_checksum, CORRUPT),
        (_becomes_a_mirror, CORRUPT),
    ],
)
def test_headers_that_lie_under_a_right_checksum_are_refused(
    build: "RecordBuilder", change: Callable[[RecordHeader], None], error: type[Exception]
) -> None:
    record = build.master(build.meta())
    header = header_of(record)
    change(header)
    with pytest.raises(error):
        RecordReader(seal(record, header.SerializeToString()))


def test_fields_of_a_later_writer_are_ignored(build: "RecordBuilder") -> None:
    record = build.master(build.meta())
    later = header_of(record).SerializeToString() + b"\xfa\x01\x05later"  # field 31, five bytes
    reader = RecordReader(seal(record, later))
    reader.verify()
    assert reader.meta == build.meta()
    np.testing.assert_array_equal(reader.section(1), RecordReader(record).section(1))


def test_a_header_that_is_no_protobuf_is_refused(build: "RecordBuilder") -> None:
    with pytest.raises(RecordFormatError, match="not a RecordHeader"):
        RecordReader(seal(build.master(build.meta()), b"\xff" * 40))


@pytest.mark.parametrize(
    ("at", "value"),
    [(0, 2**32 - 1), (0, 3), (0, 1), (0, 0), (4, 1), (8, 4), (8, 2**31), (12, 0), (12, 2), (12, 2**32 - 1), (16, 0)],
)
def test_run_tables_that_lie_under_a_right_checksum_are_refused(build: "RecordBuilder", at: int, value: int) -> None:
    record = build.small_mirror()
    start = RecordReader(record).layout.section_offsets[1]
    record[start + at : start + at + 4] = np.frombuffer(struct.pack("<I", value), np.uint8)
    header = header_of(record)
    header.section_checksums[1] = xxh3_64_intdigest(RecordReader(record).section(1).tobytes())
    reader = RecordReader(seal(record, header.SerializeToString()))
    reader.verify()
    with pytest.raises(CorruptError, match="layer 1"):
        reader.mirror(1)


@pytest.mark.parametrize("length", [1, 3, 4, 7, 8, 12])
def test_a_mirror_section_too_short_for_its_table_is_refused(build: "RecordBuilder", length: int) -> None:
    record = build.small_mirror()
    header = header_of(record)
    header.section_bytes[1] = length
    shorter = seal(record, header.SerializeToString())
    shorter = seal(record, header.SerializeToString(), record_bytes=len(shorter) - 64)
    with pytest.raises(CorruptError, match="run counts"):
        RecordReader(shorter).mirror(1)


def test_a_corrupt_layer_is_named_with_both_checksums(build: "RecordBuilder") -> None:
    record = build.master(build.meta())
    reader = RecordReader(record)
    reader.section(1)[3] ^= 1
    reader.verify_layer(0)
    said, found = reader.section_checksums[1], xxh3_64_intdigest(reader.section(1).tobytes())
    with pytest.raises(CorruptError, match=f"layer 1: checksum {found:016x}, the header says {said:016x}"):
        reader.verify()
