"""The peer port: other nodes find, fetch and store records here. A thread a connection, and one that watches the clock.

No thread of it is the node's loop; payload goes between sockets and the arena without passing through Python.
"""

import ipaddress
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from kvservice.access.principal import LOCAL, Credentials, Principal
from kvservice.model.errors import ConfigError
from kvservice.peers.host import Authorize, Host, IsCurrent
from kvservice.peers.streams_channel import Channel
from kvservice.peers.streams_limits import ServerLimits
from kvservice.peers.streams_server_connection import ConnectionCounters, PeerConnection
from kvservice.peers.streams_server_sessions import PeerSessions

BACKLOG = 128
ACCEPT_PAUSE_S = 0.1
JOIN_S = 10.0
SAY_AGAIN_S = 10.0

log = logging.getLogger(__name__)


def everybody(_: Credentials) -> Principal:
    """For a port on loopback without an access file."""
    return LOCAL


class StreamServer:
    """``tls``: the context of the port, None for plain TCP. ``sessions``: those of the node's other ports, if any.

    ``start`` and ``stop`` block; neither is for a loop.
    """

    def __init__(
        self,
        host: Host,
        address: tuple[str, int],
        *,
        authorize: Authorize = everybody,
        is_current: IsCurrent = lambda _: True,
        tls: ssl.SSLContext | None = None,
        limits: ServerLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
        sessions: PeerSessions | None = None,
    ) -> None:
        self.limits = limits or ServerLimits()
        self.sessions = sessions or PeerSessions(host, self.limits)
        self.refused = 0
        self._connection: type[PeerConnection] = PeerConnection
        self._host = host
        self._address = address
        self._authorize = authorize
        self._is_current = is_current
        self._tls = tls
        self._clock = clock
        self._lock = threading.Lock()
        self._connections: dict[PeerConnection, threading.Thread] = {}
        self._stopping = threading.Event()
        self._listener: socket.socket | None = None
        self._threads: list[threading.Thread] = []
        self._past = ConnectionCounters()
        self._said_s = -SAY_AGAIN_S

    @property
    def connections(self) -> int:
        """How many are open."""
        return len(self._connections)

    @property
    def counters(self) -> ConnectionCounters:
        """Sums over all connections, those that ended too."""
        sums = ConnectionCounters()
        with self._lock:
            for one in (self._past, *(connection.counters for connection in self._connections)):
                sums.add(one)
        return sums

    def start(self) -> int:
        """Listen; the port, if it is one. Raises ConfigError if it is taken or not ours to take."""
        self._listener = self._listen()
        for target, what in ((self._accept, "accept"), (self._watch, "watch")):
            thread = threading.Thread(target=target, name=f"kvservice-peers-{what}", daemon=True)
            self._threads.append(thread)
            thread.start()
        name = self._listener.getsockname()
        return int(name[1]) if isinstance(name, tuple) else 0

    def _listen(self) -> socket.socket:
        name, port = self._address
        family = socket.AF_INET6 if ":" in name else socket.AF_INET
        try:
            return socket.create_server((name, port), family=family, backlog=BACKLOG)
        except OSError as error:
            raise ConfigError(f"cannot listen for other nodes at {name}:{port}: {error}; set another port") from error

    def stop(self) -> None:
        """End every connection and wait for their threads. Safe to call twice. The node's loop must still run."""
        self._stopping.set()
        if self._listener is not None:
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
            self._listener.close()
        for thread in self._threads:
            thread.join(JOIN_S)
        with self._lock:
            open_now = dict(self._connections)
        for connection in open_now:
            connection.shut()
        for thread in open_now.values():
            thread.join(JOIN_S)

    # Accepting

    def _accept(self) -> None:
        assert self._listener is not None
        while not self._stopping.is_set():
            try:
                sock, address = self._listener.accept()
            except OSError as error:
                if not self._stopping.is_set():
                    log.warning("peer port: cannot take a node, out of descriptors? %r; trying again", error)
                    self._stopping.wait(ACCEPT_PAUSE_S)
                continue
            self._take(sock, *self._named(sock, address))

    def _named(self, sock: socket.socket, address: Any) -> tuple[str, bool]:
        """Where a caller is, for messages, and whether that is this machine."""
        host, port = address[:2]
        return f"{host}:{port}", ipaddress.ip_address(host.partition("%")[0]).is_loopback

    def _take(self, sock: socket.socket, where: str, is_local: bool) -> None:
        if len(self._connections) >= self.limits.connections_max:
            self._say_full(where)
            sock.close()
            return
        try:
            sock.setblocking(True)
            connection = self._connection(
                self._channel(sock),
                where,
                host=self._host,
                sessions=self.sessions,
                authorize=self._authorize,
                is_current=self._is_current,
                limits=self.limits,
                clock=self._clock,
                is_local=is_local,
            )
        except OSError as error:
            log.info("peer port: %s went away: %s", where, error)
            sock.close()
            return
        thread = threading.Thread(target=self._serve, args=(connection,), name=f"kvservice-peer-{where}", daemon=True)
        with self._lock:
            self._connections[connection] = thread
        thread.start()

    def _channel(self, sock: socket.socket) -> Channel:
        if self._tls is not None:
            sock = self._tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        return Channel(sock, sends_files=self.limits.sends_files)

    def _serve(self, connection: PeerConnection) -> None:
        try:
            connection.run()
        finally:
            with self._lock:
                self._connections.pop(connection, None)
                self._past.add(connection.counters)

    def _say_full(self, where: str) -> None:
        self.refused += 1
        if self._clock() - self._said_s >= SAY_AGAIN_S:
            self._said_s = self._clock()
            limit = self.limits.connections_max
            log.warning("peer port: %s is refused: %d connections are open, that is the limit", where, limit)

    # Watching

    def _watch(self) -> None:
        while not self._stopping.wait(self.limits.watch_interval_s):
            now_s = self._clock()
            with self._lock:
                late = [one for one in self._connections if one.until_s < now_s]
            for connection in late:
                log.warning("peer port: %s is cut off: it kept this node waiting for %s", connection.where,
                            connection.waits_for)  # fmt: skip
                connection.shut()
