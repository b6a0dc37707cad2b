"""Maps the files of arenas, and makes pages ready that are about to be written: one call for many, not a fault each.

The first write to a page through a mapping costs a fault of 1-2 us, also where another process has filled the page
already: 0.25-0.5 s/GB. MADV_POPULATE_WRITE does the same for 0.07 s/GB; where pages must be found and zeroed first for
0.6 instead of 0.75. Nothing is done for reads: one fault maps 16 pages that are there, and all of them cost 0.06 s/GB
either way. Only what is about to be written is touched: no arena takes a page more.
"""

import ctypes
import errno
import mmap
import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvservice.model.errors import CapacityError
from kvservice.storage.buffer import Bytes, round_up

STEP_BYTES = 2 << 20
"""Made ready in one call, about 1 ms if all of it is new: who maps or unmaps memory meanwhile waits that long."""

Advise = Callable[[int, int], int]
"""(address, bytes) of pages to make ready; 0, or the errno of what went wrong."""

_MADV_POPULATE_WRITE = 23  # linux/mman.h, from Linux 5.14 on
_UNKNOWN = {errno.EINVAL, errno.ENOSYS, errno.EPERM}  # an older kernel, or a sandbox
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_char_in, _address_of = ctypes.c_char.from_buffer, ctypes.addressof


def _advise(address: int, length: int) -> int:
    """Lets go of the GIL, which ``mmap.madvise`` does not."""
    return ctypes.get_errno() if _libc.madvise(address, length, _MADV_POPULATE_WRITE) else 0


@dataclass(frozen=True, slots=True, eq=False)
class _Mapping:
    """Addresses [start, end), a byte for each page: is it ready? ``view`` is dead once they may be another's."""

    start: int
    end: int
    is_ready: bytearray
    view: "weakref.ref[Bytes]"


class PageTables:
    """Which pages of this process's writable mappings are ready to be written. Any thread.

    A page counts when the kernel is through with it: nobody skips one that another thread still waits for, and of two
    that ask for the same one finds it done. A forked child believes what it inherits and takes faults where that is
    wrong, for Linux gives it no page tables of shared memory.
    """

    def __init__(self, advise: Advise = _advise) -> None:
        self._advise = advise
        self._lock = threading.Lock()
        self._mappings: tuple[_Mapping, ...] = ()
        self._is_refused = False

    def add(self, view: Bytes) -> None:
        """Know a whole mapping, writable, from now until its last view is dropped."""
        pages = round_up(len(view), mmap.PAGESIZE) // mmap.PAGESIZE
        start = view.ctypes.data
        mapping = _Mapping(start, start + pages * mmap.PAGESIZE, bytearray(pages), weakref.ref(view))
        with self._lock:
            self._mappings = (*(one for one in self._mappings if one.view() is not None), mapping)

    def prefault(self, target: Bytes | memoryview) -> None:
        """See ``prefault`` of this module."""
        if self._is_refused or not target.nbytes:
            return
        address = _address_of(_char_in(target))  # type: ignore[arg-type]  # 0.2 us; ndarray.ctypes.data takes 0.9
        for mapping in self._mappings:
            if mapping.start <= address < mapping.end:
                start = address - mapping.start
                last = -(-(start + target.nbytes) // mmap.PAGESIZE)
                first = mapping.is_ready.find(0, start // mmap.PAGESIZE, last)
                if first >= 0 and mapping.view() is not None:
                    self._make_ready(mapping, first, last)
                return

    def _make_ready(self, mapping: _Mapping, first: int, last: int) -> None:
        """Pages from ``first`` on, which is not ready, to ``last``."""
        is_ready = mapping.is_ready
        while first >= 0:
            behind = min(first + STEP_BYTES // mmap.PAGESIZE, last)
            length = (behind - first) * mmap.PAGESIZE
            code = self._advise(mapping.start + first * mmap.PAGESIZE, length)
            if code in _UNKNOWN:
                self._is_refused = True
                return
            if code:
                raise CapacityError(
                    f"the system has no memory for {length} bytes that were to be written: {os.strerror(code)}; the "
                    "container's limit or the machine's memory is too small for the arena: raise it, or make "
                    "host_bytes smaller"
                )
            is_ready[first:behind] = b"\1" * (behind - first)
            first = is_ready.find(0, behind, last)


_PAGE_TABLES = PageTables()


def map_file(fd: int, length: int, *, is_writable: bool, is_prefaulted: bool = False) -> Bytes:
    """Map all of a file; ``is_prefaulted`` makes every page ready now. Raises OSError, ValueError."""
    access = mmap.PROT_READ | (mmap.PROT_WRITE if is_writable else 0)
    flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if is_prefaulted else 0)
    view: Bytes = np.frombuffer(mmap.mmap(fd, length, flags, access), np.uint8)
    if is_writable and not is_prefaulted:
        _PAGE_TABLES.add(view)
    return view


def prefault(target: Bytes | memoryview) -> None:
    """Make ready all of ``target``, writable and contiguous, which is about to be written: before bulk, on any thread
    that may block. Each page once, without the GIL; a record that is ready costs 0.6 us. Other memory than ``map_file``
    mapped is left alone, and so is all where the kernel does not know how.

    Raises CapacityError where writing would have ended this process: the system has no page to give.
    """
    _PAGE_TABLES.prefault(target)
