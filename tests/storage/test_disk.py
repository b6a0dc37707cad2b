"""The contract of a disk, over real file systems and the double; and what only the real one can show."""

import ctypes
import errno
import fcntl
import logging
import os
import random
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from kvservice.model.errors import ConfigError, DiskError, DiskFullError, InvalidInputError
from kvservice.storage import disk as disk_module
from kvservice.storage.buffer import Bytes
from kvservice.storage.disk import BLOCK_BYTES, SMALL_BYTES_MAX, Disk, File, RealDisk, block_buffer
from tests.descriptors import nothing_left_open, opened
from tests.storage.faulty_disk import FaultyDisk

HOLD_LOCK = """
import pathlib, sys
from kvservice.storage.disk import RealDisk
disk = RealDisk(pathlib.Path(sys.argv[1]))
disk.lock("the other one")
print("locked", flush=True)
sys.stdin.read()
"""
ADVICE = {errno.ENOSPC: "free room", errno.EDQUOT: "quota", errno.EIO: "device fails", errno.EROFS: "read-only"}

Beside = Callable[[], Disk]


def blocks(count: int, seed: int = 1) -> Bytes:
    """Random bytes on a boundary; no block is all zeros."""
    buffer = block_buffer(count * BLOCK_BYTES)
    np.copyto(buffer, np.random.default_rng(seed).integers(1, 256, len(buffer), np.uint8))
    return buffer


def content(file: File, first: int = 0, count: int | None = None) -> Bytes:
    buffer = block_buffer(file.size_bytes if count is None else count * BLOCK_BYTES)
    file.read_into(first * BLOCK_BYTES, [buffer])
    return buffer


@pytest.fixture(params=["disk", "tmpfs", "faulty"])
def beside(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Beside]:
    """Opens one folder again and again, as several processes would."""
    if request.param == "faulty":
        yield FaultyDisk().beside
    elif request.param == "disk":
        yield lambda: RealDisk(tmp_path)
    else:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            yield lambda: RealDisk(Path(folder))


@pytest.fixture
def disk(beside: Beside) -> Iterator[Disk]:
    with closing(beside()) as opened:
        yield opened


@pytest.fixture
def file(disk: Disk) -> Iterator[File]:
    with closing(disk.open("slab.kv", 16 * BLOCK_BYTES)) as opened:
        yield opened


@pytest.fixture
def real(tmp_path: Path) -> Iterator[RealDisk]:
    with closing(RealDisk(tmp_path / "ssd")) as opened:
        yield opened


@pytest.fixture
def real_file(real: RealDisk) -> Iterator[File]:
    with closing(real.open("slab.kv", 16 * BLOCK_BYTES)) as opened:
        yield opened


def fail(number: int) -> Callable[..., int]:
    def failing(*_: object, **__: object) -> int:
        raise OSError(number, os.strerror(number))

    return failing


def test_a_new_file_is_taken_from_the_disk_and_all_holes(disk: Disk, file: File) -> None:
    assert (file.name, file.size_bytes) == ("slab.kv", 16 * BLOCK_BYTES)
    assert file.physical_bytes() >= file.size_bytes
    assert file.next_data(0) is None
    assert file.next_data(file.size_bytes) is None
    assert not content(file).any()
    assert disk.exists("slab.kv")


def test_what_was_written_is_read_through_any_cut_of_arrays(file: File) -> None:
    data = blocks(5)
    file.write_from(3 * BLOCK_BYTES, [data[:BLOCK_BYTES], data[:0], data[BLOCK_BYTES:]])
    target = block_buffer(len(data))
    file.read_into(3 * BLOCK_BYTES, [target[: 2 * BLOCK_BYTES], target[2 * BLOCK_BYTES :]])
    assert np.array_equal(target, data)
    assert not content(file, 8, 8).any()


