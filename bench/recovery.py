"""How long does a start take when 100,000 records lie on the SSD: after a clean stop, after a crash, without an index?

Prints a table and writes build/bench/recovery.json. Records are small, since none is read in full but the last ones.
Every start runs in a process of its own, and is compared with bare reads of the same blocks in the same process.
Run: python bench/recovery.py
"""

import argparse
import gc
import json
import mmap
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from kvservice.model.cache import CacheMeta, Extent, MasterReference
from kvservice.model.geometry import attention_geometry
from kvservice.model.identity import Identity
from kvservice.model.rope import rope_from_parameters
from kvservice.model.segment import MARK_BYTES, CacheKey, ContextId, SegmentId
from kvservice.storage.buffer import Bytes
from kvservice.storage.disk import BLOCK_BYTES, RealDisk, block_buffer
from kvservice.storage.record import RecordWriter, WrittenRecord, master_layout, mirror_layout
from kvservice.storage.recovery import INDEX_NAME, Opened, mark_clean, recover
from kvservice.storage.slab import SLAB_NAME, NoteKind, Slab, Stamp, taken_bytes
from kvservice.storage.ssd_entry import SsdEntry
from kvservice.storage.ssd_index import CHANGES_MAX, Change, Index, PutNote, PutRecord

RECORDS, FAMILY, LAYERS, TOKENS, MARKS = 100_000, 8, 28, 8, 10
SLAB_BYTES = 3 << 30
REPEATS = 3
KINDS = ("clean", "checked", "rebuilt")
FOLDER, RESULT = Path("build/bench/recovery-ssd"), Path("build/bench/recovery.json")


def make_identity() -> Identity:
    """A model of the usual depth with very small rows."""
    rope = rope_from_parameters({"rope_theta": 1e6}, head_size=16, max_positions=32768)
    geometry = attention_geometry(layers=LAYERS, heads=2, head_size=16, dtype="bfloat16")
    return Identity("bench", "small", "r1", geometry, (rope,) * LAYERS)


def digest(kind: bytes, number: int) -> bytes:
    """An id."""
    return blake2b(number.to_bytes(8, "little"), digest_size=32, person=kind).digest()


