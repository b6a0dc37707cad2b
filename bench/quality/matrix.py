"""What is measured: which methods in which arrangement."""

from typing import Final

from bench.quality.arrangements import Arrangement, Order, Source
from bench.quality.trial import Methods

JUDGED: Final = ("exact", "none", "hkvd:0.02", "hkvd:0.15")
"""Methods whose verdicts are asked for too."""

SWEEP: Final[Methods] = {
    Arrangement(Source.MEMBER, Order.SAME): (
        "exact",
        "none",
        "hkvd:0.01",
        "hkvd:0.02",
        "hkvd:0.05",
        "hkvd:0.15",
        "hkvd:0.3",
        "head:4",
        "head:8",
        "head:16",
        "blocks:0.05:8",
        "blocks:0.15:16",
        "hkvd:0.02@2",
        "hkvd:0.02@4",
        "hkvd:0.02@8",
        "hkvd:0.05@4",
        "gradual:0.1>0.02>0.01",
        "seam:16",
        "mass:0.02",
    ),
    Arrangement(Source.OWN, Order.SAME): ("none", "hkvd:0.02"),
    Arrangement(Source.BARE, Order.SAME): ("none", "hkvd:0.02"),
    Arrangement(Source.PRODUCERS, Order.SAME): (
        "none",
        "hkvd:0.05",
        "hkvd:0.15",
        "hkvd:0.3",
        "head:16",
        "hkvd:0.15@2",
        "hkvd:0.15@4",
        "hkvd:0.15@8",
        "gradual:0.3>0.15>0.08",
        "each:0.15",
        "scaled:0.15",
        "mass:0.15",
    ),
    Arrangement(Source.ALONE, Order.SAME): ("none", "hkvd:0.15"),
    Arrangement(Source.MEMBER, Order.LEFT_OUT): (
        "none",
        "hkvd:0.02",
        "hkvd:0.05",
        "hkvd:0.15",
        "hkvd:0.3",
        "head:8",
        "head:16",
        "blocks:0.05:8",
        "hkvd:0.02@4",
        "hkvd:0.05@2",
        "hkvd:0.05@4",
        "hkvd:0.05@8",
        "hkvd:0.15@4",
        "gradual:0.15>0.05>0.02",
        "seam:16",
        "seam:32",
        "scaled:0.05",
        "mass:0.05",
    ),
    Arrangement(Source.MEMBER, Order.ROTATED): (
        "none",
        "hkvd:0.05",
        "hkvd:0.15",
        "hkvd:0.3",
        "hkvd:0.15@4",
        "hkvd:0.15@8",
        "seam:32",
    ),
    Arrangement(Source.MEMBER, Order.SHUFFLED): (
        "none",
        "hkvd:0.05",
        "hkvd:0.15",
        "hkvd:0.3",
        "head:16",
        "hkvd:0.15@4",
        "gradual:0.3>0.15>0.08",
        "scaled:0.15",
        "mass:0.15",
    ),
    Arrangement(Source.PRODUCERS, Order.SHUFFLED): ("none", "hkvd:0.15"),
    Arrangement(Source.THREE_MEMBERS, Order.SHUFFLED): ("none", "hkvd:0.15"),
}

CHECK: Final[Methods] = {
    Arrangement(Source.MEMBER, Order.SAME): (
        "exact",
        "none",
        "hkvd:0.02",
        "hkvd:0.05",
        "hkvd:0.02@4",
        "head:4",
        "mass:0.02",
    ),
    Arrangement(Source.PRODUCERS, Order.SAME): ("none", "hkvd:0.15", "hkvd:0.15@4"),
    Arrangement(Source.MEMBER, Order.LEFT_OUT): (
        "none",
        "hkvd:0.02",
        "hkvd:0.05",
        "hkvd:0.05@4",
        "hkvd:0.15",
        "head:8",
    ),
    Arrangement(Source.MEMBER, Order.ROTATED): ("none", "hkvd:0.15", "hkvd:0.15@4"),
    Arrangement(Source.MEMBER, Order.SHUFFLED): ("none", "hkvd:0.15"),
}
"""The same question put to a larger model: does it choose otherwise?"""

_HEADS: Final = ("head:1", "head:2", "head:8", "mixed:0.01:1@4", "mixed:0.01:2@4", "mixed:0.01:4@4", "mixed:0.05:4@4")

HEADS: Final[Methods] = {
    Arrangement(Source.MEMBER, Order.SAME): _HEADS,
    Arrangement(Source.MEMBER, Order.LEFT_OUT): (*_HEADS, "head:4"),
}
"""Heads of segments alone, and with the rows that deviate most at a deeper layer."""

MATRICES: Final = {"sweep": SWEEP, "heads": HEADS, "check": CHECK}
