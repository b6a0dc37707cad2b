"""What a call hands to ``cpu_loops``, noted and checked in compiled code (numba).

One compiled call each: right after the caches were thrown out every function of numpy costs 5 to 20 us, and numba's
machinery is needed anyway. An address is a uint64 to numba, and with an int64 it makes a float64: hence ``np.int64``.
"""

# mypy: disable-error-code="untyped-decorator, no-any-return, return-value"
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from kvservice.kernels.cpu_loops import (
    BASE,
    BYTES,
    HEAD_BYTES,
    HEADS,
    MIRROR_TURN,
    ROW_BOUNDS,
    ROWS,
    RUN_BYTES,
    RUN_COUNT,
    RUN_ENDS,
    RUNS,
    SLOTS,
    TURN,
    Int64s,
    covered_rows,
)
from kvservice.kernels.vector import load_int32


@njit(cache=True)
def slot_bounds(slots: Int64s) -> tuple[int, int]:
    """The lowest and the highest slot; (0, -1) for none."""
    lowest, highest = 0, -1
    for i_row in range(len(slots)):
        lowest, highest = min(lowest, slots[i_row]), max(highest, slots[i_row])
    return lowest, highest


@njit(cache=True)
def are_distinct(slots: Int64s, slot_count: int, is_used: npt.NDArray[np.uint64]) -> bool:
    """Are all slots -1, or in ``[0, slot_count)`` and not used before; notes them in ``is_used``, a bit a slot."""
    for i_row in range(len(slots)):
        slot = slots[i_row]
        if slot == -1:
            continue
        if slot < 0 or slot >= slot_count:
            return False
        bit = np.uint64(1) << np.uint64(slot & 63)
        if is_used[slot >> 6] & bit:
            return False
        is_used[slot >> 6] |= bit
    return True


@njit(cache=True)
def note_target(
    jobs: Int64s, columns: Int64s, i_target: int, slots: Int64s, turns: Int64s, mirror_turns: Int64s
) -> tuple[int, int, int]:
    """Copy a target's slots to its column and fill in its jobs, ``[jobs, targets, JOB_WORDS]``; one turn a job.

    Returns the bounds of its slots, as ``slot_bounds``, and where the jobs are. One compiled call: right after the
    caches were thrown out every function of numpy costs 5 to 20 us, and this machinery is needed anyway.
    """
    column = columns[i_target]
    lowest, highest = 0, -1
    for i_row in range(len(slots)):
        column[i_row] = slots[i_row]
        lowest, highest = min(lowest, column[i_row]), max(highest, column[i_row])
    for i_job in range(len(jobs)):
        jobs[i_job, i_target, SLOTS] = column.ctypes.data
        jobs[i_job, i_target, TURN], jobs[i_job, i_target, MIRROR_TURN] = turns[i_job], mirror_turns[i_job]
    return lowest, highest, np.int64(jobs.ctypes.data)


@njit(cache=True)
def note_plane(planes: Int64s, i_plane: int, rows: npt.NDArray[Any], tokens: int, element_bytes: int) -> bool:
    """Fill in where a plane's rows are; False unless they are ``tokens`` contiguous rows of the plane's width.

    In one compiled call: a layer of half a megabyte takes 25 us, and numpy needs a microsecond for an address alone.
    """
    planes[i_plane, ROWS] = rows.ctypes.data
    row_bytes = planes[i_plane, HEADS] * planes[i_plane, HEAD_BYTES]
    return len(rows) == tokens and _has_rows(rows, row_bytes, element_bytes)


@njit(cache=True)
def _has_rows(rows: npt.NDArray[Any], row_bytes: int, element_bytes: int) -> bool:
    if rows.ndim != 2:
        return False
    is_contiguous = rows.strides[0] == row_bytes and rows.strides[1] == element_bytes
    has_width = rows.shape[1] * element_bytes == row_bytes and rows.itemsize == element_bytes
    return has_width and (is_contiguous or len(rows) == 0)


