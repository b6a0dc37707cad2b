"""What does the order of eviction cost per key, and how many seconds of prefill does it save over plain LRU?

First cost: microseconds and bytes a key, each order and size in a process of its own. Then a replay of a synthetic
multi-agent trace against caches of several sizes: rounds of agents over shared chains (Zipf over families, half of
them change rank midway), conversations that grow on top of them, one-off scans. A segment helps only where every
segment before it is there too. Prints tables and writes build/bench/eviction.json. Run: python bench/eviction.py
"""

import argparse
import gc
import json
import random
import subprocess
import sys
import time
from bisect import bisect
from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate
from pathlib import Path
from typing import Any

from kvservice.storage.eviction import EvictionOrder, LruOrder, ValueOrder, Worth

ORDERS: dict[str, type[LruOrder[Any]] | type[ValueOrder[Any]]] = {"lru": LruOrder, "value": ValueOrder}
KEYS = (10_000, 1_000_000)
EVICTIONS = 200_000
PARTS = (0.05, 0.1, 0.2, 0.35, 0.5)
SEEDS = (1, 2, 3)
RESULT = Path("build/bench/eviction.json")

REQUESTS, FAMILIES, SESSIONS = 12_000, 300, 400
SHARE_OF_SCANS, SHARE_OF_ROUNDS, SHARE_OF_ENDS = 0.05, 0.45, 0.15
SEGMENT_TOKENS = 256
LOAD_BYTES_PER_S = 20e9
ATTENTION_EQUALS_REST_AT = 30_000  # tokens before a token, from where on its attention costs more than all the rest
MIRROR_BYTES = 0.08  # of its master's
NOISE = 0.1  # of measured seconds
MODELS = (
    (131_072, 60e-6),  # bytes and prefill seconds a token: 8B, grouped queries
    (327_680, 500e-6),  # 70B, grouped queries
    (70_272, 400e-6),  # latent attention
)


@dataclass(slots=True, eq=False)
class Piece:
    """A group of a chain: the master of one segment and its mirrors. ``seconds``: all that restoring it saves."""

    bytes: int
    seconds: float
    seconds_level: float
    position: int
    uses: int = 0

    def worth(self) -> Worth:
        """As a catalog says it: what grows with position is left out."""
        return Worth(self.seconds_level, self.bytes, self.uses, self.position)


Chain = list[Piece]


def make_piece(rng: random.Random, model: tuple[int, float], position: int, agents: int) -> Piece:
    """One group of ``agents`` caches."""
    token_bytes, token_s = model
    token_s *= rng.uniform(1 - NOISE, 1 + NOISE)
    dense = SEGMENT_TOKENS * token_bytes
    level = SEGMENT_TOKENS * token_s - dense / LOAD_BYTES_PER_S
    attention = SEGMENT_TOKENS * token_s * position / ATTENTION_EQUALS_REST_AT
    size = int(dense * (1 + MIRROR_BYTES * (agents - 1)))
    return Piece(size, agents * (level + attention), agents * level, position)


class Workload:
    """Makes requests, each a chain whose last pieces may be new."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.models = [self.rng.choice(MODELS) for _ in range(FAMILIES)]
        self.agents = [self.rng.choice((1, 4, 8)) for _ in range(FAMILIES)]
        self.shared: list[Chain] = [
            self.extend([], family, self.rng.randint(4, 24), self.agents[family]) for family in range(FAMILIES)
        ]
        self.by_rank = self.rng.sample(range(FAMILIES), FAMILIES)
        self.weights = list(accumulate(1 / (rank + 1) ** 0.9 for rank in range(FAMILIES)))
        self.sessions: list[tuple[int, Chain]] = []

    def extend(self, chain: Chain, family: int, count: int, agents: int = 1) -> Chain:
        """The chain and ``count`` new pieces behind it."""
        start = len(chain) * SEGMENT_TOKENS
        ends = range(start, start + count * SEGMENT_TOKENS, SEGMENT_TOKENS)
        return chain + [make_piece(self.rng, self.models[family], position, agents) for position in ends]

    def pick_family(self) -> int:
        """By its rank, Zipf."""
        return self.by_rank[bisect(self.weights, self.rng.random() * self.weights[-1])]

    def change_ranks(self) -> None:
        """Half of the families change places."""
        places = self.rng.sample(range(FAMILIES), FAMILIES // 2)
        moved = [self.by_rank[place] for place in places]
        self.rng.shuffle(moved)
        for place, family in zip(places, moved, strict=True):
            self.by_rank[place] = family

    def next_request(self) -> Chain:
        """A scan, a round over a family's shared chain, or the next turn of a conversation."""
        kind = self.rng.random()
        if kind < SHARE_OF_SCANS:
            return self.extend([], self.rng.randrange(FAMILIES), self.rng.randint(20, 60))
        if kind < SHARE_OF_SCANS + SHARE_OF_ROUNDS:
            return self.shared[self.pick_family()]
        if len(self.sessions) < SESSIONS:
            family = self.pick_family()
            self.sessions.append((family, self.shared[family]))
        place = self.rng.randrange(len(self.sessions))
        family, chain = self.sessions[place]
        chain = self.extend(chain, family, self.rng.randint(1, 4))
        self.sessions[place] = (family, chain)
        if self.rng.random() < SHARE_OF_ENDS:
            self.sessions[place] = self.sessions[-1]
            self.sessions.pop()
        return chain

    def requests(self) -> list[Chain]:
        """The whole trace."""
        chains = []
        for number in range(REQUESTS):
            if number == REQUESTS // 2:
                self.change_ranks()
            chains.append(self.next_request())
        return chains


