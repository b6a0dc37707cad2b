"""Rows as 8 bits: the reference's bits, nothing lost between packing and unpacking, and how much rounding loses."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvservice.kernels import reference
from kvservice.kernels.cpu_int8 import DTYPES, pack, packed_bytes, round_rows, unpack
from kvservice.kernels.shapes import KernelInputError
from kvservice.model.identity import INT8_DTYPES
from tests.kernels.builders import Bits, random_bits, tensor, tensor_bits

EXPONENT = {"bfloat16": 0x7F80, "float16": 0x7C00}
SMALLEST = {"bfloat16": (127 - 100) << 7, "float16": 0}


def test_identities_and_kernels_name_the_same_storage_types() -> None:
    assert DTYPES == INT8_DTYPES


def rounded(rows: Bits, dtype: str) -> Bits:
    found = rows.copy()
    round_rows(found, rows.shape[-1], dtype)
    return found


def packed(rows: Bits, dtype: str) -> tuple[bool, Bits]:
    size = rows.shape[-1]
    out = np.full(packed_bytes(rows.size // size, size), 0xA5, np.uint8)
    return pack(rows, size, dtype, out), out


def came_back(rows: Bits, dtype: str) -> Bits:
    is_packed, out = packed(rows, dtype)
    assert is_packed
    found = np.full_like(rows, 0x7FA5)
    unpack(out, rows.shape[-1], dtype, found)
    return found


def every_head_of_steps(dtype: str) -> Bits:
    """For every finite largest value the heads that have each q once, in storage bits ``[values, 255]``."""
    largest = np.arange(SMALLEST[dtype] + 1, EXPONENT[dtype], dtype=np.uint16)[:, None]
    step = reference.widen(tensor(largest, dtype)) / 127
    rows = tensor_bits(reference.narrow(torch.arange(-127, 128) * step, tensor(largest, dtype).dtype))
    return np.where(rows == 0x8000, np.uint16(0), rows)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 3, 64, 128, 576])
@pytest.mark.parametrize("hostile", [0.0, 0.02, 0.9])
def test_rounding_gives_the_bits_of_the_reference(dtype: str, size: int, hostile: float) -> None:
    rows = random_bits(np.random.default_rng(size), (200, size), dtype, hostile=hostile)
    scales = np.random.default_rng(1).integers(-20, 20, (200, 1))
    scaled = reference.widen(tensor(rows, dtype)) * torch.from_numpy(2.0**scales).float()
    rows = tensor_bits(scaled.to(tensor(rows, dtype).dtype))
    assert np.array_equal(rounded(rows, dtype), tensor_bits(reference.round_to_8_bits(tensor(rows, dtype))))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_8_bit_value_of_every_scale_comes_back(dtype: str) -> None:
    """All of them: 8 million values a storage type."""
    rows = every_head_of_steps(dtype)
    assert np.array_equal(rounded(rows, dtype), rows), "rounding what is rounded changes nothing"
    assert np.array_equal(came_back(rows, dtype), rows)


@pytest.mark.parametrize("dtype", DTYPES)
@given(seed=st.integers(0, 1 << 32), size=st.integers(1, 130), exponent=st.integers(0, 255))
@settings(max_examples=60, deadline=None)
def test_what_is_rounded_comes_back(dtype: str, seed: int, size: int, exponent: int) -> None:
    rng = np.random.default_rng(seed)
    rows = random_bits(rng, (4, size), dtype, hostile=0.0)
    near = (exponent << 7 if dtype == "bfloat16" else (exponent & 31) << 10) & EXPONENT[dtype]
    rows[1] = rng.integers(max(near - 512, 0), near + 1, size) | (rng.integers(0, 2, size) << 15)
    rows[2], rows[3] = 0, 0x8000
    if (rows & 0x7FFF >= EXPONENT[dtype]).any():
        rows[1] = 1
    once = rounded(rows, dtype)
    assert np.array_equal(rounded(once, dtype), once)
    assert np.array_equal(came_back(once, dtype), once)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_value_moves_by_half_a_step_and_its_rounding_at_most(dtype: str) -> None:
    rows = random_bits(np.random.default_rng(5), (2000, 64), dtype, hostile=0.0)
    before, after = (reference.widen(tensor(one, dtype)).double() for one in (rows, rounded(rows, dtype)))
    largest = before.abs().amax(-1, keepdim=True)
    ulp = 2.0**-8 if dtype == "bfloat16" else 2.0**-11
    assert ((before - after).abs() <= largest / 127 / 2 + after.abs() * ulp * 1.001).all()
    assert torch.equal(after.abs().amax(-1, keepdim=True), largest), "the largest stays"


@pytest.mark.parametrize("dtype", DTYPES)
def test_tiny_heads_become_zeros_and_zeros_have_no_sign(dtype: str) -> None:
    tiny = SMALLEST[dtype]
    rows = np.array([[tiny, 0x8000 | tiny, 0, 0x8000], [0x8000] * 4], np.uint16)
    assert not rounded(rows, dtype).any()
    assert not came_back(rounded(rows, dtype), dtype).any()
    assert packed(rows, dtype)[0] is False, "as they are they would not come back"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [0x7F80, 0xFF80, 0x7FC1])
def test_what_is_not_finite_is_left_alone_and_not_packed(dtype: str, bad: int) -> None:
    rows = random_bits(np.random.default_rng(6), (3, 16), dtype, hostile=0.0)
    rows[1, 7] = bad
    found = rounded(rows, dtype)
    assert np.array_equal(found[1], rows[1])
    assert packed(found, dtype)[0] is False


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_were_not_rounded_are_refused_wherever_they_differ(dtype: str) -> None:
    rows = rounded(random_bits(np.random.default_rng(7), (5, 40), dtype, hostile=0.0), dtype)
    for index in range(0, rows.size, 7):
        changed = rows.copy()
        changed.reshape(-1)[index] ^= 1
        is_packed, _ = packed(changed, dtype)
        assert not is_packed or np.array_equal(came_back(changed, dtype), changed)
    assert packed(random_bits(np.random.default_rng(8), (5, 40), dtype, hostile=0.0), dtype)[0] is False


@pytest.mark.parametrize("dtype", DTYPES)
def test_unpacking_takes_any_bytes_and_writes_only_its_rows(dtype: str) -> None:
    room = np.full((6, 32), 0x1234, np.uint16)
    junk = np.random.default_rng(9).integers(0, 256, packed_bytes(4, 32), np.uint8)
    unpack(junk, 32, dtype, room[1:5])
    assert (room[[0, 5]] == 0x1234).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_rows_take_half_the_bytes(dtype: str) -> None:
    assert packed_bytes(1000, 128) == 130_000
    assert packed_bytes(1000, 128) / (1000 * 128 * 2) < 0.51
    rows = rounded(random_bits(np.random.default_rng(3), (7, 128), dtype, hostile=0.0), dtype)
    _, out = packed(rows, dtype)
    assert np.array_equal(out[:14].view(np.uint16), (rows & 0x7FFF).max(-1)), "the largest values come first"


def test_wrong_input_is_refused_and_nothing_is_written() -> None:
    rows = np.zeros((4, 8), np.uint16)
    out = np.zeros(packed_bytes(4, 8), np.uint8)
    locked = rows.copy()
    locked.flags.writeable = False
    with pytest.raises(KernelInputError, match="float32 has no form of 8 bits"):
        round_rows(rows, 8, "float32")
    with pytest.raises(KernelInputError, match="32 values are not heads of 7"):
        round_rows(rows, 7, "bfloat16")
    with pytest.raises(KernelInputError, match="contiguous"):
        round_rows(np.zeros((4, 16), np.uint16)[:, ::2], 8, "bfloat16")
    with pytest.raises(KernelInputError, match="storage bits"):
        round_rows(rows.astype(np.uint32), 8, "bfloat16")
    with pytest.raises(KernelInputError, match="read-only"):
        unpack(out, 8, "bfloat16", locked)
    with pytest.raises(KernelInputError, match="it takes 40"):
        pack(rows, 8, "bfloat16", out[:-1])
    with pytest.raises(KernelInputError, match="even address"):
        unpack(np.zeros(42, np.uint8)[1:41], 8, "bfloat16", rows)
    assert pack(locked, 8, "bfloat16", out), "what is read only may be packed"
