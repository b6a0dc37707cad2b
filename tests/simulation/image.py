"""What a node left on its disk, to be copied and damaged as often as a test likes."""

import asyncio
import copy
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from kvservice.model.cache import CacheMeta
from kvservice.model.identity import Identity
from kvservice.storage.record import PREFIX_BYTES, RecordReader
from kvservice.storage.slab import SLAB_NAME
from kvservice.storage.slab_format import FOOTER_BYTES, NoteKind, taken_bytes
from kvservice.storage.ssd_index import IndexPlace, NaiveIndex, NaivePlace
from tests.server.builders import (
    Client,
    Planes,
    diff_of,
    make_identity,
    make_meta,
    make_planes,
    make_relative,
)
from tests.server.ssd_world import SsdWorld, arrived, written
from tests.storage.faulty_disk import FaultyDisk

IDENTITIES = (make_identity(), make_identity(tenant="other"))
T = TypeVar("T")
SLAB_BYTES = 40 * 12288
Span = tuple[int, int, CacheMeta | None]
"""First byte in the slab's file, length, and whose it is."""


@dataclass(frozen=True, slots=True)
class Image:
    """``stored``: what is to be found; ``deleted``: what is not. ``spans``: places in the slab by what lies there."""

    disk: FaultyDisk
    stored: list[tuple[CacheMeta, Planes]]
    deleted: tuple[CacheMeta, Planes]
    spans: dict[str, list[Span]]

    def copied(self) -> FaultyDisk:
        """A disk of its own, for a process of its own."""
        disk = FaultyDisk(self.disk.seed)
        disk._medium.files = copy.deepcopy(self.disk._medium.files)
        disk._medium.small = dict(self.disk._medium.small)
        return disk


def run(work: Coroutine[Any, Any, T]) -> T:
    """Like asyncio.run, which shows what a task returned to the signal module; that takes 40 ms for a few arrays."""
    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(work)
    finally:
        loop.close()


async def make_image(place: IndexPlace, end: str, before_end: Callable[[], None] = lambda: None) -> Image:
    """Two tenants' dense caches, groups, and mirrors of a deleted master; then ``stopped`` or ``killed``."""
    world = SsdWorld(FaultyDisk(1), place=place, slab_bytes=SLAB_BYTES)  # type: ignore[arg-type]
    async with world:
        client, stored = world.client(*IDENTITIES), list[tuple[CacheMeta, Planes]]()
        for number, identity in enumerate(IDENTITIES):
            stored += await _store(client, identity, f"group {number}")
        gone, *mirrors = await _store(client, IDENTITIES[0], "deleted")
        await written(world)
        await client.delete(gone[0])
        spans = _spans(world)
        before_end()
        if end == "killed":
            await world.kill()
    return Image(world.disk, [*stored, *mirrors], gone, spans)


async def _store(client: Client, identity: Identity, name: str) -> list[tuple[CacheMeta, Planes]]:
    planes, meta = make_planes(seed=len(name)), make_meta(identity, name)
    reference = await client.store(meta, planes)
    mirror = make_meta(identity, name, ["history"], master=reference)
    theirs = make_relative(identity, planes, 0, mirror.position, rows=[2, 5])
    await client.store(mirror, theirs, diff_of(identity, planes, 0, theirs, mirror.position))
    return [(meta, planes), (mirror, theirs)]


def _spans(world: SsdWorld) -> dict[str, list[Span]]:
    slab, index = world.disk.raw(SLAB_NAME), world.opened.index
    spans: dict[str, list[Span]] = {"superblock": [(0, 4096, None)], "header": [], "payload": [], "footer": []}
    for entry in index.entries():
        at, meta = entry.extent.offset, entry.meta
        reader = RecordReader(np.array(slab[at : at + entry.extent.length]))
        spans["header"].append((at, PREFIX_BYTES + reader.layout.header_bytes, meta))
        for start, length in zip(reader.layout.section_offsets, reader.layout.section_bytes, strict=True):
            spans["payload"] += [(at + start, length, meta)] if length else []
        spans["footer"].append((at + taken_bytes(entry.extent.length) - FOOTER_BYTES, FOOTER_BYTES, meta))
    for kind in NoteKind:
        notes = (note.extent for note in index.notes() if note.kind is kind)
        spans[kind.name.lower()] = [(extent.offset, extent.length, None) for extent in notes]
    assert all(spans.values())
    return spans


async def read_all(world: SsdWorld, image: Image) -> dict[CacheMeta, Planes]:
    """What is found, read by lookups; a record on its way may turn out to be CORRUPT, and is then gone."""
    client, found = world.client(*IDENTITIES), dict[CacheMeta, Planes]()
    for meta, _ in [*image.stored, image.deleted]:
        answer, lease = await client.find(meta)
        if not lease:
            continue
        errors = {one.error.code for one in await arrived(client, lease) if one.error.code}
        assert errors <= {"CORRUPT"}
        if not errors:
            identity = next(one for one in IDENTITIES if one.namespace() == meta.namespace)
            found[meta] = [[bits.copy() for bits in layer] for layer in world.read(identity, answer)]
        await client.release(lease)
        if errors:
            assert (await client.find(meta))[1] == 0, "a record that was found wrong is never found again"
    return found


def copied_place(place: NaivePlace) -> NaivePlace:
    """The same index for another process."""
    assert place.index is not None
    other = NaivePlace()
    other.index = NaiveIndex()
    other.index.batches, other.index.synced = list(place.index.batches), place.index.synced
    return other


def folder_files(folder: Path) -> list[Path]:
    """What a bit can be flipped in."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
