"""One request that may reuse segments from other contexts: what was found for it, its role, and what is saved of it.

State and pure questions only; ``rounds.py`` moves it on.
"""

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvservice.client.connectors.vllm.chunks import Chunk
from kvservice.client.connectors.vllm.lookups import RoundTicket
from kvservice.client.connectors.vllm.wishes import ReuseWish
from kvservice.client.plans import PromptPlan
from kvservice.client.reuse.leader import AFFINITY_FULL, Role
from kvservice.client.rounds import PartKind, RoundPrompt

OUTPUT_TOKENS_MIN = 8
"""Shorter outputs cost more to keep than to compute."""
REUSING = frozenset({Role.REUSE, Role.REUSE_MORE})


class Stage(enum.Enum):
    """Where a member stands."""

    GATE = "gate"
    """Its round is not complete."""
    LOOKUP = "lookup"
    FOLLOW = "follow"
    """One member computes what it will reuse."""
    DECIDED = "decided"
    STALE = "stale"
    """Nobody came back for what was found; it is looked up again when somebody does."""


@dataclass(eq=False, slots=True)
class Member:
    """``prompt``: as wished, or under the raised ratio. ``ticket``: what was found, ``place`` its prompt there.

    ``leaders``: whom it waits for, since ``follows_s``. ``is_judged_alone``: its round was decided before, or it has
    none. ``is_loading``: a pass is at it. ``is_refreshed``: what follows its first shared segment is refreshed KV.
    ``saves``: segments to be saved when their rows are whole, in prompt order; ``unsettled``: how many of those that
    were ordered are neither stored nor given up yet.
    """

    request_id: str
    wish: ReuseWish
    stage: Stage
    prompt: RoundPrompt
    ticket: RoundTicket | None = None
    place: int = 0
    role: Role | None = None
    leaders: tuple["Member", ...] = ()
    follows_s: float = 0.0
    seen_s: float = 0.0
    known_tokens: int = 0
    is_judged_alone: bool = False
    is_over: bool = False
    saves: list[Chunk] | None = None
    is_refreshed: bool = False
    is_loading: bool = False
    reused_tokens: int = 0
    unsettled: int = 0

    @property
    def plan(self) -> PromptPlan | None:
        """What was found for its prompt; None if nothing is known."""
        plans = None if self.ticket is None else self.ticket.plans
        return None if plans is None else plans[self.place]

    @property
    def is_reusing(self) -> bool:
        """True if it is to be restored and refreshed."""
        return self.stage is Stage.DECIDED and self.role in REUSING

    @property
    def is_settled(self) -> bool:
        """True for a leader whose caches of the run are stored, or will not be."""
        return not self.unsettled and (self.is_over or (self.saves is not None and not self.saves))

    @property
    def reuse_end(self) -> int:
        """Where the last found segment that may be refreshed ends; 0 if there is none."""
        return max((end for _, end in self.found_spans()), default=0)

    def found_spans(self) -> Iterator[tuple[int, int]]:
        """Start and end of every found segment from the first that may be refreshed on."""
        plan = self.plan
        if plan is None:
            return
        for segment, _ in plan.hits:
            if segment.position >= self.wish.first_shared_token:
                yield segment.position, segment.end

    def missing_rows(self, start: int, end: int) -> int:
        """Rows of ``[start, end)`` that nothing was found for: the pass has to compute them."""
        found = sum(max(min(last, end) - max(first, start), 0) for first, last in self.found_spans())
        return end - start - found

    def plan_saves(self, local: int, promised_end: int) -> None:
        """Note which segments are to be saved from the engine's blocks, rather than by a pass.

        ``local``: tokens that the engine had; where that is refreshed KV, so is all behind. ``promised_end``: what the
        pass brings and stores ends here; 0 if there is none.
        """
        self.reused_tokens = sum(
            max(min(last, promised_end) - max(first, local), 0) for first, last in self.found_spans()
        )
        self.is_refreshed = promised_end > 0 or local > self.wish.first_shared_token
        self.saves = [
            segment_chunk(self.prompt, index, is_refreshed=self.is_refreshed)
            for index in range(self.prompt.first_shared, len(self.prompt.segments))
            if self.prompt.segments[index].position >= promised_end and not self._is_known(index)
        ]

    def _is_known(self, index: int) -> bool:
        """Held under its own key already, or, unless others wait for its caches, found where as much stood before."""
        plan = self.plan
        found = None if plan is None else plan.plan.segments[index]
        if found is None or not found.is_hit:
            return False
        is_own = found.key == self.prompt.key(index, is_refreshed=self.is_refreshed)
        return is_own or (self.role is not Role.LEAD and found.affinity >= AFFINITY_FULL)

    def due(self, whole: int) -> Iterator[Chunk]:
        """Take the segments to be saved whose rows are all there once ``whole`` tokens are."""
        while self.saves and self.saves[0].end <= whole:
            yield self.saves.pop(0)

    def words(self) -> dict[str, Any]:
        """What the answer of a request says of its part: its role, and tokens that came from other contexts' caches."""
        role = "" if self.role is None else self.role.value
        return {"role": role, "reused_tokens": self.reused_tokens, "round": self.wish.asked.round}

    def output_chunk(self, tokens: Sequence[int]) -> Chunk | None:
        """What it has said, to be kept as one cache of a segment; None if it has said hardly anything.

        ``tokens``: of the prompt and of all the output that later prompts hold. Decoded behind its own history, it
        fits no other prompt well: a fallback.
        """
        asked = self.wish.asked
        kind, last = asked.segments[-1]
        first = asked.tokens - asked.opening
        said = len(tokens) - first
        if self.prompt.token_count != asked.tokens or said - asked.opening < OUTPUT_TOKENS_MIN:
            return None
        lengths = (*asked.segments[:-1], (kind, last - asked.opening), (PartKind.SHARED, said))
        prompt = RoundPrompt.from_lengths(self.prompt.namespace, tokens, lengths, policy=self.prompt.policy)
        return segment_chunk(prompt, len(prompt.segments) - 1, is_refreshed=self.is_refreshed)


def segment_chunk(prompt: RoundPrompt, index: int, *, is_refreshed: bool) -> Chunk:
    """A segment as a chunk to be saved whole, by one rank."""
    segment = prompt.segments[index]
    context = prompt.contexts(is_refreshed=is_refreshed)[index]
    key = prompt.key(index, is_refreshed=is_refreshed)
    provenance = prompt.provenance(index, is_refreshed=is_refreshed)
    return Chunk(segment.position, segment.end, (key,), (context.marks,), provenance)
