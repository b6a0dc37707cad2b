"""The operations on torch tensors, wherever they are: numba for host memory, Triton for a GPU.

Signatures are ``reference``'s. On the CPU a plane may also be numpy storage bits (a view of an arena). Values are the
same bits everywhere; ``cpu`` alone is for programs without torch.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvservice.kernels import cpu
from kvservice.kernels.shapes import Bits, KernelInputError, MirrorRows, Plane, Rotation, Target, check_slots
from kvservice.kernels.tensors import numpy_bits, storage_name

if TYPE_CHECKING:
    from types import ModuleType

__all__ = [
    "check_slots",
    "deviation_layer",
    "diff_layer",
    "gather_layer",
    "materialise_layer",
    "move_rows",
    "restore_layer",
    "row_deviation",
]

Runs = npt.NDArray[np.int32]


def restore_layer(
    master: Sequence[Tensor | Bits],
    master_position: int,
    targets: Sequence[Target],
    paged: Sequence[Tensor],
    shapes: Sequence[Plane],
    rotation: Rotation,
) -> None:
    """Write one layer of a cache to every target's slots; see ``cpu.restore_layer``.

    Slots may be numpy or torch, a mirror's rows numpy bits or torch. On a GPU everything but slots and runs must be on
    the device. Raises ``KernelInputError``.
    """
    if _is_on_gpu(paged[0]):
        _triton().restore_layer(_on_gpu(master), master_position, targets, paged, shapes, rotation)
        return
    hosted = [Target(one.position, _slots(one.slots), _host_mirror(one.mirror)) for one in targets]
    memory = [numpy_bits(view) for view in paged]
    cpu.restore_layer(_host(master), master_position, hosted, memory, shapes, rotation, storage_name(paged[0]))


def materialise_layer(
    master: Sequence[Tensor], master_position: int, mirror: MirrorRows, shapes: Sequence[Plane], rotation: Rotation
) -> list[Tensor]:
    """One layer of a mirror as dense planes ``[tokens, heads * head_size]`` at the mirror's position."""
    if _is_on_gpu(master[0]):
        moved: list[Tensor] = _triton().materialise_layer(master, master_position, mirror, shapes, rotation)
        return moved
    rows = _host_mirror(mirror)
    assert rows is not None
    dtype = storage_name(master[0])
    dense = cpu.materialise_layer(_host(master), master_position, rows, shapes, rotation, dtype)
    return [_tensor(plane, master[0]) for plane in dense]


def move_rows(rows: Tensor, from_position: int, to_position: int, shape: Plane, rotation: Rotation) -> Tensor:
    """Rows ``[rows, heads * head_size]`` computed at one position as they are at another."""
    if _is_on_gpu(rows):
        moved: Tensor = _triton().move_rows(rows, from_position, to_position, shape, rotation)
        return moved
    dense = cpu.move_rows(numpy_bits(rows), from_position, to_position, shape, rotation, storage_name(rows))
    return _tensor(dense, rows)


def diff_layer(
    master: Sequence[Tensor],
    master_position: int,
    member: Sequence[Tensor],
    member_position: int,
    shapes: Sequence[Plane],
    rotation: Rotation,
) -> list[Runs]:
    """Per plane the runs (int32 ``[n, 2]``) of rows whose bits differ from the moved master's. Waits for the GPU."""
    if _is_on_gpu(master[0]):
        flags = _triton().diff_layer(master, master_position, member, member_position, shapes, rotation)
        return [cpu.runs_of(one.cpu().numpy() != 0) for one in flags]
    dtype = storage_name(master[0])
    return cpu.diff_layer(_host(master), master_position, _host(member), member_position, shapes, rotation, dtype)


