"""What answers a segment: its own context, or the nearest relative, or a miss that says why."""

import asyncio
from dataclasses import replace

import pytest

from kvservice.limits import NodeLimits
from kvservice.model.cache import CacheMeta
from kvservice.model.errors import LeaseExpiredError, LimitError
from kvservice.model.plan import Match, MissReason, Outcome
from kvservice.model.segment import CacheKey, affinity
from kvservice.wire.v1 import cache_pb2 as wire
from tests.server.builders import (
    TOKENS,
    Client,
    World,
    diff_of,
    make_context,
    make_identity,
    make_meta,
    make_planes,
    make_relative,
    make_segment,
    other_context,
    query,
)

IDENTITY = make_identity()
META = make_meta(IDENTITY)
REFRESHED = "hkvd:0.02/check=1"


def prompt(*names: object, identity: object = IDENTITY, **changes: object) -> wire.PromptQuery:
    """A prompt whose last segment may be answered by relatives only."""
    assert identity is IDENTITY
    context = make_context(IDENTITY, names[:-1])
    before = [make_segment(IDENTITY, name) for name in names[:-1]]
    meta = replace(META, position=context.position, key=CacheKey(make_segment(IDENTITY, names[-1]), other_context(1)))
    return query(meta, before, **({"may_shift": True} | changes))


async def last(client: Client, asked: wire.PromptQuery) -> wire.SegmentReply:
    return (await client.lookup(asked)).prompts[0].segments[-1]


def is_miss(found: wire.SegmentReply, reason: MissReason) -> bool:
    return (found.outcome, found.miss_reason, found.match) == (Outcome.MISS, reason, Match.NONE)


async def test_an_accepted_context_answers_exactly() -> None:
    client = World().client()
    await client.store(META, make_planes())
    found, _ = await client.find(META)
    assert (found.outcome, found.match, found.miss_reason) == (Outcome.HIT, Match.EXACT, MissReason.NONE)
    assert (found.context, found.position, found.provenance) == (META.key.context, 0, "")


async def test_refreshed_provenance_answers_as_refreshed_and_only_when_accepted() -> None:
    client = World().client()
    refreshed = make_meta(IDENTITY, provenance=REFRESHED)
    await client.store(refreshed, make_planes())
    found, _ = await client.find(refreshed)
    assert (found.match, found.provenance) == (Match.REFRESHED, REFRESHED)
    found, _ = await client.find(META)
    assert is_miss(found, MissReason.OTHER_CONTEXT), "an exact lookup never answers with refreshed KV"


async def test_the_first_accepted_context_that_is_held_answers() -> None:
    client = World().client()
    refreshed = make_meta(IDENTITY, provenance=REFRESHED)
    await client.store(refreshed, make_planes())
    contexts = [META.key.context, refreshed.key.context]
    assert (await client.find(META, accepted_contexts=contexts))[0].match == Match.REFRESHED
    await client.store(META, make_planes(seed=2))
    assert (await client.find(META, accepted_contexts=contexts))[0].match == Match.EXACT


async def test_a_context_asked_for_at_a_position_it_does_not_have_is_no_exact_hit() -> None:
    client = World().client()
    await client.store(META, make_planes())
    found, _ = await client.find(META, position=5)
    assert is_miss(found, MissReason.OTHER_CONTEXT)


async def test_misses_say_why() -> None:
    client = World().client()
    stranger = make_identity(tenant="stranger")
    assert is_miss((await client.find(make_meta(stranger)))[0], MissReason.UNKNOWN_NAMESPACE)
    assert is_miss((await client.find(META))[0], MissReason.UNKNOWN_SEGMENT)
    await client.store(META, make_planes())
    assert is_miss((await client.find(META, tokens=TOKENS + 1))[0], MissReason.TOKEN_COUNT)
    assert is_miss((await client.find(META, accepted_contexts=[other_context(1)]))[0], MissReason.OTHER_CONTEXT)


async def test_one_tenant_never_sees_anothers_caches() -> None:
    world = World()
    other = make_identity(tenant="other")
    await world.client(IDENTITY).store(META, make_planes())
    reply = await world.client(other).lookup(query(META))
    assert is_miss(reply.prompts[0].segments[0], MissReason.UNKNOWN_NAMESPACE)


