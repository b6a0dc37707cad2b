"""Why was there no hit? Asks a node about prompts, and puts what it says beside their tokens. Torch-free.

with Client.connect(address, identity) as client:
    for explanation in client.explain(prompts):
        print(*explanation_lines(explanation), sep="\\n")          # kvservice.client.explain_text

A question costs the node far more than a lookup: it is for people and tools, not for every request.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from kvservice.client.plans import prompt_query
from kvservice.client.rounds import RoundPrompt
from kvservice.client.session import Session
from kvservice.model.cache import CacheKind, Tier
from kvservice.model.differences import Difference, differences
from kvservice.model.errors import InvalidInputError
from kvservice.model.explanation import HeldCache, PlaceAnswer, PlaceExplanation, Reason, SegmentExplanation
from kvservice.model.identity import Identity, Namespace, identity_from_json
from kvservice.model.plan import Match
from kvservice.model.segment import segment_id
from kvservice.wire.v1 import cache_pb2 as wire

AsQuery = Callable[[Namespace], wire.PromptQuery]
"""A prompt as it would be looked up in a namespace."""


@dataclass(frozen=True, slots=True)
class ExplainedSegment:
    """The prompt's tokens ``[start, start + tokens)``, and why they are found or not."""

    start: int
    tokens: int
    why: SegmentExplanation

    @property
    def is_found(self) -> bool:
        """Would a lookup find it, as it was asked?"""
        return self.why.reason is Reason.FOUND


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Another identity of the tenant that the node knows, and what keeps it apart from the prompt's own.

    ``segments``: how many the node holds for it; ``found``: how many of the prompt's would be found under it.
    """

    identity: Identity
    segments: int
    found: int
    differences: tuple[Difference, ...]


@dataclass(frozen=True, slots=True)
class Explanation:
    """One prompt: its segments in order, and what else the node holds for the tenant.

    ``pinned_reason``: why nothing may be moved to other positions; empty if it may. ``held_segments``: of the prompt's
    own identity; ``lengths``: (tokens, how many of the newest have them), the most frequent first. ``elsewhere``: the
    nearest identities first; empty if all segments were found. ``remembered_s``: what went longer ago the node may have
    forgotten. ``has_ssd``: has the node an SSD tier?
    """

    identity: Identity
    segments: tuple[ExplainedSegment, ...]
    pinned_reason: str
    held_segments: int
    lengths: tuple[tuple[int, int], ...]
    elsewhere: tuple[Elsewhere, ...]
    remembered_s: float
    has_ssd: bool

    @property
    def is_found(self) -> bool:
        """Is every segment found?"""
        return all(one.is_found for one in self.segments)

    @property
    def tokens(self) -> int:
        """Length of the prompt, as far as it is cut into segments."""
        return sum(one.tokens for one in self.segments)

    @property
    def exact_prefix_tokens(self) -> int:
        """Tokens from the start on that are exact hits without a gap."""
        end = 0
        for one in self.segments:
            if not one.is_found or one.why.match is not Match.EXACT:
                break
            end = one.start + one.tokens
        return end


def explain(session: Session, prompts: Sequence[RoundPrompt], *, asks_others: bool = False) -> tuple[Explanation, ...]:
    """Why every segment of every prompt is found or not, as the node knows it now.

    ``asks_others``: it puts one question to each node that owns some of what is not there, with its usual deadline.
    Raises InvalidIdentityError for a prompt of a namespace that is not registered, LimitError for too many segments,
    UnavailableError when the session is lost.
    """
    queries = [(prompt.namespace, round_query(prompt)) for prompt in prompts]
    return explain_queries(session, queries, asks_others=asks_others)


def explain_queries(
    session: Session, prompts: Sequence[tuple[Namespace, AsQuery]], *, asks_others: bool = False
) -> tuple[Explanation, ...]:
    """``explain``, of prompts whose segments were made in another way."""
    identities = [session.identity_of(namespace) for namespace, _ in prompts]
    queries = [as_query(namespace) for namespace, as_query in prompts]
    reply = session.explain(queries, asks_others=asks_others)
    segments = [_segments(query, found) for query, found in zip(queries, reply.prompts, strict=True)]
    missed = [index for index, found in enumerate(segments) if not all(one.is_found for one in found)]
    elsewhere = dict[int, list[Elsewhere]]()
    for told in reply.namespaces:
        ours = [index for index in missed if prompts[index][0] == told.namespace]
        for index, one in _look_elsewhere(session, told.known, {index: prompts[index] for index in ours}):
            elsewhere.setdefault(index, []).append(one)
    by_namespace = {told.namespace: told for told in reply.namespaces}
    return tuple(
        _assemble(identity, by_namespace[namespace], segments[index], elsewhere.get(index, []), reply)
        for index, (identity, (namespace, _)) in enumerate(zip(identities, prompts, strict=True))
    )


def _assemble(
    identity: Identity,
    told: wire.NamespaceExplanation,
    segments: tuple[ExplainedSegment, ...],
    elsewhere: Sequence[Elsewhere],
    reply: wire.ExplainReply,
) -> Explanation:
    lengths = tuple((one.tokens, one.segments) for one in told.lengths)
    return Explanation(
        identity,
        segments,
        told.pinned_reason,
        told.held_segments,
        lengths,
        tuple(elsewhere),
        reply.remembered_s,
        reply.has_ssd,
    )


def round_query(prompt: RoundPrompt) -> AsQuery:
    """Its segments, wherever its policy lets them come from."""

    def in_namespace(namespace: Namespace) -> wire.PromptQuery:
        if namespace == prompt.namespace:
            return prompt_query(prompt)
        segments = tuple(replace(one, id=segment_id(namespace, one.tokens)) for one in prompt.segments)
        return prompt_query(RoundPrompt(namespace, segments, prompt.policy))

    return in_namespace


def _segments(query: wire.PromptQuery, reply: wire.PromptExplanation) -> tuple[ExplainedSegment, ...]:
    return tuple(
        ExplainedSegment(asked.position, asked.tokens, _explanation(found))
        for asked, found in zip(query.segments, reply.segments, strict=True)
    )


def _look_elsewhere(
    session: Session, known: Sequence[wire.KnownIdentity], prompts: Mapping[int, tuple[Namespace, AsQuery]]
) -> Iterator[tuple[int, Elsewhere]]:
    """For each prompt the other identities, and how much of it is held for each: its segments have other ids there."""
    for one in known if prompts else ():
        identity = identity_from_json(one.identity)
        found = dict.fromkeys(prompts, 0)
        if one.segments:
            there = [as_query(identity.namespace()) for _, as_query in prompts.values()]
            found = dict(zip(prompts, _count_found(session, there), strict=True))
        for index, (namespace, _) in prompts.items():
            what = differences(session.identity_of(namespace), identity)
            yield index, Elsewhere(identity, one.segments, found[index], what)


def _count_found(session: Session, queries: Sequence[wire.PromptQuery]) -> list[int]:
    try:
        replies = session.explain(queries).prompts
    except InvalidInputError:  # its last cache went meanwhile, and with it the namespace
        return [0] * len(queries)
    return [sum(one.reason == Reason.FOUND for one in reply.segments) for reply in replies]


def _explanation(reply: wire.SegmentExplanation) -> SegmentExplanation:
    return SegmentExplanation(
        Reason(reply.reason),
        Match(reply.match),
        _held(reply.found) if reply.HasField("found") else None,
        reply.age_s if reply.HasField("age_s") else None,
        reply.detail,
        reply.is_of_other_context,
        reply.contexts,
        tuple(map(_held, reply.nearest)),
        reply.held_tokens,
        tuple(map(_place, reply.places)),
    )


def _place(reply: wire.PlaceExplanation) -> PlaceExplanation:
    age_s = reply.age_s if reply.HasField("age_s") else None
    return PlaceExplanation(reply.name, reply.state, reply.is_answering, PlaceAnswer(reply.answer), age_s)


def _held(reply: wire.HeldCache) -> HeldCache:
    return HeldCache(
        reply.context,
        reply.position,
        reply.provenance,
        CacheKind(reply.kind),
        tuple(map(Tier, reply.tiers)),
        reply.is_arriving,
        reply.preceding,
        reply.affinity,
    )
