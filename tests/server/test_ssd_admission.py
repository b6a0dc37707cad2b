"""What is written to SSD, and what is not and why; a disk that fills up stops writing, never a client."""

import asyncio
from dataclasses import replace

import pytest

from kvservice.limits import NodeLimits
from kvservice.model.errors import DiskError
from kvservice.ssd import SsdPolicy
from kvservice.storage.admission import NotAdmitted
from kvservice.storage.slab import SLAB_NAME
from tests.server.builders import make_meta, make_planes
from tests.server.ssd_world import SsdWorld, where, written
from tests.server.test_ssd import IDENTITY, places, store_dense, store_group
from tests.storage.faulty_disk import FaultyDisk, FaultyFile

DAY_BYTES = 24 << 20


def not_admitted(world: SsdWorld) -> dict[str, int]:
    return {name: count for name, count in world.node.stats_document()["ssd"]["not_admitted"].items() if count}


async def until(world: SsdWorld, *, is_below_floor: bool) -> None:
    for _ in range(100):
        if world.node.stats_document()["ssd"]["is_below_floor"] is is_below_floor:
            return
        await asyncio.sleep(0)
    raise AssertionError("nobody looks at the free room")


async def test_under_a_budget_a_cache_is_written_at_its_second_touch() -> None:
    async with SsdWorld(policy=SsdPolicy(write_budget_bytes=DAY_BYTES)) as world:
        client = world.client()
        stored = await store_dense(client, 2)
        await written(world)
        assert places(world, stored) == ["host", "host"]
        assert not_admitted(world) == {"once_used": 2}
        await client.release((await client.find(stored[0][0]))[1])
        await written(world)
        assert places(world, stored) == ["both", "host"]


async def test_a_mirror_of_a_master_on_ssd_is_written_whatever_the_budget_says() -> None:
    async with SsdWorld(policy=SsdPolicy(write_budget_bytes=DAY_BYTES)) as world:
        client = world.client()
        stored = await store_group(client, mirrors=0)
        await client.release((await client.find(stored[0][0]))[1])
        stored = await store_group(client, "other", mirrors=1)
        await client.release((await client.find(stored[1][0]))[1])
        await written(world)
        assert places(world, stored) == ["both", "both"]


async def test_mirrors_are_written_at_their_own_second_touch_too() -> None:
    async with SsdWorld(policy=SsdPolicy(write_budget_bytes=DAY_BYTES)) as world:
        client = world.client()
        stored = await store_group(client)
        await written(world)
        for meta, _ in stored:
            await client.release((await client.find(meta))[1])
        await written(world)
        assert places(world, stored) == ["both"] * 3


async def test_a_spent_budget_fills_with_time_and_not_with_the_time_of_day() -> None:
    async with SsdWorld(policy=SsdPolicy(write_budget_bytes=24 * 8000)) as world:
        client = world.client()
        stored = await store_dense(client, 3)
        for meta, _ in stored[:2]:
            await client.release((await client.find(meta))[1])
            await written(world)
        assert places(world, stored) == ["both", "host", "host"], "an hour's worth is one record"
        assert not_admitted(world)["budget"] == 1
        world.clock.now_s += 3600
        await client.release((await client.find(stored[2][0]))[1])
        await written(world)
        assert places(world, stored) == ["both", "host", "both"]


async def test_below_the_floor_nothing_is_written_and_free_places_go_back_and_above_it_it_goes_on() -> None:
    disk = FaultyDisk(capacity_bytes=16 << 20)
    world = SsdWorld(disk, policy=SsdPolicy(free_floor_bytes=6 << 20), limits=NodeLimits(upkeep_interval_s=0.0))
    async with world:
        client = world.client()
        stored = await store_dense(client, 4)
        await written(world)
        await client.delete(stored[3][0])
        physical = world.ssd.slab.physical_bytes()
        disk.open("a stranger's", 10 << 20)
        await until(world, is_below_floor=True)
        assert world.ssd.slab.physical_bytes() < physical
        meta = make_meta(IDENTITY, "below")
        await client.store(meta, make_planes())
        await written(world)
        assert where(world, meta) == "host"
        assert not_admitted(world) == {"floor": 1}
        disk.remove("a stranger's")
        await until(world, is_below_floor=False)
        meta = make_meta(IDENTITY, "above")
        await client.store(meta, make_planes())
        await written(world)
        assert where(world, meta) == "both"
        world.check()


async def test_a_punch_that_fails_keeps_the_room_and_the_floor() -> None:
    disk = FaultyDisk(capacity_bytes=16 << 20)
    disk.facts = replace(disk.facts, can_punch=True)
    world = SsdWorld(disk, policy=SsdPolicy(free_floor_bytes=6 << 20), limits=NodeLimits(upkeep_interval_s=0.0))
    async with world:
        client = world.client()
        stored = await store_dense(client, 4)
        await written(world)
        await client.delete(stored[1][0])
        used, punch = world.ssd.slab.used_bytes, FaultyFile.punch
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(FaultyFile, "punch", failing_punch)
            disk.open("a stranger's", 10 << 20)
            await until(world, is_below_floor=True)
            for _ in range(20):
                await asyncio.sleep(0)
            assert world.node.stats_document()["ssd"]["is_below_floor"]
        assert FaultyFile.punch is punch
        assert world.ssd.slab.used_bytes == used


def failing_punch(file: FaultyFile, offset: int, length: int) -> None:
    raise DiskError(f"{file.name}: {length} bytes at {offset} are not given back")


async def test_a_record_larger_than_the_slab_stays_in_memory() -> None:
    async with SsdWorld(slab_bytes=3 * 4096) as world:
        stored = await store_dense(world.client(), 1)
        await written(world)
        assert places(world, stored) == ["host"]
        assert not_admitted(world) == {"too_large": 1}


async def test_every_reason_is_there_at_zero_from_the_start() -> None:
    async with SsdWorld() as world:
        assert world.node.stats_document()["ssd"]["not_admitted"] == {one.name.lower(): 0 for one in NotAdmitted}


@pytest.mark.parametrize("is_write_through", [True, False])
async def test_what_the_slab_takes_never_exceeds_its_size(is_write_through: bool) -> None:
    async with SsdWorld(slab_bytes=1 << 17, policy=SsdPolicy(is_write_through=is_write_through)) as world:
        client = world.client()
        await store_dense(client, 60)
        await written(world)
        assert len(world.disk.raw(SLAB_NAME)) == 1 << 17
        assert world.ssd.slab.physical_bytes() <= 1 << 17
