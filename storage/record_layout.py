"""Where everything in a record lies. Arithmetic over a CacheMeta and runs; moves no bytes. Grammar: record.py."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np

from kvservice.model.cache import CacheKind, CacheMeta
from kvservice.model.errors import InvalidInputError
from kvservice.model.geometry import Geometry
from kvservice.storage.buffer import BITS_OF_ELEMENT, Bytes, Runs, StorageBits, round_up
from kvservice.storage.record_header import HEADER_BYTES_MAX, PREFIX_BYTES, SECTION_BYTES_MAX, header_of_meta

SECTION_ALIGNMENT = 64
ROWS_ALIGNMENT = 16
COUNT_BYTES, RUN_BYTES = 4, 8

if sys.byteorder != "little":
    raise ImportError("records hold little-endian storage bits and are used in place; this machine is big-endian")


@dataclass(frozen=True, slots=True)
class RecordLayout:
    """Sizes and offsets in bytes from the record's start. ``section_bytes`` excludes padding."""

    header_bytes: int
    section_offsets: tuple[int, ...]
    section_bytes: tuple[int, ...]
    record_bytes: int

    @property
    def bounds(self) -> tuple[int, ...]:
        """Where each section begins, and the record's end: between two of them lie a layer and its padding."""
        return (*self.section_offsets, self.record_bytes)


def master_layout(meta: CacheMeta) -> RecordLayout:
    """Layout of a dense record. Raises InvalidInputError if ``meta`` names a mirror or does not fit the format."""
    _require_kind(meta, CacheKind.MASTER)
    return _layout(meta, (master_section_bytes(meta),) * meta.geometry.layers)


def mirror_layout(meta: CacheMeta, runs: Sequence[Sequence[Runs]]) -> RecordLayout:
    """Layout of a mirror with ``runs[layer][plane]``, each int32 [n, 2] of (first row, count).

    Raises InvalidInputError unless the runs are sorted, disjoint, inside [0, tokens), one array a layer and plane.
    """
    _require_kind(meta, CacheKind.MIRROR)
    if len(runs) != meta.geometry.layers:
        raise InvalidInputError(f"cache {meta.key}: runs for {len(runs)} layers, it has {meta.geometry.layers}")
    return _layout(meta, [diff_bytes(meta.geometry, layer, rows_of_planes(meta, layer)) for layer in runs])


def master_section_bytes(meta: CacheMeta) -> int:
    """Bytes of every section of a master."""
    return meta.tokens * meta.geometry.token_layer_bytes


def rows_of_planes(meta: CacheMeta, runs: Sequence[Runs]) -> list[int]:
    """Replaced rows of each plane of one layer. ``runs``: one array a plane, checked here."""
    planes = meta.geometry.planes
    if len(runs) != len(planes):
        raise InvalidInputError(f"cache {meta.key}: runs for {len(runs)} planes, it has {len(planes)}")
    return [count_rows(runs_of_plane, meta.tokens) for runs_of_plane in runs]


def diff_bytes(geometry: Geometry, runs: Sequence[Runs], rows: Sequence[int]) -> int:
    """Bytes of a mirror's section with these runs and rows, plane by plane; 0 if there are none."""
    if not any(rows):
        return 0
    return rows_offset([len(runs_of_plane) for runs_of_plane in runs]) + RowSizes.of(geometry).total_bytes(rows)


@dataclass(frozen=True, slots=True)
class RowSizes:
    """How a geometry's rows lie: ``sizes`` is (bytes, elements) of a row, plane by plane. Made once for a record."""

    bits: type[np.unsignedinteger[Any]]
    sizes: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, geometry: Geometry) -> "RowSizes":
        """The sizes of a geometry's rows."""
        return _row_sizes(geometry)

    def total_bytes(self, counts: Sequence[int]) -> int:
        """Bytes of so many rows, given plane by plane."""
        return sum(count * size for count, (size, _) in zip(counts, self.sizes, strict=True))

    def split(self, rows: Bytes, counts: Sequence[int]) -> list[StorageBits]:
        """Views of each plane's rows, ``[count, row_elements]``, that follow each other in ``rows``."""
        views: list[StorageBits] = []
        start = 0
        for count, (size, elements) in zip(counts, self.sizes, strict=True):
            end = start + count * size
            views.append(rows[start:end].view(self.bits).reshape(count, elements))
            start = end
        assert start == len(rows), (start, len(rows))
        return views


