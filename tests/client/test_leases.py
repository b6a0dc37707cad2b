"""Leases held by a client: when they are renewed, when they are lost, and that nothing leaks."""

import threading
import time
from collections.abc import Sequence

import pytest

from kvservice.client.leases import LeaseBook, LeaseKeeper
from kvservice.model.errors import StaleEpochError, UnavailableError
from kvservice.model.lease import LeaseId

ONE, OTHER = LeaseId(1), LeaseId(2)


class FakeNode:
    """Renews leases, or does not, and notes what it was asked."""

    def __init__(self, answers: bool = True, error: Exception | None = None) -> None:
        self.answers, self.error = answers, error
        self.calls: list[tuple[tuple[LeaseId, ...], float]] = []
        self.was_asked = threading.Event()

    def renew(self, leases: Sequence[LeaseId], deadline_s: float) -> Sequence[bool]:
        self.calls.append((tuple(leases), deadline_s))
        self.was_asked.set()
        if self.error is not None:
            raise self.error
        return [self.answers] * len(leases)


class FakeClock:
    """Time that stands still until it is told."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def make_keeper(node: FakeNode) -> tuple[LeaseKeeper, FakeClock]:
    clock = FakeClock()
    return LeaseKeeper(node.renew, clock, is_threaded=False), clock


def test_a_lease_is_due_after_a_third_of_its_time() -> None:
    book = LeaseBook()
    book.add(ONE, 30.0, asked_s=100.0)
    assert book.next_due_s() == 110.0
    assert book.due(109.0) == ((), 0.0)
    assert book.due(110.0) == ((ONE,), 20.0)


def test_a_lease_that_ran_out_is_never_renewed() -> None:
    book = LeaseBook()
    book.add(ONE, 30.0, asked_s=0.0)
    assert book.is_held(ONE, 29.9)
    assert not book.is_held(ONE, 30.0)
    assert book.due(30.0) == ((), 0.0)
    assert len(book) == 0


def test_a_lease_released_during_its_renewal_stays_released() -> None:
    book = LeaseBook()
    book.add(ONE, 30.0, asked_s=0.0)
    book.add(OTHER, 30.0, asked_s=0.0)
    book.drop(ONE)
    book.renewed([ONE, OTHER], [True, False], asked_s=10.0)
    assert len(book) == 0


def test_renewal_moves_the_deadline() -> None:
    keeper, clock = make_keeper(node := FakeNode())
    keeper.add(ONE, 30.0, asked_s=0.0)
    clock.now_s = 10.0
    keeper.renew_due()
    assert node.calls[0] == ((ONE,), 20.0)
    assert keeper.deadline_s(ONE) == 40.0
    keeper.close()


def test_a_node_that_does_not_answer_is_asked_again_until_the_lease_runs_out() -> None:
    keeper, clock = make_keeper(node := FakeNode(error=UnavailableError("gone")))
    keeper.add(ONE, 30.0, asked_s=0.0)
    for clock.now_s in (10.0, 11.0, 12.5, 29.0):
        keeper.renew_due()
    assert [deadline for _, deadline in node.calls] == [20.0, 17.5, 1.0]
    assert keeper.is_held(ONE)
    clock.now_s = 30.0
    keeper.renew_due()
    assert len(keeper) == 0
    keeper.close()


def test_leases_of_a_lost_session_are_forgotten() -> None:
    for node in (FakeNode(error=StaleEpochError("restarted")), FakeNode(answers=False)):
        keeper, clock = make_keeper(node)
        keeper.add(ONE, 30.0, asked_s=0.0)
        clock.now_s = 10.0
        keeper.renew_due()
        assert not keeper.is_held(ONE)
        keeper.close()


def test_the_thread_renews_and_ends_with_the_keeper() -> None:
    node = FakeNode()
    clock = FakeClock()
    clock.now_s = 10.0
    keeper = LeaseKeeper(node.renew, clock)
    before = threading.active_count()
    keeper.add(ONE, 30.0, asked_s=0.0)
    assert node.was_asked.wait(5)
    keeper.close()
    assert threading.active_count() == before
    assert len(keeper) == 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_lease_is_renewed_though_the_thread_before_died() -> None:
    node = FakeNode(error=RuntimeError("a foreign error"))
    clock = FakeClock()
    clock.now_s = 10.0
    keeper = LeaseKeeper(node.renew, clock)
    keeper.add(ONE, 30.0, asked_s=0.0)
    assert keeper._thread is not None
    keeper._thread.join(5)
    assert not keeper._thread.is_alive()
    node.error = None
    node.was_asked.clear()
    keeper.add(OTHER, 30.0, asked_s=0.0)
    assert node.was_asked.wait(5)
    assert node.calls[-1][0] == (ONE, OTHER)
    keeper.close()


def test_no_thread_runs_while_nothing_was_ever_held() -> None:
    before = threading.active_count()
    keeper = LeaseKeeper(FakeNode().renew, FakeClock())
    assert threading.active_count() == before
    keeper.close()


def test_a_lease_that_came_after_another_was_let_go_is_renewed_in_time() -> None:
    """The thread sleeps until the first one would have been due; it then finds when the second one is."""
    node = FakeNode()
    keeper = LeaseKeeper(node.renew, time.monotonic)
    keeper.add(ONE, 0.3, asked_s=time.monotonic())
    keeper.drop(ONE)
    keeper.add(OTHER, 0.6, asked_s=time.monotonic())
    assert node.was_asked.wait(5)
    assert node.calls[0][0] == (OTHER,)
    assert keeper.is_held(OTHER)
    keeper.close()


def test_a_lease_that_is_due_sooner_wakes_the_thread() -> None:
    node = FakeNode()
    keeper = LeaseKeeper(node.renew, time.monotonic)
    keeper.add(ONE, 3000.0, asked_s=time.monotonic())
    wait_until_asleep(keeper)
    keeper.add(OTHER, 0.3, asked_s=time.monotonic())
    assert node.was_asked.wait(5)
    assert node.calls[0][0] == (OTHER,)
    keeper.close()


def wait_until_asleep(keeper: LeaseKeeper) -> None:
    deadline_s = time.monotonic() + 5
    while not keeper._changed._waiters:  # type: ignore[attr-defined]
        assert time.monotonic() < deadline_s
