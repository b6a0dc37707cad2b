"""Tests in a real browser: collected only where Playwright is, that is by `make test-page`."""

import importlib.util
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.page.builders import HOSTILE, PageWorld

IS_HERE = importlib.util.find_spec("playwright") is not None
collect_ignore_glob = [] if IS_HERE else ["test_*.py"]
SHOTS = Path(__file__).resolve().parents[3] / "build/page"
LONG = "Qwen/Qwen3-30B-A3B-Instruct-2507-in-a-very-long-variant-of-its-name"
# A browser without its own network of services, and without the sandbox that a container lacks.
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
SHIFTS = """
    window.shifts = [];
    new PerformanceObserver((list) => {
      for (const entry of list.getEntries()) {
        const names = entry.sources.map((one) => one.node && (one.node.id || one.node.className || one.node.nodeName));
        window.shifts.push([entry.value, names.join()]);
      }
    }).observe({ type: "layout-shift", buffered: true });
"""
WAIT_MS, WAITS_MAX = 50, 300
Opener = Callable[..., Any]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("page").addoption("--chromium", default="chromium", help="the browser: a name or a path")


@pytest.fixture(scope="session")
def browser(request: pytest.FixtureRequest) -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    name: str = request.config.getoption("--chromium")
    path = shutil.which(name)
    assert path, f"there is no browser {name!r}: apt-get install chromium, or make test-page CHROMIUM=..."
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(FLAGS))
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def world() -> Iterator[PageWorld]:
    """A node with traffic of three models, one of a hostile name, and three rounds."""
    with PageWorld(rounds=3, names=("tiny", LONG, HOSTILE)) as made:
        yield made


@pytest.fixture(scope="session")
def idle_world() -> Iterator[PageWorld]:
    """A node that nobody ever asked."""
    with PageWorld(lookups=0) as made:
        yield made


@pytest.fixture
def open_page(browser: Any) -> Iterator[Opener]:
    """``open_page(world, width=..., scheme=...)``: the page once it shows numbers. It must not complain to its console;
    ``page.complaints`` may be emptied by who provoked some."""
    opened: list[Any] = []

    def open_(world: PageWorld, width: int = 1280, height: int = 900, scheme: str = "light", motion: str = "") -> Any:
        page = browser.new_page(
            viewport={"width": width, "height": height}, color_scheme=scheme, reduced_motion=motion or "no-preference"
        )
        page.complaints = complaints = []
        page.on("console", lambda said: complaints.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.add_init_script(SHIFTS)
        opened.append(page)
        page.goto(f"http://{world.address}/")
        until(page, "document.getElementById('state').textContent === 'live'")
        until(page, "!!document.querySelector('#chart svg')")
        until(page, "document.getElementById('round-answer').textContent.length > 20")
        until(page, "document.getElementById('family-count').textContent !== ''")
        until(page, "document.querySelector('#advice p').textContent.length > 5")
        return page

    yield open_
    for page in opened:
        page.close()
    assert [page.complaints for page in opened] == [[]] * len(opened)


def until(page: Any, expression: str, argument: object = None) -> None:
    """Wait for a condition. Playwright's own way would evaluate a string in the page, which its policy forbids."""
    for _ in range(WAITS_MAX):
        if page.evaluate(expression, argument):
            return
        page.wait_for_timeout(WAIT_MS)
    raise AssertionError(f"not true after {WAITS_MAX * WAIT_MS / 1000} s: {expression}")


def shoot(page: Any, name: str) -> None:
    """Keep a picture of the whole page."""
    SHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SHOTS / f"{name}.png", full_page=True)
