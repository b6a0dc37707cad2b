"""Which of the things found on a slab are kept at a start, and which are erased. A pure function; recovery.py does it.

    servable  := a master, or a mirror whose master (context and generation) is among the found masters
    buried    := written before a tombstone of its key
    live      := of every key, the servable record that is not buried and was written last
    hidden    := a master that is not live, and that a live mirror stands on
    kept      := live and hidden records, the identities they need, the last tombstone of a key that has a hidden record

Whether a record is servable depends on what is there, never on what is kept, so erasing any of what is not kept, in any
order, changes nothing of the rest: a start that died half way is simply done again. Only tombstones go last.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from operator import attrgetter

from kvservice.model.errors import InvalidIdentityError
from kvservice.model.geometry import Geometry
from kvservice.model.identity import Identity, Namespace, identity_from_json
from kvservice.model.segment import ContextId, SegmentId
from kvservice.storage.slab_format import Note, NoteKind, tombstone_of_payload
from kvservice.storage.ssd_entry import SsdEntry

RecordId = tuple[Namespace, SegmentId, ContextId]
"""What answers a lookup."""
MasterId = tuple[Namespace, SegmentId, ContextId, int]
"""What a mirror stands on; the number is the generation."""


class Drop(StrEnum):
    """Why something is not kept. The values are names in reports and metrics; never change them."""

    LOST = "lost"
    """The index names it, and the slab does not have it."""
    TORN = "torn"
    """Its sections do not have the checksums that its header says."""
    NO_IDENTITY = "no-identity"
    """Nothing says what its namespace means."""
    OTHER_GEOMETRY = "other-geometry"
    """Its header has another geometry than its namespace's identity."""
    DELETED = "deleted"
    """A tombstone says so, and no mirror needs it."""
    SUPERSEDED = "superseded"
    """Another record, or note, took its place."""
    NO_MASTER = "no-master"
    """A mirror whose master is not there, or in another generation."""
    MIRROR_OF_MIRROR = "mirror-of-mirror"
    """A mirror whose master is a mirror itself."""
    BAD_IDENTITY = "bad-identity"
    """A note of an identity that cannot be read, or is not in canonical form: its namespace is not known."""
    UNUSED = "unused"
    """A note that no record needs."""


@dataclass(frozen=True, slots=True)
class Decisions:
    """What becomes of all that was found; nothing is in two places, nothing in none.

    ``entries``: hidden masters (``is_deleted``), then live masters, then mirrors, each in the order they were written.
    ``notes``: one of each identity that ``entries`` need, and the tombstones of hidden ones. What is dropped comes with
    the reason. A hidden master without a tombstone was superseded: whoever deletes the newer record of its key writes a
    tombstone before, or a later start would show the older one again.
    """

    entries: list[SsdEntry]
    notes: list[Note]
    identities: dict[Namespace, Identity]
    dropped_records: list[tuple[SsdEntry, Drop]]
    dropped_notes: list[tuple[Note, Drop]]


def plan_recovery(records: Sequence[SsdEntry], notes: Iterable[Note]) -> Decisions:
    """Decide. ``records``: in places that do not overlap; their ``is_deleted`` is decided anew. O(n)."""
    found = _FoundNotes.of(notes)
    known, dropped = _with_identity(records, found.identities)
    masters = {master_id(record) for record in known if record.meta.master is None}
    live = list(_live(known, masters, found.tombstones).values())
    entries = [
        *_marked(_hidden(known, live).values(), is_deleted=True),
        *_marked((record for record in live if record.meta.master is None), is_deleted=False),
        *_marked((record for record in live if record.meta.master is not None), is_deleted=False),
    ]
    places = {entry.extent.offset for entry in entries}
    rest = [record for record in known if record.extent.offset not in places]
    if rest:
        mirrors = {master_id(record) for record in known if record.meta.master is not None}
        dropped += [(record, _reason(record, masters, mirrors, found.tombstones)) for record in rest]
    kept_notes = found.needed_by(entries)
    namespaces = dict.fromkeys(entry.meta.namespace for entry in entries)  # in an order that a seed repeats
    identities = {namespace: found.identities[namespace] for namespace in namespaces}
    return Decisions(entries, kept_notes, identities, dropped, found.without(kept_notes))


def record_id(record: SsdEntry) -> RecordId:
    """The record's namespace and key."""
    return record.meta.namespace, record.meta.key.segment, record.meta.key.context


def master_id(record: SsdEntry) -> MasterId:
    """What a mirror that stands on ``record`` names."""
    return record.meta.namespace, record.meta.key.segment, record.meta.key.context, record.generation


def base_id(record: SsdEntry) -> MasterId | None:
    """What ``record``, a mirror, stands on; None for a master."""
    master = record.meta.master
    if master is None:
        return None
    return record.meta.namespace, record.meta.key.segment, master.context, master.generation


def identity_of_note(note: Note) -> Identity:
    """The identity that a note of kind IDENTITY holds. Raises InvalidIdentityError unless it is in canonical form."""
    try:
        text = note.payload.decode()
    except UnicodeDecodeError as error:
        raise InvalidIdentityError(f"identity: no UTF-8: {error}") from error
    identity = identity_from_json(text)
    if identity.canonical_json() != text:
        raise InvalidIdentityError("identity: not in canonical form, so its digest is not its namespace")
    return identity


