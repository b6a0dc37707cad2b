"""Paged KV memory of the torch decoder: per layer one tensor of blocks, and the free blocks.

A slot is `block * block_size + offset`. One thread owns it. It knows nothing of models or prompts.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvservice.client.reuse.engine import Planes
from kvservice.model.errors import CapacityError, SlotError


@dataclass(frozen=True, slots=True)
class KVShape:
    """Geometry of paged KV: `heads` is the number of KV heads, `block_size` in token slots."""

    layers: int
    heads: int
    head_size: int
    blocks: int
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16


class PagedKV:
    """`tensors[layer]` is [2, blocks, block_size, heads, head_size]: K, then V.

    Starts as NaN, so that a row that nobody wrote shows.
    """

    def __init__(self, shape: KVShape) -> None:
        self.shape = shape
        size = (2, shape.blocks, shape.block_size, shape.heads, shape.head_size)
        self.tensors = tuple(torch.full(size, torch.nan, dtype=shape.dtype) for _ in range(shape.layers))
        # Odd blocks after even ones: a prompt's blocks are never neighbours, so nothing can rely on that.
        order = [*range(0, shape.blocks, 2), *range(1, shape.blocks, 2)]
        self._free = order[::-1]
        self._is_used = [False] * shape.blocks

    @property
    def free_tokens(self) -> int:
        """Slots in free blocks."""
        return len(self._free) * self.shape.block_size

    def allocate(self, tokens: int) -> Tensor:
        """Slots int64 [tokens] in blocks of their own.

        Raises CapacityError, and takes nothing, when too few blocks are free.
        """
        count = -(-tokens // self.shape.block_size)
        if count > len(self._free):
            raise CapacityError(f"{tokens} tokens need {count} blocks, {len(self._free)} are free; free a prompt")
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._is_used[block] = True
        starts = torch.tensor(blocks, dtype=torch.int64)[:, None] * self.shape.block_size
        return (starts + torch.arange(self.shape.block_size)).flatten()[:tokens]

    def free(self, slots: Tensor) -> None:
        """Give back the blocks that an `allocate` answered with `slots`. Raises SlotError on blocks not in use."""
        blocks = sorted(set((slots // self.shape.block_size).tolist()))
        if not all(self._is_used[block] for block in blocks):
            raise SlotError(f"blocks {blocks} are not all in use; free what allocate returned, once")
        for block in blocks:
            self._is_used[block] = False
        self._free += blocks[::-1]

    def plane_views(self, layer: int) -> list[Tensor]:
        """[K, V] of a layer, each a view [blocks, block_size, heads, head_size] of the memory itself."""
        return [self.tensors[layer][0], self.tensors[layer][1]]

    def read(self, layer: int, slots: Tensor) -> Planes:
        """Copies of K and V, each [rows, heads, head_size], of `slots` int64 [rows]."""
        return tuple(plane.index_select(0, slots) for plane in self._rows(layer))

    def write(self, layer: int, slots: Tensor, planes: Planes) -> None:
        """Store K and V [rows, heads, head_size] at `slots` int64 [rows], rounded to the KV dtype, no slot twice."""
        for plane, rows in zip(self._rows(layer), planes, strict=True):
            plane.index_copy_(0, slots, rows.to(plane.dtype))

    def _rows(self, layer: int) -> list[Tensor]:
        return [plane.flatten(0, 1) for plane in self.plane_views(layer)]
