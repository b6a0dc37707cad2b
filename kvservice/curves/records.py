"""Watched caches and their segments, as columns of numbers: an object each would take six times the memory. State only.

A record is a number, and so is a segment; numbers are used again. Of ids and contexts, which are digests, the first 8
bytes are kept: of 8,192 segments two are taken for one once in 10**11 samples.
"""

import struct
import sys
from array import array
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from kvservice.caches import Cache

NONE, GONE = -1, -2
"""No record or segment; of a mirror: a master that is watched no more, or is a mirror itself by now."""
ROOM_MIN = 32
MORE = 2
"""A record enters before another leaves."""
SPARE = 2
"""Room of the index, times the segments: probes are short."""
ERAS = 256
SEEN_MASK = (1 << 16) - 1
SEEN_MOST = 255
_FIRST_BYTES = struct.Struct(">Q").unpack_from


def hash_of(digest: bytes) -> int:
    """The first 8 bytes of a digest as a number. What is shorter, and no digest, comes from a client that is wrong."""
    try:
        number: int = _FIRST_BYTES(digest)[0]
    except struct.error:
        return int.from_bytes(digest)
    return number


def slot_of(segment: bytes) -> int:
    """Where a segment is counted in ``Records.seen``; another in every process, and in no document."""
    return hash(segment) & SEEN_MASK