def gather_layer(paged: Sequence[Tensor], slots: Tensor, shapes: Sequence[Plane], out: Sequence[Tensor | Bits]) -> int:
    """Copy paged rows at ``slots`` to ``out``; returns how many values are NaN or infinite. Waits for the GPU."""
    if _is_on_gpu(paged[0]):
        return int(_triton().gather_layer(paged, slots, shapes, _on_gpu(out)))
    memory = [numpy_bits(view) for view in paged]
    return cpu.gather_layer(memory, _slots(slots), shapes, _host(out), storage_name(paged[0]))


def deviation_layer(
    candidates: Sequence[Sequence[Tensor]], positions: Sequence[int], shapes: Sequence[Plane], rotation: Rotation
) -> npt.NDArray[np.float64]:
    """Squared L2 distances float64 ``[n, n]`` of caches of one segment, all moved to ``positions[0]``."""
    if candidates and _is_on_gpu(candidates[0][0]):
        return _gpu_deviation(candidates, positions, shapes, rotation)
    dtype = storage_name(candidates[0][0]) if candidates else "float32"
    return cpu.deviation_layer([_host(one) for one in candidates], positions, shapes, rotation, dtype)


def row_deviation(left: Tensor, right: Tensor, shape: Plane) -> Tensor:
    """Squared L2 distance float32 ``[rows]`` of every row of two planes in one position frame."""
    if _is_on_gpu(left):
        rows: Tensor = _triton().moved_row_deviation(left, right, (0, 0), shape, Rotation(()))
        return rows
    if left.dtype != right.dtype:
        raise KernelInputError(f"rows of {left.dtype} against {right.dtype}; give one type")
    return torch.from_numpy(cpu.row_deviation(numpy_bits(left), numpy_bits(right), shape, storage_name(left)))


def _gpu_deviation(
    candidates: Sequence[Sequence[Tensor]], positions: Sequence[int], shapes: Sequence[Plane], rotation: Rotation
) -> npt.NDArray[np.float64]:
    """Row sums on the device, the float64 sums in index order here."""
    kernels = _triton()
    total = np.zeros((len(candidates), len(candidates)), np.float64)
    for i_plane, shape in enumerate(shapes):
        for i_left in range(len(candidates)):
            for i_right in range(i_left + 1, len(candidates)):
                deltas = (positions[0] - positions[i_left], positions[0] - positions[i_right])
                left, right = candidates[i_left][i_plane], candidates[i_right][i_plane]
                rows = kernels.moved_row_deviation(left, right, deltas, shape, rotation)
                total[i_left, i_right] += cpu.sum_in_order(rows.cpu().numpy())
    return total + total.T


def _is_on_gpu(values: Tensor | Bits) -> bool:
    return isinstance(values, Tensor) and values.is_cuda


def _triton() -> "ModuleType":
    """The GPU's half, imported when a GPU tensor is first seen: triton is not installed everywhere."""
    from kvservice.kernels import triton_host

    return triton_host


def _on_gpu(planes: Sequence[Tensor | Bits]) -> list[Tensor]:
    tensors = [plane for plane in planes if isinstance(plane, Tensor) and plane.is_cuda]
    if len(tensors) != len(planes):
        raise KernelInputError("paged memory is on a GPU but a plane is not; copy it to the device first")
    return tensors


def _host(planes: Sequence[Tensor | Bits]) -> list[Bits]:
    return [numpy_bits(plane) if isinstance(plane, Tensor) else plane for plane in planes]


def _host_mirror(mirror: MirrorRows | None) -> MirrorRows | None:
    return None if mirror is None else MirrorRows(mirror.position, mirror.runs, _host(mirror.rows))


def _slots(slots: Any) -> npt.NDArray[np.int64]:
    found: npt.NDArray[np.int64] = slots.numpy() if isinstance(slots, Tensor) else slots
    return found


def _tensor(bits: Bits, like: Tensor) -> Tensor:
    signed = bits.view(np.int32 if bits.dtype.itemsize == 4 else np.int16)
    return torch.from_numpy(signed).view(like.dtype)
