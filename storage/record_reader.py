"""Reads one record in place. Everything in a buffer is hostile until it was checked; a size is believed last.

Prefix, header and run tables are copied out before they are checked: a buffer may be shared with a writer that errs.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from xxhash import xxh3_64_intdigest

from kvservice.model.cache import CacheKind, CacheMeta
from kvservice.model.errors import CorruptError, InvalidInputError, RecordFormatError
from kvservice.storage.buffer import Bytes, Runs, StorageBits, checksum, require_bytes
from kvservice.storage.record_header import (
    FORMAT_VERSION,
    HEADER_BYTES_MAX,
    MAGIC,
    PREFIX,
    PREFIX_BYTES,
    PREFIX_CHECKED_BYTES,
    meta_of_header,
    parse_header,
)
from kvservice.storage.record_layout import (
    COUNT_BYTES,
    RUN_BYTES,
    RecordLayout,
    RowSizes,
    count_rows,
    master_section_bytes,
    place_sections,
    rows_offset,
)
from kvservice.storage.record_writer import padding_at, record_generation


@dataclass(frozen=True, slots=True)
class RecordHead:
    """What prefix and header say, verified. The sections may be elsewhere."""

    meta: CacheMeta
    layout: RecordLayout
    section_checksums: tuple[int, ...]
    header_checksum: int

    @property
    def generation(self) -> int:
        """Digest of the content, which mirrors refer to."""
        return record_generation(self.section_checksums)


def read_head(buffer: Bytes) -> RecordHead:
    """Read and verify prefix and header at the start of ``buffer``, which may end anywhere behind them.

    Raises RecordFormatError for what is no record or of an unknown version, CorruptError for a checksum or size
    that lies.
    """
    require_bytes(buffer)
    header_bytes, record_bytes, kind, said = _read_prefix(buffer)
    data = buffer[PREFIX_BYTES : PREFIX_BYTES + header_bytes].tobytes()
    _check_header(buffer[:PREFIX_CHECKED_BYTES].tobytes(), data, said)
    header = parse_header(data)
    meta = meta_of_header(header)
    if kind != meta.kind:
        raise CorruptError(f"cache {meta.key}: the prefix says kind {kind}, the header {meta.kind.name}")
    section_bytes, section_checksums = tuple(header.section_bytes), tuple(header.section_checksums)
    _check_sections(meta, section_bytes, section_checksums)
    layout = place_sections(header_bytes, section_bytes)
    if layout.record_bytes != record_bytes:
        raise CorruptError(f"cache {meta.key}: {record_bytes} bytes said, its sections make {layout.record_bytes}")
    return RecordHead(meta, layout, section_checksums, said)


@dataclass(frozen=True, slots=True)
class MasterPlaces:
    """Where a master's planes lie in its record, in bytes: its sections are equally long.

    Plane ``p`` of layer ``l`` begins at ``start + l * layer_stride + plane_offsets[p]``.
    """

    start: int
    layer_stride: int
    plane_offsets: tuple[int, ...]


class RecordReader:
    """A record at the start of ``buffer``, verified up to its sections; those are verified by ``verify``.

    Every view lies in ``buffer`` and lives as long as it. Reads only, so any number of threads may use it. Raises
    as ``read_head`` does, and CorruptError if the buffer ends before the record or padding is not zero.
    """

    def __init__(self, buffer: Bytes) -> None:
        self.head = read_head(buffer)
        self.meta = self.head.meta
        self.layout = self.head.layout
        self.section_checksums = self.head.section_checksums
        self.header_checksum = self.head.header_checksum
        self.generation = self.head.generation
        if len(buffer) < self.layout.record_bytes:
            raise CorruptError(f"{self}: {self.layout.record_bytes} bytes said, the buffer has {len(buffer)}")
        self._buffer = buffer[: self.layout.record_bytes]
        self._rows = RowSizes.of(self.meta.geometry)
        self._empty: tuple[list[Runs], list[StorageBits]] | None = None
        self._check_padding(0, "the header")

    def __str__(self) -> str:
        return f"record of {self.meta.kind.name.lower()} {self.meta.key}"

    @property
    def buffer(self) -> Bytes:
        """The whole record."""
        return self._buffer

    def section(self, layer: int) -> Bytes:
        """A layer's section as it lies, without padding."""
        start = self.layout.section_offsets[layer]
        return self._buffer[start : start + self.layout.section_bytes[layer]]

    def master_planes(self, layer: int) -> list[StorageBits]:
        """Views of a layer's planes, each ``[tokens, row_elements]``."""
        assert self.meta.kind is CacheKind.MASTER, self
        return self._rows.split(self.section(layer), [self.meta.tokens] * len(self.meta.geometry.planes))

    def master_places(self) -> MasterPlaces:
        """Where ``master_planes`` of all layers are, for code that reads many layers in one call."""
        assert self.meta.kind is CacheKind.MASTER, self
        starts, planes = self.layout.section_offsets, [0]
        for row_bytes, _ in self._rows.sizes[:-1]:
            planes.append(planes[-1] + self.meta.tokens * row_bytes)
        return MasterPlaces(starts[0], starts[1] - starts[0] if len(starts) > 1 else 0, tuple(planes))

    def mirror(self, layer: int) -> tuple[list[Runs], list[StorageBits]]:
        """A layer's diff: per plane its runs (int32 [n, 2], a copy) and a view of its rows ``[rows, row_elements]``.

        Raises CorruptError if the run table is not sorted, disjoint and inside, or does not fit the section.
        """
        assert self.meta.kind is CacheKind.MIRROR, self
        section = self.section(layer)
        if not len(section):
            return self._empty_mirror()
        try:
            runs, rows = _read_table(section, len(self.meta.geometry.planes), self.meta.tokens)
        except InvalidInputError as error:
            raise CorruptError(f"{self}, layer {layer}: {error}") from error
        start = rows_offset([len(runs_of_plane) for runs_of_plane in runs])
        if start + self._rows.total_bytes(rows) != len(section) or not any(rows):
            raise CorruptError(f"{self}, layer {layer}: {sum(rows)} rows do not make a section of {len(section)} bytes")
        return runs, self._rows.split(section[start:], rows)

    def verify_layer(self, layer: int) -> None:
        """Raise CorruptError unless the layer's bytes have their checksum and its padding is zero."""
        found, said = checksum(self.section(layer)), self.section_checksums[layer]
        if found != said:
            raise CorruptError(f"{self}, layer {layer}: checksum {found:016x}, the header says {said:016x}")
        self._check_padding(layer + 1, f"layer {layer}")

    def verify(self) -> None:
        """Verify every layer."""
        for layer in range(self.meta.geometry.layers):
            self.verify_layer(layer)

    def _empty_mirror(self) -> tuple[list[Runs], list[StorageBits]]:
        if self._empty is None:  # made once: the layers below a check layer have no diff
            planes = len(self.meta.geometry.planes)
            runs: list[Runs] = [np.empty((0, 2), np.int32)] * planes
            self._empty = runs, self._rows.split(self._buffer[:0], [0] * planes)
        return self._empty

    def _check_padding(self, index: int, behind: str) -> None:
        start, end = padding_at(self.layout, index)
        if any(self._buffer[start:end].tobytes()):  # fewer bytes than a call of numpy costs
            raise CorruptError(f"{self}: the padding behind {behind} is not zero")


