"""Of what other places offered for a prompt: what is loaded sooner than the engine computes it.

The arithmetic is ``kvservice.peers.routes_loading``; this is how a prompt's segments are put to it.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvservice.caches import PREFILL_TOKEN_S, Space
from kvservice.peers.routes_estimate import Speed
from kvservice.peers.routes_loading import Part, load_chain, load_each
from kvservice.sharing.place import Offer, Question

_HERE = Speed(0.0, 1.0)


class Step(NamedTuple):
    """One segment of a prompt. ``question``: the index of the one that was asked for it, None without one.

    ``is_here``: what is here answers it in the context asked for.
    """

    tokens: int
    question: int | None
    is_here: bool


class Found(NamedTuple):
    """What was offered for a question, by which place, and what that place gives."""

    question: Question
    offer: Offer
    way: str
    speed: Speed

    @property
    def is_exact(self) -> bool:
        """Is it of the context asked for?"""
        meta, asked = self.offer.record.head.meta, self.question.asked
        return meta.position == asked.position and meta.key.context in asked.accepted_contexts

    @property
    def load_bytes(self) -> int:
        """Bytes to move, its master's too."""
        master = self.offer.master
        return self.offer.record.record_bytes + (0 if master is None else master.record_bytes)


async def worth_loading(steps: Sequence[Step], found: Mapping[int, Found], space: Space, slice_: int) -> set[int]:
    """Indexes of the questions of one prompt whose offers load sooner than they compute; all, if nobody said how fast
    prefill is. Lets other calls in after every ``slice_`` segments.
    """
    token_s = 0.0 if space.token_s == PREFILL_TOKEN_S else space.token_s
    chain: list[Part] = []
    rest: list[Part] = []
    chained: list[int | None] = []
    others: list[int | None] = []
    is_chain = True
    for count, step in enumerate(steps):
        is_chain = is_chain and _is_chained(step, found)
        if is_chain:
            chain.append(_part(step, found))
            chained.append(step.question)
        elif step.question in found:
            rest.append(_part(step, found))
            others.append(step.question)
        if count % slice_ == slice_ - 1:
            await asyncio.sleep(0)
    is_loaded = [*load_chain(chain, token_s).is_loaded, *load_each(rest, token_s).is_loaded]
    pairs = zip([*chained, *others], is_loaded, strict=True)
    return {question for question, is_worth in pairs if is_worth and question is not None and question in found}


def _is_chained(step: Step, found: Mapping[int, Found]) -> bool:
    return step.is_here or (step.question is not None and step.question in found and found[step.question].is_exact)


def _part(step: Step, found: Mapping[int, Found]) -> Part:
    if step.question is None or step.question not in found:
        return Part(step.tokens, 0, "", _HERE)
    one = found[step.question]
    return Part(step.tokens, one.load_bytes, one.way, one.speed)
