"""Moving a record in pieces: several at a time, started in order, so that the first layers come first."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from typing import Any, TypeVar

import numpy as np

from kvservice.storage.buffer import Bytes
from kvservice.storage.remote.contract import OnPiece
from kvservice.storage.remote.workers import Workers

T = TypeVar("T")


class Landing:
    """Where a fetch puts what it gets: copies into ``target`` and tells ``on_piece``, in a worker thread.

    ``put`` comes back only when the copy is over, cancelled or not: a fetch that has ended writes nothing more.
    """

    def __init__(self, target: Bytes, on_piece: OnPiece, workers: Workers) -> None:
        self._target = target
        self._on_piece = on_piece
        self._workers = workers

    async def put(self, start: int, data: bytes | memoryview | Bytes) -> None:
        """Place ``data`` at ``start``. Raises what ``on_piece`` raises."""
        await self._workers.run_to_end(lambda: self._copy(start, data))

    def _copy(self, start: int, data: bytes | memoryview | Bytes) -> None:
        source = data if isinstance(data, np.ndarray) else np.frombuffer(data, np.uint8)
        end = start + len(source)
        assert end <= len(self._target), (end, len(self._target))
        np.copyto(self._target[start:end], source)
        self._on_piece(start, end)


def cut(start: int, end: int, step: int) -> Iterator[tuple[int, int]]:
    """[start, end) in pieces that end at multiples of ``step``."""
    while start < end:
        stop = min(end, (start // step + 1) * step)
        yield start, stop
        start = stop


async def move_in_order(
    pieces: Iterable[tuple[int, int]], most: int, move: Callable[[int, int], Awaitable[None]]
) -> None:
    """``move(start, end)`` every piece, up to ``most`` at once. The first error ends all and is raised."""
    waiting = iter(pieces)

    async def lane() -> None:
        for start, end in waiting:
            await move(start, end)

    await together(lane() for _ in range(most))


async def together(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All results in order. When one fails the others are cancelled and over before its error is raised."""
    tasks: list[asyncio.Task[T]] = []
    try:
        async with asyncio.TaskGroup() as group:
            tasks.extend(group.create_task(call) for call in calls)
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from failures.exceptions[0].__cause__
    return [task.result() for task in tasks]
