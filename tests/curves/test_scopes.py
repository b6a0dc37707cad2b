"""Curves of the node, of tenants and namespaces: bounded in number and memory, cheap on the request path."""

import gc
import tracemalloc
from itertools import count
from typing import Any

import pytest

from kvservice.caches import Space
from kvservice.curves import scopes
from kvservice.curves.bounds import WATCHES_MAX, CurveLimits, curve_limits
from kvservice.curves.events import Stored
from kvservice.curves.scopes import FORGOTTEN_A_LOOK, NODE, OTHER, READ_SLICE_S, Curves, namespace_scope, tenant_scope
from kvservice.orders import LOAD_RATES
from kvservice.storage.eviction import ValueOrder
from tests.curves.builders import MIB, events_of, is_reference, make_cache, make_missing, make_sizes, make_space, zipf


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def make_curves(clock: Clock | None = None, **limits: Any) -> Curves:
    return Curves(CurveLimits(**limits), clock or Clock(), 256 * MIB, ValueOrder, LOAD_RATES)


def tell(curves: Curves, space: Space, events: list[Any], *, work: bool = True) -> None:
    """What a node does with each event, on the request path and behind it."""
    for event in events:
        if isinstance(event, Stored):
            curves.note_stored(event.cache)
        else:
            below = curves.note_asked(space, 1).below
            segment = event.segment if hasattr(event, "segment") else event.family.segment
            if segment < below:
                curves.events.append(event)
        if work:
            curves.work()


def trace(space: Space, references: int = 3000, segments: int = 300) -> list[Any]:
    return events_of(space, zipf(segments, references, 0.8), make_sizes(segments))


def test_an_only_tenants_curve_is_the_nodes() -> None:
    curves, space = make_curves(), make_space("one")
    tell(curves, space, trace(space))
    assert [scope.name for scope in curves] == [NODE]
    assert set(curves.names) == {NODE, tenant_scope("one"), namespace_scope(space.namespace)}
    of_tenant, of_node = curves.read(tenant_scope("one")), curves.read()
    assert of_tenant is not None
    assert of_node is not None
    assert of_tenant.curve == of_node.curve
    assert of_node.references == 3000
    assert of_node.curve.references == pytest.approx(3000)


def test_two_tenants_have_curves_of_their_own_and_the_node_has_both() -> None:
    curves, spaces = make_curves(), [make_space("one"), make_space("two")]
    for space in spaces:
        curves.watch(space)
    for space in spaces:
        tell(curves, space, trace(space))
    found = {name: curves.read(name) for name in (NODE, tenant_scope("one"), tenant_scope("two"))}
    references = {name: 0 if one is None else one.references for name, one in found.items()}
    assert references == {NODE: 6000, tenant_scope("one"): 3000, tenant_scope("two"): 3000}
    alone, both = found[tenant_scope("one")], found[NODE]
    assert alone is not None
    assert both is not None
    assert both.stored_bytes == pytest.approx(2 * alone.stored_bytes, rel=0.1)
    assert curves.read(tenant_scope("three")) is None


def test_more_namespaces_than_have_a_curve_are_counted_together() -> None:
    curves = make_curves(scopes_max=4)
    spaces = [make_space(f"tenant {number}") for number in range(10)]
    for space in spaces:
        tell(curves, space, trace(space, 50, 20))
    names = {scope.name for scope in curves}
    assert len(names) == 4 + 2
    assert {NODE, OTHER} <= names
    found = curves.read()
    assert found is not None
    assert found.references == 500


def test_namespaces_without_end_take_no_memory_without_end() -> None:
    curves = make_curves()
    for number in range(WATCHES_MAX + 50):
        space = make_space(f"tenant {number}")
        curves.note_asked(space, 1)
    assert len(curves._watches) <= WATCHES_MAX
    curves.work()
    found = curves.read()
    assert found is not None
    assert found.references == WATCHES_MAX + 50


def test_a_scope_that_nobody_asks_in_gives_its_place_to_another() -> None:
    clock = Clock()
    curves = make_curves(clock, scopes_max=2, half_life_s=100.0)
    for name in ("one", "two"):
        tell(curves, make_space(name), [make_missing(make_space(name), 1, 0)])
    before = {scope.name for scope in curves}
    clock.now_s += 101
    tell(curves, make_space("three"), [make_missing(make_space("three"), 1, 0)])
    clock.now_s += 101
    tell(curves, make_space("three"), [make_missing(make_space("three"), 1, 0)])
    after = {scope.name for scope in curves}
    assert tenant_scope("three") in after
    assert tenant_scope("three") not in before


def test_what_is_old_counts_half_after_a_half_life() -> None:
    clock, space = Clock(), make_space()
    curves = make_curves(clock, half_life_s=100.0)
    tell(curves, space, trace(space))
    clock.now_s += 101
    tell(curves, space, trace(space))
    found = curves.read()
    assert found is not None
    assert found.references == 6000
    assert found.curve.references == pytest.approx(4500, rel=0.01)


