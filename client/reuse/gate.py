"""The round gate: collects the members of a round until all are there or a short limit has passed, then stays open.

A name may be used for one round after the other. A complete round is forgotten, an incomplete one with ``renew``.

State only: it never waits and never looks at a prompt. One thread; who waits asks again, at every step of its engine.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Final

from kvservice.model.errors import InvalidInputError, LimitError

WAIT_LIMIT_S: Final = 0.5
"""How long the first to come waits for the last: what a pass saves is of this order, a user's patience too."""
ROUNDS_MAX: Final = 1024
MEMBERS_MAX: Final = 256
IDLE_S: Final = 60.0
"""After so long without an arrival a round may be forgotten: its agents are gone, or never came. No limit is longer."""

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Waiting:
    """The gate is shut. `until_s`: when it opens at the latest, on the gate's clock; None before the first arrival."""

    arrived: tuple[str, ...]
    until_s: float | None


@dataclass(frozen=True, slots=True)
class Opened:
    """The gate is open: `members` go through one pass now, in order of arrival.

    Empty when everybody who came has gone. `is_late`: stragglers, behind a pass that has left; one of them alone runs
    alone. `missing`: expected agents that are not there, by name where names are known; `missing_count` always.
    """

    members: tuple[str, ...]
    is_late: bool
    missing: tuple[str, ...]
    missing_count: int


@dataclass(slots=True)
class _Round:
    """`names` is empty when only their number is known. Dicts stand for ordered sets."""

    announced: tuple[int, frozenset[str], float]
    expected: int
    names: frozenset[str]
    touched_s: float
    opens_s: float | None = None
    is_open: bool = False
    passes: int = 0
    ready: dict[str, None] = field(default_factory=dict)
    gone: dict[str, None] = field(default_factory=dict)
    withdrawn: set[str] = field(default_factory=set)

    @property
    def seen(self) -> set[str]:
        return {*self.ready, *self.gone}

    @property
    def missing_count(self) -> int:
        return max(0, self.expected - len(self.seen))

    @property
    def is_over(self) -> bool:
        return self.missing_count == 0 and not self.ready