@lru_cache(maxsize=64)
def _row_sizes(geometry: Geometry) -> RowSizes:
    sizes = tuple((geometry.row_bytes(plane), plane.row_elements) for plane in geometry.planes)
    return RowSizes(BITS_OF_ELEMENT[geometry.element_bytes], sizes)


def rows_offset(run_counts: Sequence[int]) -> int:
    """Where the replaced rows start in a mirror's section: behind the run table, on a 16-byte boundary."""
    return round_up(COUNT_BYTES * len(run_counts) + RUN_BYTES * sum(run_counts), ROWS_ALIGNMENT)


_SHORT_TABLE = 32
"""Up to so many runs plain integers are faster than numpy (2 us against 8 us for four runs)."""
_BAD_RUNS = "runs must be sorted, disjoint, of 1 or more rows, and inside the {} tokens"


def count_rows(runs: Runs, tokens: int) -> int:
    """Rows in ``runs``. Raises InvalidInputError unless they are sorted, disjoint, not empty and in [0, tokens)."""
    if runs.dtype != np.int32 or runs.ndim != 2 or runs.shape[1] != 2:
        raise InvalidInputError(f"runs are int32 [n, 2], these are {runs.dtype} {list(runs.shape)}")
    if not len(runs):
        return 0
    if len(runs) <= _SHORT_TABLE:
        return _count_short(runs.tolist(), tokens)
    first, count = runs[:, 0].astype(np.int64), runs[:, 1].astype(np.int64)
    end = first + count
    is_apart = bool((first[1:] >= end[:-1]).all())
    if first[0] < 0 or count.min() < 1 or end[-1] > tokens or not is_apart:
        raise InvalidInputError(_BAD_RUNS.format(tokens))
    return int(count.sum())


def _count_short(runs: list[list[int]], tokens: int) -> int:
    rows = behind = 0
    for first, count in runs:
        if first < behind or count < 1:
            raise InvalidInputError(_BAD_RUNS.format(tokens))
        behind = first + count
        rows += count
    if behind > tokens:
        raise InvalidInputError(_BAD_RUNS.format(tokens))
    return rows


def place_sections(header_bytes: int, section_bytes: Sequence[int]) -> RecordLayout:
    """Offsets follow from sizes: each section starts at the next multiple of 64 bytes."""
    lengths, start = tuple(section_bytes), round_up(PREFIX_BYTES + header_bytes, SECTION_ALIGNMENT)
    if lengths and lengths.count(lengths[0]) == len(lengths):  # a master: not a step of Python a section
        step = round_up(lengths[0], SECTION_ALIGNMENT)
        offsets = tuple(start + step * index for index in range(len(lengths)))
        return RecordLayout(header_bytes, offsets, lengths, start + step * len(lengths))
    ends = tuple(accumulate((round_up(length, SECTION_ALIGNMENT) for length in lengths), initial=start))
    return RecordLayout(header_bytes, ends[:-1], lengths, ends[-1])


def _layout(meta: CacheMeta, section_bytes: Sequence[int]) -> RecordLayout:
    if max(section_bytes) > SECTION_BYTES_MAX:
        raise InvalidInputError(
            f"cache {meta.key}: a section of {max(section_bytes)} bytes, the limit is {SECTION_BYTES_MAX}; "
            "cut the segment"
        )
    header_bytes = header_of_meta(meta, section_bytes, [0] * len(section_bytes)).ByteSize()
    if header_bytes > HEADER_BYTES_MAX:
        raise InvalidInputError(f"cache {meta.key}: a header of {header_bytes} bytes, the limit is {HEADER_BYTES_MAX}")
    return place_sections(header_bytes, section_bytes)


def _require_kind(meta: CacheMeta, kind: CacheKind) -> None:
    if meta.kind is not kind:
        raise InvalidInputError(f"cache {meta.key} is a {meta.kind.name}, this lays out a {kind.name}")
