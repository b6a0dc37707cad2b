"""A scan finds what is whole, only that, and all of it; whatever else lies on the slab."""

import random
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvservice.model.cache import Extent
from kvservice.model.errors import DiskError
from kvservice.model.geometry import attention_geometry
from kvservice.storage.buffer import Bytes
from kvservice.storage.disk import BLOCK_BYTES
from kvservice.storage.record import PREFIX_BYTES, RecordReader, read_head
from kvservice.storage.record_header import MAGIC
from kvservice.storage.slab import (
    PIECE_BYTES,
    SLAB_NAME,
    Found,
    FoundNote,
    Lost,
    NoteKind,
    Slab,
    Stamp,
    taken_bytes,
)
from kvservice.storage.slab_format import NOTE_MAGIC, footer_bytes, note_bytes
from kvservice.storage.slab_scan import HEAD_BYTES_MAX, WINDOW_BYTES_MAX
from tests.storage.conftest import RecordBuilder
from tests.storage.faulty_disk import Faults, FaultyDisk, FaultyFile
from tests.storage.slab_builders import (
    MIB,
    Put,
    extent_of,
    found_extents,
    is_of,
    lost_extents,
    make_record,
    make_slab,
    noise,
    on_blocks,
    put,
    read,
    reserved,
    scan,
    stamp_of,
    take_away,
    tokens_of_blocks,
)


