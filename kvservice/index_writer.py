"""Changes of the SSD index, applied in the order they were asked for, as many at a time as have gathered.

One batch is one call that holds the GIL for microseconds; a lone change does not wait for others to come.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from kvservice.model.errors import DiskError
from kvservice.storage.ssd_index import Change, Index
from kvservice.worker import Worker

BATCH_MAX = 256
"""Changes of one batch: about 0.5 ms of the GIL."""


class IndexWriter:
    """Owned by the loop. ``before_batch`` runs on the worker before every batch: the sync of a durable slab.

    ``failed_syncs``: after one of them what had been written before may never reach the device, whatever the next says.
    """

    def __init__(self, index: Index, worker: Worker, before_batch: Callable[[], None] | None = None) -> None:
        self._index = index
        self._worker = worker
        self.is_durable = before_batch is not None
        self.failed_syncs = 0
        self._before_batch = before_batch
        self._waiting: deque[tuple[Sequence[Change], asyncio.Future[None]]] = deque()
        self._task: asyncio.Task[None] | None = None

    async def apply(self, *changes: Change) -> None:
        """Return once the index holds the changes. Raises what the index raises; the changes are then not made.

        Not undone by cancelling: what was asked for is applied.
        """
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((changes, done))
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._drain())
        await asyncio.shield(done)

    async def _drain(self) -> None:
        while self._waiting:
            batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), BATCH_MAX))]
            changes = [change for some, _ in batch for change in some]
            try:
                await self._worker.run(partial(self._write, changes))
            except Exception as error:  # noqa: BLE001  a task's top: those who wait get it
                _settle(batch, error)
            else:
                _settle(batch, None)

    def _write(self, changes: Sequence[Change]) -> None:
        self._sync()
        self._index.apply(changes)

    async def sync_since(self, failed_syncs: int) -> None:
        """Sync what was written since ``failed_syncs`` was that. Raises DiskError unless all of it is on the device."""
        if self.is_durable:
            await self._worker.run(self._sync)
        if self.failed_syncs != failed_syncs:
            raise DiskError("a sync failed, so what was written before may not outlast a power failure")

    def _sync(self) -> None:
        if self._before_batch is None:
            return
        try:
            self._before_batch()
        except DiskError:
            self.failed_syncs += 1
            raise

    async def stop(self) -> None:
        """Wait until all that was asked for is applied."""
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)


def _settle(batch: Sequence[tuple[Sequence[Change], "asyncio.Future[None]"]], error: Exception | None) -> None:
    for _, done in batch:
        if done.done():
            continue
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)
            done.exception()  # seen here too: whoever asked may have gone
