"""What places last said about segments, for people who ask why there was no hit. State only, bounded, the loop's."""

from collections.abc import Callable, Iterable

from kvservice.model.explanation import PlaceAnswer
from kvservice.model.segment import SegmentId

KEPT_MAX = 16384
"""Answers that are remembered, 300 bytes each; the newest half of them at least."""
_Kept = dict[tuple[str, SegmentId], tuple[PlaceAnswer, float]]


class LastAnswers:
    """By place and segment. A segment's id names its namespace, so nobody hears of another's.

    Two generations: one is filled, the one before is forgotten whole. Taking the oldest out of a dict one by one would
    cost a lookup of 4,096 segments 20 ms.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._young: _Kept = {}
        self._old: _Kept = {}

    def note(self, place: str, segments: Iterable[SegmentId], answer: PlaceAnswer) -> None:
        """The place was asked about these, and that is what came of it."""
        said = answer, self._clock()
        for segment in segments:
            if len(self._young) >= KEPT_MAX // 2:
                self._old, self._young = self._young, {}
            self._young[place, segment] = said

    def of(self, place: str, segment: SegmentId) -> tuple[PlaceAnswer, float] | None:
        """The last answer and how many seconds ago it was; None: not known any more."""
        found = self._young.get((place, segment)) or self._old.get((place, segment))
        return None if found is None else (found[0], self._clock() - found[1])
