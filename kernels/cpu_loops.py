"""The CPU's loops over planes, rows and targets (numba, nogil, no fastmath).

Everything is an int64: addresses, byte strides, counts. So one compiled function a storage type serves every layout,
read-only memory included. Callers check, and keep every buffer alive during the call; only ``restore_layers`` looks at
its tables first.
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

# A job is one target of a restore in one plane. A cursor walks through a mirror's runs in one plane: where its next run
# is noted and where they end, the run that it stands before or in, the next replaced row. A plane's words say where its
# rows are and how its heads rotate, and from ADDRESS on where its paged memory is, strides in bytes. Words of a master
# and of a mirror: the address that offsets start from and how far they may reach; then a master's step from layer to
# layer and the offsets of its planes; a mirror's tables: begin and end of every plane's rows, where every plane's runs
# end, the runs. A mirror's words are all 0 where a target has none. Words are int64 and read by address, never as
# arrays: numba counts references to arrays by locked instructions, and each of those waits for all streamed stores.
SLOTS, TURN, MIRROR_TURN, JOB_WORDS = range(4)
RUN, RUNS_END, FIRST, END, ROW, CURSOR_WORDS = range(6)
ROWS, HEADS, HEAD_BYTES, ROTARY_OFFSET, ROTARY_BYTES, ADDRESS, BLOCK_SIZE = range(7)
BLOCK_STRIDE, OFFSET_STRIDE, HEAD_STRIDE, ELEMENT_STRIDE, PLANE_WORDS = range(7, 12)
BASE, BYTES, LAYER_STRIDE, PLANE_OFFSETS = range(4)
ROW_BOUNDS, RUN_ENDS, RUNS, RUN_COUNT, MIRROR_WORDS = range(2, 7)
PAGED = ADDRESS
JOB_BYTES, CURSOR_BYTES, MIRROR_WORDS_BYTES, PLANE_BYTES = (
    8 * JOB_WORDS,
    8 * CURSOR_WORDS,
    8 * MIRROR_WORDS,
    8 * PLANE_WORDS,
)

_BYTES_AHEAD = 12288  # streamed stores and replaced rows throw the hardware prefetcher off: 0.55 -> 0.9 of memcpy
RUN_BYTES = 8  # two int32
_NEVER = 1 << 62  # the first row of a run behind the last one


@njit(nogil=True, cache=True)
def restore_layers(
    tag: Any,
    element_bytes: int,
    tokens: int,
    first: int,
    end: int,
    planes: int,
    targets: int,
    words: int,
    turning: int,
    jobs: int,
    master: int,
    mirrors: int,
    mirrors_first: int,
    is_streamed: bool,
) -> tuple[int, int]:
    """Restore layers ``[first, end)``; where something is wrong nothing, and ``first_bad_plane``'s answer.

    Tables are given by address, as unpacking an array costs a cold call more than a number. Of all layers: ``words``
    ``[layers, planes, PLANE_WORDS]``; ``turning`` ``[layers, 2]``: which of the jobs' rotations, and whether its pairs
    are neighbours. ``jobs`` is ``[rotations, planes, targets, JOB_WORDS]``. ``mirrors``, 0
    or ``[targets, MIRROR_WORDS]``, has tables of layers from ``mirrors_first`` on.
    """
    words += first * planes * PLANE_BYTES
    layer_stride = load_word(master, LAYER_STRIDE)
    skipped = (first - mirrors_first) * planes
    bad = first_bad_plane(tokens, (end - first) * planes, planes, targets, words, master, first, mirrors, skipped)
    if bad[0] >= 0:
        return bad
    own = np.empty(2 * targets * CURSOR_WORDS + 1, np.int64)
    cursors = np.int64(own.ctypes.data) * (mirrors != 0)  # an address is a uint64, and with an int64 a float64
    for layer in range(first, end):
        rotation, is_interleaved = load_word(turning, 2 * layer), load_word(turning, 2 * layer + 1) != 0
        for i_plane in range(planes):
            index = (layer - first) * planes + i_plane
            _open_cursors(cursors, mirrors, targets, skipped + index)
            plane_jobs = jobs + (rotation * planes + i_plane) * targets * JOB_BYTES
            plane, rows = words + index * PLANE_BYTES, load_word(master, PLANE_OFFSETS + i_plane)
            rows += load_word(master, BASE) + layer * layer_stride
            _restore_plane(
                tag, element_bytes, tokens, is_interleaved, plane, rows, plane_jobs, cursors, targets, is_streamed
            )
    if is_streamed:
        store_fence()
    own[0] = 0  # numba frees an array after its last use, and an address is none
    return bad


@njit(nogil=True, cache=True)
def _open_cursors(cursors: int, mirrors: int, targets: int, index: int) -> None:
    """Two cursors a target before the first run of plane ``index``: one to write by, one to fetch ahead by."""
    for i_cursor in range(2 * targets if mirrors != 0 else 0):
        cursor, mirror = cursors + i_cursor * CURSOR_BYTES, mirrors + (i_cursor >> 1) * MIRROR_WORDS_BYTES
        run_ends = load_word(mirror, RUN_ENDS)
        if run_ends == 0:
            store_word(cursor, FIRST, _NEVER)
            continue
        begin = load_word(run_ends, index - 1) if index > 0 else 0
        store_word(cursor, RUN, load_word(mirror, RUNS) + begin * RUN_BYTES)
        store_word(cursor, RUNS_END, load_word(mirror, RUNS) + load_word(run_ends, index) * RUN_BYTES)
        store_word(cursor, ROW, load_word(mirror, BASE) + load_word(load_word(mirror, ROW_BOUNDS), 2 * index))
        _next_run(cursor)


@njit(nogil=True, cache=True)
def _restore_plane(
    tag: Any,
    element_bytes: int,
    tokens: int,
    is_interleaved: bool,
    plane: int,
    master: int,
    jobs: int,
    cursors: int,
    targets: int,
    is_streamed: bool,
) -> None:
    """Rows outside, targets inside: a master's row is read from memory once and written to every target.

    The other way round, tiles of 4 to 32 KiB written to one target after another, is a tenth slower with ten targets.
    """
    row_bytes = _row_bytes(plane)
    rows_ahead = max(1, _BYTES_AHEAD // row_bytes)
    for i_row in range(min(rows_ahead, tokens) if cursors != 0 else 0):
        _fetch_row(i_row, row_bytes, master, cursors, targets)
    for i_row in range(tokens):
        if cursors == 0 or i_row + rows_ahead >= tokens:  # behind the last row the next plane begins
            prefetch_bytes(master + (i_row + rows_ahead) * row_bytes, row_bytes)
        else:
            _fetch_row(i_row + rows_ahead, row_bytes, master, cursors, targets)
        for i_target in range(targets):
            job, cursor = jobs + i_target * JOB_BYTES, cursors + 2 * i_target * CURSOR_BYTES
            source, turn = master + i_row * row_bytes, load_word(job, TURN)
            if cursors != 0 and i_row >= load_word(cursor, FIRST):
                source, turn = _take_row(cursor, i_row, row_bytes), load_word(job, MIRROR_TURN)
            slot = load_word(load_word(job, SLOTS), i_row)
            if slot >= 0:
                target = _slot_address(plane, slot)
                _write_row(tag, element_bytes, target, source, plane, turn, is_interleaved, is_streamed)


@njit(nogil=True, cache=True)
def _fetch_row(row: int, row_bytes: int, master: int, cursors: int, targets: int) -> None:
    """Ask for all sources of a row; for the master's only if a target wants it: 5 % of what a lone mirror reads."""
    is_wanted = False
    for i_target in range(targets):
        cursor = cursors + (2 * i_target + 1) * CURSOR_BYTES
        if row < load_word(cursor, FIRST):
            is_wanted = True
        else:
            prefetch_bytes(_take_row(cursor, row, row_bytes), row_bytes)
    if is_wanted:
        prefetch_bytes(master + row * row_bytes, row_bytes)


