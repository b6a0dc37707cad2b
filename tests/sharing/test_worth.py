"""What other places offer is loaded if that is sooner than computing it."""

from dataclasses import replace
from typing import Any

from kvservice.model.identity import INT8, Namespace
from kvservice.model.plan import Outcome
from kvservice.peers.routes_estimate import Speed
from tests.server.builders import make_identity, make_meta, make_planes, query
from tests.sharing.shelf import SharingWorld, Shelf

IDENTITY = make_identity()
META = make_meta(IDENTITY)
SLOW = Speed(1e3, 1.0)


async def found_by(prefill_s: float, *, is_gated: bool = True) -> tuple[int, int]:
    """The outcome of a lookup on a node whose engine takes so long for a segment, and what was left."""
    shelf = Shelf()
    async with SharingWorld(shelf) as world:
        await world.client().store(META, make_planes())
        await world.pushed()
    shelf.fault = None
    async with SharingWorld(shelf, push="off", is_gated=is_gated) as world:
        client = world.client()
        if prefill_s:
            for number in range(64):  # a mean over what engines report
                await client.store(make_meta(IDENTITY, ("own", number)), make_planes(), prefill_s=prefill_s)
        found, _ = await client.find(META)
        return found.outcome, world.node.counters.remote.computed_sooner


async def test_what_comes_sooner_than_it_is_computed_is_brought() -> None:
    assert await found_by(10.0) == (Outcome.HIT, 0)


async def test_what_is_computed_sooner_stays_where_it_is_and_is_counted() -> None:
    assert await found_by(1e-6) == (Outcome.MISS, 1)


async def test_as_long_as_nobody_says_how_fast_prefill_is_all_is_brought() -> None:
    assert await found_by(0.0) == (Outcome.HIT, 0)


async def test_the_gate_can_be_opened() -> None:
    assert await found_by(1e-6, is_gated=False) == (Outcome.HIT, 0)


async def test_how_fast_it_comes_is_asked_of_each_namespace() -> None:
    """Over a slow link what was rounded comes in half the time."""
    lossy, shelf = replace(IDENTITY, lossy=INT8), Shelf()
    metas = [make_meta(IDENTITY), make_meta(lossy)]
    async with SharingWorld(shelf) as world:
        client = world.client(IDENTITY, lossy)
        for meta in metas:
            await client.store(meta, make_planes())
        await world.pushed()
    shelf.fault = None
    async with SharingWorld(shelf, push="off", is_gated=True) as world:
        directory: Any = world.node.sharing and world.node.sharing.directory
        directory.places[0].speed_of = lambda of: Speed(0.0, 1e12) if of == Namespace(metas[1].namespace) else SLOW
        client = world.client(IDENTITY, lossy)
        for number, identity in enumerate([IDENTITY, lossy] * 64):
            await client.store(make_meta(identity, ("own", number)), make_planes(), prefill_s=1.0)
        reply = await client.lookup(*map(query, metas))
        assert [prompt.segments[0].outcome for prompt in reply.prompts] == [Outcome.MISS, Outcome.HIT]
        assert world.node.counters.remote.computed_sooner == 1
