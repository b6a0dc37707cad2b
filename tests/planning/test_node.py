"""Plans of a node: what its lookups and stores teach it, and whether a node of the planned size does as it said."""

import math
import time
from itertools import cycle
from typing import Any

import pytest

from kvservice.curves.scopes import namespace_scope
from kvservice.model.errors import InvalidInputError
from kvservice.model.geometry import opaque_geometry
from kvservice.model.identity import Identity
from kvservice.model.rope import opaque_rope
from kvservice.planning.document import PlanDocument
from kvservice.planning.measuring import curves_of, measure, plan_of
from kvservice.planning.planner import _storage
from kvservice.planning.request import PlanRequest
from kvservice.request_log import RequestLog
from kvservice.stats.answers import finite
from kvservice.wire.v1 import cache_pb2 as wire
from tests.curves.builders import zipf
from tests.server.builders import Client, World, make_identity, make_meta, make_planes, make_relative

IDENTITY = make_identity()
SEGMENTS, LOOKUPS, ARENA_BYTES = 300, 2500, 1 << 20
METAS = [make_meta(IDENTITY, number) for number in range(SEGMENTS)]
PLANES = make_planes()


async def serve(world: World, trace: list[int]) -> float:
    """Look up, and store what was not found, as engines do; the hit ratio."""
    client, hits = world.client(), 0
    for number in trace:
        _, lease = await client.find(METAS[number])
        if lease:
            hits += 1
            await client.release(lease)
        else:
            await client.store(METAS[number], PLANES, prefill_s=0.01)
        world.clock.now_s += 0.1
        if len(world.node.curves.events) > 200:
            world.node.curves.work()
    return hits / len(trace)


async def test_a_node_of_the_planned_size_finds_what_was_predicted_within_three_points() -> None:
    trace = zipf(SEGMENTS, LOOKUPS, 0.7, seed=4)
    small = World(arena_bytes=ARENA_BYTES)
    observed = await serve(small, trace)
    plan = plan_of(small.node, {"host": "2x"})
    now, planned = plan["now"], plan["planned"]
    assert now is not None
    assert planned is not None
    assert plan["observed_hit_ratio"] == pytest.approx(observed, abs=1e-4)
    assert now["policy"] == "simulated"
    assert now["hit_ratio"] == pytest.approx(observed, abs=0.03)
    wear = plan_of(small.node, {"host": "2x", "ssd": "1TiB"})["endurance"]
    assert wear is not None
    assert wear["rests_on"] == "published"
    published = small.node.counters.published_bytes / (LOOKUPS * 0.1) * 86400
    assert 0 < wear["written_bytes_per_day"] < published, "what the larger node finds is not written again"
    large = await serve(World(arena_bytes=2 * ARENA_BYTES), trace)
    assert large > observed + 0.05, "the larger node finds more, or this proves nothing"
    assert planned["hit_ratio"] == pytest.approx(large, abs=0.03)
    saved = large * LOOKUPS * 0.01 / (LOOKUPS * 0.1) * 3600
    assert planned["prefill_saved_s_per_hour"] == pytest.approx(saved, rel=0.1)


async def test_a_node_without_traffic_says_so() -> None:
    plan = plan_of(World().node, {})
    assert not plan["is_measured"]
    assert "no traffic yet" in plan["advice"][0]
    assert set(plan) == set(PlanDocument.__annotations__)
    assert curves_of(World().node, {})["hit_ratio"] == []


async def test_a_lookup_notes_hits_misses_stores_folds_and_deletes() -> None:
    world = World()
    client = world.client()
    await client.store(METAS[0], PLANES)
    meta = make_meta(IDENTITY, 0, history=["a"])
    await client.store(meta, make_relative(IDENTITY, PLANES, 0, meta.position, rows=[1]))
    await world.node.fold_pending()
    for _ in range(3):
        await client.find(METAS[0])
        await client.find(meta)
        await client.find(METAS[1])
    found = world.node.curves.read()
    assert found is not None
    assert found.references == 9
    assert found.curve.hit_ratio_max == pytest.approx(6 / 9)
    assert found.stored_bytes == world.node.tier.used_bytes, "a mirror counts its diff, with the rounding"
    await client.delete(METAS[0], meta)
    for _ in range(9):
        await client.find(METAS[0])
    found = world.node.curves.read()
    assert found is not None
    assert found.curve.hit_ratio_max == pytest.approx(6 / 18)


