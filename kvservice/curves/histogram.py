"""How many references, and prefill seconds, have which reuse distance in bytes; and the curve that follows from it.

Buckets grow by a factor of 2 ** (1/8), so that a size is known to 9 %. State only.
"""

import math
from array import array
from bisect import bisect_right
from dataclasses import dataclass

BUCKETS_PER_DOUBLING = 8
FIRST_BITS, LAST_BITS = 12, 47
BUCKETS = (LAST_BITS - FIRST_BITS) * BUCKETS_PER_DOUBLING + 2
EDGES = tuple(2 ** (FIRST_BITS + index / BUCKETS_PER_DOUBLING) for index in range(BUCKETS - 1))
"""Upper ends in bytes, 4 KiB to 128 TiB; the last bucket has none."""


UNIT_MIN = 1e-9


@dataclass(frozen=True, slots=True)
class MissRatioCurve:
    """Which share a memory of a size finds. Sizes are bytes; shares are of all references, or of all their seconds.

    ``hits`` and ``seconds``: at the ends of EDGES, cumulative. ``references``: that it rests on, in the whole traffic;
    ``seconds_each``: prefill seconds that a reference stands for. ``rate``: share of the segments that was watched;
    ``clustering``: misses that come with a miss, of the same segment.
    """

    hits: tuple[float, ...]
    seconds: tuple[float, ...]
    references: float
    seconds_each: float
    rate: float
    clustering: float

    def hit_ratio(self, size_bytes: float) -> float:
        """Share of references that are found with ``size_bytes``."""
        return _at(self.hits, size_bytes)

    def seconds_ratio(self, size_bytes: float) -> float:
        """Share of prefill seconds that are saved with ``size_bytes``."""
        return _at(self.seconds, size_bytes)

    @property
    def hit_ratio_max(self) -> float:
        """What no memory exceeds: the rest was never stored before it was asked for."""
        return self.hits[-1]

    def error(self, hit_ratio: float) -> float:
        """Two standard errors of a ratio. Of sizes under a hundredth of what is used it says too little."""
        return standard_error(1 - hit_ratio, self.references, self.rate, self.clustering)

    def size_for(self, share: float) -> float:
        """The least bytes that find ``share`` of what the largest memory finds; 0 if nothing is ever found."""
        wanted = share * self.hit_ratio_max
        if wanted <= 0:
            return 0.0
        return next((edge for edge, hits in zip(EDGES, self.hits, strict=True) if hits >= wanted - 1e-12), EDGES[-1])


def standard_error(share: float, references: float, rate: float, clustering: float) -> float:
    """Two standard errors of a share of ``references`` of the whole traffic, a part ``rate`` of which was watched.

    With SHARDS-adj the references are known and the share is estimated, from whole segments (Horvitz-Thompson); and a
    longer look at the same traffic would give other numbers (binomial).
    """
    share = min(max(share, 0.0), 1.0)
    if references <= 0:
        return 1.0
    sampling = (1 - rate) / rate * clustering * share
    return min(1.0, 2 * math.sqrt((sampling + share * (1 - share)) / references))


def _at(values: tuple[float, ...], size_bytes: float) -> float:
    """Linear in the logarithm of the size between two ends."""
    index = bisect_right(EDGES, size_bytes)
    if index == 0:
        return 0.0 if size_bytes <= 0 else values[0] * size_bytes / EDGES[0]
    if index == len(EDGES):
        return values[-1]
    part = math.log2(size_bytes / EDGES[index - 1]) * BUCKETS_PER_DOUBLING
    return values[index - 1] + part * (values[index] - values[index - 1])


class DistanceHistogram:
    """Counts of sampled references by distance. Cold: of what was never stored before, at any size a miss.

    ``expect`` tells how many sampled references there should be, N x R in sum. The difference to those there are is put
    into the first bucket (SHARDS-adj), since it is the hottest segments that a sample has too many or too few of.
    """

    def __init__(self) -> None:
        self._counts = array("d", [0.0] * BUCKETS)
        self._seconds = array("d", [0.0] * BUCKETS)
        self._cold = self._cold_seconds = self._expected = 0.0
        self._unit = 1.0  # what a count of 1 above stands for: scaling changes this one number

    def add(self, distance_bytes: float, seconds: float) -> None:
        """One reference that a memory of ``distance_bytes`` finds."""
        index = 0
        if distance_bytes > EDGES[0]:
            index = math.ceil((math.log2(distance_bytes) - FIRST_BITS) * BUCKETS_PER_DOUBLING - 1e-9)
        index = min(index, BUCKETS - 1)
        self._counts[index] += 1 / self._unit
        self._seconds[index] += seconds / self._unit

    def add_cold(self, seconds: float, count: float = 1.0) -> None:
        """``count`` references that no memory finds."""
        self._cold += count / self._unit
        self._cold_seconds += seconds / self._unit

    def expect(self, references: float) -> None:
        """So many more sampled references there should be."""
        self._expected += references / self._unit

    def scale(self, factor: float) -> None:
        """Make everything ``factor`` times as much: the rate fell, or what is old counts less."""
        self._unit *= factor
        if self._unit < UNIT_MIN:
            self._renormalise()

    def _renormalise(self) -> None:
        for index in range(BUCKETS):
            self._counts[index] *= self._unit
            self._seconds[index] *= self._unit
        self._cold *= self._unit
        self._cold_seconds *= self._unit
        self._expected *= self._unit
        self._unit = 1.0

    @property
    def sampled(self) -> float:
        """Sampled references."""
        return (sum(self._counts) + self._cold) * self._unit

    @property
    def cold(self) -> float:
        """Of these, those that no memory finds."""
        return self._cold * self._unit

    def curve(self, rate: float, clustering: float) -> MissRatioCurve:
        """The curve of all references, a share ``rate`` of whose segments was sampled."""
        sampled, seconds = sum(self._counts) + self._cold, sum(self._seconds) + self._cold_seconds
        each = seconds / sampled if sampled else 0.0
        missing = self._expected - sampled if self._expected else 0.0
        hits = _shares(self._counts, missing, sampled + missing)
        saved = _shares(self._seconds, missing * each, seconds + missing * each)
        return MissRatioCurve(hits, saved, (sampled + missing) * self._unit / rate, each, rate, clustering)


def _shares(values: "array[float]", missing: float, total: float) -> tuple[float, ...]:
    """Cumulative shares, which neither fall nor leave 0 to 1 whatever the correction does."""
    shares, so_far, share = [], missing, 0.0
    for value in values[:-1]:
        so_far += value
        share = max(share, min(1.0, so_far / total)) if total > 0 else 0.0
        shares.append(share)
    return tuple(shares)
