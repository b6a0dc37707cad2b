"""How long does a record take over a slow link, and how long if its rows go as 8 bits?

Two nodes in processes of their own, a sidecar and a shared node, and a client at the sidecar with two identities that
differ in ``lossy`` only. Between the nodes lies a proxy that lets so many bytes a second through in each direction
(tests/peers/far_link.py). In turns an exact and a lossy record are looked up, brought and restored; which way each
comes is the node's own choice, by what it measured, after a warm-up of some seconds. ``cpu``: of both nodes, seconds a
GB of records, summed over all rounds. Medians and quartiles; writes build/bench/slow_links.json.
Run: python bench/slow_links.py
"""

import argparse
import gc
import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bench.first_layer import (
    BLOCK_SIZE,
    FOLDER,
    HEAD_SIZE,
    HEADS,
    LAYERS,
    LOCALHOST,
    MIB,
    TOKEN_BYTES,
    Spread,
    far_away,
    free_port,
    make_identity,
    node,
    spread,
)
from kvservice.client import Client, PartKind, ReusePolicy, RoundPrompt
from kvservice.model.cache import Tier
from kvservice.model.identity import INT8, Identity

RESULT = FOLDER / "slow_links.json"
DELAY_MS = 0.1
WARM_S = 12.0
"""More than the hysteresis of a choice."""
LINKS_MBIT = [100.0, 1000.0, 3000.0, 10000.0]
PUSHED_S_MAX = 120.0
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Figure:
    """One link, in ms. ``of_exact``: a lossy record's time over the exact one's right before it."""

    mbit_per_s: float
    record_mib: int
    exact: Spread
    lossy: Spread
    of_exact: Spread
    exact_ways: dict[str, int]
    lossy_ways: dict[str, int]
    wire_share: float
    exact_cpu: float
    lossy_cpu: float


class Segments:
    """Two segments of one identity at the shared node, of which the sidecar never holds the one that is asked for."""

    def __init__(self, client: Client, identity: Identity, tokens: int) -> None:
        self.client = client
        blocks = 2 * tokens // BLOCK_SIZE
        self.paged = [
            [torch.randn((blocks, BLOCK_SIZE, HEADS, HEAD_SIZE)).bfloat16() for _ in range(2)] for _ in range(LAYERS)
        ]
        self.slots = torch.randperm(blocks * BLOCK_SIZE)[:tokens]
        self.prompts = [self._prompt(identity, tokens, number) for number in range(2)]

    def _prompt(self, identity: Identity, tokens: int, number: int) -> RoundPrompt:
        part = (PartKind.SHARED, [7 + (index + number) % 1000 for index in range(tokens)])
        return RoundPrompt.from_parts(
            identity.namespace(), [part], policy=ReusePolicy("none", 1), chunk_tokens=BLOCK_SIZE
        )

    def give(self) -> None:
        """Store both, one after the other: the sidecar has room for one and a half."""
        for prompt in self.prompts:
            before = stat(self.client, "pushes")["stored"]
            self.client.store(prompt, self.paged, self.slots)
            deadline_s = time.monotonic() + PUSHED_S_MAX
            while stat(self.client, "pushes")["stored"] == before:
                assert time.monotonic() < deadline_s, "the record did not come to the shared node"
                time.sleep(0.01)

    def bring(self, number: int) -> float:
        """Seconds from the beginning of a lookup until all is restored."""
        began_s = time.perf_counter()
        with self.client.lookup([self.prompts[number]]) as plans:
            ((_, planned),) = plans[0].hits
            assert planned.record is not None
            assert planned.record.tier is Tier.REMOTE, planned.record.tier
            self.client.restore(plans, self.paged, [self.slots]).wait()
        return time.perf_counter() - began_s


def stat(client: Client, part: str) -> dict[str, Any]:
    """A part of the sidecar's stats."""
    found: Any = client.stats()[part]
    return dict(found)


def nodes_cpu_s(folder: Path) -> float:
    """Seconds of CPU that the nodes of this run took so far."""
    total = 0.0
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if str(folder).encode() in (path / "cmdline").read_bytes():
                fields = (path / "stat").read_text().rpartition(")")[2].split()
                total += TICK_S * (int(fields[11]) + int(fields[12]))
        except (FileNotFoundError, ProcessLookupError):  # it ended just now
            continue
    return total


