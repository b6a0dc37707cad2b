"""POST /explain: which segment broke the chain and why, for a prompt or a key; and what is no question."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from kvservice.limits import NodeLimits
from kvservice.model.cache import CacheMeta
from kvservice.model.chunks import ChunkRule, keyed_chunks
from kvservice.model.identity import Identity
from kvservice.stats.explain_http import QUESTIONS_MAX
from tests.server.builders import Client, World, make_identity, make_planes
from tests.server.http_world import Http, Reply, http_of
from tests.server.test_schema import check

IDENTITY = make_identity()
TOKENS = list(range(100, 164))
CHUNK = 16


def metas_of(identity: Identity, tokens: Sequence[int] = TOKENS, **rule: Any) -> list[CacheMeta]:
    """The caches of a prompt's chunks."""
    return [
        CacheMeta(
            identity.namespace(), one.key, one.start, one.tokens, identity.geometry, "",
            tuple(one.marks[at : at + 8] for at in range(0, len(one.marks), 8)),
        )
        for one in keyed_chunks(identity.namespace(), tokens, ChunkRule(CHUNK, **rule))
    ]  # fmt: skip


async def store(client: Client, metas: Sequence[CacheMeta]) -> None:
    for meta in metas:
        await client.store(meta, make_planes(tokens=meta.tokens))


def question(**changes: Any) -> bytes:
    asked = {"identity": json.loads(IDENTITY.canonical_json()), "tokens": TOKENS, "chunk_tokens": CHUNK} | changes
    return json.dumps({name: value for name, value in asked.items() if value is not None}).encode()


async def explain(http: Http, **changes: Any) -> Any:
    reply = await http.post("/explain", question(**changes))
    assert reply.status == 200, reply.body
    check("explain", reply.json)
    return reply.json


async def test_a_prompt_that_is_held_is_found_and_a_deleted_segment_breaks_its_chain() -> None:
    world = World()
    client, metas = world.client(), metas_of(IDENTITY)
    await store(client, metas)
    async with http_of(world.node) as http:
        found = await explain(http)
        assert (found["is_found"], found["exact_prefix_tokens"], found["broken_by"]) == (True, 64, None)
        await client.delete(metas[2])
        world.clock.now_s += 5
        broken = await explain(http, identity=None, namespace=IDENTITY.namespace().hex())
    assert (broken["is_found"], broken["exact_prefix_tokens"], broken["broken_by"]) == (False, 32, 2)
    assert broken["segments"][2]["reason"] == "deleted"
    assert broken["segments"][2]["age_s"] == 5.0
    assert "segment 2, tokens 32 to 48, breaks the chain: deleted by a client, 5 s ago" in broken["text"]
    assert "1 are found" in broken["text"]


async def test_nothing_is_leased_counted_or_changed_by_asking() -> None:
    world = World()
    await store(world.client(), metas_of(IDENTITY))
    before: Any = world.node.stats_document()
    async with http_of(world.node) as http:
        await explain(http)
        await explain(http, identity=json.loads(make_identity(tenant="nobody").canonical_json()))
    assert world.node.stats_document() == before
    world.check()


async def test_boundaries_cut_as_the_request_says() -> None:
    world = World()
    await store(world.client(), metas_of(IDENTITY, boundaries=(20,), reuse_end=50))
    async with http_of(world.node) as http:
        assert not (await explain(http))["is_found"]
        found = await explain(http, boundaries=[20], reuse_end=50)
    assert found["is_found"]
    assert [one["tokens"] for one in found["segments"]] == [16, 4, 16, 14]


async def test_salt_and_adapter_are_part_of_the_key() -> None:
    world = World()
    await store(world.client(), metas_of(IDENTITY, salt="s", adapter=("a", "d")))
    async with http_of(world.node) as http:
        assert (await explain(http, salt="s", adapter={"name": "a", "digest": "d"}))["is_found"]
        other = await explain(http, salt="s")
    assert other["segments"][0]["reason"] == "other_context"
    assert other["segments"][0]["nearest"][0]["position"] == 0


async def test_another_context_answers_if_it_may() -> None:
    world = World()
    await store(world.client(), metas_of(IDENTITY))
    async with http_of(world.node) as http:
        moved = await explain(http, tokens=[1] * 16 + TOKENS[16:], may_shift=True)
    assert [one["match"] for one in moved["segments"]] == ["none", "shifted", "shifted", "shifted"]
    assert (moved["broken_by"], moved["exact_prefix_tokens"]) == (0, 0)


async def test_the_nearest_identity_is_told_with_what_differs_and_what_it_would_find() -> None:
    world = World()
    held, stranger = replace(IDENTITY, weights="r2"), make_identity(tenant="stranger")
    await store(world.client(held, stranger), [*metas_of(held), *metas_of(stranger)])
    async with http_of(world.node) as http:
        found = await explain(http)
    assert found["segments"][0]["reason"] == "empty_namespace"
    (elsewhere,) = found["elsewhere"]
    assert elsewhere["namespace"] == held.namespace().hex()
    assert (elsewhere["found"], elsewhere["held_segments"]) == (4, 4)
    assert [one["field"] for one in elsewhere["differences"]] == ["weights"]


