"""Workers: over only when the work is, however the caller ends."""

import asyncio
import gc
import threading
from functools import partial

import pytest

from kvservice.worker import InlineWorker, OrderedWork, ThreadWorker, Worker


@pytest.mark.parametrize("make", [lambda: ThreadWorker(1), InlineWorker])
async def test_a_worker_returns_or_raises_what_the_function_does(make: type[Worker]) -> None:
    worker = make()
    assert await worker.run(lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        await worker.run(lambda: 1 // 0)
    worker.close()


async def test_a_cancelled_run_is_over_only_when_the_thread_is() -> None:
    worker, started, may_end, ended = ThreadWorker(1), threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        started.set()
        may_end.wait(10)
        ended.set()

    run = asyncio.create_task(worker.run(work))
    while not started.is_set():  # noqa: ASYNC110  the event is a thread's
        await asyncio.sleep(0)
    run.cancel()
    for _ in range(10):
        await asyncio.sleep(0)
    assert not run.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert ended.is_set()
    worker.close()


async def test_a_run_cancelled_twice_is_over_only_when_the_thread_is() -> None:
    worker, started, may_end, ended = ThreadWorker(1), threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        started.set()
        may_end.wait(10)
        ended.set()

    run = asyncio.create_task(worker.run(work))
    while not started.is_set():  # noqa: ASYNC110  the event is a thread's
        await asyncio.sleep(0)
    for _ in range(2):
        run.cancel()
        for _ in range(10):
            await asyncio.sleep(0)
    is_over_early = run.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await run
    worker.close()
    assert not is_over_early
    assert ended.is_set()


async def test_ordered_work_does_the_lowest_rank_first_whoever_asked_first() -> None:
    done: list[int] = []
    work = OrderedWork(ThreadWorker(1))
    ranks = [5, 1, 3, 1]
    await asyncio.gather(*(work.run(rank, partial(done.append, 10 * rank + at)) for at, rank in enumerate(ranks)))
    assert done == [11, 13, 32, 50]


async def test_ordered_work_raises_what_its_own_function_does_and_nobody_elses() -> None:
    work = OrderedWork(InlineWorker())
    first, second = await asyncio.gather(
        work.run(2, lambda: 1 // 0), work.run(1, lambda: "right"), return_exceptions=True
    )
    assert isinstance(first, ZeroDivisionError)
    assert second == "right"


async def test_ordered_work_is_told_as_done_while_what_its_own_turn_took_still_runs() -> None:
    work, may_end = OrderedWork(ThreadWorker(2)), threading.Event()
    first = asyncio.create_task(work.run(1, lambda: "quick"))
    second = asyncio.create_task(work.run(2, lambda: may_end.wait(30)))
    third = asyncio.create_task(work.run(0, lambda: "quickest"))
    assert (await third, await first) == ("quickest", "quick")
    may_end.set()
    assert await second


async def test_ordered_work_that_fails_behind_a_cancelled_caller_is_no_forgotten_exception() -> None:
    told: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(str(context)))
    worker, began, may_end = ThreadWorker(1), threading.Event(), threading.Event()

    def fail() -> None:
        began.set()
        may_end.wait(30)
        raise ValueError("nobody waits for this")

    caller = asyncio.create_task(OrderedWork(worker).run(1, fail))
    while not began.is_set():  # noqa: ASYNC110  the event is a thread's
        await asyncio.sleep(0)
    caller.cancel()
    asyncio.get_running_loop().call_soon(may_end.set)
    with pytest.raises(asyncio.CancelledError):
        await caller
    worker.close()
    del caller
    for _ in range(3):  # the thread's turn ends, and lets go of what it held
        await asyncio.sleep(0)
        gc.collect()
    assert told == []
