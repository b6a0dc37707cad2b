"""What is known of a record on the slab without reading it: what the index says, or what a scan of the slab found."""

from dataclasses import dataclass

from kvservice.model.cache import CacheMeta, Extent


@dataclass(frozen=True, slots=True)
class SsdEntry:
    """One record on the slab.

    ``extent``: where it starts in the slab's file, and its record's bytes. ``generation`` and ``header_checksum``: what
    must be found there. ``sequence`` rises with every write over the slab's whole life. ``prefill_s``: seconds that
    computing the cache took, 0 if nobody said. ``is_deleted``: kept only for the mirrors that stand on it.
    """

    meta: CacheMeta
    extent: Extent
    generation: int
    header_checksum: int
    sequence: int
    prefill_s: float
    is_deleted: bool = False
