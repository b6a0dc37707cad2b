"""Explain: every reason for a miss is provoked in a real node, and told; nothing is leased, or told to others."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from kvservice.limits import NodeLimits
from kvservice.model.cache import CacheMeta, Tier
from kvservice.model.errors import InvalidInputError, LimitError
from kvservice.model.explanation import Reason
from kvservice.model.identity import Identity, identity_from_json
from kvservice.model.plan import Match
from kvservice.ssd import SsdPolicy, Workers
from kvservice.storage.slab import SLAB_NAME
from kvservice.wire.v1 import cache_pb2 as wire
from kvservice.worker import InlineWorker
from tests.server.builders import (
    TOKENS,
    Client,
    GatedWorker,
    World,
    cache_of,
    encode_key,
    make_identity,
    make_meta,
    make_planes,
    make_segment,
    other_context,
    query,
    until_parked,
)
from tests.server.ssd_world import SsdWorld, arrived, leave_host, where, written
from tests.server.test_ssd import IDENTITY, store_dense, store_group
from tests.storage.faulty_disk import FaultyDisk


async def explain(client: Client, *prompts: wire.PromptQuery) -> wire.ExplainReply:
    reply: wire.ExplainReply = await client.call("Explain", wire.ExplainRequest(prompts=prompts))
    return reply


async def why(
    client: Client, meta: CacheMeta, history: Sequence[bytes] = (), **changes: Any
) -> wire.SegmentExplanation:
    """What is said of one cache's segment, asked for by its own context."""
    reply = await explain(client, query(meta, history, **changes))
    return reply.prompts[0].segments[-1]


async def reason(client: Client, meta: CacheMeta, **changes: Any) -> Reason:
    return Reason((await why(client, meta, **changes)).reason)


# What is found


async def test_a_found_cache_is_told_with_tiers_kind_and_match() -> None:
    async with SsdWorld() as world:
        client = world.client()
        stored = await store_group(client)
        await written(world)
        master, mirror = [await why(client, meta) for meta, _ in stored[:2]]
        assert (master.reason, master.match, master.contexts) == (Reason.FOUND, Match.EXACT, 2)
        assert (list(master.found.tiers), master.found.kind, mirror.found.kind) == ([Tier.HOST, Tier.SSD], 1, 2)
        assert (mirror.found.position, mirror.found.preceding) == (TOKENS, 1)
        await leave_host(world, *(meta for meta, _ in stored))
        assert list((await why(client, stored[0][0])).found.tiers) == [Tier.SSD]


async def test_a_cache_on_its_way_from_ssd_is_told_as_such() -> None:
    reads = GatedWorker()
    async with SsdWorld(reads=reads) as world:
        client = world.client()
        stored = await store_dense(client, 1)
        await written(world)
        await leave_host(world, stored[0][0])
        _, lease = await client.find(stored[0][0])
        await until_parked(reads)
        found = (await why(client, stored[0][0])).found
        assert (found.is_arriving, list(found.tiers)) == (True, [Tier.SSD])
        reads.release()
        await arrived(client, lease)
        assert not (await why(client, stored[0][0])).found.is_arriving


async def test_a_shifted_use_is_found_and_says_how_much_agrees() -> None:
    world = World()
    client, meta = world.client(), make_meta(IDENTITY, "shared", ["a", "b"])
    await client.store(meta, make_planes())
    history = [make_segment(IDENTITY, "x"), make_segment(IDENTITY, "b")]
    changes = {"accepted_contexts": [other_context(1)], "may_shift": True}
    found = await why(client, meta, history, **changes)
    assert (found.reason, found.match, found.found.affinity, found.found.preceding) == (1, Match.SHIFTED, 1, 2)


async def test_explaining_leases_counts_and_touches_nothing() -> None:
    world = World()
    client, meta = world.client(), make_meta(IDENTITY)
    await client.store(meta, make_planes())
    before = world.node.stats_document()
    for one in (meta, make_meta(IDENTITY, "unknown")):
        await why(client, one)
    assert world.node.stats_document() == before
    assert world.is_empty_handed()
    world.check()


# What is held, and not for this query


