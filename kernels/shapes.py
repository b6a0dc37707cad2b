"""The words all kernels share: what a plane looks like, how a layer rotates, what a restore writes.

numpy only: a cache node imports this without torch. Payload is storage bits here, never numbers: uint16 for the
16-bit types, uint32 for float32.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Bits = npt.NDArray[Any]
"""Storage bits: uint16 (bfloat16, float16) or uint32 (float32)."""

BITS_DTYPES: dict[str, np.dtype[Any]] = {
    "bfloat16": np.dtype(np.uint16),
    "float16": np.dtype(np.uint16),
    "float32": np.dtype(np.uint32),
}


class KernelInputError(ValueError):
    """An input does not fit: wrong shape, type, position or slot. Nothing has been written."""


class Plane(Protocol):
    """What kernels read of a plane; ``kvservice.model.geometry.Plane`` and ``PlaneShape`` both fit."""

    @property
    def heads(self) -> int:
        """Heads of one row."""

    @property
    def head_size(self) -> int:
        """Elements of one head."""

    @property
    def rotary_offset(self) -> int:
        """First rotating element of every head."""

    @property
    def rotary_size(self) -> int:
        """Rotating elements of every head; 0 = the plane is copied."""


@dataclass(frozen=True, slots=True)
class PlaneShape:
    """One plane in elements: ``[rotary_offset, +rotary_size)`` of every head rotates, the rest is copied."""

    heads: int
    head_size: int
    rotary_offset: int = 0
    rotary_size: int = 0


@dataclass(frozen=True, slots=True)
class Rotation:
    """How one layer rotates: ``rotary_size / 2`` frequencies (float64); none = nothing rotates.

    Pair ``j`` is elements ``(2j, 2j + 1)`` of the rotary part when ``is_interleaved``, else
    ``(j, j + rotary_size / 2)``.
    """

    frequencies: tuple[float, ...]
    is_interleaved: bool = False


@dataclass(slots=True)
class MirrorRows:
    """One layer of a mirror: per plane its runs and the replaced rows.

    ``position`` is where the rows were computed. ``runs`` holds per plane int32 ``[n, 2]``: (first row, count),
    sorted and disjoint; ``rows`` per plane ``[sum of counts, heads * head_size]`` in run order.
    """

    position: int
    runs: Sequence[npt.NDArray[np.int32]]
    rows: Sequence[Any]


@dataclass(slots=True)
class Target:
    """One place to restore to: its first token's position and one slot a token (int64, -1 = leave this row out)."""

    position: int
    slots: Any
    mirror: MirrorRows | None = None


def check_dtype(dtype: str) -> np.dtype[Any]:
    """The numpy type of ``dtype``'s storage bits; raises ``KernelInputError`` on an unknown name."""
    if dtype not in BITS_DTYPES:
        raise KernelInputError(f"KV dtype {dtype!r} has no kernel; use one of {sorted(BITS_DTYPES)}")
    return BITS_DTYPES[dtype]


def check_plane(shape: Plane, rotation: Rotation) -> None:
    """Raise ``KernelInputError`` unless the plane is well formed and the rotation has a frequency for every pair."""
    inside = shape.rotary_offset >= 0 and shape.rotary_offset + shape.rotary_size <= shape.head_size
    if shape.heads < 1 or shape.head_size < 1 or shape.rotary_size < 0 or shape.rotary_size % 2 or not inside:
        raise KernelInputError(f"plane {shape}: sizes must be positive, the rotary part even and inside the head")
    if shape.rotary_size and rotation.frequencies and len(rotation.frequencies) * 2 != shape.rotary_size:
        raise KernelInputError(
            f"{len(rotation.frequencies)} frequencies for {shape.rotary_size} rotating elements; give one a pair"
        )


def check_slots(slots: Sequence[npt.NDArray[np.int64]], slot_count: int) -> None:
    """Raise ``KernelInputError`` unless all slots are -1 or distinct slots of ``[0, slot_count)``, over all targets.

    Call it once per restore, not per layer: it costs some microseconds per thousand slots.
    """
    used = np.concatenate([np.asarray(one, dtype=np.int64).ravel() for one in slots] or [np.empty(0, np.int64)])
    used = used[used != -1]
    if used.size == 0:
        return
    if int(used.min()) < 0 or int(used.max()) >= slot_count:
        raise KernelInputError(
            f"slots {int(used.min())}..{int(used.max())} do not fit paged memory of {slot_count} slots; "
            "use -1 for rows to leave out"
        )
    is_used = np.zeros(slot_count, dtype=np.bool_)
    is_used[used] = True
    if int(np.count_nonzero(is_used)) != used.size:
        raise KernelInputError(f"{used.size} slots, {int(np.count_nonzero(is_used))} distinct: two rows share a slot")
