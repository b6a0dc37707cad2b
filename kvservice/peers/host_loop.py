"""The loop of a node, for threads that are not its own: they wait here, the loop never does."""

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

from kvservice.model.errors import UnavailableError

LOOP_S_MAX = 30.0
"""A node whose loop does not come to a call for so long is not there."""
T = TypeVar("T")


class NodeLoop:
    """Has ``loop`` do things. Any thread but the loop's own may call."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def call(self, work: Callable[[], T]) -> T:
        """What ``work`` returns or raises on the loop. Raises UnavailableError if it does not get its turn."""
        done: Future[T] = Future()
        self._post(lambda: _run(work, done))
        return self._result(done, LOOP_S_MAX)

    def wait_for(
        self, work: Coroutine[Any, Any, T], timeout_s: float, undo: Callable[[T], object] = lambda _: None
    ) -> T:
        """The same for what takes its time; it is cancelled when the time is up. ``undo``: on the loop, with what came
        just then, which nobody takes any more."""
        done: Future[T] = Future()
        tasks: list[asyncio.Task[None]] = []

        def begin() -> None:
            if done.cancelled():
                work.close()
                return
            task = self._loop.create_task(_follow(work, done, undo))
            task.add_done_callback(lambda _: _end(work, done))
            tasks.append(task)

        try:
            self._post(begin)
        except UnavailableError:
            work.close()
            raise
        try:
            return self._result(done, timeout_s)
        finally:
            if done.cancelled():
                self.post(lambda: [task.cancel() for task in tasks])

    def post(self, work: Callable[[], object]) -> None:
        """Have the loop do it, soon; a loop that has ended has nothing left to undo."""
        try:
            self._post(lambda: work())
        except UnavailableError:
            return

    def _post(self, work: Callable[[], object]) -> None:
        try:
            self._loop.call_soon_threadsafe(work)
        except RuntimeError as error:
            raise UnavailableError(f"the node is stopping: {error}") from error

    def _result(self, done: "Future[T]", timeout_s: float) -> T:
        try:
            return done.result(timeout_s)
        except (TimeoutError, CancelledError) as error:
            if not done.cancel() and not done.cancelled():
                return done.result()  # it came to its end, or is about to: what it took must be given back by somebody
            raise UnavailableError(f"the node did not come to it within {timeout_s:g} s, or is stopping") from error


def _end(work: Coroutine[Any, Any, T], done: "Future[T]") -> None:
    """No more comes of it; cancelled in time, it has never begun."""
    work.close()
    done.cancel()


async def _follow(work: Coroutine[Any, Any, T], done: "Future[T]", undo: Callable[[T], object]) -> None:
    try:
        result = await work
    except asyncio.CancelledError:
        done.cancel()
        raise
    except BaseException as error:  # noqa: BLE001  it is raised where somebody waits for it
        if done.set_running_or_notify_cancel():
            done.set_exception(error)
    else:
        if done.set_running_or_notify_cancel():
            done.set_result(result)
        else:
            undo(result)


def _run(work: Callable[[], T], done: "Future[T]") -> None:
    if not done.set_running_or_notify_cancel():
        return
    try:
        result = work()
    except BaseException as error:  # noqa: BLE001  it is raised where somebody waits for it
        done.set_exception(error)
    else:
        done.set_result(result)