async def test_the_same_segment_behind_other_tokens_says_how_they_differ() -> None:
    world = World()
    client = world.client()
    for history in ([], ["a", "b"], ["x", "b"]):
        await client.store(make_meta(IDENTITY, "shared", history), make_planes())
    asked = make_meta(IDENTITY, "shared", ["c", "b"])
    found = await why(client, asked, [make_segment(IDENTITY, "c"), make_segment(IDENTITY, "b")])
    assert (found.reason, found.contexts) == (Reason.OTHER_CONTEXT, 3)
    assert [(one.affinity, one.preceding, one.position) for one in found.nearest] == [
        (1, 2, 2 * TOKENS), (1, 2, 2 * TOKENS), (0, 0, 0),
    ]  # fmt: skip


async def test_only_some_of_many_contexts_are_told_and_all_are_counted() -> None:
    world = World(arena_bytes=4 << 20)
    client = world.client()
    for number in range(9):
        await client.store(make_meta(IDENTITY, "shared", [number]), make_planes())
    found = await why(client, make_meta(IDENTITY, "shared", ["z"]))
    assert (found.contexts, len(found.nearest)) == (9, 4)


async def test_refreshed_kv_does_not_answer_an_exact_question_and_says_so() -> None:
    world = World()
    client = world.client()
    await client.store(make_meta(IDENTITY, "shared", ["a"], provenance="hkvd:0.02/check=1"), make_planes())
    found = await why(client, make_meta(IDENTITY, "shared", ["a"]), [make_segment(IDENTITY, "a")])
    assert found.reason == Reason.OTHER_CONTEXT
    assert (found.nearest[0].provenance, found.nearest[0].affinity) == ("hkvd:0.02/check=1", 1)


async def test_pinned_positions_and_a_least_affinity_are_reasons_of_their_own() -> None:
    world, pinned = World(), make_identity(is_pinned=True)
    client = world.client(IDENTITY, pinned)
    await client.store(make_meta(IDENTITY, "shared", ["a"]), make_planes())
    await client.store(make_meta(pinned, "shared", ["a"]), make_planes())
    asked = make_meta(pinned, "shared")
    reply = await explain(client, query(asked, may_shift=True))
    assert reply.prompts[0].segments[0].reason == Reason.PINNED
    assert "dynamic NTK" in reply.namespaces[0].pinned_reason
    asked = make_meta(IDENTITY, "shared", ["b"])
    assert await reason(client, asked, may_shift=True, affinity_min=1) == Reason.LOW_AFFINITY


async def test_another_number_of_tokens_is_the_questions_fault() -> None:
    world = World()
    client, meta = world.client(), make_meta(IDENTITY)
    await client.store(meta, make_planes())
    found = await why(client, meta, tokens=TOKENS + 1)
    assert (found.reason, found.held_tokens) == (Reason.TOKEN_COUNT, TOKENS)


async def test_leases_that_leave_no_room_to_read_from_ssd_are_told() -> None:
    async with SsdWorld(arena_bytes=64 << 10, staging_bytes=4096) as world:
        client = world.client()
        stored = await store_dense(client, 1)
        await written(world)
        await leave_host(world, stored[0][0])
        assert await reason(client, stored[0][0]) == Reason.FOUND
        reserved = await client.reserve(make_meta(IDENTITY, "large"), world.node.tier.capacity_bytes)
        assert await reason(client, stored[0][0]) == Reason.NO_ROOM
        assert not (await client.find(stored[0][0]))[1], "a lookup says the same"
        await client.call("Abort", wire.AbortRequest(reservation_ids=[reserved.reserved.id]))
        assert await reason(client, stored[0][0]) == Reason.FOUND


async def test_wrong_bytes_under_a_lease_are_told() -> None:
    async with SsdWorld() as world:
        client = world.client()
        stored = await store_dense(client, 1)
        await written(world)
        _, lease = await client.find(stored[0][0])
        flip_in_memory(world, stored[0][0])
        await verify(client, stored[0][0])
        found = await why(client, stored[0][0])
        assert (found.reason, list(found.found.tiers)) == (Reason.WRONG_BYTES, [Tier.HOST, Tier.SSD])
        await client.release(lease)
        assert await reason(client, stored[0][0]) == Reason.FOUND


