"""Records on a file: what is written is read, nothing else is touched, and a slab is only opened as what it is."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvservice.model.cache import Extent
from kvservice.model.errors import CapacityError, DiskError, DiskFullError, InvalidInputError
from kvservice.storage.buffer import Bytes
from kvservice.storage.disk import BLOCK_BYTES, Disk, RealDisk
from kvservice.storage.slab import PIECE_BYTES, SLAB_NAME, FoundNote, NoteKind, Slab, Stamp, taken_bytes
from kvservice.storage.slab_format import FOOTER_BYTES
from tests.storage.faulty_disk import Faults, FaultyDisk, FaultyFile
from tests.storage.slab_builders import (
    MIB,
    Died,
    die_after,
    found_extents,
    is_of,
    make_record,
    make_slab,
    noise,
    put,
    read,
    reserved,
    scan,
    take_away,
)

STAMP = Stamp(1, 2, 0.5)
EDGES = [1, 63, 64, 4031, 4032, 4033, 4095, 4096, 4097, 8128, 8129, 3 * 4096, 100_000]
LONG = [PIECE_BYTES - 4096, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, PIECE_BYTES + 4033, 2 * PIECE_BYTES + 777]


def faulty_disk(_: Path) -> Disk:
    return FaultyDisk()


def real_disk(folder: Path) -> Disk:
    return RealDisk(folder / "ssd")


@pytest.fixture(params=[faulty_disk, real_disk])
def any_slab(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Slab]:
    make: Callable[[Path], Disk] = request.param
    disk = make(tmp_path)
    slab = Slab.create(disk, 16 * MIB)
    yield slab
    slab.close()
    disk.close()


@pytest.mark.parametrize("skip", [0, 16])
@pytest.mark.parametrize("length", EDGES + LONG)
def test_what_was_written_is_read_from_and_to_any_address(any_slab: Slab, length: int, skip: int) -> None:
    record = noise(length + skip)[skip:]
    neighbours = [reserved(any_slab, 1) for _ in range(3)]
    take_away(any_slab, neighbours.pop(1))
    extent = reserved(any_slab, length)
    for one in neighbours:
        any_slab.write(one, noise(1, seed=7), STAMP)
    any_slab.write(extent, record, STAMP)
    np.testing.assert_array_equal(read(any_slab, extent), record)
    for one in neighbours:
        np.testing.assert_array_equal(read(any_slab, one), noise(1, seed=7))


@pytest.mark.parametrize("skip", [0, 16])
@pytest.mark.parametrize("length", [5, 4097, 2 * PIECE_BYTES + 777])
def test_pieces_are_read_in_any_order_and_touch_nothing_behind_them(any_slab: Slab, length: int, skip: int) -> None:
    extent, record = reserved(any_slab, length), noise(length)
    any_slab.write(extent, record, STAMP)
    target = noise(length + skip + 5000, seed=1)[skip:]
    target[:] = 0xEE
    for start, end in reversed(any_slab.pieces(extent)):
        any_slab.read_piece(extent, start, end, target[start:end])
    np.testing.assert_array_equal(target[:length], record)
    assert (target[length:] == 0xEE).all()


def test_pieces_cover_the_record_in_order() -> None:
    slab, _ = make_slab(8 * MIB)
    assert slab.pieces(Extent(4096, 100)) == [(0, 100)]
    assert slab.pieces(Extent(4096, PIECE_BYTES)) == [(0, PIECE_BYTES)]
    assert slab.pieces(Extent(4096, 2 * PIECE_BYTES + 1)) == [
        (0, PIECE_BYTES),
        (PIECE_BYTES, 2 * PIECE_BYTES),
        (2 * PIECE_BYTES, 2 * PIECE_BYTES + 1),
    ]


def test_a_source_may_be_read_only_or_have_gaps() -> None:
    slab, _ = make_slab()
    record = noise(20_000)
    record.flags.writeable = False
    for source in (record, record[::2]):
        extent = reserved(slab, len(source))
        slab.write(extent, source, STAMP)
        np.testing.assert_array_equal(read(slab, extent), source)


def test_threads_move_different_records_at_once(any_slab: Slab) -> None:
    extents = [reserved(any_slab, 300_000) for _ in range(16)]

    def move(number: int) -> Bytes:
        any_slab.write(extents[number], noise(300_000, seed=number), STAMP)
        return read(any_slab, extents[number])

    with ThreadPoolExecutor(4) as pool:
        for number, found in enumerate(pool.map(move, range(16))):
            np.testing.assert_array_equal(found, noise(300_000, seed=number))


@settings(deadline=None, max_examples=50)
@given(lengths=st.lists(st.integers(1, 20_000), min_size=1, max_size=30))
def test_places_are_blocks_behind_the_superblock_that_never_overlap(lengths: list[int]) -> None:
    slab, _ = make_slab(64 * 4096)
    extents = [extent for extent in map(slab.reserve, lengths) if extent is not None]
    end = BLOCK_BYTES
    for extent in sorted(extents, key=lambda extent: extent.offset):
        assert extent.offset % BLOCK_BYTES == 0
        assert extent.offset >= end
        end = extent.offset + taken_bytes(extent.length)
        assert end - extent.end >= FOOTER_BYTES
    assert end <= slab.slab_bytes
    assert slab.used_bytes == sum(taken_bytes(extent.length) for extent in extents)
    for extent in extents:
        slab.free(extent)
    assert slab.used_bytes == 0


def test_a_full_slab_gives_nothing_and_has_room_again_after_a_free() -> None:
    slab, _ = make_slab(64 * 4096)
    assert slab.capacity_bytes == 63 * 4096
    extent = reserved(slab, slab.record_bytes_max)
    assert slab.used_bytes == slab.capacity_bytes
    assert slab.reserve(1) is None
    slab.free(extent)
    assert slab.reserve(slab.record_bytes_max + 1) is None


@pytest.mark.parametrize("length", [0, -1])
def test_senseless_lengths_are_refused(length: int) -> None:
    slab, _ = make_slab()
    for use in (slab.reserve, lambda length: slab.adopt(Extent(4096, length))):
        with pytest.raises(InvalidInputError, match="1 byte or more"):
            use(length)


def test_adopted_places_are_taken_exactly() -> None:
    slab, _ = make_slab(64 * 4096)
    slab.adopt(Extent(2 * 4096, 4096))  # and a block for its footer
    assert slab.holds(Extent(2 * 4096, 4096))
    assert slab.used_bytes == 2 * 4096
    assert slab.reserve(1) == Extent(4096, 1)
    assert slab.reserve(1) == Extent(4 * 4096, 1)
    for taken in (
        Extent(0, 1),
        Extent(3 * 4096, 1),
        Extent(4096, 1),
        Extent(5 * 4096, 60 * 4096),
        Extent(6 * 4096 + 1, 1),
    ):
        with pytest.raises(InvalidInputError):
            slab.adopt(taken)
    assert slab.used_bytes == 4 * 4096


def test_an_extent_that_is_not_reserved_is_refused_and_nothing_is_written() -> None:
    slab, disk = make_slab()
    extent = reserved(slab, 100)
    before = disk.raw(SLAB_NAME).copy()
    uses: list[Callable[[Extent], None]] = [
        slab.free,
        slab.erase,
        lambda one: slab.write(one, noise(one.length), STAMP),
        lambda one: slab.read_piece(one, 0, one.length, noise(one.length)),
    ]
    for stranger in (Extent(extent.offset, 99), Extent(0, 4096 - 64), Extent(1 << 40, 100), Extent(-4096, 100)):
        for use in uses:
            with pytest.raises(InvalidInputError, match="not reserved"):
                use(stranger)
    slab.free(extent)
    for use in uses:
        with pytest.raises(InvalidInputError, match="not reserved"):
            use(extent)
    np.testing.assert_array_equal(disk.raw(SLAB_NAME), before)


@pytest.mark.parametrize("array", [noise(9), noise(11), np.zeros(10, np.int8), np.zeros((1, 10), np.uint8)])
def test_arrays_that_do_not_match_are_refused(array: Bytes) -> None:
    slab, _ = make_slab()
    extent = reserved(slab, 10)
    with pytest.raises(InvalidInputError, match="flat uint8"):
        slab.write(extent, array, STAMP)
    with pytest.raises(InvalidInputError, match="flat uint8"):
        slab.read_piece(extent, 0, 10, array)


@pytest.mark.parametrize(("start", "end"), [(0, 0), (8, 10), (-4096, 10), (0, 5001), (4096, 4096), (8192, 9000)])
def test_pieces_outside_or_off_the_blocks_are_refused(start: int, end: int) -> None:
    slab, _ = make_slab()
    extent = reserved(slab, 5000)
    with pytest.raises(InvalidInputError, match="no piece"):
        slab.read_piece(extent, start, end, noise(max(0, end - start)))


def test_a_read_only_target_is_refused() -> None:
    slab, _ = make_slab()
    extent, target = reserved(slab, 10), noise(10)
    target.flags.writeable = False
    with pytest.raises(InvalidInputError, match="read-only"):
        slab.read_piece(extent, 0, 10, target)


@pytest.mark.parametrize(
    "stamp",
    [
        Stamp(-1, 0, 0.0),
        Stamp(1 << 63, 0, 0.0),
        Stamp(1, -1, 0.0),
        Stamp(1, 1 << 64, 0.0),
        Stamp(1, 0, -1.0),
        Stamp(1, 0, float("nan")),
        Stamp(1, 0, float("inf")),
    ],
)
def test_stamps_that_no_footer_can_hold_are_refused(stamp: Stamp) -> None:
    slab, _ = make_slab()
    extent = reserved(slab, 10)
    with pytest.raises(InvalidInputError, match="sequence"):
        slab.write(extent, noise(10), stamp)


# -- what a death or a failing disk leaves


@pytest.mark.parametrize("blocks", [1, 2, 100, 514, 1100])
def test_a_record_whose_writer_died_is_never_found(monkeypatch: pytest.MonkeyPatch, blocks: int) -> None:
    """Also not where an older write of the same record left its footer and other bytes came between."""
    record = make_record(tokens=32 * blocks - 8)
    for calls in range(4):
        slab, disk = make_slab(16 * MIB)
        extent = put(slab, record).extent
        assert taken_bytes(extent.length) == blocks * 4096
        take_away(slab, extent)
        disk.raw(SLAB_NAME)[extent.offset + 4096 : extent.offset + 4096 * (blocks - 1)] = 0xEE
        with monkeypatch.context() as patch:
            die_after(patch, calls)
            try:
                put(slab, record)
            except Died:
                found = scan(Slab.open(disk.kill(), 16 * MIB))
                assert found == [], f"{found} after {calls} calls"
                continue
        assert calls == len(slab.pieces(extent))
        return
    pytest.fail("a record of 5 MiB has no more than three pieces")


def test_the_head_is_written_last_and_the_footer_first(monkeypatch: pytest.MonkeyPatch) -> None:
    slab, _ = make_slab(16 * MIB)
    offsets = []
    monkeypatch.setattr(FaultyFile, "write_from", lambda self, offset, sources: offsets.append(offset))
    extent = reserved(slab, 2 * PIECE_BYTES + 5000)
    slab.write(extent, noise(extent.length), STAMP)
    assert offsets == [extent.offset + 2 * PIECE_BYTES, extent.offset + PIECE_BYTES, extent.offset]


@pytest.mark.parametrize("fault", ["write_error", "is_full", "short_write"])
def test_a_failed_write_leaves_the_extent_reserved_and_to_be_written_again(fault: str) -> None:
    slab, disk = make_slab(16 * MIB)
    record = make_record(tokens=40_000)
    extent = reserved(slab, len(record))
    disk.faults = Faults(**{fault: 1.0})
    with pytest.raises(DiskFullError if fault == "is_full" else DiskError):
        put(slab, record, extent)
    assert slab.holds(extent)
    disk.faults = Faults()
    assert scan(slab) == []
    written = put(slab, record, extent)
    assert is_of(scan(slab)[0], written)


def test_a_failed_read_is_an_error_and_changes_nothing() -> None:
    slab, disk = make_slab()
    extent = put(slab, make_record()).extent
    disk.faults = Faults(read_error=1.0)
    with pytest.raises(DiskError, match=str(disk.folder)):
        read(slab, extent)
    disk.faults = Faults()
    np.testing.assert_array_equal(read(slab, extent), make_record())


def test_an_erased_place_is_never_found_and_may_be_written_again() -> None:
    slab, disk = make_slab()
    first, second = (put(slab, make_record(100, seed)) for seed in (1, 2))
    slab.erase(first.extent)
    assert found_extents(scan(slab)) == [second.extent]
    written = put(slab, first.record, first.extent)
    assert is_of(scan(slab)[0], written)
    disk.faults = Faults(write_error=1.0)
    with pytest.raises(DiskError):
        slab.erase(first.extent)
    assert slab.holds(first.extent)


# -- notes


def test_notes_take_a_place_and_are_found() -> None:
    slab, _ = make_slab()
    notes = [slab.write_note(NoteKind.IDENTITY, b"x" * length) for length in (1, 4096 - 112, 4096 - 111, 70_000)]
    notes.append(slab.write_note(NoteKind.TOMBSTONE, bytes(96)))
    assert [note.sequence for note in notes] == sorted({note.sequence for note in notes})
    assert slab.used_bytes == sum(taken_bytes(48 + len(note.payload)) for note in notes)
    assert found_extents(scan(slab)) == [note.extent for note in notes]
    for note in notes[:2]:
        take_away(slab, note.extent)
    assert found_extents(scan(slab)) == [note.extent for note in notes[2:]]


def test_a_note_is_not_there_before_it_is_put() -> None:
    slab, _ = make_slab(64 * BLOCK_BYTES)
    note = slab.reserve_note(NoteKind.IDENTITY, b"{}")
    assert note is not None
    assert scan(slab) == []
    slab.put_note(note)
    assert scan(slab) == [FoundNote(note)]
    take_away(slab, note.extent)
    with pytest.raises(InvalidInputError, match="not reserved"):
        slab.put_note(note)
    reserved(slab, slab.record_bytes_max)
    assert slab.reserve_note(NoteKind.IDENTITY, b"{}") is None


def test_notes_of_a_wrong_size_and_on_a_full_slab_are_refused() -> None:
    slab, _ = make_slab(64 * 4096)
    with pytest.raises(InvalidInputError, match="TOMBSTONE does not have a payload of 95"):
        slab.write_note(NoteKind.TOMBSTONE, bytes(95))
    with pytest.raises(InvalidInputError, match="IDENTITY"):
        slab.write_note(NoteKind.IDENTITY, b"")
    reserved(slab, slab.record_bytes_max)
    with pytest.raises(CapacityError, match="no room on the slab"):
        slab.write_note(NoteKind.IDENTITY, b"{}")


@pytest.mark.parametrize("fault", ["write_error", "is_full"])
def test_a_note_that_cannot_be_written_or_erased_keeps_its_place(fault: str) -> None:
    slab, disk = make_slab()
    disk.faults = Faults(**{fault: 1.0})
    with pytest.raises(DiskError):
        slab.write_note(NoteKind.IDENTITY, b"{}")
    assert slab.used_bytes == BLOCK_BYTES


def test_a_note_that_failed_to_be_written_gives_its_place_back(monkeypatch: pytest.MonkeyPatch) -> None:
    slab, _ = make_slab()
    write_from, failures = FaultyFile.write_from, [DiskError("EIO, but all has arrived")]

    def failing(file: FaultyFile, offset: int, sources: list[Bytes]) -> None:
        write_from(file, offset, sources)
        if failures:
            raise failures.pop()

    monkeypatch.setattr(FaultyFile, "write_from", failing)
    with pytest.raises(DiskError, match="all has arrived"):
        slab.write_note(NoteKind.IDENTITY, b"{}")
    assert slab.used_bytes == 0
    assert scan(slab) == []


# -- room on the file system


def test_free_stretches_are_given_back_and_what_is_held_stays(any_slab: Slab) -> None:
    held = [put(any_slab, make_record(10_000, seed)) for seed in range(4)]
    take_away(any_slab, held.pop(1).extent)
    before = any_slab.physical_bytes()
    given_back = any_slab.punch_free()
    assert given_back == before - any_slab.physical_bytes()
    assert given_back >= any_slab.capacity_bytes - any_slab.used_bytes - 64 * 1024  # a file system may keep a little
    assert any_slab.punch_free() == 0
    for one in held:
        np.testing.assert_array_equal(read(any_slab, one.extent), one.record)
    again = put(any_slab, make_record(10_000, 1))
    assert sorted(found_extents(scan(any_slab)), key=lambda extent: extent.offset) == sorted(
        [again.extent, *(one.extent for one in held)], key=lambda extent: extent.offset
    )


def test_a_write_where_room_was_given_back_and_taken_by_others_is_disk_full() -> None:
    disk = FaultyDisk(capacity_bytes=4 * MIB)
    slab = Slab.create(disk, 4 * MIB)
    held = put(slab, make_record(100))
    assert slab.punch_free() == 4 * MIB - BLOCK_BYTES - taken_bytes(held.extent.length)
    disk.open("of others", 3 * MIB)
    record = make_record(20_000)
    extent = reserved(slab, len(record))
    with pytest.raises(DiskFullError):
        put(slab, record, extent)
    assert slab.holds(extent)
    assert found_extents(scan(slab)) == [held.extent]
    disk.remove("of others")
    put(slab, record, extent)


def test_nothing_finds_room_in_free_stretches_that_are_claimed() -> None:
    slab, disk = make_slab(64 * BLOCK_BYTES)
    held = [put(slab, make_record(5, seed)) for seed in range(3)]
    take_away(slab, held.pop(1).extent)
    first = slab.claim_free()
    assert first is not None
    last = slab.claim_free(first.end)
    assert last is not None
    assert slab.claim_free(last.end) is None
    assert slab.used_bytes == slab.capacity_bytes
    assert slab.reserve(1) is None
    for extent in (first, last):
        slab.punch(extent)
    assert disk.open(SLAB_NAME).physical_bytes() == 3 * BLOCK_BYTES
    for extent in (first, last):
        slab.free(extent)
    assert slab.used_bytes == 2 * BLOCK_BYTES
    assert found_extents(scan(slab)) == [one.extent for one in held]


def test_a_failed_punch_leaves_free_what_was_free(monkeypatch: pytest.MonkeyPatch) -> None:
    slab, _ = make_slab(64 * BLOCK_BYTES)
    extents = [reserved(slab, 1) for _ in range(5)]
    for extent in extents[::2]:
        slab.free(extent)

    def failing(file: FaultyFile, offset: int, length: int) -> None:
        raise DiskError(f"{file.name}: {length} bytes at {offset}")

    monkeypatch.setattr(FaultyFile, "punch", failing)
    with pytest.raises(DiskError):
        slab.punch_free()
    assert slab.used_bytes == 2 * BLOCK_BYTES


def test_a_disk_that_cannot_punch_gives_nothing_back() -> None:
    disk = FaultyDisk()
    disk.facts = replace(disk.facts, can_punch=False)
    slab = Slab.create(disk, 4 * MIB)
    assert slab.claim_free() is None
    assert slab.punch_free() == 0
    assert slab.physical_bytes() == 4 * MIB


def test_what_was_synced_survives_a_power_loss() -> None:
    for seed in range(30):
        slab, disk = make_slab(seed=seed)
        written = [put(slab, make_record(2000, number)) for number in range(5)]
        slab.sync()
        put(slab, make_record(2000, 6))
        again = Slab.open(disk.crash(), 4 * MIB)
        found = scan(again, [one.extent for one in written])
        assert all(is_of(one, expected) for one, expected in zip(found, written, strict=False)), disk
