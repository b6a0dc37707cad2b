"""Cosine and sine of a position shift, the same bits on every machine.

A mirror encoded on one host is restored on another, so libm and SVML, which differ in last bits, must never be used
here: only IEEE float64 additions, multiplications and rint, each one numpy call (numpy never fuses them).
"""

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from kvservice.kernels.shapes import KernelInputError, Rotation

Float64s = npt.NDArray[np.float64]
Float32s = npt.NDArray[np.float32]

ANGLE_MAX = float(2**25)
"""Radians. Above, quarter turns times a part of pi/2 no longer fit 53 bits."""

# pi/2 in four parts of 27 bits and a tail: a count of quarter turns below 2^26 times a part is exact.
_HALF_PI_PARTS = (
    float.fromhex("0x1.921fb54p+0"),
    float.fromhex("0x1.10b461p-30"),
    float.fromhex("0x1.a62633p-58"),
    float.fromhex("0x1.45c06ep-86"),
)
# Minimax polynomials of fdlibm's k_sin.c and k_cos.c, |x| <= pi/4.
_SIN = (
    -1.66666666666666324348e-01,
    8.33333333332248946124e-03,
    -1.98412698298579493134e-04,
    2.75573137070700676789e-06,
    -2.50507602534068634195e-08,
    1.58969099521155010221e-10,
)
_COS = (
    4.16666666666666019037e-02,
    -1.38888888888741095749e-03,
    2.48015872894767294178e-05,
    -2.75573143513906633035e-07,
    2.08757232129817482790e-09,
    -1.13596475577881948265e-11,
)


@lru_cache(maxsize=4096)
def rotation_table(rotation: Rotation, delta: int) -> tuple[Float32s, Float32s]:
    """Cosine and sine, float32 ``[pairs]``, of moving by ``delta`` positions; read-only, shared between callers.

    ``angle = delta * frequency`` in float64. Raises ``KernelInputError`` when an angle is beyond what is exact.
    """
    angles = np.float64(delta) * np.asarray(rotation.frequencies, dtype=np.float64)
    if not bool((np.abs(angles) <= ANGLE_MAX).all()):
        raise KernelInputError(
            f"moving by {delta} positions turns past {ANGLE_MAX:.0f} radians; store the cache at a nearer position"
        )
    sine, cosine = sine_cosine(angles)
    table = (cosine.astype(np.float32), sine.astype(np.float32))
    for part in table:
        part.flags.writeable = False
    return table


def sine_cosine(angles: Float64s) -> tuple[Float64s, Float64s]:
    """Sine and cosine of float64 angles within ``ANGLE_MAX``, to about one unit in the last place."""
    quarters = np.rint(angles * (2.0 / np.pi))
    high, low = _reduce(angles, quarters)
    sine, cosine = _sine_kernel(high, low), _cosine_kernel(high, low)
    quadrant = quarters.astype(np.int64) & 3
    is_swapped = (quadrant & 1) == 1
    turned_sine = np.where(is_swapped, cosine, sine)
    turned_cosine = np.where(is_swapped, sine, cosine)
    return (
        np.where(quadrant >= 2, -turned_sine, turned_sine),
        np.where((quadrant == 1) | (quadrant == 2), -turned_cosine, turned_cosine),
    )


def _reduce(angles: Float64s, quarters: Float64s) -> tuple[Float64s, Float64s]:
    """``angles - quarters * pi/2`` as high + low (Cody and Waite, compensated)."""
    high, low = angles - quarters * _HALF_PI_PARTS[0], np.zeros_like(angles)
    for part in _HALF_PI_PARTS[1:]:
        subtracted = quarters * part
        total = high - subtracted
        back = total - high
        low = low + ((high - (total - back)) - (subtracted + back))  # Knuth's two-sum: exact rounding error
        high = total
    total = high + low
    return total, low - (total - high)


def _sine_kernel(x: Float64s, tail: Float64s) -> Float64s:
    z = x * x
    w = z * z
    r = _SIN[1] + z * (_SIN[2] + z * _SIN[3]) + z * w * (_SIN[4] + z * _SIN[5])
    v = z * x
    return x - ((z * (0.5 * tail - v * r) - tail) - v * _SIN[0])


def _cosine_kernel(x: Float64s, tail: Float64s) -> Float64s:
    z = x * x
    w = z * z
    r = z * (_COS[0] + z * (_COS[1] + z * _COS[2])) + w * w * (_COS[3] + z * (_COS[4] + z * _COS[5]))
    half = 0.5 * z
    rest = 1.0 - half
    return rest + (((1.0 - rest) - half) + (z * r - x * tail))
