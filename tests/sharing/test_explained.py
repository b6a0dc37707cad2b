"""Why there was no hit, among nodes: who owns what is not here, whether it answers, and what it says."""

import asyncio
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvservice.__main__ import main
from kvservice.app import LocalNode, Service
from kvservice.client import Explanation, RoundPrompt
from kvservice.explaining_others import ASKED_MAX
from kvservice.model.errors import InvalidInputError, UnavailableError
from kvservice.model.explanation import PlaceAnswer, PlaceExplanation, place_text
from kvservice.model.segment import SegmentId
from kvservice.peers.call import SilentError
from kvservice.sharing.last_answers import KEPT_MAX, LastAnswers
from kvservice.sharing.place import Offer, Question
from kvservice.stats.explain_http import explain_question
from kvservice.stats.explain_request import parse_question
from tests.access.certificates import Authority
from tests.client.builders import free_port, make_settings
from tests.server.builders import make_identity, make_meta, make_planes
from tests.server.test_explain_http import metas_of
from tests.server.test_schema import check
from tests.sharing.nodes import (
    IDENTITY,
    PATIENT,
    Worker,
    addresses,
    live,
    prompt_of,
    shared_node,
    sidecar,
    until,
    worker,
)
from tests.sharing.shelf import SharingWorld, Shelf
from tests.sharing.test_secured import guarded, outside

NEVER, HAS, HAS_NOT = PlaceAnswer.NEVER, PlaceAnswer.HAS, PlaceAnswer.HAS_NOT


@contextmanager
def pair(folder: Path, **changes: object) -> Iterator[tuple[LocalNode, LocalNode, int]]:
    """A shared node named shelf-1, and a sidecar of it."""
    port = free_port()
    with (
        shared_node(folder / "shared", port, node_name="shelf-1") as shared,
        sidecar(folder / "a", port, **changes) as node,
    ):
        yield shared, node, port


def explain(engine: Worker, prompt: RoundPrompt, *, asks: bool) -> Explanation:
    (found,) = engine.client.explain([prompt], asks_others=asks)
    return found


def places(explanation: Explanation) -> list[tuple[PlaceExplanation, ...]]:
    return [one.why.places for one in explanation.segments]


def leases(node: LocalNode) -> int:
    return node.on_loop(lambda one: len(one.leases.live))


def brought(node: LocalNode) -> int:
    return node.on_loop(lambda one: one.counters.remote.begun)


def test_an_owner_that_is_asked_says_what_it_has_and_nothing_is_brought_or_kept_leased(tmp_path: Path) -> None:
    with (
        pair(tmp_path) as (shared, node, port),
        sidecar(tmp_path / "b", port) as other,
        worker(other) as writer,
        worker(node) as reader,
    ):
        writer.store(prompt_of(1))
        writer.pushed()
        told = explain(reader, prompt_of(1), asks=True)
        assert not told.is_found
        assert places(told) == [(PlaceExplanation("shelf-1", "live", True, HAS),)] * len(told.segments)
        told = explain(reader, prompt_of(2), asks=True)
        assert places(told) == [(PlaceExplanation("shelf-1", "live", True, HAS_NOT),)] * len(told.segments)
        assert brought(node) == 0
        until(lambda: leases(shared) == 0, "the end of the lease")
        assert reader.restore(prompt_of(1)) is not None, "and it is found when it is looked up"


def test_without_asking_it_tells_what_the_last_lookup_heard(tmp_path: Path) -> None:
    with pair(tmp_path) as (_, node, _), worker(node) as reader:
        before = explain(reader, prompt_of(1), asks=False)
        assert places(before) == [(PlaceExplanation("shelf-1", "live", True, NEVER),)] * len(before.segments)
        assert reader.restore(prompt_of(1)) is None
        (one,) = places(explain(reader, prompt_of(1), asks=False))[0]
        assert one.answer is HAS_NOT
        assert one.age_s is not None
        assert 0 <= one.age_s < 60
        assert place_text(one) == "shelf-1 (live), asked 0 s ago: it has nothing that would answer"


def test_what_is_computed_sooner_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing(*_: object) -> set[int]:
        return set()

    monkeypatch.setattr("kvservice.sharing.finder.worth_loading", nothing)
    with (
        pair(tmp_path) as (_, node, port),
        sidecar(tmp_path / "b", port) as other,
        worker(other) as writer,
        worker(node) as reader,
    ):
        writer.store(prompt_of(1))
        writer.pushed()
        assert reader.restore(prompt_of(1)) is None
        found = places(explain(reader, prompt_of(1), asks=False))
        assert {one.answer for (one,) in found} == {PlaceAnswer.COMPUTED_SOONER}
        assert "computing it is sooner than its way here" in place_text(found[0][0])


