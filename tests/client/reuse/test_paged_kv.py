"""The decoder's paged memory: blocks, slots, and unwritten rows that show."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvservice.client.reuse.paged_kv import KVShape, PagedKV
from kvservice.model.errors import CapacityError, SlotError


def make_kv(blocks: int = 6) -> PagedKV:
    return PagedKV(KVShape(layers=2, heads=2, head_size=4, blocks=blocks, block_size=4))


def test_plane_views_are_the_memory_itself() -> None:
    kv = make_kv()
    slots = kv.allocate(6)
    rows = (torch.randn(6, 2, 4), torch.randn(6, 2, 4))
    kv.write(1, slots, rows)
    for view, plane in zip(kv.plane_views(1), rows, strict=True):
        assert view.shape == (6, 4, 2, 4)
        assert torch.equal(view.flatten(0, 1)[slots], plane.bfloat16())


def test_read_returns_copies_of_what_was_written() -> None:
    kv = make_kv()
    slots = kv.allocate(3)
    rows = (torch.randn(3, 2, 4).bfloat16(), torch.randn(3, 2, 4).bfloat16())
    kv.write(0, slots, rows)
    first = kv.read(0, slots)
    first[0].zero_()
    assert all(torch.equal(a, b) for a, b in zip(kv.read(0, slots), rows, strict=True))


def test_blocks_of_a_prompt_are_not_neighbours() -> None:
    assert make_kv().allocate(9).tolist() == [0, 1, 2, 3, 8, 9, 10, 11, 16]


def test_unwritten_rows_are_nan() -> None:
    kv = make_kv()
    assert all(plane.isnan().all() for plane in kv.read(0, kv.allocate(5)))


def test_full_memory_refuses_and_takes_nothing() -> None:
    kv = make_kv()
    kv.allocate(17)
    with pytest.raises(CapacityError, match="1 are free"):
        kv.allocate(5)
    assert kv.free_tokens == 4
    assert kv.allocate(4).numel() == 4


def test_freeing_twice_is_refused() -> None:
    kv = make_kv()
    slots = kv.allocate(5)
    kv.free(slots)
    with pytest.raises(SlotError):
        kv.free(slots)
    assert kv.free_tokens == 24


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=20))
def test_no_slot_belongs_to_two_prompts(steps: list[tuple[int, bool]]) -> None:
    kv = make_kv(blocks=8)
    held: list[Tensor] = []
    for tokens, is_free in steps:
        if is_free and held:
            kv.free(held.pop(0))
        elif -(-tokens // 4) * 4 <= kv.free_tokens:
            held.append(kv.allocate(tokens))
    blocks = [block for slots in held for block in set((slots // 4).tolist())]
    assert len(blocks) == len(set(blocks))
    assert kv.free_tokens == (8 - len(blocks)) * 4
