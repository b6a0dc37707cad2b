"""What a node holds: spaces, families, caches, groups and how often each is held. State only, owned by one thread.

It does no I/O and reads no clock; extents that nobody needs any more go to the ``free`` it was given.
A cache never changes what it says of itself: a fold publishes another one in its place and hides the old one.
"""

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from kvservice.limits import ANGLE_MAX
from kvservice.model.cache import CacheKind, CacheMeta, Extent
from kvservice.model.geometry import Geometry
from kvservice.model.identity import Identity, Namespace
from kvservice.model.segment import CacheKey, ContextId, SegmentId

POSITION_MAX = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class VerifiedRecord:
    """A record whose bytes were checked: it may be published. Its extent is as long as the record."""

    meta: CacheMeta
    extent: Extent
    generation: int


class Evicted(NamedTuple):
    """What one eviction took."""

    caches: int
    record_bytes: int


class Space:
    """One namespace: its identity, its families by segment id, the keys that are being written.

    ``sessions`` counts the sessions that registered it; a space without sessions, caches and writers is dropped.
    ``end_max``: the position behind the last token that a cache in here may have.
    """

    __slots__ = (
        "end_max", "families", "identity", "namespace", "pending", "pinned_reason", "sessions", "token_bytes",
    )  # fmt: skip

    def __init__(self, namespace: Namespace, identity: Identity) -> None:
        self.namespace = namespace
        self.identity = identity
        self.pinned_reason = identity.pinned_reason
        self.end_max = _end_max(identity)
        self.token_bytes = identity.geometry.token_bytes
        self.families: dict[SegmentId, Family] = {}
        self.pending: set[tuple[SegmentId, ContextId]] = set()
        self.sessions = 0

    @property
    def geometry(self) -> Geometry:
        """Shape of every cache in here."""
        return self.identity.geometry

    def find(self, segment: SegmentId, context: ContextId) -> "Cache | None":
        """The published cache of a key."""
        family = self.families.get(segment)
        return None if family is None else family.members.get(context)


def _end_max(identity: Identity) -> int:
    """No move between positions up to here turns past ANGLE_MAX: no distance is larger. Pinned caches never move."""
    frequencies = () if identity.pinned_reason else (abs(one) for rope in identity.rope for one in rope.frequencies)
    fastest = max(frequencies, default=0.0)
    return POSITION_MAX if fastest * POSITION_MAX <= ANGLE_MAX else int(ANGLE_MAX / fastest)


class Family:
    """All published caches of one segment by context id, least recently stored or used first."""

    __slots__ = ("members", "segment", "space", "tokens")

    def __init__(self, space: Space, segment: SegmentId, tokens: int) -> None:
        self.space = space
        self.segment = segment
        self.tokens = tokens
        self.members: dict[ContextId, Cache] = {}

    def recent(self, count: int) -> "Iterator[Cache]":
        """At most ``count`` members, the most recently used first."""
        return islice(reversed(self.members.values()), count)

    def masters(self, count: int) -> "list[Cache]":
        """At most ``count`` published masters, the most recently used first."""
        return list(islice((one for one in reversed(self.members.values()) if one.master is None), count))


class Cache:
    """One record and its place in its group: a master knows its mirrors, a mirror its master.

    ``marks``: the segments before it, 8 bytes each, nearest first. ``holds``: leases, reservations and workers that
    need its bytes; a held mirror holds its master too, so a group is held exactly when its master is.
    """

    __slots__ = (
        "context", "family", "generation", "holds", "is_hidden", "marks", "master", "mirrors", "offset", "position",
        "provenance", "record_bytes",
    )  # fmt: skip

    def __init__(self, family: Family, record: VerifiedRecord, master: "Cache | None") -> None:
        meta = record.meta
        self.family = family
        self.context = meta.key.context
        self.provenance = sys.intern(meta.provenance)
        self.marks = b"".join(meta.preceding)
        self.position = meta.position
        self.offset = record.extent.offset
        self.record_bytes = record.extent.length
        self.generation = record.generation
        self.master = master
        self.mirrors: dict[Cache, None] | None = None
        self.holds = 0
        self.is_hidden = False

    @property
    def key(self) -> CacheKey:
        """Its name inside its namespace."""
        return CacheKey(self.family.segment, self.context)

    @property
    def kind(self) -> CacheKind:
        """MASTER (dense) or MIRROR."""
        return CacheKind.MASTER if self.master is None else CacheKind.MIRROR

    @property
    def extent(self) -> Extent:
        """Where its record lies."""
        return Extent(self.offset, self.record_bytes)

    @property
    def dense_bytes(self) -> int:
        """Payload bytes that it stands for."""
        return self.family.tokens * self.family.space.token_bytes


@dataclass(slots=True)
class Totals:
    """Running sums over what is held; published caches unless they say hidden."""

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

    def count(self, cache: Cache, sign: int) -> None:
        """Add (1) or take away (-1) a published cache."""
        if cache.master is None:
            self.masters += sign
            self.master_bytes += sign * cache.record_bytes
        else:
            self.mirrors += sign
            self.mirror_bytes += sign * cache.record_bytes
        self.dense_bytes += sign * cache.dense_bytes

    def count_hidden(self, cache: Cache, sign: int) -> None:
        """Add or take away a hidden cache."""
        self.hidden += sign
        self.hidden_bytes += sign * cache.record_bytes