@pytest.mark.parametrize("verb", ["read_into", "write_from"])
def test_what_is_not_whole_aligned_blocks_inside_the_file_is_a_bug(file: File, verb: str) -> None:
    move = getattr(file, verb)
    buffer = block_buffer(3 * BLOCK_BYTES)
    whole = buffer[:BLOCK_BYTES]
    for offset, arrays, message in (
        (512, [whole], "offset 512"),
        (-BLOCK_BYTES, [whole], "are not in"),
        (15 * BLOCK_BYTES, [buffer], "are not in"),
        (0, [buffer[:100]], "length 100"),
        (0, [buffer[:2048], buffer[BLOCK_BYTES:][:2048]], "not blocks"),
        (0, [buffer[8 : 8 + BLOCK_BYTES]], "boundary"),
        (0, [whole.view(np.uint16), whole[:2048].view(np.uint16)], "not bytes|length"),
        (0, [buffer[::3]], "not flat and contiguous"),
        (0, [], "nothing to do"),
    ):
        with pytest.raises(AssertionError, match=message):
            move(offset, arrays)


def test_a_stretch_to_punch_or_a_size_that_is_not_blocks_is_a_bug(disk: Disk, file: File) -> None:
    for offset, length in ((512, BLOCK_BYTES), (0, 100), (0, 0), (0, 17 * BLOCK_BYTES)):
        with pytest.raises(AssertionError):
            file.punch(offset, length)
    for size in (0, -BLOCK_BYTES, BLOCK_BYTES + 1):
        with pytest.raises(AssertionError):
            file.resize(size)
        with pytest.raises(AssertionError):
            disk.open("other", size)
    assert not disk.exists("other")


def test_punching_gives_bytes_back_and_leaves_a_hole_of_zeros(file: File) -> None:
    file.write_from(0, [blocks(16)])
    file.sync()
    before = file.physical_bytes()
    file.punch(4 * BLOCK_BYTES, 8 * BLOCK_BYTES)
    assert file.physical_bytes() == before - 8 * BLOCK_BYTES
    assert not content(file, 4, 8).any()
    assert np.array_equal(content(file, 12, 4), blocks(16)[12 * BLOCK_BYTES :])
    assert (file.next_data(0), file.next_data(7)) == (0, 7)
    assert file.next_data(4 * BLOCK_BYTES) == file.next_data(9 * BLOCK_BYTES + 7) == 12 * BLOCK_BYTES
    file.write_from(6 * BLOCK_BYTES, [blocks(1)])
    assert file.next_data(4 * BLOCK_BYTES) == 6 * BLOCK_BYTES


def test_a_file_grows_with_holes_and_shrinks_and_is_reopened_so(beside: Beside, file: File) -> None:
    file.write_from(0, [blocks(16)])
    file.resize(32 * BLOCK_BYTES)
    assert file.size_bytes == 32 * BLOCK_BYTES
    assert file.physical_bytes() >= 32 * BLOCK_BYTES
    assert np.array_equal(content(file, 0, 16), blocks(16))
    assert file.next_data(16 * BLOCK_BYTES) is None
    file.resize(8 * BLOCK_BYTES)
    with closing(beside()) as other, closing(other.open(file.name)) as again:
        assert again.size_bytes == file.size_bytes == 8 * BLOCK_BYTES
        assert np.array_equal(content(again), blocks(16)[: 8 * BLOCK_BYTES])
        again.resize(2 * BLOCK_BYTES)
    with pytest.raises(DiskError, match=r"read at offset .*slab\.kv: it ended after"):
        content(file)  # another process made it shorter


