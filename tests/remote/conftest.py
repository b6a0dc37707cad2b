"""Fixtures: a place of every engine. Its servers are shared by all tests that only use them."""

import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from kvservice.storage.remote.tier import ObjectTier
from tests.remote.places import AVAILABLE, SERVED, SERVERS, Place, Servers, make_place

_prefixes = (f"test-{number}/q" for number in itertools.count())


@pytest.fixture(scope="session")
def shared_servers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Servers]]:
    started: dict[str, Servers] = {}
    with contextlib.ExitStack() as stack:

        def start(kind: str) -> Servers:
            if kind not in started:
                started[kind] = stack.enter_context(SERVERS[kind](request, tmp_path_factory.mktemp(kind)))
            return started[kind]

        yield start


@pytest.fixture
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")


@pytest_asyncio.fixture(params=AVAILABLE)
async def place(
    request: pytest.FixtureRequest, shared_servers: Callable[[str], Servers], credentials: None, tmp_path: Path
) -> AsyncIterator[Place]:
    opened = make_place(request.param, shared_servers(request.param), tmp_path, next(_prefixes))
    yield opened
    await opened.close()


@pytest_asyncio.fixture
async def tier(place: Place) -> ObjectTier:
    return await place.open()


@pytest_asyncio.fixture(params=[kind for kind in SERVED if kind in AVAILABLE])
async def own_place(request: pytest.FixtureRequest, credentials: None, tmp_path: Path) -> AsyncIterator[Place]:
    """A place whose servers the test may freeze, kill and restart."""
    with SERVERS[request.param](request, tmp_path) as servers:
        opened = make_place(request.param, servers, tmp_path, "p/q")
        yield opened
        await opened.close()
