"""How much is simulated: a few seconds by default; the nightly form is ``pytest tests/simulation --faults 100000``."""

import pytest

FAULTS, FLIPS = 1500, 25


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--faults", type=int, default=FAULTS, help="faults of the disk that are injected, at least")
    parser.addoption("--flips", type=int, default=FLIPS, help="bits that are flipped in every structure")


@pytest.fixture
def faults(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("--faults", FAULTS))


@pytest.fixture
def flips(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("--flips", FLIPS))
