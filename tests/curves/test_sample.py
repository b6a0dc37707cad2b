"""A sample of fixed size: bounded whatever comes, and every watched segment with its whole family."""

import gc
import tracemalloc

from hypothesis import given, settings
from hypothesis import strategies as st

from kvservice.curves.distances import Distances
from kvservice.curves.events import Deleted, Event, Stored
from kvservice.curves.sample import EVERYTHING, SEGMENT_RECORDS_MAX, Sample
from kvservice.curves.scopes import RECORD_MEMORY_BYTES
from tests.curves.builders import MIB, events_of, make_cache, make_missing, make_sizes, make_space, play, zipf

KIND = st.sampled_from(["store", "store", "find", "miss", "delete", "fold", "age", "halve"])
STEPS = st.lists(st.tuples(KIND, st.integers(0, 30), st.integers(0, 3)), max_size=200)


def check(sample: Sample, distances: Distances) -> None:
    """What must hold between any two events."""
    records = list(sample.watched())
    assert sample.records == len(records)
    assert sample._tokens == sum(record.tokens for record in records)
    assert all(segment.records and id_ == segment.id for id_, segment in sample.segments.items())
    assert all(id_ < sample.below for id_ in sample.segments)
    assert all(record.place >= 0 for record in records)
    assert distances.bytes * sample.rate - sum(record.record_bytes for record in records) < 1e-3
    assert {id_ for _, id_ in sample._largest} >= set(sample.segments)


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
        assert sample.records <= records_max


def test_the_rate_is_the_share_of_segments_that_are_watched() -> None:
    segments, sizes = 20_000, make_sizes(20_000)
    sample, _ = play(events_of(make_space(), range(segments), sizes), 2000)
    assert sample.records == 2000
    assert abs(sample.rate - 0.1) < 0.01


def test_an_endless_family_does_not_push_out_the_others() -> None:
    space = make_space()
    master = make_cache(space, 0)
    events: list[Event] = [Stored(make_cache(space, number)) for number in range(1, 100)]
    events += [make_cache(space, 0, 4096, context=context, master=master) for context in range(1, 2000)]
    sample, distances = play(events, 1024)
    check(sample, distances)
    assert sample.below == EVERYTHING
    assert sample.records == 99 + SEGMENT_RECORDS_MAX


def test_what_was_not_used_for_a_whole_period_is_forgotten() -> None:
    space = make_space()
    used, unused = make_cache(space, 1), make_cache(space, 2)
    sample, distances = play([Stored(used), Stored(unused)], 100)
    for _ in range(2):
        sample.age(0.5)
        sample.take(used)
    assert [record.segment.id for record in sample.watched()] == [used.family.segment]
    check(sample, distances)


def test_memory_stays_under_the_stated_bound() -> None:
    space, records = make_space(), 4096
    sizes, trace = make_sizes(1), zipf(60_000, 15_000, 0.5)
    gc.collect()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    sample = Sample(records, Distances())
    for number in trace:
        sample.take(make_cache(space, number, sizes[0]))
    gc.collect()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sample.records > records * 0.9
    assert (after - before) / records < RECORD_MEMORY_BYTES
