"""Leases: what is promised stays; what is given back, runs out or loses its session goes."""

import math

import pytest

from kvservice.leases import NUMBER_BITS, SPARE_DEADLINES_MAX
from kvservice.limits import NodeLimits
from kvservice.model.errors import (
    InvalidInputError,
    LimitError,
    NotOwnedError,
    StaleEpochError,
    UnknownSessionError,
)
from kvservice.wire.v1 import cache_pb2 as wire
from tests.server.builders import (
    Client,
    World,
    cache_of,
    equal_planes,
    make_identity,
    make_meta,
    make_planes,
    query,
)

IDENTITY = make_identity()
META = make_meta(IDENTITY)


async def leased(world: World, client: Client, ttl_s: float = 0.0) -> int:
    await client.store(META, make_planes())
    reply = await client.lookup(query(META), ttl_s=ttl_s)
    assert reply.lease.id
    return int(reply.lease.id)


async def renew(client: Client, *leases: int, ttl_s: float = 0.0) -> list[bool]:
    reply = await client.call("Renew", wire.RenewRequest(lease_ids=leases, lease_ttl_s=ttl_s))
    return list(reply.renewed)


async def test_a_lease_has_the_default_time_to_live_unless_told_and_never_more_than_the_limit() -> None:
    world = World(limits=NodeLimits(lease_ttl_s=5.0, lease_ttl_s_max=60.0))
    client = world.client()
    await client.store(META, make_planes())
    granted = [(await client.lookup(query(META), ttl_s=ttl_s)).lease.ttl_s for ttl_s in (0.0, 20.0, 1e9)]
    assert granted == [5.0, 20.0, 60.0]


@pytest.mark.parametrize("ttl_s", [-1.0, math.nan, math.inf])
async def test_a_time_to_live_that_is_none_is_invalid(ttl_s: float) -> None:
    world = World()
    with pytest.raises(InvalidInputError):
        await world.client().lookup(query(META), ttl_s=ttl_s)
    world.check()


async def test_an_expired_lease_is_gone_at_the_next_lookup() -> None:
    world = World()
    client = world.client()
    lease = await leased(world, client)
    world.clock.now_s += 29.9
    await client.find(make_meta(IDENTITY, "nothing"))
    assert lease in world.node.leases.live
    world.clock.now_s += 0.1
    await client.find(make_meta(IDENTITY, "nothing"))
    assert lease not in world.node.leases.live
    assert await renew(client, lease) == [False]
    assert world.node.counters.leases_expired == 1
    world.check()


async def test_a_renewed_lease_lives_on_and_is_never_shortened() -> None:
    world = World()
    client = world.client()
    lease = await leased(world, client)
    assert await renew(client, lease, ttl_s=100.0) == [True]
    assert await renew(client, lease, ttl_s=1.0) == [True]
    world.clock.now_s += 99.0
    assert await renew(client, lease, ttl_s=0.5) == [True]
    world.clock.now_s += 1.0
    assert await renew(client, lease) == [False]
    world.check()


async def test_releasing_twice_is_no_error() -> None:
    world = World()
    client = world.client()
    lease = await leased(world, client)
    assert await client.release(lease, lease) == 1
    assert await client.release(lease) == 0
    world.check()


async def test_a_lookup_without_a_hit_grants_no_lease() -> None:
    world = World()
    reply = await world.client().lookup(query(META))
    assert not reply.HasField("lease")
    assert not world.node.leases.live


async def test_a_lease_of_another_session_can_be_neither_renewed_nor_released() -> None:
    world = World()
    owner, thief = world.client(), world.client()
    lease = await leased(world, owner)
    with pytest.raises(NotOwnedError):
        await thief.release(lease)
    with pytest.raises(NotOwnedError):
        await renew(thief, lease)
    assert lease in world.node.leases.live


async def test_a_lease_from_before_a_restart_is_stale() -> None:
    world = World()
    client = world.client()
    lease = await leased(world, client)
    old = lease - (1 << NUMBER_BITS)
    with pytest.raises(StaleEpochError):
        await renew(client, old)
    with pytest.raises(StaleEpochError):
        await client.release(old)


async def test_a_session_from_before_a_restart_is_stale_and_a_closed_one_unknown() -> None:
    world = World()
    client = world.client()
    client.close()
    with pytest.raises(UnknownSessionError):
        await client.find(META)
    client.ref.boot_epoch -= 1
    with pytest.raises(StaleEpochError):
        await client.find(META)


async def test_the_end_of_a_session_frees_its_leases_only() -> None:
    world = World()
    one, other = world.client(), world.client()
    await leased(world, one)
    kept = (await other.lookup(query(META))).lease.id
    one.close()
    assert set(world.node.leases.live) == {kept}
    world.check()


async def test_leased_bytes_outlive_a_delete_until_the_last_release() -> None:
    world = World()
    client = world.client()
    planes = make_planes()
    await client.store(META, planes)
    (found, first), (_, second) = await client.find(META), await client.find(META)
    await client.delete(META)
    assert (await client.find(META))[1] == 0, "hidden at once"
    await client.store(META, make_planes(seed=9))
    await client.release(first)
    assert equal_planes(world.read(IDENTITY, found), planes)
    world.check()
    await client.release(second)
    assert not world.node.catalog.hidden
    assert cache_of(world, META) is not None, "the one stored after the delete"
    world.check()


async def test_leases_of_a_session_are_bounded() -> None:
    world = World(limits=NodeLimits(leases_per_session_max=1))
    client = world.client()
    await leased(world, client)
    with pytest.raises(LimitError):
        await client.find(META)
    world.check()


async def test_deadlines_of_released_leases_do_not_pile_up() -> None:
    world = World()
    client = world.client()
    await client.store(META, make_planes())
    for _ in range(SPARE_DEADLINES_MAX + 100):
        await client.release((await client.find(META))[1])
    assert len(world.node.leases._deadlines) <= SPARE_DEADLINES_MAX + 2
    world.check()
