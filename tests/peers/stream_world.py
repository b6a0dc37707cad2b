"""A node behind a peer port, links to it, and proxies between them that cut, stop and change what passes."""

import asyncio
import socket
import ssl
import threading
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import numpy as np

from kvservice.access.principal import Principal, Role
from kvservice.caches import Cache
from kvservice.model.cache import CacheMeta
from kvservice.model.errors import UnavailableError
from kvservice.model.geometry import attention_geometry
from kvservice.model.identity import Identity
from kvservice.peers.host import Authorize, Query
from kvservice.peers.host_node import NodeHost
from kvservice.peers.member import Address, Facts, LocalAddress, NodeId
from kvservice.peers.streams_client import PeerLink
from kvservice.peers.streams_client_calls import PeerFinding, PeerRecord
from kvservice.peers.streams_client_dialler import Caller
from kvservice.peers.streams_limits import LinkLimits, ServerLimits
from kvservice.peers.streams_server import StreamServer
from kvservice.storage.arrival import RecordArrival
from kvservice.storage.buffer import Bytes
from kvservice.storage.record import master_layout, mirror_layout
from kvservice.store import WriteRequest
from kvservice.worker import ThreadWorker
from tests.server.builders import Planes, World, check_node, make_identity, make_meta, make_planes, write_record

LOCALHOST = "127.0.0.1"
BIG = attention_geometry(layers=8, heads=4, head_size=64, dtype="bfloat16")
"""1 KiB a token and layer."""
BIG_TOKENS = 512
"""4 MiB."""
BIG_ARENA_BYTES = 32 << 20
PATIENT = LinkLimits(deadline_s=20.0, bytes_per_s_min=1 << 20, pause_s=0.05, pause_s_max=0.1)
HASTY = LinkLimits(deadline_s=0.8, pause_s=0.05, pause_s_max=0.1)
BRISK = ServerLimits(watch_interval_s=0.02)


def make_facts(name: str = "a", *, id_: uuid.UUID | None = None, epoch: int = 7) -> Facts:
    return Facts(NodeId(id_ or uuid.uuid4(), epoch), name)


def make_caller(
    facts: Facts | None = None, *, token: str = "", tls: ssl.SSLContext | None = None, server_name: str = ""
) -> Caller:
    said = facts or make_facts("caller")
    return Caller(lambda: said, lambda: token, lambda: tls, server_name)


def only_tenant(tenant: str) -> Authorize:
    """Everybody is a node that may see one tenant."""
    return lambda _: Principal("peer", Role.NODE, frozenset([tenant]))


def make_query(meta: CacheMeta, **changes: Any) -> Query:
    asked = Query(
        meta.namespace,
        meta.key.segment,
        [meta.key.context],
        meta.position,
        meta.tokens,
        marks=b"".join(meta.preceding),
    )
    return asked._replace(**changes)


class Owner:
    """A node whose peer port is open."""

    def __init__(self, world: World, server: StreamServer, facts: Facts, port: int) -> None:
        self.world = world
        self.server = server
        self.facts = facts
        self.address = Address(LOCALHOST, port)
        self.identity = make_identity(BIG)
        self.client = world.client(self.identity)

    async def store(self, name: str, **changes: Any) -> CacheMeta:
        """A master of 4 MiB."""
        meta = make_meta(self.identity, name, tokens=BIG_TOKENS, **changes)
        await self.client.store(meta, make_planes(BIG, BIG_TOKENS, seed=len(name)), prefill_s=0.5)
        return meta

    def cache(self, meta: CacheMeta) -> Cache:
        space = self.client.session.spaces[meta.namespace]
        found = space.find(meta.key.segment, meta.key.context)
        assert found is not None
        return found

    def bytes_of(self, meta: CacheMeta) -> Bytes:
        return self.world.arena.slice(self.cache(meta).extent)


@asynccontextmanager
async def owner_node(
    *, limits: ServerLimits = BRISK, world: World | None = None, facts: Facts | None = None, **changes: Any
) -> AsyncIterator[Owner]:
    """Checks at the end that nothing of it is left held, and that every thread has ended."""
    is_own = world is None
    world = world or World(arena_bytes=BIG_ARENA_BYTES, worker=ThreadWorker(1))
    said = facts or make_facts("owner")
    host = NodeHost(world.node, asyncio.get_running_loop(), lambda: said)
    server = StreamServer(host, (LOCALHOST, 0), limits=limits, **changes)
    owner = Owner(world, server, said, server.start())
    try:
        yield owner
    finally:
        await asyncio.to_thread(server.stop)
        assert server.connections == 0
        owner.client.close()
        await settled(lambda: not world.node.sessions.open)
        check_node(world.node)
        assert world.is_empty_handed()
        assert not world.node.catalog.held
        if is_own:
            world.node.worker.close()
            world.arena.close()


