"""Wrong bytes are never a hit, in whatever tier they went wrong; what was deleted stays deleted."""

import numpy as np
import pytest

from kvservice.departures import Gone
from kvservice.model.plan import MissReason, Outcome
from kvservice.ssd import SsdPolicy
from kvservice.storage.admission import NotAdmitted
from kvservice.storage.slab import SLAB_NAME
from kvservice.wire.v1 import cache_pb2 as wire
from tests.server.builders import Client, GatedWorker, cache_of, encode_key, make_meta, make_planes, until_parked
from tests.server.ssd_world import SsdWorld, arrived, assert_all_read, leave_host, read_back, where, written
from tests.server.test_ssd import IDENTITY, places, store_dense, store_group
from tests.storage.faulty_disk import NO_FAULTS, Faults


def flip_on_slab(world: SsdWorld, offset: int, at: int) -> None:
    world.disk.raw(SLAB_NAME)[offset + at] ^= 1


async def verify(client: Client, *metas: object) -> list[Outcome]:
    keys = [encode_key(meta.key) for meta in metas]  # type: ignore[attr-defined]
    reply = await client.call("Verify", wire.VerifyRequest(namespace=IDENTITY.namespace(), keys=keys))
    return [Outcome(one) for one in reply.outcomes]


async def test_a_record_that_went_wrong_on_ssd_is_told_as_corrupt_and_never_found_again() -> None:
    async with SsdWorld() as world:
        client = world.client()
        stored = await store_dense(client, 2)
        await written(world)
        metas = [meta for meta, _ in stored]
        await leave_host(world, *metas)
        cache = cache_of(world, metas[0])
        assert cache is not None
        flip_on_slab(world, cache.ssd_offset, cache.record_bytes - 100)
        _, lease = await client.find(metas[0])
        (arrival,) = await arrived(client, lease)
        assert arrival.error.code == "CORRUPT"
        assert arrival.layers < 4, "no layer counts that is not right"
        world.check()
        await client.release(lease)
        assert places(world, stored) == ["none", "ssd"]
        assert world.node.counters.corrupt == {"host": 0, "ssd": 1, "remote": 0}
        assert world.node.tier.used_bytes == 0
        await assert_all_read(world, client, IDENTITY, stored[1:])


async def test_a_master_that_went_wrong_takes_its_mirrors_along() -> None:
    async with SsdWorld() as world:
        client = world.client()
        stored = await store_group(client)
        await written(world)
        await leave_host(world, *(meta for meta, _ in stored))
        cache = cache_of(world, stored[0][0])
        assert cache is not None
        flip_on_slab(world, cache.ssd_offset, 4096)
        _, lease = await client.find(stored[1][0])
        assert "CORRUPT" in [one.error.code for one in await arrived(client, lease)]
        assert places(world, stored) == ["none"] * 3
        await client.release(lease)
        world.check()
        assert not world.node.catalog.hidden


async def test_a_quarantined_place_is_not_given_away_before_the_next_start() -> None:
    world = SsdWorld()
    async with world:
        client = world.client()
        stored = await store_dense(client, 2)
        await written(world)
        await leave_host(world, *(meta for meta, _ in stored))
        cache = cache_of(world, stored[0][0])
        assert cache is not None
        used, offset = world.ssd.slab.used_bytes, cache.ssd_offset
        flip_on_slab(world, offset, 5000)
        assert await verify(client, stored[0][0], stored[1][0]) == [Outcome.CORRUPT, Outcome.HIT]
        assert world.ssd.slab.used_bytes == used
        assert world.node.counters.quarantined_bytes == cache.record_bytes
    async with world.again() as again:
        assert places(again, stored) == ["none", "ssd"]
        assert again.ssd.slab.used_bytes < used


async def test_memory_that_went_wrong_is_read_again_from_ssd() -> None:
    async with SsdWorld() as world:
        client = world.client()
        stored = await store_dense(client, 1)
        await written(world)
        cache = cache_of(world, stored[0][0])
        assert cache is not None
        world.arena.view[cache.offset + 5000] ^= 4
        assert await verify(client, stored[0][0]) == [Outcome.CORRUPT]
        assert places(world, stored) == ["ssd"]
        await assert_all_read(world, client, IDENTITY, stored)
        assert await verify(client, stored[0][0]) == [Outcome.HIT]


