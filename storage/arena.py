"""The host arena: one sealed memfd that clients map too, and the allocator of its extents (state only, no I/O).

Payload moves only through np.copyto on the views given here.
"""

import fcntl
import mmap
import os
import threading
from collections.abc import Iterable, Iterator
from weakref import WeakValueDictionary

import numpy as np
from sortedcontainers import SortedDict, SortedList

from kvservice.model.cache import Extent
from kvservice.model.errors import CapacityError, InvalidInputError
from kvservice.storage.buffer import Bytes, round_up
from kvservice.storage.mapping import map_file

GRANULARITY_BYTES = 4096
"""A page and an O_DIRECT block: an extent can be read from and written to SSD in place."""
ARENA_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
PRIVATE_MODE = 0o600


class ExtentAllocator:
    """Which bytes of an arena are taken. Best fit, lowest offset first; free neighbours are joined at once. O(log n).

    Owned by one thread. Worst case: a record wastes less than one granule inside. Outside, no allocator that cannot
    move records is safe: to serve at most M live bytes in records of up to n granules, best fit may need nearly M * n
    bytes, first fit M * H(n) / ln 2 (Robson 1975 and 1977; Knuth, TAOCP 1, 2.5, exercises 42 and 43). Measured, records
    of 64 KiB to 16 MiB in 1 GiB: when an allocation fails, 98 % is in use (93 % at worst) if the oldest is evicted,
    89 % (70 %) if a random one is; first fit 98 and 87 %. Running out is no failure here: whoever gets None evicts and
    asks again, and since neighbours are joined at once, a stretch between two leased records is whole again at the
    latest when all in it has gone. Only leases, which end, can keep a hole small.
    """

    def __init__(self, capacity_bytes: int, granularity: int = GRANULARITY_BYTES) -> None:
        """``capacity_bytes`` is rounded down to the granularity."""
        if granularity < 1 or capacity_bytes < granularity:
            raise InvalidInputError(f"an arena of {capacity_bytes} bytes holds no granule of {granularity}")
        self.capacity_bytes = capacity_bytes // granularity * granularity
        self.granularity = granularity
        self.used_bytes = 0
        self._taken: dict[int, Extent] = {}
        self._length_at: SortedDict = SortedDict()
        self._by_length: SortedList = SortedList()
        self._add_free(0, self.capacity_bytes)

    @property
    def free_bytes(self) -> int:
        """Bytes not taken, in one piece or many."""
        return self.capacity_bytes - self.used_bytes

    @property
    def largest_free_bytes(self) -> int:
        """The largest length that ``allocate`` would now grant."""
        return self._by_length[-1][0] if self._by_length else 0

    def allocate(self, length: int) -> Extent | None:
        """An extent of ``length`` bytes on a granule, or None if no free stretch is long enough."""
        if length < 1:
            raise InvalidInputError(f"an extent has 1 byte or more, not {length}")
        taken = round_up(length, self.granularity)
        index = self._by_length.bisect_left((taken, 0))
        if index == len(self._by_length):
            return None
        free_length, offset = self._by_length[index]
        return self._take(Extent(offset, length), offset, free_length)

    def allocate_at(self, offset: int, length: int) -> Extent:
        """The extent of ``length`` bytes at exactly ``offset``, as a restart finds it.

        Raises InvalidInputError, and changes nothing, unless it starts on a granule and all of it is inside and free.
        """
        end = offset + round_up(length, self.granularity)
        if length < 1 or offset < 0 or offset % self.granularity or end > self.capacity_bytes:
            raise InvalidInputError(f"{length} bytes at {offset} are no extent of {self.capacity_bytes} bytes")
        index = self._length_at.bisect_right(offset) - 1
        start, free_length = self._length_at.peekitem(index) if index >= 0 else (0, 0)
        if end > start + free_length:
            raise InvalidInputError(f"{length} bytes at {offset}: all or part of them is taken")
        return self._take(Extent(offset, length), start, free_length)

    def allocate_all(self, extents: Iterable[Extent]) -> None:
        """Exactly these extents, as a restart finds them: all of them in one pass, O(n log n), or none.

        Takes a seventh of the time of one by one. Raises InvalidInputError, and changes nothing, unless
        each starts on a granule and all of it is inside and free.
        """
        given = list(extents)
        new = {extent.offset: extent for extent in given}
        taken = self._taken | new
        if len(taken) < len(self._taken) + len(given):
            raise InvalidInputError("two extents start at one place")
        free, end, used_bytes = list[tuple[int, int]](), 0, 0
        for offset in sorted(taken):
            length = taken[offset].length
            if offset < end or offset % self.granularity or length < 1:
                raise InvalidInputError(f"{length} bytes at {offset} are no extent, or part of them is taken")
            if offset > end:
                free.append((end, offset - end))
            end = offset + round_up(length, self.granularity)
            used_bytes += end - offset
        if end > self.capacity_bytes:
            raise InvalidInputError(f"extents up to {end} are not in {self.capacity_bytes} bytes")
        if end < self.capacity_bytes:
            free.append((end, self.capacity_bytes - end))
        self._taken, self.used_bytes = taken, used_bytes
        self._length_at = SortedDict(free)
        self._by_length = SortedList((length, offset) for offset, length in free)

    def free_stretches(self) -> Iterator[tuple[int, int]]:
        """(offset, length) of every free stretch, ascending. Do not change the allocator meanwhile."""
        yield from self._length_at.items()

    def holds(self, extent: Extent) -> bool:
        """Is this very extent allocated? Any thread may ask."""
        return self._taken.get(extent.offset) == extent

    def free(self, extent: Extent) -> None:
        """Give an extent back. Raises InvalidInputError, and changes nothing, if it is not allocated (any more)."""
        if not self.holds(extent):
            raise InvalidInputError(f"{extent} is not allocated; it was freed before or comes from elsewhere")
        del self._taken[extent.offset]
        length = round_up(extent.length, self.granularity)
        self.used_bytes -= length
        self._add_joined(extent.offset, length)

    def check(self) -> None:
        """Assert every invariant. O(n log n), for tests and for diagnosis."""
        taken = [(at, round_up(extent.length, self.granularity)) for at, extent in self._taken.items()]
        pieces = sorted([*((at, length, True) for at, length in taken), *self._free_pieces()])
        end, was_free = 0, False
        for at, length, is_taken in pieces:
            assert at == end, f"gap or overlap at {end}: {pieces}"
            assert length > 0, f"empty piece at {at}"
            assert is_taken or not was_free, f"free neighbours at {at} are not joined"
            end, was_free = at + length, not is_taken
        assert end == self.capacity_bytes, (end, self.capacity_bytes)
        assert self.used_bytes == sum(length for _, length in taken)
        assert list(self._by_length) == sorted((length, at) for at, length in self._length_at.items())

    def _free_pieces(self) -> list[tuple[int, int, bool]]:
        return [(at, length, False) for at, length in self._length_at.items()]

    def _take(self, extent: Extent, free_offset: int, free_length: int) -> Extent:
        """Take the extent out of the free stretch that it lies in."""
        end, free_end = extent.offset + round_up(extent.length, self.granularity), free_offset + free_length
        self._remove_free(free_offset, free_length)
        if extent.offset > free_offset:
            self._add_free(free_offset, extent.offset - free_offset)
        if free_end > end:
            self._add_free(end, free_end - end)
        self.used_bytes += end - extent.offset
        self._taken[extent.offset] = extent
        return extent

    def _add_joined(self, offset: int, length: int) -> None:
        end = offset + length
        after = self._length_at.get(end)
        if after is not None:
            self._remove_free(end, after)
            end += after
        index = self._length_at.bisect_left(offset) - 1
        if index >= 0:
            before, before_length = self._length_at.peekitem(index)
            if before + before_length == offset:
                self._remove_free(before, before_length)
                offset = before
        self._add_free(offset, end - offset)

    def _add_free(self, offset: int, length: int) -> None:
        self._length_at[offset] = length
        self._by_length.add((length, offset))

    def _remove_free(self, offset: int, length: int) -> None:
        del self._length_at[offset]
        self._by_length.remove((length, offset))


