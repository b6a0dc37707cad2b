"""How much memory does a cache cost the catalog, and does a lookup stay fast when there are a million of them?

Prints a table and writes build/bench/catalog.json. Records are not written: only the index is measured.
Each size runs in a process of its own, the gRPC client in another. Run: python bench/catalog.py
"""

import argparse
import asyncio
import gc
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from hashlib import blake2b
from pathlib import Path
from typing import Any

import grpc.aio

from kvservice.caches import Space, VerifiedRecord
from kvservice.calls import CacheCalls
from kvservice.limits import NodeLimits
from kvservice.model.cache import CacheMeta, Extent
from kvservice.model.geometry import attention_geometry
from kvservice.model.identity import Identity
from kvservice.model.rope import rope_from_parameters
from kvservice.model.segment import MARK_BYTES, CacheKey, ContextId, SegmentId
from kvservice.node import Node
from kvservice.rpc import add_to_server
from kvservice.storage.arena import Arena
from kvservice.storage.host_tier import HostTier
from kvservice.wire.v1 import cache_pb2 as wire
from kvservice.wire.v1.cache_pb2_grpc import CacheServiceStub

SIZES = (1_000, 1_000_000)
SEGMENTS, TOKENS, MARKS = 64, 256, 10
RECORD_BYTES = 32 << 20
LOOKUPS, RPC_LOOKUPS, WARM_UP = 3000, 1500, 200
RESULT = Path("build/bench/catalog.json")


def make_identity() -> Identity:
    """An 8B model with grouped-query attention."""
    rope = rope_from_parameters({"rope_theta": 500000.0}, head_size=128, max_positions=8192)
    geometry = attention_geometry(layers=32, heads=8, head_size=128, dtype="bfloat16")
    return Identity("bench", "8b", "r1", geometry, (rope,) * 32)


def digest(kind: bytes, number: int) -> bytes:
    """An id that both processes can make."""
    return blake2b(number.to_bytes(8, "little"), digest_size=32, person=kind).digest()


