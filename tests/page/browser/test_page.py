"""The page in Chromium: what it shows, by keyboard, on a phone and in the dark, and that it obeys no name."""

import json
import sys
import urllib.request
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.page.browser.conftest import SHOTS, Opener, shoot, until
from tests.page.builders import HOSTILE, PageWorld

CONTRAST_MIN = 4.5
SHIFT_MAX = 0.01
PAINTS = 5
# Every visible text with its colour and the first ground below it that is not clear.
TEXTS = """() => {
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), found = [];
  const clear = (color) => color === "transparent" || color === "rgba(0, 0, 0, 0)";
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    const text = walker.currentNode.textContent.trim();
    if (!text || !node.checkVisibility() || node.closest(".skip, svg, noscript")) continue;
    let ground = node;
    while (ground.parentElement && clear(getComputedStyle(ground).backgroundColor)) ground = ground.parentElement;
    found.push([text, getComputedStyle(node).color, getComputedStyle(ground).backgroundColor]);
  }
  return found;
}"""


def text(page: Any, id_: str) -> str:
    found: str = page.text_content(f"#{id_}")
    return found


def wait_text(page: Any, id_: str, condition: str) -> None:
    until(page, f"((text) => {condition})(document.getElementById('{id_}').textContent)")


def ask(world: PageWorld, path: str) -> Any:
    with urllib.request.urlopen(f"http://{world.address}{path}", timeout=10) as reply:
        return json.load(reply)


def channel(value: int) -> float:
    part = value / 255
    return part / 12.92 if part <= 0.03928 else float(((part + 0.055) / 1.055) ** 2.4)


def luminance(color: str) -> float:
    red, green, blue = (int(one) for one in color[color.index("(") + 1 : -1].split(",")[:3])
    return 0.2126 * channel(red) + 0.7152 * channel(green) + 0.0722 * channel(blue)


def contrast(one: str, other: str) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_the_first_paint_is_told(world: PageWorld, open_page: Opener, record_property: Any) -> None:
    """Its time is a figure, not a promise of this test: it is printed, and kept in the report."""
    times = []
    for _ in range(PAINTS):
        page = open_page(world)
        (found,) = page.evaluate(
            "performance.getEntriesByType('paint').filter((one) => one.name === 'first-contentful-paint')"
            ".map((one) => one.startTime)"
        )
        times.append(found)
        assert found > 0
    told = f"first contentful paint: {min(times):.0f} to {max(times):.0f} ms in {PAINTS} loads"
    record_property("first_paint_ms", times)
    sys.stderr.write(f"\n{told}\n")
    SHOTS.mkdir(parents=True, exist_ok=True)
    (SHOTS / "first_paint.txt").write_text(f"{told}\n")


def test_it_loads_from_the_node_alone_and_shows_its_numbers(world: PageWorld, open_page: Opener, browser: Any) -> None:
    page = open_page(world)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.reload()
    wait_text(page, "state", "text === 'live'")
    until(page, "!!document.querySelector('#chart svg')")
    assert {urlsplit(url).netloc for url in asked if not url.startswith("data:")} == {world.address}
    stats = ask(world, "/stats")
    assert f"{stats['host']['capacity_bytes'] / 2**20:.1f} MiB" in text(page, "host-text")
    width = page.evaluate("document.querySelector('#host-bar .fill').style.width")
    assert float(width.rstrip("%")) == pytest.approx(
        100 * stats["host"]["used_bytes"] / stats["host"]["capacity_bytes"], abs=2
    )
    assert page.get_attribute("#host-bar", "aria-valuenow") == f"{float(width.rstrip('%')):.0f}"
    assert text(page, "ssd-text") == "none"
    assert page.evaluate("performance.getEntriesByName('first-contentful-paint').length") == 1
    shoot(page, "wide-light")


