"""An engine's paged KV memory as the kernels see it. Checks shapes and slots first; never guesses a layout."""

from collections.abc import Iterable, Sequence
from itertools import product
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvservice.kernels import cpu
from kvservice.kernels.rotation import rotation_table
from kvservice.kernels.shapes import Bits, KernelInputError, MirrorRows, Rotation, Target, check_dtype, check_slots
from kvservice.kernels.tensors import numpy_bits
from kvservice.model.errors import GeometryMismatchError, InvalidInputError, SlotError, TokenCountError
from kvservice.model.geometry import Geometry
from kvservice.model.identity import Identity

Slots = npt.NDArray[np.int64]
"""One slot a token, ``block * block_size + offset``; -1: the row is the engine's own, leave it out."""

PagedKV = Sequence[Sequence[Tensor]]
"""Per layer, per plane a view ``[blocks, block_size, heads, head_size]`` of the engine's memory, any strides."""

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def check_paged_kv(paged_kv: PagedKV, geometry: Geometry) -> int:
    """How many token slots every plane has. Raises GeometryMismatchError unless the tensors are what geometry says."""
    if len(paged_kv) != geometry.layers:
        raise GeometryMismatchError(f"paged KV of {len(paged_kv)} layers, the identity says {geometry.layers}")
    counts = set()
    for layer, planes in enumerate(paged_kv):
        if len(planes) != len(geometry.planes):
            raise GeometryMismatchError(f"layer {layer}: {len(planes)} planes, the identity has {len(geometry.planes)}")
        for plane, tensor in zip(geometry.planes, planes, strict=True):
            wanted = (plane.heads, plane.head_size)
            if tensor.dim() != 4 or tuple(tensor.shape[2:]) != wanted or tensor.dtype is not DTYPES[geometry.dtype]:
                raise GeometryMismatchError(
                    f"layer {layer}, plane {plane.name!r}: {tensor.dtype} {list(tensor.shape)}; the identity says "
                    f"{geometry.dtype} [blocks, block_size, {plane.heads}, {plane.head_size}]"
                )
            counts.add(tensor.shape[0] * tensor.shape[1])
    if len(counts) != 1 or len({tensor.device for planes in paged_kv for tensor in planes}) != 1:
        raise GeometryMismatchError(f"all planes must lie on one device and have equally many slots, not {counts}")
    return int(counts.pop())


def prompt_slots(slots: Tensor | Slots, tokens: int) -> Slots:
    """The slots of a prompt as contiguous int64 ``[tokens]`` on the host. Raises TokenCountError for another number.

    Always a copy, made before any check: what was checked is what is used, though the caller changes its own.
    """
    found = np.array(slots.detach().cpu().numpy() if isinstance(slots, Tensor) else slots, order="C")
    if found.ndim != 1 or found.dtype != np.int64:
        raise InvalidInputError(f"slots must be int64 [prompt tokens], not {found.dtype} {list(found.shape)}")
    if len(found) != tokens:
        raise TokenCountError(f"{len(found)} slots for a prompt of {tokens} tokens; give one each, -1 to leave one out")
    return found


def check_target_slots(slots: Sequence[Slots], slot_count: int) -> None:
    """Raise SlotError unless every slot is -1 or in range, and none is there twice, over all targets of a restore."""
    try:
        check_slots(slots, slot_count)
    except KernelInputError as error:
        raise SlotError(f"{error}; nothing was written") from error


def layer_rotations(identity: Identity) -> tuple[Rotation, ...]:
    """How every layer's keys rotate; a position-pinned layer rotates nothing, since nothing of it may move."""
    return tuple(Rotation(rope.frequencies, rope.is_interleaved) for rope in identity.rope)


def check_moves(rotations: Iterable[Rotation], moves: Iterable[int]) -> None:
    """Raise InvalidInputError unless every layer's keys can be moved by so many positions."""
    for rotation, by in product(set(rotations), set(moves)):
        try:
            rotation_table(rotation, by)
        except KernelInputError as error:
            raise InvalidInputError(
                f"{error}, or give its rows no slots (-1) and compute them; nothing was written"
            ) from error