async def test_memory_that_went_wrong_under_a_lease_is_not_found_until_the_lease_ends() -> None:
    async with SsdWorld() as world:
        client = world.client()
        stored = await store_dense(client, 1)
        await written(world)
        _, lease = await client.find(stored[0][0])
        cache = cache_of(world, stored[0][0])
        assert cache is not None
        world.arena.view[cache.offset + 5000] ^= 4
        await verify(client, stored[0][0])
        found, none = await client.find(stored[0][0])
        assert (found.outcome, found.miss_reason, none) == (Outcome.CORRUPT, MissReason.CORRUPT, 0)
        world.check()
        await client.release(lease)
        await assert_all_read(world, client, IDENTITY, stored)


async def test_without_an_ssd_copy_wrong_memory_is_gone() -> None:
    async with SsdWorld(policy=SsdPolicy(is_write_through=False)) as world:
        client = world.client()
        stored = await store_group(client)
        cache = cache_of(world, stored[0][0])
        assert cache is not None
        world.arena.view[cache.offset + 5000] ^= 4
        assert await verify(client, stored[2][0]) == [Outcome.CORRUPT], "its master is a part of it"
        assert places(world, stored) == ["none"] * 3
        world.check()


async def test_the_scrubber_finds_a_wrong_record_and_writes_it_anew_from_memory() -> None:
    async with SsdWorld() as world:
        client = world.client()
        stored = await store_dense(client, 3)
        await written(world)
        caches = [cache_of(world, meta) for meta, _ in stored]
        assert caches[0] is not None
        assert caches[1] is not None
        flip_on_slab(world, caches[0].ssd_offset, 5000)
        world.arena.view[caches[1].offset + 5000] ^= 4
        for cache in caches:
            assert cache is not None
            await world.ssd.scrubber.check(cache)
        await written(world)
        assert places(world, stored) == ["both", "ssd", "both"]
        assert world.node.counters.corrupt == {"host": 1, "ssd": 1, "remote": 0}
        assert world.node.counters.scrubbed_caches == 3
        await leave_host(world, *(meta for meta, _ in stored))
        await assert_all_read(world, client, IDENTITY, stored)


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("is_leased", [False, True])
async def test_what_was_deleted_stays_deleted_after_a_kill(which: int, is_leased: bool) -> None:
    world = SsdWorld()
    async with world:
        client = world.client()
        stored = await store_group(client)
        await written(world)
        if is_leased:
            await client.find(stored[which][0])
        await client.delete(stored[which][0])
        await world.kill()
    left = [one for index, one in enumerate(stored) if index != which]
    for _ in range(2):  # and after a second start, which believes or checks what the first one left
        async with world.again() as world:
            assert cache_of(world, stored[which][0]) is None
            assert len(world.node.catalog.hidden) == (which == 0)
            world.check()
            await assert_all_read(world, world.client(), IDENTITY, left)


