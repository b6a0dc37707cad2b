"""Rates: nobody gets more than its own, whatever it sends; limits of sessions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvservice.access.buckets import BURST_S, CALLERS_MAX, Bucket, Buckets
from kvservice.access.principal import CallLimits, Principal, Role
from kvservice.model.errors import LimitError, RateError
from tests.server.builders import FakeClock


def principal(name: str = "a", **limits: float) -> Principal:
    return Principal(name, Role.ENGINE, frozenset({"t"}), CallLimits(**limits))  # type: ignore[arg-type]


@given(
    rate=st.floats(0.5, 1000),
    steps=st.lists(st.tuples(st.floats(0, 3), st.floats(0, 500)), max_size=60),
)
def test_no_more_gets_through_than_burst_rate_and_one_debt(rate: float, steps: list[tuple[float, float]]) -> None:
    clock = FakeClock()
    bucket, got, largest, began_s = Bucket(rate, clock), 0.0, 0.0, clock.now_s
    for pause_s, amount in steps:
        clock.now_s += pause_s
        if bucket.wait_s() == 0:
            bucket.take(amount)
            got, largest = got + amount, max(largest, amount)
    allowed = max(rate * BURST_S, 1.0) + rate * (clock.now_s - began_s) + largest
    assert got <= allowed * (1 + 1e-9)


def test_who_is_told_to_wait_gets_through_after_that_long() -> None:
    clock = FakeClock()
    bucket = Bucket(10, clock)
    bucket.take(100)
    wait_s = bucket.wait_s()
    assert wait_s == pytest.approx(8.0, rel=1e-3)
    clock.now_s += wait_s
    assert bucket.wait_s() == 0


def test_calls_beyond_the_rate_are_refused_and_others_are_not_touched() -> None:
    clock = FakeClock()
    buckets, limited, free = Buckets(clock), principal(calls_per_s=5), principal("b")
    for _ in range(10):
        buckets.admit(limited)
    with pytest.raises(RateError, match="a may make 5 calls"):
        buckets.admit(limited)
    for _ in range(1000):
        buckets.admit(free)
    clock.now_s += 0.25
    buckets.admit(limited)
    assert buckets.refused == 1


def test_bytes_are_owed_and_the_next_call_waits() -> None:
    clock = FakeClock()
    buckets, limited = Buckets(clock), principal(bytes_per_s=1000)
    buckets.admit(limited)
    buckets.charge(limited, 5000)
    with pytest.raises(RateError):
        buckets.admit(limited)
    clock.now_s += 3.1
    buckets.admit(limited)


def test_a_changed_rate_holds_from_the_next_call_on() -> None:
    clock = FakeClock()
    buckets = Buckets(clock)
    buckets.charge(principal(bytes_per_s=10), 10_000)
    with pytest.raises(RateError):
        buckets.admit(principal(bytes_per_s=10))
    buckets.admit(principal(bytes_per_s=0))


def test_sessions_are_counted_for_all_connections_together() -> None:
    buckets, limited = Buckets(FakeClock()), principal(sessions_max=2)
    buckets.open_session(limited)
    buckets.open_session(limited)
    with pytest.raises(LimitError, match="2 sessions open"):
        buckets.open_session(limited)
    buckets.close_session(limited)
    buckets.open_session(limited)
    assert buckets.sessions(limited) == 2


def test_names_that_are_gone_do_not_pile_up_and_sessions_are_not_forgotten() -> None:
    buckets, kept = Buckets(FakeClock()), principal("kept", sessions_max=1)
    buckets.open_session(kept)
    for number in range(CALLERS_MAX + 5):
        buckets.admit(principal(f"p{number}"))
    assert len(buckets._callers) <= CALLERS_MAX + 1
    assert buckets.sessions(kept) == 1
