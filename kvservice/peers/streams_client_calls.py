"""The calls that a node makes to another: what each sends, and how its answer is taken in. Run by a lane's thread."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from kvservice.model.errors import (
    CapacityError,
    CorruptError,
    InvalidInputError,
    KVServiceError,
    RecordFormatError,
    error_from_code,
)
from kvservice.model.identity import Namespace
from kvservice.model.plan import Match, MissReason
from kvservice.model.segment import CacheKey
from kvservice.peers.call import Call, ClientSession, StoppedError
from kvservice.peers.frames import FrameError, Header, Kind
from kvservice.peers.host import Answer, FoundHead, Query
from kvservice.peers.member import Facts
from kvservice.peers.packing import Packer, Piece, Unpacker, pieces_of, send_piece
from kvservice.peers.packing_kernels import KERNELS
from kvservice.peers.streams_channel import Channel, Source
from kvservice.peers.streams_messages import decode_answer, decode_facts, encode_key
from kvservice.storage.buffer import Bytes
from kvservice.storage.record_reader import RecordHead, read_head
from kvservice.storage.remote.contract import OnPiece, RemoteName, RemoteRecord
from kvservice.store import WriteRequest
from kvservice.wire.v1 import cache_pb2
from kvservice.wire.v1 import peer_pb2 as wire

log = logging.getLogger(__name__)
STORE_FRAME_BYTES = 512 << 10
"""One data frame to the peer, so that a slow link is seen to move."""
Identities = Mapping[Namespace, str]
"""Canonical JSON by namespace, for namespaces that the peer may not know."""


@dataclass(slots=True, eq=False)
class PeerLease:
    """What holds the records of one question at the peer. ``records``: of those that may still be fetched."""

    id: int
    session: ClientSession
    records: int = 0


@dataclass(frozen=True, slots=True)
class PeerRecord(RemoteRecord):
    """A record of another node. ``lease`` is None once nothing holds it there."""

    lease: PeerLease | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class PeerFinding:
    """What answers a query, heads verified and looked at, or why nothing does."""

    match: Match
    miss_reason: MissReason
    affinity: int
    record: PeerRecord | None = None
    master: PeerRecord | None = None


def take_found(
    queries: Sequence[Query], found: wire.PeerFound, session: ClientSession, ahead: Iterable[Bytes] = ()
) -> tuple[list[PeerFinding], PeerLease | None, int]:
    """Findings in the order of the queries, what leases them, and how many heads lied. Raises InvalidInputError.

    ``ahead``: what came of the records that say so, in the order of the heads.
    """
    lease = PeerLease(found.lease_id, session) if found.lease_id else None
    answers = [decode_answer(answer) for answer in found.answers]
    came = iter(ahead)
    checked = [_checked(*pair, lease, came) for pair in zip(queries, answers, strict=True)]
    findings = [finding for finding, _ in checked]
    if lease is not None:
        records = (one for finding in findings for one in (finding.record, finding.master))
        lease.records = sum(one is not None for one in records)
    return findings, lease, sum(is_wrong for _, is_wrong in checked)


def _checked(query: Query, answer: Answer, lease: PeerLease | None, came: Iterator[Bytes]) -> tuple[PeerFinding, bool]:
    """True: a head lied."""
    if answer.record is None:
        return PeerFinding(Match.NONE, answer.miss_reason, answer.affinity), False
    heads = (answer.master, answer.record)
    of_master, of_record = [next(came, None) if one is not None and one.ahead_bytes else None for one in heads]
    try:
        record = _record(query, answer.record, lease, of_record)
        master = None if answer.master is None else _record(query, answer.master, lease, of_master)
        _check_answer(query, answer.match, record.head, None if master is None else master.head)
    except (CorruptError, RecordFormatError, InvalidInputError):
        return PeerFinding(Match.NONE, MissReason.CORRUPT, answer.affinity), True
    return PeerFinding(answer.match, MissReason.NONE, answer.affinity, record, master), False


def _record(query: Query, said: FoundHead, lease: PeerLease | None, ahead: Bytes | None) -> PeerRecord:
    """Raises CorruptError or RecordFormatError for a head that lies."""
    buffer = np.empty(len(said.head), np.uint8)
    buffer[:] = np.frombuffer(said.head, np.uint8)
    head = read_head(buffer)
    name = RemoteName(query.namespace, head.meta.key.segment, head.meta.key.context)
    is_part = ahead is not None and len(ahead) <= head.layout.record_bytes
    return PeerRecord(name, head, said.prefill_s, f"{head.generation:016x}", ahead if is_part else None, lease)


def _check_answer(query: Query, match: Match, record: RecordHead, master: RecordHead | None) -> None:
    """Raise CorruptError unless this answers the question, and the master is the one that the record stands on."""
    meta = record.meta
    is_it = meta.namespace == query.namespace and meta.key.segment == query.segment and meta.tokens == query.tokens
    if match is Match.SHIFTED:
        is_it = is_it and query.may_shift
    else:
        is_it = is_it and meta.key.context in query.accepted_contexts and meta.position == query.position
    if not is_it:
        raise CorruptError(f"cache {meta.key} was answered, and it is not what was asked for")
    said = meta.master
    found = None if master is None else (master.meta.namespace, master.meta.key, master.generation, master.meta.master)
    wanted = None if said is None else (query.namespace, CacheKey(query.segment, said.context), said.generation, None)
    if found != wanted:
        raise CorruptError(f"cache {meta.key} was answered with another master than it stands on")


class FetchCall(Call):
    """Brings a record's bytes from ``at`` on into ``target``. Goes on there when a connection breaks.

    ``takes_packed``: its rows may come as 8 bits.
    """

    is_record = True

    def __init__(
        self,
        record: RemoteRecord,
        target: memoryview,
        on_piece: OnPiece,
        start: int,
        identities: Identities,
        *,
        takes_packed: bool = False,
    ) -> None:
        super().__init__(record.record_bytes - start)
        self.at = start
        self.first_s = 0.0
        self._takes_packed = takes_packed
        self._is_packed_welcome = False
        self._unpacker = Unpacker()
        self._record = record
        self._end = record.record_bytes
        self._target = target
        self._on_piece = on_piece
        self._identities = identities
        self._session: ClientSession | None = None

    def must_lead(self, session: ClientSession) -> bool:
        """See Call."""
        return bool(new_identities(self._identities, session))

    def send(self, channel: Channel, request: int, session: ClientSession) -> None:
        """See Call."""
        name, lease = self._record.name, self._record.lease if isinstance(self._record, PeerRecord) else None
        is_own = lease is None or lease.session is session
        self._session = session
        self._is_packed_welcome = self._takes_packed and not channel.lends and KERNELS.are_ready()
        message = wire.PeerFetch(
            identities=new_identities(self._identities, session),
            namespace=name.namespace,
            key=encode_key(CacheKey(name.segment, name.context)),
            generation=self._record.head.generation,
            lease_id=lease.id if lease is not None and is_own else 0,
            leased=None if lease is None or is_own else wire.PeerLeased(session=lease.session.id, lease_id=lease.id),
            start=self.at,
            takes_packed=self._is_packed_welcome,
        )
        channel.send(Kind.FETCH, request, message)

    def receive(self, channel: Channel, header: Header, moved: Callable[[], None]) -> KVServiceError | None:
        """See Call. What ``on_piece`` raises is raised as StoppedError."""
        request = header.request
        while True:
            if header.kind is Kind.ERROR:
                said = channel.receive_message(header, wire.PeerError())
                return error_from_code(said.code, said.message)
            if self._session is not None:
                self._session.registered.update(self._identities)
            self._receive_part(channel, header, moved)
            if self.at == self._end:
                with suppress(OSError):  # all is here: that the connection broke now is the next call's matter
                    channel.send(Kind.GOT, request)
                return None
            header = channel.receive_header()
            moved()
            if header.request != request:
                raise FrameError(f"a frame of request {header.request} in the middle of {request}")

    def _receive_part(self, channel: Channel, header: Header, moved: Callable[[], None]) -> None:
        def note(first: int, last: int) -> None:
            moved()
            self.first_s = self.first_s or time.monotonic()
            if first == self.at:  # a lent frame is read whole or the call ends; bytes of others come in order
                self.at = last
            try:
                self._on_piece(first, last)
            except BaseException as error:
                raise StoppedError(error) from error

        try:
            if header.kind is Kind.PACKED and self._is_packed_welcome:
                self._receive_packed(channel, header, note)
            else:
                self._receive_data(channel, of_kind(header, Kind.DATA), note)
        except (StoppedError, FrameError, OSError):
            raise
        except KVServiceError as error:  # this node's own want of memory: no other connection helps
            raise StoppedError(error) from error
        except Exception as error:
            log.exception("bringing a record failed inside this node; please report it")
            raise StoppedError(CapacityError(f"a record was not taken in: {error!r}")) from error

    def _receive_data(self, channel: Channel, header: Header, note: OnPiece) -> None:
        end = self.at + header.payload_bytes
        if end > self._end:
            raise FrameError(f"bytes up to {end} of a record of {self._end}")
        channel.receive_pieces(self._target, self.at, end, note)
        self.at = end

    def _receive_packed(self, channel: Channel, header: Header, note: OnPiece) -> None:
        start = self.at
        end = self._unpacker.receive(channel, header, self._target[: self._end], start)
        self.packed.note_packed(end - start, header.frame_bytes)
        note(start, end)


class StoreCall(Call):
    """Gives a record away. ``is_stored`` is False if the peer has its key already.

    ``packs``: its rows may go as 8 bits.
    """

    is_record = True
    is_alone = True

    def __init__(
        self,
        request: WriteRequest,
        source: Source,
        header_checksum: int,
        identities: Identities,
        *,
        packs: bool = False,
    ) -> None:
        super().__init__(request.record_bytes)
        self.is_stored = False
        self._packs = packs
        self._may_pack = False
        self._request = request
        self._source = source
        self._header_checksum = header_checksum
        self._identities = identities
        self._session: ClientSession | None = None
        self._is_answered = False

    def may_go_on(self) -> bool:
        """See Call. Once there is room for it, another try would be told that the key is being written."""
        return not self._is_answered

    def send(self, channel: Channel, request: int, session: ClientSession) -> None:
        """See Call."""
        asked, master = self._request, self._request.master
        self._session = session
        self._may_pack = self._packs and not channel.lends and KERNELS.are_ready()
        message = wire.PeerStore(
            identities=new_identities(self._identities, session),
            namespace=asked.namespace,
            key=encode_key(asked.key),
            record_bytes=asked.record_bytes,
            master_context=b"" if master is None else master.context,
            master_generation=0 if master is None else master.generation,
            prefill_s=asked.prefill_s,
            packs=self._may_pack,
        )
        channel.send(Kind.STORE, request, message)

    def receive(self, channel: Channel, header: Header, moved: Callable[[], None]) -> KVServiceError | None:
        """See Call."""
        self._is_answered = True
        if self._session is not None:
            self._session.registered.update(self._identities)
        if header.kind is Kind.EXISTS:
            return None
        go = channel.receive_message(of_kind(header, Kind.GO), wire.PeerGo())
        self.unseen_bytes = self._request.record_bytes if channel.lends else 0
        for piece in self._pieces(channel, go.takes_packed):
            send_piece(channel, header.request, self._source, piece, self.packed)
            moved()
        channel.send(Kind.COMMIT, header.request, wire.PeerCommit(header_checksum=self._header_checksum))
        header = channel.receive_header()
        if header.kind is Kind.ERROR:
            said = channel.receive_message(header, wire.PeerError())
            return error_from_code(said.code, said.message)
        channel.receive_message(of_kind(header, Kind.STORED), wire.PeerStored())
        self.is_stored = True
        return None

    def _pieces(self, channel: Channel, takes_packed: bool) -> Iterator[Piece]:
        is_packed = self._may_pack and takes_packed
        packer = Packer(np.frombuffer(self._source.view, np.uint8)) if is_packed else None
        return pieces_of(channel, self._source, 0, self._request.record_bytes, packer, STORE_FRAME_BYTES)


class CountCall(Call):
    """A request that is answered with a number: ``count``."""

    def __init__(
        self, kind: Kind, message: wire.PeerDelete | wire.PeerRenew | wire.PeerRelease, identities: Identities
    ) -> None:
        super().__init__()
        self.count = 0
        self.asked_bytes = message.ByteSize()
        self._kind = kind
        self._message = message
        self._identities = identities

    @classmethod
    def delete(cls, namespace: Namespace, keys: Sequence[CacheKey] | None, identities: Identities) -> "CountCall":
        """Of keys, or of all of a namespace (None)."""
        named: list[cache_pb2.CacheKey] = [] if keys is None else [encode_key(key) for key in keys]
        message = wire.PeerDelete(namespace=namespace, keys=named, is_whole_namespace=keys is None)
        return cls(Kind.DELETE, message, identities)

    def send(self, channel: Channel, request: int, session: ClientSession) -> None:
        """See Call."""
        if isinstance(self._message, wire.PeerDelete):
            new = new_identities(self._identities, session)
            del self._message.identities[:]
            self._message.identities.extend(new)
        channel.send(self._kind, request, self._message)

    def receive(self, channel: Channel, header: Header, moved: Callable[[], None]) -> KVServiceError | None:
        """See Call."""
        self.count = channel.receive_message(of_kind(header, Kind.COUNT), wire.PeerCount()).count
        return None


class PingCall(Call):
    """Asks whether anybody is there; ``facts``: what the peer says of itself."""

    facts: Facts

    def send(self, channel: Channel, request: int, session: ClientSession) -> None:
        """See Call."""
        channel.send(Kind.PING, request)

    def receive(self, channel: Channel, header: Header, moved: Callable[[], None]) -> KVServiceError | None:
        """See Call."""
        said = channel.receive_message(of_kind(header, Kind.PONG), wire.PeerFacts())
        try:
            self.facts = decode_facts(said)
        except InvalidInputError as error:
            raise FrameError(str(error)) from error
        return None


def new_identities(identities: Identities, session: ClientSession) -> list[str]:
    """Those that the session was not told of yet: tens of KiB each."""
    return [text for namespace, text in identities.items() if namespace not in session.registered]


def of_kind(header: Header, kind: Kind) -> Header:
    """The header. Raises FrameError unless it is of that kind."""
    if header.kind is not kind:
        raise FrameError(f"a {header.kind.name} frame where {kind.name} should be")
    return header
