"""Threads for blocking calls, the slots they write to, and moving in pieces."""

import asyncio
import threading

import pytest

from kvservice.model.errors import InvalidInputError, UnavailableError
from kvservice.storage.remote.pieces import cut, move_in_order, together
from kvservice.storage.remote.slots import Slots
from kvservice.storage.remote.workers import WAITING_MAX, Workers


@pytest.fixture
def workers() -> Workers:
    return Workers("test", 1)


async def test_work_gives_its_result_or_its_error(workers: Workers) -> None:
    assert await workers.submit(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        await workers.submit(lambda: 1 // 0)
    assert await workers.run_to_end(threading.get_ident) != threading.get_ident()
    workers.close()


async def test_a_call_that_is_given_up_is_over_for_its_caller_and_ends_in_its_thread(workers: Workers) -> None:
    go_on, ended = threading.Event(), asyncio.Event()
    future = workers.submit(lambda: go_on.wait(30), ended.set)
    behind = workers.submit(lambda: "never done")
    await asyncio.sleep(0)
    future.cancel()
    behind.cancel()
    with pytest.raises(asyncio.CancelledError):
        await future
    assert not ended.is_set()
    go_on.set()
    await ended.wait()
    assert await workers.submit(lambda: "next") == "next"
    workers.close()


async def test_work_that_must_end_is_waited_for_even_when_cancelled_twice(workers: Workers) -> None:
    started, go_on, done = threading.Event(), threading.Event(), []

    def work() -> None:
        started.set()
        go_on.wait(30)
        done.append(1)

    task = asyncio.create_task(workers.run_to_end(work))
    await asyncio.to_thread(started.wait, 30)
    for _ in range(2):
        task.cancel()
        for _ in range(3):
            await asyncio.sleep(0)
        assert not task.done()
    go_on.set()
    await asyncio.wait([task])
    assert task.cancelled()
    assert done == [1]
    workers.close()


async def test_too_much_work_is_refused_and_so_is_work_after_the_end(workers: Workers) -> None:
    started, go_on = threading.Event(), threading.Event()

    def work() -> bool:
        started.set()
        return go_on.wait(30)

    waiting = [workers.submit(work)]
    await asyncio.to_thread(started.wait, 30)
    waiting += [workers.submit(lambda: True) for _ in range(WAITING_MAX)]
    with pytest.raises(UnavailableError, match="wait already"):
        workers.submit(lambda: True)
    go_on.set()
    await asyncio.gather(*waiting)
    workers.close()
    workers.close()
    with pytest.raises(UnavailableError):
        workers.submit(lambda: 1)


async def test_a_slot_is_free_again_when_its_last_user_left() -> None:
    slots = Slots(2, 16)
    async with slots.take() as first:
        first.hold()
        async with slots.take() as second:
            assert first.address != second.address
            assert slots.free.empty()
    assert slots.free.qsize() == 1
    first.leave()
    assert slots.free.qsize() == 2
    assert slots.memory.nbytes == 32


def test_pieces_end_at_multiples() -> None:
    assert list(cut(0, 10, 4)) == [(0, 4), (4, 8), (8, 10)]
    assert list(cut(5, 9, 4)) == [(5, 8), (8, 9)]
    assert list(cut(3, 3, 4)) == []


async def test_pieces_start_in_order_and_the_first_error_ends_all() -> None:
    begun: list[int] = []
    over: list[int] = []

    async def move(start: int, end: int) -> None:
        begun.append(start)
        try:
            if start == 4:
                raise InvalidInputError("bad piece")
            await asyncio.sleep(0 if start < 4 else 60)
        finally:
            over.append(start)

    with pytest.raises(InvalidInputError, match="bad piece"):
        await move_in_order(cut(0, 100, 2), 3, move)
    assert begun == sorted(begun)
    assert sorted(over) == begun
    assert len(begun) <= 6


async def test_together_keeps_the_order() -> None:
    async def double(number: int) -> int:
        await asyncio.sleep(0)
        return 2 * number

    assert await together(double(number) for number in range(5)) == [0, 2, 4, 6, 8]
    assert await together([]) == []
