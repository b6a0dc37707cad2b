"""The CPU's loops over planes, rows and targets (numba, nogil, no fastmath).

Everything is an int64: addresses, byte strides, counts. So one compiled function a storage type serves every layout,
read-only memory included. Nothing is checked here: ``cpu`` does that, and keeps every buffer alive during the call.
"""

# mypy: disable-error-code="untyped-decorator, no-any-return"
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from kvservice.kernels.cpu_steps import (
    collect,
    copy_bytes,
    count_nonfinite,
    is_equal,
    move_heads,
    prefetch_bytes,
    spread,
)
from kvservice.kernels.vector import load_int32, load_word, store_fence, store_word

Int64s = npt.NDArray[np.int64]

# A job is one target of a restore in one plane; a plane's words say where its rows are and how its heads rotate, and
# from ADDRESS on where its paged memory is, strides in bytes. Words are int64 and read by address, never as arrays:
# numba counts references to arrays by locked instructions, and each of those waits for all streamed stores.
SLOTS, TURN, MIRROR_TURN, RUN, RUNS_END, FIRST, END, ROW, JOB_WORDS = range(9)
ROWS, HEADS, HEAD_BYTES, ROTARY_OFFSET, ROTARY_BYTES, ADDRESS, BLOCK_SIZE = range(7)
BLOCK_STRIDE, OFFSET_STRIDE, HEAD_STRIDE, ELEMENT_STRIDE, PLANE_WORDS = range(7, 12)
PAGED = ADDRESS
JOB_BYTES, PLANE_BYTES = 8 * JOB_WORDS, 8 * PLANE_WORDS

_BYTES_AHEAD = 12288  # streamed stores and replaced rows throw the hardware prefetcher off: 0.55 -> 0.9 of memcpy
_RUN_BYTES = 8  # two int32


@njit(nogil=True, cache=True)
def restore_planes(
    tag: Any,
    element_bytes: int,
    tokens: int,
    is_interleaved: bool,
    planes: Int64s,
    paged: Int64s,
    jobs: Int64s,
    is_streamed: bool,
) -> None:
    """Restore a layer.

    ``planes`` is ``[planes, PLANE_WORDS]``; ``paged``, their last words, ``[planes, PLANE_WORDS - PAGED]``; ``jobs``
    ``[planes, targets, JOB_WORDS]``.
    """
    for i_plane in range(len(planes)):
        for i_word in range(paged.shape[1]):
            planes[i_plane, PAGED + i_word] = paged[i_plane, i_word]
        plane: int = planes.ctypes.data + i_plane * PLANE_BYTES
        plane_jobs: int = jobs.ctypes.data + i_plane * jobs.shape[1] * JOB_BYTES
        _restore_plane(tag, element_bytes, tokens, is_interleaved, plane, plane_jobs, jobs.shape[1], is_streamed)
    if is_streamed:
        store_fence()


@njit(nogil=True, cache=True)
def _restore_plane(
    tag: Any,
    element_bytes: int,
    tokens: int,
    is_interleaved: bool,
    plane: int,
    jobs: int,
    job_count: int,
    is_streamed: bool,
) -> None:
    """Rows outside, targets inside: a master's row is read from memory once and written to every target."""
    row_bytes = load_word(plane, HEADS) * load_word(plane, HEAD_BYTES)
    master = load_word(plane, ROWS)
    for i_job in range(job_count):
        _next_run(jobs + i_job * JOB_BYTES, tokens)
    for i_row in range(tokens):
        prefetch_bytes(master + i_row * row_bytes + _BYTES_AHEAD, row_bytes)
        for i_job in range(job_count):
            job = jobs + i_job * JOB_BYTES
            source, turn = master + i_row * row_bytes, load_word(job, TURN)
            if i_row >= load_word(job, FIRST):
                source, turn = load_word(job, ROW), load_word(job, MIRROR_TURN)
                store_word(job, ROW, source + row_bytes)
                if i_row + 1 == load_word(job, END):
                    _next_run(job, tokens)
                    prefetch_bytes(source + row_bytes, row_bytes)
            slot = load_word(load_word(job, SLOTS), i_row)
            if slot >= 0:
                target = _slot_address(plane, slot)
                _write_row(tag, element_bytes, target, source, plane, turn, is_interleaved, is_streamed)


