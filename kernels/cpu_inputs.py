"""What a CPU call hands to ``cpu_loops``: checked inputs as addresses and words, tables of cosines and sines.

Whatever an address stands for must be kept alive by the caller until the call is over.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from kvservice.kernels import cpu_loops as loops
from kvservice.kernels import cpu_tables
from kvservice.kernels.rotation import rotation_table
from kvservice.kernels.shapes import Bits, KernelInputError, Plane, Rotation
from kvservice.kernels.vector import LANES

Int64s = npt.NDArray[np.int64]
Turn = npt.NDArray[np.float32] | None


@dataclass(frozen=True, slots=True)
class PagedLayer:
    """One layer of an engine's paged memory, checked once and kept for as long as the engine keeps the memory.

    ``planes`` holds ``cpu_loops``' words of every plane, dense rows left open.
    """

    planes: Int64s
    bits: np.dtype[Any]
    slot_count: int
    kept: tuple[Any, ...]


def paged_layer(memory: Sequence[Bits], shapes: Sequence[Plane], bits: np.dtype[Any]) -> PagedLayer:
    """Check per-plane views ``[blocks, block_size, heads, head_size]`` (any strides) and note where they are."""
    planes = np.zeros((len(shapes), loops.PLANE_WORDS), np.int64)
    for words, view, shape in zip(planes, memory, shapes, strict=True):
        check_paged(view, shape, bits)
        words[:] = plane_words(shape, bits)
        words[loops.PAGED :] = [address(view), view.shape[1], *view.strides]
    slot_count = min((view.shape[0] * view.shape[1] for view in memory), default=0)
    return PagedLayer(planes, bits, slot_count, tuple(memory))


def plane_words(shape: Plane, bits: np.dtype[Any], rows: int = 0) -> list[int]:
    """A plane's words for ``cpu_loops``, paged part left 0; ``rows`` is the address of its dense rows."""
    size = bits.itemsize
    rotary = (shape.rotary_offset * size, shape.rotary_size * size)
    return [rows, shape.heads, shape.head_size * size, *rotary, *[0] * (loops.PLANE_WORDS - loops.PAGED)]


def address(array: npt.NDArray[Any] | None) -> int:
    """Where an array begins; 0 for none."""
    return 0 if array is None else array.ctypes.data


def check_rows(plane: Bits, shape: Plane, bits: np.dtype[Any], *, is_written: bool = False) -> None:
    """Raise ``KernelInputError`` unless ``plane`` is contiguous ``[rows, heads * head_size]`` of the right type."""
    width = shape.heads * shape.head_size
    if plane.ndim != 2 or plane.shape[1] != width or plane.dtype != bits or not plane.flags.c_contiguous:
        raise KernelInputError(
            f"rows must be contiguous {bits} [rows, {width}], not {plane.dtype} {list(plane.shape)} "
            f"with strides {list(plane.strides)}"
        )
    if is_written and not plane.flags.writeable:
        raise KernelInputError("the output is read-only; give a writable view")


def check_paged(memory: Bits, shape: Plane, bits: np.dtype[Any]) -> None:
    """Raise ``KernelInputError`` unless ``memory`` is ``[blocks, block_size, heads, head_size]`` of the right type."""
    if memory.ndim != 4 or memory.shape[2:] != (shape.heads, shape.head_size) or memory.dtype != bits:
        raise KernelInputError(
            f"paged memory must be {bits} [blocks, block_size, {shape.heads}, {shape.head_size}], "
            f"not {memory.dtype} {list(memory.shape)}"
        )


def check_gathered_slots(slots: Int64s, slot_count: int) -> None:
    """Raise ``KernelInputError`` unless slots are contiguous int64 ``[rows]``, each inside ``slot_count``."""
    if slots.dtype != np.int64 or slots.ndim != 1 or not slots.flags.c_contiguous:
        raise KernelInputError(f"slots must be contiguous int64 [rows], not {slots.dtype} {list(slots.shape)}")
    lowest, highest = cpu_tables.slot_bounds(slots)
    if len(slots) and (lowest < 0 or highest >= slot_count):
        raise KernelInputError(
            f"slots {lowest}..{highest} do not fit paged memory of {slot_count} slots; only a restore may leave out "
            "rows, by -1"
        )


def check_mirror(runs: npt.NDArray[np.int32], rows: Bits, shape: Plane, bits: np.dtype[Any]) -> None:
    """Raise ``KernelInputError`` unless a mirror's runs and rows of one plane have their shapes and types."""
    check_rows(rows, shape, bits)
    if runs.ndim != 2 or runs.shape[1] != 2 or runs.dtype != np.int32 or not runs.flags.c_contiguous:
        raise KernelInputError(f"runs must be contiguous int32 [n, 2], not {runs.dtype} {list(runs.shape)}")


def make_turn(rotation: Rotation, delta: int, shape: Plane, bits: np.dtype[Any]) -> Turn:
    """The table that moves by ``delta``; none where nothing rotates."""
    if delta == 0 or shape.rotary_size == 0 or not rotation.frequencies:
        return None
    return _turn_table(rotation, delta, bits.itemsize)


@lru_cache(maxsize=4096)
def _turn_table(rotation: Rotation, delta: int, element_bytes: int) -> npt.NDArray[np.float32]:
    """Cosines and sines in the order ``loops`` reads them, 8 bytes a pair; kept alive by the cache and its callers.

    Whole lines first: 16 cosines, 16 sines; of 16-bit halves the even pairs of a line, then the odd ones. The rest of
    the pairs, too few for a line, as (cosine, sine).
    """
    turns = np.stack(rotation_table(rotation, delta))  # [2, pairs]
    is_packed = element_bytes == 2 and not rotation.is_interleaved
    line = 0 if rotation.is_interleaved and element_bytes == 4 else LANES * (2 if is_packed else 1)
    whole = turns.shape[1] // line * line if line else 0
    if is_packed:
        lines = turns[:, :whole].reshape(2, -1, LANES, 2).transpose(1, 3, 0, 2).ravel()
    else:
        lines = turns[:, :whole].reshape(2, -1, LANES).transpose(1, 0, 2).ravel()
    table = np.concatenate([lines, turns[:, whole:].T.ravel()])
    room = np.empty(table.size + LANES, np.float32)
    start = -(address(room) // table.itemsize) % LANES  # a table across cache lines costs two loads for each
    aligned = room[start : start + table.size]
    aligned[:] = table
    return aligned
