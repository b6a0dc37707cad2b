"""One flipped bit anywhere on the slab: what it hits is not served, all else is exact.

100 samples in make test, 1,000 in make crash. Flips in the index: tests/storage/test_rocks_index.py.
"""

import random

import pytest

from kvservice.model.errors import KVServiceError
from kvservice.storage.slab import SLAB_NAME
from kvservice.storage.slab_format import FOOTER_BYTES, SUPERBLOCK_BYTES, taken_bytes
from tests.server.builders import Planes, cache_of, equal_planes
from tests.server.ssd_world import SsdWorld, arrived, written
from tests.server.test_ssd import IDENTITY, Stored, store_dense, store_group

REGIONS = ("payload", "header", "footer", "note", "superblock")


@pytest.mark.parametrize("end", ["stopped", "killed"])
@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("flips", [10, pytest.param(100, marks=pytest.mark.crash)])
async def test_a_flipped_bit_never_becomes_a_wrong_byte(region: str, end: str, flips: int) -> None:
    for seed in range(flips):
        await _flip_one(region, end, random.Random(f"{region} {end} {seed}"))


async def _flip_one(region: str, end: str, chance: random.Random) -> None:
    world = SsdWorld()
    async with world:
        client = world.client()
        stored = await store_dense(client, 2) + await store_group(client, mirrors=1)
        await written(world)
        victim = chance.randrange(len(stored))
        at = _place(world, stored, victim, region, chance)
        if end == "killed":
            await world.kill()
    bit = chance.randrange(8)
    world.disk.raw(SLAB_NAME)[at] ^= 1 << bit
    where = f"{region} {end}: bit {bit} of byte {at}"
    if region == "superblock":
        with pytest.raises(KVServiceError):
            world.again()
        return
    async with world.again() as again:
        read = [await _read(again, stored, index) for index in range(len(stored))]
    is_hit = region in ("payload", "header")
    for index, planes in enumerate(read):
        stands_on_victim = index == victim or (victim == 2 and index == 3)
        assert planes is None or equal_planes(planes, stored[index][1]), where
        if is_hit and stands_on_victim:
            assert planes is None, f"{where}: it was not noticed"
        elif is_hit:
            assert planes is not None, f"{where}: it cost another cache"


def _place(world: SsdWorld, stored: Stored, victim: int, region: str, chance: random.Random) -> int:
    cache = cache_of(world, stored[victim][0])
    assert cache is not None
    extent = cache.ssd_extent
    if region == "superblock":
        return chance.randrange(SUPERBLOCK_BYTES)
    if region == "note":
        note = next(iter(world.opened.index.notes()))
        return note.extent.offset + chance.randrange(note.extent.length)
    if region == "footer":
        return extent.offset + taken_bytes(extent.length) - FOOTER_BYTES + chance.randrange(FOOTER_BYTES)
    header_bytes = int.from_bytes(bytes(world.disk.raw(SLAB_NAME)[extent.offset + 12 : extent.offset + 16]), "little")
    head = 32 + header_bytes
    return extent.offset + (chance.randrange(head) if region == "header" else chance.randrange(head, extent.length))


async def _read(world: SsdWorld, stored: Stored, index: int) -> Planes | None:
    """The cache's planes, or None for a miss or a load that failed by name."""
    client = world.client()
    try:
        found, lease = await client.find(stored[index][0])
        if not lease:
            return None
        if any(one.error.code for one in await arrived(client, lease)):
            return None
        return [[bits.copy() for bits in layer] for layer in world.read(IDENTITY, found)]
    finally:
        client.close()
