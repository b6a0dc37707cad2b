"""What a node holds: spaces, families, caches, groups, where they lie and how often each is held.

State only, owned by one thread: no I/O, and the time is told to it. Extents that nobody needs any more go to the
``Freed`` it was given.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from kvservice.caches import NOWHERE, Cache, Family, Group, SaidRecord, Space, VerifiedRecord, group_of
from kvservice.departures import Gone
from kvservice.loads import Load
from kvservice.model.cache import Extent
from kvservice.model.identity import Identity, Namespace
from kvservice.model.segment import SegmentId
from kvservice.orders import Orders
from kvservice.storage.ssd_entry import SsdEntry
from kvservice.superseded import Superseded
from kvservice.totals import TenantTotals, Totals

Where = Callable[[Cache], bool]
_on_host: Where = attrgetter("is_on_host")
_on_ssd: Where = attrgetter("is_on_ssd")


class Evicted(NamedTuple):
    """What one eviction took from a tier. ``lost``: caches that were in no other tier.

    ``idle_s``: seconds since a lookup was answered with one of the group, or since it was stored.
    """

    caches: int
    record_bytes: int
    lost: int
    idle_s: float


@dataclass(frozen=True, slots=True)
class Removal:
    """A record on the slab, of ``cache`` or an old form of it, that nobody needs any more."""

    cache: Cache
    extent: Extent


@dataclass(frozen=True, slots=True)
class Freed:
    """Where extents go that nobody needs. ``staging_offset``: host copies from here on go with their last hold."""

    host: Callable[[Extent], None]
    ssd: Callable[[Removal], None]
    staging_offset: int


class Catalog:
    """The caches of a node, and the heads (masters) of its groups.

    ``orders``: the groups by tier, in the order in which they go; those in ``held``, with whether they were used since,
    are not evicted.
    ``arriving``: caches whose host copy is not whole yet. ``condemned``: held caches whose host copy is wrong.
    ``superseded``: what lies on the slab for a cache until its newer form does. ``hidden``: each with the sequence
    number of the tombstone that a record of it on the slab must have; 0: it was not deleted, but replaced or lost.
    ``on_gone`` is told of every cache whose key is found no more. ``now_s``: the clock when somebody last looked, at
    every lookup and every upkeep.
    """

    def __init__(self, freed: Freed, orders: Orders, on_gone: Callable[[Cache, Gone], None]) -> None:
        self.spaces: dict[Namespace, Space] = {}
        self.hidden: dict[Cache, int] = {}
        self.held: dict[Cache, bool] = {}
        self.superseded = Superseded()
        self.condemned: set[Cache] = set()
        self.arriving: dict[Cache, Load] = {}
        self.orders = orders
        self.totals = Totals()
        self.tenants = TenantTotals(self.totals)
        self.now_s = 0.0
        self._freed = freed
        self._on_gone = on_gone

    # Spaces

    def open_space(self, identity: Identity) -> Space:
        """The space of an identity, for one more session."""
        space = self.space_of(identity)
        space.sessions += 1
        return space

    def space_of(self, identity: Identity) -> Space:
        """The space of an identity, made if need be; it goes with ``drop_if_unused``."""
        namespace = identity.namespace()
        space = self.spaces.get(namespace)
        if space is None:
            space = self.spaces[namespace] = Space(namespace, identity, self.tenants.open(identity.tenant))
        return space

    def close_space(self, space: Space) -> None:
        """One session less uses ``space``."""
        space.sessions -= 1
        self.drop_if_unused(space)

    def drop_if_unused(self, space: Space) -> None:
        """Forget a space that nobody uses and nothing is in."""
        if not (space.sessions or space.families or space.pending) and self.spaces.get(space.namespace) is space:
            del self.spaces[space.namespace]
            self.tenants.close(space.identity.tenant)

    # Caches

    def publish(self, space: Space, record: VerifiedRecord, master: Cache | None = None) -> Cache:
        """Make a verified record visible: at the head of a group of its own, or as a mirror of ``master``."""
        extent = record.extent
        cache = self.adopt(space, SaidRecord(record.meta, extent.length, record.generation, record.prefill_s), master)
        self.set_host(cache, extent.offset)
        if master is not None and not master.holds:
            self.orders.settle(master, is_used=True)
        return cache

    def adopt(self, space: Space, said: SaidRecord, master: Cache | None = None) -> Cache:
        """A cache that is visible and in no tier yet; whoever brings its record holds it until ``set_host``."""
        meta = said.meta
        family = self._family(space, meta.key.segment, meta.tokens)
        cache = Cache(family, meta, said.record_bytes, said.generation, said.prefill_s)
        self._show(cache)
        self._join_group(cache, master)
        return cache

    def give_up(self, cache: Cache) -> None:
        """Take an adopted cache, whose record was not brought, out of sight as if it had never been there."""
        self._hide(cache)
        self._settle(cache)

    def restore(self, space: Space, entry: SsdEntry, master: Cache | None = None) -> Cache:
        """A record that was found on the slab at the start. One that was deleted comes back hidden: see ``settle``."""
        meta = entry.meta
        cache = Cache(self._family(space, meta.key.segment, meta.tokens), meta,
                      entry.extent.length, entry.generation, entry.prefill_s)  # fmt: skip
        if not entry.is_deleted:
            self._show(cache)
        self._join_group(cache, master)
        if entry.is_deleted:
            self._note_hidden(cache)
        self.set_ssd(cache, entry.extent.offset)
        return cache

    def settle(self, cache: Cache) -> None:
        """Free a restored master that was deleted unless mirrors, which came after it, stand on it."""
        self._settle(cache)

    def _family(self, space: Space, segment: SegmentId, tokens: int) -> Family:
        family = space.families.get(segment)
        if family is None:
            family = space.families[segment] = Family(space, segment, tokens)
            space.totals.count_family(1)
        return family

    def _show(self, cache: Cache) -> None:
        assert cache.context not in cache.family.members, "the first writer wins; who publishes has looked"
        cache.family.members[cache.context] = cache

    def _join_group(self, cache: Cache, master: Cache | None) -> None:
        if master is None:
            self.totals.groups += 1
            cache.group = Group(self.now_s)
        else:
            assert master.master is None, "a master is never a mirror"
            cache.master = master
            if master.mirrors is None:
                master.mirrors = {}
            master.mirrors[cache] = None
        cache.family.space.totals.count(cache, 1)
        group_of(cache).tokens += cache.family.tokens
        cache.family.space.note_prefill(cache.family.tokens, cache.prefill_s)

    def hide(self, cache: Cache, why: Gone) -> None:
        """Take a cache out of sight at once. Its bytes go when the last hold and, of a master, the last mirror goes."""
        self._on_gone(cache, why)
        self._hide(cache)
        self._settle(cache)

    def _hide(self, cache: Cache) -> None:
        assert not cache.is_hidden, "a cache is hidden once"
        family = cache.family
        del family.members[cache.context]
        self._note_hidden(cache)
        if not family.members:
            del family.space.families[family.segment]
            family.space.totals.count_family(-1)
            self.drop_if_unused(family.space)

    def _note_hidden(self, cache: Cache) -> None:
        cache.is_hidden = True
        self.hidden[cache] = 0
        totals = cache.family.space.totals
        totals.count(cache, -1)
        totals.count_hidden(cache, 1)

    def replace(self, old: Cache, record: VerifiedRecord, master: Cache) -> Cache:
        """A mirror record in the place of a published cache. Who holds the old record keeps it until it lets go.

        The old form stays on the slab until the new one is there (``set_ssd``): a crash in between loses neither.
        """
        space, base = old.family.space, None if old.master is None else old.master.context
        assert not master.is_hidden, "a visible master keeps the family and its space alive"
        extent = self._take_ssd(old) if old.is_on_ssd else None
        self._hide(old)
        cache = self.publish(space, record, master)
        self.superseded.hand_on(old, cache)
        if extent is not None:
            self.superseded.add(cache, old, extent, base)
        self._settle(old)
        return cache

    def touch(self, cache: Cache) -> None:
        """Note a use among the family's members; the group's own order follows holds."""
        members = cache.family.members
        if members.get(cache.context) is cache:
            del members[cache.context]
            members[cache.context] = cache

    # Places

    def set_host(self, cache: Cache, offset: int) -> None:
        """The cache's record lies, or is about to lie, at ``offset`` of the host arena."""
        assert not cache.is_on_host, cache
        cache.offset = offset
        cache.family.space.totals.count_host(cache, 1)
        group_of(cache).host_bytes += cache.record_bytes
        self._update_orders(cache)

    def drop_host(self, cache: Cache) -> None:
        """Free the host copy of a cache that nobody holds."""
        assert not cache.holds, cache
        extent = cache.extent
        cache.offset = NOWHERE
        cache.family.space.totals.count_host(cache, -1)
        group_of(cache).host_bytes -= cache.record_bytes
        self._freed.host(extent)
        self._update_orders(cache)

    def set_ssd(self, cache: Cache, offset: int) -> None:
        """The cache's record lies at ``offset`` of the slab; an older form of it goes."""
        assert not cache.is_on_ssd, cache
        cache.ssd_offset = offset
        cache.family.space.totals.count_ssd(cache, 1)
        group_of(cache).ssd_bytes += cache.record_bytes
        self._update_orders(cache)
        self.drop_superseded(cache)

    def drop_ssd(self, cache: Cache) -> None:
        """Free the copy on the slab. Whoever reads it holds the cache, and must look whether it still is there."""
        self._freed.ssd(Removal(cache, self._take_ssd(cache)))

    def quarantine_ssd(self, cache: Cache) -> Extent:
        """Forget the copy on the slab, whose place is the caller's from now on."""
        return self._take_ssd(cache)

    def _take_ssd(self, cache: Cache) -> Extent:
        extent = cache.ssd_extent
        cache.ssd_offset = NOWHERE
        cache.family.space.totals.count_ssd(cache, -1)
        group_of(cache).ssd_bytes -= cache.record_bytes
        self._update_orders(cache)
        return extent

    def _update_orders(self, cache: Cache) -> None:
        if cache.head not in self.held:
            self.orders.update(cache.head)

    def drop_superseded(self, cache: Cache) -> None:
        """Free the older forms of a cache on the slab: the newer one is there, or nobody wants any."""
        for form in self.superseded.release(cache):
            self._freed.ssd(Removal(form.cache, form.extent))

    # Holds

    def hold(self, cache: Cache) -> None:
        """Keep the bytes of a cache, and of its master, where they are until ``unhold``."""
        head = cache
        if cache.master is not None:
            head = cache.master
            self._count_hold(cache)
        self._count_hold(head)
        if head.holds == 1:
            self.held[head] = False

    def use(self, cache: Cache) -> None:
        """Note that a lookup was answered with a held cache: its group goes to the end of the orders of eviction."""
        head = cache.head
        group = group_of(head)
        group.uses += 1
        group.used_s = self.now_s
        self.held[head] = True

    def _count_hold(self, cache: Cache) -> None:
        if not cache.holds:
            self.totals.held_bytes += cache.record_bytes
        cache.holds += 1

    def unhold(self, cache: Cache) -> None:
        """Give back one hold; what is hidden and needed by nobody is freed, and a staged copy goes."""
        head = cache.master
        if head is not None:
            self._uncount_hold(cache)
            self._settle(cache)
        else:
            head = cache
        self._uncount_hold(head)
        if not head.holds:
            self.orders.settle(head, is_used=self.held.pop(head))
            self._settle(head)

    def _uncount_hold(self, cache: Cache) -> None:
        assert cache.holds > 0, "a hold is given back once"
        cache.holds -= 1
        if cache.holds:
            return
        self.totals.held_bytes -= cache.record_bytes
        is_condemned = bool(self.condemned) and cache in self.condemned
        is_wanted = not cache.is_hidden or (bool(cache.mirrors) and cache.is_on_ssd)
        if is_wanted and (is_condemned or cache.offset >= self._freed.staging_offset):
            self.condemned.discard(cache)
            self._drop_unheld(cache, Gone.QUARANTINED if is_condemned else Gone.EVICTED_FROM_SSD)

    def _drop_unheld(self, cache: Cache, why: Gone) -> None:
        if cache.is_on_ssd:
            self.drop_host(cache)
        else:
            self.hide_with_mirrors(cache, why)

    # The end of a cache

    def unevictable(self) -> Iterator[Extent]:
        """Host extents that evictions cannot free: of every held group all. O(of those)."""
        for head in self.held:
            yield from (cache.extent for cache in head.members() if cache.is_on_host)

    def evict_host(self, orders: Orders | None = None) -> Evicted | None:
        """Free the host copies of the group worth least, of ``orders`` or of all; None if all are held. What is on no
        slab is lost."""
        head = (orders or self.orders).pop_host()
        return None if head is None else self._evict(head, _on_host, _on_ssd, self.drop_host, Gone.EVICTED)

    def evict_ssd(self, orders: Orders | None = None) -> Evicted | None:
        """Free the copies on the slab of the group worth least; None if every group is held."""
        head = (orders or self.orders).pop_ssd()
        return None if head is None else self._evict(head, _on_ssd, _on_host, self.drop_ssd, Gone.EVICTED_FROM_SSD)

    def _evict(
        self, head: Cache, is_here: Where, is_elsewhere: Where, drop: Callable[[Cache], None], why: Gone
    ) -> Evicted:
        members, idle_s = list(head.members()), self.now_s - group_of(head).used_s
        here = [cache for cache in members if is_here(cache)]
        lost = dict.fromkeys(cache for cache in members if not is_elsewhere(cache))
        if head in lost:
            lost = dict.fromkeys(members)  # nothing stands on what is gone
        for cache in here:
            if cache not in lost:
                drop(cache)
        for cache in lost:
            if not cache.is_hidden:
                self.hide(cache, why)
        return Evicted(len(here), sum(cache.record_bytes for cache in here), len(lost), idle_s)

    def condemn(self, cache: Cache) -> None:
        """The bytes of its host copy are wrong. They go with the last hold; what is on the slab is found again then.

        Without a copy on the slab the cache goes, and so do the mirrors that stand on it.
        """
        if not cache.is_on_ssd:
            self.hide_with_mirrors(cache)
        elif cache.holds:
            self.condemned.add(cache)
        else:
            self.drop_host(cache)

    def is_condemned(self, cache: Cache) -> bool:
        """Is its record, or its master's, one that must not be read?"""
        return bool(self.condemned) and (cache in self.condemned or cache.master in self.condemned)

    def is_readable(self, cache: Cache) -> bool:
        """Are its record and its master's whole in the host arena?"""
        return self.is_whole(cache) and (cache.master is None or self.is_whole(cache.master))

    def is_whole(self, cache: Cache) -> bool:
        """Is its own record whole in the host arena?"""
        return cache.is_on_host and cache not in self.arriving and cache not in self.condemned

    def hide_with_mirrors(self, cache: Cache, why: Gone = Gone.QUARANTINED) -> None:
        """Hide a cache that cannot be restored any more, and all that stand on it."""
        for one in list(cache.members()) if cache.master is None else [cache]:
            if not one.is_hidden:
                self.hide(one, why)

    def _settle(self, cache: Cache) -> None:
        if cache.is_hidden and not cache.holds and not cache.mirrors and cache in self.hidden:
            self._forget(cache)

    def _forget(self, cache: Cache) -> None:
        del self.hidden[cache]
        cache.family.space.totals.count_hidden(cache, -1)
        self.drop_superseded(cache)
        self.condemned.discard(cache)
        if cache.is_on_ssd:
            self.drop_ssd(cache)
        if cache.is_on_host:
            self.drop_host(cache)
        master = cache.master
        if master is None:
            self.totals.groups -= 1
            return
        assert master.mirrors is not None
        del master.mirrors[cache]
        group_of(master).tokens -= cache.family.tokens
        self._settle(master)
