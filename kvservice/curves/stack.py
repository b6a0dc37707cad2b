"""The bytes used since a key was last used: Mattson's stack by bytes, over a Fenwick tree of places in order of use.

State only. Mattson et al., "Evaluation techniques for storage hierarchies" (1970); the tree in place of the list as in
Olken (1981). Tests hold it against a plain list.
"""

from array import array
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

import numpy as np

SPARE = 2
"""Places for each key: the tree is renumbered once for as many uses as there are keys."""
KEYS_MIN = 64
"""Room at first."""


class Placed(Protocol):
    """What lies on the stack. ``place`` is the stack's to set; -1: not on it."""

    place: int
    record_bytes: int


P = TypeVar("P", bound=Placed)


class ByteStack(Generic[P]):
    """Keys by last use, each with its bytes. Every call O(log n), renumbering O(n) once in n calls."""

    def __init__(self) -> None:
        self._start([])

    def _start(self, keys: list[P]) -> None:
        """Number the keys anew, the one used longest ago first; the tree has room for twice as many."""
        room = SPARE * max(len(keys), KEYS_MIN)
        self._at: list[P | None] = [*keys, *([None] * (room - len(keys)))]
        self._next = len(keys)
        sizes = np.zeros(room + 1, np.int64)
        sizes[1 : len(keys) + 1] = [key.record_bytes for key in keys]
        sums, index = np.cumsum(sizes), np.arange(room + 1)
        self._tree = array("q", (sums - sums[index - (index & -index)]).tolist())
        self._tree[0] = 0
        self.bytes = int(sums[-1])
        for place, key in enumerate(keys):
            key.place = place

    def __iter__(self) -> Iterator[P]:
        """The key used longest ago first."""
        return (key for key in self._at if key is not None)

    def above(self, key: P) -> int:
        """Bytes of all keys used after ``key``."""
        at, tree, below = key.place + 1, self._tree, 0
        while at:
            below += tree[at]
            at &= at - 1
        return self.bytes - below

    def push(self, key: P) -> None:
        """``key`` is used now; it may be on the stack already."""
        if key.place >= 0:
            self.remove(key)
        if self._next == len(self._at):
            self._start(list(self))
        key.place, self._next = self._next, self._next + 1
        self._at[key.place] = key
        self._add(key.place, key.record_bytes)

    def remove(self, key: P) -> None:
        """Take ``key`` off."""
        self._add(key.place, -key.record_bytes)
        self._at[key.place] = None
        key.place = -1

    def resize(self, key: P, record_bytes: int) -> None:
        """``key`` has another size from now on; its place stays."""
        self._add(key.place, record_bytes - key.record_bytes)
        key.record_bytes = record_bytes

    def _add(self, place: int, change: int) -> None:
        self.bytes += change
        at, tree = place + 1, self._tree
        end = len(tree)
        while at < end:
            tree[at] += change
            at += at & -at
