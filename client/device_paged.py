"""Paged KV in a GPU's memory. The arena is copied ahead on a stream of its own, while kernels write the layer before.

Two layers are in flight at most: their staging memory is what the allocator gives and takes back.
"""

import ctypes
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvservice.client.paged import DTYPES, PagedKV, PagedSegment, Slots, check_paged_kv, layer_rotations
from kvservice.client.transport import Arena
from kvservice.kernels import dispatch
from kvservice.kernels.shapes import Bits, MirrorRows, Target
from kvservice.model.identity import Identity
from kvservice.storage.record import RecordReader

_REGISTER_READ_ONLY = 8  # cudaHostRegisterReadOnly
log = logging.getLogger(__name__)


class PinnedArena:
    """Registers the arena for DMA for as long as it is open. Where that is refused copies are slower, never wrong."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        flags = 0 if arena.flags.writeable else _REGISTER_READ_ONLY
        status = int(_runtime().cudaHostRegister(arena.ctypes.data, arena.nbytes, flags))
        self.is_pinned = status == 0
        if not self.is_pinned:
            log.warning("CUDA error %d: the arena is not registered for DMA, restores will be slower", status)

    def close(self) -> None:
        """Undo the registration; no copy from the arena may be under way. Safe to call twice."""
        if self.is_pinned:
            _runtime().cudaHostUnregister(self._arena.ctypes.data)
        self.is_pinned = False


class DevicePaged:
    """Paged KV on one GPU. Everything queued on the caller's current stream before is done before a slot is written.

    Raises GeometryMismatchError unless the tensors are what the identity says. One restore a time; a store may use
    another object of this class beside it.
    """

    batch_bytes_max = 0  # two layers are in flight as it is; more would only take more staging memory

    def __init__(self, paged_kv: PagedKV, identity: Identity) -> None:
        self.geometry = identity.geometry
        self.slot_count = check_paged_kv(paged_kv, self.geometry)
        self.layers = paged_kv
        self.rotations = layer_rotations(identity)
        self.dtype = DTYPES[self.geometry.dtype]
        self.device = paged_kv[0][0].device
        self.copies = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self.kernels = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self.kernels.wait_stream(torch.cuda.current_stream(self.device))
        self._written: list[torch.cuda.Event] = []

    def prepare(
        self, master: RecordReader, targets: Sequence[Target], mirrors: Sequence[RecordReader | None]
    ) -> PagedSegment:
        """Where a master goes; the kernels' host side checks it at the first layer, before anything is launched."""
        return _DeviceSegment(self, master, targets, mirrors)

    def finish_layer(self, layer: int) -> int:
        """Wait for the layer before this one, or for this one if it is the last: the next one's copies may begin."""
        self._written.append(self.kernels.record_event())
        is_last = layer + 1 == self.geometry.layers
        done_layers = layer + 1 if is_last else layer
        if done_layers:
            self._written[done_layers - 1].synchronize()
        return done_layers

    def settle(self) -> None:
        """Wait for all copies and kernels that were queued; slots and staging memory are then the caller's again."""
        self.copies.synchronize()
        self.kernels.synchronize()

    def gather_layer(self, layer: int, slots: Slots, out: Sequence[Bits]) -> int:
        """Copy rows to host memory."""
        with torch.cuda.stream(self.kernels):
            staged = [torch.empty(rows.shape, dtype=self.dtype, device=self.device) for rows in out]
            on_device = torch.from_numpy(slots).to(self.device)
            count = dispatch.gather_layer(self.layers[layer], on_device, self.geometry.planes, staged)
            for rows, tensor in zip(out, staged, strict=True):
                host_tensor(rows, self.dtype).copy_(tensor)
        return count

    def upload(self, rows: Bits) -> Tensor:
        """Rows on the device, queued on the stream of copies and kept until the kernels are through with them."""
        with torch.cuda.stream(self.copies):
            tensor = host_tensor(rows, self.dtype).to(self.device, non_blocking=True)
        tensor.record_stream(self.kernels)
        return tensor


class _DeviceSegment:
    def __init__(
        self,
        memory: DevicePaged,
        master: RecordReader,
        targets: Sequence[Target],
        mirrors: Sequence[RecordReader | None],
    ) -> None:
        self._memory, self._master, self._targets, self._mirrors = memory, master, targets, mirrors

    def open_layers(self, first: int, end: int) -> None:
        """Run tables are read layer by layer: the kernels' launches cost more than that."""

    def restore_layers(self, first: int, end: int) -> None:
        for layer in range(first, end):
            self._restore_layer(layer)

    def _restore_layer(self, layer: int) -> None:
        memory = self._memory
        master = [memory.upload(plane) for plane in self._master.master_planes(layer)]
        targets = [
            Target(target.position, target.slots, self._upload_mirror(mirror, layer))
            for target, mirror in zip(self._targets, self._mirrors, strict=True)
        ]
        memory.kernels.wait_stream(memory.copies)
        with torch.cuda.stream(memory.kernels):
            dispatch.restore_layer(
                master, self._master.meta.position, targets, memory.layers[layer], memory.geometry.planes,
                memory.rotations[layer],
            )  # fmt: skip

    def _upload_mirror(self, mirror: RecordReader | None, layer: int) -> MirrorRows | None:
        if mirror is None:
            return None
        runs, rows = mirror.mirror(layer)
        return MirrorRows(mirror.meta.position, runs, [self._memory.upload(one) for one in rows])


def host_tensor(rows: Bits, dtype: torch.dtype) -> Tensor:
    """The same host memory as a tensor. By address: torch warns of read-only arrays, and none is written here.

    ``rows`` must outlive the tensor; an arena's mapping does.
    """
    if not rows.size:
        return torch.empty(rows.shape, dtype=dtype)
    memory = (ctypes.c_uint8 * rows.nbytes).from_address(rows.ctypes.data)
    return torch.frombuffer(memory, dtype=dtype).view(rows.shape)


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
