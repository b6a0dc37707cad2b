"""The other sides that ``bench/streams.py`` talks to, each in a process: ``python bench/stream_servers.py ROLE MIB``.

Prints its port. Then answers every line of its input with the seconds of CPU that it has used, and ends with its input.
"""

import asyncio
import importlib
import json
import os
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np

from kvservice.access.principal import Principal
from kvservice.limits import NodeLimits
from kvservice.model.cache import CacheMeta
from kvservice.model.geometry import attention_geometry
from kvservice.model.identity import Identity, Namespace
from kvservice.model.plan import Match
from kvservice.model.rope import rope_from_parameters
from kvservice.model.segment import CacheKey, ContextId, SegmentId
from kvservice.node import Node
from kvservice.peers.host import Answer, Fetch, Found, FoundHead, Query, Room
from kvservice.peers.host_node import NodeHost
from kvservice.peers.member import Facts, NodeId
from kvservice.peers.streams_channel import Source
from kvservice.peers.streams_limits import ServerLimits
from kvservice.peers.streams_local_server import LocalServer
from kvservice.peers.streams_server import StreamServer
from kvservice.storage.arena import Arena
from kvservice.storage.buffer import Bytes, round_up
from kvservice.storage.host_tier import HostTier
from kvservice.storage.record import RecordWriter, master_layout
from kvservice.store import WriteRequest

MIB = 1 << 20
LOCALHOST = "127.0.0.1"
SLOTS = 3
"""Records in turn, so that none was touched just before."""
SPARE_BYTES = 1 * MIB
LAYERS, HEADS, HEAD_SIZE = 32, 8, 128
TOKEN_BYTES = LAYERS * 2 * HEADS * HEAD_SIZE * 2
LOCAL_NODE = NodeId(uuid.UUID(int=1), 1)
"""Who is met in shared memory."""
GET, PUT, SENDFILE = b"g", b"p", b"f"


def make_identity() -> Identity:
    """A model of 128 KiB a token."""
    rope = rope_from_parameters({"rope_theta": 500000.0}, head_size=HEAD_SIZE, max_positions=8192)
    geometry = attention_geometry(layers=LAYERS, heads=HEADS, head_size=HEAD_SIZE, dtype="bfloat16")
    return Identity("bench", "llama-3-8b", "r1", geometry, (rope,) * LAYERS)


IDENTITY = make_identity()