async def test_ids_that_are_no_digests_are_missed_and_no_curve_ends_by_them() -> None:
    world = World()
    client = world.client()
    await client.store(METAS[0], PLANES)
    for segment in (b"", b"x", METAS[0].key.segment):
        asked = wire.SegmentQuery(segment=segment, accepted_contexts=[b"", b"y", b"z" * 40], tokens=16)
        await client.lookup(wire.PromptQuery(namespace=IDENTITY.namespace(), segments=[asked]))
    found = world.node.curves.read()
    assert found is not None
    assert found.references == 3
    assert found.curve.hit_ratio_max == 0.0


async def test_before_traffic_a_plan_is_the_closed_form_of_what_engines_registered() -> None:
    world = World()
    assert "no engine has registered a model yet" in plan_of(world.node, {})["advice"][1]
    client = world.client(Identity("a", "opaque", "r1", opaque_geometry(4096), (opaque_rope(),)))
    assert "only the bytes of its rows" in plan_of(world.node, {})["advice"][1]
    world.client(IDENTITY)
    plan = plan_of(world.node, {})
    assert plan["what_if_of"] == "model tiny of tenant test, as registered"
    assert plan["what_if"] is not None
    assert plan["what_if"]["bytes_per_token"] == IDENTITY.geometry.token_bytes
    assert plan["what_if"]["break_even_bytes_per_s"] is None
    assert any("say prefill_tokens_per_s" in note for note in plan["what_if"]["notes"])
    client.close()


