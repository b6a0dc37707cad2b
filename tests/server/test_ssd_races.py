"""Bugs that the simulation met: what happens between two steps of the SSD tier. One test a bug."""

import asyncio

from kvservice.ssd import Workers
from kvservice.wire.v1 import cache_pb2 as wire
from kvservice.worker import InlineWorker
from tests.server.builders import GatedWorker, cache_of, equal_planes, make_meta, make_planes, query, until_parked
from tests.server.ssd_world import SsdWorld, arrived, leave_host, read_back, where, written
from tests.server.test_ssd import IDENTITY, store_dense, store_group

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
        assert sorted(one.layers for one in heard.arrivals) == [0, 4]
        request.known.extend(heard.arrivals)
        waiting = asyncio.create_task(client.call("Await", request))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not waiting.done(), "a client would ask again and again"
        reads.release()
        assert [one.layers for one in (await waiting).arrivals] == [4, 4]
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
        assert world.node.counters.corrupt == {"host": 0, "ssd": 0}
        world.check()
