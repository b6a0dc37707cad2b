"""The operations on a CPU: numpy storage bits in, numpy storage bits out, no torch.

A call checks shapes, types and bounds, then hands addresses to ``cpu_loops``, which releases the GIL. Calls may run in
many threads at once; a caller must not change a buffer while a call runs. Nothing is written when a check fails.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvservice.kernels import cpu_loops as loops
from kvservice.kernels import cpu_tables
from kvservice.kernels.cpu_deviation import deviation_plane, row_deviation_plane
from kvservice.kernels.cpu_inputs import (
    Int64s,
    PagedLayer,
    address,
    check_gathered_slots,
    check_rows,
    make_turn,
    paged_layer,
    plane_words,
)
from kvservice.kernels.cpu_layers import DenseLayers, MirrorLayers, PagedLayers, paged_layers
from kvservice.kernels.cpu_restore import (
    STREAM_BYTES_MIN,
    OpenMirrors,
    PreparedRestore,
    prepare_restore,
    restore_layer,
)
from kvservice.kernels.shapes import (
    Bits,
    KernelInputError,
    MirrorRows,
    Plane,
    Rotation,
    Target,
    check_dtype,
    check_plane,
    check_slots,
)
from kvservice.kernels.vector import TAGS

__all__ = [
    "DenseLayers",
    "MirrorLayers",
    "OpenMirrors",
    "PagedLayer",
    "PagedLayers",
    "PreparedRestore",
    "check_slots",
    "deviation_layer",
    "diff_layer",
    "gather_layer",
    "materialise_layer",
    "move_rows",
    "paged_layer",
    "paged_layers",
    "prepare_restore",
    "restore_layer",
    "row_deviation",
    "runs_of",
    "sum_in_order",
]

Runs = npt.NDArray[np.int32]


def materialise_layer(
    master: Sequence[Bits],
    master_position: int,
    mirror: MirrorRows,
    shapes: Sequence[Plane],
    rotation: Rotation,
    dtype: str,
) -> list[Bits]:
    """One layer of a mirror as dense planes ``[tokens, heads * head_size]`` at the mirror's position."""
    dense = [np.empty_like(plane) for plane in master]
    paged = [plane.reshape(1, -1, shape.heads, shape.head_size) for plane, shape in zip(dense, shapes, strict=True)]
    target = Target(mirror.position, np.arange(len(master[0]), dtype=np.int64), mirror)
    restore_layer(master, master_position, [target], paged, shapes, rotation, dtype)
    return dense


def move_rows(rows: Bits, from_position: int, to_position: int, shape: Plane, rotation: Rotation, dtype: str) -> Bits:
    """Rows ``[rows, heads * head_size]`` computed at one position as they are at another."""
    nothing = MirrorRows(to_position, [np.empty((0, 2), np.int32)], [rows[:0]])
    return materialise_layer([rows], from_position, nothing, [shape], rotation, dtype)[0]


