"""One record to be stored: what it says of itself, and whether it can be a mirror.

A mirror is found by comparing, bit by bit and row by row, what the engine holds with the master moved to where the
engine holds it. So it is exact whatever produced the KV, and small where most of it was restored from that master.
A lossy identity rounds what is written, not what is compared: a row that came from the master is still found equal.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvservice.client.paged import PagedMemory, Slots
from kvservice.client.rounding import round_planes
from kvservice.kernels import cpu
from kvservice.kernels.shapes import Bits, KernelInputError, MirrorRows, Rotation
from kvservice.model.cache import CacheMeta, MasterReference
from kvservice.model.errors import InvalidInputError, NonFiniteError
from kvservice.model.identity import Identity
from kvservice.storage.record import (
    RecordLayout,
    RecordReader,
    RecordWriter,
    WrittenRecord,
    master_layout,
    mirror_layout,
)

MIRROR_PART_MAX = 0.5
"""A mirror above this part of the dense bytes is stored dense: it would save little, and needs its master to live."""

_BITS = {2: np.uint16, 4: np.uint32}


@dataclass(frozen=True, slots=True)
class Diff:
    """A mirror's content: ``runs[layer][plane]`` int32 ``[n, 2]`` and the replaced rows, copied."""

    runs: tuple[list[cpu.Runs], ...]
    rows: tuple[list[Bits], ...]


@dataclass(slots=True)
class Draft:
    """A segment's cache on its way into the arena. ``base``: the master it may be stored against, leased.

    ``diff`` is set while it is to be stored as a mirror, and where its rows are known by nothing else. ``is_known``:
    they are. ``is_whole``: it is to be stored dense whatever differs.
    """

    identity: Identity
    meta: CacheMeta
    slots: Slots
    base: RecordReader | None = None
    diff: Diff | None = None
    is_known: bool = False
    is_whole: bool = False

    def find_diff(self, memory: PagedMemory, rotations: Sequence[Rotation]) -> None:
        """Try to make it a mirror of ``base``. The base's layers are verified: a mirror of other bytes is for ever.

        Raises NonFiniteError, CorruptError when the base's bytes are not what was published, and InvalidInputError when
        the base lies too far away to be compared.
        """
        if self.base is None:
            return
        room_bytes = self.meta.dense_bytes * MIRROR_PART_MAX
        scratch = empty_layer(self.meta)
        runs: list[list[cpu.Runs]] = []
        rows: list[list[Bits]] = []
        for layer, rotation in enumerate(rotations):
            self._gather(memory, layer, scratch)
            self.base.verify_layer(layer)
            runs.append(self._layer_runs(layer, rotation, scratch))
            rows.append([_take_rows(plane, found) for plane, found in zip(scratch, runs[-1], strict=True)])
            room_bytes -= sum(plane.nbytes for plane in (*rows[-1], *runs[-1]))
            if room_bytes < 0:
                return
        self.diff = Diff(tuple(runs), tuple(rows))

    def make_whole(self) -> None:
        """Store it dense after all: its master can be referred to no more. As long as that is leased it is read."""
        self.is_whole = True
        if not self.is_known:
            self.base = self.diff = None

    @property
    def is_mirror(self) -> bool:
        """True while it is to be stored as what differs from its master."""
        return self.diff is not None and not self.is_whole

    @property
    def is_rebuilt(self) -> bool:
        """True if its rows are to be made of the master's: who writes it has to hold the master's lease until then."""
        return self.is_whole and self.is_known

    def record(self) -> tuple[CacheMeta, RecordLayout]:
        """What is to be written: a mirror if a diff was found, else a dense master."""
        if self.diff is None or self.is_whole:
            return self.meta, master_layout(self.meta)
        meta = replace(self.meta, master=self.reference)
        return meta, mirror_layout(meta, self.diff.runs)

    @property
    def reference(self) -> MasterReference | None:
        """The master that the record will refer to; None if it is dense."""
        if not self.is_mirror or self.base is None:
            return None
        return MasterReference(self.base.meta.key.context, self.base.generation)

    def write(self, buffer: Bits, memory: PagedMemory, rotations: Sequence[Rotation]) -> WrittenRecord:
        """Write the record into reserved bytes, in place. Raises NonFiniteError; the bytes are then no record.

        Raises CorruptError when the master that it is rebuilt from is not what was published.
        """
        meta, layout = self.record()
        writer = RecordWriter(buffer, meta, layout)
        for layer in range(meta.geometry.layers):
            if self.diff is None:
                targets = writer.master_planes(layer)
                self._gather(memory, layer, targets)
                round_planes(self.identity, targets)
            elif self.is_rebuilt:
                self._rebuild(layer, rotations[layer], writer.master_planes(layer))
            else:
                self._write_replaced(layer, writer.mirror_rows(layer, self.diff.runs[layer]))
        return writer.finish()

    def _layer_runs(self, layer: int, rotation: Rotation, member: Sequence[Bits]) -> list[cpu.Runs]:
        assert self.base is not None
        geometry, master = self.meta.geometry, self.base.meta
        planes = self.base.master_planes(layer)
        try:
            return cpu.diff_layer(
                planes, master.position, member, self.meta.position, geometry.planes, rotation, geometry.dtype
            )
        except KernelInputError as error:
            raise InvalidInputError(
                f"cache {self.meta.key} at position {self.meta.position}, layer {layer}, against its base at "
                f"{master.position}: {error}, or leave it out of `segments`; nothing was stored"
            ) from error

    def _rebuild(self, layer: int, rotation: Rotation, out: Sequence[Bits]) -> None:
        """A layer's rows: the master's, moved, and in their places the known ones, as they are stored."""
        assert self.base is not None
        assert self.diff is not None
        self.base.verify_layer(layer)
        geometry = self.meta.geometry
        rows = [np.empty(found.shape, found.dtype) for found in self.diff.rows[layer]]
        self._write_replaced(layer, rows)
        mirror = MirrorRows(self.meta.position, self.diff.runs[layer], rows)
        master = self.base.master_planes(layer)
        dense = cpu.materialise_layer(
            master, self.base.meta.position, mirror, geometry.planes, rotation, geometry.dtype
        )
        for target, found in zip(out, dense, strict=True):
            np.copyto(target, found)

    def _write_replaced(self, layer: int, out: Sequence[Bits]) -> None:
        """The replaced rows as they are stored."""
        assert self.diff is not None
        for target, found in zip(out, self.diff.rows[layer], strict=True):
            np.copyto(target, found)
        round_planes(self.identity, out)

    def _gather(self, memory: PagedMemory, layer: int, out: Sequence[Bits]) -> None:
        count = memory.gather_layer(layer, self.slots, out)
        if count:
            raise NonFiniteError(
                f"cache {self.meta.key} at position {self.meta.position}, layer {layer}: {count} values of K or V are "
                "NaN or infinite; nothing of this call was stored"
            )


def empty_layer(meta: CacheMeta) -> list[Bits]:
    """Room for one dense layer, per plane ``[tokens, row_elements]``."""
    bits = _BITS[meta.geometry.element_bytes]
    return [np.empty((meta.tokens, plane.row_elements), bits) for plane in meta.geometry.planes]


def _take_rows(plane: Bits, runs: cpu.Runs) -> Bits:
    if not len(runs):
        return plane[:0]
    return np.concatenate([plane[first : first + count] for first, count in runs.tolist()])