@pytest.fixture
def a_piece(monkeypatch: pytest.MonkeyPatch) -> float:
    """A slice so short that one piece of work is done in it: the clock of the work goes on at every look at it."""
    ticks = count()
    monkeypatch.setattr(scopes, "perf_counter", lambda: float(next(ticks)))
    return 1.5


def test_the_turn_of_a_half_life_is_taken_in_pieces_between_which_lookups_go_on(a_piece: float) -> None:
    clock, space = Clock(), make_space()
    curves = make_curves(clock, half_life_s=100.0)
    tell(curves, space, [Stored(make_cache(space, number)) for number in range(2000)])
    tell(curves, space, [make_cache(space, 0)])
    for _ in range(2):
        clock.now_s += 101
        tell(curves, space, [make_cache(space, 0)], work=False)
        held, turns = curves.records, 0
        while curves.work(a_piece):
            assert held - curves.records <= 2 * FORGOTTEN_A_LOOK, "one piece, however many were not used"
            held, turns = curves.records, turns + 1
            if turns == 1:  # in the midst of it
                assert curves.read(wait_s=0.0) is not None
        assert turns > 2000 // FORGOTTEN_A_LOOK
    assert curves.records == 2, "what was used stays, in the node's curve and in the simulation"


def test_a_window_begins_with_the_first_lookup_and_not_with_what_was_stored_before() -> None:
    clock, space = Clock(), make_space()
    curves = make_curves(clock)
    tell(curves, space, [Stored(make_cache(space, 1))])
    clock.now_s += 5000
    curves.work()
    clock.now_s += 1
    tell(curves, space, [make_cache(space, 1)])
    clock.now_s += 99
    found = curves.read()
    assert found is not None
    assert found.window_s == pytest.approx(100)
    assert found.recent_s == pytest.approx(100)


def test_seconds_of_late_count_half_after_a_half_life_as_their_lookups_do() -> None:
    clock, space = Clock(), make_space()
    curves = make_curves(clock, half_life_s=100.0)
    for _ in range(5):
        for _ in range(100):
            clock.now_s += 1
            tell(curves, space, [make_cache(space, 1)] * 3)
    found = curves.read()
    assert found is not None
    assert found.curve.references / found.recent_s == pytest.approx(3.0, rel=0.03)
    assert found.recent_s < 201


def test_more_events_than_fit_lower_the_rate_and_leave_the_ratio_right() -> None:
    curves, space = make_curves(events_max=1024), make_space()
    sizes = make_sizes(2000)
    tell(curves, space, [Stored(make_cache(space, number, sizes[number])) for number in range(2000)])
    for _ in range(20):
        tell(curves, space, [make_cache(space, number, sizes[number]) for number in range(2000)], work=False)
        assert len(curves.events) <= 1024
        curves.work()
    found = curves.read()
    assert found is not None
    assert curves.overflows > 0
    assert found.rate < 1
    assert found.references == 40_000
    assert found.curve.hit_ratio_max == pytest.approx(1.0, abs=0.01)


def test_a_curve_that_is_read_while_events_wait_does_not_take_them_for_hits(a_piece: float) -> None:
    curves, space = make_curves(), make_space()
    curves.watch(space)
    tell(curves, space, trace(space, 3000, 3000), work=False)
    ratios = []
    while curves.work(a_piece):
        found = curves.read(wait_s=0.0)
        assert found is not None
        ratios.append(found.curve.hit_ratio(1 << 40))
    assert len(ratios) > 100
    whole = curves.read()
    assert whole is not None
    assert ratios[len(ratios) // 2] < whole.curve.hit_ratio_max + 0.02
    assert max(ratios[20:]) < whole.curve.hit_ratio_max + 0.05


def test_a_slice_ends_and_the_rest_waits() -> None:
    curves, space = make_curves(), make_space()
    tell(curves, space, trace(space), work=False)
    assert curves.work(slice_s=0.0) is (len(curves.events) > 0) is True
    while curves.work(READ_SLICE_S):
        pass
    assert not curves.events


def test_without_watched_records_nothing_is_noted() -> None:
    curves, space = make_curves(node_records_max=0), make_space()
    tell(curves, space, trace(space))
    assert not curves.events
    assert curves.read() is None
    assert curves.memory_bytes_max == 0


def test_all_memory_stays_under_the_stated_bound() -> None:
    limits = curve_limits(1024)
    gc.collect()
    tracemalloc.start()
    curves = Curves(limits, Clock(), 256 * MIB, ValueOrder, LOAD_RATES)
    curves.simulate_ssd(1024 * MIB)
    for number in range(4):
        space = make_space(f"tenant {number}")
        for event in trace(space, 4000, 3000):
            tell(curves, space, [event], work=False)
            if len(curves.events) > 500:
                curves.work()
    gc.collect()
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert any(is_reference(event) for event in curves.events)
    assert curves.records > 2500
    assert taken < curves.memory_bytes_max
