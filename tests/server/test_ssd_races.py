"""Bugs that the simulation met: what happens between two steps of the SSD tier. One test a bug."""

import asyncio
import random

import pytest

from kvservice.ssd import SsdPolicy, Workers
from kvservice.storage.slab import SLAB_NAME
from kvservice.wire.v1 import cache_pb2 as wire
from kvservice.worker import InlineWorker
from tests.server.builders import GatedWorker, cache_of, equal_planes, make_meta, make_planes, query, until_parked
from tests.server.ssd_world import (
    SsdWorld,
    arrived,
    assert_all_read,
    end_tasks,
    leave_host,
    read_back,
    where,
    written,
)
from tests.server.test_ssd import IDENTITY, store_dense, store_group
from tests.simulation.world import SimPlace
from tests.storage.faulty_disk import NO_FAULTS, Faults

SLOT = 12288
"""What a dense record of the builders takes of the arena."""


async def test_an_await_waits_for_what_is_on_its_way_though_another_record_is_there() -> None:
    reads = GatedWorker()
    async with SsdWorld(reads=reads) as world:
        client = world.client()
        stored = await store_dense(client, 2)
        await written(world)
        await leave_host(world, *(meta for meta, _ in stored))
        reply = await client.lookup(*(query(meta) for meta, _ in stored))
        await until_parked(reads)
        reads.release()
        request = wire.AwaitRequest(lease_id=reply.lease.id)
        heard = await client.call("Await", request)
        assert [one.layers for one in heard.arrivals] == [4]
        assert heard.pending == 1
        request.step = heard.step
        waiting = asyncio.create_task(client.call("Await", request))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not waiting.done(), "a client would ask again and again"
        reads.release()
        last = await waiting
        assert [one.layers for one in last.arrivals] == [4], "what changed, and nothing else"
        assert (await client.call("Await", request)).arrivals == last.arrivals, "an answer that got lost is given again"
        assert len(await arrived(client, reply.lease.id)) == 2, "an answer without news, once all is there"


async def test_what_is_staged_leaves_no_gap_in_the_tier() -> None:
    async with SsdWorld(arena_bytes=5 * SLOT, staging_bytes=2 * SLOT) as world:
        client = world.client()
        stored = await store_dense(client, 5)
        await written(world)
        await leave_host(world, *(meta for meta, _ in stored))
        leases = [(await client.find(meta))[1] for meta, _ in stored]
        for lease in leases:
            await arrived(client, lease)
        assert world.node.counters.loads.staged == 2
        await client.release(*leases[1:4])
        outcome = await client.reserve(make_meta(IDENTITY, "large"), 2 * SLOT + 1)
        assert outcome.error.code == "CAPACITY"
        assert f"leaves {2 * SLOT} of {3 * SLOT}" in outcome.error.message
        assert world.node.counters.host_evictions.groups == 2, "when the last two were stored"
        world.check()


async def test_a_mirror_whose_master_is_on_ssd_only_does_not_count_as_room_for_a_dense_record() -> None:
    async with SsdWorld(arena_bytes=3 * SLOT + 4096 + SLOT, staging_bytes=SLOT) as world:
        client = world.client()
        (master, _), (mirror, _) = await store_group(client, mirrors=1)
        await written(world)
        await leave_host(world, master, mirror)
        for meta, planes in [(make_meta(IDENTITY, name), make_planes(seed=name)) for name in range(3)]:
            await client.store(meta, planes)
            await client.find(meta)
        _, lease = await client.find(mirror)
        await arrived(client, lease)
        await client.release(lease)
        assert (where(world, master), where(world, mirror)) == ("ssd", "both")
        assert (await client.reserve(make_meta(IDENTITY, "more"), SLOT)).error.code == "CAPACITY"
        assert (where(world, master), where(world, mirror)) == ("ssd", "both"), "nothing was evicted for nothing"


async def test_a_deleted_master_does_not_stay_in_the_staging_area() -> None:
    async with SsdWorld(arena_bytes=3 * SLOT + SLOT + 4096, staging_bytes=SLOT + 4096) as world:
        client = world.client()
        (master, _), (mirror, planes) = await store_group(client, mirrors=1)
        await written(world)
        await leave_host(world, master, mirror)
        for meta, others in [(make_meta(IDENTITY, name), make_planes(seed=name)) for name in range(3)]:
            await client.store(meta, others)
            await client.find(meta)
        _, lease = await client.find(mirror)
        await arrived(client, lease)
        assert world.node.counters.loads.staged == 2
        await client.delete(master)
        await client.release(lease)
        world.check()
        assert world.node.tier.staging is not None
        assert world.node.tier.staging.used_bytes == 0
        found = await read_back(world, client, IDENTITY, mirror)
        assert found is not None
        assert equal_planes(found, planes)


async def test_what_is_deleted_while_the_scrubber_reads_it_is_no_error() -> None:
    inline, scrub = InlineWorker(), GatedWorker()
    async with SsdWorld(workers=Workers(inline, inline, inline, scrub)) as world:
        client = world.client()
        ((meta, _),) = await store_dense(client, 1)
        await written(world)
        await leave_host(world, meta)
        cache = cache_of(world, meta)
        assert cache is not None
        looking = asyncio.create_task(world.ssd.scrubber.check(cache))
        await until_parked(scrub)
        await client.delete(meta)
        scrub.release()
        assert await looking, "nothing wrong was seen"
        assert world.node.counters.corrupt == {"host": 0, "ssd": 0, "remote": 0}
        world.check()


@pytest.mark.parametrize("seed", range(6))
async def test_what_a_start_found_after_a_kill_survives_a_power_failure(seed: int) -> None:
    inline, index, chance = InlineWorker(), GatedWorker(), random.Random(seed)
    world = SsdWorld(seed=seed, place=SimPlace(chance, is_durable=True), workers=Workers(inline, inline, index, inline))
    async with world:
        stored = await store_dense(world.client(), 1)
        await until_parked(index)
        index.release()  # the identity's note; the record itself is on the slab soon, and in no index
        for _ in range(30):
            await asyncio.sleep(0)
        await world.kill()
    async with world.again(policy=SsdPolicy(is_durable=True)) as again:
        assert where(again, stored[0][0]) == "ssd"
        again.disk, dead = again.disk.crash(), again.disk
        assert dead is not again.disk
        again.is_dead = True
        await end_tasks()
    async with again.again() as third:
        await assert_all_read(third, third.client(), IDENTITY, stored)


async def test_a_staged_copy_whose_record_went_wrong_on_ssd_meanwhile_goes_with_its_lease() -> None:
    async with SsdWorld(arena_bytes=SLOT + SLOT, staging_bytes=SLOT) as world:
        client = world.client()
        stored = [(make_meta(IDENTITY, name), make_planes(seed=name)) for name in range(2)]
        for meta, planes in stored:
            await client.store(meta, planes)
            await written(world)
        await leave_host(world, *(meta for meta, _ in stored))
        leases = [(await client.find(meta))[1] for meta, _ in stored]
        for lease in leases:
            await arrived(client, lease)
        cache = cache_of(world, stored[1][0])
        assert cache is not None
        assert cache.offset >= world.node.tier.staging_offset
        world.disk.raw(SLAB_NAME)[cache.ssd_offset + 5000] ^= 1
        world.disk.faults = Faults(write_error=1.0)
        assert not await world.ssd.scrubber.check(cache)
        assert where(world, stored[1][0]) == "host"
        assert await client.release(*leases) == 2
        world.check()
        assert where(world, stored[1][0]) == "none"
        world.disk.faults = NO_FAULTS