@njit(nogil=True, cache=True)
def _take_row(cursor: int, row: int, row_bytes: int) -> int:
    """Where the replaced row is; the cursor goes on."""
    source = load_word(cursor, ROW)
    store_word(cursor, ROW, source + row_bytes)
    if row + 1 == load_word(cursor, END):
        _next_run(cursor)
    return source


@njit(nogil=True, cache=True)
def _next_run(cursor: int) -> None:
    """Open the next run; behind the last one, a run that never comes."""
    run = load_word(cursor, RUN)
    if run == load_word(cursor, RUNS_END):
        store_word(cursor, FIRST, _NEVER)
        return
    first = load_int32(run)
    store_word(cursor, FIRST, first)
    store_word(cursor, END, first + load_int32(run + 4))
    store_word(cursor, RUN, run + RUN_BYTES)


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
    moved[0] = 0  # numba frees an array after its last use, and an address is none


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
    buffer[0] = 0  # numba frees an array after its last use, and an address is none
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


@njit(nogil=True, cache=True)
def first_bad_plane(
    tokens: int,
    plane_count: int,
    planes: int,
    targets: int,
    words: int,
    master: int,
    first_layer: int,
    mirrors: int,
    skipped: int,
) -> tuple[int, int]:
    """Which plane of the layers to restore is not what its tables say, and whose it is; (-1, -1) where all is well.

    The latter is the index of the target whose mirror is wrong, -1 for the master. ``skipped``: how many planes are in
    the mirrors' tables before the first one asked about.
    """
    for index in range(plane_count):
        row_bytes = _row_bytes(words + index * PLANE_BYTES)
        offset = load_word(master, PLANE_OFFSETS + index % planes)
        offset += (first_layer + index // planes) * load_word(master, LAYER_STRIDE)
        if not 0 <= offset <= load_word(master, BYTES) - tokens * row_bytes:
            return index, -1
    for i_target in range(targets if mirrors != 0 else 0):
        mirror = mirrors + i_target * MIRROR_WORDS_BYTES
        run_ends, bounds = load_word(mirror, RUN_ENDS), load_word(mirror, ROW_BOUNDS) + skipped * 16
        begin = load_word(run_ends, skipped - 1) if run_ends != 0 and skipped > 0 else 0
        for index in range(plane_count if run_ends != 0 else 0):
            end = load_word(run_ends, skipped + index)
            if not 0 <= begin <= end <= load_word(mirror, RUN_COUNT):
                return index, i_target
            rows = covered_rows(load_word(mirror, RUNS) + begin * RUN_BYTES, end - begin, tokens)
            first, behind = load_word(bounds, 2 * index), load_word(bounds, 2 * index + 1)
            is_inside = 0 <= first <= behind <= load_word(mirror, BYTES)
            if rows < 0 or not is_inside or behind - first != rows * _row_bytes(words + index * PLANE_BYTES):
                return index, i_target
            begin = end
    return -1, -1


@njit(nogil=True, cache=True)
def _row_bytes(plane: int) -> int:
    return load_word(plane, HEADS) * load_word(plane, HEAD_BYTES)


@njit(nogil=True, cache=True)
def covered_rows(runs: int, count: int, tokens: int) -> int:
    """How many rows ``count`` runs cover; -1 unless they are sorted, disjoint, not empty and inside ``tokens``."""
    total, free = 0, 0
    for i_run in range(count):
        first: int = load_int32(runs + i_run * RUN_BYTES)
        rows: int = load_int32(runs + i_run * RUN_BYTES + 4)
        if first < free or rows < 1 or first + rows > tokens:
            return -1
        total, free = total + rows, first + rows
    return total
