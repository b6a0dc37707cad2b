"""Running sums of a catalog, so that no reader of stats walks it."""

from dataclasses import dataclass

from kvservice.caches import Cache


@dataclass(slots=True)
class Totals:
    """Running sums over what is held; published caches unless they say hidden.

    By tier, hidden ones too: a cache may be in both.
    """

    masters: int = 0
    mirrors: int = 0
    master_bytes: int = 0
    mirror_bytes: int = 0
    dense_bytes: int = 0
    hidden: int = 0
    hidden_bytes: int = 0
    families: int = 0
    groups: int = 0
    held_bytes: int = 0
    host_caches: int = 0
    host_bytes: int = 0
    ssd_caches: int = 0
    ssd_bytes: int = 0

    def count(self, cache: Cache, sign: int) -> None:
        """Add (1) or take away (-1) a published cache."""
        if cache.master is None:
            self.masters += sign
            self.master_bytes += sign * cache.record_bytes
        else:
            self.mirrors += sign
            self.mirror_bytes += sign * cache.record_bytes
        self.dense_bytes += sign * cache.dense_bytes

    def count_hidden(self, cache: Cache, sign: int) -> None:
        """Add or take away a hidden cache."""
        self.hidden += sign
        self.hidden_bytes += sign * cache.record_bytes
