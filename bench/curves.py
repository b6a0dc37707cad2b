"""What do miss-ratio curves cost: on a lookup, and behind it?

Lookups of 64 segments that are all found, or all missed, over a cache of many segments, with curves and without, in
turn; the events are taken in between lookups and timed apart. Prints a table and writes build/bench/curves.json.
Run: python bench/curves.py; with --short only a few rounds, to see that it runs.
"""

import argparse
import asyncio
import gc
import json
import random
import statistics
import time
from hashlib import blake2b
from pathlib import Path
from typing import Any

from kvservice.caches import Space, VerifiedRecord
from kvservice.calls import CacheCalls
from kvservice.curves.bounds import CurveLimits
from kvservice.curves.scopes import Curves
from kvservice.limits import NodeLimits
from kvservice.model.cache import CacheMeta, Extent
from kvservice.model.geometry import attention_geometry
from kvservice.model.identity import Identity
from kvservice.model.rope import rope_from_parameters
from kvservice.model.segment import CacheKey, ContextId, SegmentId
from kvservice.node import Node
from kvservice.orders import LOAD_RATES
from kvservice.storage.arena import Arena
from kvservice.storage.eviction import ValueOrder
from kvservice.storage.host_tier import HostTier
from kvservice.wire.v1 import cache_pb2 as wire

CACHES = (1000, 200_000)
SEGMENTS, LOOKUPS, ROUNDS, WORKED, TOKENS = 64, 50, 80, 8, 128
RECORD_BYTES = 4096
RESULT = Path("build/bench/curves.json")


def digest(kind: bytes, number: int) -> bytes:
    """An id."""
    return blake2b(number.to_bytes(8, "little"), digest_size=32, person=kind).digest()


class Bench:
    """One node with ``caches`` published caches, without bytes: only the index is looked at."""

    def __init__(self, caches: int) -> None:
        rope = rope_from_parameters({"rope_theta": 500000.0}, head_size=128, max_positions=8192)
        geometry = attention_geometry(layers=32, heads=8, head_size=128, dtype="bfloat16")
        identity = Identity("bench", "8b", "r1", geometry, (rope,) * 32)
        tier = HostTier(Arena(1 << 20))
        self.node = Node(NodeLimits(), tier, clock=time.monotonic, boot_epoch=1)
        self.calls = CacheCalls(self.node)
        welcome = self.calls.open_session(wire.Hello(identities=[identity.canonical_json()]))
        self.session = wire.SessionRef(session_id=welcome.session_id, boot_epoch=1)
        self.namespace = welcome.namespaces[0]
        space = self.node.session(welcome.session_id, 1).space(self.namespace)
        for number in range(caches):
            self.node.curves.note_stored(self.node.catalog.publish(space, _record(space, number)))
            self.node.curves.work()

    def request(self, rng: random.Random, caches: int, first: int = 0) -> Any:
        """A prompt of segments picked at random from ``first`` on."""
        numbers = [first + rng.randrange(caches) for _ in range(SEGMENTS)]
        segments = [
            wire.SegmentQuery(
                segment=digest(b"segment", number), accepted_contexts=[digest(b"context", number)], tokens=TOKENS
            )
            for number in numbers
        ]
        prompt = wire.PromptQuery(namespace=self.namespace, segments=segments)
        return wire.LookupRequest(session=self.session, prompts=[prompt])

    async def time_lookup(self, request: Any) -> float:
        """CPU seconds of one lookup."""
        started = time.thread_time()
        reply = await self.calls.lookup(request)
        spent = time.thread_time() - started
        if reply.lease.id:
            await self.calls.call("Release", wire.ReleaseRequest(session=self.session, lease_ids=[reply.lease.id]))
        return spent

    def time_work(self) -> tuple[float, int]:
        """CPU seconds of taking in what was noted; how many events that was."""
        events, started = len(self.node.curves.events), time.thread_time()
        self.node.curves.work()
        return time.thread_time() - started, events

    def time_noting(self, request: Any) -> float:
        """Seconds of the statements that curves add to a lookup, alone: the least of many runs."""
        curves, space = self.node.curves, next(iter(self.node.catalog.spaces.values()))
        segments = [one.segment for one in request.prompts[0].segments]
        found = [next(iter(space.families[SegmentId(one)].members.values())) for one in segments]
        empty, noting = [], []
        for _ in range(2000):
            started = time.perf_counter()
            for _segment, _cache in zip(segments, found, strict=True):
                pass
            looped = time.perf_counter()
            events, below = curves.events, curves.note_asked(space, len(segments)).below
            for segment, cache in zip(segments, found, strict=True):
                if segment < below and space is not None:
                    events.append(cache)
            empty.append(looped - started)
            noting.append(time.perf_counter() - looped)
            events.clear()
        return min(noting) - min(empty)


def _record(space: Space, number: int) -> VerifiedRecord:
    key = CacheKey(SegmentId(digest(b"segment", number)), ContextId(digest(b"context", number)))
    meta = CacheMeta(space.namespace, key, 0, TOKENS, space.geometry)
    return VerifiedRecord(meta, Extent(number * RECORD_BYTES, RECORD_BYTES), number)


async def measure(caches: int, rounds: int, *, is_missed: bool) -> dict[str, Any]:
    """CPU time, medians over rounds, with curves and without them in turn."""
    bench = Bench(caches)
    on = bench.node.curves
    off = Curves(CurveLimits(node_records_max=0), time.monotonic, 1, ValueOrder, LOAD_RATES)
    rng = random.Random(1)
    gc.collect()
    gc.freeze()  # as a node does: a collection over all caches would be half of what is measured
    lookups: dict[Curves, list[float]] = {on: [], off: []}
    ratios, behind, events = list[float](), 0.0, 0
    first = caches if is_missed else 0
    for number in range(rounds):
        spent = {on: 0.0, off: 0.0}
        for turn in range(LOOKUPS):
            for curves in (on, off) if turn % 2 else (off, on):
                bench.node.curves = curves
                spent[curves] += await bench.time_lookup(bench.request(rng, caches, first))
        for curves in (on, off):
            lookups[curves].append(spent[curves] / LOOKUPS)
        ratios.append(spent[on] / spent[off])
        bench.node.curves = on
        if number >= rounds - WORKED:  # at the end only: it takes the core's caches from the lookups behind it
            after, count = bench.time_work()
            behind, events = behind + after, events + count
        on.events.clear()
    return {
        "caches": caches,
        "lookups_are": "missed" if is_missed else "found",
        "lookup_us": round(statistics.median(lookups[off]) * 1e6, 1),
        "lookup_with_curves_us": round(statistics.median(lookups[on]) * 1e6, 1),
        "noting_us": round(bench.time_noting(bench.request(rng, caches)) * 1e6, 2),
        "ratio": round(statistics.median(ratios), 4),
        "ratio_quartiles": [round(one, 4) for one in statistics.quantiles(ratios, n=4)[::2]],
        "events_share": round(events / (WORKED * LOOKUPS * SEGMENTS), 4),
        "event_us": round(behind / max(events, 1) * 1e6, 1),
        "rate": round(next(iter(on)).sample.rate, 4),
    }


def main() -> None:
    """All sizes, found and missed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--short", action="store_true")
    rounds = WORKED if parser.parse_args().short else ROUNDS
    cases = [(caches, is_missed) for caches in CACHES for is_missed in (False, True)]
    results = [asyncio.run(measure(caches, rounds, is_missed=is_missed)) for caches, is_missed in cases]
    for one in results:
        print(", ".join(f"{name} {value}" for name, value in one.items()))
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(json.dumps({"segments": SEGMENTS, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
