"""Quotas on the slab: at demotion, while records are erased and rewritten, at a start, and for loads into memory."""

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvservice.access.quotas import Quota
from kvservice.storage.admission import NotAdmitted
from tests.access.quota_world import SLOT, check_room, host_taken, limit, slots, ssd_taken
from tests.server.builders import Client, cache_of, make_identity, make_meta, make_planes, make_relative
from tests.server.ssd_world import SsdWorld, leave_host, read_back, where, written

ACME, RIVAL = make_identity(tenant="acme"), make_identity(tenant="rival")


def ssd_slots(count: int) -> Quota:
    return Quota(ssd_bytes=count * SLOT)


async def fill(world: SsdWorld, client: Client, identity: Any, *names: object) -> None:
    for name in names:
        await client.store(make_meta(identity, name), make_planes())
        await written(world)


async def test_a_tenant_at_its_quota_makes_room_among_its_own() -> None:
    async with SsdWorld() as world:
        limit(world, acme=ssd_slots(2))
        rival, acme = world.client(RIVAL), world.client(ACME)
        await fill(world, rival, RIVAL, 0, 1, 2)
        await fill(world, acme, ACME, 0, 1, 2, 3)
        assert [where(world, make_meta(ACME, name)) for name in range(4)] == ["host", "host", "both", "both"]
        assert [where(world, make_meta(RIVAL, name)) for name in range(3)] == ["both"] * 3
        assert world.node.allocation.room.ssd_taken("acme") == ssd_taken(world.node)["acme"] == 2 * SLOT
        check_room(world.node)
        world.check()


async def test_what_is_held_stays_and_the_new_one_is_only_in_memory() -> None:
    async with SsdWorld() as world:
        limit(world, acme=ssd_slots(2))
        client = world.client(ACME)
        await fill(world, client, ACME, 0, 1)
        for name in (0, 1):
            await client.find(make_meta(ACME, name))
        await fill(world, client, ACME, 2)
        assert [where(world, make_meta(ACME, name)) for name in range(3)] == ["both", "both", "host"]
        assert world.ssd.admission.refused[NotAdmitted.NO_ROOM] == 1
        assert world.node.allocation.room.quotas.refused["ssd"] == 1


async def test_a_record_larger_than_the_quota_evicts_nothing() -> None:
    async with SsdWorld() as world:
        client = world.client(ACME)
        await fill(world, client, ACME, 0, 1)
        limit(world, acme=Quota(ssd_bytes=SLOT - 1))
        await fill(world, client, ACME, 2)
        assert [where(world, make_meta(ACME, name)) for name in range(3)] == ["both", "both", "host"]
        assert world.node.counters.ssd_evictions.groups == 0


async def test_a_start_with_a_lower_quota_brings_what_fits() -> None:
    async with SsdWorld() as world:
        await fill(world, world.client(ACME), ACME, 0, 1, 2)
        await fill(world, world.client(RIVAL), RIVAL, 0)
    again = world.again()
    limit(again, acme=ssd_slots(1))
    async with again:
        again.node.allocation.room.enforce_all()
        await again.ssd.demotion.settle()
        assert ssd_taken(again.node) == {"acme": SLOT, "rival": SLOT}
        again.check()


