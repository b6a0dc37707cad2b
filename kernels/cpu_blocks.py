"""Rows to and from blocks that an engine packs as its own kernels like, by a table of places (numba, nogil).

Bits are moved, values never looked at, save that a gather counts those which are not finite. Where neighbours of a row
are neighbours in the block they go together: a pair of bfloat16 of AMX's K, a head of a plain layout.
"""

# mypy: disable-error-code="untyped-decorator, no-any-return"
from dataclasses import dataclass, field
from math import gcd
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from kvservice.kernels.cpu_inputs import Int64s, address
from kvservice.kernels.cpu_steps import copy_bytes, count_nonfinite
from kvservice.kernels.cpu_tables import slot_bounds
from kvservice.kernels.shapes import Bits, KernelInputError, check_dtype
from kvservice.kernels.vector import TAGS, copy_four_bytes, copy_two_bytes, load_int32, load_word

_PLACE_BYTES = 4
_REACH_MAX = (1 << 31) - 1


@dataclass(frozen=True, slots=True, eq=False)
class BlockTable:
    """Where one plane's values lie in a block. Safe for many threads. Raises ``KernelInputError``.

    ``perm`` int64 ``[block_size, heads * head_size]``: the element offset inside a block of every value, none twice,
    each below ``block_elements``.
    """

    perm: Int64s
    block_elements: int
    dtype: str
    bits: np.dtype[Any] = field(init=False)
    stretch_bytes: int = field(init=False)
    """The longest piece in which every row may be moved."""
    places: npt.NDArray[np.int32] = field(init=False)
    """``[block_size, stretches]``: the byte offset of every stretch."""

    def __post_init__(self) -> None:
        bits = check_dtype(self.dtype)
        _check_perm(self.perm, self.block_elements, bits.itemsize)
        width = _stretch(self.perm)
        object.__setattr__(self, "bits", bits)
        object.__setattr__(self, "stretch_bytes", width * bits.itemsize)
        object.__setattr__(self, "places", (self.perm[:, ::width] * bits.itemsize).astype(np.int32, order="C"))

    def words(self) -> tuple[int, int, int, int]:
        """Block size, where ``places`` are, stretches of a row and their bytes, as ``scatter_rows`` takes them."""
        return self.block_size, address(self.places), self.places.shape[1], self.stretch_bytes

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self.perm.shape[0]

    @property
    def row_elements(self) -> int:
        """Elements of a row."""
        return self.perm.shape[1]


def scatter_by_table(blocks: Bits, slots: Int64s, table: BlockTable, rows: Bits) -> None:
    """Write ``rows`` ``[n, row_elements]``, contiguous, to ``slots`` of ``blocks``; what lies beside is untouched.

    ``blocks`` is ``[blocks, block_elements]``, contiguous inside a block. Slot -1 leaves a row out; no other may be
    there twice. Raises ``KernelInputError`` before anything is written.
    """
    count = _check(blocks, slots, table, rows, lowest=-1, is_rows_written=False)
    scatter_rows(
        address(blocks), blocks.strides[0], *table.words(), address(slots), address(rows), count
    )  # fmt: skip


def gather_by_table(blocks: Bits, slots: Int64s, table: BlockTable, out: Bits) -> int:
    """Copy the rows at ``slots`` to ``out``, as ``scatter_by_table`` takes them, none left out.

    Returns how many of the values are NaN or infinite. Raises ``KernelInputError`` before anything is written.
    """
    count = _check(blocks, slots, table, out, lowest=0, is_rows_written=True)
    return _gather_rows(
        TAGS[table.dtype], table.bits.itemsize, address(blocks), blocks.strides[0], *table.words(), address(slots),
        address(out), count,
    )  # fmt: skip


@njit(nogil=True, cache=True)
def scatter_rows(
    blocks: int,
    block_stride: int,
    block_size: int,
    places: int,
    stretches: int,
    stretch_bytes: int,
    slots: int,
    rows: int,
    count: int,
) -> None:
    """Spread contiguous rows to their slots, by address; a slot below 0 leaves its row out."""
    for i_row in range(count):
        slot = load_word(slots, i_row)
        if slot < 0:
            continue
        block = slot // block_size
        row_places = places + (slot - block * block_size) * stretches * _PLACE_BYTES
        target, source = blocks + block * block_stride, rows + i_row * stretches * stretch_bytes
        if stretch_bytes == 2:
            for i in range(stretches):
                copy_two_bytes(target + load_int32(row_places + i * _PLACE_BYTES), source + 2 * i)
        elif stretch_bytes == 4:
            for i in range(stretches):
                copy_four_bytes(target + load_int32(row_places + i * _PLACE_BYTES), source + 4 * i)
        else:
            for i in range(stretches):
                place = load_int32(row_places + i * _PLACE_BYTES)
                copy_bytes(target + place, source + stretch_bytes * i, stretch_bytes, False)