def test_a_thousand_random_operations_equal_an_array(file: File) -> None:
    chance, model = random.Random(7), np.zeros(16 * BLOCK_BYTES, np.uint8)
    for step in range(1000):
        first = chance.randrange(16)
        start, end = first * BLOCK_BYTES, chance.randint(first + 1, 16) * BLOCK_BYTES
        match chance.randrange(4):
            case 0:
                file.punch(start, end - start)
                model[start:end] = 0
            case 1:
                assert np.array_equal(content(file, first, (end - start) // BLOCK_BYTES), model[start:end]), step
            case 2:
                found = file.next_data(start)
                assert not model[start:found].any(), step  # a hole never hides data
            case _:
                source = blocks((end - start) // BLOCK_BYTES, step)
                file.write_from(start, [source])
                model[start:end] = source
    assert np.array_equal(content(file), model)


def test_threads_read_and_write_different_places_at_once(file: File) -> None:
    def write_and_read(place: int) -> bool:
        for round_ in range(20):
            data = blocks(4, place * 100 + round_)
            file.write_from(place * 4 * BLOCK_BYTES, [data])
            if not np.array_equal(content(file, place * 4, 4), data):
                return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(write_and_read, range(4)))


def test_a_file_is_made_once_and_opened_only_if_it_is_there(disk: Disk, file: File) -> None:
    with pytest.raises(DiskError, match=r"slab\.kv: File exists"):
        disk.open(file.name, BLOCK_BYTES)
    with pytest.raises(DiskError, match=r"missing\.kv: No such file"):
        disk.open("missing.kv")
    assert not disk.exists("missing.kv")


def test_a_file_larger_than_the_free_room_is_refused_and_leaves_nothing(disk: Disk, file: File) -> None:
    too_much = disk.free_bytes() // BLOCK_BYTES * BLOCK_BYTES * 2
    with pytest.raises(DiskFullError, match=r"large\.kv: No space left .*ssd_bytes"):
        disk.open("large.kv", too_much)
    assert not disk.exists("large.kv")
    with pytest.raises(DiskFullError, match=r"slab\.kv: No space left"):
        file.resize(too_much)
    assert file.size_bytes == 16 * BLOCK_BYTES


def test_a_removed_file_is_gone_and_removing_it_again_is_fine(disk: Disk, file: File) -> None:
    file.write_from(0, [blocks(16)])
    disk.remove(file.name)
    assert not disk.exists(file.name)
    disk.remove(file.name)
    assert np.array_equal(content(file), blocks(16))  # who has it open keeps it


def test_a_small_file_is_replaced_whole(disk: Disk) -> None:
    assert disk.read_small("epoch") is None
    for data in (b"1", b"a longer one" * 1000, b"", b"\x00" * SMALL_BYTES_MAX):
        disk.write_small("epoch", data)
        assert disk.read_small("epoch") == data
    with pytest.raises(AssertionError):
        disk.write_small("epoch", b"\x00" * (SMALL_BYTES_MAX + 1))
    disk.remove("epoch")
    assert disk.read_small("epoch") is None


def test_a_name_never_leads_out_of_the_folder(disk: Disk) -> None:
    for name in ("", ".", "..", "../up", "/etc/passwd", "down/file", "zero\0"):
        for call in (disk.open, disk.exists, disk.remove, disk.read_small, lambda name: disk.write_small(name, b"")):
            with pytest.raises(InvalidInputError, match="does not name a file"):
                call(name)


def test_a_lock_keeps_others_out_until_it_is_closed(beside: Beside, disk: Disk) -> None:
    disk.lock("the first")
    other = beside()
    with pytest.raises(ConfigError, match=rf"in use by the first \(process {os.getpid()}\)"):
        other.lock("the second")
    disk.close()
    disk.close()
    other.lock("the second")
    other.close()


def test_the_folder_is_made_private_but_not_its_parent(real: RealDisk, tmp_path: Path) -> None:
    assert stat.S_IMODE(real.folder.stat().st_mode) == 0o700
    real.open("slab.kv", BLOCK_BYTES).close()
    real.write_small("epoch", b"1")
    for name in ("slab.kv", "epoch"):
        assert stat.S_IMODE((real.folder / name).stat().st_mode) == 0o600, name
    with pytest.raises(ConfigError, match=r"missing/ssd: No such file.*make the folder above it"):
        RealDisk(tmp_path / "missing" / "ssd")
    with pytest.raises(ConfigError, match=r"epoch: Not a directory.*name a folder"):
        RealDisk(real.folder / "epoch")


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENOSPC, errno.EIO])
def test_a_folder_that_cannot_be_written_stops_the_boot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(RealDisk, "_open", fail(number))
    with nothing_left_open(), pytest.raises(ConfigError, match=f"{tmp_path}: {os.strerror(number)}"):
        RealDisk(tmp_path)


