"""Room: nothing is evicted for a record that does not fit between what may not go."""

import numpy as np
import pytest

from kvservice.limits import NodeLimits
from tests.server.builders import Client, World, cache_of, make_identity, make_meta, make_planes

IDENTITY = make_identity()
PAGE = 4096
SLOT = 3 * PAGE
"""What a record of the builders takes."""


async def filled(count: int, limits: NodeLimits | None = None) -> tuple[World, Client]:
    """A tier that is full of ``count`` equal records, the oldest first."""
    world = World(arena_bytes=count * SLOT, limits=limits)
    client = world.client()
    for name in range(count):
        await client.store(make_meta(IDENTITY, name), make_planes())
    assert world.node.tier.used_bytes == count * SLOT
    return world, client


async def test_a_record_that_leases_leave_no_gap_for_evicts_nothing_and_is_told_the_truth() -> None:
    world, client = await filled(8)
    _, lease = await client.find(make_meta(IDENTITY, 4))  # 4 slots before it, 3 behind
    outcome = await client.reserve(make_meta(IDENTITY, "large"), 5 * SLOT)
    assert outcome.error.code == "CAPACITY"
    assert f"{4 * SLOT} of {8 * SLOT}" in outcome.error.message
    assert world.node.counters.host_evictions.groups == 0
    assert world.node.catalog.totals.masters == 8
    assert (await client.reserve(make_meta(IDENTITY, "large"), 4 * SLOT)).WhichOneof("outcome") == "reserved"
    world.check()
    await client.release(lease)
    world.check()


async def test_a_gap_is_counted_in_whole_pages() -> None:
    world, client = await filled(8)
    await client.find(make_meta(IDENTITY, 4))
    assert (await client.reserve(make_meta(IDENTITY, "large"), 4 * SLOT + 1)).error.code == "CAPACITY"
    assert world.node.counters.host_evictions.groups == 0
    assert (await client.reserve(make_meta(IDENTITY, "large"), 4 * SLOT - 1)).WhichOneof("outcome") == "reserved"


async def test_what_is_being_written_is_in_the_way_too() -> None:
    world, client = await filled(8)
    assert (await client.reserve(make_meta(IDENTITY, "small"), SLOT)).WhichOneof("outcome") == "reserved"
    outcome = await client.reserve(make_meta(IDENTITY, "large"), 8 * SLOT)
    assert outcome.error.code == "CAPACITY"
    assert world.node.counters.host_evictions.groups == 1, "the first reservation's"


async def test_mirrors_of_a_held_master_are_in_the_way_since_their_group_stays() -> None:
    world = World(arena_bytes=8 * SLOT)
    client = world.client()
    master = make_meta(IDENTITY)
    reference = await client.store(master, make_planes())
    filler = [make_meta(IDENTITY, name) for name in range(3)]
    for meta in filler:
        await client.store(meta, make_planes())
    mirror = make_meta(IDENTITY, provenance="p", master=reference)
    runs = [[np.empty((0, 2), np.int32) for _ in layer] for layer in make_planes()]
    await client.store(mirror, make_planes(), runs)
    await client.find(master)
    held = world.node.allocation.longest_stretch()
    cache = cache_of(world, mirror)
    assert cache is not None
    assert not cache.holds
    assert held == max(cache.offset - SLOT, 8 * SLOT - cache.offset - PAGE)


@pytest.mark.parametrize("slots", [1, 2])
async def test_reaching_the_limit_of_evictions_is_said_as_such(slots: int) -> None:
    world, client = await filled(8, NodeLimits(evictions_per_reserve_max=1))
    outcome = await client.reserve(make_meta(IDENTITY, "large"), slots * SLOT)
    if slots == 1:
        assert outcome.WhichOneof("outcome") == "reserved"
    else:
        assert "1 group" in outcome.error.message
    world.check()
