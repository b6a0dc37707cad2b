"""Records that may not be held: too far away to be moved exactly, or with values that are no numbers."""

from dataclasses import replace

import pytest

from kvservice import limits
from kvservice.kernels import rotation
from kvservice.model.geometry import DTYPE_BYTES, attention_geometry
from kvservice.model.segment import ContextId
from kvservice.wire.v1 import cache_pb2 as wire
from tests.server.builders import (
    TOKENS,
    Client,
    World,
    cache_of,
    diff_of,
    make_identity,
    make_meta,
    make_planes,
    make_relative,
)

IDENTITY = make_identity()
META = make_meta(IDENTITY)


@pytest.mark.parametrize("position", [(1 << 25) - TOKENS + 1, 4_000_000_000])
async def test_a_cache_too_far_away_to_be_moved_exactly_is_refused(position: int) -> None:
    world = World()
    outcome = await store_at(world.client(), position)
    assert outcome.error.code == "INVALID_INPUT"
    assert "nearer" in outcome.error.message
    assert world.is_empty_handed()
    assert world.node.tier.used_bytes == 0
    world.check()


async def test_a_cache_at_the_last_exact_position_is_held_and_can_be_folded_and_elected() -> None:
    world = World()
    client = world.client()
    assert not (await store_at(client, (1 << 25) - TOKENS)).error.code
    await client.store(META, make_planes(seed=2))
    await world.node.fold_pending()
    far = replace(META, key=replace(META.key, context=ContextId(bytes(32))))
    assert len((await client.commit_round(IDENTITY, META, far)).elections) == 1
    world.check()


async def test_a_pinned_cache_is_never_moved_and_may_stand_anywhere() -> None:
    identity = make_identity(is_pinned=True)
    meta = replace(make_meta(identity), position=4_000_000_000)
    await World().client(identity).store(meta, make_planes())


async def store_at(client: Client, position: int) -> wire.CommitOutcome:
    meta = replace(META, key=replace(META.key, context=ContextId(bytes(32))), position=position)
    return await client.commit(*await client.begin(meta, make_planes()))


def test_the_angle_that_a_node_accepts_is_the_one_that_kernels_can_turn() -> None:
    assert limits.ANGLE_MAX == rotation.ANGLE_MAX


NON_FINITE = {
    "bfloat16": [0x7F80, 0xFF80, 0x7FC0, 0xFFFF],
    "float16": [0x7C00, 0xFC00, 0x7E00, 0xFFFF],
    "float32": [0x7F800000, 0xFF800000, 0x7FC00000, 0xFFFFFFFF],
}
assert set(NON_FINITE) == set(DTYPE_BYTES)
LARGEST = {"bfloat16": 0x7F7F, "float16": 0x7BFF, "float32": 0x7F7FFFFF}


@pytest.mark.parametrize(("dtype", "bits"), [(dtype, one) for dtype, found in NON_FINITE.items() for one in found])
async def test_a_master_with_a_nan_or_an_infinity_is_refused_and_freed(dtype: str, bits: int) -> None:
    geometry = attention_geometry(layers=3, heads=2, head_size=16, dtype=dtype)
    identity = make_identity(geometry)
    world, planes = World(), make_planes(geometry)
    planes = [[plane & plane.dtype.type(0x3FFF) for plane in layer] for layer in planes]
    planes[2][1][-1, -1] = bits
    outcome = await (client := world.client(identity)).commit(*await client.begin(make_meta(identity), planes))
    assert outcome.error.code == "NON_FINITE"
    assert "layer 2" in outcome.error.message
    assert world.is_empty_handed()
    assert world.node.tier.used_bytes == 0
    assert +world.node.counters.commits_refused == {"NON_FINITE": 1}


@pytest.mark.parametrize("dtype", LARGEST)
@pytest.mark.parametrize("sign", [0, 1])
async def test_the_largest_finite_values_are_held(dtype: str, sign: int) -> None:
    geometry = attention_geometry(layers=2, heads=2, head_size=16, dtype=dtype)
    identity = make_identity(geometry)
    planes = make_planes(geometry)
    for plane in (plane for layer in planes for plane in layer):
        plane[:] = LARGEST[dtype] | sign << (8 * geometry.element_bytes - 1)
    await World().client(identity).store(make_meta(identity), planes)


async def test_a_mirror_with_a_nan_is_refused_and_freed() -> None:
    world = World()
    client = world.client()
    reference = await client.store(META, make_planes())
    member = make_meta(IDENTITY, history=["a"], master=reference)
    planes = make_relative(IDENTITY, make_planes(), META.position, member.position, rows=[3])
    planes[3][0][3, 1] = 0x7FC0
    runs = diff_of(IDENTITY, make_planes(), META.position, planes, member.position)
    outcome = await client.commit(*await client.begin(member, planes, runs))
    assert outcome.error.code == "NON_FINITE"
    assert cache_of(world, member) is None
    assert world.is_empty_handed()
    world.check()
