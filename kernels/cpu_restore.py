"""Restoring on a CPU: what all layers share is prepared once, then any number of layers is one compiled call.

A layer of 256 tokens is half a megabyte, 70 us of memcpy: checks and tables per layer would double its time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvservice.kernels import cpu_loops as loops
from kvservice.kernels import cpu_tables
from kvservice.kernels.cpu_inputs import Int64s, PagedLayer, address, check_mirror, check_rows, paged_layer
from kvservice.kernels.cpu_layers import DenseLayers, MirrorLayers, PagedLayers, paged_layers
from kvservice.kernels.shapes import Bits, KernelInputError, MirrorRows, Plane, Rotation, Target, check_dtype
from kvservice.kernels.vector import TAGS

STREAM_BYTES_MIN = 1 << 18
"""Layers that write less leave their bytes in the cache; larger ones bypass it, as memcpy does."""

_SLOT = np.dtype(np.int64)
_NO_BYTES, _EVERYWHERE = np.empty(0, np.uint8), (1 << 63) - 1
"""Buffer and reach of offsets that are addresses, of arrays that were checked one by one."""


@dataclass(slots=True)
class OpenMirrors:
    """Layers ``[first, end)`` of all mirrors of a restore, as its compiled loops look for them."""

    first: int
    end: int
    words: Int64s
    words_at: int
    kept: Sequence[MirrorLayers | None]


@dataclass(slots=True)
class PreparedRestore:
    """A restore of one segment to some targets: everything that its layers share. Safe for many threads.

    Made by ``prepare_restore``.
    """

    tokens: int
    paged: PagedLayers
    targets: int
    jobs_at: int
    _is_streamed: bool
    _kept: list[Any]

    def open_mirrors(self, first: int, mirrors: Sequence[MirrorLayers | None]) -> "OpenMirrors":
        """Note where the targets' mirrors, one a target, ``None`` where it is dense, have layers from ``first`` on.

        Raises ``KernelInputError`` unless all of them have equally many layers.
        """
        if len(mirrors) != self.targets:
            raise KernelInputError(f"{len(mirrors)} mirrors for {self.targets} targets; give one each, or None")
        shapes = {mirror.run_ends.shape for mirror in mirrors if mirror is not None}
        if len(shapes) > 1 or any(shape[1] != len(self.paged.shapes) for shape in shapes):
            raise KernelInputError(f"mirrors of {sorted(shapes)} layers and planes; give the same layers, all planes")
        words, words_at = np.zeros((self.targets, loops.MIRROR_WORDS), np.int64), 0
        for i_target, mirror in enumerate(mirrors):
            if mirror is not None:
                words_at = mirror.note(words, i_target)
        layers = next(iter(shapes), (self.paged.layers,))[0]
        return OpenMirrors(first, first + layers, words, words_at, mirrors)

    def restore_layers(self, first: int, end: int, master: DenseLayers, mirrors: "OpenMirrors | None" = None) -> None:
        """Write layers ``[first, end)`` to all targets, in order; all of them are in place when it returns.

        ``master`` has all layers, ``mirrors`` these and any others. Raises ``KernelInputError`` before anything is
        written.
        """
        layers, planes = self.paged.layers, len(self.paged.shapes)
        if not 0 <= first <= end <= layers or len(master.plane_offsets) != planes:
            raise KernelInputError(
                f"layers {first}..{end}, {len(master.plane_offsets)} planes each, for memory of {layers} and {planes}"
            )
        if mirrors is not None and not mirrors.first <= first <= end <= mirrors.end:
            raise KernelInputError(f"layers {first}..{end} of mirrors opened for {mirrors.first}..{mirrors.end}")
        bad, i_target = self._write(first, end, master.words_at, mirrors)
        if bad >= 0:
            raise KernelInputError(f"layer {first + bad // planes}, plane {bad % planes}: {self._complaint(i_target)}")

    def restore_planes(self, master: Sequence[Bits], mirrors: Sequence[MirrorRows | None]) -> None:
        """Write the one layer of this paged memory from arrays: ``master`` per plane ``[tokens, heads * head_size]``.

        ``mirrors``: one entry a target, ``None`` where it is dense. Raises ``KernelInputError`` before anything
        is written.
        """
        paged = self.paged
        if paged.layers != 1 or len(master) != len(paged.shapes):
            raise KernelInputError(f"{len(master)} planes in a restore of {len(paged.shapes)}; give all planes")
        for rows, shape in zip(master, paged.shapes, strict=True):
            check_rows(rows, shape, paged.bits)
            if len(rows) != self.tokens:
                raise KernelInputError(f"a plane of {len(rows)} rows in a restore of {self.tokens}; give all rows")
        dense = DenseLayers(_NO_BYTES, 0, 0, [address(rows) for rows in master])
        dense.words[loops.BASE], dense.words[loops.BYTES] = 0, _EVERYWHERE
        opened = self.open_mirrors(0, [None if one is None else self._in_place(one) for one in mirrors])
        opened.words[:, loops.BASE], opened.words[:, loops.BYTES] = 0, _EVERYWHERE
        bad, i_target = self._write(0, 1, dense.words_at, opened)
        if bad >= 0:
            mirror = mirrors[i_target]
            assert mirror is not None
            covered = int(mirror.runs[bad][:, 1].sum())
            raise KernelInputError(
                f"{len(mirror.rows[bad])} rows for runs that cover {covered}; {self._complaint(i_target)}"
            )

    def _write(self, first: int, end: int, master: int, mirrors: "OpenMirrors | None") -> tuple[int, int]:
        """(-1, -1), or the first plane that is wrong and whose it is, with nothing written."""
        paged = self.paged
        mirrors_at, mirrors_first = (mirrors.words_at, mirrors.first) if mirrors is not None else (0, 0)
        bad: tuple[int, int] = loops.restore_layers(
            TAGS[paged.dtype], paged.bits.itemsize, self.tokens, first, end, len(paged.shapes), self.targets,
            paged.words_at, paged.turning_at, self.jobs_at, master, mirrors_at, mirrors_first, self._is_streamed,
        )  # fmt: skip
        return bad

    def _in_place(self, mirror: MirrorRows) -> MirrorLayers:
        """One layer's arrays, wherever they are: bounds of rows are addresses."""
        for runs, rows, shape in zip(mirror.runs, mirror.rows, self.paged.shapes, strict=True):
            check_mirror(runs, rows, shape, self.paged.bits)
        bounds = np.array([[(address(rows), address(rows) + rows.nbytes) for rows in mirror.rows]], np.int64)
        run_ends = np.cumsum([len(runs) for runs in mirror.runs], dtype=np.int64).reshape(1, -1)
        return MirrorLayers(_NO_BYTES, bounds, np.concatenate(mirror.runs), run_ends)

    def _complaint(self, i_target: int) -> str:
        if i_target < 0:
            return f"its {self.tokens} rows lie outside the buffer"
        return (
            f"runs of target {i_target}'s mirror must be sorted, disjoint, not empty, inside the {self.tokens} rows, "
            "and cover the rows that are there"
        )


