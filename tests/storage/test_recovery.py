"""Starts: after a clean stop, after a crash, without an index; what is kept, what goes, and what is refused."""

import gc
import logging
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from kvservice.model.errors import ConfigError, DiskError
from kvservice.storage.clean_marker import EPOCH_NAME, MARKER_NAME
from kvservice.storage.disk import BLOCK_BYTES, RealDisk
from kvservice.storage.recovery import INDEX_NAME, Opened, RecoveryKind, mark_clean, recover
from kvservice.storage.recovery_plan import Drop
from kvservice.storage.slab import SLAB_NAME, NoteKind
from kvservice.storage.ssd_entry import SsdEntry
from kvservice.storage.ssd_index import NaivePlace, PutNote, PutRecord
from tests.storage.faulty_disk import FaultyDisk
from tests.storage.index_damage import WHOLESALE, damage
from tests.storage.recovery_builders import (
    IDENTITY,
    NOW_NS,
    OTHER,
    SLAB_BYTES,
    Writer,
    contents,
    index_contents,
    make_entry,
    start,
)
from tests.storage.slab_builders import noise


class World:
    """A disk and an index that outlive processes."""

    def __init__(self) -> None:
        self.disk, self.place = FaultyDisk(), NaivePlace()
        self.opened = self.start()
        self.writer = Writer(self.opened.slab, self.opened.index)

    def start(self, slab_bytes: int = SLAB_BYTES, now_ns: int = NOW_NS) -> Opened:
        self.opened = start(self.disk, self.place, slab_bytes, now_ns)
        return self.opened

    def stop(self) -> None:
        """Cleanly."""
        mark_clean(self.disk, self.opened.slab, self.opened.index, self.opened.boot_epoch)
        self.kill()

    def kill(self) -> None:
        self.opened.slab.close()
        self.disk = self.disk.kill()

    def lose_index(self) -> None:
        self.kill()
        self.place.index = None

    def store_family(self) -> list[SsdEntry]:
        """A master and two mirrors."""
        master = self.writer.store(0, 0)
        return [master, *(self.writer.store(0, number, master=master, content=number) for number in (1, 2))]


@pytest.fixture
def world() -> World:
    return World()


def index_agrees(opened: Opened) -> bool:
    entries, notes = index_contents(opened.index)
    return entries == contents(opened) and notes == sorted(opened.notes, key=lambda note: note.extent.offset)


# Kinds


def test_the_first_start_is_new(world: World) -> None:
    assert (world.opened.report.kind, world.opened.entries, world.opened.notes) == (RecoveryKind.NEW, [], [])
    assert world.opened.slab.slab_bytes == SLAB_BYTES
    assert world.disk.exists(EPOCH_NAME)


def test_after_a_clean_stop_the_index_is_believed_and_the_slab_not_read(world: World) -> None:
    entries, used = world.store_family(), world.opened.slab.used_bytes
    next_sequence = world.opened.slab.next_sequence()
    world.stop()
    opened = world.start()
    assert (opened.report.kind, opened.report.scanned_bytes) == (RecoveryKind.CLEAN, 0)
    assert (contents(opened), opened.identities) == (entries, {IDENTITY.namespace(): IDENTITY})
    assert opened.slab.used_bytes == used
    assert opened.slab.next_sequence() > next_sequence
    assert not world.disk.exists(MARKER_NAME)


def test_after_a_crash_every_record_is_compared_and_kept(world: World) -> None:
    entries, used = world.store_family(), world.opened.slab.used_bytes
    last = world.opened.slab.next_sequence() - 1
    world.kill()
    opened = world.start()
    assert (opened.report.kind, opened.report.verified, opened.report.dropped) == (RecoveryKind.CHECKED, 0, {})
    assert (opened.entries, opened.slab.used_bytes) == (entries, used)
    assert opened.slab.next_sequence() > last


def test_without_an_index_everything_is_found_again(world: World) -> None:
    entries, used = world.store_family(), world.opened.slab.used_bytes
    world.stop()
    world.place.index = None
    opened = world.start()
    assert (opened.report.kind, opened.report.verified, opened.report.dropped) == (RecoveryKind.REBUILT, 3, {})
    assert (opened.entries, opened.slab.used_bytes) == (entries, used)
    assert index_agrees(opened)
    assert world.place.index is not None
    assert world.place.index.synced == len(world.place.index.batches)
    world.stop()
    assert world.start().report.kind is RecoveryKind.CLEAN


