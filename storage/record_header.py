"""A record's header: CacheMeta to protobuf and back. What is read here is hostile until each field was checked."""

import struct
from collections.abc import Sequence
from functools import lru_cache

from google.protobuf.message import DecodeError

from kvservice.model.cache import CacheMeta, MasterReference
from kvservice.model.errors import InvalidInputError, RecordFormatError
from kvservice.model.geometry import Geometry, Plane
from kvservice.model.identity import Namespace
from kvservice.model.segment import (
    DIGEST_BYTES,
    MARK_BYTES,
    PRECEDING_MAX,
    SEGMENT_TOKENS_MAX,
    CacheKey,
    ContextId,
    SegmentId,
)
from kvservice.wire.v1.record_pb2 import GeometryShape, PlaneShape, RecordHeader
from kvservice.wire.v1.record_pb2 import MasterReference as MasterReferenceShape

MAGIC = b"KVSREC\r\n"
"""The line ending shows a text-mode copy at once, as in PNG."""
FORMAT_VERSION = 1
PREFIX = struct.Struct("<8sHHIQQ")
PREFIX_BYTES = PREFIX.size
PREFIX_CHECKED_BYTES = PREFIX_BYTES - 8
HEADER_BYTES_MAX = 1 << 16
SECTION_BYTES_MAX = (1 << 32) - 1

assert PREFIX_BYTES == 32


def said_header_bytes(prefix: bytes) -> int:
    """How long the header is by its prefix, which nobody has verified; no longer than a header may be."""
    said: int = PREFIX.unpack(prefix)[3]
    return min(said, HEADER_BYTES_MAX)


def header_of_meta(meta: CacheMeta, section_bytes: Sequence[int], section_checksums: Sequence[int]) -> RecordHeader:
    """The header that says ``meta``. Its size does not depend on the checksums: they are fixed64.

    Raises InvalidInputError for a value the format has no room for.
    """
    _check_meta(meta)
    try:
        return RecordHeader(
            namespace=meta.namespace,
            segment=meta.key.segment,
            context=meta.key.context,
            provenance=meta.provenance,
            position=meta.position,
            tokens=meta.tokens,
            geometry=_shape_of_geometry(meta.geometry),
            preceding=b"".join(meta.preceding),
            master=_shape_of_reference(meta.master),
            section_bytes=section_bytes,
            section_checksums=section_checksums,
        )
    except ValueError as error:
        raise InvalidInputError(f"cache {meta.key}: the record format has no room for a value: {error}") from error


def parse_header(data: bytes) -> RecordHeader:
    """Decode a header. Fields of a later writer are ignored. Raises RecordFormatError if it is none."""
    try:
        return RecordHeader.FromString(data)
    except DecodeError as error:
        raise RecordFormatError(f"the header of {len(data)} bytes is not a RecordHeader: {error}") from error


def meta_of_header(header: RecordHeader) -> CacheMeta:
    """The meta that ``header`` says. Raises RecordFormatError for a field this program cannot mean."""
    try:
        meta = CacheMeta(
            namespace=Namespace(header.namespace),
            key=CacheKey(SegmentId(header.segment), ContextId(header.context)),
            position=header.position,
            tokens=header.tokens,
            geometry=_geometry_of_bytes(header.geometry.SerializeToString()),
            provenance=header.provenance,
            preceding=_marks_of(header.preceding),
            master=_reference_of_header(header),
        )
        _check_meta(meta)
    except InvalidInputError as error:
        raise RecordFormatError(f"the header is intact, but not one this program can read: {error}") from error
    return meta


def _check_meta(meta: CacheMeta) -> None:
    digests = {"namespace": meta.namespace, "segment": meta.key.segment, "context": meta.key.context}
    if meta.master is not None:
        digests["master's context"] = meta.master.context
    for name, value in digests.items():
        if len(value) != DIGEST_BYTES:
            raise InvalidInputError(f"cache {meta.key}: the {name} has {len(value)} bytes, a digest has {DIGEST_BYTES}")
    if not 0 < meta.tokens <= SEGMENT_TOKENS_MAX:
        raise InvalidInputError(f"cache {meta.key}: {meta.tokens} tokens, a segment has 1 to {SEGMENT_TOKENS_MAX}")
    if len(meta.preceding) > PRECEDING_MAX or any(len(mark) != MARK_BYTES for mark in meta.preceding):
        raise InvalidInputError(f"cache {meta.key}: preceding holds up to {PRECEDING_MAX} marks of {MARK_BYTES} bytes")


def _shape_of_geometry(geometry: Geometry) -> GeometryShape:
    planes = [
        PlaneShape(
            name=plane.name,
            heads=plane.heads,
            head_size=plane.head_size,
            rotary_offset=plane.rotary_offset,
            rotary_size=plane.rotary_size,
        )
        for plane in geometry.planes
    ]
    return GeometryShape(layers=geometry.layers, dtype=geometry.dtype, planes=planes)


@lru_cache(maxsize=64)
def _geometry_of_bytes(data: bytes) -> Geometry:
    """By what the header says of it: all caches of an engine say the same."""
    shape = GeometryShape.FromString(data)
    planes = tuple(
        Plane(plane.name, plane.heads, plane.head_size, plane.rotary_offset, plane.rotary_size)
        for plane in shape.planes
    )
    return Geometry(shape.layers, shape.dtype, planes)


def _shape_of_reference(reference: MasterReference | None) -> MasterReferenceShape | None:
    if reference is None:
        return None
    return MasterReferenceShape(context=reference.context, generation=reference.generation)


def _reference_of_header(header: RecordHeader) -> MasterReference | None:
    if not header.HasField("master"):
        return None
    return MasterReference(ContextId(header.master.context), header.master.generation)


def _marks_of(preceding: bytes) -> tuple[bytes, ...]:
    return tuple(preceding[at : at + MARK_BYTES] for at in range(0, len(preceding), MARK_BYTES))
