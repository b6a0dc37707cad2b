"""Rows of several prompts, copied out of an engine's paged KV, so that they can be stored while the engine goes on.

Taken on the engine's thread, one gather a layer over all rows; then it is paged memory of its own that ``store_round``
reads in another thread, and that nothing ever writes. Loads numba: see ``host_blocks``.
"""

from collections.abc import Sequence

import numpy as np
import torch

from kvservice.client.connectors.vllm.paged import EnginePaged, Place
from kvservice.client.connectors.vllm.staging import Staging, split_layers
from kvservice.client.paged import PagedSegment, Slots, layer_rotations
from kvservice.kernels import cpu
from kvservice.kernels.shapes import Bits, Target, check_dtype
from kvservice.model.errors import InvalidInputError
from kvservice.model.identity import Identity
from kvservice.storage.buffer import Bytes, StorageBits
from kvservice.storage.record import RecordReader


class StagedRows:
    """``PagedMemory`` of rows in memory of ours: slot ``n`` is row ``n``. Any thread may read.

    ``planes``: per layer, per plane ``[rows, row_elements]``.
    """

    batch_bytes_max = 0

    def __init__(self, identity: Identity, planes: Sequence[Sequence[StorageBits]]) -> None:
        self.geometry = identity.geometry
        self.rotations = layer_rotations(identity)
        self.slot_count = len(planes[0][0])
        self._layers = [self._as_paged(one) for one in planes]

    def gather_layer(self, layer: int, slots: Slots, out: Sequence[Bits]) -> int:
        """Copy rows to ``out``; returns how many values are not finite."""
        return cpu.gather_layer(self._layers[layer], slots, self.geometry.planes, out, self.geometry.dtype)

    def prepare(
        self, master: RecordReader, targets: Sequence[Target], mirrors: Sequence[RecordReader | None]
    ) -> PagedSegment:
        """Raises InvalidInputError: nothing is restored into what is to be stored."""
        raise InvalidInputError("staged rows are not written; restore to the engine's own memory")

    def finish_layer(self, layer: int) -> int:
        """Raises InvalidInputError, as ``prepare`` does."""
        raise InvalidInputError("staged rows are not written; restore to the engine's own memory")

    def settle(self) -> None:
        """Nothing is ever left to be done."""

    def _as_paged(self, planes: Sequence[StorageBits]) -> cpu.PagedLayer:
        geometry = self.geometry
        shapes = [
            (len(rows), 1, plane.heads, plane.head_size) for rows, plane in zip(planes, geometry.planes, strict=True)
        ]
        views = [rows.reshape(shape) for rows, shape in zip(planes, shapes, strict=True)]
        return cpu.paged_layer(views, geometry.planes, check_dtype(geometry.dtype))


class Snapshot(StagedRows):
    """Rows of an engine's paged KV as of now. Made by ``begin``, filled by ``take``.

    One thread takes, then another may read; whoever has it last gives its memory back by ``close``.
    """

    def __init__(
        self, paged: EnginePaged, identity: Identity, prompts: Sequence[Slots], staging: Staging, buffer: Bytes
    ):
        self._paged = paged
        self._staging = staging
        self._buffer: Bytes | None = buffer
        engine_slots = [slots[slots >= 0] for slots in prompts]
        self._place = Place(torch.from_numpy(np.concatenate([np.empty(0, np.int64), *engine_slots])))
        self._slots = _row_numbers(prompts)
        self._planes = split_layers(buffer, identity.geometry, len(self._place))
        super().__init__(identity, self._planes)
        self._taken = 0

    @classmethod
    def begin(
        cls, paged: EnginePaged, identity: Identity, prompts: Sequence[Slots], staging: Staging
    ) -> "Snapshot | None":
        """Room for the rows of ``prompts``; None if ``staging`` has none. Nothing is copied yet.

        ``prompts``: per prompt the engine's slots, int64 ``[prompt tokens]``, -1 where no row is to be taken. They are
        not kept.
        """
        rows = sum(int((slots >= 0).sum()) for slots in prompts)
        buffer = staging.take(rows * identity.geometry.token_bytes)
        return None if buffer is None else cls(paged, identity, prompts, staging, buffer)

    @property
    def is_complete(self) -> bool:
        """True once every layer was taken."""
        return self._taken == self.geometry.layers

    def take(self, layers: int | None = None) -> None:
        """Copy the next ``layers`` layers out of the engine's memory, all that are left if it is not given.

        On the engine's thread, while the rows are still there. Raises SlotError; call ``close`` then.
        """
        assert self._buffer is not None, "the snapshot was closed"
        left = self.geometry.layers - self._taken
        for _ in range(left if layers is None else min(layers, left)):
            self._paged.gather(self._taken, self._place, self._planes[self._taken])
            self._taken += 1

    def slots_of(self, index: int) -> Slots:
        """Slots in this memory of prompt ``index``, int64 ``[prompt tokens]``; -1 where no row was taken."""
        return self._slots[index]

    def close(self) -> None:
        """Give the memory back; nothing can be read any more. Safe to call twice."""
        buffer, self._buffer = self._buffer, None
        self._planes, self._layers = [], []
        if buffer is not None:
            self._staging.give_back(buffer)

    def gather_layer(self, layer: int, slots: Slots, out: Sequence[Bits]) -> int:
        """Copy rows to ``out``; returns how many values are not finite. Any thread, once the layer was taken."""
        assert self._buffer is not None, "the snapshot was closed"
        assert layer < self._taken, f"layer {layer} was not taken yet"
        return super().gather_layer(layer, slots, out)


def _row_numbers(prompts: Sequence[Slots]) -> list[Slots]:
    """The rows that were taken, numbered through all prompts."""
    found, first = [], 0
    for slots in prompts:
        is_taken = slots >= 0
        numbers = np.where(is_taken, first + np.cumsum(is_taken) - 1, -1).astype(np.int64)
        first += int(is_taken.sum())
        found.append(numbers)
    return found
