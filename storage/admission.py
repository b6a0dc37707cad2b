"""May a record be written to SSD now? State only: it counts and answers, and writes nothing.

An SSD wears by what is written to it, and most of what is stored is never used again.
"""

from collections.abc import Callable
from enum import IntEnum

DAY_S = 86_400.0
BURST_DAYS = 1 / 4
"""Share of a day's budget that can be saved up: a busy morning after an idle night may spend six hours' worth."""
START_DAYS = 1 / 24
"""What a start brings along: an hour's worth, so that restarts at most once an hour at most double the budget."""


class NotAdmitted(IntEnum):
    """Why a record was not written. The numbers are stable, none is 0."""

    ONCE_USED = 1
    """A budget is set, and its group was not used since it was stored."""
    BUDGET = 2
    """What may be written a day is spent."""
    FLOOR = 3
    """The file system has less free room than it must keep."""
    NO_ROOM = 4
    """Nothing on the slab may go, or the file system is full."""
    TOO_LARGE = 5
    """Larger than the slab."""
    DISK_ERROR = 6
    """The write failed."""


class Admission:
    """Decides by use, by a budget of bytes a day, and by the room the file system must keep. One thread owns it.

    The budget is a token bucket over ``clock`` (monotonic seconds, so setting the time of day changes nothing). It
    starts with START_DAYS of the budget, fills evenly and holds at most BURST_DAYS of it. Whoever finds something in
    it is admitted, so a record larger than the bucket is too; what is written beyond its content, and what is
    required, is owed: until that is paid back nothing else is admitted. In t days at most
    ``budget * (BURST_DAYS + t)`` and what was in flight are written, besides what was required.

    ``is_below_floor``: set by whoever watches the file system; True refuses everything.
    ``refused`` has every reason from the start. ``budget_bytes_per_day`` 0: no budget, and once is enough.
    """

    def __init__(self, budget_bytes_per_day: int, *, clock: Callable[[], float]) -> None:
        assert budget_bytes_per_day >= 0, "0 is no budget"
        self.is_below_floor = False
        self.admitted = 0
        self.written_bytes = 0
        self.refused = dict.fromkeys(NotAdmitted, 0)
        self._budget_bytes_per_day = budget_bytes_per_day
        self._clock = clock
        self._left_bytes = budget_bytes_per_day * START_DAYS
        self._filled_at_s = clock()

    def decide(self, record_bytes: int, uses: int, *, is_required: bool = False) -> NotAdmitted | None:
        """None if the record may be written, else the reason, counted. Call ``note_written`` once it is there.

        ``uses`` of its group since that was stored. ``is_required``: use and budget do not matter (a mirror whose
        master is on SSD, a record that was superseded, a flush before the stop); the floor does.
        """
        assert record_bytes > 0, "a record has bytes"
        reason = self._reason(uses, is_required)
        if reason is None:
            self.admitted += 1
        else:
            self.refuse(reason)
        return reason

    def _reason(self, uses: int, is_required: bool) -> NotAdmitted | None:
        if self.is_below_floor:
            return NotAdmitted.FLOOR
        if is_required or not self._budget_bytes_per_day:
            return None
        if uses < 1:
            return NotAdmitted.ONCE_USED
        self._fill()
        return None if self._left_bytes > 0 else NotAdmitted.BUDGET

    def refuse(self, reason: NotAdmitted) -> None:
        """Count a refusal that was found elsewhere."""
        self.refused[reason] += 1

    def note_written(self, record_bytes: int) -> None:
        """So many bytes were written, required or not; the budget pays."""
        self.written_bytes += record_bytes
        self._fill()
        self._left_bytes -= record_bytes

    def budget_left_bytes(self) -> int | None:
        """What the budget holds now, negative if it owes; None without a budget."""
        if not self._budget_bytes_per_day:
            return None
        self._fill()
        return int(self._left_bytes)

    def _fill(self) -> None:
        now_s = self._clock()
        gained = self._budget_bytes_per_day * max(0.0, now_s - self._filled_at_s) / DAY_S
        self._left_bytes = min(self._left_bytes + gained, self._budget_bytes_per_day * BURST_DAYS)
        self._filled_at_s = max(self._filled_at_s, now_s)
