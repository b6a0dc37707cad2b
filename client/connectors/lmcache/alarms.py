"""Alarms: something short to be done at a time, on one thread that does nothing else and so is never late."""

import heapq
import itertools
import logging
import threading
from collections.abc import Callable

from kvservice.client.connectors.breaker import Clock

STOP_TIMEOUT_S = 5.0

log = logging.getLogger("kvservice.lmcache")


class Alarms:
    """Safe from any thread. What rings must not block."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._order = itertools.count()
        self._set: list[tuple[float, int, Callable[[], None]]] = []
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def set(self, at_s: float, ring: Callable[[], None]) -> None:
        """Have ``ring`` called at ``at_s`` on the clock, or not at all once closed."""
        with self._changed:
            if self._is_closed:
                return
            heapq.heappush(self._set, (at_s, next(self._order), ring))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kvservice-alarms", daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        """Forget all alarms and end the thread."""
        with self._changed:
            self._is_closed = True
            self._set.clear()
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(STOP_TIMEOUT_S)

    def _run(self) -> None:
        while (ring := self._next()) is not None:
            try:
                ring()
            except Exception:  # a thread's top: the next alarm must ring
                log.exception("kvservice: an alarm failed in a way nobody expected")

    def _next(self) -> Callable[[], None] | None:
        with self._changed:
            while not self._is_closed:
                wait_s = self._set[0][0] - self._clock() if self._set else None
                if wait_s is not None and wait_s <= 0:
                    return heapq.heappop(self._set)[2]
                self._changed.wait(wait_s)
            return None
