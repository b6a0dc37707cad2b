"""Memory for first layers that come with an answer, used again: pages that are new cost more than what fills them."""

import threading
from weakref import WeakValueDictionary

import numpy as np

from kvservice.storage.buffer import Bytes, round_up

KEPT_BYTES_MAX = 4 << 20
"""Of one link, about: what one lookup needs. More are made, and dropped."""
STEP_BYTES = 64 << 10


class AheadBuffers:
    """Of one link. Any thread takes and gives back. What is never given back is freed with its last view."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[Bytes] = []
        self._taken: WeakValueDictionary[int, Bytes] = WeakValueDictionary()

    def take(self, count: int) -> Bytes:
        """uint8 [count], of any content."""
        with self._lock:
            buffer = self._idle.pop() if self._idle else None
            if buffer is None or len(buffer) < count:
                buffer = np.empty(round_up(count, STEP_BYTES), np.uint8)
            view = buffer[:count]
            self._taken[id(view)] = view
            return view

    def give_back(self, view: Bytes | None) -> None:
        """Nobody looks at what ``take`` gave any more. Said twice, or of other memory, it means nothing."""
        if view is None:
            return
        with self._lock:
            buffer = view.base if self._taken.pop(id(view), None) is view else None
            if buffer is not None and sum(map(len, self._idle)) < KEPT_BYTES_MAX:
                self._idle.append(buffer)
