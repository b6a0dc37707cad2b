"""Where records and notes lie on the slab, and what a catalog needs to know of them; no payload.

The slab says all of this too. Whatever is wrong with an index, it is given up and made anew from there (recovery.py):
it is never repaired, and never half believed. Bytes: index_format.py.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple, Protocol

from kvservice.model.errors import InvalidInputError
from kvservice.model.identity import Namespace
from kvservice.model.segment import CacheKey
from kvservice.storage.index_format import (
    CHECKSUM,
    CorruptIndexError,
    encode_entry,
    encode_note,
    geometries_of,
    note_key,
    record_key,
)
from kvservice.storage.slab_format import Note
from kvservice.storage.ssd_entry import SsdEntry

CHANGES_MAX = 4096
"""Changes of one batch. RocksDB keeps the GIL while it takes a batch in, 1 us a change or less."""
U64 = (1 << 64) - 1


class PutRecord(NamedTuple):
    """Say where a record lies. It never takes the place of a record elsewhere, not even of one with the same key."""

    entry: SsdEntry


class RemoveRecord(NamedTuple):
    """Forget the record of ``key`` at ``offset`` of the slab; fine if it is not there. Erase it on the slab before."""

    namespace: Namespace
    key: CacheKey
    offset: int


class PutNote(NamedTuple):
    """Say where a note lies, and what it says. An identity goes before the records of its namespace."""

    note: Note


class RemoveNote(NamedTuple):
    """Forget the note at ``offset`` of the slab; fine if it is not there. Erase it on the slab before."""

    offset: int


Change = PutRecord | RemoveRecord | PutNote | RemoveNote


@dataclass(frozen=True, slots=True)
class IndexDigest:
    """Stands for all that an index says: how many records and notes, and the sum of their checksums modulo 2^64."""

    count: int
    checksum: int


class Index(Protocol):
    """What lies where on one slab. Survives the end of the process; what was not synced may go with the machine.

    Any thread may call; one at a time changes. Calls block. Raises CorruptIndexError as said, DiskError or
    DiskFullError where the file system refuses: then the index stays as it was and takes no more changes, until it is
    closed and opened again.
    """

    def apply(self, changes: Sequence[Change]) -> None:
        """Make all changes, or none, in order. InvalidInputError for more than CHANGES_MAX."""

    def notes(self) -> list[Note]:
        """All notes, by offset. CorruptIndexError."""

    def entries(self) -> Iterator[SsdEntry]:
        """All records, by key. CorruptIndexError, also where a record's identity is missing. Exhaust or drop it."""

    def digest(self) -> IndexDigest:
        """Of all records and notes, without looking into them. CorruptIndexError."""

    def sync(self) -> None:
        """Return when every change made before has reached the device."""

    def flush(self) -> None:
        """Bring everything into its final, checksummed form, on the device: before a clean stop."""

    def close(self) -> None:
        """Give up files and lock. Safe to call twice."""


class IndexPlace(Protocol):
    """Where an index is kept from start to start. One thread; DiskError where the file system refuses."""

    def exists(self) -> bool:
        """Is there an index, whole or not?"""

    def open(self) -> Index:
        """Open the index, made if there is none. CorruptIndexError if it is damaged."""

    def set_aside(self) -> None:
        """Move the index, which must be closed, out of the way, so that the next ``open`` makes a new one."""

    def drop_damaged(self) -> None:
        """Remove all that was set aside."""


class NaiveIndex:
    """A list of batches, and what they add up to: the readable reference, and the test double. See Index."""

    def __init__(self) -> None:
        self.batches: list[tuple[Change, ...]] = []
        self.synced = 0

    def apply(self, changes: Sequence[Change]) -> None:
        """See Index."""
        if len(changes) > CHANGES_MAX:
            raise InvalidInputError(f"a batch of {len(changes)} changes, the limit is {CHANGES_MAX}")
        self.batches.append(tuple(changes))

    def notes(self) -> list[Note]:
        """See Index."""
        return [said for _, said in self._all() if isinstance(said, Note)]

    def entries(self) -> Iterator[SsdEntry]:
        """See Index."""
        geometries = geometries_of(self.notes())
        for _, said in self._all():
            if isinstance(said, SsdEntry):
                if said.meta.namespace not in geometries:
                    raise CorruptIndexError(f"namespace {said.meta.namespace[:8].hex()} has records, but no identity")
                yield said

    def digest(self) -> IndexDigest:
        """See Index."""
        encoded = [encode_note(said) if isinstance(said, Note) else encode_entry(said) for _, said in self._all()]
        total = sum(int.from_bytes(value[-CHECKSUM.size :], "little") for _, value in encoded)
        return IndexDigest(len(encoded), total & U64)

    def sync(self) -> None:
        """See Index."""
        self.synced = len(self.batches)

    def flush(self) -> None:
        """See Index."""
        self.sync()

    def close(self) -> None:
        """See Index. What it says stays."""

    def lose_unsynced(self, kept: int = 0) -> None:
        """Forget the batches since the last ``sync``, except for the first ``kept``, as a power failure does."""
        del self.batches[self.synced + kept :]
        self.sync()

    def _all(self) -> list[tuple[bytes, SsdEntry | Note]]:
        found: dict[bytes, SsdEntry | Note] = {}
        for change in (change for batch in self.batches for change in batch):
            match change:
                case PutRecord(entry):
                    found[record_key(entry.meta.namespace, entry.meta.key, entry.extent.offset)] = entry
                case RemoveRecord(namespace, key, offset):
                    found.pop(record_key(namespace, key, offset), None)
                case PutNote(note):
                    found[note_key(note.extent.offset)] = note
                case RemoveNote(offset):
                    found.pop(note_key(offset), None)
        return sorted(found.items(), key=itemgetter(0))


class NaivePlace:
    """Keeps one NaiveIndex from start to start. See IndexPlace. ``is_damaged``: the next ``open`` refuses."""

    def __init__(self) -> None:
        self.index: NaiveIndex | None = None
        self.is_damaged = False
        self.damaged: list[NaiveIndex] = []

    def exists(self) -> bool:
        """See IndexPlace."""
        return self.index is not None

    def open(self) -> NaiveIndex:
        """See IndexPlace."""
        if self.is_damaged:
            raise CorruptIndexError("the index was declared damaged")
        self.index = self.index or NaiveIndex()
        return self.index

    def set_aside(self) -> None:
        """See IndexPlace."""
        if self.index is not None:
            self.damaged.append(self.index)
        self.index, self.is_damaged = None, False

    def drop_damaged(self) -> None:
        """See IndexPlace."""
        self.damaged.clear()
