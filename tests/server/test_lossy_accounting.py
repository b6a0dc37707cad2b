"""What a namespace rounds when it is stored is never told as exact: by the node, tenants, namespaces and metrics."""

from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from kvservice.accounting import OTHER, AccountLimits, Accounts
from kvservice.model.identity import INT8, Identity
from kvservice.stats.metrics import METRICS
from kvservice.stats.report import stats_tables
from kvservice.top_frame import Seen, frame
from kvservice.top_rates import rates
from tests.server.builders import TOKENS, World, make_identity, make_meta, make_planes

NONE, ONE = AccountLimits(namespaces_max=0, tenants_max=0), AccountLimits(namespaces_max=0, tenants_max=1)


def make_lossy(tenant: str = "test") -> Identity:
    return replace(make_identity(tenant=tenant), lossy=INT8)


async def found(world: World, identity: Identity, segments: int = 1) -> None:
    """So many segments are found in the context asked for."""
    client = world.client(identity)
    for name in range(segments):
        await client.store(make_meta(identity, name), make_planes())
        await client.find(make_meta(identity, name))


def told(document: Any) -> tuple[int, int]:
    """Segments told as exact and as lossy."""
    return document["exact_tokens"] // TOKENS, document["lossy_tokens"] // TOKENS


def samples(document: Any, name: str) -> dict[tuple[str, ...], float]:
    (spec,) = (one for one in METRICS if one.name == name)
    return dict(spec.samples(document))


async def test_of_a_named_namespace_and_of_the_whole_node() -> None:
    world, exact, lossy = World(), make_identity(), make_lossy()
    await found(world, exact, 3)
    await found(world, lossy, 2)
    document: Any = world.node.stats_document()
    world.check()
    assert told(document["accounting"]) == (3, 2)
    assert (document["accounting"]["exact_ratio"], document["accounting"]["lossy_ratio"]) == (0.6, 0.4)
    named = {one: document["by_namespace"][one.namespace().hex()] for one in (exact, lossy)}
    assert {one.lossy: told(part) for one, part in named.items()} == {"": (3, 0), INT8: (0, 2)}
    assert {one.lossy: part["lossy"] for one, part in named.items()} == {"": "", INT8: INT8}
    assert told(document["by_tenant"]["test"]) == (3, 2)
    assert (document["lookups"]["exact"], document["lookups"]["rounded"]) == (3, 2)


@pytest.mark.parametrize("limits", [NONE, ONE])
async def test_of_namespaces_without_a_name(limits: AccountLimits) -> None:
    world = World()
    world.node.accounts = Accounts(limits)
    for tenant, exact, lossy in (("a", 1, 2), ("b", 3, 4)):
        await found(world, make_identity(tenant=tenant), exact)
        await found(world, make_lossy(tenant), lossy)
    document: Any = world.node.stats_document()
    world.check()
    assert told(document["accounting"]) == (4, 6)
    assert {name: told(one) for name, one in document["by_namespace"].items()} == {OTHER: (4, 6)}
    assert document["by_namespace"][OTHER]["lossy"] == OTHER
    by_tenant = {name: told(one) for name, one in document["by_tenant"].items()}
    assert by_tenant == ({OTHER: (4, 6)} if limits is NONE else {"a": (1, 2), OTHER: (3, 4)})


async def test_what_is_refreshed_or_moved_there_is_counted_once() -> None:
    world, lossy = World(), make_lossy()
    client = world.client(lossy)
    refreshed = make_meta(lossy, "refreshed", provenance="p")
    await client.store(make_meta(lossy), make_planes())
    await client.store(refreshed, make_planes())
    await client.find(make_meta(lossy))
    await client.find(refreshed)
    await client.find(make_meta(lossy, history=["b"]), may_shift=True)
    document: Any = world.node.stats_document()
    world.check()
    lookups = document["lookups"]
    assert [lookups[name] for name in ("exact", "rounded", "refreshed", "shifted")] == [0, 1, 1, 1]
    assert told(document["accounting"]) == (0, 3)


async def test_of_one_that_is_gone() -> None:
    """Its session ended and it held nothing: the ledger knows still."""
    world, lossy = World(), make_lossy()
    client = world.client(lossy)
    meta = make_meta(lossy)
    await client.store(meta, make_planes())
    _, lease = await client.find(meta)
    await client.release(lease)
    await client.delete(meta)
    client.close()
    document: Any = world.node.stats_document()
    assert lossy.namespace() not in world.node.catalog.spaces
    assert told(document["by_namespace"][lossy.namespace().hex()]) == told(document["accounting"]) == (0, 1)


async def test_in_metrics() -> None:
    world, exact, lossy = World(), make_identity(), make_lossy()
    await found(world, exact, 3)
    await found(world, lossy, 2)
    document = world.node.stats_document()
    assert samples(document, "kvservice_exact_tokens_total") == {(): 3 * TOKENS}
    assert samples(document, "kvservice_lossy_tokens_total") == {(): 2 * TOKENS}
    assert samples(document, "kvservice_tenant_lossy_tokens_total") == {("test",): 2 * TOKENS, (OTHER,): 0}
    digests = exact.namespace().hex(), lossy.namespace().hex()
    of_namespaces = samples(document, "kvservice_namespace_exact_tokens_total")
    assert of_namespaces == {(digests[0],): 3 * TOKENS, (digests[1],): 0, (OTHER,): 0}
    assert samples(document, "kvservice_lookup_exact_total") == {(): 3}
    assert samples(document, "kvservice_lookup_rounded_total") == {(): 2}
    info = samples(document, "kvservice_namespace_info")
    assert {labels[0]: labels[3] for labels in info} == {digests[0]: "", digests[1]: INT8, OTHER: OTHER}


async def test_in_a_terminal() -> None:
    world, exact, lossy = World(), make_identity(), make_lossy()
    await found(world, exact, 1)
    stats: Any = world.node.stats_document()
    assert "rounded" not in text_of(stats)
    await found(world, lossy, 3)
    stats = world.node.stats_document()
    told = text_of(stats)
    assert "rounded" in told
    assert "25.0% found exactly, 75.0% more with an approximation" in told
    lines = [line.plain for line in frame(Seen("here:1", stats, rates(None, stats)), 80, 40)]
    assert sum(line.startswith("int8 tiny ") for line in lines) == 1
    assert sum(line.startswith("tiny ") for line in lines) == 1


def text_of(stats: Any) -> str:
    console = Console(width=200)
    with console.capture() as captured:
        console.print(stats_tables(stats))
    return captured.get()
