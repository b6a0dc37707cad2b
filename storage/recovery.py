"""Opens what a stop, clean or not, left in the folder: slab, index, and what of the records is kept.

The order of writes makes every start restartable. The mark of a clean stop goes first. What is dropped is erased on the
slab, records before notes, and only then does the index change. What is wrong with the slab as a whole is an error
before anything is written. Decisions: recovery_plan.py.
"""

import gc
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import StrEnum

from kvservice.model.errors import InvalidInputError
from kvservice.model.identity import Identity, Namespace
from kvservice.storage.clean_marker import (
    CleanMarker,
    next_epoch,
    read_epoch,
    read_marker,
    remove_marker,
    write_epoch,
    write_marker,
)
from kvservice.storage.disk import Disk
from kvservice.storage.index_format import CorruptIndexError
from kvservice.storage.recovery_plan import Decisions, Drop, plan_recovery
from kvservice.storage.recovery_search import FoundThings, reserve_all, search_slab
from kvservice.storage.rocks_index import RocksPlace
from kvservice.storage.slab import SLAB_NAME, Slab
from kvservice.storage.slab_format import Note
from kvservice.storage.ssd_entry import SsdEntry
from kvservice.storage.ssd_index import (
    CHANGES_MAX,
    Change,
    Index,
    IndexPlace,
    PutNote,
    PutRecord,
    RemoveNote,
    RemoveRecord,
)

log = logging.getLogger(__name__)

INDEX_NAME = "index"


class RecoveryKind(StrEnum):
    """How a start came to know what is there."""

    NEW = "new"
    """There was no slab."""
    CLEAN = "clean"
    """The index is as the clean stop left it, and is believed; the slab was not read."""
    CHECKED = "checked"
    """Every head and footer that the index names was read, and what it does not name was searched."""
    REBUILT = "rebuilt"
    """There was no index to believe; the slab was searched."""


@dataclass(frozen=True, slots=True)
class RecoveryReport:
    """What a start found. ``why``: the reason for the kind, for people.

    ``records``, ``record_bytes``: kept, hidden ones too. ``dropped``: by reason. ``scanned_bytes`` were read from the
    slab to find records; ``unreadable_blocks`` could not be. ``verified``: records that were read in full.
    """

    kind: RecoveryKind
    why: str
    records: int
    record_bytes: int
    hidden: int
    dropped: Mapping[Drop, int]
    verified: int
    scanned_bytes: int
    unreadable_blocks: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Opened:
    """A slab and an index that agree, for the caller to use and to close. See Decisions for entries and notes."""

    slab: Slab
    index: Index
    entries: list[SsdEntry]
    identities: dict[Namespace, Identity]
    notes: list[Note]
    boot_epoch: int
    report: RecoveryReport


def recover(
    disk: Disk,
    slab_bytes: int,
    *,
    place: IndexPlace | None = None,
    holder: str = "kvservice",
    clock: Callable[[], float] = time.monotonic,
    wall_clock_ns: Callable[[], int] = time.time_ns,
    before_index: Callable[[], None] = lambda: None,
) -> Opened:
    """Lock the folder and open what is in it; blocks, one thread. The lock stays until the disk is closed.

    ``place``: where the index is, ``index`` in the folder by default. ``before_index`` is called between the erasing of
    what is dropped and the change of the index. Raises ConfigError for a folder in use, a slab that is none or of
    another size, and DiskError; whatever it raises, calling it again, in another process too, gives the same records.
    """
    started = clock()
    disk.lock(holder)
    with _paused_collector(), ExitStack() as on_error:
        is_new = not disk.exists(SLAB_NAME)
        slab = Slab.create(disk, slab_bytes) if is_new else Slab.open(disk, slab_bytes)
        on_error.callback(slab.close)
        epochs = _Epochs(read_marker(disk), read_epoch(disk))
        place = place or RocksPlace(disk.folder / INDEX_NAME)
        said = _new_index(place) if is_new else _open_index(place, slab, epochs)
        on_error.callback(said.index.close)
        remove_marker(disk)
        boot_epoch = epochs.next(wall_clock_ns())
        write_epoch(disk, boot_epoch)
        found = _look(slab, said)
        if said.kind in (RecoveryKind.CHECKED, RecoveryKind.REBUILT):
            slab.sync()  # a killed process may not have come to that, and the index is about to vouch for what it wrote
        decisions = plan_recovery(found.records, found.notes)
        _erase(slab, found, decisions)
        before_index()
        _repair(place, said, decisions)
        on_error.pop_all()
    report = _report(said, found, decisions, clock() - started)
    is_quiet = said.kind in (RecoveryKind.NEW, RecoveryKind.CLEAN) and not report.dropped
    log.log(logging.INFO if is_quiet else logging.WARNING, "%s: %s", disk.folder, report)
    return Opened(slab, said.index, decisions.entries, decisions.identities, decisions.notes, boot_epoch, report)


