"""A durable SSD tier: what is promised holds after a power failure, and a sync that failed is not believed later on."""

import asyncio
import random
from typing import TypeVar

import pytest

from kvservice.model.errors import DiskError
from kvservice.ssd import SsdPolicy, Workers
from kvservice.worker import InlineWorker
from tests.server.builders import GatedWorker, cache_of, make_meta, make_planes, until_parked
from tests.server.ssd_world import SsdWorld, assert_all_read, end_tasks, where, written
from tests.server.test_ssd import IDENTITY, store_dense, store_group
from tests.simulation.world import SimPlace
from tests.storage.faulty_disk import NO_FAULTS, Faults

T = TypeVar("T")
DURABLE = SsdPolicy(is_durable=True)


def durable_world(seed: int, index: GatedWorker | None = None) -> SsdWorld:
    inline, place = InlineWorker(), SimPlace(random.Random(seed), is_durable=True)
    return SsdWorld(seed=seed, place=place, policy=DURABLE, workers=Workers(inline, inline, index or inline, inline))


async def after_power_failure(world: SsdWorld) -> SsdWorld:
    assert isinstance(world.place, SimPlace)
    world.place, world.disk, world.is_dead = world.place.heir(), world.disk.crash(), True
    await end_tasks()
    return world.again(policy=DURABLE)


@pytest.mark.parametrize("seed", range(12))
async def test_a_tombstone_never_goes_before_what_it_buries(seed: int) -> None:
    index = GatedWorker()
    world = durable_world(seed, index)
    async with world:
        client = world.client()
        storing = asyncio.create_task(store_group(client))
        stored = await _finished(storing, index)
        await _finished(asyncio.create_task(written(world)), index)
        await _finished(asyncio.create_task(client.delete(stored[0][0])), index)
        calls = [asyncio.create_task(client.delete(*(meta for meta, _ in stored[1:])))]
        await until_parked(index)
        assert not calls[0].done()
        async with await after_power_failure(world) as again:
            assert where(again, stored[0][0]) == "none"


async def _finished(task: "asyncio.Task[T]", index: GatedWorker) -> T:
    """Let index changes through until the task is done."""
    for _ in range(200):
        await asyncio.sleep(0)
        if task.done():
            break
        if index.parked:
            index.release()
    return await task


@pytest.mark.parametrize("seed", range(6))
async def test_what_was_erased_and_not_synced_is_not_deleted_yet(seed: int) -> None:
    world = durable_world(seed)
    async with world:
        client = world.client()
        ((meta, _),) = await store_dense(client, 1)
        await written(world)
        world.disk.faults = Faults(sync_error=1.0)
        with pytest.raises(DiskError):
            await client.delete(meta)
        world.disk.faults = NO_FAULTS
        assert await client.delete(meta) == 0
        async with await after_power_failure(world) as again:
            assert where(again, meta) == "none"


async def test_a_record_that_was_written_while_a_sync_failed_does_not_count_as_written() -> None:
    index = GatedWorker()
    world = durable_world(1, index)
    async with world:
        client = world.client()
        stored = await store_dense(client, 1)
        await _finished(asyncio.create_task(written(world)), index)
        for name in ("first", "second"):
            stored.append((make_meta(IDENTITY, name), make_planes(seed=len(name))))
            await client.store(*stored[-1])
        await until_parked(index)
        for _ in range(30):
            await asyncio.sleep(0)
        world.disk.faults = Faults(sync_error=1.0)
        index.release()  # the change of the first; the data of the second is written, too
        await until_parked(index)
        world.disk.faults = NO_FAULTS
        await _finished(asyncio.create_task(written(world)), index)
        assert [where(world, meta) for meta, _ in stored] == ["both", "host", "host"]
        for meta, _ in stored[1:]:
            cache = cache_of(world, meta)
            assert cache is not None
            world.ssd.note_published(cache)
        await _finished(asyncio.create_task(written(world)), index)
        assert [where(world, meta) for meta, _ in stored] == ["both"] * 3
        async with await after_power_failure(world) as again:
            await assert_all_read(again, again.client(), IDENTITY, stored)


async def test_the_room_of_what_could_not_be_removed_comes_back_once_the_disk_syncs_again() -> None:
    world = durable_world(3)
    async with world:
        client = world.client()
        stored = await store_dense(client, 2)
        await written(world)
        cache = cache_of(world, stored[0][0])
        assert cache is not None
        world.disk.faults = Faults(sync_error=1.0)
        world.node.catalog.drop_ssd(cache)  # as an eviction would
        await world.ssd.demotion.settle()
        world.disk.faults = NO_FAULTS
        used = world.ssd.slab.used_bytes
        await client.delete(stored[1][0])
        assert world.ssd.slab.used_bytes < used // 2
        assert where(world, stored[0][0]) == "host"


@pytest.mark.parametrize("seed", [8, 20, 24, 72, 83])  # disks that keep the data, and not its erasure
async def test_a_record_whose_writing_and_erasing_were_not_synced_does_not_outlast_its_delete(seed: int) -> None:
    world = durable_world(seed)
    async with world:
        client = world.client()
        await store_dense(client, 1)
        await written(world)
        world.disk.faults = Faults(sync_error=1.0)
        meta = make_meta(IDENTITY, "second")
        await client.store(meta, make_planes(seed=7))
        for _ in range(50):
            await asyncio.sleep(0)
        assert world.node.counters.demotions.failed == 1
        world.disk.faults = NO_FAULTS
        assert await client.delete(meta) == 1
        async with await after_power_failure(world) as again:
            assert where(again, meta) == "none"
