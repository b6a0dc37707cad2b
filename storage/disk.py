"""The only door to the file system: a folder, its files, and what the file system under it can do.

Payload moves by os.preadv and os.pwritev straight from and to the arrays given, with O_DIRECT where the file system has
it; both release the GIL. Every OSError leaves here as an error of ``kvservice.model.errors``.
"""

import ctypes
import errno
import fcntl
import logging
import mmap
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from kvservice.model.errors import ConfigError, DiskError, DiskFullError, InvalidInputError, KVServiceError
from kvservice.storage.buffer import Bytes

log = logging.getLogger(__name__)

BLOCK_BYTES = 4096  # what O_DIRECT moves: offsets, lengths and addresses of payload are multiples of it
SMALL_BYTES_MAX = 1 << 20  # a file of ``read_small`` and ``write_small``

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_ARRAYS_PER_CALL_MAX = 1024  # IOV_MAX of Linux
_FALLOCATE_TRIES_MAX = 100  # a signal ends fallocate(2) on tmpfs, and ctypes does not start it again
_PUNCH = 0x02 | 0x01  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE of linux/falloc.h
_UNSUPPORTED = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS}
_ADVICE = {
    errno.EACCES: "let the user of this process read and write there",
    errno.EDQUOT: "raise the quota of this user, or make ssd_bytes smaller",
    errno.EIO: "the device fails: see the kernel's log (dmesg), and replace it",
    errno.ENOENT: "make the folder above it; a file removed from outside is lost, start the service again",
    errno.ENOSPC: "free room on its file system, or make ssd_bytes smaller",
    errno.ENOTDIR: "name a folder, or remove the file that has its name",
    errno.EROFS: "the file system is read-only, often after an error: see the kernel's log (dmesg), and mount it anew",
}


@dataclass(frozen=True, slots=True)
class DiskFacts:
    """What a probe found the file system to do; ``why_not`` is the reason for each no, empty if there is none."""

    is_direct: bool
    is_preallocated: bool
    can_punch: bool
    why_not: str = ""


class File(Protocol):
    """A file of a size that changes only by ``resize``. Any thread may read and write, at once, in different places.

    Offsets and lengths are multiples of BLOCK_BYTES and lie inside the file, arrays are flat, contiguous uint8 of such
    lengths on such addresses: anything else is a bug of the caller (AssertionError). Calls block, release the GIL, hold
    on to no array, and raise DiskError, or DiskFullError where room is short. ``size_bytes``: as found when opened, or
    as made by ``resize``; holes included.
    """

    name: str
    size_bytes: int

    def read_into(self, offset: int, targets: Sequence[Bytes]) -> None:
        """Fill all targets, one behind the other, from ``offset`` on. If it raises, they hold anything."""

    def write_from(self, offset: int, sources: Sequence[Bytes]) -> None:
        """Write all sources, one behind the other, from ``offset`` on. If it raises, any part may have arrived."""

    def sync(self) -> None:
        """Return when the device holds all. If it raises, what the last good one did not cover may never arrive."""

    def punch(self, offset: int, length: int) -> None:
        """Give the bytes back to the file system; they read as zeros. DiskError where ``can_punch`` is False."""

    def next_data(self, offset: int) -> int | None:
        """First byte at or behind ``offset`` that may hold data, None if only holes follow."""

    def resize(self, size_bytes: int) -> None:
        """Shrink, or grow and take the room at once (``is_preallocated``), for good. An error leaves the old size."""

    def physical_bytes(self) -> int:
        """Bytes taken on the file system, preallocated ones included."""

    def close(self) -> None:
        """Give up the descriptor. No call may be under way. Safe to call twice."""


class Disk(Protocol):
    """A folder on a disk. Any thread, but one at a time for one name; errors as in File.

    A name is that of a file in the folder, without a slash: InvalidInputError otherwise. ``folder`` is absolute.
    """

    folder: Path
    facts: DiskFacts

    def open(self, name: str, size_bytes: int | None = None) -> File:
        """The file as it is; with ``size_bytes`` a new one, preallocated, all holes.

        DiskError if it is not there, or for a new one if it is. A new one is there for good, or, after an error, not.
        """

    def exists(self, name: str) -> bool:
        """Is there anything of this name?"""

    def remove(self, name: str) -> None:
        """Remove the file, for good when it returns. Fine if it is not there. Who has it open keeps it."""

    def read_small(self, name: str) -> bytes | None:
        """All bytes of a small file, None if there is none. DiskError for more than SMALL_BYTES_MAX."""

    def write_small(self, name: str, data: bytes) -> None:
        """Put ``data`` in the place of all that the file held, for good: after a crash it is the old or the new."""

    def free_bytes(self) -> int:
        """Bytes that an ordinary user may still take on the file system."""

    def lock(self, holder: str) -> None:
        """Keep others out until ``close`` or the end of this process. ConfigError, naming who holds it, if taken."""

    def close(self) -> None:
        """Give up folder and lock. Files stay open. Safe to call twice."""


