"""How soon is the first layer of a cache that another node holds usable? Asked: one round trip + one layer's transfer.

Two nodes in processes of their own on loopback, a sidecar and a shared node, and a client at the sidecar. ``first`` is
from the beginning of the lookup to the rows of layer 0 in the client's paged KV, ``last`` the same of the last layer.
Beside them, in turns in the same run, what a bare socket to a process of its own takes: a round trip of a small
message, one that brings as many bytes as one layer has, and one that brings as many as the whole record. The sidecar's
memory holds one record and a half, so that of two segments in turn the one that is asked for is at the shared node
alone. Records of 16 and 64 MiB in 30 layers. Medians and quartiles; writes build/bench/first_layer.json.
With --delay-ms the nodes, and the bare socket's two ends, are so far from each other, one way: a proxy in a process of
its own (tests/peers/far_link.py) passes bytes on so much later.
Run: python bench/first_layer.py
     python bench/first_layer.py --medium stream --delay-ms 0 5 20
"""

import argparse
import gc
import json
import math
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

from kvservice.client import Client, PartKind, ReusePolicy, RoundPrompt
from kvservice.config import process_environment
from kvservice.model.cache import Tier
from kvservice.model.geometry import attention_geometry
from kvservice.model.identity import Identity
from kvservice.model.rope import rope_from_parameters

MIB, LOCALHOST = 1 << 20, "127.0.0.1"
LAYERS, HEADS, HEAD_SIZE, BLOCK_SIZE = 30, 4, 128, 16
TOKEN_BYTES = LAYERS * 2 * HEADS * HEAD_SIZE * 2
START_TIMEOUT_S = 60.0
ASK_BYTES = 64
STREAM, SHARED_MEMORY = "stream", "shared-memory"
FAR_LINK = Path(__file__).resolve().parents[1] / "tests/peers/far_link.py"
FOLDER, RESULT = Path("build/bench"), Path("build/bench/first_layer.json")


@dataclass(frozen=True, slots=True)
class Spread:
    """Milliseconds, or a ratio: median and quartiles."""

    median: float
    p25: float
    p75: float


@dataclass(frozen=True, slots=True)
class Figure:
    """One size and delay (one way), in ms. ``lookup``: until the plan is there; ``of_bare``: the first layer's time
    over the bare one's."""

    record_mib: int
    delay_ms: float
    layer_kib: int
    way: str
    round_trip: Spread
    bare_layer: Spread
    bare_record: Spread
    lookup: Spread
    first: Spread
    last: Spread
    of_bare: Spread
    last_of_bare: Spread


class Bare:
    """A process that answers so many bytes: a round trip and their transfer, nothing else."""

    def __init__(self, record_bytes: int, delay_ms: float) -> None:
        self._stack = ExitStack()
        port = self._stack.enter_context(answering([__file__, "--serve", str(record_bytes)]))
        self._socket = socket.create_connection((LOCALHOST, self._stack.enter_context(far_away(port, delay_ms))))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._target = memoryview(bytearray(record_bytes))

    def bring(self, count: int) -> float:
        """Seconds for a question and so many bytes: a round trip and their transfer."""
        began_s, at = time.perf_counter(), 0
        self._socket.sendall(count.to_bytes(8, "little"))
        while at < count:
            at += self._socket.recv_into(self._target[at:count])
        return time.perf_counter() - began_s

    def close(self) -> None:
        """End it."""
        self._socket.close()
        self._stack.close()


