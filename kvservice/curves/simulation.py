"""What the policy in force would find with other sizes: miniature caches that run the node's own order of eviction.

Of a share R of all segments, a cache with R times the bytes finds what the whole cache finds of all. Whole groups go,
as in the node. What a miniature finds more or less than reuse distances say *of the same sample* is to be added to the
curve of a larger one: both have the error of the small sample (a control variate). State only. Waldspurger et al.,
"Cache Modeling and Optimization using Miniature Simulations" (USENIX ATC 2017).
"""

from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvservice.curves.distances import Distances
from kvservice.curves.histogram import standard_error
from kvservice.curves.records import GONE, Records
from kvservice.orders import worth_of
from kvservice.storage.eviction import EvictionOrder

GROUPS_MIN = 16
"""A miniature with room for fewer groups of the mean size says nothing: a cache of 16 pieces is another cache."""


@dataclass(frozen=True, slots=True)
class SimulatedPoint:
    """What one size finds. ``hits`` and ``seconds``: shares of all references, and of their prefill seconds.

    ``more_hits`` and ``more_seconds``: than reuse distances say of the same sample; ``error``: two standard errors of
    ``more_hits``. ``is_reliable``: False where the miniature had room for too few groups.
    """

    capacity_bytes: int
    hits: float
    seconds: float
    is_reliable: bool
    more_hits: float
    more_seconds: float
    error: float = 0.0


class Miniature:
    """One cache of ``capacity_bytes``, made a share of that large. ``rate``: bytes a second that its tier gives.

    A group is a head and those of its mirrors that are here. By record: ``is_held``; of heads ``bytes``, 0 without a
    group, ``tokens`` and ``uses``. ``differing``: references that it found and reuse distances did not, or the reverse;
    ``more_hits``, ``more_seconds``: the former less the latter. ``behind``: a
    larger tier, which is told first, and where a group that left this one keeps its uses.
    """

    def __init__(self, capacity_bytes: int, order: EvictionOrder[int], rate: float) -> None:
        self.capacity_bytes = capacity_bytes
        self.hits = self.seconds = self.differing = self.more_hits = self.more_seconds = 0.0
        self.used_bytes = self.groups = 0
        self.is_held, self.bytes, self.tokens, self.uses = bytearray(), array("Q"), array("I"), array("I")
        self._order = order
        self._rate = rate
        self._share = 1.0
        self._has_evicted = False
        self.behind: Miniature | None = None

    def attach(self, records: Records) -> None:
        """See Reader."""
        self._records = records

    @property
    def is_reliable(self) -> bool:
        """Does it hold enough groups, or did it never need to choose?"""
        return not self._has_evicted or self.groups >= GROUPS_MIN

    def holds(self, record: int) -> bool:
        """Is the record here, with the master that it needs?"""
        head = self._records.head(record)
        is_known = head != GONE and max(record, head) < len(self.is_held)
        return is_known and bool(self.is_held[record] & self.is_held[head])

    def count(self, seconds: float, *, is_found: bool, is_near: bool) -> None:
        """A reference; ``is_near``: would it be found by its reuse distance?"""
        more = is_found - is_near
        self.hits += is_found
        self.seconds += seconds * is_found
        self.differing += abs(more)
        self.more_hits += more
        self.more_seconds += seconds * more

    def age(self, factor: float) -> None:
        """See Reader."""
        self.hits *= factor
        self.seconds *= factor
        self.differing *= factor
        self.more_hits *= factor
        self.more_seconds *= factor

    def use(self, record: int) -> bool:
        """A lookup asks for the record; whoever misses it stores what it then computed. True if it was found."""
        is_found, head = self.holds(record), self._records.head(record)
        if head != GONE:
            self._take_out(head)
            self.uses[head] += is_found
            self._put(head, head)
            self._put(head, record)
            self._admit(head)
        return is_found

    def uses_of(self, head: int) -> int:
        """Of its group; 0 if that is not here."""
        return self.uses[head] if head < len(self.is_held) and self.bytes[head] else 0

    def store(self, record: int) -> None:
        """The record is new."""
        head = self._records.head(record)
        if head != GONE:
            self._take_out(head)
            self._put(head, record)
            self._admit(head)

    def drop(self, record: int) -> None:
        """The record is gone, or needs a place in another group. What stood on it goes too: nothing finds that."""
        if record >= len(self.is_held):
            return
        if self.bytes[record]:
            self._order.remove(record)
            self._end(record)
        elif self.is_held[record]:
            head = self._records.head(record)
            self._order.remove(head)
            self._take(head, record)
            if self.bytes[head]:
                self._add(head)
            else:
                self.groups -= 1

    def shrink(self, share: float) -> None:
        """It is made ``share`` times as large as the cache that it stands for."""
        self._share = share
        self._make_room()

    def _take_out(self, head: int) -> None:
        if head >= len(self.is_held):
            self._grow()
        if self.bytes[head]:
            self._order.remove(head)
        else:
            self.groups += 1
            self.tokens[head] = 0
            self.uses[head] = 0 if self.behind is None else self.behind.uses_of(head)

    def _grow(self) -> None:
        more = self._records.room - len(self.is_held)
        self.is_held = self.is_held + bytes(more)
        self.bytes = self.bytes + array("Q", [0]) * more
        self.tokens, self.uses = self.tokens + array("I", [0]) * more, self.uses + array("I", [0]) * more

    def _put(self, head: int, record: int) -> None:
        if record >= len(self.is_held):
            self._grow()
        if not self.is_held[record]:
            self.is_held[record] = 1
            self.bytes[head] += self._records.bytes[record]
            self.tokens[head] += self._records.tokens[record]
            self.used_bytes += self._records.bytes[record]

    def _take(self, head: int, record: int) -> None:
        self.is_held[record] = 0
        self.bytes[head] -= self._records.bytes[record]
        self.tokens[head] -= self._records.tokens[record]
        self.used_bytes -= self._records.bytes[record]

    def _admit(self, head: int) -> None:
        """Room is made before what comes is in the order, as in the node: it does not compete for its own place."""
        self._make_room()
        if self.used_bytes > self.capacity_bytes * self._share:
            self._evict(head)  # larger than the cache
        else:
            self._add(head)

    def _add(self, head: int) -> None:
        records, size = self._records, self.bytes[head]
        prefill_s = self.tokens[head] * records.token_s[head]
        self._order.add(head, worth_of(prefill_s, size, self._rate, self.uses[head], records.position[head]))

    def _make_room(self) -> None:
        room = self.capacity_bytes * self._share
        while self.used_bytes > room:
            head = self._order.pop()
            if head is None:
                return
            self._evict(head)

    def _evict(self, head: int) -> None:
        self._has_evicted = True
        self._end(head)

    def _end(self, head: int) -> None:
        for record in self._records.group(head):
            if record < len(self.is_held) and self.is_held[record]:
                self._take(head, record)
        assert not self.bytes[head], "a group is a head and its mirrors"
        self.groups -= 1


