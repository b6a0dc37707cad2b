"""The round gate: it opens when all are there or the limit has passed, latches, and says who is missing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvservice.client.reuse.gate import IDLE_S, Opened, RoundGate, Waiting
from kvservice.model.errors import InvalidInputError, LimitError


class Clock:
    """Time that a test moves by hand."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def make_gate(clock: Clock, expected: int | list[str] = 3, limit_s: float = 0.5) -> RoundGate:
    gate = RoundGate(clock, rounds_max=4, members_max=8)
    gate.announce("r", expected, limit_s)
    return gate


@pytest.mark.parametrize("expected", [3, ["c", "a", "b"]])
def test_gate_opens_when_all_are_there_in_order_of_arrival(clock: Clock, expected: int | list[str]) -> None:
    gate = make_gate(clock, expected)
    for agent in "bca":
        assert isinstance(gate.take("r"), Waiting)
        gate.arrive("r", agent)
    assert gate.take("r") == Opened(("b", "c", "a"), is_late=False, missing=(), missing_count=0)
    assert len(gate) == 0


def test_limit_counts_from_the_first_arrival_not_from_the_announcement(clock: Clock) -> None:
    gate = make_gate(clock)
    clock.now_s += 30
    assert gate.take("r") == Waiting((), None)
    gate.arrive("r", "a")
    clock.now_s += 0.49
    gate.arrive("r", "b")
    assert gate.take("r") == Waiting(("a", "b"), 130.5)
    clock.now_s = 130.5
    assert gate.take("r") == Opened(("a", "b"), is_late=False, missing=(), missing_count=1)


def test_agent_that_never_arrives_is_named(clock: Clock) -> None:
    gate = make_gate(clock, ["a", "b", "c"])
    gate.arrive("r", "b")
    clock.now_s += 1
    assert gate.take("r") == Opened(("b",), is_late=False, missing=("a", "c"), missing_count=2)


def test_open_gate_stays_open_so_stragglers_go_at_once_together_or_alone(clock: Clock) -> None:
    gate = make_gate(clock, 4)
    gate.arrive("r", "a")
    clock.now_s += 1
    assert gate.take("r") == Opened(("a",), is_late=False, missing=(), missing_count=3)
    assert gate.take("r") == Opened((), is_late=True, missing=(), missing_count=3)
    gate.arrive("r", "b")
    gate.arrive("r", "c")
    assert gate.take("r") == Opened(("b", "c"), is_late=True, missing=(), missing_count=1)
    gate.arrive("r", "d")
    assert gate.take("r") == Opened(("d",), is_late=True, missing=(), missing_count=0)
    assert len(gate) == 0


def test_limit_of_nought_waits_for_nobody(clock: Clock) -> None:
    gate = make_gate(clock, 2, limit_s=0)
    gate.arrive("r", "a")
    assert gate.take("r") == Opened(("a",), is_late=False, missing=(), missing_count=1)


def test_arriving_twice_is_arriving_once_and_a_preempted_member_joins_the_next_pass(clock: Clock) -> None:
    gate = make_gate(clock, 2)
    gate.arrive("r", "a")
    gate.arrive("r", "a")
    clock.now_s += 1
    assert gate.take("r") == Opened(("a",), is_late=False, missing=(), missing_count=1)
    gate.arrive("r", "a")
    gate.arrive("r", "b")
    assert gate.take("r") == Opened(("a", "b"), is_late=True, missing=(), missing_count=0)


@pytest.mark.parametrize("expected", [3, ["a", "b", "c"]])
def test_nobody_waits_for_a_withdrawn_agent(clock: Clock, expected: int | list[str]) -> None:
    gate = make_gate(clock, expected)
    for agent in "ab":
        gate.arrive("r", agent)
    gate.withdraw("r", "b")
    gate.withdraw("r", "b")
    gate.announce("r", expected)  # a later member still says what all said
    gate.arrive("r", "c")
    assert gate.take("r") == Opened(("a", "c"), is_late=False, missing=(), missing_count=0)


def test_withdrawing_the_last_ends_the_round_and_strangers_change_nothing(clock: Clock) -> None:
    gate = make_gate(clock, ["a", "b"])
    gate.withdraw("elsewhere", "a")
    gate.withdraw("r", "z")
    gate.arrive("r", "a")
    clock.now_s += 1
    gate.take("r")
    gate.withdraw("r", "a")  # its pass has left
    assert len(gate) == 1
    gate.withdraw("r", "b")
    assert len(gate) == 0


def test_unknown_and_forgotten_rounds_are_refused_by_name(clock: Clock) -> None:
    gate = make_gate(clock)
    gate.arrive("r", "a")
    assert gate.forget("r") == ("a",)
    assert gate.forget("r") == ()
    for call in (lambda: gate.arrive("r", "a"), lambda: gate.take("r")):
        with pytest.raises(InvalidInputError, match="round 'r' is unknown or over"):
            call()


def test_one_member_too_many_is_refused_and_the_others_still_go(clock: Clock) -> None:
    gate = make_gate(clock, 2)
    gate.arrive("r", "a")
    gate.arrive("r", "b")
    with pytest.raises(InvalidInputError, match="'c' is one too many: round 'r' has its 2 members"):
        gate.arrive("r", "c")
    assert gate.take("r") == Opened(("a", "b"), is_late=False, missing=(), missing_count=0)


