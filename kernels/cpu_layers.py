"""What a restore over several layers reads and writes, as tables that compiled code walks through.

Right after the caches were thrown out, a Python call a layer costs up to 17 us, a quarter of writing half a megabyte.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvservice.kernels import cpu_loops as loops
from kvservice.kernels import cpu_tables
from kvservice.kernels.cpu_inputs import Int64s, PagedLayer, Turn, address, make_turn
from kvservice.kernels.shapes import KernelInputError, Plane, Rotation, check_dtype, check_plane

Bytes = npt.NDArray[np.uint8]
Runs = npt.NDArray[np.int32]
Turns = tuple[Int64s, list[Turn]]

TURNS_KEPT_MAX = 1024
"""Moves whose tables paged memory keeps, half a kilobyte each for heads of 128; all are dropped when there are more."""

_BYTE, _WORD, _RUN = np.dtype(np.uint8), np.dtype(np.int64), np.dtype(np.int32)


@dataclass(frozen=True, slots=True)
class PagedLayers:
    """All layers of an engine's paged memory, checked once and kept for as long as the engine keeps the memory.

    ``words`` is ``[layers, planes, PLANE_WORDS]``. ``turning`` ``[layers, 2]`` says which of ``rotations`` a layer has,
    and whether its pairs are neighbours. Safe for many threads. Made by ``paged_layers``.
    """

    layers: int
    shapes: tuple[Plane, ...]
    dtype: str
    bits: np.dtype[Any]
    rotations: tuple[Rotation, ...]
    slot_count: int
    words: Int64s
    turning: Int64s
    row_bytes: Int64s
    row_bytes_max: int
    words_at: int
    turning_at: int
    kept: tuple[PagedLayer, ...]
    _turns: dict[int, Turns] = field(default_factory=dict)

    def turns(self, delta: int) -> Turns:
        """Addresses of the tables that move by ``delta``, int64 ``[rotations * planes]``; kept as long as the tuple.

        By ``delta`` alone: to hash a rotation is to read all its frequencies, 10 us out of cold memory.
        """
        found = self._turns.get(delta)
        if found is None:
            if len(self._turns) >= TURNS_KEPT_MAX:
                self._turns.clear()
            tables = [
                make_turn(rotation, delta, shape, self.bits) for rotation in self.rotations for shape in self.shapes
            ]
            found = self._turns[delta] = (np.array([address(table) for table in tables], np.int64), tables)
        return found


@dataclass(slots=True)
class DenseLayers:
    """A master's layers in one buffer (uint8, contiguous), equally far apart. Keeps it alive.

    Plane ``p`` of layer ``l``, ``[tokens, heads * head_size]``, begins ``start + l * layer_stride + plane_offsets[p]``
    bytes behind the buffer's begin. Raises ``KernelInputError``.
    """

    buffer: Bytes
    start: int
    layer_stride: int
    plane_offsets: Sequence[int]
    words: Int64s = field(init=False)
    words_at: int = field(init=False)

    def __post_init__(self) -> None:
        _check_tables((self.buffer, 1, _BYTE))
        places = [self.start + offset for offset in self.plane_offsets]
        self.words = np.array([0, 0, self.layer_stride, *places], np.int64)
        self.words_at = cpu_tables.note_dense(self.words, self.buffer)
        if not self.words_at:
            raise KernelInputError("a master's buffer must be contiguous")


@dataclass(slots=True)
class MirrorLayers:
    """Some layers of a mirror in one buffer (uint8, contiguous). Raises ``KernelInputError``.

    ``row_bounds`` int64 ``[layers, planes, 2]``: where each plane's replaced rows begin and end, in bytes. ``runs``
    int32 ``[n, 2]``: all tables of (first row, count) behind one another, layer by layer, plane by plane; ``run_ends``
    int64 ``[layers, planes]``: where in it each of them ends.
    """

    buffer: Bytes
    row_bounds: Int64s
    runs: Runs
    run_ends: Int64s

    def __post_init__(self) -> None:
        _check_tables(
            (self.buffer, 1, _BYTE), (self.row_bounds, 3, _WORD), (self.runs, 2, _RUN), (self.run_ends, 2, _WORD)
        )
        if self.row_bounds.shape != (*self.run_ends.shape, 2) or self.runs.shape[1] != 2:
            raise KernelInputError(
                f"row bounds {list(self.row_bounds.shape)} and runs {list(self.runs.shape)} do not fit run ends "
                f"{list(self.run_ends.shape)}; give [layers, planes, 2], [n, 2] and [layers, planes]"
            )

    @classmethod
    def read(cls, buffer: Bytes, sections: Int64s, paged: PagedLayers, tokens: int) -> "MirrorLayers":
        """Read the tables of sections of ``buffer``, int64 ``[layers, 2]``: where each begins and ends, in bytes.

        section := run count of every plane (int32), their runs, zeros up to a multiple of 16, their rows; or nothing.
        The runs are copied before they are checked. Raises ``KernelInputError`` naming the first section, counted from
        0, that is anything else: runs must be sorted, disjoint, not empty and inside ``tokens``.
        """
        _check_tables((buffer, 1, _BYTE), (sections, 2, _WORD))
        run_ends = np.empty((len(sections), len(paged.shapes)), np.int64)
        row_bounds = np.empty((len(sections), len(paged.shapes), 2), np.int64)
        bad, runs = cpu_tables.read_run_tables(buffer, sections, paged.row_bytes, tokens, run_ends, row_bounds)
        if bad >= 0:
            raise KernelInputError(f"section {bad} of a mirror: its runs and rows are not what its size says")
        return cls(buffer, row_bounds, runs, run_ends)

    def take_rows(self, first: int, end: int, row_bytes: Int64s) -> "MirrorLayers":
        """Rows ``[first, end)`` of the segment, counted from ``first`` on, over the same buffer.

        ``row_bytes``: of every plane. For tables as ``read`` gives them.
        """
        firsts, counts = self.runs[:, 0], self.runs[:, 1]
        begins, ends = np.maximum(firsts, first), np.minimum(firsts + counts, end)
        is_kept = ends > begins
        runs = np.stack([begins - first, ends - begins], axis=1)[is_kept].astype(np.int32)
        skipped = self._plane_sums(np.clip(first - firsts, 0, counts))
        rows = self._plane_sums(np.where(is_kept, ends - begins, 0))
        begin = self.row_bounds[:, :, 0] + skipped * row_bytes
        bounds = np.stack([begin, begin + rows * row_bytes], axis=2)
        run_ends = np.cumsum(self._plane_sums(is_kept).ravel(), dtype=np.int64).reshape(self.run_ends.shape)
        return MirrorLayers(self.buffer, bounds, runs, run_ends)

    def _plane_sums(self, values: npt.NDArray[Any]) -> Int64s:
        """Sums of one value a run, int64 ``[layers, planes]``."""
        sums = np.concatenate([[0], np.cumsum(values, dtype=np.int64)])[self.run_ends.ravel()]
        return np.diff(sums, prepend=0).reshape(self.run_ends.shape)

    def note(self, words: Int64s, i_target: int) -> int:
        """Fill in ``words`` ``[targets, MIRROR_WORDS]`` for a target; returns where they are. Must outlive them."""
        at: int = cpu_tables.note_mirror(words, i_target, self.buffer, self.row_bounds, self.runs, self.run_ends)
        if not at:
            raise KernelInputError("a mirror's buffer, row bounds, runs and run ends must be contiguous")
        return at


def paged_layers(
    layers: Sequence[PagedLayer], shapes: Sequence[Plane], rotations: Sequence[Rotation], dtype: str
) -> PagedLayers:
    """Put layers that rotate as ``rotations`` say, one a layer, into one table. Raises ``KernelInputError``."""
    bits = check_dtype(dtype)
    distinct = tuple(dict.fromkeys(rotations))
    for rotation in distinct:
        for shape in shapes:
            check_plane(shape, rotation)
    if len(layers) != len(rotations) or any(one.bits != bits or len(one.planes) != len(shapes) for one in layers):
        raise KernelInputError(
            f"{len(layers)} layers and {len(rotations)} rotations; give one each, every layer {len(shapes)} planes of "
            f"{bits}"
        )
    words = np.array([one.planes for one in layers], np.int64).reshape(len(layers), len(shapes), loops.PLANE_WORDS)
    turning = np.array([(distinct.index(one), one.is_interleaved) for one in rotations], np.int64).reshape(-1, 2)
    slot_count = min((one.slot_count for one in layers), default=0)
    row_bytes = np.array([shape.heads * shape.head_size * bits.itemsize for shape in shapes], np.int64)
    return PagedLayers(
        len(layers), tuple(shapes), dtype, bits, distinct, slot_count, words, turning, row_bytes,
        int(row_bytes.max(initial=0)), address(words),
        address(turning), tuple(layers),
    )  # fmt: skip


def _check_tables(*tables: tuple[npt.NDArray[Any], int, np.dtype[Any]]) -> None:
    for table, dimensions, kind in tables:
        if table.ndim != dimensions or table.dtype != kind:
            raise KernelInputError(
                f"a table must be {kind} of {dimensions} dimensions, not {table.dtype} {table.shape}"
            )
