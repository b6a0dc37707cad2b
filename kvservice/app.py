"""Composition root: builds a node's parts, owns the order in which they start and stop.

``Service`` is a whole node on an event loop of its own thread; ``serve`` runs one in the foreground until a signal;
``LocalNode`` is the same node without sockets, for a client in this process.
"""

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Self, TypeVar

import grpc
import numpy as np
from aiohttp import web
from google.protobuf.message import Message
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvservice.access.admin import AdminSocket
from kvservice.access.guard import Guard
from kvservice.access.http_gate import http_gate
from kvservice.building import build_node
from kvservice.calls import CacheCalls
from kvservice.config import Settings
from kvservice.data_socket import DataSocket, remove_stale_socket
from kvservice.model.errors import KVServiceError, UnavailableError
from kvservice.model.limits import GRPC_OPTIONS
from kvservice.network_rpc import NETWORK_CALLS_MAX, NETWORK_OPTIONS, NetworkServicer
from kvservice.node import Node
from kvservice.page.families_document import families_of
from kvservice.page.http import add_page
from kvservice.planning.measuring import curves_of, plan_of
from kvservice.rpc import add_to_server
from kvservice.sharing.network import Network
from kvservice.stats.document import NodeDocument
from kvservice.stats.explain_http import add_explain
from kvservice.stats.host_check import host_check
from kvservice.stats.http import Answer, build_http
from kvservice.stats.log_http import add_log
from kvservice.wire.v1 import cache_pb2

