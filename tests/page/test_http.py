"""The page's routes and documents over HTTP: what it is made of, what a browser is told, what /families says."""

import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.client import HTTPResponse
from typing import Any

import pytest

from kvservice.page import families_document as families
from kvservice.page.http import FILES, FOLDER
from kvservice.round_history import NAME_CHARS_MAX, ROUNDS_MAX, SEGMENTS_MAX, RoundHistory
from tests.page.builders import HOSTILE, PageWorld, commit_round
from tests.server.builders import World, make_identity, make_meta, make_planes

IDENTITY = make_identity()


@pytest.fixture(scope="module")
def page() -> Iterator[PageWorld]:
    with PageWorld(lookups=50, rounds=2, names=("tiny", HOSTILE)) as world:
        yield world


def get(page: PageWorld, path: str) -> HTTPResponse:
    reply: HTTPResponse = urllib.request.urlopen(f"http://{page.address}{path}", timeout=10)
    return reply


def get_json(page: PageWorld, path: str) -> Any:
    with get(page, path) as reply:
        return json.load(reply)


def test_the_page_is_three_files_of_the_package(page: PageWorld) -> None:
    for path, (name, kind) in FILES.items():
        with get(page, path) as reply:
            assert reply.headers["Content-Type"] == f"{kind}; charset=utf-8"
            assert reply.read() == (FOLDER / name).read_bytes() != b""
    assert {path.name for path in FOLDER.iterdir() if path.suffix != ".py" and path.is_file()} == {
        name for name, _ in FILES.values()
    }


def test_the_browser_is_told_to_run_and_load_nothing_else(page: PageWorld) -> None:
    for path in FILES:
        with get(page, path) as reply:
            policy = dict(part.strip().split(" ", 1) for part in reply.headers["Content-Security-Policy"].split(";"))
            assert policy["default-src"] == policy["form-action"] == policy["frame-ancestors"] == "'none'"
            assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
            assert reply.headers["X-Content-Type-Options"] == "nosniff"
            assert reply.headers["Referrer-Policy"] == "no-referrer"


def test_nothing_inline_and_nothing_from_outside() -> None:
    html, css, script = ((FOLDER / name).read_text() for name, _ in FILES.values())
    assert re.findall(r"<script(?![^>]*\ssrc=)", html) == []
    assert re.findall(r"\s(?:style|on[a-z]+)=", html) == []
    for text in (html, css, script):
        outside = set(re.findall(r"https?://[^\s\"'%)]+", text)) - {"http://www.w3.org/2000/svg"}
        assert not outside
    assert "@import" not in css
    assert "url(" not in css
    for banned in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
        assert banned not in script, f"{banned}: texts of clients are written as texts"


def test_every_id_that_the_script_names_is_there_once() -> None:
    html, script = (FOLDER / "page.html").read_text(), (FOLDER / "page.js").read_text()
    there = re.findall(r'\bid="([^"]+)"', html)
    assert len(there) == len(set(there))
    named = set(re.findall(r'\b(?:at|say|showList)\("([a-z-]+)"', script))
    assert named - set(there) == set()
    labels = set(re.findall(r'(?:\bfor|aria-labelledby)="([^"]+)"', html))
    assert labels <= set(there)


def test_rounds_are_told_with_the_families_that_are_left(page: PageWorld) -> None:
    answer = get_json(page, "/families")
    assert set(answer) == set(families.FamiliesDocument.__annotations__)
    assert answer["round_count"] == 2
    newest = answer["rounds"][0]
    assert set(newest) == set(families.RoundDocument.__annotations__)
    assert newest["name"] == f"round 1 {HOSTILE}"
    assert (newest["members"], newest["segments"], newest["elections"]) == (12, 3, 3)
    assert newest["bytes_after"] < newest["bytes_before"]
    family = newest["families"][0]
    assert set(family) == set(families.FamilyDocument.__annotations__)
    (group,) = family["groups"]
    assert set(group) == set(families.GroupDocument.__annotations__)
    assert group["mirrors"] == len(group["mirror_sizes"]) == 3
    assert group["mirror_bytes"] == sum(group["mirror_sizes"]) < group["master_bytes"]
    assert family["record_bytes"] == group["master_bytes"] + group["mirror_bytes"]
    assert family["dense_bytes"] == group["dense_bytes"] == 4 * make_meta(IDENTITY).dense_bytes