class WallClock:
    """The time of day, set back and forth by hours while a node runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._now_s, self._jumps = 1.8e9, cycle((7200.0, -10_800.0, 86_400.0, -90_000.0))
        monkeypatch.setattr(time, "time", self.read)
        monkeypatch.setattr(time, "time_ns", lambda: int(self.read() * 1e9))

    def read(self) -> float:
        self._now_s += next(self._jumps)
        return self._now_s


async def test_a_time_of_day_that_jumps_changes_no_document(monkeypatch: pytest.MonkeyPatch) -> None:
    trace, told = zipf(SEGMENTS, 1500, 0.7, seed=4), list[Any]()
    for jumps in (False, True):
        with monkeypatch.context() as patch:
            if jumps:
                WallClock(patch)
            world = World(arena_bytes=ARENA_BYTES)
            world.node.request_log = RequestLog(10)
            await serve(world, trace)
            world.node.expire()
            world.node.recent.note()
            world.node.curves.work()
            node = world.node
            told.append((plan_of(node, {"host": "2x"}), curves_of(node, {}), node.stats_document()))
    assert told[0] == told[1]
    assert told[1][0]["is_measured"]


@pytest.mark.parametrize("jump_s", [-20_000.0, 20_000.0])
async def test_even_a_monotonic_clock_that_jumps_leaves_plans_sane(jump_s: float) -> None:
    """A machine that slept, or a hypervisor that is wrong."""
    world = World(arena_bytes=ARENA_BYTES)
    world.clock.now_s = 50_000.0
    trace = zipf(SEGMENTS, 1500, 0.7, seed=4)
    await serve(world, trace)
    world.clock.now_s += jump_s
    await serve(world, trace)
    plan, stats = plan_of(world.node, {"host": "2x"}), world.node.stats_document()
    assert all(sum(one["age_s"]["buckets"].values()) >= 0 for one in stats["evictions"].values())
    for sizes in (plan["now"], plan["planned"]):
        if sizes is not None:
            assert 0 <= sizes["hit_ratio"] <= 1
            assert sizes["prefill_saved_s_per_hour"] >= 0
    assert plan["window"] is not None
    assert plan["window"]["seconds"] >= 0


async def test_lookups_of_a_namespace_that_is_not_registered_are_noted_by_nobody() -> None:
    world = World()
    client = world.client()
    other = make_meta(make_identity(tenant="other"))
    reply = await client.lookup(wire.PromptQuery(namespace=other.namespace, segments=[wire.SegmentQuery(tokens=1)]))
    assert reply.prompts[0].segments[0].outcome != 1
    assert world.node.curves.read() is None


async def look_up(world: World, identity: Identity) -> Client:
    client = world.client(identity)
    await client.find(make_meta(identity))
    return client


async def test_plans_are_for_a_tenant_or_a_namespace_too_and_unknown_ones_are_named() -> None:
    world, one, two = World(), make_identity(tenant="one"), make_identity(tenant="two")
    with pytest.raises(InvalidInputError, match="There are: none"):
        plan_of(world.node, {"tenant": "one"})
    for identity in (one, two):
        await look_up(world, identity)
    plan = plan_of(world.node, {"tenant": "two"})
    assert plan["window"] is not None
    assert plan["window"]["scope"] == "tenant two"
    curves = curves_of(world.node, {"namespace": one.namespace().hex().upper()})
    assert curves["scope"] == namespace_scope(one.namespace())
    assert curves["simulated"] == []
    with pytest.raises(InvalidInputError, match="tenant two"):
        plan_of(world.node, {"tenant": "three"})
    with pytest.raises(InvalidInputError, match="hexadecimal"):
        plan_of(world.node, {"namespace": "xyz"})


async def test_a_tenant_that_is_no_longer_alone_is_told_what_was_lost() -> None:
    world, one, two = World(), make_identity(tenant="one"), make_identity(tenant="two")
    await look_up(world, one)
    before = plan_of(world.node, {"tenant": "one"})
    assert "1 segments looked up, " in before["missing"]
    await look_up(world, two)
    assert "since another tenant appeared" in plan_of(world.node, {"tenant": "one"})["missing"]
    assert "since another" not in plan_of(world.node, {"tenant": "two"})["missing"]
    spaces = {"namespace": one.namespace().hex()}
    assert "since another namespace appeared" in plan_of(world.node, spaces)["missing"]


async def test_the_plan_of_a_tenant_leaves_out_what_is_the_whole_nodes() -> None:
    world, one, two = World(), make_identity(tenant="one"), make_identity(tenant="two")
    for identity in (one, two):
        await world.client(identity).store(make_meta(identity), make_planes())
        await look_up(world, identity)
    world.clock.now_s += 1.0
    node, tenant = (measure(world.node, PlanRequest(tenant=name)) for name in ("", "one"))
    assert node.published_bytes_per_s > 0
    assert node.written_bytes_per_s is None, "there is no SSD"
    assert node.stored_bytes > 0
    assert (tenant.published_bytes_per_s, tenant.written_bytes_per_s, tenant.ssd_load_bytes_per_s) == (0, None, 0)
    assert (tenant.stored_bytes, tenant.dense_bytes, tenant.wanted, tenant.written) == (0, 0, 0, 0)
    storage = _storage(tenant, tenant.curve) if tenant.curve is not None else None
    assert storage is not None
    assert (storage["mirror_gain"], storage["dedup_gain"]) == (None, None)


def test_what_is_not_finite_is_not_known() -> None:
    assert finite({"a": [1.0, math.inf, {"b": math.nan}], "c": "x"}) == {"a": [1.0, None, {"b": None}], "c": "x"}


async def test_curves_that_fail_stop_and_lookups_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    client = await look_up(world, IDENTITY)
    curves = world.node.curves
    curves.limits = curves.limits.__class__(idle_s=0.0, pause_s=0.0)

    def fail(_: float) -> bool:
        raise ArithmeticError("planted")

    monkeypatch.setattr(curves, "work", fail)
    await curves.run()
    monkeypatch.undo()
    assert not curves.is_on
    await client.store(METAS[0], PLANES)
    _, lease = await client.find(METAS[0])
    assert lease
    assert not curves.events
    assert "no curves are kept" in plan_of(world.node, {})["missing"]
