"""One flipped bit, anywhere on the disk: it is found, or it does not matter; no read ever gives other bytes."""

import random
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from kvservice.model.cache import CacheMeta
from kvservice.model.errors import ConfigError
from kvservice.storage.index_format import CorruptIndexError, decode_entry, encode_entry, geometries_of
from kvservice.storage.recovery import RecoveryKind
from kvservice.storage.rocks_index import RocksPlace
from kvservice.storage.slab import SLAB_NAME
from kvservice.storage.ssd_entry import SsdEntry
from kvservice.storage.ssd_index import NaiveIndex, NaivePlace
from tests.server.builders import Planes, equal_planes
from tests.server.ssd_world import SsdWorld
from tests.simulation.image import SLAB_BYTES, Image, copied_place, folder_files, make_image, read_all, run
from tests.storage.faulty_disk import FaultyDisk

ENDS = ["stopped", "killed"]


@cache
def image_of(end: str) -> tuple[Image, NaivePlace]:
    place = NaivePlace()
    return run(make_image(place, end)), place


async def start(disk: FaultyDisk, place: object, image: Image) -> tuple[dict[CacheMeta, Planes], RecoveryKind]:
    """What the next start finds, and how."""
    async with SsdWorld(disk, place=place, slab_bytes=SLAB_BYTES) as world:  # type: ignore[arg-type]
        found = await read_all(world, image)
        world.check()
        kind = world.opened.report.kind
        await world.kill()
    world.opened.index.close()
    world.arena.close()
    return found, kind


def flipped(image: Image, what: str, chance: random.Random) -> tuple[FaultyDisk, CacheMeta | None]:
    """A copy of the disk with one bit flipped in what is of that kind, and whose it was."""
    disk = image.copied()
    offset, length, meta = chance.choice(image.spans[what])
    bit = chance.randrange(length * 8)
    disk.raw(SLAB_NAME)[offset + bit // 8] ^= 1 << bit % 8
    return disk, meta


def stands_on(image: Image, meta: CacheMeta | None) -> set[CacheMeta]:
    """The stored ones that go when the record of ``meta`` goes."""
    if meta is None:
        return set()
    key = meta.key
    return {
        one
        for one, _ in image.stored
        if one.key == key or (one.key.segment == key.segment and one.master and one.master.context == key.context)
    }


def check(image: Image, found: dict[CacheMeta, Planes], missing: set[CacheMeta]) -> None:
    """All but ``missing`` is there, and all that is there is right."""
    stored = dict(image.stored)
    assert found.keys() == stored.keys() - missing
    assert all(equal_planes(planes, stored[meta]) for meta, planes in found.items())


def samples(flips: int, name: str) -> Iterator[random.Random]:
    for number in range(flips):
        yield random.Random(f"{name} {number}")


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("what", ["header", "payload", "footer"])
def test_a_flip_in_a_record_costs_that_record_and_what_stands_on_it(what: str, end: str, flips: int) -> None:
    image, place = image_of(end)
    for chance in samples(flips, what):
        disk, meta = flipped(image, what, chance)
        found, kind = run(start(disk, copied_place(place), image))
        assert kind is (RecoveryKind.CLEAN if end == "stopped" else RecoveryKind.CHECKED)
        is_unread = what == "footer" and end == "stopped"  # only a search looks at footers
        check(image, found, set() if is_unread else stands_on(image, meta))


@pytest.mark.parametrize("end", ENDS)
def test_a_flip_in_the_superblock_stops_the_start_and_changes_nothing(end: str, flips: int) -> None:
    image, place = image_of(end)
    for chance in samples(flips, "superblock"):
        disk, _ = flipped(image, "superblock", chance)
        before = disk.raw(SLAB_NAME).copy()
        with pytest.raises(ConfigError, match=r"slab\.kv"):
            run(start(disk, copied_place(place), image))
        assert (disk.raw(SLAB_NAME) == before).all()


@pytest.mark.parametrize("end", ENDS)
def test_a_flip_in_an_identity_costs_its_namespace_at_most(end: str, flips: int) -> None:
    image, place = image_of(end)
    for chance in samples(flips, "identity"):
        disk, _ = flipped(image, "identity", chance)
        found, _ = run(start(disk, copied_place(place), image))
        lost = {meta.namespace for meta, _ in image.stored} - {meta.namespace for meta in found}
        assert len(lost) == (end == "killed")
        check(image, found, {meta for meta, _ in image.stored if meta.namespace in lost})


@pytest.mark.parametrize("end", ENDS)
def test_a_flip_in_a_tombstone_costs_at_most_the_deletion(end: str, flips: int) -> None:
    """The deleted cache may be found again, as it was. Nothing else changes."""
    image, place = image_of(end)
    for chance in samples(flips, "tombstone"):
        disk, _ = flipped(image, "tombstone", chance)
        found, _ = run(start(disk, copied_place(place), image))
        meta, planes = image.deleted
        again = found.pop(meta, None)
        assert (again is None) == (end == "stopped")
        assert again is None or equal_planes(again, planes)
        check(image, found, set())


class FlippedIndex(NaiveIndex):
    """One bit of one record's key or value is wrong."""

    chance = random.Random()

    def entries(self) -> Iterator[SsdEntry]:
        entries, geometries = list(super().entries()), geometries_of(self.notes())
        victim = self.chance.randrange(len(entries))
        for number, entry in enumerate(entries):
            key, value = encode_entry(entry)
            if number == victim:
                data = bytearray(key + value)
                bit = self.chance.randrange(len(data) * 8)
                data[bit // 8] ^= 1 << bit % 8
                key, value = bytes(data[: len(key)]), bytes(data[len(key) :])
            yield decode_entry(key, value, geometries)


@pytest.mark.parametrize("end", ENDS)
def test_a_flip_in_what_the_index_says_makes_it_anew(end: str, flips: int) -> None:
    image, place = image_of(end)
    for chance in samples(flips, "index"):
        mine = copied_place(place)
        assert mine.index is not None
        index = FlippedIndex()
        index.batches, index.chance = mine.index.batches, chance
        with pytest.raises(CorruptIndexError):
            list(index.entries())
        mine.index = index
        found, kind = run(start(image.copied(), mine, image))
        assert kind is RecoveryKind.REBUILT
        check(image, found, set())


@pytest.mark.parametrize("end", ENDS)
def test_a_flip_in_a_file_of_the_index_costs_nothing(end: str, flips: int, tmp_path: Path) -> None:
    first, saved = tmp_path / "first", tmp_path / "saved"

    def save() -> None:
        if end == "killed":
            shutil.copytree(first, saved)

    image = run(make_image(RocksPlace(first), end, save))
    if end == "stopped":
        shutil.copytree(first, saved)
    kinds = set()
    for number, chance in enumerate(samples(flips, "files")):
        folder = tmp_path / str(number)  # RocksDB never forgets a folder that it had open
        shutil.copytree(saved, folder)
        path = chance.choice(folder_files(folder))
        data = bytearray(path.read_bytes())
        bit = chance.randrange(len(data) * 8)
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        found, kind = run(start(image.copied(), RocksPlace(folder), image))
        kinds.add(kind)
        check(image, found, set())
        shutil.rmtree(folder)
    assert RecoveryKind.REBUILT in kinds or flips < 20
