"""A disk in memory that misbehaves on a seed: the naive form of ``storage.disk`` (no faults) and its test double.

Its folder is named after the seed, so every message that names a file prints it.
"""

import errno
import os
import random
import threading
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvservice.model.errors import DiskError
from kvservice.storage.buffer import Bytes, round_up
from kvservice.storage.disk import (
    BLOCK_BYTES,
    SMALL_BYTES_MAX,
    DiskFacts,
    assert_blocks,
    assert_stretch,
    path_of,
    taken_error,
    translated,
)

SECTOR_BYTES = 512
CAPACITY_BYTES = 1 << 40
UNSYNCED_BLOCKS_MAX = 1 << 14  # 64 MiB; behind that the oldest are written back unasked, as a kernel does
FACTS = DiskFacts(is_direct=True, is_preallocated=True, can_punch=True)
POISON = 0xCB

BlockMask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Faults:
    """How likely each fault is for one operation; what strikes is counted by these names.

    Of those that decide what becomes of a write, the first in this order strikes. Small files know ``read_error``,
    ``flipped_read``, ``write_error`` and ``is_full`` only.
    """

    write_error: float = 0.0  # EIO, nothing arrives
    is_full: float = 0.0  # ENOSPC, some first blocks arrive; also when a file is made or grows
    short_write: float = 0.0  # DiskError, some first blocks arrive
    torn_write: float = 0.0  # EIO, some first 512-byte sectors arrive
    silent_torn_write: float = 0.0  # the same, and no error
    lost_write: float = 0.0  # no error, nothing arrives
    misdirected_write: float = 0.0  # no error, all arrives in another place of the file
    flipped_write: float = 0.0  # one bit of what arrives is stored wrong, for good
    read_error: float = 0.0  # EIO
    short_read: float = 0.0  # DiskError, some first blocks are read
    flipped_read: float = 0.0  # one bit of what is read is wrong, this time
    sync_error: float = 0.0  # EIO, and some of what was not synced will never be, whatever a later sync says


FAULT_NAMES = tuple(field.name for field in fields(Faults))
NO_FAULTS = Faults()


def all_faults(probability: float) -> Faults:
    """Every fault equally likely."""
    return Faults(**dict.fromkeys(FAULT_NAMES, probability))


@dataclass(slots=True)
class _Change:
    """One write or punch that no sync has covered: what its blocks were before, and which of them may be undone."""

    first: int
    before: Bytes | None  # None: zeros
    had_data: BlockMask
    was_taken: BlockMask
    may_undo: BlockMask
    is_doomed: bool = False


