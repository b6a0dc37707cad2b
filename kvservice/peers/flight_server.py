"""The Flight port: what the peer port does, over Arrow Flight, for where only gRPC gets through. Slower: 0.7-1.2 CPU
seconds a GB against 0.3.

The calls of a caller are proved one by one. Records lie still until gRPC has let go of their bytes. Calls run on gRPC's
threads; flight_endpoint.py has what needs pyarrow, which is imported when the port is opened.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

import numpy as np
from google.protobuf.message import Message

from kvservice import __version__
from kvservice.access.principal import Credentials, Principal
from kvservice.access.tls import PemFiles
from kvservice.model.errors import (
    ConfigError,
    ForbiddenError,
    InvalidInputError,
    KVServiceError,
    LeaseExpiredError,
    LimitError,
    UnavailableError,
)
from kvservice.model.identity import Namespace
from kvservice.peers.flight_sessions import FlightLimits, FlightSessions
from kvservice.peers.flight_words import BYE, DELETE, FIND, HELLO, PING, RELEASE, RENEW, require_flight
from kvservice.peers.frames import MESSAGE_BYTES_MAX, parse_message
from kvservice.peers.host import Authorize, Held, Host, HostSession, Room
from kvservice.peers.streams_limits import ServerLimits
from kvservice.peers.streams_messages import (
    decode_facts,
    decode_fetch,
    decode_keys,
    decode_query,
    decode_store,
    encode_facts,
    encode_found,
)
from kvservice.peers.streams_server import JOIN_S, everybody
from kvservice.peers.streams_server_connection import ConnectionCounters
from kvservice.peers.streams_server_sessions import PeerSession, PeerSessions
from kvservice.storage.buffer import Bytes
from kvservice.wire.v1 import peer_pb2 as wire

FAILURES_TOLD = 4
"""Looks at which the port is not free yet, before it is said: what listened there takes a moment to end."""
M = TypeVar("M", bound=Message)

log = logging.getLogger(__name__)


class FlightCaller(NamedTuple):
    """What a call shows: credentials, where it comes from, and the sessions that its headers name."""

    credentials: Credentials
    where: str
    session: bytes = b""
    lease_session: bytes = b""


class FlightServer:
    """``sessions``: those of the same node's peer port, if it has one. ``tls``: what is shown and believed now; None
    for plaintext.

    pyarrow cannot exchange certificates. So when they change the port is opened anew: connections that are there end
    with the calls that run on them, sessions stay. ``start`` and ``stop`` block; neither is for a loop.
    """

    def __init__(
        self,
        host: Host,
        address: tuple[str, int],
        *,
        sessions: PeerSessions | None = None,
        authorize: Authorize = everybody,
        tls: Callable[[], PemFiles] | None = None,
        limits: ServerLimits | None = None,
        flight_limits: FlightLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = limits or ServerLimits()
        self.flight_limits = flight_limits or FlightLimits()
        self.counters = ConnectionCounters()
        self.sessions = FlightSessions(sessions or PeerSessions(host, self.limits), self.flight_limits, clock)
        self._address, self._tls = address, tls
        self._shown: PemFiles | None = None
        self._host = host
        self._authorize = authorize
        self._clock = clock
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._intakes: set[Intake] = set()
        self._shut: Callable[[], None] | None = None
        self._leaving: list[threading.Thread] = []
        self._is_open = False
        self._failures = 0
        self._watcher = threading.Thread(target=self._watch, name="kvservice-flight-watch", daemon=True)

    def start(self) -> int:
        """Listen; the port. Raises ConfigError if it is taken or not ours to take, or pyarrow is missing."""
        require_flight()
        port = self._open(None if self._tls is None else self._tls())
        self._is_open = True
        self._watcher.start()
        return port

    def _open(self, tls: PemFiles | None) -> int:
        from kvservice.peers.flight_endpoint import open_endpoint

        port, self._shut = open_endpoint(self, self._address, tls)
        self._address, self._shown = (self._address[0], port), tls
        return port

    def stop(self) -> None:
        """End every call and session. Safe to call twice. The node's loop must still run."""
        self._stopping.set()
        if not self._is_open:
            return
        self._is_open = False
        self._watcher.join(JOIN_S)
        for intake in self._open_intakes():
            intake.cut()
        self._leave()
        until_s = time.monotonic() + JOIN_S
        for thread in self._leaving:
            thread.join(max(0.0, until_s - time.monotonic()))
        if any(thread.is_alive() for thread in self._leaving):
            log.warning("Flight port: a caller that reads nothing keeps it from closing; it is left behind")
        self.sessions.sweep(is_all=True)

    def _leave(self) -> None:
        """Take no more calls where they came until now; those that run go on."""
        shut, self._shut = self._shut, None
        self._leaving = [thread for thread in self._leaving if thread.is_alive()]
        if shut is not None:
            thread = threading.Thread(target=shut, name="kvservice-flight-stop", daemon=True)
            thread.start()
            self._leaving.append(thread)

    def _exchange(self) -> None:
        """Open the port anew if its certificate is another one now; again at the next look while it is still taken."""
        tls = None if self._tls is None else self._tls()
        if tls == self._shown and self._shut is not None:
            return
        self._leave()
        try:
            self._open(tls)
        except ConfigError as error:
            self._failures += 1
            if self._failures == FAILURES_TOLD:
                log.warning("Flight port: with the new certificate it is not open yet, and is tried again: %s", error)
        else:
            self._failures = 0
            log.info("Flight port: the new certificate is in use")

    # Calls, by gRPC's threads. Each raises KVServiceError

    def prove(self, caller: FlightCaller) -> Principal:
        """Who calls."""
        principal = self._authorize(caller.credentials)
        if not principal.is_node:
            raise ForbiddenError(f"{principal.name} is no node: give it the role node in the access file")
        return principal

    def act(self, verb: str, body: bytes, caller: FlightCaller) -> bytes:
        """Answer a question."""
        if len(body) > MESSAGE_BYTES_MAX:
            raise LimitError(f"a question of {len(body)} bytes, the limit is {MESSAGE_BYTES_MAX}; split it")
        principal = self._proved(caller)
        self.count(requests=1)
        if verb == HELLO:
            return self._greet(_parsed(body, wire.PeerHello()), caller, principal).SerializeToString()
        if verb == BYE:
            self.sessions.end(caller.session, principal)
            return b""
        answer = {PING: self._ping, FIND: self._find, DELETE: self._delete, RENEW: self._renew, RELEASE: self._release}
        if verb not in answer:
            raise InvalidInputError(f"{verb[:40]!r} is no verb of this node; its version is {__version__}")
        with self.sessions.call(caller.session, principal) as session:
            return answer[verb](body, session.host).SerializeToString()

    @contextmanager
    def sending(self, body: bytes, caller: FlightCaller) -> Iterator[tuple[Held, int]]:
        """A record that is asked for, and from which byte on. Whoever sends it releases it."""
        principal, asked = self._proved(caller), _parsed(body, wire.PeerFetch())
        self.count(requests=1)
        with self.sessions.call(caller.session, principal) as session:
            held = self._hold(asked, caller, session, principal)
            if asked.start >= held.record_bytes:
                held.release()
                raise InvalidInputError(f"a record of {held.record_bytes} bytes was asked for from {asked.start} on")
            yield held, asked.start

    @contextmanager
    def taking(self, body: bytes, caller: FlightCaller) -> Iterator["Intake | None"]:
        """Room for a record that is given, None if its key is held. It is given back unless it was committed."""
        principal, asked = self._proved(caller), _parsed(body, wire.PeerStore())
        self.count(requests=1)
        with self.sessions.call(caller.session, principal) as session:
            _register(session.host, asked.identities)
            room = session.host.reserve(decode_store(asked))
            if room is None:
                yield None
                return
            intake = Intake(session.host, room, caller.where, self._clock, self.flight_limits.slow_s)
            with self._lock:
                self._intakes.add(intake)
            try:
                yield intake
            finally:
                with self._lock:
                    self._intakes.discard(intake)
                intake.cut()

    def count(self, **counts: int) -> None:
        """Add to the counters."""
        with self._lock:
            self.counters.add(ConnectionCounters(**counts))

    def check_running(self) -> None:
        """Raise UnavailableError once the port is being closed."""
        if self._stopping.is_set():
            raise UnavailableError("this node is stopping")

    def _proved(self, caller: FlightCaller) -> Principal:
        self.check_running()
        try:
            return self.prove(caller)
        except KVServiceError as error:
            log.warning("Flight port: %s is refused: %s", caller.where, error)
            raise

    def _greet(self, hello: wire.PeerHello, caller: FlightCaller, principal: Principal) -> wire.PeerWelcome:
        try:
            session = self.sessions.greet(decode_facts(hello.facts), hello.session, principal, caller.where)
        except KVServiceError as error:
            log.warning("Flight port: %s is refused: %s", caller.where, error)
            raise
        limits = wire.PeerLimits(
            find_queries_max=self.limits.find_queries_max,
            record_bytes_max=self._host.record_bytes_max,
            fetches_max=self.flight_limits.calls_max,
        )
        facts = encode_facts(self._host.facts)
        return wire.PeerWelcome(facts=facts, session=session, version=__version__, limits=limits)

    def _ping(self, _: bytes, __: HostSession) -> wire.PeerFacts:
        return encode_facts(self._host.facts)

    def _find(self, body: bytes, node: HostSession) -> wire.PeerFound:
        asked = _parsed(body, wire.PeerFind())
        limit = self.limits.find_queries_max
        if len(asked.queries) > limit:
            raise LimitError(f"{len(asked.queries)} segments in one question, the limit is {limit}; split it")
        _register(node, asked.identities)
        found = encode_found(node.find([decode_query(one) for one in asked.queries], asked.lease_ttl_s, asked.wait_s))
        if found.ByteSize() > MESSAGE_BYTES_MAX:
            node.release([found.lease_id])
            raise LimitError(f"{len(asked.queries)} segments have too long an answer; split the question")
        return found

    def _delete(self, body: bytes, node: HostSession) -> wire.PeerCount:
        asked = _parsed(body, wire.PeerDelete())
        if asked.is_whole_namespace and asked.keys:
            raise InvalidInputError("a delete names keys or a whole namespace, not both")
        _register(node, asked.identities)
        keys = None if asked.is_whole_namespace else decode_keys(asked.keys)
        return wire.PeerCount(count=node.delete(Namespace(asked.namespace), keys))

    def _renew(self, body: bytes, node: HostSession) -> wire.PeerCount:
        asked = _parsed(body, wire.PeerRenew())
        return wire.PeerCount(count=node.renew(list(asked.lease_ids), asked.lease_ttl_s))

    def _release(self, body: bytes, node: HostSession) -> wire.PeerCount:
        return wire.PeerCount(count=node.release(list(_parsed(body, wire.PeerRelease()).lease_ids)))

    def _hold(self, asked: wire.PeerFetch, caller: FlightCaller, session: PeerSession, principal: Principal) -> Held:
        """Under the lease that found it, be it that of a stream; else what is published under the key."""
        wanted = decode_fetch(asked)
        other = self.sessions.leased_in(caller.lease_session, session, principal) if caller.lease_session else None
        if other is not None:
            try:
                return other.host.hold(wanted)
            except LeaseExpiredError:
                log.debug("Flight port: %s leased %s in a session that knows it no more", caller.where, wanted.key)
        _register(session.host, asked.identities)
        return session.host.hold(wanted if not caller.lease_session else wanted._replace(lease_id=0))

    # Watching

    def _open_intakes(self) -> "list[Intake]":
        with self._lock:
            return list(self._intakes)

    def _watch(self) -> None:
        while not self._stopping.wait(self.limits.watch_interval_s):
            self.sessions.sweep()
            self._exchange()
            for intake in self._open_intakes():
                if intake.is_late and intake.cut():
                    log.warning("Flight port: %s is cut off: it kept this node waiting for a slow writer", intake.where)