def test_an_owner_that_is_gone_is_named_as_disconnected_and_not_waited_for(tmp_path: Path) -> None:
    port = free_port()
    with ExitStack() as stack:
        with shared_node(tmp_path / "shared", port, node_name="shelf-1"):
            node = stack.enter_context(sidecar(tmp_path / "a", port))
        until(lambda: not live(node), "the loss")
        reader = stack.enter_context(worker(node))
        (one,) = places(explain(reader, prompt_of(1), asks=True))[0]
        assert (one.name, one.state, one.is_answering) == ("shelf-1", "disconnected", False)
        assert one.answer is PlaceAnswer.NOT_REACHED
        assert place_text(one) == "shelf-1 (disconnected, does not answer), asked now: it was not reached"


def test_this_node_may_be_the_owner(tmp_path: Path) -> None:
    port = free_port()
    with shared_node(tmp_path / "own", port, shared=f"127.0.0.1:{port}") as node:
        until(lambda: len(live(node)) == 1, "itself")
        with worker(node) as reader:
            (one,) = places(explain(reader, prompt_of(1), asks=True))[0]
            assert (one.state, one.answer, place_text(one)) == ("self", NEVER, "this node owns it")


def test_found_segments_and_nodes_alone_tell_of_no_places(tmp_path: Path) -> None:
    with pair(tmp_path) as (_, node, _), worker(node) as engine:
        engine.store(prompt_of(1))
        assert places(explain(engine, prompt_of(1), asks=True)) == [()] * len(prompt_of(1).segments)
    with shared_node(tmp_path / "alone", 0) as node, worker(node) as engine:
        assert places(explain(engine, prompt_of(1), asks=True)) == [()] * len(prompt_of(1).segments)


def test_a_tenant_that_may_not_be_named_there_hears_what_a_stranger_hears(tmp_path: Path) -> None:
    """The owner holds another tenant's caches, and answers as if it held nothing."""
    port, authority = free_port(), Authority(tmp_path / "ca")
    with (
        guarded(tmp_path / "shared", port, authority, '"somebody else"') as shared,
        outside(tmp_path / "a", port, authority.cert, "let me in") as node,
        worker(shared) as inside,
        worker(node) as stranger,
    ):
        until(lambda: bool(live(node)), "the shared node")
        inside.store(prompt_of(1))
        answers = [
            {one.answer for (one,) in places(explain(stranger, prompt, asks=True))}
            for prompt in (prompt_of(1), prompt_of(2))
        ]
        assert answers == [{HAS_NOT}, {HAS_NOT}]


# A place of our own


class Answering:
    """Finds nothing, or fails, and counts."""

    name = "node x"
    way = "node x"

    def __init__(self, fault: Exception | None = None) -> None:
        self.fault = fault
        self.asked: list[int] = []

    async def find(self, questions: Sequence[Question], ahead_bytes: int = 0) -> list[Offer | None]:
        self.asked.append(len(questions))
        if self.fault is not None:
            raise self.fault
        return [None] * len(questions)


