"""What every index promises, the naive one and the one in RocksDB; and that they say the same."""

import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvservice.model.errors import InvalidInputError
from kvservice.storage.index_format import CorruptIndexError
from kvservice.storage.rocks_index import RocksIndex, RocksPlace
from kvservice.storage.slab_format import Note
from kvservice.storage.ssd_entry import SsdEntry
from kvservice.storage.ssd_index import (
    CHANGES_MAX,
    Change,
    Index,
    IndexDigest,
    IndexPlace,
    NaiveIndex,
    NaivePlace,
    PutNote,
    PutRecord,
    RemoveNote,
    RemoveRecord,
)
from tests.storage.recovery_builders import (
    OTHER,
    index_contents,
    make_entry,
    make_identity_note,
    make_tombstone,
)

Places = Callable[[Path], IndexPlace]
NOTES = [make_identity_note(), make_identity_note(OTHER, offset=2 << 20)]


def naive(_: Path) -> IndexPlace:
    return NaivePlace()


def rocks(folder: Path) -> IndexPlace:
    return RocksPlace(folder / "index")


@pytest.fixture(params=[naive, rocks])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> IndexPlace:
    make: Places = request.param
    return make(tmp_path)


@pytest.fixture
def index(place: IndexPlace) -> Iterator[Index]:
    index = place.open()
    index.apply([PutNote(note) for note in NOTES])
    yield index
    index.close()


def removal(entry: SsdEntry) -> RemoveRecord:
    return RemoveRecord(entry.meta.namespace, entry.meta.key, entry.extent.offset)


def test_what_is_put_is_said(index: Index) -> None:
    entries = [
        make_entry(0, 0, offset=4096),
        make_entry(0, 1, offset=8192, master=(0, 7), is_deleted=True),
        make_entry(0, 0, offset=12288, identity=OTHER),
    ]
    index.apply([PutRecord(entry) for entry in entries])
    assert index_contents(index) == (entries, NOTES)


def test_a_removed_record_or_note_is_said_no_more(index: Index) -> None:
    entry, tombstone = make_entry(), make_tombstone(0, 0, offset=8192, sequence=3)
    index.apply([PutRecord(entry), PutNote(tombstone)])
    index.apply([removal(entry), RemoveNote(8192)])
    index.apply([removal(entry), RemoveNote(8192)])  # fine if it is not there
    assert index_contents(index) == ([], NOTES)


def test_records_of_one_key_in_two_places_are_two(index: Index) -> None:
    older, newer = make_entry(offset=4096, is_deleted=True), make_entry(offset=8192, sequence=2)
    index.apply([PutRecord(older), PutRecord(newer)])
    assert index_contents(index)[0] == [older, newer]
    index.apply([removal(older)])
    assert index_contents(index)[0] == [newer]


def test_a_record_put_again_in_its_place_is_changed(index: Index) -> None:
    index.apply([PutRecord(make_entry())])
    index.apply([PutRecord(make_entry(is_deleted=True))])
    assert index_contents(index)[0] == [make_entry(is_deleted=True)]


def test_changes_of_a_batch_are_made_in_order(index: Index) -> None:
    entry = make_entry()
    index.apply([PutRecord(entry), removal(entry), PutRecord(replace(entry, sequence=5)), PutNote(NOTES[0])])
    assert index_contents(index)[0] == [replace(entry, sequence=5)]


def test_a_batch_has_a_limit(index: Index) -> None:
    with pytest.raises(InvalidInputError, match="limit is 4096"):
        index.apply([RemoveNote(0)] * (CHANGES_MAX + 1))
    index.apply([])
    index.apply([RemoveNote(0)] * CHANGES_MAX)


def test_records_without_their_identity_make_the_index_unbelievable(index: Index) -> None:
    index.apply([PutRecord(make_entry()), RemoveNote(NOTES[0].extent.offset)])
    with pytest.raises(CorruptIndexError, match="no identity"):
        list(index.entries())


def test_an_index_is_the_same_after_it_was_closed_and_opened(place: IndexPlace) -> None:
    assert not place.exists()
    index = place.open()
    index.apply([PutNote(NOTES[0]), PutRecord(make_entry())])
    said, digest = index_contents(index), index.digest()
    index.close()
    assert place.exists()
    again = place.open()
    assert (index_contents(again), again.digest()) == (said, digest)
    again.close()


