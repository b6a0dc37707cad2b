"""Leases: which caches may not move or go because a lookup promised them. State only; the clock is a parameter."""

import heapq
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvservice.caches import Cache
from kvservice.catalog import Catalog
from kvservice.limits import NodeLimits
from kvservice.loads import Feed
from kvservice.model.errors import InvalidInputError, LimitError, NotOwnedError, StaleEpochError
from kvservice.model.lease import BootEpoch, LeaseId
from kvservice.sessions import Session
from kvservice.stats.counters import Counters

# lease id := epoch_tag:u24 number:u40     so that an id from before a restart is known as such
NUMBER_BITS = 40
EPOCH_TAG_MASK = (1 << 24) - 1
SPARE_DEADLINES_MAX = 1024


@dataclass(slots=True)
class Grant:
    """A lease as the node keeps it: one hold for each entry of ``caches``. ``deadline_s`` is on the node's clock.

    ``loads``: those of its records that were on SSD when they were found.
    """

    id: LeaseId
    session: Session
    ttl_s: float
    deadline_s: float
    caches: list[Cache] = field(default_factory=list)
    loads: Feed = field(default_factory=Feed)


class Leases:
    """The live leases by id. Every one ends exactly once: released, expired, or with its session."""

    def __init__(self, catalog: Catalog, boot_epoch: BootEpoch, limits: NodeLimits, counters: Counters) -> None:
        self.live: dict[LeaseId, Grant] = {}
        self._catalog = catalog
        self._limits = limits
        self._counters = counters
        self._epoch_tag = boot_epoch & EPOCH_TAG_MASK
        self._next_number = 1
        self._deadlines: list[tuple[float, LeaseId]] = []  # a live lease has one entry, at or before its deadline

    def ttl_s(self, asked_s: float) -> float:
        """The time to live that is granted for what was asked; 0 asks for the default."""
        if not math.isfinite(asked_s) or asked_s < 0:
            raise InvalidInputError(f"a lease's time to live must be a number of seconds, it is {asked_s}")
        return min(asked_s or self._limits.lease_ttl_s, self._limits.lease_ttl_s_max)

    def grant(self, session: Session, now_s: float, asked_s: float) -> Grant:
        """A new lease without caches, for ``asked_s`` from now or as long as is allowed."""
        ttl_s = self.ttl_s(asked_s)
        if len(session.leases) >= self._limits.leases_per_session_max:
            raise LimitError(f"a session may have {self._limits.leases_per_session_max} leases; release some")
        id_ = LeaseId(self._epoch_tag << NUMBER_BITS | self._next_number)
        self._next_number += 1
        grant = self.live[id_] = Grant(id_, session, ttl_s, now_s + ttl_s)
        session.leases.add(id_)
        heapq.heappush(self._deadlines, (grant.deadline_s, id_))
        return grant

    def add(self, grant: Grant, cache: Cache) -> None:
        """Hold one more cache under a live lease, and count the use."""
        self._catalog.hold(cache)
        self._catalog.use(cache)
        grant.caches.append(cache)

    def take_back(self, grant: Grant) -> None:
        """Undo the last ``add``, but for the use: the cache cannot be read."""
        self._catalog.unhold(grant.caches.pop())

    def renew(self, session: Session, ids: Iterable[int], deadline_s: float) -> list[bool]:
        """Move deadlines, never nearer. False for what expired or was released."""
        grants = [self._own(session, id_) for id_ in ids]
        for grant in grants:
            if grant is not None:
                grant.deadline_s = max(grant.deadline_s, deadline_s)
        return [grant is not None for grant in grants]

    def release(self, session: Session, ids: Iterable[int]) -> int:
        """End leases; how many were live. Releasing twice is no error."""
        grants = {grant.id: grant for id_ in ids if (grant := self._own(session, id_)) is not None}
        for grant in grants.values():
            self.end(grant)
        return len(grants)

    def find(self, session: Session, id_: int) -> Grant | None:
        """A session's own lease; None if it expired or was released."""
        return self._own(session, id_)

    def _own(self, session: Session, id_: int) -> Grant | None:
        if id_ >> NUMBER_BITS != self._epoch_tag:
            raise StaleEpochError(f"lease {id_} is from before the service's last start; look up again")
        grant = self.live.get(LeaseId(id_))
        if grant is not None and grant.session.principal.name != session.principal.name:
            return None  # as if it had never been: another caller's leases are nobody's business
        if grant is not None and grant.session is not session:
            raise NotOwnedError(f"lease {id_} belongs to another session")
        return grant

    def end(self, grant: Grant) -> None:
        """Give back all that a live lease holds."""
        del self.live[grant.id]
        grant.session.leases.discard(grant.id)
        for cache in reversed(grant.caches):  # the last of a prompt first: of equal ones the suffix is evicted first
            self._catalog.unhold(cache)
        grant.caches.clear()
        grant.loads.close()
        if len(self._deadlines) > 2 * len(self.live) + SPARE_DEADLINES_MAX:
            self._deadlines = [(one.deadline_s, one.id) for one in self.live.values()]
            heapq.heapify(self._deadlines)

    def end_if_live(self, grant: Grant) -> None:
        """End it, unless its time or its session ended it already."""
        if grant.id in self.live:
            self.end(grant)

    def end_all(self, session: Session) -> None:
        """End every lease of a session."""
        for id_ in list(session.leases):
            self.end(self.live[id_])

    def expire(self, now_s: float) -> None:
        """End the leases whose deadline has come."""
        while self._deadlines and self._deadlines[0][0] <= now_s:
            _, id_ = heapq.heappop(self._deadlines)
            grant = self.live.get(id_)
            if grant is None:
                continue
            if grant.deadline_s > now_s:
                heapq.heappush(self._deadlines, (grant.deadline_s, id_))
                continue
            self._counters.leases_expired += 1
            self.end(grant)