def test_a_damaged_index_is_made_anew_and_then_forgotten(world: World) -> None:
    entries = world.store_family()
    world.stop()
    world.place.is_damaged = True
    opened = world.start()
    assert opened.report.kind is RecoveryKind.REBUILT
    assert "declared damaged" in opened.report.why
    assert opened.entries == entries
    assert not world.place.damaged


def test_the_index_of_a_slab_that_is_gone_is_dropped(world: World) -> None:
    world.store_family()
    world.kill()
    world.disk.remove(SLAB_NAME)
    opened = world.start()
    assert (opened.report.kind, opened.entries) == (RecoveryKind.NEW, [])
    assert index_contents(opened.index) == ([], [])


@pytest.mark.parametrize("name", [MARKER_NAME, EPOCH_NAME])
def test_with_a_damaged_marker_or_epoch_nothing_is_believed(world: World, name: str) -> None:
    entries = world.store_family()
    world.stop()
    world.disk.write_small(name, b"damaged")
    opened = world.start()
    assert (opened.report.kind, opened.entries) == (RecoveryKind.CHECKED, entries)
    assert opened.report.why


def test_a_marker_of_another_slab_index_or_boot_is_not_believed(world: World) -> None:
    entries = world.store_family()
    world.stop()
    marker = world.disk.read_small(MARKER_NAME)
    assert marker is not None
    assert world.place.index is not None
    world.place.index.apply([PutRecord(replace(entries[0], is_deleted=True))])
    assert world.start().report.why == "the index is not as the last stop left it"
    world.kill()
    world.disk.write_small(MARKER_NAME, marker)
    assert "last boot was" in world.start().report.why
    world.stop()
    world.disk.remove(SLAB_NAME)
    other = World()
    world.disk.open(SLAB_NAME, SLAB_BYTES).close()
    np.copyto(world.disk.raw(SLAB_NAME), other.disk.raw(SLAB_NAME))
    assert "is of slab" in world.start().report.why


def test_an_index_that_names_overlapping_places_is_made_anew(world: World) -> None:
    entries = world.store_family()
    world.opened.index.apply([PutRecord(make_entry(1, 1, offset=entries[0].extent.offset, sequence=77))])
    world.stop()
    opened = world.start()
    assert (opened.report.kind, opened.entries) == (RecoveryKind.REBUILT, entries)
    assert "cannot be" in opened.report.why


# What is kept


def test_a_record_written_and_not_indexed_is_found(world: World) -> None:
    entries = [*world.store_family(), world.writer.store(1, 0, is_indexed=False)]
    world.kill()
    opened = world.start()
    assert contents(opened) == entries
    assert (opened.report.verified, opened.report.dropped) == (1, {})
    assert index_agrees(opened)


def test_a_record_erased_and_still_indexed_is_forgotten(world: World) -> None:
    first, second = world.writer.store(0, 0), world.writer.store(0, 1)
    world.writer.remove(first, is_indexed=False)
    world.kill()
    opened = world.start()
    assert (opened.entries, opened.report.dropped) == ([second], {Drop.LOST: 1})
    assert index_agrees(opened)


def test_a_torn_record_is_erased_for_good(world: World) -> None:
    whole = world.writer.store(0, 0)
    torn = world.writer.store(0, 1, is_indexed=False)
    world.disk.raw(SLAB_NAME)[torn.extent.end - 1] ^= np.uint8(1)
    world.kill()
    used = world.opened.slab.used_bytes
    opened = world.start()
    assert (opened.entries, opened.report.dropped) == ([whole], {Drop.TORN: 1})
    assert opened.slab.used_bytes == used - BLOCK_BYTES
    world.kill()
    assert world.start().report.dropped == {}


def test_a_deleted_master_stays_hidden_through_every_kind_of_start(world: World) -> None:
    master, *mirrors = world.store_family()
    tombstone = world.writer.bury(master)
    expected = [replace(master, is_deleted=True), *mirrors]
    for lose in (world.stop, world.kill, world.lose_index):
        lose()
        opened = world.start()
        assert (contents(opened), opened.report.hidden, opened.report.dropped) == (expected, 1, {})
        assert tombstone in opened.notes
        assert index_agrees(opened)


def test_a_tombstone_written_and_not_indexed_counts(world: World) -> None:
    master, *mirrors = world.store_family()
    world.writer.bury(master, is_indexed=False)
    world.kill()
    opened = world.start()
    assert opened.entries == [replace(master, is_deleted=True), *mirrors]
    assert index_agrees(opened)


