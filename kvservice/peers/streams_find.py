"""The question of one node to another: what it sends, and how its answer, and first layers with it, are taken in."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from kvservice.model.errors import InvalidInputError, KVServiceError
from kvservice.model.segment import ContextId
from kvservice.peers.ahead_buffers import AheadBuffers
from kvservice.peers.call import Call, ClientSession
from kvservice.peers.frames import FrameError, Header, Kind
from kvservice.peers.host import Query
from kvservice.peers.streams_channel import Channel
from kvservice.peers.streams_client_calls import (
    Identities,
    PeerFinding,
    PeerLease,
    new_identities,
    of_kind,
    take_found,
)
from kvservice.peers.streams_messages import encode_query
from kvservice.sharing.place import Question
from kvservice.storage.buffer import Bytes
from kvservice.wire.v1 import peer_pb2 as wire


def query_of(question: Question) -> Query:
    """The same question, for another node."""
    asked = question.asked
    return Query(
        question.space.namespace,
        question.segment,
        [ContextId(one) for one in asked.accepted_contexts],
        asked.position,
        asked.tokens,
        asked.may_shift,
        max(asked.affinity_min, question.affinity + 1) if question.affinity >= 0 else asked.affinity_min,
        question.marks,
    )


class FindCall(Call):
    """Asks for segments; ``findings`` are in the order of the queries. ``corrupt``: heads that lied."""

    def __init__(self, queries: Sequence[Query], identities: Identities, ttl_s: float, wait_s: float) -> None:
        super().__init__()
        self.findings: list[PeerFinding] = []
        self.lease: PeerLease | None = None
        self.corrupt = 0
        self._queries = queries
        self._identities = identities
        self._ttl_s, self._wait_s, self._ahead_bytes = ttl_s, wait_s, 0
        self._buffers = AheadBuffers()
        self._session: ClientSession | None = None
        self.asked_bytes = sum(map(_asked_bytes, queries))
        self.left: list[PeerLease] = []
        """Leases of answers that broke off."""

    def take_ahead(self, count: int, buffers: AheadBuffers) -> None:
        """So many bytes of first layers, at most, may come with the answer, into buffers of these."""
        self.expected_bytes = self._ahead_bytes = count
        self._buffers = buffers

    def must_lead(self, session: ClientSession) -> bool:
        """See Call."""
        return bool(new_identities(self._identities, session))

    def send(self, channel: Channel, request: int, session: ClientSession) -> None:
        """See Call."""
        self._session, new = session, new_identities(self._identities, session)
        queries = map(encode_query, self._queries)
        message = wire.PeerFind(
            identities=new,
            queries=queries,
            lease_ttl_s=self._ttl_s,
            wait_s=self._wait_s,
            ahead_bytes=self._ahead_bytes,
        )
        channel.send(Kind.FIND, request, message)

    def receive(self, channel: Channel, header: Header, moved: Callable[[], None]) -> KVServiceError | None:
        """See Call. Heads are verified here, off the loop."""
        found = channel.receive_message(of_kind(header, Kind.FOUND), wire.PeerFound())
        if len(found.answers) != len(self._queries) or self._session is None:
            raise FrameError(f"{len(found.answers)} answers to {len(self._queries)} questions")
        self._session.registered.update(self._identities)
        if found.lease_id:
            self.left.append(PeerLease(found.lease_id, self._session))
        ahead = self._receive_ahead(channel, header.request, found, moved)
        if found.lease_id:
            self.left.pop()
        try:
            self.findings, self.lease, self.corrupt = take_found(self._queries, found, self._session, ahead)
        except InvalidInputError as error:
            raise FrameError(str(error)) from error
        return None

    def _receive_ahead(
        self, channel: Channel, request: int, found: wire.PeerFound, moved: Callable[[], None]
    ) -> list[Bytes]:
        """The first bytes of each record that has some, in the order of the heads."""
        counts = [one.ahead_bytes for answer in found.answers for one in _heads(answer) if one.ahead_bytes]
        if sum(counts) > self._ahead_bytes:
            raise FrameError(f"{sum(counts)} bytes come with an answer, {self._ahead_bytes} were asked for")
        ahead = [self._buffers.take(count) for count in counts]
        for target in ahead:
            _receive_all(channel, request, target.data, moved)
        if ahead:
            with suppress(OSError):  # all is here: that the connection broke now is the next call's matter
                channel.send(Kind.GOT, request)
        return ahead


def _asked_bytes(query: Query) -> int:
    """At least as long as it is on the wire."""
    return 128 + 34 * len(query.accepted_contexts) + len(query.marks)


def _heads(answer: wire.PeerAnswer) -> Iterator[wire.PeerHead]:
    """A master before its mirror."""
    return (getattr(answer, name) for name in ("master", "record") if answer.HasField(name))


def _receive_all(channel: Channel, request: int, target: memoryview, moved: Callable[[], None]) -> None:
    """Fill ``target`` from data frames of a request."""
    at = 0
    while at < len(target):
        header = of_kind(channel.receive_header(), Kind.DATA)
        end = at + header.payload_bytes
        if header.request != request or end > len(target):
            raise FrameError(f"data of request {header.request} up to byte {end}, of {len(target)} of {request}")
        channel.receive_pieces(target, at, end, lambda *_: moved())
        at = end
