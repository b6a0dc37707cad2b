"""The mark of a clean stop and the boot epoch: believed only whole, and never in the way of a start."""

import os
from pathlib import Path
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvservice.storage.clean_marker import (
    EPOCH_NAME,
    MARKER_NAME,
    CleanMarker,
    next_epoch,
    read_epoch,
    read_marker,
    remove_marker,
    write_epoch,
    write_marker,
)
from kvservice.storage.disk import BLOCK_BYTES, RealDisk
from kvservice.storage.ssd_index import IndexDigest
from tests.storage.faulty_disk import Faults, FaultyDisk

MARKER = CleanMarker(UUID(int=7), 1_800_000_000_000_000_000, 41, IndexDigest(3, (1 << 64) - 1))


def test_the_marker_comes_back_as_it_was() -> None:
    disk = FaultyDisk()
    assert read_marker(disk) is None
    write_marker(disk, MARKER)
    assert read_marker(disk) == MARKER


def test_no_changed_bit_of_the_marker_is_believed() -> None:
    disk = FaultyDisk()
    write_marker(disk, MARKER)
    data = disk.read_small(MARKER_NAME)
    assert data is not None
    for bit in range(len(data) * 8):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        disk.write_small(MARKER_NAME, bytes(changed))
        assert read_marker(disk) in (None, MARKER), bit  # white space may change


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"{}", b"[]", b"7", b"null", b'"text"', b"\xff", b"[" * 100_000, b'{"checksum": 1}', b"9" * 5000],
    ids=range(11),
)
def test_what_is_no_marker_is_none(data: bytes) -> None:
    disk = FaultyDisk()
    disk.write_small(MARKER_NAME, data)
    assert read_marker(disk) is None


def test_the_epoch_comes_back_as_it_was() -> None:
    disk = FaultyDisk()
    assert read_epoch(disk) is None
    write_epoch(disk, 1_800_000_000_000_000_000)
    assert disk.read_small(EPOCH_NAME) == b"1800000000000000000\n"
    assert read_epoch(disk) == 1_800_000_000_000_000_000


@pytest.mark.parametrize(
    "data", [b"", b"-1", b"1.5", b"one", b"\xff", "٣".encode(), b"9" * 19, b"1" * 5000, b"1 2", b"0x10"]
)
def test_what_is_no_epoch_is_none(data: bytes) -> None:
    disk = FaultyDisk()
    disk.write_small(EPOCH_NAME, data)
    assert read_epoch(disk) is None


@pytest.mark.parametrize("name", [MARKER_NAME, EPOCH_NAME])
def test_a_file_that_cannot_be_read_counts_as_missing(name: str) -> None:
    disk = FaultyDisk()
    write_marker(disk, MARKER)
    write_epoch(disk, 5)
    disk.faults = Faults(read_error=1)
    assert read_marker(disk) is None
    assert read_epoch(disk) is None
    disk.faults = Faults()
    disk.remove(name)
    disk.open(name, 300 * BLOCK_BYTES).close()  # not small
    assert (read_marker(disk), read_epoch(disk)) == ((None, 5) if name == MARKER_NAME else (MARKER, None))


@given(earlier=st.lists(st.none() | st.integers(0, 1 << 62)), now_ns=st.integers(1, 1 << 62))
def test_the_epoch_rises_whatever_the_clock_says(earlier: list[int | None], now_ns: int) -> None:
    epoch = next_epoch(earlier, now_ns)
    assert epoch >= now_ns
    assert all(epoch > one for one in earlier if one is not None)
    assert epoch == now_ns or epoch - 1 in earlier


def test_nothing_is_left_of_a_marker_whose_writing_was_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = RealDisk(tmp_path / "ssd")
    monkeypatch.setattr(os, "rename", _die)
    monkeypatch.setattr(os, "unlink", _die)
    with pytest.raises(SystemExit):
        write_marker(disk, MARKER)
    monkeypatch.undo()
    assert [path.name for path in disk.folder.iterdir()] == ["CLEAN.new"]
    remove_marker(disk)
    assert not list(disk.folder.iterdir())
    disk.close()


def _die(*_: object, **__: object) -> None:
    raise SystemExit
