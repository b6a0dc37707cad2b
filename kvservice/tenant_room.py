"""Room for tenants: none ever has more in a tier than its quota, and makes room among its own groups only. State only.

What counts is what is taken at the moment of asking: published and hidden records, what is reserved, and on the slab
what is being written, being erased, or kept for a newer form. Nothing waits between the question and the taking, so
that no two writers get the same room.
"""

from collections import Counter
from collections.abc import Iterator

from kvservice.access.quotas import Quotas
from kvservice.caches import Cache, group_of
from kvservice.catalog import Catalog
from kvservice.model.cache import Extent
from kvservice.orders import Orders
from kvservice.stats.counters import Counters, Room
from kvservice.storage.slab_format import taken_bytes
from kvservice.totals import host_taken

GROUPS_GUESSED_MAX = 16
"""Idle groups whose size is added up before all held ones are looked at."""


class TenantRoom:
    """Who takes how much. ``quotas`` may be replaced, or their table may, at any time between two calls."""

    def __init__(self, catalog: Catalog, counters: Counters) -> None:
        self.quotas = Quotas()
        self._catalog = catalog
        self._counters = counters
        self._unpublished: dict[int, tuple[str, int]] = {}  # by offset of the arena: whose, and how much
        self._unpublished_of = Counter[str]()
        self._moving: dict[int, tuple[str, int]] = {}  # by offset of the slab: of no cache that could be found
        self._moving_of = Counter[str]()

    # Host memory

    def host_taken(self, tenant: str) -> int:
        """Bytes of the arena that a tenant takes."""
        totals = self._catalog.tenants.all_of(tenant)
        return self._unpublished_of[tenant] + (0 if totals is None else totals.host_taken)

    def make_host_room(self, tenant: str, record_bytes: int, room: Room) -> None:
        """Evict the tenant's own groups, those worth least first, until a record fits its quota.

        Raises QuotaError, and evicts nothing, if what may not go leaves no room for it.
        """
        limit = self.quotas.of(tenant).host_bytes
        if limit is None:
            return
        wanted = host_taken(record_bytes)
        missing = self.host_taken(tenant) + wanted - limit
        if missing <= 0:
            return
        orders = self._own(tenant)
        self._require_evictable(tenant, orders, wanted, missing, limit)
        while self.host_taken(tenant) + wanted > limit:
            evicted = self._catalog.evict_host(orders)
            if evicted is None:
                raise self.quotas.refusal("host", tenant, wanted, limit, self.host_taken(tenant))
            self._counters.host_evictions.count(room, *evicted)

    def _require_evictable(self, tenant: str, orders: Orders, wanted: int, missing: int, limit: int) -> None:
        first = orders.first_of_host(GROUPS_GUESSED_MAX)
        if sum(group_of(head).host_bytes for head in first) >= missing:
            return
        fixed = self._unpublished_of[tenant]
        for head in self._catalog.held:
            if head.family.space.identity.tenant == tenant:
                fixed += sum(host_taken(one.record_bytes) for one in head.members() if one.is_on_host)
        if fixed + wanted > limit:
            raise self.quotas.refusal("host", tenant, wanted, limit, fixed)

    def note_unpublished(self, extent: Extent, tenant: str) -> None:
        """An extent of the arena is taken for a tenant, by no cache yet."""
        _add(self._unpublished, self._unpublished_of, extent.offset, tenant, host_taken(extent.length))

    def forget_unpublished(self, extent: Extent) -> None:
        """It is free, or a cache's; no error for one that was nobody's."""
        _drop(self._unpublished, self._unpublished_of, extent.offset)

    # SSD

    def ssd_taken(self, tenant: str) -> int:
        """Bytes of the slab that a tenant takes."""
        totals = self._catalog.tenants.all_of(tenant)
        found = 0 if totals is None else totals.ssd_taken
        return found + self._moving_of[tenant] + self._catalog.superseded.taken[tenant]

    def has_ssd_room(self, tenant: str, record_bytes: int) -> bool:
        """Does a record fit its quota as things are?"""
        limit = self.quotas.of(tenant).ssd_bytes
        return limit is None or self.ssd_taken(tenant) + taken_bytes(record_bytes) <= limit

    def could_have_ssd_room(self, tenant: str, record_bytes: int) -> bool:
        """Would it fit if all of the tenant's went that may go?"""
        limit = self.quotas.of(tenant).ssd_bytes
        if limit is None:
            return True
        fixed = taken_bytes(record_bytes)
        for head in self._catalog.held:
            if head.family.space.identity.tenant == tenant:
                fixed += sum(taken_bytes(one.record_bytes) for one in head.members() if one.is_on_ssd)
        return fixed <= limit

    def evict_from_ssd(self, tenant: str, room: Room) -> bool:
        """Free the copies on the slab of the tenant's group that is worth least; False if all are held.

        Their room is there when the removals have settled.
        """
        evicted = self._catalog.evict_ssd(self._own(tenant))
        if evicted is not None:
            self._counters.ssd_evictions.count(room, *evicted)
        return evicted is not None

    def is_erasing(self, tenant: str) -> bool:
        """Is something of the tenant's on its way to or from the slab?"""
        return self._moving_of[tenant] > 0

    def note_moving(self, extent: Extent, tenant: str) -> None:
        """A place of the slab is taken and no cache's: it is being written, or will be erased. Twice is once."""
        if extent.offset not in self._moving:
            _add(self._moving, self._moving_of, extent.offset, tenant, taken_bytes(extent.length))

    def forget_moving(self, extent: Extent) -> None:
        """It is free, or a cache's; no error for what was not noted."""
        _drop(self._moving, self._moving_of, extent.offset)

    # Tenants

    def enforce(self, tenant: str) -> None:
        """After a quota was lowered: evict from both tiers what may go, down to the quota."""
        quota = self.quotas.of(tenant)
        while quota.host_bytes is not None and self.host_taken(tenant) > quota.host_bytes:
            evicted = self._catalog.evict_host(self._own(tenant))
            if evicted is None:
                break
            self._counters.host_evictions.count(Room.WRITE, *evicted)
        while quota.ssd_bytes is not None and self._ssd_lasting(tenant) > quota.ssd_bytes:
            if not self.evict_from_ssd(tenant, Room.RECORD):
                break

    def _ssd_lasting(self, tenant: str) -> int:
        """Without what is on its way out already."""
        return self.ssd_taken(tenant) - self._moving_of[tenant]

    def enforce_all(self) -> None:
        """Enforce every tenant's quota, and forget the orders of those that have none any more."""
        orders, quotas = self._catalog.orders, self.quotas
        for tenant in list(orders.own):
            quota = quotas.of(tenant)
            if quota.host_bytes is None and quota.ssd_bytes is None:
                del orders.own[tenant]
        if not quotas.table.is_empty:
            for tenant in {space.identity.tenant for space in self._catalog.spaces.values()}:
                self.enforce(tenant)

    def refuse(self, tier: str) -> None:
        """Count a refusal that is no error to anybody."""
        self.quotas.refused[tier] += 1

    def _own(self, tenant: str) -> Orders:
        """The tenant's own order of eviction: made when it first meets its quota, O(n log n) in its groups; kept up
        from then on."""
        orders = self._catalog.orders
        if tenant not in orders.own:
            heads = dict.fromkeys(self._heads(tenant))  # of equal age as they were stored
            orders.keep_own(tenant, sorted(heads, key=lambda head: group_of(head).used_s))
        return orders.own[tenant]

    def _heads(self, tenant: str) -> Iterator[Cache]:
        """Masters of the tenant that nobody holds, hidden ones with mirrors too."""
        for space in self._catalog.spaces.values():
            if space.identity.tenant == tenant:
                yield from (one for one in space.caches() if one.master is None and not one.holds)
        for one in self._catalog.hidden:
            if one.master is None and not one.holds and one.family.space.identity.tenant == tenant:
                yield one


def _add(places: dict[int, tuple[str, int]], sums: Counter[str], offset: int, tenant: str, taken: int) -> None:
    assert offset not in places, offset
    places[offset] = tenant, taken
    sums[tenant] += taken


def _drop(places: dict[int, tuple[str, int]], sums: Counter[str], offset: int) -> None:
    tenant, taken = places.pop(offset, ("", 0))
    if taken:
        sums[tenant] -= taken
        if not sums[tenant]:
            del sums[tenant]
