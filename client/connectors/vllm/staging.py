"""Memory for rows between the engine's paged KV and the service: what a step has gathered, until it is stored."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from kvservice.client.connectors.vllm.metadata import SaveOrder
from kvservice.model.geometry import Geometry
from kvservice.storage.buffer import Bytes, StorageBits
from kvservice.storage.record_layout import RowSizes

IDLE_BUFFERS_MAX = 16
WASTE_MAX = 2
"""A buffer that is kept serves rows that take half of it, or more."""


class Staging:
    """Memory for rows that wait to be stored: never more than ``bytes_max``. Safe from any thread.

    Buffers are kept for the next rows: memory that was never used costs 0.25 ms a MiB to touch for the first time.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._lock = threading.Lock()
        self._used_bytes = 0
        self._idle: list[Bytes] = []

    @property
    def used_bytes(self) -> int:
        """Bytes that are handed out."""
        return self._used_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes for which there is room."""
        return self._bytes_max - self._used_bytes

    def take(self, length: int) -> Bytes | None:
        """A buffer of ``length`` bytes or more, whatever is in it; None if there is no room."""
        with self._lock:
            if length > self.free_bytes:
                return None
            most = min(WASTE_MAX * length, self.free_bytes)
            fitting = [index for index, buffer in enumerate(self._idle) if length <= len(buffer) <= most]
            if fitting:
                buffer = self._idle.pop(min(fitting, key=lambda index: len(self._idle[index])))
                self._used_bytes += len(buffer)
                return buffer
            self._used_bytes += length
            if self._used_bytes + sum(map(len, self._idle)) > self._bytes_max:
                self._idle.clear()
        return np.empty(length, np.uint8)

    def give_back(self, buffer: Bytes) -> None:
        """The buffer may be used again."""
        with self._lock:
            self._used_bytes -= len(buffer)
            if len(self._idle) < IDLE_BUFFERS_MAX:
                self._idle.append(buffer)


@dataclass(eq=False, slots=True)
class Draft:
    """One chunk on its way: what it is, and its rows, ``planes[layer][plane]`` of ``[tokens, row_elements]``."""

    order: SaveOrder
    planes: list[list[StorageBits]]
    prefill_s: float = 0.0


@dataclass(frozen=True, eq=False, slots=True)
class Gathered:
    """The chunks of one step. Their rows follow each other in ``planes[layer][plane]``, ``[rows, row_elements]``, so
    that a layer is gathered in one call: a call has a price, 0.1 ms for SmolLM2, whatever it moves.
    """

    drafts: tuple[Draft, ...]
    planes: tuple[list[StorageBits], ...]
    buffer: Bytes

    @classmethod
    def of(cls, orders: Sequence[SaveOrder], geometry: Geometry, buffer: Bytes) -> "Gathered":
        """Rows of ``orders`` in ``buffer``, of ``geometry.token_bytes`` a token at least. Nothing is written yet."""
        ends = list(accumulate(order.chunk.tokens for order in orders))
        planes = split_layers(buffer, geometry, ends[-1])
        drafts = (
            Draft(order, [[plane[end - order.chunk.tokens : end] for plane in layer] for layer in planes])
            for order, end in zip(orders, ends, strict=True)
        )
        return cls(tuple(drafts), tuple(planes), buffer)


def split_layers(buffer: Bytes, geometry: Geometry, rows: int) -> list[list[StorageBits]]:
    """Per layer, per plane a view ``[rows, row_elements]`` of a buffer, which may be longer."""
    step, sizes, counts = rows * geometry.token_layer_bytes, RowSizes.of(geometry), [rows] * len(geometry.planes)
    return [sizes.split(buffer[layer * step : (layer + 1) * step], counts) for layer in range(geometry.layers)]