def ways(client: Client) -> Counter[str]:
    """Transfers by medium."""
    return Counter({medium: one["choices"] for medium, one in stat(client, "network")["media"].items()})


def measure(mbit_per_s: float, record_mib: int, rounds: int, folder: Path) -> Figure:
    """One link."""
    tokens = record_mib * MIB // TOKEN_BYTES // BLOCK_SIZE * BLOCK_SIZE
    exact, port = make_identity(), free_port()
    lossy = replace(exact, lossy=INT8)
    small, large = record_mib * 3 // 2 * MIB, record_mib * 8 * MIB
    flags = ["--shares-memory", "False", "--host-bytes"]
    with (
        node(folder, "shared", "--peer-port", str(port), *flags, str(large)),
        far_away(port, DELAY_MS, mbit_per_s * 125e3) as slow_port,
        node(folder, "sidecar", "--shared", f"{LOCALHOST}:{slow_port}", *flags, str(small)) as address,
        Client.connect(address, exact, lossy) as client,
    ):
        both = [Segments(client, identity, tokens) for identity in (exact, lossy)]
        for one in both:
            one.give()
        warm_s = time.monotonic() + WARM_S
        while time.monotonic() < warm_s:
            for number in range(2):
                for one in both:
                    one.bring(number)
        gc.freeze()
        return figure(mbit_per_s, record_mib, tokens * TOKEN_BYTES, both, rounds, folder)


def figure(
    mbit_per_s: float, record_mib: int, record_bytes: int, both: list[Segments], rounds: int, folder: Path
) -> Figure:
    """Rounds of one of each."""
    client = both[0].client
    seconds: list[list[float]] = [[], []]
    cpu_s, came = [0.0, 0.0], [Counter[str](), Counter[str]()]
    packed = stat(client, "network")
    for number in range(rounds):
        for kind, one in enumerate(both):
            before_s, before = nodes_cpu_s(folder), ways(client)
            seconds[kind].append(one.bring(number % 2))
            cpu_s[kind] += nodes_cpu_s(folder) - before_s
            came[kind] += ways(client) - before
    after, moved = stat(client, "network"), rounds * record_bytes
    names = ("packed_bytes", "packed_wire_bytes")
    dense, wire = (after[name] - packed[name] for name in names)
    return Figure(
        mbit_per_s=mbit_per_s,
        record_mib=record_mib,
        exact=spread(seconds[0], 1e3),
        lossy=spread(seconds[1], 1e3),
        of_exact=spread([two / one for one, two in zip(*seconds, strict=True)]),
        exact_ways=dict(came[0]),
        lossy_ways=dict(came[1]),
        wire_share=round((moved - dense + wire) / moved, 3),
        exact_cpu=round(cpu_s[0] / moved * 1e9, 2),
        lossy_cpu=round(cpu_s[1] / moved * 1e9, 2),
    )


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--mbit", type=float, nargs="+", default=LINKS_MBIT, help="of the link, a second")
    parser.add_argument("--mib", type=int, default=16, help="of a record")
    parser.add_argument("--rounds", type=int, default=16)
    asked = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    figures = []
    for mbit_per_s in asked.mbit:
        folder = Path(tempfile.mkdtemp(dir=FOLDER)).absolute()
        try:
            figures.append(measure(mbit_per_s, asked.mib, asked.rounds, folder))
        finally:
            shutil.rmtree(folder)
        show(figures[-1])
    said = {"rounds": asked.rounds, "figures": [asdict(one) for one in figures]}
    RESULT.write_text(json.dumps(said, indent=2) + "\n")
    return 0


def show(one: Figure) -> None:
    """Print it."""
    print(f"{one.record_mib} MiB over {one.mbit_per_s:g} Mbit/s; ms, median (quartiles)")
    for name in ("exact", "lossy", "of_exact"):
        found: Spread = getattr(one, name)
        print(f"  {name:9s} {found.median:9.3f}  ({found.p25:.3f}-{found.p75:.3f})")
    print(f"  exact over {one.exact_ways}, lossy over {one.lossy_ways}; of a lossy record's bytes {one.wire_share}")
    print(f"  CPU of both nodes: exact {one.exact_cpu} s a GB, lossy {one.lossy_cpu}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
