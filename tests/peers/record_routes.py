"""Records route_mix.csv: real transfers over loopback by several media, in phases of load. Not a test; run by hand:

    python -m tests.peers.record_routes tests/peers/data/route_mix.csv

Every line is one moment: when, the phase, a size, and how long each medium took for it: the median of three transfers,
since what the machine's other work does to one of them is no property of a medium. All are measured one after the other
in an order that changes, so what the best choice would have been is known afterwards. Media, each served by a process
of its own, behind a link with a bandwidth and a delay as between hosts: a framed socket with sendfile, Arrow Flight,
and HTTP over a link as to an object store.

Phases: quiet; a core kept busy; the stream behind a slow link; other transfers at the same time.
"""

import csv
import http.client
import http.server
import math
import multiprocessing
import os
import random
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import flight

SIZES = (64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)
BYTES_MAX = SIZES[-1]
PHASES = (("quiet", 50.0), ("busy", 40.0), ("congested", 100.0), ("quiet", 80.0), ("crowded", 40.0))
PAUSE_S = 0.15
TRIES = 3
LINKS = {"stream": (400e6, 3e-4), "slow stream": (100e6, 2e-3), "flight": (200e6, 3e-4), "cold": (60e6, 2e-2)}
"""Bytes a second and delay of the link before each server; the slow one replaces the stream's while it is congested."""
PIECE = 256 << 10
ASK = struct.Struct("<Q")
Fetch = Callable[[int], float]


def record(path: Path) -> None:
    """Measure all phases and write the file."""
    draw, pause = random.Random(7), threading.Event()
    with ExitStack() as stack, path.open("w", newline="") as file:
        lines = csv.writer(file, lineterminator="\n")
        ports = {name: stack.enter_context(serving(serve)) for name, serve in SERVERS.items()}
        links = {
            name: stack.enter_context(serving(serve_link, ports[name.removeprefix("slow ")], *link))
            for name, link in LINKS.items()
        }
        direct, slow = stream_client(links["stream"]), stream_client(links["slow stream"])
        fetches: dict[str, Fetch] = {
            "stream": direct,
            "flight": flight_client(links["flight"]),
            "cold": http_client(links["cold"]),
        }
        lines.writerow(("at_s", "phase", "bytes", *fetches))
        begun_s, end_s = perf_counter(), 0.0
        for phase, phase_s in PHASES:
            end_s += phase_s
            fetches["stream"] = slow if phase == "congested" else direct
            with load_of(phase, ports["stream"]):
                while perf_counter() - begun_s < end_s:
                    size, at_s = draw.choice(SIZES), perf_counter() - begun_s
                    order = [name for _ in range(TRIES) for name in draw.sample(sorted(fetches), len(fetches))]
                    tries = [(name, fetches[name](size)) for name in order]
                    found = {name: median(s for one, s in tries if one == name) for name in fetches}
                    lines.writerow((f"{at_s:.2f}", phase, size, *(f"{found[name]:.6f}" for name in fetches)))
                    pause.wait(PAUSE_S)


@contextmanager
def serving(target: Callable[..., None], *arguments: object) -> Iterator[int]:
    """A process that serves on a port it tells."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=target, args=(theirs, *arguments), daemon=True)
    process.start()
    try:
        yield ours.recv()
    finally:
        process.kill()
        process.join()


@contextmanager
def load_of(phase: str, stream_port: int) -> Iterator[None]:
    """What else the machine does meanwhile."""
    with ExitStack() as stack:
        if phase == "busy":
            stack.enter_context(serving(spin))
        if phase == "crowded":
            stack.enter_context(serving(fetch_forever, stream_port))
        yield


def spin(told: Connection) -> None:
    """Keep a core busy."""
    told.send(0)
    while True:
        sum(range(100_000))


def fetch_forever(told: Connection, port: int) -> None:
    """Another client of the stream's server."""
    told.send(0)
    fetch = stream_client(port)
    while True:
        fetch(BYTES_MAX)


# A framed stream


def serve_stream(told: Connection) -> None:
    descriptor = os.memfd_create("route-mix")
    os.pwrite(descriptor, np.random.default_rng(1).bytes(BYTES_MAX), 0)
    listener = socket.create_server(("127.0.0.1", 0))
    told.send(listener.getsockname()[1])
    while True:
        peer, _ = listener.accept()
        threading.Thread(target=answer_stream, args=(peer, descriptor), daemon=True).start()


