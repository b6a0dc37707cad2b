"""How long to wait before the next try: twice as long each time, and never at the same moment as everybody else."""

from collections.abc import Callable


class Backoff:
    """Waits between half and all of ``first_s * 2 ** tries``, at most ``max_s``. ``draw``: a number of [0, 1)."""

    def __init__(self, draw: Callable[[], float], *, first_s: float = 0.1, max_s: float = 10.0) -> None:
        assert 0 < first_s <= max_s, (first_s, max_s)
        self._draw = draw
        self._first_s, self._max_s = first_s, max_s
        self._ceiling_s = first_s

    def next_s(self) -> float:
        """Seconds to wait now."""
        ceiling_s, self._ceiling_s = self._ceiling_s, min(self._max_s, self._ceiling_s * 2)
        return ceiling_s * (0.5 + 0.5 * self._draw())

    def reset(self) -> None:
        """It worked: the next wait is a short one again."""
        self._ceiling_s = self._first_s
