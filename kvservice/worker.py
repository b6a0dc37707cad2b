"""Where checksums and folding arithmetic run: a few threads off the loop's, for calls that release the GIL."""

import asyncio
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
            await _until_done(future)  # the thread still reads an extent that our caller would now free
            raise

    def close(self) -> None:
        """See Worker."""
        self._pool.shutdown(wait=True)


async def _until_done(future: "asyncio.Future[T]") -> None:
    """Wait, however often the waiting task is cancelled; it is a thread that ends this, not its caller."""
    while not future.done():
        with suppress(asyncio.CancelledError):
            await asyncio.wait([future])


class InlineWorker:
    """Runs at once, in the caller's thread: the reference and the test double."""

    async def run(self, function: Callable[[], T]) -> T:
        """See Worker."""
        return function()

    def close(self) -> None:
        """See Worker."""
