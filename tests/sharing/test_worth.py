"""What other places offer is loaded if that is sooner than computing it."""

from kvservice.model.plan import Outcome
from tests.server.builders import make_identity, make_meta, make_planes
from tests.sharing.shelf import SharingWorld, Shelf

IDENTITY = make_identity()
META = make_meta(IDENTITY)


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
