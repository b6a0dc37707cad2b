"""The breaker: when it refuses, when it lets one call through, and how it comes back."""

from kvservice.client.connectors.breaker import Breaker, BreakerState


class FakeClock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def make_breaker(clock: FakeClock) -> Breaker:
    return Breaker(clock, failures_max=3, slow_s=1.0, pause_s=2.0, pause_s_max=5.0)


def state_of(breaker: Breaker) -> BreakerState:
    return breaker.state


def open_breaker(clock: FakeClock) -> Breaker:
    breaker = make_breaker(clock)
    for _ in range(3):
        breaker.failed()
    assert breaker.state is BreakerState.OPEN
    return breaker


def test_it_opens_after_so_many_failures_in_a_row() -> None:
    breaker = make_breaker(FakeClock())
    for _ in range(10):
        breaker.failed()
        breaker.failed()
        breaker.succeeded(0.1)
    assert breaker.state is BreakerState.CLOSED
    breaker.failed()
    breaker.failed()
    assert breaker.allows()
    breaker.failed()
    assert not breaker.allows()
    assert breaker.opened == 1


def test_slow_answers_are_failures() -> None:
    breaker = make_breaker(FakeClock())
    for _ in range(3):
        breaker.succeeded(1.5)
    assert breaker.state is BreakerState.OPEN


def test_after_the_pause_one_probe_is_let_through() -> None:
    clock = FakeClock()
    breaker = open_breaker(clock)
    clock.now_s += 1.9
    assert not breaker.allows()
    clock.now_s += 0.2
    assert breaker.allows()
    assert state_of(breaker) is BreakerState.HALF_OPEN
    assert not breaker.allows()
    breaker.succeeded(0.1)
    assert state_of(breaker) is BreakerState.CLOSED
    assert breaker.allows()


def test_every_failed_probe_doubles_the_pause_up_to_its_limit() -> None:
    clock = FakeClock()
    breaker = open_breaker(clock)
    for pause_s in (2.0, 4.0, 5.0, 5.0):
        clock.now_s += pause_s - 0.1
        assert not breaker.allows()
        clock.now_s += 0.1
        assert breaker.allows()
        breaker.failed()
    assert breaker.opened == 5


def test_a_success_makes_the_pause_short_again() -> None:
    clock = FakeClock()
    breaker = open_breaker(clock)
    clock.now_s += 2
    assert breaker.allows()
    breaker.failed()
    clock.now_s += 4
    assert breaker.allows()
    breaker.succeeded(0.1)
    for _ in range(3):
        breaker.failed()
    clock.now_s += 2
    assert breaker.allows()


def test_a_probe_nobody_reports_is_followed_by_another() -> None:
    clock = FakeClock()
    breaker = open_breaker(clock)
    clock.now_s += 2
    assert breaker.allows()
    clock.now_s += 1
    assert not breaker.allows()
    clock.now_s += 1
    assert breaker.allows()


def test_reports_of_calls_from_before_it_opened_change_nothing() -> None:
    clock = FakeClock()
    breaker = open_breaker(clock)
    breaker.succeeded(0.1)
    breaker.failed()
    assert breaker.state is BreakerState.OPEN
    clock.now_s += 2
    assert breaker.allows()
