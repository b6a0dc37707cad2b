"""Which segments are watched: those whose id lies below a threshold, so many that their records stay under a limit.

SHARDS of fixed size (Waldspurger et al., "Efficient MRC Construction with SHARDS", FAST 2015). Ids are digests, so the
first bytes of one are its hash. All caches of a segment, master and mirrors, are in the sample, or none is; every
segment has the same chance, and with it its whole history. State only.
"""

from typing import Protocol

import numpy as np

from kvservice.caches import Cache
from kvservice.curves.events import Deleted, Event, Missing, Stored
from kvservice.curves.records import ERAS, NONE, Records, hash_of, slot_of

HASH_BYTES = 8
HASHES = 1 << (8 * HASH_BYTES)
EVERYTHING = b"\xff" * 33
"""Above every segment id."""
SEGMENT_RECORDS_MAX = 64
"""Records of one segment that are watched, the newest: a family without end must not push out all others."""
ROOM_SHARE = 128
"""A full sample makes room for a hundred-and-twenty-eighth of itself at once: the largest ids are looked for."""


class Reader(Protocol):
    """What is learnt from a sample. ``seconds``: of prefill that a miss costs."""

    def attach(self, records: Records) -> None:
        """These are the records that it will be told of, by their numbers."""

    def enter(self, record: int) -> None:
        """A record is stored for the first time, or again after it left."""

    def refer(self, record: int, seconds: float, *, is_new: bool) -> None:
        """A lookup asked for a record that was stored at some time; if ``is_new``, before anybody watched."""

    def miss(self, seconds: float, count: float = 1.0) -> None:
        """``count`` lookups asked for what was never stored; ``seconds`` of prefill in sum."""

    def resize(self, record: int, record_bytes: int, master: int) -> None:
        """A record has another form; the reader sets it. ``master``: NONE, or a record that is no mirror."""

    def leave(self, record: int) -> None:
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
        self.records = Records(records_max)
        self._tokens = 0
        self._records_max = records_max
        self._granularity = granularity
        self._era = 0
        self._forgotten, self._is_forgetting = 0, False  # records up to here were looked at since the era began
        self._entered = 0
        self._token_s = 0.0  # of the record that came last
        reader.attach(self.records)

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

    def expect(self, references: float) -> None:
        """So many lookups there were in this scope, watched or not."""
        self.reader.expect(references * self.rate)

    def miss_strangers(self, count: float) -> None:
        """So many lookups, of those that it should have seen, asked for what it does not know and missed it."""
        if count:
            tokens = self._tokens / self.records.count if self.records.count else 0.0
            self.reader.miss(count * tokens * self._token_s, count)

    def _found(self, cache: Cache) -> bool:
        entered, record = self._entered, self._record(cache)
        if record < 0:
            return False
        seconds = cache.prefill_s or cache.family.tokens * cache.family.space.token_s
        self._use(record, seconds, is_new=self._entered > entered)
        return True

    def _missed(self, missing: Missing) -> bool:
        segment, seconds = self.records.find_segment(hash_of(missing.segment)), missing.tokens * missing.space.token_s
        record = NONE if segment < 0 else self._answer(segment, missing)
        if record < 0:
            self.reader.miss(seconds)
        else:
            self._use(record, seconds, is_new=False)
        return True

    def _answer(self, segment: int, missing: Missing) -> int:
        """What would have answered, were everything that was ever stored still there."""
        for context in missing.contexts:
            record = self.records.find(segment, hash_of(context))
            if record >= 0:
                return record
        return self.records.newest(segment) if missing.may_be_any else NONE

    def _stored(self, cache: Cache) -> bool:
        return self._record(cache) >= 0

    def _deleted(self, cache: Cache) -> bool:
        segment = self.records.find_segment(hash_of(cache.family.segment))
        record = NONE if segment < 0 else self.records.find(segment, hash_of(cache.context))
        if record >= 0:
            self._drop(record)
        return True

    def _use(self, record: int, seconds: float, *, is_new: bool) -> None:
        self.reader.refer(record, seconds, is_new=is_new)
        records, master = self.records, self.records.master[record]
        if master >= 0:
            records.era[master] = self._era
            records.touch(master)
        records.era[record] = self._era
        records.touch(record)

    def _record(self, cache: Cache) -> int:
        """The record of a cache, as it is stored now; a new one enters. NONE if that pushed its segment out."""
        records, id_ = self.records, cache.family.segment
        master = NONE if cache.master is None else self._record(cache.master)
        if id_ >= self.below or (cache.master is not None and master < 0):
            return NONE
        hash_, mark, size = hash_of(id_), hash_of(cache.context), self._size(cache)
        segment = records.find_segment(hash_)
        record = NONE if segment < 0 else records.find(segment, mark)
        if record < 0:
            return self._enter(records.watch(hash_, slot_of(id_)) if segment < 0 else segment, mark, cache, master)
        if records.bytes[record] != size or records.master[record] != master:
            self.reader.resize(record, size, master)
            if master >= 0:
                records.orphan(record)  # a mirror is no master
        return record

    def _enter(self, segment: int, mark: int, cache: Cache, master: int) -> int:
        records, hash_ = self.records, self.records.id[segment]
        record = records.add(segment, mark, cache, self._size(cache), master)
        records.era[record] = self._era
        self._entered += 1
        self._tokens += cache.family.tokens
        self._token_s = cache.family.space.token_s
        self.reader.enter(record)
        if records.held[segment] > SEGMENT_RECORDS_MAX:
            self._drop(next(one for one in records.of_segment(segment) if one != master))
        if records.count > self._records_max:
            spare = self._records_max // ROOM_SHARE
            self.lower_to(records.hash_that_frees(records.count - self._records_max + spare))
        return record if hash_.to_bytes(HASH_BYTES) < self.below else NONE

    def _size(self, cache: Cache) -> int:
        return -(-cache.record_bytes // self._granularity) * self._granularity

    def _drop(self, record: int) -> None:
        self.reader.leave(record)
        self._tokens -= self.records.tokens[record]
        self.records.remove(record)

    def lower_to(self, hash_: int) -> None:
        """Watch from now on only segments whose hash is less than ``hash_``."""
        self.below = hash_.to_bytes(HASH_BYTES)
        for segment in self.records.from_hash(hash_):
            for record in self.records.of_segment(segment):
                self._drop(record)
        rate = max(hash_, 1) / HASHES
        self.reader.rescale(rate, rate / self.rate)
        self.rate = rate

    def halve(self) -> None:
        """Watch half as many segments: there are more events than may be worked in."""
        self.lower_to(max(int(self.rate * HASHES) // 2, 1))

    def age(self, factor: float) -> None:
        """What was counted counts less; what was not used since the last call is to be forgotten, see ``forget``."""
        if self._is_forgetting:
            self.forget(self.records.room)
        self.records.scale_misses(factor)
        self.reader.age(factor)
        self._era = (self._era + 1) % ERAS
        self._forgotten, self._is_forgetting = 0, True

    def forget(self, count: int) -> bool:
        """Look at ``count`` records for what was not used in this era or the one before; True if there are more."""
        records, known = self.records, (self._era, (self._era - 1) % ERAS)
        end = min(self._forgotten + count, records.room)
        for record in range(self._forgotten, end):
            if records.home[record] >= 0 and records.era[record] not in known:
                self._drop(record)
        self._forgotten, self._is_forgetting = end, end < records.room
        return self._is_forgetting

    @property
    def is_sparse(self) -> bool:
        """Could it watch many times as much?"""
        return self.rate < 1 and self.records.count < self._records_max // 8

    def clustering(self) -> float:
        """Of the misses of watched segments: the mean of how many the segment of a miss has; 1 if all are strangers."""
        misses = np.frombuffer(self.records.misses, np.float32)[self.records.watched()].astype(np.float64)
        total = float(misses.sum())
        return max(1.0, float((misses * misses).sum()) / total) if total else 1.0

    def token_bytes(self) -> float:
        """Stored bytes a token of all that is watched; 0 without any."""
        records = self.records
        is_used = np.frombuffer(records.home, np.int32) >= 0
        size = float(np.frombuffer(records.bytes, np.uint64)[is_used].sum())
        return size / self._tokens if self._tokens else 0.0
