"""A session with one node: who we are, what we hold, and the calls of the wire contract in the words of the model.

Importable without torch: tools that only look need no engine.
"""

import time
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np
from google.protobuf.message import Message

from kvservice.client.leases import Clock, LeaseKeeper
from kvservice.client.transport import CALL_TIMEOUT_S, Arena, PendingCall, Transport
from kvservice.model.cache import Extent, Tier
from kvservice.model.errors import (
    InvalidIdentityError,
    KVServiceError,
    LeaseExpiredError,
    LimitError,
    StaleEpochError,
)
from kvservice.model.identity import Identity, Namespace
from kvservice.model.lease import BootEpoch, Lease, LeaseId, SessionId
from kvservice.model.limits import IDENTITIES_PER_SESSION_MAX
from kvservice.model.plan import Location, Outcome
from kvservice.model.segment import CacheKey
from kvservice.wire.v1 import cache_pb2 as wire

LEASE_TTL_S = 30.0
NO_LEASE = LeaseId(0)
"""The lease id of a lookup that found nothing."""

_NO_ARENA: Arena = np.empty(0, np.uint8)

T = TypeVar("T")
M = TypeVar("M", bound=Message)


class Session:
    """One open session. Safe from any thread; a context manager. Closing it frees all that it holds on the node.

    ``identities``: the first is the session's own, the rest (other shards, adapters) are registered beside it.
    ``lease_ttl_s``: how long leases last without renewal; a thread renews them while the session is open.
    Raises UnavailableError when the node cannot be reached.
    """

    def __init__(
        self,
        transport: Transport,
        identities: Sequence[Identity],
        *,
        is_writer: bool = True,
        client_name: str = "",
        lease_ttl_s: float = LEASE_TTL_S,
        clock: Clock = time.monotonic,
    ) -> None:
        if not identities:
            raise InvalidIdentityError("a session needs at least one identity")
        self.is_writer = is_writer
        self._transport = transport
        self._client_name = client_name
        self._identities: dict[Namespace, Identity] = {one.namespace(): one for one in identities}
        self._ttl_s = lease_ttl_s
        self._clock = clock
        self._leases = LeaseKeeper(self._renew, clock)
        self._open()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the session. Safe to call twice. The arena is unmapped when the last view of it is dropped."""
        self._leases.close()
        self._arena = _NO_ARENA
        self._transport.close()

    def reconnect(self) -> None:
        """Open a new session in place of this one, lost or not. Every lease and plan of before is void."""
        self._leases.clear()
        self._arena = _NO_ARENA
        self._open()

    @property
    def address(self) -> str:
        """The node's address, for messages."""
        return self._transport.address

    @property
    def identity(self) -> Identity:
        """The session's own identity."""
        return next(iter(self._identities.values()))

    @property
    def namespace(self) -> Namespace:
        """The session's own namespace."""
        return next(iter(self._identities))

    @property
    def session_id(self) -> SessionId:
        """The node's name for this session."""
        return self._session_id

    @property
    def boot_epoch(self) -> BootEpoch:
        """Which start of the node this session is with."""
        return self._boot_epoch

    @property
    def limits(self) -> wire.Limits:
        """What the node takes in one call."""
        return self._welcome.limits

    @property
    def arena(self) -> Arena:
        """All of the node's arena; read only what is leased, write only what is reserved."""
        return self._arena

    @property
    def leases_held(self) -> int:
        """How many leases this session keeps alive."""
        return len(self._leases)

    def identity_of(self, namespace: Namespace) -> Identity:
        """The registered identity of a namespace. Raises InvalidIdentityError for any other."""
        found = self._identities.get(namespace)
        if found is None:
            raise InvalidIdentityError(
                f"namespace {namespace.hex()[:12]} is not registered with this session; "
                "register its identity, and build prompts with the namespace of a registered one"
            )
        return found

    def register(self, identity: Identity) -> Namespace:
        """Add an identity; returns its namespace. Doing it twice changes nothing.

        Raises LimitError for one more than a session may have.
        """
        namespace = identity.namespace()
        if namespace not in self._identities:
            if len(self._identities) >= IDENTITIES_PER_SESSION_MAX:
                raise LimitError(f"a session has at most {IDENTITIES_PER_SESSION_MAX} identities; open another session")
            reply = self._transport.register(wire.RegisterIdentities(identities=[identity.canonical_json()]))
            _check_namespaces([namespace], reply.namespaces)
            self._identities[namespace] = identity
        return namespace

    def lookup(self, prompts: Sequence[wire.PromptQuery]) -> tuple[wire.LookupReply, Lease]:
        """Ask for all prompts of a round at once. What was found is leased, and kept so until ``release``.

        The lease's deadline is on this client's clock, from before the node was asked; renewals do not move it.
        Raises LimitError when the round has more segments than the node takes in one call.
        """
        count = sum(len(prompt.segments) for prompt in prompts)
        if count > self.limits.lookup_segments_max:
            raise LimitError(
                f"a lookup of {count} segments, {self.address} takes {self.limits.lookup_segments_max}; split the round"
            )
        asked_s = self._clock()
        request = wire.LookupRequest(session=self._reference(), prompts=prompts, lease_ttl_s=self._lease_ttl_s())
        reply = self._call("Lookup", request, wire.LookupReply)
        lease = NO_LEASE
        if reply.HasField("lease"):
            lease = LeaseId(reply.lease.id)
            self._leases.add(lease, reply.lease.ttl_s, asked_s)
        return reply, Lease(lease, self.session_id, self.boot_epoch, asked_s + reply.lease.ttl_s)

    def release(self, leases: Iterable[LeaseId]) -> int:
        """Give leases back; returns how many the node still knew. Releasing twice is no error."""
        ours = [lease for lease in leases if self._leases.drop(lease)]
        if not ours:
            return 0
        request = wire.ReleaseRequest(session=self._reference(), lease_ids=ours)
        return self._call("Release", request, wire.ReleaseReply).released

    def let_go(self, lease: LeaseId) -> None:
        """Give a lease back without waiting for the node's answer. Doing it twice is no error.

        Raises UnavailableError when the node cannot be told; it frees the lease when it runs out, or with the session.
        """
        if self._leases.drop(lease):
            self._transport.post("Release", wire.ReleaseRequest(session=self._reference(), lease_ids=[lease]))

    def check_lease(self, lease: Lease) -> None:
        """Raise unless what ``lease`` covers is certain to be readable now.

        StaleEpochError: the lease is of another session or another start of the node. LeaseExpiredError: it was
        released or not renewed in time.
        """
        if (lease.session, lease.boot_epoch) != (self.session_id, self.boot_epoch):
            raise StaleEpochError(
                f"lease {lease.id} is from before the last reconnect to {self.address}; look up again"
            )
        if not self._leases.is_held(lease.id):
            raise LeaseExpiredError(f"lease {lease.id} at {self.address} was released or ran out; look up again")

    def reserve(self, items: Sequence[wire.ReserveItem]) -> list[wire.ReserveOutcome]:
        """Ask for room for records, in as many calls as the node's limit needs; one outcome an item, in order."""
        outcomes: list[wire.ReserveOutcome] = []
        for batch in self._batches(items):
            request = wire.ReserveRequest(session=self._reference(), items=batch)
            try:
                outcomes += self._call("Reserve", request, wire.ReserveReply).outcomes
            except KVServiceError:
                self.abort([one.reserved.id for one in outcomes if one.HasField("reserved")])
                raise
        return outcomes

    def commit(self, items: Sequence[wire.CommitItem]) -> list[wire.CommitOutcome]:
        """Publish written records, in as many calls as the node's limit needs; one outcome an item, in order.

        On an error the records of earlier calls are published, and the failed call's may be: its answer may be lost.
        """
        outcomes: list[wire.CommitOutcome] = []
        for batch in self._batches(items):
            request = wire.CommitRequest(session=self._reference(), items=batch)
            outcomes += self._call("Commit", request, wire.CommitReply).outcomes
        return outcomes

    def abort(self, reservations: Sequence[int]) -> int:
        """Give reservations back unwritten, in as many calls as needed; returns how many the node still knew."""
        aborted = 0
        for batch in self._batches(reservations):
            request = wire.AbortRequest(session=self._reference(), reservation_ids=batch)
            aborted += self._call("Abort", request, wire.AbortReply).aborted
        return aborted

    def commit_round(self, request: wire.CommitRoundRequest) -> wire.CommitRoundReply:
        """Have the node elect masters among a round's dense caches."""
        request.session.CopyFrom(self._reference())
        return self._call("CommitRound", request, wire.CommitRoundReply)

    def delete(self, request: wire.DeleteRequest) -> int:
        """Delete caches; returns how many there were."""
        request.session.CopyFrom(self._reference())
        return self._call("Delete", request, wire.DeleteReply).deleted

    def await_arrivals(self, lease: Lease, step: int) -> wire.AwaitReply:
        """What has arrived of the lease's records that were on SSD, after ``step``: that of the last reply, 0 at first.

        Returns without news after some seconds. Raises LeaseExpiredError when the lease is over.
        """
        return self._call("Await", self._await_request(lease, step), wire.AwaitReply)

    def begin_await(self, lease: Lease, step: int) -> PendingCall:
        """The same, sent now and read later. Raises UnavailableError when it cannot be sent."""
        return self._transport.begin("Await", self._await_request(lease, step))

    def verify(self, namespace: Namespace, keys: Sequence[CacheKey]) -> list[Outcome]:
        """Have the node look at the bytes of caches: HIT if intact, CORRUPT if not (it then never answers again)."""
        outcomes: list[Outcome] = []
        for batch in self._batches(keys):
            request = wire.VerifyRequest(session=self._reference(), namespace=namespace)
            request.keys.extend(wire.CacheKey(segment=key.segment, context=key.context) for key in batch)
            outcomes += map(Outcome, self._call("Verify", request, wire.VerifyReply).outcomes)
        return outcomes

    def stats_json(self) -> str:
        """The node's figures, the same document as GET /stats."""
        return self._call("Stats", wire.StatsRequest(), wire.StatsReply).json

    def explain(self, prompts: Sequence[wire.PromptQuery], *, asks_others: bool = False) -> wire.ExplainReply:
        """Why the segments of prompts are found or not: see ``kvservice.client.explain``. Leases nothing.

        Besides this session's namespaces, those of their tenants may be named. Raises LimitError for too many segments.
        """
        request = wire.ExplainRequest(session=self._reference(), prompts=prompts, asks_others=asks_others)
        return self._call("Explain", request, wire.ExplainReply)

    def read_view(self, place: Location) -> Arena:
        """The leased bytes at ``place``, read-only, in the arena."""
        view = self._slice(place.extent.offset, place.extent.length)
        view.flags.writeable = False
        return view

    def write_view(self, extent: wire.Extent) -> Arena:
        """The reserved bytes of ``extent``, in the arena.

        Raises UnavailableError when the session is lost: they may be another's by now.
        """
        self._transport.arena()
        return self._slice(extent.offset, extent.length)

    def _open(self) -> None:
        hello = wire.Hello(
            client_name=self._client_name,
            wants_write=self.is_writer,
            identities=[one.canonical_json() for one in self._identities.values()],
        )
        self._welcome = self._transport.open_session(hello)
        self._session_id = SessionId(self._welcome.session_id)  # asked for with every layer that is restored
        self._boot_epoch = BootEpoch(self._welcome.boot_epoch)
        try:
            _check_namespaces(list(self._identities), self._welcome.namespaces)
            self._arena = self._transport.arena()
        except BaseException:
            self._transport.close()
            raise

    def _slice(self, offset: int, length: int) -> Arena:
        if offset + length > len(self._arena):
            raise KVServiceError(f"{self.address} named bytes {offset}+{length} of an arena of {len(self._arena)}")
        return self._arena[offset : offset + length]

    def _await_request(self, lease: Lease, step: int) -> wire.AwaitRequest:
        return wire.AwaitRequest(session=self._reference(), lease_id=lease.id, step=step)

    def _lease_ttl_s(self) -> float:
        return min(self._ttl_s, self.limits.lease_ttl_s_max)

    def _renew(self, leases: Sequence[LeaseId], deadline_s: float) -> Sequence[bool]:
        request = wire.RenewRequest(session=self._reference(), lease_ids=leases, lease_ttl_s=self._lease_ttl_s())
        return list(self._call("Renew", request, wire.RenewReply, min(deadline_s, CALL_TIMEOUT_S)).renewed)

    def _batches(self, items: Sequence[T]) -> Iterable[Sequence[T]]:
        step = max(self.limits.reserve_items_max, 1)
        return (items[start : start + step] for start in range(0, len(items), step))

    def _reference(self) -> wire.SessionRef:
        return wire.SessionRef(session_id=self._session_id, boot_epoch=self._boot_epoch)

    def _call(self, name: str, request: Message, kind: type[M], timeout_s: float = CALL_TIMEOUT_S) -> M:
        reply: Any = self._transport.call(name, request, timeout_s)
        assert isinstance(reply, kind), (name, type(reply))
        return reply


def _check_namespaces(ours: Sequence[Namespace], theirs: Sequence[bytes]) -> None:
    if list(ours) != list(theirs):
        raise InvalidIdentityError("node and client make different namespaces of one identity; run the same version")


def location_of(place: wire.Location) -> Location:
    """Where a record lies, as a node says it."""
    return Location(Tier(place.tier), Extent(place.extent.offset, place.extent.length), place.generation)