class Arena:
    """One memfd, one mapping. ``view`` is flat, writable uint8, page-aligned.

    The file can neither shrink nor grow, so no client can make another's access fault. Any thread may use the views;
    who may touch which extent is the catalog's matter. The memory goes when the last mapping, here or in a client,
    is gone.
    """

    def __init__(self, bytes: int, *, is_prefaulted: bool = False) -> None:  # noqa: A002  the design's word for sizes
        """``is_prefaulted``: take every page now, so that first writes do not pay for it.

        Measured for 1 GiB: 0.7-1.0 s at boot, then 0.03 s to fill; not prefaulted, the first fill takes 1.1-4.7 s.
        Raises CapacityError for more bytes than the machine has memory, or if the system does not grant them. A
        container's limit is not seen here: going past it ends the process, at boot if prefaulted.
        """
        if bytes < 1:
            raise InvalidInputError(f"an arena has 1 byte or more, not {bytes}")
        self.bytes = round_up(bytes, mmap.PAGESIZE)
        _check_machine_has(self.bytes)
        self._fd = _sealed_memory(self.bytes, is_prefaulted=is_prefaulted)
        try:
            self.view = map_file(self._fd, self.bytes, is_writable=True, is_prefaulted=is_prefaulted)
        except OSError as error:
            os.close(self._fd)
            raise CapacityError(f"no address space for an arena of {self.bytes} bytes: {error}") from error

    def descriptor(self) -> int:
        """The read-write descriptor. Stays the arena's; whoever sends it on must not close it."""
        assert self._fd >= 0, "the arena is closed"
        return self._fd

    def read_only_descriptor(self) -> int:
        """A new descriptor that cannot be mapped writable. The caller closes it.

        It guards against mistakes, not against malice: a process of the same user can open the file anew.
        """
        return os.open(f"/proc/self/fd/{self.descriptor()}", os.O_RDONLY | os.O_CLOEXEC)

    def slice(self, extent: Extent) -> Bytes:
        """The extent's bytes, writable, in place. Raises InvalidInputError if it does not lie inside."""
        if extent.offset < 0 or extent.length < 0 or extent.end > self.bytes:
            raise InvalidInputError(f"{extent} does not lie in an arena of {self.bytes} bytes")
        return self.view[extent.offset : extent.end]

    def offset_of(self, view: Bytes) -> int | None:
        """Where a view starts, if it is one of this arena's; None for other memory."""
        offset = int(view.ctypes.data - self.view.ctypes.data)
        return offset if 0 <= offset <= len(self.view) - len(view) and len(view) else None

    def close(self) -> None:
        """Give up descriptor and view. Views still held elsewhere stay valid until dropped. Safe to call twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self.view = np.empty(0, np.uint8)


def attach_arena(fd: int, bytes: int, *, is_writable: bool) -> Bytes:  # noqa: A002
    """Map an arena that another process handed over; read-only unless ``is_writable``.

    ``fd`` stays the caller's and may be closed right after; the mapping goes when the last view is dropped. Raises
    InvalidInputError if the file is not of ``bytes`` bytes, could still shrink (an access would then kill this
    process with SIGBUS), or may not be mapped so.
    """
    check_arena(fd, bytes)
    try:
        return map_file(fd, bytes, is_writable=is_writable)
    except (OSError, ValueError) as error:
        wanted = "writable" if is_writable else "read-only"
        raise InvalidInputError(f"descriptor {fd} cannot be mapped {wanted}: {error}") from error


class AttachedArenas:
    """Arenas of other processes, each mapped read-only once for all that hold it. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: WeakValueDictionary[tuple[int, int], Bytes] = WeakValueDictionary()

    def attach(self, fd: int, bytes: int) -> Bytes:  # noqa: A002
        """The arena's bytes, as ``attach_arena`` maps them; the mapping goes when nobody holds them. Raises as that."""
        check_arena(fd, bytes)
        found = os.fstat(fd)
        with self._lock:
            known = self._known.get((found.st_dev, found.st_ino))
            if known is None:
                known = self._known[found.st_dev, found.st_ino] = attach_arena(fd, bytes, is_writable=False)
        return known


