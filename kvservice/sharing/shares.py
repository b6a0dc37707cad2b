"""Transfers that run together share one link: for how long each of them had it, as if their shares were equal.

With n under way a second counts for 1/n of one. So a transfer takes what it would take alone, whoever came meanwhile.
State only.
"""

from collections.abc import Callable


class Shares:
    """Counts those that run. ``clock``: monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._running = 0
        self._each_s = self._at_s = 0.0

    def begin(self) -> float:
        """One more runs; what ``now`` says."""
        each_s = self.now()
        self._running += 1
        return each_s

    def end(self) -> None:
        """One less runs."""
        self.now()
        self._running -= 1

    def now(self) -> float:
        """Seconds that one had the link which ran all the time."""
        now_s = self._clock()
        self._each_s += (now_s - self._at_s) / self._running if self._running else 0.0
        self._at_s = now_s
        return self._each_s
