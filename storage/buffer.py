"""Byte buffers as numpy views: the types of this folder, and the one check on what callers hand in.

Payload moves only through calls that release the GIL (np.copyto), never through ``bytes(view)`` or ``tobytes``.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from kvservice.model.errors import InvalidInputError

Bytes = npt.NDArray[np.uint8]
"""[bytes], one dimension, contiguous."""

StorageBits = npt.NDArray[np.unsignedinteger[Any]]
"""[rows, row_elements], uint8, uint16 or uint32: the bits of a storage type, whatever they mean."""

Runs = npt.NDArray[np.int32]
"""[runs, 2]: first row and count of each run; sorted, disjoint."""

BITS_OF_ELEMENT: dict[int, type[np.unsignedinteger[Any]]] = {1: np.uint8, 2: np.uint16, 4: np.uint32}
ALIGNMENT_MIN = 16


def require_bytes(buffer: Bytes, *, is_writable: bool = False) -> None:
    """Raise InvalidInputError unless ``buffer`` is flat, contiguous uint8 on a 16-byte boundary."""
    if buffer.dtype != np.uint8 or buffer.ndim != 1 or not buffer.flags.c_contiguous:
        raise InvalidInputError(f"a buffer is flat contiguous uint8, this is {buffer.dtype} of shape {buffer.shape}")
    if len(buffer) and buffer.ctypes.data % ALIGNMENT_MIN:
        raise InvalidInputError(
            f"a record's buffer must start on a {ALIGNMENT_MIN}-byte boundary; take it from an arena"
        )
    if is_writable and not buffer.flags.writeable:
        raise InvalidInputError("the buffer is read-only; reserve an extent in a session that writes")


def round_up(length: int, step: int) -> int:
    """The smallest multiple of ``step`` that is at least ``length``."""
    return -(-length // step) * step


def checksum(view: Bytes) -> int:
    """XXH3-64 of a contiguous view. Releases the GIL."""
    return xxh3_64_intdigest(view.data)
