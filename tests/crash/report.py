"""What a crash test did, for people to judge whether it did enough."""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Self

from tests.crash.choices import Death, Plan
from tests.crash.reading import Seen


@dataclass(slots=True)
class Report:
    """Sums over the cycles of one or more campaigns."""

    seeds: list[str] = field(default_factory=list)
    deaths: Counter[Death] = field(default_factory=Counter)
    armed: Counter[str] = field(default_factory=Counter)
    reached: Counter[str] = field(default_factory=Counter)
    recovery_s: dict[str, list[float]] = field(default_factory=dict)
    dropped: Counter[str] = field(default_factory=Counter)
    seen: Counter[str] = field(default_factory=Counter)
    damages: Counter[str] = field(default_factory=Counter)
    quiet_points: int = 0
    steps: int = 0
    due: int = 0
    asked: int = 0

    @property
    def kills(self) -> int:
        """Ends by SIGKILL."""
        return sum(count for death, count in self.deaths.items() if death is not Death.STOP)

    def note_point(self, plan: Plan, *, is_reached: bool) -> None:
        if plan.point is not None:
            self.armed[plan.point.value] += 1
            self.reached[plan.point.value] += is_reached

    def note_recovery(self, recovery: dict[str, Any]) -> None:
        self.recovery_s.setdefault(recovery["kind"], []).append(recovery["seconds"])
        self.dropped.update(recovery["dropped"])

    def note_reads(self, seen: Seen) -> None:
        self.seen.update(dataclasses.asdict(seen))

    @classmethod
    def of(cls, reports: Sequence[Self]) -> "Report":
        """All of them as one."""
        total = Report()
        for report in reports:
            total.seeds += report.seeds
            for name in ("deaths", "armed", "reached", "dropped", "seen", "damages"):
                getattr(total, name).update(getattr(report, name))
            for kind, seconds in report.recovery_s.items():
                total.recovery_s.setdefault(kind, []).extend(seconds)
            for name in ("quiet_points", "steps", "due", "asked"):
                setattr(total, name, getattr(total, name) + getattr(report, name))
        return total

    def lines(self) -> list[str]:
        """For the terminal."""
        deaths = ", ".join(f"{count} {death.value}" for death, count in self.deaths.most_common())
        points = ", ".join(f"{name} {self.reached[name]}/{count}" for name, count in sorted(self.armed.items()))
        armed, reached = self.armed.total(), self.reached.total()
        share = 100 * reached / armed if armed else 0
        return [
            f"{self.kills} kills ({deaths}); {'; '.join(self.seeds)}",
            f"kill points reached: {reached} of {armed} ({share:.0f} %): {points}",
            f"{self.steps} steps of load, {self.quiet_points} quiet points; damage: {_counts(self.damages)}",
            f"{self.asked} keys asked for after starts, {self.due} of them had to be back and were",
            f"all reads: {_counts(self.seen)}",
            *(
                f"recovery {kind}: {len(all_s)} times, median {1000 * median(all_s):.0f} ms, "
                f"most {1000 * max(all_s):.0f} ms"
                for kind, all_s in sorted(self.recovery_s.items())
            ),
            f"dropped at starts: {_counts(self.dropped)}",
        ]


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counter.most_common()) or "none"
