"""Verifies a record while its pieces arrive, so that its first layers are read while the last ones are on their way."""

import threading
from collections.abc import Callable

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


class InOrder:
    """Has bytes that come in pieces, in any order and from any thread, looked at in order and by one thread at a time.

    ``look(end)``: all before ``end`` is there. Who brings a piece while another thread looks leaves it to that one and
    goes on: where two threads bring pieces, one looks while the other brings.
    """

    def __init__(self, look: Callable[[int], None]) -> None:
        self._look = look
        self._lock = threading.Lock()
        self._waiting: dict[int, int] = {}
        self._end = 0
        self._is_looking = False

    def arrived(self, start: int, end: int) -> None:
        """Bytes [start, end) are there and stay as they are. Raises what ``look`` does; the next one looks again."""
        with self._lock:
            self._waiting[start] = end
            while self._end in self._waiting:
                self._end = self._waiting.pop(self._end)
            if self._is_looking:
                return
            self._is_looking = True
        seen = -1
        try:
            while (end := self._end_beyond(seen)) > seen:
                self._look(end)
                seen = end
        except BaseException:
            self._is_looking = False
            raise

    def _end_beyond(self, seen: int) -> int:
        """Up to where all is there; if that is no news, nobody looks from now on."""
        with self._lock:
            self._is_looking = self._end > seen
            return self._end


class RecordArrival:
    """One record on its way into ``target``. Pieces may arrive in any order, from any thread.

    ``namespace``, ``key``, ``generation`` and ``master``: what the record must be; another one in its place is CORRUPT.
    """

    def __init__(
        self, target: Bytes, namespace: Namespace, key: CacheKey, generation: int, master: MasterReference | None
    ) -> None:
        self._target = target
        self._said = (namespace, key, generation, master)
        self._pieces = InOrder(self._verify)
        self._reader: RecordReader | None = None
        self._layers = 0

    @property
    def layers(self) -> int:
        """How many layers, from the first on, are known to be right."""
        return self._layers

    def arrived(self, start: int, end: int) -> int:
        """Bytes [start, end) are there: how many layers, from the first on, are now known to be right.

        Raises CorruptError once something is not what was stored; nothing behind it is ever counted. A piece that
        closes a gap verifies all that waited for it, in the calling thread; or in the one that verifies just then,
        which is then told of those layers, too.
        """
        self._pieces.arrived(start, end)
        return self._layers

    def _verify(self, end: int) -> None:
        if self._reader is None:
            if not is_head_here(self._target, end):
                return
            self._reader = self._open()
        ends = [*self._reader.layout.section_offsets[1:], self._reader.layout.record_bytes]
        while self._layers < len(ends) and ends[self._layers] <= end:
            self._reader.verify_layer(self._layers)
            self._layers += 1

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
