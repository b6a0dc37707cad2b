"""How much longer than reading takes it to get a cache from SSD into paged KV: looked up, verified, restored?

The node is a process of its own. Its memory holds one record and a half, so that of two segments of 16 or 64 MiB, each
looked up in turn, the one that is asked for is on its slab alone. Before each, as many bytes of the slab's file are
read with O_DIRECT into an aligned buffer by as many threads as the node has (nothing else). A restore ends when the
last layer is in place, at other positions than it was stored for, every layer verified by the node. Asked: 0.9 of the
raw read's rate. Prints a table and writes build/bench/ssd_restore.json. Run: python bench/ssd_restore.py
"""

import argparse
import gc
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from kvservice.client import Client, PartKind, ReusePolicy, RoundPrompt
from kvservice.config import process_environment
from kvservice.model.cache import Tier
from kvservice.model.geometry import attention_geometry
from kvservice.model.identity import Identity
from kvservice.model.rope import rope_from_parameters
from kvservice.storage.disk import block_buffer
from kvservice.storage.slab import SLAB_NAME

MIB, BLOCK_BYTES = 1 << 20, 4096
LAYERS, HEADS, HEAD_SIZE, BLOCK_SIZE = 32, 4, 128, 16
TOKEN_BYTES = LAYERS * 2 * HEADS * HEAD_SIZE * 2
THREADS = 2
PIECE_BYTES, START_TIMEOUT_S = 2 * MIB, 60.0
FOLDER, RESULT = Path("build/bench"), Path("build/bench/ssd_restore.json")


@dataclass(frozen=True, slots=True)
class Figure:
    """One size. ``of_read``: the raw read's time over the restore's, median and quartiles of neighbouring pairs."""

    record_mib: int
    read_ms: float
    restore_ms: float
    restore_gb_s: float
    of_read: float
    of_read_p25: float
    of_read_p75: float


