"""What went between nodes as 8 bits, counted."""

from dataclasses import dataclass


@dataclass(slots=True)
class PackedCounters:
    """``packed_bytes``: of records, that came or went packed; ``packed_wire_bytes``: what they took on the wire."""

    packed_bytes: int = 0
    packed_wire_bytes: int = 0

    def note_packed(self, packed_bytes: int, packed_wire_bytes: int) -> None:
        """So many more."""
        self.packed_bytes += packed_bytes
        self.packed_wire_bytes += packed_wire_bytes

    def add_packed(self, other: "PackedCounters") -> None:
        """Count another's, too."""
        self.note_packed(other.packed_bytes, other.packed_wire_bytes)