def test_curves_are_drawn_with_the_present_size_marked(world: PageWorld, open_page: Opener) -> None:
    page = open_page(world)
    curves = ask(world, "/curves")
    for name in ("lookups", "weighted"):
        path = page.get_attribute(f"#chart path.{name}", "d")
        assert path.count("L") > 50
        assert "NaN" not in path
        heights = [float(point.split(" ")[1]) for point in path[1:].split("L")]
        assert heights == sorted(heights), "more memory never misses more"
    assert page.locator("#chart line.present").count() == 1
    assert page.locator("#chart line.planned").count() == 0
    assert page.locator("#chart circle").count() == len(curves["simulated"]) > 0
    assert page.get_attribute("#chart", "aria-label").startswith("Misses by size: ")
    page.click("#curve-table summary")
    rows = page.locator("#curve-table tbody tr")
    assert rows.count() == 8
    assert "%" in rows.nth(4).text_content()


def test_another_scope_has_another_curve(world: PageWorld, open_page: Opener) -> None:
    page = open_page(world)
    before = page.get_attribute("#chart path.lookups", "d")
    scope = f"tenant tenant {HOSTILE}"
    assert scope in page.eval_on_selector_all("#scope option", "all => all.map((one) => one.value)")
    page.select_option("#scope", scope)
    until(page, "before => document.querySelector('#chart path.lookups').getAttribute('d') !== before", before)
    wait_text(page, "curve-note", "text.includes('1500 lookups')")


def test_a_slider_changes_the_numbers_to_what_the_planner_says(world: PageWorld, open_page: Opener) -> None:
    page = open_page(world)
    wait_text(page, "plan-hits", "text.includes('%')")
    before, advice = text(page, "plan-hits"), text(page, "advice")
    assert before == text(page, "now-hits")
    page.focus("#host-slider")
    for _ in range(4):
        page.keyboard.press("ArrowRight")
    assert text(page, "host-size") == "4.0 MiB, 4.0 times"
    assert page.get_attribute("#host-slider", "aria-valuetext") == "4.0 MiB, 4.0 times"
    until(page, "before => document.getElementById('plan-hits').textContent !== before", before)
    plan = ask(world, f"/plan?host={4 << 20}&ssd=0")
    assert text(page, "plan-hits") == f"{plan['planned']['hit_ratio'] * 100:.1f} %"
    assert text(page, "now-hits") == f"{plan['now']['hit_ratio'] * 100:.1f} %"
    assert text(page, "advice") != advice
    assert page.locator("#chart line.planned").count() == 1
    page.focus("#ssd-slider")
    page.keyboard.press("End")
    assert text(page, "ssd-size") == "32.0 MiB"
    assert page.locator("#chart line.planned").count() == 2
    shoot(page, "what-if")


def test_rounds_and_families_show_masters_and_mirrors(world: PageWorld, open_page: Opener) -> None:
    page = open_page(world)
    family = ask(world, "/families?count=1")["families"][0]
    row = page.locator("#family-list details").first
    assert family["segment"][:8] in row.text_content()
    assert row.locator("summary .bar .master").count() == 1
    assert row.locator("summary .bar .mirror").count() == 3
    widths = row.locator("summary .bar .fill").evaluate_all("all => all.map((one) => parseFloat(one.style.width))")
    sizes = [family["groups"][0]["master_bytes"], *family["groups"][0]["mirror_sizes"]]
    assert widths == pytest.approx([100 * size / family["dense_bytes"] for size in sizes], abs=0.01)
    round_ = page.locator("#round-list details").first
    round_.locator("summary").click()
    assert round_.locator(".deep .bar").count() == 3
    assert "caches 12, segments 3" in round_.text_content()


def test_an_open_row_stays_open_and_where_it_is(world: PageWorld, open_page: Opener) -> None:
    page = open_page(world)
    row = page.locator("#round-list details").first
    row.locator("summary").click()
    said = row.text_content()
    world.commit_round("while somebody reads")
    page.evaluate("refreshFamilies()")
    assert page.locator("#round-list details").first.text_content() == said
    assert row.get_attribute("open") is not None
    row.locator("summary").click()
    page.evaluate("document.activeElement.blur()")
    page.evaluate("refreshFamilies()")
    until(page, "document.getElementById('round-list').textContent.includes('while somebody reads')")


