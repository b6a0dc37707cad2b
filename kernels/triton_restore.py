"""The restore kernel: a tile of a master's rows is loaded once and written to every target.

The host wrapper checks and raises; the kernel never guesses. All addresses are int64, every dimension is masked.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return"
# No other annotations than constexpr: Triton compiles them too.
import triton
import triton.language as tl

from kvservice.kernels.triton_law import pair_offsets, turn


@triton.jit
def slot_addresses(p_paged, slots, block_size, block_stride, offset_stride):
    """Where the head of each slot begins; ``slots`` is int64 and not negative."""
    block = slots // block_size
    offset = slots - block * block_size
    return p_paged + (block * block_stride + offset * offset_stride)


@triton.jit
def restore_plane(
    p_master,  # [tokens, HEADS * HEAD_SIZE] storage bits
    p_rows,  # [replaced rows of all targets, HEADS * HEAD_SIZE]
    p_paged,
    p_slots,  # int64 [targets, tokens], -1 = leave out
    p_sources,  # int32 [targets, tokens], -1 = the master's row, else the row of p_rows
    p_turns,  # float32 [targets, 2 (master, mirror), 2 (cosine, sine), PAIRS]
    p_is_moved,  # int32 [targets, 2 (master, mirror)]
    tokens,
    targets,
    block_size,
    block_stride,
    offset_stride,
    head_stride,
    element_stride,
    HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    ROTARY_OFFSET: tl.constexpr,
    PAIRS: tl.constexpr,
    COPIED: tl.constexpr,  # power of two over what stands before or after the rotary part
    PADDED: tl.constexpr,  # power of two over PAIRS
    IS_INTERLEAVED: tl.constexpr,
    HAS_MIRROR: tl.constexpr,
    STORAGE: tl.constexpr,
    B_TOKENS: tl.constexpr,
):
    """Grid: (tiles of B_TOKENS, heads). Each part of the head is loaded, then written to one target after another."""
    i_token = tl.program_id(0) * B_TOKENS + tl.arange(0, B_TOKENS)
    i_head = tl.program_id(1).to(tl.int64)
    head_start = i_token.to(tl.int64) * (HEADS * HEAD_SIZE) + i_head * HEAD_SIZE  # [B_TOKENS]
    rows_head = i_head * HEAD_SIZE
    p_head = p_paged + i_head * head_stride
    REST: tl.constexpr = ROTARY_OFFSET + 2 * PAIRS
    if ROTARY_OFFSET > 0:
        _copy_part(
            p_master, p_rows + rows_head, p_head, p_slots, p_sources, tokens, targets, block_size, block_stride,
            offset_stride, element_stride, i_token, head_start, 0, ROTARY_OFFSET, COPIED, HEADS * HEAD_SIZE, HAS_MIRROR,
        )  # fmt: skip
    if REST < HEAD_SIZE:
        _copy_part(
            p_master, p_rows + rows_head, p_head, p_slots, p_sources, tokens, targets, block_size, block_stride,
            offset_stride, element_stride, i_token, head_start, REST, HEAD_SIZE - REST, COPIED, HEADS * HEAD_SIZE,
            HAS_MIRROR,
        )  # fmt: skip
    if PAIRS > 0:
        _move_part(
            p_master, p_rows + rows_head, p_head, p_slots, p_sources, p_turns, p_is_moved, tokens, targets, block_size,
            block_stride, offset_stride, element_stride, i_token, head_start, ROTARY_OFFSET, PAIRS, PADDED,
            HEADS * HEAD_SIZE, IS_INTERLEAVED, HAS_MIRROR, STORAGE,
        )  # fmt: skip


@triton.jit
def _copy_part(
    p_master,
    p_rows,
    p_paged,
    p_slots,
    p_sources,
    tokens,
    targets,
    block_size,
    block_stride,
    offset_stride,
    element_stride,
    i_token,
    head_start,
    BEGIN: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_MIRROR: tl.constexpr,
):
    """Copy elements ``[BEGIN, BEGIN + SIZE)`` of each row's head."""
    i_part = tl.arange(0, PADDED)
    m_token, m_part = i_token < tokens, (i_part < SIZE)[None, :]
    i_element = (BEGIN + i_part)[None, :]
    # [B_TOKENS, PADDED]
    bits = tl.load(p_master + (head_start[:, None] + i_element), mask=m_token[:, None] & m_part, other=0)
    column = i_token.to(tl.int64)  # [B_TOKENS] places in the tables of this target
    for _i_target in range(targets):
        slots = tl.load(p_slots + column, mask=m_token, other=-1)
        m_row = (slots >= 0)[:, None] & m_part
        written = bits
        if HAS_MIRROR:
            source = tl.load(p_sources + column, mask=m_token, other=-1)[:, None]
            p_row = p_rows + (source.to(tl.int64) * WIDTH + i_element)
            written = tl.where(source >= 0, tl.load(p_row, mask=m_part & (source >= 0), other=0), bits)
        p_target = slot_addresses(p_paged, tl.maximum(slots, 0), block_size, block_stride, offset_stride)
        tl.store(p_target[:, None] + i_element.to(tl.int64) * element_stride, written, mask=m_row)
        column += tokens


