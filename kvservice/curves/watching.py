"""Curves as the request path sees them: which scopes a namespace is in, what is noted of it, and what is still owed.

State only, owned by the node's thread.
"""

from dataclasses import dataclass, field
from operator import attrgetter
from typing import Protocol

from kvservice.curves.distances import Distances
from kvservice.curves.sample import Sample


@dataclass(slots=True, eq=False)
class Scope:
    """One curve. ``references``: lookups in it, watched or not; ``since_s``, ``last_s``: the first and the last.

    ``past_s``: seconds of its window up to ``aged_s``, weighted as what was counted in them is.
    """

    name: str
    sample: Sample
    distances: Distances
    since_s: float
    last_s: float
    references: int = 0
    past_s: float = 0.0
    aged_s: float = 0.0

    def note_asked(self, references: int, before_s: float, now_s: float) -> None:
        """Lookups between two times."""
        if not self.references:
            self.since_s = self.aged_s = before_s
        self.references += references
        self.last_s = now_s

    def recent_s(self, now_s: float) -> float:
        """Seconds of its window, weighted."""
        return self.past_s + max(now_s - self.aged_s, 0.0) if self.references else 0.0

    def age(self, factor: float, now_s: float) -> None:
        """What was counted up to now counts less, and so does its time."""
        self.past_s, self.aged_s = factor * self.recent_s(now_s), now_s
        self.sample.age(factor)


class Known(Protocol):
    """Watched segments."""

    def __contains__(self, segment: bytes, /) -> bool: ...


@dataclass(slots=True, eq=False)
class Watch:
    """What the request path needs of a namespace. ``below``: segments below it are noted. ``asked``: lookups counted.

    ``known``: the watched segments, to be asked for where ``seen`` is not 0; ``strangers``: of misses below, those of
    others, which are counted and no more. ``samples``: who takes in what was noted: those of ``scopes`` and the
    simulation's. ``rate``: the share of segments that ``below`` is.
    """

    below: bytes
    scopes: tuple[Scope, ...] = ()
    samples: tuple[Sample, ...] = ()
    asked: int = 0
    known: Known = ()
    seen: bytearray = field(default_factory=bytearray)
    strangers: int = 0
    rate: float = 1.0

    def lower(self) -> None:
        """Note what one of the samples wants, and no more."""
        widest = max(self.samples, key=attrgetter("rate"))
        self.below, self.known, self.rate = widest.below, widest.records, widest.rate
        self.seen = widest.records.seen


@dataclass(slots=True, eq=False)
class Owed:
    """Lookups whose events wait: ``asked`` in all, ``strangers`` of them missed what none of the samples knows.

    They are told to the samples as the events are: else a curve that is read meanwhile would take what waits for hits.
    ``rate``: the share of segments that was noted.
    """

    samples: tuple[Sample, ...]
    asked: float
    strangers: float
    rate: float

    def pay(self, part: float) -> None:
        """Tell the samples of a part."""
        asked, strangers = part * self.asked, part * self.strangers
        for sample in self.samples:
            sample.miss_strangers(strangers * sample.rate / self.rate)
            sample.expect(asked)
        self.asked -= asked
        self.strangers -= strangers

    def forgive(self) -> None:
        """Some of its events were lost: what was not told is what the strangers missed, and no more."""
        for sample in self.samples:
            missed = self.strangers * sample.rate / self.rate
            sample.miss_strangers(missed)
            sample.reader.expect(missed)
        self.asked = self.strangers = 0.0


NOTHING = Watch(b"")
"""Of a node that keeps no curves, and of a namespace that is not known."""
