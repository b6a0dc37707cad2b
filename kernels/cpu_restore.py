"""Restoring on a CPU: what all layers of a restore share is prepared once, a layer then costs a few microseconds.

A layer of 256 tokens is half a megabyte, 25 us of memcpy: checks and tables per layer would double its time.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvservice.kernels import cpu_loops as loops
from kvservice.kernels.cpu_inputs import (
    Int64s,
    PagedLayer,
    Turn,
    address,
    check_mirror,
    check_rows,
    checked_highest,
    make_turn,
    paged_layer,
    plane_words,
)
from kvservice.kernels.shapes import (
    Bits,
    KernelInputError,
    MirrorRows,
    Plane,
    Rotation,
    Target,
    check_dtype,
    check_plane,
)
from kvservice.kernels.vector import TAGS

STREAM_BYTES_MIN = 1 << 18
"""Layers that write less leave their bytes in the cache; larger ones bypass it, as memcpy does."""


@dataclass(slots=True)
class PreparedRestore:
    """A restore of one segment to some targets: everything that its layers share. Safe for many threads.

    Layers whose rotation differs need one of their own. Made by ``prepare_restore``.
    """

    tokens: int
    targets: Sequence[Target]
    shapes: Sequence[Plane]
    rotation: Rotation
    dtype: str
    _bits: np.dtype[Any]
    _planes: Int64s
    _jobs: Int64s
    _tag: Any
    _is_streamed: bool
    _highest_slot: int
    _kept: list[Any]
    _mirror_turns: dict[tuple[int, int], tuple[int, Turn]] = field(default_factory=dict)

    def restore_layer(
        self,
        master: Sequence[Bits],
        paged: PagedLayer,
        mirrors: Sequence[MirrorRows | None] | None = None,
    ) -> None:
        """Write one layer to all targets; ``mirrors`` holds one entry a target, ``None`` where it is dense.

        ``master`` is per plane ``[tokens, heads * head_size]``. Raises ``KernelInputError`` before anything is written.
        """
        if self._highest_slot >= paged.slot_count:
            raise KernelInputError(f"slot {self._highest_slot} is outside paged memory of {paged.slot_count} slots")
        if not len(master) == len(paged.words) == len(self.shapes):
            raise KernelInputError(f"{len(master)} planes in a restore of {len(self.shapes)}; give all planes")
        planes = self._planes.copy()
        element_bytes = self._bits.itemsize
        for i_plane, rows in enumerate(master):
            if not loops.note_plane(planes, i_plane, rows, self.tokens, element_bytes):
                check_rows(rows, self.shapes[i_plane], self._bits)
                raise KernelInputError(f"a plane of {len(rows)} rows in a restore of {self.tokens}; give all rows")
        jobs = self._jobs if mirrors is None else self._mirror_jobs(mirrors)
        loops.restore_planes(
            self._tag, element_bytes, self.tokens, self.rotation.is_interleaved, planes, paged.words, jobs,
            self._is_streamed,
        )  # fmt: skip

    def _mirror_jobs(self, mirrors: Sequence[MirrorRows | None]) -> Int64s:
        jobs = self._jobs.copy()
        for i_target, (target, mirror) in enumerate(zip(self.targets, mirrors, strict=True)):
            if mirror is None:
                continue
            for i_plane, shape in enumerate(self.shapes):
                runs, rows = mirror.runs[i_plane], mirror.rows[i_plane]
                turn, _ = self._mirror_turn(i_plane, target.position - mirror.position)
                covered = loops.note_mirror(
                    jobs, i_plane, i_target, turn, runs, rows, self._planes, self.tokens, self._bits.itemsize
                )
                if covered != len(rows):
                    check_mirror(runs, rows, shape, self._bits)
                    raise KernelInputError(
                        f"{len(rows)} rows for runs that cover {covered}; runs must be sorted, disjoint, not empty and "
                        f"inside the {self.tokens} rows (-1: they are not)"
                    )
        return jobs

    def _mirror_turn(self, i_plane: int, delta: int) -> tuple[int, Turn]:
        """Address of a mirror's table, and the table to keep it alive."""
        key = (i_plane, delta)
        if key not in self._mirror_turns:
            turn = make_turn(self.rotation, delta, self.shapes[i_plane], self._bits)
            self._mirror_turns[key] = (address(turn), turn)
        return self._mirror_turns[key]


def prepare_restore(
    tokens: int,
    master_position: int,
    targets: Sequence[Target],
    shapes: Sequence[Plane],
    rotation: Rotation,
    dtype: str,
) -> PreparedRestore:
    """Check and note what all layers of a restore share: slots, positions, tables. ``Target.mirror`` is not read.

    Distinct slots are the caller's promise (``check_slots``). Raises ``KernelInputError``.
    """
    bits = check_dtype(dtype)
    for shape in shapes:
        check_plane(shape, rotation)
    columns = [np.array(target.slots) for target in targets]
    highest = max((checked_highest(column, tokens) for column in columns), default=-1)
    turns = [[make_turn(rotation, target.position - master_position, s, bits) for target in targets] for s in shapes]
    jobs = np.zeros((len(shapes), len(targets), loops.JOB_WORDS), np.int64)
    slots = [address(column) for column in columns]
    for i_plane, row in enumerate(turns):
        for i_target, turn in enumerate(row):
            jobs[i_plane, i_target, loops.SLOTS] = slots[i_target]
            jobs[i_plane, i_target, loops.TURN] = address(turn)
    planes = np.array([plane_words(shape, bits) for shape in shapes], np.int64)
    row_bytes = max(shape.heads * shape.head_size for shape in shapes) * bits.itemsize
    is_streamed = row_bytes * tokens * len(targets) >= STREAM_BYTES_MIN
    return PreparedRestore(
        tokens, targets, shapes, rotation, dtype, bits, planes, jobs, TAGS[dtype], is_streamed, highest,
        [turns, columns],
    )  # fmt: skip


def restore_layer(
    master: Sequence[Bits],
    master_position: int,
    targets: Sequence[Target],
    paged: Sequence[Bits] | PagedLayer,
    shapes: Sequence[Plane],
    rotation: Rotation,
    dtype: str,
) -> None:
    """Write one layer of a cache to every target's slots: each master row is read once.

    ``master`` holds per plane ``[tokens, heads * head_size]`` (contiguous), ``paged`` per plane a view
    ``[blocks, block_size, heads, head_size]`` of the engine's memory with any strides. Clean rows move from
    ``master_position``, a mirror's rows from the mirror's position. Slots must be distinct (``check_slots``, once for
    all layers). Raises ``KernelInputError`` before anything is written. Many layers: ``prepare_restore``.
    """
    layer = paged if isinstance(paged, PagedLayer) else paged_layer(paged, shapes, check_dtype(dtype))
    prepared = prepare_restore(len(master[0]), master_position, targets, shapes, rotation, dtype)
    has_mirror = any(target.mirror is not None for target in targets)
    prepared.restore_layer(master, layer, [target.mirror for target in targets] if has_mirror else None)
