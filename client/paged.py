"""An engine's paged KV memory as the kernels see it. Checks shapes and slots first; never guesses a layout."""

from collections.abc import Iterable, Sequence
from itertools import product
from operator import is_
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvservice.kernels import cpu, cpu_tables
from kvservice.kernels.rotation import rotation_table
from kvservice.kernels.shapes import Bits, KernelInputError, Rotation, Target, check_dtype, check_slots
from kvservice.kernels.tensors import numpy_bits
from kvservice.model.errors import (
    CorruptError,
    GeometryMismatchError,
    InvalidIdentityError,
    InvalidInputError,
    SlotError,
    TokenCountError,
)
from kvservice.model.geometry import Geometry
from kvservice.model.identity import Identity
from kvservice.storage.record import RecordReader

Slots = npt.NDArray[np.int64]
"""One slot a token, ``block * block_size + offset``; -1: the row is the engine's own, leave it out."""

PagedKV = Sequence[Sequence[Tensor]]
"""Per layer, per plane a view ``[blocks, block_size, heads, head_size]`` of the engine's memory, any strides."""

CPU_BATCH_BYTES_MAX = 16 << 20
"""2 ms of writing; a call that finds its code and data out of the caches costs 10 to 30 us more than warm."""

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def check_paged_kv(paged_kv: PagedKV, geometry: Geometry) -> int:
    """How many token slots every plane has. Raises GeometryMismatchError unless the tensors are what geometry says,
    InvalidIdentityError for opaque rows."""
    if geometry.is_opaque:
        raise InvalidIdentityError(
            "an identity of opaque rows has no paged KV: its bytes have another program's layout; use OpaqueStore"
        )
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
    if isinstance(slots, Tensor):  # mostly int64 in host memory: torch then needs two calls less
        slots = slots.numpy() if slots.dtype is torch.int64 and slots.is_cpu else slots.detach().cpu().numpy()
    found = np.array(slots, order="C")
    if found.ndim != 1 or found.dtype != np.int64:
        raise InvalidInputError(f"slots must be int64 [prompt tokens], not {found.dtype} {list(found.shape)}")
    if len(found) != tokens:
        raise TokenCountError(f"{len(found)} slots for a prompt of {tokens} tokens; give one each, -1 to leave one out")
    return found


