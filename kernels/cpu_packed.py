"""Restoring to blocks that an engine packs in its own way: rows are moved and corrected in scratch memory that stays in
the core's cache, then spread by tables of places. Any number of layers is one compiled call.

A segment of a hundred rows is 80 KB a layer; a call for each of its layers would spend half the time between calls, and
wait for the GIL each time.
"""

# mypy: disable-error-code="untyped-decorator"
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numba import njit

from kvservice.kernels.cpu_blocks import BlockTable, check_blocks, scatter_rows
from kvservice.kernels.cpu_inputs import Int64s, address, paged_layer
from kvservice.kernels.cpu_layers import DenseLayers, MirrorLayers, PagedLayers, paged_layers
from kvservice.kernels.cpu_loops import PLANE_BYTES, first_bad_plane, restore_layers
from kvservice.kernels.cpu_restore import STREAM_BYTES_MIN, OpenMirrors, PreparedRestore, prepare_restore
from kvservice.kernels.shapes import Bits, KernelInputError, Plane, Rotation, Target, check_dtype
from kvservice.kernels.vector import TAGS, load_word

BLOCKS, BLOCK_STRIDE, BLOCK_SIZE, PLACES, STRETCHES, STRETCH_BYTES, ROWS, PLANE_WORDS = range(8)
"""Of a plane of packed memory: where its blocks, table and scratch rows are."""
TOKENS, TARGETS, JOBS, MASTER, SLOTS, COUNT, MIRRORS, MIRRORS_FIRST, PIECE_WORDS = range(9)
"""Of a piece of a restore: what ``cpu_loops.restore_layers`` takes, and where its scratch rows go."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedLayers:
    """All layers of an engine's packed memory, kept for as long as the engine keeps the memory, and the scratch rows.

    ``scratch``: the layers as restores see them, all the same ``scratch_rows`` rows. ``words`` int64 ``[layers, planes,
    PLANE_WORDS]``. Safe for many threads: they take turns at the scratch rows. Made by ``packed_layers``.
    """

    scratch: PagedLayers
    scratch_rows: int
    slot_count: int
    words: Int64s
    kept: tuple[Any, ...]
    turn: threading.Lock = field(default_factory=threading.Lock)


def packed_layers(
    blocks: Sequence[Bits],
    tables: Sequence[Sequence[BlockTable]],
    shapes: Sequence[Plane],
    rotations: Sequence[Rotation],
    dtype: str,
) -> PackedLayers:
    """Check and note where all layers are: ``blocks`` one a layer, as ``scatter_by_table`` takes them, ``tables`` one a
    plane of each. Raises ``KernelInputError``."""
    bits = check_dtype(dtype)
    widths = [shape.heads * shape.head_size for shape in shapes]
    rows_max = max(1, (STREAM_BYTES_MIN - 1) // (max(widths) * bits.itemsize))  # more would be written past the cache
    scratch = [np.empty((rows_max, width), bits) for width in widths]
    views = [rows.reshape(1, -1, one.heads, one.head_size) for rows, one in zip(scratch, shapes, strict=True)]
    paged = paged_layers([paged_layer(views, shapes, bits)] * len(blocks), shapes, rotations, dtype)
    words = np.empty((len(blocks), len(shapes), PLANE_WORDS), np.int64)
    slot_counts = []
    for of_planes, memory, own in zip(words, blocks, tables, strict=True):
        for plane, table, width, rows in zip(of_planes, own, widths, scratch, strict=True):
            slot_counts.append(check_blocks(memory, table, is_written=True))
            if table.row_elements != width or table.bits != bits:
                raise KernelInputError(f"a table of {table.row_elements} {table.bits} for rows of {width} {bits}")
            plane[:] = [address(memory), memory.strides[0], *table.words(), address(rows)]
    return PackedLayers(paged, rows_max, min(slot_counts), words, (tuple(blocks), tables, scratch))


@dataclass(frozen=True, slots=True)
class _Piece:
    """Rows ``[first, end)`` of targets. ``slots``: the engine's, one target's behind the other's; -1 leaves out."""

    first: int
    end: int
    targets: slice
    slots: Int64s
    prepared: PreparedRestore
    master: DenseLayers

    def words(self) -> list[int]:
        places = (address(self.slots), len(self.slots))
        prepared = self.prepared
        return [prepared.tokens, prepared.targets, prepared.jobs_at, self.master.words_at, *places, 0, 0]