@asynccontextmanager
async def link_to(
    address: Address | LocalAddress, *, limits: LinkLimits = PATIENT, caller: Caller | None = None, **changes: Any
) -> AsyncIterator[PeerLink]:
    link = PeerLink(address, caller or make_caller(), limits=limits, **changes)
    try:
        yield link
    finally:
        await link.close()


async def settled(is_so: Callable[[], bool], tries: int = 500) -> None:
    """Let threads and the loop go on until something is so."""
    for _ in range(tries):
        if is_so():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not come to that")


async def find(link: PeerLink, identity: Identity, *queries: Query) -> list[PeerFinding]:
    texts = {identity.namespace(): identity.canonical_json()}
    return await link.find_all(queries, texts)


async def find_record(link: PeerLink, owner: Owner, meta: CacheMeta) -> PeerRecord:
    finding = (await find(link, owner.identity, make_query(meta)))[0]
    assert finding.record is not None, finding
    return finding.record


async def fetched_at_last(link: PeerLink, record: PeerRecord) -> Bytes:
    """The record once the node answers again; a machine that is busy may be late some times more."""
    for _ in range(50):
        await settled(lambda: link.is_answering)
        with suppress(UnavailableError):
            return await fetch_verified(link, record)
    raise AssertionError("it does not come back")


def arrival_of(record: PeerRecord, target: Bytes) -> RecordArrival:
    meta = record.head.meta
    return RecordArrival(target, meta.namespace, meta.key, record.head.generation, meta.master)


async def fetch_verified(link: PeerLink, record: PeerRecord) -> Bytes:
    """The record's bytes, verified as they came."""
    target = np.zeros(record.record_bytes, np.uint8)
    arrival = arrival_of(record, target)

    def on_piece(start: int, end: int) -> None:
        arrival.arrived(start, end)

    await link.fetch(record, target, on_piece)
    assert arrival.layers == len(record.head.section_checksums)
    return target


def make_record(meta: CacheMeta, planes: Planes, runs: Any = None) -> tuple[Bytes, int]:
    """A whole record in memory of its own, and its header's checksum."""
    layout = master_layout(meta) if meta.master is None else mirror_layout(meta, runs)
    buffer = np.zeros(layout.record_bytes, np.uint8)
    return buffer, write_record(buffer, meta, planes, runs)


async def give_new(owner: Owner, link: PeerLink) -> tuple[CacheMeta, Planes]:
    """Give a new record to the owner, twice, and look at what lies there."""
    meta, planes = make_meta(owner.identity, "pushed", tokens=BIG_TOKENS), make_planes(BIG, BIG_TOKENS, seed=9)
    view, checksum = make_record(meta, planes)
    request = WriteRequest(meta.namespace, meta.key, len(view), None, 0.25)
    identity = owner.identity.canonical_json()
    assert await link.give(request, view, checksum, identity)
    assert not await link.give(request, view, checksum, identity), "the first writer wins"
    assert np.array_equal(owner.bytes_of(meta), view)
    assert owner.cache(meta).prefill_s == 0.25
    return meta, planes


class Proxy:
    """Passes bytes on, both ways. ``on_answer``: may change, hold up or cut what the node answers (raise OSError).

    It is told the number of the connection, how many bytes were passed before, and the bytes.
    """

    def __init__(self, target: Address, on_answer: Callable[[int, int, bytearray], None] | None = None) -> None:
        self._target = target
        self._on_answer = on_answer or (lambda number, passed, data: None)
        self._listener = socket.create_server((LOCALHOST, 0))
        self.address = Address(LOCALHOST, self._listener.getsockname()[1])
        self.connections = 0
        self._socks: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def __enter__(self) -> "Proxy":
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join(10)
        for sock in self._socks:
            sock.close()

    def cut(self) -> None:
        """Break all connections."""
        for sock in list(self._socks):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                caller, _ = self._listener.accept()
                try:
                    node = socket.create_connection(self._target)
                except ConnectionError:
                    caller.close()
                    continue
                self._socks += [caller, node]
                number, self.connections = self.connections, self.connections + 1
                for source, sink, is_answer in ((caller, node, False), (node, caller, True)):
                    thread = threading.Thread(target=self._pass, args=(number, source, sink, is_answer), daemon=True)
                    self._threads.append(thread)
                    thread.start()

    def _pass(self, number: int, source: socket.socket, sink: socket.socket, is_answer: bool) -> None:
        passed = 0
        try:
            while data := bytearray(source.recv(64 << 10)):
                if is_answer:
                    self._on_answer(number, passed, data)
                sink.sendall(data)
                passed += len(data)
        except OSError:
            pass
        for sock in (source, sink):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
