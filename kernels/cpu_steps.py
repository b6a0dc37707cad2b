"""The CPU's steps inside one row: move, copy, compare or count a head (numba, nogil, no fastmath).

Addresses, byte counts and byte strides are int64; ``turn`` is the address of a table of ``cpu_inputs``, 0 = copy.
numba's cache looks at the file of the outermost function only: after an edit here or in ``vector``, touch
``cpu_loops.py`` and ``cpu_deviation.py``.
"""

# mypy: disable-error-code="untyped-decorator"
import math
from typing import Any

from numba import njit

from kvservice.kernels.vector import (
    LINE_BYTES,
    copy_line,
    copy_line_streamed,
    copy_two_bytes,
    differ_in_line,
    load_uint16,
    move_halves,
    move_halves_streamed,
    move_neighbours,
    move_neighbours_streamed,
    move_pair,
    nonfinite_in_line,
    prefetch_line,
    widen,
)

_LINE_MASK = LINE_BYTES - 1


@njit(nogil=True, cache=True)
def move_heads(
    tag: Any,
    element_bytes: int,
    target: int,
    target_stride: int,
    source: int,
    heads: int,
    head_bytes: int,
    rotary_offset: int,
    rotary_bytes: int,
    is_interleaved: bool,
    turn: int,
    is_streamed: bool,
) -> None:
    """Copy what does not rotate, rotate what does, for all heads of a row (source heads side by side)."""
    if turn == 0 or rotary_bytes == 0:
        _copy_parts(target, target_stride, source, head_bytes, heads, head_bytes, is_streamed)
        return
    if rotary_offset > 0:
        _copy_parts(target, target_stride, source, head_bytes, heads, rotary_offset, is_streamed)
    p_target, p_source = target + rotary_offset, source + rotary_offset
    if is_interleaved:
        _rotate_neighbours(
            tag, element_bytes, p_target, target_stride, p_source, head_bytes, heads, rotary_bytes, turn, is_streamed
        )
    else:
        _rotate_halves(
            tag,
            element_bytes,
            p_target,
            target_stride,
            p_source,
            head_bytes,
            heads,
            rotary_bytes // 2,
            turn,
            is_streamed,
        )
    rest = rotary_offset + rotary_bytes
    if rest < head_bytes:
        _copy_parts(target + rest, target_stride, source + rest, head_bytes, heads, head_bytes - rest, is_streamed)


@njit(nogil=True, cache=True)
def _rotate_halves(
    tag: Any,
    element_bytes: int,
    target: int,
    target_stride: int,
    source: int,
    source_stride: int,
    heads: int,
    reach: int,
    turn: int,
    is_streamed: bool,
) -> None:
    """Pairs ``reach`` bytes apart; the table holds 8 bytes a pair. Heads inside, so that a table line is read once."""
    done = 0
    table_step = 8 // element_bytes
    if is_streamed and ((target | target_stride | reach) & _LINE_MASK) == 0:
        while done < reach:
            for i_head in range(heads):
                p_target = target + i_head * target_stride + done
                p_source = source + i_head * source_stride + done
                move_halves_streamed(tag, p_target, p_source, reach, turn + done * table_step)
            done += LINE_BYTES
        return
    while done + LINE_BYTES <= reach:
        for i_head in range(heads):
            p_target = target + i_head * target_stride + done
            p_source = source + i_head * source_stride + done
            move_halves(tag, p_target, p_source, reach, turn + done * table_step)
        done += LINE_BYTES
    while done < reach:
        pair = turn + done * table_step
        for i_head in range(heads):
            p_target = target + i_head * target_stride + done
            p_source = source + i_head * source_stride + done
            move_pair(tag, p_target, p_source, reach, pair, pair + 4)
        done += element_bytes


