"""What one node stored another one finds, layer by layer and bit for bit; whatever goes wrong is a miss."""

import asyncio

import pytest

from kvservice.limits import NodeLimits
from kvservice.model.cache import CacheMeta, MasterReference, Tier
from kvservice.model.errors import UnavailableError
from kvservice.model.plan import Match, MissReason, Outcome
from kvservice.storage.buffer import Bytes
from kvservice.wire.v1 import cache_pb2 as wire
from tests.server.builders import (
    Client,
    Planes,
    diff_of,
    equal_planes,
    make_identity,
    make_meta,
    make_planes,
    make_relative,
    query,
)
from tests.sharing.shelf import PIECE_BYTES, SharingWorld, Shelf

IDENTITY = make_identity()
META = make_meta(IDENTITY)
PLANES = make_planes(seed=3)
FOUND_ELSEWHERE = int(Tier.REMOTE)


async def filled(shelf: Shelf) -> None:
    """META on the shelf."""
    async with SharingWorld(shelf) as world:
        await world.client().store(META, PLANES, prefill_s=2.5)
        await world.pushed()
    shelf.fault = None


async def with_mirror(shelf: Shelf) -> tuple[CacheMeta, Planes]:
    """META and a mirror of it on the shelf: what the mirror is."""
    async with SharingWorld(shelf) as world:
        client = world.client()
        reference = await client.store(META, PLANES)
        meta = make_meta(IDENTITY, history=("other",), master=reference)
        planes = make_relative(IDENTITY, PLANES, META.position, meta.position, rows=(3,))
        await client.store(meta, planes, diff_of(IDENTITY, PLANES, META.position, planes, meta.position))
        await world.pushed()
    shelf.fault = None
    return meta, planes


async def waited(client: Client, lease: int) -> wire.AwaitReply:
    """The last of what a lease hears of its records."""
    step = 0
    for _ in range(100):
        reply: wire.AwaitReply = await client.call("Await", wire.AwaitRequest(lease_id=lease, step=step))
        step = reply.step
        if not reply.pending:
            return reply
    raise AssertionError("records neither arrive nor fail")


async def test_what_another_node_stored_is_found_and_exact() -> None:
    shelf = Shelf()
    await filled(shelf)
    async with SharingWorld(shelf) as world:
        client = world.client()
        found, lease = await client.find(META)
        assert (found.outcome, found.match, found.record.tier) == (Outcome.HIT, Match.EXACT, FOUND_ELSEWHERE)
        reply = await waited(client, lease)
        assert not any(arrival.error.code for arrival in reply.arrivals)
        assert equal_planes(world.read(IDENTITY, found), PLANES)
        again, _ = await client.find(META)
        assert again.record.tier == Tier.HOST
        assert shelf.asked == 1
        counters = world.node.counters.remote
        assert (counters.asked, counters.found, counters.begun, counters.done, counters.failed) == (1, 1, 1, 1, 0)
        world.check()


async def test_a_mirror_comes_with_its_master_and_both_are_counted_as_from_elsewhere() -> None:
    shelf = Shelf()
    meta, planes = await with_mirror(shelf)
    async with SharingWorld(shelf) as world:
        client = world.client()
        found, lease = await client.find(meta)
        assert (found.record.tier, found.master.tier) == (FOUND_ELSEWHERE, FOUND_ELSEWHERE)
        await waited(client, lease)
        assert equal_planes(world.read(IDENTITY, found), planes)
        assert world.node.counters.remote.begun == 2
        world.check()


async def test_the_first_layer_is_usable_before_the_last_one_is_here() -> None:
    shelf = Shelf()
    await filled(shelf)
    shelf.gate.clear()
    async with SharingWorld(shelf) as world:
        client = world.client()
        _, lease = await client.find(META)
        reply = await client.call("Await", wire.AwaitRequest(lease_id=lease, step=0))
        assert reply.pending == 1
        assert all(arrival.layers < IDENTITY.geometry.layers for arrival in reply.arrivals)
        shelf.gate.set()
        reply = await waited(client, lease)
        assert [arrival.layers for arrival in reply.arrivals] == [IDENTITY.geometry.layers]


async def test_two_lookups_of_the_same_share_one_fetch() -> None:
    shelf = Shelf()
    await filled(shelf)
    shelf.gate.clear()
    async with SharingWorld(shelf) as world:
        first, second = world.client(), world.client()
        leases = [(client, (await client.find(META))[1]) for client in (first, second)]
        shelf.gate.set()
        for client, lease in leases:
            await waited(client, lease)
        assert len(shelf.fetched) == 1


