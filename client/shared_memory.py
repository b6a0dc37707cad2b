"""A node on this host: calls over gRPC, bytes through the node's arena, whose descriptor is handed over once.

    request := b"KVSARENA" session_id:16 boot_epoch:u64
    reply   := status:u32 arena_bytes:u64 message:utf-8        status 0 comes with one descriptor (SCM_RIGHTS)

The grammar's home is kvservice/data_socket.py, which serves it; it is repeated here since a client imports nothing of
the server: change both together. Payload never passes gRPC or a socket.
"""

import os
import socket
import struct
from typing import Any

from google.protobuf.message import Message

from kvservice.client.session_stream import SessionStream
from kvservice.client.transport import CALL_TIMEOUT_S, Arena
from kvservice.model.errors import KVServiceError, StaleEpochError, UnavailableError
from kvservice.storage.arena import attach_arena
from kvservice.wire.v1.cache_pb2 import Hello, Registered, RegisterIdentities, Welcome

HAND_OVER_TIMEOUT_S = 5.0
_REQUEST = struct.Struct("<8s16sQ")
_REPLY = struct.Struct("<IQ")
_MESSAGE_BYTES_MAX = 240
_MAGIC = b"KVSARENA"


class SharedMemoryTransport:
    """One session with the node at ``unix:/path`` or ``127.0.0.1:port``. Safe from any thread."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._stream: SessionStream | None = None
        self._arena: Arena | None = None

    def open_session(self, hello: Hello) -> Welcome:
        """Open a session on a connection of its own and map the arena; one that was open before is closed."""
        self.close()
        stream = SessionStream(self.address)
        try:
            welcome = stream.open(hello)
            self._arena = map_arena(welcome, is_writable=hello.wants_write)
        except BaseException:
            stream.close()
            raise
        self._stream = stream
        return welcome

    def register(self, request: RegisterIdentities) -> Registered:
        """Add identities to the open session."""
        return self._open_stream().register(request)

    def call(self, name: str, request: Message, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        """The reply to a call. Raises UnavailableError when the session's stream has ended."""
        return self._open_stream().call(name, request, timeout_s)

    def arena(self) -> Arena:
        """The mapped arena. Views of it stay valid, though not their contents, after the session has ended.

        Raises UnavailableError when it has.
        """
        self._open_stream().check_open()
        assert self._arena is not None
        return self._arena

    def close(self) -> None:
        """End the session and its connection."""
        stream, self._stream, self._arena = self._stream, None, None
        if stream is not None:
            stream.close()

    def _open_stream(self) -> SessionStream:
        if self._stream is None:
            raise UnavailableError(f"no session is open with {self.address}; open one first")
        return self._stream


def map_arena(welcome: Welcome, *, is_writable: bool) -> Arena:
    """Map the arena of the node that said ``welcome``.

    Raises UnavailableError when its data socket does not answer, StaleEpochError when it does not know the session.
    """
    path = welcome.arena.data_socket
    request = _REQUEST.pack(_MAGIC, welcome.session_id, welcome.boot_epoch)
    try:
        reply, descriptors = _exchange(path, request)
    except OSError as error:
        raise UnavailableError(
            f"the data socket {path} did not hand over the node's arena: {error}; client and node must share a host"
        ) from error
    try:
        arena_bytes = _check_reply(path, reply, descriptors)
        return attach_arena(descriptors[0], arena_bytes, is_writable=is_writable)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _exchange(path: str, request: bytes) -> tuple[bytes, list[int]]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.settimeout(HAND_OVER_TIMEOUT_S)
        peer.connect(path)
        peer.sendall(request)
        reply, descriptors, _, _ = socket.recv_fds(peer, _REPLY.size + _MESSAGE_BYTES_MAX, 1)
        return reply, descriptors


def _check_reply(path: str, reply: bytes, descriptors: list[int]) -> int:
    if len(reply) < _REPLY.size:
        raise UnavailableError(f"the data socket {path} closed without an answer; is the node stopping?")
    status, arena_bytes = _REPLY.unpack_from(reply)
    if status:
        raise StaleEpochError(f"{path}: {reply[_REPLY.size :].decode(errors='replace')}; open a new session")
    if not descriptors:
        raise KVServiceError(f"the data socket {path} sent no descriptor; client and node are of different versions")
    return int(arena_bytes)
