"""How fast do records go between two nodes, against a bare socket loop, Mooncake Store over TCP and unary gRPC?

All in one run on loopback, in turns, records of 16 and 64 MiB one after another on one connection, each other side in
a process of its own. ``get`` ends with the bytes in this process's arena, ``put`` with the other side's word that it
has them. CPU is that of both processes. ``stream`` moves bytes only; ``node`` is the whole way: a get verified layer by
layer as it comes, a put verified and published by a node. ``shared memory`` is the same between two nodes of one host,
each of which reads the other's arena.

Asked: stream >= 0.9 of the bare loop, >= 2 x Mooncake, >= 4 x gRPC, and <= 0.3 s of CPU a GB.
"""

import argparse
import asyncio
import importlib
import json
import os
import shutil
import socket
import ssl
import statistics
import subprocess
import tempfile
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import grpc
import numpy as np

from bench.stream_servers import (
    GET,
    IDENTITY,
    LOCAL_NODE,
    LOCALHOST,
    MIB,
    PUT,
    SENDFILE,
    SLOTS,
    Server,
    fill,
    make_certificate,
    make_meta,
    seal,
    slot_bytes,
)
from kvservice.peers.host import Query
from kvservice.peers.member import Address, Facts, LocalAddress, NodeId
from kvservice.peers.streams_client import PeerLink
from kvservice.peers.streams_client_calls import PeerRecord
from kvservice.peers.streams_client_dialler import Caller
from kvservice.peers.streams_limits import LinkLimits
from kvservice.storage.arena import Arena
from kvservice.storage.arrival import RecordArrival
from kvservice.storage.record import master_layout
from kvservice.store import WriteRequest

OUTPUT = Path("build/bench/streams.json")
PATIENT = LinkLimits(deadline_s=60.0)
START_S = 30.0
COMPARED = ("bare", "sendfile", "grpc", "mooncake")
IDENTITY_JSON = IDENTITY.canonical_json()
"""Made once, as a link does."""


class Way(Protocol):
    """One way to move a record. ``get(slot)`` fills the arena's slot; ``put(slot)`` sends it."""

    async def get(self, slot: int) -> None:
        """Bring one."""

    async def put(self, slot: int) -> None:
        """Give one."""


class Memory:
    """This process's arena: slots to get into, and records to put."""

    def __init__(self, mib: int) -> None:
        self.mib = mib
        self.arena = Arena(2 * SLOTS * slot_bytes(mib), is_prefaulted=True)
        self.record_bytes = master_layout(make_meta(0, mib)).record_bytes
        self._number = 1000
        for slot in range(2 * SLOTS):
            fill(self.view(slot), slot)

    def view(self, slot: int) -> Any:
        """uint8 [record_bytes]; the second half of the slots are to be put."""
        return self.arena.view[slot * slot_bytes(self.mib) :][: self.record_bytes]

    def renamed(self, slot: int) -> tuple[Any, int]:
        """The record in a slot under a new name: what it says of itself, and its checksum."""
        self._number += 1
        meta = make_meta(self._number, self.mib)
        return meta, seal(self.view(SLOTS + slot), meta)


class Bare:
    """recv_into and sendall, or sendfile, in a loop."""

    def __init__(self, memory: Memory, port: int, *, with_sendfile: bool) -> None:
        self._memory = memory
        self._sock = socket.create_connection((LOCALHOST, port))
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._with_sendfile = with_sendfile

    async def get(self, slot: int) -> None:
        """See Way."""
        self._sock.sendall((SENDFILE if self._with_sendfile else GET) + bytes([slot]))
        view, at = self._memory.view(slot).data, 0
        while at < len(view):
            at += self._sock.recv_into(view[at:])

    async def put(self, slot: int) -> None:
        """See Way."""
        self._sock.sendall(PUT + bytes([slot]))
        if self._with_sendfile:
            at = (SLOTS + slot) * slot_bytes(self._memory.mib)
            end, descriptor = at + self._memory.record_bytes, self._memory.arena.descriptor()
            while at < end:
                at += os.sendfile(self._sock.fileno(), descriptor, at, end - at)
        else:
            self._sock.sendall(self._memory.view(SLOTS + slot).data)
        self._sock.recv(1)


