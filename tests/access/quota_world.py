"""What quotas are checked against: what every tenant takes, counted anew from the catalog and the reservations."""

from collections import Counter
from collections.abc import Iterator

from kvservice.access.quotas import Quota, QuotaTable
from kvservice.caches import Cache, group_of
from kvservice.node import Node
from kvservice.storage.slab_format import taken_bytes
from tests.server.builders import World

PAGE = 4096
SLOT = 3 * PAGE
"""What a record of the builders takes in memory, and on the slab."""


def limit(world: World, **quotas: Quota) -> None:
    """Put quotas in force, by tenant."""
    world.node.allocation.room.quotas.table = QuotaTable(quotas)


def slots(count: int) -> Quota:
    """A quota of so many records in memory."""
    return Quota(host_bytes=count * SLOT)


def taken_of(world: World, tenant: str) -> int:
    return host_taken(world.node)[tenant]


def host_taken(node: Node) -> Counter[str]:
    """Bytes of the arena by tenant: held, reserved, and left behind by sessions whose process may still write."""
    found = Counter[str]()
    for cache in everything(node):
        if cache.is_on_host:
            found[cache.family.space.identity.tenant] += _pages(cache.record_bytes)
    for offset, extent in node.allocation.unpublished.items():
        found[node.allocation.room._unpublished[offset][0]] += _pages(extent.length)
    return found


def ssd_taken(node: Node) -> Counter[str]:
    """Bytes of the slab by tenant, of what can be found there."""
    found = Counter[str]()
    for cache in everything(node):
        if cache.is_on_ssd:
            found[cache.family.space.identity.tenant] += taken_bytes(cache.record_bytes)
    return found


def everything(node: Node) -> Iterator[Cache]:
    for space in node.catalog.spaces.values():
        yield from space.caches()
    yield from node.catalog.hidden


def check_room(node: Node) -> None:
    """The sums are those counted anew; own orders have exactly their tenant's groups that nobody holds."""
    room, counted = node.allocation.room, host_taken(node)
    for tenant in {*counted, *room._unpublished_of}:
        assert room.host_taken(tenant) == counted[tenant], tenant
    assert sum(counted.values()) == node.tier.used_bytes + (node.tier.staging.used_bytes if node.tier.staging else 0)
    for tenant, own in node.catalog.orders.own.items():
        heads = {one for one in everything(node) if one.master is None and _tenant(one) == tenant and not one.holds}
        assert set(own.host) - set(node.catalog.held) == {one for one in heads if group_of(one).host_bytes}
        assert set(own.ssd) - set(node.catalog.held) == {one for one in heads if group_of(one).ssd_bytes}


def _tenant(cache: Cache) -> str:
    return cache.family.space.identity.tenant


def _pages(length: int) -> int:
    return -(-length // PAGE) * PAGE
