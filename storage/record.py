"""Records: one cache as one byte string, the same in every tier and on the wire. The public surface is here.

    record  := prefix header pad section*              one section a layer, in layer order
    prefix  := magic:"KVSREC\\r\\n" version:u16 kind:u16 header_bytes:u32 record_bytes:u64 header_checksum:u64
    header  := RecordHeader                            protobuf, proto/kvservice/wire/v1/record.proto
    section := (planes | diff | nothing) pad           pad: zeros up to a multiple of 64 bytes of the record
    planes  := ([tokens, heads, head_size] bits)*      kind 1, master: plane after plane
    diff    := run_count:u32* (first:u32 count:u32)* pad16 rows*      kind 2, mirror: each plane after plane
    nothing :=                                         kind 2: no plane of this layer has a run

Little endian; header_checksum is XXH3-64 over prefix bytes [0, 24) and header. FORMAT.md has the reasons.
"""

from kvservice.storage.record_header import (
    FORMAT_VERSION,
    HEADER_BYTES_MAX,
    PREFIX_BYTES,
    SECTION_BYTES_MAX,
    header_of_meta,
    meta_of_header,
    parse_header,
)
from kvservice.storage.record_layout import (
    SECTION_ALIGNMENT,
    RecordLayout,
    count_rows,
    master_layout,
    mirror_layout,
)
from kvservice.storage.record_reader import RecordHead, RecordReader, read_head
from kvservice.storage.record_writer import RecordWriter, WrittenRecord, record_generation

__all__ = [
    "FORMAT_VERSION",
    "HEADER_BYTES_MAX",
    "PREFIX_BYTES",
    "SECTION_ALIGNMENT",
    "SECTION_BYTES_MAX",
    "RecordHead",
    "RecordLayout",
    "RecordReader",
    "RecordWriter",
    "WrittenRecord",
    "count_rows",
    "header_of_meta",
    "master_layout",
    "meta_of_header",
    "mirror_layout",
    "parse_header",
    "read_head",
    "record_generation",
]
