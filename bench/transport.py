"""How fast is a record put into and got out of a node on this host, against a memcpy of the same bytes?

put: reserve, gather from paged KV, checksum, commit, the node's own verification included. get: lookup and restore to
paged KV, without a move. Every round times memcpys beside it (np.copyto, one thread), so that other load on the machine
falls on both. Their bytes, like those of put and get, were last touched long before. numpy's large buffers lie in huge
pages where the system grants them; arena and paged KV do not, so one more memcpy is between pages as small as theirs.
A round of four records shows what the calls cost: there are as many for four as for one. The node is a process of its
own. A call is also timed both ways, over the data socket and over gRPC, in turns.

Asked (DESIGN.md): put and get at 0.8 of memcpy or more, a batched lookup of 64 segments below 3 ms at p99, idle.
"""

import argparse
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from kvservice.client import Client, PartKind, Plans, RoundPrompt, SharedMemoryTransport, StoreOutcome
from kvservice.client.session_stream import SessionStream
from kvservice.config import process_environment
from kvservice.model.geometry import attention_geometry
from kvservice.model.identity import Identity
from kvservice.model.rope import rope_from_parameters
from kvservice.wire.v1 import cache_pb2 as wire

MIB = 1 << 20
OUTPUT = Path("build/bench/transport.json")
LAYERS, HEADS, HEAD_SIZE, BLOCK_SIZE = 32, 8, 128, 16
TOKENS = 128  # 32 layers * 2 planes * 8 heads * 128 * 2 bytes = 128 KiB a token: 16 MiB
LOOKUP_SEGMENTS = 64
CALLS_IN_TURN = 50
START_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Figure:
    """Milliseconds of one thing timed, and its rate against the memcpys (median of pairs)."""

    name: str
    p50_ms: float
    p10_ms: float
    p90_ms: float
    gb_s: float
    of_memcpy_16_mib: float
    of_memcpy_64_mib: float
    of_small_paged: float


@dataclass(frozen=True, slots=True)
class Latency:
    """Milliseconds of one call."""

    name: str
    p50_ms: float
    p99_ms: float
    calls: int


class Memcpy:
    """np.copyto between buffers that were touched before, though not soon before: a pool of them takes turns."""

    def __init__(self, name: str, length: int, pool: int, *, is_small_paged: bool = False) -> None:
        self.name, self.length = name, length
        make = _small_paged if is_small_paged else np.empty
        self._source, self._target = make((pool, length), np.uint8), make((pool, length), np.uint8)
        self._source[:], self._target[:] = 1, 0
        self._turn = 0

    def time_s(self) -> float:
        """Seconds of one copy."""
        self._turn = (self._turn + 1) % len(self._source)
        source, target = self._source[self._turn], self._target[self._turn]
        return timed(lambda: np.copyto(target, source))


def _small_paged(shape: tuple[int, int], dtype: type[np.uint8]) -> npt.NDArray[np.uint8]:
    memory = mmap.mmap(-1, shape[0] * shape[1])  # shared memory, as an arena is
    return np.frombuffer(memory, dtype).reshape(shape)


def timed(work: Callable[[], object]) -> float:
    """Seconds that ``work`` takes."""
    begun_s = time.perf_counter()
    work()
    return time.perf_counter() - begun_s


@contextmanager
def running_node(host_bytes: int) -> Iterator[str]:
    """A node in a process of its own; yields its address."""
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--socket", f"{folder}/kv.sock", "--grpc-port", "-1", "--http-port", "-1"]
        flags += ["--host-bytes", str(host_bytes), "--is-prefaulted", "true"]
        command = [sys.executable, "-m", "kvservice", "serve", *flags]
        node = subprocess.Popen(command, stdout=subprocess.PIPE, env=process_environment())
        try:
            assert node.stdout is not None
            if not node.stdout.readline():
                raise RuntimeError("the node did not start; run the command above by hand")
            yield f"unix:{folder}/kv.sock"
        finally:
            node.terminate()
            node.wait(START_TIMEOUT_S)


def make_identity() -> Identity:
    """Llama-3-8B's shape, bfloat16."""
    rope = rope_from_parameters({"rope_theta": 500000.0}, head_size=HEAD_SIZE, max_positions=8192)
    geometry = attention_geometry(layers=LAYERS, heads=HEADS, head_size=HEAD_SIZE, dtype="bfloat16")
    return Identity("bench", "llama-3-8b", "r1", geometry, (rope,) * LAYERS)