def test_a_probe_leaves_nothing_and_says_once_what_works(real: RealDisk, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    RealDisk(real.folder).close()
    assert not list(real.folder.iterdir())
    assert [record.levelname for record in caplog.records] == ["WARNING" if real.facts.why_not else "INFO"]


def test_a_file_system_without_direct_io_is_read_and_written_buffered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fcntl, "fcntl", fail(errno.EINVAL))
    with closing(RealDisk(tmp_path)) as disk, closing(disk.open("slab.kv", 4 * BLOCK_BYTES)) as file:
        assert not disk.facts.is_direct
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "no O_DIRECT (Invalid argument)" in caplog.text
        file.write_from(0, [blocks(4)])
        file.sync()
        assert np.array_equal(content(file), blocks(4))


def test_a_file_system_without_fallocate_gets_sparse_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_module, "_fallocate", fail(errno.EOPNOTSUPP))
    with closing(RealDisk(tmp_path)) as disk, closing(disk.open("slab.kv", 4 * BLOCK_BYTES)) as file:
        assert (disk.facts.is_preallocated, disk.facts.can_punch) == (False, False)
        for reason in ("no preallocation (", "no hole punching ("):
            assert reason in disk.facts.why_not
        file.resize(8 * BLOCK_BYTES)
        assert file.size_bytes == (tmp_path / "slab.kv").stat().st_size == 8 * BLOCK_BYTES
        assert file.physical_bytes() == 0
        with pytest.raises(DiskError, match="cannot punch"):
            file.punch(0, BLOCK_BYTES)