def test_names_from_clients_are_texts(world: PageWorld, open_page: Opener) -> None:
    page = open_page(world)
    page.wait_for_timeout(500)
    for place in ("round-list", "namespace-rows"):
        assert HOSTILE in text(page, place)
    assert page.locator("img").count() == 0
    assert page.title() == "kvservice"
    assert page.evaluate("document.querySelectorAll('script').length") == 1


def test_what_a_name_would_run_is_blocked_even_if_it_were_markup(world: PageWorld, open_page: Opener) -> None:
    page = open_page(world)
    page.evaluate("text => { document.body.insertAdjacentHTML('beforeend', text); }", HOSTILE)
    until(page, "document.querySelector('img').complete")
    assert page.title() == "kvservice"
    assert any("Content Security Policy" in one for one in page.complaints)
    page.complaints.clear()


def test_rates_follow_the_traffic_and_a_restart_shows_none(world: PageWorld, open_page: Opener) -> None:
    page = open_page(world)
    world.look_up(*range(20))
    wait_text(page, "rate-segments", "text === '10'")
    stats = ask(world, "/stats")
    restarted = {**stats, "boot_epoch": stats["boot_epoch"] + 1, "uptime_s": 1.0}
    page.route("**/stats", lambda route: route.fulfill(json=restarted))
    wait_text(page, "rate-segments", "text === '\\u2013'")
    page.unroute("**/stats")


def test_pause_stops_the_asking_and_goes_on(world: PageWorld, open_page: Opener) -> None:
    page = open_page(world)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.focus("#pause")
    page.keyboard.press("Space")
    assert page.get_attribute("#pause", "aria-pressed") == "true"
    assert text(page, "state") == "paused"
    page.wait_for_timeout(300)
    asked.clear()
    page.wait_for_timeout(4500)
    assert asked == []
    page.keyboard.press("Space")
    wait_text(page, "state", "text === 'live'")
    page.wait_for_timeout(300)
    assert any(url.endswith("/stats") for url in asked)


def test_a_node_that_goes_is_told_and_one_that_comes_back_too(world: PageWorld, open_page: Opener) -> None:
    page = open_page(world)
    page.route("**/stats", lambda route: route.abort())
    wait_text(page, "state", "text === 'no answer'")
    assert "down" in page.get_attribute("#state", "class")
    page.unroute("**/stats")
    wait_text(page, "state", "text === 'live'")
    page.complaints.clear()


def test_before_traffic_it_says_so_and_shows_the_closed_form(idle_world: PageWorld, open_page: Opener) -> None:
    page = open_page(idle_world)
    assert "no lookups yet" in text(page, "curve-note")
    assert "no lookups yet" in text(page, "answers-text")
    assert "no traffic yet" in text(page, "advice")
    assert text(page, "plan-hits") == "\u2013"
    assert "No round was committed yet." in text(page, "round-list")
    before = text(page, "round-answer")
    assert "2.3 GiB instead of 10.0 GiB: 4.3 times less" in before
    page.focus("input[name=refresh_ratio]")
    page.keyboard.press("Home")
    until(page, "before => document.getElementById('round-answer').textContent !== before", before)
    plan = ask(idle_world, "/plan?layers=32&heads=32&kv_heads=8&head_size=128&refresh_ratio=0")["what_if"]
    assert f"{plan['ratio']:.1f} times less" in text(page, "round-answer")
    page.fill("input[name=layers]", "0")
    wait_text(page, "round-answer", "text.includes('layers')")
    page.complaints.clear()  # the browser reports the refusal too
    shoot(page, "idle")


def test_everything_is_reached_by_keyboard_in_the_order_it_is_read(world: PageWorld, open_page: Opener) -> None:
    page = open_page(world)
    reached: list[str] = []
    for _ in range(60):
        page.keyboard.press("Tab")
        name = page.evaluate("(one => one.id || one.name || one.className || one.textContent)(document.activeElement)")
        if reached and page.evaluate("document.activeElement === document.body"):
            break
        reached.append(name)
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none", name
        assert page.evaluate("getComputedStyle(document.activeElement).outlineWidth") == "3px", name
    order = ["skip", "pause", "scope", "The curve as a table", "host-slider", "ssd-slider", "advice"]
    assert reached[:7] == order
    assert reached[-5:] == ["/stats", "/metrics", "/curves", "/plan", "/families"]
    for name in ("layers", "dtype", "agents", "private_share", "refresh_ratio"):
        assert name in reached
    tops = page.evaluate(
        "[...document.querySelectorAll('button, select, summary, input')].map((one) => one.getBoundingClientRect().top)"
    )
    assert tops[0] == min(tops)


