"""Does a node's memory stay flat while caches come and go, and is nothing left behind at the end?

One node in this process, with an SSD tier if --ssd is given: tiny records through the real reserve, write, commit, so
that every put evicts what is worth least, in memory and on the slab. Prints the resident memory at every tenth, and
exits 1 if it grows by more than 5 % after the first, or if arena bytes, descriptors or files are left. Run:
python bench/soak.py --puts 1000000, and python bench/soak.py --puts 50000 --ssd
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from kvservice.app import LocalNode
from kvservice.config import Settings
from kvservice.model.cache import CacheMeta
from kvservice.model.geometry import attention_geometry
from kvservice.model.identity import Identity
from kvservice.model.rope import rope_from_parameters
from kvservice.model.segment import CacheKey, ContextId, SegmentId
from kvservice.node import Node
from kvservice.sessions import Session
from kvservice.storage.record import RecordWriter, master_layout
from kvservice.store import WriteRequest

MIB = 1 << 20
TOKENS, BATCH = 4, 32
GROWTH_MAX = 1.05
FOLDER, RESULT = Path("build/bench"), Path("build/bench/soak.json")


class Writer:
    """Puts numbered caches, a batch at a time, on the node's loop."""

    def __init__(self, node: Node) -> None:
        geometry = attention_geometry(layers=2, heads=1, head_size=8, dtype="bfloat16")
        rope = rope_from_parameters({"rope_theta": 1e4}, head_size=8, max_positions=4096)
        identity = Identity("soak", "model", "r1", geometry, (rope,) * 2)
        self.node, self.session = node, self._open(node, identity)
        key = CacheKey(SegmentId(bytes(32)), ContextId(bytes(32)))
        self.meta = CacheMeta(identity.namespace(), key, 0, TOKENS, geometry)
        self.layout = master_layout(self.meta)

    @staticmethod
    def _open(node: Node, identity: Identity) -> Session:
        return node.open_session("soak", [identity.canonical_json()], may_write=True)

    async def put(self, first: int) -> None:
        """Reserve, write and commit BATCH caches; every one is new."""
        items = []
        for number in range(first, first + BATCH):
            digest = number.to_bytes(32, "little")
            meta = replace(self.meta, key=CacheKey(SegmentId(digest), ContextId(digest)))
            request = WriteRequest(meta.namespace, meta.key, self.layout.record_bytes)
            reservation = self.node.reserve(self.session, request)
            assert reservation is not None, "every key is new"
            writer = RecordWriter(self.node.tier.view(reservation.extent), meta, self.layout)
            for layer in range(2):
                for plane in writer.master_planes(layer):
                    plane[:] = np.uint16(number & 0x3FFF)
            items.append((reservation.id, writer.finish().header_checksum))
        for outcome in await self.node.commit(self.session, items):
            assert not isinstance(outcome, Exception), outcome


def resident_bytes() -> int:
    """Memory of this process, without the arena, which is shared memory."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return sum(int(fields[name].split()[0]) << 10 for name in ("RssAnon", "RssFile"))


def descriptors() -> int:
    """How many this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


async def soak(writer: Writer, puts: int) -> list[int]:
    """Put so many caches; the memory at every tenth."""
    sizes, done = [], 0
    for tenth in range(1, 11):
        while done < puts * tenth // 10:
            await writer.put(done)
            done += BATCH
        sizes.append(resident_bytes())
        print(f"{done:9,} puts   {sizes[-1] / MIB:7.1f} MiB   {writer.node.counters.host_evictions.groups:9,} evicted")
    return sizes


def run(puts: int, folder: Path, *, has_ssd: bool) -> dict[str, object]:
    """One soak in ``folder``; what is left behind is in the result."""
    before, started = descriptors(), time.monotonic()
    changes = {"ssd_folder": str(folder / "ssd"), "ssd_bytes": 32 * MIB, "ssd_free_floor_bytes": 0} if has_ssd else {}
    settings = Settings(
        socket=str(folder / "k.sock"), grpc_port=-1, http_port=-1, host_bytes=16 * MIB, scrub_bytes_per_s=0,
        **changes,  # type: ignore[arg-type]
    )  # fmt: skip
    with LocalNode(settings) as node:
        writer = node.on_loop(Writer)
        sizes = node.run_on_loop(soak(writer, puts))
        node.on_loop(lambda one: one.close_session(writer.session.id))
        while node.on_loop(lambda one: one.catalog.evict_host() or one.catalog.evict_ssd()):
            pass
        left = node.on_loop(lambda one: one.tier.used_bytes)
    files = sorted(path.name for path in folder.rglob("*.tmp"))
    return {
        "puts": puts, "has_ssd": has_ssd, "seconds": round(time.monotonic() - started, 1), "resident_bytes": sizes,
        "growth": round(max(sizes[1:]) / sizes[0], 4), "arena_bytes_left": left,
        "descriptors_left": descriptors() - before, "temporary_files_left": files,
    }  # fmt: skip


def main() -> int:
    """Soak, print, write; 1 if something grew or was left."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--puts", type=int, default=1_000_000)
    parser.add_argument("--ssd", action="store_true")
    options = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=FOLDER))
    try:
        result = run(options.puts, folder, has_ssd=options.ssd)
    finally:
        shutil.rmtree(folder)
    RESULT.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))
    is_flat = float(str(result["growth"])) <= GROWTH_MAX
    is_clean = not (result["arena_bytes_left"] or result["descriptors_left"] or result["temporary_files_left"])
    return 0 if is_flat and is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
