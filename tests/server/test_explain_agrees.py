"""What Explain calls found is what a lookup finds, whatever happened before: a random walk over a node with SSD."""

import random

import pytest

from kvservice.model.cache import CacheMeta
from kvservice.model.explanation import Reason
from kvservice.model.plan import Outcome
from kvservice.ssd import SsdPolicy
from kvservice.wire.v1 import cache_pb2 as wire
from tests.server.builders import Client, make_meta, make_planes, query
from tests.server.ssd_world import SsdWorld, arrived, written
from tests.server.test_ssd import IDENTITY

STEPS = 80
ARENA_BYTES, SLAB_BYTES = 160 << 10, 96 << 10
METAS = [make_meta(IDENTITY, name, history) for name in range(4) for history in ([], ["a"])]
WENT = {
    Reason.EVICTED, Reason.NOT_ADMITTED, Reason.EVICTED_FROM_SSD, Reason.DELETED, Reason.QUARANTINED, Reason.REFUSED,
}  # fmt: skip


@pytest.mark.parametrize("seed", range(6))
async def test_explanations_agree_with_lookups(seed: int) -> None:
    rng = random.Random(seed)
    policy = SsdPolicy(write_budget_bytes=rng.choice([0, 24 << 20]))
    async with SsdWorld(arena_bytes=ARENA_BYTES, slab_bytes=SLAB_BYTES, policy=policy) as world:
        client, stored = world.client(), set[CacheMeta]()
        for _ in range(STEPS):
            await step(world, client, rng, stored)
            await compare(client, stored)
            world.check()


async def step(world: SsdWorld, client: Client, rng: random.Random, stored: set[CacheMeta]) -> None:
    meta = rng.choice(METAS)
    match rng.randrange(6):
        case 0 | 1:
            if not (await look(client, meta)):
                await client.store(meta, make_planes(seed=rng.randrange(3)))
                stored.add(meta)
        case 2:
            await client.delete(meta)
        case 3:
            world.node.catalog.evict_host()
        case 4:
            world.node.catalog.evict_ssd()
        case _:
            await written(world)


async def compare(client: Client, stored: set[CacheMeta]) -> None:
    for meta in METAS:
        reply = await client.call("Explain", wire.ExplainRequest(prompts=[query(meta)]))
        said = reply.prompts[0].segments[0]
        assert (said.reason == Reason.FOUND) == await look(client, meta), (Reason(said.reason), str(meta.key))
        if said.reason != Reason.FOUND and meta in stored:
            assert Reason(said.reason) in WENT, "what was stored and is not found went for a reason"
            assert not said.is_of_other_context


async def look(client: Client, meta: CacheMeta) -> bool:
    found, lease = await client.find(meta)
    if lease:
        await arrived(client, lease)
        await client.release(lease)
    return found.outcome == Outcome.HIT
