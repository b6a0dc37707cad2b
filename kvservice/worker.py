"""Where checksums and folding arithmetic run: a few threads off the loop's, for calls that release the GIL."""

import asyncio
import heapq
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Protocol, TypeVar

T = TypeVar("T")


class Worker(Protocol):
    """Runs a function elsewhere. What it reads must be held until ``run`` is over, however it ends."""

    async def run(self, function: Callable[[], T]) -> T:
        """What ``function`` returns or raises. Is over only when ``function`` is, even if cancelled."""

    def close(self) -> None:
        """Wait for what runs; take nothing more."""


class ThreadWorker:
    """A thread pool."""

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="kvservice-worker")

    async def run(self, function: Callable[[], T]) -> T:
        """See Worker."""
        future = asyncio.get_running_loop().run_in_executor(self._pool, function)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await until_done(future)  # the thread still reads an extent that our caller would now free
            raise

    def close(self) -> None:
        """See Worker."""
        self._pool.shutdown(wait=True)


async def until_done(future: "asyncio.Future[T]") -> None:
    """Wait, however often the waiting task is cancelled; it is a thread that ends this, not its caller."""
    while not future.done():
        with suppress(asyncio.CancelledError):
            await asyncio.wait([future])


class OrderedWork:
    """Work on a worker, the lowest rank first, equal ones as they came. Owned by one loop."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._waiting: list[tuple[int, int, Callable[[], None]]] = []
        self._count = 0
        self._turns: set[asyncio.Task[None]] = set()
        self._lock = threading.Lock()  # the loop adds, threads take

    async def run(self, rank: int, function: Callable[[], T]) -> T:
        """What ``function`` returns or raises. Is over only when ``function`` is, even if cancelled."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def work() -> None:
            try:
                result = function()
            except BaseException as error:  # noqa: BLE001  a thread's top: whoever waits gets it
                loop.call_soon_threadsafe(done.set_exception, error)
            else:
                loop.call_soon_threadsafe(done.set_result, result)

        self._count += 1
        with self._lock:
            heapq.heappush(self._waiting, (rank, self._count, work))
        # As many turns as jobs, but a turn does what is first, not what we asked for: another one may do ours.
        turn = loop.create_task(self._worker.run(self._take))
        self._turns.add(turn)
        turn.add_done_callback(self._turns.discard)
        try:
            return await asyncio.shield(done)
        except asyncio.CancelledError:
            await until_done(done)
            done.exception()  # nobody waits for it any more: not one to report when the future is collected
            raise

    def _take(self) -> None:
        with self._lock:
            _, _, work = heapq.heappop(self._waiting)
        work()


class InlineWorker:
    """Runs at once, in the caller's thread: the reference and the test double."""

    async def run(self, function: Callable[[], T]) -> T:
        """See Worker."""
        return function()

    def close(self) -> None:
        """See Worker."""