class Intake:
    """A room that another node fills. It can be taken away between two batches, whatever that node does."""

    def __init__(self, node: HostSession, room: Room, where: str, clock: Callable[[], float], slow_s: float) -> None:
        self.where = where
        self.bytes = len(room.view)
        self.at = 0
        self._node, self._room = node, room
        self._target = np.frombuffer(room.view, np.uint8)
        self._clock, self._slow_s = clock, slow_s
        self._until_s = clock() + slow_s
        self._lock = threading.Lock()
        self._is_over = False

    @property
    def is_late(self) -> bool:
        """Was nothing brought for too long?"""
        return self._clock() > self._until_s

    def fill(self, data: Bytes) -> None:
        """The next bytes. Raises InvalidInputError for more than there is room for."""
        with self._lock:
            self._check()
            end = self.at + len(data)
            if end > self.bytes:
                raise InvalidInputError(f"bytes up to {end} of a record of {self.bytes}")
            np.copyto(self._target[self.at : end], data)
            start, self.at = self.at, end
            self._room.arrived(start, end)
            self._until_s = self._clock() + self._slow_s

    def commit(self, header_checksum: int) -> int:
        """Publish it; its generation. Raises InvalidInputError for half a record, and what the node says."""
        with self._lock:
            self._check()
            if self.at != self.bytes:
                raise InvalidInputError(f"a commit after {self.at} of {self.bytes} bytes")
            self._is_over = True
        return self._node.commit(self._room, header_checksum)

    def cut(self) -> bool:
        """Give the room back, unless that is over. Nothing is written to it after this."""
        with self._lock:
            if self._is_over:
                return False
            self._is_over = True
        self._node.abort(self._room)
        return True

    def _check(self) -> None:
        if self._is_over:
            raise UnavailableError("the room for this record was taken back: its bytes came too slowly")


def _register(node: HostSession, identities: Iterable[str]) -> None:
    texts = list(identities)
    if texts:
        node.register(texts)


def _parsed(body: bytes, message: M) -> M:
    parse_message(body, message)
    return message
