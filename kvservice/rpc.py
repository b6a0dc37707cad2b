"""The gRPC edge: a session for each stream, a status for each error. Decides nothing.

One of the server's broad ``except`` is here (control_socket.py and network_rpc.py have the others): what nobody foresaw
is logged with its traceback and answered INTERNAL.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar, cast

import grpc
import grpc.aio

from kvservice.access.gate import Gate
from kvservice.access.principal import LOCAL, Principal
from kvservice.calls import CacheCalls
from kvservice.model.errors import (
    CapacityError,
    CorruptError,
    DiskError,
    ForbiddenError,
    InvalidInputError,
    KVServiceError,
    LeaseExpiredError,
    LimitError,
    MasterGoneError,
    NotListedError,
    NotOwnedError,
    RecordFormatError,
    StaleEpochError,
    UnauthenticatedError,
    UnavailableError,
    UnknownSessionError,
)
from kvservice.wire.v1 import cache_pb2 as wire
from kvservice.wire.v1.cache_pb2_grpc import CacheServiceServicer, add_CacheServiceServicer_to_server

__all__ = ["ERROR_KEY", "CacheCalls", "CacheServicer", "abort", "add_to_server", "status_of"]

ERROR_KEY = "kvservice-error"
"""Trailing metadata: the error's code (model/errors.py)."""

TURNS_OF_A_CANCELLATION = 4
"""Turns of the loop from a cancellation's arrival at the process to the call's task: poll, batch, watcher, task."""

