"""The unix socket beside a peer port: nodes of the same host and user find and store here as there, and read the arena.

Who comes shows what it shows at the peer port, and may do what it may do there. Besides it must be the same user's
process, and may see every tenant: what it gets is a descriptor of all that lies in memory.
"""

import socket
from pathlib import Path
from typing import Any

from kvservice.access.principal import Principal
from kvservice.data_socket import bind_private
from kvservice.model.errors import ConfigError, ForbiddenError
from kvservice.peers.host import Host
from kvservice.peers.locality import require_same_user
from kvservice.peers.streams_channel import Channel
from kvservice.peers.streams_local_channel import LocalChannel
from kvservice.peers.streams_server import StreamServer
from kvservice.peers.streams_server_connection import PeerConnection
from kvservice.storage.arena import Arena, AttachedArenas


class LocalConnection(PeerConnection):
    """See PeerConnection."""

    _channel: LocalChannel

    def _require(self, principal: Principal) -> None:
        require_same_user(self._channel.sock)
        super()._require(principal)
        if principal.tenants is not None:
            raise ForbiddenError(
                f"{principal.name} may see {principal.tenants_text()} only, and this way leads to the memory of all "
                "tenants; share over the peer port"
            )

    def _exchange(self) -> None:
        self._channel.send_arena()
        self._channel.receive_arena()


class LocalServer(StreamServer):
    """See StreamServer. ``path``: of the socket, mode 0600, removed at the end; ``arena``: the node's."""

    def __init__(self, host: Host, path: Path, arena: Arena, **others: Any) -> None:
        super().__init__(host, ("", 0), **others)
        self._connection = LocalConnection
        self._path = path
        self._arena = arena
        self._attached = AttachedArenas()
        self._number = 0

    def _listen(self) -> socket.socket:
        try:
            listener = bind_private(self._path)
        except OSError as error:
            raise ConfigError(f"cannot listen for other nodes of this host at {self._path}: {error}") from error
        listener.setblocking(True)
        return listener

    def stop(self) -> None:
        """See StreamServer."""
        is_bound = self._listener is not None and self._listener.fileno() >= 0
        super().stop()
        if is_bound:
            self._path.unlink(missing_ok=True)

    def _named(self, sock: socket.socket, address: Any) -> tuple[str, bool]:
        self._number += 1
        return f"{self._path} #{self._number}", True

    def _channel(self, sock: socket.socket) -> Channel:
        return LocalChannel(sock, self._arena, self._attached)
