"""How a client reaches a node: the calls of the wire contract, and the node's arena. No decisions, no retries."""

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from google.protobuf.message import Message

from kvservice.wire.v1.cache_pb2 import Hello, Registered, RegisterIdentities, Welcome

Arena = npt.NDArray[np.uint8]
"""The node's host arena, mapped here; read-only for sessions that do not write."""

CALL_TIMEOUT_S = 10.0
"""Deadline of a call that names none. Commit verifies what was written at 10 GB/s: this covers 50 GB and some wait."""


class PendingCall(Protocol):
    """A call whose answer is read later. One thread at a time."""

    def reply(self, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        """The reply message, within so many seconds from now. Once only. Raises the error that the node named."""

    def give_up(self) -> None:
        """Nobody wants the answer any more. Does nothing once it was read."""


class LateCall:
    """A pending call that is only made when its answer is wanted: where nothing can be sent ahead."""

    def __init__(self, call: Callable[[str, Message, float], Any], name: str, request: Message) -> None:
        self._call, self._name, self._request = call, name, request

    def reply(self, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        """Make the call."""
        return self._call(self._name, self._request, timeout_s)

    def give_up(self) -> None:
        """Nothing was sent."""


class Transport(Protocol):
    """One session's way to one node. Every method may be called from any thread.

    Every failure is a KVServiceError; a node that cannot be reached is an UnavailableError.
    """

    @property
    def address(self) -> str:
        """Whom it talks to, for messages."""

    def open_session(self, hello: Hello) -> Welcome:
        """Open the one session of this transport, or a new one in place of one that was lost."""

    def register(self, request: RegisterIdentities) -> Registered:
        """Add identities to the open session."""

    def call(self, name: str, request: Message, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        """The reply message to call ``name`` of CacheService. Raises the error that the node named."""

    def begin(self, name: str, request: Message) -> PendingCall:
        """Send a call, and read its answer later; meanwhile this thread does something else.

        Give up what is not read. Raises UnavailableError when it cannot be sent.
        """

    def post(self, name: str, request: Message) -> None:
        """Send a call that nobody waits for: neither its reply nor the node's error is told. For a release, say.

        The node gets it before what this thread calls later, unless so many other calls are under way that it takes
        another way. Raises UnavailableError when it cannot be sent.
        """

    def arena(self) -> Arena:
        """The arena of the node that the session is open with; the same mapping until a new session is opened."""

    def close(self) -> None:
        """End the session; the node frees all that it held. Safe to call twice."""
