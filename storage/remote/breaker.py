"""A breaker for one place or peer: what cannot be reached is asked once, not once for every key.

    CLOSED     --a deadline ran out, or failures_max errors in a row-->  OPEN       every call is refused at once
    OPEN       --the pause is over, somebody asks-->                     HALF_OPEN  that one call goes: the probe
    HALF_OPEN  --any answer-->                                           CLOSED     the pause is short again
    HALF_OPEN  --a failure-->                                            OPEN       the pause doubles, up to its limit

A call that ran into its deadline has cost all that a call may cost, so one is enough. An error that came at once, such
as a connection refused while the other side restarts, cost nothing and is forgiven a few times.
"""

import enum
import math
import threading
from collections.abc import Callable

Clock = Callable[[], float]


class BreakerState(enum.IntEnum):
    """The numbers are in metrics; never change them."""

    CLOSED = 0
    HALF_OPEN = 1
    OPEN = 2


class Breaker:
    """Safe from any thread, does no I/O. ``clock``: seconds that never go back.

    ``slow_s``: an answer that took longer is a failure; for who does better without one that comes late.
    Ask ``allows`` right before a call, after any waiting for a turn: calls that queue behind one that ran into its
    deadline then fail at once. A probe of which nothing is heard for a pause is lost; the next caller probes.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        failures_max: int = 3,
        slow_s: float = math.inf,
        pause_s: float = 1.0,
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
        """Where it stands. It leaves OPEN when somebody asks after the pause, not by itself."""
        return self._state

    @property
    def opened(self) -> int:
        """How often it has opened, for metrics."""
        return self._opened

    def allows(self) -> bool:
        """May a call be made now? While half-open only one may, the probe."""
        if self.state is BreakerState.CLOSED:  # the usual case, without the lock
            return True
        with self._lock:
            if self._state is BreakerState.CLOSED:
                return True
            now_s = self._clock()
            if now_s < self._until_s:
                return False
            self._state = BreakerState.HALF_OPEN
            self._until_s = now_s + self._pause_s
            return True

    def succeeded(self, seconds: float = 0.0) -> None:
        """An answer came after ``seconds``, whatever it says. While open nothing changes: it was asked before the
        trouble."""
        if seconds > self._slow_s:
            self.failed()
            return
        with self._lock:
            if self._state is not BreakerState.OPEN:
                self._state = BreakerState.CLOSED
                self._failures = 0
                self._pause_s = self._pause_s_min

    def failed(self) -> None:
        """No answer, but at once: refused, reset, or an error of the other side."""
        self._count(self._failures_max)

    def timed_out(self) -> None:
        """No answer within the deadline."""
        self._count(1)

    def _count(self, failures_max: int) -> None:
        with self._lock:
            if self._state is BreakerState.OPEN:  # a call from before the trouble does not make the pause longer
                return
            self._failures += 1
            if self._state is BreakerState.HALF_OPEN:
                self._pause_s = min(self._pause_s * 2, self._pause_s_max)
            elif self._failures < failures_max:
                return
            self._state = BreakerState.OPEN
            self._until_s = self._clock() + self._pause_s
            self._opened += 1
