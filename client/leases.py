"""Leases that this client holds, and the thread that renews them.

``LeaseBook`` is the state: it does no I/O and takes the time as an argument. ``LeaseKeeper`` is its thread.
Deadlines are this host's monotonic clock, counted from *before* the node was asked: a lease never looks held here
after the node has let it go.
"""

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvservice.model.errors import KVServiceError, StaleEpochError, UnknownSessionError
from kvservice.model.lease import LeaseId

RENEWALS_PER_TTL = 3
"""Two renewals may fail before a lease runs out."""
RETRIES_PER_TTL = 12
STOP_TIMEOUT_S = 10.0

Clock = Callable[[], float]
Renew = Callable[[Sequence[LeaseId], float], Sequence[bool]]
"""(lease ids, deadline of the call in seconds) -> per lease whether it was renewed."""


@dataclass(slots=True)
class _Held:
    ttl_s: float
    due_s: float
    deadline_s: float


class LeaseBook:
    """Which leases are held until when, and when each is to be renewed. Not thread-safe."""

    def __init__(self) -> None:
        self._held: dict[LeaseId, _Held] = {}

    def __len__(self) -> int:
        return len(self._held)

    def add(self, lease: LeaseId, ttl_s: float, asked_s: float) -> None:
        """Note a lease granted for ``ttl_s`` by a call that began at ``asked_s``."""
        self._held[lease] = _Held(ttl_s, asked_s + ttl_s / RENEWALS_PER_TTL, asked_s + ttl_s)

    def drop(self, lease: LeaseId) -> bool:
        """Forget a lease; True if it was known."""
        return self._held.pop(lease, None) is not None

    def clear(self) -> None:
        """Forget every lease: the session that held them is gone."""
        self._held.clear()

    def is_held(self, lease: LeaseId, now_s: float) -> bool:
        """True if the lease is known and its deadline lies ahead."""
        held = self._held.get(lease)
        return held is not None and now_s < held.deadline_s

    def deadline_s(self, lease: LeaseId) -> float | None:
        """When the lease runs out; None if it is not known."""
        held = self._held.get(lease)
        return None if held is None else held.deadline_s

    def next_due_s(self) -> float | None:
        """When the next renewal is due; None if nothing is held."""
        return min((held.due_s for held in self._held.values()), default=None)

    def due(self, now_s: float) -> tuple[tuple[LeaseId, ...], float]:
        """Leases to renew now, and how long the call may take: until the first of them runs out.

        Leases that have run out are dropped, never renewed: their records may be gone.
        """
        for lease in [lease for lease, held in self._held.items() if held.deadline_s <= now_s]:
            del self._held[lease]
        due = [lease for lease, held in self._held.items() if held.due_s <= now_s]
        return tuple(due), min((self._held[lease].deadline_s - now_s for lease in due), default=0.0)

    def renewed(self, leases: Sequence[LeaseId], are_renewed: Sequence[bool], asked_s: float) -> None:
        """Note the answer to a renewal; refused leases are dropped, those released meanwhile stay so."""
        for lease, is_renewed in zip(leases, are_renewed, strict=True):
            held = self._held.get(lease)
            if held is not None and is_renewed:
                self.add(lease, held.ttl_s, asked_s)
            elif held is not None:
                del self._held[lease]

    def failed(self, leases: Sequence[LeaseId], now_s: float) -> None:
        """Note that a renewal did not get through: try again soon."""
        for lease in leases:
            held = self._held.get(lease)
            if held is not None:
                held.due_s = now_s + held.ttl_s / RETRIES_PER_TTL


class LeaseKeeper:
    """Renews leases on a thread of its own, which runs only while something is held. Safe from any thread."""

    def __init__(self, renew: Renew, clock: Clock, *, is_threaded: bool = True) -> None:
        """Without a thread the caller runs ``renew_due``: for tests and simulation."""
        self._is_threaded = is_threaded
        self._renew = renew
        self._clock = clock
        self._book = LeaseBook()
        self._changed = threading.Condition()
        self._is_closed = False
        self._wakes_s = math.inf
        self._thread: threading.Thread | None = None

    def __len__(self) -> int:
        with self._changed:
            return len(self._book)

    def add(self, lease: LeaseId, ttl_s: float, asked_s: float) -> None:
        """Keep a lease alive until ``drop``."""
        with self._changed:
            self._book.add(lease, ttl_s, asked_s)
            is_running = self._thread is not None and self._thread.is_alive()
            if self._is_threaded and not is_running and not self._is_closed:  # a thread that died must not be the last
                self._thread = threading.Thread(target=self._run, name="kvservice-leases", daemon=True)
                self._thread.start()
            if asked_s + ttl_s / RENEWALS_PER_TTL < self._wakes_s:  # mostly it wakes early enough: no switch of threads
                self._changed.notify()

    def drop(self, lease: LeaseId) -> bool:
        """Stop keeping a lease; True if it was kept."""
        with self._changed:
            return self._book.drop(lease)

    def clear(self) -> None:
        """Forget every lease."""
        with self._changed:
            self._book.clear()

    def is_held(self, lease: LeaseId) -> bool:
        """True if the lease's records are certain to be readable now."""
        with self._changed:
            return self._book.is_held(lease, self._clock())

    def deadline_s(self, lease: LeaseId) -> float | None:
        """When the lease runs out, on this client's clock; None if it is not kept."""
        with self._changed:
            return self._book.deadline_s(lease)

    def close(self) -> None:
        """Forget every lease and end the thread."""
        with self._changed:
            self._is_closed = True
            self._book.clear()
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(STOP_TIMEOUT_S)

    def renew_due(self) -> None:
        """One pass: renew what is due."""
        with self._changed:
            asked_s = self._clock()
            leases, deadline_s = self._book.due(asked_s)
        if not leases:
            return
        try:
            are_renewed = self._renew(leases, deadline_s)
        except (UnknownSessionError, StaleEpochError):
            are_renewed = [False] * len(leases)
        except KVServiceError:  # the node may be back before the leases run out
            with self._changed:
                self._book.failed(leases, self._clock())
            return
        with self._changed:
            self._book.renewed(leases, are_renewed, asked_s)

    def _run(self) -> None:
        while self._wait_until_due():
            self.renew_due()

    def _wait_until_due(self) -> bool:
        """Wait for the next renewal's time; False once the keeper is closed."""
        with self._changed:
            while not self._is_closed:
                due_s = self._book.next_due_s()
                wait_s = None if due_s is None else due_s - self._clock()
                if wait_s is not None and wait_s <= 0:
                    return True
                self._wakes_s = math.inf if due_s is None else due_s
                self._changed.wait(wait_s)
            return False
