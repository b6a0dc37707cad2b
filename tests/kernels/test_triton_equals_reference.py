"""The Triton kernels give the reference's bits: on a GPU where there is one, else in Triton's interpreter."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from kvservice.kernels import cpu, reference
from kvservice.kernels.shapes import KernelInputError, MirrorRows, Target
from tests.kernels.builders import (
    Restore,
    make_restore,
    random_bits,
    tensor,
    tensor_bits,
    to_torch,
)

triton_host = pytest.importorskip("kvservice.kernels.triton_host")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES = [
    ("small", "bfloat16", "plain", False),
    ("small", "float16", "heads_first", True),
    ("odd", "float32", "interleaved", False),
    ("partial", "bfloat16", "element_apart", True),
    ("latent", "float16", "plain", False),
    ("mha", "bfloat16", "tokens_innermost", False),
]


@pytest.fixture(autouse=True)
def _quiet_interpreter() -> Iterator[None]:
    """The interpreter computes with numpy, which warns of infinities and NaN."""
    with np.errstate(all="ignore"):
        yield


def make_case(geometry: str, dtype: str, layout: str, is_interleaved: bool, seed: int = 5) -> Restore:
    return make_restore(
        seed, geometry=geometry, dtype=dtype, layout=layout, is_interleaved=is_interleaved, tokens=18, targets=3
    )


def on_device(planes: list[Tensor]) -> list[Tensor]:
    return [plane.to(DEVICE) for plane in planes]


@pytest.mark.parametrize("seed", [5, 6])
@pytest.mark.parametrize(("geometry", "dtype", "layout", "is_interleaved"), CASES)
def test_restore_writes_the_reference_bits_and_nothing_else(
    geometry: str, dtype: str, layout: str, is_interleaved: bool, seed: int
) -> None:
    case = make_case(geometry, dtype, layout, is_interleaved, seed)
    wanted = [tensor(memory, dtype) for memory in case.make_paged()]
    reference.restore_layer(
        case.torch_master(), case.master_position, case.torch_targets(), wanted, case.shapes, case.rotation
    )
    written = on_device([tensor(memory, dtype) for memory in case.make_paged()])
    triton_host.restore_layer(
        case.torch_master(DEVICE), case.master_position, case.torch_targets(DEVICE), written, case.shapes, case.rotation
    )
    for left, right in zip(written, wanted, strict=True):
        np.testing.assert_array_equal(tensor_bits(left), tensor_bits(right))


@pytest.mark.parametrize(("geometry", "dtype", "layout", "is_interleaved"), CASES)
def test_materialised_mirrors_have_the_reference_bits(
    geometry: str, dtype: str, layout: str, is_interleaved: bool
) -> None:
    case = make_case(geometry, dtype, layout, is_interleaved)
    mirror = next(target.mirror for target in case.targets if target.mirror is not None)
    dense = triton_host.materialise_layer(
        case.torch_master(DEVICE), case.master_position, to_torch(mirror, dtype, DEVICE), case.shapes, case.rotation
    )
    wanted = reference.materialise_layer(
        case.torch_master(), case.master_position, to_torch(mirror, dtype), case.shapes, case.rotation
    )
    for left, right in zip(dense, wanted, strict=True):
        np.testing.assert_array_equal(tensor_bits(left), tensor_bits(right))


@pytest.mark.parametrize("delta", [0, 977])
@pytest.mark.parametrize(("geometry", "dtype", "layout", "is_interleaved"), CASES)
def test_diffs_find_the_reference_rows(
    geometry: str, dtype: str, layout: str, is_interleaved: bool, delta: int
) -> None:
    case = make_case(geometry, dtype, layout, is_interleaved)
    rng = np.random.default_rng(1)
    position = case.master_position + delta
    member = [
        cpu.move_rows(plane, case.master_position, position, shape, case.rotation, dtype)
        for plane, shape in zip(case.master, case.shapes, strict=True)
    ]
    for plane in member:
        plane[rng.random(len(plane)) < 0.3, rng.integers(0, plane.shape[1])] ^= 1
    in_torch = [tensor(plane, dtype) for plane in member]
    flags = triton_host.diff_layer(
        case.torch_master(DEVICE), case.master_position, on_device(in_torch), position, case.shapes, case.rotation
    )
    wanted = reference.diff_layer(
        case.torch_master(), case.master_position, in_torch, position, case.shapes, case.rotation
    )
    for one, runs in zip(flags, wanted, strict=True):
        np.testing.assert_array_equal(cpu.runs_of(one.cpu().numpy() != 0), runs)


@pytest.mark.parametrize(("geometry", "dtype", "layout", "is_interleaved"), CASES)
def test_gathered_rows_have_the_reference_bits_and_count(
    geometry: str, dtype: str, layout: str, is_interleaved: bool
) -> None:
    case = make_case(geometry, dtype, layout, is_interleaved)
    paged, rng = case.make_paged(), np.random.default_rng(2)
    for memory in paged:
        memory[...] = random_bits(rng, memory.shape, dtype)
    views = [tensor(memory, dtype) for memory in paged]
    slots = torch.from_numpy(rng.integers(0, case.blocks * case.block_size, len(case.master[0])))
    wanted, out = [torch.zeros_like(plane) for plane in case.torch_master()], case.torch_master(DEVICE)
    count = triton_host.gather_layer(on_device(views), slots.to(DEVICE), case.shapes, out)
    assert int(count) == reference.gather_layer(views, slots, case.shapes, wanted)
    for left, right in zip(out, wanted, strict=True):
        np.testing.assert_array_equal(tensor_bits(left), tensor_bits(right))


@pytest.mark.parametrize("deltas", [(0, 0), (0, -40), (13, 5)])
@pytest.mark.parametrize(("geometry", "dtype", "layout", "is_interleaved"), CASES)
def test_row_deviations_have_the_reference_bits(
    geometry: str, dtype: str, layout: str, is_interleaved: bool, deltas: tuple[int, int]
) -> None:
    case = make_case(geometry, dtype, layout, is_interleaved)
    rng = np.random.default_rng(3)
    shape = case.shapes[0]
    pair = [tensor(random_bits(rng, case.master[0][:5].shape, dtype, hostile=0.001), dtype) for _ in deltas]
    rows = triton_host.moved_row_deviation(*on_device(pair), deltas, shape, case.rotation)
    moved = [reference.move_rows(one, 0, delta, shape, case.rotation) for one, delta in zip(pair, deltas, strict=True)]
    wanted = reference.row_deviation(moved[0], moved[1], shape)
    np.testing.assert_array_equal(rows.cpu().numpy().view(np.uint32), wanted.numpy().view(np.uint32))


def test_bad_mirrors_are_refused_before_anything_is_written() -> None:
    case = make_case("small", "bfloat16", "plain", False)
    paged = on_device([tensor(memory, "bfloat16") for memory in case.make_paged()])
    before = [tensor_bits(memory).copy() for memory in paged]
    runs = np.array([[3, 2], [4, 1]], np.int32)
    rows = torch.zeros(3, 24, dtype=torch.bfloat16, device=DEVICE)
    target = Target(0, torch.arange(18), MirrorRows(0, [runs, runs], [rows, rows]))
    with pytest.raises(KernelInputError, match="disjoint"):
        triton_host.restore_layer(case.torch_master(DEVICE), 0, [target], paged, case.shapes, case.rotation)
    for memory, old in zip(paged, before, strict=True):
        np.testing.assert_array_equal(tensor_bits(memory), old)