def make_record(space: Space, number: int, family_size: int) -> VerifiedRecord:
    """Cache ``number``: ``family_size`` neighbours share a segment."""
    key = CacheKey(SegmentId(digest(b"segment", number // family_size)), ContextId(digest(b"context", number)))
    seen = b"".join(digest(b"mark", number + at)[:MARK_BYTES] for at in range(MARKS))
    marks = tuple(seen[at : at + MARK_BYTES] for at in range(0, len(seen), MARK_BYTES))
    meta = CacheMeta(space.namespace, key, number % 30_000, TOKENS, space.geometry, preceding=marks)
    return VerifiedRecord(meta, Extent(number * RECORD_BYTES, RECORD_BYTES), (number * 0x9E3779B97F4A7C15) % (1 << 64))


def make_request(session: wire.SessionRef, namespace: bytes, rng: random.Random, caches: int, family_size: int) -> Any:
    """One prompt of segments picked at random, each asked for by its own context."""
    numbers = [rng.randrange(caches) for _ in range(SEGMENTS)]
    segments = [
        wire.SegmentQuery(
            segment=digest(b"segment", number // family_size),
            accepted_contexts=[digest(b"nobody", number), digest(b"context", number)],
            position=number % 30_000,
            tokens=TOKENS,
        )
        for number in numbers
    ]
    return wire.LookupRequest(session=session, prompts=[wire.PromptQuery(namespace=namespace, segments=segments)])


def resident_bytes() -> int:
    """Memory of this process, pages in use."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def quantiles(seconds: list[float]) -> dict[str, float]:
    """Milliseconds."""
    ordered = sorted(seconds)
    return {
        "p50_ms": round(statistics.median(ordered) * 1e3, 4),
        "p99_ms": round(ordered[int(len(ordered) * 0.99)] * 1e3, 4),
        "max_ms": round(ordered[-1] * 1e3, 4),
    }


async def measure(caches: int, family_size: int, *, with_rpc: bool) -> dict[str, Any]:
    """Fill a node's catalog, then look up."""
    node = Node(NodeLimits(), HostTier(Arena(1 << 20)), clock=time.monotonic, boot_epoch=1, owns_process=True)
    calls = CacheCalls(node)
    welcome = calls.open_session(wire.Hello(identities=[make_identity().canonical_json()]))
    session = wire.SessionRef(session_id=welcome.session_id, boot_epoch=1)
    space = node.session(welcome.session_id, 1).space(welcome.namespaces[0])
    result: dict[str, Any] = {"caches": caches, "family_size": family_size}
    result |= fill(node, space, caches, family_size)
    rng = random.Random(1)
    seconds, found = [], 0
    for _ in range(WARM_UP + LOOKUPS):
        request = make_request(session, welcome.namespaces[0], rng, caches, family_size)
        started = time.perf_counter()
        reply = await calls.call("Lookup", request)
        seconds.append(time.perf_counter() - started)
        found += sum(one.outcome == 1 for one in reply.prompts[0].segments)
        await calls.call("Release", wire.ReleaseRequest(session=session, lease_ids=[reply.lease.id]))
    assert found == SEGMENTS * len(seconds), "every segment is held"
    result["in_process"] = quantiles(seconds[WARM_UP:])
    if with_rpc:
        result["rpc"] = await measure_rpc(calls, caches, family_size)
    await node.stop()
    return result


def fill(node: Node, space: Space, caches: int, family_size: int) -> dict[str, Any]:
    """Publish, as commits do, freezing as the node does; then how long a full collection takes."""
    assert node.heap is not None, "made with owns_process"
    gc.collect()
    before, pauses, started = resident_bytes(), [0.0], time.perf_counter()
    for number in range(caches):
        node.catalog.publish(space, make_record(space, number, family_size))
        paused = time.perf_counter()
        if node.heap.note_growth():
            pauses.append(time.perf_counter() - paused)
    result = {
        "index_bytes_per_cache": round((resident_bytes() - before) / caches),
        "publish_us": round((time.perf_counter() - started) / caches * 1e6, 2),
        "freeze_pause_max_ms": round(max(pauses) * 1e3, 2),
        "full_collection_ms": round(collection_s() * 1e3, 2),
    }
    gc.unfreeze()
    result["full_collection_unfrozen_ms"] = round(collection_s() * 1e3, 2)
    gc.freeze()
    return result


def collection_s() -> float:
    """How long a full collection takes now."""
    started = time.perf_counter()
    gc.collect()
    return time.perf_counter() - started


async def measure_rpc(calls: CacheCalls, caches: int, family_size: int) -> Any:
    """The same over a unix socket, from a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        address = f"unix:{folder}/grpc.sock"
        server = grpc.aio.server()
        add_to_server(calls, server)
        server.add_insecure_port(address)
        await server.start()
        command = [sys.executable, __file__, "--client", address, "--caches", str(caches), "--family", str(family_size)]
        process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
        out, _ = await process.communicate()
        await server.stop(None)
    return json.loads(out)


async def run_client(address: str, caches: int, family_size: int) -> dict[str, float]:
    """Look up and release, one call after the other; only lookups are timed."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = CacheServiceStub(channel)  # type: ignore[no-untyped-call]
        stream = stub.OpenSession()
        await stream.write(wire.SessionRequest(hello=wire.Hello(identities=[make_identity().canonical_json()])))
        welcome = (await stream.read()).welcome
        session = wire.SessionRef(session_id=welcome.session_id, boot_epoch=welcome.boot_epoch)
        rng, seconds = random.Random(2), []
        for _ in range(WARM_UP + RPC_LOOKUPS):
            request = make_request(session, welcome.namespaces[0], rng, caches, family_size)
            started = time.perf_counter()
            reply = await stub.Lookup(request)
            seconds.append(time.perf_counter() - started)
            await stub.Release(wire.ReleaseRequest(session=session, lease_ids=[reply.lease.id]))
        await stream.done_writing()
    return quantiles(seconds[WARM_UP:])


def measure_elsewhere(caches: int, family_size: int) -> Any:
    """One size in a fresh process."""
    command = [sys.executable, __file__, "--caches", str(caches), "--family", str(family_size)]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def report(results: list[Any]) -> None:
    """Table and file."""
    print(f"lookups of {SEGMENTS} segments, random keys, ms; collections in ms")
    print(
        "caches    family  B/cache  publish us  in-process p50/p99  gRPC p50/p99/max  freeze max  full gc  unfrozen gc"
    )
    for one in results:
        mine, rpc = one["in_process"], one["rpc"]
        print(
            f"{one['caches']:<9} {one['family_size']:<7} {one['index_bytes_per_cache']:<8} {one['publish_us']:<11} "
            f"{mine['p50_ms']:.3f} / {mine['p99_ms']:.3f}       {rpc['p50_ms']:.2f} / {rpc['p99_ms']:.2f} / "
            f"{rpc['max_ms']:.2f} {one['freeze_pause_max_ms']:<11} {one['full_collection_ms']:<8} "
            f"{one['full_collection_unfrozen_ms']}"
        )
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(json.dumps({"segments": SEGMENTS, "results": results}, indent=1) + "\n")


def main() -> None:
    """Without arguments: everything. With them: one part, as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--caches", type=int)
    parser.add_argument("--family", type=int, default=1)
    parser.add_argument("--client", help="address of a node to look up in")
    options = parser.parse_args()
    if options.client:
        print(json.dumps(asyncio.run(run_client(options.client, options.caches, options.family))))
    elif options.caches:
        print(json.dumps(asyncio.run(measure(options.caches, options.family, with_rpc=True))))
    else:
        report([measure_elsewhere(caches, family) for family in (1, 8) for caches in SIZES])


if __name__ == "__main__":
    main()
