"""One connection of a session on the data socket: decode, call, encode; decides nothing. Grammar: model/frames.py.

A lighter way to the calls that gRPC serves too: a round trip costs a tenth of gRPC's, since one read, one task and one
write are all there is. A connection carries one call at a time, so a client that waits long uses another one.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any, cast

from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from kvservice.access.buckets import Buckets
from kvservice.calls import CacheCalls
from kvservice.model.errors import InvalidInputError, KVServiceError, LimitError, NotOwnedError
from kvservice.model.frames import Call, CallBuffer, pack_answer
from kvservice.sessions import Session
from kvservice.wire.v1 import cache_pb2 as wire

_LOG = logging.getLogger(__name__)
_SERVICE = wire.DESCRIPTOR.services_by_name["CacheService"]
_REQUESTS: dict[str, type[Message]] = {
    method.name: GetMessageClass(method.input_type) for method in _SERVICE.methods if not method.client_streaming
}


class CallConnection(asyncio.BufferedProtocol):
    """Serves the calls of ``session`` until the other end closes; ``on_lost`` is called then, once.

    The session was attached for it (``Store.attach``) and is detached when it is lost. What is under way for a client
    that closes is cancelled, and what the last Reserve gave is taken back unless a later call showed that it was read.
    """

    def __init__(
        self,
        calls: CacheCalls,
        session: Session,
        on_lost: "Callable[[CallConnection], None]" = lambda _: None,
        buckets: Buckets | None = None,
    ) -> None:
        self._calls = calls
        self._session = session
        self._on_lost = on_lost
        self._buckets = buckets
        self._loop = asyncio.get_running_loop()
        self._buffer = CallBuffer()
        self._transport: asyncio.Transport | None = None
        self._running: asyncio.Task[None] | None = None
        self._unread: tuple[wire.ReserveRequest, wire.ReserveReply] | None = None
        self._is_reader_slow = False
        self._lost = self._loop.create_future()

    async def stop(self) -> None:
        """Close at once, and wait until nothing of it is left. Safe to call twice."""
        if self._transport is not None:
            self._transport.abort()
        await self._lost
        if self._running is not None:
            await asyncio.wait([self._running])

    # What the event loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio."""
        self._transport = cast("asyncio.Transport", transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        """See asyncio."""
        return self._buffer.space()

    def buffer_updated(self, nbytes: int) -> None:
        """See asyncio."""
        self._buffer.filled(nbytes)
        self._next()

    def pause_writing(self) -> None:
        """See asyncio. Whoever does not read answers gets no further ones."""
        self._is_reader_slow = True

    def resume_writing(self) -> None:
        """See asyncio."""
        self._is_reader_slow = False
        self._next()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio."""
        self._transport = None
        if self._running is not None:
            self._running.cancel()
        if self._unread is not None:
            self._calls.take_back(*self._unread)
        self._calls.node.store.detach(self._session)
        self._on_lost(self)
        self._lost.set_result(None)

    # Calls, one after the other

    def _next(self) -> None:
        """Begin the next call that is here, if none is under way."""
        if self._transport is None:
            return
        if self._running is not None or self._is_reader_slow:
            self._transport.pause_reading()
            return
        try:
            call = self._buffer.take()
        except LimitError as error:  # where the next frame begins is not known any more
            _LOG.warning("data socket: closing a connection of %s: %s", self._session.client_name or "a client", error)
            self._transport.abort()
            return
        if call is None:
            self._transport.resume_reading()
            return
        self._running = self._loop.create_task(self._serve(call))

    async def _serve(self, call: Call) -> None:
        try:
            answer = await self._answer(call)
        finally:
            self._running = None
        if not call.is_post and self._transport is not None:
            self._transport.write(answer)
        self._next()

    async def _answer(self, call: Call) -> bytes:
        self._unread = None  # whoever sends this has read the answer before
        try:
            self._admit(call)
            request = self._decode(call)
            reply = await self._calls.call(call.name, request)
            if call.name == "Reserve":
                self._unread = request, reply
            return pack_answer(reply.SerializeToString())
        except KVServiceError as error:
            return pack_answer(str(error).encode(), error)
        except Exception:  # noqa: BLE001  the RPC edge
            _LOG.exception("call %s failed; this is a fault of the service, please report it", call.name)
            return pack_answer(b"%s failed inside the service" % call.name.encode(), KVServiceError())

    def _admit(self, call: Call) -> None:
        """Raise RateError if the session's principal has to wait; most have no limit."""
        principal = self._session.principal
        if self._buckets is not None and (principal.limits.calls_per_s or principal.limits.bytes_per_s):
            self._buckets.admit(principal)
            self._buckets.charge(principal, len(call.message))

    def _decode(self, call: Call) -> Any:
        kind = _REQUESTS.get(call.name)
        if kind is None:
            raise InvalidInputError(f"there is no call {call.name!r}; there are {', '.join(_REQUESTS)}")
        if call.is_post and call.name == "Reserve":
            raise InvalidInputError("a Reserve whose answer nobody reads; call it and read the answer")
        try:
            request: Any = kind.FromString(call.message)
        except DecodeError as error:
            raise InvalidInputError(f"{len(call.message)} bytes are no request of {call.name}: {error}") from error
        if "session" in kind.DESCRIPTOR.fields_by_name and request.session.session_id != self._session.id:
            raise NotOwnedError(
                f"{call.name} names another session than its connection's; open a connection for that session"
            )
        return request
