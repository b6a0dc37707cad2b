"""Which groups may be evicted from which tier, and in what order. State only.

A group is in a tier's order if nobody holds it and a record of it lies in the tier.
"""

from dataclasses import dataclass

from kvservice.caches import Cache, group_of
from kvservice.storage.eviction import SECONDS_SAVED_MAX, EvictionOrder, Priority, Worth

SAVED_SHARE_MIN = 0.05
"""A find saves at least this share of the prefill, however slow its tier: the seconds are guesses, bytes are not."""


@dataclass(frozen=True, slots=True)
class LoadRates:
    """What a tier gives back in bytes a second; the time that takes is taken off what a find saves."""

    host: float
    ssd: float


LOAD_RATES = LoadRates(host=10e9, ssd=1e9)
"""What one core copies and one SSD reads, about; only their ratio to the seconds of prefill matters."""


@dataclass(slots=True)
class Hold:
    """A held group: the places it had in the orders, to be taken again unless it was used meanwhile."""

    host: Priority | None
    ssd: Priority | None
    is_used: bool = False


class Orders:
    """One order a tier. ``head``: the master of a group, which stands for it."""

    def __init__(self, host: EvictionOrder[Cache], ssd: EvictionOrder[Cache], rates: LoadRates) -> None:
        self.host = host
        self.ssd = ssd
        self._rates = rates

    def leave(self, head: Cache) -> Hold:
        """The group is held from now on."""
        host = self.host.remove(head) if head in self.host else None
        ssd = self.ssd.remove(head) if head in self.ssd else None
        return Hold(host, ssd)

    def enter(self, head: Cache, hold: Hold) -> None:
        """Nobody holds the group any more: back to its places, or, if it was used, to new ones by its worth now."""
        group = group_of(head)  # no loop over tiers here: a lookup pays for every find
        if group.host_bytes:
            self._enter(self.host, head, None if hold.is_used else hold.host, group.host_bytes, self._rates.host)
        if group.ssd_bytes:
            self._enter(self.ssd, head, None if hold.is_used else hold.ssd, group.ssd_bytes, self._rates.ssd)

    @staticmethod
    def _enter(order: EvictionOrder[Cache], head: Cache, before: Priority | None, size: int, rate: float) -> None:
        if before is None:
            order.add(head, _worth(head, size, rate))
        else:
            order.restore(head, before)

    def renew(self, head: Cache) -> None:
        """A group that nobody holds is worth something else now: new places, as if it was just used."""
        hold = self.leave(head)
        hold.is_used = True
        self.enter(head, hold)

    def update(self, head: Cache) -> None:
        """After a record of a group that nobody holds came to a tier or went; where it stays it keeps its place."""
        group = group_of(head)
        tiers = ((self.host, group.host_bytes, self._rates.host), (self.ssd, group.ssd_bytes, self._rates.ssd))
        for order, size, rate in tiers:
            if size and head not in order:
                order.add(head, _worth(head, size, rate))
            elif not size and head in order:
                order.remove(head)

    def host_yields_to(self, cache: Cache) -> bool:
        """Would the group that goes next from the host go before that of ``cache``, if that came now?"""
        head = cache.head
        size = group_of(head).host_bytes + cache.record_bytes
        return self.host.yields_to(_worth(head, size, self._rates.host))


def _worth(head: Cache, size: int, rate: float) -> Worth:
    group = group_of(head)
    seconds = min(group.tokens * head.family.space.token_s, SECONDS_SAVED_MAX)
    return Worth(max(seconds - size / rate, SAVED_SHARE_MIN * seconds), size, group.uses + 1, head.position)
