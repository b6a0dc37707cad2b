"""A link to another node over Arrow Flight: what a link over streams is, where only gRPC gets through.

Everything here runs on the loop that made the link; calls are made by a few threads (flight_calls.py). One deadline a
call, one breaker a peer. pyarrow is imported when a link is made.
"""

import asyncio
import random
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from kvservice.access.tls import PemFiles
from kvservice.caches import Space
from kvservice.model.errors import InvalidInputError, UnavailableError
from kvservice.model.identity import Namespace
from kvservice.model.segment import CacheKey
from kvservice.peers.call import SilentError
from kvservice.peers.flight_runner import Moving, Runner
from kvservice.peers.flight_words import DELETE, FIND, PING, RELEASE, require_flight
from kvservice.peers.host import Query
from kvservice.peers.member import Facts, FlightAddress
from kvservice.peers.streams_client import IDENTITIES_MAX, Transfer
from kvservice.peers.streams_client_calls import Identities, PeerFinding, PeerLease, PeerRecord, take_found
from kvservice.peers.streams_client_dialler import Caller
from kvservice.peers.streams_find import query_of
from kvservice.peers.streams_limits import LinkLimits
from kvservice.peers.streams_messages import decode_facts, encode_key, encode_query
from kvservice.sharing.place import Offer, Parcel, Question
from kvservice.storage.buffer import Bytes
from kvservice.storage.remote.contract import OnPiece, RemoteRecord
from kvservice.store import WriteRequest
from kvservice.wire.v1 import peer_pb2 as wire


