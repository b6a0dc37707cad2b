"""What was deleted stays deleted, whatever else of its key is on the slab, under way, or cannot be erased."""

import asyncio
import random
from collections.abc import Callable
from typing import Any, TypeVar

import pytest

from kvservice.departures import Gone
from kvservice.limits import NodeLimits
from kvservice.model.cache import CacheMeta
from kvservice.model.errors import DiskError
from kvservice.ssd import Workers
from kvservice.worker import InlineWorker
from tests.server.builders import (
    Client,
    GatedWorker,
    cache_of,
    diff_of,
    make_meta,
    make_planes,
    make_relative,
    until_parked,
)
from tests.server.ssd_world import SsdWorld, assert_all_read, leave_host, where, written
from tests.server.test_ssd import IDENTITY, Stored, store_dense, store_group
from tests.simulation.world import SimIndex, SimPlace
from tests.storage.faulty_disk import NO_FAULTS, Faults

T = TypeVar("T")
NO_FOLDING = NodeLimits(fold_queue_max=0)


class Valve(GatedWorker):
    """Runs jobs at once while it is open, and parks them while it is not."""

    def __init__(self) -> None:
        super().__init__()
        self.is_open = True

    async def run(self, function: Callable[[], T]) -> T:
        return function() if self.is_open else await super().run(function)

    def open(self) -> None:
        self.is_open = True
        while self.parked:
            self.release()


class ValveWorld(SsdWorld):
    """Its reads or writes of the slab can be stopped."""

    def __init__(self, *, limits: NodeLimits | None = None) -> None:
        self.reads, self.writes, other = Valve(), Valve(), InlineWorker()
        super().__init__(limits=limits, workers=Workers(self.reads, self.writes, other, other))

    async def __aexit__(self, *error: object) -> None:
        self.reads.open()
        self.writes.open()
        await super().__aexit__(*error)


async def turns(count: int = 30) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def killed(world: SsdWorld) -> SsdWorld:
    await world.kill()
    return world.again()


async def until_acknowledged(call: "asyncio.Task[Any]", writes: Valve) -> None:
    """Let one job after the other end until the call has its answer: what is under way then, a kill cuts off."""
    for _ in range(100):
        await turns()
        if call.done():
            return
        writes.release()
    raise AssertionError("no answer")


async def assert_gone(world: SsdWorld, meta: CacheMeta) -> None:
    assert where(world, meta) == "none"
    found, lease = await world.client().find(meta)
    assert not lease, found


async def elect(client: Client, stored: Stored) -> CacheMeta:
    """Make the group of ``stored`` stand on another master, nearer to all of them; returns that."""
    near = make_relative(IDENTITY, stored[0][1], 0, 0, rows=[0, 1])
    others = [(make_meta(IDENTITY, "shared", provenance=name), near) for name in ("p", "q")]
    for meta, planes in others:
        await client.store(meta, planes)
    stored += others
    await client.commit_round(IDENTITY, stored[0][0], *(meta for meta, _ in others))
    masters = [meta for meta, _ in stored if (cache := cache_of(client.world, meta)) and cache.master is None]
    assert len(masters) == 1
    assert masters[0] in [meta for meta, _ in others]
    return masters[0]


async def test_what_is_stored_anew_while_its_old_form_is_being_buried_survives_a_kill() -> None:
    world = ValveWorld()
    async with world:
        client = world.client()
        groups = [await store_group(client, name) for name in ("first", "second")]
        await written(world)
        world.writes.is_open = False
        deleting = asyncio.create_task(client.delete(*(group[0][0] for group in groups)))
        await turns()
        anew = [(group[0][0], make_planes(seed=9)) for group in groups]
        for meta, planes in anew:
            await client.store(meta, planes)
        await turns()
        world.writes.open()
        assert await deleting == 2
        await written(world)
        assert [where(world, meta) for meta, _ in anew] == ["both", "both"]
        async with await killed(world) as again:
            await assert_all_read(again, again.client(), IDENTITY, [*anew, *groups[0][1:], *groups[1][1:]])