_LOG = logging.getLogger(__name__)
_STATUS: tuple[tuple[type[KVServiceError], grpc.StatusCode], ...] = (
    (InvalidInputError, grpc.StatusCode.INVALID_ARGUMENT),
    (RecordFormatError, grpc.StatusCode.INVALID_ARGUMENT),
    (CorruptError, grpc.StatusCode.DATA_LOSS),
    (CapacityError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (DiskError, grpc.StatusCode.UNAVAILABLE),
    (LimitError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (UnauthenticatedError, grpc.StatusCode.UNAUTHENTICATED),
    (ForbiddenError, grpc.StatusCode.PERMISSION_DENIED),
    (NotOwnedError, grpc.StatusCode.PERMISSION_DENIED),
    (StaleEpochError, grpc.StatusCode.FAILED_PRECONDITION),
    (UnknownSessionError, grpc.StatusCode.FAILED_PRECONDITION),
    (LeaseExpiredError, grpc.StatusCode.FAILED_PRECONDITION),
    (MasterGoneError, grpc.StatusCode.FAILED_PRECONDITION),
    (NotListedError, grpc.StatusCode.UNIMPLEMENTED),
    (UnavailableError, grpc.StatusCode.UNAVAILABLE),
)
Request = TypeVar("Request")
Reply = TypeVar("Reply")


def status_of(error: KVServiceError) -> grpc.StatusCode:
    """The gRPC status that stands for an error."""
    return next((status for kind, status in _STATUS if isinstance(error, kind)), grpc.StatusCode.INTERNAL)


def add_to_server(calls: CacheCalls, server: grpc.aio.Server, gate: Gate | None = None) -> None:
    """Serve a node's calls to everybody who reaches the server."""
    add_CacheServiceServicer_to_server(CacheServicer(calls, gate), server)  # type: ignore[no-untyped-call]


class CacheServicer(CacheServiceServicer):
    """CacheService over a node's calls. Who calls is the principal ``local`` of ``gate``; network_rpc.py asks."""

    def __init__(self, calls: CacheCalls, gate: Gate | None = None) -> None:
        self._calls = calls
        self._gate = gate

    async def OpenSession(  # noqa: N802
        self, request_iterator: AsyncIterator[wire.SessionRequest], context: "Context"
    ) -> AsyncIterator[wire.SessionReply]:
        """See ``serve_session``: here everybody is local."""
        async for reply in self.serve_session(
            request_iterator, context, LOCAL if self._gate is None else self._gate.local
        ):
            yield reply

    async def serve_session(
        self, requests: AsyncIterator[wire.SessionRequest], context: "Context", principal: Principal
    ) -> AsyncIterator[wire.SessionReply]:
        """A session that lives as long as the stream: when it ends, however it ends, all that it held is freed."""
        session_id = b""
        try:
            async for request in requests:
                reply = self._answer_session(request, session_id, principal)
                session_id = reply.welcome.session_id or session_id
                yield reply
        except Exception as error:  # noqa: BLE001  the RPC edge
            await abort(context, "OpenSession", error)
        finally:
            self._calls.close_session(session_id)

    def _answer_session(
        self, request: wire.SessionRequest, session_id: bytes, principal: Principal
    ) -> wire.SessionReply:
        kind = request.WhichOneof("request")
        if kind == "hello" and not session_id:
            return wire.SessionReply(welcome=self._calls.open_session(request.hello, principal))
        if kind == "register" and session_id:
            return wire.SessionReply(registered=self._calls.register(session_id, request.register))
        raise InvalidInputError("a session's stream begins with one hello; after it come only registrations")

    async def Lookup(self, request: wire.LookupRequest, context: "Context") -> wire.LookupReply:  # noqa: N802
        """See cache.proto."""
        return await _answer(self._calls.lookup, request, context)

    async def Await(self, request: wire.AwaitRequest, context: "Context") -> wire.AwaitReply:  # noqa: N802
        """See cache.proto."""
        return await _answer(self._calls.await_loads, request, context)

    async def Reserve(self, request: wire.ReserveRequest, context: "Context") -> wire.ReserveReply:  # noqa: N802
        """See cache.proto. What is reserved for a caller that has gone is taken back."""
        reply = await _answer(self._calls.reserve, request, context)
        try:
            await _require_caller(context)
        except UnavailableError as error:
            self._calls.take_back(request, reply)
            await abort(context, "reserve", error)
        except asyncio.CancelledError:
            self._calls.take_back(request, reply)
            raise
        return reply

    async def Commit(self, request: wire.CommitRequest, context: "Context") -> wire.CommitReply:  # noqa: N802
        """See cache.proto."""
        return await _answer(self._calls.commit, request, context)

    async def Abort(self, request: wire.AbortRequest, context: "Context") -> wire.AbortReply:  # noqa: N802
        """See cache.proto."""
        return await _answer(self._calls.abort, request, context)

    async def CommitRound(  # noqa: N802
        self, request: wire.CommitRoundRequest, context: "Context"
    ) -> wire.CommitRoundReply:
        """See cache.proto."""
        return await _answer(self._calls.commit_round, request, context)

    async def Renew(self, request: wire.RenewRequest, context: "Context") -> wire.RenewReply:  # noqa: N802
        """See cache.proto."""
        return await _answer(self._calls.renew, request, context)

    async def Release(self, request: wire.ReleaseRequest, context: "Context") -> wire.ReleaseReply:  # noqa: N802
        """See cache.proto."""
        return await _answer(self._calls.release, request, context)

    async def Delete(self, request: wire.DeleteRequest, context: "Context") -> wire.DeleteReply:  # noqa: N802
        """See cache.proto."""
        return await _answer(self._calls.delete, request, context)

    async def Verify(self, request: wire.VerifyRequest, context: "Context") -> wire.VerifyReply:  # noqa: N802
        """See cache.proto."""
        return await _answer(self._calls.verify, request, context)

    async def Stats(self, request: wire.StatsRequest, context: "Context") -> wire.StatsReply:  # noqa: N802
        """See cache.proto."""
        return await _answer(self._calls.stats, request, context)

    async def Explain(self, request: wire.ExplainRequest, context: "Context") -> wire.ExplainReply:  # noqa: N802
        """See cache.proto."""
        return await _answer(self._calls.explain, request, context)


Context = grpc.aio.ServicerContext[Any, Any]


async def _require_caller(context: Context) -> None:
    """Raise CancelledError or UnavailableError if the caller no longer waits, as far as the service can know."""
    for _ in range(TURNS_OF_A_CANCELLATION):
        await asyncio.sleep(0)
    remaining_s = cast("float | None", context.time_remaining())  # None: no deadline, whatever the stub says
    if remaining_s is not None and remaining_s <= 0:
        raise UnavailableError("the caller's deadline passed before the answer; nothing was reserved, ask again")


async def _answer(call: Callable[[Request], Awaitable[Reply]], request: Request, context: Context) -> Reply:
    try:
        return await call(request)
    except Exception as error:
        await abort(context, call.__name__, error)
        raise AssertionError("abort raises") from error


async def abort(context: Context, call: str, error: Exception) -> None:
    """End a call with the status of ``error``; raises AbortError."""
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if isinstance(error, KVServiceError):
        await context.abort(status_of(error), str(error), ((ERROR_KEY, error.code),))
    _LOG.error("call %s failed; this is a fault of the service, please report it", call, exc_info=error)
    await context.abort(grpc.StatusCode.INTERNAL, f"{call} failed inside the service", ((ERROR_KEY, "INTERNAL"),))
