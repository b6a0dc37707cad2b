"""Running sums of a catalog, of its tenants and of its namespaces, so that no reader of stats walks it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvservice.storage.arena import GRANULARITY_BYTES
from kvservice.storage.buffer import round_up
from kvservice.storage.slab_format import taken_bytes

if TYPE_CHECKING:
    from kvservice.caches import Cache  # which imports this


@dataclass(slots=True)
class Totals:
    """Running sums over what is held; published caches unless they say hidden.

    By tier, hidden ones too: a cache may be in both. ``above``: the sums that these are a part of, a tenant's of a
    namespace's, the node's of a tenant's. ``groups`` and ``held_bytes`` are of the node alone. ``host_taken`` and
    ``ssd_taken``: bytes of the tiers that the records take, rounding and footers included; quotas count these.
    """

    above: "Totals | None" = None
    masters: int = 0
    mirrors: int = 0
    master_bytes: int = 0
    mirror_bytes: int = 0
    dense_bytes: int = 0
    hidden: int = 0
    hidden_bytes: int = 0
    families: int = 0
    groups: int = 0
    held_bytes: int = 0
    host_caches: int = 0
    host_bytes: int = 0
    host_mirror_bytes: int = 0
    ssd_caches: int = 0
    ssd_bytes: int = 0
    ssd_mirror_bytes: int = 0
    host_taken: int = 0
    ssd_taken: int = 0

    def count(self, cache: "Cache", sign: int) -> None:
        """Add (1) or take away (-1) a published cache."""
        if cache.master is None:
            self.masters += sign
            self.master_bytes += sign * cache.record_bytes
        else:
            self.mirrors += sign
            self.mirror_bytes += sign * cache.record_bytes
        self.dense_bytes += sign * cache.dense_bytes
        if self.above is not None:
            self.above.count(cache, sign)

    def count_hidden(self, cache: "Cache", sign: int) -> None:
        """Add or take away a hidden cache."""
        self.hidden += sign
        self.hidden_bytes += sign * cache.record_bytes
        if self.above is not None:
            self.above.count_hidden(cache, sign)

    def count_family(self, sign: int) -> None:
        """Add or take away a segment that has caches."""
        self.families += sign
        if self.above is not None:
            self.above.count_family(sign)

    def count_host(self, cache: "Cache", sign: int) -> None:
        """Add or take away a record in host memory."""
        self.host_caches += sign
        self.host_bytes += sign * cache.record_bytes
        self.host_taken += sign * host_taken(cache.record_bytes)
        self.host_mirror_bytes += sign * cache.record_bytes * (cache.master is not None)
        if self.above is not None:
            self.above.count_host(cache, sign)

    def count_ssd(self, cache: "Cache", sign: int) -> None:
        """Add or take away a record on SSD."""
        self.ssd_caches += sign
        self.ssd_bytes += sign * cache.record_bytes
        self.ssd_taken += sign * taken_bytes(cache.record_bytes)
        self.ssd_mirror_bytes += sign * cache.record_bytes * (cache.master is not None)
        if self.above is not None:
            self.above.count_ssd(cache, sign)


def host_taken(record_bytes: int) -> int:
    """Bytes of the arena that a record takes."""
    return round_up(record_bytes, GRANULARITY_BYTES)


class TenantTotals:
    """The sums of every tenant that has a namespace, and of those that are gone but still have bytes in a tier."""

    def __init__(self, node: Totals) -> None:
        self._node = node
        self._by_name: dict[str, Totals] = {}
        self._namespaces: dict[str, int] = {}
        self._leaving: dict[str, Totals] = {}  # a quota must not forget what is leased or being erased

    def __len__(self) -> int:
        return len(self._by_name)

    def get(self, tenant: str) -> Totals | None:
        """The sums of a tenant; None if it has no namespace."""
        return self._by_name.get(tenant)

    def all_of(self, tenant: str) -> Totals | None:
        """The sums of a tenant, also if it has no namespace any more; None if it has no bytes either."""
        return self._by_name.get(tenant) or self._leaving.get(tenant)

    def open(self, tenant: str) -> Totals:
        """The sums of a new namespace of a tenant."""
        above = self._by_name.get(tenant) or self._leaving.pop(tenant, None) or Totals(self._node)
        self._by_name[tenant] = above
        self._namespaces[tenant] = self._namespaces.get(tenant, 0) + 1
        return Totals(above)

    def close(self, tenant: str) -> None:
        """A namespace went. What of it is still leased is the node's from now on."""
        self._namespaces[tenant] -= 1
        if not self._namespaces[tenant]:
            del self._namespaces[tenant]
            self._leaving[tenant] = self._by_name.pop(tenant)
            self._leaving = {name: one for name, one in self._leaving.items() if one.host_bytes or one.ssd_bytes}
