"""What is stored of a segment: a dense master, or a mirror that refers to one."""

import enum
from dataclasses import dataclass

from kvservice.model.geometry import Geometry
from kvservice.model.identity import Namespace
from kvservice.model.segment import EXACT, CacheKey, ContextId


class CacheKind(enum.IntEnum):
    """The numbers are on disk and on the wire; never change them."""

    MASTER = 1
    MIRROR = 2


class Tier(enum.IntEnum):
    """Where a record lies. The numbers are on the wire; never change them."""

    GPU = 1
    HOST = 2
    SSD = 3
    REMOTE = 4


@dataclass(frozen=True, slots=True)
class Extent:
    """A stretch of an arena, in bytes."""

    offset: int
    length: int

    @property
    def end(self) -> int:
        """First byte behind it."""
        return self.offset + self.length


@dataclass(frozen=True, slots=True)
class MasterReference:
    """The master that a mirror stands on. ``generation`` is a digest of the master's checksums, so that a mirror
    can never meet other bytes than those it was made from, across restarts too."""

    context: ContextId
    generation: int


@dataclass(frozen=True, slots=True)
class CacheMeta:
    """What a record says of itself, besides its bytes.

    ``position``: the first token's position where the cache was computed. ``preceding``: marks of the segments before,
    nearest first. ``master``: set for a mirror, None for a master.
    """

    namespace: Namespace
    key: CacheKey
    position: int
    tokens: int
    geometry: Geometry
    provenance: str = EXACT
    preceding: tuple[bytes, ...] = ()
    master: MasterReference | None = None

    @property
    def kind(self) -> CacheKind:
        """MASTER (dense) or MIRROR."""
        return CacheKind.MASTER if self.master is None else CacheKind.MIRROR

    @property
    def dense_bytes(self) -> int:
        """Payload bytes of the cache when dense; what it stands for, whatever is stored."""
        return self.tokens * self.geometry.token_bytes
