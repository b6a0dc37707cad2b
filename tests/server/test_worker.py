"""Workers: over only when the work is, however the caller ends."""

import asyncio
import threading

import pytest

from kvservice.worker import InlineWorker, ThreadWorker, Worker


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
