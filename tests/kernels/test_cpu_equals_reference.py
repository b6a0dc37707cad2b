"""The numba path gives the reference's bits for every operation, geometry, type and layout."""

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvservice.kernels import cpu, reference
from kvservice.kernels.shapes import MirrorRows
from tests.kernels.builders import Restore, make_restore, random_bits, restores, tensor, tensor_bits, to_torch

examples = settings(
    max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


def assert_same(left: npt.NDArray[np.generic], right: npt.NDArray[np.generic]) -> None:
    assert left.shape == right.shape
    assert left.dtype == right.dtype
    np.testing.assert_array_equal(left, right)


@examples
@given(restores)
def test_restore_writes_the_reference_bits_and_nothing_else(case: Restore) -> None:
    wanted, written = case.make_paged(), case.make_paged()
    views = [tensor(memory, case.dtype) for memory in wanted]
    reference.restore_layer(
        case.torch_master(), case.master_position, case.torch_targets(), views, case.shapes, case.rotation
    )
    cpu.restore_layer(case.master, case.master_position, case.targets, written, case.shapes, case.rotation, case.dtype)
    for left, right in zip(written, wanted, strict=True):
        whole_left, whole_right = whole(left), whole(right)
        assert_same(whole_left, whole_right)


def whole(view: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    """The storage under a view, so that writes beside the view are seen."""
    base = view
    while isinstance(base.base, np.ndarray):
        base = base.base
    return base


@examples
@given(restores, st.integers(-4000, 4000))
def test_moved_rows_have_the_reference_bits(case: Restore, delta: int) -> None:
    position = case.master_position
    for plane, shape in zip(case.master, case.shapes, strict=True):
        moved = cpu.move_rows(plane, position, position + delta, shape, case.rotation, case.dtype)
        wanted = reference.move_rows(tensor(plane, case.dtype), position, position + delta, shape, case.rotation)
        assert_same(moved, tensor_bits(wanted))


@examples
@given(restores)
def test_materialised_mirrors_have_the_reference_bits(case: Restore) -> None:
    for target in case.targets:
        if target.mirror is None:
            continue
        dense = cpu.materialise_layer(
            case.master, case.master_position, target.mirror, case.shapes, case.rotation, case.dtype
        )
        wanted = reference.materialise_layer(
            case.torch_master(), case.master_position, to_torch(target.mirror, case.dtype), case.shapes, case.rotation
        )
        for left, right in zip(dense, wanted, strict=True):
            assert_same(left, tensor_bits(right))


@examples
@given(restores, st.integers(0, 2**32 - 1))
def test_diffs_are_the_reference_runs_and_restore_the_member_exactly(case: Restore, seed: int) -> None:
    rng = np.random.default_rng(seed)
    position = int(rng.choice([case.master_position, case.master_position + 977]))
    member = [
        cpu.move_rows(plane, case.master_position, position, shape, case.rotation, case.dtype)
        for plane, shape in zip(case.master, case.shapes, strict=True)
    ]
    for plane in member:
        dirty = rng.random(len(plane)) < 0.3
        plane[dirty, rng.integers(0, plane.shape[1])] ^= 1
    runs = cpu.diff_layer(case.master, case.master_position, member, position, case.shapes, case.rotation, case.dtype)
    wanted = reference.diff_layer(
        case.torch_master(), case.master_position, [tensor(plane, case.dtype) for plane in member], position,
        case.shapes, case.rotation,
    )  # fmt: skip
    for left, right in zip(runs, wanted, strict=True):
        assert_same(left, right)
    rows = [
        np.concatenate([plane[first : first + count] for first, count in one] or [plane[:0]])
        for plane, one in zip(member, runs, strict=True)
    ]
    mirror = MirrorRows(position, runs, rows)
    restored = cpu.materialise_layer(case.master, case.master_position, mirror, case.shapes, case.rotation, case.dtype)
    for left, right in zip(restored, member, strict=True):
        assert_same(left, right)


@examples
@given(restores)
def test_gathered_rows_have_the_reference_bits_and_count(case: Restore) -> None:
    paged = case.make_paged()
    rng = np.random.default_rng(len(case.targets))
    for memory in paged:
        memory[...] = random_bits(rng, memory.shape, case.dtype)
    slots = rng.integers(0, case.blocks * case.block_size, len(case.master[0]))
    out = [np.full_like(plane, 0x7FA5) for plane in case.master]
    wanted = [torch.zeros_like(plane) for plane in case.torch_master()]
    count = cpu.gather_layer(paged, slots, case.shapes, out, case.dtype)
    views = [tensor(memory, case.dtype) for memory in paged]
    assert count == reference.gather_layer(views, torch.from_numpy(slots), case.shapes, wanted)
    for left, right in zip(out, wanted, strict=True):
        assert_same(left, tensor_bits(right))


@examples
@given(restores, st.integers(0, 2**32 - 1), st.integers(0, 4))
def test_deviations_have_the_reference_bits(case: Restore, seed: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    hostile = float(rng.choice([0.0, 0.0, 0.01]))
    positions = [int(rng.choice([5, 5, 900])) for _ in range(count)]
    candidates = [
        [random_bits(rng, plane.shape, case.dtype, hostile=hostile) for plane in case.master] for _ in positions
    ]
    got = cpu.deviation_layer(candidates, positions, case.shapes, case.rotation, case.dtype)
    in_torch = [[tensor(plane, case.dtype) for plane in one] for one in candidates]
    wanted = reference.deviation_layer(in_torch, positions, case.shapes, case.rotation)
    assert_same(got, wanted)
    if count >= 2:
        shape = case.shapes[0]
        left, right = candidates[0][0], candidates[1][0]
        rows = cpu.row_deviation(left, right, shape, case.dtype)
        wanted_rows = reference.row_deviation(tensor(left, case.dtype), tensor(right, case.dtype), shape)
        assert_same(rows.view(np.uint32), wanted_rows.numpy().view(np.uint32))


def test_a_restore_large_enough_to_bypass_the_cache_has_the_reference_bits() -> None:
    for geometry, is_interleaved in (("gqa", False), ("gqa", True), ("latent", False), ("mha", False)):
        for seed in (1, 2):
            case = make_restore(
                seed, geometry=geometry, is_interleaved=is_interleaved, tokens=1200, targets=3, block_size=16
            )
            test_restore_writes_the_reference_bits_and_nothing_else.hypothesis.inner_test(case)  # type: ignore[attr-defined]
