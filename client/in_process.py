"""A node in this process, without a socket: for tests, the demo and engines that host their own cache."""

from typing import Any, Protocol

from google.protobuf.message import Message

from kvservice.client.transport import CALL_TIMEOUT_S, Arena, LateCall, PendingCall
from kvservice.model.errors import UnavailableError
from kvservice.wire.v1.cache_pb2 import Hello, Registered, RegisterIdentities, Welcome


class LocalNode(Protocol):
    """What is needed of ``kvservice.app.LocalNode``: the node's calls, blocking, from any thread."""

    @property
    def arena(self) -> Arena:
        """The node's host arena, writable."""

    def open_session(self, hello: Hello) -> Welcome:
        """Open a session."""

    def register(self, session_id: bytes, request: RegisterIdentities) -> Registered:
        """Add identities to a session."""

    def close_session(self, session_id: bytes) -> None:
        """End a session and free all that it held."""

    def call(self, name: str, request: Message) -> Any:
        """One call of CacheService; raises KVServiceErrors as they are."""

    def post(self, name: str, request: Message) -> None:
        """The same, without waiting for what comes of it."""


class InProcessTransport:
    """Calls a ``LocalNode``. A session that does not write gets a read-only view of the arena, as over a socket."""

    address = "this process"

    def __init__(self, node: LocalNode) -> None:
        self._node = node
        self._session_id = b""
        self._arena: Arena | None = None

    def open_session(self, hello: Hello) -> Welcome:
        """Open a session; one that was open before is closed."""
        self.close()
        welcome = self._node.open_session(hello)
        self._session_id = welcome.session_id
        self._arena = self._node.arena.view()
        self._arena.flags.writeable = hello.wants_write
        return welcome

    def register(self, request: RegisterIdentities) -> Registered:
        """Add identities to the open session."""
        return self._node.register(self._open_id(), request)

    def call(self, name: str, request: Message, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        """The node's reply; calls in a process need no deadline."""
        self._open_id()
        return self._node.call(name, request)

    def begin(self, name: str, request: Message) -> PendingCall:
        """Made when its answer is wanted: nothing travels within a process."""
        self._open_id()
        return LateCall(self.call, name, request)

    def post(self, name: str, request: Message) -> None:
        """Begin a call without waiting for it."""
        self._open_id()
        self._node.post(name, request)

    def arena(self) -> Arena:
        """The node's own arena."""
        self._open_id()
        assert self._arena is not None
        return self._arena

    def close(self) -> None:
        """End the session."""
        session_id, self._session_id, self._arena = self._session_id, b"", None
        if session_id:
            self._node.close_session(session_id)

    def _open_id(self) -> bytes:
        if not self._session_id:
            raise UnavailableError("no session is open with the node in this process; open one first")
        return self._session_id