def make_meta(number: int, mib: int) -> CacheMeta:
    """A record of so many MiB under a name that ``number`` makes."""
    key = CacheKey(SegmentId(number.to_bytes(32, "little")), ContextId(bytes(32)))
    return CacheMeta(IDENTITY.namespace(), key, 0, mib * MIB // TOKEN_BYTES, IDENTITY.geometry)


def fill(view: Bytes, seed: int) -> None:
    """Finite bfloat16 values."""
    values = np.random.default_rng(seed).standard_normal(len(view) // 2, np.float32).view(np.uint32) >> 16
    view[: len(view) // 2 * 2].view(np.uint16)[:] = values.astype(np.uint16)


def seal(view: Bytes, meta: CacheMeta) -> int:
    """Make a record of what lies there, under the name of ``meta``; its header's checksum."""
    return RecordWriter(view, meta, master_layout(meta)).finish().header_checksum


def slot_bytes(mib: int) -> int:
    """Room for one record, on a page."""
    return round_up(mib * MIB + SPARE_BYTES, 4096)


def make_slots(mib: int) -> tuple[Arena, list[Bytes]]:
    """An arena full of records, and a view of each."""
    arena, views = Arena(SLOTS * slot_bytes(mib), is_prefaulted=True), []
    for number in range(SLOTS):
        meta = make_meta(number, mib)
        view = arena.view[number * slot_bytes(mib) :][: master_layout(meta).record_bytes]
        fill(view, number)
        seal(view, meta)
        views.append(view)
    return arena, views


# Bare sockets


def serve_bare(mib: int) -> int:
    """One byte asks: the record by sendall, by sendfile, or take one."""
    arena, views = make_slots(mib)
    listener = socket.create_server((LOCALHOST, 0))

    def serve(sock: socket.socket) -> None:
        while asked := sock.recv(2, socket.MSG_WAITALL):
            view, offset = views[asked[1]].data, asked[1] * slot_bytes(mib)
            if asked[:1] == GET:
                sock.sendall(view)
            elif asked[:1] == SENDFILE:
                at, end = offset, offset + len(view)
                while at < end:
                    at += os.sendfile(sock.fileno(), arena.descriptor(), at, end - at)
            else:
                at = 0
                while at < len(view):
                    at += sock.recv_into(view[at:])
                sock.sendall(b".")

    def accept() -> None:
        while True:
            threading.Thread(target=serve, args=(greet(listener),), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return int(listener.getsockname()[1])


def greet(listener: socket.socket) -> socket.socket:
    """The next caller."""
    sock, _ = listener.accept()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


# Streams


class ArenaHost:
    """A host that holds the slots, takes records into them and verifies nothing: streams alone."""

    record_bytes_max = 1 << 40

    def __init__(self, mib: int) -> None:
        self.facts = Facts(NodeId(uuid.uuid4(), 1), "bench")
        self._arena, self._views = make_slots(mib)
        self._mib = mib
        self._room = 0

    def open(self, principal: Principal, name: str) -> "ArenaHost":
        """One session for all."""
        return self

    def register(self, identities: Sequence[str]) -> None:
        """All are known."""

    def find(self, queries: Sequence[Query], ttl_s: float, wait_s: float, ahead_bytes: int = 0) -> Found:
        """All are here."""
        heads = [FoundHead(self._views[query.segment[0]][: 1 << 14].tobytes(), 0.0) for query in queries]
        return Found(0, 0.0, tuple(Answer(Match.EXACT, record=head) for head in heads))

    def hold(self, wanted: Fetch) -> "ArenaHeld":
        """By number."""
        number = wanted.key.segment[0]
        view = self._views[number]
        return ArenaHeld(Source(view.data, self._arena.descriptor(), number * slot_bytes(self._mib)), len(view))

    def reserve(self, request: WriteRequest) -> Room:
        """The slots in turn."""
        self._room = (self._room + 1) % SLOTS
        return Room(self._room, self._views[self._room][: request.record_bytes].data)

    def commit(self, room: Room, header_checksum: int) -> int:
        """It is here."""
        return 1

    def abort(self, room: Room) -> None:
        """Nothing to do."""

    def renew(self, lease_ids: Sequence[int], ttl_s: float) -> int:
        """No leases."""
        return 0

    def release(self, lease_ids: Sequence[int]) -> int:
        """No leases."""
        return 0

    def delete(self, namespace: Namespace, keys: Sequence[CacheKey] | None) -> int:
        """Nothing goes."""
        return 0

    def close(self) -> None:
        """Nothing to do."""


class ArenaHeld:
    """A slot; nothing moves it."""

    may_pack = False

    def __init__(self, source: Source, record_bytes: int) -> None:
        self.source = source
        self.record_bytes = record_bytes

    def wait(self, beyond: int) -> int:
        """All is here."""
        return self.record_bytes

    def release(self) -> None:
        """Nothing to do."""


def serve_stream(mib: int, how: str = "") -> int:
    """Streams over plain TCP; ``how`` = files: sent by the kernel from the arena's file, as over a network card."""
    limits = ServerLimits(sends_files=True if how == "files" else None)
    return StreamServer(ArenaHost(mib), (LOCALHOST, 0), limits=limits).start()


def serve_tls(mib: int, cert: str, key: str) -> int:
    """Streams under TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    return StreamServer(ArenaHost(mib), (LOCALHOST, 0), tls=context).start()


def serve_node(mib: int) -> int:
    """A real node: what is given is verified and published, what is found is leased."""
    return StreamServer(make_host(mib)[0], (LOCALHOST, 0)).start()


def serve_local(mib: int, path: str) -> int:
    """The same node at a unix socket, where each side reads the other's memory."""
    host, arena = make_host(mib)
    return LocalServer(host, Path(path), arena).start()


def make_host(mib: int) -> tuple[NodeHost, Arena]:
    """A node on a loop of its own."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    arena = Arena((SLOTS + 2) * slot_bytes(mib), is_prefaulted=True)
    node = Node(NodeLimits(), HostTier(arena), clock=time.monotonic, boot_epoch=1)
    facts = Facts(LOCAL_NODE, "bench")
    return NodeHost(node, loop, lambda: facts), arena


# gRPC


def serve_grpc(mib: int) -> int:
    """One method each way, bytes to bytes."""
    _, views = make_slots(mib)

    def get(request: bytes, _: object) -> bytes:
        return bytes(views[request[0]].data)

    def put(request: bytes, _: object) -> bytes:
        np.copyto(views[0][: len(request)], np.frombuffer(request, np.uint8))
        return b"."

    handlers = {
        "Get": grpc.unary_unary_rpc_method_handler(get),
        "Put": grpc.unary_unary_rpc_method_handler(put),
    }
    options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    server = grpc.server(ThreadPoolExecutor(2), options=options)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench", handlers),))
    port = server.add_insecure_port(f"{LOCALHOST}:0")
    server.start()
    globals()["kept"] = server
    return int(port)


# Mooncake


def serve_mooncake(mib: int, master: str) -> int:
    """The process whose memory the pool is."""
    store = importlib.import_module("mooncake.store").MooncakeDistributedStore()
    pool_bytes = max(1 << 30, 16 * slot_bytes(mib))
    code = store.setup(LOCALHOST, "P2PHANDSHAKE", pool_bytes, 0, "tcp", "", master)
    if code:
        raise RuntimeError(f"the store was not set up: {code}")
    globals()["kept"] = store
    return 0


ROLES: dict[str, Callable[..., int]] = {
    "bare": serve_bare,
    "stream": serve_stream,
    "tls": serve_tls,
    "node": serve_node,
    "local": serve_local,
    "grpc": serve_grpc,
    "mooncake": serve_mooncake,
}


class Server:
    """One of the roles, in a process."""

    def __init__(self, role: str, mib: int, *arguments: str) -> None:
        command = [sys.executable, str(Path(__file__).resolve()), role, str(mib), *arguments]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.port = int(self._line())

    def _line(self) -> str:
        assert self._process.stdout is not None
        while line := self._process.stdout.readline():
            if line.startswith("{"):
                return str(json.loads(line)["value"])
        raise RuntimeError("the other side ended; run it by hand to see why")

    def cpu_s(self) -> float:
        """Seconds of CPU that it has used."""
        assert self._process.stdin is not None
        self._process.stdin.write("?\n")
        self._process.stdin.flush()
        return float(self._line())

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def make_certificate() -> tuple[str, str]:
    """For 127.0.0.1, by openssl: certificate and key, in a folder of their own."""
    folder = Path(tempfile.mkdtemp())
    cert, key = str(folder / "cert.pem"), str(folder / "key.pem")
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    name = ["-subj", "/CN=bench", "-addext", f"subjectAltName=IP:{LOCALHOST}"]
    command = ["openssl", "req", "-x509", *curve, *name, "-keyout", key, "-out", cert]
    subprocess.run(command, check=True, capture_output=True)
    return cert, key


def main(arguments: Sequence[str]) -> None:
    """One role."""
    role, mib, *others = arguments
    say(ROLES[role](int(mib), *others))
    for _ in sys.stdin:
        say(time.process_time())
    os._exit(0)


def say(value: float) -> None:
    """A line that is not one of a library's own."""
    print(json.dumps({"value": value}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
