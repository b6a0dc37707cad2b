"""What must hold after every start, before anything is asked of the service; then every key that ever was is read."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvservice.client.session import Session
from kvservice.client.shared_memory import SharedMemoryTransport
from kvservice.model.segment import CacheKey
from kvservice.storage.slab_format import FoundNote, FoundRecord, taken_bytes
from tests.crash.content import Kind
from tests.crash.damage import scan_slab
from tests.crash.oracle import Book, BrokenError
from tests.crash.reading import Reader, Seen
from tests.crash.service import END_TIMEOUT_S, ServiceProcess

SERVING = 1
FOLDER_HOLDS = {"slab.kv", "index", "epoch", "lock"}
BATCH_BYTES = 1 << 20
"""Of one lookup: a small part of the smallest arena, so that it finds room."""
GONE_BATCH = 500
TRIES_MAX = 20


def check_started(service: ServiceProcess, epoch: int) -> dict[str, Any]:
    """It is healthy, holds nothing for anybody, and its epoch is above ``epoch``; returns its stats."""
    if service.health() != SERVING:
        raise BrokenError(f"health is {service.health()} though the service said that it runs")
    stats = service.stats()
    if stats["boot_epoch"] <= epoch:
        raise BrokenError(f"the boot epoch is {stats['boot_epoch']}, the last one was {epoch}")
    handles = stats["handles"]
    if any(handles.values()) or stats["host"]["unpublished_bytes"]:
        raise BrokenError(f"a new start holds something: {handles}")
    return stats


def check_folder(folder: Path) -> None:
    """Nothing is left of what an earlier start did not finish."""
    extra = {path.name for path in folder.iterdir()} ^ FOLDER_HOLDS
    if extra:
        raise BrokenError(f"in the folder, and should not be, or the other way round: {sorted(extra)}")


def check_slab(service: ServiceProcess, folder: Path) -> None:
    """While nothing is written, catalog, allocator and slab agree to the byte."""
    ssd = service.stats()["ssd"]
    found = scan_slab(folder)
    if service.stats()["ssd"] != ssd or ssd["quarantined_bytes"]:
        return  # the scrubber was at work
    records = [one.extent for one in found if isinstance(one, FoundRecord)]
    notes = [one.note.extent for one in found if isinstance(one, FoundNote)]
    used = sum(taken_bytes(extent.length) for extent in (*records, *notes))
    said = ssd["caches"], ssd["record_bytes"], ssd["used_bytes"]
    there = len(records), sum(extent.length for extent in records), used
    if said != there:
        raise BrokenError(f"records, bytes, used bytes: the service says {said}, on the slab are {there}")


def check_lock(service: ServiceProcess, socket: Path) -> None:
    """A second service for the folder does not start, and says who has it."""
    settings = service.settings | {"socket": str(socket), "kill_point": ""}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    command = [sys.executable, "-P", "-m", "kvservice", "serve", *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=END_TIMEOUT_S)
    who = f"in use by kvservice at {service.socket} (process {service.pid})"
    if done.returncode != 1 or who not in done.stderr:
        raise BrokenError(f"a second service in the folder ended with {done.returncode}: {done.stderr}")


def read_all(
    service: ServiceProcess, books: Sequence[Book], kinds: Sequence[Sequence[Kind]], *, is_final: bool
) -> tuple[Seen, int]:
    """Read every key of every book in full: counts, and how many were asked. ``is_final``: just after a start."""
    seen, asked = Seen(), 0
    for book, own in zip(books, kinds, strict=True):
        identities = [kind.identity for kind in own]
        with Session(SharedMemoryTransport(f"unix:{service.socket}"), identities, client_name="check") as session:
            reader = Reader(session, book, seen, is_final=is_final)
            asked += len(book.entries)
            _read_gone(reader, book.gone())
            _read_open(reader, book)
    stats = service.stats()
    handles = stats["handles"]
    if handles["leases"] or handles["reservations"]:
        raise BrokenError(f"something is held after all was released: {handles}")
    found = sum(len(book.held()) for book in books)
    if not seen.corrupt and found != held_by(stats):
        raise BrokenError(f"{found} caches were found, the service holds {held_by(stats)}: nobody stored the others")
    return seen, asked


def held_by(stats: dict[str, Any]) -> int:
    """Caches that a service would answer with."""
    return int(stats["caches"]["master"]["count"] + stats["caches"]["mirror"]["count"])


def _read_gone(reader: Reader, keys: Sequence[CacheKey]) -> None:
    for start in range(0, len(keys), GONE_BATCH):
        reader.read(keys[start : start + GONE_BATCH])


def _read_open(reader: Reader, book: Book) -> None:
    left = book.open()
    for _ in range(TRIES_MAX):
        left = [key for batch in _batches(book, left) for key in reader.read(batch)]
        if not left:
            return
    raise BrokenError(f"{len(left)} caches find no room in memory, though nobody holds any")


def _batches(book: Book, keys: Sequence[CacheKey]) -> list[list[CacheKey]]:
    batches: list[list[CacheKey]] = []
    room = 0
    for key in keys:
        size = book.last(key).meta.dense_bytes
        if not batches or size > room:
            batches.append([])
            room = BATCH_BYTES
        batches[-1].append(key)
        room -= size
    return batches
