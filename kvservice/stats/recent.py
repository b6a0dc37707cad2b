"""What happened a second of late: counters whose past counts half after every half-life. State only, of one thread.

Over the whole life of a node a mean would still tell of its first day after a month.
"""

from collections.abc import Callable, Sequence


class Recent:
    """``read`` gives counters, which only rise. ``clock``: monotonic seconds."""

    def __init__(self, read: Callable[[], Sequence[float]], clock: Callable[[], float], half_life_s: float) -> None:
        self._read, self._clock, self._half_life_s = read, clock, half_life_s
        self._before, self._before_s = tuple(read()), clock()
        self._sums, self._seconds = [0.0] * len(self._before), 0.0

    def note(self) -> None:
        """Take in what was counted since the last call; the more often, the smoother."""
        now_s, now = self._clock(), tuple(self._read())
        passed_s = now_s - self._before_s
        if passed_s <= 0:
            self._before_s = now_s  # of a clock that went back nothing is known but that it goes on
            return
        kept = 0.5 ** (passed_s / self._half_life_s)
        self._sums = [
            kept * total + one - before for total, one, before in zip(self._sums, now, self._before, strict=True)
        ]
        self._seconds = kept * self._seconds + passed_s
        self._before, self._before_s = now, now_s

    def sums(self) -> tuple[float, ...]:
        """What was counted, weighted."""
        self.note()
        return tuple(self._sums)

    def rates(self) -> tuple[float, ...]:
        """The same a second; 0 before any time has passed."""
        self.note()
        return tuple(one / self._seconds if self._seconds else 0.0 for one in self._sums)
