"""Locked objects: found under a lease that is held until each of them was given back, or too much time went by.

An object may be locked several times; each lock is given back once. Who reads keeps the lease, whatever is given back
meanwhile. State only: leases to end are returned, or ended by the last reader.
"""

import threading
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from kvservice.client.connectors.lmcache.vault import Place
from kvservice.client.opaque import FoundRows


@dataclass(eq=False, slots=True)
class _Lease:
    """One answer of the service. ``locks``: how many of its objects are locked. ``readers``: who reads it now."""

    found: FoundRows
    deadline_s: float
    locks: int = 0
    readers: int = 0

    @property
    def is_over(self) -> bool:
        return self.locks == 0 and self.readers == 0


class Holds:
    """Which objects are locked, by any hashable name. Safe from any thread; nothing here calls the service."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[Hashable, list[tuple[_Lease, int]]] = {}

    def __len__(self) -> int:
        """How many locks there are."""
        with self._lock:
            return sum(map(len, self._held.values()))

    def add(self, places: Iterable[tuple[Hashable, Place]], deadline_s: float) -> None:
        """Lock objects until ``drop``, or until ``reap`` after ``deadline_s``."""
        leases: dict[int, _Lease] = {}
        with self._lock:
            for name, place in places:
                lease = leases.setdefault(id(place.found), _Lease(place.found, deadline_s))
                lease.locks += 1
                self._held.setdefault(name, []).append((lease, place.index))

    def drop(self, names: Iterable[Hashable]) -> list[FoundRows]:
        """Give locks back, the oldest of each; returns the leases that end with them. Others are no error."""
        with self._lock:
            return self._ended([self._pop(name, 0) for name in names])

    def reap(self, now_s: float) -> list[FoundRows]:
        """Give up locks whose time is over; returns the leases that end with them."""
        with self._lock:
            late = [
                (name, lease)
                for name, held in self._held.items()
                for lease, _ in held
                if lease.deadline_s <= now_s and not lease.readers
            ]
            return self._ended([self._pop(name, self._index(name, lease)) for name, lease in late])

    @contextmanager
    def reading(self, name: Hashable) -> Iterator[Place | None]:
        """The place of a locked object, whose lease lasts at least as long as this; None if it is not locked."""
        with self._lock:
            held = self._held.get(name)
            lease, index = held[0] if held else (None, 0)
            if lease is not None:
                lease.readers += 1
        if lease is None:
            yield None
            return
        try:
            yield Place(lease.found, index)
        finally:
            with self._lock:
                lease.readers -= 1
                is_over = lease.is_over
            if is_over:
                lease.found.close()

    def _index(self, name: Hashable, lease: _Lease) -> int:
        return next(index for index, (one, _) in enumerate(self._held[name]) if one is lease)

    def _pop(self, name: Hashable, index: int) -> _Lease | None:
        held = self._held.get(name)
        if not held:
            return None
        lease, _ = held.pop(index)
        lease.locks -= 1
        if not held:
            del self._held[name]
        return lease

    def _ended(self, leases: Iterable[_Lease | None]) -> list[FoundRows]:
        distinct: Mapping[int, _Lease] = {id(lease): lease for lease in leases if lease is not None}
        return [lease.found for lease in distinct.values() if lease.is_over]
