"""The contract of a remote tier: a place outside this host that keeps whole records under their names.

What comes from there is hostile: a head is believed once ``read_head`` has verified it, a section once its checksum was
(storage/arrival.py). So amnesia or rot at such a place is a miss, never a wrong byte.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from kvservice.model.identity import Namespace
from kvservice.model.segment import ContextId, SegmentId
from kvservice.storage.buffer import Bytes
from kvservice.storage.record_reader import RecordHead

OnPiece = Callable[[int, int], None]
"""Told, from any thread, that bytes [start, end) of a record are in the target. May raise CorruptError."""


class RemoteName(NamedTuple):
    """What a record is called in every place."""

    namespace: Namespace
    segment: SegmentId
    context: ContextId


class Wanted(NamedTuple):
    """One segment that is looked for: by contexts, best first, and up to ``others_max`` caches of other contexts."""

    namespace: Namespace
    segment: SegmentId
    contexts: tuple[ContextId, ...]
    others_max: int = 0


@dataclass(frozen=True, slots=True)
class RemoteFeatures:
    """What a place can do.

    ``reads_ranges``: layers can be used before the whole record is here. ``creates_once``: of two writers of one name
    the place itself keeps the first. ``lists_segments``: ``find`` also answers with contexts that were not named.
    ``is_durable``: what was stored is there after the place restarts. ``record_bytes_max``: larger ones are refused.
    """

    reads_ranges: bool
    creates_once: bool
    lists_segments: bool
    is_durable: bool
    record_bytes_max: int


@dataclass(frozen=True, slots=True)
class RemoteRecord:
    """A record that a place says it holds; its head is verified, its sections are not.

    ``prefill_s``: seconds that computing it took, 0 if unknown. ``version``: the place's own word for these very bytes,
    empty if it has none; ``fetch`` raises CorruptError rather than give those of another version. ``ahead``: its first
    bytes, up to the end of a layer, where they came with the answer; not verified.
    """

    name: RemoteName
    head: RecordHead
    prefill_s: float = 0.0
    version: str = ""
    ahead: Bytes | None = field(default=None, compare=False, repr=False)

    @property
    def record_bytes(self) -> int:
        """Length of the record."""
        return self.head.layout.record_bytes


class RemoteTier(Protocol):
    """A place. All calls come from the loop it was opened on, many at a time; none blocks the loop.

    Every call ends within the deadline that the place was opened with, one that moves payload within what that takes
    at the slowest rate allowed on top, and a fetch of which nothing arrives for a deadline ends too. It then raises
    UnavailableError: the place cannot be reached, was too slow, or its breaker is open. NotOwnedError: it refuses our
    credentials; CorruptError: bytes lie; CapacityError: it is full; StaleEpochError: what was found is gone meanwhile.
    A name that is not there is an answer, no error.
    """

    @property
    def name(self) -> str:
        """One word, for metrics and messages."""

    @property
    def features(self) -> RemoteFeatures:
        """What it can do."""

    async def find(self, wanted: Sequence[Wanted]) -> list[list[RemoteRecord]]:
        """What is held of every segment: named contexts in the order asked, then others, newest first where known.

        A head that lies counts as not held (and is counted as corrupt). One round trip where the place allows it.
        """

    async def fetch(self, record: RemoteRecord, target: Bytes, on_piece: OnPiece, start: int = 0) -> None:
        """Fill ``target[start:]`` with the record's bytes from ``start`` on, in pieces that are told as they arrive.

        ``target`` is as long as the record. A record of which ``on_piece`` raises CorruptError is forgotten by the
        place: else it would be found again and again, and its name could not be stored anew.

        Pieces do not overlap; their order is free. What ``on_piece`` raises ends the fetch and is raised. When this
        returns or raises, nothing writes to ``target`` any more.
        """

    async def store(self, name: RemoteName, record: Bytes, prefill_s: float) -> bool:
        """Keep a record; False if the name is taken already. The record is read until this returns or raises."""

    async def delete(self, name: RemoteName) -> bool:
        """Forget a name; was it there? When this returns no ``find`` answers with it."""

    async def delete_all(self, namespace: Namespace) -> int:
        """Forget all of a namespace, in batches that have the deadline each; how many names there were.

        Raises NotListedError, and has deleted nothing, if the place cannot list what it holds.
        """

    async def close(self) -> None:
        """End what is open. Safe to call twice."""
