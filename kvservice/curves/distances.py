"""The curve of a memory that evicts what was used longest ago, of any size at once: from reuse distances in bytes.

The distance of a reference: the stored bytes of all that was used since, itself included. A segment that many prompts
share counts once, by its master; a mirror counts its diff, and needs its master too. State only.
"""

from math import inf

from kvservice.curves.histogram import DistanceHistogram, MissRatioCurve
from kvservice.curves.records import GONE, Records
from kvservice.curves.sample import Sample
from kvservice.curves.stack import ByteStack


class Distances:
    """Reads a sample of segments. Of a rate R, what other segments used counts 1/R times, the segment's own once.

    ``capacity_bytes``: of the largest tier there is; how its misses cluster is told by ``Sample.clustering``.
    ``last_bytes``: the distance of the last reference.
    """

    def __init__(self, capacity_bytes: float = 0.0) -> None:
        self.histogram = DistanceHistogram()
        self._capacity_bytes = capacity_bytes
        self._rate = 1.0
        self.last_bytes = inf

    def attach(self, records: Records) -> None:
        """See Reader."""
        self._records = records
        self._stack = ByteStack(records)

    @property
    def bytes(self) -> float:
        """Stored bytes of all that is watched, as they would be of all segments."""
        return self._stack.bytes / self._rate

    def enter(self, record: int) -> None:
        """See Reader."""
        self._stack.push(record)

    def refer(self, record: int, seconds: float, *, is_new: bool) -> None:
        """See Reader. All that is known of what was found at first sight: it takes no more than there is."""
        records = self._records
        head, segment, places = records.head(record), records.home[record], records.place
        if head == GONE:
            self.last_bytes = inf
            records.misses[segment] += 1
            self.histogram.add_cold(seconds)
        else:
            deepest = record if places[record] <= places[head] else head
            self.last_bytes = self._capacity_bytes if is_new else self._distance(record, deepest)
            self.histogram.add(self.last_bytes, seconds)
            records.misses[segment] += self.last_bytes > self._capacity_bytes
            if head != record:
                self._stack.push(head)
        self._stack.push(record)

    def _distance(self, record: int, deepest: int) -> float:
        """Bytes that must fit: others above ``deepest``, its own segment's above it, and itself."""
        records, own = self._records, 0
        sizes, places, segment = records.bytes, records.place, records.home[record]
        if records.held[segment] > 1:
            own = sum(sizes[one] for one in records.of_segment(segment) if places[one] > places[deepest])
        return (self._stack.above(deepest) - own) / self._rate + own + sizes[deepest]

    def miss(self, seconds: float, count: float = 1.0) -> None:
        """See Reader."""
        self.histogram.add_cold(seconds, count)

    def resize(self, record: int, record_bytes: int, master: int) -> None:
        """See Reader."""
        self._records.master[record] = master
        self._stack.resize(record, record_bytes)

    def leave(self, record: int) -> None:
        """See Reader."""
        self._stack.remove(record)

    def rescale(self, rate: float, factor: float) -> None:
        """See Reader."""
        self._rate = rate
        self.histogram.scale(factor)

    def age(self, factor: float) -> None:
        """See Reader."""
        self.histogram.scale(factor)

    def expect(self, references: float) -> None:
        """See Reader."""
        self.histogram.expect(references)

    def curve(self, sample: Sample) -> MissRatioCurve:
        """As it stands."""
        return self.histogram.curve(sample.rate, sample.clustering())
