"""Miniatures of a cache under the policy in force, against the whole cache."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvservice.caches import Cache
from kvservice.curves.bounds import CurveLimits
from kvservice.curves.events import Event, Missing, Stored
from kvservice.curves.records import Records, hash_of
from kvservice.curves.sample import Sample
from kvservice.curves.simulation import GROUPS_MIN, Miniature, PolicySimulation
from kvservice.orders import worth_of
from kvservice.storage.eviction import AgeOrder, EvictionOrder, LruOrder, ValueOrder
from tests.curves.builders import (
    MIB,
    TOKENS,
    events_of,
    exact_distances,
    is_reference,
    make_cache,
    make_sizes,
    make_space,
    play,
    zipf,
)

RATE = 10e9
ORDERS = [ValueOrder, AgeOrder, LruOrder]
Orders = Callable[[], EvictionOrder[Any]]


def simulate(
    events: list[Event], capacities: list[int], records_max: int, order: Orders
) -> tuple[Sample, PolicySimulation]:
    simulation = PolicySimulation([(size, RATE) for size in capacities], order, capacities[-1])
    sample = Sample(records_max, simulation)
    for event in events:
        if is_reference(event):
            sample.expect(1)
        sample.take(event)
    return sample, simulation


def whole_cache(trace: list[int], sizes: list[int], capacity: int, order: EvictionOrder[int]) -> float:
    """The hit ratio of one cache of full size, written down again: the policy's order and nothing else is shared."""
    uses: dict[int, int] = {}
    used, hits, token_s = 0, 0, make_space().token_s
    for number in trace:
        if number in uses:
            hits += 1
            order.remove(number)
        else:
            uses[number] = -1
            used += sizes[number]
        while used > capacity:
            gone = order.pop()
            assert gone is not None
            used -= sizes[gone]
            del uses[gone]
        uses[number] += 1
        order.add(number, worth_of(TOKENS * token_s, sizes[number], RATE, uses[number], 0))
    return hits / len(trace)


@pytest.mark.parametrize("order", ORDERS)
def test_with_everything_watched_it_is_the_whole_cache(order: Orders) -> None:
    trace, sizes = zipf(400, 6000, 0.8), make_sizes(400)
    capacities = [30 * MIB, 100 * MIB, 300 * MIB]
    _, simulation = simulate(events_of(make_space(), trace, sizes), capacities, 1 << 20, order)
    assert [point.capacity_bytes for point in simulation.points()] == capacities
    for point in simulation.points():
        assert point.hits == pytest.approx(whole_cache(trace, sizes, point.capacity_bytes, order()), abs=0.003)


@pytest.mark.parametrize("order", [ValueOrder, AgeOrder])
def test_a_small_sample_corrects_a_larger_ones_curve_to_the_whole_cache_within_three_points(order: Orders) -> None:
    trace, sizes = zipf(30_000, 90_000, 0.9, seed=2), make_sizes(30_000)
    events, limits = events_of(make_space(), trace, sizes), CurveLimits()
    sample, simulation = simulate(events, [1 << 31, 1 << 32, 1 << 33], limits.simulated_records_max, order)
    larger, distances = play(events, limits.node_records_max)
    curve = distances.curve(larger)
    assert sample.rate < 0.1
    for point in simulation.points(sample.rate, sample.clustering()):
        assert point.is_reliable
        exact = whole_cache(trace, sizes, point.capacity_bytes, order())
        found = curve.hit_ratio(point.capacity_bytes)
        assert found + point.more_hits == pytest.approx(exact, abs=0.03)
        assert abs(found + point.more_hits - exact) < curve.error(found) + point.error < 0.1


def test_the_age_order_finds_what_reuse_distances_say() -> None:
    trace, sizes = zipf(400, 6000, 0.8), make_sizes(400)
    distances = exact_distances(trace, sizes)
    _, simulation = simulate(events_of(make_space(), trace, sizes), [60 * MIB, 200 * MIB], 1 << 20, LruOrder)
    for point in simulation.points():
        exact = np.mean([one is not None and one <= point.capacity_bytes for one in distances])
        assert point.hits == pytest.approx(exact, abs=0.01)