SERVICE_NAME = cache_pb2.DESCRIPTOR.services_by_name["CacheService"].full_name
STOP_GRACE_S = 2.0
START_TIMEOUT_S = 600.0
"""Recovering 1 TiB from headers alone takes minutes."""
T = TypeVar("T")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where a running node answers; a port is 0 if it was not opened."""

    socket: str
    grpc_port: int
    http_port: int
    peer_port: int = 0


def build_application(node: Node, host: str = "127.0.0.1", guard: Guard | None = None) -> web.Application:
    """All that a node answers over HTTP at ``host``: its numbers, and the page that shows them; to whom ``guard`` lets
    in."""
    answers: dict[str, Answer] = {
        "/plan": partial(plan_of, node),
        "/curves": partial(curves_of, node),
        "/families": partial(families_of, node),
    }
    application = build_http(node.stats_document, answers)
    application.middlewares.append(host_check(host))
    if guard is not None and guard.asks_callers:
        application.middlewares.append(http_gate(guard.gate, is_local=guard.is_local))
    add_explain(application, node)
    add_log(application, node)
    add_page(application)
    return application


class NodeServers:
    """All servers of one node, on the running loop."""

    def __init__(self, settings: Settings, *, owns_process: bool = False) -> None:
        self._settings = settings
        self.guard = Guard(settings)
        self._built = build_node(settings, str(settings.data_socket_path), owns_process=owns_process)
        self._node, self._arena = self._built.node, self._built.arena
        self.guard.attach(self._node)
        self._calls = CacheCalls(self._node)
        path, buckets = settings.data_socket_path, self.guard.gate.buckets
        self._data = DataSocket(path, self._arena.bytes, self._calls, self._open_descriptor, buckets)
        self.admin = AdminSocket(settings.admin_socket_path, self._node, self.guard)
        self.peers = Network(settings, self._built, self.guard)
        self.admin.add("drain", self.peers.drain_verb)
        self.admin.add("members", self.peers.members_verb, method="GET")
        self._grpc = grpc.aio.server(options=GRPC_OPTIONS)
        self._network: grpc.aio.Server | None = None
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]  # set by the package at import
        self._http: web.AppRunner | None = None

    async def start(self) -> Addresses:
        """Open everything; healthy once this returns. On failure all that was opened is closed again."""
        try:
            return await self._start()
        except BaseException:
            await self.stop()
            raise

    async def _start(self) -> Addresses:
        self._node.start()
        self.guard.start()
        self._data.start()
        await self.admin.start()
        await self.peers.open()
        grpc_port = await self._start_grpc()
        http_port = await self._start_http()
        await self._health.set(SERVICE_NAME, health_pb2.HealthCheckResponse.SERVING)
        await self._health.set("", health_pb2.HealthCheckResponse.SERVING)
        return Addresses(str(self._settings.socket_path), grpc_port, http_port, self.peers.port)

    async def stop(self) -> None:
        """Close in the opposite order; sessions end, and with them all that they hold. Safe to call twice."""
        self.peers.end_drain()  # its caller waits in the admin socket
        await self._health.enter_graceful_shutdown()
        await self._grpc.stop(STOP_GRACE_S)
        if self._network is not None:
            await self._network.stop(STOP_GRACE_S)
        if self._http is not None:
            await self._http.cleanup()
        await self.admin.stop()
        await self._data.stop()
        await self.peers.close()
        await self.guard.stop()
        try:
            await self._node.stop()
        finally:
            self._built.close()

    async def _start_grpc(self) -> int:
        add_to_server(self._calls, self._grpc, self.guard.gate)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._grpc)
        names = (SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._grpc)
        path = self._settings.socket_path
        remove_stale_socket(path)
        mask = os.umask(0o177)
        try:
            self._grpc.add_insecure_port(f"unix:{path}")
        finally:
            os.umask(mask)
        port, address = 0, f"{self._settings.host}:{self._settings.grpc_port}"
        if self._settings.grpc_port >= 0 and self.guard.asks_callers:
            port = await self._start_network(address)
        elif self._settings.grpc_port >= 0:
            port = self._grpc.add_insecure_port(address)
        await self._grpc.start()
        return port

    async def _start_network(self, address: str) -> int:
        """A server of its own for callers that are asked who they are."""
        calls_max = self._settings.sessions_max + NETWORK_CALLS_MAX
        self._network = server = grpc.aio.server(options=NETWORK_OPTIONS, maximum_concurrent_rpcs=calls_max)
        NetworkServicer(self._calls, self.guard.gate, is_local=self.guard.is_local).add_to(server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        certificates = self.guard.certificates
        if certificates is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, certificates.grpc_credentials())
        await server.start()
        return port

    async def _start_http(self) -> int:
        if self._settings.http_port < 0:
            return 0
        application = build_application(self._node, self._settings.host, self.guard)
        self._http = web.AppRunner(application, access_log=None)
        await self._http.setup()
        certificates = self.guard.certificates
        context = None if certificates is None else certificates.server_context()
        site = web.TCPSite(self._http, self._settings.host, self._settings.http_port, ssl_context=context)
        await site.start()
        address = self._http.addresses[0]
        return int(address[1])

    def _open_descriptor(self, is_writable: bool) -> int:
        return os.dup(self._arena.descriptor()) if is_writable else self._arena.read_only_descriptor()


async def serve(settings: Settings, announce: Callable[[Addresses], None]) -> None:
    """Run a node until SIGTERM or SIGINT; SIGHUP has it read its access file and certificates again. ``announce`` is
    called once it is healthy."""
    servers, stop = NodeServers(settings, owns_process=True), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, servers.guard.reload)
    announce(await servers.start())
    await stop.wait()
    await servers.stop()


class LoopThread:
    """An event loop on a thread of its own; the calling thread submits coroutines and waits for them."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._posted: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def run(self, work: Awaitable[T], timeout_s: float | None = None) -> T:
        """The result of ``work``, run on the loop; exceptions are raised here."""
        future: Future[T] = asyncio.run_coroutine_threadsafe(_as_coroutine(work), self.loop)
        return future.result(timeout_s)

    @property
    def is_closed(self) -> bool:
        """Is nothing run any more?"""
        return self.loop.is_closed()

    def post(self, work: Callable[[], Coroutine[None, None, None]]) -> None:
        """Have the loop begin ``work``, before anything that this thread asks for later, and return at once."""
        self.loop.call_soon_threadsafe(self._begin, work)

    def _begin(self, work: Callable[[], Coroutine[None, None, None]]) -> None:
        task = self.loop.create_task(work())
        self._posted.add(task)  # the loop itself holds no task
        task.add_done_callback(self._posted.discard)

    def close(self) -> None:
        """End what still runs on the loop, whose callers get CancelledError; stop it and wait for its thread."""
        self.run(_cancel_others())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


