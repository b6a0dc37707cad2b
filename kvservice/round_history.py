"""The last rounds that were committed: their names and segments, for those who look. State only, owned by one thread.

It holds digests, not caches: a segment that went since is simply not found.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from kvservice.model.identity import Namespace
from kvservice.model.segment import CacheKey, SegmentId

ROUNDS_MAX = 32
SEGMENTS_MAX = 64
"""Of one round that are remembered: a round's record is 2 KiB at most."""
NAME_CHARS_MAX = 64


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """One round. ``members``: caches that it named; ``segments``: the first SEGMENTS_MAX of ``segment_count``.

    ``elections``: segments that got a master. Bytes are of the records of all its families. ``at_s``: of the node's
    uptime.
    """

    name: str
    namespace: Namespace
    at_s: float
    members: int
    segment_count: int
    segments: tuple[SegmentId, ...]
    elections: int
    bytes_before: int
    bytes_after: int


class RoundHistory:
    """A ring of them, the newest last."""

    def __init__(self, rounds_max: int = ROUNDS_MAX) -> None:
        self._records: deque[RoundRecord] = deque(maxlen=rounds_max)
        self.committed = 0

    def note(
        self,
        name: str,
        namespace: bytes,
        keys: Iterable[CacheKey],
        elections: int,
        sizes: tuple[int, int],
        at_s: float,
    ) -> None:
        """A round was committed. ``sizes``: bytes before and after."""
        members = list(keys)
        segments = list(dict.fromkeys(key.segment for key in members))
        self.committed += 1
        self._records.append(
            RoundRecord(
                name[:NAME_CHARS_MAX],
                Namespace(namespace),
                at_s,
                len(members),
                len(segments),
                tuple(islice(segments, SEGMENTS_MAX)),
                elections,
                *sizes,
            )
        )

    def newest(self, count: int) -> list[RoundRecord]:
        """At most ``count``, the newest first."""
        return list(islice(reversed(self._records), count))
