"""What one pass does: which segments it restores to which rows, what it refreshes, and what it stores.

Loads numba through the kernels: imported when the first pass begins, after the engine's model was built.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from kvservice.client.connectors.vllm.metadata import RefreshOrder
from kvservice.client.connectors.vllm.paged import EnginePaged
from kvservice.client.paged import PagedMemory, Slots
from kvservice.client.plans import Plans, PromptPlan, look_up
from kvservice.client.restore import Restore, RestoreWork, plan_restore
from kvservice.client.reuse.collective import Member
from kvservice.client.reuse.kinds import ByKind
from kvservice.client.reuse.refresh import Prompt
from kvservice.client.reuse.rows import PromptRows, RowClass, Span, classify
from kvservice.client.session import Session
from kvservice.model.errors import KVServiceError, UnavailableError
from kvservice.model.plan import Match


class PassLateError(KVServiceError):
    """The bytes of a pass did not come from SSD in time."""

    code = "PASS_LATE"


KNOWN_PART_MAX: Final = 0.4
"""A segment with a larger part of its rows refreshed may have to be stored whole: all of them are needed then."""


@dataclass(frozen=True, eq=False, slots=True)
class PromptWork:
    """One prompt of a pass. ``slots``: the engine's, int64 ``[end]``, of all its rows up to where the pass ends.
    ``selector``: which of them are computed again.
    """

    order: RefreshOrder
    slots: Slots
    selector: ByKind

    @classmethod
    def of(cls, order: RefreshOrder, paged: EnginePaged) -> "PromptWork":
        """The rows of an order."""
        slots = paged.place(order.block_ids, 0, order.load.end).slots.numpy()
        return cls(order, slots, ByKind.of(order.prompt, end=order.load.end))

    @property
    def end(self) -> int:
        """The first position behind the pass."""
        return self.order.load.end

    @property
    def first_row(self) -> int:
        """From where on segments are restored: what lies before is the engine's own, or exact."""
        prompt = self.order.prompt
        return max(self.order.load.start, prompt.segments[prompt.first_shared].position)

    @property
    def restore_slots(self) -> Slots:
        """Int64 ``[prompt tokens]``: where segments go; -1 for rows that the restore leaves alone."""
        found = np.full(self.order.prompt.token_count, -1, np.int64)
        end = min(self.end, len(found))
        found[self.first_row : end] = self.slots[self.first_row : end]
        return found

    def member(self, plan: PromptPlan, exact_end: int) -> Member:
        """The prompt as the refresh sees it. ``exact_end``: rows from the load's start up to here are in place."""
        tokens = torch.tensor(self.order.prompt.tokens[: self.end], dtype=torch.int64)
        rows = self._rows(plan, exact_end)
        return Member(Prompt(tokens, torch.from_numpy(self.slots), rows), self.selector)

    def _rows(self, plan: PromptPlan, exact_end: int) -> PromptRows:
        load = self.order.load
        spans = [Span(load.start, exact_end - load.start, RowClass.EXACT)] if exact_end > load.start else []
        for found in plan.spans():
            start, end = max(found.start, self.first_row), min(found.end, self.end)
            if start < end:
                row_class = RowClass.CANDIDATE if found.match is Match.SHIFTED else RowClass.EXACT
                spans.append(Span(start, end - start, row_class))
        return classify(self.end, spans, load.start)

    def makes(self, plan: PromptPlan, picked: Tensor) -> list["Made"]:
        """The segments that the pass has made: whole, and not merely restored as they were. ``picked``: positions."""
        prompt = self.order.prompt
        found = []
        for index in range(prompt.first_shared, len(prompt.segments)):
            segment, planned = prompt.segments[index], plan.plan.segments[index]
            is_whole = segment.position >= self.order.load.start and segment.end <= self.end
            if not is_whole or planned.match in (Match.EXACT, Match.REFRESHED):
                continue
            inside = picked[(picked >= segment.position) & (picked < segment.end)] - segment.position
            is_small = len(inside) <= KNOWN_PART_MAX * len(segment.tokens)
            is_known = planned.match is Match.SHIFTED and planned.master is None and is_small
            found.append(Made(index, inside.numpy() if is_known else None))
        return found

    def snapshot_slots(self, makes: Sequence["Made"]) -> Slots:
        """Int64 ``[prompt tokens]``: the rows of these segments that a store needs; -1 elsewhere."""
        found = np.full(self.order.prompt.token_count, -1, np.int64)
        for made in makes:
            segment = self.order.prompt.segments[made.index]
            rows = np.arange(len(segment.tokens)) if made.rows is None else made.rows
            found[segment.position + rows] = self.slots[segment.position + rows]
        return found


@dataclass(frozen=True, eq=False, slots=True)
class Made:
    """Segment ``index`` of a prompt. ``rows``: those that differ from the dense cache it was restored from, int64,
    rising; None if all are needed to tell.
    """

    index: int
    rows: Slots | None


@dataclass(frozen=True, eq=False, slots=True)
class PassWork:
    """All prompts of a pass, what was found for them under one lease, and the restore that brings it."""

    session: Session
    prompts: tuple[PromptWork, ...]
    plans: Plans
    restore: Restore
    restored: RestoreWork

    @classmethod
    def plan(
        cls, session: Session, memory: PagedMemory, paged: EnginePaged, orders: Sequence[RefreshOrder]
    ) -> "PassWork":
        """Look all prompts up in one call, and check where everything goes. Nothing is written yet.

        Raises what ``look_up`` and ``plan_restore`` raise; no lease is left then.
        """
        prompts = tuple(PromptWork.of(order, paged) for order in orders)
        plans = look_up(session, [order.prompt for order in orders])
        try:
            restored = plan_restore(session, plans, [one.restore_slots for one in prompts], memory)
        except UnavailableError as error:  # a disk that is slow says nothing of the session, which others use
            plans.close()
            raise PassLateError(f"what was found did not come in time: {error}") from error
        except BaseException:
            plans.close()
            raise
        return cls(session, prompts, plans, Restore(restored, len(paged.caches)), restored)

    def bring(self) -> None:
        """Write every found segment to its rows, layer by layer, checksums verified. Never raises: waiting does."""
        self.restore.run(self.restored, self.plans, verify=True, on_progress=None)

    def members(self, exact_ends: Sequence[int]) -> list[Member]:
        """One a prompt."""
        together = zip(self.prompts, self.plans, exact_ends, strict=True)
        return [one.member(plan, exact_end) for one, plan, exact_end in together]

    def makes(self, picked: Sequence[Tensor]) -> list[list[Made]]:
        """Per prompt the segments that the pass has made and that are to be stored."""
        together = zip(self.prompts, self.plans, picked, strict=True)
        return [one.makes(plan, rows) for one, plan, rows in together]


def row_counts(members: Sequence[Member], picked: Sequence[Tensor]) -> tuple[int, int, int]:
    """Rows restored and left, restored and computed again, and computed since nothing was there; over all prompts."""
    counts = [member.prompt.rows.counts() for member in members]
    candidates = sum(one[RowClass.CANDIDATE] for one in counts)
    refreshed = sum(len(rows) for rows in picked)
    exact = sum(one[RowClass.EXACT] for one in counts)
    return candidates - refreshed + exact, refreshed, sum(one[RowClass.MUST] for one in counts)
