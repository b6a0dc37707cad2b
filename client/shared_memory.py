"""A node on this host: bytes through the node's arena, calls over its data socket, the session itself over gRPC.

Calls for which no connection is free, since others wait on all of them, go over gRPC. Payload never passes gRPC or a
socket.
"""

import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from kvservice.client.call_sockets import BegunCall, CallSockets, greet
from kvservice.client.security import NO_SECURITY, Security
from kvservice.client.session_stream import SessionStream
from kvservice.client.transport import CALL_TIMEOUT_S, Arena, LateCall, PendingCall
from kvservice.model.errors import KVServiceError, UnavailableError
from kvservice.model.frames import ARENA_MAGIC
from kvservice.storage.arena import attach_arena
from kvservice.wire.v1 import cache_pb2
from kvservice.wire.v1.cache_pb2 import Hello, Registered, RegisterIdentities, Welcome

_REPLIES: dict[str, type[Message]] = {
    method.name: GetMessageClass(method.output_type)
    for method in cache_pb2.DESCRIPTOR.services_by_name["CacheService"].methods
}


@dataclass(frozen=True, slots=True)
class _Connected:
    """One open session: its stream, its call connections, and the arena."""

    stream: SessionStream
    calls: CallSockets
    arena: Arena

    def close(self) -> None:
        self.stream.close()
        self.calls.close()


@dataclass(frozen=True, slots=True)
class _Pending:
    """A call under way on a connection of its own."""

    begun: BegunCall
    kind: type[Message]

    def reply(self, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        return self.kind.FromString(self.begun.finish(timeout_s))

    def give_up(self) -> None:
        self.begun.give_up()


class SharedMemoryTransport:
    """One session with the node at ``unix:/path`` or ``127.0.0.1:port``. Safe from any thread."""

    def __init__(self, address: str, security: Security = NO_SECURITY) -> None:
        self.address = address
        self._security = security
        self._connected: _Connected | None = None

    def open_session(self, hello: Hello) -> Welcome:
        """Open a session on a connection of its own and map the arena; one that was open before is closed."""
        self.close()
        stream = SessionStream(self.address, self._security)
        try:
            welcome = stream.open(hello)
            arena = map_arena(welcome, is_writable=hello.wants_write)
        except BaseException:
            stream.close()
            raise
        self._connected = _Connected(stream, CallSockets(welcome), arena)
        return welcome

    def register(self, request: RegisterIdentities) -> Registered:
        """Add identities to the open session."""
        return self._open().stream.register(request)

    def call(self, name: str, request: Message, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        """The reply to a call. Raises UnavailableError when the session's stream has ended."""
        connected = self._open()
        answer = connected.calls.call(name, request.SerializeToString(), timeout_s)
        if answer is None:
            return connected.stream.call(name, request, timeout_s)
        return _REPLIES[name].FromString(answer)

    def begin(self, name: str, request: Message) -> PendingCall:
        """Send a call whose answer is read later. Raises UnavailableError when the session's stream has ended."""
        begun = self._open().calls.begin(name, request.SerializeToString(), CALL_TIMEOUT_S)
        return LateCall(self.call, name, request) if begun is None else _Pending(begun, _REPLIES[name])

    def post(self, name: str, request: Message) -> None:
        """Send a call without waiting. Raises UnavailableError when it cannot be sent."""
        connected = self._open()
        if not connected.calls.post(name, request.SerializeToString()):
            connected.stream.post(name, request)

    def arena(self) -> Arena:
        """The mapped arena. Views of it stay valid, though not their contents, after the session has ended.

        Raises UnavailableError when it has.
        """
        return self._open().arena

    def close(self) -> None:
        """End the session and its connections. The arena is unmapped when the last view of it is dropped."""
        connected, self._connected = self._connected, None
        if connected is not None:
            connected.close()

    def _open(self) -> _Connected:
        connected = self._connected
        if connected is None:
            raise UnavailableError(f"no session is open with {self.address}; open one first")
        connected.stream.check_open()
        return connected


def map_arena(welcome: Welcome, *, is_writable: bool) -> Arena:
    """Map the arena of the node that said ``welcome``; client and node must share a host. Raises as ``greet``.

    The connection that brought it stays open as long as there is a view of the mapping: what a lost session had
    reserved goes to nobody else before, since a thread of this process, or a forked child, may still be writing.
    """
    peer, arena_bytes, descriptors = greet(ARENA_MAGIC, welcome)
    try:
        arena = attach_arena(_only(descriptors, welcome), arena_bytes, is_writable=is_writable)
    except BaseException:
        peer.close()
        raise
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    weakref.finalize(arena, peer.close).atexit = False  # at the very end the system closes it, after the last write
    return arena


def _only(descriptors: Sequence[int], welcome: Welcome) -> int:
    if len(descriptors) != 1:
        raise KVServiceError(f"{welcome.arena.data_socket} sent no descriptor; client and node differ in version")
    return descriptors[0]
