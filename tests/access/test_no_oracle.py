"""Across tenants nothing is learnt: a foreign key is answered as one that is nowhere, by the same bytes and work."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from kvservice.access.gate import Gate
from kvservice.access.principal import Principal, Role
from kvservice.access.quotas import Quota
from kvservice.access.tenant_stats import tenant_stats_json
from kvservice.model.errors import KVServiceError
from kvservice.wire.v1 import cache_pb2 as wire
from tests.access.quota_world import SLOT, limit
from tests.server.builders import Client, World, encode_key, make_identity, make_meta, make_planes, query

ACME, RIVAL = make_identity(tenant="acme"), make_identity(tenant="rival")
ABSENT = make_identity(tenant="absent")
"""Of a tenant that the node never heard of."""
CALLER = Principal("acme", Role.ENGINE, frozenset({"acme"}))


class Probes:
    """Counts what is looked up in dictionaries that a test puts in the node's places."""

    def __init__(self) -> None:
        self.count = 0

    def around(self, inner: Any) -> Any:
        probes = self

        class Counted(dict[Any, Any]):
            def get(self, key: Any, default: Any = None) -> Any:
                probes.count += 1
                return super().get(key, default)

            def __getitem__(self, key: Any) -> Any:
                probes.count += 1
                return super().__getitem__(key)

            def __contains__(self, key: object) -> bool:
                probes.count += 1
                return super().__contains__(key)

            def __iter__(self) -> Iterator[Any]:
                probes.count += 1
                return super().__iter__()

        return Counted(inner)


async def world_with_rival() -> tuple[World, Client, Probes]:
    """A node that holds caches of acme's and of rival's, and a session of acme's; probes of all catalogs count."""
    world = World()
    rival = world.client(RIVAL)
    for name in range(3):
        await rival.store(make_meta(RIVAL, name), make_planes())
    session = world.node.open_session("caller", [ACME.canonical_json()], may_write=True, principal=CALLER)
    welcome = wire.Welcome(session_id=session.id, boot_epoch=world.node.boot_epoch)
    client = Client(world, welcome)
    await client.store(make_meta(ACME, "own"), make_planes())
    probes, catalog = Probes(), world.node.catalog
    catalog.spaces = probes.around(catalog.spaces)
    for space in catalog.spaces.values():
        space.families = probes.around(space.families)
    session.spaces = probes.around(session.spaces)
    world.node.store.open = probes.around(world.node.store.open)
    return world, client, probes


def request_of(name: str, identity: Any) -> Any:
    """A question about a cache of ``identity``, which the session did not register."""
    meta = make_meta(identity, 1)
    match name:
        case "Lookup":
            return wire.LookupRequest(prompts=[query(meta), query(meta, may_shift=True)])
        case "Reserve":
            item = wire.ReserveItem(namespace=meta.namespace, key=encode_key(meta.key), record_bytes=5000)
            return wire.ReserveRequest(items=[item])
        case "Delete":
            return wire.DeleteRequest(keys=[encode_key(meta.key)])
        case "DeleteAll":
            return wire.DeleteRequest(namespace=meta.namespace)
        case "Verify":
            return wire.VerifyRequest(namespace=meta.namespace, keys=[encode_key(meta.key)])
        case "Explain":
            return wire.ExplainRequest(prompts=[query(meta)])
        case _:
            return wire.CommitRoundRequest(round="r", namespace=meta.namespace, members=[encode_key(meta.key)])


async def ask(client: Client, name: str, identity: Any) -> bytes:
    """The answer, with the namespace that was asked for put out of it."""
    try:
        reply = await client.call(name.removesuffix("All"), request_of(name, identity))
        raw: bytes = reply.SerializeToString()
    except KVServiceError as error:
        raw = f"{error.code} {error}".encode()
    return raw.replace(identity.namespace().hex()[:12].encode(), b"NAMESPACE")


@pytest.mark.parametrize("name", ["Lookup", "Reserve", "Delete", "DeleteAll", "Verify", "Explain", "CommitRound"])
async def test_a_foreign_key_is_answered_as_an_absent_one_by_the_same_work(name: str) -> None:
    world, client, probes = await world_with_rival()
    answers, counts = [], []
    for identity in (RIVAL, ABSENT):
        probes.count = 0
        answers.append(await ask(client, name, identity))
        counts.append(probes.count)
    assert answers[0] == answers[1]
    assert counts[0] == counts[1]
    assert counts[0] or name == "DeleteAll", "nothing was counted"
    assert len(world.node.catalog.spaces) == 2


