"""What a record must be to be published: its bytes, against what was reserved and what its commit says.

All at once at the commit; or layer by layer as the bytes come, where they come over a wire and nobody can change them
any more: each layer is then still in the core's cache, and the commit has nothing left to read.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvservice.caches import POSITION_MAX, VerifiedRecord
from kvservice.limits import ANGLE_MAX
from kvservice.model.cache import CacheKind, CacheMeta
from kvservice.model.errors import (
    ChecksumMismatchError,
    GeometryMismatchError,
    InvalidInputError,
    KVServiceError,
    NonFiniteError,
    TokenCountError,
)
from kvservice.model.segment import SEGMENT_TOKENS_MAX
from kvservice.storage.arrival import Sections
from kvservice.storage.buffer import BITS_OF_ELEMENT, Bytes, StorageBits
from kvservice.storage.record import RecordReader

if TYPE_CHECKING:
    from kvservice.store import Reservation

FINITE_CHUNK_BYTES = 512 << 10
"""Looked at in one go, so that the second look finds it in the core's cache (16 MiB: 0.34 ms, in one piece 0.38)."""
_SIGNED: dict[int, np.dtype[np.signedinteger[Any]]] = {2: np.dtype(np.int16), 4: np.dtype(np.int32)}
# The largest finite value by its bits, without a sign; all bits above are infinities and NaNs.
_LARGEST_FINITE = {"bfloat16": 0x7F7F, "float16": 0x7BFF, "float32": 0x7F7F_FFFF}


class CommitCheck:
    """The checks of one record, from its first byte to its last."""

    def __init__(self, reservation: "Reservation", view: Bytes) -> None:
        self._reservation = reservation
        self._view = view
        self._sections = Sections(view, self._open_head)
        self._reader: RecordReader | None = None
        self._is_meta_right = False
        self._right = bytearray()
        self._fault: KVServiceError | None = None

    @property
    def is_over(self) -> bool:
        """Is every byte looked at, or a fault found? Then ``finish`` takes some microseconds."""
        return self._fault is not None or (self._is_meta_right and all(self._right))

    def arrived(self, start: int, end: int) -> None:
        """Bytes [start, end) are there and stay as they are: check what is whole. What is wrong is said at the end.

        Pieces may arrive in any order, from any thread, each byte once.
        """
        if self._fault is not None:
            return
        try:
            for layer in self._sections.arrived(start, end):
                self._check_layer(self._open(), layer)
        except KVServiceError as error:
            self._fault = error

    def finish(self, header_checksum: int) -> VerifiedRecord:
        """Check what is left, once nothing more arrives. Raises KVServiceError if the record is not right."""
        reader = self._open()
        if reader.header_checksum != header_checksum:
            raise ChecksumMismatchError(
                f"the header's checksum is {reader.header_checksum:016x}, the commit says {header_checksum:016x}"
            )
        if self._fault is not None:
            raise self._fault
        self._open_head()
        for layer, is_right in enumerate(self._right):
            if not is_right:
                self._check_layer(reader, layer)
        return VerifiedRecord(reader.meta, self._reservation.extent, reader.generation, self._reservation.prefill_s)

    def _open(self) -> RecordReader:
        if self._reader is None:
            self._reader = RecordReader(self._view)
            self._right = bytearray(len(self._reader.section_checksums))
        return self._reader

    def _open_head(self) -> Sequence[int]:
        reader = self._open()
        if not self._is_meta_right:
            _check_meta(self._reservation, reader.meta, reader.layout.record_bytes)
            self._is_meta_right = True
        return reader.layout.bounds

    def _check_layer(self, reader: RecordReader, layer: int) -> None:
        reader.verify_layer(layer)
        is_opaque = reader.meta.geometry.is_opaque  # bytes, no numbers
        if not is_opaque and not all(_is_finite(rows, reader.meta.geometry.dtype) for rows in _rows(reader, layer)):
            raise NonFiniteError(
                f"cache {self._reservation.key}: layer {layer} holds a NaN or an infinity; do not store it, "
                "recompute it"
            )
        self._right[layer] = 1


def _rows(reader: RecordReader, layer: int) -> list[StorageBits]:
    """The values that a layer stores. Raises CorruptError unless a mirror's run table makes sense."""
    if reader.meta.kind is CacheKind.MIRROR:
        return reader.mirror(layer)[1]
    return [reader.section(layer).view(BITS_OF_ELEMENT[reader.meta.geometry.element_bytes])]


def _is_finite(rows: StorageBits, dtype: str) -> bool:
    """Is no value a NaN or an infinity? Two maxima, without a copy: signed for values above 0, unsigned for below.

    Of a 16 MiB record 0.32 ms after the checksum's 0.27 ms; numpy lets go of the GIL.
    """
    largest, flat = _LARGEST_FINITE[dtype], rows.reshape(-1)
    sign, step = 1 << (8 * flat.itemsize - 1), FINITE_CHUNK_BYTES // flat.itemsize
    for start in range(0, len(flat), step):
        chunk = flat[start : start + step]
        above, below = np.maximum.reduce(chunk.view(_SIGNED[flat.itemsize])), np.maximum.reduce(chunk)
        if above > largest or below > largest | sign:
            return False
    return True


def _check_meta(reservation: "Reservation", meta: CacheMeta, record_bytes: int) -> None:
    key, space = reservation.key, reservation.space
    if meta.key != key or meta.namespace != space.namespace:
        raise InvalidInputError(f"cache {key}: the record in its extent says that it is {meta.key}")
    if meta.geometry != space.geometry:
        raise GeometryMismatchError(f"cache {key}: its record has another geometry than the identity of its namespace")
    if record_bytes != reservation.extent.length:
        raise InvalidInputError(f"cache {key}: {record_bytes} bytes written, {reservation.extent.length} reserved")
    if not 0 < meta.tokens <= SEGMENT_TOKENS_MAX or meta.position + meta.tokens > POSITION_MAX:
        raise TokenCountError(f"cache {key}: {meta.tokens} tokens at {meta.position} are out of range")
    if meta.position + meta.tokens > space.end_max:
        raise InvalidInputError(
            f"cache {key}: {meta.tokens} tokens at {meta.position} turn past {ANGLE_MAX:.0f} radians and could not be "
            f"moved exactly; store it nearer to position 0, with its last token before {space.end_max}"
        )
    if meta.master != reservation.reference:
        raise InvalidInputError(f"cache {key}: its record names another master than was reserved")
