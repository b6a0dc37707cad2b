"""Many lives on honest disks: everything that was promised is kept. ``--lives`` says how many."""

import asyncio
import logging
from collections.abc import Iterator

import pytest

from tests.simulation.lives import honest_life

STEPS = 250


@pytest.fixture(autouse=True)
def _no_log() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.slow
def test_stops_kills_and_power_failures_cost_nothing_that_was_promised(lives: int) -> None:
    compared = 0
    for seed in range(lives):
        try:
            compared += asyncio.run(honest_life(seed, STEPS))
        except Exception as error:
            error.add_note(f"seed {seed}: asyncio.run(honest_life({seed}, {STEPS})) repeats it")
            raise
    print(f"\n{compared} records read in {lives} lives of {STEPS} steps")  # noqa: T201  the nightly run's figures
    assert compared > 5 * lives
