"""The operations on a GPU: checks, tables and launches around the Triton kernels.

All tensors lie on one device and stay there; only slots, sources and tables of a few kilobytes are copied to it. Work
is queued on the current stream: the caller orders it and keeps buffers alive. Nothing is launched when a check fails.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton
from torch import Tensor

from kvservice.kernels.rotation import rotation_table
from kvservice.kernels.shapes import KernelInputError, MirrorRows, Plane, Rotation, Target, check_plane
from kvservice.kernels.tensors import bits_of, check_tensor_paged, check_tensor_rows, storage_name
from kvservice.kernels.triton_law import LAUNCH, STORAGES
from kvservice.kernels.triton_restore import restore_plane
from kvservice.kernels.triton_rows import deviation_plane, diff_plane, gather_plane

B_TOKENS = 16
B_ELEMENTS = 128
TILE_ELEMENTS = 2048
"""Elements of a restore's tile: 16 for each of 128 threads; wider ones need 240 registers."""

Runs = npt.NDArray[np.int32]


def restore_layer(
    master: Sequence[Tensor],
    master_position: int,
    targets: Sequence[Target],
    paged: Sequence[Tensor],
    shapes: Sequence[Plane],
    rotation: Rotation,
) -> None:
    """Write one layer to every target's slots, one launch a plane; see ``cpu.restore_layer``."""
    if not targets or not len(master[0]):
        return
    for plane, memory, shape in zip(master, paged, shapes, strict=True):
        check_tensor_rows(plane, shape)
        check_tensor_paged(memory, shape, plane.dtype)
        check_plane(shape, rotation)
    slots = _slot_table(targets, len(master[0]), paged, master[0].device)
    planned = [
        _sources(targets, i_plane, plane, shape)
        for i_plane, (plane, shape) in enumerate(zip(master, shapes, strict=True))
    ]
    for plane, memory, shape, (sources, rows) in zip(master, paged, shapes, planned, strict=True):
        _launch_restore(plane, master_position, targets, memory, shape, rotation, slots, sources, rows)


