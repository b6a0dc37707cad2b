"""Making, opening and growing a slab: it is opened as what it is or not at all, wherever a process died."""

import struct

import numpy as np
import pytest

from kvservice.model.errors import ConfigError, DiskError, DiskFullError
from kvservice.storage.disk import BLOCK_BYTES
from kvservice.storage.slab import SLAB_NAME, Slab
from kvservice.storage.slab_format import SUPERBLOCK_BYTES
from tests.storage.faulty_disk import FaultyDisk
from tests.storage.slab_builders import (
    MIB,
    Died,
    die_after,
    is_of,
    make_record,
    make_slab,
    put,
    read,
    reserved,
    scan,
)


def test_records_are_found_after_a_restart_by_a_slab_of_the_same_uuid() -> None:
    slab, disk = make_slab()
    written = put(slab, make_record())
    again = Slab.open(disk.kill(), 4 * MIB + 4095)
    assert (again.uuid, again.slab_bytes, again.used_bytes) == (slab.uuid, 4 * MIB, 0)
    assert is_of(scan(again)[0], written)
    again.adopt(written.extent)
    np.testing.assert_array_equal(read(again, written.extent), written.record)
    assert Slab.create(FaultyDisk(), 4 * MIB).uuid != slab.uuid


def test_sequences_rise_over_a_slabs_whole_life() -> None:
    slab, disk = make_slab()
    first = put(slab, make_record())
    again = Slab.open(disk.kill(), 4 * MIB)
    scan(again)
    assert again.next_sequence() > first.stamp.sequence
    again.continue_behind(1000)
    again.continue_behind(10)
    assert [again.next_sequence(), again.next_sequence()] == [1001, 1002]


def test_a_slab_that_is_there_is_not_made_anew() -> None:
    _, disk = make_slab()
    with pytest.raises(DiskError):
        Slab.create(disk, 4 * MIB)
    with pytest.raises(DiskError):
        Slab.open(FaultyDisk(), 4 * MIB)


@pytest.mark.parametrize("slab_bytes", [-1, 0, 4096, 8191])
def test_a_slab_without_room_is_refused(slab_bytes: int) -> None:
    with pytest.raises(ConfigError, match="give at least 8192"):
        Slab.create(FaultyDisk(), slab_bytes)


def test_every_flipped_bit_of_the_superblock_is_noticed() -> None:
    _, disk = make_slab()
    block = disk.raw(SLAB_NAME)[:BLOCK_BYTES]
    for bit in [*range(8 * SUPERBLOCK_BYTES), *range(8 * SUPERBLOCK_BYTES, 8 * BLOCK_BYTES, 1001), 8 * BLOCK_BYTES - 1]:
        block[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ConfigError, match="remove the folder"):
            Slab.open(disk, 4 * MIB)
        block[bit // 8] ^= 1 << bit % 8
    Slab.open(disk, 4 * MIB)


def test_another_version_and_another_file_are_refused_and_kept() -> None:
    _, disk = make_slab()
    block = disk.raw(SLAB_NAME)[:BLOCK_BYTES]
    block[8:10] = np.frombuffer(struct.pack("<H", 2), np.uint8)
    with pytest.raises(ConfigError, match="format version 2; this program reads 1"):
        Slab.open(disk, 4 * MIB)
    block[:8] = np.frombuffer(b"RIFFWAVE", np.uint8)
    before = disk.raw(SLAB_NAME).copy()
    with pytest.raises(ConfigError, match="not a slab: it starts with b'RIFFWAVE'"):
        Slab.open(disk, 8 * MIB)
    np.testing.assert_array_equal(disk.raw(SLAB_NAME), before)
    assert not [file for file in disk.open_files if file.size_bytes > 4 * MIB]


@pytest.mark.parametrize("found", [2 * MIB, 8 * MIB])
def test_a_size_that_changed_outside_is_refused_with_both_sizes(found: int) -> None:
    _, disk = make_slab()
    disk.open(SLAB_NAME).resize(found)
    with pytest.raises(
        ConfigError, match=rf"has {found} bytes, its first block says {4 * MIB}.*truncate --size {4 * MIB}"
    ):
        Slab.open(disk, 4 * MIB)
    assert len(disk.raw(SLAB_NAME)) == found


def test_a_smaller_wish_is_refused_and_says_what_to_give() -> None:
    _, disk = make_slab()
    with pytest.raises(ConfigError, match=f"give at least {4 * MIB}"):
        Slab.open(disk, 2 * MIB)


def test_a_larger_wish_makes_it_grow_and_keeps_what_is_there() -> None:
    slab, disk = make_slab()
    written = put(slab, make_record(1000))
    disk = disk.kill()
    grown = Slab.open(disk, 9 * MIB)
    assert (grown.uuid, grown.slab_bytes, grown.physical_bytes()) == (slab.uuid, 9 * MIB, 9 * MIB)
    assert is_of(scan(grown)[0], written)
    assert reserved(grown, grown.record_bytes_max).offset == BLOCK_BYTES
    assert Slab.open(disk, 9 * MIB).slab_bytes == 9 * MIB


def test_what_was_made_and_grown_survives_a_power_loss() -> None:
    for seed in range(20):
        slab, disk = make_slab(seed=seed)
        disk = disk.crash()
        assert Slab.open(disk, 8 * MIB).uuid == slab.uuid
        again = Slab.open(disk.crash(), 8 * MIB)
        assert (again.uuid, again.slab_bytes) == (slab.uuid, 8 * MIB)


def test_no_room_to_grow_leaves_the_slab_as_it_was() -> None:
    disk = FaultyDisk(capacity_bytes=6 * MIB)
    slab = Slab.create(disk, 4 * MIB)
    with pytest.raises(DiskFullError):
        Slab.open(disk, 8 * MIB)
    assert Slab.open(disk, 4 * MIB).uuid == slab.uuid
    with pytest.raises(DiskFullError):
        Slab.create(other := FaultyDisk(capacity_bytes=6 * MIB), 8 * MIB)
    assert Slab.open(other, 5 * MIB).slab_bytes == 5 * MIB


@pytest.mark.parametrize("size_bytes", [0, 4096])
def test_a_slab_whose_maker_died_is_made_again(monkeypatch: pytest.MonkeyPatch, size_bytes: int) -> None:
    disk = FaultyDisk()
    with monkeypatch.context() as patch:
        die_after(patch, 0)
        with pytest.raises(Died):
            Slab.create(disk, 4 * MIB)
    if not size_bytes:
        disk.remove(SLAB_NAME)
        monkeypatch.setattr("tests.storage.faulty_disk.assert_stretch", lambda *_: None)
        disk.open(SLAB_NAME, 0)
    slab = Slab.open(disk.kill(), 4 * MIB)
    assert slab.slab_bytes == 4 * MIB
    put(slab, make_record())


@pytest.mark.parametrize("calls", [0, 1, 2, 3])
def test_whenever_the_process_dies_while_a_slab_is_made_or_grows_the_next_one_opens_it(
    monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    disk = FaultyDisk()
    with monkeypatch.context() as patch:
        made = die_after(patch, calls)
        for make, slab_bytes in ((Slab.create, 4 * MIB), (Slab.open, 8 * MIB)):
            try:
                make(disk, slab_bytes)
            except Died:
                break
        assert made() == min(calls, 3)
    slab = Slab.open(disk.kill(), 8 * MIB)
    assert slab.slab_bytes == 8 * MIB
    assert Slab.open(disk.beside(), 8 * MIB).uuid == slab.uuid
