"""Recorded traces: what a node was asked for and stored, as events; and their reuse distances, slowly and exactly.

The files are made by bench/curve_traces.py: real clients playing debates of agents on a real node.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.curve_traces import COLUMNS, FOUND, MISSED, NOTHING
from kvservice.caches import Cache
from kvservice.curves.events import Event, Missing, Stored
from tests.curves.builders import digest, make_cache, make_space, segment_of

FOLDER = Path(__file__).resolve().parent / "data"
NAMES = tuple(sorted(file.stem for file in FOLDER.glob("*.parquet")))
Key = tuple[int, int]


def read_trace(name: str) -> list[list[int]]:
    """Rows of COLUMNS."""
    pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq  # type: ignore[import-not-found, unused-ignore]

    table: Any = pq.read_table(FOLDER / f"{name}.parquet")
    rows: list[list[int]] = np.stack([table[column].to_numpy() for column in COLUMNS], axis=1).tolist()
    return rows


def events_of_trace(rows: Sequence[Sequence[int]]) -> list[Event]:
    """The same as a node tells its curves; ids are other digests, one for one."""
    space = make_space()
    caches: dict[tuple[int, ...], Cache] = {}

    def cache_of(segment: int, context: int, size: int, tokens: int, master: int) -> Cache:
        key = (segment, context, size, master)
        if key not in caches:
            head = heads.get((segment, master)) if master != NOTHING else None
            caches[key] = make_cache(space, segment, size, context=context, master=head, tokens=tokens)
        if master == NOTHING:
            heads[segment, context] = caches[key]
        return caches[key]

    heads: dict[Key, Cache] = {}
    events: list[Event] = []
    for kind, _, segment, context, master, size, tokens in rows:
        if kind == MISSED:
            marks = (digest(b"context", context),)
            events.append(Missing(space, segment_of(space, segment), marks, tokens, False))
        else:
            cache = cache_of(segment, context, size, tokens, master)
            events.append(cache if kind == FOUND else Stored(cache))
    return events


class ExactStack:
    """Mattson's stack by bytes over times of use, for a trace known to be so long: O(log n) each."""

    def __init__(self, length: int) -> None:
        self._tree = [0] * (2 * length + 2)
        self._now = self._total = 0
        self._used_at: dict[Key, int] = {}
        self.sizes: dict[Key, int] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._used_at

    def distance(self, key: Key) -> int:
        """Bytes of all down to ``key``, itself included."""
        at, below = self._used_at[key] - 1, 0
        while at:
            below += self._tree[at]
            at &= at - 1
        return self._total - below

    def use(self, key: Key) -> None:
        if key in self._used_at:
            self._add(self._used_at[key], -self.sizes[key])
        self._now += 1
        self._used_at[key] = self._now
        self._add(self._now, self.sizes[key])

    def resize(self, key: Key, size: int) -> None:
        if key in self._used_at:
            self._add(self._used_at[key], size - self.sizes[key])
        self.sizes[key] = size

    def _add(self, at: int, change: int) -> None:
        self._total += change
        while at < len(self._tree):
            self._tree[at] += change
            at += at & -at


def exact_distances_of_trace(rows: Sequence[Sequence[int]]) -> list[float | None]:
    """Of every lookup: of the cache and, for a mirror, its master, whichever lies deeper; None: never stored before."""
    stack, masters, found = ExactStack(2 * len(rows)), dict[Key, Key | None](), list[float | None]()
    for kind, _, segment, context, master, size, _ in rows:
        key: Key = (segment, context)
        if kind != MISSED:
            masters[key] = None if master == NOTHING else (segment, master)
            stack.resize(key, size)
        head = masters.get(key)
        if kind <= MISSED:
            known = key in stack and (head is None or head in stack)
            found.append(max(stack.distance(one) for one in (key, head) if one is not None) if known else None)
        if kind <= MISSED and key in stack:
            if head is not None:
                stack.use(head)
            stack.use(key)
        elif kind != MISSED and key not in stack:
            stack.use(key)
    return found