def test_what_is_set_aside_makes_room_for_a_new_index(place: IndexPlace) -> None:
    index = place.open()
    index.apply([PutNote(NOTES[0])])
    index.close()
    place.set_aside()
    assert not place.exists()
    index = place.open()
    assert index_contents(index) == ([], [])
    index.close()
    place.drop_damaged()
    assert place.exists()


# Digests


def test_a_digest_does_not_depend_on_the_history(index: Index) -> None:
    before = index.digest()
    assert before.count == 2
    entries = [make_entry(0, number, offset=4096 * number) for number in range(1, 9)]
    index.apply([PutRecord(entry) for entry in entries])
    full = index.digest()
    index.apply([removal(entry) for entry in reversed(entries)])
    assert index.digest() == before
    index.flush()
    index.apply([PutRecord(entry) for entry in reversed(entries)])
    assert index.digest() == full
    assert full == IndexDigest(10, full.checksum)


@pytest.mark.parametrize(
    "change",
    [
        PutRecord(make_entry(sequence=2)),
        PutRecord(make_entry(is_deleted=True)),
        PutRecord(make_entry(offset=8192)),
        removal(make_entry()),
        RemoveNote(NOTES[1].extent.offset),
        PutNote(replace(NOTES[1], sequence=8)),
    ],
)
def test_every_change_changes_the_digest(index: Index, change: Change) -> None:
    index.apply([PutRecord(make_entry())])
    before = index.digest()
    index.apply([change])
    assert index.digest() != before


# The two against each other


def all_changes() -> st.SearchStrategy[Change]:
    numbers = st.integers(0, 2)
    entries = st.builds(
        make_entry,
        numbers,
        numbers,
        offset=numbers.map(lambda number: 4096 * number),
        sequence=st.integers(0, 1 << 60),
        master=st.none() | st.tuples(numbers, numbers),
        is_deleted=st.booleans(),
        identity=st.sampled_from([OTHER, OTHER]),
    )
    tombstones = st.builds(make_tombstone, numbers, numbers, offset=numbers, sequence=numbers)
    return st.one_of(entries.map(PutRecord), entries.map(removal), tombstones.map(PutNote), numbers.map(RemoveNote))


@settings(deadline=None, max_examples=25)
@given(batches=st.lists(st.lists(all_changes(), max_size=8), max_size=8), seed=st.integers(0, 1 << 30))
def test_both_say_the_same_whatever_changed(
    tmp_path_factory: pytest.TempPathFactory, batches: list[list[Change]], seed: int
) -> None:
    chance, folder = random.Random(seed), tmp_path_factory.mktemp("both")
    reference, index = NaiveIndex(), RocksIndex(folder / "index")
    first: list[Change] = [PutNote(note) for note in NOTES]
    for batch in (first, *batches):
        reference.apply(batch)
        index.apply(batch)
        match chance.randrange(4):
            case 0:
                index.flush()
            case 1:
                index.close()
                index = RocksIndex(folder / "index")
    assert (index_contents(index), index.digest()) == (index_contents(reference), reference.digest())
    index.close()
    shutil.rmtree(folder)


# The naive one as a test double


def test_the_naive_index_loses_what_was_not_synced() -> None:
    index = NaiveIndex()
    said: list[tuple[list[SsdEntry], list[Note]]] = []
    for change in (PutNote(NOTES[0]), PutRecord(make_entry(0, 1)), PutRecord(make_entry(0, 2))):
        index.apply([change])
        said.append(index_contents(index))
        if len(said) == 1:
            index.sync()
    index.lose_unsynced(kept=1)
    assert index_contents(index) == said[1]
    index.apply([PutRecord(make_entry(0, 3))])
    index.lose_unsynced()
    assert index_contents(index) == said[1]  # what came through a crash is on the device


def test_the_naive_place_can_be_damaged() -> None:
    place = NaivePlace()
    place.open()
    place.is_damaged = True
    with pytest.raises(CorruptIndexError):
        place.open()
    place.set_aside()
    assert index_contents(place.open()) == ([], [])
