"""What a client asks while records arrive: it waits for news, and only for news."""

from collections.abc import Sequence

import pytest

from kvservice.client.arrivals import Arrivals
from kvservice.client.transport import LateCall, PendingCall
from kvservice.model.cache import Extent, Tier
from kvservice.model.errors import CorruptError, UnavailableError
from kvservice.model.lease import BootEpoch, Lease, LeaseId, SessionId
from kvservice.model.plan import Location
from kvservice.wire.v1 import cache_pb2 as wire

LEASE = Lease(LeaseId(1), SessionId(b""), BootEpoch(1), 0.0)


def place(offset: int, tier: Tier = Tier.SSD) -> Location:
    return Location(tier, Extent(offset, 10), 0)


class ScriptedSession:
    """Answers as it is told, a step an answer, and notes after which step it was asked."""

    def __init__(self, *replies: Sequence[wire.Arrival]) -> None:
        self.replies = list(replies)
        self.asked: list[int] = []
        self.begun: list[int] = []

    def await_arrivals(self, lease: Lease, step: int) -> wire.AwaitReply:
        assert lease is LEASE
        self.asked.append(step)
        return wire.AwaitReply(step=len(self.asked), arrivals=self.replies.pop(0))

    def begin_await(self, lease: Lease, step: int) -> PendingCall:
        self.begun.append(step)
        return LateCall(lambda *_: self.await_arrivals(lease, step), "Await", wire.AwaitRequest())


def arrival(offset: int, layers: int, code: str = "") -> wire.Arrival:
    return wire.Arrival(offset=offset, layers=layers, error=wire.ItemError(code=code, message="why") if code else None)


def test_what_was_in_memory_is_there_and_nobody_is_asked() -> None:
    session = ScriptedSession()
    assert Arrivals(session, LEASE).wait_for(place(0, Tier.HOST), 5) == 5
    assert not session.asked


def test_what_one_wait_hears_the_next_one_knows() -> None:
    session = ScriptedSession([arrival(0, 2), arrival(64, 4)], [arrival(0, 3)])
    arrivals = Arrivals(session, LEASE)
    assert arrivals.wait_for(place(0), 1) == 2
    assert arrivals.wait_for(place(64), 4) == 4
    assert arrivals.wait_for(place(0), 3) == 3
    assert session.asked == [0, 1]


def test_a_failure_is_remembered_and_raised_to_who_needs_what_never_came() -> None:
    session = ScriptedSession([arrival(0, 1, "CORRUPT"), arrival(64, 0)], [arrival(64, 1)])
    arrivals = Arrivals(session, LEASE)
    assert arrivals.wait_for(place(64), 1) == 1
    assert arrivals.wait_for(place(0), 1) == 1, "what came before it failed is good"
    with pytest.raises(CorruptError, match="why"):
        arrivals.wait_for(place(0), 2)


def test_a_layer_that_does_not_come_in_time_is_an_error() -> None:
    times = iter([0.0, 1.0, 61.0])
    session = ScriptedSession([arrival(0, 0)])
    with pytest.raises(UnavailableError, match="recompute"):
        Arrivals(session, LEASE, lambda: next(times)).wait_for(place(0), 1)


def test_a_question_sent_ahead_is_answered_to_who_waits_first() -> None:
    session = ScriptedSession([arrival(0, 1)], [arrival(0, 2)])
    arrivals = Arrivals(session, LEASE)
    arrivals.ask_ahead()
    arrivals.ask_ahead()
    assert (session.begun, session.asked) == ([0], []), "sent once, and not waited for"
    assert arrivals.wait_for(place(0), 1) == 1
    assert arrivals.wait_for(place(0), 2) == 2
    assert (session.begun, session.asked) == ([0], [0, 1])


def test_a_question_that_was_given_up_is_asked_again_by_who_waits() -> None:
    session = ScriptedSession([arrival(0, 1)])
    arrivals = Arrivals(session, LEASE)
    arrivals.ask_ahead()
    arrivals.give_up()
    arrivals.give_up()
    assert arrivals.wait_for(place(0), 1) == 1
    assert session.asked == [0]


def test_a_question_that_cannot_be_sent_ahead_is_told_to_who_waits() -> None:
    class LostSession(ScriptedSession):
        def begin_await(self, lease: Lease, step: int) -> PendingCall:
            raise UnavailableError("not sent")

        def await_arrivals(self, lease: Lease, step: int) -> wire.AwaitReply:
            raise UnavailableError("no session is open")

    arrivals = Arrivals(LostSession(), LEASE)
    arrivals.ask_ahead()
    with pytest.raises(UnavailableError, match="no session"):
        arrivals.wait_for(place(0), 1)