async def test_an_old_form_counts_until_the_new_one_is_on_the_slab(monkeypatch: pytest.MonkeyPatch) -> None:
    async with SsdWorld() as world:
        enqueue = world.node.families.enqueue
        monkeypatch.setattr(world.node.families, "enqueue", lambda _: None)  # fold when all is on the slab
        client, planes, room = world.client(ACME), make_planes(), world.node.allocation.room
        metas = [make_meta(ACME, "seg", history) for history in ([], ["before"])]
        for meta in metas:
            await client.store(meta, make_relative(ACME, planes, 0, meta.position, rows=[3]))
            await written(world)
        limit(world, acme=ssd_slots(2))
        dense = cache_of(world, metas[1])
        assert dense is not None
        enqueue(dense)
        await world.node.fold_pending()
        await written(world)
        assert world.node.counters.folds.folded == 1
        assert where(world, metas[1]) == "host", "the dense form is what a crash would leave: it stays, and counts"
        assert room.ssd_taken("acme") == 2 * SLOT == ssd_taken(world.node)["acme"] + SLOT
        limit(world, acme=ssd_slots(3))
        mirror = cache_of(world, metas[1])
        assert mirror is not None
        world.ssd.note_published(mirror)
        await written(world)
        assert where(world, metas[1]) == "both"
        assert SLOT < room.ssd_taken("acme") == ssd_taken(world.node)["acme"] < 2 * SLOT
        assert not room._moving


async def test_a_load_counts_against_memory_and_makes_room_among_its_own() -> None:
    async with SsdWorld() as world:
        rival, client = world.client(RIVAL), world.client(ACME)
        metas = [make_meta(ACME, name) for name in range(4)]
        await fill(world, rival, RIVAL, 0)
        await fill(world, client, ACME, *range(4))
        await leave_host(world, *metas)
        limit(world, acme=slots(2))
        for meta in metas:
            assert await read_back(world, client, ACME, meta) is not None
            assert host_taken(world.node)["acme"] <= 2 * SLOT
        leases = [(await client.find(meta))[1] for meta in metas[:3]]
        assert [bool(one) for one in leases] == [True, True, False]
        check_room(world.node)


STEPS = st.lists(
    st.tuples(st.sampled_from(["store", "lease", "release", "delete", "host", "quota", "fold"]), st.integers(0, 8)),
    max_size=40,
)


@settings(max_examples=60, deadline=None)
@given(steps=STEPS, count=st.integers(0, 4))
def test_no_sequence_of_calls_gets_past_a_quota_of_the_slab(steps: list[tuple[str, int]], count: int) -> None:
    asyncio.run(_play(steps, count))


async def _play(steps: list[tuple[str, int]], count: int) -> None:
    async with SsdWorld() as world:
        client, room, leases = world.client(ACME), world.node.allocation.room, list[int]()
        limit(world, acme=ssd_slots(count))
        for what, number in steps:
            meta = make_meta(ACME, number % 3, ["x"] * (number // 3))
            if what == "store" and (await client.find(meta))[0].outcome:
                continue
            count = number % 5 if what == "quota" else count
            await _step(world, client, what, meta, leases, count)
            found = ssd_taken(world.node)["acme"]
            assert found <= room.ssd_taken("acme")
            if what == "store":
                assert room.ssd_taken("acme") <= max(count * SLOT, _fixed(world))
            check_room(world.node)
        await written(world)
        assert not room._moving
        assert room.ssd_taken("acme") == ssd_taken(world.node)["acme"] + world.node.catalog.superseded.taken["acme"]


def _fixed(world: SsdWorld) -> int:
    """What was there when a quota was lowered, and is leased: nothing can be done about that."""
    held = (one for head in world.node.catalog.held for one in head.members() if one.is_on_ssd)
    return sum(SLOT for _ in held) + world.node.catalog.superseded.taken["acme"]


async def _step(world: SsdWorld, client: Client, what: str, meta: Any, leases: list[int], count: int) -> None:
    match what:
        case "store":
            await client.store(meta, make_relative(ACME, make_planes(), 0, meta.position, rows=[1]))
            await written(world)
        case "lease":
            leases.append((await client.find(meta))[1])
        case "release":
            await client.release(*filter(None, leases))
            leases.clear()
        case "delete":
            await client.delete(meta)
        case "host":
            await written(world)
            while world.node.catalog.evict_host():
                pass
        case "quota":
            limit(world, acme=ssd_slots(count))
            world.node.allocation.room.enforce_all()
            await world.ssd.demotion.settle()
        case "fold":
            await world.node.fold_pending()
            await written(world)