# What went


async def test_an_evicted_cache_is_remembered_with_its_age() -> None:
    world = World()
    client, meta = world.client(), make_meta(IDENTITY)
    await client.store(meta, make_planes())
    assert world.node.catalog.evict_host() is not None
    world.clock.now_s += 12
    found = await why(client, meta)
    assert (found.reason, found.age_s, found.detail, found.is_of_other_context) == (Reason.EVICTED, 12, "", False)
    other = await why(client, make_meta(IDENTITY, "shared", ["a"]))
    assert (other.reason, other.is_of_other_context) == (Reason.EVICTED, True)
    await client.store(meta, make_planes())
    assert await reason(client, meta) == Reason.FOUND, "what is stored anew is found, whatever became of it before"
    await client.delete(meta)
    assert await reason(client, meta) == Reason.DELETED, "the newest is told"


@pytest.mark.parametrize(
    ("detail", "changes"),
    [
        ("once_used", {"policy": SsdPolicy(write_budget_bytes=24 << 20)}),
        ("too_large", {"slab_bytes": 3 * 4096}),
        ("floor", {"disk": FaultyDisk(capacity_bytes=8 << 20), "policy": SsdPolicy(free_floor_bytes=16 << 20)}),
    ],
)
async def test_what_ssd_did_not_admit_is_told_with_the_reason(detail: str, changes: Any) -> None:
    async with SsdWorld(**changes) as world:
        client = world.client()
        stored = await store_dense(client, 1)
        await written(world)
        assert where(world, stored[0][0]) == "host"
        world.node.catalog.evict_host()
        found = await why(client, stored[0][0])
        assert (found.reason, found.detail) == (Reason.NOT_ADMITTED, detail)


async def test_a_spent_budget_is_told() -> None:
    async with SsdWorld(policy=SsdPolicy(write_budget_bytes=24 * 8000)) as world:
        client = world.client()
        stored = await store_dense(client, 2)
        for meta, _ in stored:
            await client.release((await client.find(meta))[1])
            await written(world)
        assert [where(world, meta) for meta, _ in stored] == ["both", "host"]
        while world.node.catalog.evict_host():
            pass
        found = await why(client, stored[1][0])
        assert (found.reason, found.detail) == (Reason.NOT_ADMITTED, "budget")
        assert await reason(client, stored[0][0]) == Reason.FOUND


async def test_what_still_waited_for_ssd_when_it_was_evicted_is_told() -> None:
    inline, writes = InlineWorker(), GatedWorker()
    async with SsdWorld(workers=Workers(inline, writes, inline, inline), policy=SsdPolicy(threads=1)) as world:
        client = world.client()
        stored = await store_dense(client, 2)
        await until_parked(writes)
        assert world.node.catalog.evict_host() is not None, "what is being written is held, the other one waits"
        found = await why(client, stored[1][0])
        assert (found.reason, found.detail) == (Reason.EVICTED, "waiting")
        while writes.parked or world.ssd.demotion.writing:
            if writes.parked:
                writes.release()
            await asyncio.sleep(0)


async def test_what_was_evicted_from_ssd_too_is_told() -> None:
    async with SsdWorld() as world:
        client = world.client()
        stored = await store_dense(client, 1)
        await written(world)
        await leave_host(world, stored[0][0])
        world.node.catalog.evict_ssd()
        assert await reason(client, stored[0][0]) == Reason.EVICTED_FROM_SSD


async def test_a_deleted_cache_is_told_even_while_its_bytes_are_leased() -> None:
    world = World()
    client, meta = world.client(), make_meta(IDENTITY)
    await client.store(meta, make_planes())
    _, lease = await client.find(meta)
    await client.delete(meta)
    assert world.node.catalog.hidden
    assert await reason(client, meta) == Reason.DELETED
    await client.release(lease)
    assert await reason(client, meta) == Reason.DELETED