class FlightLink:
    """See Carrier. ``on_change`` is told, on the loop, when the peer is lost (None), and what it says of itself.

    ``identity_of``: the canonical JSON of a namespace that records were found in over another way; None: not known.
    ``pem``: what connections are secured with now, None for plaintext; asked before every call. Raises ConfigError for
    files that cannot be read, and without pyarrow.
    """

    def __init__(
        self,
        address: FlightAddress,
        caller: Caller,
        *,
        pem: Callable[[], PemFiles | None] = lambda: None,
        identity_of: Callable[[Namespace], str | None] = lambda _: None,
        limits: LinkLimits | None = None,
        on_change: Callable[[Facts | None], None] = lambda _: None,
        on_transfer: Callable[[Transfer], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        require_flight()
        from kvservice.peers.flight_calls import FlightConnection

        self.address = address
        self.limits = limits or LinkLimits()
        self.facts: Facts | None = None
        """What the peer said of itself last."""
        self._identity_of = identity_of
        self._on_change, self._on_transfer = on_change, on_transfer
        self._clock = clock
        self._runner = Runner(self.name, self.limits, self._probe, lambda: on_change(None), clock, draw)
        self.counters, self.breaker = self._runner.counters, self._runner.breaker
        self._connection: FlightConnection = FlightConnection(
            address, caller, pem, self.limits.deadline_s, self._note_greeted
        )
        self._identities: OrderedDict[Namespace, str] = OrderedDict()

    @property
    def name(self) -> str:
        """For messages and metrics."""
        return f"node {self.address}"

    @property
    def is_answering(self) -> bool:
        """Is it worth asking, as far as is known?"""
        return self._runner.is_answering

    def doubt(self) -> None:
        """The peer is lost another way: the next call waits for a ping first, and not for long."""
        self._runner.doubt()

    # Questions

    async def ping(self) -> float:
        """Seconds of a round trip; also learns what the peer says of itself now."""
        return await self._ping(is_probe=False, deadline_s=self.limits.deadline_s)

    async def _probe(self, deadline_s: float) -> None:
        await self._ping(is_probe=True, deadline_s=deadline_s)

    async def _ping(self, *, is_probe: bool, deadline_s: float) -> float:
        started_s, said = self._clock(), wire.PeerFacts()
        await self._runner.run(
            lambda _, timeout_s: self._connection.ask(PING, None, said, timeout_s),
            is_probe=is_probe,
            deadline_s=deadline_s,
        )
        try:
            self._take_facts(decode_facts(said))
        except InvalidInputError as error:
            raise UnavailableError(f"{self.name} sent what cannot be: {error}") from error
        return self._clock() - started_s

    async def find_all(
        self, queries: Sequence[Query], identities: Identities, *, ttl_s: float = 0.0
    ) -> list[PeerFinding]:
        """See PeerLink."""
        step = self.limits.find_queries_max
        parts = [queries[at : at + step] for at in range(0, len(queries), step)]
        results = await asyncio.gather(
            *(self._find(part, {one.namespace: identities[one.namespace] for one in part}, ttl_s) for part in parts),
            return_exceptions=True,
        )
        found = [one for one in results if not isinstance(one, BaseException)]
        for result in results:
            if isinstance(result, BaseException):
                for _, lease in found:
                    self._release(lease)
                raise result
        for _, lease in found:
            if lease is not None and not lease.records:
                self._release(lease)  # of heads that lied
        return [finding for findings, _ in found for finding in findings]

    async def _find(
        self, queries: Sequence[Query], identities: Identities, ttl_s: float
    ) -> tuple[list[PeerFinding], PeerLease | None]:
        message = wire.PeerFind(
            queries=map(encode_query, queries), lease_ttl_s=ttl_s, wait_s=self.limits.deadline_s / 2
        )

        def find(moving: Moving, timeout_s: float) -> tuple[list[PeerFinding], PeerLease | None, int]:
            found, session = self._connection.ask_with(FIND, message, identities, wire.PeerFound(), timeout_s)
            try:
                taken = take_found(queries, found, session)  # heads are verified here, off the loop
            except ValueError as error:
                raise UnavailableError(f"{self.name} sent what cannot be: {error}") from error
            if moving.is_given_up:
                self._release(taken[1])
            return taken

        for namespace, text in identities.items():
            self._remember(namespace, text)
        findings, lease, corrupt = await self._runner.run(find)
        self.counters.corrupt += corrupt
        return findings, lease

    async def find(self, questions: Sequence[Question], ahead_bytes: int = 0) -> list[Offer | None]:
        """See Carrier."""
        identities = {one.space.namespace: self._identity(one.space) for one in questions}
        findings = await self.find_all(list(map(query_of, questions)), identities, ttl_s=self.limits.lease_ttl_s)
        return [None if one.record is None else Offer(one.record, one.master) for one in findings]

    def let_go(self, records: Iterable[RemoteRecord]) -> None:
        """See Carrier. A lease ends with the last of its records."""
        for record in records:
            lease = record.lease if isinstance(record, PeerRecord) else None
            if lease is not None and lease.records > 0:
                lease.records -= 1
                if not lease.records:
                    self._release(lease)

    def _release(self, lease: PeerLease | None) -> None:
        """Tell the peer, and do not wait for it: what is not heard runs out by itself."""
        if lease is not None:
            message, answer = wire.PeerRelease(lease_ids=[lease.id]), wire.PeerCount()
            self._runner.tell(lambda: self._connection.ask(RELEASE, message, answer, self.limits.deadline_s))

    async def delete(self, space: Space, keys: Sequence[CacheKey] | None) -> int:
        """See Carrier."""
        identities, step = {space.namespace: self._identity(space)}, self.limits.keys_max
        parts = [None] if keys is None else [keys[at : at + step] for at in range(0, len(keys), step)]
        count = 0
        for part in parts:
            named = [] if part is None else [encode_key(key) for key in part]
            message = wire.PeerDelete(namespace=space.namespace, keys=named, is_whole_namespace=part is None)
            count += await self._runner.run(partial(self._delete, message, identities))
        return count

    def _delete(self, message: wire.PeerDelete, identities: Identities, _: Moving, timeout_s: float) -> int:
        answer, _session = self._connection.ask_with(DELETE, message, identities, wire.PeerCount(), timeout_s)
        return answer.count

    # Records

    async def fetch(self, record: RemoteRecord, target: Bytes, on_piece: OnPiece, start: int = 0) -> None:
        """See Carrier. Pieces come in order. Goes on where it was when the connection broke."""
        from kvservice.peers.flight_calls import Piece

        namespace, started_s, limits = record.name.namespace, self._clock(), self.limits
        text = self._identities.get(namespace) or self._identity_of(namespace)
        identities = {} if text is None else {namespace: text}

        def fetch(moving: Moving, timeout_s: float) -> Moving:
            moving.at = start
            for left in reversed(range(limits.resumes_max + 1)):
                at = moving.at
                try:
                    self._connection.fetch(record, Piece(target, on_piece, at), identities, moving, timeout_s)
                    break
                except UnavailableError as error:
                    if not left or moving.at == at or isinstance(error, SilentError):
                        raise
                    self.counters.resumed += 1
            return moving

        size = record.record_bytes - start
        moving = await self._runner.run(fetch, is_record=True, expected_bytes=size)
        self.counters.fetched += 1
        self.counters.fetched_bytes += size
        self._on_transfer(Transfer(True, size, max(0.0, moving.first_s - started_s), self._clock() - started_s))

    async def store(self, parcel: Parcel) -> bool:
        """See Carrier."""
        name = parcel.name
        key = CacheKey(name.segment, name.context)
        request = WriteRequest(name.namespace, key, len(parcel.view), parcel.master, parcel.prefill_s)
        return await self.give(request, parcel.view, parcel.header_checksum, self._identity(parcel.space))

    async def give(self, request: WriteRequest, view: Bytes, header_checksum: int, identity: str) -> bool:
        """See PeerLink."""
        started_s, identities = self._clock(), {Namespace(request.namespace): identity}

        def store(moving: Moving, timeout_s: float) -> bool:
            return self._connection.store(request, view, header_checksum, identities, moving, timeout_s)

        is_stored = await self._runner.run(store, is_record=True, expected_bytes=len(view))
        if is_stored:
            self.counters.stored += 1
            self.counters.stored_bytes += len(view)
            self._on_transfer(Transfer(False, len(view), 0.0, self._clock() - started_s))
        return is_stored

    def _identity(self, space: Space) -> str:
        known = self._identities.get(space.namespace)
        if known is None:
            known = space.identity.canonical_json()
        self._remember(space.namespace, known)
        return known

    def _remember(self, namespace: Namespace, text: str) -> None:
        """At hand, for sessions that do not know it yet."""
        self._identities[namespace] = text
        self._identities.move_to_end(namespace)
        if len(self._identities) > IDENTITIES_MAX:
            self._identities.popitem(last=False)

    # Who is there

    def _note_greeted(self, facts: Facts) -> None:
        """From a thread."""
        self._runner.post(partial(self._take_facts, facts))

    def _take_facts(self, facts: Facts) -> None:
        self.facts = facts
        self._on_change(facts)

    async def close(self) -> None:
        """See Carrier."""
        await self._runner.close(lambda: self._connection.close(says_bye=self.is_answering))
