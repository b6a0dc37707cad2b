"""Which groups may be evicted from which tier, and in what order. State only.

A group that nobody holds is in a tier's order exactly if a record of it lies in the tier.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from kvservice.caches import Cache, group_of
from kvservice.storage.eviction import SECONDS_SAVED_MAX, EvictionOrder, Worth

SAVED_SHARE_MIN = 0.05
"""A find saves at least this share of the prefill, however slow its tier: the seconds are guesses, bytes are not."""


@dataclass(frozen=True, slots=True)
class LoadRates:
    """What a tier gives back in bytes a second; the time that takes is taken off what a find saves."""

    host: float
    ssd: float


LOAD_RATES = LoadRates(host=10e9, ssd=1e9)
"""What one core copies and one SSD reads, about; only their ratio to the seconds of prefill matters."""


class Orders:
    """One order a tier. ``head``: the master of a group, which stands for it.

    A group that is held keeps its place, and is passed over when its turn comes: a lookup, which holds what it finds,
    would else pay for two orders (0.45 instead of 0.3 ms for 64 finds, 1.3 at 1,000,000 caches).
    """

    def __init__(self, host: EvictionOrder[Cache], ssd: EvictionOrder[Cache], rates: LoadRates) -> None:
        self.host = host
        self.ssd = ssd
        self.rates = rates
        self.own: dict[str, Orders] = {}
        """Of tenants that have met their quota: of their groups alone, the same places among themselves."""

    @property
    def kind(self) -> Callable[[], EvictionOrder[Any]]:
        """Makes an empty order of the kind in force, for a simulation."""
        return type(self.host)

    def pop_host(self) -> Cache | None:
        """The group that goes next from the host; None if all are held. Those passed over come back by ``settle``."""
        return _pop(self.host)

    def pop_ssd(self) -> Cache | None:
        """The group that goes next from the slab."""
        return _pop(self.ssd)

    def first_of_host(self, count: int) -> list[Cache]:
        """Of the next ``count`` groups to go from the host, those that nobody holds."""
        return [head for head in self.host.first(count) if not head.holds]

    def settle(self, head: Cache, *, is_used: bool) -> None:
        """Nobody holds the group any more: it keeps its places or, if it was used, gets new ones by its worth now."""
        group = group_of(head)  # no loop over tiers here: a lookup pays for every find
        self._settle(self.host, head, group.host_bytes, self.rates.host, is_used)
        if group.ssd_bytes or head in self.ssd:
            self._settle(self.ssd, head, group.ssd_bytes, self.rates.ssd, is_used)
        if self.own:
            own = self.own.get(head.family.space.identity.tenant)
            if own is not None:
                own.settle(head, is_used=is_used)

    def keep_own(self, tenant: str, heads: Iterable[Cache]) -> None:
        """From now on know a tenant's own order too. ``heads``: its groups that nobody holds, the oldest first."""
        assert tenant not in self.own, tenant
        own = Orders(type(self.host)(), type(self.ssd)(), self.rates)
        for head in heads:
            own.settle(head, is_used=True)
        self.own[tenant] = own

    @staticmethod
    def _settle(order: EvictionOrder[Cache], head: Cache, size: int, rate: float, is_used: bool) -> None:
        is_there = head in order
        if is_there and (is_used or not size):
            order.remove(head)
        if size and (is_used or not is_there):
            order.add(head, _worth(head, size, rate))

    def update(self, head: Cache) -> None:
        """After a record of a group that nobody holds came to a tier or went; where it stays it keeps its place."""
        self.settle(head, is_used=False)

    def host_yields_to(self, cache: Cache) -> bool:
        """Would the group that goes next from the host go before that of ``cache``, if that came now?"""
        head = cache.head
        size = group_of(head).host_bytes + cache.record_bytes
        return self.host.yields_to(_worth(head, size, self.rates.host))


def _pop(order: EvictionOrder[Cache]) -> Cache | None:
    head = order.pop()
    while head is not None and head.holds:
        head = order.pop()
    return head


def _worth(head: Cache, size: int, rate: float) -> Worth:
    group = group_of(head)
    return worth_of(group.tokens * head.family.space.token_s, size, rate, group.uses, head.position)


def worth_of(prefill_s: float, size: int, rate: float, uses: float, position: int) -> Worth:
    """What a group of ``size`` bytes is worth in a tier that gives back ``rate`` bytes a second.

    ``prefill_s``: seconds that its tokens take on average; ``uses``: lookups that it answered.
    """
    seconds = min(prefill_s, SECONDS_SAVED_MAX)
    return Worth(max(seconds - size / rate, SAVED_SHARE_MIN * seconds), size, uses + 1, position)
