"""What the server of streams needs of the node behind it, and who may ask it.

``Host`` is the interface; host_node.py has the real one. Every call is made by the thread of a connection and may
block; none of them may be called from the node's own loop.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from kvservice.access.principal import Credentials, Principal
from kvservice.model.identity import Namespace
from kvservice.model.plan import Match, MissReason
from kvservice.model.segment import CacheKey, ContextId, SegmentId
from kvservice.peers.member import Facts
from kvservice.peers.streams_channel import Source
from kvservice.store import WriteRequest

Authorize = Callable[[Credentials], Principal]
"""Raises UnauthenticatedError for credentials that are unknown or have run out. Any thread calls it."""
IsCurrent = Callable[[Principal], bool]
"""Is what proved a caller still in force? Any thread calls it."""


class Query(NamedTuple):
    """One segment that another node looks for. ``marks``: of the segments before it, nearest first, 8 bytes each."""

    namespace: Namespace
    segment: SegmentId
    accepted_contexts: Sequence[ContextId]
    position: int
    tokens: int
    may_shift: bool = False
    affinity_min: int = 0
    marks: bytes = b""


@dataclass(frozen=True, slots=True)
class FoundHead:
    """Prefix and header of a record, as they lie in memory; not verified.

    ``ahead_bytes``: of the record, from its start to the end of a layer, that come right behind the answer.
    """

    head: bytes
    prefill_s: float
    ahead_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """What answers a query, or why nothing does. ``master`` is set if the record is a mirror."""

    match: Match = Match.NONE
    miss_reason: MissReason = MissReason.NONE
    affinity: int = 0
    record: FoundHead | None = None
    master: FoundHead | None = None


class Fetch(NamedTuple):
    """A record that is to be sent."""

    namespace: Namespace
    key: CacheKey
    generation: int
    lease_id: int


class Held(Protocol):
    """A record that stays where it is until ``release``, which must be called once."""

    @property
    def source(self) -> Source:
        """Its bytes."""

    @property
    def record_bytes(self) -> int:
        """How many."""

    @property
    def may_pack(self) -> bool:
        """Are its rows such as have a form of 8 bits?"""

    def wait(self, beyond: int) -> int:
        """Wait until more than ``beyond`` bytes from the start on are there and right; how many are.

        Raises KVServiceError if no more will come, or nothing came for too long.
        """

    def release(self) -> None:
        """It is not needed any more."""


class Ahead(NamedTuple):
    """The first bytes of a record that was found; whoever gets it releases it."""

    held: Held
    bytes: int


@dataclass(frozen=True, slots=True)
class Found:
    """Answers in the order of the queries. ``lease_id`` is 0 if nothing was found.

    ``ahead``: what is to be sent behind them, in the order of the heads that say so, masters before mirrors.
    """

    lease_id: int
    ttl_s: float
    answers: tuple[Answer, ...]
    ahead: tuple[Ahead, ...] = ()


def _nothing(_start: int, _end: int) -> None:
    return


@dataclass(frozen=True, slots=True)
class Room:
    """Where a record is received: ``view`` is writable until it is committed or aborted.

    ``arrived`` is told of each piece that is there and stays as it is; what is whole is checked then. Any thread may.
    """

    id: int
    view: memoryview
    arrived: Callable[[int, int], None] = _nothing


class HostSession(Protocol):
    """What one caller does and holds, over any number of connections. Any of their threads may call."""

    def register(self, identities: Sequence[str]) -> None:
        """Know these namespaces from now on; one that the caller may not see is as one that holds nothing."""

    def find(self, queries: Sequence[Query], ttl_s: float, wait_s: float, ahead_bytes: int = 0) -> Found:
        """Answer under one lease. Raises InvalidInputError for a namespace that was not registered.

        ``ahead_bytes``: of first layers, at most, that are sent along.
        """

    def renew(self, lease_ids: Sequence[int], ttl_s: float) -> int:
        """How many are still held."""

    def release(self, lease_ids: Sequence[int]) -> int:
        """How many were held."""

    def hold(self, wanted: Fetch) -> Held:
        """The very record. Raises LeaseExpiredError if it is not held (any more)."""

    def reserve(self, request: WriteRequest) -> Room | None:
        """Room for a record; None if its key exists. Raises CapacityError and others."""

    def commit(self, room: Room, header_checksum: int) -> int:
        """Verify and publish what was written; its generation. The room is gone, whatever comes of it."""

    def abort(self, room: Room) -> None:
        """Give the room back; nobody writes there any more."""

    def delete(self, namespace: Namespace, keys: Sequence[CacheKey] | None) -> int:
        """Delete keys of a namespace, or all of it (None); how many were held."""

    def close(self) -> None:
        """End all leases. Called once, after the last connection has ended."""


class Host(Protocol):
    """The node."""

    @property
    def facts(self) -> Facts:
        """What it says of itself now."""

    @property
    def record_bytes_max(self) -> int:
        """Larger ones never fit."""

    def open(self, principal: Principal, name: str) -> HostSession:
        """A session for a caller. Raises LimitError if there are too many."""
