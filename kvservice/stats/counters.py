"""Counters of a node: whole numbers that only rise, from zero at every start. One thread owns them."""

from collections import Counter
from dataclasses import dataclass, field

from kvservice.model.plan import Match, MissReason


@dataclass(slots=True)
class LookupCounters:
    """Segments asked for, and what was answered.

    asked = exact + refreshed + shifted + the sum of misses. from_ssd: of those found, the ones that were not
    whole in host memory; all others were.
    """

    calls: int = 0
    asked: int = 0
    exact: int = 0
    refreshed: int = 0
    shifted: int = 0
    from_ssd: int = 0
    misses: list[int] = field(default_factory=lambda: [0] * len(MissReason))

    def count(self, match: Match, miss_reason: MissReason) -> None:
        """One segment was answered."""
        self.asked += 1
        if match is Match.EXACT:
            self.exact += 1
        elif match is Match.SHIFTED:
            self.shifted += 1
        elif match is Match.REFRESHED:
            self.refreshed += 1
        else:
            self.misses[miss_reason] += 1


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
    """What evictions took from a tier. Lost: caches that were in no other tier."""

    groups: int = 0
    caches: int = 0
    record_bytes: int = 0
    lost: int = 0

    def count(self, caches: int, record_bytes: int, lost: int) -> None:
        """One group went."""
        self.groups += 1
        self.caches += caches
        self.record_bytes += record_bytes
        self.lost += lost


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
class DemotionCounters:
    """Records written to SSD. Dropped: the cache went away, or its bytes were wrong, while it was written."""

    written: int = 0
    record_bytes: int = 0
    dropped: int = 0
    failed: int = 0
    erased: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class Counters:
    """All counters of a node."""

    lookups: LookupCounters = field(default_factory=LookupCounters)
    folds: FoldCounters = field(default_factory=FoldCounters)
    reserved: int = 0
    existed: int = 0
    reserves_refused: Counter[str] = field(default_factory=Counter)
    published: int = 0
    published_bytes: int = 0
    commits_refused: Counter[str] = field(default_factory=Counter)
    aborted: int = 0
    host_evictions: EvictionCounters = field(default_factory=EvictionCounters)
    ssd_evictions: EvictionCounters = field(default_factory=EvictionCounters)
    loads: LoadCounters = field(default_factory=LoadCounters)
    demotions: DemotionCounters = field(default_factory=DemotionCounters)
    deleted: int = 0
    elections: int = 0
    rebased: int = 0
    corrupt: dict[str, int] = field(default_factory=lambda: {"host": 0, "ssd": 0})
    scrubbed_caches: int = 0
    scrubbed_bytes: int = 0
    scrub_passes: int = 0
    quarantined_bytes: int = 0
    leases_granted: int = 0
    leases_expired: int = 0
    sessions_opened: int = 0