class Stream:
    """A link to a peer port, or a unix socket. ``is_verified``: every layer is, as it comes."""

    def __init__(self, memory: Memory, at: Address | LocalAddress, tls: ssl.SSLContext | None = None) -> None:
        facts = Facts(NodeId(uuid.uuid4(), 1), "bench")
        caller = Caller(lambda: facts, tls=lambda: tls)
        self.link = PeerLink(at, caller, arena=memory.arena, limits=PATIENT)
        self._memory = memory
        self.records: list[PeerRecord] = []
        self.is_verified = False
        self._named: tuple[Any, int] | None = None

    async def find(self, numbers: Sequence[int]) -> None:
        """Ask once for the records that are fetched."""
        metas = [make_meta(number, self._memory.mib) for number in numbers]
        queries = [Query(one.namespace, one.key.segment, [one.key.context], 0, one.tokens) for one in metas]
        found = await self.link.find_all(queries, {IDENTITY.namespace(): IDENTITY_JSON}, ttl_s=600)
        self.records = [one.record for one in found if one.record is not None]
        if len(self.records) != len(numbers):
            raise RuntimeError("the other side does not hold what it should")

    async def get(self, slot: int) -> None:
        """See Way."""
        record, target = self.records[slot], self._memory.view(slot)
        if not self.is_verified:
            await self.link.fetch(record, target, lambda start, end: None)
            return
        meta = record.head.meta
        arrival = RecordArrival(target, meta.namespace, meta.key, record.head.generation, None)

        def on_piece(start: int, end: int) -> None:
            arrival.arrived(start, end)

        await self.link.fetch(record, target, on_piece)

    def prepare_put(self, slot: int) -> None:
        """Name the next record."""
        self._named = self._memory.renamed(slot)

    async def put(self, slot: int) -> None:
        """See Way."""
        assert self._named is not None
        meta, checksum = self._named
        request = WriteRequest(meta.namespace, meta.key, self._memory.record_bytes)
        await self.link.give(request, self._memory.view(SLOTS + slot), checksum, IDENTITY_JSON)


class Grpc:
    """Bytes in a message."""

    def __init__(self, memory: Memory, port: int) -> None:
        options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        channel = grpc.insecure_channel(f"{LOCALHOST}:{port}", options=options)
        self._get = channel.unary_unary("/bench/Get", None, None)
        self._put = channel.unary_unary("/bench/Put", None, None)
        self._memory = memory

    async def get(self, slot: int) -> None:
        """See Way."""
        np.copyto(self._memory.view(slot), np.frombuffer(self._get(bytes([slot])), np.uint8))

    async def put(self, slot: int) -> None:
        """See Way."""
        self._put(bytes(self._memory.view(SLOTS + slot).data))


class Mooncake:
    """Zero-copy puts and gets of one pool in another process."""

    def __init__(self, memory: Memory, master: str) -> None:
        self._store = importlib.import_module("mooncake.store").MooncakeDistributedStore()
        self._check(self._store.setup(LOCALHOST, "P2PHANDSHAKE", 0, 64 * MIB, "tcp", "", master), "setup")
        self._memory = memory
        self._number = 0
        base = memory.arena.view
        self._check(self._store.register_buffer(base.ctypes.data, len(base)), "register_buffer")
        for slot in range(SLOTS):
            view = memory.view(SLOTS + slot)
            self._check(self._store.put_from(f"get{slot}", view.ctypes.data, len(view)), "put_from")

    def _check(self, code: int, what: str) -> None:
        if code < 0:
            raise RuntimeError(f"Mooncake: {what} answers {code}")

    async def get(self, slot: int) -> None:
        """See Way."""
        view = self._memory.view(slot)
        self._check(self._store.get_into(f"get{slot}", view.ctypes.data, len(view)), "get_into")

    def prepare_put(self, slot: int) -> None:
        """Make room for the next one."""
        if self._number:
            self._store.remove(f"put{self._number}", True)
        self._number += 1

    async def put(self, slot: int) -> None:
        """See Way."""
        view = self._memory.view(SLOTS + slot)
        self._check(self._store.put_from(f"put{self._number}", view.ctypes.data, len(view)), "put_from")


