"""Why each route was chosen: predicted, actual, reason. A ring of the last choices, and counters that never fall."""

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice
from typing import TypedDict

KEPT_MAX = 1024


class Medium(StrEnum):
    """How bytes get here."""

    IN_PROCESS = "in_process"
    SHARED_MEMORY = "shared_memory"
    STREAM = "stream"
    INT8_STREAM = "int8_stream"
    """The stream, with rows that were rounded to 8 bits sent as such."""
    FLIGHT = "flight"
    COLD = "cold"


class Why(StrEnum):
    """Why a medium was chosen."""

    ONLY = "only"
    """Nothing else was there."""
    FIRST = "first"
    """Nothing was in use yet for such transfers: the lowest prediction."""
    KEPT = "kept"
    """It is in use, and nothing is clearly better."""
    HELD = "held"
    """It is in use; another is clearly better, but not for long enough."""
    SWITCHED = "switched"
    """Another was clearly better for long enough."""
    FALLBACK = "fallback"
    """What was in use is gone or failed."""
    TRIAL = "trial"
    """To know again how fast it is: nothing was moved that way for a while."""


@dataclass(slots=True, eq=False)
class Choice:
    """One decision. ``predicted``: seconds by every medium that was there. ``actual_s``: None until it is done.

    ``direction``: "from" the peer or "to" it.
    """

    at_s: float
    peer: str
    medium: Medium
    bytes: int
    predicted: Mapping[Medium, float]
    why: Why
    actual_s: float | None = None
    has_failed: bool = False
    direction: str = "from"

    @property
    def predicted_s(self) -> float:
        """Seconds that the chosen medium should take."""
        return self.predicted[self.medium]

    def __str__(self) -> str:
        others = ", ".join(f"{name} {_ms(s)}" for name, s in self.predicted.items() if name is not self.medium)
        actual = "failed" if self.has_failed else "under way" if self.actual_s is None else _ms(self.actual_s)
        return (
            f"{self.bytes} bytes {self.direction} {self.peer} by {self.medium} ({self.why}): "
            f"predicted {_ms(self.predicted_s)}, actual {actual}; others: {others or 'none'}"
        )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"


class MediumDocument(TypedDict):
    """All choices of one medium, in /stats. ``error_share``: mean of |actual - predicted| / actual."""

    choices: int
    failures: int
    bytes: int
    predicted_s: float
    actual_s: float
    error_share: float


class RoutesDocument(TypedDict):
    """All choices, in /stats."""

    media: dict[str, MediumDocument]
    reasons: dict[str, int]


@dataclass(slots=True)
class _Sums:
    choices: int = 0
    done: int = 0
    failures: int = 0
    bytes: int = 0
    predicted_s: float = 0.0
    actual_s: float = 0.0
    error: float = 0.0


@dataclass(slots=True)
class RouteLog:
    """The last choices, and sums over all. ``bytes`` and seconds count what was completed."""

    kept: deque[Choice] = field(default_factory=lambda: deque(maxlen=KEPT_MAX))
    reasons: Counter[Why] = field(default_factory=Counter)
    _sums: dict[Medium, _Sums] = field(default_factory=lambda: {medium: _Sums() for medium in Medium})

    def begin(self, choice: Choice) -> None:
        """A choice was made."""
        self.kept.append(choice)
        self.reasons[choice.why] += 1
        self._sums[choice.medium].choices += 1

    def end(self, choice: Choice) -> None:
        """It is known what became of it."""
        sums = self._sums[choice.medium]
        if choice.has_failed or choice.actual_s is None:
            sums.failures += 1
            return
        sums.done += 1
        sums.bytes += choice.bytes
        sums.predicted_s += choice.predicted_s
        sums.actual_s += choice.actual_s
        sums.error += abs(choice.actual_s - choice.predicted_s) / max(choice.actual_s, 1e-9)

    def last(self, count: int) -> list[Choice]:
        """The last choices, newest first."""
        return list(islice(reversed(self.kept), count))

    def document(self) -> RoutesDocument:
        """The sums, for /stats. Every medium and reason stands there, zeros too."""
        return RoutesDocument(
            media={medium.value: _document(sums) for medium, sums in self._sums.items()},
            reasons={why.value: self.reasons[why] for why in Why},
        )


def _document(sums: _Sums) -> MediumDocument:
    return MediumDocument(
        choices=sums.choices,
        failures=sums.failures,
        bytes=sums.bytes,
        predicted_s=sums.predicted_s,
        actual_s=sums.actual_s,
        error_share=sums.error / sums.done if sums.done else 0.0,
    )
