"""Why a prompt's segments are found or not, and what else is held that is like them. Reads the node, changes nothing.

For people and tools: it costs far more than a lookup, and no lookup pays for it. Nothing here crosses tenants: a
session hears of its own namespaces, and of other identities of their tenants.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING

from kvservice.caches import Cache, Family, Space
from kvservice.catalog import Catalog
from kvservice.departures import CODES, Departure, Gone
from kvservice.lookup import Asked, Finding, find
from kvservice.model.cache import Tier
from kvservice.model.differences import differences
from kvservice.model.explanation import HeldCache, Reason, SegmentExplanation
from kvservice.model.identity import Namespace
from kvservice.model.plan import Match, MissReason
from kvservice.model.segment import EXACT, MARK_BYTES, ContextId, SegmentId, affinity
from kvservice.sessions import Session
from kvservice.ssd import Ssd
from kvservice.storage.admission import NotAdmitted
from kvservice.storage.buffer import round_up

if TYPE_CHECKING:
    from kvservice.node import Node  # which imports this

NEAREST_MAX = 4
"""Caches in other contexts that are told of a segment."""
NEWEST_SEGMENTS = 4096
"""Whose lengths are looked at."""
LENGTHS_MAX = 8
LOOKED_AT_MAX = 65536
"""Hidden caches, keys being written and namespaces that one question goes through, the newest ones: a few ms each."""
KNOWN_COMPARED_MAX = 16
KNOWN_MAX = 8
FEW_FIELDS = 3
"""Identities of another model are told if no more than this differs."""

WAITING = len(NotAdmitted) + 1
NOT_ON_SSD = ("", *(reason.name.lower() for reason in NotAdmitted), "waiting")
"""Why a cache was on no SSD, by number; empty: it is not known, or there is no SSD."""

_MISSES = {
    MissReason.OTHER_CONTEXT: Reason.OTHER_CONTEXT,
    MissReason.PINNED: Reason.PINNED,
    MissReason.LOW_AFFINITY: Reason.LOW_AFFINITY,
}
_DEPARTURES = {
    Gone.EVICTED: Reason.EVICTED,
    Gone.EVICTED_FROM_SSD: Reason.EVICTED_FROM_SSD,
    Gone.DELETED: Reason.DELETED,
    Gone.QUARANTINED: Reason.QUARANTINED,
    Gone.REFUSED: Reason.REFUSED,
    Gone.NOT_BROUGHT: Reason.NOT_BROUGHT,
}


def why_not_on_ssd(ssd: Ssd, cache: Cache) -> int:
    """Why a cache of memory, or the master it stands on, is not on SSD: a number of NOT_ON_SSD, as of now. O(1)."""
    admission, cache = ssd.admission, cache.head if cache.is_on_ssd else cache
    if cache.record_bytes > ssd.slab.record_bytes_max:
        return NotAdmitted.TOO_LARGE
    if admission.is_below_floor:
        return NotAdmitted.FLOOR
    if cache in ssd.queue:
        return WAITING
    left_bytes, group = admission.budget_left_bytes(), cache.head.group
    if left_bytes is None:
        return 0
    if group is not None and not group.uses:
        return NotAdmitted.ONCE_USED
    return NotAdmitted.BUDGET if left_bytes <= 0 else 0


def space_to_explain(catalog: Catalog, session: Session, namespace: bytes) -> Space:
    """A namespace of the session, or another of its tenants'. Raises InvalidInputError for a stranger's."""
    space = catalog.spaces.get(Namespace(namespace))
    tenants = {one.identity.tenant for one in session.spaces.values()}
    return space if space is not None and space.identity.tenant in tenants else session.space(namespace)


class SpaceExplainer:
    """Explains segments of one namespace. Used for one question: what changes meanwhile may be told as it was before.

    ``has_missed``: was any segment not found?
    """

    def __init__(self, node: "Node", space: Space) -> None:
        self.space = space
        self.has_missed = False
        self._node = node
        self._catalog = node.catalog

    def explain(self, segment: SegmentId, asked: Asked, marks: bytes) -> SegmentExplanation:
        """Why a segment behind ``marks`` (flat, nearest first) is found or not."""
        found = self._explain(segment, asked, marks)
        self.has_missed = self.has_missed or found.reason is not Reason.FOUND
        return found

    def _explain(self, segment: SegmentId, asked: Asked, marks: bytes) -> SegmentExplanation:
        family = self.space.families.get(segment)
        limit = self._node.limits.candidates_max
        finding = find(family, asked, marks, is_pinned=bool(self.space.pinned_reason), candidates_max=limit)
        if family is None:
            return self._unheld(segment, asked)
        if finding.cache is not None:
            return self._found(family, finding, finding.cache, marks)
        own = None if finding.miss_reason is MissReason.TOKEN_COUNT else self._own(segment, asked)
        return self._with_others(own or _held_elsewhere(finding), family, asked.position, marks)

    def lengths(self) -> tuple[tuple[int, int], ...]:
        """(tokens, segments) of the namespace's newest segments, the most frequent length first."""
        return tuple(self._lengths.most_common(LENGTHS_MAX))

    def known_spaces(self) -> list[Space]:
        """Other namespaces of the tenant, the nearest identity first: of the same model, or with few differences."""
        mine = self.space.identity
        spaces = islice(reversed(self._catalog.spaces.values()), LOOKED_AT_MAX)
        others = [one for one in spaces if one is not self.space and one.identity.tenant == mine.tenant]
        others.sort(key=self._distance_guessed)
        ranked = [(len(differences(mine, one.identity)), one) for one in others[:KNOWN_COMPARED_MAX]]
        near = [pair for pair in ranked if pair[0] <= FEW_FIELDS or pair[1].identity.model == mine.model]
        near.sort(key=lambda pair: (not pair[1].families, pair[0], -len(pair[1].families)))
        return [one for _, one in near[:KNOWN_MAX]]

    def _distance_guessed(self, other: Space) -> tuple[bool, int, int]:
        """Cheap: comparing RoPE layer by layer takes 0.5 ms."""
        mine, theirs = self.space.identity, other.identity
        differ = (mine.model != theirs.model, mine.weights != theirs.weights, mine.geometry != theirs.geometry)
        return not other.families, sum(differ), -len(other.families)

    # What is held

    def _found(self, family: Family, finding: Finding, cache: Cache, marks: bytes) -> SegmentExplanation:
        reason = Reason.FOUND
        if self._catalog.is_condemned(cache):
            reason = Reason.WRONG_BYTES
        elif not self._has_room(cache):
            reason = Reason.NO_ROOM
        others = len(family.members) - 1
        return SegmentExplanation(
            reason, finding.match, self._held(cache, marks), contexts=others, held_tokens=family.tokens
        )

    def _has_room(self, cache: Cache) -> bool:
        """Could what is on SSD only be read into the arena now, if leases stay as they are?"""
        return all(
            one.is_on_host or self._longest_stretch >= round_up(one.record_bytes, self._granularity)
            for one in dict.fromkeys((cache.head, cache))
        )

    @cached_property
    def _longest_stretch(self) -> int:
        staging = self._node.tier.staging
        return max(self._node.allocation.longest_stretch(), 0 if staging is None else staging.largest_free_bytes)

    @property
    def _granularity(self) -> int:
        return self._node.tier.allocator.granularity

    def _with_others(
        self, explanation: SegmentExplanation, family: Family, position: int, marks: bytes
    ) -> SegmentExplanation:
        """``explanation``, with the caches that the segment has in other contexts."""
        held = [self._held(cache, marks) for cache in family.recent(self._node.limits.candidates_max)]
        held.sort(key=lambda one: (-one.affinity, one.provenance != EXACT, one.position != position, one.context))
        return replace(
            explanation,
            contexts=len(family.members),
            nearest=tuple(held[:NEAREST_MAX]),
            held_tokens=family.tokens,
        )

    def _held(self, cache: Cache, marks: bytes) -> HeldCache:
        is_arriving = cache in self._catalog.arriving
        tiers = [Tier.HOST] if cache.is_on_host and not is_arriving else []
        own = _marks(cache.marks)
        return HeldCache(
            cache.context,
            cache.position,
            cache.provenance,
            cache.kind,
            tuple(tiers + [Tier.SSD] * cache.is_on_ssd),
            is_arriving,
            len(own),
            affinity(own, _marks(marks)),
        )

    # What is not

    def _unheld(self, segment: SegmentId, asked: Asked) -> SegmentExplanation:
        """Nothing of the segment is held in the namespace."""
        found = self._own(segment, asked) or self._of_other_context(segment)
        if found is not None:
            return found
        if not self.space.families:
            return SegmentExplanation(Reason.EMPTY_NAMESPACE)
        is_known = asked.tokens in self._lengths
        return SegmentExplanation(Reason.NEVER_STORED if is_known else Reason.OTHER_LENGTHS)

    def _own(self, segment: SegmentId, asked: Asked) -> SegmentExplanation | None:
        """What is known of the very keys that were asked for; None: nothing."""
        departures, namespace = self._node.departures, self.space.namespace
        for context in asked.accepted_contexts:
            if (segment, ContextId(context)) in self.space.pending:
                return SegmentExplanation(Reason.BEING_WRITTEN)
            departure = departures.of_key(namespace, segment, context)
            if departure is not None:
                return _departed(departure)
            if (segment, context) in self._deleted:
                return SegmentExplanation(Reason.DELETED)
        return None

    def _of_other_context(self, segment: SegmentId) -> SegmentExplanation | None:
        """What is known of the segment behind other tokens."""
        found = None
        departure = self._node.departures.of_segment(self.space.namespace, segment)
        if any(one == segment for one, _ in islice(self.space.pending, LOOKED_AT_MAX)):
            found = SegmentExplanation(Reason.BEING_WRITTEN)
        elif departure is not None:
            found = _departed(departure)
        elif any(one == segment for one, _ in self._deleted):
            found = SegmentExplanation(Reason.DELETED)
        return None if found is None else replace(found, is_of_other_context=True)

    @cached_property
    def _deleted(self) -> set[tuple[bytes, bytes]]:
        """Deleted keys whose records stay, for leases or mirrors; after a restart nothing else tells of them."""
        return set(self._iterate_deleted())

    def _iterate_deleted(self) -> Iterator[tuple[bytes, bytes]]:
        hidden = self._catalog.hidden
        for cache in islice(reversed(hidden), LOOKED_AT_MAX):
            if hidden[cache] and cache.family.space.namespace == self.space.namespace:
                yield cache.family.segment, cache.context

    @cached_property
    def _lengths(self) -> Counter[int]:
        newest = islice(reversed(self.space.families.values()), NEWEST_SEGMENTS)
        return Counter(family.tokens for family in newest)


def _held_elsewhere(finding: Finding) -> SegmentExplanation:
    """Held, and not for this query."""
    return SegmentExplanation(_MISSES.get(finding.miss_reason, Reason.TOKEN_COUNT), Match.NONE)


def _departed(departure: Departure) -> SegmentExplanation:
    reason, detail = _DEPARTURES[departure.why], ""
    if departure.why is Gone.EVICTED:
        detail = NOT_ON_SSD[departure.detail]
        reason = Reason.NOT_ADMITTED if detail and departure.detail != WAITING else reason
    elif departure.why is Gone.REFUSED:
        detail = CODES[departure.detail]
    return SegmentExplanation(reason, age_s=departure.age_s, detail=detail)


def _marks(flat: bytes) -> list[bytes]:
    return [flat[at : at + MARK_BYTES] for at in range(0, len(flat), MARK_BYTES)]