def answer_stream(peer: socket.socket, descriptor: int) -> None:
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while asked := peer.recv(ASK.size, socket.MSG_WAITALL):
        sent, (size,) = 0, ASK.unpack(asked)
        while sent < size:
            with suppress(BrokenPipeError):  # a client that was ended in the middle
                sent += os.sendfile(peer.fileno(), descriptor, sent, size - sent)
                continue
            return


def serve_link(told: Connection, port: int, bytes_per_s: float, wait_s: float) -> None:
    """A link of a bandwidth and a delay before a server."""
    listener = socket.create_server(("127.0.0.1", 0))
    told.send(listener.getsockname()[1])
    while True:
        peer, server = listener.accept()[0], socket.create_connection(("127.0.0.1", port))
        for source, target, pace in ((peer, server, (math.inf, wait_s)), (server, peer, (bytes_per_s, 0.0))):
            target.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=carry, args=(source, target, *pace), daemon=True).start()


def carry(source: socket.socket, target: socket.socket, bytes_per_s: float, wait_s: float) -> None:
    buffer, pause, free_s = bytearray(PIECE), threading.Event(), 0.0
    while count := source.recv_into(buffer):
        free_s = max(free_s, perf_counter()) + count / bytes_per_s + wait_s
        pause.wait(max(0.0, free_s - perf_counter()))
        target.sendall(memoryview(buffer)[:count])


def stream_client(port: int) -> Fetch:
    peer, target = socket.create_connection(("127.0.0.1", port)), memoryview(bytearray(BYTES_MAX))
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def fetch(size: int) -> float:
        begun_s, got = perf_counter(), 0
        peer.sendall(ASK.pack(size))
        while got < size:
            got += peer.recv_into(target[got:size])
        return perf_counter() - begun_s

    return fetch


# Arrow Flight


class FlightServer(flight.FlightServerBase):  # type: ignore[misc]  # pyarrow has no types
    """Gives as many bytes as a ticket says, in pieces of 1 MiB."""

    def __init__(self) -> None:
        super().__init__("grpc://127.0.0.1:0")
        self._data = np.random.default_rng(1).integers(0, 255, BYTES_MAX, dtype=np.uint8)

    def do_get(self, _: object, ticket: Any) -> Any:
        size = int(ticket.ticket)
        piece = min(size, 1 << 20)
        arrays = [pa.array(self._data[start : start + piece]) for start in range(0, size, piece)]
        return flight.RecordBatchStream(pa.Table.from_arrays([pa.chunked_array(arrays)], names=["bytes"]))


def serve_flight(told: Connection) -> None:
    server = FlightServer()
    told.send(server.port)
    server.serve()


def flight_client(port: int) -> Fetch:
    client, target = flight.connect(f"grpc://127.0.0.1:{port}"), np.zeros(BYTES_MAX, np.uint8)

    def fetch(size: int) -> float:
        begun_s, got = perf_counter(), 0
        for chunk in client.do_get(flight.Ticket(str(size).encode())):
            found = chunk.data.column(0).to_numpy()
            np.copyto(target[got : got + len(found)], found)
            got += len(found)
        assert got == size
        return perf_counter() - begun_s

    return fetch


# HTTP, like an object store


class ColdHandler(http.server.BaseHTTPRequestHandler):
    """Answers ``GET /SIZE``."""

    protocol_version = "HTTP/1.1"
    data = memoryview(np.random.default_rng(1).bytes(BYTES_MAX))

    def do_GET(self) -> None:
        size = int(self.path[1:])
        self.send_response(200)
        self.send_header("Content-Length", str(size))
        self.end_headers()
        self.wfile.write(self.data[:size])

    def log_message(self, *_: object) -> None:
        """Nothing is said."""


def serve_cold(told: Connection) -> None:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), ColdHandler)
    told.send(server.server_address[1])
    server.serve_forever()


def http_client(port: int) -> Fetch:
    client, target = http.client.HTTPConnection("127.0.0.1", port), memoryview(bytearray(BYTES_MAX))

    def fetch(size: int) -> float:
        begun_s, got = perf_counter(), 0
        client.request("GET", f"/{size}")
        answer = client.getresponse()
        while got < size:
            got += answer.readinto(target[got:size])
        answer.read()
        return perf_counter() - begun_s

    return fetch


SERVERS = {"stream": serve_stream, "flight": serve_flight, "cold": serve_cold}

if __name__ == "__main__":
    record(Path(sys.argv[1]))
