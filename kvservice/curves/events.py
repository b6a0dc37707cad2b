"""What happened to segments, in order, as it is noted for the curves: a line of the request path, worked through later.

event := Cache       a lookup was answered with it
       | Missing     a lookup was not answered
       | Stored      a cache is new, or has a new form: another size, another master
       | Deleted     a client took it away; no larger memory would find it
"""

from typing import NamedTuple

from kvservice.caches import Cache, Space
from kvservice.lookup import Asked, Finding
from kvservice.model.plan import MissReason

CONTEXTS_MAX = 4
"""Accepted contexts of a miss that are remembered; they come best first."""


class Missing(NamedTuple):
    """A segment that was asked for and not found. ``may_be_any``: any cache of the segment would have done."""

    space: Space
    segment: bytes
    contexts: tuple[bytes, ...]
    tokens: int
    may_be_any: bool

    @classmethod
    def of(cls, space: Space, segment: bytes, asked: Asked, finding: Finding) -> "Missing":
        """What a lookup asked for in vain."""
        may_be_any = asked.may_shift and finding.miss_reason is MissReason.UNKNOWN_SEGMENT
        contexts = tuple(asked.accepted_contexts[:CONTEXTS_MAX])
        return cls(space, segment, contexts, asked.tokens, may_be_any)


class Stored(NamedTuple):
    """A cache was published."""

    cache: Cache


class Deleted(NamedTuple):
    """A cache was deleted."""

    cache: Cache


Event = Cache | Missing | Stored | Deleted


def space_of(event: Event) -> Space:
    """Whose event it is."""
    if isinstance(event, Missing):
        return event.space
    cache = event if isinstance(event, Cache) else event.cache
    return cache.family.space


def segment_of(event: Event) -> bytes:
    """Which segment it is about."""
    if isinstance(event, Missing):
        return event.segment
    cache = event if isinstance(event, Cache) else event.cache
    return cache.family.segment