@pytest.mark.parametrize(
    ("fault", "answer"),
    [
        (None, HAS_NOT),
        (UnavailableError("gone"), PlaceAnswer.NOT_REACHED),
        (SilentError("slow"), PlaceAnswer.TOO_SLOW),
        (InvalidInputError("no"), PlaceAnswer.REFUSED),
    ],
)
async def test_each_node_is_asked_once_in_bounds_and_its_failures_are_told(
    fault: Exception | None, answer: PlaceAnswer, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, identity = Answering(fault), make_identity()
    monkeypatch.setattr(
        "kvservice.explaining_others._standing",
        lambda *_: iter([(place, PlaceExplanation("x", "live", is_answering=True))]),
    )
    async with SharingWorld(Shelf()) as world:
        world.client(identity)
        asked = {"identity": json.loads(identity.canonical_json()), "tokens": list(range(700)), "chunk_tokens": 1}
        question = parse_question(json.dumps(asked | {"asks_others": True}).encode())
        document = await explain_question(world.node, question)
        check("explain", document)
        assert place.asked == [ASKED_MAX]
        told = [one["places"][0]["answer"] for one in document["segments"]]
        assert told == [answer.name.lower()] * ASKED_MAX + ["never"] * (700 - ASKED_MAX)
        assert "x (live), asked now: it " in document["segments"][0]["text"]
        await explain_question(world.node, replace(question, asks_others=False))
        assert place.asked == [ASKED_MAX]


async def test_what_is_offered_to_a_question_that_was_given_up_is_let_go_of(monkeypatch: pytest.MonkeyPatch) -> None:
    shelf, identity = Shelf(), make_identity()
    is_out, came, gone = asyncio.Event(), asyncio.Event(), asyncio.Event()
    meta = metas_of(identity, range(16))[0]
    async with SharingWorld(shelf) as world:
        await world.client(identity).store(meta, make_planes(tokens=16))
        await world.pushed()
    shelf.fault = None  # its closing
    async with SharingWorld(shelf) as world:
        assert world.node.sharing is not None
        (storage,) = world.node.sharing.directory.storages()
        find = storage.find

        async def find_late(questions: Sequence[Question], ahead_bytes: int = 0) -> list[Offer | None]:
            offers = await find(questions, ahead_bytes)
            assert offers != [None]
            is_out.set()
            await came.wait()
            return offers

        monkeypatch.setattr(storage, "find", find_late)
        monkeypatch.setattr(storage, "let_go", lambda _: gone.set())
        told = (storage, PlaceExplanation("x", "live", is_answering=True))
        monkeypatch.setattr("kvservice.explaining_others._standing", lambda *_: iter([told]))
        world.client(identity)
        given = {"identity": json.loads(identity.canonical_json()), "tokens": list(range(16)), "chunk_tokens": 16}
        question = parse_question(json.dumps(given | {"asks_others": True}).encode())
        asking = asyncio.create_task(explain_question(world.node, question))
        await asyncio.wait_for(is_out.wait(), 30)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        assert asking.cancelled()
        came.set()
        await asyncio.wait_for(gone.wait(), 30)


async def test_cold_storage_is_named_and_not_asked() -> None:
    shelf, identity = Shelf(), make_identity()
    async with SharingWorld(shelf) as world:
        await world.client(identity).find(make_meta(identity))
        asked = shelf.asked
        given: dict[str, Any] = {"identity": json.loads(identity.canonical_json()), "tokens": [1, 2], "chunk_tokens": 1}
        document = await explain_question(
            world.node, parse_question(json.dumps(given | {"asks_others": True}).encode())
        )
        assert shelf.asked == asked
        (one,) = document["segments"][0]["places"]
        assert (one["name"], one["state"], one["answer"]) == ("shelf", "cold", "never")
        assert "shelf (cold) was not asked" in document["text"]


async def test_a_lookup_that_does_not_reach_a_place_is_remembered() -> None:
    shelf, identity = Shelf(), make_identity()
    async with SharingWorld(shelf) as world:
        client = world.client(identity)
        (meta,) = metas_of(identity, range(16))
        given = {"identity": json.loads(identity.canonical_json()), "tokens": list(range(16)), "chunk_tokens": 16}
        question = parse_question(json.dumps(given).encode())

        async def answer() -> str:
            await client.find(meta)
            document = await explain_question(world.node, question)
            return document["segments"][0]["places"][0]["answer"]

        assert await answer() == "has_not"
        shelf.fault = UnavailableError("gone")
        assert await answer() == "not_reached"
        shelf.fault = InvalidInputError("no")
        assert await answer() == "refused"
        shelf.fault = None
        await client.store(meta, make_planes(tokens=16))


def test_last_answers_are_bounded_and_the_newest_stay() -> None:
    now_s = 0.0
    answers = LastAnswers(lambda: now_s)
    segments = [SegmentId(number.to_bytes(32, "big")) for number in range(3 * KEPT_MAX)]
    answers.note("x", segments, HAS)
    now_s = 5.0
    known = [one for one in segments if answers.of("x", one) is not None]
    assert KEPT_MAX // 2 <= len(known) <= KEPT_MAX
    assert known == segments[-len(known) :]
    assert answers.of("x", segments[-1]) == (HAS, 5.0)
    assert answers.of("y", segments[-1]) is None
    answers.note("x", segments[-1:], HAS_NOT)
    assert answers.of("x", segments[-1]) == (HAS_NOT, 0.0)


def test_the_command_asks_the_owner(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    (tmp_path / "b").mkdir()
    identity, tokens = tmp_path / "identity.json", tmp_path / "tokens"
    identity.write_text(IDENTITY.canonical_json())
    tokens.write_text("1 2 3 4")
    settings = make_settings(tmp_path / "b", shared=addresses(port), **PATIENT)
    with shared_node(tmp_path / "shared", port, node_name="shelf-1"), Service(settings) as service:
        peers = service._servers.peers
        assert peers.cluster is not None
        until(lambda: bool(peers.cluster and peers.cluster.directory.members), "the shared node")
        asked = ["explain", "--identity", str(identity), "--tokens", str(tokens), "--chunk-tokens", "2"]
        assert main([*asked, "--socket", settings.socket]) == 1
        assert "; shelf-1 (live), asked now: it has nothing that would answer" in capsys.readouterr().out
        assert main([*asked, "--socket", settings.socket, "--json"]) == 1
        (place,) = json.loads(capsys.readouterr().out)["segments"][0]["places"]
        assert (place["name"], place["answer"], place["age_s"]) == ("shelf-1", "HAS_NOT", None)