@njit(nogil=True, cache=True)
def _gather_rows(
    tag: Any,
    element_bytes: int,
    blocks: int,
    block_stride: int,
    block_size: int,
    places: int,
    stretches: int,
    stretch_bytes: int,
    slots: int,
    out: int,
    count: int,
) -> int:
    nonfinite = 0
    for i_row in range(count):
        slot = load_word(slots, i_row)
        block = slot // block_size
        row_places = places + (slot - block * block_size) * stretches * _PLACE_BYTES
        source, target = blocks + block * block_stride, out + i_row * stretches * stretch_bytes
        if stretch_bytes == 2:
            for i in range(stretches):
                copy_two_bytes(target + 2 * i, source + load_int32(row_places + i * _PLACE_BYTES))
        elif stretch_bytes == 4:
            for i in range(stretches):
                copy_four_bytes(target + 4 * i, source + load_int32(row_places + i * _PLACE_BYTES))
        else:
            for i in range(stretches):
                place = load_int32(row_places + i * _PLACE_BYTES)
                copy_bytes(target + stretch_bytes * i, source + place, stretch_bytes, False)
        nonfinite += count_nonfinite(tag, target, stretches * stretch_bytes, element_bytes)
    return nonfinite


def _stretch(perm: Int64s) -> int:
    """The largest number of elements that divides every row into pieces which are pieces of the block too."""
    is_break = (np.diff(perm, axis=1) != 1).any(axis=0)
    return gcd(perm.shape[1], *(np.flatnonzero(is_break) + 1).tolist())


def _check_perm(perm: Int64s, block_elements: int, element_bytes: int) -> None:
    if perm.ndim != 2 or perm.dtype != np.int64 or not perm.size:
        raise KernelInputError(
            f"a table of places must be int64 [block_size, row_elements], not {perm.dtype} {perm.shape}"
        )
    lowest, highest = int(perm.min()), int(perm.max())
    if lowest < 0 or highest >= block_elements or block_elements * element_bytes > _REACH_MAX:
        raise KernelInputError(f"places {lowest}..{highest} do not lie in a block of {block_elements} elements")
    if len(np.unique(perm)) != perm.size:
        raise KernelInputError("a table of places names one place twice")


def check_blocks(blocks: Bits, table: BlockTable, *, is_written: bool) -> int:
    """How many slots the blocks have; raises ``KernelInputError`` unless they are of the table's kind."""
    if blocks.ndim != 2 or blocks.shape[1] != table.block_elements or blocks.dtype != table.bits:
        raise KernelInputError(
            f"blocks must be {table.bits} [blocks, {table.block_elements}], not {blocks.dtype} {list(blocks.shape)}"
        )
    if blocks.strides[1] != table.bits.itemsize:
        raise KernelInputError(f"a block must be contiguous, its elements are {blocks.strides[1]} bytes apart")
    if is_written and not blocks.flags.writeable:
        raise KernelInputError("the blocks are read-only; give a writable view")
    return len(blocks) * table.block_size


def _check(blocks: Bits, slots: Int64s, table: BlockTable, rows: Bits, *, lowest: int, is_rows_written: bool) -> int:
    """How many rows; raises ``KernelInputError`` unless everything fits."""
    slot_count = check_blocks(blocks, table, is_written=not is_rows_written)
    if slots.dtype != np.int64 or slots.ndim != 1 or not slots.flags.c_contiguous:
        raise KernelInputError(f"slots must be contiguous int64 [rows], not {slots.dtype} {list(slots.shape)}")
    wanted = (len(slots), table.row_elements)
    if rows.shape != wanted or rows.dtype != table.bits or not rows.flags.c_contiguous:
        raise KernelInputError(
            f"rows must be contiguous {table.bits} {list(wanted)}, not {rows.dtype} {list(rows.shape)}"
        )
    if is_rows_written and not rows.flags.writeable:
        raise KernelInputError("the output is read-only; give a writable view")
    first, last = slot_bounds(slots)
    if first < lowest or last >= slot_count:
        raise KernelInputError(f"slots {first}..{last} do not fit blocks of {slot_count} slots")
    return len(slots)