def _read_prefix(buffer: Bytes) -> tuple[int, int, int, int]:
    data = buffer[:PREFIX_BYTES].tobytes()
    if len(data) < PREFIX_BYTES or not data.startswith(MAGIC):
        raise RecordFormatError(f"not a record: it starts with {data[: len(MAGIC)]!r}, {len(buffer)} bytes")
    _, version, kind, header_bytes, record_bytes, said = PREFIX.unpack(data)
    if version != FORMAT_VERSION:
        raise RecordFormatError(f"a record of format version {version}; this program reads {FORMAT_VERSION}")
    if header_bytes > HEADER_BYTES_MAX or PREFIX_BYTES + header_bytes > min(len(buffer), record_bytes):
        raise CorruptError(f"a header of {header_bytes} bytes in a record of {record_bytes}, buffer of {len(buffer)}")
    return header_bytes, record_bytes, kind, said


def _check_header(prefix: bytes, header: bytes, said: int) -> None:
    found = xxh3_64_intdigest(prefix + header)
    if found != said:
        raise CorruptError(f"the header's checksum is {found:016x}, the prefix says {said:016x}")


def _check_sections(meta: CacheMeta, section_bytes: tuple[int, ...], section_checksums: Sequence[int]) -> None:
    layers = meta.geometry.layers
    if len(section_bytes) != layers or len(section_checksums) != layers:
        raise CorruptError(
            f"cache {meta.key}: {len(section_bytes)} sections, {len(section_checksums)} checksums, {layers} layers"
        )
    dense = master_section_bytes(meta)
    if meta.kind is CacheKind.MASTER and section_bytes.count(dense) != layers:
        raise CorruptError(f"cache {meta.key}: a master's section has {dense} bytes, one of these has not")


def _read_table(section: Bytes, planes: int, tokens: int) -> tuple[list[Runs], list[int]]:
    """Runs and number of rows of every plane, checked. K and V mostly have equal tables: those are checked once."""
    head = section[: COUNT_BYTES * planes].tobytes()
    if len(head) < COUNT_BYTES * planes:
        raise InvalidInputError(f"{len(section)} bytes have no room for {planes} run counts")
    run_counts = struct.unpack(f"<{planes}I", head)
    if rows_offset(run_counts) > len(section):
        raise InvalidInputError(f"run counts {run_counts} do not fit in {len(section)} bytes")
    start, known = COUNT_BYTES * planes, dict[bytes, tuple[Runs, int]]()
    found = []
    for count in run_counts:
        end = start + RUN_BYTES * count
        table = section[start:end].tobytes()
        if table not in known:
            runs = np.frombuffer(bytearray(table), np.int32).reshape(count, 2)
            known[table] = runs, count_rows(runs, tokens)
        found.append(known[table])
        start = end
    return [runs for runs, _ in found], [rows for _, rows in found]
