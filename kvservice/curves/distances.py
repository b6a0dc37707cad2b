"""The curve of a memory that evicts what was used longest ago, of any size at once: from reuse distances in bytes.

The distance of a reference: the stored bytes of all that was used since, itself included. A segment that many prompts
share counts once, by its master; a mirror counts its diff, and needs its master too. State only.
"""

from kvservice.curves.histogram import DistanceHistogram, MissRatioCurve
from kvservice.curves.sample import Record, Sample
from kvservice.curves.stack import ByteStack


class Distances:
    """Reads a sample of segments. Of a rate R, what other segments used counts 1/R times, the segment's own once.

    ``capacity_bytes``: of the largest tier there is; how its misses cluster is told by ``Sample.clustering``.
    """

    def __init__(self, capacity_bytes: float = 0.0) -> None:
        self.histogram = DistanceHistogram()
        self._capacity_bytes = capacity_bytes
        self._stack: ByteStack[Record] = ByteStack()
        self._rate = 1.0

    @property
    def bytes(self) -> float:
        """Stored bytes of all that is watched, as they would be of all segments."""
        return self._stack.bytes / self._rate

    def enter(self, record: Record) -> None:
        """See Reader."""
        self._stack.push(record)

    def refer(self, record: Record, seconds: float, *, is_new: bool) -> None:
        """See Reader. All that is known of what was found at first sight: it takes no more than there is."""
        master = record.master
        is_whole = record.place >= 0 and (master is None or master.place >= 0)
        if is_whole:
            deepest = record if master is None or record.place < master.place else master
            distance_bytes = self._capacity_bytes if is_new else self._distance(record, deepest)
            self.histogram.add(distance_bytes, seconds)
            record.segment.misses += distance_bytes > self._capacity_bytes
        else:
            record.segment.misses += 1
            self.histogram.add_cold(seconds)
        if master is not None and master.place >= 0:
            self._stack.push(master)
        self._stack.push(record)

    def _distance(self, record: Record, deepest: Record) -> float:
        """Bytes that must fit: others above ``deepest``, its own segment's above it, and itself."""
        place, own = deepest.place, 0
        records = record.segment.records
        if len(records) > 1:
            own = sum(one.record_bytes for one in records if one.place > place)
        return (self._stack.above(deepest) - own) / self._rate + own + deepest.record_bytes

    def miss(self, seconds: float, count: float = 1.0) -> None:
        """See Reader."""
        self.histogram.add_cold(seconds, count)

    def resize(self, record: Record, record_bytes: int, master: Record | None) -> None:
        """See Reader."""
        record.master = master
        self._stack.resize(record, record_bytes)

    def leave(self, record: Record) -> None:
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
