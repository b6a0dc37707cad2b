"""One connection that another node opened: greeted, then its requests answered one after another, by one thread.

What is wrong with a request is an answer. What is wrong with a frame ends the connection: nothing behind it can be
understood. Holds and reservations end here, however the connection does.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace

import numpy as np

from kvservice import __version__
from kvservice.access.principal import Credentials, Principal
from kvservice.model.errors import ForbiddenError, InvalidInputError, KVServiceError, LimitError, RecordFormatError
from kvservice.model.identity import Namespace
from kvservice.peers.frames import MESSAGE_BYTES_MAX, FrameError, Header, Kind
from kvservice.peers.host import Authorize, Held, Host, HostSession, IsCurrent, Room
from kvservice.peers.member import Facts
from kvservice.peers.packed_counters import PackedCounters
from kvservice.peers.packing import Packer, Unpacker, pieces_of, send_piece
from kvservice.peers.packing_kernels import KERNELS
from kvservice.peers.streams_channel import Channel, ClosedError
from kvservice.peers.streams_limits import ServerLimits
from kvservice.peers.streams_messages import (
    decode_facts,
    decode_fetch,
    decode_keys,
    decode_query,
    decode_store,
    encode_error,
    encode_facts,
    encode_found,
)
from kvservice.peers.streams_server_sessions import PeerSession, PeerSessions
from kvservice.wire.v1 import peer_pb2 as wire

log = logging.getLogger(__name__)


@dataclass(slots=True)
class ConnectionCounters(PackedCounters):
    """Requests, and records and their bytes sent and taken."""

    requests: int = 0
    sent: int = 0
    sent_bytes: int = 0
    taken: int = 0
    taken_bytes: int = 0

    def add(self, other: "ConnectionCounters") -> None:
        """Count all of another's, too."""
        for spec in fields(self):
            setattr(self, spec.name, getattr(self, spec.name) + getattr(other, spec.name))