@dataclass(frozen=True, slots=True)
class Figure:
    """One way, one direction, one size. ``times``: its rate over those of others in the same round, quartiles."""

    way: str
    direction: str
    mib: int
    gb_s: float
    cpu_s_per_gb: float
    times: dict[str, tuple[float, float, float]]


@dataclass(slots=True)
class Measured:
    """Seconds of every round, and of CPU in all, of this process and the other."""

    seconds: list[float]
    cpu_s: float = 0.0


@contextmanager
def mooncake_master() -> Iterator[str]:
    """A master of its own; its address."""
    ports = [free_port(), free_port()]
    command = ["mooncake_master", f"--rpc_port={ports[0]}", f"--metrics_port={ports[1]}", f"--rpc_address={LOCALHOST}"]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen([*command, f"--metrics_host={LOCALHOST}"], stdout=log, stderr=log)
        try:
            wait_for_port(ports[0])
            yield f"{LOCALHOST}:{ports[0]}"
        finally:
            process.terminate()
            process.wait(START_S)


def free_port() -> int:
    """One that nobody has now."""
    with socket.create_server((LOCALHOST, 0)) as sock:
        return int(sock.getsockname()[1])


def wait_for_port(port: int) -> None:
    """Until somebody listens there."""
    end_s = time.monotonic() + START_S
    while True:
        try:
            socket.create_connection((LOCALHOST, port), 1).close()
        except OSError:
            if time.monotonic() > end_s:
                raise
            time.sleep(0.1)
        else:
            return


def why_no_mooncake() -> str:
    """Empty if it can be measured."""
    try:
        importlib.import_module("mooncake.store")
    except ImportError as error:
        return f"{error}: pip install mooncake-transfer-engine-non-cuda"
    return "" if shutil.which("mooncake_master") else "mooncake_master is not on the path: put its folder there"


async def measure(mib: int, rounds: int) -> list[Figure]:
    """All ways at one size."""
    with ExitStack() as stack:
        memory, ways, servers = Memory(mib), dict[str, Way](), dict[str, Server]()

        def start(name: str, *arguments: str) -> int:
            servers[name] = Server(name, mib, *arguments)
            stack.callback(servers[name].close)
            return servers[name].port

        def port(name: str, *arguments: str) -> Address:
            return Address(LOCALHOST, start(name, *arguments))

        bare = start("bare")
        ways["bare"] = Bare(memory, bare, with_sendfile=False)
        ways["sendfile"] = Bare(memory, bare, with_sendfile=True)
        servers["sendfile"] = servers["bare"]
        cert, key = make_certificate()
        tls, path = ssl.create_default_context(cafile=cert), str(Path(cert).with_name("peers.sock"))
        start("local", path)
        streams = {
            "stream": Stream(memory, port("stream")),
            "stream, tls": Stream(memory, port("tls", cert, key), tls),
            "node": Stream(memory, port("node")),
            "shared memory": Stream(memory, LocalAddress(path, LOCAL_NODE)),
        }
        servers["stream, tls"], servers["shared memory"] = servers["tls"], servers["local"]
        await prepare(streams)
        ways |= streams
        ways["grpc"] = Grpc(memory, start("grpc"))
        reason = why_no_mooncake()
        if reason:
            print(f"Mooncake is left out: {reason}")
        else:
            master = stack.enter_context(mooncake_master())
            start("mooncake", master)
            ways["mooncake"] = Mooncake(memory, master)
        measured = await take_turns(ways, servers, rounds)
        for one in streams.values():
            await one.link.close()
    return [figure(way, direction, memory, measured) for way in ways for direction in ("get", "put")]


