"""Records on their way into the arena, and the feeds in which leases hear of them. State only, the loop's."""

import asyncio
from collections.abc import Iterable
from itertools import takewhile

from kvservice.caches import Cache
from kvservice.model.errors import KVServiceError

AWAIT_S_MAX = 5.0
"""An Await without news is answered after this long, so that a client sees that the node lives."""


class Load:
    """One record on its way from ``source`` (``kvservice.lookup``). ``layers``: how many have arrived and are right.

    ``over``: set when no more will, see ``error``. ``feeds``: who is told of every step.
    """

    __slots__ = ("cache", "error", "feeds", "layers", "offset", "over", "source", "turn")

    def __init__(self, cache: Cache, source: int, turn: int = 0) -> None:
        self.cache = cache
        self.source = source
        self.turn = turn
        self.offset = cache.offset
        self.layers = 0
        self.error: KVServiceError | None = None
        self.over = asyncio.Event()
        self.feeds: set[Feed] = set()

    @property
    def is_done(self) -> bool:
        """Will nothing more come?"""
        return self.over.is_set()

    def advance(self, layers: int) -> None:
        """More has arrived."""
        if layers > self.layers:
            self.layers = layers
            for feed in self.feeds:
                feed.note(self)

    def finish(self, error: KVServiceError | None) -> None:
        """Nothing more will."""
        self.error = error
        self.over.set()
        for feed in self.feeds:
            feed.finish(self)
        self.feeds.clear()


class Feed:
    """What has arrived of one lease's records. A reader says after which step it asks, and hears what changed since.

    So an answer costs what it tells, not what the lease holds, and one that got lost is heard when it is asked again.
    ``step``: of the last change; what has arrived of a record that is added is one.
    """

    def __init__(self) -> None:
        self.step = 0
        self._changed: dict[Load, int] = {}  # its last step; the latest at the end
        self._pending: set[Load] = set()
        self._news = asyncio.Event()

    @property
    def pending(self) -> int:
        """Records of which more will come."""
        return len(self._pending)

    def add(self, loads: Iterable[Load]) -> None:
        """Follow these, too."""
        for load in loads:
            if not load.is_done:
                self._pending.add(load)
                load.feeds.add(self)
            if (load.layers or load.error is not None) and load not in self._changed:
                self.note(load)

    def note(self, load: Load) -> None:
        """A load has changed."""
        self.step += 1
        self._changed.pop(load, None)
        self._changed[load] = self.step
        self._news.set()

    def finish(self, load: Load) -> None:
        """Nothing more of it will come; that it is all there has been told, why it is not is news."""
        self._pending.discard(load)
        self._news.set()
        if load.error is not None:
            self.note(load)

    def since(self, step: int) -> list[Load]:
        """What changed after ``step``, the latest first."""
        return [load for load, _ in takewhile(lambda one: one[1] > step, reversed(self._changed.items()))]

    async def wait(self, step: int, timeout_s: float) -> None:
        """Return once there is news after ``step``, nothing more will come, or the time is up."""
        while self.step <= step and self._pending:
            self._news.clear()
            try:
                await asyncio.wait_for(self._news.wait(), timeout_s)
            except TimeoutError:
                return

    def close(self) -> None:
        """The lease is over: nobody asks again, and who waits is answered."""
        for load in self._pending:
            load.feeds.discard(self)
        self._pending.clear()
        self._changed.clear()
        self._news.set()
