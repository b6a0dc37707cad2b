"""One gRPC connection and the session stream on it. Foreign errors become ours here, and nowhere else in the client.

The stream is kept open by a thread; the node frees what the session held when it ends. A lost stream is never
repaired: every later call says so, and a new session has to be opened.
"""

import queue
import threading
from collections.abc import Iterator
from typing import Any

import grpc
from google.protobuf.message import Message

from kvservice.client.security import NO_SECURITY, Security
from kvservice.client.transport import CALL_TIMEOUT_S
from kvservice.model.errors import KVServiceError, UnavailableError, error_from_code
from kvservice.model.limits import GRPC_OPTIONS
from kvservice.wire.v1.cache_pb2 import Hello, Registered, RegisterIdentities, SessionReply, SessionRequest, Welcome
from kvservice.wire.v1.cache_pb2_grpc import CacheServiceStub

OPEN_TIMEOUT_S = 5.0
STOP_TIMEOUT_S = 5.0
ERROR_CODE_KEY = "kvservice-error"

_CHANNEL_OPTIONS = (
    *GRPC_OPTIONS,
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # a new session must not inherit the back-off of a lost one
)
_UNREACHABLE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)


class SessionStream:
    """A connection to ``address`` with one session. Methods may be called from any thread, ``open`` once."""

    def __init__(self, address: str, security: Security = NO_SECURITY) -> None:
        """Raises ConfigError for a token or a certificate that cannot be read."""
        self._address = address
        self._metadata = security.metadata()
        self._channel = security.channel(address, _CHANNEL_OPTIONS)
        self._stub: Any = CacheServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._requests: queue.SimpleQueue[SessionRequest | None] = queue.SimpleQueue()
        self._replies: queue.SimpleQueue[SessionReply | KVServiceError] = queue.SimpleQueue()
        self._lost: KVServiceError | None = None
        self._asking = threading.Lock()
        self._posted: set[grpc.Future[Any]] = set()
        self._reader = threading.Thread(target=self._read, name="kvservice-session", daemon=True)

    def open(self, hello: Hello) -> Welcome:
        """Say hello and wait for the welcome."""
        self._reader.start()
        return self._ask(SessionRequest(hello=hello)).welcome

    def register(self, request: RegisterIdentities) -> Registered:
        """Add identities to the session."""
        return self._ask(SessionRequest(register=request)).registered

    def call(self, name: str, request: Message, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        """The reply to one call."""
        self.check_open()
        try:
            return getattr(self._stub, name)(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise translate(error, self._address, name, timeout_s) from error
        except ValueError as error:  # grpc: another thread closed the channel after the check
            raise self._closed_before(name, error) from error

    def post(self, name: str, request: Message) -> None:
        """Send a call whose answer nobody waits for."""
        self.check_open()
        try:
            future = getattr(self._stub, name).future(request, timeout=CALL_TIMEOUT_S, metadata=self._metadata)
        except ValueError as error:  # grpc: another thread closed the channel after the check
            raise self._closed_before(name, error) from error
        self._posted.add(future)  # gRPC cancels a call that nobody holds
        future.add_done_callback(self._posted.discard)

    def close(self) -> None:
        """End the stream and the connection, and wait for the thread."""
        self._lost = self._lost or UnavailableError(f"the session with {self._address} was closed; open a new one")
        self._requests.put(None)
        self._channel.close()
        if self._reader.is_alive() and self._reader is not threading.current_thread():
            self._reader.join(STOP_TIMEOUT_S)

    def _closed_before(self, name: str, error: ValueError) -> UnavailableError:
        return UnavailableError(f"the connection to {self._address} was closed before {name}: {error}; {_ADVICE}")

    def _ask(self, request: SessionRequest) -> SessionReply:
        with self._asking:  # replies carry no number: one question at a time
            self.check_open()
            self._requests.put(request)
            try:
                reply = self._replies.get(timeout=OPEN_TIMEOUT_S)
            except queue.Empty:
                self._lost = UnavailableError(f"{self._address} did not answer within {OPEN_TIMEOUT_S} s; {_ADVICE}")
                raise self._lost from None
        if isinstance(reply, KVServiceError):
            raise reply
        return reply

    def check_open(self) -> None:
        """Raise UnavailableError if the stream has ended: the node has freed all that the session held."""
        if self._lost is not None:
            raise UnavailableError(f"{self._lost}") from self._lost

    def _read(self) -> None:
        """The thread: hand on replies until the stream ends, then say why it did."""
        try:
            for reply in self._stub.OpenSession(self._outgoing(), metadata=self._metadata):
                self._replies.put(reply)
            ended: KVServiceError = UnavailableError(
                f"{self._address} ended the session; it is stopping or has restarted: open a new session"
            )
        except grpc.RpcError as error:
            ended = translate(error, self._address, "OpenSession", OPEN_TIMEOUT_S)
        except ValueError as error:  # grpc: the channel was closed before the stream began
            ended = UnavailableError(f"the connection to {self._address} was closed: {error}")
        self._lost = self._lost or ended
        self._replies.put(ended)

    def _outgoing(self) -> Iterator[SessionRequest]:
        while (request := self._requests.get()) is not None:
            yield request


_ADVICE = "check that `kvservice serve` runs there, then open a new session"


def translate(error: grpc.RpcError, address: str, name: str, timeout_s: float) -> KVServiceError:
    """Our error for one of gRPC's: the one that the node named in its trailing metadata, or what the status means."""
    code, details = error.code(), error.details() or str(error)
    named = next((str(one.value) for one in error.trailing_metadata() or () if one.key == ERROR_CODE_KEY), None)
    if named is not None:
        return error_from_code(named, details)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return UnavailableError(f"{address} did not answer {name} within {timeout_s:g} s; {_ADVICE}")
    if code in _UNREACHABLE:
        return UnavailableError(f"{address} cannot be reached for {name}: {details}; {_ADVICE}")
    return KVServiceError(f"{address} failed in {name}: {code.name}: {details}")
