"""Verifies a record while its pieces arrive, so that its first layers are read while the last ones are on their way."""

import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import pairwise

from kvservice.model.cache import MasterReference
from kvservice.model.errors import CorruptError, RecordFormatError
from kvservice.model.identity import Namespace
from kvservice.model.segment import CacheKey
from kvservice.storage.buffer import Bytes
from kvservice.storage.record_header import PREFIX_BYTES, said_header_bytes
from kvservice.storage.record_layout import SECTION_ALIGNMENT
from kvservice.storage.record_reader import RecordReader


def is_head_here(target: Bytes, end: int) -> bool:
    """Is the head with its padding among the first ``end`` bytes, as far as its prefix can be believed?"""
    if end < min(len(target), PREFIX_BYTES):
        return False
    if len(target) < PREFIX_BYTES:
        return True
    header_bytes = said_header_bytes(target[:PREFIX_BYTES].tobytes())
    return end >= min(len(target), PREFIX_BYTES + header_bytes + SECTION_ALIGNMENT)


class Contiguous:
    """Up to where pieces that come in any order are there without a gap. One thread at a time."""

    def __init__(self, end: int = 0) -> None:
        self.end = end
        self._waiting: dict[int, int] = {}

    def add(self, start: int, end: int) -> None:
        """One more, that overlaps none."""
        self._waiting[start] = end
        while self.end in self._waiting:
            self.end = self._waiting.pop(self.end)


class Sections:
    """Which layers' sections are whole, while a record's pieces arrive: in any order, from any thread, each byte once.

    ``open_head`` is called once the head is there: where each section begins, and the record's end.
    """

    def __init__(self, target: Bytes, open_head: Callable[[], Sequence[int]]) -> None:
        self._target = target
        self._open_head = open_head
        self._lock = threading.Lock()
        self._before: list[tuple[int, int]] = []
        self._head = Contiguous()
        self._bounds: Sequence[int] = ()
        self._missing: list[int] = []

    def arrived(self, start: int, end: int) -> list[int]:
        """Bytes [start, end) are there and stay as they are: the layers that are whole with them, each told once.

        Raises what ``open_head`` does, the next piece then tries again; CorruptError for bytes that come twice.
        """
        with self._lock:
            if self._bounds:
                return self._count(start, end)
            self._before.append((start, end))
            self._head.add(start, end)
            if not is_head_here(self._target, self._head.end):
                return []
            bounds = self._open_head()
            self._missing = [behind - first for first, behind in pairwise(bounds)]
            self._bounds, before, self._before = bounds, self._before, []
            empty = [layer for layer, count in enumerate(self._missing) if not count]  # a mirror without a diff there
            return sorted([*empty, *(layer for piece in before for layer in self._count(*piece))])

    def _count(self, start: int, end: int) -> list[int]:
        whole, bounds = [], self._bounds
        for layer in range(max(0, bisect_right(bounds, start) - 1), len(self._missing)):
            if bounds[layer] >= end:
                break
            count = min(end, bounds[layer + 1]) - max(start, bounds[layer])
            self._missing[layer] -= count
            if self._missing[layer] < 0:
                raise CorruptError(f"bytes {start} to {end} of a record came twice")
            if count and not self._missing[layer]:
                whole.append(layer)
        return whole


class RecordArrival:
    """One record on its way into ``target``. Pieces may arrive in any order, from any thread.

    ``namespace``, ``key``, ``generation`` and ``master``: what the record must be; another one in its place is CORRUPT.
    """

    def __init__(
        self, target: Bytes, namespace: Namespace, key: CacheKey, generation: int, master: MasterReference | None
    ) -> None:
        self._target = target
        self._said = (namespace, key, generation, master)
        self._sections = Sections(target, self._open_head)
        self._reader: RecordReader | None = None
        self._right = bytearray()

    @property
    def layers(self) -> int:
        """How many layers, from the first on, are known to be right."""
        right = self._right  # another thread may open the head just now
        known = right.find(0)
        return len(right) if known < 0 else known

    def arrived(self, start: int, end: int) -> int:
        """Bytes [start, end) are there: how many layers, from the first on, are now known to be right.

        The layers that are whole with them are verified in the calling thread, others' at the same time in theirs.
        Raises CorruptError if one is not what was stored; nothing behind it is ever counted.
        """
        for layer in self._sections.arrived(start, end):
            assert self._reader is not None, "it tells where layers are"
            self._reader.verify_layer(layer)
            self._right[layer] = 1
        return self.layers

    def _open_head(self) -> Sequence[int]:
        self._reader = self._open()
        self._right = bytearray(len(self._reader.section_checksums))
        return self._reader.layout.bounds

    def _open(self) -> RecordReader:
        try:
            reader = RecordReader(self._target)
        except RecordFormatError as error:
            raise CorruptError(f"cache {self._said[1]}: what lies in its place is no record: {error}") from error
        found = (reader.meta.namespace, reader.meta.key, reader.generation, reader.meta.master)
        if found != self._said or reader.layout.record_bytes != len(self._target):
            raise CorruptError(
                f"cache {self._said[1]}: in its place lies the {reader} of {reader.layout.record_bytes} bytes, "
                f"generation {reader.generation:016x}"
            )
        return reader
