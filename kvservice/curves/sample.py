"""Which segments are watched: those whose id lies below a threshold, so many that their records stay under a limit.

SHARDS of fixed size (Waldspurger et al., "Efficient MRC Construction with SHARDS", FAST 2015). Ids are digests, so the
first bytes of one are its hash. All caches of a segment, master and mirrors, are in the sample, or none is; every
segment has the same chance, and with it its whole history. State only.
"""

from collections.abc import Iterator
from heapq import heappop, heappush
from typing import Protocol

from kvservice.caches import Cache
from kvservice.curves.events import Deleted, Event, Missing, Stored

HASH_BYTES = 8
HASHES = 1 << (8 * HASH_BYTES)
EVERYTHING = b"\xff" * 33
"""Above every segment id."""
SEGMENT_RECORDS_MAX = 64
"""Records of one segment that are watched, the newest: a family without end must not push out all others."""
STALE_MIN = 64
"""Below this many entries of segments that left, no new sorting pays."""


class Record:
    """A cache that is, or once was, stored. ``place``: on a ByteStack, its to set. ``era``: of its last use.

    ``record_bytes``: with the rounding of its extent.
    """

    __slots__ = ("era", "mark", "master", "place", "position", "record_bytes", "segment", "token_s", "tokens")

    def __init__(self, segment: "Segment", mark: bytes, cache: Cache, record_bytes: int) -> None:
        self.segment = segment
        self.mark = mark
        self.record_bytes = record_bytes
        self.tokens = cache.family.tokens
        self.token_s = cache.family.space.token_s
        self.position = cache.position
        self.master: Record | None = None
        self.place = -1
        self.era = 0


class Segment:
    """A watched segment with the records of its caches, the one used longest ago first.

    A list, since most have one record, and a dict takes three times the memory. ``misses``: the readers' to count.
    """

    __slots__ = ("id", "misses", "records")

    def __init__(self, id_: bytes) -> None:
        self.id = id_
        self.records: list[Record] = []
        self.misses = 0.0

    def find(self, mark: bytes) -> Record | None:
        """The record of a context."""
        return next((record for record in self.records if record.mark == mark), None)


class Reader(Protocol):
    """What is learnt from a sample. ``seconds``: of prefill that a miss costs."""

    def enter(self, record: Record) -> None:
        """A record is stored for the first time, or again after it left."""

    def refer(self, record: Record, seconds: float, *, is_new: bool) -> None:
        """A lookup asked for a record that was stored at some time; if ``is_new``, before anybody watched."""

    def miss(self, seconds: float, count: float = 1.0) -> None:
        """``count`` lookups asked for what was never stored; ``seconds`` of prefill in sum."""

    def resize(self, record: Record, record_bytes: int, master: Record | None) -> None:
        """A record has another form; the reader sets it."""

    def leave(self, record: Record) -> None:
        """A record is watched no more."""

    def rescale(self, rate: float, factor: float) -> None:
        """The share of segments that are watched is ``rate``, ``factor`` times what it was."""

    def age(self, factor: float) -> None:
        """All that was counted counts ``factor`` times as much from now on."""

    def expect(self, references: float) -> None:
        """So many sampled references there should be, besides those told of before."""