class Records:
    """At most ``records_max`` and two more.

    Columns of records: ``home`` (its segment), ``mark`` (of its context), ``bytes`` (with the rounding of its extent),
    ``tokens``, ``token_s`` (prefill seconds a token), ``position``, ``master``, ``place`` (on a ByteStack, its to set),
    ``era`` (of its last use). Columns of segments: ``id``, ``held`` (records), ``misses`` (the readers' to count).
    A column is another array after it has grown: do not keep it.
    """

    def __init__(self, records_max: int) -> None:
        self._room_max = records_max + MORE
        self.count = self.segments = 0
        self.home, self.master, self.place = array("i"), array("i"), array("i")
        self.mark, self.bytes = array("Q"), array("Q")
        self.tokens, self.position = array("I"), array("I")
        self.token_s, self.era = array("f"), array("B")
        self._older, self._newer = array("i"), array("i")  # in its segment
        self.id, self.held, self.misses, self._slot = array("Q"), array("H"), array("f"), array("H")
        self._seen = bytearray()
        self._oldest, self._newest = array("i"), array("i")
        self._free_record = self._free_segment = NONE
        self._index, self._mask = array("i"), 0
        self._grow_records()
        self._grow_segments()

    def __contains__(self, segment: bytes) -> bool:
        return self.find_segment(hash_of(segment)) >= 0

    def __iter__(self) -> Iterator[int]:
        return (record for record, segment in enumerate(self.home) if segment >= 0)

    @property
    def room(self) -> int:
        """Numbers of records are below this."""
        return len(self.home)

    @property
    def seen(self) -> bytearray:
        """How many segments have this ``slot_of``, SEEN_MOST or more: where there is none, none is known.

        A lookup asks this first, at a sixth of what asking for the segment takes. Made when it is first asked for.
        """
        if not self._seen:
            self._seen = bytearray(SEEN_MASK + 1)
            for segment in self.watched().tolist():
                self._count_seen(self._slot[segment], 1)
        return self._seen

    def _count_seen(self, slot: int, change: int) -> None:
        if self._seen and self._seen[slot] < SEEN_MOST:
            self._seen[slot] += change

    # Finding

    def find_segment(self, id_: int) -> int:
        """The segment with this id, or NONE."""
        index, mask, ids = self._index, self._mask, self.id
        at = id_ & mask
        while (segment := index[at]) >= 0:
            if ids[segment] == id_:
                return segment
            at = at + 1 & mask
        return NONE

    def find(self, segment: int, mark: int) -> int:
        """The record of a context, or NONE."""
        record = self._newest[segment]
        while record >= 0 and self.mark[record] != mark:
            record = self._older[record]
        return record

    def newest(self, segment: int) -> int:
        """The record that was used last."""
        return self._newest[segment]

    def of_segment(self, segment: int) -> Iterator[int]:
        """Its records, the one used longest ago first."""
        record = self._oldest[segment]
        while record >= 0:
            newer = self._newer[record]
            yield record
            record = newer

    def head(self, record: int) -> int:
        """Its master, or itself; GONE for a mirror whose master is."""
        master = self.master[record]
        return record if master == NONE else master

    def group(self, head: int) -> Iterator[int]:
        """A head and its mirrors."""
        return (one for one in self.of_segment(self.home[head]) if one == head or self.master[one] == head)

    def watched(self) -> npt.NDArray[np.intp]:
        """All segments."""
        return np.flatnonzero(np.frombuffer(self.held, np.uint16))

    def from_hash(self, hash_: int) -> list[int]:
        """Segments whose id is ``hash_`` or more."""
        is_meant = np.frombuffer(self.id, np.uint64) >= np.uint64(hash_)
        is_meant &= np.frombuffer(self.held, np.uint16) > 0
        found: list[int] = np.flatnonzero(is_meant).tolist()
        return found

    def hash_that_frees(self, count: int) -> int:
        """The largest id such that the segments from it on have ``count`` records at least."""
        ids, held = np.frombuffer(self.id, np.uint64), np.frombuffer(self.held, np.uint16)
        if count < len(ids):
            halves = np.frombuffer(self.id, np.uint32)[sys.byteorder == "little" :: 2]  # the upper ones, not copied
            top = np.flatnonzero(halves >= np.partition(halves, len(ids) - count)[len(ids) - count])
            ids, held = ids[top], held[top]  # each has a record at least
        order = np.argsort(ids)[::-1]
        return int(ids[order][np.searchsorted(np.cumsum(held[order]), count)])

    # Changing

    def watch(self, id_: int, slot: int) -> int:
        """A new segment, which is to get a record at once. ``slot``: its ``slot_of``."""
        if self._free_segment < 0:
            self._grow_segments()
        segment = self._free_segment
        self._free_segment = self._oldest[segment]
        self.id[segment], self.misses[segment], self._slot[segment] = id_, 0.0, slot
        self._count_seen(slot, 1)
        self._oldest[segment] = self._newest[segment] = NONE
        self.segments += 1
        self._put(segment)
        return segment

    def add(self, segment: int, mark: int, cache: Cache, record_bytes: int, master: int) -> int:
        """A new record, the newest of its segment."""
        if self._free_record < 0:
            self._grow_records()
        record = self._free_record
        self._free_record = self._older[record]
        self.home[record], self.mark[record], self.bytes[record] = segment, mark, record_bytes
        self.tokens[record], self.position[record] = cache.family.tokens, cache.position
        self.token_s[record] = cache.family.space.token_s
        self.master[record], self.place[record] = master, NONE
        self.count += 1
        self.held[segment] += 1
        self._append(record)
        return record

    def remove(self, record: int) -> None:
        """Its mirrors lose their master; a segment without records goes too."""
        segment = self.home[record]
        self.orphan(record)
        self._unlink(record)
        self.home[record] = NONE
        self._older[record], self._free_record = self._free_record, record
        self.count -= 1
        self.held[segment] -= 1
        if not self.held[segment]:
            self._take(segment)
            self._count_seen(self._slot[segment], -1)
            self.id[segment] = 0  # below all others
            self._oldest[segment], self._free_segment = self._free_segment, segment
            self.segments -= 1

    def orphan(self, record: int) -> None:
        """It is no master any more."""
        segment = self.home[record]
        for one in self.of_segment(segment) if self.held[segment] > 1 else ():
            if self.master[one] == record:
                self.master[one] = GONE

    def touch(self, record: int) -> None:
        """It is the newest of its segment."""
        if self._newer[record] >= 0:
            self._unlink(record)
            self._append(record)

    def scale_misses(self, factor: float) -> None:
        """All misses count ``factor`` times as much."""
        np.frombuffer(self.misses, np.float32)[:] *= np.float32(factor)

    def _append(self, record: int) -> None:
        segment = self.home[record]
        newest = self._newest[segment]
        self._older[record], self._newer[record] = newest, NONE
        if newest >= 0:
            self._newer[newest] = record
        else:
            self._oldest[segment] = record
        self._newest[segment] = record

    def _unlink(self, record: int) -> None:
        segment, older, newer = self.home[record], self._older[record], self._newer[record]
        if older >= 0:
            self._newer[older] = newer
        else:
            self._oldest[segment] = newer
        if newer >= 0:
            self._older[newer] = older
        else:
            self._newest[segment] = older

    # The index: open addressing, and what is taken out leaves no gap

    def _put(self, segment: int) -> None:
        at = self.id[segment] & self._mask
        while self._index[at] >= 0:
            at = at + 1 & self._mask
        self._index[at] = segment

    def _take(self, segment: int) -> None:
        index, mask, ids = self._index, self._mask, self.id
        gap = ids[segment] & mask
        while index[gap] != segment:
            gap = gap + 1 & mask
        at = gap + 1 & mask
        while (other := index[at]) >= 0:
            if at - (ids[other] & mask) & mask >= at - gap & mask:  # it came past the gap on its way
                index[gap], gap = other, at
            at = at + 1 & mask
        index[gap] = NONE

    # Room: doubled, and exactly that much, where an array that is extended takes a sixteenth more

    def _more(self, there: int) -> int:
        return min(max(there, ROOM_MIN), self._room_max - there)

    def _grow_records(self) -> None:
        there, more = len(self.home), self._more(len(self.home))
        assert more > 0, "who adds has removed"
        free = array("i", range(there + 1, there + more + 1))
        free[-1] = NONE
        self._free_record = there
        for_numbers, for_none = array("i", [0]) * more, array("i", [NONE]) * more
        self.home, self.master, self.place = self.home + for_none, self.master + for_none, self.place + for_none
        self._older, self._newer = self._older + free, self._newer + for_numbers
        self.mark, self.bytes = self.mark + array("Q", [0]) * more, self.bytes + array("Q", [0]) * more
        self.tokens, self.position = self.tokens + array("I", [0]) * more, self.position + array("I", [0]) * more
        self.token_s, self.era = self.token_s + array("f", [0]) * more, self.era + array("B", [0]) * more

    def _grow_segments(self) -> None:
        there, more = len(self.id), self._more(len(self.id))
        assert more > 0, "who adds has removed"
        free = array("i", range(there + 1, there + more + 1))
        free[-1] = NONE
        self._free_segment = there
        self._oldest, self._newest = self._oldest + free, self._newest + array("i", [NONE]) * more
        self.id, self.held = self.id + array("Q", [0]) * more, self.held + array("H", [0]) * more
        self.misses, self._slot = self.misses + array("f", [0]) * more, self._slot + array("H", [0]) * more
        size = 1 << (SPARE * max(len(self.id) - MORE, ROOM_MIN) - 1).bit_length()
        self._index, self._mask = array("i", [NONE]) * size, size - 1
        for segment in self.watched().tolist():
            self._put(segment)