class PolicySimulation:
    """Reads a sample of segments with one miniature a size. ``tiers``: bytes, and bytes a second that loading gives.

    ``capacity_bytes``: of the largest tier there is; ``ssd_bytes``: of the SSD that lies behind memory, 0 without one.
    """

    def __init__(
        self,
        tiers: Iterable[tuple[int, float]],
        order: Callable[[], EvictionOrder[int]],
        capacity_bytes: int = 0,
        ssd_bytes: int = 0,
    ) -> None:
        self._capacity_bytes = capacity_bytes
        self._distances = Distances(capacity_bytes)
        self.miniatures = [Miniature(size, order(), rate) for size, rate in sorted(dict(tiers).items())]
        self.references = self.seconds = self.expected = 0.0
        behind = next((one for one in self.miniatures if one.capacity_bytes == ssd_bytes), None)
        for one in self.miniatures:
            one.behind = behind if one.capacity_bytes < ssd_bytes else None
        self._told = sorted(self.miniatures, key=lambda one: one is not behind)

    def attach(self, records: Records) -> None:
        """See Reader."""
        self._records = records
        self._distances.attach(records)
        for one in self.miniatures:
            one.attach(records)

    def enter(self, record: int) -> None:
        """See Reader."""
        self._distances.enter(record)
        for one in self.miniatures:
            one.store(record)

    def refer(self, record: int, seconds: float, *, is_new: bool) -> None:
        """See Reader. What was found at first sight was found with no more than there is."""
        self.references += 1
        self.seconds += seconds
        self._distances.refer(record, seconds, is_new=is_new)
        for one in self._told:
            is_found, is_near = one.use(record), self._distances.last_bytes <= one.capacity_bytes
            one.count(seconds, is_found=is_near if is_new else is_found, is_near=is_near)

    def miss(self, seconds: float, count: float = 1.0) -> None:
        """See Reader."""
        self.references += count
        self.seconds += seconds

    def resize(self, record: int, record_bytes: int, master: int) -> None:
        """See Reader."""
        holders = [one for one in self.miniatures if one.holds(record)]
        for one in self.miniatures:
            one.drop(record)
        self._distances.resize(record, record_bytes, master)
        for one in holders:
            one.store(record)

    def leave(self, record: int) -> None:
        """See Reader."""
        self._distances.leave(record)
        for one in self.miniatures:
            one.drop(record)

    def rescale(self, rate: float, factor: float) -> None:
        """See Reader."""
        self._distances.rescale(rate, 1.0)
        self.age(factor)
        for one in self.miniatures:
            one.shrink(rate)

    def age(self, factor: float) -> None:
        """See Reader."""
        self.references *= factor
        self.seconds *= factor
        self.expected *= factor
        for one in self.miniatures:
            one.age(factor)

    def expect(self, references: float) -> None:
        """See Reader."""
        self.expected += references

    def points(self, rate: float = 1.0, clustering: float = 1.0) -> tuple[SimulatedPoint, ...]:
        """What every size finds, the smallest first; empty before the first reference.

        ``rate``, ``clustering``: of the sample that is read, for the error.
        """
        if not self.references:
            return ()
        missing = self.expected - self.references if self.expected else 0.0
        return tuple(self._point(one, missing, rate, clustering) for one in self.miniatures)

    def _point(self, one: Miniature, missing: float, rate: float, clustering: float) -> SimulatedPoint:
        seconds_each = self.seconds / self.references
        whole, whole_s = self.references + missing, self.seconds + missing * seconds_each
        differing = one.differing / whole if whole > 0 else 0.0
        return SimulatedPoint(
            one.capacity_bytes,
            _share(one.hits + missing, whole),
            _share(one.seconds + missing * seconds_each, whole_s),
            one.is_reliable,
            one.more_hits / whole if whole > 0 else 0.0,
            one.more_seconds / whole_s if whole_s > 0 else 0.0,
            standard_error(differing, whole / rate, rate, clustering) if whole > 0 else 1.0,
        )


def _share(part: float, whole: float) -> float:
    return min(1.0, max(0.0, part / whole)) if whole > 0 else 0.0
