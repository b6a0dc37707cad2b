"""The gRPC edge of the network: who calls is asked before a message is taken in, then rpc.py serves the call.

Every unary call is received as a stream of one message: its handler runs when the metadata is there, and only a caller
that is known, and within its rates, has its message read. On the wire there is no difference.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import Any, cast

import grpc
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from kvservice.access.authorization import token_of
from kvservice.access.gate import Gate
from kvservice.access.principal import Credentials, Principal
from kvservice.access.tenant_stats import tenant_stats_json
from kvservice.access.tls import names_in_auth_context
from kvservice.calls import CacheCalls
from kvservice.model.errors import ForbiddenError, InvalidInputError
from kvservice.rpc import CacheServicer, Context, abort
from kvservice.wire.v1 import cache_pb2 as wire

NETWORK_CALLS_MAX = 256
"""Calls from the network that are under way at a time, besides the streams of sessions."""
NETWORK_MESSAGE_BYTES_MAX = 8 << 20
"""The largest lookup has 7 MiB."""
HANDSHAKE_TIMEOUT_MS = 10_000
NETWORK_OPTIONS = (
    ("grpc.max_receive_message_length", NETWORK_MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", 32 << 20),
    ("grpc.server_handshake_timeout_ms", HANDSHAKE_TIMEOUT_MS),
)
_SERVICE = wire.DESCRIPTOR.services_by_name["CacheService"]
Requests = AsyncIterator[bytes]


class NetworkServicer:
    """CacheService for callers that must say who they are. ``is_local``: plaintext on loopback, where they need not."""

    def __init__(self, calls: CacheCalls, gate: Gate, *, is_local: bool) -> None:
        self._calls = calls
        self._gate = gate
        self._is_local = is_local
        self._servicer = CacheServicer(calls, gate)

    def add_to(self, server: grpc.aio.Server) -> None:
        """Serve all calls of CacheService."""
        handlers = {method.name: self._handler(method) for method in _SERVICE.methods}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE.full_name, handlers),))

    def _handler(self, method: Any) -> "grpc.RpcMethodHandler[Any, Any]":
        if method.client_streaming:
            return grpc.stream_stream_rpc_method_handler(
                cast("Any", self._open_session),
                request_deserializer=None,
                response_serializer=wire.SessionReply.SerializeToString,
            )
        kind = GetMessageClass(method.input_type)
        serve = getattr(self._servicer, method.name)
        return grpc.stream_unary_rpc_method_handler(
            cast("Any", partial(self._call, method.name, kind, serve)),
            request_deserializer=None,
            response_serializer=GetMessageClass(method.output_type).SerializeToString,
        )

    def _principal_of(self, context: Context) -> Principal:
        """Who calls. Raises UnauthenticatedError, and RateError if it has to wait."""
        metadata = cast("Sequence[tuple[str, str | bytes]]", context.invocation_metadata() or ())
        headers = [str(value) for key, value in metadata if key == "authorization"]
        names = names_in_auth_context(cast("Any", context.auth_context() or {}))
        credentials = Credentials(token_of(headers[0]) if headers else "", names, self._is_local)
        principal = self._gate.authorize(credentials)
        self._gate.buckets.admit(principal)
        return principal

    async def _call(
        self,
        name: str,
        kind: type[Message],
        serve: Callable[[Any, Context], Awaitable[Any]],
        requests: Requests,
        context: Context,
    ) -> Any:
        try:
            principal = self._principal_of(context)
            request = _parsed(kind, await self._first(name, requests, principal))
            if name == "Stats":
                return await self._stats(cast("wire.StatsRequest", request), principal)
            self._check(request, principal)
        except Exception as error:
            await abort(context, name, error)
            raise AssertionError("abort raises") from error
        return await serve(request, context)

    async def _first(self, name: str, requests: Requests, principal: Principal) -> bytes:
        async for raw in requests:
            self._gate.buckets.charge(principal, len(raw))
            return raw
        raise InvalidInputError(f"{name} came without a request")

    def _check(self, request: Any, principal: Principal) -> None:
        """A caller uses its own sessions only."""
        _require_sessions(principal)
        reference = request.session
        self._calls.node.sessions.require(reference.session_id, reference.boot_epoch, principal)

    async def _stats(self, request: wire.StatsRequest, principal: Principal) -> wire.StatsReply:
        if principal.sees_all:
            return await self._calls.stats(request)
        return wire.StatsReply(json=tenant_stats_json(self._calls.node, self._gate, principal))

    async def _open_session(self, requests: Requests, context: Context) -> AsyncIterator[wire.SessionReply]:
        try:
            principal = self._principal_of(context)
            _require_sessions(principal)
            self._gate.buckets.open_session(principal)
        except Exception as error:
            await abort(context, "OpenSession", error)
            raise AssertionError("abort raises") from error
        try:
            async for reply in self._servicer.serve_session(self._metered(requests, principal), context, principal):
                yield reply
        finally:
            self._gate.buckets.close_session(principal)

    async def _metered(self, requests: Requests, principal: Principal) -> AsyncIterator[wire.SessionRequest]:
        async for raw in requests:
            self._gate.buckets.charge(principal, len(raw))
            yield cast("wire.SessionRequest", _parsed(wire.SessionRequest, raw))


def _require_sessions(principal: Principal) -> None:
    if not principal.may_open_sessions:
        raise ForbiddenError(f"{principal.name} reads figures, and has no sessions: its role is {principal.role}")


def _parsed(kind: type[Message], raw: bytes) -> Message:
    try:
        return kind.FromString(raw)
    except DecodeError as error:
        raise InvalidInputError(f"{len(raw)} bytes are no {kind.__name__}: {error}") from error
