"""The rotation law against float64, and the bits that are easily lost: -0.0, NaN payloads, infinities, subnormals."""

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvservice.kernels import cpu, reference
from kvservice.kernels.rotation import rotation_table
from kvservice.kernels.shapes import PlaneShape, Rotation
from tests.kernels.builders import TORCH_DTYPES, Bits, bits_type, make_rotation, random_bits, tensor, tensor_bits

DTYPES = sorted(TORCH_DTYPES)
SHAPE = PlaneShape(2, 32, 0, 32)
ROTATION = make_rotation(32, is_interleaved=False)
SIGN = {"bfloat16": 0x8000, "float16": 0x8000, "float32": 0x80000000}
NAN = {"bfloat16": 0x7FC0, "float16": 0x7E00, "float32": 0x7FC00000}


def move(bits: npt.NDArray[np.generic], delta: int, dtype: str) -> npt.NDArray[np.generic]:
    return cpu.move_rows(bits, 0, delta, SHAPE, ROTATION, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_restore_at_the_own_position_returns_every_bit_pattern(dtype: str) -> None:
    rng = np.random.default_rng(0)
    rows: Bits = rng.integers(0, SIGN[dtype] * 2, (300, 64), dtype=np.uint64).astype(bits_type(dtype))
    np.testing.assert_array_equal(cpu.move_rows(rows, 77, 77, SHAPE, ROTATION, dtype), rows)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("delta", [1, -977, 100_000])
def test_moved_values_are_the_float64_rotation_to_within_rounding(dtype: str, delta: int) -> None:
    rows = random_bits(np.random.default_rng(1), (50, 64), dtype, hostile=0.0)
    x = tensor(rows, dtype).double().numpy().reshape(-1, 2, 2, 16)
    angles = delta * np.array(ROTATION.frequencies)
    exact = np.stack(
        [
            x[:, :, 0] * np.cos(angles) - x[:, :, 1] * np.sin(angles),
            x[:, :, 1] * np.cos(angles) + x[:, :, 0] * np.sin(angles),
        ],
        axis=2,
    )
    moved = tensor(move(rows, delta, dtype), dtype).double().numpy().reshape(-1, 2, 2, 16)
    # Three float32 roundings of terms as large as the pair, two of the table, then half a unit of storage.
    size = np.hypot(x[:, :, :1], x[:, :, 1:])
    storage = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}[dtype]
    assert (np.abs(moved - exact) <= 4 * 2.0**-24 * size + storage * np.abs(exact) + 2.0**-25).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_storage_rounding_is_nearest_even_for_all_magnitudes(dtype: str) -> None:
    rng = np.random.default_rng(2)
    patterns = rng.integers(0, 1 << 32, 1 << 20, dtype=np.uint64).astype(np.uint32)
    halfway = (np.arange(1 << 16, dtype=np.uint32) << 16) | 0x8000
    in_float16_range = rng.integers(0x32000000, 0x48000000, 1 << 20, dtype=np.uint64).astype(np.uint32) & 0xFFFFF000
    values = torch.from_numpy(np.concatenate([patterns, halfway, in_float16_range]).view(np.float32))
    values = values[~torch.isnan(values)]
    wanted = values.to(TORCH_DTYPES[dtype])
    np.testing.assert_array_equal(tensor_bits(reference.narrow(values, TORCH_DTYPES[dtype])), tensor_bits(wanted))
    if dtype == "float16":
        with np.errstate(over="ignore"):
            np.testing.assert_array_equal(tensor_bits(wanted), values.numpy().astype(np.float16).view(np.uint16))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_stored_value_survives_a_rotation_by_nearly_nothing(dtype: str) -> None:
    """cos = 1 and sin = tiny: widening and rounding of all 65536 patterns, paired with zero."""
    rotation = Rotation((2.0**-60,) * 16)
    assert rotation_table(rotation, 1)[0].tolist() == [1.0] * 16
    first = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16).reshape(-1, 16)
    rows = np.concatenate([first, np.zeros_like(first)], axis=1)
    moved = cpu.move_rows(rows, 0, 1, PlaneShape(1, 32, 0, 32), rotation, dtype)[:, :16]
    values = tensor(first, dtype)
    is_plain = torch.isfinite(values.float()).numpy() & (first != 0x8000)
    np.testing.assert_array_equal(moved[is_plain], first[is_plain])
    assert (moved[torch.isnan(values.float()).numpy()] == NAN[dtype]).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_stays_the_one_nan_and_infinity_spreads_as_ieee_says(dtype: str) -> None:
    zero, infinity = bits_type(dtype)(0), {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F800000}[dtype]
    rows = np.full((1, 64), zero)
    rows[0, 0] = infinity | 1  # NaN with a payload
    rows[0, 1] = infinity
    moved = move(rows, 5, dtype)
    assert moved[0, 0] == moved[0, 16] == NAN[dtype]
    assert moved[0, 1] & infinity == infinity
    assert moved[0, 2] % SIGN[dtype] == 0


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(DTYPES), st.integers(-5000, 5000), st.integers(0, 2**32 - 1))
def test_a_copied_part_never_changes(dtype: str, delta: int, seed: int) -> None:
    shape = PlaneShape(2, 40, 6, 20)
    rows = random_bits(np.random.default_rng(seed), (7, 80), dtype, hostile=0.5)
    moved = cpu.move_rows(rows, 0, delta, shape, make_rotation(20, is_interleaved=True), dtype)
    copied = np.r_[0:6, 26:40, 40:46, 66:80]
    np.testing.assert_array_equal(moved[:, copied], rows[:, copied])


def test_a_rotation_without_frequencies_copies() -> None:
    rows = random_bits(np.random.default_rng(0), (3, 64), "bfloat16", hostile=0.5)
    np.testing.assert_array_equal(cpu.move_rows(rows, 0, 9, SHAPE, Rotation(()), "bfloat16"), rows)
