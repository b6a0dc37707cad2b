"""Who is connected to the peer port: sessions of nodes, each over some connections. State only; one lock, no I/O."""

import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from kvservice.access.principal import Principal
from kvservice.model.errors import ConfigError, LimitError
from kvservice.peers.fence import Fence, twin_error
from kvservice.peers.host import Host, HostSession
from kvservice.peers.member import Facts, NodeId
from kvservice.peers.streams_limits import ServerLimits

SESSION_ID_BYTES = 16


class Cut(Protocol):
    """A connection, as far as it can be ended from outside."""

    def shut(self) -> None:
        """End it."""


@dataclass(slots=True, eq=False)
class PeerSession:
    """What one node does here. It ends with the last of its connections."""

    id: bytes
    node: NodeId
    principal: Principal
    host: HostSession
    connections: set[Cut] = field(default_factory=set)


class PeerSessions:
    """Sessions by id. No two live nodes of one uuid, and no boot before one that was seen."""

    def __init__(self, host: Host, limits: ServerLimits) -> None:
        self._host = host
        self._limits = limits
        self._lock = threading.Lock()
        self._fence = Fence()
        self._open: dict[bytes, PeerSession] = {}

    def join(self, facts: Facts, asked: bytes, principal: Principal, connection: Cut, where: str) -> PeerSession:
        """The session that a new connection belongs to. Raises ConfigError, StaleEpochError, LimitError."""
        own = self._host.facts.node
        if facts.node == own:
            raise ConfigError(f"{where} is this very node, {own}: leave its address out of those it shares with")
        if facts.node.uuid == own.uuid:
            raise twin_error(facts.node, where, own, "this node")
        with self._lock:
            self._fence.admit(facts.node, where)
            of_peer = [one for one in self._open.values() if one.node.uuid == facts.node.uuid]
            before = [one for one in of_peer if one.node.epoch < facts.node.epoch]
            self._cut(before)
            count = sum(len(one.connections) for one in of_peer if one not in before)
            if count >= self._limits.connections_per_peer_max:
                raise LimitError(f"node {facts.node} at {where} has {count} connections here, that is the limit")
            session = self._open.get(asked)
            if session is None or session.node != facts.node or session.principal.name != principal.name:
                host = self._host.open(principal, f"{facts.name or facts.node.uuid} at {where}"[:128])
                session = PeerSession(os.urandom(SESSION_ID_BYTES), facts.node, principal, host)
                self._open[session.id] = session
            session.connections.add(connection)
            return session

    def leave(self, session: PeerSession, connection: Cut) -> None:
        """A connection has ended; the session does with its last one."""
        with self._lock:
            session.connections.discard(connection)
            is_last = not session.connections
            if is_last:
                self._open.pop(session.id, None)
        if is_last:
            session.host.close()

    def find(self, asked: bytes, node: NodeId, principal: Principal) -> PeerSession | None:
        """An open session of this very caller, however it was opened; None: it has none of that id."""
        session = self._open.get(asked)
        is_its = session is not None and (session.node, session.principal.name) == (node, principal.name)
        return session if is_its else None

    @property
    def count(self) -> int:
        """How many are open."""
        return len(self._open)

    def _cut(self, sessions: Iterable[PeerSession]) -> None:
        for session in sessions:
            for connection in session.connections:
                connection.shut()