async def test_the_relative_with_the_most_equal_segments_right_before_answers() -> None:
    client = World().client()
    histories = [("x", "b"), ("a", "b"), ("z", "a", "b"), ("a", "c"), ()]
    metas = {history: make_meta(IDENTITY, history=history) for history in histories}
    for seed, meta in enumerate(metas.values()):
        await client.store(meta, make_planes(seed=seed))
    for names, expected in ((("q", "b"), 1), (("q", "a", "b"), 2), (("z", "a", "b"), 3), (("q",), 0)):
        found = await last(client, prompt(*names, "shared"))
        marks = make_context(IDENTITY, names).marks
        assert (found.match, found.affinity) == (Match.SHIFTED, expected)
        assert found.affinity == max(affinity(meta.preceding, marks) for meta in metas.values())


async def test_below_the_least_affinity_a_segment_is_computed() -> None:
    client = World().client()
    await client.store(make_meta(IDENTITY, history=["a"]), make_planes())
    found = await last(client, prompt("b", "shared", affinity_min=1))
    assert is_miss(found, MissReason.LOW_AFFINITY)
    assert (await last(client, prompt("a", "shared", affinity_min=1))).match == Match.SHIFTED


async def test_of_equal_affinity_exact_goes_before_refreshed_master_before_mirror_and_same_position_before_other() -> (
    None
):
    client = World().client()
    refreshed = make_meta(IDENTITY, history=["p", "q"], provenance=REFRESHED)
    master, mirror = make_meta(IDENTITY, history=["r"]), make_meta(IDENTITY, history=["s", "t"])
    await client.store(refreshed, make_planes(seed=1))
    at_two = prompt("y", "z", "shared")
    assert (await last(client, at_two)).context == refreshed.key.context, "better than nothing"
    reference = await client.store(master, make_planes())
    mirror = replace(mirror, master=reference)
    planes = make_relative(IDENTITY, make_planes(), master.position, mirror.position, rows=[0])
    runs = diff_of(IDENTITY, make_planes(), master.position, planes, mirror.position)
    await client.store(mirror, planes, runs)
    assert (await last(client, at_two)).context == master.key.context, "a master, though the mirror stands right"
    other = make_meta(IDENTITY, history=["u", "v"])
    await client.store(other, make_planes(seed=3))
    assert (await last(client, at_two)).context == other.key.context, "the master that stands right"


async def test_a_full_tie_is_settled_by_the_lowest_context() -> None:
    for order in (1, -1):
        client = World().client()
        metas = [make_meta(IDENTITY, history=[name]) for name in "abcdef"][::order]
        for meta in metas:
            await client.store(meta, make_planes())
        found = await last(client, prompt("q", "shared"))
        assert found.context == min(meta.key.context for meta in metas)


async def test_only_the_most_recently_used_members_are_ranked() -> None:
    client = World(limits=NodeLimits(candidates_max=2)).client()
    metas = [make_meta(IDENTITY, history=[name]) for name in "abc"]
    for meta in metas:
        await client.store(meta, make_planes())
    asked = prompt("a", "shared")
    assert (await last(client, asked)).affinity == 0
    await client.find(metas[0])
    assert (await last(client, asked)).affinity == 1


async def test_pinned_caches_are_never_moved() -> None:
    identity = make_identity(is_pinned=True)
    client = World().client(identity)
    meta: CacheMeta = make_meta(identity, history=["a"])
    await client.store(meta, make_planes())
    context = [other_context(1)]
    reply = await client.lookup(query(meta, accepted_contexts=context, may_shift=True, position=meta.position + 1))
    assert is_miss(reply.prompts[0].segments[0], MissReason.PINNED)
    assert reply.prompts[0].pinned_reason == identity.pinned_reason
    found, _ = await client.find(meta, accepted_contexts=context, may_shift=True)
    assert found.match == Match.SHIFTED, "at the same position nothing is moved"
    assert (await client.find(meta))[0].match == Match.EXACT


async def test_a_found_mirror_brings_its_master() -> None:
    world = World()
    client = world.client()
    reference = await client.store(META, make_planes())
    meta = make_meta(IDENTITY, history=["a"], master=reference)
    planes = make_relative(IDENTITY, make_planes(), 0, meta.position)
    await client.store(meta, planes, diff_of(IDENTITY, make_planes(), 0, planes, meta.position))
    found, lease = await client.find(meta)
    assert (found.master_context, found.master.generation) == (META.key.context, reference.generation)
    assert [
        cache.holds for cache in world.node.catalog.spaces[META.namespace].families[META.key.segment].members.values()
    ]
    await client.delete(META, meta)
    assert {cache.holds for cache in world.node.catalog.hidden} == {1}
    await client.release(lease)
    assert world.node.tier.used_bytes == 0
    world.check()


