"""How often and from which seed the crash tests kill the service; what they did is printed at the end of the run."""

from pathlib import Path
from random import SystemRandom

import pytest

from tests.crash.report import Report

ROOT = Path(__file__).resolve().parents[2]
KILLS = 40
SEED_BITS = 32
REPORTS = pytest.StashKey[list[Report]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kills", type=int, default=KILLS, help="how often the crash tests kill the service")
    parser.addoption("--seed", type=int, default=None, help="of the crash tests; a new one by default")


@pytest.fixture(scope="session")
def kills(pytestconfig: pytest.Config) -> int:
    return int(pytestconfig.getoption("--kills", KILLS))


@pytest.fixture(scope="session")
def seed(pytestconfig: pytest.Config) -> int:
    given = pytestconfig.getoption("--seed", None)
    return SystemRandom().getrandbits(SEED_BITS) if given is None else int(given)


@pytest.fixture
def folder() -> Path:
    """On the disk of the repository, not in memory."""
    return ROOT / "build" / "crash"


@pytest.fixture
def reports(pytestconfig: pytest.Config) -> list[Report]:
    """What is printed at the end, as one."""
    return pytestconfig.stash.setdefault(REPORTS, [])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    reports = config.stash.get(REPORTS, [])
    for line in Report.of(reports).lines() if reports else []:
        terminalreporter.write_line(line)
