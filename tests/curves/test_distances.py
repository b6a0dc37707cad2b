"""Reuse distances in unique stored bytes: exact where everything is watched, close where a sample is."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvservice.caches import Cache
from kvservice.curves.events import Deleted, Event, Stored
from kvservice.curves.histogram import EDGES, MissRatioCurve
from tests.curves.builders import (
    MIB,
    TOKENS,
    NaiveStack,
    events_of,
    exact_distances,
    exact_hits,
    make_cache,
    make_missing,
    make_sizes,
    make_space,
    play,
    zipf,
)

PLENTY = 1 << 20
STEPS = st.lists(st.tuples(st.integers(0, 7), st.integers(0, 3)), min_size=1, max_size=150)


def curve_of(events: list[Event], records_max: int = PLENTY) -> MissRatioCurve:
    sample, distances = play(events, records_max)
    return distances.curve(sample)


@settings(deadline=None)
@given(STEPS, st.integers(0, 100))
def test_with_everything_watched_the_curve_is_that_of_a_plain_list(steps: list[tuple[int, int]], seed: int) -> None:
    """Families of a master and mirrors: a master counts once whoever uses it, a mirror needs its master too."""
    space, rng = make_space(), np.random.default_rng(seed)
    caches: dict[tuple[int, int], Cache] = {}
    naive, found, events = NaiveStack(), list[float | None](), list[Event]()
    for number, context in steps:
        master = caches.get((number, 0))
        if master is None:
            master = caches[number, 0] = make_cache(space, number, int(rng.integers(1, 4 * MIB)))
            events.append(Stored(master))
            naive.use(master, master.record_bytes)
        cache = caches.get((number, context))
        if cache is None:
            size = int(rng.integers(1, MIB))
            cache = caches[number, context] = make_cache(space, number, size, context=context, master=master)
            events += [make_missing(space, number, context), Stored(cache)]
            found.append(None)
            naive.use(cache, size)
            continue
        events.append(cache if rng.integers(2) else make_missing(space, number, context))
        found.append(max(naive.distance(one) or 0 for one in (cache, cache.master or cache)))
        naive.use(master, master.record_bytes)
        naive.use(cache, cache.record_bytes)
    assert np.allclose(curve_of(events).hits, exact_hits(found))


def errors(curve: MissRatioCurve, trace: list[int], sizes: list[int]) -> np.ndarray:
    """Of the hit ratio at 100 sizes up to all that is used, against the exact one."""
    exact = exact_hits(exact_distances(trace, sizes))
    grid = np.linspace(0.01, 1, 100) * sum(sizes[one] for one in set(trace))
    found = np.array([curve.hit_ratio(size) for size in grid])
    return np.asarray(np.abs(found - np.interp(grid, EDGES, exact)))


@pytest.mark.parametrize(("exponent", "records_max"), [(0.7, 8192), (1.0, 8192), (1.2, 8192), (1.0, 1024)])
def test_a_sample_of_fixed_size_is_close_on_zipf_traces(exponent: float, records_max: int) -> None:
    trace, sizes = zipf(40_000, 150_000, exponent, seed=1), make_sizes(40_000)
    sample, distances = play(events_of(make_space(), trace, sizes), records_max)
    curve = distances.curve(sample)
    assert sample.rate < 0.75
    found = errors(curve, trace, sizes)
    assert found.mean() < 0.01
    assert curve.references == pytest.approx(150_000)
    stated = [curve.error(curve.hit_ratio(size)) for size in (1 << 32, 1 << 33)]
    assert 0 < max(stated) < 0.05


def test_the_correction_for_hot_segments_brings_the_curve_nearer() -> None:
    """One segment is asked for half the time: whether it is watched or not decides what an uncorrected curve says."""
    rng, sizes = np.random.default_rng(3), make_sizes(20_000)
    trace = [0 if rng.random() < 0.5 else int(rng.integers(1, 20_000)) for _ in range(60_000)]
    sample, distances = play(events_of(make_space(), trace, sizes), 1024)
    corrected = errors(distances.curve(sample), trace, sizes).mean()
    sample.expect(-len(trace))  # as if nobody had counted
    uncorrected = errors(distances.curve(sample), trace, sizes).mean()
    assert corrected < 0.02 < 0.08 < uncorrected


@pytest.mark.parametrize("records_max", [1024, 2048])
def test_the_stated_error_holds_the_truth_most_times(records_max: int) -> None:
    held, told = 0, 0
    for seed in range(12):
        trace, sizes = zipf(6000, 20_000, 0.9, seed=seed), make_sizes(6000)
        space = make_space(f"tenant {seed}")  # another sample each time
        sample, distances = play(events_of(space, trace, sizes), records_max)
        curve, exact = distances.curve(sample), exact_hits(exact_distances(trace, sizes))
        for index in [at for at, edge in enumerate(EDGES) if sum(sizes) / 32 < edge < sum(sizes)][::8]:
            told += 1
            held += abs(curve.hits[index] - exact[index]) <= curve.error(curve.hits[index])
    assert told > 40
    assert held / told > 0.85


def test_what_was_never_stored_is_found_by_no_memory() -> None:
    space = make_space()
    assert curve_of([make_missing(space, 1, 0)] * 10).hit_ratio_max == 0.0


def test_what_was_evicted_would_be_found_by_a_larger_memory() -> None:
    space, kept = make_space(), make_cache(make_space(), 1, MIB)
    other = make_cache(space, 2, 3 * MIB)
    curve = curve_of([Stored(kept), Stored(other), make_missing(space, 1, 0)])
    assert curve.hit_ratio(3.5 * MIB) == 0.0
    assert curve.hit_ratio(4.5 * MIB) == 1.0


def test_a_shifted_use_would_be_answered_by_any_cache_of_the_segment_that_was_stored() -> None:
    space = make_space()
    stored = Stored(make_cache(space, 1, context=3))
    assert curve_of([stored, make_missing(space, 1, 9, may_be_any=True)]).hit_ratio_max == 1.0
    assert curve_of([stored, make_missing(space, 1, 9)]).hit_ratio_max == 0.0


def test_what_was_found_at_first_sight_took_no_more_than_there_is() -> None:
    sample, distances = play([make_cache(make_space(), 1)], PLENTY, 64 * MIB)
    assert distances.curve(sample).hit_ratio(32 * MIB) == 0.0
    assert distances.curve(sample).hit_ratio(64 * MIB) == 1.0


def test_what_a_client_deleted_would_be_found_by_no_memory() -> None:
    space = make_space()
    cache = make_cache(space, 1)
    assert curve_of([Stored(cache), Deleted(cache), make_missing(space, 1, 0)]).hit_ratio_max == 0.0


def test_folding_a_cache_into_a_mirror_makes_it_count_its_diff_only() -> None:
    space = make_space()
    master, dense = make_cache(space, 1, 8 * MIB), make_cache(space, 1, 8 * MIB, context=1)
    folded = make_cache(space, 1, MIB, context=1, master=master)
    curve = curve_of([Stored(master), Stored(dense), Stored(folded), folded])
    assert curve.hit_ratio(10 * MIB) == 1.0
    assert curve.hit_ratio(8 * MIB) == 0.0


def test_seconds_of_prefill_weigh_the_second_curve() -> None:
    space = make_space()
    small, large = make_cache(space, 1, MIB, prefill_s=1.0), make_cache(space, 2, 10 * MIB, prefill_s=3.0)
    sample, distances = play([Stored(small), small, Stored(large), large, make_missing(space, 3, 0)], PLENTY)
    curve = distances.curve(sample)
    assert curve.hit_ratio_max == pytest.approx(2 / 3)
    assert curve.seconds_ratio(1 << 40) == pytest.approx(4 / (4 + TOKENS * space.token_s))
    assert curve.seconds_each == pytest.approx((4 + TOKENS * space.token_s) / 3)
