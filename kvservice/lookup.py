"""Which cache answers a segment. Policy only: it reads the catalog and changes nothing.

An accepted context answers as it is. Otherwise, where the query allows a shifted use, the member of the family with the
highest affinity does; exact provenance goes before refreshed, masters before mirrors, the same position before another.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from kvservice.caches import Cache, Family
from kvservice.model.plan import Match, MissReason
from kvservice.model.segment import EXACT, MARK_BYTES, PRECEDING_MAX, ContextId

MARKS_BYTES_MAX = MARK_BYTES * PRECEDING_MAX
FROM_HOST, FROM_SSD, FROM_REMOTE = range(3)
"""Where bytes come from, the nearest first; plain numbers, for a lookup comes here for every segment."""


class Asked(Protocol):
    """One segment of a prompt as asked; the wire message fits."""

    @property
    def accepted_contexts(self) -> Sequence[bytes]:
        """Contexts that answer it as they are, best first."""

    @property
    def position(self) -> int:
        """Where its first token stands."""

    @property
    def tokens(self) -> int:
        """How many it has."""

    @property
    def may_shift(self) -> bool:
        """Will a cache from another context do?"""

    @property
    def affinity_min(self) -> int:
        """The least affinity that such a cache needs."""


class Finding(NamedTuple):
    """The cache that answers, or why none does. ``source``: where the farthest of its bytes have to come from."""

    cache: Cache | None
    match: Match
    miss_reason: MissReason
    affinity: int
    source: int = FROM_HOST


def _miss(reason: MissReason, affinity: int = 0) -> Finding:
    return Finding(None, Match.NONE, reason, affinity)


UNKNOWN_NAMESPACE = _miss(MissReason.UNKNOWN_NAMESPACE)
NO_ROOM = _miss(MissReason.NO_ROOM)
CORRUPT = _miss(MissReason.CORRUPT)
_UNKNOWN_SEGMENT = _miss(MissReason.UNKNOWN_SEGMENT)
_TOKEN_COUNT = _miss(MissReason.TOKEN_COUNT)
_OTHER_CONTEXT = _miss(MissReason.OTHER_CONTEXT)
_PINNED = _miss(MissReason.PINNED)


def marks_behind(segment: bytes, marks: bytes) -> bytes:
    """The marks of what follows ``segment``, which has ``marks`` before it; flat, nearest first."""
    return segment[:MARK_BYTES] + marks[: MARKS_BYTES_MAX - MARK_BYTES]


def find(family: Family | None, asked: Asked, marks: bytes, *, is_pinned: bool, candidates_max: int) -> Finding:
    """What answers a segment of ``family`` behind the segments that ``marks`` name."""
    if family is None:
        return _UNKNOWN_SEGMENT
    if family.tokens != asked.tokens:
        return _TOKEN_COUNT
    members, position = family.members, asked.position
    for context in asked.accepted_contexts:
        cache = members.get(ContextId(context))
        # A context implies its position; a query that says otherwise is wrong and must not get KV as if it were right.
        if cache is not None and cache.position == position:
            match = Match.EXACT if cache.provenance == EXACT else Match.REFRESHED
            return Finding(cache, match, MissReason.NONE, len(cache.marks) // MARK_BYTES)
    if not asked.may_shift:
        return _OTHER_CONTEXT
    return _find_shifted(family, asked, marks, is_pinned, candidates_max)


def _find_shifted(family: Family, asked: Asked, marks: bytes, is_pinned: bool, candidates_max: int) -> Finding:
    best, best_rank, position = None, None, asked.position
    agreed = b""  # what the best one's marks and ours agree on: a worse one is told by one comparison
    for cache in family.recent(candidates_max):
        if (is_pinned and cache.position != position) or not cache.marks.startswith(agreed):
            continue
        longer, rank = _agreed(cache.marks, marks, len(agreed)), _rank(cache, position)
        if best_rank is None or len(longer) > len(agreed) or rank < best_rank:
            best, best_rank, agreed = cache, rank, longer
    if best is None:
        return _PINNED
    affinity = len(agreed) // MARK_BYTES
    if affinity < asked.affinity_min:
        return _miss(MissReason.LOW_AFFINITY, affinity)
    return Finding(best, Match.SHIFTED, MissReason.NONE, affinity)


def _rank(cache: Cache, position: int) -> tuple[bool, bool, bool, bytes]:
    return cache.provenance != EXACT, cache.master is not None, cache.position != position, cache.context


def affinity_of(ours: bytes, theirs: bytes) -> int:
    """How many segments right before two segments agree, given their marks."""
    return len(_agreed(ours, theirs, 0)) // MARK_BYTES


def _agreed(ours: bytes, theirs: bytes, at: int) -> bytes:
    """The marks that both begin with, whole ones, given that they agree on the first ``at`` bytes."""
    end = at + MARK_BYTES
    while end <= len(theirs) and ours[at:end] == theirs[at:end]:
        at, end = end, end + MARK_BYTES
    return theirs[:at]
