"""Restores to packed blocks give the reference's bits, whatever the pieces and the batches; what lies is refused."""

import threading

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvservice.kernels import cpu_packed, reference
from kvservice.kernels.cpu_blocks import BlockTable
from kvservice.kernels.cpu_layers import DenseLayers
from kvservice.kernels.cpu_packed import PackedLayers, PackedRestore, packed_layers
from kvservice.kernels.shapes import KernelInputError
from tests.kernels.builders import Bits, make_perms, random_bits, tensor
from tests.kernels.test_layers import Layers, make_layers, read

BLOCK_SIZE = 16


def make_tables(case: Layers, packing: str) -> list[BlockTable]:
    shape = case.shapes[0]
    elements = 2 * BLOCK_SIZE * shape.heads * shape.head_size
    perms = make_perms(packing, BLOCK_SIZE, shape.heads, shape.head_size)
    return [BlockTable(perm, elements, case.dtype) for perm in perms]


def make_blocks(case: Layers, tables: list[BlockTable]) -> list[Bits]:
    """Per layer blocks of any bits."""
    count = case.tokens * len(case.targets) // BLOCK_SIZE + 1
    rng = np.random.default_rng(1)
    return [random_bits(rng, (count, tables[0].block_elements), case.dtype) for _ in case.master]


def expected(case: Layers, tables: list[BlockTable]) -> list[Bits]:
    """What the blocks become: plain memory restored by the reference, its rows spread by the reference."""
    plain, wanted = case.make_paged(), make_blocks(case, tables)
    case.restore_by_reference(plain)
    written = np.concatenate([one.slots[one.slots >= 0] for one in case.targets])
    for planes, blocks in zip(plain, wanted, strict=True):
        for plane, table in zip(planes, tables, strict=True):
            rows = plane.reshape(-1, table.row_elements)[written]
            places, perm = torch.from_numpy(written), torch.from_numpy(table.perm)
            reference.scatter_by_table(tensor(blocks, case.dtype), places, perm, tensor(rows, case.dtype))
    return wanted


def make_memory(case: Layers, tables: list[BlockTable], blocks: list[Bits]) -> PackedLayers:
    return packed_layers(blocks, [tables] * len(blocks), case.shapes, case.rotations, case.dtype)


def make_restore(case: Layers, memory: PackedLayers) -> PackedRestore:
    positions = [mirror[0].position if mirror else None for mirror in case.mirrors]
    return PackedRestore(memory, case.tokens, 100, case.dense(), case.targets, positions)


def open_from(case: Layers, memory: PackedLayers, restore: PackedRestore, first: int) -> None:
    tables = [read(one[first:], memory.scratch, case.tokens) if one else None for one in case.mirrors]
    restore.open_mirrors(first, tables)


cases = st.builds(
    make_layers,
    st.integers(0, 2**32 - 1),
    geometry=st.sampled_from(["mha", "gqa", "partial"]),
    dtype=st.sampled_from(["bfloat16", "float16", "float32"]),
    layers=st.integers(1, 5),
    tokens=st.integers(1, 40),
    targets=st.integers(1, 4),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(cases, st.sampled_from(["amx", "shuffled"]), st.integers(1, 50), st.data())
def test_pieces_and_batches_write_the_reference_bits(
    case: Layers, packing: str, scratch_rows: int, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(case.master) - 1)), max_size=3)) - {len(case.master)})
    tables = make_tables(case, packing)
    written = make_blocks(case, tables)
    with pytest.MonkeyPatch.context() as patch:
        row_bytes = tables[0].row_elements * tables[0].bits.itemsize
        patch.setattr(cpu_packed, "STREAM_BYTES_MIN", scratch_rows * row_bytes + 1)
        memory = make_memory(case, tables, written)
    assert memory.scratch_rows == scratch_rows
    restore = make_restore(case, memory)
    for first, end in zip([0, *cuts], [*cuts, len(case.master)], strict=True):
        open_from(case, memory, restore, first)
        restore.restore_layers(first, end)
    for ours, theirs in zip(written, expected(case, tables), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def with_mirror(layers: int) -> Layers:
    """A case whose first target has a mirror."""
    for seed in range(50):
        case = make_layers(seed, layers=layers)
        if case.mirrors[0] is not None and any(len(runs) for layer in case.mirrors[0] for runs in layer.runs):
            return case
    raise AssertionError("no seed gives a mirror")


def test_only_layers_whose_mirrors_are_open_are_written() -> None:
    case = with_mirror(4)
    tables = make_tables(case, "amx")
    memory = make_memory(case, tables, make_blocks(case, tables))
    restore = make_restore(case, memory)
    open_from(case, memory, restore, 2)
    for first, end in ((1, 3), (2, 5), (3, 2)):
        with pytest.raises(KernelInputError, match=r"of 2\.\.4 that are open"):
            restore.restore_layers(first, end)
    with pytest.raises(KernelInputError, match="1 mirrors for 2 targets"):
        restore.open_mirrors(0, [None])


def test_a_later_piece_that_lies_keeps_the_first_from_being_written(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_layers(1, layers=3)
    tables = make_tables(case, "amx")
    monkeypatch.setattr(cpu_packed, "STREAM_BYTES_MIN", 7 * tables[0].row_elements * 2 + 1)
    blocks = make_blocks(case, tables)
    before = [one.copy() for one in blocks]
    memory = make_memory(case, tables, blocks)
    whole = case.dense()
    short = DenseLayers(whole.buffer[:-65], whole.start, whole.layer_stride, whole.plane_offsets)
    restore = PackedRestore(memory, case.tokens, 100, short, case.targets, [None, None])
    with pytest.raises(KernelInputError, match=r"layer 2, plane 1, rows 14\.\.19: its rows lie outside"):
        restore.restore_layers(0, 3)
    for ours, theirs in zip(blocks, before, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_restore_waits_for_its_turn_at_the_scratch_rows() -> None:
    case = make_layers(3)
    tables = make_tables(case, "amx")
    blocks = make_blocks(case, tables)
    before = [one.copy() for one in blocks]
    memory = make_memory(case, tables, blocks)
    restore = PackedRestore(memory, case.tokens, 100, case.dense(), case.targets, [None, None])
    thread = threading.Thread(target=restore.restore_layers, args=(0, 3))
    with memory.turn:
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
        for ours, theirs in zip(blocks, before, strict=True):
            np.testing.assert_array_equal(ours, theirs)
    thread.join(60)
    assert not np.array_equal(blocks[0], before[0])


def test_tables_of_other_rows_and_read_only_blocks_are_refused() -> None:
    case = make_layers(3)
    tables = make_tables(case, "amx")
    blocks = make_blocks(case, tables)
    narrow = BlockTable(tables[0].perm[:, ::2].copy(), tables[0].block_elements, case.dtype)
    with pytest.raises(KernelInputError, match="for rows of 128"):
        packed_layers(blocks, [[narrow, narrow]] * 3, case.shapes, case.rotations, case.dtype)
    blocks[1].flags.writeable = False
    with pytest.raises(KernelInputError, match="read-only"):
        make_memory(case, tables, blocks)