def test_growing_that_fails_half_way_leaves_the_old_size(
    real: RealDisk, real_file: File, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill_up(fd: int, mode: int, offset: int, length: int) -> None:
        os.ftruncate(fd, offset + length // 2)
        raise OSError(errno.ENOSPC, "")

    monkeypatch.setattr(disk_module, "_fallocate", fill_up)
    with pytest.raises(DiskFullError):
        real_file.resize(32 * BLOCK_BYTES)
    assert real_file.size_bytes == (real.folder / "slab.kv").stat().st_size == 16 * BLOCK_BYTES
    with pytest.raises(DiskFullError):
        real.open("other.kv", 8 * BLOCK_BYTES)
    assert not real.exists("other.kv")


def test_a_signal_during_preallocation_does_not_fail_it(real: RealDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = [errno.EINTR, errno.EINTR, 0]

    def interrupted(*_: int) -> int:
        ctypes.set_errno(errors[0])
        return -1 if errors.pop(0) else 0

    monkeypatch.setattr(disk_module, "_libc", SimpleNamespace(fallocate=interrupted))
    real.open("slab.kv", BLOCK_BYTES).close()
    assert not errors


@pytest.mark.parametrize("step", [BLOCK_BYTES, 2 * BLOCK_BYTES + 512, 3 * BLOCK_BYTES])
def test_short_reads_and_writes_are_continued(real_file: File, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    def less(move: Callable[..., int]) -> Callable[..., int]:
        return lambda fd, views, offset: min(step, move(fd, views, offset))

    monkeypatch.setattr(os, "preadv", less(os.preadv))
    monkeypatch.setattr(os, "pwritev", less(os.pwritev))
    data, target, cut = blocks(16), block_buffer(16 * BLOCK_BYTES), 5 * BLOCK_BYTES
    real_file.write_from(0, [data[:cut], data[cut:]])
    real_file.read_into(0, [target[:cut], target[cut:]])
    assert np.array_equal(target, data)


def test_more_arrays_than_one_call_takes_are_moved(real: RealDisk) -> None:
    count = disk_module._ARRAYS_PER_CALL_MAX + 3
    with closing(real.open("slab.kv", count * BLOCK_BYTES)) as file:
        data = blocks(count)
        file.write_from(0, list(data.reshape(count, BLOCK_BYTES)))
        assert np.array_equal(content(file), data)


def test_a_file_cut_inside_a_block_ends_a_read_early(real: RealDisk, real_file: File) -> None:
    os.truncate(real.folder / "slab.kv", BLOCK_BYTES + 100)
    with pytest.raises(DiskError, match=r"read at offset 4096 of .*it ended after 100 bytes.*put it back"):
        content(real_file)
    with closing(real.open("slab.kv")) as again:
        assert again.size_bytes == BLOCK_BYTES + 100


@pytest.mark.parametrize("number", ADVICE)
def test_an_error_of_the_system_names_file_place_reason_and_remedy(
    real: RealDisk, real_file: File, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    for name in ("preadv", "pwritev", "fdatasync"):
        monkeypatch.setattr(os, name, fail(number))
    for call, place in (
        (lambda: real_file.write_from(BLOCK_BYTES, [blocks(1)]), "write at offset 4096 of"),
        (lambda: content(real_file, 2, 1), "read at offset 8192 of"),
        (real_file.sync, "sync"),
    ):
        with pytest.raises(DiskError) as caught:
            call()
        assert isinstance(caught.value, DiskFullError) == (number in (errno.ENOSPC, errno.EDQUOT))
        for part in (place, f"{real.folder}/slab.kv", os.strerror(number), f"errno {number}", ADVICE[number]):
            assert part in str(caught.value)


def test_all_but_payload_is_on_the_device_when_it_returns(real: RealDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[bool, bool]] = []

    def fsync(fd: int) -> None:
        calls.append((stat.S_ISDIR(os.fstat(fd).st_mode), real.exists("epoch")))

    monkeypatch.setattr(os, "fsync", fsync)
    real.write_small("epoch", b"1")
    assert calls == [(False, False), (True, True)]  # the new file first, then, with its name, the folder
    calls.clear()
    real.remove("epoch")
    real.open("slab.kv", BLOCK_BYTES).close()
    assert calls == [(True, False), (False, False), (True, False)]


@pytest.mark.parametrize("name", ["fsync", "rename"])
def test_a_small_file_that_cannot_be_replaced_stays(real: RealDisk, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    real.write_small("epoch", b"1")
    monkeypatch.setattr(os, name, fail(errno.ENOSPC))
    with pytest.raises(DiskFullError, match="epoch: No space left"):
        real.write_small("epoch", b"2")
    assert real.read_small("epoch") == b"1"
    assert [path.name for path in real.folder.iterdir()] == ["epoch"]


def test_a_file_that_is_not_small_or_a_link_is_not_read(real: RealDisk, tmp_path: Path) -> None:
    (real.folder / "epoch").write_bytes(b"\x00" * (SMALL_BYTES_MAX + 1))
    with pytest.raises(DiskError, match="more than"):
        real.read_small("epoch")
    (tmp_path / "outside").write_bytes(b"secret")
    (real.folder / "link").symlink_to(tmp_path / "outside")
    for call in (real.open, real.read_small):
        with pytest.raises(DiskError, match="link: Too many levels of symbolic links"):
            call("link")


def test_another_process_with_the_lock_is_named_and_its_death_frees_it(real: RealDisk) -> None:
    command = [sys.executable, "-c", HOLD_LOCK, str(real.folder)]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with other:
        assert other.stdout
        assert other.stdout.readline() == b"locked\n"
        said = rf"ssd is in use by the other one \(process {other.pid}\); stop it"
        with nothing_left_open(), pytest.raises(ConfigError, match=said):
            real.lock("this one")
        other.kill()
    assert (real.folder / "lock").read_text() == f"{other.pid} the other one\n"
    real.lock("this one")
    assert (real.folder / "lock").read_text() == f"{os.getpid()} this one\n"


def test_a_descriptor_copied_into_a_forked_child_does_not_keep_the_lock(real: RealDisk) -> None:
    real.lock("this one")
    copy = os.dup(real._lock_fd)
    real.close()
    other = RealDisk(real.folder)
    other.lock("that one")
    other.close()
    os.close(copy)


def test_no_descriptor_is_inherited_or_left_open(tmp_path: Path) -> None:
    before = opened()
    disk = RealDisk(tmp_path)
    disk.lock("this one")
    file = disk.open("slab.kv", BLOCK_BYTES)
    disk.write_small("epoch", b"1")
    disk.read_small("epoch")
    with pytest.raises(DiskError):
        disk.open("slab.kv", BLOCK_BYTES)
    with pytest.raises(DiskFullError):
        disk.open("other.kv", 1 << 50)
    new = opened() - before
    assert len(new) == 3  # folder, lock and slab
    assert not any(os.get_inheritable(int(line.split()[0])) for line in new)
    for _ in range(2):
        file.close()
        disk.close()
    assert not opened() - before
