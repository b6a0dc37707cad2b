"""What went between nodes as 8 bits: sums over this node's ports and all links that it ever made. They never fall.

A link counts by itself as long as it is there. What is left of one that is gone is its last count. The loop's.
"""

from collections.abc import Iterable
from weakref import ref

from kvservice.peers.packed_counters import PackedCounters


class PackedSums:
    """Of links that are watched; how many are gone does not matter."""

    def __init__(self) -> None:
        self._past = PackedCounters()
        self._links: list[tuple[ref[object], PackedCounters]] = []

    def watch(self, link: object, counters: PackedCounters) -> None:
        """Count what a link counts; nobody else counts in ``counters``."""
        self._forget_gone()
        self._links.append((ref(link), counters))

    def total(self, ports: Iterable[PackedCounters]) -> PackedCounters:
        """Of all links, and of these ports."""
        self._forget_gone()
        sums = PackedCounters()
        for one in (self._past, *(counters for _, counters in self._links), *ports):
            sums.add_packed(one)
        return sums

    def _forget_gone(self) -> None:
        there = []
        for link, counters in self._links:
            if link() is None:
                self._past.add_packed(counters)
            else:
                there.append((link, counters))
        self._links = there