async def test_a_deleted_master_that_mirrors_stand_on_is_known_after_a_restart() -> None:
    world = SsdWorld()
    async with world:
        client = world.client()
        stored = await store_group(client)
        await written(world)
        await client.delete(stored[0][0])
    async with world.again() as again:
        client = again.client()
        assert again.node.catalog.hidden
        found = await why(client, stored[0][0])
        assert (found.reason, found.HasField("age_s"), found.contexts) == (Reason.DELETED, False, 2)
        assert await reason(client, stored[1][0]) == Reason.FOUND


async def test_a_quarantined_cache_is_told_and_so_are_mirrors_that_went_with_their_master() -> None:
    world = World()
    client = world.client()
    stored = await store_group(client)
    flip_in_memory(world, stored[0][0])
    await verify(client, stored[0][0])
    assert [await reason(client, meta) for meta, _ in stored] == [Reason.QUARANTINED] * 3


async def test_a_record_that_went_wrong_on_ssd_is_told_as_quarantined() -> None:
    async with SsdWorld() as world:
        client = world.client()
        stored = await store_dense(client, 1)
        await written(world)
        await leave_host(world, stored[0][0])
        cache = cache_of(world, stored[0][0])
        assert cache is not None
        world.disk.raw(SLAB_NAME)[cache.ssd_offset + cache.record_bytes - 100] ^= 1
        _, lease = await client.find(stored[0][0])
        await arrived(client, lease)
        assert await reason(client, stored[0][0]) == Reason.QUARANTINED


async def test_a_staged_copy_whose_record_left_the_ssd_is_told_as_evicted_from_there() -> None:
    async with SsdWorld() as world:
        client = world.client()
        stored = await store_dense(client, 1)
        await written(world)
        cache = cache_of(world, stored[0][0])
        assert cache is not None
        await leave_host(world, stored[0][0])
        world.node.allocation.take(world.node.tier.capacity_bytes)  # so that the load goes through the staging area
        _, lease = await client.find(stored[0][0])
        await arrived(client, lease)
        assert cache.offset >= world.node.tier.staging_offset
        world.node.catalog.drop_ssd(cache)
        await client.release(lease)
        assert await reason(client, stored[0][0]) == Reason.EVICTED_FROM_SSD
        world.node.allocation.give_back(next(iter(world.node.allocation.unpublished.values())))


async def test_a_fold_is_no_departure() -> None:
    """The key stays, and is found: a mirror stands in the place of the dense cache."""
    world = World()
    client = world.client()
    planes = make_planes()
    metas = [make_meta(IDENTITY, "shared"), make_meta(IDENTITY, "shared", provenance="twin")]
    for meta in metas:
        await client.store(meta, planes)
    assert await world.node.fold_pending()
    assert world.node.counters.folds.folded == 1
    assert [await reason(client, meta) for meta in metas] == [Reason.FOUND] * 2
    assert not len(world.node.departures)


# What never was


async def test_a_cache_that_is_being_written_is_told_to_whoever_asks() -> None:
    world = World()
    writer, reader = world.client(), world.client(may_write=False)
    meta = make_meta(IDENTITY)
    begun = await writer.begin(meta, make_planes())
    assert await reason(reader, meta) == Reason.BEING_WRITTEN
    other = await why(reader, make_meta(IDENTITY, "shared", ["a"]))
    assert (other.reason, other.is_of_other_context) == (Reason.BEING_WRITTEN, True)
    await writer.commit(*begun)
    assert await reason(reader, meta) == Reason.FOUND


async def test_what_the_node_refused_is_told_with_the_code() -> None:
    world = World()
    client = world.client()
    large, wrong = make_meta(IDENTITY, "large"), make_meta(IDENTITY, "wrong")
    assert (await client.reserve(large, 2 << 20)).error.code == "RECORD_TOO_LARGE"
    reservation, checksum = await client.begin(wrong, make_planes())
    assert (await client.commit(reservation, checksum ^ 1)).error.code == "CHECKSUM_MISMATCH"
    found = [await why(client, meta) for meta in (large, wrong)]
    assert [one.reason for one in found] == [Reason.REFUSED] * 2
    assert [one.detail for one in found] == ["RECORD_TOO_LARGE", "CHECKSUM_MISMATCH"]