async def prepare(streams: dict[str, Stream]) -> None:
    """Have every other side hold the records that are fetched."""
    for name in ("node", "shared memory"):
        node, numbers = streams[name], []
        node.is_verified = True
        for slot in range(SLOTS):
            node.prepare_put(slot)
            await node.put(slot)
            assert node._named is not None
            numbers.append(int.from_bytes(node._named[0].key.segment, "little"))
        await node.find(numbers)
    for name in ("stream", "stream, tls"):
        await streams[name].find(range(SLOTS))


async def take_turns(ways: dict[str, Way], servers: dict[str, Server], rounds: int) -> dict[tuple[str, str], Measured]:
    """Every way once a round and direction; two rounds do not count."""
    measured = {(way, direction): Measured([]) for way in ways for direction in ("get", "put")}
    for number in range(rounds + 2):
        for direction in ("get", "put"):
            for way in ways.values():
                if isinstance(way, Stream):
                    await way.link.ping()  # as in service, where it keeps a connection, and what that has mapped
            for name, way in ways.items():
                slot = number % SLOTS
                if direction == "put" and hasattr(way, "prepare_put"):
                    way.prepare_put(slot)
                step = way.get if direction == "get" else way.put
                seconds, cpu_s = await timed(step, slot, servers[name])
                if number >= 2:
                    measured[name, direction].seconds.append(seconds)
                    measured[name, direction].cpu_s += cpu_s
    return measured


async def timed(step: Callable[[int], Awaitable[None]], slot: int, server: Server) -> tuple[float, float]:
    """Seconds of one transfer, and of CPU on both sides."""
    cpu_s, begun_s = server.cpu_s() + time.process_time(), time.perf_counter()
    await step(slot)
    seconds = time.perf_counter() - begun_s
    return seconds, time.process_time() + server.cpu_s() - cpu_s


def figure(way: str, direction: str, memory: Memory, measured: dict[tuple[str, str], Measured]) -> Figure:
    """Medians over rounds."""
    own, size = measured[way, direction], memory.record_bytes
    others = [name for name in COMPARED if (name, direction) in measured]
    times = {name: quartiles(measured[name, direction].seconds, own.seconds) for name in others}
    cpu_s = own.cpu_s / len(own.seconds) / size * 1e9
    return Figure(way, direction, memory.mib, size / statistics.median(own.seconds) / 1e9, cpu_s, times)


def quartiles(others: Sequence[float], own: Sequence[float]) -> tuple[float, float, float]:
    """Of other / own, round by round: a quarter, the middle, three quarters."""
    low, middle, high = statistics.quantiles((one / two for one, two in zip(others, own, strict=True)), n=4)
    return round(low, 3), round(middle, 3), round(high, 3)


def print_table(figures: Sequence[Figure]) -> None:
    """For people."""
    print(f"{'':14}{'':6}{'MiB':>4}{'GB/s':>7}{'CPU s/GB':>10}" + "".join(f"{'x ' + name:>21}" for name in COMPARED))
    for one in figures:
        shown = "".join(f"{mid:8.2f} ({low:.2f}-{high:.2f})" for low, mid, high in one.times.values())
        print(f"{one.way:14}{one.direction:6}{one.mib:4}{one.gb_s:7.2f}{one.cpu_s_per_gb:10.3f}{shown}")


def main() -> None:
    """Run, print, write ``build/bench/streams.json``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parsed = parser.parse_args()
    figures = [one for mib in (16, 64) for one in asyncio.run(measure(mib, parsed.rounds))]
    print_table(figures)
    parsed.output.parent.mkdir(parents=True, exist_ok=True)
    document = {"cpus": os.cpu_count(), "rounds": parsed.rounds, "figures": [asdict(one) for one in figures]}
    parsed.output.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