class PeerConnection:
    """``until_s``: when ``clock`` says so, whoever watches the clock shuts this down, for ``waits_for``."""

    def __init__(
        self,
        channel: Channel,
        where: str,
        *,
        host: Host,
        sessions: PeerSessions,
        authorize: Authorize,
        is_current: IsCurrent,
        limits: ServerLimits,
        clock: Callable[[], float],
        is_local: bool,
    ) -> None:
        self.where = where
        self.waits_for = "a greeting"
        self.until_s = clock() + limits.handshake_s
        self._channel = channel
        self._host = host
        self._sessions = sessions
        self._authorize = authorize
        self._is_current = is_current
        self._proved_s = clock()
        self._limits = limits
        self._clock = clock
        self._is_local = is_local
        self.counters = ConnectionCounters()
        self._session: PeerSession | None = None
        self._is_by_certificate = False
        self._unconfirmed: dict[int, list[Held]] = {}
        self._answers = {
            Kind.FIND: self._find,
            Kind.FETCH: self._fetch,
            Kind.STORE: self._store,
            Kind.DELETE: self._delete,
            Kind.RENEW: self._renew,
            Kind.RELEASE: self._release,
            Kind.PING: self._ping,
            Kind.GOT: self._got,
        }

    def shut(self) -> None:
        """End it, from any thread."""
        self._channel.shut()

    # The thread

    def run(self) -> None:
        """Serve until the connection ends."""
        try:
            if self._greet():
                while True:
                    self._answer()
        except ClosedError:
            log.debug("peer port: %s closed its connection", self.where)
        except FrameError as error:
            log.warning("peer port: %s is cut off: %s", self.where, error)
            self._say_last(error)
        except OSError as error:
            level = logging.WARNING if self._session is None else logging.INFO
            log.log(level, "peer port: the connection of %s broke: %s", self.where, error)
        except Exception:
            log.exception("peer port: serving %s failed; this is a fault of the service, please report it", self.where)
        finally:
            self._end()

    def _end(self) -> None:
        self._channel.close(at_once=bool(self._unconfirmed))
        for request in list(self._unconfirmed):
            self._let_go(request)
        if self._session is not None:
            self._sessions.leave(self._session, self)

    def _allow(self, seconds: float, what: str) -> None:
        """The next step may take so long."""
        self.waits_for = what
        self.until_s = self._clock() + seconds

    def _say_last(self, error: KVServiceError) -> None:
        self._allow(self._limits.handshake_s, "the end")
        with suppress(OSError):
            self._channel.send(Kind.ERROR, 0, encode_error(error))

    # Greeting

    def _greet(self) -> bool:
        """False: it was refused, and told why."""
        self._channel.handshake()
        try:
            self._channel.receive_opening()
        except RecordFormatError as error:
            self._channel.send_opening()
            return self._refuse(error)
        self._channel.send_opening()
        header = self._channel.receive_header()
        if header.kind is not Kind.HELLO:
            raise FrameError(f"a connection begins with hello, not {header.kind.name}")
        hello = self._channel.receive_message(header, wire.PeerHello())
        try:
            self._session = self._admit(hello)
        except KVServiceError as error:
            return self._refuse(error)
        limits = wire.PeerLimits(
            find_queries_max=self._limits.find_queries_max,
            record_bytes_max=self._host.record_bytes_max,
            fetch_bytes_max=self._limits.fetch_bytes_max,
            fetches_max=self._limits.fetches_max,
        )
        facts = encode_facts(self._facts(self._session.principal))
        welcome = wire.PeerWelcome(facts=facts, session=self._session.id, version=__version__, limits=limits)
        self._channel.send(Kind.WELCOME, header.request, welcome)
        self._exchange()
        return True

    def _exchange(self) -> None:
        """What both sides give each other behind the welcome."""

    def _facts(self, principal: Principal) -> Facts:
        """What it may know of this node. The way to all of its memory is for those who may see every tenant, and can
        prove it there, where no certificate is shown."""
        facts, is_welcome = self._host.facts, principal.tenants is None and not self._is_by_certificate
        return facts if is_welcome else replace(facts, boot_id="", local_path="")

    def _admit(self, hello: wire.PeerHello) -> PeerSession:
        facts = decode_facts(hello.facts)
        shown = Credentials(hello.token, self._channel.peer_certificate, self._is_local)
        principal = self._authorize(shown)
        self._is_by_certificate = not shown.token and bool(shown.certificate_names)
        self._require(principal)
        return self._sessions.join(facts, hello.session, principal, self, self.where)

    def _require(self, principal: Principal) -> None:
        """Raises ForbiddenError for who may not come this way."""
        if not principal.is_node:
            raise ForbiddenError(f"{principal.name} is no node: give it the role node in the access file")

    def _refuse(self, error: KVServiceError) -> bool:
        log.warning("peer port: %s is refused: %s", self.where, error)
        self._say_last(error)
        return False

    # Requests

    def _answer(self) -> None:
        limits = self._limits
        self._allow(limits.slow_s if self._unconfirmed else limits.idle_s, "a request")
        header = self._channel.receive_header()
        answer = self._answers.get(header.kind)
        if answer is None:
            raise FrameError(f"a {header.kind.name} frame where a request should be")
        self._allow(limits.slow_s, "the rest of a request")
        self._require_proof()
        self.counters.requests += 1
        try:
            answer(header)
        except FrameError:
            raise
        except KVServiceError as error:
            self._allow(limits.slow_s, "room for an answer")
            self._channel.send(Kind.ERROR, header.request, encode_error(error))

    def _require_proof(self) -> None:
        """Cut off who was let in once and would not be now."""
        assert self._session is not None, "greeted"
        if self._clock() - self._proved_s < self._limits.proof_s:
            return
        self._proved_s = self._clock()
        if not self._is_current(self._session.principal):
            raise FrameError(f"what proved {self._session.principal.name} is not in force any more; dial anew")

    @property
    def _node(self) -> HostSession:
        assert self._session is not None, "greeted"
        return self._session.host

    def _register(self, identities: Sequence[str]) -> None:
        self._allow(self._limits.host_s, "the node")
        if identities:
            self._node.register(list(identities))

    def _reply(self, header: Header, kind: Kind, message: wire.PeerFound | wire.PeerCount | wire.PeerStored) -> None:
        self._allow(self._limits.slow_s, "room for an answer")
        self._channel.send(kind, header.request, message)

    def _find(self, header: Header) -> None:
        asked = self._channel.receive_message(header, wire.PeerFind())
        limit = self._limits.find_queries_max
        if len(asked.queries) > limit:
            raise LimitError(f"{len(asked.queries)} segments in one question, the limit is {limit}; split it")
        self._register(asked.identities)
        queries = [decode_query(query) for query in asked.queries]
        ahead_bytes = 0 if self._is_full(header) else min(asked.ahead_bytes, self._limits.ahead_bytes_max)
        result = self._node.find(queries, asked.lease_ttl_s, asked.wait_s, ahead_bytes)
        if result.ahead:
            self._unconfirmed[header.request] = [one.held for one in result.ahead]
        found = encode_found(result)
        if found.ByteSize() > MESSAGE_BYTES_MAX:
            self._let_go(header.request)
            self._node.release([found.lease_id])
            raise LimitError(f"{len(queries)} segments have too long an answer for one frame; split the question")
        self._reply(header, Kind.FOUND, found)
        for one in result.ahead:
            self._send_bytes(header.request, one.held, 0, one.bytes)

    def _is_full(self, header: Header) -> bool:
        """Is as much unconfirmed as may be, or this very request?"""
        return len(self._unconfirmed) >= self._limits.fetches_max or header.request in self._unconfirmed

    def _fetch(self, header: Header) -> None:
        asked = self._channel.receive_message(header, wire.PeerFetch())
        if self._is_full(header):
            raise FrameError(f"{len(self._unconfirmed)} records were sent and not confirmed, or one twice")
        self._register(asked.identities)
        held = self._hold(asked)
        self._unconfirmed[header.request] = [held]
        try:
            self._send_record(header.request, held, asked.start, self._packer(asked, held))
        except KVServiceError:
            self._let_go(header.request)
            raise

    def _hold(self, asked: wire.PeerFetch) -> Held:
        """What was leased on another way to this node is held in the session of that one."""
        assert self._session is not None, "greeted"
        wanted, leased = decode_fetch(asked), asked.leased
        other = self._sessions.find(leased.session, self._session.node, self._session.principal)
        if other is None:
            return self._node.hold(wanted)
        return other.host.hold(wanted._replace(lease_id=leased.lease_id))

    def _packer(self, asked: wire.PeerFetch, held: Held) -> Packer | None:
        """What packs the record; None if it goes as it lies."""
        is_packed = asked.takes_packed and held.may_pack and not self._channel.lends and KERNELS.are_ready()
        return Packer(np.frombuffer(held.source.view, np.uint8)) if is_packed else None

    def _send_record(self, request: int, held: Held, start: int, packer: Packer | None) -> None:
        at, total = start, held.record_bytes
        if at >= total:
            raise InvalidInputError(f"a record of {total} bytes was asked for from byte {at} on")
        while at < total:
            self._allow(self._limits.host_s, "the node")
            end = held.wait(at)
            self._send_bytes(request, held, at, end, packer)
            at = end
        self.counters.sent += 1

    def _send_bytes(self, request: int, held: Held, start: int, end: int, packer: Packer | None = None) -> None:
        for piece in pieces_of(self._channel, held.source, start, end, packer):
            self._allow(self._limits.slow_s, "a slow reader")
            send_piece(self._channel, request, held.source, piece, self.counters)
            self.counters.sent_bytes += piece.last - piece.first

    def _got(self, header: Header) -> None:
        if header.request not in self._unconfirmed:
            raise FrameError(f"record {header.request} is confirmed, and was not sent")
        self._let_go(header.request)

    def _let_go(self, request: int) -> None:
        for held in self._unconfirmed.pop(request, ()):
            held.release()

    def _store(self, header: Header) -> None:
        asked = self._channel.receive_message(header, wire.PeerStore())
        self._register(asked.identities)
        room = self._node.reserve(decode_store(asked))
        if room is None:
            self._channel.send(Kind.EXISTS, header.request)
            return
        try:
            takes_packed = asked.packs and not self._channel.lends and KERNELS.are_ready()
            checksum = self._receive_record(header.request, room, wire.PeerGo(takes_packed=takes_packed))
        except BaseException:
            self._node.abort(room)
            raise
        self._allow(self._limits.host_s, "the node")
        generation = self._node.commit(room, checksum)
        self.counters.taken += 1
        self.counters.taken_bytes += len(room.view)
        self._reply(header, Kind.STORED, wire.PeerStored(generation=generation))

    def _receive_record(self, request: int, room: Room, go: wire.PeerGo) -> int:
        """Fill the room; the header's checksum that the other side commits with."""
        channel, at, unpacker = self._channel, 0, Unpacker()
        self._allow(self._limits.slow_s, "a slow writer")
        channel.send(Kind.GO, request, go)
        while at < len(room.view):
            self._allow(self._limits.slow_s, "a slow writer")
            at = self._receive_part(request, room, at, unpacker if go.takes_packed else None)
        self._allow(self._limits.slow_s, "a commit")
        header = channel.receive_header()
        if header.kind is not Kind.COMMIT or header.request != request:
            raise FrameError(f"a {header.kind.name} frame where a commit should be")
        return channel.receive_message(header, wire.PeerCommit()).header_checksum

    def _receive_part(self, request: int, room: Room, at: int, unpacker: Unpacker | None) -> int:
        """The record's next bytes, as data, or packed if there is an unpacker; up to where."""
        channel, total = self._channel, len(room.view)
        header = channel.receive_header()
        if header.kind is Kind.PACKED and header.request == request and unpacker is not None:
            end = unpacker.receive(channel, header, room.view, at)
            self.counters.note_packed(end - at, header.frame_bytes)
            room.arrived(at, end)
            return end
        end = at + header.payload_bytes
        if header.kind is not Kind.DATA or header.request != request or end > total:
            raise FrameError(f"a {header.kind.name} frame to byte {end} where data of a record of {total} should be")
        channel.receive_pieces(room.view, at, end, room.arrived)
        return end

    def _delete(self, header: Header) -> None:
        asked = self._channel.receive_message(header, wire.PeerDelete())
        if asked.is_whole_namespace and asked.keys:
            raise InvalidInputError("a delete names keys or a whole namespace, not both")
        self._register(asked.identities)
        keys = None if asked.is_whole_namespace else decode_keys(asked.keys)
        count = self._node.delete(Namespace(asked.namespace), keys)
        self._reply(header, Kind.COUNT, wire.PeerCount(count=count))

    def _renew(self, header: Header) -> None:
        asked = self._channel.receive_message(header, wire.PeerRenew())
        self._allow(self._limits.host_s, "the node")
        count = self._node.renew(list(asked.lease_ids), asked.lease_ttl_s)
        self._reply(header, Kind.COUNT, wire.PeerCount(count=count))

    def _release(self, header: Header) -> None:
        asked = self._channel.receive_message(header, wire.PeerRelease())
        self._allow(self._limits.host_s, "the node")
        self._reply(header, Kind.COUNT, wire.PeerCount(count=self._node.release(list(asked.lease_ids))))

    def _ping(self, header: Header) -> None:
        if header.message_bytes:
            raise FrameError("a ping says nothing")
        assert self._session is not None, "greeted"
        self._channel.send(Kind.PONG, header.request, encode_facts(self._facts(self._session.principal)))