class RealFile:
    """A file of RealDisk, which makes it and hands over ``fd``, with O_DIRECT if the facts say so. See File."""

    def __init__(self, fd: int, path: Path, facts: DiskFacts) -> None:
        self.name, self.size_bytes = path.name, os.fstat(fd).st_size
        self._fd, self._path, self._facts = fd, path, facts

    def read_into(self, offset: int, targets: Sequence[Bytes]) -> None:
        """See File."""
        self._move_all("read", os.preadv, offset, targets)

    def write_from(self, offset: int, sources: Sequence[Bytes]) -> None:
        """See File."""
        self._move_all("write", os.pwritev, offset, sources)

    def _move_all(self, verb: str, move: Callable[..., int], offset: int, arrays: Sequence[Bytes]) -> None:
        assert_blocks(self._path, self.size_bytes, offset, arrays)
        views = [array.data for array in arrays]
        while views:
            with translated(f"{verb} at offset {offset} of", self._path):
                count = move(self._fd, views[:_ARRAYS_PER_CALL_MAX], offset)
            moved = count // BLOCK_BYTES * BLOCK_BYTES  # O_DIRECT cannot go on inside a block
            if not moved:
                raise DiskError(
                    f"cannot {verb} at offset {offset} of {self._path}: it ended after {count} bytes. The file had "
                    f"{self.size_bytes} bytes; if something outside made it shorter, put it back or remove the folder"
                )
            offset += moved
            while views and moved >= len(views[0]):
                moved -= len(views.pop(0))
            views[:1] = [view[moved:] for view in views[:1]]

    def sync(self) -> None:
        """See File."""
        with translated("sync", self._path):
            os.fdatasync(self._fd)

    def punch(self, offset: int, length: int) -> None:
        """See File."""
        assert_stretch(self._path, self.size_bytes, offset, length)
        with translated(f"punch {length} bytes at offset {offset} of", self._path):
            _fallocate(self._fd, _PUNCH, offset, length)

    def next_data(self, offset: int) -> int | None:
        """See File."""
        assert 0 <= offset <= self.size_bytes, f"{self._path}: {offset} is not in {self.size_bytes} bytes"
        with translated(f"look for data at offset {offset} of", self._path):
            try:
                found = os.lseek(self._fd, offset, os.SEEK_DATA)
            except OSError as error:
                if error.errno == errno.ENXIO:
                    return None
                raise
        return max(offset, found // BLOCK_BYTES * BLOCK_BYTES)  # a file system may have smaller blocks

    def resize(self, size_bytes: int) -> None:
        """See File."""
        assert_stretch(self._path, size_bytes, 0, size_bytes)
        with translated(f"give {size_bytes} bytes to", self._path):
            _set_size(self._fd, self.size_bytes, size_bytes, is_preallocated=self._facts.is_preallocated)
            os.fsync(self._fd)
        self.size_bytes = size_bytes

    def physical_bytes(self) -> int:
        """See File."""
        return os.fstat(self._fd).st_blocks * 512

    def close(self) -> None:
        """See File."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


class RealDisk:
    """A folder of a mounted file system, made with mode 0700 if only it is missing. See Disk.

    Making it probes what the file system can do, and raises ConfigError if the folder cannot be made or written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self._lock_fd = folder.absolute(), -1
        with translated("keep the SSD tier in", self.folder, ConfigError), ExitStack() as on_error:
            with suppress(FileExistsError):
                self.folder.mkdir(0o700)
            self._folder_fd = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            on_error.callback(self.close)
            self.facts = self._probe()
            on_error.pop_all()
        level = logging.WARNING if self.facts.why_not else logging.INFO
        log.log(level, "%s: %s", self.folder, self.facts.why_not or "O_DIRECT, preallocation and hole punching work")

    def open(self, name: str, size_bytes: int | None = None) -> RealFile:
        """See Disk."""
        path, flags = path_of(self.folder, name), os.O_RDWR | (os.O_DIRECT if self.facts.is_direct else 0)
        if size_bytes is None:
            with translated("open", path):
                return RealFile(self._open(name, flags), path, self.facts)
        assert_stretch(path, size_bytes, 0, size_bytes)
        with translated(f"give {size_bytes} bytes to", path), ExitStack() as on_error:
            fd = self._open(name, flags | os.O_CREAT | os.O_EXCL)
            on_error.callback(os.unlink, name, dir_fd=self._folder_fd)
            on_error.callback(os.close, fd)
            _set_size(fd, 0, size_bytes, is_preallocated=self.facts.is_preallocated)
            os.fsync(fd)
            os.fsync(self._folder_fd)
            on_error.pop_all()
        return RealFile(fd, path, self.facts)

    def exists(self, name: str) -> bool:
        """See Disk."""
        with translated("look for", path_of(self.folder, name)), suppress(FileNotFoundError):
            os.stat(name, dir_fd=self._folder_fd, follow_symlinks=False)
            return True
        return False

    def remove(self, name: str) -> None:
        """See Disk."""
        with translated("remove", path_of(self.folder, name)):
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self._folder_fd)
            os.fsync(self._folder_fd)

    def read_small(self, name: str) -> bytes | None:
        """See Disk."""
        path = path_of(self.folder, name)
        with translated("read", path), suppress(FileNotFoundError):
            with os.fdopen(self._open(name, os.O_RDONLY), "rb") as file:
                data = file.read(SMALL_BYTES_MAX + 1)
            if len(data) <= SMALL_BYTES_MAX:
                return data
            raise DiskError(f"{path} has more than {SMALL_BYTES_MAX} bytes; it is not of this program, move it away")
        return None

    def write_small(self, name: str, data: bytes) -> None:
        """See Disk. Uses a file of the name with ``.new`` behind it."""
        path, new = path_of(self.folder, name), f"{name}.new"
        assert len(data) <= SMALL_BYTES_MAX, f"{path}: {len(data)} bytes for a small file"
        with translated("write", path), ExitStack() as on_error:
            fd = self._open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            on_error.callback(os.unlink, new, dir_fd=self._folder_fd)
            with os.fdopen(fd, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(fd)
            os.rename(new, name, src_dir_fd=self._folder_fd, dst_dir_fd=self._folder_fd)
            on_error.pop_all()
            os.fsync(self._folder_fd)

    def free_bytes(self) -> int:
        """See Disk."""
        return _free_bytes(self._folder_fd)

    def lock(self, holder: str) -> None:
        """See Disk. The file ``lock`` says process and ``holder``; it stays, only the flock(2) on it counts."""
        assert self._lock_fd < 0, f"{self.folder} is locked by this very object"
        with translated("lock", self.folder), ExitStack() as on_error:
            fd = self._open("lock", os.O_RDWR | os.O_CREAT)
            on_error.callback(os.close, fd)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise taken_error(self.folder, os.pread(fd, BLOCK_BYTES, 0).decode(errors="replace")) from error
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()} {holder}\n".encode(), 0)
            on_error.pop_all()
        self._lock_fd = fd

    def close(self) -> None:
        """See Disk."""
        if self._lock_fd >= 0:
            fcntl.flock(self._lock_fd, fcntl.LOCK_UN)  # a forked child may hold a copy of the descriptor
        for fd in (self._lock_fd, self._folder_fd):
            if fd >= 0:
                os.close(fd)
        self._lock_fd = self._folder_fd = -1

    def _open(self, name: str, flags: int) -> int:
        return os.open(name, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600, dir_fd=self._folder_fd)

    def _probe(self) -> DiskFacts:
        name = f"probe-{os.getpid()}-{secrets.token_hex(4)}"  # the lock is not held yet: others may probe too
        with ExitStack() as stack:
            fd = self._open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            stack.callback(os.close, fd)
            os.unlink(name, dir_fd=self._folder_fd)
            no_room = _why_not("preallocation", lambda: _fallocate(fd, 0, 0, 2 * BLOCK_BYTES))
            no_punch = _why_not("hole punching", lambda: _fallocate(fd, _PUNCH, BLOCK_BYTES, BLOCK_BYTES))
            no_direct = _why_not("O_DIRECT", lambda: _try_direct(fd))
        why_not = "; ".join(filter(None, (no_direct, no_room, no_punch)))
        return DiskFacts(not no_direct, not no_room, not no_punch, why_not)