class PackedRestore:
    """A restore of one segment to some targets in packed memory, in pieces that fit the scratch rows.

    ``mirror_positions`` as ``prepare_restore`` has them. Slots must be distinct (``check_slots``). One thread at a
    time. Raises ``KernelInputError`` before anything is written.
    """

    def __init__(
        self,
        memory: PackedLayers,
        tokens: int,
        master_position: int,
        master: DenseLayers,
        targets: Sequence[Target],
        mirror_positions: Sequence[int | None],
    ) -> None:
        for target in targets:
            _check_slots(target.slots, tokens, memory.slot_count)
        self._memory = memory
        self._targets = len(targets)
        self._pieces = list(_cut(memory, tokens, master_position, master, targets, mirror_positions))
        self._words = np.array([piece.words() for piece in self._pieces], np.int64).reshape(-1, PIECE_WORDS)
        self._opened: list[OpenMirrors] = []
        self._layers = range(memory.scratch.layers)

    def open_mirrors(self, first: int, mirrors: Sequence[MirrorLayers | None]) -> None:
        """Note where the targets' mirrors, one a target, have layers from ``first`` on; ``MirrorLayers.read`` ones."""
        if len(mirrors) != self._targets:
            raise KernelInputError(f"{len(mirrors)} mirrors for {self._targets} targets; give one each, or None")
        row_bytes = self._memory.scratch.row_bytes
        opened = []
        for piece in self._pieces:
            own = [one and one.take_rows(piece.first, piece.end, row_bytes) for one in mirrors[piece.targets]]
            opened.append(piece.prepared.open_mirrors(first, own))
        for words, one in zip(self._words, opened, strict=True):
            words[MIRRORS], words[MIRRORS_FIRST] = one.words_at, first
        self._opened = opened
        self._layers = range(first, min((one.end for one in opened), default=self._memory.scratch.layers))

    def restore_layers(self, first: int, end: int) -> None:
        """Write layers ``[first, end)``, mirrors of which are open, to all targets; all in place when it returns."""
        memory = self._memory
        paged = memory.scratch
        if not self._layers.start <= first <= end <= self._layers.stop:
            raise KernelInputError(f"layers {first}..{end} of {self._layers.start}..{self._layers.stop} that are open")
        with memory.turn:
            i_piece, plane, i_target = _restore_packed(
                TAGS[paged.dtype], paged.bits.itemsize, first, end, len(paged.shapes), paged.words_at,
                paged.turning_at, address(memory.words), address(self._words), len(self._words),
            )  # fmt: skip
        if i_piece >= 0:
            piece, count = self._pieces[i_piece], len(paged.shapes)
            whose = "its rows" if i_target < 0 else f"the mirror of target {piece.targets.start + i_target}"
            raise KernelInputError(
                f"layer {first + plane // count}, plane {plane % count}, rows {piece.first}..{piece.end}: {whose} lie "
                "outside the buffer, or are not what its runs say"
            )


def _cut(
    memory: PackedLayers,
    tokens: int,
    master_position: int,
    master: DenseLayers,
    targets: Sequence[Target],
    mirror_positions: Sequence[int | None],
) -> Iterator[_Piece]:
    """As many whole targets at a time as fit; one target in parts where it does not fit by itself."""
    step = max(1, min(tokens, memory.scratch_rows))
    for first in range(0, tokens, step):
        end = min(first + step, tokens)
        group = memory.scratch_rows // (end - first)
        offsets = [
            at + first * int(size) for at, size in zip(master.plane_offsets, memory.scratch.row_bytes, strict=True)
        ]
        part = DenseLayers(master.buffer, master.start, master.layer_stride, offsets)
        for begin in range(0, len(targets), group):
            own = slice(begin, min(begin + group, len(targets)))
            slots = np.concatenate([target.slots[first:end] for target in targets[own]])
            if (slots < 0).all():
                continue
            rows = np.where(slots < 0, -1, np.arange(len(slots))).reshape(-1, end - first)
            moved = [Target(one.position, places) for one, places in zip(targets[own], rows, strict=True)]
            sources = mirror_positions[own]
            prepared = prepare_restore(end - first, master_position, moved, memory.scratch, sources)
            yield _Piece(first, end, own, slots, prepared, part)


def _check_slots(slots: Int64s, tokens: int, slot_count: int) -> None:
    if slots.dtype != np.int64 or slots.shape != (tokens,):
        raise KernelInputError(f"slots must be int64 [{tokens}], not {slots.dtype} {list(slots.shape)}")
    if tokens and not -1 <= int(slots.min()) <= int(slots.max()) < slot_count:
        raise KernelInputError(f"slots {slots.min()}..{slots.max()} do not fit paged memory of {slot_count} slots")


@njit(nogil=True, cache=True)
def _restore_packed(
    tag: Any,
    element_bytes: int,
    first: int,
    end: int,
    planes: int,
    scratch: int,
    turning: int,
    packed: int,
    pieces: int,
    count: int,
) -> tuple[int, int, int]:
    """All pieces of every layer; with nothing written, which piece is wrong and what ``first_bad_plane`` says of it."""
    for i_piece in range(count):
        piece = pieces + 8 * PIECE_WORDS * i_piece
        skipped = (first - load_word(piece, MIRRORS_FIRST)) * planes
        bad = first_bad_plane(
            load_word(piece, TOKENS), (end - first) * planes, planes, load_word(piece, TARGETS),
            scratch + first * planes * PLANE_BYTES, load_word(piece, MASTER), first, load_word(piece, MIRRORS), skipped,
        )  # fmt: skip
        if bad[0] >= 0:
            return i_piece, bad[0], bad[1]
    for layer in range(first, end):
        for i_piece in range(count):
            piece = pieces + 8 * PIECE_WORDS * i_piece
            restore_layers(
                tag, element_bytes, load_word(piece, TOKENS), layer, layer + 1, planes, load_word(piece, TARGETS),
                scratch, turning, load_word(piece, JOBS), load_word(piece, MASTER), load_word(piece, MIRRORS),
                load_word(piece, MIRRORS_FIRST), False,
            )  # fmt: skip
            for i_plane in range(planes):
                plane = packed + 8 * PLANE_WORDS * (layer * planes + i_plane)
                scatter_rows(
                    load_word(plane, BLOCKS), load_word(plane, BLOCK_STRIDE), load_word(plane, BLOCK_SIZE),
                    load_word(plane, PLACES), load_word(plane, STRETCHES), load_word(plane, STRETCH_BYTES),
                    load_word(piece, SLOTS), load_word(plane, ROWS), load_word(piece, COUNT),
                )  # fmt: skip
    return -1, -1, -1