@contextmanager
def answering(program: Sequence[str]) -> Iterator[int]:
    """A Python program of its own that listens at the port that it prints."""
    process = subprocess.Popen([sys.executable, *program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield int(process.stdout.readline())
    finally:
        process.terminate()
        process.wait(START_TIMEOUT_S)
        process.stdin.close()
        process.stdout.close()


@contextmanager
def far_away(port: int, delay_ms: float, bytes_per_s: float = math.inf) -> Iterator[int]:
    """The port at which what listens at ``port`` is so far away, over such a link; the same one if it is not."""
    if not delay_ms and bytes_per_s == math.inf:
        yield port
        return
    link = ["--delay-ms", str(delay_ms), "--bytes-per-s", str(bytes_per_s)]
    with answering([str(FAR_LINK), f"{LOCALHOST}:{port}", *link]) as far_port:
        yield far_port


def serve(record_bytes: int) -> None:
    """The other side of Bare."""
    payload = memoryview(bytearray(record_bytes))
    with socket.create_server((LOCALHOST, 0)) as listening:
        print(listening.getsockname()[1], flush=True)
        connection, _ = listening.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while asked := connection.recv(8, socket.MSG_WAITALL):
            connection.sendall(payload[: int.from_bytes(asked, "little")])


class Bench:
    """Two segments at the shared node, and an engine's paged KV beside the sidecar."""

    def __init__(self, client: Client, tokens: int) -> None:
        self.client, self.tokens = client, tokens
        blocks = 2 * tokens // BLOCK_SIZE
        self.paged = [
            [torch.randn((blocks, BLOCK_SIZE, HEADS, HEAD_SIZE)).bfloat16() for _ in range(2)] for _ in range(LAYERS)
        ]
        order = torch.randperm(blocks)
        self.slots = (order[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten()[:tokens]
        self.prompts = [self._prompt(number) for number in range(2)]
        for number, prompt in enumerate(self.prompts):
            client.store(prompt, self.paged, self.slots)
            self._await_pushed(number + 1)

    def _prompt(self, number: int) -> RoundPrompt:
        part = (PartKind.SHARED, [7 + (index + number) % 1000 for index in range(self.tokens)])
        return RoundPrompt.from_parts(
            self.client.namespace, [part], policy=ReusePolicy("none", 1), chunk_tokens=BLOCK_SIZE
        )

    def _await_pushed(self, records: int) -> None:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while _stat(self.client, "pushes", "stored") < records:
            assert time.monotonic() < deadline_s, "the record did not come to the shared node"
            time.sleep(0.01)

    def bring(self, number: int) -> tuple[float, float, float]:
        """Seconds from the beginning of a lookup to its plan, to the first layer and to the last one."""
        began_s = time.perf_counter()
        with self.client.lookup([self.prompts[number]]) as plans:
            planned_s = time.perf_counter() - began_s
            (_, planned), *more = plans[0].hits
            assert not more
            assert planned.record is not None
            assert planned.record.tier is Tier.REMOTE, planned.record.tier
            restore = self.client.restore(plans, self.paged, [self.slots])
            restore.wait_for_layer(0)
            first_s = time.perf_counter() - began_s
            restore.wait()
            return planned_s, first_s, time.perf_counter() - began_s


def _stat(client: Client, part: str, name: str) -> int:
    found: Any = client.stats()[part]
    return int(found[name])


@contextmanager
def node(folder: Path, name: str, *flags: str) -> Iterator[str]:
    """A node of its own; its address. What it logs goes to a file beside it."""
    path = folder / f"{name}.sock"
    command = [sys.executable, "-m", "kvservice", "serve", "--socket", str(path), "--grpc-port", "-1"]
    command += ["--http-port", "-1", "--log-level", "WARNING", *flags]
    with (folder / f"{name}.log").open("w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=process_environment())
    assert process.stdout is not None
    try:
        if "unix:" not in process.stdout.readline():
            raise SystemExit(f"the {name} node did not start")
        drained = threading.Thread(target=process.stdout.read, daemon=True)
        drained.start()
        yield f"unix:{path}"
    finally:
        process.terminate()
        process.wait(START_TIMEOUT_S)
        drained.join(START_TIMEOUT_S)
        process.stdout.close()


def measure(record_mib: int, delay_ms: float, medium: str, rounds: int, folder: Path) -> Figure:
    """One size and delay."""
    tokens = record_mib * MIB // TOKEN_BYTES // BLOCK_SIZE * BLOCK_SIZE
    record_bytes, port = tokens * TOKEN_BYTES, free_port()
    small, large = record_mib * 3 // 2 * MIB, record_mib * 4 * MIB
    said = ["--shares-memory", str(medium == SHARED_MEMORY)]
    with (
        node(folder, "shared", "--peer-port", str(port), "--host-bytes", str(large), *said),
        far_away(port, delay_ms) as far_port,
        node(folder, "sidecar", "--shared", f"{LOCALHOST}:{far_port}", "--host-bytes", str(small), *said) as address,
        Client.connect(address, make_identity()) as client,
    ):
        bench, bare = Bench(client, tokens), Bare(record_bytes, delay_ms)
        seconds: list[tuple[float, ...]] = []
        for number in range(rounds + 4):
            asked = [bare.bring(count) for count in (ASK_BYTES, record_bytes // LAYERS, record_bytes)]
            seconds.append((*asked, *bench.bring(number % 2)))
            if number == 1:
                gc.freeze()  # as engines do once they have started
        bare.close()
        seconds = seconds[4:]  # the first ones compile and connect
        return make_figure(record_mib, delay_ms, record_bytes, way_of(client), seconds)


def way_of(client: Client) -> str:
    """Which media the records came over, most of them first."""
    document: Any = client.stats()
    moved = Counter[str]()
    for other in document["network"]["others"]:
        moved.update({medium: way["transfers"] for medium, way in other["ways"].items() if way["transfers"]})
    return ", ".join(medium for medium, _ in moved.most_common())


def free_port() -> int:
    """A port that nobody has just now."""
    with socket.socket() as probe:
        probe.bind((LOCALHOST, 0))
        return int(probe.getsockname()[1])


def make_identity() -> Identity:
    """A model of 60 KiB a token in 30 layers."""
    geometry = attention_geometry(layers=LAYERS, heads=HEADS, head_size=HEAD_SIZE, dtype="bfloat16")
    rope = rope_from_parameters({"rope_theta": 1e6}, head_size=HEAD_SIZE, max_positions=1 << 20)
    return Identity("bench", "model", "r1", geometry, (rope,) * LAYERS)


def make_figure(
    record_mib: int, delay_ms: float, record_bytes: int, way: str, seconds: Sequence[tuple[float, ...]]
) -> Figure:
    """``seconds``: rows of bare round trip, layer and record; lookup, first and last layer."""
    round_trip, layer, record, lookup, first, last = (list(column) for column in zip(*seconds, strict=True))
    return Figure(
        record_mib=record_mib,
        delay_ms=delay_ms,
        layer_kib=record_bytes // LAYERS // 1024,
        way=way,
        round_trip=spread(round_trip, 1e3),
        bare_layer=spread(layer, 1e3),
        bare_record=spread(record, 1e3),
        lookup=spread(lookup, 1e3),
        first=spread(first, 1e3),
        last=spread(last, 1e3),
        of_bare=spread([ours / theirs for ours, theirs in zip(first, layer, strict=True)]),
        last_of_bare=spread([ours / theirs for ours, theirs in zip(last, record, strict=True)]),
    )


def spread(values: Sequence[float], scale: float = 1.0) -> Spread:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(values, n=4)
    return Spread(*(round(one * scale, 3) for one in (middle, low, high)))


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--sizes", type=int, nargs="+", default=[16, 64], help="MiB of a record")
    parser.add_argument("--delay-ms", type=float, nargs="+", default=[0.0], help="between the nodes, one way")
    parser.add_argument("--medium", choices=[STREAM, SHARED_MEMORY], help="default: shared-memory, stream with a delay")
    parser.add_argument("--serve", type=int, default=0, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.serve:
        serve(asked.serve)
        return 0
    medium = asked.medium or (STREAM if any(asked.delay_ms) else SHARED_MEMORY)
    if medium == SHARED_MEMORY and any(asked.delay_ms):
        parser.error("memory that is shared is not far away: a delay takes --medium stream")
    FOLDER.mkdir(parents=True, exist_ok=True)
    figures = []
    for record_mib, delay_ms in product(asked.sizes, asked.delay_ms):
        folder = Path(tempfile.mkdtemp(dir=FOLDER))
        try:
            one = measure(record_mib, delay_ms, medium, asked.rounds, folder)
        finally:
            shutil.rmtree(folder)
        figures.append(one)
        show(one)
    said = {"rounds": asked.rounds, "layers": LAYERS, "figures": [asdict(one) for one in figures]}
    RESULT.write_text(json.dumps(said, indent=2) + "\n")
    return 0


def show(one: Figure) -> None:
    """Print it."""
    where = f"over {one.way}" + (f", {one.delay_ms:g} ms away" if one.delay_ms else "")
    print(f"{one.record_mib} MiB in {LAYERS} layers of {one.layer_kib} KiB, {where}; ms, median (quartiles)")
    for name in ("round_trip", "bare_layer", "bare_record", "lookup", "first", "last", "of_bare", "last_of_bare"):
        found: Spread = getattr(one, name)
        print(f"  {name:12s} {found.median:8.3f}  ({found.p25:.3f}-{found.p75:.3f})")


if __name__ == "__main__":
    sys.exit(main())