def test_the_largest_families_come_first_and_as_many_as_asked_for(page: PageWorld) -> None:
    answer = get_json(page, "/families?count=2")
    assert [one["members"] for one in answer["families"]] == [4, 4]
    assert len(answer["rounds"]) == 2
    assert answer["families_looked_at"] == answer["family_count"]


@pytest.mark.parametrize("query", ["count=0", "count=25", "count=-1", "count=2e1", "count=%C2%B2", "size=3", "count="])
def test_nonsense_is_refused(page: PageWorld, query: str) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        get(page, f"/families?{query}")
    assert refused.value.code == 400
    assert "count" in json.load(refused.value)["message"]
    refused.value.close()


def test_no_other_file_is_served(page: PageWorld) -> None:
    for path in ("/page.html", "/../page.css", "/page/http.py", "/favicon.ico"):
        with pytest.raises(urllib.error.HTTPError) as refused:
            get(page, path)
        assert refused.value.code == 404
        refused.value.close()


async def test_a_family_that_went_is_not_told() -> None:
    world = World()
    await commit_round(world, IDENTITY, "gone", segments=1)
    client = world.client(IDENTITY)
    await client.delete(make_meta(IDENTITY, "gone0"), *(_member(agent) for agent in range(1, 4)))
    answer = families.families_of(world.node, {})
    assert answer["families"] == []
    assert answer["rounds"][0]["families"] == []
    assert answer["rounds"][0]["segments"] == 1


def _member(agent: int) -> Any:
    return make_meta(IDENTITY, "gone0", history=[f"agent {agent}"])


async def test_a_master_that_was_deleted_is_told_under_its_mirrors() -> None:
    world = World()
    await commit_round(world, IDENTITY, "headless", segments=1)
    space = world.node.catalog.spaces[IDENTITY.namespace()]
    (family,) = space.families.values()
    (master,) = family.masters(2)
    await world.client(IDENTITY).call("Delete", _delete(master))
    (told,) = families.families_of(world.node, {})["families"]
    assert told["members"] == told["groups"][0]["mirrors"] == 3
    assert told["groups"][0]["master_bytes"] == master.record_bytes


def _delete(cache: Any) -> Any:
    from kvservice.wire.v1 import cache_pb2 as wire
    from tests.server.builders import encode_key

    return wire.DeleteRequest(keys=[encode_key(cache.key)])


async def test_the_answer_is_bounded_and_says_what_it_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "FAMILIES_LOOKED_MAX", 5)
    monkeypatch.setattr(families, "MEMBERS_MAX", 2)
    world = World()
    await commit_round(world, IDENTITY, "one", segments=1)
    client = world.client(IDENTITY)
    for number in range(9):
        await client.store(make_meta(IDENTITY, number), make_planes())
    answer = families.families_of(world.node, {"count": "24"})
    assert (answer["families_looked_at"], answer["family_count"]) == (5, 10)
    (family,) = answer["rounds"][0]["families"]
    assert (family["members"], family["looked_at"]) == (4, 2)


def test_the_history_of_rounds_is_a_ring_of_bounded_records() -> None:
    history = RoundHistory()
    keys = [make_meta(IDENTITY, number).key for number in range(SEGMENTS_MAX + 3)]
    for number in range(ROUNDS_MAX + 5):
        history.note(f"{number}" + "x" * 999, b"n" * 32, keys, 1, (10, 5), float(number))
    assert history.committed == ROUNDS_MAX + 5
    records = history.newest(999)
    assert len(records) == ROUNDS_MAX
    assert [records[0].at_s, records[-1].at_s] == [ROUNDS_MAX + 4.0, 5.0]
    assert len(records[0].name) == NAME_CHARS_MAX
    assert (records[0].segment_count, len(records[0].segments)) == (SEGMENTS_MAX + 3, SEGMENTS_MAX)
