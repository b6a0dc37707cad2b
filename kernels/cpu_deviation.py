"""The CPU's loops of the deviation law (numba, nogil, no fastmath). Nothing is checked here: ``cpu`` does that."""

# mypy: disable-error-code="untyped-decorator, no-any-return"
import math
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from kvservice.kernels.cpu_loops import HEAD_BYTES, HEADS, Int64s, move_dense
from kvservice.kernels.vector import load_word, widen

Float32s = npt.NDArray[np.float32]
Float64s = npt.NDArray[np.float64]


@njit(nogil=True, cache=True)
def deviation_plane(
    tag: Any,
    element_bytes: int,
    tokens: int,
    is_interleaved: bool,
    plane: int,
    candidates: Int64s,
    turns: Int64s,
    values: Float32s,
    squares: Float32s,
    total: Float64s,
) -> None:
    """Add every pair's squared distance over this plane to ``total`` (upper triangle)."""
    row_bytes = load_word(plane, HEADS) * load_word(plane, HEAD_BYTES)
    moved = np.empty(row_bytes, np.uint8)
    sums = np.zeros_like(total)
    for i_row in range(tokens):
        for i_one in range(len(candidates)):
            source = candidates[i_one] + i_row * row_bytes
            move_dense(
                tag,
                element_bytes,
                moved.ctypes.data,
                source,
                plane,
                load_word(plane, HEADS),
                is_interleaved,
                turns[i_one],
            )
            _widen_row(tag, element_bytes, moved.ctypes.data, row_bytes // element_bytes, values[i_one])
        for i_left in range(len(candidates)):
            for i_right in range(i_left + 1, len(candidates)):
                sums[i_left, i_right] += _squared_distance(values[i_left], values[i_right], squares)
    for i_left in range(len(candidates)):
        for i_right in range(i_left + 1, len(candidates)):
            total[i_left, i_right] += sums[i_left, i_right]


@njit(nogil=True, cache=True)
def row_deviation_plane(
    tag: Any,
    element_bytes: int,
    left: int,
    right: int,
    rows: int,
    width: int,
    values: Float32s,
    squares: Float32s,
    out: Float32s,
) -> None:
    """Squared distance of every row of two planes."""
    for i_row in range(rows):
        start = i_row * width * element_bytes
        _widen_row(tag, element_bytes, left + start, width, values[0])
        _widen_row(tag, element_bytes, right + start, width, values[1])
        out[i_row] = _squared_distance(values[0], values[1], squares)


@njit(nogil=True, cache=True)
def _widen_row(tag: Any, element_bytes: int, source: int, width: int, values: Float32s) -> None:
    for i_element in range(width):
        values[i_element] = widen(tag, source + i_element * element_bytes)


@njit(nogil=True, cache=True)
def _squared_distance(left: Float32s, right: Float32s, squares: Float32s) -> Any:
    """The deviation law: each difference and square rounded to float32, summed by halving; one NaN only."""
    half = len(squares)
    for i in range(half):
        difference = left[i] - right[i]
        squares[i] = difference * difference
    while half > 1:
        half //= 2
        for i in range(half):
            squares[i] = squares[i] + squares[i + half]
    return np.float32(np.nan) if math.isnan(squares[0]) else squares[0]
