"""Pages that are about to be written are made ready in few calls, each once, and no others are."""

import ctypes
import errno
import os
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from kvservice.model.cache import Extent
from kvservice.model.errors import CapacityError
from kvservice.storage import mapping
from kvservice.storage.arena import Arena, AttachedArenas, attach_arena
from kvservice.storage.buffer import Bytes
from kvservice.storage.mapping import STEP_BYTES, PageTables, prefault
from tests.storage.page_faults import PAGE, CountingTables, RefusingTables, counted, filled, needs_advice

MIB = 1 << 20
BULK = 16 * MIB


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> CountingTables:
    return counted(monkeypatch)


@pytest.fixture
def arena(tables: CountingTables) -> Iterator[Arena]:
    made = Arena(2 * BULK)
    yield made
    made.close()


def attached(arena: Arena) -> Bytes:
    return attach_arena(arena.descriptor(), arena.bytes, is_writable=True)


def taken_bytes(arena: Arena) -> int:
    return os.fstat(arena.descriptor()).st_blocks * 512


@needs_advice
@pytest.mark.parametrize("is_filled", [False, True])
def test_writing_what_is_ready_takes_a_twentieth_of_the_faults(
    arena: Arena, tables: CountingTables, is_filled: bool
) -> None:
    source = filled(BULK)
    if is_filled:
        np.copyto(arena.slice(Extent(0, BULK)), 1)
    unready, ready = attached(arena)[:BULK], attached(arena)[BULK if not is_filled else 0 :][:BULK]
    before = tables.faults_of(lambda: np.copyto(unready, source))
    prefault(ready)
    after = tables.faults_of(lambda: np.copyto(ready, source))
    assert before >= BULK // PAGE
    assert after <= before // 20


@needs_advice
def test_an_arena_takes_no_page_more_than_what_was_written(arena: Arena) -> None:
    view, extents = attached(arena), [Extent(0, 1), Extent(3 * PAGE, PAGE + 1), Extent(5 * MIB, 3 * MIB - 5)]
    for extent in extents:
        prefault(view[extent.offset : extent.end])
        np.copyto(view[extent.offset : extent.end], 7)
    assert taken_bytes(arena) == (1 + 2 + 3 * MIB // PAGE) * PAGE


@needs_advice
def test_pages_are_asked_for_in_steps_and_once(arena: Arena, tables: CountingTables) -> None:
    start = arena.view.ctypes.data
    prefault(arena.view[MIB + 5 : MIB + 10])
    assert tables.calls == [(start + MIB, PAGE)]
    prefault(arena.view[:BULK].data)
    steps = tables.calls[1:]
    assert [at for at, _ in steps] == list(range(start, start + BULK, STEP_BYTES))
    assert {length for _, length in steps} == {STEP_BYTES}
    count = len(tables.calls)
    prefault(arena.view[PAGE + 1 : BULK])
    prefault(arena.view[:0])
    assert len(tables.calls) == count


@needs_advice
def test_a_mapping_of_its_own_has_pages_of_its_own(arena: Arena, tables: CountingTables) -> None:
    prefault(arena.view[:PAGE])
    one = attached(arena)
    prefault(one[:PAGE])
    assert len(tables.calls) == 2


@needs_advice
def test_what_needs_it_not_is_left_alone(tables: CountingTables) -> None:
    whole = Arena(MIB, is_prefaulted=True)
    read_only = AttachedArenas().attach(whole.descriptor(), whole.bytes)
    for target in (whole.view, np.empty(MIB, np.uint8), memoryview(bytearray(10))):
        prefault(target)
    assert not tables.calls
    assert not tables._mappings
    assert not read_only.flags.writeable


def test_a_mapping_that_is_gone_is_forgotten(tables: CountingTables) -> None:
    prefault(Arena(MIB).view[:PAGE])
    (gone,) = tables._mappings
    assert gone.view() is None
    found = memoryview((ctypes.c_uint8 * PAGE).from_address(gone.start)).cast("B")  # not one byte of it is touched
    count = len(tables.calls)
    prefault(found)
    assert len(tables.calls) == count
    arena = Arena(MIB)
    assert [one.start for one in tables._mappings] == [arena.view.ctypes.data]


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOSYS, errno.EPERM])
def test_a_kernel_that_does_not_know_how_is_asked_once(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    tables = RefusingTables(code)
    monkeypatch.setattr(mapping, "_PAGE_TABLES", tables)
    arena = Arena(BULK)
    for _ in range(3):
        prefault(arena.view)
        prefault(Arena(MIB).view)
    assert tables.calls == 1
    np.copyto(arena.view, 3)
    assert arena.view.min() == 3


@pytest.mark.parametrize("code", [errno.ENOMEM, errno.EFAULT])
def test_no_memory_is_an_error_and_asked_for_again_later(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    tables = RefusingTables(code)
    monkeypatch.setattr(mapping, "_PAGE_TABLES", tables)
    arena = Arena(BULK)
    for count in (1, 2):
        with pytest.raises(CapacityError, match=rf"{os.strerror(code)}.*host_bytes smaller"):
            prefault(arena.view)
        assert tables.calls == count
    tables.code = 0
    prefault(arena.view)
    assert tables.calls == 2 + BULK // STEP_BYTES


def test_nobody_skips_a_page_that_another_thread_still_waits_for() -> None:
    asked, may_end, calls = threading.Semaphore(0), threading.Event(), list[int]()

    def slow(address: int, length: int) -> int:
        calls.append(address)
        asked.release()
        assert may_end.wait(20)
        return 0

    tables, arena = PageTables(slow), Arena(MIB)
    tables.add(arena.view)
    threads = [threading.Thread(target=tables.prefault, args=(arena.view,)) for _ in range(2)]
    for thread in threads:
        thread.start()
        assert asked.acquire(timeout=20)  # the second one asks too, while the first one waits
    may_end.set()
    for thread in threads:
        thread.join()
    tables.prefault(arena.view)
    assert len(calls) == 2


@needs_advice
def test_many_threads_make_all_of_it_ready(arena: Arena, tables: CountingTables) -> None:
    view, barrier = attached(arena), threading.Barrier(4)
    pieces = [view[at : at + 3 * MIB] for at in range(0, BULK - 2 * MIB, MIB)]

    def run(number: int) -> None:
        barrier.wait()
        for index in range(number, len(pieces) + number):
            prefault(pieces[index % len(pieces)])

    threads = [threading.Thread(target=run, args=(number * 3,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tables.faults_of(lambda: np.copyto(view[:BULK], 1)) < 40
