"""Why a prompt's segments were found or not, as a node knows it. Plain data, the same on both sides of the wire."""

import enum
from dataclasses import dataclass

from kvservice.model.cache import CacheKind, Tier
from kvservice.model.plan import Match


class Reason(enum.IntEnum):
    """The first thing that is true of a segment. The numbers are on the wire; never change them."""

    FOUND = 1
    WRONG_BYTES = 2
    """It is held, its bytes in memory are wrong, and others lease them: see MissReason.CORRUPT."""
    NO_ROOM = 3
    """It is on SSD, and leases leave no room in the arena to read it into."""
    TOKEN_COUNT = 4
    """The segment is held with another number of tokens: the query is wrong."""
    BEING_WRITTEN = 5
    """Reserved by a writer and not committed yet."""
    EVICTED = 6
    """Evicted from memory, and on no SSD."""
    NOT_ADMITTED = 7
    """Evicted from memory, and SSD did not take it: ``detail`` says why."""
    EVICTED_FROM_SSD = 8
    """Evicted from SSD when it was in memory no more."""
    DELETED = 9
    QUARANTINED = 10
    """Its bytes were wrong, or could not be read, and no other copy was there; or its master's."""
    REFUSED = 11
    """The node refused to store it: ``detail`` is the error's code."""
    OTHER_CONTEXT = 12
    """Held behind other tokens, and the query asked for exact reuse along the prompt."""
    PINNED = 13
    """Held behind other tokens at other positions, and the identity's positions are pinned."""
    LOW_AFFINITY = 14
    """Held behind other tokens, and fewer segments agree than the query asks for."""
    EMPTY_NAMESPACE = 15
    """Nothing at all is held for this identity."""
    OTHER_LENGTHS = 16
    """Never seen, and none of the segments held for this identity has its length: it may be stored in other chunks."""
    NEVER_STORED = 17
    """Never seen, as far as the node remembers."""
    NOT_BROUGHT = 18
    """Another place had it lately, and it did not arrive whole; the next lookup asks again."""


@dataclass(frozen=True, slots=True)
class HeldCache:
    """A cache of the segment, in the context asked for or in another.

    ``tiers``: where it lies, without a tier it is still on its way to. ``preceding``: how many segments before its own
    it remembers; ``affinity``: how many of those agree with the prompt's, from the nearest on.
    """

    context: bytes
    position: int
    provenance: str
    kind: CacheKind
    tiers: tuple[Tier, ...]
    is_arriving: bool
    preceding: int
    affinity: int


class PlaceAnswer(enum.IntEnum):
    """What the last question about a segment brought. The numbers are on the wire; never change them."""

    NEVER = 1
    """It was not asked about it, as far as the node remembers."""
    HAS = 2
    HAS_NOT = 3
    NOT_REACHED = 4
    TOO_SLOW = 5
    """No answer within the deadline."""
    REFUSED = 6
    COMPUTED_SOONER = 7
    """It has it, and it was left there: the engine computes it sooner than it would come."""


@dataclass(frozen=True, slots=True)
class PlaceExplanation:
    """Where else a segment belongs. ``state``: of a member (live, draining, disconnected), self for the node that
    explains, cold for storage that is no node. ``age_s``: seconds since a lookup asked it; None: it was asked for this
    explanation, or never.
    """

    name: str
    state: str
    is_answering: bool
    answer: PlaceAnswer = PlaceAnswer.NEVER
    age_s: float | None = None


_ANSWERS = {
    PlaceAnswer.HAS: "it has it",
    PlaceAnswer.HAS_NOT: "it has nothing that would answer",
    PlaceAnswer.NOT_REACHED: "it was not reached",
    PlaceAnswer.TOO_SLOW: "it did not answer in time",
    PlaceAnswer.REFUSED: "it refused the question",
    PlaceAnswer.COMPUTED_SOONER: "it has it, and computing it is sooner than its way here",
}


def place_text(place: PlaceExplanation) -> str:
    """In words."""
    if place.state == "self":
        return "this node owns it"
    who = f"{place.name} ({place.state}{'' if place.is_answering else ', does not answer'})"
    if place.answer is PlaceAnswer.NEVER:
        return f"{who} was not asked"
    when = "asked now" if place.age_s is None else f"asked {place.age_s:.0f} s ago"
    return f"{who}, {when}: {_ANSWERS[place.answer]}"


@dataclass(frozen=True, slots=True)
class SegmentExplanation:
    """One segment. ``found``: the cache that a lookup answers with, and how it relates to what was asked.

    ``age_s``: seconds since it went, for what went; None if that is not known. ``detail``: see the reason; empty if
    nobody knows.
    ``is_of_other_context``: what is said is true of the segment behind other tokens: nothing is known of this key.
    ``contexts``: caches of the segment in other contexts; ``nearest``: some of them, the highest affinity first.
    ``held_tokens``: of the segment as held; 0 if it is not. ``places``: where else it belongs, owners first; empty if
    it is found, or if the node shares with nobody.
    """

    reason: Reason
    match: Match = Match.NONE
    found: HeldCache | None = None
    age_s: float | None = None
    detail: str = ""
    is_of_other_context: bool = False
    contexts: int = 0
    nearest: tuple[HeldCache, ...] = ()
    held_tokens: int = 0
    places: tuple[PlaceExplanation, ...] = ()