def test_the_skip_link_leads_past_the_charts(world: PageWorld, open_page: Opener) -> None:
    page = open_page(world)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.getBoundingClientRect().left") >= 0
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "host-slider"


def test_rows_open_by_keyboard(world: PageWorld, open_page: Opener) -> None:
    page = open_page(world)
    page.locator("#family-list summary").first.focus()
    page.keyboard.press("Enter")
    assert page.locator("#family-list details").first.get_attribute("open") is not None
    assert "master" in page.locator("#family-list details .deep").first.text_content()


def test_every_control_has_a_name(world: PageWorld, open_page: Opener) -> None:
    page = open_page(world)
    nameless = page.evaluate(
        "[...document.querySelectorAll('input, select, button, [role=meter], [role=img]')].filter((one) =>"
        " !one.getAttribute('aria-label') && !one.getAttribute('aria-labelledby') && !(one.labels && one.labels.length)"
        " && !one.textContent.trim()).map((one) => one.outerHTML)"
    )
    assert nameless == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_on_a_phone_nothing_is_wider_than_it(world: PageWorld, open_page: Opener, scheme: str) -> None:
    page = open_page(world, width=360, height=740, scheme=scheme)
    page.wait_for_timeout(300)
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    outside = page.evaluate(
        "[...document.querySelectorAll('main *, header *, footer *')].filter((one) => one.checkVisibility()"
        " && !one.closest('.bar, .hidden') && one.getBoundingClientRect().right > 361).map((one) => one.outerHTML)"
    )
    assert outside == []
    clipped = page.evaluate(
        "[...document.querySelectorAll('.tile dd span, .tile dt, .plan td, .plan th, .tier .line span, #chart text')]"
        ".filter((one) => one.scrollWidth > one.clientWidth + 1 && one.clientWidth).map((one) => one.textContent)"
    )
    assert clipped == []
    shoot(page, f"phone-{scheme}")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_are_legible(world: PageWorld, open_page: Opener, scheme: str) -> None:
    page = open_page(world, scheme=scheme)
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (luminance(ground) < 0.05) == (scheme == "dark")
    weak = [one for one in page.evaluate(TEXTS) if contrast(one[1], one[2]) < CONTRAST_MIN]
    assert weak == []
    inks = page.evaluate(
        "[...document.querySelectorAll('#chart path, #chart line.present')].map((one) => getComputedStyle(one).stroke)"
    )
    card = page.evaluate("getComputedStyle(document.querySelector('section')).backgroundColor")
    assert len(inks) == 3
    assert all(contrast(ink, card) >= 3 for ink in inks)
    shoot(page, f"wide-{scheme}")


@pytest.mark.parametrize("width", [1280, 360])
def test_nothing_moves_when_numbers_come(world: PageWorld, open_page: Opener, width: int) -> None:
    page = open_page(world, width=width)
    for number in range(3):
        world.look_up(*range(20 * number, 20 * number + 20))
        page.wait_for_timeout(2100)
    shifts = page.evaluate("window.shifts")
    assert sum(value for value, _ in shifts) < SHIFT_MAX, shifts


@pytest.mark.parametrize(("motion", "seconds"), [("reduce", "0s"), ("no-preference", "0.4s")])
def test_reduced_motion_is_respected(world: PageWorld, open_page: Opener, motion: str, seconds: str) -> None:
    page = open_page(world, motion=motion)
    assert page.evaluate("getComputedStyle(document.querySelector('#host-bar .fill')).transitionDuration") == seconds
    assert page.evaluate("document.getAnimations().length") == 0 or motion == "no-preference"
