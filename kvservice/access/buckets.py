"""Token buckets: how often a principal may call, and how many bytes it may send. State only; the clock is a parameter.

A call is admitted while neither bucket is empty and pays afterwards, when its size is known: so nothing of a message is
taken in for a caller that is in debt, and a message larger than the bucket still gets through, once.
"""

from collections.abc import Callable
from dataclasses import dataclass

from kvservice.access.principal import Principal
from kvservice.model.errors import LimitError, RateError

BURST_S = 2.0
"""A caller that was quiet may spend so many seconds' worth at once."""
CALLERS_MAX = 4096
"""Principals whose buckets are kept; they come from the access file, which has fewer."""


class Bucket:
    """Fills with ``rate`` a second up to BURST_S of it; 0: never empty. One token at least, so that a rate below one
    a second lets something through."""

    def __init__(self, rate: float, clock: Callable[[], float]) -> None:
        self.rate = rate
        self._clock = clock
        self._left = self._most
        self._filled_at_s = clock()

    @property
    def _most(self) -> float:
        return max(self.rate * BURST_S, 1.0)

    def wait_s(self) -> float:
        """Seconds until something may be taken; 0: now."""
        if not self.rate:
            return 0.0
        now_s = self._clock()
        self._left = min(self._left + self.rate * max(now_s - self._filled_at_s, 0.0), self._most)
        self._filled_at_s = now_s
        return 0.0 if self._left > 0 else (1e-3 - self._left) / self.rate

    def take(self, amount: float) -> None:
        """Pay; the bucket may go into debt."""
        if self.rate:
            self._left -= amount


@dataclass(slots=True)
class _Caller:
    calls: Bucket
    sent: Bucket
    sessions: int = 0


class Buckets:
    """The buckets and open sessions of every principal. One thread owns it. ``clock``: monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.refused = 0
        self._clock = clock
        self._callers: dict[str, _Caller] = {}

    def admit(self, principal: Principal) -> None:
        """Raise RateError if the principal has to wait before its next call; otherwise the call counts."""
        caller = self._caller(principal)
        wait_s = max(caller.calls.wait_s(), caller.sent.wait_s())
        if wait_s > 0:
            self.refused += 1
            limits = principal.limits
            raise RateError(
                f"{principal.name} may make {limits.calls_per_s:g} calls and send {limits.bytes_per_s} bytes a second "
                f"(0: no limit); ask again in {wait_s:.3f} s"
            )
        caller.calls.take(1)

    def charge(self, principal: Principal, sent_bytes: int) -> None:
        """So many bytes came from it, or are about to."""
        self._caller(principal).sent.take(sent_bytes)

    def open_session(self, principal: Principal) -> None:
        """One session more. Raises LimitError if it has as many as it may; ``close_session`` gives it back."""
        caller, limit = self._caller(principal), principal.limits.sessions_max
        if limit and caller.sessions >= limit:
            raise LimitError(f"{principal.name} has {caller.sessions} sessions open, the limit is {limit}; close some")
        caller.sessions += 1

    def close_session(self, principal: Principal) -> None:
        """One session less."""
        self._caller(principal).sessions -= 1

    def sessions(self, principal: Principal) -> int:
        """How many it has open."""
        return self._caller(principal).sessions

    def _caller(self, principal: Principal) -> _Caller:
        limits, caller = principal.limits, self._callers.get(principal.name)
        if caller is None:
            caller = self._callers[principal.name] = _Caller(self._bucket(0), self._bucket(0))
            self._forget_idle(principal.name)
        if caller.calls.rate != limits.calls_per_s:  # new, or the access file has changed
            caller.calls = self._bucket(limits.calls_per_s)
        if caller.sent.rate != limits.bytes_per_s:
            caller.sent = self._bucket(limits.bytes_per_s)
        return caller

    def _bucket(self, rate: float) -> Bucket:
        return Bucket(rate, self._clock)

    def _forget_idle(self, but: str) -> None:
        """Names that an access file no longer has may pile up over years of changes."""
        if len(self._callers) > CALLERS_MAX:
            self._callers = {name: one for name, one in self._callers.items() if one.sessions or name == but}
