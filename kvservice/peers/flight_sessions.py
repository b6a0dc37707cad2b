"""Who is connected to the Flight port. Flight tells of no lost connection: a session ends when it was not used for a
while, and with it what it held. State only; one lock, no I/O."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvservice.access.principal import Principal
from kvservice.model.errors import LimitError, UnknownSessionError
from kvservice.peers.member import Facts
from kvservice.peers.streams_server_sessions import PeerSession, PeerSessions


@dataclass(frozen=True, slots=True)
class FlightLimits:
    """``session_ttl_s``: without a call for so long a session ends; a member is pinged every two seconds.

    ``calls_max``: of one session at a time, and ``sessions_max``: of all nodes; a call is a thread. ``slow_s``: for one
    batch of a record to be brought: slower writers lose their room.
    """

    session_ttl_s: float = 30.0
    sessions_max: int = 256
    calls_max: int = 32
    slow_s: float = 10.0


class FlightCut:
    """Stands for a session among the connections of its node; ``shut`` by a later boot of that node."""

    is_shut = False

    def shut(self) -> None:
        """See Cut: it is found to have ended at the next look."""
        self.is_shut = True


@dataclass(slots=True, eq=False)
class FlightSession:
    """What one node does over Flight. ``used_s``: when a call of it ended last; ``calls``: under way."""

    peer: PeerSession
    cut: FlightCut
    used_s: float
    calls: int = 0


class FlightSessions:
    """Sessions by id, among all sessions of the node's peers (``peers``). Any thread calls."""

    def __init__(self, peers: PeerSessions, limits: FlightLimits, clock: Callable[[], float]) -> None:
        self._peers = peers
        self._limits = limits
        self._clock = clock
        self._lock = threading.Lock()
        self._open: dict[bytes, FlightSession] = {}

    @property
    def count(self) -> int:
        """How many are open."""
        return len(self._open)

    def greet(self, facts: Facts, asked: bytes, principal: Principal, where: str) -> bytes:
        """The id of the caller's session: that which it asks for, if it is still there, else a new one.

        Raises ConfigError, StaleEpochError, LimitError.
        """
        self.sweep()
        with self._lock:
            session = self._of(asked, principal)
            if session is not None and session.peer.node == facts.node:
                session.used_s = self._clock()
                return asked
            if len(self._open) >= self._limits.sessions_max:
                raise LimitError(f"{len(self._open)} sessions are open over Flight, that is the limit; try again later")
        cut = FlightCut()
        peer = self._peers.join(facts, b"", principal, cut, where)
        with self._lock:
            self._open[peer.id] = FlightSession(peer, cut, self._clock())
        return peer.id

    @contextmanager
    def call(self, asked: bytes, principal: Principal) -> Iterator[PeerSession]:
        """A call of a session, which stays open meanwhile. Raises UnknownSessionError, LimitError."""
        with self._lock:
            session = self._of(asked, principal)
            if session is None:
                raise UnknownSessionError("this session over Flight is not open (any more); say hello again")
            if session.calls >= self._limits.calls_max:
                raise LimitError(f"{session.calls} calls of one node are under way over Flight, that is the limit")
            session.calls += 1
        try:
            yield session.peer
        finally:
            with self._lock:
                session.calls -= 1
                session.used_s = self._clock()

    def leased_in(self, asked: bytes, session: PeerSession, principal: Principal) -> PeerSession | None:
        """The caller's other session, that of its streams, which leased what it fetches here."""
        return self._peers.find(asked, session.node, principal)

    def end(self, asked: bytes, principal: Principal) -> None:
        """The caller needs its session no more."""
        with self._lock:
            session = self._of(asked, principal)
            if session is not None:
                session.cut.shut()
        self.sweep()

    def sweep(self, *, is_all: bool = False) -> None:
        """End what was not used for too long, or was shut; ``is_all``: every session without a call."""
        oldest_s = self._clock() - self._limits.session_ttl_s
        with self._lock:
            over = [
                one
                for one in self._open.values()
                if not one.calls and (is_all or one.cut.is_shut or one.used_s < oldest_s)
            ]
            for session in over:
                del self._open[session.peer.id]
        for session in over:
            self._peers.leave(session.peer, session.cut)

    def _of(self, asked: bytes, principal: Principal) -> FlightSession | None:
        """Of this caller: an id alone opens nothing."""
        session = self._open.get(asked)
        is_its = session is not None and session.peer.principal.name == principal.name and not session.cut.is_shut
        return session if is_its else None