@triton.jit
def _move_part(
    p_master,
    p_rows,
    p_paged,
    p_slots,
    p_sources,
    p_turns,
    p_is_moved,
    tokens,
    targets,
    block_size,
    block_stride,
    offset_stride,
    element_stride,
    i_token,
    head_start,
    ROTARY_OFFSET: tl.constexpr,
    PAIRS: tl.constexpr,
    PADDED: tl.constexpr,
    WIDTH: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    HAS_MIRROR: tl.constexpr,
    STORAGE: tl.constexpr,
):
    """Rotate the pairs of each row's head; a row that does not move is copied bit for bit."""
    i_pair = tl.arange(0, PADDED)
    m_pair = i_pair < PAIRS
    m_token, m_part = i_token < tokens, m_pair[None, :]
    i_first, i_second = pair_offsets(i_pair[None, :], ROTARY_OFFSET, PAIRS, IS_INTERLEAVED)
    m_load = m_token[:, None] & m_part
    first = tl.load(p_master + (head_start[:, None] + i_first), mask=m_load, other=0)  # [B_TOKENS, PADDED]
    second = tl.load(p_master + (head_start[:, None] + i_second), mask=m_load, other=0)
    column = i_token.to(tl.int64)  # [B_TOKENS] places in the tables of this target
    for i_target in range(targets):
        slots = tl.load(p_slots + column, mask=m_token, other=-1)
        m_row = (slots >= 0)[:, None] & m_part
        x1, x2 = first, second
        p_turn = p_turns + i_target * (4 * PAIRS) + i_pair
        cosine = tl.load(p_turn, mask=m_pair, other=1.0)[None, :]
        sine = tl.load(p_turn + PAIRS, mask=m_pair, other=0.0)[None, :]
        is_moved = tl.load(p_is_moved + i_target * 2) + tl.zeros_like(slots)[:, None].to(tl.int32)
        if HAS_MIRROR:
            source = tl.load(p_sources + column, mask=m_token, other=-1)[:, None]
            is_replaced = source >= 0
            p_row = p_rows + source.to(tl.int64) * WIDTH
            x1 = tl.where(is_replaced, tl.load(p_row + i_first, mask=m_part & is_replaced, other=0), first)
            x2 = tl.where(is_replaced, tl.load(p_row + i_second, mask=m_part & is_replaced, other=0), second)
            cosine = tl.where(is_replaced, tl.load(p_turn + 2 * PAIRS, mask=m_pair, other=1.0)[None, :], cosine)
            sine = tl.where(is_replaced, tl.load(p_turn + 3 * PAIRS, mask=m_pair, other=0.0)[None, :], sine)
            is_moved = tl.where(is_replaced, tl.load(p_is_moved + i_target * 2 + 1), is_moved)
        y1, y2 = turn(x1, x2, cosine, sine, STORAGE)
        p_target = slot_addresses(p_paged, tl.maximum(slots, 0), block_size, block_stride, offset_stride)
        p_first = p_target[:, None] + i_first.to(tl.int64) * element_stride
        p_second = p_target[:, None] + i_second.to(tl.int64) * element_stride
        tl.store(p_first, tl.where(is_moved != 0, y1, x1), mask=m_row)
        tl.store(p_second, tl.where(is_moved != 0, y2, x2), mask=m_row)
        column += tokens
