"""Parts that two threads do."""

import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from kvservice.peers import two_threads
from kvservice.peers.streams_channel import cut
from kvservice.peers.two_threads import PARTS_MIN, do_each

PARTS = cut(0, 1000, 10)
MIDDLE = 500
WAIT_S = 20


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(two_threads, "_CORES", 2)


def test_each_part_is_done_once() -> None:
    begun = list[tuple[int, int]]()
    do_each(PARTS, lambda *part: begun.append(part))
    assert sorted(begun) == PARTS


def test_another_thread_helps() -> None:
    both = threading.Barrier(2, timeout=WAIT_S)
    threads = dict[int, int]()

    def do(first: int, _: int) -> None:
        if first in (0, MIDDLE):
            both.wait()
            threads[first] = threading.get_ident()

    do_each(PARTS, do)
    assert threads[0] == threading.get_ident() != threads[MIDDLE]


@pytest.mark.parametrize("count", [0, 1, PARTS_MIN - 1])
def test_a_few_parts_are_done_by_who_asks(count: int) -> None:
    threads = list[int]()
    do_each(PARTS[:count], lambda *_: threads.append(threading.get_ident()))
    assert threads == [threading.get_ident()] * count


def test_one_core_gets_no_help(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(two_threads, "_CORES", 1)
    threads = set[int]()
    do_each(PARTS, lambda *_: threads.add(threading.get_ident()))
    assert threads == {threading.get_ident()}


def test_nobody_waits_for_help_that_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """All helpers are at other records, or the program is ending."""
    free, done = threading.Event(), list[int]()
    with ThreadPoolExecutor(1) as pool:
        monkeypatch.setattr(two_threads, "_pool", pool)
        kept = pool.submit(free.wait, WAIT_S)
        do_each(PARTS, lambda first, _: done.append(first))
        free.set()
        assert kept.result()
    do_each(PARTS, lambda first, _: done.append(first))  # that pool is shut
    assert sorted(done) == sorted(first for first, _ in PARTS * 2)


def test_a_helper_that_comes_too_late_finds_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool takes the work, and then cannot start a thread for it: one that it has may come to it later."""
    taken, done = list[Callable[[], None]](), list[int]()

    class Pool:
        def submit(self, work: Callable[[], None]) -> None:
            taken.append(work)
            raise RuntimeError("can't start new thread")

    monkeypatch.setattr(two_threads, "_pool", Pool())

    def do(first: int, _: int) -> None:
        done.append(first)
        if first == MIDDLE - 10:
            raise KeyError(first)

    with pytest.raises(KeyError):
        do_each(PARTS, do)
    before = list(done)
    taken[0]()
    assert done == before


@pytest.mark.parametrize("is_helper", [False, True])
def test_an_error_of_either_is_raised_and_ends_the_work_of_both(is_helper: bool) -> None:
    me, both, begun = threading.get_ident(), threading.Barrier(2, timeout=WAIT_S), list[int]()

    def do(first: int, _: int) -> None:
        begun.append(first)
        if first in (0, MIDDLE):
            both.wait()
        if (threading.get_ident() != me) is is_helper:
            raise KeyError(first)
        threading.Event().wait(0.01)

    with pytest.raises(KeyError):
        do_each(PARTS, do)
    assert len(begun) < len(PARTS) // 2


def test_nothing_runs_any_more_when_it_ends() -> None:
    """Also after an error of its own thread: the other one still writes to the same memory."""
    me, both, written = threading.get_ident(), threading.Barrier(2, timeout=WAIT_S), list[int]()

    def do(first: int, _: int) -> None:
        both.wait()
        if threading.get_ident() == me:
            raise KeyError(first)
        threading.Event().wait(0.05)
        written.append(first)

    with pytest.raises(KeyError):
        do_each(PARTS, do)
    assert len(written) == 1


@pytest.mark.parametrize("both_fail", [False, True])
def test_an_error_keeps_nothing_that_its_work_stood_on(both_fail: bool) -> None:
    """Not until the collector comes."""

    class Held:
        pass

    held, me, both = Held(), threading.get_ident(), threading.Barrier(2, timeout=WAIT_S)
    alive = weakref.ref(held)

    def do(first: int, _: int, held: Held = held) -> None:
        if first in (0, MIDDLE):
            both.wait()
        if both_fail or threading.get_ident() != me:
            raise KeyError(first)

    gc.disable()
    try:
        with suppress(KeyError):
            do_each(PARTS, do)
        del held, do
        for _ in range(100):  # the helper may still be on its way out
            if alive() is None:
                break
            threading.Event().wait(0.01)
        assert alive() is None
    finally:
        gc.enable()