@njit(cache=True)
def note_dense(words: Int64s, buffer: npt.NDArray[np.uint8]) -> int:
    """Fill in where a master's buffer is; returns where the words are, 0 unless the buffer is contiguous."""
    words[BASE], words[BYTES] = buffer.ctypes.data, len(buffer)
    return np.int64(words.ctypes.data) if _is_contiguous(buffer) else np.int64(0)


@njit(cache=True)
def note_mirror(
    words: Int64s,
    i_target: int,
    buffer: npt.NDArray[np.uint8],
    row_bounds: Int64s,
    runs: npt.NDArray[np.int32],
    run_ends: Int64s,
) -> int:
    """Fill in a mirror's words, ``[targets, MIRROR_WORDS]``; returns where they are, 0 unless all are contiguous."""
    words[i_target, BASE], words[i_target, BYTES] = buffer.ctypes.data, len(buffer)
    words[i_target, ROW_BOUNDS], words[i_target, RUN_ENDS] = row_bounds.ctypes.data, run_ends.ctypes.data
    words[i_target, RUNS], words[i_target, RUN_COUNT] = runs.ctypes.data, len(runs)
    are_tables = _is_contiguous(row_bounds) and _is_contiguous(runs) and _is_contiguous(run_ends)
    return np.int64(words.ctypes.data) if are_tables and _is_contiguous(buffer) else np.int64(0)


@njit(cache=True)
def _is_contiguous(table: npt.NDArray[Any]) -> bool:
    step, is_dense = table.itemsize, True
    for i_axis in range(table.ndim - 1, -1, -1):
        is_dense = is_dense and (table.strides[i_axis] == step or table.shape[i_axis] < 2)
        step *= table.shape[i_axis]
    return is_dense or table.size == 0


@njit(cache=True)
def read_run_tables(
    buffer: npt.NDArray[np.uint8],
    sections: Int64s,
    row_bytes: Int64s,
    tokens: int,
    run_ends: Int64s,
    row_bounds: Int64s,
) -> tuple[int, npt.NDArray[np.int32]]:
    """Copy the runs of all sections out, ``[layers, 2]``: begin and end; note where they and the replaced rows end.

    Returns the first layer whose section is not as ``MirrorLayers.read`` says, -1 if all are, and the runs. Sizes are
    read once: whoever writes to the buffer meanwhile cannot make this read or write anything outside.
    """
    planes, base, total = len(row_bytes), np.int64(buffer.ctypes.data), 0
    for layer in range(len(sections)):
        begin, end = sections[layer]
        head = 4 * planes if end != begin else 0
        if not _is_contiguous(buffer) or not 0 <= begin <= end - head <= end <= len(buffer):
            return layer, np.empty((0, 2), np.int32)
        before = total
        for i_plane in range(planes):
            count = load_int32(base + begin + 4 * i_plane) if head else 0
            total += count
            run_ends[layer, i_plane] = total
            if count < 0 or head + (total - before) * RUN_BYTES > end - begin:
                return layer, np.empty((0, 2), np.int32)
    runs, done = np.empty((total, 2), np.int32), 0
    for layer in range(len(sections)):
        begin, end = sections[layer]
        if begin == end:
            row_bounds[layer] = begin
            continue
        table = base + begin + 4 * planes
        for i_run in range(run_ends[layer, planes - 1] - done):
            runs[done + i_run, 0] = load_int32(table + i_run * RUN_BYTES)
            runs[done + i_run, 1] = load_int32(table + i_run * RUN_BYTES + 4)
        at = begin + (4 * planes + (run_ends[layer, planes - 1] - done) * RUN_BYTES + 15) // 16 * 16
        first_row = at
        for i_plane in range(planes):
            rows = covered_rows(np.int64(runs.ctypes.data) + done * RUN_BYTES, run_ends[layer, i_plane] - done, tokens)
            if rows < 0:
                return layer, runs
            row_bounds[layer, i_plane, 0], row_bounds[layer, i_plane, 1] = at, at + rows * row_bytes[i_plane]
            at, done = row_bounds[layer, i_plane, 1], run_ends[layer, i_plane]
        if at != end or at == first_row:
            return layer, runs
    return -1, runs
