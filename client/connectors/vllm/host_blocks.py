"""A layer's cache in the host's memory, moved row by row through the kernels' tables of places, without the GIL.

Loads numba: import it only where a worker's model is built already. Callers keep the cache alive.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from kvservice.client.connectors.vllm.layout import BlockLayout
from kvservice.client.connectors.vllm.paged import RowPlanes
from kvservice.kernels.cpu_blocks import BlockTable, gather_by_table, scatter_by_table
from kvservice.kernels.shapes import Bits, KernelInputError
from kvservice.kernels.tensors import numpy_bits, storage_name
from kvservice.model.errors import GeometryMismatchError, SlotError

Slots = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False, slots=True)
class HostBlocks:
    """``bits``: the cache as ``[blocks, block_elements]``, a view; ``tables``: K's and V's. Any thread, its own slots.

    Slots are contiguous int64 ``[rows]``.
    """

    bits: Bits
    tables: tuple[BlockTable, ...]

    @property
    def slot_count(self) -> int:
        """Token slots of the cache."""
        return len(self.bits) * self.tables[0].block_size

    def gather(self, slots: Slots, out: RowPlanes) -> int:
        """Copy rows to ``out``; returns how many values are not finite. Raises SlotError, GeometryMismatchError."""
        check_slots(slots, 0, self.slot_count)
        count = 0
        for table, rows in zip(self.tables, out, strict=True):
            try:
                count += gather_by_table(self.bits, slots, table, _bits(rows))
            except KernelInputError as error:
                raise GeometryMismatchError(f"{error}; these rows were not read") from error
        return count

    def scatter(self, slots: Slots, planes: RowPlanes) -> None:
        """Write rows, no slot twice; -1 leaves one out. What lies beside is untouched. Raises as ``gather``."""
        check_slots(slots, -1, self.slot_count)
        for table, rows in zip(self.tables, planes, strict=True):
            try:
                scatter_by_table(self.bits, slots, table, _bits(rows))
            except KernelInputError as error:
                raise GeometryMismatchError(f"{error}; these rows were not written") from error


def host_blocks(caches: Sequence[Tensor], layouts: Sequence[BlockLayout]) -> tuple[HostBlocks, ...]:
    """One a layer, at least one; layers of one layout share its tables. Raises GeometryMismatchError."""
    tables: dict[int, tuple[BlockTable, ...]] = {}
    found = []
    for layout, cache in zip(layouts, caches, strict=True):
        if id(layout) not in tables:
            perms = (layout.perm_k.numpy(), layout.perm_v.numpy())
            tables[id(layout)] = tuple(BlockTable(one, layout.block_elements, storage_name(cache)) for one in perms)
        found.append(HostBlocks(numpy_bits(layout.blocks_of(cache).view(cache.dtype)), tables[id(layout)]))
    _compile(found[0])
    return tuple(found)


def _compile(blocks: HostBlocks) -> None:
    """Have the kernels compiled, or fetched from numba's cache, now: a first call takes up to a second."""
    nothing: list[Bits] = [np.empty((0, table.row_elements), table.bits) for table in blocks.tables]
    slots = np.empty(0, np.int64)
    blocks.scatter(slots, nothing)
    blocks.gather(slots, nothing)


def check_slots(slots: Slots, lowest: int, slot_count: int) -> None:
    """Raise SlotError unless every slot is from ``lowest`` to the last one."""
    if len(slots) and not lowest <= int(slots.min()) <= int(slots.max()) < slot_count:
        raise SlotError(f"slots {slots.min()}..{slots.max()} must be from {lowest} to {slot_count - 1}")


def _bits(rows: Bits | Tensor) -> Bits:
    return numpy_bits(rows) if isinstance(rows, Tensor) else rows