class PagedSegment(Protocol):
    """A segment about to be written to its targets."""

    def restore_layer(self, layer: int, rows: Sequence[Bits], mirrors: Sequence[MirrorRows | None]) -> None:
        """Write one layer of the master, per plane ``[tokens, row_elements]``, to every target, now or later.

        ``mirrors``: one a target, None where the master is what it wants.
        """


class PagedMemory(Protocol):
    """Paged KV of one engine: ``CpuPaged`` in host memory, ``DevicePaged`` in a GPU's."""

    slot_count: int
    rotations: tuple[Rotation, ...]
    """One a layer."""

    def prepare(self, tokens: int, position: int, targets: Sequence[Target]) -> PagedSegment:
        """Note where a master of ``tokens`` rows, computed at ``position``, goes. Raises InvalidInputError."""

    def finish_layer(self, layer: int) -> int:
        """All of ``layer`` was asked for. Returns how many layers are in place by now; all of them after the last."""

    def settle(self) -> None:
        """Return once nothing that was asked for is still to be read or written: a restore has failed under way."""

    def gather_layer(self, layer: int, slots: Slots, out: Sequence[Bits]) -> int:
        """Copy rows to ``out``, per plane ``[rows, row_elements]``; returns how many values are not finite."""


class CpuPaged:
    """Paged KV in host memory: one fused pass a layer. Safe from any thread as long as no slot is used twice.

    Raises GeometryMismatchError unless the tensors are what the identity says.
    """

    def __init__(self, paged_kv: PagedKV, identity: Identity) -> None:
        geometry = identity.geometry
        self.slot_count = check_paged_kv(paged_kv, geometry)
        self.geometry = geometry
        self.rotations = layer_rotations(identity)
        bits = check_dtype(geometry.dtype)
        self._identity = identity
        self._tensors = [(tensor, tensor.data_ptr()) for planes in paged_kv for tensor in planes]
        views = [[numpy_bits(tensor) for tensor in planes] for planes in paged_kv]
        self.layers = [cpu.paged_layer(planes, geometry.planes, bits) for planes in views]

    def is_of(self, paged_kv: PagedKV, identity: Identity) -> bool:
        """True if it stands for these very tensors, where they were when it was made, and this identity."""
        given = [tensor for planes in paged_kv for tensor in planes]
        return (
            identity is self._identity
            and [len(planes) for planes in paged_kv] == [len(identity.geometry.planes)] * identity.geometry.layers
            and all(one is ours and one.data_ptr() == at for one, (ours, at) in zip(given, self._tensors, strict=True))
        )

    def prepare(self, tokens: int, position: int, targets: Sequence[Target]) -> PagedSegment:
        """Tables and checks that all layers share, made once."""
        return _CpuSegment(self, tokens, position, targets)

    def finish_layer(self, layer: int) -> int:
        """Every write is in place when its call returns."""
        return layer + 1

    def settle(self) -> None:
        """Nothing is ever left to be done."""

    def gather_layer(self, layer: int, slots: Slots, out: Sequence[Bits]) -> int:
        """Copy rows to ``out``."""
        return cpu.gather_layer(self.layers[layer], slots, self.geometry.planes, out, self.geometry.dtype)


class _CpuSegment:
    def __init__(self, memory: CpuPaged, tokens: int, position: int, targets: Sequence[Target]) -> None:
        self._memory = memory
        geometry = memory.geometry
        try:
            self._prepared = {
                rotation: cpu.prepare_restore(tokens, position, targets, geometry.planes, rotation, geometry.dtype)
                for rotation in set(memory.rotations)
            }
        except KernelInputError as error:
            raise InvalidInputError(f"{error}; nothing was written") from error

    def restore_layer(self, layer: int, rows: Sequence[Bits], mirrors: Sequence[MirrorRows | None]) -> None:
        prepared = self._prepared[self._memory.rotations[layer]]
        try:
            prepared.restore_layer(rows, self._memory.layers[layer], mirrors if any(mirrors) else None)
        except KernelInputError as error:
            raise InvalidInputError(f"layer {layer}: {error}; the layer was not written") from error