def prepare_restore(
    tokens: int,
    master_position: int,
    targets: Sequence[Target],
    paged: PagedLayers,
    mirror_positions: Sequence[int | None] = (),
) -> PreparedRestore:
    """Check and note what all layers of a restore share: slots, positions, tables.

    ``mirror_positions``, where there are mirrors: one a target, ``None`` where it is dense; ``Target.mirror`` is not
    read. Distinct slots are the caller's promise (``check_slots``). Raises ``KernelInputError``.
    """
    count = len(targets)
    columns = np.empty((count, tokens), np.int64)
    jobs, jobs_at = np.empty((len(paged.rotations) * len(paged.shapes), count, loops.JOB_WORDS), np.int64), 0
    kept: list[Any] = [jobs, columns]
    sources = mirror_positions or [None] * count
    for i_target, (target, source) in enumerate(zip(targets, sources, strict=True)):
        slots, turns = target.slots, paged.turns(target.position - master_position)
        mirror_turns = turns if source is None else paged.turns(target.position - source)
        if slots.dtype != _SLOT or slots.shape != (tokens,):
            raise KernelInputError(f"slots must be int64 [{tokens}], not {slots.dtype} {list(slots.shape)}")
        lowest, highest, jobs_at = cpu_tables.note_target(jobs, columns, i_target, slots, turns[0], mirror_turns[0])
        if lowest < -1:
            raise KernelInputError(f"slot {lowest} does not fit paged memory; -1 leaves out a row of a restore")
        if highest >= paged.slot_count:
            raise KernelInputError(f"slot {highest} is outside paged memory of {paged.slot_count} slots")
        kept += turns, mirror_turns
    is_streamed = paged.row_bytes_max * tokens * count >= STREAM_BYTES_MIN
    return PreparedRestore(tokens, paged, count, jobs_at, is_streamed, kept)


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
    mirrors = [target.mirror for target in targets]
    positions = [None if mirror is None else mirror.position for mirror in mirrors]
    whole = paged_layers([layer], shapes, [rotation], dtype)
    prepare_restore(len(master[0]), master_position, targets, whole, positions).restore_planes(master, mirrors)
