"""What the policy in force would find with other sizes: miniature caches that run the node's own order of eviction.

Waldspurger et al., "Cache Modeling and Optimization using Miniature Simulations" (USENIX ATC 2017): of a share R of all
segments, a cache with R times the bytes finds what the whole cache finds of all. Whole groups go, as in the node.
State only.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvservice.curves.sample import Record
from kvservice.orders import worth_of
from kvservice.storage.eviction import EvictionOrder

GROUPS_MIN = 16
"""A miniature with room for fewer groups of the mean size says nothing: a cache of 16 pieces is another cache."""


class Group:
    """Records of a master and its mirrors that a miniature holds, by record; compared by identity."""

    __slots__ = ("bytes", "head", "members", "tokens", "uses")

    def __init__(self, head: Record) -> None:
        self.head = head
        self.members: dict[Record, int] = {}
        self.bytes = 0
        self.tokens = 0
        self.uses = 0


@dataclass(frozen=True, slots=True)
class SimulatedPoint:
    """What one size finds. ``hits`` and ``seconds``: shares of all references, and of their prefill seconds.

    ``is_reliable``: False where the miniature had room for too few groups.
    """

    capacity_bytes: int
    hits: float
    seconds: float
    is_reliable: bool


class Miniature:
    """One cache of ``capacity_bytes``, made a share of that large. ``rate``: bytes a second that its tier gives."""

    def __init__(self, capacity_bytes: int, order: EvictionOrder[Group], rate: float) -> None:
        self.capacity_bytes = capacity_bytes
        self.hits = self.seconds = 0.0
        self.used_bytes = 0
        self.groups: dict[Record, Group] = {}
        self._order = order
        self._rate = rate
        self._share = 1.0
        self._has_evicted = False

    @property
    def is_reliable(self) -> bool:
        """Does it hold enough groups, or did it never need to choose?"""
        return not self._has_evicted or len(self.groups) >= GROUPS_MIN

    def holds(self, record: Record) -> bool:
        """Is the record here, with the master that it needs?"""
        group = self.groups.get(record.master or record)
        return group is not None and record in group.members and group.head in group.members

    def use(self, record: Record) -> bool:
        """A lookup asks for the record; whoever misses it stores what it then computed. True if it was found."""
        is_found, head = self.holds(record), record.master or record
        group = self._taken_out(head)
        group.uses += is_found
        self._put(group, head)
        if record is not head:
            self._put(group, record)
        self._admit(group)
        return is_found

    def store(self, record: Record) -> None:
        """The record is new."""
        group = self._taken_out(record.master or record)
        self._put(group, record)
        self._admit(group)

    def drop(self, record: Record) -> None:
        """The record is gone, or needs a place in another group."""
        for head in (record, record.master):
            group = None if head is None else self.groups.get(head)
            if group is not None and record in group.members:
                self._order.remove(group)
                size = group.members.pop(record)
                group.bytes -= size
                group.tokens -= record.tokens
                self.used_bytes -= size
                if group.members:
                    self._add(group)
                else:
                    del self.groups[group.head]

    def shrink(self, share: float) -> None:
        """It is made ``share`` times as large as the cache that it stands for."""
        self._share = share
        self._make_room()

    def _taken_out(self, head: Record) -> Group:
        group = self.groups.get(head)
        if group is None:
            group = self.groups[head] = Group(head)
        else:
            self._order.remove(group)
        return group

    def _put(self, group: Group, record: Record) -> None:
        change = record.record_bytes - group.members.get(record, 0)
        if record not in group.members:
            group.tokens += record.tokens
        group.members[record] = record.record_bytes
        group.bytes += change
        self.used_bytes += change

    def _admit(self, group: Group) -> None:
        """Room is made before what comes is in the order, as in the node: it does not compete for its own place."""
        self._make_room()
        if self.used_bytes > self.capacity_bytes * self._share:
            self._evict(group)  # larger than the cache
        else:
            self._add(group)

    def _add(self, group: Group) -> None:
        head = group.head
        worth = worth_of(group.tokens * head.token_s, group.bytes, self._rate, group.uses, head.position)
        self._order.add(group, worth)

    def _make_room(self) -> None:
        room = self.capacity_bytes * self._share
        while self.used_bytes > room:
            group = self._order.pop()
            if group is None:
                return
            self._evict(group)

    def _evict(self, group: Group) -> None:
        self._has_evicted = True
        self.used_bytes -= group.bytes
        del self.groups[group.head]


class PolicySimulation:
    """Reads a sample of segments with one miniature a size. ``tiers``: bytes, and bytes a second that loading gives.

    ``capacity_bytes``: of the largest tier there is.
    """

    def __init__(
        self, tiers: Iterable[tuple[int, float]], order: Callable[[], EvictionOrder[Group]], capacity_bytes: int = 0
    ) -> None:
        self._capacity_bytes = capacity_bytes
        self.miniatures = [Miniature(size, order(), rate) for size, rate in sorted(dict(tiers).items())]
        self.references = self.seconds = self.expected = 0.0

    def enter(self, record: Record) -> None:
        """See Reader."""
        for one in self.miniatures:
            one.store(record)

    def refer(self, record: Record, seconds: float, *, is_new: bool) -> None:
        """See Reader. What was found at first sight was found with no more than there is."""
        self.references += 1
        self.seconds += seconds
        for one in self.miniatures:
            is_found = one.use(record)
            if one.capacity_bytes >= self._capacity_bytes if is_new else is_found:
                one.hits += 1
                one.seconds += seconds

    def miss(self, seconds: float, count: float = 1.0) -> None:
        """See Reader."""
        self.references += count
        self.seconds += seconds

    def resize(self, record: Record, record_bytes: int, master: Record | None) -> None:
        """See Reader."""
        holders = [one for one in self.miniatures if one.holds(record)]
        for one in self.miniatures:
            one.drop(record)
        record.record_bytes, record.master = record_bytes, master
        for one in holders:
            one.store(record)

    def leave(self, record: Record) -> None:
        """See Reader."""
        for one in self.miniatures:
            one.drop(record)

    def rescale(self, rate: float, factor: float) -> None:
        """See Reader."""
        self.age(factor)
        for one in self.miniatures:
            one.shrink(rate)

    def age(self, factor: float) -> None:
        """See Reader."""
        self.references *= factor
        self.seconds *= factor
        self.expected *= factor
        for one in self.miniatures:
            one.hits *= factor
            one.seconds *= factor

    def expect(self, references: float) -> None:
        """See Reader."""
        self.expected += references

    def points(self) -> tuple[SimulatedPoint, ...]:
        """What every size finds, the smallest first; empty before the first reference."""
        if not self.references:
            return ()
        missing = self.expected - self.references if self.expected else 0.0
        missing_s = missing * self.seconds / self.references
        return tuple(
            SimulatedPoint(
                one.capacity_bytes,
                _share(one.hits + missing, self.references + missing),
                _share(one.seconds + missing_s, self.seconds + missing_s),
                one.is_reliable,
            )
            for one in self.miniatures
        )


def _share(part: float, whole: float) -> float:
    return min(1.0, max(0.0, part / whole)) if whole > 0 else 0.0
