"""A start may die at any step, of a kill or with the power: the next one keeps the same records."""

import random
from contextlib import suppress
from itertools import count

import numpy as np
import pytest

from kvservice.storage.recovery import Opened, RecoveryKind, mark_clean
from kvservice.storage.recovery_plan import Drop
from kvservice.storage.slab import SLAB_NAME, Note, NoteKind
from kvservice.storage.ssd_entry import SsdEntry
from kvservice.storage.ssd_index import NaivePlace
from tests.storage.faulty_disk import FaultyDisk
from tests.storage.recovery_builders import (
    IDENTITY,
    OTHER,
    Writer,
    contents,
    die_before_step,
    index_contents,
    lose_power,
    make_identity,
    start,
)
from tests.storage.slab_builders import Died

INDEXES = ["kept", "lost", "damaged", "damaged behind a clean stop"]
Kept = tuple[list[SsdEntry], list[Note], int]


def make_ruin(index: str) -> tuple[FaultyDisk, NaivePlace]:
    """A folder in which there is something of everything that a start may have to decide on."""
    disk, place = FaultyDisk(), NaivePlace()
    opened = start(disk, place)
    writer = Writer(opened.slab, opened.index)
    fill_with_what_stays(writer)
    fill_with_what_goes(writer)
    torn = writer.store(9, 0, is_indexed=False)
    disk.raw(SLAB_NAME)[torn.extent.end - 1] ^= np.uint8(1)
    opened.slab.sync()
    opened.index.sync()
    if index.endswith("clean stop"):
        mark_clean(disk, opened.slab, opened.index, opened.boot_epoch)
    opened.slab.close()
    if index == "lost":
        place.index = None
    place.is_damaged = index.startswith("damaged")
    return disk.kill(), place


def fill_with_what_stays(writer: Writer) -> None:
    master = writer.store(0, 0)
    writer.store(0, 1, master=master)
    writer.store(0, 2, master=master, is_indexed=False)
    deleted = writer.store(1, 0)
    writer.store(1, 1, master=deleted)
    writer.bury(deleted)
    writer.store(1, 0, content=5)
    replaced = writer.store(2, 0)
    writer.store(2, 1, master=replaced)
    writer.store(2, 0, master=writer.store(2, 2), content=6)
    writer.store(0, 0, identity=OTHER)


def fill_with_what_goes(writer: Writer) -> None:
    writer.remove(writer.store(3, 0), is_indexed=False)
    for context in (1, 2):
        gone = writer.store(4, 0, content=context)
        writer.store(4, context, master=gone)
        writer.remove(gone)
    writer.bury(writer.store(5, 0))
    writer.bury(writer.store(5, 1, is_indexed=False), is_indexed=False)
    writer.store(6, 0, content=1)
    writer.store(6, 0, content=2)
    nameless = make_identity("nameless")
    writer.store(7, 0, identity=nameless)
    note = writer.slab.write_note(NoteKind.IDENTITY, IDENTITY.canonical_json().encode())
    writer.slab.erase(writer.identities[nameless.tenant].extent)
    assert note.sequence > writer.identities[IDENTITY.tenant].sequence


def kept(opened: Opened) -> Kept:
    assert index_contents(opened.index)[0] == contents(opened)
    notes = sorted(opened.notes, key=lambda note: note.extent.offset)
    assert opened.index.notes() == notes
    return contents(opened), notes, opened.slab.used_bytes


@pytest.mark.parametrize("index", INDEXES)
def test_a_ruin_is_decided_the_same_whatever_became_of_its_index(index: str) -> None:
    opened = start(*make_ruin(index))
    assert kept(opened) == kept(start(*make_ruin("kept")))
    dropped = dict(opened.report.dropped)
    assert dropped.pop(Drop.LOST, 0) == (0 if index != "kept" else 2)
    assert dropped == {
        Drop.NO_MASTER: 2,
        Drop.DELETED: 2,
        Drop.UNUSED: 2,
        Drop.SUPERSEDED: 2,
        Drop.NO_IDENTITY: 1,
        Drop.TORN: 1,
    }
    assert (opened.report.hidden, opened.report.records) == (2, 12)


@pytest.mark.parametrize("index", INDEXES)
@pytest.mark.parametrize("is_power_lost", [False, True])
def test_a_start_that_died_at_any_step_is_done_again_with_the_same_end(
    monkeypatch: pytest.MonkeyPatch, index: str, is_power_lost: bool
) -> None:
    expected = kept(start(*make_ruin(index)))
    for steps in count():
        disk, place = make_ruin(index)
        with monkeypatch.context() as patch:
            die_before_step(patch, steps)
            try:
                start(disk, place)
                break
            except Died:
                pass
        heir = lose_power(disk, place, steps) if is_power_lost else disk.kill()
        assert kept(start(heir, place)) == expected, steps
    assert steps > 15, "steps are counted"


@pytest.mark.parametrize("seed", range(20))
def test_starts_that_die_again_and_again_get_there(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    chance = random.Random(seed)
    index = chance.choice(INDEXES)
    expected = kept(start(*make_ruin(index)))
    disk, place = make_ruin(index)
    for _ in range(chance.randint(2, 8)):
        with monkeypatch.context() as patch:
            die_before_step(patch, chance.randrange(12))
            with suppress(Died):
                start(disk, place)
        disk = lose_power(disk, place, seed) if chance.random() < 0.5 else disk.kill()
        if place.index is not None and chance.random() < 0.2:
            place.is_damaged = True
    assert kept(start(disk, place)) == expected, (seed, index)


def test_a_marked_ruin_is_believed_and_brought_in_order() -> None:
    """The index alone: what it does not name is not looked for, and what cannot be served goes all the same."""
    opened = start(*make_ruin("kept behind a clean stop"))
    assert opened.report.kind is RecoveryKind.CLEAN
    kept(opened)
    assert Drop.TORN not in opened.report.dropped


def test_a_stop_that_died_before_its_mark_is_no_clean_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for steps in count():
        disk, place = make_ruin("kept")
        opened = start(disk, place)
        expected = kept(opened)
        with monkeypatch.context() as patch:
            die_before_step(patch, steps)
            try:
                mark_clean(disk, opened.slab, opened.index, opened.boot_epoch)
                break
            except Died:
                pass
        again = start(lose_power(disk, place, steps), place)
        assert (again.report.kind, kept(again)) == (RecoveryKind.CHECKED, expected)
    assert steps == 3