def check_target_slots(slots: Sequence[Slots], slot_count: int) -> None:
    """Raise SlotError unless every slot is -1 or in range, and none is there twice, over all targets of a restore."""
    is_used = np.zeros(slot_count // 64 + 1, np.uint64)
    if all(cpu_tables.are_distinct(one, slot_count, is_used) for one in slots):
        return
    try:  # says what is wrong
        check_slots(slots, slot_count)
    except KernelInputError as error:
        raise SlotError(f"{error}; nothing was written") from error


def layer_rotations(identity: Identity) -> tuple[Rotation, ...]:
    """How every layer's keys rotate; a position-pinned layer rotates nothing, since nothing of it may move."""
    known = {id(rope): Rotation(rope.frequencies, rope.is_interleaved) for rope in identity.rope}
    return tuple(known[id(rope)] for rope in identity.rope)


def check_moves(rotations: Iterable[Rotation], moves: Iterable[int]) -> None:
    """Raise InvalidInputError unless every layer's keys can be moved by so many positions."""
    distinct = {id(one): one for one in rotations}.values()  # mostly one: to hash it is to read all its frequencies
    for rotation, by in product(distinct, {one for one in moves if one}):
        try:
            rotation_table(rotation, by)
        except KernelInputError as error:
            raise InvalidInputError(
                f"{error}, or give its rows no slots (-1) and compute them; nothing was written"
            ) from error


class PagedSegment(Protocol):
    """A segment about to be written to its targets."""

    def open_layers(self, first: int, end: int) -> None:
        """Note where layers ``[first, end)`` lie, once their bytes are all there. Raises CorruptError."""

    def restore_layers(self, first: int, end: int) -> None:
        """Write layers ``[first, end)``, opened in one call, to every target, now or later."""


class PagedMemory(Protocol):
    """Paged KV of one engine: ``CpuPaged`` in host memory, ``DevicePaged`` in a GPU's."""

    slot_count: int
    rotations: tuple[Rotation, ...]
    """One a layer."""
    batch_bytes_max: int
    """How much to write between two calls of ``finish_layer``; 0 = a layer."""

    def prepare(
        self, master: RecordReader, targets: Sequence[Target], mirrors: Sequence[RecordReader | None]
    ) -> PagedSegment:
        """Note where a master goes, and the mirror that corrects it, if any, one a target. Raises InvalidInputError."""

    def finish_layer(self, layer: int) -> int:
        """All of ``layer`` was asked for. Returns how many layers are in place by now; all of them after the last."""

    def settle(self) -> None:
        """Return once nothing that was asked for is still to be read or written: a restore has failed under way."""

    def gather_layer(self, layer: int, slots: Slots, out: Sequence[Bits]) -> int:
        """Copy rows to ``out``, per plane ``[rows, row_elements]``; returns how many values are not finite."""


class CpuPaged:
    """Paged KV in host memory: one fused pass over layers. Safe from any thread as long as no slot is used twice.

    Raises GeometryMismatchError unless the tensors are what the identity says.
    """

    batch_bytes_max = CPU_BATCH_BYTES_MAX

    def __init__(self, paged_kv: PagedKV, identity: Identity) -> None:
        geometry = identity.geometry
        self.slot_count = check_paged_kv(paged_kv, geometry)
        self.geometry = geometry
        self.rotations = layer_rotations(identity)
        bits = check_dtype(geometry.dtype)
        self._identity = identity
        self._tensors = [tensor for planes in paged_kv for tensor in planes]
        self._addresses = [tensor.data_ptr() for tensor in self._tensors]
        views = [[numpy_bits(tensor) for tensor in planes] for planes in paged_kv]
        self.layers = [cpu.paged_layer(planes, geometry.planes, bits) for planes in views]
        self.table = cpu.paged_layers(self.layers, geometry.planes, self.rotations, geometry.dtype)

    def is_of(self, paged_kv: PagedKV, identity: Identity) -> bool:
        """True if it stands for these very tensors, where they were when it was made, and this identity."""
        given = [tensor for planes in paged_kv for tensor in planes]
        return (
            identity is self._identity
            and [len(planes) for planes in paged_kv] == [len(identity.geometry.planes)] * identity.geometry.layers
            and all(map(is_, given, self._tensors))
            and list(map(Tensor.data_ptr, given)) == self._addresses
        )

    def prepare(
        self, master: RecordReader, targets: Sequence[Target], mirrors: Sequence[RecordReader | None]
    ) -> PagedSegment:
        """Tables and checks that all layers share, made once."""
        return _CpuSegment(self, master, targets, mirrors)

    def finish_layer(self, layer: int) -> int:
        """Every write is in place when its call returns."""
        return layer + 1

    def settle(self) -> None:
        """Nothing is ever left to be done."""

    def gather_layer(self, layer: int, slots: Slots, out: Sequence[Bits]) -> int:
        """Copy rows to ``out``."""
        return cpu.gather_layer(self.layers[layer], slots, self.geometry.planes, out, self.geometry.dtype)


class _CpuSegment:
    def __init__(
        self,
        memory: CpuPaged,
        master: RecordReader,
        targets: Sequence[Target],
        mirrors: Sequence[RecordReader | None],
    ) -> None:
        self._mirrors = mirrors
        self._opened: cpu.OpenMirrors | None = None
        self._has_mirrors = any(mirror is not None for mirror in mirrors)
        positions = [None if mirror is None else mirror.meta.position for mirror in mirrors]
        try:
            places = master.master_places()
            self._master = cpu.DenseLayers(master.buffer, places.start, places.layer_stride, places.plane_offsets)
            self._prepared = cpu.prepare_restore(
                master.meta.tokens, master.meta.position, targets, memory.table, positions
            )
        except KernelInputError as error:
            raise InvalidInputError(f"{error}; nothing was written") from error

    def open_layers(self, first: int, end: int) -> None:
        if self._has_mirrors:
            paged = self._prepared.paged
            layers = [None if one is None else read_mirror_tables(one, first, end, paged) for one in self._mirrors]
            self._opened = self._prepared.open_mirrors(first, layers)

    def restore_layers(self, first: int, end: int) -> None:
        try:
            self._prepared.restore_layers(first, end, self._master, self._opened)
        except KernelInputError as error:
            raise InvalidInputError(f"layers {first}..{end}: {error}; none of them was written") from error


def read_mirror_tables(mirror: RecordReader, first: int, end: int, paged: cpu.PagedLayers) -> cpu.MirrorLayers:
    """Where layers ``[first, end)`` of a mirror lie in its record. Raises CorruptError, naming the cache."""
    layout = mirror.layout
    begins, lengths = layout.section_offsets[first:end], layout.section_bytes[first:end]
    sections = [(begin, begin + length) for begin, length in zip(begins, lengths, strict=True)]
    try:
        return cpu.MirrorLayers.read(mirror.buffer, np.array(sections, np.int64), paged, mirror.meta.tokens)
    except KernelInputError as error:
        for layer in range(first, end):
            mirror.mirror(layer)  # says what is wrong with which cache and layer
        raise CorruptError(f"{mirror}, layers {first}..{end}: {error}") from error
