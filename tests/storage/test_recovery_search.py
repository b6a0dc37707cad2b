"""What a search of the slab finds, and that a record read in full is right in every bit."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from kvservice.model.errors import CorruptError, InvalidInputError
from kvservice.storage.buffer import Bytes
from kvservice.storage.disk import BLOCK_BYTES
from kvservice.storage.record import read_head
from kvservice.storage.recovery_search import VERIFIED_MAX, reserve_all, search_slab, verify_record
from kvservice.storage.slab import PIECE_BYTES, SLAB_NAME, Slab
from kvservice.storage.ssd_entry import SsdEntry
from tests.storage.conftest import RecordBuilder
from tests.storage.faulty_disk import Faults, FaultyDisk
from tests.storage.recovery_builders import Writer, make_entry, make_index
from tests.storage.slab_builders import GEOMETRY, MIB, make_slab, on_blocks, put


def reopened(disk: FaultyDisk, slab: Slab) -> Slab:
    slab.close()
    return Slab.open(disk, slab.slab_bytes)


def small_mirror() -> Bytes:
    """Sections with and without runs, padding behind both."""
    return on_blocks(RecordBuilder().small_mirror())


def long_master() -> Bytes:
    """Three sections, each longer than a piece, on no boundary of pieces."""
    build = RecordBuilder()
    tokens = PIECE_BYTES // 64 + 33
    return on_blocks(build.master(build.meta(tokens=tokens, geometry=GEOMETRY), 3))


@pytest.mark.parametrize("record", [small_mirror(), long_master()], ids=["mirror", "master"])
def test_a_whole_record_is_right(record: Bytes) -> None:
    slab, _ = make_slab(16 * MIB)
    verify_record(slab, put(slab, record).extent, read_head(record))


@pytest.mark.parametrize("make", [small_mirror, long_master])
def test_every_flipped_bit_behind_the_head_is_found(make: Callable[[], Bytes]) -> None:
    record = make()
    slab, disk = make_slab(16 * MIB)
    extent, head = put(slab, record).extent, read_head(record)
    place = disk.raw(SLAB_NAME)[extent.offset :]
    bits = range((32 + head.layout.header_bytes) * 8, len(record) * 8)
    for bit in bits if len(record) < BLOCK_BYTES else np.random.default_rng(1).choice(bits, 12):
        place[bit // 8] ^= np.uint8(1 << bit % 8)
        with pytest.raises(CorruptError):
            verify_record(slab, extent, head)
        place[bit // 8] ^= np.uint8(1 << bit % 8)
    verify_record(slab, extent, head)


def test_reserved_places_do_not_overlap() -> None:
    slab, _ = make_slab()
    entries = [make_entry(0, number, offset=BLOCK_BYTES * number) for number in (3, 1, 2)]
    reserve_all(slab, entries, [])
    assert slab.used_bytes == 3 * BLOCK_BYTES
    with pytest.raises(InvalidInputError):
        reserve_all(slab, [make_entry(0, 4, offset=BLOCK_BYTES * 4), *entries], [])
    assert slab.used_bytes == 3 * BLOCK_BYTES


def test_what_the_index_names_is_taken_as_it_says() -> None:
    slab, disk = make_slab()
    index = make_index()
    writer = Writer(slab, index)
    entry = writer.store(0, 0)
    found = search_slab(reopened(disk, slab), [entry], writer.identities.values())
    assert found.records[0] is entry
    assert found.notes == list(writer.identities.values())
    assert (found.lost, found.verified, found.torn) == (0, 0, [])
    assert found.scanned_bytes > 0


@pytest.mark.parametrize(
    "change",
    [
        lambda entry: replace(entry, generation=1),
        lambda entry: replace(entry, header_checksum=1),
        lambda entry: replace(entry, sequence=99),
        lambda entry: replace(entry, prefill_s=9.0),
        lambda entry: replace(entry, meta=make_entry(0, 3).meta),
    ],
    ids=["generation", "header checksum", "sequence", "prefill", "key"],
)
def test_what_differs_from_the_index_in_anything_is_as_on_the_slab(change: Callable[[SsdEntry], SsdEntry]) -> None:
    slab, disk = make_slab()
    entry = Writer(slab, make_index()).store(0, 0)
    found = search_slab(reopened(disk, slab), [change(entry)], [])
    assert found.records == [entry]
    assert found.verified == 1


def test_records_that_the_index_does_not_name_are_read_in_full_the_last_ones() -> None:
    slab, disk = make_slab()
    writer = Writer(slab, make_index())
    entries = [writer.store(0, number, is_indexed=False) for number in range(VERIFIED_MAX + 6)]
    for entry in (entries[0], entries[5], entries[6], entries[-1]):
        disk.raw(SLAB_NAME)[entry.extent.offset + entry.extent.length - 1] ^= np.uint8(1)  # padding
    found = search_slab(reopened(disk, slab), [], [])
    assert found.verified == VERIFIED_MAX
    assert [one.extent for one in found.torn] == [entries[-1].extent, entries[6].extent]
    assert [one.extent for one in found.records] == [one.extent for one in entries[:6] + entries[7:-1]]


def test_a_record_that_cannot_be_read_again_counts_as_torn() -> None:
    slab, disk = make_slab()
    Writer(slab, make_index()).store(0, 0, is_indexed=False)
    again = reopened(disk, slab)
    scan = again.scan

    def then_fail(_: object) -> object:
        found = list(scan({}))
        disk.faults = Faults(read_error=1)
        return type("Scan", (list,), {"read_bytes": 0, "unreadable_blocks": 0})(found)

    again.scan = then_fail  # type: ignore[assignment, method-assign]
    found = search_slab(again, [], [])
    assert (len(found.torn), found.records) == (1, [])


def test_of_two_things_that_the_index_says_of_one_place_the_last_is_looked_for() -> None:
    slab, disk = make_slab()
    entry = Writer(slab, make_index()).store(0, 0)
    stale = make_entry(0, 5, offset=entry.extent.offset, sequence=0)
    for said in ([entry, stale], [stale, entry]):
        found = search_slab(reopened(disk, slab), said, [])
        assert found.records[0] is entry
        slab = Slab.open(disk, slab.slab_bytes)


def test_found_records_share_geometry_and_namespace() -> None:
    slab, disk = make_slab()
    writer = Writer(slab, make_index())
    for context in range(2):
        writer.store(0, context)
    first, second = (record.meta for record in search_slab(reopened(disk, slab), [], []).records)
    assert first.geometry is second.geometry
    assert first.namespace is second.namespace