@dataclass(frozen=True, slots=True)
class _FoundNotes:
    """``identity_notes`` and ``tombstones``: the last of each. ``bad``: where identities lie that cannot be read."""

    notes: list[Note]
    identities: dict[Namespace, Identity]
    identity_notes: dict[Namespace, Note]
    tombstones: dict[RecordId, Note]
    bad: set[int]

    @classmethod
    def of(cls, notes: Iterable[Note]) -> "_FoundNotes":
        found = cls(sorted(notes, key=_note_age), {}, {}, {}, set())
        for note in found.notes:
            if note.kind is NoteKind.TOMBSTONE:
                namespace, key = tombstone_of_payload(note.payload)
                found.tombstones[namespace, key.segment, key.context] = note
            else:
                found._add_identity(note)
        return found

    def _add_identity(self, note: Note) -> None:
        try:
            identity = identity_of_note(note)
        except InvalidIdentityError:
            self.bad.add(note.extent.offset)
        else:
            self.identities[identity.namespace()] = identity
            self.identity_notes[identity.namespace()] = note

    def needed_by(self, entries: Iterable[SsdEntry]) -> list[Note]:
        namespaces: dict[Namespace, None] = {}
        needed: dict[RecordId, Note] = {}
        for entry in entries:
            namespaces[entry.meta.namespace] = None
            if entry.is_deleted and _is_buried(entry, self.tombstones):
                needed[record_id(entry)] = self.tombstones[record_id(entry)]
        return [*(self.identity_notes[namespace] for namespace in namespaces), *needed.values()]

    def without(self, kept: Iterable[Note]) -> list[tuple[Note, Drop]]:
        places = {note.extent.offset for note in kept}
        last = {note.extent.offset for note in (*self.identity_notes.values(), *self.tombstones.values())}
        return [(note, self._reason(note, last)) for note in self.notes if note.extent.offset not in places]

    def _reason(self, note: Note, last: set[int]) -> Drop:
        if note.extent.offset in self.bad:
            return Drop.BAD_IDENTITY
        return Drop.UNUSED if note.extent.offset in last else Drop.SUPERSEDED


def _note_age(note: Note) -> tuple[int, int]:
    return note.sequence, note.extent.offset


def _age(record: SsdEntry) -> tuple[int, int]:
    return record.sequence, record.extent.offset


def _with_identity(
    records: Iterable[SsdEntry], identities: dict[Namespace, Identity]
) -> tuple[list[SsdEntry], list[tuple[SsdEntry, Drop]]]:
    known, dropped = [], []
    equal: dict[Namespace, Geometry] = {}  # the last that was compared: mostly all records share one object
    for record in records:
        namespace, geometry = record.meta.namespace, record.meta.geometry
        if equal.get(namespace) is not geometry:
            identity = identities.get(namespace)
            if identity is None or identity.geometry != geometry:
                dropped.append((record, Drop.OTHER_GEOMETRY if identity else Drop.NO_IDENTITY))
                continue
            equal[namespace] = geometry
        known.append(record)
    return known, dropped


def _is_buried(record: SsdEntry, tombstones: dict[RecordId, Note]) -> bool:
    if not tombstones:
        return False
    tombstone = tombstones.get(record_id(record))
    return tombstone is not None and record.sequence < tombstone.sequence


def _live(
    records: Iterable[SsdEntry], masters: set[MasterId], tombstones: dict[RecordId, Note]
) -> dict[RecordId, SsdEntry]:
    live: dict[RecordId, SsdEntry] = {}
    for record in records:
        if (record.meta.master is not None and base_id(record) not in masters) or _is_buried(record, tombstones):
            continue
        other = live.setdefault(record_id(record), record)
        if other is not record and _age(other) < _age(record):
            live[record_id(record)] = record
    return live


def _hidden(records: Iterable[SsdEntry], live: Iterable[SsdEntry]) -> dict[MasterId, SsdEntry]:
    """Masters that live mirrors stand on and that are not live; of equal ones the last written."""
    needed, there = set[MasterId | None](), set[MasterId]()
    for record in live:
        if record.meta.master is None:
            there.add(master_id(record))
        else:
            needed.add(base_id(record))
    needed -= there
    hidden: dict[MasterId, SsdEntry] = {}
    for record in records if needed else ():
        if record.meta.master is None and master_id(record) in needed:
            other = hidden.setdefault(master_id(record), record)
            if _age(other) < _age(record):
                hidden[master_id(record)] = record
    return hidden


def _marked(records: Iterable[SsdEntry], *, is_deleted: bool) -> list[SsdEntry]:
    """In the order they were written."""
    marked = [one if one.is_deleted is is_deleted else replace(one, is_deleted=is_deleted) for one in records]
    return sorted(marked, key=attrgetter("sequence"))


def _reason(record: SsdEntry, masters: set[MasterId], mirrors: set[MasterId], tombstones: dict[RecordId, Note]) -> Drop:
    if _is_buried(record, tombstones):
        return Drop.DELETED
    base = base_id(record)
    if base is None or base in masters:
        return Drop.SUPERSEDED
    return Drop.MIRROR_OF_MIRROR if base in mirrors else Drop.NO_MASTER
