"""The online curve against exact Mattson stacks, on what real agents asked a real node for."""

import numpy as np
import pytest

from kvservice.curves.bounds import CurveLimits
from kvservice.curves.histogram import EDGES
from tests.curves.builders import exact_hits, is_reference, play
from tests.curves.recorded import NAMES, events_of_trace, exact_distances_of_trace, read_trace


@pytest.mark.parametrize("name", NAMES)
def test_the_curve_of_a_recorded_trace_is_within_a_hundredth_of_the_exact_one(name: str) -> None:
    rows = read_trace(name)
    events, limits = events_of_trace(rows), CurveLimits()
    exact = exact_hits(exact_distances_of_trace(rows))
    sample, distances = play(events, limits.node_records_max)
    curve = distances.curve(sample)
    assert sample.rate < 0.75, "more caches than are watched, or this proves little"
    assert sum(map(is_reference, events)) == pytest.approx(curve.references)
    used = sum({(row[2], row[3]): row[5] for row in rows}.values())
    grid = np.linspace(0.01, 1, 100) * used
    errors = np.abs([curve.hit_ratio(size) for size in grid] - np.interp(grid, EDGES, exact))
    assert errors.mean() < 0.01, f"mean {errors.mean():.4f}, largest {errors.max():.4f}"


def test_there_are_recorded_traces() -> None:
    assert len(NAMES) >= 2