def _launch_restore(
    plane: Tensor,
    master_position: int,
    targets: Sequence[Target],
    memory: Tensor,
    shape: Plane,
    rotation: Rotation,
    slots: Tensor,
    sources: Tensor | None,
    rows: Tensor,
) -> None:
    deltas = [
        (one.position - master_position, one.position - one.mirror.position if one.mirror else 0) for one in targets
    ]
    turns, is_moved = _turns(deltas, shape, rotation, plane.device)
    pairs = _pairs(shape, rotation)
    before = shape.rotary_offset if pairs else 0
    copied = max(before, shape.head_size - before - 2 * pairs, 1)
    tile = max(1, min(B_TOKENS, TILE_ELEMENTS // triton.next_power_of_2(copied)))
    restore_plane[(triton.cdiv(len(plane), tile), shape.heads)](
        bits_of(plane), bits_of(rows), bits_of(memory), slots, slots if sources is None else sources, turns, is_moved,
        len(plane), len(targets), memory.shape[1], *memory.stride(),
        HEADS=shape.heads, HEAD_SIZE=shape.head_size, ROTARY_OFFSET=before, PAIRS=pairs,
        COPIED=triton.next_power_of_2(copied), PADDED=triton.next_power_of_2(max(pairs, 1)),
        IS_INTERLEAVED=rotation.is_interleaved, HAS_MIRROR=sources is not None,
        STORAGE=STORAGES[storage_name(plane)], B_TOKENS=tile, **LAUNCH,
    )  # fmt: skip


def materialise_layer(
    master: Sequence[Tensor], master_position: int, mirror: MirrorRows, shapes: Sequence[Plane], rotation: Rotation
) -> list[Tensor]:
    """One layer of a mirror as dense planes at the mirror's position."""
    dense = [torch.empty_like(plane) for plane in master]
    paged = [plane.view(1, -1, shape.heads, shape.head_size) for plane, shape in zip(dense, shapes, strict=True)]
    target = Target(mirror.position, torch.arange(len(master[0]), device=master[0].device), mirror)
    restore_layer(master, master_position, [target], paged, shapes, rotation)
    return dense


def move_rows(rows: Tensor, from_position: int, to_position: int, shape: Plane, rotation: Rotation) -> Tensor:
    """Rows ``[rows, heads * head_size]`` computed at one position as they are at another."""
    nothing = MirrorRows(to_position, [np.empty((0, 2), np.int32)], [rows[:0]])
    return materialise_layer([rows], from_position, nothing, [shape], rotation)[0]


def diff_layer(
    master: Sequence[Tensor],
    master_position: int,
    member: Sequence[Tensor],
    member_position: int,
    shapes: Sequence[Plane],
    rotation: Rotation,
) -> list[Tensor]:
    """Per plane int32 ``[tokens]`` on the device: 1 where a row's bits differ from the moved master's."""
    flags = []
    for plane, other, shape in zip(master, member, shapes, strict=True):
        check_tensor_rows(plane, shape)
        check_tensor_rows(other, shape)
        check_plane(shape, rotation)
        if plane.shape != other.shape or plane.dtype != other.dtype:
            raise KernelInputError(f"master {list(plane.shape)} and member {list(other.shape)} are not one segment")
        flags.append(torch.empty(len(plane), dtype=torch.int32, device=plane.device))
        if not len(plane):
            continue
        turns, _ = _turns([(member_position - master_position, 0)], shape, rotation, plane.device)
        diff_plane[(triton.cdiv(len(plane), B_TOKENS),)](
            bits_of(plane), bits_of(other), turns, int(member_position != master_position), flags[-1], len(plane),
            **_head(shape, rotation), STORAGE=STORAGES[storage_name(plane)], B_TOKENS=B_TOKENS, B_ELEMENTS=B_ELEMENTS,
            **LAUNCH,
        )  # fmt: skip
    return flags


def gather_layer(paged: Sequence[Tensor], slots: Tensor, shapes: Sequence[Plane], out: Sequence[Tensor]) -> Tensor:
    """Copy paged rows at ``slots`` to ``out``; int64 scalar on the device: how many values are NaN or infinite."""
    total = torch.zeros((), dtype=torch.int64, device=slots.device)
    for memory, plane, shape in zip(paged, out, shapes, strict=True):
        check_tensor_rows(plane, shape)
        check_tensor_paged(memory, shape, plane.dtype)
        if slots.dtype != torch.int64 or slots.shape != (len(plane),) or not slots.is_contiguous():
            raise KernelInputError(f"slots must be contiguous int64 [{len(plane)}], not {slots.dtype}")
    for memory, plane, shape in zip(paged, out, shapes, strict=True):
        if not len(plane):
            continue
        tiles = triton.cdiv(len(plane), B_TOKENS)
        counts = torch.empty((tiles, shape.heads), dtype=torch.int32, device=slots.device)
        gather_plane[(tiles, shape.heads)](
            bits_of(memory), slots, bits_of(plane), counts, len(plane), memory.shape[1], *memory.stride(),
            HEADS=shape.heads, HEAD_SIZE=shape.head_size, PADDED=triton.next_power_of_2(shape.head_size),
            STORAGE=STORAGES[storage_name(plane)], B_ROWS=B_TOKENS,
        )  # fmt: skip
        total += counts.sum()
    return total


def moved_row_deviation(
    left: Tensor, right: Tensor, deltas: tuple[int, int], shape: Plane, rotation: Rotation
) -> Tensor:
    """Squared L2 distance float32 ``[rows]`` of every row of two planes, each moved by its delta first."""
    check_tensor_rows(left, shape)
    check_tensor_rows(right, shape)
    check_plane(shape, rotation)
    if left.shape != right.shape or left.dtype != right.dtype:
        raise KernelInputError(f"{list(left.shape)} against {list(right.shape)}; give equally many rows")
    out = torch.empty(len(left), dtype=torch.float32, device=left.device)
    if not len(left):
        return out
    turns, _ = _turns([deltas], shape, rotation, left.device)
    padded = triton.next_power_of_2(shape.heads * shape.head_size)
    deviation_plane[(len(left),)](
        bits_of(left), bits_of(right), turns, int(deltas[0] != 0), int(deltas[1] != 0), out,
        **_head(shape, rotation), STORAGE=STORAGES[storage_name(left)], PADDED=padded,
        HALVINGS=padded.bit_length() - 1, **LAUNCH,
    )  # fmt: skip
    return out


def _pairs(shape: Plane, rotation: Rotation) -> int:
    return shape.rotary_size // 2 if rotation.frequencies else 0


def _head(shape: Plane, rotation: Rotation) -> dict[str, Any]:
    return {
        "WIDTH": shape.heads * shape.head_size,
        "HEAD_SIZE": shape.head_size,
        "ROTARY_OFFSET": shape.rotary_offset,
        "PAIRS": _pairs(shape, rotation),
        "IS_INTERLEAVED": rotation.is_interleaved,
    }


def _turns(
    deltas: Sequence[tuple[int, int]], shape: Plane, rotation: Rotation, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Tables float32 ``[n, 2, 2 (cosine, sine), pairs]`` and which of the moves are moves, int32 ``[n, 2]``."""
    pairs = _pairs(shape, rotation)
    tables = np.zeros((len(deltas), 2, 2, max(pairs, 1)), np.float32)
    for i_row, row in enumerate(deltas):
        for i_kind, delta in enumerate(row):
            if pairs and delta:
                tables[i_row, i_kind] = rotation_table(rotation, delta)
    is_moved = torch.tensor([[int(delta != 0) for delta in row] for row in deltas], dtype=torch.int32)
    return torch.from_numpy(tables).to(device, non_blocking=True), is_moved.to(device, non_blocking=True)


def _slot_table(targets: Sequence[Target], tokens: int, paged: Sequence[Tensor], device: torch.device) -> Tensor:
    """Slots int64 ``[targets, tokens]`` on the device; bounds are the caller's promise (``check_slots``)."""
    columns = [torch.as_tensor(target.slots) for target in targets]
    for column in columns:
        if column.dtype != torch.int64 or column.shape != (tokens,):
            raise KernelInputError(f"slots must be int64 [{tokens}], not {column.dtype} {list(column.shape)}")
    return torch.stack([column.to(device, non_blocking=True) for column in columns])


def _sources(targets: Sequence[Target], i_plane: int, plane: Tensor, shape: Plane) -> tuple[Tensor | None, Tensor]:
    """Source map int32 ``[targets, tokens]`` (none without mirrors) and all replaced rows, one target after another."""
    if not any(target.mirror for target in targets):
        return None, plane
    table = np.full((len(targets), len(plane)), -1, np.int32)
    all_rows: list[Tensor] = []
    used = 0
    for column, target in zip(table, targets, strict=True):
        if target.mirror is None:
            continue
        runs, rows = target.mirror.runs[i_plane], target.mirror.rows[i_plane]
        check_tensor_rows(rows, shape)
        indices = row_indices(runs, len(plane))
        if len(indices) != len(rows) or rows.dtype != plane.dtype:
            raise KernelInputError(f"runs cover {len(indices)} rows but {len(rows)} rows of {rows.dtype} were given")
        column[indices] = np.arange(used, used + len(rows), dtype=np.int32)
        used += len(rows)
        all_rows.append(rows)
    joined = all_rows[0] if len(all_rows) == 1 else torch.cat(all_rows)
    return torch.from_numpy(table).to(plane.device, non_blocking=True), joined if used else plane


def row_indices(runs: Runs, tokens: int) -> npt.NDArray[np.int64]:
    """The rows of a run table; raises ``KernelInputError`` unless sorted, disjoint, not empty, inside ``tokens``."""
    table = np.asarray(runs)
    if table.ndim != 2 or table.shape[1] != 2 or table.dtype != np.int32:
        raise KernelInputError(f"runs must be int32 [n, 2], not {table.dtype} {list(table.shape)}")
    if not len(table):
        return np.empty(0, np.int64)
    first, count = table[:, 0].astype(np.int64), table[:, 1].astype(np.int64)
    end = first + count
    if first[0] < 0 or end[-1] > tokens or (count < 1).any() or (first[1:] < end[:-1]).any():
        raise KernelInputError(f"runs must be sorted, disjoint, not empty and inside the {tokens} rows")
    return np.repeat(first - (np.cumsum(count) - count), count) + np.arange(int(count.sum()))