async def test_a_round_is_answered_in_order_under_one_lease() -> None:
    world = World()
    client = world.client()
    metas = [make_meta(IDENTITY, name) for name in range(3)]
    for meta in metas:
        await client.store(meta, make_planes())
    reply = await client.lookup(*(query(meta, [META.key.segment]) for meta in (metas[2], metas[0], META, metas[2])))
    contexts = [answer.segments[1].outcome for answer in reply.prompts]
    assert contexts == [Outcome.HIT, Outcome.HIT, Outcome.MISS, Outcome.HIT]
    assert [answer.segments[0].outcome for answer in reply.prompts] == [Outcome.MISS] * 4
    assert len(world.node.leases.live) == 1
    await client.release(reply.lease.id)
    world.check()


async def test_a_lookup_of_too_many_segments_is_refused() -> None:
    world = World(limits=NodeLimits(lookup_segments_max=2))
    with pytest.raises(LimitError):
        await world.client().lookup(query(META, [bytes(32)] * 2))
    world.check()


async def test_a_session_that_ends_during_a_long_lookup_leaves_no_lease() -> None:
    world = World(limits=NodeLimits(lookup_slice=1))
    client = world.client()
    await client.store(META, make_planes())
    lookup = asyncio.create_task(client.lookup(*[query(META, [bytes(32)])] * 3))
    await asyncio.sleep(0)
    assert world.node.leases.live
    client.close()
    with pytest.raises(Exception, match="ended"):
        await lookup
    assert world.is_empty_handed()
    world.check()


async def test_prompts_without_segments_count_too() -> None:
    world = World(limits=NodeLimits(lookup_slice=2, lookup_segments_max=8))
    client, other = world.client(), world.client()
    empty = wire.PromptQuery(namespace=IDENTITY.namespace())
    lookup = asyncio.create_task(client.lookup(*[empty] * 8))
    await asyncio.sleep(0)
    await other.lookup(empty)
    assert not lookup.done(), "others are let in"
    assert len((await lookup).prompts) == 8
    with pytest.raises(LimitError, match="in 9 prompts, the limit is 8; split it"):
        await client.lookup(*[empty] * 9)
    world.check()


async def test_what_breaks_off_in_a_prompt_is_all_counted_where_it_began() -> None:
    world = World(limits=NodeLimits(lookup_slice=2))
    client = world.client()
    await client.store(META, make_planes())
    lookup = asyncio.create_task(client.lookup(query(META, [bytes([number] * 32) for number in range(5)])))
    await asyncio.sleep(0)
    client.close()
    with pytest.raises(LeaseExpiredError):
        await lookup
    ledger = world.node.accounts.of(None)
    assert not sum(ledger.segments)
    world.check()


@pytest.mark.parametrize("slice_", [1, 2, 3, 5, 64])
async def test_a_long_prompt_lets_others_in_and_is_answered_as_at_once(slice_: int) -> None:
    replies = []
    for limits in (NodeLimits(), NodeLimits(lookup_slice=slice_)):
        world = World(limits=limits)
        client, other = world.client(), world.client()
        metas = [make_meta(IDENTITY, name, tokens=4) for name in "abcde"]
        for meta in metas:
            await client.store(meta, make_planes(tokens=4))
        asked = wire.PromptQuery(namespace=IDENTITY.namespace())
        for meta in (*metas, make_meta(IDENTITY, "missing", tokens=4)):
            asked.segments.append(query(meta, [meta.key.context]).segments[0])
        lookup = asyncio.create_task(client.lookup(asked, asked))
        turns = 0
        while not lookup.done():
            await asyncio.sleep(0)
            turns += 1
            await other.lookup(asked)
        reply = lookup.result()
        reply.ClearField("lease")
        replies.append(reply)
        assert turns > (limits.lookup_slice < 12), "they took turns"
        assert world.node.counters.lookups.asked == 12 + 6 * turns
        world.check()
    assert replies[0] == replies[1]


async def test_garbage_in_a_query_is_a_miss() -> None:
    client = World().client()
    asked = wire.PromptQuery(namespace=b"?", segments=[wire.SegmentQuery(segment=b"", accepted_contexts=[b"", b"x"])])
    assert (await last(client, asked)).outcome == Outcome.MISS
    asked.namespace = IDENTITY.namespace()
    assert (await last(client, asked)).outcome == Outcome.MISS