def test_dropped_records_are_erased_and_their_room_is_free(world: World) -> None:
    master, *_ = world.store_family()
    other = world.writer.store(3, 3, identity=OTHER)
    world.writer.remove(master)
    world.writer.remove_note(world.writer.identities[OTHER.tenant])
    assert world.place.index is not None
    world.place.index = None
    world.kill()
    opened = world.start()
    assert (opened.entries, opened.slab.used_bytes) == ([], 0)
    assert opened.report.dropped == {Drop.NO_MASTER: 2, Drop.NO_IDENTITY: 1, Drop.UNUSED: 1}
    assert not world.disk.raw(SLAB_NAME)[other.extent.offset : other.extent.offset + BLOCK_BYTES].any()
    world.kill()
    assert world.start().report.dropped == {}


def test_what_is_dropped_is_erased_before_the_index_forgets_it(world: World) -> None:
    older, newer = world.writer.store(0, 0), world.writer.store(0, 0, content=1)
    world.kill()
    seen = []

    def look() -> None:
        assert world.place.index is not None
        seen.append((world.disk.raw(SLAB_NAME)[older.extent.offset], index_contents(world.place.index)[0]))

    opened = recover(world.disk, SLAB_BYTES, place=world.place, before_index=look)
    assert seen == [(0, [older, newer])]
    assert opened.entries == [newer]
    assert index_agrees(opened)


def test_a_bad_identity_costs_its_records_only(world: World) -> None:
    entries = world.store_family()
    bad = world.opened.slab.write_note(NoteKind.IDENTITY, IDENTITY.canonical_json().replace(",", ", ").encode())
    world.opened.index.apply([PutNote(bad)])
    world.stop()
    opened = world.start()
    assert (contents(opened), opened.report.dropped) == (entries, {Drop.BAD_IDENTITY: 1})
    assert bad not in opened.notes


def test_rubbish_between_records_is_passed_over_and_its_room_is_free(world: World) -> None:
    entries, used = world.store_family(), world.opened.slab.used_bytes
    world.disk.raw(SLAB_NAME)[used + BLOCK_BYTES :] = noise(SLAB_BYTES - used - BLOCK_BYTES)
    world.kill()
    assert world.start().entries == entries
    assert world.opened.slab.used_bytes == used


def test_a_slab_grows_and_keeps_its_records(world: World) -> None:
    entries = world.store_family()
    world.stop()
    opened = world.start(2 * SLAB_BYTES)
    assert (contents(opened), opened.slab.slab_bytes) == (entries, 2 * SLAB_BYTES)


# Epochs


@pytest.mark.parametrize("step_ns", [-10_000_000_000, 0, 5])
def test_the_boot_epoch_rises_whatever_the_clock_does(world: World, step_ns: int) -> None:
    epochs = [world.opened.boot_epoch]
    for boot in range(1, 4):
        world.stop()
        if boot == 2:
            world.disk.remove(EPOCH_NAME)  # the marker knows it too
        epochs.append(world.start(now_ns=NOW_NS + boot * step_ns).boot_epoch)
    assert epochs == sorted(set(epochs))
    assert epochs[0] == NOW_NS


# Refused


def test_a_folder_in_use_is_refused(world: World) -> None:
    with pytest.raises(ConfigError, match="in use by kvservice"):
        start(world.disk.beside(), world.place)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda raw: raw.__setitem__(slice(0, 8), 0), "not a slab"),
        (lambda raw: raw.__setitem__(20, 1), "damaged"),
        (lambda raw: raw.__setitem__(8, 9), "version 9"),
    ],
)
def test_what_is_wrong_with_the_slab_as_a_whole_changes_nothing(
    world: World, spoil: Callable[[object], None], words: str
) -> None:
    world.store_family()
    world.stop()
    spoil(world.disk.raw(SLAB_NAME))
    before = world.disk.raw(SLAB_NAME).copy(), world.disk.read_small(MARKER_NAME), world.disk.read_small(EPOCH_NAME)
    assert world.place.index is not None
    digest = world.place.index.digest()
    with pytest.raises(ConfigError, match=words):
        world.start()
    assert np.array_equal(world.disk.raw(SLAB_NAME), before[0])
    assert (world.disk.read_small(MARKER_NAME), world.disk.read_small(EPOCH_NAME)) == before[1:]
    assert world.place.index.digest() == digest


