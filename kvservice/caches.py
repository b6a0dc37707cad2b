"""What a catalog is made of: spaces (namespaces), families (segments), caches, groups. Plain objects without rules.

A cache never changes what it says of itself, only where its record lies: a fold publishes another one in its place.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from kvservice.limits import ANGLE_MAX
from kvservice.model.cache import CacheKind, CacheMeta, Extent
from kvservice.model.geometry import Geometry
from kvservice.model.identity import Identity, Namespace
from kvservice.model.segment import CacheKey, ContextId, SegmentId
from kvservice.totals import Totals

POSITION_MAX = (1 << 32) - 1
NOWHERE = -1
"""The offset of a record that is not in a tier."""
PREFILL_TOKEN_S = 1e-4
"""Seconds of prefill a token that are assumed until a writer says: 10,000 tokens a second."""
PREFILL_SHARE = 1 / 16
"""Of the newest report in a namespace's mean."""


@dataclass(frozen=True, slots=True)
class VerifiedRecord:
    """A record whose bytes were checked: it may be published. Its extent is as long as the record.

    ``prefill_s``: seconds that computing it took, 0 if nobody said.
    """

    meta: CacheMeta
    extent: Extent
    generation: int
    prefill_s: float = 0.0


class SaidRecord(NamedTuple):
    """What is known of a record before its bytes are here. ``prefill_s`` as in VerifiedRecord."""

    meta: CacheMeta
    record_bytes: int
    generation: int
    prefill_s: float = 0.0


class Space:
    """One namespace: its identity, its families by segment id, the keys that are being written.

    ``sessions`` counts the sessions that registered it; a space without sessions, caches and writers is dropped.
    ``end_max``: the position behind the last token that a cache in here may have. ``token_s``: seconds of prefill a
    token, a running mean over all that writers said, since a single report is noisy and grows with the position.
    ``totals``: sums over its caches.
    """

    __slots__ = (
        "end_max", "families", "identity", "namespace", "pending", "pinned_reason", "sessions", "token_bytes",
        "token_s", "totals",
    )  # fmt: skip

    def __init__(self, namespace: Namespace, identity: Identity, totals: Totals | None = None) -> None:
        self.namespace = namespace
        self.identity = identity
        self.pinned_reason = identity.pinned_reason
        self.end_max = _end_max(identity)
        self.token_bytes = identity.geometry.token_bytes
        self.families: dict[SegmentId, Family] = {}
        self.pending: set[tuple[SegmentId, ContextId]] = set()
        self.sessions = 0
        self.totals = totals or Totals()
        self.token_s = PREFILL_TOKEN_S

    def note_prefill(self, tokens: int, prefill_s: float) -> None:
        """A writer says what computing a cache took; 0: it does not say."""
        if prefill_s > 0:
            self.token_s += PREFILL_SHARE * (prefill_s / tokens - self.token_s)

    @property
    def geometry(self) -> Geometry:
        """Shape of every cache in here."""
        return self.identity.geometry

    def caches(self) -> "list[Cache]":
        """All published ones."""
        return [cache for family in self.families.values() for cache in family.members.values()]

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

    ``offset`` and ``ssd_offset``: where its record lies in the host arena and in the slab, or NOWHERE. ``marks``: the
    segments before it, 8 bytes each, nearest first. ``holds``: leases, reservations and workers that need its bytes; a
    held mirror holds its master too, so a group is held exactly when its master is. ``group``: of a master, the sums
    over it and its mirrors.
    """

    __slots__ = (
        "context", "family", "generation", "group", "holds", "is_hidden", "marks", "master", "mirrors", "offset",
        "position", "prefill_s", "provenance", "record_bytes", "ssd_offset",
    )  # fmt: skip

    def __init__(self, family: Family, meta: CacheMeta, record_bytes: int, generation: int, prefill_s: float) -> None:
        self.family = family
        self.context = meta.key.context
        self.provenance = sys.intern(meta.provenance)
        self.marks = b"".join(meta.preceding)
        self.position = meta.position
        self.offset = NOWHERE
        self.ssd_offset = NOWHERE
        self.record_bytes = record_bytes
        self.generation = generation
        self.prefill_s = prefill_s
        self.master: Cache | None = None
        self.mirrors: dict[Cache, None] | None = None
        self.group: Group | None = None
        self.holds = 0
        self.is_hidden = False

    def __str__(self) -> str:
        return str(self.key)

    @property
    def key(self) -> CacheKey:
        """Its name inside its namespace."""
        return CacheKey(self.family.segment, self.context)

    @property
    def kind(self) -> CacheKind:
        """MASTER (dense) or MIRROR."""
        return CacheKind.MASTER if self.master is None else CacheKind.MIRROR

    @property
    def head(self) -> "Cache":
        """The master of its group: itself, or the one it stands on."""
        return self if self.master is None else self.master

    @property
    def is_on_host(self) -> bool:
        """Is its record in the host arena, or on the way there?"""
        return self.offset >= 0

    @property
    def is_on_ssd(self) -> bool:
        """Is its record on the slab, found after a restart?"""
        return self.ssd_offset >= 0

    @property
    def extent(self) -> Extent:
        """Where its record lies in the host arena."""
        assert self.is_on_host, f"{self} is not in the host arena"
        return Extent(self.offset, self.record_bytes)

    @property
    def ssd_extent(self) -> Extent:
        """Where its record lies on the slab."""
        assert self.is_on_ssd, f"{self} is not on the slab"
        return Extent(self.ssd_offset, self.record_bytes)

    @property
    def dense_bytes(self) -> int:
        """Payload bytes that it stands for."""
        return self.family.tokens * self.family.space.token_bytes

    def members(self) -> "Iterator[Cache]":
        """Of a master: its mirrors, hidden ones too, then itself."""
        yield from self.mirrors or ()
        yield self


class Group:
    """Sums over a master and its mirrors, hidden ones too. ``uses``: lookups that one of them answered.

    ``used_s``: when the last one did, or when the master was stored, on the node's clock.
    """

    __slots__ = ("host_bytes", "ssd_bytes", "tokens", "used_s", "uses")

    def __init__(self, now_s: float) -> None:
        self.host_bytes = 0
        self.ssd_bytes = 0
        self.tokens = 0
        self.uses = 0
        self.used_s = now_s


def group_of(cache: Cache) -> Group:
    """The sums of the group that a cache is in."""
    group = cache.head.group
    assert group is not None, "a master has a group"
    return group