class Sample:
    """The watched segments of one scope, and what a reader makes of them. At most ``records_max`` records.

    ``granularity``: bytes that extents are rounded up to.
    """

    def __init__(self, records_max: int, reader: Reader, granularity: int = 1) -> None:
        assert records_max > 0, "a sample has room"
        self.reader = reader
        self.below = EVERYTHING
        self.rate = 1.0
        self.records = 0
        self.segments: dict[bytes, Segment] = {}
        self._tokens = 0
        self._records_max = records_max
        self._granularity = granularity
        self._largest: list[tuple[int, bytes]] = []  # a heap of negative hashes and ids, some of segments that left
        self._era = 0
        self._entered = 0
        self._token_s = 0.0  # of the record that came last

    def take(self, event: Event) -> bool:
        """Work one event in; False if its segment is not watched."""
        match event:
            case Cache():
                return event.family.segment < self.below and self._found(event)
            case Missing():
                return event.segment < self.below and self._missed(event)
            case Stored(cache):
                return cache.family.segment < self.below and self._stored(cache)
            case Deleted(cache):
                return cache.family.segment < self.below and self._deleted(cache)

    def expect(self, references: int) -> None:
        """So many lookups there were in this scope, watched or not."""
        self.reader.expect(references * self.rate)

    def miss_strangers(self, count: float) -> None:
        """So many lookups, of those that it should have seen, asked for what it does not know and missed it."""
        if count:
            tokens = self._tokens / self.records if self.records else 0.0
            self.reader.miss(count * tokens * self._token_s, count)

    def _found(self, cache: Cache) -> bool:
        entered, record = self._entered, self._record(cache)
        if record is None:
            return False
        seconds = cache.prefill_s or cache.family.tokens * cache.family.space.token_s
        self._use(record, seconds, is_new=self._entered > entered)
        return True

    def _missed(self, missing: Missing) -> bool:
        segment, seconds = self.segments.get(missing.segment), missing.tokens * missing.space.token_s
        record = None if segment is None else _answer(segment, missing)
        if record is None:
            self.reader.miss(seconds)
        else:
            self._use(record, seconds, is_new=False)
        return True

    def _stored(self, cache: Cache) -> bool:
        return self._record(cache) is not None

    def _deleted(self, cache: Cache) -> bool:
        segment = self.segments.get(cache.family.segment)
        record = None if segment is None else segment.find(_mark(cache))
        if record is not None:
            self._drop(record)
        return True

    def _use(self, record: Record, seconds: float, *, is_new: bool) -> None:
        self.reader.refer(record, seconds, is_new=is_new)
        records = record.segment.records
        for one in (record,) if record.master is None else (record.master, record):
            one.era = self._era
            if records[-1] is not one and one in records:
                records.remove(one)
                records.append(one)

    def _record(self, cache: Cache) -> Record | None:
        """The record of a cache, as it is stored now; a new one enters. None if that pushed its segment out."""
        master = None if cache.master is None else self._record(cache.master)
        id_, mark = cache.family.segment, _mark(cache)
        if id_ >= self.below or (cache.master is not None and master is None):
            return None
        segment = self.segments.get(id_)
        record = None if segment is None else segment.find(mark)
        if record is not None:
            if record.record_bytes != self._size(cache) or record.master is not master:
                self.reader.resize(record, self._size(cache), master)
            return record
        return self._enter(segment or self._watch(id_), mark, cache, master)

    def _watch(self, id_: bytes) -> Segment:
        segment = self.segments[id_] = Segment(id_)
        heappush(self._largest, _largest_first(id_))
        if len(self._largest) > STALE_MIN + 2 * len(self.segments):
            self._sort_largest()
        return segment

    def _enter(self, segment: Segment, mark: bytes, cache: Cache, master: Record | None) -> Record | None:
        record = Record(segment, mark, cache, self._size(cache))
        record.master, record.era = master, self._era
        segment.records.append(record)
        self.records += 1
        self._entered += 1
        self._tokens += record.tokens
        self._token_s = record.token_s
        self.reader.enter(record)
        if len(segment.records) > SEGMENT_RECORDS_MAX:
            self._drop(next(one for one in segment.records if one is not master))
        while self.records > self._records_max:
            self.lower_to(self._largest_hash())
        return record if segment.id in self.segments else None

    def _size(self, cache: Cache) -> int:
        return -(-cache.record_bytes // self._granularity) * self._granularity

    def _largest_hash(self) -> int:
        while self._largest[0][1] not in self.segments:
            heappop(self._largest)
        return -self._largest[0][0]

    def _drop(self, record: Record) -> None:
        self.reader.leave(record)
        segment = record.segment
        segment.records.remove(record)
        self.records -= 1
        self._tokens -= record.tokens
        if not segment.records:
            del self.segments[segment.id]

    def lower_to(self, hash_: int) -> None:
        """Watch from now on only segments whose hash is less than ``hash_``."""
        self.below = hash_.to_bytes(HASH_BYTES)
        while self._largest and -self._largest[0][0] >= hash_:
            segment = self.segments.get(heappop(self._largest)[1])
            for record in list(segment.records) if segment is not None else ():
                self._drop(record)
        rate = max(hash_, 1) / HASHES
        self.reader.rescale(rate, rate / self.rate)
        self.rate = rate

    def halve(self) -> None:
        """Watch half as many segments: there are more events than may be worked in."""
        self.lower_to(max(int(self.rate * HASHES) // 2, 1))

    def age(self, factor: float) -> None:
        """What was counted counts less; what was not used since the last call is forgotten."""
        for segment in list(self.segments.values()):
            segment.misses *= factor
            for record in [one for one in segment.records if one.era < self._era]:
                self._drop(record)
        self._sort_largest()
        self.reader.age(factor)
        self._era += 1

    def _sort_largest(self) -> None:
        self._largest = sorted(map(_largest_first, self.segments))

    @property
    def is_sparse(self) -> bool:
        """Could it watch many times as much?"""
        return self.rate < 1 and self.records < self._records_max // 8

    def clustering(self) -> float:
        """Of the misses of watched segments: the mean of how many the segment of a miss has; 1 if all are strangers."""
        misses = [segment.misses for segment in self.segments.values() if segment.misses]
        return max(1.0, sum(one * one for one in misses) / sum(misses)) if misses else 1.0

    def watched(self) -> Iterator[Record]:
        """All records."""
        return (record for segment in self.segments.values() for record in segment.records)


def _largest_first(segment: bytes) -> tuple[int, bytes]:
    return -int.from_bytes(segment[:HASH_BYTES]), segment


def _mark(cache: Cache) -> bytes:
    return cache.context[:HASH_BYTES]


def _answer(segment: Segment, missing: Missing) -> Record | None:
    """What would have answered, were everything that was ever stored still there."""
    for context in missing.contexts:
        record = segment.find(context[:HASH_BYTES])
        if record is not None:
            return record
    return segment.records[-1] if missing.may_be_any else None