def plant(disk: FaultyDisk, offset: int, content: Bytes | bytes) -> None:
    """Put bytes into the file behind the slab's back, as data."""
    file = disk.open(SLAB_NAME)
    blocks = np.zeros(-(-len(content) // BLOCK_BYTES) * BLOCK_BYTES, np.uint8)
    blocks[: len(content)] = np.frombuffer(content, np.uint8)
    file.write_from(offset, [on_blocks(blocks)])
    file.close()


def whole_extent(slab: Slab, record: Bytes, sequence: int = 7) -> Bytes:
    """The bytes of an extent that holds this record."""
    content = np.zeros(taken_bytes(len(record)), np.uint8)
    content[: len(record)] = record
    footer = footer_bytes(slab.uuid, len(record), Stamp(sequence, read_head(record).header_checksum, 0.0))
    content[-len(footer) :] = np.frombuffer(footer, np.uint8)
    return content


def test_an_empty_slab_has_nothing() -> None:
    slab, _ = make_slab()
    assert scan(slab) == []


def test_records_and_notes_are_found_with_all_that_was_said_of_them() -> None:
    slab, _ = make_slab(32 * MIB)
    sizes = [5, *(tokens_of_blocks(blocks) for blocks in (1, 2, 3, 4, 5, 63, 64, 257, 600)), 100_000]
    written = [put(slab, make_record(tokens, seed)) for seed, tokens in enumerate(sizes)]
    note = slab.write_note(NoteKind.IDENTITY, b'{"model":"m"}')
    found = scan(slab)
    assert all(is_of(one, expected) for one, expected in zip(found, written, strict=False))
    assert found[len(written) :] == [FoundNote(note)]


def test_records_are_found_wherever_their_footer_falls_in_a_block() -> None:
    slab, _ = make_slab()
    written = [put(slab, make_record(tokens, tokens)) for tokens in range(1, 100)]
    assert len({one.extent.length % BLOCK_BYTES for one in written}) == 32
    assert all(is_of(one, expected) for one, expected in zip(scan(slab), written, strict=True))


def test_a_header_longer_than_a_block_is_read() -> None:
    slab, _ = make_slab(32 * MIB)
    build = RecordBuilder()
    geometry = attention_geometry(layers=1500, heads=1, head_size=2, dtype="bfloat16")
    record = on_blocks(build.master(build.meta(tokens=1, geometry=geometry)))
    assert read_head(record).layout.header_bytes > 3 * BLOCK_BYTES
    written = [put(slab, record) for _ in range(3)]
    assert [is_of(one, expected) for one, expected in zip(scan(slab), written, strict=True)] == [True] * 3
    known = [one.extent for one in written]
    assert found_extents(scan(slab, known)) == known


def test_what_was_freed_and_erased_is_not_found_also_where_smaller_ones_lie_now() -> None:
    slab, _ = make_slab(241 * BLOCK_BYTES)
    large = [put(slab, make_record(tokens_of_blocks(60), seed)) for seed in range(4)]
    for one in large[1:3]:
        take_away(slab, one.extent)
    assert found_extents(scan(slab)) == [large[0].extent, large[3].extent]
    small = [put(slab, make_record(tokens_of_blocks(7), seed)) for seed in range(10, 15)]
    assert small[0].extent.offset == large[1].extent.offset
    expected = [large[0], *small, large[3]]
    assert all(is_of(one, put_) for one, put_ in zip(scan(slab), expected, strict=True))


def test_a_torn_record_is_not_found_and_hides_nothing() -> None:
    slab, disk = make_slab(16 * MIB)
    extent = reserved(slab, len(record := make_record(tokens_of_blocks(1200))))
    plant(disk, extent.offset, record[:PIECE_BYTES])  # only its first piece
    behind = put(slab, make_record(3, 1))
    inside = make_record(3, 2)
    plant(disk, extent.offset + 700 * BLOCK_BYTES, whole_extent(slab, inside))
    assert found_extents(scan(slab)) == [Extent(extent.offset + 700 * BLOCK_BYTES, len(inside)), behind.extent]


def test_a_record_of_another_slab_is_not_found() -> None:
    slab, disk = make_slab()
    other, other_disk = make_slab()
    put(other, make_record(500))
    other.write_note(NoteKind.IDENTITY, b"{}")
    plant(disk, BLOCK_BYTES, other_disk.raw(SLAB_NAME)[BLOCK_BYTES : 1 * MIB].copy())
    behind = put(slab, make_record(3, 1), reserved_at(slab, Extent(2 * MIB, len(make_record(3, 1)))))
    assert found_extents(scan(slab)) == [behind.extent]
    lost = scan(slab, found_extents(scan(other)))
    assert [str(other.uuid) in one.reason for one in lost if isinstance(one, Lost)] == [True, True]


def require_disjoint(found: Sequence[Found]) -> None:
    end = BLOCK_BYTES
    for extent in sorted(found_extents(found), key=lambda extent: extent.offset):
        assert extent.offset >= end
        end = extent.offset + taken_bytes(extent.length)


def reserved_at(slab: Slab, extent: Extent) -> Extent:
    slab.adopt(extent)
    return extent


def test_payload_that_looks_like_a_record_is_not_found_inside_a_whole_one() -> None:
    slab, disk = make_slab(16 * MIB)
    for seed, blocks in enumerate((4, 200, 900)):
        inner = whole_extent(slab, make_record(5, seed), sequence=999)
        note = np.frombuffer(note_bytes(slab.uuid, 999, NoteKind.IDENTITY, b"{}"), np.uint8)
        record = make_record(tokens_of_blocks(blocks), seed)
        for at in range(BLOCK_BYTES, len(record) - 2 * BLOCK_BYTES + 1, 2 * BLOCK_BYTES):
            record[at : at + BLOCK_BYTES] = inner
            record[at + BLOCK_BYTES : at + BLOCK_BYTES + len(note)] = note
        put(slab, record)
    assert [extent.length for extent in found_extents(scan(slab))] == [
        len(make_record(tokens_of_blocks(blocks))) for blocks in (4, 200, 900)
    ]
    assert slab.next_sequence() < 999
    disk.raw(SLAB_NAME)[BLOCK_BYTES] ^= 1  # without a head of its own the outer one is garbage, whatever is in it
    assert found_extents(scan(slab))[0] == Extent(2 * BLOCK_BYTES, len(make_record(5)))


@pytest.mark.parametrize("seed", range(5))
def test_garbage_everywhere_is_no_record_and_hides_none(seed: int) -> None:
    slab, disk = make_slab(8 * MIB)
    chance = random.Random(seed)
    garbage = noise(8 * MIB - BLOCK_BYTES, seed)
    head = make_record(5)
    for at in range(0, len(garbage), BLOCK_BYTES):
        start = chance.choice([b"", MAGIC, NOTE_MAGIC, head[: chance.randrange(40, 300)].tobytes()])
        garbage[at : at + len(start)] = np.frombuffer(start, np.uint8)
    plant(disk, BLOCK_BYTES, garbage)
    written = []
    for number in range(6):
        record = make_record(tokens_of_blocks(chance.choice([1, 2, 30, 300])), number)
        offset = chance.randrange(1, 64) * 32 * BLOCK_BYTES - chance.randrange(3) * BLOCK_BYTES
        try:
            extent = reserved_at(slab, Extent(offset, len(record)))
        except ValueError:
            continue
        written.append(put(slab, record, extent))
    written.sort(key=lambda one: one.extent.offset)
    assert written
    assert all(is_of(one, expected) for one, expected in zip(scan(slab), written, strict=True)), seed


@pytest.mark.parametrize("position", ["footer", "note", "header"])
def test_every_flipped_bit_is_noticed(position: str) -> None:
    slab, disk = make_slab(16 * BLOCK_BYTES)
    extent = put(slab, make_record(tokens_of_blocks(2))).extent
    note = slab.write_note(NoteKind.TOMBSTONE, bytes(range(96)))
    start, length = {
        "footer": (extent.offset + taken_bytes(extent.length) - 64, 64),
        "note": (note.extent.offset, note.extent.length),
        "header": (extent.offset, PREFIX_BYTES + 100),
    }[position]
    raw = disk.raw(SLAB_NAME)
    both = {extent, note.extent}
    hit = note.extent if position == "note" else extent
    for bit in range(8 * start, 8 * (start + length)):
        raw[bit // 8] ^= 1 << bit % 8
        assert set(found_extents(scan(slab))) == both - {hit}, bit
        known = scan(slab, sorted(both, key=lambda one: one.offset))
        assert lost_extents(known) == [hit], bit
        raw[bit // 8] ^= 1 << bit % 8
    assert set(found_extents(scan(slab))) == both


# -- what the index says


def test_known_extents_are_found_first_and_the_rest_behind_them() -> None:
    slab, _ = make_slab()
    written = [put(slab, make_record(tokens_of_blocks(3), seed)) for seed in range(6)]
    note = slab.write_note(NoteKind.IDENTITY, b"{}")
    known = [written[4].extent, written[1].extent, note.extent]
    places = [one.extent for one in written]
    assert found_extents(scan(slab, known)) == [
        places[1], places[4], note.extent, places[0], places[2], places[3], places[5],
    ]  # fmt: skip


def test_with_all_known_only_heads_and_footers_are_read() -> None:
    slab, _ = make_slab(32 * MIB)
    known = [put(slab, make_record(20_000, seed)).extent for seed in range(8)]
    walk = slab.scan({extent.offset: extent for extent in known})
    assert found_extents(list(walk)) == known
    assert walk.read_bytes == 8 * 2 * BLOCK_BYTES


def test_small_known_ones_are_read_many_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    slab, _ = make_slab(16 * MIB)
    known = [put(slab, make_record(tokens_of_blocks(3), seed)).extent for seed in range(500)]
    calls = counted_reads(monkeypatch)
    assert found_extents(scan(slab, known)) == known
    assert len(calls) <= 500 * 3 * BLOCK_BYTES // WINDOW_BYTES_MAX + 2


def test_of_small_known_ones_that_cannot_all_be_read_only_those_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    slab, _ = make_slab()
    known = [put(slab, make_record(tokens_of_blocks(3), seed)).extent for seed in range(9)]
    unreadable(monkeypatch, {1 + 3 * 4 + 1, 1 + 3 * 7})
    found = scan(slab, [*known, Extent(BLOCK_BYTES + 1, 10), Extent(2 * BLOCK_BYTES, -9), Extent(9 * MIB, 10)])
    assert lost_extents(found)[:-1] == [Extent(BLOCK_BYTES + 1, 10), Extent(2 * BLOCK_BYTES, -9), known[7]]
    assert found_extents(found) == [*known[:7], known[8]]


@pytest.mark.parametrize(
    "place",
    [(0, 10), (BLOCK_BYTES + 1, 10), (-BLOCK_BYTES, 10), (4 * MIB, 10), (BLOCK_BYTES, 4 * MIB), (8192, 0), (8192, -9)],
)
def test_extents_that_are_no_place_are_lost_and_not_read(place: tuple[int, int]) -> None:
    slab, _ = make_slab()
    written = put(slab, make_record())
    found = scan(slab, [Extent(*place)])
    assert lost_extents(found) == [Extent(*place)]
    assert found_extents(found) == [written.extent]


def test_a_known_extent_where_something_else_lies_is_lost_and_that_is_found() -> None:
    slab, _ = make_slab()
    first, second = (put(slab, make_record(tokens_of_blocks(3), seed)) for seed in range(2))
    longer, shorter = Extent(first.extent.offset, first.extent.length + 64), Extent(second.extent.offset, 64)
    nothing = Extent(1 * MIB, 1000)
    found = scan(slab, [longer, shorter, nothing])
    assert lost_extents(found) == [longer, shorter, nothing]
    assert found_extents(found) == [first.extent, second.extent]
    assert all(one.reason for one in found if isinstance(one, Lost))


def test_a_record_over_the_place_of_a_lost_one_is_found() -> None:
    slab, _ = make_slab()
    small = [put(slab, make_record(tokens_of_blocks(4), seed)) for seed in range(4)]
    for one in small[:3]:
        take_away(slab, one.extent)
    large = put(slab, make_record(tokens_of_blocks(12), 9))
    assert large.extent.offset == small[0].extent.offset
    found = scan(slab, [one.extent for one in small])
    assert lost_extents(found) == [one.extent for one in small[:3]]
    assert found_extents(found) == [small[3].extent, large.extent]


@pytest.mark.parametrize("inner_sequence", [1, 1000])
def test_of_known_extents_that_overlap_the_one_written_last_stays(inner_sequence: int) -> None:
    slab, disk = make_slab()
    outer = put(slab, make_record(tokens_of_blocks(20)))
    slab.continue_behind(500)
    behind = put(slab, make_record(5, 3))
    inner = make_record(5, 2)
    inner_extent = Extent(outer.extent.offset + 5 * BLOCK_BYTES, len(inner))
    plant(disk, inner_extent.offset, whole_extent(slab, inner, inner_sequence))
    slab.write(outer.extent, outer.record, Stamp(400, outer.stamp.header_checksum, 0.0))
    plant(disk, inner_extent.offset, whole_extent(slab, inner, inner_sequence))
    found = scan(slab, [outer.extent, inner_extent, behind.extent])
    is_outer = inner_sequence < 400
    assert found_extents(found)[0] == (outer.extent if is_outer else inner_extent)
    assert lost_extents(found) == [inner_extent if is_outer else outer.extent]
    assert behind.extent in found_extents(found)


def test_a_record_that_reaches_into_a_known_one_is_not_found() -> None:
    slab, disk = make_slab()
    outer, inner = put(slab, make_record(tokens_of_blocks(20))), make_record(5, 2)
    known = Extent(outer.extent.offset + 5 * BLOCK_BYTES, len(inner))
    plant(disk, known.offset, whole_extent(slab, inner))
    assert found_extents(scan(slab, [known])) == [known]
    assert found_extents(scan(slab)) == [outer.extent], "its head and footer alone do not tell"


# -- a disk that fails


def unreadable(monkeypatch: pytest.MonkeyPatch, blocks: set[int]) -> None:
    """Reads of these blocks of any file fail, and leave in the targets what was there."""
    read_into = FaultyFile.read_into

    def failing(file: FaultyFile, offset: int, targets: list[Bytes]) -> None:
        stop = offset + sum(map(len, targets))
        if any(offset <= block * BLOCK_BYTES < stop for block in blocks):
            raise DiskError(f"errno 5: {file.name} at {offset}")
        read_into(file, offset, targets)

    monkeypatch.setattr(FaultyFile, "read_into", failing)


def counted_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Where every read from here on begins."""
    calls, read_into = list[int](), FaultyFile.read_into

    def counted(file: FaultyFile, offset: int, targets: list[Bytes]) -> None:
        calls.append(offset)
        read_into(file, offset, targets)

    monkeypatch.setattr(FaultyFile, "read_into", counted)
    return calls


def test_unreadable_blocks_are_skipped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    slab, _ = make_slab(8 * MIB)
    first, second, third = (put(slab, make_record(tokens_of_blocks(100), seed)) for seed in range(3))
    last = slab.write_note(NoteKind.IDENTITY, b"{}")
    head, middle, footer = 1, 1 + 100 + 50, 1 + 299
    unreadable(monkeypatch, {head, middle, footer})
    walk = slab.scan({})
    assert found_extents(list(walk)) == [second.extent, last.extent]
    assert walk.unreadable_blocks == 2, "the one inside a whole record is not looked at"
    known = [first.extent, second.extent, third.extent]
    found = scan(slab, known)
    assert lost_extents(found) == [first.extent, third.extent]
    assert all("errno 5" in one.reason for one in found if isinstance(one, Lost))
    assert found_extents(found) == [second.extent, last.extent]


def test_what_an_earlier_read_left_in_memory_is_not_found_where_a_block_is_unreadable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slab, disk = make_slab(64 * BLOCK_BYTES)
    written = put(slab, make_record(tokens_of_blocks(1)))
    plant(disk, 2 * BLOCK_BYTES, noise(40 * BLOCK_BYTES))
    unreadable(monkeypatch, set(range(5, 40)))
    assert found_extents(scan(slab)) == [written.extent]


@pytest.mark.parametrize("seed", range(20))
def test_a_disk_that_fails_and_lies_makes_a_scan_miss_things_but_never_fail_or_invent(seed: int) -> None:
    slab, disk = make_slab(2 * MIB, seed)
    written = {one.extent: one for one in (put(slab, make_record(tokens_of_blocks(9), number)) for number in range(40))}
    disk.faults = Faults(read_error=0.1, short_read=0.1, flipped_read=0.1)
    for known in ([], list(written)):
        for one in scan(slab, known):
            assert isinstance(one, Lost) or is_of(one, written[extent_of(one)]), disk
    disk.faults = Faults()
    assert len(found_extents(scan(slab))) == 40


# -- how much is read


def test_a_mostly_empty_slab_of_4_gib_is_hardly_read() -> None:
    slab, _ = make_slab(4 << 30)
    far = Extent(3 << 30, len(record := make_record(1000)))
    written = [put(slab, record), put(slab, record, reserved_at(slab, far))]
    walk = slab.scan({})
    assert found_extents(list(walk)) == [one.extent for one in written]
    assert walk.read_bytes <= 4 * HEAD_BYTES_MAX


def test_garbage_is_read_once_in_large_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    slab, disk = make_slab(16 * MIB)
    plant(disk, BLOCK_BYTES, noise(16 * MIB - BLOCK_BYTES))
    walk = slab.scan({})
    assert list(walk) == []
    assert walk.read_bytes == 16 * MIB - BLOCK_BYTES
    calls = counted_reads(monkeypatch)
    scan(slab)
    assert len(calls) <= 16 * MIB // WINDOW_BYTES_MAX + 8


def test_a_dense_slab_is_not_read_again_and_again() -> None:
    slab, _ = make_slab(4 * MIB)
    while (extent := slab.reserve(len(record := make_record(5)))) is not None:
        slab.write(extent, record, stamp_of(slab, record))
    walk = slab.scan({})
    assert len(list(walk)) == 4 * MIB // BLOCK_BYTES - 1
    assert walk.read_bytes <= 5 * MIB


# -- whatever happens


@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_damage_and_noise_never_make_a_scan_fail(data: st.DataObject) -> None:
    slab, disk = make_slab(64 * BLOCK_BYTES)
    for seed, blocks in enumerate((1, 3, 9)):
        put(slab, make_record(tokens_of_blocks(blocks), seed))
    slab.write_note(NoteKind.IDENTITY, bytes(5000))
    known = data.draw(st.sampled_from([[], found_extents(scan(slab))]))
    raw = disk.raw(SLAB_NAME)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(1, 15)) * BLOCK_BYTES + data.draw(st.sampled_from([0, 8, 16, 4032]))
        content = data.draw(st.binary(min_size=1, max_size=64))
        raw[at : at + len(content)] = np.frombuffer(content, np.uint8)
    require_disjoint(scan(slab, known))


def play(slab: Slab, chance: random.Random, rounds: int) -> Iterator[tuple[dict[Extent, Put], bool]]:
    """Write, erase and sync; yields what is held, and whether all of it is on the device."""
    held: dict[Extent, Put] = {}
    for _ in range(rounds):
        record = make_record(tokens_of_blocks(chance.choice([1, 2, 7, 40, 600])), chance.randrange(4))
        extent = slab.reserve(len(record))
        if extent is not None and chance.random() < 0.6:
            held[extent] = put(slab, record, extent)
        elif extent is not None:
            slab.free(extent)
        if held and (extent is None or chance.random() < 0.4):
            taken = chance.choice(list(held))
            take_away(slab, taken)
            del held[taken]
        if is_synced := chance.random() < 0.2:
            slab.sync()
        yield held, is_synced


@pytest.mark.parametrize("seed", range(15))
def test_after_a_kill_exactly_what_was_written_and_not_erased_is_found_and_is_whole(seed: int) -> None:
    slab, disk = make_slab(4 * MIB, seed)
    *_, (held, _) = play(slab, random.Random(seed), 60)
    again = Slab.open(disk.kill(), 4 * MIB)
    found = scan(again)
    assert {extent_of(one): one for one in found if is_of(one, held[extent_of(one)])}.keys() == held.keys(), disk
    for one in found:
        again.adopt(extent_of(one))
        RecordReader(read(again, extent_of(one))).verify()


@pytest.mark.parametrize("seed", range(30))
def test_after_a_power_loss_all_that_was_synced_and_not_erased_since_is_found(seed: int) -> None:
    slab, disk = make_slab(4 * MIB, seed)
    chance = random.Random(seed)
    synced: list[Put] = []
    held: dict[Extent, Put] = {}
    for held, is_synced in play(slab, chance, chance.randrange(5, 60)):
        if is_synced:
            synced = list(held.values())
    again = Slab.open(disk.crash(), 4 * MIB)
    synced.sort(key=lambda one: one.extent.offset)
    expected = [one for one in synced if held.get(one.extent) is one]
    found = scan(again, [one.extent for one in expected])
    assert not lost_extents(found), disk
    assert all(is_of(one, put_) for one, put_ in zip(found, expected, strict=False)), disk
    require_disjoint(found)
