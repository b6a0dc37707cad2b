"""Memory for first layers that come with an answer, used again: pages that are new cost more than what fills them."""

import threading
from collections import deque
from weakref import WeakValueDictionary

import numpy as np

from kvservice.storage.buffer import Bytes, round_up

KEPT_MAX = 16
"""Of one link: what a lookup of several segments needs. More are made, and dropped."""
STEP_BYTES = 64 << 10


class AheadBuffers:
    """Of one link. Any thread takes and gives back. What is never given back is freed with its last view."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: deque[Bytes] = deque(maxlen=KEPT_MAX)
        self._taken: WeakValueDictionary[int, Bytes] = WeakValueDictionary()

    def take(self, count: int) -> Bytes:
        """uint8 [count], of any content."""
        with self._lock:
            buffer = self._idle.pop() if self._idle else None
            if buffer is None or len(buffer) < count:
                buffer = np.empty(round_up(count, STEP_BYTES), np.uint8)
            self._taken[id(buffer)] = buffer
            return buffer[:count]

    def give_back(self, view: Bytes | None) -> None:
        """Nobody looks at what ``take`` gave any more. Said twice, or of other memory, it means nothing."""
        if view is None:
            return
        with self._lock:
            buffer = self._taken.pop(id(view.base), None)
            if buffer is not None:
                self._idle.append(buffer)
