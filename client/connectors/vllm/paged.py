"""The engine's paged KV as the worker's side uses it: rows of one layer, read and written by token positions.

A cache in the host's memory is moved by the kernels' tables of places, without the GIL; one on a device by
``BlockLayout``, in torch. For 838 rows of SmolLM2, not whole blocks, packed for AMX, that is 0.13 ms a layer instead of
1.7. Needs torch, imports no engine.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from kvservice.client.connectors.vllm.layout import BlockLayout
from kvservice.kernels.shapes import Bits
from kvservice.model.geometry import Geometry

if TYPE_CHECKING:
    from kvservice.client.connectors.vllm.host_blocks import HostBlocks

RowPlanes = Sequence[Bits | Tensor]
"""Rows of K, then of V, each contiguous ``[rows, row_elements]``: storage bits, or a tensor of the cache's type."""


@dataclass(frozen=True, eq=False, slots=True)
class Place:
    """Where rows lie: ``slots`` int64 ``[rows]``, on the host."""

    slots: Tensor

    @classmethod
    def joined(cls, places: Iterable["Place"]) -> "Place":
        """The rows of one place behind those of the other."""
        return cls(torch.cat([place.slots for place in places]))

    def __len__(self) -> int:
        return len(self.slots)


class EnginePaged:
    """Layers in the order of a record's sections. ``caches``: the tensors that the engine registered.

    ``indices``: layers by the engine's names. ``hosted``: one a layer; none unless all caches are in the host's memory.
    Any thread may read and write, each its own slots.
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
        is_hosted = all(cache.device.type == "cpu" for cache in caches)
        self.hosted = _on_host(self.caches, self.layouts) if is_hosted else ()

    def place(self, block_ids: Sequence[int], skip: int, count: int) -> Place:
        """Where the tokens behind the first ``skip`` ones of these blocks lie."""
        places = np.arange(skip, skip + count, dtype=np.int64)
        numbers = np.array(block_ids, np.int64)
        return Place(torch.from_numpy(numbers[places // self.block_size] * self.block_size + places % self.block_size))

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

    def gather(self, layer: int, place: Place, out: RowPlanes) -> None:
        """Copy rows of a layer to ``out``, K then V. Raises SlotError, GeometryMismatchError."""
        if self.hosted:
            self.hosted[layer].gather(place.slots.numpy(), out)
        else:
            self.layouts[layer].gather(self.caches[layer], place.slots, out)

    def scatter(self, layer: int, place: Place, planes: RowPlanes) -> None:
        """Write rows of a layer, no slot twice; what lies beside them is untouched. Raises as ``gather``."""
        if self.hosted:
            self.hosted[layer].scatter(place.slots.numpy(), planes)
        else:
            self.layouts[layer].scatter(self.caches[layer], place.slots, planes)


def _on_host(caches: Sequence[Tensor], layouts: Sequence[BlockLayout]) -> "tuple[HostBlocks, ...]":
    from kvservice.client.connectors.vllm.host_blocks import host_blocks  # loads numba: not before the model is built

    return host_blocks(caches, layouts)


def _nothing() -> None:
    return
