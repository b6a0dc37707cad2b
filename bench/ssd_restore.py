"""How much longer than reading takes it to get a cache from SSD into paged KV: looked up, verified, restored?

A node in this process; one segment of 16 or 64 MiB whose record is only on the slab. In turn: its pieces are read with
O_DIRECT into an aligned buffer by as many threads as the node has (nothing else), and it is looked up and restored to
other positions of paged KV, every layer verified, which ends when the last layer is in place. Asked: 0.9 of the raw
read's rate. Prints a table and writes build/bench/ssd_restore.json. Run: python bench/ssd_restore.py
"""

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from kvservice.app import LocalNode
from kvservice.caches import Cache
from kvservice.client import Client, PartKind, ReusePolicy, RoundPrompt
from kvservice.config import Settings
from kvservice.model.geometry import attention_geometry
from kvservice.model.identity import Identity
from kvservice.model.rope import rope_from_parameters
from kvservice.node import Node
from kvservice.storage.buffer import Bytes
from kvservice.storage.disk import block_buffer
from kvservice.storage.slab import Slab

MIB = 1 << 20
LAYERS, HEADS, HEAD_SIZE, BLOCK_SIZE = 32, 4, 128, 16
TOKEN_BYTES = LAYERS * 2 * HEADS * HEAD_SIZE * 2
THREADS = 2
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
    """A node with one stored segment, and an engine's paged KV to restore it to."""

    def __init__(self, node: LocalNode, client: Client, tokens: int) -> None:
        self.node, self.client, self.tokens = node, client, tokens
        blocks = 2 * tokens // BLOCK_SIZE
        self.paged = [
            [torch.randn((blocks, BLOCK_SIZE, HEADS, HEAD_SIZE)).bfloat16() for _ in range(2)] for _ in range(LAYERS)
        ]
        order = torch.randperm(blocks)
        self.slots = (order[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten()
        self.prompt = self._prompt(0)
        client.store(self.prompt, self.paged, self.slots[:tokens])
        self.buffer = block_buffer(tokens * TOKEN_BYTES + 2 * MIB)
        self.threads = ThreadPoolExecutor(THREADS)

    def _prompt(self, private: int) -> RoundPrompt:
        parts = [(PartKind.PRIVATE, [3] * private)] if private else []
        shared = (PartKind.SHARED, [7 + index % 1000 for index in range(self.tokens)])
        policy = ReusePolicy("none", 1)
        return RoundPrompt.from_parts(self.client.namespace, [*parts, shared], policy=policy, chunk_tokens=BLOCK_SIZE)

    def cache(self) -> Cache:
        """The segment's cache, with its record on the slab alone."""
        return self.node.on_loop(_only_cache)

    def leave_host(self) -> None:
        """Evict the host copy, once it is on the slab."""
        deadline_s = time.monotonic() + 60
        while not self.cache().is_on_ssd:
            assert time.monotonic() < deadline_s, "the record did not come to the slab"
            time.sleep(0.01)
        self.node.on_loop(lambda node: node.catalog.evict_host())
        assert not self.cache().is_on_host

    def read(self) -> None:
        """Read all pieces, nothing else."""
        slab, extent = self.node.on_loop(_slab), self.cache().ssd_extent

        def piece(bounds: tuple[int, int]) -> None:
            target: Bytes = self.buffer[bounds[0] : bounds[1]]
            slab.read_piece(extent, *bounds, target)

        list(self.threads.map(piece, slab.pieces(extent)))

    def restore(self) -> None:
        """Look it up behind a short history, and restore it there."""
        prompt = self._prompt(BLOCK_SIZE)
        with self.client.lookup([prompt]) as plans:
            assert plans.hit_tokens == self.tokens
            slots = self.slots[: prompt.token_count]
            self.client.restore(plans, self.paged, [slots], verify=False).wait()  # the node verified every layer


def _only_cache(node: Node) -> Cache:
    families = (family for space in node.catalog.spaces.values() for family in space.families.values())
    (cache,) = (cache for family in families for cache in family.members.values())
    return cache


def _slab(node: Node) -> Slab:
    assert node.ssd is not None
    return node.ssd.slab


def timed(work: Callable[[], object]) -> float:
    """Seconds that ``work`` takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def measure(record_mib: int, rounds: int, folder: Path) -> Figure:
    """One size."""
    tokens = record_mib * MIB // TOKEN_BYTES // BLOCK_SIZE * BLOCK_SIZE
    settings = Settings(
        socket=str(folder / "k.sock"), grpc_port=-1, http_port=-1, host_bytes=4 * record_mib * MIB,
        ssd_folder=str(folder / "ssd"), ssd_bytes=4 * record_mib * MIB, ssd_free_floor_bytes=0, scrub_bytes_per_s=0,
        ssd_threads=THREADS,
    )  # fmt: skip
    with LocalNode(settings) as node, Client.in_process(node, make_identity()) as client:
        bench, pairs = Bench(node, client, tokens), list[tuple[float, float]]()
        for _ in range(rounds + 1):
            bench.leave_host()
            pairs.append((timed(bench.read), timed(bench.restore)))
    return make_figure(record_mib, tokens * TOKEN_BYTES, pairs[1:])  # the first compiles


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
