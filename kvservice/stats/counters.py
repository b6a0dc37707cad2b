"""Counters of a node: whole numbers that only rise, from zero at every start. One thread owns them."""

import enum
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from kvservice.model.errors import BY_CODE
from kvservice.stats.recent import Recent

AGE_EDGES_S = (1.0, 10.0, 60.0, 600.0, 3600.0, 6 * 3600.0, 24 * 3600.0, 7 * 24 * 3600.0)
"""Upper edges of the histogram of ages; what is older is counted behind the last."""


class Room(enum.StrEnum):
    """What an eviction made room for. The values are names in documents and metrics; never change them."""

    WRITE = "write"
    """In memory, for a record that a client writes."""
    FOLD = "fold"
    """In memory, for a mirror in the place of a dense cache."""
    LOAD = "load"
    """In memory, for a record that a lookup found on SSD."""
    RECORD = "record"
    """On SSD, for a record of memory."""
    NOTE = "note"
    """On SSD, for an identity or a tombstone."""


HOST_ROOMS, SSD_ROOMS = (Room.WRITE, Room.FOLD, Room.LOAD), (Room.RECORD, Room.NOTE)


@dataclass(slots=True)
class LookupCounters:
    """Calls that were answered; segments of all that were begun, as they came in.

    What became of them is counted by ``kvservice.accounting``; the two must agree.
    """

    calls: int = 0
    asked: int = 0


@dataclass(slots=True)
class FoldCounters:
    """Dense caches compared with a master. Kept: no master was near enough. Refused: the mirror did not restore.

    Dropped: the queue was full, there was no room, or the cache went away meanwhile.
    """

    folded: int = 0
    kept: int = 0
    refused: int = 0
    dropped: int = 0
    saved_bytes: int = 0


@dataclass(slots=True)
class EvictionCounters:
    """What evictions took from a tier. Lost: caches that were in no other tier.

    ``groups_for``: groups by what room was made for. ``ages``: groups by seconds since a lookup was answered with one
    of them, or since they were stored, at AGE_EDGES_S; ``age_s``: the sum.
    """

    groups_for: dict[str, int]
    groups: int = 0
    caches: int = 0
    record_bytes: int = 0
    lost: int = 0
    ages: list[int] = field(default_factory=lambda: [0] * (len(AGE_EDGES_S) + 1))
    age_s: float = 0.0

    @classmethod
    def of(cls, rooms: Iterable[Room]) -> "EvictionCounters":
        """Of a tier in which room is made for these."""
        return cls({room.value: 0 for room in rooms})

    def count(self, room: Room, caches: int, record_bytes: int, lost: int, idle_s: float) -> None:
        """One group went."""
        self.groups += 1
        self.groups_for[room] += 1
        self.caches += caches
        self.record_bytes += record_bytes
        self.lost += lost
        self.ages[bisect_left(AGE_EDGES_S, idle_s)] += 1
        self.age_s += idle_s


@dataclass(slots=True)
class LoadCounters:
    """Records read from SSD for a lookup. Staged: through the staging area. Failed: corrupt or unreadable."""

    begun: int = 0
    staged: int = 0
    done: int = 0
    failed: int = 0
    record_bytes: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class RemoteCounters:
    """What other places were asked for, and what came.

    Asked: segments that nothing here answered. Found: those that a place offered. Computed sooner: of those, what was
    left there, since the engine computes it before it would be here. Refused: offers that were not what
    was asked, or that leases left no room for. Begun, done, failed: records on their way. Unreachable: questions to a
    place that did not answer in time.
    """

    asked: int = 0
    found: int = 0
    computed_sooner: int = 0
    refused: int = 0
    unreachable: int = 0
    begun: int = 0
    done: int = 0
    failed: int = 0
    record_bytes: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class PushCounters:
    """Records that were given to other places.

    Existed: the place had the key already. Refused: by the place, for good. Failed: it was not reached; tried again,
    a few times if only this one fails. Dropped: the queue was full, or the cache went before its turn and was not
    folded, or its master was deleted.
    """

    stored: int = 0
    existed: int = 0
    refused: int = 0
    failed: int = 0
    dropped: int = 0
    record_bytes: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class DemotionCounters:
    """Records written to SSD. Dropped: the cache went away, or its bytes were wrong, while it was written."""

    written: int = 0
    record_bytes: int = 0
    dropped: int = 0
    failed: int = 0
    erased: int = 0
    seconds: float = 0.0


def _no_errors() -> Counter[str]:
    return Counter(dict.fromkeys(BY_CODE, 0))


@dataclass(slots=True)
class Counters:
    """All counters of a node."""

    lookups: LookupCounters = field(default_factory=LookupCounters)
    folds: FoldCounters = field(default_factory=FoldCounters)
    reserved: int = 0
    existed: int = 0
    reserves_refused: Counter[str] = field(default_factory=_no_errors)
    published: int = 0
    published_bytes: int = 0
    commits_refused: Counter[str] = field(default_factory=_no_errors)
    aborted: int = 0
    host_evictions: EvictionCounters = field(default_factory=partial(EvictionCounters.of, HOST_ROOMS))
    ssd_evictions: EvictionCounters = field(default_factory=partial(EvictionCounters.of, SSD_ROOMS))
    loads: LoadCounters = field(default_factory=LoadCounters)
    demotions: DemotionCounters = field(default_factory=DemotionCounters)
    remote: RemoteCounters = field(default_factory=RemoteCounters)
    pushes: PushCounters = field(default_factory=PushCounters)
    deleted: int = 0
    elections: int = 0
    rebased: int = 0
    corrupt: dict[str, int] = field(default_factory=lambda: {"host": 0, "ssd": 0, "remote": 0})
    scrubbed_caches: int = 0
    scrubbed_bytes: int = 0
    scrub_passes: int = 0
    quarantined_bytes: int = 0
    leases_granted: int = 0
    leases_expired: int = 0
    sessions_opened: int = 0

    def recent(self, clock: Callable[[], float], half_life_s: float) -> Recent:
        """What ``bytes_moved`` tells, of late."""
        return Recent(self.bytes_moved, clock, half_life_s)

    def bytes_moved(self) -> tuple[float, float, float, float]:
        """Written to SSD, published, read from SSD, and the seconds that reading took: what plans want of late."""
        return self.demotions.record_bytes, self.published_bytes, self.loads.record_bytes, self.loads.seconds
