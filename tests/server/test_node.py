"""The plain path, and who may do what."""

from tests.server.builders import World, cache_of, equal_planes, make_identity, make_meta, make_planes

IDENTITY = make_identity()


async def test_what_was_stored_is_what_a_lease_reads() -> None:
    world = World()
    client, meta, planes = world.client(), make_meta(IDENTITY), make_planes()
    await client.store(meta, planes)
    found, lease = await client.find(meta)
    assert equal_planes(world.read(IDENTITY, found), planes)
    assert await client.release(lease) == 1
    world.check()
    assert cache_of(world, meta) is not None
