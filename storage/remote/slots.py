"""A fixed piece of memory in slots: what a foreign library writes into, so that it never writes into the arena.

Such a library cannot be cancelled. A call that is given up goes on writing, perhaps for half a minute; its slot is not
given to anybody else before the thread came back.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import numpy as np

from kvservice.storage.buffer import Bytes


class Slot:
    """``view``: its bytes. ``hold`` once for every call that uses it, ``leave`` when that call's thread came back."""

    def __init__(self, view: Bytes, slots: "Slots") -> None:
        self.view = view
        self._slots = slots
        self._holders = 0

    @property
    def address(self) -> int:
        """Where its first byte is."""
        return self.view.ctypes.data

    def hold(self) -> None:
        """One more uses it."""
        self._holders += 1

    def leave(self) -> None:
        """One less; the last one gives it back."""
        self._holders -= 1
        assert self._holders >= 0, self._holders
        if not self._holders:
            self._slots.free.put_nowait(self)


class Slots:
    """``count`` slots of ``slot_bytes``. Used in one loop only."""

    def __init__(self, count: int, slot_bytes: int) -> None:
        self.memory: Bytes = np.zeros(count * slot_bytes, np.uint8)
        self.free: asyncio.Queue[Slot] = asyncio.Queue()
        for start in range(0, len(self.memory), slot_bytes):
            self.free.put_nowait(Slot(self.memory[start : start + slot_bytes], self))

    @contextlib.asynccontextmanager
    async def take(self) -> AsyncIterator[Slot]:
        """A free slot, as soon as there is one."""
        slot = await self.free.get()
        slot.hold()
        try:
            yield slot
        finally:
            slot.leave()
