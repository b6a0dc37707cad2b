"""Which notes on the slab keep deleted records from coming back, and which records each of them buries. State only."""

from collections import Counter
from dataclasses import dataclass

from kvservice.caches import Cache
from kvservice.storage.slab_format import Note, tombstone_payload


def name_of(cache: Cache) -> bytes:
    """Namespace and key, as a tombstone says them."""
    return tombstone_payload(cache.family.space.namespace, cache.key)


@dataclass(frozen=True, slots=True)
class Burial:
    """A deleted key, by its ``name``, and the caches whose records may be on the slab, or may get there.

    ``tombstone``: the sequence number of its tombstone, should it need one.
    """

    name: bytes
    tombstone: int
    caches: tuple[Cache, ...]


class Tombstones:
    """Of records on the slab that nobody may find; those of one key may share one."""

    def __init__(self) -> None:
        self._notes: dict[Cache, Note] = {}
        self._records = Counter[int]()

    def __contains__(self, cache: Cache) -> bool:
        return cache in self._notes

    def __len__(self) -> int:
        return len(self._notes)

    def add(self, cache: Cache, note: Note) -> None:
        """A note on the slab is the tombstone of the cache's record there."""
        self._notes[cache] = note
        self._records[note.extent.offset] += 1

    def release(self, cache: Cache) -> Note | None:
        """The cache's record goes: its tombstone, if it has one that no other record needs."""
        note = self._notes.pop(cache, None)
        if note is None:
            return None
        self._records[note.extent.offset] -= 1
        if self._records[note.extent.offset]:
            return None
        del self._records[note.extent.offset]
        return note