async def test_the_last_mirror_of_a_deleted_master_takes_master_and_tombstone_along() -> None:
    world = SsdWorld()
    async with world:
        client = world.client()
        stored = await store_group(client)
        await written(world)
        await client.delete(stored[0][0])
        await client.delete(*(meta for meta, _ in stored[1:]))
        assert not world.node.catalog.hidden
        await world.ssd.demotion.settle()
        assert not world.ssd.demotion.tombstones
        (identity,) = (note for note in world.opened.index.notes())
        assert world.ssd.slab.used_bytes == -(-(identity.extent.length + 64) // 4096) * 4096
        await world.kill()
    async with world.again() as again:
        assert not again.opened.report.records


async def test_a_deleted_cache_may_be_stored_anew_and_its_old_master_serves_the_mirrors() -> None:
    world = SsdWorld()
    async with world:
        client = world.client()
        stored = await store_group(client)
        await written(world)
        await client.delete(stored[0][0])
        (anew,) = await store_dense(client, 1)
        stored[0] = stored[0][0], anew[1]
        await client.store(*stored[0])
        await written(world)
        await world.kill()
    async with world.again() as again:
        await assert_all_read(again, again.client(), IDENTITY, [*stored, anew])


async def test_what_is_deleted_on_its_way_from_ssd_is_gone_when_it_has_arrived() -> None:
    reads = GatedWorker()
    world = SsdWorld(reads=reads)
    async with world:
        client = world.client()
        stored = await store_dense(client, 1)
        await written(world)
        await leave_host(world, stored[0][0])
        _, lease = await client.find(stored[0][0])
        await until_parked(reads)
        cache = cache_of(world, stored[0][0])
        assert cache is not None
        world.node.catalog.hide(cache, Gone.DELETED)
        reads.release()
        assert not (await arrived(client, lease))[0].error.code, "a lease is kept"
        await world.ssd.bury([cache])
        await world.kill()
    async with world.again() as again:
        assert places(again, stored) == ["none"]


async def test_a_load_without_room_is_a_miss_that_says_so() -> None:
    async with SsdWorld(arena_bytes=3 * 12288 + 4096, staging_bytes=4096) as world:
        client = world.client()
        stored = await store_dense(client, 5)
        await written(world)
        await leave_host(world, *(meta for meta, _ in stored[:3]), *(meta for meta, _ in stored[3:]))
        leases = [(await client.find(meta))[1] for meta, _ in stored[:3]]
        found, lease = await client.find(stored[3][0])
        assert (found.outcome, found.miss_reason, lease) == (Outcome.MISS, MissReason.NO_ROOM, 0)
        world.check()
        for lease in leases:
            await arrived(client, lease)
        await client.release(*leases)
        await assert_all_read(world, client, IDENTITY, stored)


async def test_a_full_tier_of_leases_still_loads_through_the_staging_area() -> None:
    async with SsdWorld(arena_bytes=3 * 12288 + 12288, staging_bytes=12288) as world:
        client = world.client()
        stored = await store_dense(client, 5)
        await written(world)
        await leave_host(world, *(meta for meta, _ in stored))
        for meta, _ in stored[:3]:
            await arrived(client, (await client.find(meta))[1])
        for meta, planes in stored[3:]:
            await assert_all_read(world, client, IDENTITY, [(meta, planes)])
            assert where(world, meta) == "ssd", "it went with its lease"
        assert world.node.counters.loads.staged == 2
        world.check()


async def test_an_arrival_of_a_strangers_or_ended_lease_is_an_error() -> None:
    async with SsdWorld() as world:
        client = world.client()
        stored = await store_dense(client, 1)
        await written(world)
        _, lease = await client.find(stored[0][0])
        with pytest.raises(Exception, match="another session"):
            await world.client().call("Await", wire.AwaitRequest(lease_id=lease))
        await client.release(lease)
        with pytest.raises(Exception, match="look up again"):
            await client.call("Await", wire.AwaitRequest(lease_id=lease))


async def test_a_session_that_ends_while_its_records_arrive_leaves_nothing_held() -> None:
    reads = GatedWorker()
    async with SsdWorld(reads=reads) as world:
        client = world.client()
        stored = await store_dense(client, 1)
        await written(world)
        await leave_host(world, stored[0][0])
        await client.find(stored[0][0])
        await until_parked(reads)
        client.close()
        cache = cache_of(world, stored[0][0])
        assert cache is not None
        assert cache.holds == 1, "the thread writes there"
        reads.release()
        await world.ssd.promotion.stop()
        assert not cache.holds
        assert places(world, stored) == ["both"]


async def test_a_record_of_another_generation_in_its_place_is_corrupt() -> None:
    async with SsdWorld() as world:
        client = world.client()
        stored = await store_dense(client, 2)
        await written(world)
        await leave_host(world, *(meta for meta, _ in stored))
        one, other = (cache_of(world, meta) for meta, _ in stored)
        assert one is not None
        assert other is not None
        slab = world.disk.raw(SLAB_NAME)
        np.copyto(slab[one.ssd_offset : one.ssd_offset + 12288], slab[other.ssd_offset : other.ssd_offset + 12288])
        assert await verify(client, stored[0][0], stored[1][0]) == [Outcome.CORRUPT, Outcome.HIT]
        assert await read_back(world, client, IDENTITY, stored[0][0]) is None


async def test_a_disk_that_refuses_to_write_never_fails_a_client() -> None:
    world = SsdWorld()
    async with world:
        client = world.client()
        await store_dense(client, 1)
        await written(world)
        world.disk.faults = Faults(is_full=1.0)
        meta, planes = make_meta(IDENTITY, "while full"), make_planes(seed=9)
        await client.store(meta, planes)
        await written(world)
        assert where(world, meta) == "host"
        assert world.ssd.admission.refused[NotAdmitted.NO_ROOM] == 1
        world.disk.faults = NO_FAULTS
        cache = cache_of(world, meta)
        assert cache is not None
        world.ssd.note_published(cache)
        await written(world)
        assert where(world, meta) == "both", "it goes on once there is room"
        world.check()
