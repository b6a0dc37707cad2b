"""Load or compute: the least sum, found the slow way too; runs share a latency."""

from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvservice.peers.routes_estimate import Speed
from kvservice.peers.routes_loading import Part, WhyLoad, load_chain, load_each

MIB = 1 << 20
LINK = Speed(latency_s=1e-3, bytes_per_s=1e9)
SLOW = Speed(latency_s=1.0, bytes_per_s=1e6)
TOKEN_S = 1e-4


def part(tokens: int = 256, count: int = 4 * MIB, way: str = "a/stream", speed: Speed = LINK) -> Part:
    return Part(tokens, count, way, speed)


def load_s(parts: list[Part]) -> float:
    """The slow way: runs, each with one latency; what is here costs nothing."""
    far = [one for one in parts if one.bytes]
    runs = [list(run) for _, run in groupby(far, key=lambda one: one.way)]
    return sum(run[0].speed.latency_s + sum(one.bytes / one.speed.bytes_per_s for one in run) for run in runs)


parts_lists = st.lists(
    st.builds(
        lambda tokens, count, way: part(tokens, count, way, {"a": LINK, "b": SLOW, "c": Speed(1e-2, 1e8)}[way]),
        st.integers(1, 2000),
        st.sampled_from([0, 4096, MIB, 16 * MIB]),
        st.sampled_from("abc"),
    ),
    max_size=8,
)


@given(parts_lists, st.sampled_from([1e-6, 1e-4, 1e-2]))
def test_a_chain_is_loaded_as_far_as_the_sum_is_least(parts: list[Part], token_s: float) -> None:
    found = load_chain(parts, token_s)
    sums = [
        load_s(parts[:count]) + sum(one.tokens for one in parts[count:]) * token_s for count in range(len(parts) + 1)
    ]
    assert found.seconds == pytest.approx(min(sums))
    assert sums[found.loaded] == pytest.approx(min(sums))
    assert found.is_loaded == (True,) * found.loaded + (False,) * (len(parts) - found.loaded)
    assert found.all_loaded_s == pytest.approx(sums[-1])
    assert found.all_computed_s == pytest.approx(sums[0])


@given(parts_lists, st.sampled_from([1e-6, 1e-4, 1e-2]))
def test_every_run_of_approximations_is_loaded_that_loads_sooner(parts: list[Part], token_s: float) -> None:
    found, start = load_each(parts, token_s), 0
    for _, one in groupby(parts, key=lambda one: (one.way, one.bytes > 0)):
        run = list(one)
        is_sooner = load_s(run) <= sum(each.tokens for each in run) * token_s
        assert found.is_loaded[start : start + len(run)] == (is_sooner,) * len(run)
        start += len(run)
    assert len(found.is_loaded) == start
    assert found.seconds <= found.all_computed_s + 1e-9


def test_a_fast_link_loads_all_and_a_slow_one_nothing() -> None:
    fast = load_chain([part()] * 4, TOKEN_S)
    assert (fast.loaded, fast.why) == (4, WhyLoad.ALL_SOONER)
    slow = load_chain([part(way="b", speed=SLOW)] * 4, TOKEN_S)
    assert (slow.loaded, slow.why) == (0, WhyLoad.COMPUTE_SOONER)
    assert slow.seconds == pytest.approx(4 * 256 * TOKEN_S)
    assert str(fast) == "4 of 4 loaded (all_sooner): 17.78 ms; all loaded 17.78 ms, all computed 102.40 ms"


def test_a_chain_is_loaded_up_to_where_the_link_gets_slow() -> None:
    found = load_chain([part(), part(), part(way="b", speed=SLOW), part()], TOKEN_S)
    assert (found.is_loaded, found.why) == ((True, True, False, False), WhyLoad.PART_SOONER)
    each = load_each([part(), part(way="b", speed=SLOW), part()], TOKEN_S)
    assert each.is_loaded == (True, False, True)


def test_a_slow_start_is_worth_it_for_what_follows() -> None:
    first = part(tokens=1)
    assert load_chain([first], TOKEN_S).loaded == 0
    assert load_chain([first, *[part()] * 3], TOKEN_S).loaded == 4


def test_neighbours_that_come_the_same_way_pay_one_latency_also_around_what_is_here() -> None:
    near = part(count=0, way="here")
    assert load_chain([part(), part()], TOKEN_S).all_loaded_s == pytest.approx(1e-3 + 2 * 4 * MIB / 1e9)
    assert load_chain([part(), near, part()], TOKEN_S).all_loaded_s == pytest.approx(1e-3 + 2 * 4 * MIB / 1e9)
    assert load_chain([part(), part(way="b")], TOKEN_S).all_loaded_s == pytest.approx(2e-3 + 2 * 4 * MIB / 1e9)
    assert load_each([near, near], TOKEN_S).is_loaded == (True, True)


@pytest.mark.parametrize("load", [load_chain, load_each])
def test_while_nobody_said_how_fast_prefill_is_what_was_found_is_loaded(load: object) -> None:
    assert callable(load)
    found = load([part(way="b", speed=SLOW)], 0.0)
    assert (found.loaded, found.why) == (1, WhyLoad.UNKNOWN_PREFILL)
    nothing = load([], TOKEN_S)
    assert (nothing.loaded, nothing.seconds, nothing.why) == (0, 0.0, WhyLoad.NOTHING)
