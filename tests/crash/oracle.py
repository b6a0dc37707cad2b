"""What the service may answer, key by key, worked out from what it acknowledged. One writer owns one book.

allowed := the bytes committed under the key and not deleted since, acknowledged or in flight
due     := all of it was seen on SSD at a quiet point, and nothing since then may have taken it from there
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count

from kvservice.model.cache import MasterReference
from kvservice.model.segment import CacheKey, SegmentId
from tests.crash.content import Draft

EVENTS_MAX = 12
GONE_MAX = 1000


class BrokenError(AssertionError):
    """The service did what it must never do."""


@dataclass(slots=True, eq=False)
class Entry:
    """One key. ``allowed``: none: a hit is a phantom. ``is_tainted``: bits of its segment were flipped on the slab.

    ``reference``: what mirrors of it name, if it was dense when it was last seen. ``is_held``: acknowledged, and not
    known to be gone.
    """

    allowed: list[Draft]
    name: str
    reference: MasterReference | None = None
    is_held: bool = False
    is_due: bool = False
    is_tainted: bool = False
    events: deque[str] = field(default_factory=lambda: deque(maxlen=EVENTS_MAX))

    def __str__(self) -> str:
        due = "must be back" if self.is_due else "may be gone"
        return f"{self.name}, {due}, {len(self.allowed)} contents allowed, history: {'; '.join(self.events)}"


class Book:
    """All keys that one writer ever used. ``cycle`` is for the histories."""

    def __init__(self) -> None:
        self.entries: dict[CacheKey, Entry] = {}
        self.cycle = 0
        self._numbers = count(1)
        self._last: dict[CacheKey, Draft] = {}
        self._segments: dict[SegmentId, list[CacheKey]] = {}

    def next_number(self) -> int:
        """A number for a name that was never used."""
        return next(self._numbers)

    def last(self, key: CacheKey) -> Draft:
        """What was last stored under a key, without its bytes: says how to ask for it."""
        return self._last[key]

    def held(self) -> list[CacheKey]:
        return [key for key, entry in self.entries.items() if entry.is_held]

    def gone(self) -> list[CacheKey]:
        """Keys for which nothing is allowed."""
        return [key for key, entry in self.entries.items() if not entry.allowed]

    def open(self) -> list[CacheKey]:
        return [key for key, entry in self.entries.items() if entry.allowed]

    def due(self) -> list[CacheKey]:
        return [key for key, entry in self.entries.items() if entry.is_due]

    def of_segment(self, segment: SegmentId) -> list[CacheKey]:
        return self._segments.get(segment, [])

    @property
    def is_tainted(self) -> bool:
        return any(entry.is_tainted for entry in self.entries.values())

    @property
    def held_bytes(self) -> int:
        """What is held, were all of it dense."""
        return sum(self._last[key].meta.dense_bytes for key in self.held())

    def story(self, key: CacheKey) -> str:
        """What happened to a key, and to the others of its segment, for people."""
        lines = [f"{other}: {self.entries[other]}" for other in self.of_segment(key.segment) if other != key]
        return "\n    ".join([f"{self.entries.get(key, 'a key that was never used')}; beside it:", *lines])

    # Steps of the writer

    def begin_store(self, draft: Draft) -> None:
        key = draft.meta.key
        if key not in self.entries:
            self.entries[key] = Entry([], f"{draft.name}@{draft.meta.position}")
            self._segments.setdefault(key.segment, []).append(key)
        self._last[key] = replace(draft, planes=[], runs=None)
        entry = self.entries[key]
        entry.allowed.append(draft)
        entry.is_tainted |= any(self.entries[other].is_tainted for other in self.of_segment(key.segment))
        self._note(entry, f"storing {'dense' if draft.meta.master is None else 'mirror'}")

    def refused(self, draft: Draft, why: str) -> None:
        """The service said no: it was never published."""
        entry = self.entries[draft.meta.key]
        entry.allowed.remove(draft)
        self._note(entry, f"refused: {why}")

    def stored(self, draft: Draft, generation: int) -> None:
        entry = self.entries[draft.meta.key]
        entry.is_held = True
        is_dense = draft.meta.master is None
        entry.reference = MasterReference(draft.meta.key.context, generation) if is_dense else None
        self._note(entry, "acknowledged")

    def forget_oldest(self) -> None:
        """Of the keys that are gone keep the latest: enough to find a phantom by, little enough to ask for often."""
        for key in self.gone()[:-GONE_MAX]:
            self._segments[key.segment].remove(key)
            del self.entries[key], self._last[key]

    def begin_delete(self, keys: Iterable[CacheKey]) -> None:
        for key in keys:
            entry = self.entries[key]
            entry.is_due = entry.is_held = False
            self._note(entry, "deleting")

    def deleted(self, keys: Iterable[CacheKey]) -> None:
        for key in keys:
            self.entries[key].allowed.clear()
            self._note(self.entries[key], "deleted")

    def may_lose(self, segment: SegmentId) -> None:
        """From here on an eviction from memory may take what the slab has of a segment."""
        for key in self.of_segment(segment):
            self.entries[key].is_due = False

    # What was seen

    def seen(self, key: CacheKey, drafts: list[Draft], reference: MasterReference | None, *, is_final: bool) -> None:
        """A read gave these bytes. ``is_final``: after a start, so nothing else will ever come back."""
        entry = self.entries[key]
        entry.reference, entry.is_held = reference, True
        if is_final:
            entry.allowed = drafts
            self._note(entry, "back")

    def missed(self, key: CacheKey, why: str, *, is_final: bool) -> None:
        entry = self.entries[key]
        entry.is_held = False
        self._note(entry, f"missed: {why}")
        if is_final and not entry.is_tainted:
            entry.allowed.clear()

    def note_quiet(self, what: str) -> None:
        """All that is held is on SSD now."""
        for key in self.held():
            entry = self.entries[key]
            entry.is_due = not entry.is_tainted
            self._note(entry, what)

    def taint(self, segment: SegmentId) -> None:
        """Bits were flipped in a record of this segment: its caches and what stands on them may be gone for good."""
        for key in self.of_segment(segment):
            entry = self.entries[key]
            entry.is_tainted, entry.is_due = True, False
            self._note(entry, "bits flipped")

    def _note(self, entry: Entry, what: str) -> None:
        entry.events.append(f"{self.cycle}:{what}")


def all_entries(books: Iterable[Book]) -> Iterator[Entry]:
    for book in books:
        yield from book.entries.values()
