"""``dispatch`` takes tensors and arena views and gives what ``reference`` gives; no torch is needed for ``cpu``."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from kvservice.kernels import cpu, dispatch, reference
from kvservice.kernels.shapes import KernelInputError, Rotation
from tests.kernels.builders import Restore, make_restore, random_bits, tensor, tensor_bits, to_torch


@pytest.fixture(params=["bfloat16", "float16", "float32"])
def case(request: pytest.FixtureRequest) -> Restore:
    return make_restore(11, dtype=request.param, layout="interleaved", targets=3)


def test_restore_takes_tensors_and_arena_views(case: Restore) -> None:
    results = []
    for master, targets in (
        (case.torch_master(), case.torch_targets()),
        (case.master, case.targets),
    ):
        paged = [tensor(memory, case.dtype) for memory in case.make_paged()]
        dispatch.restore_layer(master, case.master_position, targets, paged, case.shapes, case.rotation)
        results.append(paged)
    wanted = [tensor(memory, case.dtype) for memory in case.make_paged()]
    reference.restore_layer(
        case.torch_master(), case.master_position, case.torch_targets(), wanted, case.shapes, case.rotation
    )
    for paged in results:
        for left, right in zip(paged, wanted, strict=True):
            np.testing.assert_array_equal(tensor_bits(left), tensor_bits(right))


def test_every_operation_gives_the_reference_result(case: Restore) -> None:
    rng = np.random.default_rng(0)
    master, position = case.torch_master(), case.master_position
    member = [tensor(random_bits(rng, plane.shape, case.dtype), case.dtype) for plane in case.master]
    moved = dispatch.move_rows(master[0], position, 3, case.shapes[0], case.rotation)
    wanted = reference.move_rows(master[0], position, 3, case.shapes[0], case.rotation)
    np.testing.assert_array_equal(tensor_bits(moved), tensor_bits(wanted))
    for ours, theirs in zip(
        dispatch.diff_layer(master, position, member, 9, case.shapes, case.rotation),
        reference.diff_layer(master, position, member, 9, case.shapes, case.rotation),
        strict=True,
    ):
        np.testing.assert_array_equal(ours, theirs)
    candidates, positions = [master, member, master], [position, 9, position]
    np.testing.assert_array_equal(
        dispatch.deviation_layer(candidates, positions, case.shapes, case.rotation),
        reference.deviation_layer(candidates, positions, case.shapes, case.rotation),
    )
    rows = dispatch.row_deviation(master[0], member[0], case.shapes[0])
    torch.testing.assert_close(
        rows, reference.row_deviation(master[0], member[0], case.shapes[0]), rtol=0, atol=0, equal_nan=True
    )


def test_mirrors_are_materialised_and_rows_gathered_as_tensors(case: Restore) -> None:
    mirror = next(target.mirror for target in case.targets if target.mirror is not None)
    for rows in (mirror, to_torch(mirror, case.dtype)):
        dense = dispatch.materialise_layer(case.torch_master(), case.master_position, rows, case.shapes, case.rotation)
        wanted = reference.materialise_layer(
            case.torch_master(), case.master_position, to_torch(mirror, case.dtype), case.shapes, case.rotation
        )
        for left, right in zip(dense, wanted, strict=True):
            np.testing.assert_array_equal(tensor_bits(left), tensor_bits(right))
    paged = [tensor(memory, case.dtype) for memory in case.make_paged()]
    slots, out = torch.tensor([3, 0, 5]), [np.empty_like(plane[:3]) for plane in case.master]
    elements = sum(plane.size for plane in out)
    assert dispatch.gather_layer(paged, slots, case.shapes, out) == elements  # all poison


def test_a_restore_of_many_layers_is_prepared_once(case: Restore) -> None:
    wanted, written = case.make_paged(), case.make_paged()
    cpu.restore_layer(case.master, case.master_position, case.targets, wanted, case.shapes, case.rotation, case.dtype)
    layer = cpu.paged_layer(written, case.shapes, written[0].dtype)
    paged = cpu.paged_layers([layer], case.shapes, [case.rotation], case.dtype)
    mirrors = [target.mirror for target in case.targets]
    positions = [None if mirror is None else mirror.position for mirror in mirrors]
    prepared = cpu.prepare_restore(len(case.master[0]), case.master_position, case.targets, paged, positions)
    for _ in range(2):
        prepared.restore_planes(case.master, mirrors)
    for left, right in zip(written, wanted, strict=True):
        np.testing.assert_array_equal(left, right)


def test_unsupported_tensors_are_refused() -> None:
    rows = torch.zeros(2, 8, dtype=torch.float64)
    case = make_restore(1, geometry="small")
    with pytest.raises(KernelInputError, match="no kernel"):
        dispatch.move_rows(rows, 0, 1, case.shapes[0], Rotation(()))


def test_the_numpy_level_imports_neither_torch_nor_triton() -> None:
    program = "import sys, kvservice.kernels.cpu; sys.exit(bool({'torch', 'triton'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0