def test_a_cache_of_few_pieces_is_said_to_be_unreliable() -> None:
    trace, sizes = zipf(400, 4000, 0.8), [MIB] * 400
    capacities = [(GROUPS_MIN // 2) * MIB, 4 * GROUPS_MIN * MIB]
    _, simulation = simulate(events_of(make_space(), trace, sizes), capacities, 1 << 20, ValueOrder)
    assert [point.is_reliable for point in simulation.points()] == [False, True]


def test_groups_go_whole_and_a_mirror_without_its_master_is_not_found() -> None:
    space = make_space()
    master = make_cache(space, 1, 4 * MIB)
    mirror = make_cache(space, 1, MIB, context=1, master=master)
    _, simulation = simulate([Stored(mirror), mirror], [6 * MIB], 100, LruOrder)
    assert simulation.miniatures[0].hits == 1
    between = Stored(make_cache(space, 2, 3 * MIB))
    _, simulation = simulate([Stored(mirror), between, mirror], [6 * MIB], 100, LruOrder)
    assert simulation.miniatures[0].hits == 0


def test_a_group_that_comes_back_from_a_larger_tier_has_the_uses_that_it_had_there() -> None:
    space = make_space()
    used, others = make_cache(space, 1), [Stored(make_cache(space, number)) for number in range(2, 9)]
    events: list[Event] = [Stored(used), used, used, *others, used]
    for ssd_bytes, uses in ((0, 0), (20 * MIB, 3)):
        simulation = PolicySimulation([(2 * MIB, RATE), (20 * MIB, RATE)], LruOrder, 20 * MIB, ssd_bytes)
        sample = Sample(100, simulation)
        for event in events:
            sample.take(event)
        records, (small, large) = sample.records, simulation.miniatures
        record = records.newest(records.find_segment(hash_of(used.family.segment)))
        assert (small.uses_of(record), large.uses_of(record)) == (uses, 3)


def test_what_was_found_at_first_sight_is_found_by_all_that_is_as_large_as_what_there_is() -> None:
    simulation = PolicySimulation([(2 * MIB, RATE), (8 * MIB, RATE), (9 * MIB, RATE)], LruOrder, 8 * MIB)
    Sample(100, simulation).take(make_cache(make_space(), 1))
    assert [point.hits for point in simulation.points()] == [0, 1, 1]


STEPS = st.lists(st.tuples(st.sampled_from("ffmdha"), st.integers(0, 20), st.integers(0, 2)), max_size=120)


@settings(deadline=None)
@given(STEPS)
def test_a_miniature_counts_its_bytes_whatever_comes(steps: list[tuple[str, int, int]]) -> None:
    space = make_space()
    simulation = PolicySimulation([(3 * MIB, RATE), (9 * MIB, RATE)], ValueOrder)
    sample = Sample(12, simulation)
    for kind, number, context in steps:
        cache: Cache = make_cache(space, number, MIB // (context + 1), context=context)
        if kind == "m":
            cache = make_cache(space, number, 9000, context=context + 1, master=make_cache(space, number))
        if kind == "h":
            sample.halve()
        elif kind == "a":
            sample.age(0.5)
        elif kind == "d":
            sample.take(Missing(space, cache.family.segment, (cache.context,), TOKENS, False))
        else:
            sample.take(cache)
        for one in simulation.miniatures:
            check(one, sample.records)


def check(one: Miniature, records: Records) -> None:
    held = [record for record, is_held in enumerate(one.is_held) if is_held]
    heads = [record for record, size in enumerate(one.bytes) if size]
    assert set(held) <= set(records)
    assert set(one._order) == set(heads)
    assert one.groups == len(heads)
    assert {records.head(record) for record in held} == set(heads)
    for head in heads:
        members = [record for record in held if records.head(record) == head]
        assert one.bytes[head] == sum(records.bytes[record] for record in members)
        assert one.tokens[head] == sum(records.tokens[record] for record in members)
    assert one.used_bytes == sum(one.bytes) <= one.capacity_bytes