async def test_a_dense_form_that_is_still_being_written_does_not_outlive_its_deleted_mirror() -> None:
    world = ValveWorld(limits=NO_FOLDING)
    async with world:
        client = world.client()
        metas = sorted(
            (make_meta(IDENTITY, 0, provenance=name) for name in ("p", "q")), key=lambda one: one.key.context
        )
        await client.store(metas[0], make_planes())
        await written(world)
        world.writes.is_open = False
        await client.store(metas[1], make_relative(IDENTITY, make_planes(), 0, 0, rows=[3]))
        await client.store(make_meta(IDENTITY, "keeps the other writer busy"), make_planes(seed=1))
        await turns()
        await client.commit_round(IDENTITY, *metas)
        cache = cache_of(world, metas[1])
        assert cache is not None
        assert cache.master is not None
        deleting = asyncio.create_task(client.delete(metas[1]))
        await turns()
        assert not deleting.done(), "its dense form is still on its way to the slab"
        await until_acknowledged(deleting, world.writes)
        async with await killed(world) as again:
            await assert_gone(again, metas[1])


async def test_a_deleted_mirror_does_not_come_back_as_the_dense_form_that_others_still_stand_on() -> None:
    world = ValveWorld(limits=NO_FOLDING)
    async with world:
        client = world.client()
        stored = await store_group(client)
        await written(world)
        world.writes.is_open = False
        await elect(client, stored)
        assert len(world.node.catalog.superseded) == 3
        await until_acknowledged(asyncio.create_task(client.delete(stored[0][0])), world.writes)
        assert len(world.node.catalog.superseded), "or this tests nothing"
        async with await killed(world) as again:
            await assert_gone(again, stored[0][0])
            await assert_all_read(again, again.client(), IDENTITY, stored[1:3])


async def test_a_form_that_only_a_restart_remembers_does_not_come_back_in_place_of_its_deleted_successor() -> None:
    world = ValveWorld(limits=NO_FOLDING)
    async with world:
        client = world.client()
        stored = await store_group(client)
        await written(world)
        world.writes.is_open = False
        await elect(client, stored)
        cache = cache_of(world, stored[0][0])
        assert cache is not None
        await until_acknowledged(asyncio.create_task(world.ssd.demotion.write(cache)), world.writes)
        assert cache.is_on_ssd
        async with await killed(world) as again:
            assert [one.key for one in again.node.catalog.hidden] == [stored[0][0].key], "its mirrors stand on it"
            await again.client().delete(stored[0][0])
            async with await killed(again) as third:
                await assert_gone(third, stored[0][0])
                await assert_all_read(third, third.client(), IDENTITY, stored[1:3])


@pytest.mark.parametrize("first", [0, 1])
async def test_one_tombstone_of_two_deleted_masters_of_a_key_stays_for_the_last_of_them(first: int) -> None:
    world = SsdWorld(limits=NO_FOLDING)
    async with world:
        client = world.client()
        stored = await store_group(client, mirrors=1)
        await written(world)
        await client.delete(stored[0][0])
        reference = await client.store(stored[0][0], make_planes(seed=5))
        mirror = make_meta(IDENTITY, "shared", ["second"], master=reference)
        planes = make_relative(IDENTITY, make_planes(seed=5), 0, mirror.position)
        await client.store(mirror, planes, diff_of(IDENTITY, make_planes(seed=5), 0, planes, mirror.position))
        await written(world)
        await client.delete(stored[0][0])
        mirrors = [(mirror, planes), stored[1]]
        async with await killed(world) as again:
            await again.client().delete(mirrors.pop(first)[0])
            async with await killed(again) as third:
                await assert_gone(third, stored[0][0])
                await assert_all_read(third, third.client(), IDENTITY, mirrors)
                await third.client().delete(mirrors[0][0])
                async with await killed(third) as last:
                    assert (last.opened.report.records, last.opened.notes) == (0, [])


@pytest.mark.parametrize("which", [0, 1])
async def test_a_record_that_cannot_be_erased_is_buried_or_its_delete_fails(which: int) -> None:
    world = SsdWorld()
    async with world:
        client = world.client()
        stored = await store_group(client, mirrors=1)
        await written(world)
        world.disk.faults = Faults(write_error=1.0)
        for _ in range(2):
            with pytest.raises(DiskError):
                await client.delete(stored[which][0])
            assert where(world, stored[which][0]) == "none"
        world.disk.faults = NO_FAULTS
        assert await client.delete(stored[which][0]) == 0, "it was hidden before, and is buried now"
        async with await killed(world) as again:
            await assert_gone(again, stored[which][0])
            await assert_all_read(again, again.client(), IDENTITY, stored[1:] if which == 0 else stored[:1])


