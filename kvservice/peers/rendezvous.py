"""Who owns a segment: weighted rendezvous hashing, equal in every process, Python version and C library. Pure.

Every node draws a number u of (0, 1) for the segment, its BLAKE3 digest, and the highest score owns it:

    score = -weight / ln(u)

Highest random weight: Thaler and Ravishankar, "Using name-based mappings to increase hit rates", IEEE/ACM Transactions
on Networking 6(1), 1998. The weights: the logarithmic method of Schindelhauer and Schomaker, "Weighted distributed hash
tables", SPAA 2005; the probability of the highest score is weight / sum of weights. A node that comes, or whose weight
grows, only takes segments; one that goes only gives its own away.
"""

import math
import struct
from collections.abc import Sequence
from typing import NamedTuple

from blake3 import blake3

_DRAW = struct.Struct("<Q")
_DRAW_BITS = 52  # one bit less than a float64 holds, so that draw + 1/2 is exact and u is never 0 or 1
_LN2 = 0.6931471805599453
_SQRT_HALF = 0.7071067811865476
_TERMS = tuple(1.0 / (2 * k + 1) for k in range(10, -1, -1))
"""atanh(s) = s (1 + s^2/3 + ... + s^20/21 + ...): for |s| <= 0.172 the rest is below 1e-17 of it."""


class Candidate(NamedTuple):
    """A node that may own segments. ``id``: bytes that name it for good. ``weight``: above 0."""

    id: bytes
    weight: float


def rank(key: bytes, candidates: Sequence[Candidate]) -> list[int]:
    """Indexes of all candidates, the owner of ``key`` first. Equal scores: the lower id first."""
    if not candidates:
        return []
    draws = [_draw(id_ + key) for id_, _ in candidates]
    if _are_equal(candidates):
        scores: Sequence[float] = [-draw for draw in draws]  # the same order, without logarithms: half the time
    else:
        scores = [
            weight / ln((draw + 0.5) / (1 << _DRAW_BITS))  # below 0: the lowest is the highest score
            for draw, (_, weight) in zip(draws, candidates, strict=True)
        ]
    return sorted(range(len(candidates)), key=lambda index: (scores[index], candidates[index].id))


def _draw(data: bytes) -> int:
    number: int = _DRAW.unpack(blake3(data).digest(8))[0]
    return number >> (64 - _DRAW_BITS)


def _are_equal(candidates: Sequence[Candidate]) -> bool:
    return all(weight == candidates[0].weight for _, weight in candidates)


def ln(u: float) -> float:
    """Natural logarithm of 0 < u < 1 by operations that IEEE 754 rounds alike everywhere; libm's last bit differs."""
    mantissa, exponent = math.frexp(u)
    if mantissa < _SQRT_HALF:
        mantissa, exponent = mantissa * 2.0, exponent - 1
    s = (mantissa - 1.0) / (mantissa + 1.0)
    square, total = s * s, 0.0
    for term in _TERMS:
        total = total * square + term
    return exponent * _LN2 + 2.0 * s * total