@njit(nogil=True, cache=True)
def _slot_address(plane: int, slot: int) -> int:
    block_size = load_word(plane, BLOCK_SIZE)
    block = slot // block_size
    offset = slot - block * block_size
    strides = block * load_word(plane, BLOCK_STRIDE) + offset * load_word(plane, OFFSET_STRIDE)
    return load_word(plane, ADDRESS) + strides


@njit(nogil=True, cache=True)
def _write_row(
    tag: Any,
    element_bytes: int,
    target: int,
    source: int,
    plane: int,
    turn: int,
    is_interleaved: bool,
    is_streamed: bool,
) -> None:
    """Move one row into paged memory, by way of a buffer where its elements do not lie side by side."""
    heads, head_bytes = load_word(plane, HEADS), load_word(plane, HEAD_BYTES)
    head_stride = load_word(plane, HEAD_STRIDE)
    if load_word(plane, ELEMENT_STRIDE) == element_bytes:
        move_heads(
            tag, element_bytes, target, head_stride, source, heads, head_bytes, load_word(plane, ROTARY_OFFSET),
            load_word(plane, ROTARY_BYTES), is_interleaved, turn, is_streamed,
        )  # fmt: skip
    else:
        _write_row_apart(tag, element_bytes, target, source, plane, turn, is_interleaved)


@njit(nogil=True, cache=True)
def _write_row_apart(
    tag: Any, element_bytes: int, target: int, source: int, plane: int, turn: int, is_interleaved: bool
) -> None:
    heads, head_bytes = load_word(plane, HEADS), load_word(plane, HEAD_BYTES)
    moved = np.empty(heads * head_bytes, np.uint8)
    begin: int = moved.ctypes.data
    move_dense(tag, element_bytes, begin, source, plane, heads, is_interleaved, turn)
    for i_head in range(heads):
        p_target = target + i_head * load_word(plane, HEAD_STRIDE)
        spread(p_target, begin + i_head * head_bytes, head_bytes, element_bytes, load_word(plane, ELEMENT_STRIDE))


@njit(nogil=True, cache=True)
def move_dense(
    tag: Any,
    element_bytes: int,
    target: int,
    source: int,
    plane: int,
    heads: int,
    is_interleaved: bool,
    turn: int,
) -> None:
    """Move ``heads`` heads from one contiguous place to another, through the cache."""
    head_bytes = load_word(plane, HEAD_BYTES)
    move_heads(
        tag, element_bytes, target, head_bytes, source, heads, head_bytes, load_word(plane, ROTARY_OFFSET),
        load_word(plane, ROTARY_BYTES), is_interleaved, turn, False,
    )  # fmt: skip


@njit(nogil=True, cache=True)
def diff_plane(
    tag: Any,
    element_bytes: int,
    tokens: int,
    is_interleaved: bool,
    plane: int,
    member: int,
    turn: int,
    runs: npt.NDArray[np.int32],
) -> int:
    """Write the runs of rows in which ``member`` differs from the moved plane; returns how many runs."""
    count = 0
    is_open = False
    buffer = np.empty(load_word(plane, HEAD_BYTES), np.uint8)
    scratch: int = buffer.ctypes.data
    row_bytes = load_word(plane, HEADS) * load_word(plane, HEAD_BYTES)
    for i_row in range(tokens):
        start = i_row * row_bytes
        if _is_row_equal(
            tag, element_bytes, plane, load_word(plane, ROWS) + start, member + start, is_interleaved, turn, scratch
        ):
            is_open = False
        elif is_open:
            runs[count - 1, 1] += 1
        else:
            runs[count, 0], runs[count, 1] = i_row, 1
            count += 1
            is_open = True
    return count


@njit(nogil=True, cache=True)
def _is_row_equal(
    tag: Any,
    element_bytes: int,
    plane: int,
    source: int,
    member: int,
    is_interleaved: bool,
    turn: int,
    scratch: int,
) -> bool:
    """Whether a moved row has the member's bits; left at the first head that differs."""
    head_bytes = load_word(plane, HEAD_BYTES)
    if turn == 0:
        return is_equal(source, member, load_word(plane, HEADS) * head_bytes)
    for i_head in range(load_word(plane, HEADS)):
        start = i_head * head_bytes
        move_dense(tag, element_bytes, scratch, source + start, plane, 1, is_interleaved, turn)
        if not is_equal(scratch, member + start, head_bytes):
            return False
    return True