async def test_an_empty_namespace_other_lengths_and_never_stored() -> None:
    world = World()
    client = world.client()
    asked = make_meta(IDENTITY, "asked")
    assert await reason(client, asked) == Reason.EMPTY_NAMESPACE
    for number in range(3):
        await client.store(make_meta(IDENTITY, number, tokens=8), make_planes(tokens=8))
    reply = await explain(client, query(asked))
    assert reply.prompts[0].segments[0].reason == Reason.OTHER_LENGTHS
    assert [(one.tokens, one.segments) for one in reply.namespaces[0].lengths] == [(8, 3)]
    assert reply.namespaces[0].held_segments == 3
    await client.store(make_meta(IDENTITY, "same length"), make_planes())
    assert await reason(client, asked) == Reason.NEVER_STORED


# Other identities, and other tenants


def known_of(reply: wire.ExplainReply) -> list[tuple[Identity, int]]:
    return [(identity_from_json(one.identity), one.segments) for one in reply.namespaces[0].known]


async def test_near_identities_of_the_tenant_are_told_and_strangers_are_not() -> None:
    world = World()
    revised, salted = replace(IDENTITY, weights="r2"), replace(IDENTITY, salt="s", weights="r3")
    other_model = replace(IDENTITY, model="large", weights="w", kv_scales="x", salt="y")
    stranger = replace(revised, tenant="stranger")
    client, theirs = world.client(revised, salted, other_model), world.client(stranger)
    for identity in (revised, salted, other_model):
        await client.store(make_meta(identity), make_planes())
    await theirs.store(make_meta(stranger), make_planes())
    asked = world.client()
    assert known_of(await explain(asked, query(make_meta(IDENTITY)))) == [(revised, 1), (salted, 1)]
    await asked.store(make_meta(IDENTITY), make_planes())
    assert not known_of(await explain(asked, query(make_meta(IDENTITY)))), "nothing is amiss"


async def test_a_session_may_ask_in_its_tenants_namespaces_and_in_no_others() -> None:
    world = World()
    revised, stranger = replace(IDENTITY, weights="r2"), replace(IDENTITY, tenant="stranger")
    client, theirs = world.client(revised), world.client(stranger)
    await client.store(make_meta(revised), make_planes())
    await theirs.store(make_meta(stranger), make_planes())
    asked = world.client()
    assert await reason(asked, make_meta(revised)) == Reason.FOUND
    for meta in (make_meta(stranger), make_meta(replace(IDENTITY, weights="never seen"))):
        with pytest.raises(InvalidInputError, match="not registered"):
            await why(asked, meta)


async def test_equal_ids_of_another_tenant_tell_nothing() -> None:
    """Ids are the client's to choose: what became of a stranger's equal key is not told."""
    world = World()
    stranger = replace(IDENTITY, tenant="stranger")
    mine, theirs = world.client(), world.client(stranger)
    meta = make_meta(IDENTITY)
    await theirs.store(replace(make_meta(stranger), key=meta.key), make_planes())
    assert await reason(mine, meta) == Reason.EMPTY_NAMESPACE
    await theirs.call("Delete", wire.DeleteRequest(keys=[encode_key(meta.key)]))
    assert await reason(theirs, replace(make_meta(stranger), key=meta.key)) == Reason.DELETED
    assert await reason(mine, meta) == Reason.EMPTY_NAMESPACE


# Limits


async def test_too_many_segments_are_refused_and_long_questions_let_others_in() -> None:
    world = World(limits=NodeLimits(explain_segments_max=64, explain_slice=1))
    client, turns = world.client(), 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    history = [make_segment(IDENTITY, number) for number in range(64)]
    with pytest.raises(LimitError, match="the limit is 64"):
        await why(client, make_meta(IDENTITY), history)
    others = asyncio.create_task(count())
    await why(client, make_meta(IDENTITY), history[1:])
    others.cancel()
    assert turns >= 60


def flip_in_memory(world: World, meta: CacheMeta) -> None:
    cache = cache_of(world, meta)
    assert cache is not None
    world.arena.view[cache.offset + 5000] ^= 4


async def verify(client: Client, meta: CacheMeta) -> None:
    request = wire.VerifyRequest(namespace=meta.namespace, keys=[encode_key(meta.key)])
    await client.call("Verify", request)
