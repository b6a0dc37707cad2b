"""The arena: one sealed memfd, and who may write it."""

import errno
import fcntl
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from kvservice.model.cache import Extent
from kvservice.model.errors import CapacityError, InvalidInputError
from kvservice.storage.arena import Arena, attach_arena
from tests.descriptors import nothing_left_open

ATTACH_AND_WRITE = """
import sys
from kvservice.storage.arena import attach_arena
view = attach_arena(int(sys.argv[1]), int(sys.argv[2]), is_writable=True)
assert view[5] == 17
view[6] = 18
"""


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena(8 * mmap.PAGESIZE)
    yield made
    made.close()


@pytest.mark.parametrize("is_prefaulted", [False, True])
def test_an_arena_is_zero_writable_and_page_aligned(*, is_prefaulted: bool) -> None:
    arena = Arena(3 * mmap.PAGESIZE + 1, is_prefaulted=is_prefaulted)
    assert len(arena.view) == arena.bytes == 4 * mmap.PAGESIZE
    assert arena.view.ctypes.data % mmap.PAGESIZE == 0
    assert arena.view.flags.writeable
    assert not arena.view.any()
    arena.close()


def test_another_process_shares_the_bytes(arena: Arena) -> None:
    arena.view[5] = 17
    fd = arena.descriptor()
    command = [sys.executable, "-c", ATTACH_AND_WRITE, str(fd), str(arena.bytes)]
    subprocess.run(command, pass_fds=(fd,), check=True, timeout=30)
    assert arena.view[6] == 18


def test_a_reader_sees_writes_and_cannot_write(arena: Arena) -> None:
    fd = arena.read_only_descriptor()
    view = attach_arena(fd, arena.bytes, is_writable=False)
    with pytest.raises(InvalidInputError, match="cannot be mapped writable"):
        attach_arena(fd, arena.bytes, is_writable=True)
    os.close(fd)
    arena.slice(Extent(100, 4))[:] = 7
    assert view[99:105].tolist() == [0, 7, 7, 7, 7, 0]
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1


def test_a_read_only_map_of_the_writable_descriptor_cannot_write(arena: Arena) -> None:
    assert not attach_arena(arena.descriptor(), arena.bytes, is_writable=False).flags.writeable


def test_nobody_can_change_the_size_or_take_the_seals_further(arena: Arena) -> None:
    for size in (0, arena.bytes + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.descriptor(), size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(arena.descriptor(), fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    assert os.fstat(arena.descriptor()).st_mode & 0o777 == 0o600


def test_descriptors_do_not_leak_into_children(arena: Arena) -> None:
    fd = arena.read_only_descriptor()
    assert not os.get_inheritable(fd)
    assert not os.get_inheritable(arena.descriptor())
    os.close(fd)


def test_files_that_could_fault_are_not_attached(arena: Arena) -> None:
    with pytest.raises(InvalidInputError, match="was promised"):
        attach_arena(arena.descriptor(), arena.bytes * 2, is_writable=False)
    unsealed = os.memfd_create("unsealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, 4096)
    with pytest.raises(InvalidInputError, match="change its size"):
        attach_arena(unsealed, 4096, is_writable=False)
    reading, writing = os.pipe()
    for fd in (reading, -1):
        with pytest.raises(InvalidInputError, match="not an arena"):
            attach_arena(fd, 4096, is_writable=False)
    for fd in (unsealed, reading, writing):
        os.close(fd)


def test_views_outlive_close(arena: Arena) -> None:
    view = arena.slice(Extent(0, 10))
    arena.close()
    arena.close()
    view[:] = 3
    assert view.sum() == 30
    assert len(arena.view) == 0


@pytest.mark.parametrize("extent", [Extent(-1, 2), Extent(0, -1), Extent(8 * mmap.PAGESIZE, 1), Extent(0, 1 << 60)])
def test_extents_outside_are_refused(arena: Arena, extent: Extent) -> None:
    with pytest.raises(InvalidInputError, match="does not lie"):
        arena.slice(extent)


@pytest.mark.parametrize("length", [1 << 50, 1 << 63, 1 << 100])
def test_more_than_the_machine_has_is_refused(length: int) -> None:
    with pytest.raises(CapacityError, match="make host_bytes smaller"):
        Arena(length, is_prefaulted=True)


def test_an_arena_of_nothing_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="1 byte or more"):
        Arena(0)


@pytest.mark.parametrize(
    ("call", "message"), [("os.posix_fallocate", "does not grant"), ("mmap.mmap", "no address space")]
)
def test_memory_that_is_not_granted_is_an_error_and_leaves_nothing_open(
    monkeypatch: pytest.MonkeyPatch, call: str, message: str
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOMEM, "refused")

    monkeypatch.setattr(call, refuse)
    with nothing_left_open(), pytest.raises(CapacityError, match=message):
        Arena(4096, is_prefaulted=True)


def test_mapping_memory_goes_with_the_last_view() -> None:
    before = _mapped_arenas()
    arena = Arena(mmap.PAGESIZE)
    view = attach_arena(arena.descriptor(), arena.bytes, is_writable=True)
    arena.close()
    np.copyto(view, np.uint8(9))
    assert _mapped_arenas() > before
    del view
    assert _mapped_arenas() == before


def _mapped_arenas() -> int:
    with open("/proc/self/maps") as maps:  # noqa: PTH123
        return maps.read().count("kvservice-arena")