@njit(nogil=True, cache=True)
def _rotate_neighbours(
    tag: Any,
    element_bytes: int,
    target: int,
    target_stride: int,
    source: int,
    source_stride: int,
    heads: int,
    rotary_bytes: int,
    turn: int,
    is_streamed: bool,
) -> None:
    """Pairs side by side; the table holds 8 bytes a pair."""
    can_stream = is_streamed and ((target | target_stride) & _LINE_MASK) == 0
    lines_end = rotary_bytes // LINE_BYTES * LINE_BYTES if element_bytes == 2 else 0
    for i_head in range(heads):
        p_target, p_source = target + i_head * target_stride, source + i_head * source_stride
        for done in range(0, lines_end, LINE_BYTES):
            if can_stream:
                move_neighbours_streamed(tag, p_target + done, p_source + done, turn + done * 2)
            else:
                move_neighbours(tag, p_target + done, p_source + done, turn + done * 2)
        for done in range(lines_end, rotary_bytes, 2 * element_bytes):
            pair = turn + done * 4 // element_bytes
            move_pair(tag, p_target + done, p_source + done, element_bytes, pair, pair + 4)


@njit(nogil=True, cache=True)
def _copy_parts(
    target: int, target_stride: int, source: int, source_stride: int, parts: int, count: int, is_streamed: bool
) -> None:
    """The same ``count`` bytes of every head; in one copy where heads lie side by side."""
    if target_stride == count and source_stride == count:
        copy_bytes(target, source, parts * count, is_streamed)
        return
    for i_part in range(parts):
        copy_bytes(target + i_part * target_stride, source + i_part * source_stride, count, is_streamed)


@njit(nogil=True, cache=True)
def copy_bytes(target: int, source: int, count: int, is_streamed: bool) -> None:
    """Copy ``count`` bytes (even), past the cache where asked and where the target is aligned."""
    done = 0
    if is_streamed and (target & _LINE_MASK) == 0:
        while done + LINE_BYTES <= count:
            copy_line_streamed(target + done, source + done)
            done += LINE_BYTES
    while done + LINE_BYTES <= count:
        copy_line(target + done, source + done)
        done += LINE_BYTES
    while done < count:
        copy_two_bytes(target + done, source + done)
        done += 2


@njit(nogil=True, cache=True)
def prefetch_bytes(source: int, count: int) -> None:
    """Ask for ``count`` bytes that are needed soon."""
    for done in range(0, count, LINE_BYTES):
        prefetch_line(source + done)


@njit(nogil=True, cache=True)
def is_equal(left: int, right: int, count: int) -> bool:
    """Whether ``count`` bytes (even) are the same."""
    done = 0
    while done + LINE_BYTES <= count:
        if differ_in_line(left + done, right + done):
            return False
        done += LINE_BYTES
    while done < count:
        if load_uint16(left + done) != load_uint16(right + done):
            return False
        done += 2
    return True


@njit(nogil=True, cache=True)
def count_nonfinite(tag: Any, source: int, count: int, element_bytes: int) -> int:
    """How many values in ``count`` bytes are NaN or infinite."""
    nonfinite, done = 0, 0
    while done + LINE_BYTES <= count:
        nonfinite += nonfinite_in_line(tag, source + done)
        done += LINE_BYTES
    while done < count:
        if not math.isfinite(widen(tag, source + done)):
            nonfinite += 1
        done += element_bytes
    return nonfinite


@njit(nogil=True, cache=True)
def spread(target: int, source: int, count: int, element_bytes: int, element_stride: int) -> None:
    """Contiguous bytes to elements ``element_stride`` apart."""
    for i_element in range(count // element_bytes):
        for step in range(0, element_bytes, 2):
            copy_two_bytes(target + i_element * element_stride + step, source + i_element * element_bytes + step)


@njit(nogil=True, cache=True)
def collect(target: int, source: int, count: int, element_bytes: int, element_stride: int) -> None:
    """Elements ``element_stride`` apart to contiguous bytes."""
    for i_element in range(count // element_bytes):
        for step in range(0, element_bytes, 2):
            copy_two_bytes(target + i_element * element_bytes + step, source + i_element * element_stride + step)