def check_arena(fd: int, bytes: int) -> None:  # noqa: A002
    """Raise InvalidInputError unless this is a file of ``bytes`` bytes that can neither shrink nor grow."""
    try:
        found, seals = os.fstat(fd).st_size, fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise InvalidInputError(f"descriptor {fd} is not an arena: {error}") from error
    if found != bytes:
        raise InvalidInputError(f"descriptor {fd} is a file of {found} bytes, an arena of {bytes} was promised")
    if seals & ARENA_SEALS != ARENA_SEALS:
        raise InvalidInputError(f"descriptor {fd} is a file that could change its size; an arena is sealed")


def _check_machine_has(length: int) -> None:
    """Linux grants a memfd of any size and kills who fills it; so ask first."""
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE
    if length > memory_bytes:
        raise CapacityError(f"an arena of {length} bytes on a machine with {memory_bytes}; make host_bytes smaller")


def _sealed_memory(length: int, *, is_prefaulted: bool) -> int:
    fd = os.memfd_create("kvservice-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(fd, PRIVATE_MODE)  # a memfd is born 0777: any user could open it through /proc
        os.ftruncate(fd, length)
        if is_prefaulted:
            os.posix_fallocate(fd, 0, length)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, ARENA_SEALS | fcntl.F_SEAL_SEAL)
    except OSError as error:
        os.close(fd)
        raise CapacityError(f"the system does not grant {length} bytes of shared memory: {error}") from error
    return fd
