"""Which found things a start keeps: cases one by one, and any mixture against a model that reads like the rules."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvservice.model.cache import Extent
from kvservice.model.errors import InvalidIdentityError
from kvservice.model.geometry import attention_geometry
from kvservice.storage.recovery_plan import (
    Decisions,
    Drop,
    base_id,
    identity_of_note,
    master_id,
    plan_recovery,
    record_id,
)
from kvservice.storage.slab_format import Note, NoteKind, tombstone_of_payload
from kvservice.storage.ssd_entry import SsdEntry
from tests.storage.recovery_builders import IDENTITY, OTHER, make_entry, make_identity_note, make_tombstone

NOTE = make_identity_note()


def plan(*found: SsdEntry | Note, has_identity: bool = True) -> Decisions:
    records = [one for one in found if isinstance(one, SsdEntry)]
    notes = [one for one in found if isinstance(one, Note)]
    return plan_recovery(records, [*([NOTE] if has_identity else []), *notes])


def reasons(decisions: Decisions) -> dict[int, Drop]:
    """By place."""
    records = {record.extent.offset: reason for record, reason in decisions.dropped_records}
    return records | {note.extent.offset: reason for note, reason in decisions.dropped_notes}


def at(number: int) -> int:
    return 4096 * number


# Case by case


def test_nothing_found_keeps_nothing() -> None:
    assert plan(has_identity=False) == Decisions([], [], {}, [], [])


def test_a_master_and_its_mirror_are_kept_the_master_first() -> None:
    mirror, master = make_entry(0, 1, offset=at(1), master=(0, 7)), make_entry(0, 0, offset=at(2), sequence=2)
    decisions = plan(mirror, master)
    assert decisions == Decisions([master, mirror], [NOTE], {IDENTITY.namespace(): IDENTITY}, [], [])


def test_of_two_records_of_a_key_the_last_written_is_kept() -> None:
    older, newer = make_entry(offset=at(2), sequence=1), make_entry(offset=at(1), sequence=2, generation=8)
    for found in ((older, newer), (newer, older)):
        assert plan(*found).entries == [newer]
        assert reasons(plan(*found)) == {at(2): Drop.SUPERSEDED}


def test_a_newer_mirror_that_cannot_be_served_does_not_cost_the_older_record() -> None:
    older, newer = make_entry(offset=at(1), sequence=1), make_entry(offset=at(2), sequence=2, master=(5, 7))
    assert plan(older, newer).entries == [older]
    assert reasons(plan(older, newer)) == {at(2): Drop.NO_MASTER}


def test_a_fold_that_was_under_way_keeps_what_old_mirrors_stand_on() -> None:
    """Cache 0 became a mirror of 1; 2 is still a mirror of the dense form of 0."""
    dense, new_master = make_entry(0, 0, offset=at(1)), make_entry(0, 1, offset=at(2), generation=9, sequence=2)
    folded = make_entry(0, 0, offset=at(3), master=(1, 9), generation=3, sequence=4)
    old_mirror = make_entry(0, 2, offset=at(4), master=(0, 7), sequence=3)
    decisions = plan(folded, old_mirror, new_master, dense)
    assert decisions.entries == [replace(dense, is_deleted=True), new_master, old_mirror, folded]
    assert not reasons(decisions)
    assert plan(folded, new_master, dense).entries == [new_master, folded]


@pytest.mark.parametrize("generation", [6, 8])
def test_a_mirror_of_another_generation_is_dropped(generation: int) -> None:
    found = make_entry(0, 0, offset=at(1)), make_entry(0, 1, offset=at(2), master=(0, generation))
    assert reasons(plan(*found)) == {at(2): Drop.NO_MASTER}


def test_a_master_of_another_segment_or_namespace_is_none() -> None:
    mirror = make_entry(0, 1, offset=at(1), master=(0, 7))
    elsewhere = make_entry(1, 0, offset=at(2)), make_entry(0, 0, offset=at(3), identity=OTHER)
    other_note = make_identity_note(OTHER, offset=at(4))
    assert reasons(plan(mirror, *elsewhere, other_note)) == {at(1): Drop.NO_MASTER}


def test_a_mirror_of_a_mirror_is_dropped() -> None:
    master, mirror = make_entry(0, 0, offset=at(1)), make_entry(0, 1, offset=at(2), master=(0, 7), generation=8)
    second = make_entry(0, 2, offset=at(3), master=(1, 8))
    assert plan(master, mirror, second).entries == [master, mirror]
    assert reasons(plan(master, mirror, second)) == {at(3): Drop.MIRROR_OF_MIRROR}


def test_a_deleted_master_lives_on_for_its_mirrors() -> None:
    master, mirror = make_entry(0, 0, offset=at(1)), make_entry(0, 1, offset=at(2), master=(0, 7), sequence=2)
    tombstone = make_tombstone(0, 0, offset=at(3), sequence=3)
    decisions = plan(master, mirror, tombstone)
    assert decisions.entries == [replace(master, is_deleted=True), mirror]
    assert decisions.notes == [NOTE, tombstone]
    assert not reasons(decisions)


def test_a_deleted_master_without_mirrors_goes_with_its_tombstone() -> None:
    decisions = plan(make_entry(offset=at(1)), make_tombstone(0, 0, offset=at(2), sequence=2))
    assert reasons(decisions) == {at(1): Drop.DELETED, at(2): Drop.UNUSED, NOTE.extent.offset: Drop.UNUSED}


def test_a_deleted_mirror_and_what_stood_on_it_goes() -> None:
    master, mirror = make_entry(0, 0, offset=at(1)), make_entry(0, 1, offset=at(2), master=(0, 7))
    decisions = plan(master, mirror, make_tombstone(0, 1, offset=at(3), sequence=2))
    assert decisions.entries == [master]
    assert reasons(decisions) == {at(2): Drop.DELETED, at(3): Drop.UNUSED}


def test_a_record_stored_again_after_its_deletion_lives_beside_the_hidden_one() -> None:
    old, mirror = make_entry(0, 0, offset=at(1)), make_entry(0, 1, offset=at(2), master=(0, 7), sequence=2)
    tombstone = make_tombstone(0, 0, offset=at(3), sequence=3)
    again = make_entry(0, 0, offset=at(4), sequence=4, generation=8)
    decisions = plan(again, old, mirror, tombstone)
    assert decisions.entries == [replace(old, is_deleted=True), again, mirror]
    assert decisions.notes == [NOTE, tombstone]


def test_a_record_stored_again_with_equal_bytes_takes_over_the_mirrors() -> None:
    old, mirror = make_entry(0, 0, offset=at(1)), make_entry(0, 1, offset=at(2), master=(0, 7), sequence=2)
    again = make_entry(0, 0, offset=at(4), sequence=4)
    decisions = plan(old, mirror, make_tombstone(0, 0, offset=at(3), sequence=3), again)
    assert decisions.entries == [again, mirror]
    assert reasons(decisions) == {at(1): Drop.DELETED, at(3): Drop.UNUSED}


def test_of_two_tombstones_the_last_one_counts() -> None:
    first, second = (make_tombstone(0, 0, offset=at(number), sequence=number) for number in (2, 5))
    old, mirror = make_entry(0, 0, offset=at(1)), make_entry(0, 1, offset=at(3), master=(0, 8), sequence=4)
    again = make_entry(0, 0, offset=at(4), sequence=3, generation=8)
    decisions = plan(old, first, again, mirror, second)
    assert decisions.entries == [replace(again, is_deleted=True), mirror]
    assert reasons(decisions) == {at(1): Drop.DELETED, at(2): Drop.SUPERSEDED}


def test_what_the_index_called_deleted_is_decided_anew() -> None:
    assert plan(make_entry(is_deleted=True)).entries == [make_entry()]


def test_records_without_an_identity_go() -> None:
    found = make_entry(0, 0, offset=at(1), identity=OTHER), make_entry(0, 1, offset=at(2))
    decisions = plan(*found)
    assert decisions.entries == [found[1]]
    assert reasons(decisions) == {at(1): Drop.NO_IDENTITY}


def test_records_of_another_geometry_than_their_identity_go() -> None:
    wrong = attention_geometry(layers=3, heads=1, head_size=16, dtype="bfloat16")
    entry = make_entry(0, 0, offset=at(1))
    odd = replace(entry, meta=replace(entry.meta, geometry=wrong))
    mirror = make_entry(0, 1, offset=at(2), master=(0, 7))
    assert reasons(plan(odd, mirror)) == {
        at(1): Drop.OTHER_GEOMETRY, at(2): Drop.NO_MASTER, NOTE.extent.offset: Drop.UNUSED,
    }  # fmt: skip


def test_one_note_of_an_identity_is_kept() -> None:
    second = make_identity_note(offset=at(9), sequence=9)
    decisions = plan(make_entry(), second)
    assert decisions.notes == [second]
    assert reasons(decisions) == {NOTE.extent.offset: Drop.SUPERSEDED}


@pytest.mark.parametrize(
    "payload",
    [b"\xff\xfe", b"{}", IDENTITY.canonical_json().replace(",", ", ").encode(), b"[" * 100_000],
    ids=["no text", "no identity", "not canonical", "too deep"],
)
def test_an_identity_that_is_not_its_namespace_is_dropped(payload: bytes) -> None:
    note = Note(Extent(at(5), len(payload) + 48), 5, NoteKind.IDENTITY, payload)
    with pytest.raises(InvalidIdentityError):
        identity_of_note(note)
    decisions = plan(make_entry(), note, has_identity=False)
    assert reasons(decisions) == {at(1): Drop.NO_IDENTITY, at(5): Drop.BAD_IDENTITY}


# Any mixture against the model

Found = tuple[list[SsdEntry], list[Note]]


@st.composite
def mixtures(draw: st.DrawFn) -> Found:
    """Few keys, so that everything meets everything. Places and sequence numbers are all different."""
    count = draw(st.integers(0, 12))
    ages = draw(st.permutations(range(count)))
    numbers, generations = st.integers(0, 2), st.integers(7, 8)
    records, notes = list[SsdEntry](), list[Note]()
    for place, sequence in enumerate(ages):
        segment, context = draw(st.integers(0, 1)), draw(numbers)
        identity = draw(st.sampled_from([IDENTITY, IDENTITY, OTHER]))
        match draw(st.sampled_from(["master", "master", "mirror", "mirror", "tombstone", "identity"])):
            case "identity":
                notes.append(make_identity_note(identity, offset=at(place), sequence=sequence))
            case "tombstone":
                notes.append(make_tombstone(segment, context, offset=at(place), sequence=sequence, identity=identity))
            case kind:
                base = (draw(numbers), draw(generations)) if kind == "mirror" else None
                records.append(
                    make_entry(
                        segment, context, offset=at(place), sequence=sequence, master=base,
                        generation=draw(generations), is_deleted=draw(st.booleans()), identity=identity,
                    )
                )  # fmt: skip
    if draw(st.booleans()):
        notes.append(make_identity_note(offset=at(count), sequence=count))
    return records, notes


class Model:
    """The rules, each one read off the text, without a thought for time."""

    def __init__(self, records: Sequence[SsdEntry], notes: Sequence[Note]) -> None:
        self.notes = notes
        self.namespaces = {identity_of_note(one).namespace() for one in notes if one.kind is NoteKind.IDENTITY}
        self.records = [one for one in records if one.meta.namespace in self.namespaces]
        self.live = [one for one in self.records if self.is_live(one)]
        self.hidden = [one for one in self.records if self.is_hidden(one)]

    def is_servable(self, record: SsdEntry) -> bool:
        base = base_id(record)
        return base is None or any(base_id(one) is None and master_id(one) == base for one in self.records)

    def burying(self, record: SsdEntry) -> list[Note]:
        return [one for one in self.tombstones_of(record) if one.sequence > record.sequence]

    def tombstones_of(self, record: SsdEntry) -> list[Note]:
        tombstones = [one for one in self.notes if one.kind is NoteKind.TOMBSTONE]
        named = (record.meta.namespace, record.meta.key)
        return [one for one in tombstones if tombstone_of_payload(one.payload) == named]

    def may_answer(self, record: SsdEntry) -> bool:
        return self.is_servable(record) and not self.burying(record)

    def is_live(self, record: SsdEntry) -> bool:
        rivals = [one for one in self.records if record_id(one) == record_id(record) and self.may_answer(one)]
        return self.may_answer(record) and all(one.sequence <= record.sequence for one in rivals)

    def is_hidden(self, record: SsdEntry) -> bool:
        if base_id(record) is not None or record in self.live:
            return False
        is_needed = any(base_id(one) == master_id(record) for one in self.live)
        equal = [one for one in self.records if base_id(one) is None and master_id(one) == master_id(record)]
        return is_needed and not any(one in self.live or one.sequence > record.sequence for one in equal)

    def kept_notes(self) -> set[int]:
        kept = set()
        for namespace in {one.meta.namespace for one in (*self.live, *self.hidden)}:
            of_it = [
                one
                for one in self.notes
                if one.kind is NoteKind.IDENTITY and identity_of_note(one).namespace() == namespace
            ]
            kept.add(max(of_it, key=lambda one: one.sequence).extent.offset)
        for record in self.hidden:
            if self.burying(record):
                kept.add(max(self.tombstones_of(record), key=lambda one: one.sequence).extent.offset)
        return kept


def places(things: Iterable[SsdEntry | Note]) -> set[int]:
    return {thing.extent.offset for thing in things}


@settings(deadline=None, max_examples=400)
@given(found=mixtures())
def test_any_mixture_is_decided_as_the_rules_say(found: Found) -> None:
    records, notes = found
    model, decisions = Model(records, notes), plan_recovery(records, notes)
    assert places(one for one in decisions.entries if one.is_deleted) == places(model.hidden)
    assert places(one for one in decisions.entries if not one.is_deleted) == places(model.live)
    assert places(decisions.notes) == model.kept_notes()
    assert set(decisions.identities) == {one.meta.namespace for one in decisions.entries}


@settings(deadline=None, max_examples=200)
@given(found=mixtures())
def test_everything_is_kept_or_dropped_and_only_once(found: Found) -> None:
    records, notes = found
    decisions = plan_recovery(records, notes)
    dropped = [*decisions.dropped_records, *decisions.dropped_notes]
    kept = [*places(decisions.entries), *places(decisions.notes), *reasons(decisions)]
    assert len(decisions.entries) + len(decisions.notes) + len(dropped) == len(kept)
    assert sorted(kept) == sorted(places(records) | places(notes))


@settings(deadline=None, max_examples=200)
@given(found=mixtures())
def test_what_is_kept_can_be_served_and_comes_in_order(found: Found) -> None:
    entries = plan_recovery(*found).entries
    masters = set()
    for entry in entries:
        base = base_id(entry)
        if base is None:
            masters.add(master_id(entry))
        else:
            assert base in masters
            assert not entry.is_deleted
    live = [record_id(entry) for entry in entries if not entry.is_deleted]
    assert len(live) == len(set(live))
    assert [entry.is_deleted for entry in entries] == sorted((entry.is_deleted for entry in entries), reverse=True)


@settings(deadline=None, max_examples=400)
@given(found=mixtures(), data=st.data())
def test_a_start_that_died_while_it_erased_is_simply_done_again(found: Found, data: st.DataObject) -> None:
    """Any dropped records are gone, in no order; notes only after all of those."""
    records, notes = found
    first = plan_recovery(records, notes)
    dropped = [thing.extent.offset for thing, _ in first.dropped_records]
    erased = data.draw(st.sets(st.sampled_from(dropped))) if dropped else set()
    if erased == set(dropped) and first.dropped_notes:
        erased |= data.draw(st.sets(st.sampled_from([thing.extent.offset for thing, _ in first.dropped_notes])))
    rest = [one for one in records if one.extent.offset not in erased]
    second = plan_recovery(rest, [one for one in notes if one.extent.offset not in erased])
    assert by_place(second.entries) == by_place(first.entries)
    assert places(second.notes) == places(first.notes)


@settings(deadline=None, max_examples=200)
@given(found=mixtures())
def test_a_start_after_a_start_changes_nothing(found: Found) -> None:
    first = plan_recovery(*found)
    second = plan_recovery(first.entries, first.notes)
    assert second == replace(first, dropped_records=[], dropped_notes=[])


def by_place(entries: Iterable[SsdEntry]) -> dict[int, SsdEntry]:
    return {entry.extent.offset: entry for entry in entries}
