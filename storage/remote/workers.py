"""A few threads for calls that block. A call that is given up goes on in its thread and holds up only that one."""

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from kvservice.model.errors import UnavailableError

T = TypeVar("T")
WAITING_MAX = 1024


def _nothing() -> None:
    """What most calls want to be done when they have ended."""


class Workers:
    """``threads`` daemon threads: one that is stuck in a foreign library cannot keep the process from ending."""

    def __init__(self, name: str, threads: int) -> None:
        self._name = name
        self._waiting: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{index}", daemon=True) for index in range(threads)
        ]
        self._is_closed = False
        for thread in self._threads:
            thread.start()

    def submit(self, work: Callable[[], T], ended: Callable[[], None] = _nothing) -> "asyncio.Future[T]":
        """Do ``work`` in a thread; the future belongs to the running loop. Cancelled before its turn, it is not done.

        ``ended`` is called in the loop when no thread does it any more, which may be long after a cancellation.
        Raises UnavailableError when too many wait, or after ``close``.
        """
        if self._is_closed or self._waiting.qsize() >= WAITING_MAX:
            raise UnavailableError(f"{self._name}: closed, or {WAITING_MAX} calls wait already; try again later")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._waiting.put(lambda: _do(loop, future, work, ended))
        return future

    async def run_to_end(self, work: Callable[[], T]) -> T:
        """Do short ``work``, and come back only when it is over, cancelled or not: nothing touches its memory then."""
        future = self.submit(work)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            while not future.done():
                try:
                    await asyncio.wait([future])
                except asyncio.CancelledError:
                    continue  # cancelled again; the first one is raised below
            if not future.cancelled():
                future.exception()  # seen: the caller is gone
            raise

    def close(self) -> None:
        """Let the threads end when they are through; does not wait for one that is stuck."""
        if not self._is_closed:
            self._is_closed = True
            for _ in self._threads:
                self._waiting.put(None)

    def _work(self) -> None:
        while (do := self._waiting.get()) is not None:
            do()


def _do(
    loop: asyncio.AbstractEventLoop,
    future: "asyncio.Future[Any]",
    work: Callable[[], Any],
    ended: Callable[[], None],
) -> None:
    result, error = None, None
    try:
        if not future.cancelled():
            result = work()
    except BaseException as caught:  # noqa: BLE001  a thread's top: whoever waits gets it
        error = caught
    try:
        loop.call_soon_threadsafe(_tell, future, result, error, ended)
    except RuntimeError:  # the loop was closed meanwhile: nobody waits any more
        return


def _tell(
    future: "asyncio.Future[Any]", result: object, error: BaseException | None, ended: Callable[[], None]
) -> None:
    ended()
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
