"""The other kernels: which rows differ, how far rows lie apart, rows out of paged memory.

All addresses are int64, every dimension is masked; the host wrappers check.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return"
# No other annotations than constexpr: Triton compiles them too.
import triton
import triton.language as tl

from kvservice.kernels.triton_law import narrow, widen
from kvservice.kernels.triton_restore import slot_addresses


@triton.jit
def moved_bits(
    p_plane,
    p_turn,  # float32 [2 (cosine, sine), PAIRS]
    is_moved,
    row_start,
    i_element,
    m_part,
    HEAD_SIZE: tl.constexpr,
    ROTARY_OFFSET: tl.constexpr,
    PAIRS: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    STORAGE: tl.constexpr,
):
    """Storage bits of any elements of moved rows: each element is loaded with the other one of its pair."""
    bits = tl.load(p_plane + (row_start + i_element), mask=m_part, other=0)
    if PAIRS > 0:
        i_rotary = i_element % HEAD_SIZE - ROTARY_OFFSET
        m_rotary = (i_rotary >= 0) & (i_rotary < 2 * PAIRS)
        if IS_INTERLEAVED:
            is_first = i_rotary % 2 == 0
            i_pair = i_rotary // 2
            reach = 1
        else:
            is_first = i_rotary < PAIRS
            i_pair = tl.where(is_first, i_rotary, i_rotary - PAIRS)
            reach = PAIRS
        i_other = tl.where(is_first, i_element + reach, i_element - reach)
        other = tl.load(p_plane + (row_start + i_other), mask=m_part & m_rotary, other=0)
        cosine = tl.load(p_turn + i_pair, mask=m_rotary, other=1.0)
        sine = tl.load(p_turn + PAIRS + i_pair, mask=m_rotary, other=0.0)
        here, there = widen(bits, STORAGE) * cosine, widen(other, STORAGE) * sine
        moved = narrow(tl.where(is_first, here - there, here + there), STORAGE)
        bits = tl.where(m_rotary & (is_moved != 0), moved, bits)
    return bits


@triton.jit
def diff_plane(
    p_master,
    p_member,
    p_turn,
    is_moved,
    p_out,  # int32 [tokens]: 1 where a row differs
    tokens,
    WIDTH: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    ROTARY_OFFSET: tl.constexpr,
    PAIRS: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    STORAGE: tl.constexpr,
    B_TOKENS: tl.constexpr,
    B_ELEMENTS: tl.constexpr,
):
    """Grid: (tiles of B_TOKENS). Rows are compared piece by piece as bits."""
    i_token = tl.program_id(0) * B_TOKENS + tl.arange(0, B_TOKENS)
    m_token = i_token < tokens
    row_start = i_token.to(tl.int64)[:, None] * WIDTH
    is_different = tl.zeros([B_TOKENS], tl.int32)
    for first in range(0, WIDTH, B_ELEMENTS):
        i_element = (first + tl.arange(0, B_ELEMENTS))[None, :]
        m_part = m_token[:, None] & (i_element < WIDTH)  # [B_TOKENS, B_ELEMENTS]
        moved = moved_bits(
            p_master, p_turn, is_moved, row_start, i_element, m_part, HEAD_SIZE, ROTARY_OFFSET, PAIRS, IS_INTERLEAVED,
            STORAGE,
        )  # fmt: skip
        member = tl.load(p_member + (row_start + i_element), mask=m_part, other=0)
        is_different |= tl.max(((moved != member) & m_part).to(tl.int32), axis=1)
    tl.store(p_out + i_token, is_different, mask=m_token)


@triton.jit
def deviation_plane(
    p_left,
    p_right,
    p_turns,  # float32 [2 (left, right), 2 (cosine, sine), PAIRS]
    is_left_moved,
    is_right_moved,
    p_out,  # float32 [rows]
    WIDTH: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    ROTARY_OFFSET: tl.constexpr,
    PAIRS: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    STORAGE: tl.constexpr,
    PADDED: tl.constexpr,  # power of two over WIDTH
    HALVINGS: tl.constexpr,  # its logarithm
):
    """Grid: (rows). The deviation law: squares summed by halving; a sum over two is free of order."""
    i_row = tl.program_id(0).to(tl.int64)
    i_element = tl.arange(0, PADDED)
    m_part = i_element < WIDTH
    left = moved_bits(
        p_left, p_turns, is_left_moved, i_row * WIDTH, i_element, m_part, HEAD_SIZE, ROTARY_OFFSET, PAIRS,
        IS_INTERLEAVED, STORAGE,
    )  # fmt: skip
    right = moved_bits(
        p_right, p_turns + 2 * PAIRS, is_right_moved, i_row * WIDTH, i_element, m_part, HEAD_SIZE, ROTARY_OFFSET,
        PAIRS, IS_INTERLEAVED, STORAGE,
    )  # fmt: skip
    difference = widen(left, STORAGE) - widen(right, STORAGE)
    squares = tl.where(m_part, difference * difference, 0.0)
    for i_halving in tl.static_range(HALVINGS):
        squares = tl.sum(tl.reshape(squares, [2, PADDED >> (i_halving + 1)]), axis=0)
    total = tl.sum(squares, axis=0)
    pattern = tl.where(total == total, total.to(tl.int32, bitcast=True), 0x7FC00000)
    tl.store(p_out + i_row, pattern.to(tl.float32, bitcast=True))


@triton.jit
def gather_plane(
    p_paged,
    p_slots,  # int64 [rows]
    p_out,  # [rows, HEADS * HEAD_SIZE]
    p_nonfinite,  # int32 [tiles, HEADS]
    rows,
    block_size,
    block_stride,
    offset_stride,
    head_stride,
    element_stride,
    HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    STORAGE: tl.constexpr,
    B_ROWS: tl.constexpr,
):
    """Grid: (tiles of B_ROWS, heads)."""
    i_row = tl.program_id(0) * B_ROWS + tl.arange(0, B_ROWS)
    i_head = tl.program_id(1).to(tl.int64)
    m_row = i_row < rows
    slots = tl.load(p_slots + i_row, mask=m_row, other=0)
    p_source = slot_addresses(p_paged + i_head * head_stride, slots, block_size, block_stride, offset_stride)
    i_element = tl.arange(0, PADDED)[None, :]
    m_part = m_row[:, None] & (i_element < HEAD_SIZE)  # [B_ROWS, PADDED]
    bits = tl.load(p_source[:, None] + i_element.to(tl.int64) * element_stride, mask=m_part, other=0)
    out_start = i_row.to(tl.int64)[:, None] * (HEADS * HEAD_SIZE) + i_head * HEAD_SIZE
    tl.store(p_out + (out_start + i_element), bits, mask=m_part)
    exponent = 0x7F800000 if STORAGE == 2 else (0x7C00 if STORAGE == 1 else 0x7F80)
    is_nonfinite = (bits.to(tl.int32) & exponent) == exponent
    count = tl.sum(tl.sum(is_nonfinite.to(tl.int32), axis=1), axis=0)
    tl.store(p_nonfinite + tl.program_id(0) * HEADS + tl.program_id(1), count)
