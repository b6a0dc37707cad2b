"""Builders for index and recovery: entries, notes, and a writer that fills a slab and an index as a node does."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from hashlib import blake2b

import numpy as np
import pytest

from kvservice.model.cache import CacheMeta, Extent, MasterReference
from kvservice.model.identity import Identity
from kvservice.model.rope import rope_from_parameters
from kvservice.model.segment import CacheKey, ContextId, SegmentId
from kvservice.storage.buffer import Bytes
from kvservice.storage.record import read_head
from kvservice.storage.recovery import Opened, recover
from kvservice.storage.slab import Note, NoteKind, Slab, Stamp, tombstone_payload
from kvservice.storage.ssd_entry import SsdEntry
from kvservice.storage.ssd_index import (
    Index,
    NaiveIndex,
    NaivePlace,
    PutNote,
    PutRecord,
    RemoveNote,
    RemoveRecord,
)
from tests.storage.conftest import RecordBuilder
from tests.storage.faulty_disk import FaultyDisk, FaultyFile
from tests.storage.slab_builders import GEOMETRY, MIB, Died, on_blocks

SLAB_BYTES = 4 * MIB
NOW_NS = 1_800_000_000_000_000_000


def make_identity(tenant: str = "tenant") -> Identity:
    rope = rope_from_parameters({"rope_theta": 10_000.0}, head_size=16, max_positions=128)
    return Identity(tenant, "model", "weights", GEOMETRY, (rope,) * GEOMETRY.layers)


IDENTITY = make_identity()
OTHER = make_identity("other")


def make_key(segment: int, context: int) -> CacheKey:
    return CacheKey(SegmentId(make_digest("segment", segment)), ContextId(make_digest("context", context)))


def make_digest(kind: str, number: int) -> bytes:
    return blake2b(b"%d" % number, digest_size=32, person=kind.encode()).digest()


def make_entry(
    segment: int = 0,
    context: int = 0,
    *,
    offset: int = 4096,
    sequence: int = 1,
    generation: int = 7,
    master: tuple[int, int] | None = None,
    is_deleted: bool = False,
    identity: Identity = IDENTITY,
) -> SsdEntry:
    """``master``: number of its context, and generation."""
    reference = None if master is None else MasterReference(make_key(0, master[0]).context, master[1])
    key = make_key(segment, context)
    meta = CacheMeta(identity.namespace(), key, 3, 5, identity.geometry, "", (b"8 bytes.",), reference)
    return SsdEntry(meta, Extent(offset, 100), generation, 11, sequence, 0.5, is_deleted)


def make_identity_note(identity: Identity = IDENTITY, *, offset: int = 1 << 20, sequence: int = 0) -> Note:
    payload = identity.canonical_json().encode()
    return Note(Extent(offset, len(payload) + 48), sequence, NoteKind.IDENTITY, payload)


def make_tombstone(segment: int, context: int, *, offset: int, sequence: int, identity: Identity = IDENTITY) -> Note:
    payload = tombstone_payload(identity.namespace(), make_key(segment, context))
    return Note(Extent(offset, len(payload) + 48), sequence, NoteKind.TOMBSTONE, payload)


def make_index(*things: SsdEntry | Note) -> NaiveIndex:
    index = NaiveIndex()
    index.apply([PutNote(thing) if isinstance(thing, Note) else PutRecord(thing) for thing in things])
    return index


@dataclass(slots=True)
class Writer:
    """Writes to a slab and its index as a node does. ``identities``: notes by tenant."""

    slab: Slab
    index: Index
    identities: dict[str, Note] = field(default_factory=dict)

    def store(
        self,
        segment: int,
        context: int,
        *,
        master: SsdEntry | None = None,
        content: int = 0,
        tokens: int = 3,
        identity: Identity = IDENTITY,
        is_indexed: bool = True,
    ) -> SsdEntry:
        """A dense cache, or a mirror of ``master``; another ``content``, another generation."""
        self.name_identity(identity)
        entry = self.write(make_record(segment, context, master, content, tokens, identity))
        if is_indexed:
            self.index.apply([PutRecord(entry)])
        return entry

    def name_identity(self, identity: Identity) -> None:
        if identity.tenant not in self.identities:
            note = self.slab.write_note(NoteKind.IDENTITY, identity.canonical_json().encode())
            self.identities[identity.tenant] = note
            self.index.apply([PutNote(note)])

    def write(self, record: Bytes) -> SsdEntry:
        """To the slab only."""
        head, extent = read_head(record), self.slab.reserve(len(record))
        assert extent is not None
        stamp = Stamp(self.slab.next_sequence(), head.header_checksum, 0.25)
        self.slab.write(extent, record, stamp)
        return SsdEntry(head.meta, extent, head.generation, head.header_checksum, stamp.sequence, stamp.prefill_s)

    def bury(self, entry: SsdEntry, *, is_indexed: bool = True) -> Note:
        """Delete a master that mirrors stand on."""
        note = self.slab.write_note(NoteKind.TOMBSTONE, tombstone_payload(entry.meta.namespace, entry.meta.key))
        if is_indexed:
            self.index.apply([PutRecord(replace(entry, is_deleted=True)), PutNote(note)])
        return note

    def remove(self, entry: SsdEntry, *, is_indexed: bool = True) -> None:
        """``is_indexed`` False: the process ends before the index is changed."""
        self.slab.erase(entry.extent)
        if is_indexed:
            self.index.apply([RemoveRecord(entry.meta.namespace, entry.meta.key, entry.extent.offset)])
            self.slab.free(entry.extent)

    def remove_note(self, note: Note) -> None:
        self.slab.erase(note.extent)
        self.index.apply([RemoveNote(note.extent.offset)])
        self.slab.free(note.extent)


def make_record(
    segment: int, context: int, master: SsdEntry | None, content: int, tokens: int, identity: Identity
) -> Bytes:
    build = RecordBuilder()
    reference = None if master is None else MasterReference(master.meta.key.context, master.generation)
    meta = build.meta(tokens=tokens, geometry=identity.geometry, master=reference)
    meta = replace(meta, namespace=identity.namespace(), key=make_key(segment, context))
    if master is None:
        return on_blocks(build.master(meta, content))
    runs = [[build.runs((0, 1)), build.runs()] for _ in range(meta.geometry.layers)]
    return on_blocks(build.mirror(meta, runs, content))


def start(disk: FaultyDisk, place: NaivePlace, slab_bytes: int = SLAB_BYTES, now_ns: int = NOW_NS) -> Opened:
    return recover(disk, slab_bytes, place=place, clock=lambda: 0.0, wall_clock_ns=lambda: now_ns)


def contents(opened: Opened) -> list[SsdEntry]:
    """All that a start kept, in an order that does not depend on how it was found."""
    return sorted(opened.entries, key=lambda entry: entry.extent.offset)


def index_contents(index: Index) -> tuple[list[SsdEntry], list[Note]]:
    return sorted(index.entries(), key=lambda entry: entry.extent.offset), index.notes()


STEPS: list[tuple[type, str]] = [
    (FaultyDisk, "write_small"),
    (FaultyDisk, "remove"),
    (FaultyFile, "write_from"),
    (FaultyFile, "sync"),
    (NaiveIndex, "apply"),
    (NaiveIndex, "sync"),
    (NaivePlace, "set_aside"),
    (NaivePlace, "drop_damaged"),
]


def die_before_step(monkeypatch: pytest.MonkeyPatch, steps: int) -> Callable[[], int]:
    """The process ends when it has changed something so many times; gives how often it has so far."""
    made = 0

    def mortal(act: Callable[..., object]) -> Callable[..., object]:
        def step(*values: object) -> object:
            nonlocal made
            if made == steps:
                raise Died
            made += 1
            return act(*values)

        return step

    for kind, name in STEPS:
        monkeypatch.setattr(kind, name, mortal(getattr(kind, name)))
    return lambda: made


def lose_power(disk: FaultyDisk, place: NaivePlace, seed: int) -> FaultyDisk:
    """What the next boot finds of the disk; the index loses a part of what was not synced."""
    if place.index is not None:
        place.index.lose_unsynced(random.Random(seed).randrange(len(place.index.batches) - place.index.synced + 1))
    return disk.crash()


def flip_bit(data: Bytes, chance: random.Random) -> None:
    data[chance.randrange(len(data))] ^= np.uint8(1 << chance.randrange(8))