async def test_wrong_bytes_are_never_served_and_the_next_shelf_is_asked() -> None:
    bad, good = Shelf(), Shelf()
    await filled(bad)
    await filled(good)

    def spoil(start: int, piece: Bytes) -> None:
        if start > 8 * PIECE_BYTES:
            piece[0] ^= 1

    bad.change = spoil
    async with SharingWorld(bad, good) as world:
        client = world.client()
        found, lease = await client.find(META)
        await waited(client, lease)
        assert equal_planes(world.read(IDENTITY, found), PLANES)
        assert world.node.counters.corrupt["remote"] == 1
        name, start = good.fetched[0]
        assert name.context == META.key.context
        assert start > 0, "verified layers are not written again"


async def test_wrong_bytes_everywhere_are_an_error_for_who_waits_and_a_miss_for_the_next() -> None:
    shelf = Shelf()
    await filled(shelf)
    shelf.change = _flip_behind_the_head
    async with SharingWorld(shelf) as world:
        client = world.client()
        _, lease = await client.find(META)
        reply = await waited(client, lease)
        assert [arrival.error.code for arrival in reply.arrivals] == ["CORRUPT"]
        await client.release(lease)
        shelf.fault = UnavailableError("gone")
        found, _ = await client.find(META)
        assert (found.outcome, found.miss_reason) == (Outcome.MISS, MissReason.UNKNOWN_SEGMENT)
        assert world.is_empty_handed()
        assert world.node.tier.used_bytes == 0
        world.check()


def _flip_behind_the_head(start: int, piece: Bytes) -> None:
    if start:
        piece[0] ^= 1


async def test_a_place_that_is_gone_is_a_miss() -> None:
    shelf = Shelf()
    shelf.fault = UnavailableError("gone")
    async with SharingWorld(shelf) as world:
        found, lease = await world.client().find(META)
        assert (found.outcome, lease) == (Outcome.MISS, 0)
        assert world.node.counters.remote.unreachable == 1


async def test_a_place_that_fails_in_the_middle_is_an_error_and_a_miss_later() -> None:
    shelf = Shelf()
    await filled(shelf)
    shelf.gate.clear()
    async with SharingWorld(shelf) as world:
        client = world.client()
        _, lease = await client.find(META)
        shelf.fault = UnavailableError("cut")
        shelf.gate.set()
        reply = await waited(client, lease)
        assert [arrival.error.code for arrival in reply.arrivals] == ["UNAVAILABLE"]
        explained = await client.call("Explain", wire.ExplainRequest(prompts=[query(META)]))
        assert explained.prompts[0].segments[0].reason == 18
        await client.release(lease)
        world.check()
        assert world.is_empty_handed()


async def test_a_master_that_does_not_arrive_takes_its_mirror_along() -> None:
    shelf = Shelf()
    meta, _ = await with_mirror(shelf)
    shelf.change = lambda start, piece: piece.fill(7) if start == 0 and len(piece) == PIECE_BYTES else None
    async with SharingWorld(shelf) as world:
        client = world.client()
        _, lease = await client.find(meta)
        reply = await waited(client, lease)
        assert "CORRUPT" in {arrival.error.code for arrival in reply.arrivals}
        await client.release(lease)
        await world.arrived()
        assert not world.node.catalog.spaces[IDENTITY.namespace()].families
        world.check()


async def test_an_offer_of_another_thing_is_refused() -> None:
    shelf = Shelf()
    await filled(shelf)
    other = make_meta(IDENTITY, "another")
    view, prefill_s = next(iter(shelf.records.values()))
    name = next(iter(shelf.records))
    shelf.records = {name._replace(segment=other.key.segment, context=other.key.context): (view, prefill_s)}
    async with SharingWorld(shelf) as world:
        found, _ = await world.client().find(other)
        assert found.outcome == Outcome.MISS
        assert world.node.counters.remote.begun == 0


async def test_a_shifted_use_brings_the_nearest_cache_of_the_segment() -> None:
    shelf = Shelf()
    await filled(shelf)
    wanted = make_meta(IDENTITY, history=("x", "y"))
    async with SharingWorld(shelf) as world:
        client = world.client()
        found, lease = await client.find(wanted, may_shift=True)
        assert (found.match, found.context) == (Match.SHIFTED, META.key.context)
        await waited(client, lease)
        exact, _ = await client.find(wanted)
        assert exact.outcome == Outcome.MISS


async def test_an_approximation_that_is_here_is_not_asked_for_at_every_lookup() -> None:
    shelf = Shelf()
    async with SharingWorld(shelf) as world:
        client = world.client()
        await client.store(META, PLANES)
        wanted = make_meta(IDENTITY, history=("x",))
        history = [wire.SegmentQuery(segment=make_meta(IDENTITY, "x").key.segment, position=0, tokens=16)]
        for _ in range(3):
            prompt = query(wanted, may_shift=True)
            prompt.segments.insert(0, history[0])
            await client.lookup(prompt)
        counters = world.node.counters.remote
        assert counters.asked == 3 + 1, "the history three times, the approximation once"


