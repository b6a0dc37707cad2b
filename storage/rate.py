"""A bound on bytes a second for work in the background. State only: it says how long to wait, the caller waits."""

from collections.abc import Callable


class ByteRate:
    """At most ``bytes_per_s`` on average from any moment on, one piece ahead; idle time is not saved up for a burst.

    ``clock``: monotonic seconds. One thread owns it.
    """

    def __init__(self, bytes_per_s: float, *, clock: Callable[[], float]) -> None:
        assert bytes_per_s > 0, "no bound is no ByteRate"
        self.bytes_per_s = bytes_per_s
        self._clock = clock
        self._free_at_s = clock()

    def take(self, count: int) -> float:
        """Seconds to wait before moving ``count`` bytes: until what was taken before has had its time."""
        now_s = self._clock()
        start_s = max(self._free_at_s, now_s)
        self._free_at_s = start_s + count / self.bytes_per_s
        return start_s - now_s