def test_a_slab_does_not_shrink(world: World) -> None:
    world.stop()
    with pytest.raises(ConfigError, match="does not shrink"):
        world.start(SLAB_BYTES // 2)


def test_after_an_error_files_are_closed_and_the_collector_runs(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.store_family()
    world.kill()

    def refuse(*_: object) -> None:
        raise DiskError("refused")

    with monkeypatch.context() as patch:
        patch.setattr("kvservice.storage.recovery.write_epoch", refuse)
        with pytest.raises(DiskError, match="refused"):
            world.start()
    assert not world.disk.open_files
    assert gc.isenabled()
    world.disk = world.disk.kill()
    assert len(world.start().entries) == 3


def test_a_start_that_lost_something_says_so(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.store_family()
    world.stop()
    with caplog.at_level(logging.WARNING):
        world.start()
        assert not caplog.records
        world.kill()
        world.start()
    assert "checked" in caplog.text


# RocksDB on a real disk


def open_real(folder: Path) -> tuple[RealDisk, Opened]:
    disk = RealDisk(folder)
    return disk, recover(disk, SLAB_BYTES)


def close_real(disk: RealDisk, opened: Opened) -> None:
    opened.index.close()
    opened.slab.close()
    disk.close()


@dataclass(frozen=True, slots=True)
class Real:
    """One folder twice: as a clean stop and as a killed process left it, there with half of the index in its log."""

    stopped: Path
    killed: Path
    entries: list[SsdEntry]


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Real:
    """Two boots; one deleted master."""
    folder = tmp_path_factory.mktemp("real")
    disk, opened = open_real(folder / "ssd")
    writer = Writer(opened.slab, opened.index)
    for segment in range(10):
        master = writer.store(segment, 0)
        for context in range(1, 6):
            writer.store(segment, context, master=master, content=context)
        if segment == 3:
            writer.bury(master)
        if segment == 5:
            opened.index.flush()
    shutil.copytree(folder / "ssd", folder / "killed")
    mark_clean(disk, opened.slab, opened.index, opened.boot_epoch)
    close_real(disk, opened)
    disk, opened = open_real(folder / "ssd")
    entries = contents(opened)
    mark_clean(disk, opened.slab, opened.index, opened.boot_epoch)
    close_real(disk, opened)
    return Real(folder / "ssd", folder / "killed", entries)


def test_a_real_folder_opens_clean(real: Real, tmp_path: Path) -> None:
    disk, opened = open_real(shutil.copytree(real.stopped, tmp_path / "ssd"))
    assert (opened.report.kind, contents(opened)) == (RecoveryKind.CLEAN, real.entries)
    assert (len(real.entries), opened.report.hidden) == (60, 1)
    close_real(disk, opened)


def test_a_killed_process_loses_nothing(real: Real, tmp_path: Path) -> None:
    disk, opened = open_real(shutil.copytree(real.killed, tmp_path / "ssd"))
    assert (opened.report.kind, contents(opened)) == (RecoveryKind.CHECKED, real.entries)
    assert (opened.report.verified, opened.report.dropped) == (0, {})
    close_real(disk, opened)


@pytest.mark.parametrize("spoil", WHOLESALE)
def test_a_lost_index_is_made_anew_with_all_records(real: Real, tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    folder = shutil.copytree(real.stopped, tmp_path / "ssd")
    spoil(folder / INDEX_NAME)
    disk, opened = open_real(folder)
    assert contents(opened) == real.entries
    assert index_agrees(opened)
    assert opened.report.kind is not RecoveryKind.CLEAN
    assert not list(folder.glob("*damaged*"))
    close_real(disk, opened)


def test_whatever_happens_to_the_files_of_the_index_every_record_comes_back(
    real: Real, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    kinds = set()
    for seed in range(30):
        chance = random.Random(seed)
        folder = shutil.copytree(chance.choice([real.stopped, real.killed]), tmp_path / str(seed))
        what = [damage(folder / INDEX_NAME, chance) for _ in range(chance.randint(1, 3))]
        disk, opened = open_real(folder)
        assert contents(opened) == real.entries, (seed, what)
        assert index_agrees(opened), (seed, what)
        kinds.add(opened.report.kind)
        close_real(disk, opened)
        shutil.rmtree(folder)
    assert kinds == {RecoveryKind.CLEAN, RecoveryKind.CHECKED, RecoveryKind.REBUILT}
    assert capfd.readouterr() == ("", "")