async def test_no_room_is_a_miss_and_leaves_nothing() -> None:
    shelf = Shelf()
    await filled(shelf)
    async with SharingWorld(shelf, arena_bytes=64 << 10, limits=NodeLimits()) as world:
        client = world.client()
        for number in range(64):
            one = make_meta(IDENTITY, ("filler", number))
            outcome = await client.reserve(one, 4096)
            if outcome.WhichOneof("outcome") != "reserved":
                break
        found, _ = await client.find(META)
        assert found.outcome == Outcome.MISS
        assert world.node.counters.remote.refused == 1
        world.check()


async def test_a_delete_reaches_every_place_and_nothing_comes_back() -> None:
    shelf = Shelf()
    async with SharingWorld(shelf) as world:
        client = world.client()
        await client.store(META, PLANES)
        await world.pushed()
        assert len(shelf.records) == 1
        await client.delete(META)
        assert not shelf.records
        found, _ = await client.find(META)
        assert found.outcome == Outcome.MISS


async def test_what_was_deleted_before_its_turn_is_not_given_away() -> None:
    shelf = Shelf()
    async with SharingWorld(shelf) as world:
        client = world.client()
        await client.store(META, PLANES)
        await client.delete(META)
        await world.pushed()
        assert not shelf.records


@pytest.mark.parametrize(("push", "at_once", "later"), [("off", 0, 0), ("back", 0, 1), ("through", 1, 1)])
async def test_push_policies(push: str, at_once: int, later: int) -> None:
    shelf = Shelf()
    async with SharingWorld(shelf, push=push) as world:
        await world.client().store(META, PLANES)
        assert len(shelf.records) == at_once
        if push != "off":
            await world.pushed()
        assert len(shelf.records) == later


async def test_a_commit_does_not_fail_for_a_place_that_is_away() -> None:
    shelf = Shelf()
    shelf.fault = UnavailableError("away")
    async with SharingWorld(shelf, push="through") as world:
        await world.client().store(META, PLANES)
        shelf.fault = None
        await world.pushed()
        assert len(shelf.records) == 1


async def test_a_place_that_comes_back_is_given_what_it_missed() -> None:
    shelf = Shelf()
    shelf.fault = UnavailableError("away")
    async with SharingWorld(shelf) as world:
        await world.client().store(META, PLANES)
        for _ in range(100):
            if world.node.counters.pushes.failed:
                break
            world.clock.now_s += 1
            await asyncio.sleep(0.01)
        shelf.fault = None
        await world.pushed()
        assert len(shelf.records) == 1


async def test_a_mirror_whose_master_the_place_lost_is_not_offered() -> None:
    shelf = Shelf()
    meta, _ = await with_mirror(shelf)
    shelf.records = {name: one for name, one in shelf.records.items() if name.context == meta.key.context}
    async with SharingWorld(shelf) as world:
        found, _ = await world.client().find(meta)
        assert found.outcome == Outcome.MISS


async def test_a_master_of_another_generation_that_is_here_keeps_the_mirror_out() -> None:
    shelf = Shelf()
    meta, _ = await with_mirror(shelf)
    async with SharingWorld(shelf, push="off") as world:
        client = world.client()
        reference = await client.store(META, make_planes(seed=9))
        assert reference != MasterReference(META.key.context, 0)
        found, _ = await client.find(meta)
        assert found.outcome == Outcome.MISS
        world.check()


async def test_a_stop_in_the_middle_ends_what_is_on_its_way() -> None:
    shelf = Shelf()
    await filled(shelf)
    shelf.gate.clear()
    async with SharingWorld(shelf) as world:
        await world.client().find(META)
    assert not world.node.catalog.arriving
    assert world.node.tier.used_bytes == 0


async def test_a_tenant_at_its_quota_puts_nothing_more_into_cold_storage_until_it_deletes() -> None:
    shelf = Shelf()
    async with SharingWorld(shelf) as world:
        client = world.client()
        await client.store(META, PLANES)
        await world.pushed()
        record_bytes = sum(len(view) for view, _ in shelf.records.values())
        world.limit_cold(IDENTITY.tenant, record_bytes + 1)
        other = make_meta(IDENTITY, "other")
        await client.store(other, PLANES)
        await world.pushed()
        assert (len(shelf.records), world.node.counters.pushes.refused) == (1, 1)
        await client.delete(META)
        third = make_meta(IDENTITY, "third")
        await client.store(third, PLANES)
        await world.pushed()
        assert {name.segment for name in shelf.records} == {third.key.segment}