@dataclass(slots=True)
class Score:
    """What a cache saved of what was asked for."""

    seconds: float = 0.0
    seconds_asked: float = 0.0
    bytes: int = 0
    bytes_asked: int = 0
    orphan_bytes: int = 0
    seen_bytes: int = 0

    def ask(self, chain: Chain) -> None:
        """Count a request."""
        self.seconds_asked += sum(piece.seconds for piece in chain)
        self.bytes_asked += sum(piece.bytes for piece in chain)

    def hit(self, pieces: Iterable[Piece]) -> None:
        """Count what was there."""
        for piece in pieces:
            self.seconds += piece.seconds
            self.bytes += piece.bytes

    def note_orphans(self, chain: Chain, found: int, held: set[Piece]) -> None:
        """Count what is there of a chain, and how much of that lies behind a gap."""
        self.seen_bytes += sum(piece.bytes for piece in chain if piece in held)
        self.orphan_bytes += sum(piece.bytes for piece in chain[found:] if piece in held)

    def figures(self) -> dict[str, float]:
        """Ratios."""
        return {
            "seconds_saved": round(self.seconds, 1),
            "seconds_ratio": round(self.seconds / self.seconds_asked, 4),
            "byte_hit_ratio": round(self.bytes / self.bytes_asked, 4),
            "orphan_ratio": round(self.orphan_bytes / max(1, self.seen_bytes), 4),
        }


def present_prefix(chain: Chain, held: set[Piece]) -> int:
    """How many pieces from the start are there."""
    return next((at for at, piece in enumerate(chain) if piece not in held), len(chain))


def replay(chains: list[Chain], capacity: int, order: EvictionOrder[Piece]) -> Score:
    """As a node works: what is found is held until the rest was computed and stored, then it comes back as used."""
    score, held, used = Score(), set[Piece](), 0
    for chain in chains:
        score.ask(chain)
        found = present_prefix(chain, held)
        score.hit(chain[:found])
        score.note_orphans(chain, found, held)
        missing = [piece for piece in chain[found:] if piece not in held]
        for piece in chain[:found]:
            order.remove(piece)
            piece.uses += 1
        used += sum(piece.bytes for piece in missing)
        while used > capacity and (gone := order.pop()) is not None:
            held.remove(gone)
            used -= gone.bytes
        for piece in missing:
            piece.uses = 1
            held.add(piece)
        for piece in chain[:found] + missing:
            order.add(piece, piece.worth())
    return score


def replay_belady(chains: list[Chain], capacity: int) -> Score:
    """Knows the future: keeps what is used soonest, stores nothing that comes later than all it holds.

    An upper bound in practice, not a proof: sizes differ, and pieces count without those before them.
    """
    uses: dict[Piece, list[int]] = {}
    for number in range(len(chains) - 1, -1, -1):
        for piece in chains[number]:
            uses.setdefault(piece, []).append(number)
    score, held, used = Score(), dict[Piece, int](), 0
    farthest: list[tuple[int, int, Piece]] = []
    for chain in chains:
        score.ask(chain)
        score.hit(piece for piece in chain if piece in held)
        for piece in chain:
            uses[piece].pop()
            used -= piece.bytes * (held.pop(piece, None) is not None)
            if uses[piece]:
                held[piece] = uses[piece][-1]
                used += piece.bytes
                heappush(farthest, (-uses[piece][-1], id(piece), piece))
        while used > capacity:
            later, _, piece = heappop(farthest)
            if held.get(piece) == -later:
                del held[piece]
                used -= piece.bytes
    return score


