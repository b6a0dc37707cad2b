"""In which order a tier gives up what it holds. Policy only: evicts nothing, knows no leases."""

from collections.abc import Hashable, Iterator
from typing import Generic, Protocol, TypeVar

from sortedcontainers import SortedDict

Key = TypeVar("Key", bound=Hashable)


class EvictionOrder(Protocol[Key]):
    """Ranks keys by how little is lost with them. Owned by one thread.

    Keys are added once and known until removed; the programmer guarantees both (asserted).
    """

    @property
    def used_bytes(self) -> int:
        """Bytes of all keys."""

    def add(self, key: Key, bytes: int) -> None:  # noqa: A002  the design's word for sizes
        """Start ranking ``key``, just used, of ``bytes`` bytes."""

    def touch(self, key: Key) -> None:
        """``key`` was used."""

    def remove(self, key: Key) -> None:
        """Stop ranking ``key``."""

    def bytes_of(self, key: Key) -> int:
        """What evicting ``key`` would free."""

    def candidates(self) -> Iterator[Key]:
        """The keys known now, first to go first. Adding, touching and removing keys while iterating is fine: what
        is removed or touched does not come any more."""


class LruOrder(Generic[Key]):
    """Least recently used first. O(log n); the reference for policies that weigh value."""

    def __init__(self) -> None:
        self.used_bytes = 0
        self._bytes: dict[Key, int] = {}
        self._stamp_of: dict[Key, int] = {}
        self._by_stamp: SortedDict = SortedDict()
        self._next_stamp = 0

    def __len__(self) -> int:
        return len(self._bytes)

    def __contains__(self, key: Key) -> bool:
        return key in self._bytes

    def add(self, key: Key, bytes: int) -> None:  # noqa: A002
        """See EvictionOrder."""
        assert key not in self._bytes, key
        assert bytes >= 0, bytes
        self._bytes[key] = bytes
        self.used_bytes += bytes
        self._stamp(key)

    def touch(self, key: Key) -> None:
        """See EvictionOrder."""
        del self._by_stamp[self._stamp_of[key]]
        self._stamp(key)

    def remove(self, key: Key) -> None:
        """See EvictionOrder."""
        self.used_bytes -= self._bytes.pop(key)
        del self._by_stamp[self._stamp_of.pop(key)]

    def bytes_of(self, key: Key) -> int:
        """See EvictionOrder."""
        return self._bytes[key]

    def candidates(self) -> Iterator[Key]:
        """See EvictionOrder."""
        last, end = -1, self._next_stamp
        while (index := self._by_stamp.bisect_right(last)) < len(self._by_stamp):
            last, key = self._by_stamp.peekitem(index)
            if last >= end:
                return
            yield key

    def _stamp(self, key: Key) -> None:
        self._stamp_of[key] = self._next_stamp
        self._by_stamp[self._next_stamp] = key
        self._next_stamp += 1