class RoundGate:
    """Gates of all rounds under way. `clock` gives seconds that never go back."""

    def __init__(self, clock: Clock, *, rounds_max: int = ROUNDS_MAX, members_max: int = MEMBERS_MAX) -> None:
        self._clock = clock
        self._rounds_max = rounds_max
        self._members_max = members_max
        self._rounds: dict[str, _Round] = {}

    def __len__(self) -> int:
        """How many rounds are known."""
        return len(self._rounds)

    def announce(self, round_id: str, expected: int | Collection[str], limit_s: float = WAIT_LIMIT_S) -> None:
        """A round of so many members, or of these. Every member may announce it: the same again changes nothing.

        Raises InvalidInputError for a round without members, a limit below 0, or what contradicts an earlier
        announcement; LimitError for too many members or rounds.
        """
        names = frozenset[str]() if isinstance(expected, int) else frozenset(expected)
        count = expected if isinstance(expected, int) else len(names)
        self._check(round_id, count, limit_s)
        known = self._rounds.get(round_id)
        if known is None:
            self._make_room()
            self._rounds[round_id] = _Round((count, names, limit_s), count, names, self._clock())
        elif known.announced != (count, names, limit_s):
            said, limit_s = sorted(known.announced[1]) or known.announced[0], known.announced[2]
            raise InvalidInputError(f"round {round_id!r} was announced with {said} and {limit_s:g} s; keep to it")

    def renew(self, round_id: str, agent: str, expected: int | Collection[str]) -> bool:
        """Forget a round that was left incomplete if ``agent`` begins another of its name; True if it does.

        To be asked before it announces, and only if all that ever came are done: the gate does not know that. Then who
        came before comes for a new round, and so does who expects others. Who was missing is late for the old one, and
        nothing is gained by having it wait for agents that have gone.
        """
        known = self._rounds.get(round_id)
        if known is None or known.ready or known.opens_s is None or self._clock() < known.opens_s:
            return False
        count = expected if isinstance(expected, int) else len(set(expected))
        is_known = agent in known.gone or agent in known.withdrawn
        if not is_known and count == known.announced[0]:
            return False
        del self._rounds[round_id]
        return True

    def arrive(self, round_id: str, agent: str) -> None:
        """`agent`'s prompt is ready. Again while it waits: nothing changes. Again behind its pass, while others are
        missing (it was preempted, say): it joins the next.

        Raises InvalidInputError for a round that is unknown or forgotten, an agent it does not name, or one more than
        it has members.
        """
        known = self._known(round_id)
        if known.names and agent not in known.names:
            raise InvalidInputError(f"agent {agent!r} is none of round {round_id!r}: {sorted(known.names)}")
        if agent in known.withdrawn:  # it is back: nobody's place was taken meanwhile
            known.withdrawn.discard(agent)
            known.expected += 1
        if agent not in known.seen and known.missing_count == 0:
            raise InvalidInputError(
                f"agent {agent!r} is one too many: round {round_id!r} has its {known.expected} members; "
                "announce a larger round, or give the next one an id of its own"
            )
        known.touched_s = self._clock()
        known.gone.pop(agent, None)
        known.ready[agent] = None
        if known.opens_s is None:
            known.opens_s = known.touched_s + known.announced[2]

    def withdraw(self, round_id: str, agent: str) -> None:
        """`agent` was aborted or has failed: nobody waits for it any more.

        Without effect once its pass has left, for an agent or a round that is not known, and a second time: an abort
        may come whenever it likes.
        """
        known = self._rounds.get(round_id)
        if known is None or agent in known.gone or agent in known.withdrawn:
            return
        if known.names and agent not in known.names:
            return
        known.ready.pop(agent, None)
        known.withdrawn.add(agent)
        known.names -= {agent}
        known.expected = max(0, known.expected - 1)
        if known.is_over:
            del self._rounds[round_id]

    def take(self, round_id: str) -> Waiting | Opened:
        """Who goes now. The gate opens when all are there or the limit has passed, and stays open: later ones go at
        once, with whoever came since. A round whose last member was taken is forgotten.

        Raises InvalidInputError for a round that is unknown or forgotten.
        """
        known = self._known(round_id)
        now_s = self._clock()
        is_due = known.opens_s is not None and now_s >= known.opens_s
        known.is_open = known.is_open or is_due or known.missing_count == 0
        if not known.is_open:
            return Waiting(tuple(known.ready), known.opens_s)
        members, is_late = tuple(known.ready), known.passes > 0
        missing = tuple(sorted(known.names - known.seen))
        if members:
            known.touched_s = now_s
            known.passes += 1
        known.gone.update(known.ready)
        known.ready = {}
        if known.is_over:
            del self._rounds[round_id]
        return Opened(members, is_late, missing, known.missing_count)

    def forget(self, round_id: str) -> tuple[str, ...]:
        """End a round whatever its state; returns who was still waiting, to be run alone. Safe to call twice."""
        known = self._rounds.pop(round_id, None)
        return () if known is None else tuple(known.ready)

    def _known(self, round_id: str) -> _Round:
        if round_id not in self._rounds:
            raise InvalidInputError(f"round {round_id!r} is unknown or over; announce it, or run the prompt alone")
        return self._rounds[round_id]

    def _check(self, round_id: str, count: int, limit_s: float) -> None:
        if count < 1 or not 0 <= limit_s <= IDLE_S:
            raise InvalidInputError(
                f"round {round_id!r} of {count} members within {limit_s} s; give 1 or more, and 0 to {IDLE_S:g} s"
            )
        if count > self._members_max:
            raise LimitError(f"round {round_id!r} has {count} members, {self._members_max} may go together; split it")

    def _make_room(self) -> None:
        """Forget rounds that nobody came to for long; LimitError when that is not enough."""
        if len(self._rounds) < self._rounds_max:
            return
        old_s = self._clock() - IDLE_S
        for round_id in [one for one, known in self._rounds.items() if known.touched_s < old_s]:
            del self._rounds[round_id]
        if len(self._rounds) >= self._rounds_max:
            raise LimitError(f"{self._rounds_max} rounds are under way; forget some, or run the prompt alone")
