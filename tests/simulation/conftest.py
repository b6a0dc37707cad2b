"""How much is simulated: seconds by default. The nightly form is ``make simulation``, see the Makefile."""

from functools import lru_cache

import pytest

from kvservice.model.identity import Identity

FAULTS, FLIPS, LIVES = 2000, 15, 12


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--faults", type=int, default=FAULTS, help="faults of the disk that are injected, at least")
    parser.addoption("--lives", type=int, default=LIVES, help="lives of a node on a disk that keeps its word")
    parser.addoption("--flips", type=int, default=FLIPS, help="bits that are flipped in every structure")


@pytest.fixture
def faults(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("--faults", FAULTS))


@pytest.fixture
def lives(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("--lives", LIVES))


@pytest.fixture
def flips(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("--flips", FLIPS))


@pytest.fixture(autouse=True)
def _identities_are_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A third of all time here would go into the JSON of two identities: every boot and every client makes it anew."""
    monkeypatch.setattr(Identity, "canonical_json", lru_cache(64)(Identity.canonical_json))
