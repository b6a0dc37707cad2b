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
from kvservice.model.plan import Match, PlannedSegment

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


@dataclass(frozen=True, slots=True)
class SegmentSave:
    """Segment ``index`` of the member's prompt, to be saved from the engine's blocks. ``is_brought``: in part by a
    pass, so that most of its rows are those of a master.
    """

    chunk: Chunk
    index: int
    is_brought: bool = False


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
    saves: list[SegmentSave] | None = None
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
    def mark(self) -> bytes:
        """How its KV is refreshed, at the ratio that its role asks for: for the names of the engine's blocks."""
        assert self.prompt.policy is not None
        return self.prompt.policy.provenance.encode()

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
        self.saves = list(self._saves_behind(local, promised_end))

    def _saves_behind(self, local: int, promised_end: int) -> Iterator[SegmentSave]:
        for index in range(self.prompt.first_shared, len(self.prompt.segments)):
            segment = self.prompt.segments[index]
            is_behind = segment.position >= promised_end
            # A pass stores what it has made from its first row to its last. Not so where the engine had the first rows,
            # or has to compute the last one, since a prompt's last token is always its own.
            is_brought = not is_behind and (segment.position < local < segment.end or segment.end > promised_end)
            if (is_behind and not self._is_known(index)) or (is_brought and self._is_foreign(index)):
                chunk = segment_chunk(self.prompt, index, is_refreshed=self.is_refreshed)
                yield SegmentSave(chunk, index, is_brought and self._found(index) is not None)

    def _is_known(self, index: int) -> bool:
        """Held under its own key already, or, unless others wait for its caches, found where as much stood before."""
        found = self._found(index)
        is_as_good = found is not None and self.role is not Role.LEAD and found.affinity >= AFFINITY_FULL
        return is_as_good or self._is_own(index)

    def _is_own(self, index: int) -> bool:
        found = self._found(index)
        return found is not None and found.key == self.prompt.key(index, is_refreshed=self.is_refreshed)

    def _is_foreign(self, index: int) -> bool:
        """Not found where it stands here, exact or refreshed: what a pass makes of it is new."""
        found = self._found(index)
        return found is None or found.match is Match.SHIFTED

    def _found(self, index: int) -> PlannedSegment | None:
        plan = self.plan
        found = None if plan is None else plan.plan.segments[index]
        return found if found is not None and found.is_hit else None

    def due(self, whole: int) -> Iterator[SegmentSave]:
        """Take the segments to be saved whose rows are all there once ``whole`` tokens are."""
        while self.saves and self.saves[0].chunk.end <= whole:
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