async def _as_coroutine(work: Awaitable[T]) -> T:
    return await work


async def _on_loop(work: Callable[[], T]) -> T:
    return work()


class Service:
    """A whole node behind its sockets, on a thread of this process: ``with Service(settings) as service``."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.addresses = Addresses("", 0, 0)

    def __enter__(self) -> Self:
        self._thread = LoopThread("kvservice")
        try:
            self._servers = self._thread.run(_build_servers(self._settings), START_TIMEOUT_S)
            self.addresses = self._thread.run(self._servers.start(), START_TIMEOUT_S)
        except BaseException:
            self._thread.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._thread.run(self._servers.stop())
        finally:
            self._thread.close()


async def _build_servers(settings: Settings) -> NodeServers:
    return NodeServers(settings)  # grpc.aio objects belong to the loop they are made on


class LocalNode:
    """A node inside this process, without sockets: ``with LocalNode(settings) as node``. Thread-safe."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def __enter__(self) -> Self:
        guard = Guard(self._settings)
        self._built = build_node(self._settings, "")
        guard.attach(self._built.node)
        self._node, self._arena = self._built.node, self._built.arena
        self._calls = CacheCalls(self._node)
        self._thread = LoopThread("kvservice-local")
        self._thread.run(_on_loop(self._node.start))
        self._thread.run(_on_loop(self._node.allocation.room.enforce_all))
        self.peers = Network(self._settings, self._built, guard)
        try:
            self._thread.run(self.peers.open())
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._thread.run(self.peers.close())
            self._thread.run(self._node.stop())
        finally:
            self._thread.close()
            self._built.close()

    @property
    def arena(self) -> np.ndarray:
        """The host arena, uint8 ``[bytes]``. Read leased extents, write reserved ones."""
        return self._arena.view

    def on_loop(self, work: Callable[[Node], T]) -> T:
        """What ``work`` makes of the node, on the thread that owns it; for tests and measurements."""
        return self._thread.run(_on_loop(lambda: work(self._node)))

    def run_on_loop(self, work: Awaitable[T]) -> T:
        """The result of ``work``, run on the thread that owns the node; for tests and measurements."""
        return self._thread.run(work)

    def stats(self) -> NodeDocument:
        """What the node holds and has done; see stats/document.py."""
        return self.on_loop(Node.stats_document)

    def open_session(self, hello: cache_pb2.Hello) -> cache_pb2.Welcome:
        """Open a session; the caller closes it."""
        return self._thread.run(_on_loop(lambda: self._calls.open_session(hello)))

    def register(self, session_id: bytes, request: cache_pb2.RegisterIdentities) -> cache_pb2.Registered:
        """Register more identities with a session."""
        return self._thread.run(_on_loop(lambda: self._calls.register(session_id, request)))

    def close_session(self, session_id: bytes) -> None:
        """Free all that the session holds."""
        self._thread.run(_on_loop(lambda: self._calls.close_session(session_id)))

    def call(self, name: str, request: Message) -> Message:
        """One call of the cache service by its name, such as ``"Lookup"``. Raises KVServiceError."""
        if self._thread.is_closed:
            raise UnavailableError("the node in this process has ended; start another")
        try:
            reply: Message = self._thread.run(self._calls.call(name, request))
        except CancelledError as error:
            raise UnavailableError("the node in this process ended during the call; start another") from error
        return reply

    def post(self, name: str, request: Message) -> None:
        """The same call, without waiting for what comes of it. Raises UnavailableError if the node has ended."""
        try:
            self._thread.post(partial(self._unheard, name, request))
        except RuntimeError as error:
            raise UnavailableError(f"the node in this process has ended: {error}; start another") from error

    async def _unheard(self, name: str, request: Message) -> None:
        with suppress(KVServiceError):
            await self._calls.call(name, request)
