"""The answer of POST /explain, one JSON object. Its schema is the types below; texts are for people and may change."""

from collections.abc import Sequence
from typing import TypedDict

from kvservice.model.differences import Difference
from kvservice.model.explanation import HeldCache, PlaceExplanation, Reason, SegmentExplanation, place_text
from kvservice.model.identity import Identity
from kvservice.model.plan import Match
from kvservice.stats.explain_request import AskedSegment


class HeldCacheDocument(TypedDict):
    """A cache of the segment. ``tiers``: where it is whole. ``provenance``: empty is exact.

    ``affinity``: how many of the ``preceding`` segments it remembers agree with the prompt's, from the nearest on.
    """

    context: str
    position: int
    provenance: str
    kind: str
    tiers: list[str]
    is_arriving: bool
    preceding: int
    affinity: int


class PlaceDocument(TypedDict):
    """Where else a segment belongs. ``state``: of a member; self: this node; cold: storage, which is not asked.

    ``answer``: never, has, has_not, not_reached, too_slow, refused, or computed_sooner: it has it, and a lookup left it
    there. ``age_s``: since a lookup asked; None: it was asked for this explanation, or never.
    """

    name: str
    state: str
    is_answering: bool
    answer: str
    age_s: float | None


class ExplainedSegmentDocument(TypedDict):
    """The prompt's tokens ``[start, start + tokens)``. ``reason``: found, or the first thing that is true of it.

    ``detail``: of the reason; empty: none. ``age_s``: since it went. ``is_of_other_context``: what is said is true of
    the segment behind other tokens. ``nearest``: some of the ``contexts`` caches in other contexts.
    ``places``: its owners first; empty if it is here, or if the node shares with nobody.
    """

    start: int
    tokens: int
    segment: str
    context: str
    reason: str
    match: str
    detail: str
    age_s: float | None
    is_of_other_context: bool
    contexts: int
    held_tokens: int
    found: HeldCacheDocument | None
    nearest: list[HeldCacheDocument]
    places: list[PlaceDocument]
    text: str


class LengthDocument(TypedDict):
    """How many of a namespace's newest segments have so many tokens."""

    tokens: int
    segments: int


class DifferenceDocument(TypedDict):
    """A field in which two identities differ: the prompt's on the left. ``advice``: what to do."""

    field: str
    left: str
    right: str
    advice: str


class ElsewhereDocument(TypedDict):
    """Another identity of the tenant. ``found``: how many of the prompt's segments it would find."""

    namespace: str
    model: str
    held_segments: int
    found: int
    differences: list[DifferenceDocument]


class ExplainDocument(TypedDict):
    """All of it. ``broken_by``: the first segment that is not found exactly, None if all are; ``exact_prefix_tokens``:
    before it. ``pinned_reason``: why nothing may be moved. What went longer ago than ``remembered_s`` may be forgotten.
    """

    namespace: str
    tenant: str
    model: str
    is_found: bool
    tokens: int
    exact_prefix_tokens: int
    broken_by: int | None
    text: str
    held_segments: int
    lengths: list[LengthDocument]
    pinned_reason: str
    remembered_s: float
    has_ssd: bool
    segments: list[ExplainedSegmentDocument]
    elsewhere: list[ElsewhereDocument]


def explain_document(
    identity: Identity,
    explained: Sequence[tuple[AskedSegment, SegmentExplanation]],
    *,
    segments: list[ExplainedSegmentDocument],
    held_segments: int,
    lengths: Sequence[tuple[int, int]],
    remembered_s: float,
    has_ssd: bool,
    elsewhere: list[ElsewhereDocument],
) -> ExplainDocument:
    """``explained``: the segments in order, and why each is found or not; ``segments``: the same as documents."""
    broken_by = next((index for index, (_, why) in enumerate(explained) if why.match is not Match.EXACT), None)
    prefix = explained[:broken_by]
    return {
        "namespace": identity.namespace().hex(),
        "tenant": identity.tenant,
        "model": identity.model,
        "is_found": all(why.reason is Reason.FOUND for _, why in explained),
        "tokens": sum(asked.tokens for asked, _ in explained),
        "exact_prefix_tokens": sum(asked.tokens for asked, _ in prefix),
        "broken_by": broken_by,
        "text": _summary(explained, broken_by),
        "held_segments": held_segments,
        "lengths": [{"tokens": tokens, "segments": count} for tokens, count in lengths],
        "pinned_reason": identity.pinned_reason,
        "remembered_s": round(remembered_s, 3),
        "has_ssd": has_ssd,
        "segments": segments,
        "elsewhere": elsewhere,
    }


