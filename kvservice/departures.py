"""What went lately and why: a ring of fixed size, for `explain` only. State only, owned by one thread.

A cache that is folded or moves to another master keeps its key and is found under it, so that is no departure. The ring
begins empty at every start; the oldest entry goes for the newest. Noting costs 1-2 us, finding scans the ring: 40 us.
"""

import enum
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvservice.caches import Cache
from kvservice.model.errors import BY_CODE, KVServiceError
from kvservice.model.segment import CacheKey

CODES = tuple(BY_CODE)
MARK_BYTES = 8
"""Of each of namespace, segment and context: two keys alike in all 24 bytes do not happen by chance."""


class Gone(enum.IntEnum):
    """Why a key is not found any more, or never was."""

    EVICTED = 1
    """From memory; ``detail``: why it was not on SSD, a number of ``kvservice.explaining.NOT_ON_SSD``."""
    EVICTED_FROM_SSD = 2
    DELETED = 3
    QUARANTINED = 4
    REFUSED = 5
    """A write failed; ``detail``: the error's place in CODES."""
    NOT_BROUGHT = 6
    """Another place had it, and it did not arrive whole."""


class Departure(NamedTuple):
    """One entry of the ring. ``age_s``: seconds ago."""

    why: Gone
    detail: int
    age_s: float


class Departures:
    """The last ``size`` keys that went, at 34 bytes each. ``clock``: monotonic seconds.

    ``why_not_on_ssd`` is asked, once, about a cache that is evicted from memory and on no SSD.
    """

    def __init__(self, clock: Callable[[], float], size: int) -> None:
        assert size > 0, "a ring has room"
        self.why_not_on_ssd: Callable[[Cache], int] = _unknown
        self._clock = clock
        self._began_s = clock()
        self._size = size
        self._count = 0
        # A column each: a scan reads the segments' half MiB, 40 us, and of the others only what it found.
        self._namespaces, self._segments, self._contexts = (np.zeros(size, np.uint64) for _ in range(3))
        self._when_s = np.zeros(size)
        self._why, self._detail = (np.zeros(size, np.uint8) for _ in range(2))

    def __len__(self) -> int:
        return min(self._count, self._size)

    @property
    def remembered_s(self) -> float:
        """How far back nothing was forgotten: to the start of the node, or to the oldest entry of a full ring."""
        is_full = self._count >= self._size
        return self._clock() - (float(self._when_s[self._count % self._size]) if is_full else self._began_s)

    @property
    def nbytes(self) -> int:
        """Bytes that it takes, full or not."""
        columns = (self._namespaces, self._segments, self._contexts, self._when_s, self._why, self._detail)
        return sum(column.nbytes for column in columns)

    def note_gone(self, cache: Cache, why: Gone) -> None:
        """A cache went out of sight."""
        detail = self.why_not_on_ssd(cache) if why is Gone.EVICTED else 0
        self._note(cache.family.space.namespace, cache.family.segment, cache.context, why, detail)

    def note_refused(self, namespace: bytes, key: CacheKey, error: KVServiceError) -> None:
        """A write failed; the key is not stored."""
        self._note(namespace, key.segment, key.context, Gone.REFUSED, CODES.index(error.code))

    def of_key(self, namespace: bytes, segment: bytes, context: bytes) -> Departure | None:
        """What became of a key last."""
        found = self._of(namespace, segment)
        return self._newest(found[self._contexts[found] == _mark(context)])

    def of_segment(self, namespace: bytes, segment: bytes) -> Departure | None:
        """What became last of any cache of a segment."""
        return self._newest(self._of(namespace, segment))

    def _of(self, namespace: bytes, segment: bytes) -> npt.NDArray[np.intp]:
        found = np.flatnonzero(self._segments == _mark(segment))
        is_it: npt.NDArray[np.bool_] = (self._namespaces[found] == _mark(namespace)) & (self._why[found] > 0)
        return np.asarray(found[is_it])

    def _newest(self, found: npt.NDArray[np.intp]) -> Departure | None:
        if not len(found):
            return None
        at = found[np.argmax((found - self._count) % self._size)]
        return Departure(Gone(int(self._why[at])), int(self._detail[at]), self._clock() - float(self._when_s[at]))

    def _note(self, namespace: bytes, segment: bytes, context: bytes, why: Gone, detail: int) -> None:
        at, self._count = self._count % self._size, self._count + 1
        self._namespaces[at], self._segments[at], self._contexts[at] = map(_mark, (namespace, segment, context))
        self._when_s[at], self._why[at], self._detail[at] = self._clock(), why, detail


def _mark(id_: bytes) -> int:
    return int.from_bytes(id_[:MARK_BYTES], "little")


def _unknown(_: Cache) -> int:
    return 0
