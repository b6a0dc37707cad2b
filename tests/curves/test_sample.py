"""A sample of fixed size: bounded whatever comes, and every watched segment with its whole family."""

import gc
import tracemalloc

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvservice.curves.bounds import (
    HOST_SIZES,
    RECORD_MEMORY_BYTES,
    SCOPE_MEMORY_BYTES,
    SSD_SIZES,
    CurveLimits,
    simulation_memory_bytes,
)
from kvservice.curves.distances import Distances
from kvservice.curves.events import Deleted, Event, Stored
from kvservice.curves.records import NONE
from kvservice.curves.sample import EVERYTHING, HASH_BYTES, SEGMENT_RECORDS_MAX, Sample
from kvservice.curves.simulation import PolicySimulation
from kvservice.storage.eviction import ValueOrder
from tests.curves.builders import MIB, events_of, make_cache, make_missing, make_sizes, make_space, play

KIND = st.sampled_from(["store", "store", "find", "miss", "delete", "fold", "age", "halve"])
STEPS = st.lists(st.tuples(KIND, st.integers(0, 30), st.integers(0, 3)), max_size=200)


def check(sample: Sample, distances: Distances) -> None:
    """What must hold between any two events."""
    records = sample.records
    watched = list(records)
    assert records.count == len(watched)
    assert sample._tokens == sum(records.tokens[one] for one in watched)
    segments = records.watched().tolist()
    assert records.segments == len(segments)
    assert sorted(one for segment in segments for one in records.of_segment(segment)) == watched
    assert all(records.home[one] == segment for segment in segments for one in records.of_segment(segment))
    assert all(len(list(records.of_segment(segment))) == records.held[segment] for segment in segments)
    assert all(records.find_segment(records.id[segment]) == segment for segment in segments)
    assert all(records.id[segment].to_bytes(HASH_BYTES) < sample.below for segment in segments)
    assert all(records.place[one] >= 0 for one in watched)
    assert all(records.seen[records._slot[segment]] for segment in segments)
    assert np.count_nonzero(np.frombuffer(records.seen, np.uint8)) <= len(segments)
    masters = [records.master[one] for one in watched if records.master[one] >= 0]
    assert all(records.master[one] == NONE for one in masters), "a master is no mirror, and watched"
    assert distances.bytes * sample.rate - sum(records.bytes[one] for one in watched) < 1e-3


@settings(deadline=None)
@given(STEPS, st.sampled_from([1, 5, 40]))
def test_whatever_comes_it_stays_whole_and_within_its_bound(
    steps: list[tuple[str, int, int]], records_max: int
) -> None:
    space, distances = make_space(), Distances()
    sample = Sample(records_max, distances)
    for kind, number, context in steps:
        cache = make_cache(space, number, MIB + context, context=context)
        if kind == "fold":
            cache = make_cache(space, number, 4096, context=context + 1, master=make_cache(space, number))
        if kind == "age":
            sample.age(0.5)
        elif kind == "halve":
            sample.halve()
        elif kind == "miss":
            sample.take(make_missing(space, number, context, may_be_any=context == 3))
        else:
            events: dict[str, Event] = {"find": cache, "delete": Deleted(cache)}
            sample.take(events.get(kind, Stored(cache)))
        check(sample, distances)
        assert sample.records.count <= records_max


def test_the_rate_is_the_share_of_segments_that_are_watched() -> None:
    segments, sizes = 20_000, make_sizes(20_000)
    sample, _ = play(events_of(make_space(), range(segments), sizes), 2000)
    assert 1980 <= sample.records.count <= 2000
    assert abs(sample.rate - 0.1) < 0.01


def test_an_endless_family_does_not_push_out_the_others() -> None:
    space = make_space()
    master = make_cache(space, 0)
    events: list[Event] = [Stored(make_cache(space, number)) for number in range(1, 100)]
    events += [make_cache(space, 0, 4096, context=context, master=master) for context in range(1, 2000)]
    sample, distances = play(events, 1024)
    check(sample, distances)
    assert sample.below == EVERYTHING
    assert sample.records.count == 99 + SEGMENT_RECORDS_MAX


def test_what_was_not_used_for_a_whole_period_is_forgotten() -> None:
    space = make_space()
    used, unused = make_cache(space, 1), make_cache(space, 2)
    sample, distances = play([Stored(used), Stored(unused)], 100)
    for _ in range(2):
        sample.age(0.5)
        while sample.forget(1):
            pass
        sample.take(used)
    assert sample.records.count == 1
    assert used.family.segment in sample.records
    assert unused.family.segment not in sample.records
    check(sample, distances)


def test_a_curve_takes_at_most_a_mib() -> None:
    """With as many watched records as a node's own curve has, and each of another segment: nothing takes more."""
    space, limits = make_space(), CurveLimits()
    gc.collect()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    sample = Sample(limits.node_records_max, Distances())
    assert not any(sample.records.seen)
    for number in range(limits.node_records_max + 200):
        sample.take(make_cache(space, number % (limits.node_records_max - 10)))
    gc.collect()
    tracemalloc.reset_peak()
    for number in range(limits.node_records_max):
        sample.take(make_cache(space, number))
    _, after = tracemalloc.get_traced_memory()  # numbering anew takes some for a while
    tracemalloc.stop()
    assert sample.records.count > limits.node_records_max * 0.99
    assert after - before <= limits.node_records_max * RECORD_MEMORY_BYTES + SCOPE_MEMORY_BYTES <= MIB


def test_the_simulation_of_all_sizes_takes_at_most_a_mib() -> None:
    """Each of them large enough for all that is watched."""
    space, most = make_space(), CurveLimits().simulated_records_max
    caches = [make_cache(space, number) for number in range(most)]
    gc.collect()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    sizes = len(HOST_SIZES) + len(SSD_SIZES)
    simulation = PolicySimulation([(most * MIB + size, 10e9) for size in range(sizes)], ValueOrder)
    sample = Sample(most, simulation)
    for cache in caches * 3:
        sample.take(cache)
    gc.collect()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert all(one.groups == sample.records.count == most for one in simulation.miniatures)
    assert after - before <= simulation_memory_bytes(most) <= MIB
