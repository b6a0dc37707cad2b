"""Groups come and go as one: never a dangling mirror, nothing evicted that is held, nothing kept that nobody needs."""

from dataclasses import replace

import pytest

from kvservice.model.cache import CacheMeta
from kvservice.model.errors import InvalidInputError
from kvservice.storage.record import master_layout
from kvservice.wire.v1 import cache_pb2 as wire
from tests.server.builders import (
    Client,
    World,
    cache_of,
    diff_of,
    equal_planes,
    make_identity,
    make_meta,
    make_planes,
    make_relative,
)

IDENTITY = make_identity()
META = make_meta(IDENTITY)
PAGE = 4096
DENSE_PAGES_BYTES = -(-master_layout(META).record_bytes // PAGE) * PAGE


async def store_group(client: Client, name: object = "shared", mirrors: int = 2) -> list[CacheMeta]:
    """A master and its mirrors."""
    master = make_meta(IDENTITY, name)
    reference = await client.store(master, make_planes())
    metas = [master]
    for number in range(mirrors):
        meta = make_meta(IDENTITY, name, [f"history {number}"], master=reference)
        planes = make_relative(IDENTITY, make_planes(), 0, meta.position)
        await client.store(meta, planes, diff_of(IDENTITY, make_planes(), 0, planes, meta.position))
        metas.append(meta)
    return metas


def held(world: World, metas: list[CacheMeta]) -> list[bool]:
    return [cache_of(world, meta) is not None for meta in metas]


def small_world(dense: int, more_pages: int = 0) -> World:
    return World(arena_bytes=dense * DENSE_PAGES_BYTES + more_pages * PAGE)


async def test_the_group_that_was_not_used_for_longest_goes_first() -> None:
    world = small_world(3)
    client = world.client()
    metas = [make_meta(IDENTITY, name) for name in range(5)]
    for meta in metas[:3]:
        await client.store(meta, make_planes())
    await client.release((await client.find(metas[0]))[1])
    for meta in metas[3:]:
        await client.store(meta, make_planes())
        world.check()
    assert held(world, metas) == [True, False, False, True, True]
    assert world.node.counters.host_evictions.groups == 2


async def test_a_group_goes_as_a_whole() -> None:
    world = small_world(1, more_pages=2)
    client = world.client()
    metas = await store_group(client)
    other = make_meta(IDENTITY, "other")
    await client.store(other, make_planes())
    assert held(world, metas) == [False, False, False]
    counters = world.node.counters
    assert (counters.host_evictions.groups, counters.host_evictions.caches) == (1, 3)
    world.check()


@pytest.mark.parametrize("which", [0, 1])
async def test_a_group_with_one_leased_member_stays(which: int) -> None:
    world = small_world(2, more_pages=2)
    client = world.client()
    metas = await store_group(client)
    await client.find(metas[which])
    others = [make_meta(IDENTITY, name) for name in range(3)]
    for other in others:
        await client.store(other, make_planes())
        world.check()
    assert held(world, metas) == [True, True, True]
    assert held(world, others) == [False, False, True]


async def test_a_use_of_a_mirror_is_a_use_of_its_group() -> None:
    world = small_world(2, more_pages=1)
    client = world.client()
    metas = await store_group(client, mirrors=1)
    other, newest = make_meta(IDENTITY, "other"), make_meta(IDENTITY, "newest")
    await client.store(other, make_planes())
    await client.release((await client.find(metas[1]))[1])
    await client.store(newest, make_planes())
    assert held(world, [*metas, other, newest]) == [True, True, False, True]
    world.check()


async def test_a_deleted_master_is_out_of_sight_but_stays_under_its_mirrors() -> None:
    world = World()
    client = world.client()
    metas = await store_group(client)
    await client.delete(metas[0])
    world.check()
    assert held(world, metas) == [False, True, True]
    found, lease = await client.find(metas[1])
    planes = make_relative(IDENTITY, make_planes(), 0, metas[1].position)
    assert equal_planes(world.read(IDENTITY, found), planes)
    await client.release(lease)
    await client.delete(metas[1])
    assert world.node.catalog.hidden
    await client.delete(metas[2])
    assert world.node.tier.used_bytes == 0, "the last mirror takes its master along"
    assert not world.node.catalog.hidden
    world.check()


async def test_a_hidden_masters_group_is_evicted_whole() -> None:
    world = small_world(1, more_pages=1)
    client = world.client()
    metas = await store_group(client, mirrors=1)
    await client.delete(metas[0])
    await client.store(make_meta(IDENTITY, "other"), make_planes())
    assert held(world, metas) == [False, False]
    assert not world.node.catalog.hidden
    world.check()


async def test_a_new_cache_may_take_the_key_of_a_deleted_one_that_is_still_needed() -> None:
    world = World()
    client = world.client()
    metas = await store_group(client)
    await client.delete(metas[0])
    newer = make_planes(seed=5)
    await client.store(metas[0], newer)
    found, _ = await client.find(metas[0])
    assert equal_planes(world.read(IDENTITY, found), newer)
    found, _ = await client.find(metas[1])
    assert equal_planes(world.read(IDENTITY, found), make_relative(IDENTITY, make_planes(), 0, metas[1].position))
    world.check()


async def test_deleting_a_namespace_takes_all_of_it_and_nothing_else() -> None:
    world = World()
    other = make_identity(tenant="other")
    client = world.client(IDENTITY, other)
    await store_group(client)
    kept = make_meta(other)
    await client.store(kept, make_planes())
    reply = await client.call("Delete", wire.DeleteRequest(namespace=IDENTITY.namespace()))
    assert reply.deleted == 3
    assert held(world, [META, kept]) == [False, True]
    world.check()


async def test_a_delete_must_name_keys_or_a_registered_namespace_not_both() -> None:
    world = World()
    client = world.client()
    await client.store(META, make_planes())
    key = wire.CacheKey(segment=META.key.segment, context=META.key.context)
    for request in (
        wire.DeleteRequest(namespace=IDENTITY.namespace(), keys=[key]),
        wire.DeleteRequest(namespace=make_identity(tenant="stranger").namespace()),
    ):
        with pytest.raises(InvalidInputError):
            await client.call("Delete", request)
    assert held(world, [META]) == [True]


async def test_deleting_twice_or_what_is_not_held_is_no_error() -> None:
    world = World()
    client = world.client()
    await client.store(META, make_planes())
    assert await client.delete(META, META, make_meta(IDENTITY, "nothing")) == 1
    assert await client.delete(META) == 0
    world.check()


async def test_a_session_cannot_delete_a_strangers_cache() -> None:
    world = World()
    await world.client().store(META, make_planes())
    assert await world.client(make_identity(tenant="other")).delete(META) == 0
    assert held(world, [META]) == [True]


async def test_a_space_lives_as_long_as_a_session_or_a_cache_needs_it() -> None:
    world = World()
    client = world.client()
    assert len(world.node.catalog.spaces) == 1
    client.close()
    assert not world.node.catalog.spaces
    client = world.client()
    await client.store(META, make_planes())
    client.close()
    assert len(world.node.catalog.spaces) == 1
    client = world.client()
    assert (await client.find(META))[1], "a later session finds what an earlier one stored"
    await client.delete(META)
    client.close()
    assert not world.node.catalog.spaces
    world.check()


async def test_room_in_pieces_is_made_whole_by_evicting_further() -> None:
    world = small_world(4)
    client = world.client()
    metas = [make_meta(IDENTITY, name) for name in range(4)]
    for meta in metas:
        await client.store(meta, make_planes())
    await client.release((await client.find(metas[1]))[1])
    wide = replace(make_meta(IDENTITY, "wide", tokens=32), tokens=32)
    await client.store(wide, make_planes(tokens=32))
    assert held(world, [wide]) == [True]
    world.check()


async def test_what_prefill_takes_is_a_mean_over_a_namespace_not_a_claim_of_one_writer() -> None:
    world = World()
    client = world.client()
    metas = [make_meta(IDENTITY, name) for name in range(40)]
    for meta in metas:
        await client.store(meta, make_planes(), prefill_s=0.032)
    space = world.node.catalog.spaces[IDENTITY.namespace()]
    assert 0.0017 < space.token_s < 0.0020, "on its way from a guess to what all of them said"
    await client.store(make_meta(IDENTITY, "absurd"), make_planes(), prefill_s=86400.0)
    await client.store(make_meta(IDENTITY, "silent"), make_planes())
    small = make_meta(IDENTITY, "negative")
    layout = master_layout(small)
    outcome = await client.reserve(small, layout.record_bytes, prefill_s=-1.0)
    assert outcome.error.code == "INVALID_INPUT"
    world.check()
