"""The breaker: its states, on a clock that tests move."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvservice.storage.remote.breaker import Breaker, BreakerState


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_one_deadline_opens_it(clock: Clock) -> None:
    breaker = Breaker(clock)
    assert breaker.allows()
    breaker.timed_out()
    assert breaker.state is BreakerState.OPEN
    assert not breaker.allows()
    assert breaker.opened == 1


def test_quick_failures_open_it_when_they_come_in_a_row(clock: Clock) -> None:
    breaker = Breaker(clock, failures_max=3)
    for _ in range(4):
        breaker.failed()
        breaker.failed()
        breaker.succeeded()
    assert breaker.allows()
    for _ in range(3):
        breaker.failed()
    assert not breaker.allows()


def test_after_the_pause_one_probe_goes_and_its_answer_decides(clock: Clock) -> None:
    breaker = Breaker(clock, pause_s=2.0)
    breaker.timed_out()
    clock.now_s += 1.9
    assert not breaker.allows()
    clock.now_s += 0.1
    assert [breaker.allows() for _ in range(3)] == [True, False, False]
    assert breaker.state is BreakerState.HALF_OPEN
    breaker.succeeded()
    assert [breaker.allows() for _ in range(3)] == [True, True, True]


def test_the_pause_doubles_up_to_its_limit_and_is_short_again_after_an_answer(clock: Clock) -> None:
    breaker = Breaker(clock, pause_s=1.0, pause_s_max=4.0)
    breaker.timed_out()
    for pause_s in (1.0, 2.0, 4.0, 4.0):
        clock.now_s += pause_s - 0.01
        assert not breaker.allows()
        clock.now_s += 0.02
        assert breaker.allows()
        breaker.failed()
    clock.now_s += 4.1
    assert breaker.allows()
    breaker.succeeded()
    breaker.timed_out()
    clock.now_s += 1.0
    assert breaker.allows()


def test_a_probe_of_which_nothing_is_heard_is_lost(clock: Clock) -> None:
    breaker = Breaker(clock, pause_s=1.0)
    breaker.timed_out()
    clock.now_s += 1.0
    assert breaker.allows()
    assert not breaker.allows()
    clock.now_s += 1.0
    assert breaker.allows()


def test_late_reports_change_nothing_while_it_is_open(clock: Clock) -> None:
    breaker = Breaker(clock, pause_s=1.0)
    breaker.timed_out()
    breaker.succeeded()
    breaker.timed_out()
    breaker.failed()
    assert breaker.opened == 1
    assert not breaker.allows()
    clock.now_s += 1.0
    assert breaker.allows()


@given(st.lists(st.sampled_from(["allows", "succeeded", "failed", "timed_out", "wait"]), max_size=60))
def test_it_is_never_open_for_good_and_never_lets_two_probes_through_in_one_pause(steps: list[str]) -> None:
    clock = Clock()
    breaker = Breaker(clock, failures_max=2, pause_s=1.0, pause_s_max=8.0)
    probe_s = -100.0
    for step in steps:
        if step == "wait":
            clock.now_s += 0.4
        elif step == "allows":
            was = breaker.state
            if breaker.allows() and was is not BreakerState.CLOSED:
                assert clock.now_s - probe_s >= 1.0
                probe_s = clock.now_s
        else:
            getattr(breaker, step)()
            if step == "succeeded":
                probe_s = -100.0
    clock.now_s += 8.0
    assert breaker.allows()
