"""Counts what writing costs a thread in page faults: those that interrupt it, not those made good in one call ahead."""

import resource
from collections.abc import Callable

import numpy as np
import pytest

from kvservice.storage import mapping
from kvservice.storage.arena import Arena
from kvservice.storage.mapping import PageTables

PAGE = 4096

is_known = mapping._advise(int(Arena(PAGE).view.ctypes.data), 0) == 0
needs_advice = pytest.mark.skipif(not is_known, reason="MADV_POPULATE_WRITE needs Linux 5.14")


class CountingTables(PageTables):
    """The real ones. ``calls``: (address, bytes) that the system was asked for; ``ahead``: faults of those calls."""

    def __init__(self) -> None:
        super().__init__(self._count)
        self.calls: list[tuple[int, int]] = []
        self.ahead = 0

    def _count(self, address: int, length: int) -> int:
        before = thread_faults()
        code = mapping._advise(address, length)
        self.ahead += thread_faults() - before
        self.calls.append((address, length))
        return code

    def faults_of(self, work: Callable[[], object]) -> int:
        """Faults that interrupted this thread in ``work``."""
        before, ahead = thread_faults(), self.ahead
        work()
        return thread_faults() - before - (self.ahead - ahead)


def counted(monkeypatch: pytest.MonkeyPatch) -> CountingTables:
    """In place of the process's own, for the test."""
    made = CountingTables()
    monkeypatch.setattr(mapping, "_PAGE_TABLES", made)
    return made


class RefusingTables(PageTables):
    """Those of a kernel that answers ``code``; ``calls``: how often it was asked."""

    def __init__(self, code: int) -> None:
        super().__init__(self._refuse)
        self.code = code
        self.calls = 0

    def _refuse(self, address: int, length: int) -> int:
        self.calls += 1
        return self.code


def thread_faults() -> int:
    """Of this thread so far, without input or output."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt


def filled(count: int) -> np.ndarray:
    """uint8 [count] of this process's own memory, all of it there."""
    return np.arange(count, dtype=np.int64).astype(np.uint8)
