"""Storing segments that passes have brought in part only: what differs from the master is found by comparing all rows.

The engine had their first rows, or has computed their last one, so that nobody knows which rows differ. There is at
most one such segment at either end of what a pass brings. Loads numba: see ``host_blocks``.
"""

from collections.abc import Sequence

import numpy as np

from kvservice.client.connectors.vllm.metrics import Counts
from kvservice.client.connectors.vllm.pass_store import count_stored
from kvservice.client.connectors.vllm.snapshot import StagedRows
from kvservice.client.connectors.vllm.staging import Draft
from kvservice.client.paged import Slots
from kvservice.client.plans import look_up
from kvservice.client.rounds import RoundPrompt
from kvservice.client.session import Session
from kvservice.client.store import StoreRequest, store_round
from kvservice.model.identity import Identity


def store_segments(session: Session, identity: Identity, drafts: Sequence[Draft], counts: Counts) -> None:
    """Store every draft as a mirror of what is found for it now, or whole where nothing near is.

    Raises what ``look_up`` and ``store_round`` raise; those before are stored then.
    """
    prompts = [draft.order.prompt for draft in drafts]
    asked = [prompt for prompt in prompts if prompt is not None]
    assert len(asked) == len(drafts), "a draft of no segment"
    with look_up(session, asked) as plans:
        for draft, plan in zip(drafts, plans, strict=True):
            index = draft.order.index
            request = StoreRequest(
                plan.prompt, _slots(plan.prompt, index), base=plan, is_refreshed=True, segments=[index]
            )
            (result,) = store_round(session, identity, StagedRows(identity, draft.planes), [request], None)
            for stored in result.segments:
                count_stored(counts, stored, draft.order.chunk.tokens * identity.geometry.token_bytes)


def _slots(prompt: RoundPrompt, index: int) -> Slots:
    """Int64 ``[prompt tokens]``: the segment's rows are 0, 1, ...; -1 elsewhere."""
    found, segment = np.full(prompt.token_count, -1, np.int64), prompt.segments[index]
    found[segment.position : segment.end] = np.arange(len(segment.tokens))
    return found
