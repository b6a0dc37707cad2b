"""More questions and answers on their way than a unix socket has room for: nobody waits for who waits for them."""

import asyncio
from pathlib import Path

from kvservice.model.geometry import attention_geometry
from kvservice.model.identity import Identity, Namespace
from kvservice.peers.streams_client_calls import PeerRecord
from kvservice.peers.streams_identities import KnownIdentities
from kvservice.peers.streams_limits import LinkLimits
from tests.peers.local_world import local_link, met_node
from tests.peers.stream_world import fetch_verified, link_to, make_caller, make_facts, make_query
from tests.server.builders import make_identity, make_meta, make_planes

GEOMETRY = attention_geometry(layers=80, heads=1, head_size=128, dtype="bfloat16")
PATIENT = LinkLimits(deadline_s=20.0)
RECORDS, TOKENS = 60, 4


def large_identity() -> tuple[Identity, str]:
    identity = make_identity(GEOMETRY)
    text = identity.canonical_json()
    assert len(text) > 100_000, "many of them find no room"
    return identity, text


class Named:
    """Says a text of every namespace; ``asked``: of which."""

    def __init__(self, text: str) -> None:
        self.asked: list[Namespace] = []
        self._text = text

    def __call__(self, namespace: Namespace) -> str:
        self.asked.append(namespace)
        return self._text


async def test_many_fetches_that_each_bring_an_identity(tmp_path: Path) -> None:
    identity, text = large_identity()
    named = Named(text)
    async with met_node(tmp_path) as met:
        client = met.owner.world.client(identity)
        metas = [make_meta(identity, number, tokens=TOKENS) for number in range(RECORDS)]
        for number, meta in enumerate(metas):
            await client.store(meta, make_planes(GEOMETRY, TOKENS, seed=number))
        caller = make_caller(make_facts("caller"))
        async with (
            link_to(met.owner.address, caller=caller, limits=PATIENT) as stream,
            local_link(met, caller=caller, limits=PATIENT, identity_of=named) as local,
        ):
            found = await stream.find_all([make_query(one) for one in metas], {identity.namespace(): text}, ttl_s=30)
            records = [one.record for one in found if isinstance(one.record, PeerRecord)]
            assert len(records) == RECORDS
            await asyncio.gather(*(fetch_verified(local, one) for one in records))
            assert len(named.asked) == 1, "made once"
            stream.let_go(records)
        client.close()


async def test_many_long_questions_with_long_answers(tmp_path: Path) -> None:
    identity, text = large_identity()
    async with met_node(tmp_path) as met:
        client = met.owner.world.client(identity)
        meta = make_meta(identity, tokens=TOKENS)
        await client.store(meta, make_planes(GEOMETRY, TOKENS))
        async with local_link(met, limits=PATIENT) as local:
            queries = [make_query(meta)] * 4 * PATIENT.find_queries_max
            found = await local.find_all(queries, {identity.namespace(): text}, ttl_s=30)
            assert all(one.record is not None for one in found)
        client.close()


def test_what_was_made_once_is_kept() -> None:
    identity = make_identity()
    named = Named("text")
    known = KnownIdentities(1, named)
    for _ in range(3):
        assert known.find(identity.namespace()) == {identity.namespace(): "text"}
    assert named.asked == [identity.namespace()]
