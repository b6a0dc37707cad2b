"""Writes one record into a buffer, in place: the caller fills views of the sections, then ``finish`` seals it.

Equal meta, runs and rows give equal bytes. The buffer holds no readable record from construction until ``finish``.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from xxhash import xxh3_64_intdigest

from kvservice.model.cache import CacheKind, CacheMeta
from kvservice.model.errors import InvalidInputError
from kvservice.storage.buffer import Bytes, Runs, StorageBits, checksum, require_bytes
from kvservice.storage.mapping import prefault
from kvservice.storage.record_header import (
    FORMAT_VERSION,
    MAGIC,
    PREFIX,
    PREFIX_BYTES,
    PREFIX_CHECKED_BYTES,
    header_of_meta,
)
from kvservice.storage.record_layout import (
    RecordLayout,
    RowSizes,
    diff_bytes,
    place_sections,
    rows_of_planes,
    rows_offset,
)


@dataclass(frozen=True, slots=True)
class WrittenRecord:
    """What ``finish`` computed: the header's checksum, and the generation a mirror of this record refers to."""

    header_checksum: int
    generation: int


class RecordWriter:
    """Fills ``buffer`` (uint8, writable, at least ``layout.record_bytes``). Used by one thread; owns nothing.

    Raises InvalidInputError for another buffer, CapacityError if the system has no memory for its pages.
    """

    def __init__(self, buffer: Bytes, meta: CacheMeta, layout: RecordLayout) -> None:
        require_bytes(buffer, is_writable=True)
        if len(buffer) < layout.record_bytes:
            raise InvalidInputError(f"cache {meta.key}: {layout.record_bytes} bytes do not fit in {len(buffer)}")
        assert layout == place_sections(layout.header_bytes, layout.section_bytes), layout
        assert len(layout.section_bytes) == meta.geometry.layers, layout
        self._buffer = buffer[: layout.record_bytes]
        prefault(self._buffer)
        self._meta = meta
        self._layout = layout
        self._rows = RowSizes.of(meta.geometry)
        self._layers_with_runs: set[int] = set()
        self._buffer[: len(MAGIC)] = 0  # what the extent held before must not pass for this record

    def master_planes(self, layer: int) -> list[StorageBits]:
        """Writable views of a layer's planes, each ``[tokens, row_elements]``, inside the buffer."""
        assert self._meta.kind is CacheKind.MASTER, self._meta.key
        return self._rows.split(self._section(layer), [self._meta.tokens] * len(self._meta.geometry.planes))

    def mirror_rows(self, layer: int, runs: Sequence[Runs]) -> list[StorageBits]:
        """Write a layer's run table; returns writable views of its rows, one ``[rows, row_elements]`` a plane.

        ``runs``: as given to ``mirror_layout``. Raises InvalidInputError if they need another size than the layout's.
        """
        assert self._meta.kind is CacheKind.MIRROR, self._meta.key
        section = self._section(layer)
        rows = rows_of_planes(self._meta, runs)
        if diff_bytes(self._meta.geometry, runs, rows) != len(section):
            raise InvalidInputError(f"cache {self._meta.key}, layer {layer}: these are not the runs that were laid out")
        self._layers_with_runs.add(layer)
        if not len(section):
            return self._rows.split(section, rows)
        return self._rows.split(section[_write_table(section, runs) :], rows)

    def finish(self) -> WrittenRecord:
        """Checksum the sections, zero the padding, write header and prefix. Call it after the last row is in place."""
        sections = range(self._meta.geometry.layers)
        assert self._meta.kind is CacheKind.MASTER or all(
            layer in self._layers_with_runs or not self._layout.section_bytes[layer] for layer in sections
        ), f"cache {self._meta.key}: a layer's runs were laid out but not written"
        checksums = [checksum(self._section(layer)) for layer in sections]
        self._zero_padding()
        return WrittenRecord(self._write_header(checksums), record_generation(checksums))

    def _section(self, layer: int) -> Bytes:
        start = self._layout.section_offsets[layer]
        return self._buffer[start : start + self._layout.section_bytes[layer]]

    def _zero_padding(self) -> None:
        for start, end in padding_of(self._layout):
            self._buffer[start:end] = 0

    def _write_header(self, checksums: Sequence[int]) -> int:
        layout = self._layout
        header = header_of_meta(self._meta, layout.section_bytes, checksums).SerializeToString(deterministic=True)
        assert len(header) == layout.header_bytes, (len(header), layout)
        fields = (MAGIC, FORMAT_VERSION, int(self._meta.kind), layout.header_bytes, layout.record_bytes)
        said = xxh3_64_intdigest(PREFIX.pack(*fields, 0)[:PREFIX_CHECKED_BYTES] + header)
        start = np.frombuffer(PREFIX.pack(*fields, said) + header, np.uint8)
        np.copyto(self._buffer[: PREFIX_BYTES + layout.header_bytes], start)
        return said


def record_generation(section_checksums: Sequence[int]) -> int:
    """Digest of a record's content, which its mirrors refer to: XXH3-64 over the little-endian checksums."""
    return xxh3_64_intdigest(struct.pack(f"<{len(section_checksums)}Q", *section_checksums))


def padding_of(layout: RecordLayout) -> list[tuple[int, int]]:
    """(start, end) of the padding behind the header, then behind every section."""
    return [padding_at(layout, index) for index in range(len(layout.section_offsets) + 1)]


def padding_at(layout: RecordLayout, index: int) -> tuple[int, int]:
    """(start, end) of the padding behind the header, index 0, or behind section ``index - 1``."""
    offsets, start = layout.section_offsets, PREFIX_BYTES + layout.header_bytes
    if index:
        start = offsets[index - 1] + layout.section_bytes[index - 1]
    return start, offsets[index] if index < len(offsets) else layout.record_bytes


def _write_table(section: Bytes, runs: Sequence[Runs]) -> int:
    counts = [len(runs_of_plane) for runs_of_plane in runs]
    table = section[: rows_offset(counts)].view(np.int32)
    table[:] = 0
    table[: len(counts)] = counts
    end = len(counts) + 2 * sum(counts)
    np.concatenate([runs_of_plane.reshape(-1) for runs_of_plane in runs], out=table[len(counts) : end])
    return table.nbytes
