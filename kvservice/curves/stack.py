"""The bytes used since a record was last used: Mattson's stack by bytes, over a Fenwick tree of places in order of use.

State only. Mattson et al., "Evaluation techniques for storage hierarchies" (1970); the tree in place of the list as in
Olken (1981). Tests hold it against a plain list.
"""

from array import array
from collections.abc import Iterator
from typing import Protocol

import numpy as np

KEYS_MIN = 32
"""Room at first."""
PART = 1024
"""Records numbered at a time, so that it takes no memory to speak of."""


class Placed(Protocol):
    """Columns of what lies on the stack. ``place`` is the stack's to set; -1: not on it."""

    place: "array[int]"
    bytes: "array[int]"


class ByteStack:
    """Records by last use, each with its bytes. Every call O(log n), renumbering O(n) once in n calls."""

    def __init__(self, records: Placed) -> None:
        self._records = records
        self._at, self._next, self._tree = array("i"), 0, array("q")
        self._renumber()

    def _renumber(self) -> None:
        """Number the records anew, the one used longest ago first; the tree has room for half as many more
        at least, so that it is renumbered once in as many uses."""
        at = np.frombuffer(self._at, np.int32)
        keys = at[at >= 0]
        count = len(keys)
        least = max(count + count // 2, KEYS_MIN)
        if not least <= len(at) <= 4 * least:  # else the same arrays: a curve never has two of each
            room = 1 << (least - 1).bit_length()
            self._at, self._tree = array("i", [-1]) * room, array("q", [0]) * (room + 1)
            at = np.frombuffer(self._at, np.int32)
        tree = np.frombuffer(self._tree, np.uint64)
        at[:count], at[count:], tree[0], tree[count + 1 :] = keys, -1, 0, 0
        places, sizes = np.frombuffer(self._records.place, np.int32), np.frombuffer(self._records.bytes, np.uint64)
        for first in range(0, count, PART):
            part = keys[first : first + PART]
            places[part] = np.arange(first, first + len(part), dtype=np.int32)
            tree[first + 1 : first + 1 + len(part)] = sizes[part]
        self._next, self.bytes, room = count, int(tree.sum()), len(at)
        step = 1
        while 2 * step <= room:  # every node is whole before its parent takes it in
            parents = tree[2 * step :: 2 * step]
            parents += tree[step :: 2 * step][: len(parents)]
            step *= 2

    def __iter__(self) -> Iterator[int]:
        """The record used longest ago first."""
        return (record for record in self._at if record >= 0)

    def above(self, record: int) -> int:
        """Bytes of all records used after ``record``."""
        at, tree, below = self._records.place[record] + 1, self._tree, 0
        while at:
            below += tree[at]
            at &= at - 1
        return self.bytes - below

    def push(self, record: int) -> None:
        """``record`` is used now; it may be on the stack already."""
        if self._records.place[record] >= 0:
            self.remove(record)
        if self._next == len(self._at):
            self._renumber()
        place, self._next = self._next, self._next + 1
        self._at[place], self._records.place[record] = record, place
        self._add(place, self._records.bytes[record])

    def remove(self, record: int) -> None:
        """Take ``record`` off."""
        place = self._records.place[record]
        self._add(place, -self._records.bytes[record])
        self._at[place] = self._records.place[record] = -1

    def resize(self, record: int, record_bytes: int) -> None:
        """``record`` has another size from now on; its place stays."""
        self._add(self._records.place[record], record_bytes - self._records.bytes[record])
        self._records.bytes[record] = record_bytes

    def _add(self, place: int, change: int) -> None:
        self.bytes += change
        at, tree = place + 1, self._tree
        end = len(tree)
        while at < end:
            tree[at] += change
            at += at & -at
