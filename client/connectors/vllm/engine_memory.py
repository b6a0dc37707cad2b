"""An engine's paged KV as restores and stores see it: ``PagedMemory`` over whatever layout its blocks have.

Where every plane is a view ``[blocks, block_size, heads, head_size]`` of the cache, with any strides, rows go straight
to their places. Where the engine packs them otherwise (AMX: pairs of dimensions, pairs of tokens), they are moved and
corrected in scratch memory that stays in the core's cache, and spread from there. Loads numba: see ``host_blocks``.
"""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from kvservice.client.connectors.vllm.host_blocks import HostBlocks
from kvservice.client.connectors.vllm.layout import UnknownLayoutError
from kvservice.client.connectors.vllm.paged import EnginePaged
from kvservice.client.device_paged import DevicePaged
from kvservice.client.paged import (
    CPU_BATCH_BYTES_MAX,
    DTYPES,
    CpuPaged,
    PagedMemory,
    PagedSegment,
    Slots,
    layer_rotations,
    read_mirror_tables,
)
from kvservice.kernels.cpu_layers import DenseLayers
from kvservice.kernels.cpu_packed import PackedLayers, PackedRestore, packed_layers
from kvservice.kernels.shapes import Bits, KernelInputError, Target
from kvservice.model.errors import GeometryMismatchError, InvalidInputError
from kvservice.model.geometry import Plane
from kvservice.model.identity import Identity
from kvservice.storage.record import RecordReader


def engine_memory(paged: EnginePaged, identity: Identity) -> PagedMemory:
    """Paged memory over the engine's caches; make it once. On a device one restore a time, as ``DevicePaged`` says.

    Raises GeometryMismatchError unless the caches are what the identity says, and UnknownLayoutError for blocks on a
    device that are no strided planes.
    """
    _check_caches(paged, identity)
    views = plane_views(paged, identity)
    is_hosted = bool(paged.hosted)
    if views is None and not is_hosted:
        raise UnknownLayoutError(
            f"blocks of the {paged.caches[0].device} hold no strided planes of K and V; nothing is moved on it"
        )
    if views is None:
        return PackedPaged(paged.hosted, identity)
    return CpuPaged(views, identity) if is_hosted else DevicePaged(views, identity)


def plane_views(paged: EnginePaged, identity: Identity) -> list[list[Tensor]] | None:
    """Per layer, per plane a view ``[blocks, block_size, heads, head_size]``; None if one plane has no equal steps."""
    views = []
    for cache, layout in zip(paged.caches, paged.layouts, strict=True):
        planes = zip(identity.geometry.planes, (layout.perm_k, layout.perm_v), strict=True)
        views.append([_plane_view(cache, perm, plane) for plane, perm in planes])
    found = [[one for one in planes if one is not None] for planes in views]
    return found if all(len(one) == len(planes) for one, planes in zip(found, views, strict=True)) else None


def _plane_view(cache: Tensor, perm: Tensor, plane: Plane) -> Tensor | None:
    """``perm`` as a base and three steps over the cache, if it is no more than that."""
    places = perm.cpu().view(-1, plane.heads, plane.head_size).numpy()
    base = int(places[0, 0, 0])
    steps = [int(places.take(1, axis)[0, 0]) - base if places.shape[axis] > 1 else 0 for axis in range(3)]
    rising = (np.arange(size) * step for size, step in zip(places.shape, steps, strict=True))
    first, second, third = np.ix_(*rising)
    if min(steps) < 0 or not np.array_equal(places, base + first + second + third):
        return None
    shape = (cache.shape[0], *places.shape)
    return cache.as_strided(shape, (cache.stride(0), *steps), cache.storage_offset() + base)


def _check_caches(paged: EnginePaged, identity: Identity) -> None:
    geometry = identity.geometry
    if len(geometry.planes) != 2 or len(paged.caches) != geometry.layers:
        raise GeometryMismatchError(
            f"the engine has {len(paged.caches)} layers of K and V, the identity says {geometry.layers} layers of "
            f"{[plane.name for plane in geometry.planes]}"
        )
    wanted = (DTYPES[geometry.dtype], *(plane.row_elements for plane in geometry.planes))
    for layer, (cache, layout) in enumerate(zip(paged.caches, paged.layouts, strict=True)):
        found = (cache.dtype, layout.perm_k.shape[1], layout.perm_v.shape[1])
        if found != wanted:
            raise GeometryMismatchError(f"layer {layer}: a cache of {found}, the identity says {wanted}")


class PackedPaged:
    """Paged KV in host memory in a layout known by tables of places. Any thread may use it, each its own slots.

    Restores of several threads take turns, batch by batch.
    """

    batch_bytes_max = CPU_BATCH_BYTES_MAX

    def __init__(self, hosted: Sequence[HostBlocks], identity: Identity) -> None:
        geometry = self.geometry = identity.geometry
        self.rotations = layer_rotations(identity)
        self._blocks = tuple(hosted)
        bits, tables = [one.bits for one in hosted], [one.tables for one in hosted]
        self.layers = packed_layers(bits, tables, geometry.planes, self.rotations, geometry.dtype)
        self.slot_count = self.layers.slot_count

    def prepare(
        self, master: RecordReader, targets: Sequence[Target], mirrors: Sequence[RecordReader | None]
    ) -> PagedSegment:
        """Tables and checks that all layers share, made once."""
        return _PackedSegment(self.layers, master, targets, mirrors)

    def finish_layer(self, layer: int) -> int:
        """Every write is in place when its call returns."""
        return layer + 1

    def settle(self) -> None:
        """Nothing is ever left to be done."""

    def gather_layer(self, layer: int, slots: Slots, out: Sequence[Bits]) -> int:
        """Copy rows to ``out``."""
        return self._blocks[layer].gather(slots, out)


class _PackedSegment:
    def __init__(
        self,
        memory: PackedLayers,
        master: RecordReader,
        targets: Sequence[Target],
        mirrors: Sequence[RecordReader | None],
    ) -> None:
        self._scratch, self._mirrors = memory.scratch, mirrors
        self._has_mirrors = any(mirror is not None for mirror in mirrors)
        positions = [None if mirror is None else mirror.meta.position for mirror in mirrors]
        meta, places = master.meta, master.master_places()
        try:
            dense = DenseLayers(master.buffer, places.start, places.layer_stride, places.plane_offsets)
            self._restore = PackedRestore(memory, meta.tokens, meta.position, dense, targets, positions)
        except KernelInputError as error:
            raise InvalidInputError(f"{error}; nothing was written") from error

    def open_layers(self, first: int, end: int) -> None:
        if self._has_mirrors:
            tables = [
                None if one is None else read_mirror_tables(one, first, end, self._scratch) for one in self._mirrors
            ]
            self._restore.open_mirrors(first, tables)

    def restore_layers(self, first: int, end: int) -> None:
        try:
            self._restore.restore_layers(first, end)
        except KernelInputError as error:
            raise InvalidInputError(f"layers {first}..{end}: {error}; none of them was written") from error
