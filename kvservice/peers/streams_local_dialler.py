"""Opens connections to a node of the same host, over its unix socket, and exchanges descriptors of arenas with it.

Only with this user's process, and only with the very boot of the node that said where it can be met: nothing is said to
anybody else, and no token shown.
"""

import socket
from collections.abc import Callable

from kvservice.model.errors import KVServiceError, UnavailableError
from kvservice.peers.call import ClientSession
from kvservice.peers.locality import require_same_user
from kvservice.peers.member import Facts, LocalAddress
from kvservice.peers.streams_channel import Channel
from kvservice.peers.streams_client_dialler import Caller, PeerDialler
from kvservice.peers.streams_limits import LinkLimits
from kvservice.peers.streams_local_channel import ASK_BUFFER_BYTES, LocalChannel
from kvservice.storage.arena import Arena, AttachedArenas


class LocalDialler(PeerDialler):
    """See PeerDialler. ``arena``: this node's, which the other one reads what is given to it from."""

    def __init__(
        self,
        address: LocalAddress,
        caller: Caller,
        limits: LinkLimits,
        on_greeted: Callable[[Facts], None],
        arena: Arena,
    ) -> None:
        super().__init__(address, caller, limits, on_greeted)
        self._local = address
        self._arena = arena
        self._attached = AttachedArenas()

    def dial(self) -> tuple[Channel, ClientSession]:
        """See PeerDialler. Raises UnavailableError, whatever the reason: there are other ways to the same node."""
        try:
            return super().dial()
        except UnavailableError:
            raise
        except KVServiceError as error:
            raise UnavailableError(f"{self._local} is not used: {error}") from error

    def _connect(self) -> Channel:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(self._deadline_s)
            sock.connect(self._local.path)
            require_same_user(sock)
            return LocalChannel(sock, self._arena, self._attached, ASK_BUFFER_BYTES)
        except BaseException:
            sock.close()
            raise

    def _open(self, channel: Channel, own: Facts) -> None:
        channel.send_opening()
        channel.receive_opening()
        self._say_hello(channel, own)

    def _admit(self, own: Facts, facts: Facts) -> None:
        super()._admit(own, facts)
        if facts.node != self._local.node:
            raise UnavailableError(f"{self._local} is now of node {facts.node}, not of {self._local.node}")

    def _exchange(self, channel: Channel) -> None:
        assert isinstance(channel, LocalChannel), "made by _connect"
        channel.receive_arena()
        channel.send_arena()