class _Content:
    """What a file holds, as a reader sees it, and how to undo what is not synced."""

    def __init__(self, size_bytes: int) -> None:
        self.bytes: Bytes = np.zeros(size_bytes, np.uint8)
        self.has_data: BlockMask = np.zeros(size_bytes // BLOCK_BYTES, np.bool_)
        self.is_taken: BlockMask = np.ones(size_bytes // BLOCK_BYTES, np.bool_)
        self.taken_blocks = len(self.is_taken)
        self.unsynced: deque[_Change] = deque()
        self._unsynced_blocks = 0

    def missing_bytes(self, offset: int, length: int) -> int:
        """Bytes that a write there must first take from the file system."""
        first, end = _blocks(offset, length)
        return (end - first - int(np.count_nonzero(self.is_taken[first:end]))) * BLOCK_BYTES

    def write(self, offset: int, sources: Sequence[Bytes], length: int) -> None:
        """Let the first ``length`` bytes arrive."""
        self._change(offset, length, is_data=True)
        for source in sources:
            part = source[:length]
            np.copyto(self.bytes[offset : offset + len(part)], part)
            offset, length = offset + len(part), length - len(part)

    def punch(self, offset: int, length: int) -> None:
        self._change(offset, length, is_data=False)
        self.bytes[offset : offset + length] = 0

    def next_data(self, offset: int) -> int | None:
        ahead = self.has_data[offset // BLOCK_BYTES :]
        if not ahead.any():
            return None
        return max(offset, (offset // BLOCK_BYTES + int(ahead.argmax())) * BLOCK_BYTES)

    def resize(self, size_bytes: int) -> None:
        grown = _Content(size_bytes)
        kept = min(len(self.has_data), len(grown.has_data))
        grown.has_data[:kept], grown.is_taken[:kept] = self.has_data[:kept], self.is_taken[:kept]
        data = np.flatnonzero(grown.has_data)
        grown.bytes.reshape(-1, BLOCK_BYTES)[data] = self.bytes.reshape(-1, BLOCK_BYTES)[data]
        self.bytes, self.has_data, self.is_taken = grown.bytes, grown.has_data, grown.is_taken
        self.taken_blocks = int(np.count_nonzero(self.is_taken))
        self._forget_unsynced()

    def sync(self) -> None:
        """All is durable now, but what is doomed and was not written again since."""
        doomed: list[_Change] = []
        durable = np.zeros(len(self.has_data), np.bool_)
        for change in reversed(self.unsynced):
            span = slice(change.first, change.first + len(change.may_undo))
            if not change.is_doomed:
                durable[span] = True
                continue
            change.may_undo &= ~durable[span]
            if change.may_undo.any():
                doomed.append(change)
        self._forget_unsynced()
        for change in reversed(doomed):
            self._remember(change)

    def fail_sync(self, chance: random.Random) -> None:
        """Half of what is not durable never will be."""
        for change in self.unsynced:
            change.is_doomed |= chance.random() < 0.5

    def lose_power(self, chance: random.Random) -> None:
        """Take each block back over none, some or all of its unsynced changes, the latest first."""
        limit = chance.randrange(257)  # none to all of 256
        is_kept = np.zeros(len(self.has_data), np.bool_)
        for change in reversed(self.unsynced):
            count = len(change.may_undo)
            span = slice(change.first, change.first + count)
            drawn = np.frombuffer(chance.randbytes(count), np.uint8) < limit
            undone = (drawn | change.is_doomed) & change.may_undo & ~is_kept[span]
            is_kept[span] |= ~undone
            self._undo(change, np.flatnonzero(undone))
        self.taken_blocks = int(np.count_nonzero(self.is_taken))
        self._forget_unsynced()

    def _undo(self, change: _Change, blocks: npt.NDArray[np.intp]) -> None:
        at = change.first + blocks
        before = 0 if change.before is None else change.before.reshape(-1, BLOCK_BYTES)[blocks]
        self.bytes.reshape(-1, BLOCK_BYTES)[at] = before
        self.has_data[at], self.is_taken[at] = change.had_data[blocks], change.was_taken[blocks]

    def _change(self, offset: int, length: int, *, is_data: bool) -> None:
        first, end = _blocks(offset, length)
        had_data, was_taken = self.has_data[first:end].copy(), self.is_taken[first:end].copy()
        before = self.bytes[first * BLOCK_BYTES : end * BLOCK_BYTES].copy() if had_data.any() else None
        self._remember(_Change(first, before, had_data, was_taken, np.ones(end - first, np.bool_)))
        self.has_data[first:end] = self.is_taken[first:end] = is_data
        self.taken_blocks += (end - first if is_data else 0) - int(np.count_nonzero(was_taken))

    def _remember(self, change: _Change) -> None:
        self.unsynced.append(change)
        self._unsynced_blocks += len(change.may_undo)
        while self._unsynced_blocks > UNSYNCED_BLOCKS_MAX:
            self._unsynced_blocks -= len(self.unsynced.popleft().may_undo)

    def _forget_unsynced(self) -> None:
        self.unsynced.clear()
        self._unsynced_blocks = 0


class _Medium:
    """What outlives a process: files, and who uses them. ``boots`` counts those that died."""

    def __init__(self, seed: int, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.files: dict[str, _Content] = {}
        self.small: dict[str, bytes] = {}
        self.chance = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.boots = 0
        self.locker: FaultyDisk | None = None
        self.turn = threading.RLock()

    def free_bytes(self) -> int:
        taken = sum(content.taken_blocks for content in self.files.values()) * BLOCK_BYTES
        small = sum(round_up(len(data), BLOCK_BYTES) for data in self.small.values())
        return max(0, self.capacity_bytes - taken - small)

    def require_free(self, length: int) -> None:
        if length > self.free_bytes():
            raise OSError(errno.ENOSPC, "full")


class FaultyDisk:
    """See Disk and Faults. One operation at a time; with one thread, a seed always gives the same run.

    ``faults`` may be set anew at any time. ``counts``: faults that struck, by name. ``open_files``: not closed yet.
    """

    def __init__(self, seed: int = 0, faults: Faults = NO_FAULTS, capacity_bytes: int = CAPACITY_BYTES) -> None:
        self.seed, self.faults = seed, faults
        self.folder, self.facts = Path(f"/faulty-disk-of-seed-{seed}"), FACTS
        self.open_files: set[FaultyFile] = set()
        self._medium, self._boot, self._is_closed = _Medium(seed, capacity_bytes), 0, False

    def __str__(self) -> str:
        return f"FaultyDisk(seed={self.seed}) after {dict(self._medium.counts)}"

    @property
    def counts(self) -> Counter[str]:
        return self._medium.counts

    def crash(self) -> "FaultyDisk":
        """Power loss: a random part of what is not synced is gone. What the next boot finds; this disk is dead."""
        with self.alive():
            for content in self._medium.files.values():
                content.lose_power(self._medium.chance)
            return self.kill()

    def kill(self) -> "FaultyDisk":
        """The end of the process: all that was written is still there, but not synced. This disk is dead."""
        with self.alive():
            self._medium.boots += 1
            self._medium.locker = None
            return self.beside()

    def beside(self) -> "FaultyDisk":
        """The same folder as another process has it open."""
        other = FaultyDisk(self.seed, self.faults)
        other._medium, other._boot = self._medium, self._medium.boots
        return other

    def raw(self, name: str) -> Bytes:
        """The bytes of a file in place, to look at without faults or to damage. Until the next ``resize``."""
        return self._medium.files[name].bytes

    def open(self, name: str, size_bytes: int | None = None) -> "FaultyFile":
        path = path_of(self.folder, name)
        with self._turn():
            if size_bytes is not None:
                self._make(path, size_bytes)
            with translated("open", path):
                if name not in self._medium.files:
                    raise OSError(errno.ENOENT, name)
            file = FaultyFile(self, path, self._medium.files[name])
            self.open_files.add(file)
            return file

    def _make(self, path: Path, size_bytes: int) -> None:
        assert_stretch(path, size_bytes, 0, size_bytes)
        with translated(f"give {size_bytes} bytes to", path):
            if self.exists(path.name):
                raise OSError(errno.EEXIST, path.name)
            self.raise_if("is_full", errno.ENOSPC)
            self._medium.require_free(size_bytes)
            self._medium.files[path.name] = _Content(size_bytes)

    def exists(self, name: str) -> bool:
        path_of(self.folder, name)
        with self._turn():
            return name in self._medium.files or name in self._medium.small

    def remove(self, name: str) -> None:
        path_of(self.folder, name)
        with self._turn():
            self._medium.files.pop(name, None)
            self._medium.small.pop(name, None)

    def read_small(self, name: str) -> bytes | None:
        path = path_of(self.folder, name)
        with self._turn(), translated("read", path):
            if not self.exists(name):
                return None
            self.raise_if("read_error", errno.EIO)
            if name in self._medium.files:
                raise DiskError(f"{path} is not small")
            data = bytearray(self._medium.small[name])
            if data and self.strikes("flipped_read"):
                _flip(np.frombuffer(data, np.uint8), self._medium.chance)
            return bytes(data)

    def write_small(self, name: str, data: bytes) -> None:
        path = path_of(self.folder, name)
        assert len(data) <= SMALL_BYTES_MAX, f"{path}: {len(data)} bytes for a small file"
        with self._turn(), translated("write", path):
            self.raise_if("write_error", errno.EIO)
            self.raise_if("is_full", errno.ENOSPC)
            self._medium.require_free(len(data))  # the old one goes only when the new one is there
            self._medium.files.pop(name, None)
            self._medium.small[name] = data

    def free_bytes(self) -> int:
        with self._turn():
            return self._medium.free_bytes()

    def lock(self, holder: str) -> None:
        with self._turn():
            assert self._medium.locker is not self, f"{self.folder} is locked by this very object"
            if self._medium.locker:
                raise taken_error(self.folder, self._medium.small["lock"].decode())
            self._medium.small["lock"] = f"{os.getpid()} {holder}\n".encode()
            self._medium.locker = self

    def close(self) -> None:
        with self._medium.turn:
            if self._medium.locker is self:
                self._medium.locker = None
            self._is_closed = True

    @contextmanager
    def _turn(self) -> Iterator[None]:
        assert not self._is_closed, f"{self.folder} is closed"
        with self.alive():
            yield

    @contextmanager
    def alive(self) -> Iterator[_Medium]:
        """The medium, for as long as no other thread has it. Dead processes do nothing."""
        with self._medium.turn:
            assert self._boot == self._medium.boots, f"{self.folder}: this process has died; go on with its heir"
            yield self._medium

    def strikes(self, fault: str) -> bool:
        """Does this fault happen now?"""
        probability: float = getattr(self.faults, fault)
        if not probability or self._medium.chance.random() >= probability:
            return False
        self._medium.counts[fault] += 1
        return True

    def raise_if(self, fault: str, number: int) -> None:
        """The OSError of this number, if the fault happens now."""
        if self.strikes(fault):
            raise OSError(number, fault)


class FaultyFile:
    """A file of FaultyDisk. See File."""

    def __init__(self, disk: FaultyDisk, path: Path, content: _Content) -> None:
        self.name, self.size_bytes = path.name, len(content.bytes)
        self._disk, self._path, self._content = disk, path, content

    def read_into(self, offset: int, targets: Sequence[Bytes]) -> None:
        assert_blocks(self._path, self.size_bytes, offset, targets)
        total = sum(map(len, targets))
        with self._turn(f"read at offset {offset} of") as medium:
            readable = max(0, min(total, len(self._content.bytes) - offset))
            try:
                self._disk.raise_if("read_error", errno.EIO)
                if self._disk.strikes("short_read"):
                    readable = _part(readable, BLOCK_BYTES, medium.chance)
            except OSError:
                readable = 0
                raise
            finally:
                _fill(targets, self._content.bytes[offset : offset + readable])
            if readable < total:
                raise DiskError(f"cannot read at offset {offset} of {self._path}: it ended after {readable} bytes")
            if self._disk.strikes("flipped_read"):
                _flip(medium.chance.choice([target for target in targets if len(target)]), medium.chance)

    def write_from(self, offset: int, sources: Sequence[Bytes]) -> None:
        assert_blocks(self._path, self.size_bytes, offset, sources)
        total = sum(map(len, sources))
        assert offset + total <= len(self._content.bytes), f"{self._path} was shrunk through another File"
        with self._turn(f"write at offset {offset} of") as medium:
            place, length, error = self._fate(offset, total, medium.chance)
            medium.require_free(self._content.missing_bytes(place, length))
            if length:
                self._content.write(place, sources, length)
                if self._disk.strikes("flipped_write"):
                    _flip(self._content.bytes[place : place + length], medium.chance)
            if error:
                raise error

    def _fate(self, offset: int, total: int, chance: random.Random) -> tuple[int, int, Exception | None]:
        """Of a write: where it lands, how many bytes of it, and what the writer is told."""
        strikes = self._disk.strikes
        if strikes("write_error"):
            return offset, 0, OSError(errno.EIO, "write_error")
        if strikes("is_full"):
            return offset, _part(total, BLOCK_BYTES, chance), OSError(errno.ENOSPC, "is_full")
        if strikes("short_write"):
            length = _part(total, BLOCK_BYTES, chance)
            reason = f"cannot write at offset {offset} of {self._path}: it ended after {length} bytes"
            return offset, length, DiskError(reason)
        if strikes("torn_write"):
            return offset, _part(total, SECTOR_BYTES, chance), OSError(errno.EIO, "torn_write")
        if strikes("silent_torn_write"):
            return offset, _part(total, SECTOR_BYTES, chance), None
        if strikes("lost_write"):
            return offset, 0, None
        other_places = (len(self._content.bytes) - total) // BLOCK_BYTES
        if other_places and strikes("misdirected_write"):
            place = chance.randrange(other_places) * BLOCK_BYTES
            return place + BLOCK_BYTES * (place >= offset), total, None
        return offset, total, None

    def sync(self) -> None:
        with self._turn("sync") as medium:
            if self._disk.strikes("sync_error"):
                self._content.fail_sync(medium.chance)
                raise OSError(errno.EIO, "sync_error")
            self._content.sync()

    def punch(self, offset: int, length: int) -> None:
        assert_stretch(self._path, self.size_bytes, offset, length)
        with self._turn("punch"):
            self._content.punch(offset, length)

    def next_data(self, offset: int) -> int | None:
        assert 0 <= offset <= self.size_bytes, f"{self._path}: {offset} is not in {self.size_bytes} bytes"
        with self._turn("look for data of"):
            return self._content.next_data(offset)

    def resize(self, size_bytes: int) -> None:
        assert_stretch(self._path, size_bytes, 0, size_bytes)
        with self._turn(f"give {size_bytes} bytes to") as medium:
            grown_bytes = size_bytes - len(self._content.bytes)
            if grown_bytes > 0:
                self._disk.raise_if("is_full", errno.ENOSPC)
                medium.require_free(grown_bytes)
            self._content.resize(size_bytes)
            self.size_bytes = size_bytes

    def physical_bytes(self) -> int:
        with self._turn("look at"):
            return self._content.taken_blocks * BLOCK_BYTES

    def close(self) -> None:
        self._disk.open_files.discard(self)

    @contextmanager
    def _turn(self, action: str) -> Iterator[_Medium]:
        assert self in self._disk.open_files, f"{self._path} is closed"
        with self._disk.alive() as medium, translated(action, self._path):
            yield medium


def _blocks(offset: int, length: int) -> tuple[int, int]:
    """The first block of a stretch and the one behind its last."""
    return offset // BLOCK_BYTES, -(-(offset + length) // BLOCK_BYTES)


def _part(total: int, step: int, chance: random.Random) -> int:
    """Some steps of ``total``, not all of them."""
    return chance.randrange(max(1, total // step)) * step


def _fill(targets: Sequence[Bytes], source: Bytes) -> None:
    """What has no source is poisoned: nobody may look at it."""
    for target in targets:
        part, source = source[: len(target)], source[len(target) :]
        np.copyto(target[: len(part)], part)
        target[len(part) :] = POISON


def _flip(data: Bytes, chance: random.Random) -> None:
    bit = chance.randrange(len(data) * 8)
    data[bit // 8] ^= 1 << bit % 8
