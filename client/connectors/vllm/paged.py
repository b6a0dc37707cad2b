"""The engine's paged KV as the worker's side uses it: rows of one layer, read and written by token positions.

Whole blocks of a cache in the host's memory, which is nearly all there is, are moved by three calls of numpy a layer:
one takes the blocks, one a plane puts their elements in order. Everything else goes through ``BlockLayout``. For 256
tokens of SmolLM2, 196 KB a layer, packed for AMX, that is 0.09 ms instead of 0.43 ms on a busy machine. Needs torch,
imports no engine.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvservice.client.connectors.vllm.layout import BlockLayout
from kvservice.model.geometry import Geometry
from kvservice.storage.buffer import StorageBits

Index = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False, slots=True)
class Place:
    """Where rows lie: ``slots`` int64 ``[rows]``; ``blocks`` as well if they are whole blocks of the layout."""

    slots: Tensor
    blocks: Index | None

    def __len__(self) -> int:
        return len(self.slots)


@dataclass(frozen=True, eq=False, slots=True)
class _Order:
    """A layout's tables for numpy: where each element of a plane's rows lies in a block, and the way back."""

    planes: tuple[Index, Index]
    inverse: Index

    @classmethod
    def of(cls, layout: BlockLayout) -> "_Order":
        planes = (layout.perm_k.cpu().numpy().reshape(-1), layout.perm_v.cpu().numpy().reshape(-1))
        inverse = np.empty(layout.block_elements, np.int64)
        inverse[np.concatenate(planes)] = np.arange(layout.block_elements)
        return cls(planes, inverse)


class EnginePaged:
    """Layers in the order of a record's sections. ``caches``: the tensors that the engine registered.

    ``indices``: layers by the engine's names. Any thread may read and write, each its own slots.
    """

    def __init__(
        self,
        caches: Sequence[Tensor],
        layouts: Sequence[BlockLayout],
        indices: Mapping[str, int],
        block_size: int,
        geometry: Geometry,
    ) -> None:
        self.caches, self.layouts, self.indices = tuple(caches), tuple(layouts), dict(indices)
        self.block_size = block_size
        self.geometry = geometry
        self._unit = layouts[0].block_size
        is_alike = all(layout.block_size == self._unit for layout in layouts) and block_size % self._unit == 0
        self._is_fast = is_alike and all(cache.device.type == "cpu" for cache in caches)
        orders = {id(layout): _Order.of(layout) for layout in layouts} if self._is_fast else {}
        self._orders = [orders[id(layout)] for layout in layouts] if self._is_fast else []
        pairs = zip(layouts, caches, strict=True)
        self._bits: list[npt.NDArray[Any]] = [
            layout._blocks(cache).numpy()
            for layout, cache in pairs
            if self._is_fast  # a view, checked
        ]

    def place(self, block_ids: Sequence[int], skip: int, count: int) -> Place:
        """Where the tokens behind the first ``skip`` ones of these blocks lie."""
        places = np.arange(skip, skip + count, dtype=np.int64)
        numbers = np.array(block_ids, np.int64)
        slots = numbers[places // self.block_size] * self.block_size + places % self.block_size
        is_whole = self._is_fast and count > 0 and skip % self._unit == 0 and count % self._unit == 0
        return Place(torch.from_numpy(slots), slots[:: self._unit] // self._unit if is_whole else None)

    def fence(self) -> Callable[[], None]:
        """What a thread that writes has to call first: it waits until what the engine has queued so far is done.

        A device reads and writes in the order of the engine's own queue, which other threads do not stand in.
        """
        cache = self.caches[0]
        if not cache.is_cuda:
            return _nothing
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(cache.device))
        wait: Callable[[], None] = event.synchronize
        return wait

    def finish(self) -> None:
        """Wait until what this thread has written is in place."""
        if self.caches[0].is_cuda:
            torch.cuda.current_stream(self.caches[0].device).synchronize()

    def gather(self, layer: int, place: Place, out: Sequence[StorageBits]) -> None:
        """Copy rows of a layer to ``out``, one contiguous array ``[rows, row_elements]`` a plane."""
        if place.blocks is None:
            self.layouts[layer].gather(self.caches[layer], place.slots, out)
            return
        bits = self._bits[layer]
        taken = bits.take(place.blocks, axis=0)
        for order, target in zip(self._orders[layer].planes, out, strict=True):
            assert target.flags.c_contiguous
            taken.take(order, axis=1, out=target.view(bits.dtype).reshape(len(taken), -1), mode="clip")

    def scatter(self, layer: int, place: Place, planes: Sequence[StorageBits]) -> None:
        """Write rows of a layer, given as ``gather`` gives them."""
        if place.blocks is None:
            self.layouts[layer].scatter(self.caches[layer], place.slots, planes)
            return
        bits, count = self._bits[layer], len(place.blocks)
        rows = np.concatenate([plane.view(bits.dtype).reshape(count, -1) for plane in planes], axis=1)
        bits[place.blocks] = rows.take(self._orders[layer].inverse, axis=1, mode="clip")


def _nothing() -> None:
    return
