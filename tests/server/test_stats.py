"""The stats document adds up."""

import json

from kvservice.accounting import OTHER
from kvservice.model.plan import MissReason
from kvservice.stats.document import NodeDocument
from tests.server.builders import World, make_identity, make_meta, make_planes, make_relative

IDENTITY = make_identity()
META = make_meta(IDENTITY)


def shape(value: object) -> object:
    """A document's keys and types."""
    return {key: shape(one) for key, one in value.items()} if isinstance(value, dict) else type(value).__name__


async def test_the_document_is_whole_and_zero_from_the_start_and_keeps_its_shape() -> None:
    world = World()
    first = world.node.stats_document()
    assert set(first) == set(NodeDocument.__annotations__)
    assert first["lookups"]["missed"] == {r.name.lower(): 0 for r in MissReason if r is not MissReason.NONE}
    assert first["caches"]["ratio"] == 1.0
    client = world.client()
    await client.store(META, make_planes())
    await client.find(META)
    later = json.loads(json.dumps(world.node.stats_document()))
    for named in (later["by_tenant"], later["by_namespace"]):
        assert len({repr(shape(part)) for part in named.values()}) == 1, "those with a name and the rest look alike"
    later |= {name: {OTHER: later[name][OTHER]} for name in ("by_tenant", "by_namespace")}
    assert shape(later) == shape(json.loads(json.dumps(first)))


async def test_what_is_held_and_done_is_told() -> None:
    world = World()
    client = world.client()
    await client.store(META, make_planes())
    meta = make_meta(IDENTITY, history=["a"])
    await client.store(meta, make_relative(IDENTITY, make_planes(), 0, meta.position, rows=[1]))
    await world.node.fold_pending()
    await client.find(META)
    await client.find(meta)
    await client.find(make_meta(IDENTITY, "nothing"))
    reservation, checksum = await client.begin(make_meta(IDENTITY, "bad"), make_planes())
    await client.commit(reservation, checksum ^ 1)
    await client.reserve(META, 4096)
    world.clock.now_s += 12.5
    stats = world.node.stats_document()
    caches, lookups, writes = stats["caches"], stats["lookups"], stats["writes"]
    assert stats["uptime_s"] == 12.5
    assert (caches["master"]["count"], caches["mirror"]["count"], caches["families"], caches["groups"]) == (1, 1, 1, 1)
    assert caches["dense_bytes"] == 2 * META.dense_bytes
    stored = caches["master"]["record_bytes"] + caches["mirror"]["record_bytes"]
    assert caches["ratio"] == round(caches["dense_bytes"] / stored, 4) > 1.0
    assert stats["host"]["record_bytes"] == stored <= stats["host"]["used_bytes"]
    answered = lookups["exact"] + lookups["refreshed"] + lookups["shifted"] + sum(lookups["missed"].values())
    assert lookups["asked"] == answered == 3
    assert (writes["published"], writes["existed"]) == (2, 1)
    assert {code: count for code, count in writes["commits_refused"].items() if count} == {"CHECKSUM_MISMATCH": 1}
    assert stats["folds"]["folded"] == 1
    assert stats["handles"]["leases"] == 2


async def test_evictions_are_counted_in_groups_caches_and_bytes() -> None:
    world = World(arena_bytes=1 << 16)
    client = world.client()
    metas = [make_meta(IDENTITY, name) for name in range(12)]
    for meta in metas:
        await client.store(meta, make_planes())
    evictions, caches = world.node.stats_document()["evictions"]["host"], world.node.stats_document()["caches"]
    assert evictions["groups"] == evictions["caches"] == 12 - caches["master"]["count"] > 0
    one = caches["master"]["record_bytes"] // caches["master"]["count"]
    assert evictions["record_bytes"] == one * evictions["caches"]