def block_buffer(length: int) -> Bytes:
    """``length`` zero bytes on a page boundary: what ``read_into`` and ``write_from`` take. Gone with its last view."""
    return np.frombuffer(mmap.mmap(-1, length), np.uint8)


def path_of(folder: Path, name: str) -> Path:
    """Raise InvalidInputError unless ``name`` is that of a file in a folder, whatever the folder."""
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise InvalidInputError(f"{name!r} does not name a file in {folder}; a name has no slash and is not . or ..")
    return folder / name


def assert_blocks(path: Path, size_bytes: int, offset: int, arrays: Sequence[Bytes]) -> None:
    """Assert what File asks of the offset and the arrays of a read or a write."""
    assert_stretch(path, size_bytes, offset, sum(map(len, arrays)))
    for array in arrays:
        assert array.dtype == np.uint8, f"{path}: {array.dtype}, not bytes"
        assert array.ndim == array.flags.c_contiguous == 1, f"{path}: an array that is not flat and contiguous"
        assert len(array) % BLOCK_BYTES == 0, f"{path}: an array of {len(array)} bytes, not blocks of {BLOCK_BYTES}"
        assert array.ctypes.data % BLOCK_BYTES == 0, f"{path}: an array not on a {BLOCK_BYTES}-byte boundary"


