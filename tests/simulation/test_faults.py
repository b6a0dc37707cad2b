"""Many lives on disks that fail. The short form takes seconds; see conftest.py for the long one."""

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.simulation.faults import faulty_life
from tests.storage.faulty_disk import FAULT_NAMES

LIVES_MAX = 100_000
STEPS = 400


@pytest.fixture(autouse=True)
def _no_log() -> Iterator[None]:
    """A million warnings of what goes wrong on purpose."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.slow
def test_a_disk_that_fails_never_yields_wrong_bytes_and_fails_nobody_else(faults: int) -> None:
    total = Counter[str]()
    for seed in range(LIVES_MAX):
        try:
            total += asyncio.run(faulty_life(seed, STEPS))
        except Exception as error:
            error.add_note(f"seed {seed}: asyncio.run(faulty_life({seed}, {STEPS})) repeats it")
            raise
        if _struck(total) >= faults:
            break
    print(f"\n{_struck(total)} faults in {seed + 1} lives: {dict(total)}")  # noqa: T201  the nightly run's figures
    assert _struck(total) >= faults
    missing = {name for name in FAULT_NAMES if not total[name]}
    assert not missing, "every kind of fault was met"


def _struck(total: Counter[str]) -> int:
    return sum(total[name] for name in (*FAULT_NAMES, "index_refused"))
