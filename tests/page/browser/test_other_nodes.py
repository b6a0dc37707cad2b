"""Other nodes on the page, in Chromium: who they are, how bytes come from them, and that their names are texts."""

import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from tests.page.browser.conftest import Opener, shoot, until
from tests.page.browser.test_page import CONTRAST_MIN, SHIFT_MAX, TEXTS, contrast, text
from tests.page.builders import HOSTILE, PageWorld
from tests.page.sharing_world import SharingPage, sharing_page
from tests.sharing.nodes import prompt_of, worker


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharingPage]:
    with sharing_page(tmp_path_factory.mktemp("sharing")) as made:
        yield made


def stats_of(shared: SharingPage) -> Any:
    with urllib.request.urlopen(f"http://{shared.address}/stats", timeout=10) as reply:
        return json.load(reply)


def give(page: Any, others: list[dict[str, Any]], stats: Any) -> None:
    """Have the page hear of these other nodes from now on."""
    document = {**stats, "network": {**stats["network"], "others": others}}
    page.route("**/stats", lambda route: route.fulfill(json=document))


def test_a_node_alone_has_no_section_and_says_so_in_its_tiers(world: PageWorld, open_page: Opener) -> None:
    page = open_page(world)
    assert not page.is_visible("#nodes")
    assert text(page, "others-text") == "none"
    assert text(page, "others-note") == "shares with no other node"


def test_every_other_node_is_named_with_its_ways(shared: SharingPage, open_page: Opener) -> None:
    page = open_page(shared)
    assert page.is_visible("#nodes")
    rows = page.locator("#node-list .row")
    assert rows.count() == 3
    told = {state: rows.filter(has_text=state).first.text_content() for state in ("live", "unmet", "cold storage")}
    assert told["live"].startswith("shelf-1live")
    assert f"127.0.0.1:{shared.nobody}" in told["unmet"]
    assert "s3://bucket/prefix" in told["cold storage"]
    stats = stats_of(shared)
    (live,) = (one for one in stats["network"]["others"] if one["state"] == "live")
    (medium,) = (name for name, way in live["ways"].items() if way["chosen"])
    way = live["ways"][medium]
    total = sum(one["chosen"] for one in live["ways"].values())
    assert f"{medium.replace('_', ' ')}, " in told["live"]
    assert f"{way['chosen']} of {total} loads" in told["live"]
    assert all(f"{name} {count}" in told["live"] for name, count in way["reasons"].items())
    assert " ms, " in told["live"]
    assert "brought; " in told["live"]
    assert text(page, "node-count") == "3"
    shoot(page, "nodes-wide")


def test_tiers_and_answers_count_what_came_from_them(shared: SharingPage, open_page: Opener) -> None:
    page = open_page(shared)
    remote = stats_of(shared)["remote"]
    width = float(page.evaluate("document.querySelector('#others-bar .remote').style.width").rstrip("%"))
    assert width == pytest.approx(100 * (remote["found"] - remote["computed_sooner"]) / remote["asked"], abs=0.1)
    assert f"of {remote['asked']} segments" in page.get_attribute("#others-bar", "aria-label")
    assert f"asked {remote['asked']}, found {remote['found']}" in text(page, "others-note")
    share = float(page.evaluate("document.querySelector('#answers-bar .remote').style.width").rstrip("%"))
    assert share > 0
    assert "other nodes " in page.get_attribute("#answers-bar", "aria-label")


def test_what_comes_and_goes_has_rates(shared: SharingPage, open_page: Opener) -> None:
    page = open_page(shared)
    with worker(shared.node) as engine:
        engine.store(prompt_of(7))
        engine.pushed()
    until(page, "/^[1-9]/.test(document.getElementById('rate-given').textContent)")
    until(page, "document.getElementById('rate-brought').textContent === '0 B'")


def test_names_of_nodes_are_texts_and_states_are_told(shared: SharingPage, open_page: Opener) -> None:
    page, stats = open_page(shared), stats_of(shared)
    (live,) = (one for one in stats["network"]["others"] if one["state"] == "live")
    states = ("live", "draining", "disconnected", "left")
    others = [{**live, "state": state, "name": f"{HOSTILE} {state}"} for state in states]
    others[0] |= {"warmth": 0.25, "problem": HOSTILE}
    give(page, others, stats)
    until(page, "document.querySelectorAll('#node-list .row').length === 4")
    rows = page.locator("#node-list .row")
    for index, state in enumerate(states):
        assert f"{HOSTILE} {state}{state}" in rows.nth(index).text_content()
    assert "warming, 25.0 %" in rows.nth(0).text_content()
    assert page.locator("#node-list .bad").count() == 3
    assert page.locator("img").count() == 0
    assert page.title() == "kvservice"


def test_many_nodes_are_cut_and_said_to_be(shared: SharingPage, open_page: Opener) -> None:
    page, stats = open_page(shared), stats_of(shared)
    give(page, stats["network"]["others"][:1] * 100, stats)
    until(page, "document.getElementById('node-count').textContent === 'the first 16 of 100'")
    assert page.locator("#node-list .row").count() == 16


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_on_a_phone_they_fit_and_are_legible(shared: SharingPage, open_page: Opener, scheme: str) -> None:
    page, stats = open_page(shared, width=360, height=740, scheme=scheme), stats_of(shared)
    others = stats["network"]["others"]
    others[0] |= {"name": "a-long-name-of-a-node.in-a-long.domain.example:50153" * 2, "problem": "no " * 40}
    others[1] |= {"state": "disconnected"}
    give(page, others, stats)
    until(page, "document.getElementById('node-list').textContent.includes('disconnected')")
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    outside = page.evaluate(
        "[...document.querySelectorAll('#nodes *')].filter((one) => one.getBoundingClientRect().right > 361)"
        ".map((one) => one.outerHTML)"
    )
    assert outside == []
    clipped = page.evaluate(
        "[...document.querySelectorAll('.tier .line span, .tile dd span, .tile dt')]"
        ".filter((one) => one.scrollWidth > one.clientWidth + 1 && one.clientWidth).map((one) => one.textContent)"
    )
    assert clipped == []
    assert [one for one in page.evaluate(TEXTS) if contrast(one[1], one[2]) < CONTRAST_MIN] == []
    shoot(page, f"nodes-phone-{scheme}")


@pytest.mark.parametrize("width", [1280, 360])
def test_nothing_moves_when_they_come(shared: SharingPage, open_page: Opener, width: int) -> None:
    page = open_page(shared, width=width)
    page.wait_for_timeout(4500)
    shifts = page.evaluate("window.shifts")
    assert sum(value for value, _ in shifts) < SHIFT_MAX, shifts
