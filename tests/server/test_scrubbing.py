"""The scrubber looks at what is held, and at nothing that went while it waited for its turn."""

from kvservice.storage.rate import ByteRate
from kvservice.storage.slab import SLAB_NAME
from tests.server.builders import cache_of
from tests.server.ssd_world import SsdWorld, assert_all_read, leave_host, read_back, written
from tests.server.test_ssd import IDENTITY, places, store_dense, store_group


async def test_a_pass_leaves_out_what_goes_while_it_waits_for_its_turn() -> None:
    async with SsdWorld() as world:
        client = world.client()
        dense, group = await store_dense(client, 3), await store_group(client)
        await written(world)
        waits = []

        async def pause(seconds: float) -> None:
            waits.append(seconds)
            if len(waits) == 2:
                await client.delete(dense[1][0], dense[2][0], group[0][0])

        world.ssd.scrubber._pause = pause
        world.ssd.scrubber._rate = ByteRate(1 << 20, clock=world.clock)
        await world.ssd.scrubber.run_once()
        world.check()
        assert world.node.counters.scrub_passes == 1
        assert world.node.counters.scrubbed_caches == 4, "the first, and the group with its hidden master"
        assert places(world, [dense[0], *group]) == ["both", "none", "both", "both"]
        await assert_all_read(world, client, IDENTITY, [dense[0], *group[1:]])


async def test_a_hidden_master_that_is_nowhere_right_takes_its_mirrors_along() -> None:
    async with SsdWorld() as world:
        client = world.client()
        group = await store_group(client)
        await written(world)
        master = cache_of(world, group[0][0])
        assert master is not None
        await leave_host(world, *(meta for meta, _ in group))
        await client.delete(group[0][0])
        world.disk.raw(SLAB_NAME)[master.ssd_offset + 5000] ^= 1
        assert not await world.ssd.scrubber.check(master)
        world.check()
        assert places(world, group) == ["none"] * 3
        assert not world.node.catalog.hidden


async def test_a_mirror_whose_master_is_on_ssd_only_is_looked_at_and_written_anew() -> None:
    async with SsdWorld() as world:
        client = world.client()
        group = await store_group(client, mirrors=1)
        await written(world)
        await leave_host(world, *(meta for meta, _ in group))
        mirror = cache_of(world, group[1][0])
        assert mirror is not None
        assert await read_back(world, client, IDENTITY, group[1][0]) is not None
        assert mirror.master is not None
        world.node.catalog.drop_host(mirror.master)
        world.disk.raw(SLAB_NAME)[mirror.ssd_offset + mirror.record_bytes - 70] ^= 1
        assert not await world.ssd.scrubber.check(mirror)
        assert places(world, group) == ["ssd", "both"]
        await assert_all_read(world, client, IDENTITY, group)
