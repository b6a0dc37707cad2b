"""Agents' outputs in the one order that all prompts of a round hold them in. Pure.

What a segment is reused from matters more than which rows are refreshed: from a prompt with the same segments in the
same order a 2 % refresh is nearly lossless.
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Output:
    """What one agent said. ``turn``: in which round, so that older outputs come first and stay where they were."""

    agent: str
    text: str
    turn: int = 0


def canonical_order(outputs: Iterable[Output], *, without: str | None = None) -> list[Output]:
    """By turn, then agent, then text: the same for every reader, in whatever order they arrived.

    ``without``: leave this agent's own outputs out. What all readers hold before the gap still agrees.
    """
    kept = (one for one in outputs if one.agent != without)
    return sorted(kept, key=lambda one: (one.turn, one.agent, one.text))