def elsewhere_document(
    identity: Identity, held_segments: int, found: int, differences: Sequence[Difference]
) -> ElsewhereDocument:
    """Another identity, and what keeps it apart."""
    return {
        "namespace": identity.namespace().hex(),
        "model": identity.model,
        "held_segments": held_segments,
        "found": found,
        "differences": [
            {"field": one.field, "left": one.left, "right": one.right, "advice": one.advice} for one in differences
        ],
    }


def segment_document(asked: AskedSegment, why: SegmentExplanation) -> ExplainedSegmentDocument:
    """One segment, and why it is found or not."""
    return {
        "start": asked.position,
        "tokens": asked.tokens,
        "segment": asked.segment.hex(),
        "context": asked.accepted_contexts[0].hex(),
        "reason": why.reason.name.lower(),
        "match": why.match.name.lower(),
        "detail": why.detail,
        "age_s": None if why.age_s is None else round(why.age_s, 3),
        "is_of_other_context": why.is_of_other_context,
        "contexts": why.contexts,
        "held_tokens": why.held_tokens,
        "found": None if why.found is None else _held(why.found),
        "nearest": [_held(one) for one in why.nearest],
        "places": [_place(one) for one in why.places],
        "text": _text(why),
    }


def _place(place: PlaceExplanation) -> PlaceDocument:
    return {
        "name": place.name,
        "state": place.state,
        "is_answering": place.is_answering,
        "answer": place.answer.name.lower(),
        "age_s": None if place.age_s is None else round(place.age_s, 3),
    }


def _held(held: HeldCache) -> HeldCacheDocument:
    return {
        "context": held.context.hex(),
        "position": held.position,
        "provenance": held.provenance,
        "kind": held.kind.name.lower(),
        "tiers": [tier.name.lower() for tier in held.tiers],
        "is_arriving": held.is_arriving,
        "preceding": held.preceding,
        "affinity": held.affinity,
    }


_TEXTS = {
    Reason.FOUND: "found",
    Reason.WRONG_BYTES: "held, but its bytes in memory are wrong and others lease them; it goes when they let go",
    Reason.NO_ROOM: "on SSD, and leases leave no room in memory to read it into; release leases, or give more memory",
    Reason.TOKEN_COUNT: "held with another number of tokens; the question is wrong",
    Reason.BEING_WRITTEN: "being written by somebody right now",
    Reason.EVICTED: "evicted from memory, and on no SSD; a larger host tier or an SSD tier would have kept it",
    Reason.NOT_ADMITTED: "evicted from memory, and SSD did not take it",
    Reason.EVICTED_FROM_SSD: "evicted from SSD when it was in memory no more; a larger SSD tier would have kept it",
    Reason.DELETED: "deleted by a client",
    Reason.QUARANTINED: "dropped: its bytes, or its master's, were wrong or unreadable and there was no other copy",
    Reason.REFUSED: "the node refused to store it",
    Reason.OTHER_CONTEXT: "held only behind other tokens, and the question asks for exact reuse along the prompt",
    Reason.PINNED: "held only behind other tokens at other positions, and this identity's positions are pinned",
    Reason.LOW_AFFINITY: "held only behind other tokens, and fewer segments before it agree than the question asks for",
    Reason.EMPTY_NAMESPACE: "nothing at all is held for this identity; see what differs from others",
    Reason.OTHER_LENGTHS: "never seen, and no segment held for this identity has its length; see chunk_tokens",
    Reason.NEVER_STORED: "never stored, as far as the node remembers",
    Reason.NOT_BROUGHT: "another place had it, and it did not arrive whole; the next lookup asks again",
}


def _text(why: SegmentExplanation) -> str:
    detail = f" ({why.detail})" if why.detail else ""
    age = "" if why.age_s is None else f", {why.age_s:.0f} s ago"
    other = "; that was behind other tokens, of this very place nothing is known" if why.is_of_other_context else ""
    how = f", {why.match.name.lower()}" if why.reason is Reason.FOUND else ""
    places = "".join(f"; {place_text(one)}" for one in why.places)
    return f"{_TEXTS[why.reason]}{how}{detail}{age}{other}{places}"


def _summary(explained: Sequence[tuple[AskedSegment, SegmentExplanation]], broken_by: int | None) -> str:
    if broken_by is None:
        return "all segments are found exactly"
    asked, why = explained[broken_by]
    after = sum(one.reason is Reason.FOUND for _, one in explained[broken_by + 1 :])
    behind = f"; of those behind it {after} are found" if after else ""
    end = asked.position + asked.tokens
    return f"segment {broken_by}, tokens {asked.position} to {end}, breaks the chain: {_text(why)}{behind}"