@pytest.mark.parametrize("name", ["Lookup", "Reserve", "Delete", "Verify", "Explain"])
async def test_a_foreign_segment_asked_for_in_ones_own_namespace_is_a_plain_miss(name: str) -> None:
    """Who guesses another tenant's segment id learns nothing from asking for it as its own."""
    world, client, probes = await world_with_rival()
    answers, counts = [], []
    for other in (RIVAL, ABSENT):
        request, foreign = request_of(name, ACME), make_meta(other, 1)
        _put(request, name, foreign)
        probes.count = 0
        reply = await client.call(name, request)
        counts.append(probes.count)
        answers.append(_told(reply, name))
        await client.call("Abort", wire.AbortRequest(reservation_ids=[*world.node.store.open]))
    assert answers[0] == answers[1]
    assert counts[0] == counts[1] > 0


def _put(request: Any, name: str, foreign: Any) -> None:
    match name:
        case "Lookup" | "Explain":
            request.prompts[0].segments[0].segment = foreign.key.segment
            request.prompts[0].segments[0].accepted_contexts[0] = foreign.key.context
            del request.prompts[1:]
        case "Reserve":
            request.items[0].key.CopyFrom(encode_key(foreign.key))
        case _:
            request.keys[0].CopyFrom(encode_key(foreign.key))


def _told(reply: Any, name: str) -> bytes:
    if name == "Reserve":
        return str(reply.outcomes[0].WhichOneof("outcome")).encode()
    if name == "Explain":
        reply.remembered_s = 0
    raw: bytes = reply.SerializeToString()
    return raw


async def test_others_leases_and_reservations_are_as_unknown_as_none() -> None:
    world, client, _ = await world_with_rival()
    rival = world.client(RIVAL)
    rival.session.principal = Principal("rival", Role.ENGINE, frozenset({"rival"}))
    _, lease = await rival.find(make_meta(RIVAL, 1))
    reserved = (await rival.reserve(make_meta(RIVAL, "new"), SLOT)).reserved
    absent = lease + 1000
    assert await client.release(lease) == await client.release(absent) == 0
    renewed = await client.call("Renew", wire.RenewRequest(lease_ids=[lease, absent]))
    assert list(renewed.renewed) == [False, False]
    aborted = await client.call("Abort", wire.AbortRequest(reservation_ids=[reserved.id, reserved.id + 1000]))
    assert aborted.aborted == 0
    texts = []
    for id_ in (reserved.id, reserved.id + 1000):
        outcome = await client.call("Commit", wire.CommitRequest(items=[wire.CommitItem(reservation_id=id_)]))
        texts.append((outcome.outcomes[0].error.code, outcome.outcomes[0].error.message.replace(str(id_), "ID")))
    assert texts[0] == texts[1]
    assert await rival.release(lease) == 1


async def test_figures_are_of_the_callers_tenants_alone() -> None:
    world, client, _ = await world_with_rival()
    await client.find(make_meta(ACME, "own"))
    rival = world.client(RIVAL)
    await rival.find(make_meta(RIVAL, 1))
    document = json.loads(tenant_stats_json(world.node, Gate(), CALLER))
    assert set(document["by_tenant"]) == {"acme"}
    assert {one["tenant"] for one in document["by_namespace"].values()} == {"acme"}
    assert document["quotas"]["acme"]["host"] == {"taken_bytes": SLOT, "limit_bytes": None}
    before = tenant_stats_json(world.node, Gate(), CALLER)
    await rival.store(make_meta(RIVAL, "more"), make_planes())
    await rival.find(make_meta(RIVAL, 2))
    assert tenant_stats_json(world.node, Gate(), CALLER) == before, "what a rival does shows nowhere"
    assert "rival" not in before


async def test_a_refusal_for_a_quota_tells_of_the_own_tenant_alone() -> None:
    world, client, _ = await world_with_rival()
    limit(world, acme=Quota(host_bytes=SLOT), rival=Quota(host_bytes=9 * SLOT))
    outcome = await client.reserve(make_meta(ACME, "x"), 2 * SLOT)
    assert outcome.error.code == "QUOTA"
    assert "rival" not in outcome.error.message
    assert str(9 * SLOT) not in outcome.error.message