def diff_layer(
    master: Sequence[Bits],
    master_position: int,
    member: Sequence[Bits],
    member_position: int,
    shapes: Sequence[Plane],
    rotation: Rotation,
    dtype: str,
) -> list[Runs]:
    """Per plane the runs (int32 ``[n, 2]``: first row, count) whose bits differ from the moved master's."""
    bits = check_dtype(dtype)
    all_runs = []
    for plane, other, shape in zip(master, member, shapes, strict=True):
        check_rows(plane, shape, bits)
        check_rows(other, shape, bits)
        check_plane(shape, rotation)
        if len(plane) != len(other):
            raise KernelInputError(f"a master of {len(plane)} rows and a member of {len(other)} are not one segment")
        turn = make_turn(rotation, member_position - master_position, shape, bits)
        runs = np.empty((len(plane) // 2 + 1, 2), np.int32)
        words = np.array(plane_words(shape, bits, address(plane)), np.int64)
        count = loops.diff_plane(
            TAGS[dtype],
            bits.itemsize,
            len(plane),
            rotation.is_interleaved,
            address(words),
            address(other),
            address(turn),
            runs,
        )
        all_runs.append(runs[:count].copy())
    return all_runs


def gather_layer(
    paged: Sequence[Bits] | PagedLayer, slots: Int64s, shapes: Sequence[Plane], out: Sequence[Bits], dtype: str
) -> int:
    """Copy the rows at ``slots`` to ``out`` (per plane ``[rows, heads * head_size]``, contiguous, writable).

    Returns how many of the values are NaN or infinite, so that a store can refuse them.
    """
    bits = check_dtype(dtype)
    layer = paged if isinstance(paged, PagedLayer) else paged_layer(paged, shapes, bits)
    if not len(out) == len(shapes) == len(layer.planes) or layer.bits != bits:
        raise KernelInputError(f"{len(out)} planes of output for {len(layer.planes)} planes of {layer.bits}")
    check_gathered_slots(slots, layer.slot_count)
    planes = layer.planes.copy()
    for i_plane, (plane, shape) in enumerate(zip(out, shapes, strict=True)):
        if not (plane.flags.writeable and cpu_tables.note_plane(planes, i_plane, plane, len(slots), bits.itemsize)):
            check_rows(plane, shape, bits, is_written=True)
            raise KernelInputError(f"{len(plane)} rows of output for {len(slots)} slots; give equally many")
    is_streamed = out[0].nbytes >= STREAM_BYTES_MIN
    return int(loops.gather_planes(TAGS[dtype], bits.itemsize, planes, slots, is_streamed))


def deviation_layer(
    candidates: Sequence[Sequence[Bits]],
    positions: Sequence[int],
    shapes: Sequence[Plane],
    rotation: Rotation,
    dtype: str,
) -> npt.NDArray[np.float64]:
    """Squared L2 distances float64 ``[n, n]`` between caches of one segment, all moved to ``positions[0]``.

    Law: difference and square of the moved, stored values each rounded to float32; a row summed by halving (padded with
    zeros to a power of two); rows of a plane, then planes, added up in float64 in index order.
    """
    bits = check_dtype(dtype)
    if len(candidates) != len(positions):
        raise KernelInputError(f"{len(candidates)} candidates at {len(positions)} positions; give one each")
    total = np.zeros((len(candidates), len(candidates)), np.float64)
    for i_plane, shape in enumerate(shapes):
        planes = [candidate[i_plane] for candidate in candidates]
        for plane in planes:
            check_rows(plane, shape, bits)
        if len({len(plane) for plane in planes}) > 1:
            raise KernelInputError("candidates of different lengths are not caches of one segment")
        check_plane(shape, rotation)
        if planes:
            _add_deviation(planes, positions, shape, rotation, dtype, total)
    return total + total.T


def row_deviation(left: Bits, right: Bits, shape: Plane, dtype: str) -> npt.NDArray[np.float32]:
    """Squared L2 distance float32 ``[rows]`` of every row of two planes in one position frame (same law)."""
    bits = check_dtype(dtype)
    check_rows(left, shape, bits)
    check_rows(right, shape, bits)
    if len(left) != len(right):
        raise KernelInputError(f"{len(left)} rows against {len(right)}; give equally many")
    out = np.empty(len(left), np.float32)
    width = shape.heads * shape.head_size
    values, squares = _row_floats(2, shape)
    row_deviation_plane(
        TAGS[dtype], bits.itemsize, address(left), address(right), len(left), width, values, squares, out
    )
    return out


def runs_of(is_different: npt.NDArray[np.bool_]) -> Runs:
    """Maximal runs (int32 ``[n, 2]``: first, count) of true entries."""
    edges = np.diff(np.concatenate([[False], is_different, [False]]).astype(np.int8))
    first, end = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
    return np.stack([first, end - first], axis=1).astype(np.int32)


def sum_in_order(rows: npt.NDArray[np.float32]) -> float:
    """The sum of float32 rows in float64, one after another."""
    return float(np.add.accumulate(rows.astype(np.float64))[-1]) if len(rows) else 0.0


def _add_deviation(
    planes: Sequence[Bits],
    positions: Sequence[int],
    shape: Plane,
    rotation: Rotation,
    dtype: str,
    total: npt.NDArray[np.float64],
) -> None:
    bits = planes[0].dtype
    turns = [make_turn(rotation, positions[0] - position, shape, bits) for position in positions]
    values, squares = _row_floats(len(planes), shape)
    words = np.array(plane_words(shape, bits), np.int64)
    candidates = np.array([address(plane) for plane in planes], np.int64)
    tables = np.array([address(turn) for turn in turns], np.int64)
    deviation_plane(
        TAGS[dtype], bits.itemsize, len(planes[0]), rotation.is_interleaved, address(words), candidates, tables,
        values, squares, total,
    )  # fmt: skip


def _row_floats(count: int, shape: Plane) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Zeroed values ``[count, padded]`` and squares ``[padded]``, padded to a power of two."""
    padded = 1 << (shape.heads * shape.head_size - 1).bit_length()
    return np.zeros((count, padded), np.float32), np.zeros(padded, np.float32)
