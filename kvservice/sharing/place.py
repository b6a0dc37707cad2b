"""The contract of a place that records are brought from and given to: another node, or storage behind an engine."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from kvservice.caches import Space
from kvservice.lookup import Asked
from kvservice.model.cache import MasterReference
from kvservice.model.identity import Namespace
from kvservice.model.segment import CacheKey, SegmentId
from kvservice.peers.routes_estimate import Speed
from kvservice.storage.buffer import Bytes
from kvservice.storage.remote.contract import OnPiece, RemoteName, RemoteRecord

HOT_USES = 8
"""Lookups that a group answered before it is worth another copy."""


class Question(NamedTuple):
    """One segment of a prompt that nothing here answers well; ``marks``: the segments before it, flat.

    ``affinity``: of the approximation that is here; -1 without one.
    """

    space: Space
    segment: SegmentId
    asked: Asked
    marks: bytes
    affinity: int = -1


@dataclass(frozen=True, slots=True)
class Offer:
    """What a place has for a question: a record and, if that is a mirror, its master's."""

    record: RemoteRecord
    master: RemoteRecord | None = None


@dataclass(frozen=True, slots=True)
class Parcel:
    """A whole record that is given away; ``view`` is read until ``Carrier.store`` is over."""

    space: Space
    name: RemoteName
    view: Bytes
    header_checksum: int
    master: MasterReference | None
    prefill_s: float


class Carrier(Protocol):
    """One way to where records are, besides here. Called from the node's loop, which no call blocks.

    Every call ends in bounded time. It raises UnavailableError when the place cannot be reached, is too slow, or is
    left alone for a while after that; other kinds of KVServiceError for what the place says.
    """

    @property
    def name(self) -> str:
        """For messages and metrics."""

    async def find(self, questions: Sequence[Question], ahead_bytes: int = 0) -> list[Offer | None]:
        """The best that is held for each question. What is offered stays there until it was fetched, or for a while.

        ``ahead_bytes``: of first layers, at most, that may come with the answer, where the place can: what is going to
        be fetched is then usable after one round trip.
        """

    async def fetch(self, record: RemoteRecord, target: Bytes, on_piece: OnPiece, start: int = 0) -> None:
        """See ``RemoteTier.fetch``."""

    def let_go(self, records: Iterable[RemoteRecord]) -> None:
        """Nobody will fetch these any more. Costs the caller no time."""

    async def store(self, parcel: Parcel) -> bool:
        """Keep a record; False if the key is held there already. MasterGoneError: its master is not held there."""

    async def delete(self, space: Space, keys: Sequence[CacheKey] | None) -> int:
        """Delete keys of a namespace, or all of it (None); how many there were.

        NotListedError: of a whole namespace it has deleted nothing, since it cannot list what it holds.
        """

    async def close(self) -> None:
        """End what is open. Safe to call twice."""


class Place(Carrier, Protocol):
    """Where records are, and how fast they come from there; see ``kvservice.sharing.routed``."""

    @property
    def way(self) -> str:
        """What leads there; records that come the same way share its latency."""

    def speed_of(self, namespace: Namespace) -> Speed:
        """What it gives of a namespace, as far as was measured."""

    @property
    def ahead_bytes(self) -> int:
        """Of first layers, that are worth having with an answer: so many that it does not come much later."""


class Directory(Protocol):
    """Which place has what. Asked on the node's loop."""

    def sources(self, segment: SegmentId) -> Sequence[Place]:
        """Where caches of a segment may be, the likeliest first; the next is asked when one has none."""

    def behind(self, segment: SegmentId) -> Sequence[Place]:
        """Where to look on behalf of another node, which asked its nodes itself: places that are no node."""

    def storages(self) -> Sequence[Place]:
        """All places that are no node."""

    def homes(self, segment: SegmentId, uses: int) -> Sequence[Place]:
        """Where a cache of a segment belongs, besides here; ``uses``: lookups that its group answered here."""

    def everywhere(self) -> Sequence[Place]:
        """All places, for what concerns all of them."""