async def test_a_key_is_explained_from_what_is_known_of_it() -> None:
    world = World()
    client, metas = world.client(), metas_of(IDENTITY)
    await store(client, metas)
    keys = [{"segment": one.key.segment.hex(), "context": one.key.context.hex()} for one in metas]
    await client.delete(metas[1])
    whose = {"identity": None, "tokens": None, "chunk_tokens": None, "namespace": IDENTITY.namespace().hex()}
    async with http_of(world.node) as http:
        found = await explain(http, **whose, key=keys[3])
        gone = await explain(http, **whose, key=keys[1])
        other = await explain(http, **whose, key=keys[3] | {"context": "00" * 32})
        never = await explain(http, **whose, key={"segment": "11" * 32, "context": "00" * 32})
    assert (found["is_found"], found["segments"][0]["start"], found["tokens"]) == (True, 48, 16)
    assert gone["segments"][0]["reason"] == "deleted"
    assert (other["segments"][0]["reason"], other["segments"][0]["contexts"]) == ("other_context", 1)
    assert never["segments"][0]["reason"] == "never_stored"


# Bad input


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokens": None}, "and not both"),
        ({"key": {"segment": "00" * 32, "context": "00" * 32}}, "and not both"),
        ({"identity": None}, "the digest of its"),
        ({"namespace": "00" * 32}, "the digest of its"),
        ({"identity": None, "namespace": "xyz"}, "64 hexadecimal digits"),
        ({"identity": None, "namespace": "00" * 32}, "nothing is held for namespace"),
        ({"identity": {"tenant": "t"}}, "missing fields"),
        ({"identity": [1]}, "an identity is a JSON object"),
        ({"token": [1]}, "did you mean 'tokens'"),
        ({"tokens": [1.5]}, "whole numbers"),
        ({"tokens": [-1] * 16}, "0 to 4294967295"),
        ({"tokens": [1 << 40] * 16}, "0 to 4294967295"),
        ({"tokens": [True]}, "whole numbers"),
        ({"tokens": "1 2 3"}, "a list of at most"),
        ({"tokens": []}, "no block"),
        ({"tokens": [1, 2], "block_size": 16}, "no block"),
        ({"chunk_tokens": 0}, "multiple of the block size"),
        ({"chunk_tokens": 10, "block_size": 4}, "multiple of the block size"),
        ({"chunk_tokens": -1}, "whole number from 0"),
        ({"boundaries": [1] * 2000}, "at most 1024"),
        ({"salt": 5}, "a text"),
        ({"adapter": {"name": "a"}}, '"digest"'),
        ({"may_shift": "yes"}, "true or false"),
        ({"asks_others": 1}, "true or false"),
        ({"tokens": None, "chunk_tokens": None, "key": {"segment": "00" * 32}}, "a \"context\""),
        ({"tokens": None, "chunk_tokens": None, "key": {"segment": "0", "context": "00" * 32}}, "hexadecimal"),
        ({"tokens": None, "key": {"segment": "00" * 32, "context": "00" * 32}}, "takes no 'chunk_tokens'"),
        (
            {"tokens": None, "chunk_tokens": None, "asks_others": True, "key": {"segment": "00" * 32, "context": ""}},
            "takes no 'asks_others'",
        ),
    ],
)  # fmt: skip
async def test_what_is_no_question_is_refused_with_advice(changes: dict[str, Any], words: str) -> None:
    async with http_of(World().node) as http:
        reply = await http.post("/explain", question(**changes))
        assert reply.status == 400, reply.body
        assert words in reply.json["message"]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b"null", b'{"a": NaN}', b"[" * 100_000])
async def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    async with http_of(World().node) as http:
        assert (await http.post("/explain", body)).status == 400


async def test_another_sites_form_cannot_ask_and_too_much_is_refused() -> None:
    world = World(limits=NodeLimits(explain_segments_max=3))
    world.client()
    async with http_of(world.node) as http:
        assert (await http.post("/explain", question(), "text/plain")).status == 415
        assert (await http.get("/explain")).status == 405
        reply = await http.post("/explain", question())
        assert (reply.status, reply.json["error"]) == (400, "LIMIT")
        assert (await http.post("/explain", b" " * (17 << 20))).status == 413


async def test_lookups_get_their_turn_and_a_crowd_is_told_to_come_back() -> None:
    world = World()
    client = world.client()
    many = list(range(1000))
    async with http_of(world.node) as http:
        asked = [asyncio.ensure_future(http.post("/explain", question(tokens=many, chunk_tokens=1))) for _ in range(6)]
        lookups = 0
        while not all(one.done() for one in asked):
            await client.find(metas_of(IDENTITY)[0])
            lookups += 1
            await asyncio.sleep(0)
        replies: list[Reply] = [await one for one in asked]
    statuses = [one.status for one in replies]
    assert statuses.count(200) >= QUESTIONS_MAX
    assert set(statuses) == {200, 429}
    assert lookups > 100