def mark_clean(disk: Disk, slab: Slab, index: Index, boot_epoch: int) -> None:
    """Leave the mark of a clean stop; afterwards only close slab and index. Blocks; CorruptIndexError, DiskError.

    ``boot_epoch``: as ``recover`` gave it. The next start believes the index, if it is still as it is now: the caller
    knows that it names all that is on the slab, and nothing else.
    """
    slab.sync()
    index.flush()
    write_marker(disk, CleanMarker(slab.uuid, boot_epoch, slab.next_sequence(), index.digest()))


@contextmanager
def _paused_collector() -> Iterator[None]:
    """Half a million objects that stay, and no cycles: collecting meanwhile takes half as long again, for nothing."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


# The index


@dataclass(frozen=True, slots=True)
class _Epochs:
    marker: CleanMarker | None
    last: int | None

    def next(self, now_ns: int) -> int:
        return next_epoch([self.last, None if self.marker is None else self.marker.boot_epoch], now_ns)


@dataclass(frozen=True, slots=True)
class _Said:
    """An open index, what it says, and how far that is believed."""

    index: Index
    kind: RecoveryKind
    why: str
    entries: Sequence[SsdEntry] = ()
    notes: Sequence[Note] = ()


def _new_index(place: IndexPlace) -> _Said:
    if place.exists():
        place.set_aside()  # of a slab that is gone
    return _Said(place.open(), RecoveryKind.NEW, "there was no slab")


def _open_index(place: IndexPlace, slab: Slab, epochs: _Epochs) -> _Said:
    if not place.exists():
        return _Said(place.open(), RecoveryKind.REBUILT, "there was no index")
    said = _read_index(place, slab, epochs)
    if isinstance(said, _Said):
        return said
    place.set_aside()  # not before the error is gone: it may hold the index open
    return _Said(place.open(), RecoveryKind.REBUILT, said)


def _read_index(place: IndexPlace, slab: Slab, epochs: _Epochs) -> _Said | str:
    """What the index says; or, with the index closed, why it cannot be believed."""
    with ExitStack() as on_error:
        try:
            index = place.open()
            on_error.callback(index.close)
            entries, notes = list(index.entries()), index.notes()
            why_not = _why_not_clean(slab, index, epochs)
            if not why_not and epochs.marker is not None:
                _believe(slab, entries, notes, epochs.marker)
        except CorruptIndexError as error:
            return str(error)
        on_error.pop_all()
    kind = RecoveryKind.CHECKED if why_not else RecoveryKind.CLEAN
    return _Said(index, kind, why_not or "the last stop was clean", entries, notes)


def _why_not_clean(slab: Slab, index: Index, epochs: _Epochs) -> str:
    """Why the index has to be compared with the slab; empty if it is as the last stop left it."""
    marker = epochs.marker
    if marker is None:
        return "the last stop was not clean"
    if marker.slab_uuid != slab.uuid:
        return f"the mark of a clean stop is of slab {marker.slab_uuid}, not of this one"
    if marker.boot_epoch != epochs.last:
        return f"the mark of a clean stop is of boot {marker.boot_epoch}, the last boot was {epochs.last}"
    if marker.digest != index.digest():
        return "the index is not as the last stop left it"
    return ""


def _believe(slab: Slab, entries: Sequence[SsdEntry], notes: Sequence[Note], marker: CleanMarker) -> None:
    try:
        reserve_all(slab, entries, notes)
    except InvalidInputError as error:
        raise CorruptIndexError(f"the index names places that cannot be: {error}") from error
    slab.continue_behind(marker.sequence)


# The steps


def _look(slab: Slab, said: _Said) -> FoundThings:
    if said.kind is RecoveryKind.CLEAN:
        return FoundThings(list(said.entries), list(said.notes))
    if said.kind is RecoveryKind.NEW:
        return FoundThings()
    return search_slab(slab, said.entries, said.notes)


def _erase(slab: Slab, found: FoundThings, decisions: Decisions) -> None:
    """Erase what is not kept, and give its places back. Tombstones go last: what they bury must never come back."""
    records = [entry.extent for entry in (*found.torn, *(entry for entry, _ in decisions.dropped_records))]
    notes = [note.extent for note, _ in decisions.dropped_notes]
    for extents in (records, notes):
        for extent in extents:
            slab.erase(extent)
        if extents:
            slab.sync()
    for extent in (*records, *notes):
        slab.free(extent)


def _repair(place: IndexPlace, said: _Said, decisions: Decisions) -> None:
    """Bring the index to what was decided. After every batch it is one that the next start understands."""
    changes = [] if _agree(said, decisions) else list(_changes(said, decisions))
    for start in range(0, len(changes), CHANGES_MAX):
        said.index.apply(changes[start : start + CHANGES_MAX])
    if changes:
        said.index.sync()
    place.drop_damaged()


def _agree(said: _Said, decisions: Decisions) -> bool:
    """Mostly so after a clean stop, and found out ten times faster than what the changes are."""
    is_same = set(map(id, said.entries)) == set(map(id, decisions.entries))
    return is_same and set(map(id, said.notes)) == set(map(id, decisions.notes))


def _changes(said: _Said, decisions: Decisions) -> Iterator[Change]:
    """Identities come before the records that need them, and go after them."""
    notes = {note.extent.offset: note for note in decisions.notes}
    entries = {entry.extent.offset: entry for entry in decisions.entries}
    said_notes = {note.extent.offset: note for note in said.notes}
    said_entries = {entry.extent.offset: entry for entry in said.entries}
    yield from (PutNote(note) for offset, note in notes.items() if said_notes.get(offset) != note)
    for one in said.entries:
        meta, kept = one.meta, entries.get(one.extent.offset)
        if kept is None or (kept.meta.namespace, kept.meta.key) != (meta.namespace, meta.key):
            yield RemoveRecord(meta.namespace, meta.key, one.extent.offset)
    for offset, entry in entries.items():
        if said_entries.get(offset) is not entry:
            yield PutRecord(entry)
    yield from (RemoveNote(offset) for offset in said_notes if offset not in notes)


def _report(said: _Said, found: FoundThings, decisions: Decisions, seconds: float) -> RecoveryReport:
    dropped = Counter(reason for _, reason in (*decisions.dropped_records, *decisions.dropped_notes))
    dropped += Counter({Drop.LOST: found.lost, Drop.TORN: len(found.torn)})
    return RecoveryReport(
        kind=said.kind,
        why=said.why,
        records=len(decisions.entries),
        record_bytes=sum(entry.extent.length for entry in decisions.entries),
        hidden=sum(entry.is_deleted for entry in decisions.entries),
        dropped=dict(dropped),
        verified=found.verified,
        scanned_bytes=found.scanned_bytes,
        unreadable_blocks=found.unreadable_blocks,
        seconds=seconds,
    )
