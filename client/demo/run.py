"""`kvservice demo`: one round of agents, stored once and restored exactly, with what it saves and what it costs."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from kvservice.client.client import Client
from kvservice.client.demo.measure import Closeness, closeness
from kvservice.client.demo.report import print_report
from kvservice.client.demo.round import Round
from kvservice.client.demo.service_process import ServiceProcess
from kvservice.client.demo.world import load_world
from kvservice.client.rounds import PartKind

HOST_BYTES = 1 << 30
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """What the command line asks for. ``ratio``: share of the shared rows that is refreshed."""

    agents: int
    ratio: float
    is_tiny: bool
    output: Path
    cache: Path

    @property
    def selector(self) -> str:
        """The selector whose KV is stored."""
        return f"hkvd:{self.ratio:g}"


@dataclass(slots=True)
class Steps:
    """Says what is being done, and keeps how long each step took, in seconds."""

    console: Console
    seconds: dict[str, float]

    def run(self, name: str, work: Callable[[], T]) -> T:
        """Do one step."""
        began = time.perf_counter()
        with self.console.status(f"{name} ..."):
            result = work()
        self.seconds[name] = time.perf_counter() - began
        self.console.print(f"[green]✓[/] {name} [dim]{self.seconds[name]:.1f} s[/]")
        return result


def run_demo(settings: DemoSettings) -> int:
    """Run it, print the report, write the file. Exit status 1 if a single restored bit differs."""
    steps = Steps(Console(), {})
    with ServiceProcess(HOST_BYTES) as service:
        world = steps.run(
            "load the model", lambda: load_world(settings.cache, settings.agents, is_tiny=settings.is_tiny)
        )
        identities = (world.identity, world.producers_identity)
        with Client.connect(service.address, *identities, client_name="demo") as client:
            facts = play(Round(world, client, settings.selector), settings, steps)
    facts["seconds"] = steps.seconds
    settings.output.parent.mkdir(parents=True, exist_ok=True)
    settings.output.write_text(json.dumps(facts, indent=2) + "\n")
    print_report(steps.console, facts, settings.output)
    return 0 if facts["exact"] and facts["agreement_reuse_restored"] == 1.0 else 1


def play(game: Round, settings: DemoSettings, steps: Steps) -> dict[str, object]:
    """All phases; returns what `build/demo.json` holds."""
    steps.run("round 1: every agent reads its history and speaks", game.write_outputs)
    game.make_prompts()
    steps.run("round 2: the leader computes the shared run in full", game.lead)
    steps.run("prefill every prompt in full, to compare with", game.compute_references)
    others = steps.run("try other selectors and sources", lambda: _alternatives(game))
    steps.run("round 2: the others restore it, refresh and store mirrors", game.follow)
    reuse = steps.run("compare next tokens", game.closeness_as_stored)
    before = [game.continue_reader(index) for index in range(len(game.readers))]
    snapshot = game.snapshot()
    game.drop_engine()
    speed = steps.run("drop everything from the engine and restore it", game.restore_all)
    is_exact = game.is_exact(snapshot)
    pairs = zip(before, map(game.continue_reader, range(len(game.readers))), strict=True)
    after = Closeness.mean([closeness(one, other) for one, other in pairs])
    return {
        **_counts(game, settings),
        **_sizes(game),
        "restore_gb_s": speed.restore_gb_s,
        "memcpy_gb_s": speed.memcpy_gb_s,
        "restore_over_memcpy": speed.ratio,
        "exact": is_exact,
        "agreement_full": reuse.agreement,
        "kl_full": reuse.kl,
        "agreement_reuse_restored": after.agreement,
        "quality": {name: {"kl": one.kl, "agreement": one.agreement} for name, one in others.items()},
        "stats": game.client.stats(),
    }


def _alternatives(game: Round) -> dict[str, Closeness]:
    found = {name: game.closeness_of(name) for name in ("none", "hkvd:0.02", "hkvd:0.05", "hkvd:0.15")}
    for name in ("none", "hkvd:0.02", "hkvd:0.15"):
        found[f"{name} from the producers' own caches"] = game.closeness_of(name, from_producers=True)
    return found


def _counts(game: Round, settings: DemoSettings) -> dict[str, object]:
    return {
        "model": game.world.model_name,
        "agents": len(game.readers),
        "prompt_tokens": [reader.count for reader in game.readers],
        "history_tokens": [agent.history.numel() for agent in game.world.agents],
        "shared_tokens": sum(segment.numel() for segment in game.segments),
        "selector": settings.selector,
        "ratio": settings.ratio,
        "leader": game.leader,
    }


def _sizes(game: Round) -> dict[str, object]:
    """Bytes of the second round: what N dense copies would take, and what is stored."""
    dense_of = _dense_bytes(game)
    stored = [(reader, one) for reader, one in game.stored_segments() if one.record_bytes]
    shared = [(reader, one) for reader, one in stored if _kind(game, reader, one.index) is PartKind.SHARED]
    mirrors = [(dense_of(reader, one.index), one.record_bytes) for reader, one in game.mirrors()]
    dense = sum(reader.count for reader in game.readers) * game.token_bytes
    dense_shared = sum(segment.numel() for segment in game.segments) * game.token_bytes * len(game.readers)
    total = game.history_bytes + sum(one.record_bytes for _, one in stored)
    return {
        "bytes_dense": dense,
        "bytes_stored": total,
        "mirrors": len(mirrors),
        # Over sums: the refreshed rows gather in some segments, and a mean of ratios would flatter the empty mirrors.
        "mirror_ratio": sum(dense for dense, _ in mirrors) / sum(stored for _, stored in mirrors),
        "mirror_ratio_smallest": min(dense / record for dense, record in mirrors),
        "shared_ratio": dense_shared / sum(one.record_bytes for _, one in shared),
        "round_ratio": dense / total,
    }


def _kind(game: Round, reader: int, index: int) -> PartKind:
    return game.readers[reader].prompt.segments[index].kind


def _dense_bytes(game: Round) -> Callable[[int, int], int]:
    return lambda reader, index: len(game.readers[reader].prompt.segments[index].tokens) * game.token_bytes
