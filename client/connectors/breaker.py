"""A breaker: stop asking a service that fails or is slow, and find out by itself when it is back.

    CLOSED    --failures_max in a row-->  OPEN       every call is refused at once
    OPEN      --pause is over-->          HALF_OPEN  one call is let through: the probe
    HALF_OPEN --quick success-->          CLOSED
    HALF_OPEN --failure-->                OPEN       the pause is twice as long, up to pause_s_max

An answer slower than ``slow_s`` is a failure: a cache that answers late costs more than no cache.
"""

import enum
import threading
from collections.abc import Callable

Clock = Callable[[], float]


class BreakerState(enum.IntEnum):
    """The numbers are in metrics; never change them."""

    CLOSED = 0
    HALF_OPEN = 1
    OPEN = 2


class Breaker:
    """Safe from any thread. ``clock``: seconds that never go back.

    Every call that ``allows`` let through should be reported by ``succeeded`` or ``failed``. A probe of which nothing
    is heard for a pause counts as lost, and the next caller probes.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        failures_max: int = 5,
        slow_s: float = 1.0,
        pause_s: float = 2.0,
        pause_s_max: float = 30.0,
    ) -> None:
        assert failures_max >= 1, failures_max
        assert 0 < pause_s <= pause_s_max, (pause_s, pause_s_max)
        self._clock = clock
        self._failures_max = failures_max
        self._slow_s = slow_s
        self._pause_s_min, self._pause_s_max = pause_s, pause_s_max
        self._lock = threading.Lock()
        self._state = BreakerState.CLOSED
        self._failures = 0
        self._pause_s = pause_s
        self._until_s = 0.0
        self._opened = 0

    @property
    def state(self) -> BreakerState:
        """Where it stands. An open one turns half-open when somebody asks after the pause, not by itself."""
        return self._state

    @property
    def opened(self) -> int:
        """How often it has opened, for metrics."""
        return self._opened

    def allows(self) -> bool:
        """True if a call may be made now. Costs no I/O; while half-open only the probe is let through."""
        if self.state is BreakerState.CLOSED:  # the usual case, without the lock
            return True
        with self._lock:
            if self._is_closed():
                return True
            if self._clock() < self._until_s:
                return False
            self._state = BreakerState.HALF_OPEN
            self._until_s = self._clock() + self._pause_s  # a probe nobody reports is lost by then
            return True

    def succeeded(self, seconds: float) -> None:
        """A call was answered after ``seconds``. While open nothing changes: it was asked before the trouble."""
        if seconds > self._slow_s:
            self.failed()
            return
        with self._lock:
            if self._state is not BreakerState.OPEN:
                self._state = BreakerState.CLOSED
                self._failures = 0
                self._pause_s = self._pause_s_min

    def failed(self) -> None:
        """A call failed, or ran into its deadline. Late reports while open do not make the pause longer."""
        with self._lock:
            if self._state is BreakerState.OPEN:
                return
            self._failures += 1
            if self._state is BreakerState.HALF_OPEN:
                self._pause_s = min(self._pause_s * 2, self._pause_s_max)
                self._open()
            elif self._failures >= self._failures_max:
                self._open()

    def _is_closed(self) -> bool:
        return self._state is BreakerState.CLOSED

    def _open(self) -> None:
        self._state = BreakerState.OPEN
        self._until_s = self._clock() + self._pause_s
        self._opened += 1
