"""Rows of packed blocks: moved as the reference moves them, bit for bit, and nothing beside them."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvservice.kernels import reference
from kvservice.kernels.cpu_blocks import BlockTable, gather_by_table, scatter_by_table
from kvservice.kernels.shapes import KernelInputError
from tests.kernels.builders import (
    PACKINGS,
    POISON,
    TORCH_DTYPES,
    Bits,
    bits_type,
    make_perms,
    random_bits,
    tensor,
    tensor_bits,
)

HEADS, BLOCK_SIZE, BLOCKS = 3, 32, 5
ROW, BLOCK = HEADS * 16, 2 * HEADS * BLOCK_SIZE * 16
SLOTS = np.array([7, 31, 32, 159, 0, 96, 97, 5], np.int64)
Slots = npt.NDArray[np.int64]


def make_table(packing: str = "amx", plane: int = 0, *, head_size: int = 16, dtype: str = "bfloat16") -> BlockTable:
    perm = make_perms(packing, BLOCK_SIZE, HEADS, head_size)[plane]
    return BlockTable(perm, 2 * HEADS * BLOCK_SIZE * head_size, dtype)


def make_memory(table: BlockTable, seed: int = 0) -> Bits:
    """Blocks with other things between them; ``blocks_of`` are the blocks alone."""
    return random_bits(np.random.default_rng(seed), (BLOCKS, table.block_elements + 6), table.dtype)


def blocks_of(memory: Bits) -> Bits:
    return memory[:, 3:-3]


def scatter_slots(count: int, seed: int) -> Slots:
    """Slots out of order, some rows left out."""
    rng = np.random.default_rng(seed)
    slots = rng.permutation(BLOCKS * BLOCK_SIZE)[:count].astype(np.int64)
    slots[rng.random(count) < 0.2] = -1
    return slots


moves = {
    "packing": st.sampled_from(PACKINGS),
    "plane": st.integers(0, 1),
    "dtype": st.sampled_from(sorted(TORCH_DTYPES)),
    "head_size": st.sampled_from([16, 48, 80]),
    "count": st.integers(0, BLOCKS * BLOCK_SIZE),
    "seed": st.integers(0, 2**32 - 1),
}


@settings(deadline=None)
@given(**moves)
def test_a_scatter_equals_the_reference_and_touches_nothing_else(
    packing: str, plane: int, dtype: str, head_size: int, count: int, seed: int
) -> None:
    table = make_table(packing, plane, head_size=head_size, dtype=dtype)
    rows = random_bits(np.random.default_rng(seed), (count, table.row_elements), dtype, hostile=0.5)
    slots, ours = scatter_slots(count, seed), make_memory(table)
    theirs = ours.copy()
    wanted = tensor(theirs, dtype)[:, 3:-3]
    reference.scatter_by_table(wanted, torch.from_numpy(slots), torch.from_numpy(table.perm), tensor(rows, dtype))
    scatter_by_table(blocks_of(ours), slots, table, rows)
    np.testing.assert_array_equal(ours, theirs)


@settings(deadline=None)
@given(**moves)
def test_a_gather_equals_the_reference_and_counts_what_is_not_finite(
    packing: str, plane: int, dtype: str, head_size: int, count: int, seed: int
) -> None:
    table, slots = make_table(packing, plane, head_size=head_size, dtype=dtype), np.abs(scatter_slots(count, seed))
    blocks = blocks_of(make_memory(table, seed))
    found: Bits = np.full((count, table.row_elements), POISON[dtype], bits_type(dtype))
    wanted = tensor(np.full_like(found, POISON[dtype]), dtype)
    view = tensor(np.ascontiguousarray(blocks), dtype)
    expected = reference.gather_by_table(view, torch.from_numpy(slots), torch.from_numpy(table.perm), wanted)
    assert gather_by_table(blocks, slots, table, found) == expected
    np.testing.assert_array_equal(found, tensor_bits(wanted))


@pytest.mark.parametrize(
    ("packing", "plane", "dtype", "stretch_bytes"),
    [
        ("amx", 0, "bfloat16", 4),
        ("amx", 1, "bfloat16", 2),
        ("vec", 0, "float32", 4),
        ("vec", 1, "bfloat16", 32),
        ("rows", 1, "bfloat16", 2 * ROW),
        ("shuffled", 0, "float16", 2),
    ],
)
def test_what_lies_together_is_moved_together(packing: str, plane: int, dtype: str, stretch_bytes: int) -> None:
    assert make_table(packing, plane, dtype=dtype).stretch_bytes == stretch_bytes


def bad_perm(**changes: Any) -> Slots:
    perm = make_perms("amx", BLOCK_SIZE, HEADS, 16)[0].copy()
    for value in changes.values():
        perm[3, 5] = value
    return perm


@pytest.mark.parametrize(
    ("perm", "says"),
    [
        (bad_perm(outside=BLOCK), "do not lie in a block"),
        (bad_perm(negative=-1), "do not lie in a block"),
        (bad_perm(double=bad_perm()[0, 0]), "twice"),
        (bad_perm().astype(np.int32), "must be int64"),
        (bad_perm()[0], "must be int64"),
        (bad_perm()[:0], "must be int64"),
    ],
)
def test_a_table_that_is_none_is_refused(perm: Any, says: str) -> None:
    with pytest.raises(KernelInputError, match=says):
        BlockTable(perm, BLOCK, "bfloat16")


def rows_of(count: int = len(SLOTS), width: int = ROW) -> Bits:
    return np.zeros((count, width), np.uint16)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"rows": rows_of(len(SLOTS) - 1)}, "rows must be"),
    ({"rows": rows_of(width=ROW + 1)}, "rows must be"),
    ({"rows": rows_of().astype(np.uint32)}, "rows must be"),
    ({"rows": rows_of(width=2 * ROW)[:, ::2]}, "rows must be"),
    ({"slots": SLOTS.astype(np.int32)}, "slots must be"),
    ({"slots": np.repeat(SLOTS, 2)[::2]}, "slots must be"),
    ({"slots": SLOTS.reshape(2, -1)}, "slots must be"),
    ({"slots": SLOTS + 1}, "do not fit"),
    ({"slots": SLOTS - 2}, "do not fit"),
    ({"blocks": np.zeros((BLOCKS, BLOCK + 1), np.uint16)}, "blocks must be"),
    ({"blocks": np.zeros((BLOCKS, BLOCK), np.uint32)}, "blocks must be"),
    ({"blocks": np.zeros((BLOCKS, 2 * BLOCK), np.uint16)[:, ::2]}, "contiguous"),
]


@pytest.mark.parametrize(("changes", "says"), BAD)
def test_what_does_not_fit_is_refused_before_anything_is_written(changes: dict[str, Any], says: str) -> None:
    given_: dict[str, Any] = {
        "blocks": np.zeros((BLOCKS, BLOCK), np.uint16),
        "slots": SLOTS,
        "rows": rows_of() + 9,
    } | changes
    with pytest.raises(KernelInputError, match=says):
        scatter_by_table(given_["blocks"], given_["slots"], make_table(), given_["rows"])
    assert not given_["blocks"].any()
    before = given_["rows"].copy()
    with pytest.raises(KernelInputError, match=says):
        gather_by_table(given_["blocks"], given_["slots"], make_table(), given_["rows"])
    assert np.array_equal(given_["rows"], before)


def test_a_gather_leaves_no_row_out_and_read_only_memory_is_not_written() -> None:
    blocks, rows = np.zeros((BLOCKS, BLOCK), np.uint16), rows_of()
    with pytest.raises(KernelInputError, match="do not fit"):
        gather_by_table(blocks, SLOTS - 1, make_table(), rows)
    for output in (blocks, rows):
        output.flags.writeable = False
    with pytest.raises(KernelInputError, match="read-only"):
        scatter_by_table(blocks, SLOTS, make_table(), rows)
    with pytest.raises(KernelInputError, match="read-only"):
        gather_by_table(blocks, SLOTS, make_table(), rows)
