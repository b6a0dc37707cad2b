"""What is under way comes to its end: mirrors follow a deleted master to the slab, and nobody's leaving undoes a step.

What was deleted and what a delete must wait for: test_ssd_deletion.py.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from kvservice.model.cache import CacheMeta
from kvservice.ssd import SsdPolicy
from kvservice.storage.recovery import RecoveryKind
from tests.server.builders import GatedWorker, cache_of, make_meta, make_planes, until_parked
from tests.server.ssd_world import SsdWorld, assert_all_read, where, written
from tests.server.test_ssd import IDENTITY, places, store_dense, store_group

TURNS_MAX = 100


async def turns(count: int = TURNS_MAX) -> None:
    """Let tasks run as far as they get."""
    for _ in range(count):
        await asyncio.sleep(0)


async def finished(work: Coroutine[Any, Any, Any], worker: GatedWorker) -> Any:
    """The result of ``work``, which needs the worker."""
    task = asyncio.create_task(work)
    for _ in range(TURNS_MAX):
        await turns(5)
        if task.done():
            return task.result()
        if worker.parked:
            worker.release()
    raise AssertionError("it does not end")


async def write(world: SsdWorld, *metas: CacheMeta) -> None:
    for meta in metas:
        cache = cache_of(world, meta)
        assert cache is not None
        assert await world.ssd.demotion.write(cache)


@pytest.mark.parametrize("is_stored_anew", [False, True])
@pytest.mark.parametrize("is_killed", [False, True])
async def test_mirrors_reach_ssd_though_their_master_was_deleted_before_it_did(
    is_stored_anew: bool, is_killed: bool
) -> None:
    world = SsdWorld(policy=SsdPolicy(is_write_through=False))
    async with world:
        client = world.client()
        master, *left = await store_group(client)
        await client.delete(master[0])
        if is_stored_anew:
            left.insert(0, (master[0], make_planes(seed=99)))
            await client.store(*left[0])
        await write(world, *(meta for meta, _ in left))
        world.check()
        if is_killed:
            await world.kill()
    for _ in range(2):
        async with world.again() as world:
            assert where(world, master[0]) == ("ssd" if is_stored_anew else "none")
            assert len(world.node.catalog.hidden) == 1
            await assert_all_read(world, world.client(), IDENTITY, left)
    async with world.again() as world:
        await world.client().delete(*(meta for meta, _ in left))
        await world.kill()
    assert not world.again().opened.report.records


async def test_a_deleted_master_that_left_the_slab_comes_back_hidden_with_its_mirrors() -> None:
    world = SsdWorld()
    async with world:
        client = world.client()
        stored = await store_group(client)
        await written(world)
        await client.delete(stored[0][0])
        assert world.node.catalog.evict_ssd() is not None
        await write(world, *(meta for meta, _ in stored[1:]))  # before the removal has run
        await written(world)
        assert places(world, stored) == ["none", "both", "both"]
        await world.kill()
    async with world.again() as again:
        assert places(again, stored) == ["none", "ssd", "ssd"]
        await assert_all_read(again, again.client(), IDENTITY, stored[1:])


async def test_a_delete_that_nobody_waits_for_any_more_is_done_before_the_next_one_returns() -> None:
    writes = GatedWorker()
    world = SsdWorld()
    async with world:
        client = world.client()
        stored = await store_group(client)
        await written(world)
        world.ssd.demotion._worker = writes
        first = asyncio.create_task(client.delete(stored[0][0]))
        await until_parked(writes)
        first.cancel()
        await turns()
        second = asyncio.create_task(client.delete(stored[0][0]))
        await turns()
        assert not second.done(), "the tombstone is not written"
        assert await finished(asyncio.wait_for(second, None), writes) == 0
        await world.kill()
    async with world.again() as again:
        assert where(again, stored[0][0]) == "none"
        await assert_all_read(again, again.client(), IDENTITY, stored[1:])


async def test_a_stop_in_the_middle_of_a_write_leaves_an_index_that_is_believed() -> None:
    index = GatedWorker()
    world = SsdWorld(policy=SsdPolicy(flush_s=0))
    async with world:
        client = world.client()
        stored = await store_dense(client, 1)
        await written(world)
        world.ssd.index._worker = index
        stored.append((make_meta(IDENTITY, 1), make_planes(seed=1)))
        await client.store(*stored[1])
        await until_parked(index)
        await finished(world.node.stop(), index)
        world.is_dead, world.disk = True, world.disk.kill()
    async with world.again() as again:
        assert again.opened.report.kind is RecoveryKind.CLEAN
        assert again.opened.report.records == 2
        assert not again.opened.report.dropped
        await assert_all_read(again, again.client(), IDENTITY, stored)
