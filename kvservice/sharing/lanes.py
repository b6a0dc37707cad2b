"""What waits for each place: so many errands at a time, and while a place is not reached one now and then.

State only, the loop's. No place holds up another one.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from kvservice.caches import Cache, Space
from kvservice.model.segment import CacheKey
from kvservice.sharing.place import Place

TRIES_MAX = 4
"""Of one errand that fails at a place that answers others. While nobody reaches the place, no try is counted."""
AT_A_TIME = 4
"""Records on their way to one place."""
PAUSE_S, PAUSE_S_MAX = 0.8, 30.0


@dataclass(slots=True, eq=False)
class Errand:
    """``cache`` is to be given to a place; without one, ``key`` is to be deleted there.

    ``is_copy``: only where it belongs since it is hot. ``tries``: that failed for it alone.
    """

    place: Place
    space: Space
    key: CacheKey
    cache: Cache | None = None
    is_copy: bool = False
    tries: int = 0

    @property
    def name(self) -> object:
        """What it must not wait for twice."""
        return (self.space.namespace, self.key) if self.cache is None else self.cache


@dataclass(slots=True)
class _Lane:
    errands: OrderedDict[object, Errand] = field(default_factory=OrderedDict)
    running: int = 0
    failures: int = 0
    due_s: float = 0.0


class Lanes:
    """Errands by place, in the order in which they came."""

    def __init__(self) -> None:
        self.waiting = self.running = 0
        self._lanes: dict[Place, _Lane] = {}

    def add(self, errand: Errand) -> None:
        """Behind the others of its place, unless it waits there already."""
        lane = self._lanes.setdefault(errand.place, _Lane())
        if errand.name not in lane.errands:
            lane.errands[errand.name] = errand
            self.waiting += 1

    def due(self, now_s: float) -> Iterator[Errand]:
        """What may begin now. Each counts as running until ``ended`` or ``failed``."""
        for lane in list(self._lanes.values()):
            while lane.errands and now_s >= lane.due_s and lane.running < (1 if lane.failures else AT_A_TIME):
                _, errand = lane.errands.popitem(last=False)
                lane.running += 1
                self.waiting -= 1
                self.running += 1
                yield errand

    def ended(self, errand: Errand, *, is_reached: bool) -> None:
        """It is over. ``is_reached``: its place answered; otherwise it says nothing of its place."""
        lane = self._take_off(errand)
        if is_reached:
            lane.failures, lane.due_s = 0, 0.0
        self._tidy(errand.place, lane)

    def failed(self, errand: Errand, now_s: float) -> bool:
        """Its place was not reached: is it tried again, behind the others?"""
        lane = self._take_off(errand)
        is_left = self._pause(lane, errand, now_s)
        self._tidy(errand.place, lane)
        return is_left

    def add_failed(self, errand: Errand, now_s: float) -> None:
        """It was tried before its turn, and its place was not reached."""
        self._pause(self._lanes.setdefault(errand.place, _Lane()), errand, now_s)

    def _pause(self, lane: _Lane, errand: Errand, now_s: float) -> bool:
        errand.tries += not lane.failures
        if now_s >= lane.due_s:  # of those that fail together the first one counts
            lane.due_s = now_s + min(PAUSE_S_MAX, PAUSE_S * 4.0 ** min(lane.failures, TRIES_MAX))
            lane.failures += 1
        if errand.tries < TRIES_MAX:
            self.add(errand)
        return errand.tries < TRIES_MAX

    def hurry(self) -> None:
        """Places may be reached again: nobody waits."""
        for lane in self._lanes.values():
            lane.due_s = 0.0

    def withdraw(self, caches: Iterable[Cache]) -> None:
        """These are not given any more."""
        for cache in caches:
            for place, lane in list(self._lanes.items()):
                if lane.errands.pop(cache, None) is not None:
                    self.waiting -= 1
                    self._tidy(place, lane)

    def caches(self) -> list[Cache]:
        """All that wait to be given, some at several places."""
        return [
            errand.cache
            for lane in self._lanes.values()
            for errand in lane.errands.values()
            if errand.cache is not None
        ]

    def _take_off(self, errand: Errand) -> _Lane:
        lane = self._lanes[errand.place]
        lane.running -= 1
        self.running -= 1
        return lane

    def _tidy(self, place: Place, lane: _Lane) -> None:
        if not lane.errands and not lane.running:
            del self._lanes[place]
