"""The rotation law in Triton: storage bits to float32 and back, one turn of pairs, one NaN.

Payload is int16 or int32 bits: Triton's interpreter truncates bfloat16 stores, so rounding is integer arithmetic here.
Kernels must be launched with ``LAUNCH`` (no fused multiply-add).
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return"
# No other annotations than constexpr: Triton compiles them too.
from typing import Any

import triton
import triton.language as tl

LAUNCH: dict[str, Any] = {"enable_fp_fusion": False}
STORAGES = {"bfloat16": 0, "float16": 1, "float32": 2}
"""What the constexpr STORAGE says."""


@triton.jit
def widen(bits, STORAGE: tl.constexpr):
    """Storage bits as float32 (exact)."""
    if STORAGE == 0:
        values = (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif STORAGE == 1:
        values = bits.to(tl.float16, bitcast=True).to(tl.float32)
    else:
        values = bits.to(tl.float32, bitcast=True)
    return values


@triton.jit
def narrow(values, STORAGE: tl.constexpr):
    """Float32 rounded nearest-even to storage bits; NaN becomes the one NaN."""
    pattern = tl.where(values == values, values.to(tl.int32, bitcast=True), 0x7FC00000)
    if STORAGE == 0:
        bits = ((pattern + 0x7FFF + ((pattern >> 16) & 1)) >> 16).to(tl.int16)
    elif STORAGE == 1:
        bits = float16_bits(pattern).to(tl.int16)
    else:
        bits = pattern
    return bits


@triton.jit
def float16_bits(pattern):
    """Nearest-even float16 of float32 bits, as in ``reference``."""
    sign = (pattern >> 16) & 0x8000
    size = pattern & 0x7FFFFFFF
    exponent = size >> 23
    normal = (size - (112 << 23) + 0xFFF + ((size >> 13) & 1)) >> 13
    shift = tl.minimum(tl.maximum(126 - exponent, 14), 25)
    significand = (size & 0x7FFFFF) | 0x800000
    half = (tl.full(pattern.shape, 1, tl.int32) << (shift - 1)) - 1
    small = (significand + half + ((significand >> shift) & 1)) >> shift
    small = tl.where(exponent < 101, 0, small)
    magnitude = tl.where(exponent < 113, small, normal)
    magnitude = tl.where(exponent >= 143, 0x7C00, magnitude)
    magnitude = tl.where(size > 0x7F800000, 0x7E00, magnitude)
    return sign | magnitude


@triton.jit
def turn(first, second, cosine, sine, STORAGE: tl.constexpr):
    """Both results of the law as storage bits, from storage bits."""
    x1, x2 = widen(first, STORAGE), widen(second, STORAGE)
    y1 = (x1 * cosine) - (x2 * sine)
    y2 = (x2 * cosine) + (x1 * sine)
    return narrow(y1, STORAGE), narrow(y2, STORAGE)


@triton.jit
def pair_offsets(i_pair, ROTARY_OFFSET: tl.constexpr, PAIRS: tl.constexpr, IS_INTERLEAVED: tl.constexpr):
    """Where in a head the two elements of each pair are."""
    if IS_INTERLEAVED:
        first = ROTARY_OFFSET + 2 * i_pair
        second = first + 1
    else:
        first = ROTARY_OFFSET + i_pair
        second = first + PAIRS
    return first, second
