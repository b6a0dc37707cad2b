"""What a lookup found for the prompts of a round, under one lease. Torch-free."""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self, overload

from kvservice.client.arrivals import Arrivals
from kvservice.client.rounds import PromptSegment, RoundPrompt
from kvservice.client.session import NO_LEASE, Session, location_of
from kvservice.model.cache import MasterReference
from kvservice.model.errors import KVServiceError
from kvservice.model.lease import Lease
from kvservice.model.plan import Match, MissReason, Outcome, Plan, PlannedSegment
from kvservice.model.segment import CacheKey, ContextId
from kvservice.wire.v1 import cache_pb2 as wire


@dataclass(frozen=True, slots=True)
class RestoredSpan:
    """A run of a prompt's tokens that is one found segment.

    ``is_moved``: the cache was computed at another position. ``affinity``: how many segments before it agree.
    """

    start: int
    tokens: int
    match: Match
    is_moved: bool
    affinity: int

    @property
    def end(self) -> int:
        """The first position behind it."""
        return self.start + self.tokens


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """One prompt and what was found for each of its segments."""

    prompt: RoundPrompt
    plan: Plan

    @property
    def is_arriving(self) -> bool:
        """Was something of it not in memory when it was found?"""
        places = (place for one in self.plan.segments for place in (one.record, one.master))
        return any(place is not None and place.is_arriving for place in places)

    @property
    def hits(self) -> tuple[tuple[PromptSegment, PlannedSegment], ...]:
        """The segments that can be restored, in prompt order."""
        pairs = zip(self.prompt.segments, self.plan.segments, strict=True)
        return tuple((segment, planned) for segment, planned in pairs if planned.is_hit)

    @property
    def hit_tokens(self) -> int:
        """Tokens that can be restored."""
        return sum(len(segment.tokens) for segment, _ in self.hits)

    @property
    def exact_prefix_tokens(self) -> int:
        """Tokens from the start on that are exact hits without a gap: what a prefix cache would have found."""
        end = 0
        for segment, planned in self.hits:
            if segment.position != end or planned.match is not Match.EXACT:
                break
            end = segment.end
        return end

    def spans(self, *matches: Match) -> tuple[RestoredSpan, ...]:
        """Found segments with one of these matches, or with any; in prompt order, one span a segment."""
        return tuple(
            span_of(segment, planned) for segment, planned in self.hits if not matches or planned.match in matches
        )


class Plans(Sequence[PromptPlan]):
    """One plan a prompt, in order. A context manager: leaving it releases the lease. Safe from any thread."""

    def __init__(self, session: Session, lease: Lease, plans: Sequence[PromptPlan]) -> None:
        self.lease = lease
        self._session = session
        self._plans = tuple(plans)
        self._lock = threading.Lock()
        self._asked: Arrivals | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._plans)

    @overload
    def __getitem__(self, index: int) -> PromptPlan: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[PromptPlan]: ...

    def __getitem__(self, index: int | slice) -> PromptPlan | Sequence[PromptPlan]:
        return self._plans[index]

    def __iter__(self) -> Iterator[PromptPlan]:
        return iter(self._plans)

    @property
    def hit_tokens(self) -> int:
        """Tokens that can be restored, over all prompts."""
        return sum(plan.hit_tokens for plan in self._plans)

    def check(self) -> None:
        """Raise StaleEpochError or LeaseExpiredError unless what was found is certain to be readable now."""
        if self.lease.id != NO_LEASE:
            self._session.check_lease(self.lease)

    def ask_ahead(self) -> None:
        """Ask for the arrival of what is on its way, and do not wait: a restore has slots to check meanwhile.

        Does nothing where all was in memory. Twice is no error.
        """
        with self._lock:
            if self._asked is None and any(plan.is_arriving for plan in self._plans):
                self._asked = Arrivals(self._session, self.lease)
                self._asked.ask_ahead()

    def take_arrivals(self) -> Arrivals:
        """Whom to ask of what is on its way: with the question that was sent ahead, for who comes first. Give it up."""
        with self._lock:
            asked, self._asked = self._asked, None
        return asked or Arrivals(self._session, self.lease)

    def close(self) -> None:
        """Release the lease without waiting for the node; that it is gone is no error. Safe to call twice."""
        self.take_arrivals().give_up()
        try:
            self._session.let_go(self.lease.id)
        except KVServiceError:  # the node frees it with the session, or when it runs out
            return


def look_up(session: Session, prompts: Sequence[RoundPrompt]) -> Plans:
    """Ask for every segment of every prompt in one call. Raises as ``Session.lookup``."""
    for prompt in prompts:
        session.identity_of(prompt.namespace)
    reply, lease = session.lookup([prompt_query(prompt) for prompt in prompts])
    replies = zip(prompts, reply.prompts, strict=True)
    return Plans(session, lease, [prompt_plan(prompt, found, lease) for prompt, found in replies])


def span_of(segment: PromptSegment, planned: PlannedSegment) -> RestoredSpan:
    """The span of a found segment."""
    return RestoredSpan(segment.position, len(segment.tokens), planned.match, planned.is_moved, planned.affinity)


def prompt_query(prompt: RoundPrompt) -> wire.PromptQuery:
    """A prompt as a node is asked about it."""
    segments = [_segment_query(prompt, index) for index in range(len(prompt.segments))]
    return wire.PromptQuery(namespace=prompt.namespace, segments=segments)


def _segment_query(prompt: RoundPrompt, index: int) -> wire.SegmentQuery:
    query = prompt.query(index)
    return wire.SegmentQuery(
        segment=query.accepted[0].segment,
        accepted_contexts=[key.context for key in query.accepted],
        position=query.position,
        tokens=query.tokens,
        may_shift=query.may_shift,
        affinity_min=query.affinity_min,
    )


def prompt_plan(prompt: RoundPrompt, reply: wire.PromptReply, lease: Lease) -> PromptPlan:
    """What a node answered for a prompt, under the lease that the answer came with."""
    found = zip(prompt.segments, reply.segments, strict=True)
    planned = tuple(_planned_segment(segment, one) for segment, one in found)
    return PromptPlan(prompt, Plan(planned, lease, reply.pinned_reason))


def _planned_segment(segment: PromptSegment, reply: wire.SegmentReply) -> PlannedSegment:
    outcome = Outcome(reply.outcome)
    if outcome is not Outcome.HIT:
        return PlannedSegment(outcome, miss_reason=MissReason(reply.miss_reason))
    reference = None
    if reply.HasField("master"):
        reference = MasterReference(ContextId(reply.master_context), reply.master.generation)
    return PlannedSegment(
        outcome,
        Match(reply.match),
        key=CacheKey(segment.id, ContextId(reply.context)),
        provenance=reply.provenance,
        position=reply.position,
        is_moved=reply.position != segment.position,
        affinity=reply.affinity,
        record=location_of(reply.record),
        master=location_of(reply.master) if reference is not None else None,
        reference=reference,
    )
