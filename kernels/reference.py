"""The operations in torch: slow, obviously right. Every other implementation must give these bits.

Storage is looked at as int32 patterns, arithmetic is float32 with every operation rounded on its own, and rounding to
storage is integer arithmetic. Tensors may be on any device; paged memory is changed in place.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvservice.kernels.rotation import rotation_table
from kvservice.kernels.shapes import MirrorRows, Plane, Rotation, Target

Runs = npt.NDArray[np.int32]

NAN_BITS = 0x7FC00000
"""The one NaN that a rotation gives."""


def restore_layer(
    master: Sequence[Tensor],
    master_position: int,
    targets: Sequence[Target],
    paged: Sequence[Tensor],
    shapes: Sequence[Plane],
    rotation: Rotation,
) -> None:
    """Write one layer to every target's slots; see ``cpu.restore_layer``."""
    for target in targets:
        slots = torch.as_tensor(target.slots)
        for i_plane, (plane, memory, shape) in enumerate(zip(master, paged, shapes, strict=True)):
            rows = move_rows(plane, master_position, target.position, shape, rotation)
            if target.mirror is not None:
                replaced = _row_indices(target.mirror.runs[i_plane])
                rows[replaced] = move_rows(
                    target.mirror.rows[i_plane], target.mirror.position, target.position, shape, rotation
                )
            for i_row, slot in enumerate(slots.tolist()):
                if slot >= 0:
                    block, offset = divmod(slot, memory.shape[1])
                    memory[block, offset] = rows[i_row].view(shape.heads, shape.head_size)


def materialise_layer(
    master: Sequence[Tensor], master_position: int, mirror: MirrorRows, shapes: Sequence[Plane], rotation: Rotation
) -> list[Tensor]:
    """One layer of a mirror as dense planes at the mirror's position."""
    dense = []
    for plane, runs, rows, shape in zip(master, mirror.runs, mirror.rows, shapes, strict=True):
        moved = move_rows(plane, master_position, mirror.position, shape, rotation)
        moved[_row_indices(runs)] = rows
        dense.append(moved)
    return dense


def move_rows(rows: Tensor, from_position: int, to_position: int, shape: Plane, rotation: Rotation) -> Tensor:
    """Rows ``[rows, heads * head_size]`` computed at one position as they are at another (the rotation law)."""
    moved = rows.clone()
    if from_position == to_position or not shape.rotary_size or not rotation.frequencies:
        return moved
    cosine, sine = (torch.tensor(part) for part in rotation_table(rotation, to_position - from_position))
    cosine, sine = cosine.to(rows.device), sine.to(rows.device)
    heads = moved.view(-1, shape.heads, shape.head_size)
    rotary = heads[..., shape.rotary_offset : shape.rotary_offset + shape.rotary_size]
    half = shape.rotary_size // 2
    if rotation.is_interleaved:
        first, second = rotary[..., 0::2], rotary[..., 1::2]
    else:
        first, second = rotary[..., :half], rotary[..., half:]
    x1, x2 = widen(first), widen(second)
    y1 = (x1 * cosine) - (x2 * sine)
    y2 = (x2 * cosine) + (x1 * sine)
    first.copy_(narrow(y1, rows.dtype))
    second.copy_(narrow(y2, rows.dtype))
    return moved


def diff_layer(
    master: Sequence[Tensor],
    master_position: int,
    member: Sequence[Tensor],
    member_position: int,
    shapes: Sequence[Plane],
    rotation: Rotation,
) -> list[Runs]:
    """Per plane the runs (int32 ``[n, 2]``) of rows whose bits differ from the moved master's."""
    found = []
    for plane, other, shape in zip(master, member, shapes, strict=True):
        moved = move_rows(plane, master_position, member_position, shape, rotation)
        found.append(runs_of((bits(moved) != bits(other)).any(dim=1).cpu().numpy()))
    return found


def gather_layer(paged: Sequence[Tensor], slots: Tensor, shapes: Sequence[Plane], out: Sequence[Tensor]) -> int:
    """Copy paged rows at ``slots`` to ``out``; returns how many values are NaN or infinite."""
    nonfinite = 0
    for memory, plane, shape in zip(paged, out, shapes, strict=True):
        block, offset = slots // memory.shape[1], slots % memory.shape[1]
        plane.copy_(memory[block, offset].reshape(len(slots), shape.heads * shape.head_size))
        nonfinite += int((~torch.isfinite(plane.float())).sum())
    return nonfinite


def scatter_by_table(blocks: Tensor, slots: Tensor, perm: Tensor, rows: Tensor) -> None:
    """Write rows to packed blocks ``[blocks, block_elements]``; see ``cpu_blocks.scatter_by_table``."""
    for row, slot in zip(rows, slots.tolist(), strict=True):
        if slot >= 0:
            block, offset = divmod(slot, len(perm))
            blocks[block, perm[offset]] = row


def gather_by_table(blocks: Tensor, slots: Tensor, perm: Tensor, out: Tensor) -> int:
    """Copy rows of packed blocks to ``out``; returns how many values are NaN or infinite."""
    block, offset = slots // len(perm), slots % len(perm)
    out.copy_(blocks[block[:, None], perm[offset]])
    return int((~torch.isfinite(out.float())).sum())


