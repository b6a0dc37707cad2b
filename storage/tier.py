"""The contract of a tier, and its naive form: the readable reference and the test double."""

from typing import Protocol

import numpy as np

from kvservice.model.cache import Extent
from kvservice.model.errors import InvalidInputError
from kvservice.storage.buffer import Bytes

POISON = 0xCB


class Tier(Protocol):
    """A place that records are kept in: moves bytes, knows nothing of what they mean.

    One thread owns a tier and calls ``reserve`` and ``free``; ``write`` and ``read`` may come from any thread, at the
    same time, for different extents. The caller keeps two writers, or a writer and a reader, off one extent, and frees
    none that is in use. The bytes of a reserved extent are undefined until written. ``write`` and ``read`` block until
    done, hold on to neither array, release the GIL while they move bytes, and raise InvalidInputError for an extent
    that is not reserved here or an array of another length.
    """

    @property
    def name(self) -> str:
        """One word, for metrics and messages."""

    @property
    def capacity_bytes(self) -> int:
        """Bytes this tier can hold."""

    @property
    def used_bytes(self) -> int:
        """Bytes reserved, rounding included."""

    def reserve(self, length: int) -> Extent | None:
        """An extent of ``length`` bytes, or None if there is no room. Raises InvalidInputError for less than 1 byte."""

    def write(self, extent: Extent, source: Bytes) -> None:
        """Copy ``source`` into the extent; both have the same length."""

    def read(self, extent: Extent, target: Bytes) -> None:
        """Copy the extent into ``target``; both have the same length."""

    def free(self, extent: Extent) -> None:
        """Give the extent back. Raises InvalidInputError, and changes nothing, if it is not reserved."""


class NaiveTier:
    """Every extent an array of its own. Never fragments; unwritten bytes are poisoned."""

    def __init__(self, capacity_bytes: int, name: str = "naive") -> None:
        self.name = name
        self.capacity_bytes = capacity_bytes
        self._arrays: dict[Extent, Bytes] = {}
        self._next_offset = 0

    @property
    def used_bytes(self) -> int:
        """See Tier."""
        return sum(extent.length for extent in self._arrays)

    def reserve(self, length: int) -> Extent | None:
        """See Tier."""
        if length < 1:
            raise InvalidInputError(f"an extent has 1 byte or more, not {length}")
        if self.used_bytes + length > self.capacity_bytes:
            return None
        extent = Extent(self._next_offset, length)
        self._next_offset += length
        self._arrays[extent] = np.full(length, POISON, np.uint8)
        return extent

    def write(self, extent: Extent, source: Bytes) -> None:
        """See Tier."""
        require_length(extent, source)
        np.copyto(self._array(extent), source)

    def read(self, extent: Extent, target: Bytes) -> None:
        """See Tier."""
        require_length(extent, target)
        np.copyto(target, self._array(extent))

    def free(self, extent: Extent) -> None:
        """See Tier."""
        self._array(extent)
        del self._arrays[extent]

    def _array(self, extent: Extent) -> Bytes:
        try:
            return self._arrays[extent]
        except KeyError:
            raise not_reserved(extent, self.name) from None


def require_length(extent: Extent, array: Bytes) -> None:
    """Raise InvalidInputError unless ``array`` is flat uint8 of the extent's length."""
    if array.dtype != np.uint8 or array.shape != (extent.length,):
        raise InvalidInputError(f"{extent} wants flat uint8 of its length, not {array.dtype} of shape {array.shape}")


def not_reserved(extent: Extent, tier: str) -> InvalidInputError:
    """The error for an extent that a tier does not hold."""
    return InvalidInputError(f"{extent} is not reserved in tier {tier}; it was freed before or comes from elsewhere")
