"""How warm a node is: an empty one takes its share of the segments slowly. Pure.

Its weight rises from ``1 / steps`` to 1 over ``over_s``, in steps, so that owners change at a few moments and not with
every lookup. Segments only ever move to it; who owned them before comes second and still has what it is asked for.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ramp:
    """A rise in ``steps`` equal steps over ``over_s`` seconds; 0 seconds: warm at once."""

    over_s: float = 120.0
    steps: int = 16

    def __post_init__(self) -> None:
        assert self.over_s >= 0, self.over_s
        assert self.steps >= 1, self.steps

    def warmth(self, empty_s: float) -> float:
        """Share of its weight that a node has ``empty_s`` seconds after it began empty: above 0, 1 when warm."""
        return min(self.steps, self._step(empty_s) + 1) / self.steps

    def next_step_s(self, empty_s: float) -> float | None:
        """Seconds until the share rises next, None if it is warm."""
        step = self._step(empty_s)
        if step + 1 >= self.steps:
            return None
        return (step + 1) * self.over_s / self.steps - empty_s

    def _step(self, empty_s: float) -> int:
        if empty_s >= self.over_s:
            return self.steps
        return math.floor(max(0.0, empty_s) * self.steps / self.over_s)