@njit(nogil=True, cache=True)
def gather_planes(tag: Any, element_bytes: int, planes: Int64s, slots: Int64s, is_streamed: bool) -> int:
    """Copy paged rows to every plane's dense ones; returns how many values are NaN or infinite."""
    nonfinite = 0
    for i_plane in range(len(planes)):
        plane: int = planes.ctypes.data + i_plane * PLANE_BYTES
        nonfinite += _gather_plane(tag, element_bytes, plane, slots.ctypes.data, len(slots), is_streamed)
    if is_streamed:
        store_fence()
    return nonfinite


@njit(nogil=True, cache=True)
def _gather_plane(tag: Any, element_bytes: int, plane: int, slots: int, rows: int, is_streamed: bool) -> int:
    out = load_word(plane, ROWS)
    heads, head_bytes = load_word(plane, HEADS), load_word(plane, HEAD_BYTES)
    head_stride, element_stride = load_word(plane, HEAD_STRIDE), load_word(plane, ELEMENT_STRIDE)
    if head_stride == head_bytes and element_stride == element_bytes:
        heads, head_bytes = 1, heads * head_bytes
    nonfinite = 0
    rows_ahead = max(1, _BYTES_AHEAD // (heads * head_bytes))
    for i_row in range(rows):
        if i_row + rows_ahead < rows and head_stride == head_bytes:
            prefetch_bytes(_slot_address(plane, load_word(slots, i_row + rows_ahead)), head_bytes)
        source = _slot_address(plane, load_word(slots, i_row))
        for i_head in range(heads):
            p_source = source + i_head * head_stride
            p_out = out + (i_row * heads + i_head) * head_bytes
            if element_stride == element_bytes:
                copy_bytes(p_out, p_source, head_bytes, is_streamed)
                nonfinite += count_nonfinite(tag, p_source, head_bytes, element_bytes)
            else:
                collect(p_out, p_source, head_bytes, element_bytes, element_stride)
                nonfinite += count_nonfinite(tag, p_out, head_bytes, element_bytes)
    return nonfinite


@njit(cache=True)
def slot_bounds(slots: Int64s) -> tuple[int, int]:
    """The lowest and the highest slot; (0, -1) for none."""
    lowest, highest = 0, -1
    for i_row in range(len(slots)):
        lowest, highest = min(lowest, slots[i_row]), max(highest, slots[i_row])
    return lowest, highest


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
def note_mirror(
    jobs: Int64s,
    i_plane: int,
    i_target: int,
    turn: int,
    runs: npt.NDArray[np.int32],
    rows: npt.NDArray[Any],
    planes: Int64s,
    tokens: int,
    element_bytes: int,
) -> int:
    """Fill in a job's words about its mirror; returns the rows that the runs cover.

    -1 unless runs are sorted, disjoint, not empty and inside ``tokens``; -2 where a shape or an element is wrong.
    """
    job = jobs[i_plane, i_target]
    row_bytes = planes[i_plane, HEADS] * planes[i_plane, HEAD_BYTES]
    if not _has_rows(rows, row_bytes, element_bytes) or not _has_rows(runs, _RUN_BYTES, _RUN_BYTES // 2):
        return -2
    job[MIRROR_TURN], job[ROW] = turn, rows.ctypes.data
    job[RUN] = runs.ctypes.data
    job[RUNS_END] = runs.ctypes.data + len(runs) * _RUN_BYTES
    total, free = 0, 0
    for i_run in range(len(runs)):
        first: int = runs[i_run, 0]
        count: int = runs[i_run, 1]
        if first < free or count < 1 or first + count > tokens:
            return -1
        total, free = total + count, first + count
    return total


@njit(nogil=True, cache=True)
def _next_run(job: int, tokens: int) -> None:
    """Open the job's next run; behind the last one, a run that never comes."""
    run = load_word(job, RUN)
    if run == load_word(job, RUNS_END):
        store_word(job, FIRST, tokens)
        return
    first = load_int32(run)
    store_word(job, FIRST, first)
    store_word(job, END, first + load_int32(run + 4))
    store_word(job, RUN, run + _RUN_BYTES)