async def test_a_delete_of_many_buries_all_that_it_can() -> None:
    world = ValveWorld()
    async with world:
        client = world.client()
        groups = [await store_group(client, name, mirrors=1) for name in ("first", "second", "third")]
        await written(world)
        world.writes.is_open = False
        deleting = asyncio.create_task(client.delete(*(group[0][0] for group in groups)))
        await turns()
        world.disk.faults = Faults(write_error=1.0)
        world.writes.release()
        await turns()
        world.disk.faults = NO_FAULTS
        world.writes.open()
        with pytest.raises(DiskError):
            await deleting
        async with await killed(world) as again:
            assert [where(again, group[0][0]) for group in groups] == ["ssd", "none", "none"]


async def test_a_deleted_master_that_is_on_its_way_from_ssd_is_buried_at_once() -> None:
    world = ValveWorld()
    async with world:
        client = world.client()
        stored = await store_group(client, mirrors=1)
        await written(world)
        await leave_host(world, *(meta for meta, _ in stored))
        world.reads.is_open = False
        deleting = asyncio.create_task(client.delete(stored[0][0]))
        await client.find(stored[1][0])
        await deleting
        assert cache_of(world, stored[1][0])
        async with await killed(world) as again:
            await assert_gone(again, stored[0][0])


async def test_a_key_that_is_held_no_more_is_deleted_from_the_slab_all_the_same() -> None:
    world = ValveWorld(limits=NO_FOLDING)
    async with world:
        client = world.client()
        stored = await store_group(client)
        await written(world)
        world.writes.is_open = False
        await elect(client, stored)
        cache = cache_of(world, stored[0][0])
        assert cache is not None
        world.node.catalog.hide(cache, Gone.EVICTED)  # as an eviction would
        deleting = asyncio.create_task(client.delete(stored[0][0]))
        await until_acknowledged(deleting, world.writes)
        assert deleting.result() == 0
        async with await killed(world) as again:
            await assert_gone(again, stored[0][0])


async def test_a_record_that_an_eviction_could_not_erase_does_not_outlive_the_delete_of_its_key() -> None:
    world = SsdWorld()
    async with world:
        client = world.client()
        ((meta, _),) = await store_dense(client, 1)
        await written(world)
        world.disk.faults = Faults(write_error=1.0)
        world.node.catalog.evict_ssd()
        await world.ssd.demotion.settle()
        world.node.catalog.evict_host()
        assert where(world, meta) == "none"
        world.disk.faults = NO_FAULTS
        assert await client.delete(meta) == 0
        async with await killed(world) as again:
            await assert_gone(again, meta)


async def test_a_record_that_was_written_in_vain_and_could_not_be_erased_does_not_outlive_its_cache() -> None:
    index, inline = GatedWorker(), InlineWorker()
    place = SimPlace(random.Random(1))
    world = SsdWorld(place=place, workers=Workers(inline, inline, index, inline))
    async with world:
        client = world.client()
        ((meta, _),) = await store_dense(client, 1)
        await until_parked(index)
        index.release()  # the identity's change
        await until_parked(index)
        place.refusal, world.disk.faults = 1.0, Faults(write_error=1.0)
        index.release()  # the record's, after its data
        await turns()
        assert where(world, meta) == "host"
        assert isinstance(place.index, SimIndex)
        place.refusal, place.index.is_failed, world.disk.faults = 0.0, False, NO_FAULTS
        deleting = asyncio.create_task(client.delete(meta))
        await turns()
        while index.parked:
            index.release()
        assert await deleting == 1
        async with await killed(world) as again:
            await assert_gone(again, meta)


async def test_a_delete_that_is_tried_again_buries_nothing_that_came_after_it_and_leaves_that_to_the_next() -> None:
    world = SsdWorld()
    async with world:
        client = world.client()
        stored = await store_group(client, mirrors=1)
        await written(world)
        world.disk.faults = Faults(write_error=1.0)
        with pytest.raises(DiskError):
            await client.delete(stored[0][0])
        world.disk.faults = NO_FAULTS
        await client.store(stored[0][0], make_planes(seed=9))
        await written(world)
        assert where(world, stored[0][0]) == "both"
        world.disk.faults = Faults(write_error=1.0)
        cache = cache_of(world, stored[0][0])
        assert cache is not None
        world.node.catalog.drop_ssd(cache)  # as an eviction would, and its record cannot be erased
        await world.ssd.demotion.settle()
        world.disk.faults = NO_FAULTS
        await client.delete(make_meta(IDENTITY, "another"))  # tries the first one again
        assert where(world, stored[0][0]) == "host"
        await client.delete(stored[0][0])
        async with await killed(world) as again:
            await assert_gone(again, stored[0][0])
            await assert_all_read(again, again.client(), IDENTITY, stored[1:])
