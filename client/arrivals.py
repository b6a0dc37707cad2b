"""What of the found records has arrived in the arena: those that were on SSD come while a restore already runs."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from kvservice.client.transport import PendingCall
from kvservice.model.errors import KVServiceError, UnavailableError, error_from_code
from kvservice.model.lease import Lease
from kvservice.model.plan import Location
from kvservice.wire.v1 import cache_pb2 as wire

ARRIVE_TIMEOUT_S = 60.0
"""One layer may take this long; a disk gives thousands in that time."""


class AwaitsArrivals(Protocol):
    """A session, as far as this needs one."""

    def begin_await(self, lease: Lease, step: int) -> PendingCall:
        """The same as ``await_arrivals``, sent now and read later."""

    def await_arrivals(self, lease: Lease, step: int) -> wire.AwaitReply:
        """The loads of the lease that changed after ``step``, once there is one; and the step to ask with next."""


class Arrivals:
    """The records of one lease. Any thread may wait; they share what one of them hears.

    Records that were in memory when they were found are there: nothing is asked for them.
    """

    def __init__(self, session: AwaitsArrivals, lease: Lease, clock: Callable[[], float] = time.monotonic) -> None:
        self._session = session
        self._lease = lease
        self._clock = clock
        self._lock = threading.Lock()
        self._step = 0
        self._asked: PendingCall | None = None
        self._layers: dict[int, int] = {}
        self._errors: dict[int, KVServiceError] = {}

    def ask_ahead(self) -> None:
        """Send the next question, and do not wait: who waits then reads its answer. Twice is no error."""
        with self._lock:
            if self._asked is None:
                with suppress(KVServiceError):  # who waits asks again, and is told why
                    self._asked = self._session.begin_await(self._lease, self._step)

    def give_up(self) -> None:
        """Let go of a question that was sent ahead, if nobody waited for its answer. Who waits later asks again."""
        with self._lock:
            asked, self._asked = self._asked, None
        if asked is not None:
            asked.give_up()

    def wait_for(self, place: Location, layers: int, timeout_s: float = ARRIVE_TIMEOUT_S) -> int:
        """Return once the first ``layers`` layers at ``place`` are there and verified; how many are.

        Raises CorruptError or DiskError if they never will be, UnavailableError when they are not in time, and what
        asking the node raises.
        """
        if not place.is_arriving:
            return layers
        offset, deadline_s = place.extent.offset, self._clock() + timeout_s
        with self._lock:
            while self._layers.get(offset, 0) < layers:
                if offset in self._errors:
                    raise self._errors[offset]
                if self._clock() >= deadline_s:
                    where = place.tier.name
                    raise UnavailableError(
                        f"layer {layers - 1} of a record on {where} did not arrive within {timeout_s:g} s; recompute it"
                    )
                self._ask()
            return self._layers[offset]

    def _ask(self) -> None:
        asked, self._asked = self._asked, None
        reply = self._session.await_arrivals(self._lease, self._step) if asked is None else asked.reply()
        self._step = reply.step
        for arrival in reply.arrivals:
            self._layers[arrival.offset] = arrival.layers
            if arrival.HasField("error"):
                self._errors[arrival.offset] = error_from_code(arrival.error.code, arrival.error.message)