def compare(seed: int) -> dict[str, dict[str, dict[str, float]]]:
    """Size of the cache -> way -> figures, for one trace."""
    chains = Workload(seed).requests()
    footprint = sum(piece.bytes for piece in {piece for chain in chains for piece in chain})
    results: dict[str, dict[str, dict[str, float]]] = {}
    for part in PARTS:
        capacity = int(footprint * part)
        ways = {name: replay(chains, capacity, make()).figures() for name, make in ORDERS.items()}
        results[f"{part:.0%}"] = ways | {"belady": replay_belady(chains, capacity).figures()}
    return results


class Key:
    """As large as nothing: only the order is measured."""

    __slots__ = ()


def resident_bytes() -> int:
    """Memory of this process, pages in use."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def measure(name: str, count: int) -> dict[str, Any]:
    """One order with ``count`` keys: add them, use each once in the order stored and once at random, evict."""
    rng = random.Random(4)
    some = [make_piece(rng, rng.choice(MODELS), rng.randrange(100) * SEGMENT_TOKENS, 1) for _ in range(1000)]
    worths = [Worth(piece.seconds_level, piece.bytes, rng.randint(1, 4), piece.position) for piece in some]
    keys = [Key() for _ in range(count)]
    shuffled = rng.sample(keys, count)
    gc.collect()
    before, order = resident_bytes(), ORDERS[name]()
    result: dict[str, Any] = {"order": name, "keys": count}
    started = time.perf_counter()
    for number, key in enumerate(keys):
        order.add(key, worths[number % 1000])
    result["add_us"] = since(started, count)
    result["bytes_per_key"] = round((resident_bytes() - before) / count)
    for pattern, chosen in (("in_turn", keys), ("random", shuffled)):
        result[f"use_{pattern}_us"] = measure_uses(order, chosen, worths)
    result["bytes_per_key_used"] = round((resident_bytes() - before) / count)
    started = time.perf_counter()
    for number in range(EVICTIONS):
        gone = order.pop()
        assert gone is not None, "as many come as go"
        order.add(gone, worths[number % 1000])
    result["evict_and_add_us"] = since(started, EVICTIONS)
    return result | measure_pauses(order, shuffled, worths)


def measure_uses(order: EvictionOrder[Key], keys: list[Key], worths: list[Worth]) -> float:
    """Microseconds to take each key out and add it again."""
    started = time.perf_counter()
    for number, key in enumerate(keys):
        order.remove(key)
        order.add(key, worths[number % 1000])
    return since(started, len(keys))


def measure_pauses(order: EvictionOrder[Key], keys: list[Key], worths: list[Worth]) -> dict[str, float]:
    """The slowest of many uses, each timed: the one that compacts."""
    slowest = 0.0
    for number, key in enumerate(keys):
        started = time.perf_counter()
        order.remove(key)
        order.add(key, worths[number % 1000])
        slowest = max(slowest, time.perf_counter() - started)
    return {"slowest_use_ms": round(slowest * 1e3, 2)}


def since(started: float, count: int) -> float:
    """Microseconds each of ``count`` took."""
    return round((time.perf_counter() - started) / count * 1e6, 2)


def measure_elsewhere(name: str, count: int) -> Any:
    """In a fresh process."""
    command = [sys.executable, __file__, "--order", name, "--keys", str(count)]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def report(costs: list[Any], traces: dict[int, Any]) -> None:
    """Tables and file."""
    print("us per operation (use: remove and add); bytes a key fresh / after use; ms of the slowest use")
    print("order   keys      add    use in turn  use random  evict+add  bytes       slowest")
    for one in costs:
        print(
            f"{one['order']:<7} {one['keys']:<9} {one['add_us']:<6} {one['use_in_turn_us']:<12} "
            f"{one['use_random_us']:<11} {one['evict_and_add_us']:<10} "
            f"{one['bytes_per_key']:>4} / {one['bytes_per_key_used']:<5}{one['slowest_use_ms']}"
        )
    print("\nreplay: share of the prefill seconds saved / byte hit ratio / bytes there without their prefix")
    print("seed  cache  lru                   value                 belady (bound)")
    for seed, parts in traces.items():
        for part, ways in parts.items():
            cells = (
                f"{one['seconds_ratio']:.3f} / {one['byte_hit_ratio']:.3f} / {one['orphan_ratio']:.4f}"
                for one in ways.values()
            )
            print(f"{seed:<5} {part:<6} {'  '.join(cells)}")
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(json.dumps({"costs": costs, "replay": traces}, indent=1) + "\n")


def main() -> None:
    """Without arguments: everything. With them: the cost of one order, as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--order", choices=ORDERS)
    parser.add_argument("--keys", type=int, default=KEYS[0])
    options = parser.parse_args()
    if options.order:
        print(json.dumps(measure(options.order, options.keys)))
    else:
        costs = [measure_elsewhere(name, count) for count in KEYS for name in ORDERS]
        report(costs, {seed: compare(seed) for seed in SEEDS})


if __name__ == "__main__":
    main()
