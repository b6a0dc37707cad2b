"""Plans: what a lookup answers for a prompt, segment by segment."""

import enum
from dataclasses import dataclass

from kvservice.model.cache import Extent, MasterReference, Tier
from kvservice.model.lease import Lease
from kvservice.model.segment import CacheKey


class Outcome(enum.IntEnum):
    """The four outcomes of a read. The numbers are on the wire; never change them."""

    HIT = 1
    MISS = 2
    ERROR = 3
    CORRUPT = 4


class Match(enum.IntEnum):
    """How what was found relates to what was asked. The numbers are on the wire; never change them."""

    NONE = 0
    EXACT = 1
    """Equal context, exact provenance: the bytes that a full prefill stored."""
    REFRESHED = 2
    """Equal context, refreshed provenance: the bytes that the same reuse stored."""
    SHIFTED = 3
    """A cache of the segment from another context: an approximation."""


class MissReason(enum.IntEnum):
    """Why there was no hit. The numbers are on the wire; never change them."""

    NONE = 0
    UNKNOWN_NAMESPACE = 1
    UNKNOWN_SEGMENT = 2
    OTHER_CONTEXT = 3
    """The segment is held, but not in this context, and the query did not allow a shifted use."""
    PINNED = 4
    """A shifted use would need a move, and the identity's positions are pinned."""
    LOW_AFFINITY = 5
    TOKEN_COUNT = 6
    """The segment is held with another number of tokens: the query is wrong."""
    NO_ROOM = 7
    """The cache is on SSD, and leases leave no room in the arena to read it into."""
    CORRUPT = 8
    """The cache's bytes in memory are wrong and leased by others; it is found again when they are gone, or never."""


@dataclass(frozen=True, slots=True)
class SegmentQuery:
    """One segment of a prompt, as asked.

    ``accepted``: keys that answer it as they are, best first. ``may_shift``: caches from other contexts will do
    if their affinity is at least ``affinity_min``.
    """

    accepted: tuple[CacheKey, ...]
    position: int
    tokens: int
    may_shift: bool = False
    affinity_min: int = 0


ARRIVES_FROM = (Tier.SSD, Tier.REMOTE)
"""Tiers whose records have to be brought into the arena before they can be read."""


@dataclass(frozen=True, slots=True)
class Location:
    """Where a leased record lies."""

    tier: Tier
    extent: Extent
    generation: int

    @property
    def is_arriving(self) -> bool:
        """Was it not in memory when it was found? Then it is on its way into the extent, layer after layer."""
        return self.tier in ARRIVES_FROM


@dataclass(frozen=True, slots=True)
class PlannedSegment:
    """What was found for one segment. For a mirror ``master`` is where its master lies, else None.

    ``position`` is where the found cache was computed; ``is_moved`` says that it differs from the asked one.
    """

    outcome: Outcome
    match: Match = Match.NONE
    miss_reason: MissReason = MissReason.NONE
    key: CacheKey | None = None
    provenance: str = ""
    position: int = 0
    is_moved: bool = False
    affinity: int = 0
    record: Location | None = None
    master: Location | None = None
    reference: MasterReference | None = None

    @property
    def is_hit(self) -> bool:
        """True if the segment can be restored."""
        return self.outcome is Outcome.HIT


@dataclass(frozen=True, slots=True)
class Plan:
    """All that a lookup found for one prompt, under one lease. ``pinned_reason``: why nothing of it may be moved."""

    segments: tuple[PlannedSegment, ...]
    lease: Lease
    pinned_reason: str = ""