class Bench:
    """Two stored segments, and an engine's paged KV to restore them to."""

    def __init__(self, client: Client, slab: Path, tokens: int) -> None:
        self.client, self.tokens = client, tokens
        blocks = 2 * tokens // BLOCK_SIZE
        self.paged = [
            [torch.randn((blocks, BLOCK_SIZE, HEADS, HEAD_SIZE)).bfloat16() for _ in range(2)] for _ in range(LAYERS)
        ]
        order = torch.randperm(blocks)
        self.slots = (order[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten()
        for number in range(2):
            client.store(self._prompt(number), self.paged, self.slots[:tokens])
            self._await_ssd(number + 1)
        self.shifted = [self._prompt(number, BLOCK_SIZE) for number in range(2)]
        self.buffer = block_buffer(tokens * TOKEN_BYTES)
        self.file = os.open(slab, os.O_RDONLY | os.O_DIRECT)
        self.threads = ThreadPoolExecutor(THREADS)

    def close(self) -> None:
        """End the threads."""
        self.threads.shutdown()
        os.close(self.file)

    def _prompt(self, number: int, private: int = 0) -> RoundPrompt:
        parts = [(PartKind.PRIVATE, [3] * private)] if private else []
        shared = (PartKind.SHARED, [7 + (index + number) % 1000 for index in range(self.tokens)])
        policy = ReusePolicy("none", 1)
        return RoundPrompt.from_parts(self.client.namespace, [*parts, shared], policy=policy, chunk_tokens=BLOCK_SIZE)

    def _await_ssd(self, caches: int) -> None:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while True:
            tier = self.client.stats()["ssd"]
            if isinstance(tier, dict) and tier["caches"] == caches:
                return
            assert time.monotonic() < deadline_s, "the record did not come to the slab"
            time.sleep(0.01)

    def read(self) -> None:
        """Read as many bytes as a record has, nothing else."""

        def piece(start: int) -> None:
            os.preadv(self.file, [self.buffer[start : start + PIECE_BYTES].data], BLOCK_BYTES + start)

        list(self.threads.map(piece, range(0, len(self.buffer), PIECE_BYTES)))

    def restore(self, number: int) -> None:
        """Look it up behind a short history, and restore it there."""
        prompt = self.shifted[number]
        with self.client.lookup([prompt]) as plans:
            (_, planned), *more = plans[0].hits
            assert not more
            assert planned.record is not None
            assert planned.record.tier is Tier.SSD
            slots = self.slots[: prompt.token_count]
            self.client.restore(plans, self.paged, [slots], verify=False).wait()  # the node verified every layer


@contextmanager
def running_node(folder: Path, record_mib: int) -> Iterator[str]:
    """A node of its own; its address."""
    command = [
        sys.executable,
        "-m",
        "kvservice",
        "serve",
        "--socket",
        str(folder / "k.sock"),
        "--grpc-port",
        "-1",
        "--log-level",
        "WARNING",
    ]
    command += ["--http-port", "-1", "--host-bytes", str(record_mib * 3 // 2 * MIB), "--staging-bytes", "0"]
    command += ["--ssd-folder", str(folder / "ssd"), "--ssd-bytes", str(4 * record_mib * MIB)]
    command += ["--ssd-free-floor-bytes", "0", "--scrub-bytes-per-s", "0", "--ssd-threads", str(THREADS)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=process_environment())
    assert process.stdout is not None
    try:
        if "unix:" not in process.stdout.readline():
            raise SystemExit("the node did not start")
        yield f"unix:{folder}/k.sock"
    finally:
        process.terminate()
        process.wait(START_TIMEOUT_S)
        process.stdout.close()


def timed(work: Callable[[], object]) -> float:
    """Seconds that ``work`` takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def measure(record_mib: int, rounds: int, folder: Path) -> Figure:
    """One size."""
    tokens = record_mib * MIB // TOKEN_BYTES // BLOCK_SIZE * BLOCK_SIZE
    with running_node(folder, record_mib) as address, Client.connect(address, make_identity()) as client:
        bench, pairs = Bench(client, folder / "ssd" / SLAB_NAME, tokens), list[tuple[float, float]]()
        for number in range(rounds + 2):
            pairs.append((timed(bench.read), timed(partial(bench.restore, number % 2))))
            if number == 1:
                gc.freeze()  # as engines do once they have started
        bench.close()
    return make_figure(record_mib, tokens * TOKEN_BYTES, pairs[2:])  # the first compiles


def make_identity() -> Identity:
    """A model of 128 KiB a token."""
    geometry = attention_geometry(layers=LAYERS, heads=HEADS, head_size=HEAD_SIZE, dtype="bfloat16")
    rope = rope_from_parameters({"rope_theta": 1e6}, head_size=HEAD_SIZE, max_positions=1 << 20)
    return Identity("bench", "model", "r1", geometry, (rope,) * LAYERS)


def make_figure(record_mib: int, size: int, pairs: list[tuple[float, float]]) -> Figure:
    """Medians over neighbouring pairs of (read, restore) seconds."""
    ratios = sorted(read / restore for read, restore in pairs)
    low, middle, high = statistics.quantiles(ratios, n=4)
    read_s, restore_s = (statistics.median(times) for times in zip(*pairs, strict=True))
    rounded = [round(one, 3) for one in (middle, low, high)]
    return Figure(
        record_mib, round(read_s * 1e3, 2), round(restore_s * 1e3, 2), round(size / restore_s / 1e9, 2), *rounded
    )


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=40)
    rounds = parser.parse_args().rounds
    FOLDER.mkdir(parents=True, exist_ok=True)
    figures = []
    print("record    raw read   to paged KV   GB/s   of the raw read (quartiles)")
    for record_mib in (16, 64):
        folder = Path(tempfile.mkdtemp(dir=FOLDER))
        try:
            one = measure(record_mib, rounds, folder)
        finally:
            shutil.rmtree(folder)
        figures.append(one)
        print(
            f"{one.record_mib:3d} MiB   {one.read_ms:6.1f} ms   {one.restore_ms:8.1f} ms   {one.restore_gb_s:5.2f}   "
            f"{one.of_read:.2f} ({one.of_read_p25:.2f}-{one.of_read_p75:.2f})"
        )
    RESULT.write_text(json.dumps({"rounds": rounds, "figures": [asdict(one) for one in figures]}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