def make_paged_kv(tokens: int) -> list[list[torch.Tensor]]:
    """Paged KV with room for so many tokens, random values."""
    shape = (2, tokens // BLOCK_SIZE, BLOCK_SIZE, HEADS, HEAD_SIZE)
    return [list(torch.randn(shape).to(torch.bfloat16).unbind(0)) for _ in range(LAYERS)]


def make_prompt(client: Client, lengths: Sequence[int], seed: int) -> RoundPrompt:
    """Shared segments of these lengths."""
    tokens = np.random.default_rng(seed).integers(0, 1 << 30, sum(lengths)).tolist()
    return RoundPrompt.from_lengths(client.namespace, tokens, [(PartKind.SHARED, length) for length in lengths])


def make_slots(blocks: int, tokens: int) -> torch.Tensor:
    """Slots of a prompt, its blocks scattered as an engine's are."""
    starts = torch.randperm(blocks)[: tokens // BLOCK_SIZE] * BLOCK_SIZE
    return (starts[:, None] + torch.arange(BLOCK_SIZE)).flatten()


class RecordBench:
    """Puts and gets records of 16 MiB over and over, all of them in one call."""

    def __init__(self, client: Client, paged_kv: list[list[torch.Tensor]], records: int) -> None:
        self._client = client
        self._paged_kv = paged_kv
        self._blocks = paged_kv[0][0].shape[0]
        self._prompt = make_prompt(client, [TOKENS] * records, records)
        self._plans: Plans | None = None
        self.length = records * 16 * MIB

    def put(self) -> None:
        """Store the records."""
        result = self._client.store(self._prompt, self._paged_kv, self._slots)
        assert {one.outcome for one in result.segments} == {StoreOutcome.MASTER}, result

    def get(self) -> None:
        """Look them up and restore them."""
        self._plans = self._client.lookup([self._prompt])
        self._client.restore(self._plans, self._paged_kv, [self._slots]).wait()
        assert self._plans.hit_tokens == self._prompt.token_count

    def prepare_put(self) -> None:
        """Make room for the records, at other slots."""
        self.prepare_get()
        self._client.delete([self._prompt.key(index) for index in range(len(self._prompt.segments))])

    def prepare_get(self) -> None:
        """Give back the last lease; other slots."""
        if self._plans is not None:
            self._plans.close()
        self._slots = make_slots(self._blocks, self._prompt.token_count)


def bench_records(client: Client, rounds: int) -> list[Figure]:
    """Put and get against memcpys, in pairs."""
    memcpys = (
        Memcpy("memcpy 16 MiB", 16 * MIB, 16),
        Memcpy("memcpy 64 MiB", 64 * MIB, 4),
        Memcpy("memcpy 16 MiB, small pages", 16 * MIB, 16, is_small_paged=True),
    )
    paged_kv = make_paged_kv(16 * TOKENS)
    figures, all_copies = [], []
    for records in (1, 4):
        bench = RecordBench(client, paged_kv, records)
        for name, prepare, work in (("put", bench.prepare_put, bench.put), ("get", bench.prepare_get, bench.get)):
            times, copies = time_in_pairs(prepare, work, memcpys, rounds)
            figures.append(figure(f"{name} {records} x 16 MiB", times, copies, bench.length))
            all_copies += copies
    bare = [
        figure(one.name, [copy[which] * one.length for copy in all_copies], all_copies, one.length)
        for which, one in enumerate(memcpys)
    ]
    return bare + figures


def time_in_pairs(
    prepare: Callable[[], None], work: Callable[[], None], memcpys: Sequence[Memcpy], rounds: int
) -> tuple[list[float], list[list[float]]]:
    """Seconds of ``work``, and beside each the seconds a byte of every memcpy; the first two rounds do not count."""
    times, copies = [], []
    for _ in range(rounds + 2):
        prepare()
        copies.append([memcpy.time_s() / memcpy.length for memcpy in memcpys])
        times.append(timed(work))
    return times[2:], copies[2:]


def figure(name: str, times: Sequence[float], copies: Sequence[Sequence[float]], length: int) -> Figure:
    """Medians and spread. ``copies``: seconds a byte of the memcpys, timed beside each of ``times``."""
    low, middle, high = np.percentile(times, [10, 50, 90])
    ratios = [
        statistics.median(copy[which] * length / time_s for copy, time_s in zip(copies, times, strict=True))
        for which in range(3)
    ]
    return Figure(name, middle * 1e3, low * 1e3, high * 1e3, length / middle / 1e9, *ratios)


def bench_calls(client: Client, calls: int) -> list[Latency]:
    """A batched lookup of 64 held segments, lease and release included, and one that finds nothing."""
    paged_kv, lengths = make_paged_kv(LOOKUP_SEGMENTS * BLOCK_SIZE), [1] * LOOKUP_SEGMENTS
    held, missing = make_prompt(client, lengths, 2), make_prompt(client, lengths, 3)
    client.store(held, paged_kv, torch.arange(LOOKUP_SEGMENTS))
    found = []
    for prompt, name in ((held, "64 segments, all held"), (missing, "64 segments, none held")):
        prompt.query(0)  # keys are made once a prompt
        times = []
        for _ in range(calls):
            begun_s = time.perf_counter()
            plans = client.lookup([prompt])
            times.append(time.perf_counter() - begun_s)
            plans.close()
        found.append(latency(f"lookup of {name}", times))
    return found


def bench_ways(client: Client, address: str, calls: int) -> list[Latency]:
    """The same call, a lookup of one segment that is not held, over the data socket and over gRPC, in turns."""
    stream, transport = SessionStream(address), SharedMemoryTransport(address)
    try:
        hello = wire.Hello(identities=[client.session.identity.canonical_json()])
        ways: Sequence[tuple[wire.Welcome, SharedMemoryTransport | SessionStream]] = (
            (transport.open_session(hello), transport),
            (stream.open(hello), stream),
        )
        times: tuple[list[float], list[float]] = ([], [])
        segment = wire.SegmentQuery(segment=bytes(32), accepted_contexts=[bytes(32)], tokens=1)
        prompt = wire.PromptQuery(namespace=client.namespace, segments=[segment])
        for _ in range(calls // CALLS_IN_TURN):
            for (welcome, way), taken in zip(ways, times, strict=True):
                session = wire.SessionRef(session_id=welcome.session_id, boot_epoch=welcome.boot_epoch)
                request = wire.LookupRequest(session=session, prompts=[prompt])
                taken += [timed(partial(way.call, "Lookup", request)) for _ in range(CALLS_IN_TURN)]
    finally:
        transport.close()
        stream.close()
    names = ("one call over the data socket", "one call over gRPC")
    return [latency(name, taken) for name, taken in zip(names, times, strict=True)]


def latency(name: str, times: Sequence[float]) -> Latency:
    """Median and worst of a hundred."""
    p50, p99 = np.percentile(times, [50, 99])
    return Latency(name, p50 * 1e3, p99 * 1e3, len(times))


def print_table(figures: Sequence[Figure], latencies: Sequence[Latency]) -> None:
    """For people."""
    heads = ("p50 ms", "p10-p90", "GB/s", "of 16 MiB", "of 64 MiB", "small pages")
    print(f"{'':28}{heads[0]:>8}{heads[1]:>15}{heads[2]:>7}" + "".join(f"{head:>11}" for head in heads[3:]))
    for one in figures:
        spread = f"{one.p10_ms:.2f}-{one.p90_ms:.2f}"
        ratios = (one.of_memcpy_16_mib, one.of_memcpy_64_mib, one.of_small_paged)
        print(f"{one.name:28}{one.p50_ms:8.2f}{spread:>15}{one.gb_s:7.2f}" + "".join(f"{r:11.2f}" for r in ratios))
    for call in latencies:
        print(f"{call.name:36} p50 {call.p50_ms:.3f} ms, p99 {call.p99_ms:.3f} ms ({call.calls} calls)")


def main() -> None:
    """Run, print, write ``build/bench/transport.json``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few rounds: to see that it runs")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parsed = parser.parse_args()
    rounds, calls = (5, 50) if parsed.quick else (60, 2000)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    with running_node(256 * MIB) as address, Client.connect(address, make_identity(), client_name="bench") as client:
        figures, latencies = bench_records(client, rounds), bench_calls(client, calls)
        latencies += bench_ways(client, address, calls)
    print_table(figures, latencies)
    parsed.output.parent.mkdir(parents=True, exist_ok=True)
    document = {
        "cpus": os.cpu_count(),
        "rounds": rounds,
        "figures": [asdict(one) for one in figures],
        "latencies": [asdict(one) for one in latencies],
    }
    parsed.output.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