def test_agent_that_the_round_does_not_name_is_refused(clock: Clock) -> None:
    with pytest.raises(InvalidInputError, match="'z' is none of round 'r'"):
        make_gate(clock, ["a", "b"]).arrive("r", "z")


@pytest.mark.parametrize(("expected", "limit_s"), [(0, 0.5), (-1, 0.5), (2, -0.1), (2, IDLE_S + 1), (2, float("nan"))])
def test_round_that_makes_no_sense_is_refused(clock: Clock, expected: int, limit_s: float) -> None:
    with pytest.raises(InvalidInputError, match="give 1 or more"):
        RoundGate(clock).announce("r", expected, limit_s)


def test_announcement_that_contradicts_is_refused(clock: Clock) -> None:
    gate = make_gate(clock, 3)
    gate.announce("r", 3, 0.5)
    for expected, limit_s in ((4, 0.5), (3, 0.6)):
        with pytest.raises(InvalidInputError, match=r"was announced with 3 and 0\.5 s"):
            gate.announce("r", expected, limit_s)


def test_rounds_and_members_have_a_limit_and_idle_rounds_make_room(clock: Clock) -> None:
    gate = make_gate(clock)
    with pytest.raises(LimitError, match="9 members, 8 may go together"):
        gate.announce("large", 9)
    for number in range(3):
        gate.announce(f"r{number}", 2)
    with pytest.raises(LimitError, match="4 rounds are under way"):
        gate.announce("one more", 2)
    clock.now_s += IDLE_S + 1
    gate.announce("one more", 2)
    assert len(gate) == 1


def incomplete(clock: Clock, gate: RoundGate) -> None:
    """a and b have gone, c has never come."""
    for agent in "ab":
        gate.arrive("r", agent)
    clock.now_s += 0.5
    gate.take("r")


@pytest.mark.parametrize("expected", [3, ["a", "b", "c"]])
def test_who_came_before_begins_another_round_of_an_incomplete_ones_name(
    clock: Clock, expected: int | list[str]
) -> None:
    gate = make_gate(clock, expected)
    incomplete(clock, gate)
    assert gate.renew("r", "b", expected)
    gate.announce("r", expected)
    for agent in "bca":
        assert gate.take("r") == Waiting(tuple("bca"[: "bca".index(agent)]), None if agent == "b" else 101.0)
        gate.arrive("r", agent)
    assert gate.take("r") == Opened(("b", "c", "a"), is_late=False, missing=(), missing_count=0)


def test_a_straggler_of_an_incomplete_round_is_late_and_begins_none(clock: Clock) -> None:
    gate = make_gate(clock)
    incomplete(clock, gate)
    assert not gate.renew("r", "c", 3)
    gate.announce("r", 3)
    gate.arrive("r", "c")
    assert gate.take("r") == Opened(("c",), is_late=True, missing=(), missing_count=0)


def test_who_expects_others_begins_another_round(clock: Clock) -> None:
    gate = make_gate(clock)
    incomplete(clock, gate)
    assert gate.renew("r", "c", 2)
    gate.announce("r", 2)


def test_a_round_whose_gate_is_shut_or_that_somebody_waits_in_is_no_old_one(clock: Clock) -> None:
    gate = make_gate(clock)
    gate.arrive("r", "a")
    assert not gate.renew("r", "a", 3)
    gate.take("r")
    clock.now_s += 0.4
    assert not gate.renew("r", "a", 3)
    clock.now_s += 0.1
    gate.take("r")
    gate.arrive("r", "b")
    assert not gate.renew("r", "a", 3), "b waits for its pass"
    assert not gate.renew("elsewhere", "a", 3)


@given(
    st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from(["arrive", "withdraw", "take", "wait"])), max_size=40)
)
def test_nobody_goes_twice_without_arriving_again_and_no_arrival_is_lost(events: list[tuple[str, str]]) -> None:
    clock = Clock()
    gate = RoundGate(clock)
    gate.announce("r", ["a", "b", "c", "d"])
    waiting: set[str] = set()
    for agent, event in events:
        try:
            if event == "arrive":
                gate.arrive("r", agent)
                waiting.add(agent)
            elif event == "withdraw":
                gate.withdraw("r", agent)
                waiting.discard(agent)
            elif event == "wait":
                clock.now_s += 1
            elif isinstance(found := gate.take("r"), Opened):
                assert set(found.members) == waiting
                waiting.clear()
        except InvalidInputError:
            assert event != "withdraw"
            if len(gate) == 0:
                assert not waiting
                return


def test_an_agent_that_was_aborted_and_came_back_counts_once() -> None:
    gate = RoundGate(lambda: 0.0)
    gate.announce("r", 2)
    for _ in range(2):
        gate.arrive("r", "anna")
        gate.withdraw("r", "anna")
    gate.arrive("r", "anna")
    gate.arrive("r", "bert")
    taken = gate.take("r")
    assert isinstance(taken, Opened)
    assert set(taken.members) == {"anna", "bert"}