class Catalog:
    """The caches of a node, and the heads (masters) of its groups.

    ``idle`` orders the groups that nobody holds by their last use; only they are evicted. ``held``: all others.
    """

    def __init__(self, free: Callable[[Extent], None]) -> None:
        self.spaces: dict[Namespace, Space] = {}
        self.hidden: dict[Cache, None] = {}
        # Not storage's LruOrder: 3.2 us and 146 bytes a group against 0.9 us and 81, and a lookup pays for every hit.
        self.idle: OrderedDict[Cache, None] = OrderedDict()
        self.held: dict[Cache, None] = {}
        self.totals = Totals()
        self._free = free

    # Spaces

    def open_space(self, identity: Identity) -> Space:
        """The space of an identity, for one more session."""
        namespace = identity.namespace()
        space = self.spaces.get(namespace)
        if space is None:
            space = self.spaces[namespace] = Space(namespace, identity)
        space.sessions += 1
        return space

    def close_space(self, space: Space) -> None:
        """One session less uses ``space``."""
        space.sessions -= 1
        self.drop_if_unused(space)

    def drop_if_unused(self, space: Space) -> None:
        """Forget a space that nobody uses and nothing is in."""
        if not (space.sessions or space.families or space.pending) and self.spaces.get(space.namespace) is space:
            del self.spaces[space.namespace]

    # Caches

    def publish(self, space: Space, record: VerifiedRecord, master: Cache | None = None) -> Cache:
        """Make a verified record visible: at the head of a group of its own, or as a mirror of ``master``."""
        key = record.meta.key
        family = space.families.get(key.segment)
        if family is None:
            family = space.families[key.segment] = Family(space, key.segment, record.meta.tokens)
            self.totals.families += 1
        assert key.context not in family.members, "the first writer wins; who publishes has looked"
        cache = Cache(family, record, master)
        family.members[key.context] = cache
        self.totals.count(cache, 1)
        self._join_group(cache, master)
        return cache

    def _join_group(self, cache: Cache, master: Cache | None) -> None:
        if master is None:
            self.totals.groups += 1
            self.idle[cache] = None
            return
        assert master.master is None, "a master is never a mirror"
        if master.mirrors is None:
            master.mirrors = {}
        master.mirrors[cache] = None
        if not master.holds:
            self.idle.move_to_end(master)

    def hide(self, cache: Cache) -> None:
        """Take a cache out of sight at once. Its bytes go when the last hold and, of a master, the last mirror goes."""
        assert not cache.is_hidden, "a cache is hidden once"
        family = cache.family
        del family.members[cache.context]
        cache.is_hidden = True
        self.hidden[cache] = None
        self.totals.count(cache, -1)
        self.totals.count_hidden(cache, 1)
        if not family.members:
            del family.space.families[family.segment]
            self.totals.families -= 1
            self.drop_if_unused(family.space)
        self._settle(cache)

    def replace(self, old: Cache, record: VerifiedRecord, master: Cache) -> Cache:
        """A mirror record in the place of a published cache. Who holds the old record keeps it until it lets go."""
        space = old.family.space
        assert not master.is_hidden, "a visible master keeps the family and its space alive"
        self.hide(old)
        return self.publish(space, record, master)

    def touch(self, cache: Cache) -> None:
        """Note a use among the family's members; the group's own order follows holds."""
        members = cache.family.members
        if members.get(cache.context) is cache:
            del members[cache.context]
            members[cache.context] = cache

    # Holds

    def hold(self, cache: Cache) -> None:
        """Keep the bytes of a cache, and of its master, where they are until ``unhold``."""
        head = cache
        if cache.master is not None:
            head = cache.master
            self._count_hold(cache)
        self._count_hold(head)
        if head.holds == 1:
            self.idle.pop(head, None)
            self.held[head] = None

    def _count_hold(self, cache: Cache) -> None:
        if not cache.holds:
            self.totals.held_bytes += cache.record_bytes
        cache.holds += 1

    def unhold(self, cache: Cache) -> None:
        """Give back one hold; what is hidden and needed by nobody is freed."""
        head = cache.master
        if head is not None:
            self._uncount_hold(cache)
            self._settle(cache)
        else:
            head = cache
        self._uncount_hold(head)
        if not head.holds:
            del self.held[head]
            self.idle[head] = None
            self._settle(head)

    def _uncount_hold(self, cache: Cache) -> None:
        assert cache.holds > 0, "a hold is given back once"
        cache.holds -= 1
        if not cache.holds:
            self.totals.held_bytes -= cache.record_bytes

    # The end of a cache

    def unevictable(self) -> Iterator[Extent]:
        """Extents that evictions cannot free: of every held group all caches. O(of those)."""
        for head in self.held:
            yield head.extent
            for mirror in head.mirrors or ():
                yield mirror.extent

    def evict_oldest(self) -> Evicted | None:
        """Free the group that was not used for longest, master and mirrors; None if every group is held."""
        head = next(iter(self.idle), None)
        if head is None:
            return None
        group = [*(head.mirrors or ()), head]
        for cache in group:
            if not cache.is_hidden:
                self.hide(cache)
        return Evicted(len(group), sum(cache.record_bytes for cache in group))

    def _settle(self, cache: Cache) -> None:
        if cache.is_hidden and not cache.holds and not cache.mirrors:
            self._forget(cache)

    def _forget(self, cache: Cache) -> None:
        del self.hidden[cache]
        self.totals.count_hidden(cache, -1)
        self._free(cache.extent)
        master = cache.master
        if master is None:
            self.totals.groups -= 1
            self.idle.pop(cache, None)
            return
        assert master.mirrors is not None
        del master.mirrors[cache]
        self._settle(master)