class Builder:
    """Makes records of families: one master, and mirrors of one row in every layer."""

    def __init__(self, identity: Identity) -> None:
        self.namespace, self.geometry = identity.namespace(), identity.geometry
        self.runs = [[np.array([[1, 1]], np.int32)] * 2] * LAYERS
        self.buffer = block_buffer(1 << 20)

    def meta(self, number: int, master: MasterReference | None) -> CacheMeta:
        """What cache ``number`` says of itself."""
        key = CacheKey(SegmentId(digest(b"segment", number // FAMILY)), ContextId(digest(b"context", number)))
        marks = tuple(digest(b"mark", number + at)[:MARK_BYTES] for at in range(MARKS))
        return CacheMeta(self.namespace, key, number % 30_000, TOKENS, self.geometry, preceding=marks, master=master)

    def master(self, meta: CacheMeta) -> tuple[Bytes, WrittenRecord]:
        """A dense record, valid until the next."""
        layout = master_layout(meta)
        writer = RecordWriter(self.buffer, meta, layout)
        return self.buffer[: layout.record_bytes], writer.finish()

    def mirror(self, meta: CacheMeta) -> tuple[Bytes, WrittenRecord]:
        """A sparse record, valid until the next."""
        layout = mirror_layout(meta, self.runs)
        writer = RecordWriter(self.buffer, meta, layout)
        for layer in range(LAYERS):
            writer.mirror_rows(layer, self.runs[layer])
        return self.buffer[: layout.record_bytes], writer.finish()


def write_records(slab: Slab, builder: Builder) -> Iterator[SsdEntry]:
    """All records, family by family."""
    reference: MasterReference | None = None
    for number in range(RECORDS):
        is_master = number % FAMILY == 0
        meta = builder.meta(number, None if is_master else reference)
        record, written = builder.master(meta) if is_master else builder.mirror(meta)
        if is_master:
            reference = MasterReference(meta.key.context, written.generation)
        extent = slab.reserve(len(record))
        assert extent is not None, "SLAB_BYTES is too small"
        stamp = Stamp(slab.next_sequence(), written.header_checksum, 0.5)
        slab.write(extent, record, stamp)
        yield SsdEntry(meta, extent, written.generation, stamp.header_checksum, stamp.sequence, stamp.prefill_s)


def put_all(index: Index, entries: Iterator[SsdEntry]) -> None:
    """As a node does, but in larger batches."""
    batch: list[Change] = []
    for entry in entries:
        batch.append(PutRecord(entry))
        if len(batch) == CHANGES_MAX:
            index.apply(batch)
            batch = []
    index.apply(batch)


def make() -> None:
    """A new folder with all records, cleanly stopped."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.parent.mkdir(parents=True, exist_ok=True)
    identity = make_identity()
    disk = RealDisk(FOLDER)
    opened = recover(disk, SLAB_BYTES)
    note = opened.slab.write_note(NoteKind.IDENTITY, identity.canonical_json().encode())
    opened.index.apply([PutNote(note)])
    put_all(opened.index, write_records(opened.slab, Builder(identity)))
    stop(disk, opened)


def stop(disk: RealDisk, opened: Opened) -> None:
    """A clean stop."""
    mark_clean(disk, opened.slab, opened.index, opened.boot_epoch)
    opened.index.close()
    opened.slab.close()
    disk.close()


def measure(kind: str) -> dict[str, Any]:
    """One start of a kind, on a folder that was stopped cleanly; stopped cleanly afterwards."""
    if kind != "clean":
        (FOLDER / "CLEAN").unlink()
    if kind == "rebuilt":
        shutil.rmtree(FOLDER / INDEX_NAME)
    gc.collect()
    started, started_cpu = time.perf_counter(), time.process_time()
    disk = RealDisk(FOLDER)
    opened = recover(disk, SLAB_BYTES)
    seconds, cpu_s = time.perf_counter() - started, time.process_time() - started_cpu
    assert (opened.report.kind, opened.report.records, opened.report.dropped) == (kind, RECORDS, {}), opened.report
    bare_s = bare_reads_s([entry.extent for entry in opened.entries])
    result = {"kind": kind, "seconds": round(seconds, 3), "cpu_s": round(cpu_s, 3), "bare_reads_s": round(bare_s, 3)}
    stop(disk, opened)
    return result | {"report": asdict(opened.report), "index_bytes": folder_bytes(FOLDER / INDEX_NAME)}


def bare_reads_s(extents: Sequence[Extent]) -> float:
    """Seconds to read the first and the last block of every extent, in order, with nothing else."""
    fd, block = os.open(FOLDER / SLAB_NAME, os.O_RDONLY | os.O_DIRECT), mmap.mmap(-1, BLOCK_BYTES)
    places = sorted(extent.offset for extent in extents)
    last = {extent.offset: extent.offset + taken_bytes(extent.length) - BLOCK_BYTES for extent in extents}
    started = time.perf_counter()
    for offset in places:
        os.preadv(fd, [block], offset)
        os.preadv(fd, [block], last[offset])
    seconds = time.perf_counter() - started
    os.close(fd)
    return seconds


def folder_bytes(folder: Path) -> int:
    """Bytes of all files in it."""
    return sum(path.stat().st_size for path in folder.iterdir())


def measure_elsewhere(kind: str) -> Any:
    """One start in a fresh process."""
    return json.loads(subprocess.run([sys.executable, __file__, kind], check=True, stdout=subprocess.PIPE).stdout)


def report(results: list[Any]) -> None:
    """Table and file."""
    print(
        f"{RECORDS} records of {LAYERS} layers, families of {FAMILY}; seconds until slab, index and entries are there"
    )
    print("kind      best   worst  CPU    bare reads of heads and footers  MiB read  index MiB")
    for kind in KINDS:
        runs = [one for one in results if one["kind"] == kind]
        seconds, bare_s = [one["seconds"] for one in runs], min(one["bare_reads_s"] for one in runs)
        print(
            f"{kind:<9} {min(seconds):<6.2f} {max(seconds):<6.2f} {min(one['cpu_s'] for one in runs):<6.2f} "
            f"{bare_s:<32.2f} {runs[0]['report']['scanned_bytes'] / (1 << 20):<9.0f} "
            f"{runs[0]['index_bytes'] / (1 << 20):.0f}"
        )
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(json.dumps({"records": RECORDS, "results": results}, indent=1) + "\n")


def main() -> None:
    """Without arguments: everything. With one: a start of that kind in the folder that is there, as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", nargs="?", choices=("make", *KINDS))
    options = parser.parse_args()
    if options.kind == "make":
        make()
    elif options.kind:
        print(json.dumps(measure(options.kind)))
    else:
        make()
        report([measure_elsewhere(kind) for _ in range(REPEATS) for kind in KINDS])
        shutil.rmtree(FOLDER)


if __name__ == "__main__":
    main()
