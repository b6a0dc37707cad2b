"""Rows as 8 bits between nodes: a record is cut into what goes packed and what goes as it lies, and is taken in again.

Packed is what comes back bit for bit, and nothing else: whoever gets it cannot tell, but for the bytes on the wire.
What comes packed is hostile until it was checked; that its bits are right, the layers' checksums say. Kernels are
imported inside functions: a node that never packs compiles nothing.
"""

import logging
from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from kvservice.model.cache import CacheKind
from kvservice.model.errors import CorruptError, InvalidInputError, RecordFormatError
from kvservice.peers.frames import DATA_BYTES_MAX, HEADER, FrameError, Header
from kvservice.peers.packed_counters import PackedCounters
from kvservice.peers.streams_channel import PIECE_BYTES, Channel, Source, cut
from kvservice.storage.buffer import Bytes, round_up
from kvservice.storage.mapping import prefault
from kvservice.storage.record_reader import RecordReader
from kvservice.wire.v1 import peer_pb2 as wire

log = logging.getLogger(__name__)
FRAME_ROWS_BYTES = 512 << 10
"""Of the record, that one packed frame stands for, so that a slow link is seen to move."""
AREA_BYTES_MIN = 16 << 10
"""Fewer rows are not worth a frame."""
ELEMENT_BYTES = 2
"""Of every storage type that has a form of 8 bits."""


class Packed(NamedTuple):
    """What a packed frame carries. ``payload`` lives until the next piece is asked for."""

    message: wire.PeerPacked
    payload: Bytes

    @property
    def wire_bytes(self) -> int:
        """Of the frame."""
        return HEADER.size + self.message.ByteSize() + len(self.payload)


class Piece(NamedTuple):
    """Bytes [first, last) of a record, as they lie or packed."""

    first: int
    last: int
    packed: Packed | None = None


class Area(NamedTuple):
    """Bytes [first, last) of a record, which are rows: heads of ``head_size`` elements, one behind the other."""

    first: int
    last: int
    head_size: int


# Sending


class Packer:
    """Cuts a record, whose bytes may still be arriving. One thread at a time."""

    def __init__(self, record: Bytes) -> None:
        self._record = record
        self._reader: RecordReader | None = None
        self._is_plain = False
        self._scratch = np.empty(0, np.uint8)

    def cut(self, start: int, end: int) -> Iterator[Piece]:
        """Bytes [start, end) of the record, in order and without gaps. All before ``end`` must have arrived."""
        plain = start
        for first, last, head_size in self._areas(start, end):
            head_bytes = ELEMENT_BYTES * head_size
            for at, behind in cut(first, last, _heads_of_frame(head_size) * head_bytes):
                packed = self._pack(at, behind, head_size)
                if packed is not None:
                    if plain < at:
                        yield Piece(plain, at)
                    yield Piece(at, behind, packed)
                    plain = behind
                elif behind - plain >= DATA_BYTES_MAX:  # nobody waits while more of it is looked at
                    yield Piece(plain, behind)
                    plain = behind
        if plain < end:
            yield Piece(plain, end)

    def _areas(self, start: int, end: int) -> Iterator[Area]:
        """Those in [start, end) that are worth it, from a head's first byte on."""
        for first, last, head_size in _joined(self._rows(start, end)):
            head_bytes = ELEMENT_BYTES * head_size
            begin = first + round_up(max(0, start - first), head_bytes)
            is_shorter = _packed_bytes(1, head_size) < head_bytes <= FRAME_ROWS_BYTES
            if is_shorter and last - begin >= AREA_BYTES_MIN:
                yield Area(begin, last, head_size)

    def _rows(self, start: int, end: int) -> Iterator[Area]:
        """Of all layers that end in (start, end]."""
        reader = self._open()
        if reader is None:
            return
        layout = reader.layout
        for layer in range(max(0, bisect_right(layout.bounds, start) - 1), len(layout.section_bytes)):
            if layout.section_offsets[layer] + layout.section_bytes[layer] > end:
                return
            yield from _rows_of(reader, layer)

    def _open(self) -> RecordReader | None:
        """None: there is nothing in it that could be packed."""
        if self._reader is None and not self._is_plain:
            self._reader = _reader_of(self._record)
            self._is_plain = self._reader is None
        return self._reader

    def _pack(self, first: int, last: int, head_size: int) -> Packed | None:
        """None: they would not come back as they are."""
        from kvservice.kernels.cpu_int8 import pack

        assert self._reader is not None, "it tells where rows are"
        dtype, heads = self._reader.meta.geometry.dtype, (last - first) // (ELEMENT_BYTES * head_size)
        payload = self._room(_packed_bytes(heads, head_size))
        if not pack(self._record[first:last].view(np.uint16), head_size, dtype, payload):
            return None
        return Packed(wire.PeerPacked(dtype=dtype, head_size=head_size, heads=heads), payload)

    def _room(self, count: int) -> Bytes:
        if len(self._scratch) < count:
            self._scratch = np.empty(count, np.uint8)
        return self._scratch[:count]