def assert_stretch(path: Path, size_bytes: int, offset: int, length: int) -> None:
    """Assert that a stretch is made of blocks, not empty, and lies in the file."""
    assert offset % BLOCK_BYTES == 0, f"{path}: offset {offset} is not a multiple of {BLOCK_BYTES}"
    assert length % BLOCK_BYTES == 0, f"{path}: length {length} is not a multiple of {BLOCK_BYTES}"
    assert length > 0, f"{path}: nothing to do at offset {offset}"
    assert 0 <= offset <= size_bytes - length, f"{path}: {length} bytes at {offset} are not in {size_bytes} bytes"


@contextmanager
def translated(action: str, path: Path, kind: type[KVServiceError] | None = None) -> Iterator[None]:
    """Turn an OSError into an error of ours: what could not be done, why, what to do. ``kind``: not one of the disk."""
    try:
        yield
    except OSError as error:
        number = error.errno or 0
        kind = kind or (DiskFullError if number in (errno.ENOSPC, errno.EDQUOT) else DiskError)
        advice = _ADVICE.get(number, "see the kernel's log (dmesg)")
        raise kind(f"cannot {action} {path}: {os.strerror(number)} (errno {number}); {advice}") from error


def taken_error(folder: Path, content: str) -> ConfigError:
    """The error of ``lock`` for a folder whose lock file holds ``content``."""
    pid, _, holder = content.strip().partition(" ")
    who = f"{holder or 'another program'} (process {pid or 'unknown'})"
    return ConfigError(f"{folder} is in use by {who}; stop it, or give this service a folder of its own")


def _why_not(what: str, trial: Callable[[], None]) -> str:
    """Empty if the trial succeeds, a reason if the file system does not have it. Other errors are raised."""
    try:
        trial()
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        return f"no {what} ({os.strerror(error.errno)})"
    return ""


def _try_direct(fd: int) -> None:
    fcntl.fcntl(fd, fcntl.F_SETFL, os.O_DIRECT)
    written, read = block_buffer(BLOCK_BYTES), block_buffer(BLOCK_BYTES)
    written[:] = np.arange(BLOCK_BYTES) % 251
    os.pwritev(fd, [written.data], 0)
    os.preadv(fd, [read.data], 0)
    if not np.array_equal(read, written):
        raise OSError(errno.EIO, "other bytes came back")


def _free_bytes(fd: int) -> int:
    found = os.fstatvfs(fd)
    return found.f_bavail * found.f_frsize


def _set_size(fd: int, before: int, after: int, *, is_preallocated: bool) -> None:
    """OSError, and the size before, if there is no room; also where the room is not taken yet."""
    if after - before > _free_bytes(fd):
        raise OSError(errno.ENOSPC, "")
    try:
        if after > before and is_preallocated:
            _fallocate(fd, 0, before, after - before)
        else:
            os.ftruncate(fd, after)
    except OSError:
        os.ftruncate(fd, before)  # fallocate grows a file step by step until it fails
        raise


def _fallocate(fd: int, mode: int, offset: int, length: int) -> None:
    """fallocate(2). Not os.posix_fallocate: it cannot punch, and writes every block where preallocation is missing."""
    for _ in range(_FALLOCATE_TRIES_MAX):
        if _libc.fallocate(fd, mode, offset, length) == 0:
            return
        if ctypes.get_errno() != errno.EINTR:
            break
    raise OSError(ctypes.get_errno(), "fallocate")