def deviation_layer(
    candidates: Sequence[Sequence[Tensor]], positions: Sequence[int], shapes: Sequence[Plane], rotation: Rotation
) -> npt.NDArray[np.float64]:
    """Squared L2 distances float64 ``[n, n]`` of caches of one segment, all moved to ``positions[0]``."""
    count = len(candidates)
    total = np.zeros((count, count), np.float64)
    for i_plane, shape in enumerate(shapes):
        moved = [
            move_rows(candidate[i_plane], position, positions[0], shape, rotation)
            for candidate, position in zip(candidates, positions, strict=True)
        ]
        for i_left in range(count):
            for i_right in range(i_left + 1, count):
                total[i_left, i_right] += sum_in_order(row_deviation(moved[i_left], moved[i_right], shape))
    return total + total.T


def row_deviation(left: Tensor, right: Tensor, shape: Plane) -> Tensor:
    """Squared L2 distance float32 ``[rows]`` of every row of two planes in one frame (the deviation law)."""
    width = shape.heads * shape.head_size
    padded = 1 << (width - 1).bit_length()
    squares = torch.zeros(len(left), padded, device=left.device)
    difference = widen(left) - widen(right)
    squares[:, :width] = difference * difference
    while padded > 1:
        padded //= 2
        squares = squares[:, :padded] + squares[:, padded:]
    rows = squares[:, 0]
    return torch.where(torch.isnan(rows), _float_of_bits(torch.full_like(rows, NAN_BITS, dtype=torch.int32)), rows)


def sum_in_order(rows: Tensor) -> float:
    """The sum of float32 rows in float64, one after another."""
    total = 0.0
    for value in rows.tolist():
        total += value
    return total


def runs_of(is_different: npt.NDArray[np.bool_]) -> Runs:
    """Maximal runs (first, count) of true entries."""
    edges = np.diff(np.concatenate([[False], is_different, [False]]).astype(np.int8))
    first, end = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
    return np.stack([first, end - first], axis=1).astype(np.int32)


def round_to_8_bits(heads: Tensor) -> Tensor:
    """Heads ``[..., head_size]`` as they come back from 8 bits a value; the law is in ``cpu_int8``."""
    wide = widen(heads)
    largest = wide.abs().amax(-1, keepdim=True)
    step = torch.where(largest > 0, largest, 1.0) / 127
    rounded = narrow(torch.round(wide / step) * step, heads.dtype)
    is_small = largest <= 2.0**-100 if heads.dtype == torch.bfloat16 else largest == 0
    rounded = torch.where(is_small | (rounded == 0), torch.zeros_like(heads), rounded)  # zeros have no sign
    return torch.where(torch.isfinite(largest), rounded, heads)


def bits(values: Tensor) -> Tensor:
    """Storage bits as integers of the same width."""
    return values.view(torch.int32 if values.dtype == torch.float32 else torch.int16)


def widen(values: Tensor) -> Tensor:
    """Stored values as float32 (exact)."""
    if values.dtype != torch.bfloat16:
        return values.to(torch.float32)
    return _float_of_bits(values.contiguous().view(torch.int16).to(torch.int32) << 16)


def narrow(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Float32 rounded nearest-even to storage by integer arithmetic; NaN becomes the one NaN."""
    pattern = values.contiguous().view(torch.int32)
    pattern = torch.where(torch.isnan(values), NAN_BITS, pattern)
    if dtype == torch.float32:
        return _float_of_bits(pattern)
    nearest_bfloat16 = (pattern + 0x7FFF + ((pattern >> 16) & 1)) >> 16
    rounded = nearest_bfloat16 if dtype == torch.bfloat16 else _float16_bits(pattern)
    return rounded.to(torch.int16).view(dtype)


def _float16_bits(pattern: Tensor) -> Tensor:
    sign, size = (pattern >> 16) & 0x8000, pattern & 0x7FFFFFFF
    normal = (size - (112 << 23) + 0xFFF + ((size >> 13) & 1)) >> 13
    # Below 2^-14 float16 counts in steps of 2^-24: shift the significand there, nearest even.
    shift = (126 - (size >> 23)).clamp(14, 25)
    significand = (size & 0x7FFFFF) | 0x800000
    half, odd = (1 << (shift - 1)) - 1, (significand >> shift) & 1
    small = torch.where(size >> 23 < 101, 0, (significand + half + odd) >> shift)
    magnitude = torch.where(size < 113 << 23, small, normal)
    magnitude = torch.where(size >= 143 << 23, 0x7C00, magnitude)
    return sign | torch.where(size > 0x7F800000, 0x7E00, magnitude)


def _float_of_bits(pattern: Tensor) -> Tensor:
    return pattern.view(torch.float32)


def _row_indices(runs: Runs) -> Tensor:
    rows = [first + i for first, count in np.asarray(runs).tolist() for i in range(count)]
    return torch.tensor(rows, dtype=torch.int64)