def pieces_of(
    channel: Channel, source: Source, start: int, end: int, packer: Packer | None, frame_bytes: int = DATA_BYTES_MAX
) -> Iterator[Piece]:
    """Bytes [start, end) of a source, each piece for one frame on this channel; without a packer all as they lie."""
    for piece in (Piece(start, end),) if packer is None else packer.cut(start, end):
        if piece.packed is not None:
            yield piece
        else:
            yield from (Piece(*part) for part in channel.frames_of(source, piece.first, piece.last, frame_bytes))


def send_piece(channel: Channel, request: int, source: Source, piece: Piece, counters: PackedCounters) -> None:
    """One frame, counted if it is packed."""
    if piece.packed is None:
        channel.send_data(request, source, piece.first, piece.last)
    else:
        channel.send_packed(request, *piece.packed)
        counters.note_packed(piece.last - piece.first, piece.packed.wire_bytes)


def _reader_of(record: Bytes) -> RecordReader | None:
    """None for a storage type without a form of 8 bits, and for what is no record."""
    from kvservice.kernels.cpu_int8 import DTYPES

    try:
        reader = RecordReader(record)
    except (CorruptError, RecordFormatError, InvalidInputError) as error:
        log.warning("what is sent is no record, and goes as it lies: %s", error)
        return None
    return reader if reader.meta.geometry.dtype in DTYPES else None


def _joined(areas: Iterator[Area]) -> Iterator[Area]:
    """What lies without a gap, with heads of one size, as one: K and V, and layers that need no padding."""
    joined: Area | None = None
    for area in areas:
        if joined is None:
            joined = area
        elif (area.first, area.head_size) == (joined.last, joined.head_size):
            joined = joined._replace(last=area.last)
        else:
            yield joined
            joined = area
    if joined is not None:
        yield joined


def _rows_of(reader: RecordReader, layer: int) -> Iterator[Area]:
    """A layer's rows, plane by plane: they end where its section does."""
    try:
        is_master = reader.meta.kind is CacheKind.MASTER
        planes = reader.master_planes(layer) if is_master else reader.mirror(layer)[1]
    except CorruptError as error:
        log.warning("a layer goes as it lies: %s", error)
        return
    at = reader.layout.section_offsets[layer] + reader.layout.section_bytes[layer] - sum(rows.nbytes for rows in planes)
    for rows, plane in zip(planes, reader.meta.geometry.planes, strict=True):
        yield Area(at, at + rows.nbytes, plane.head_size)
        at += rows.nbytes


def _heads_of_frame(head_size: int) -> int:
    """So many that it is seen to move as often as what goes as it lies."""
    return max(1, PIECE_BYTES // _packed_bytes(1, head_size))


def _packed_bytes(heads: int, head_size: int) -> int:
    from kvservice.kernels.cpu_int8 import packed_bytes

    return packed_bytes(heads, head_size)


# Receiving


class Unpacker:
    """Takes packed frames in. One thread at a time."""

    def __init__(self) -> None:
        self._scratch = np.empty(0, np.uint8)

    def receive(self, channel: Channel, header: Header, target: memoryview, at: int) -> int:
        """Fill ``target``, a record, from ``at`` on with what a packed frame stands for; up to where.

        Raises FrameError for a frame that lies, before anything is written or room is made, and CapacityError if the
        system has no memory for it.
        """
        from kvservice.kernels.cpu_int8 import unpack

        said = channel.receive_message(header, wire.PeerPacked())
        end = at + _checked_bytes(said, header.payload_bytes, at, len(target))
        if len(self._scratch) < header.payload_bytes:
            self._scratch = np.empty(header.payload_bytes, np.uint8)
        payload, rows = self._scratch[: header.payload_bytes], target[at:end]
        channel.receive_piece(payload.data)
        prefault(rows)
        unpack(payload, said.head_size, said.dtype, np.frombuffer(rows, np.uint16))
        return end


def _checked_bytes(said: wire.PeerPacked, payload_bytes: int, at: int, total: int) -> int:
    """Of the record, that the frame stands for. Raises FrameError unless everything that it says fits together."""
    from kvservice.kernels.cpu_int8 import DTYPES

    count = ELEMENT_BYTES * said.heads * said.head_size
    is_right = said.dtype in DTYPES and not at % ELEMENT_BYTES and 0 < count <= min(FRAME_ROWS_BYTES, total - at)
    if not is_right or payload_bytes != _packed_bytes(said.heads, said.head_size):
        what = f"{payload_bytes} bytes for {said.heads} heads of {said.head_size} {said.dtype[:40]!r}"
        raise FrameError(f"a packed frame of {what} at byte {at} of a record of {total}")
    return count
