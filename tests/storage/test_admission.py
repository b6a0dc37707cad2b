"""What is written to SSD: by use, by a budget of bytes a day, and never under the file system's floor."""

import pytest

from kvservice.storage.admission import BURST_DAYS, DAY_S, START_DAYS, Admission, NotAdmitted

DAY_BYTES = 24_000
HOUR_BYTES = DAY_BYTES // 24


class Clock:
    """Seconds that pass when told."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def pass_hours(self, hours: float) -> None:
        self.now_s += hours * 3600


def write(admission: Admission, record_bytes: int, *, uses: int = 1, is_required: bool = False) -> NotAdmitted | None:
    """Decide, and write if admitted."""
    reason = admission.decide(record_bytes, uses, is_required=is_required)
    if reason is None:
        admission.note_written(record_bytes)
    return reason


def test_without_a_budget_everything_is_written_at_once() -> None:
    admission = Admission(0, clock=Clock())
    assert [write(admission, 1 << 40, uses=0) for _ in range(100)] == [None] * 100
    assert admission.budget_left_bytes() is None
    assert (admission.admitted, admission.written_bytes) == (100, 100 << 40)


def test_with_a_budget_only_what_was_used_since_it_was_stored_is_written() -> None:
    admission = Admission(DAY_BYTES, clock=Clock())
    assert write(admission, 10, uses=0) is NotAdmitted.ONCE_USED
    assert write(admission, 10, uses=1) is None


def test_required_records_are_written_without_use_or_budget_and_the_budget_pays() -> None:
    admission = Admission(DAY_BYTES, clock=Clock())
    assert write(admission, HOUR_BYTES, uses=0, is_required=True) is None
    assert write(admission, HOUR_BYTES, uses=0, is_required=True) is None
    assert admission.budget_left_bytes() == -HOUR_BYTES
    assert write(admission, 1) is NotAdmitted.BUDGET


def test_under_the_floor_nothing_is_written_and_above_it_again() -> None:
    for budget in (0, DAY_BYTES):
        admission = Admission(budget, clock=Clock())
        admission.is_below_floor = True
        assert write(admission, 10, uses=9) is NotAdmitted.FLOOR
        assert write(admission, 10, uses=0, is_required=True) is NotAdmitted.FLOOR
        admission.is_below_floor = False
        assert write(admission, 10) is None


def test_a_start_brings_an_hours_worth() -> None:
    admission = Admission(DAY_BYTES, clock=Clock())
    assert admission.budget_left_bytes() == HOUR_BYTES == DAY_BYTES * START_DAYS
    for _ in range(10):
        assert write(admission, HOUR_BYTES // 10) is None
    assert write(admission, 1) is NotAdmitted.BUDGET


def test_an_empty_budget_fills_evenly() -> None:
    clock = Clock()
    admission = Admission(DAY_BYTES, clock=clock)
    assert write(admission, HOUR_BYTES) is None
    for _ in range(20):
        assert write(admission, HOUR_BYTES) is NotAdmitted.BUDGET
        clock.pass_hours(1)
        assert admission.budget_left_bytes() == HOUR_BYTES
        assert write(admission, HOUR_BYTES) is None


def test_what_is_saved_up_over_days_is_six_hours_worth() -> None:
    clock = Clock()
    admission = Admission(DAY_BYTES, clock=clock)
    clock.pass_hours(24 * 30)
    assert admission.budget_left_bytes() == DAY_BYTES * BURST_DAYS == 6 * HOUR_BYTES


def test_a_record_larger_than_the_bucket_is_written_and_paid_back() -> None:
    clock = Clock()
    admission = Admission(DAY_BYTES, clock=clock)
    assert write(admission, 2 * DAY_BYTES) is None
    clock.pass_hours(46.9)
    assert write(admission, 1) is NotAdmitted.BUDGET
    clock.pass_hours(0.2)
    assert write(admission, 1) is None


def test_over_any_day_no_more_than_the_budget_and_a_burst_is_written() -> None:
    clock, step_s = Clock(), 60.0
    admission = Admission(DAY_BYTES, clock=clock)
    clock.pass_hours(100)
    written, record_bytes = 0, 50
    for _ in range(int(DAY_S / step_s)):
        clock.now_s += step_s
        while write(admission, record_bytes) is None:
            written += record_bytes
    assert DAY_BYTES <= written <= DAY_BYTES * (1 + BURST_DAYS) + record_bytes


def test_a_clock_that_stands_or_goes_back_grants_nothing() -> None:
    clock = Clock()
    admission = Admission(DAY_BYTES, clock=clock)
    assert write(admission, HOUR_BYTES) is None
    clock.pass_hours(-5)
    assert admission.budget_left_bytes() == 0
    assert write(admission, 1) is NotAdmitted.BUDGET
    clock.pass_hours(5)
    assert write(admission, 1) is NotAdmitted.BUDGET, "the same five hours do not count twice"


def test_every_reason_is_counted_from_zero() -> None:
    admission = Admission(DAY_BYTES, clock=Clock())
    assert admission.refused == dict.fromkeys(NotAdmitted, 0)
    write(admission, 10, uses=0)
    write(admission, HOUR_BYTES)
    write(admission, 10)
    admission.refuse(NotAdmitted.NO_ROOM)
    admission.refuse(NotAdmitted.NO_ROOM)
    counted = {NotAdmitted.ONCE_USED: 1, NotAdmitted.BUDGET: 1, NotAdmitted.NO_ROOM: 2}
    assert admission.refused == dict.fromkeys(NotAdmitted, 0) | counted
    assert (admission.admitted, admission.written_bytes) == (1, HOUR_BYTES)


def test_a_reason_is_never_false() -> None:
    assert all(NotAdmitted)


def test_a_write_that_failed_costs_nothing() -> None:
    admission = Admission(DAY_BYTES, clock=Clock())
    assert admission.decide(HOUR_BYTES, 1) is None
    assert admission.budget_left_bytes() == HOUR_BYTES


def test_a_negative_budget_or_an_empty_record_is_a_bug() -> None:
    with pytest.raises(AssertionError):
        Admission(-1, clock=Clock())
    with pytest.raises(AssertionError):
        Admission(0, clock=Clock()).decide(0, 1)
