"""What was committed survives eviction, a stop, a kill and the loss of the index; masters go before mirrors."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from kvservice.limits import NodeLimits
from kvservice.model.cache import CacheMeta, MasterReference
from kvservice.ssd import SsdPolicy
from kvservice.storage.recovery import RecoveryKind
from kvservice.storage.ssd_index import NaivePlace
from tests.server.builders import (
    Client,
    Planes,
    World,
    cache_of,
    diff_of,
    equal_planes,
    make_identity,
    make_meta,
    make_planes,
    make_relative,
)
from tests.server.ssd_world import SsdWorld, assert_all_read, leave_host, read_back, where, written

IDENTITY = make_identity()
Stored = list[tuple[CacheMeta, Planes]]


async def store_dense(client: Client, count: int) -> Stored:
    stored = [(make_meta(IDENTITY, name), make_planes(seed=name)) for name in range(count)]
    for meta, planes in stored:
        await client.store(meta, planes)
    return stored


async def store_group(client: Client, name: object = "shared", mirrors: int = 2) -> Stored:
    """A master and its mirrors, with a row replaced in each."""
    planes, meta = make_planes(), make_meta(IDENTITY, name)
    reference = await client.store(meta, planes)
    stored = [(meta, planes)]
    for number in range(mirrors):
        mirror = make_meta(IDENTITY, name, [f"history {number}"], master=reference)
        theirs = make_relative(IDENTITY, planes, 0, mirror.position, rows=[number])
        await client.store(mirror, theirs, diff_of(IDENTITY, planes, 0, theirs, mirror.position))
        stored.append((mirror, theirs))
    return stored


def places(world: World, stored: Sequence[tuple[CacheMeta, Planes]]) -> list[str]:
    return [where(world, meta) for meta, _ in stored]


async def test_a_cache_is_on_both_tiers_soon_after_its_commit_and_found_on_ssd_after_eviction() -> None:
    async with SsdWorld() as world:
        client = world.client()
        stored = await store_dense(client, 3)
        await written(world)
        assert places(world, stored) == ["both"] * 3
        await leave_host(world, *(meta for meta, _ in stored))
        world.check()
        await assert_all_read(world, client, IDENTITY, stored)
        assert places(world, stored) == ["both"] * 3
        lookups = world.node.stats_document()["lookups"]
        assert (lookups["exact"], lookups["from_ssd"]) == (3, 3)


async def test_a_mirror_and_its_master_are_read_together() -> None:
    async with SsdWorld() as world:
        client = world.client()
        stored = await store_group(client)
        await written(world)
        await leave_host(world, *(meta for meta, _ in stored))
        found = await read_back(world, client, IDENTITY, stored[1][0])
        assert found is not None
        assert equal_planes(found, stored[1][1])
        assert places(world, stored) == ["both", "both", "ssd"]
        assert world.node.stats_document()["loads"]["done"] == 2
        world.check()


@pytest.mark.parametrize("end", ["stopped", "killed", "index lost", "index damaged"])
async def test_everything_is_back_after_a_restart(end: str) -> None:
    world = SsdWorld()
    async with world:
        client = world.client()
        stored = await store_dense(client, 4) + await store_group(client)
        await written(world)
        epoch, used = world.node.boot_epoch, world.ssd.slab.used_bytes
        if end != "stopped":
            await world.kill()
    if end == "index lost":
        world.place = NaivePlace()
    world.place.is_damaged = end == "index damaged"
    async with world.again() as again:
        kinds = {"stopped": RecoveryKind.CLEAN, "killed": RecoveryKind.CHECKED}
        assert again.opened.report.kind is kinds.get(end, RecoveryKind.REBUILT)
        assert again.node.boot_epoch > epoch
        assert again.ssd.slab.used_bytes == used
        again.check()
        assert places(again, stored) == ["ssd"] * len(stored)
        await assert_all_read(again, again.client(), IDENTITY, stored)


async def test_a_stop_brings_to_ssd_what_was_only_in_memory() -> None:
    world = SsdWorld(policy=SsdPolicy(is_write_through=False))
    async with world:
        stored = await store_group(world.client())
        await written(world)
        assert places(world, stored) == ["host"] * 3
    async with world.again() as again:
        await assert_all_read(again, again.client(), IDENTITY, stored)


async def test_a_restart_without_any_session_keeps_what_nobody_asked_for_yet() -> None:
    world = SsdWorld()
    async with world:
        stored = await store_dense(world.client(), 2)
    for _ in range(2):
        async with world.again() as world:
            world.check()
    async with world.again() as again:
        await assert_all_read(again, again.client(), IDENTITY, stored)


async def test_memory_that_is_full_evicts_to_ssd_and_loses_nothing() -> None:
    async with SsdWorld(arena_bytes=(64 << 10) + 12 * 12288) as world:
        client = world.client()
        stored = await store_dense(client, 40)
        await written(world)
        assert world.node.counters.host_evictions.groups >= 28
        assert world.node.counters.host_evictions.lost == 0
        await assert_all_read(world, client, IDENTITY, stored)


async def test_writing_back_keeps_the_next_to_go_on_ssd() -> None:
    policy = SsdPolicy(is_write_through=False)
    async with SsdWorld(arena_bytes=(64 << 10) + 12 * 12288, policy=policy) as world:
        client = world.client()
        for name in range(40):
            await client.store(make_meta(IDENTITY, name), make_planes(seed=name))
            await written(world)
        assert world.node.counters.host_evictions.groups >= 28
        assert world.node.counters.host_evictions.lost == 0
        assert 28 <= world.node.counters.demotions.written < 40


async def test_a_slab_that_is_full_gives_up_what_is_worth_least() -> None:
    async with SsdWorld(slab_bytes=10 * 16384) as world:
        client = world.client()
        stored = await store_dense(client, 30)
        await written(world)
        counters = world.node.counters
        assert counters.ssd_evictions.groups >= 17
        assert world.ssd.slab.used_bytes <= world.ssd.slab.capacity_bytes
        world.check()
        await assert_all_read(world, client, IDENTITY, stored)


async def test_a_group_leaves_the_slab_as_a_whole_and_never_while_it_is_held() -> None:
    async with SsdWorld(slab_bytes=12 * 16384) as world:
        client = world.client()
        stored = await store_group(client)
        await written(world)
        await leave_host(world, *(meta for meta, _ in stored))
        found, lease = await client.find(stored[2][0])
        for name in range(30):
            await client.store(make_meta(IDENTITY, name), make_planes(seed=name))
            await written(world)
        assert places(world, stored) == ["both", "ssd", "both"]
        assert equal_planes(world.read(IDENTITY, found), stored[2][1])
        await client.release(lease)
        while world.node.catalog.evict_ssd():
            await world.ssd.demotion.settle()
        assert places(world, stored) == ["host", "none", "host"]
        world.check()


async def test_a_cache_whose_bytes_went_wrong_in_memory_never_reaches_ssd() -> None:
    async with SsdWorld(policy=SsdPolicy(is_write_through=False)) as world:
        client = world.client()
        ((meta, _),) = await store_dense(client, 1)
        cache = cache_of(world, meta)
        assert cache is not None
        world.arena.view[cache.offset + cache.record_bytes - 70] ^= 1
        assert not await world.ssd.demotion.write(cache)
        assert where(world, meta) == "none"
        assert world.node.counters.corrupt == {"host": 1, "ssd": 0, "remote": 0}
        assert world.ssd.slab.used_bytes <= 8192  # the identity
        world.check()


@pytest.mark.parametrize("is_new_form_written", [False, True])
async def test_a_folded_cache_is_never_without_a_form_on_ssd(is_new_form_written: bool) -> None:
    world = SsdWorld(limits=NodeLimits(fold_queue_max=0))
    async with world:
        client = world.client()
        stored = await store_dense(client, 1)
        near = make_relative(IDENTITY, stored[0][1], 0, 0, rows=[3])
        stored.append((make_meta(IDENTITY, 0, provenance="hkvd"), near))
        await client.store(*stored[1])
        await written(world)
        assert world.node.catalog.totals.masters == 2
        await client.commit_round(IDENTITY, *(meta for meta, _ in stored))
        assert world.node.catalog.totals.mirrors == 1
        assert len(world.node.catalog.superseded) == 1
        if is_new_form_written:
            await written(world)
            assert not len(world.node.catalog.superseded)
            assert places(world, stored) == ["both", "both"]
        world.check()
        await world.kill()
    async with world.again() as again:
        await assert_all_read(again, again.client(), IDENTITY, stored)
        assert again.node.catalog.totals.mirrors == is_new_form_written


async def test_a_larger_slab_may_be_asked_for_at_the_next_start() -> None:
    world = SsdWorld()
    async with world:
        stored = await store_dense(world.client(), 2)
    async with world.again(slab_bytes=8 << 20) as again:
        assert again.ssd.slab.slab_bytes == 8 << 20
        await assert_all_read(again, again.client(), IDENTITY, stored)


async def test_the_seconds_that_a_prefill_took_survive_a_restart() -> None:
    world = SsdWorld()
    async with world:
        (stored,) = await store_dense(world.client(), 1)
        cache = cache_of(world, stored[0])
        assert cache is not None
        cache.prefill_s = 2.5
        await written(world)
    async with world.again() as again:
        cache = cache_of(again, stored[0])
        assert cache is not None
        assert cache.prefill_s == replace(again.opened.report, seconds=2.5).seconds == 2.5


async def test_a_mirror_of_a_master_that_is_on_ssd_only_is_written() -> None:
    world = SsdWorld()
    async with world:
        client = world.client()
        stored = await store_group(client, mirrors=0)
        cache = cache_of(world, stored[0][0])
        await written(world)
        await leave_host(world, stored[0][0])
        assert cache is not None
        reference = MasterReference(cache.context, cache.generation)
        meta = make_meta(IDENTITY, "shared", ["history"], master=reference)
        planes = make_relative(IDENTITY, stored[0][1], 0, meta.position, rows=[1])
        await client.store(meta, planes, diff_of(IDENTITY, stored[0][1], 0, planes, meta.position))
        stored.append((meta, planes))
        await written(world)
        assert places(world, stored) == ["ssd", "both"]
        await world.kill()
    async with world.again() as again:
        await assert_all_read(again, again.client(), IDENTITY, stored)
