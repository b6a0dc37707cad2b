"""What choosing costs on a recorded mix of real transfers (record_routes.py), against the best choice in hindsight.

In hindsight: for every phase and class of sizes the one medium with the least total. Only what was chosen is told to
the router.
"""

import csv
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import pytest

from kvservice.peers.routes import Router, size_class
from kvservice.peers.routes_log import Choice, Medium, Why
from tests.peers.members import ManualClock

RECORDED = Path(__file__).parent / "data" / "route_mix.csv"
MEDIA = (Medium.STREAM, Medium.FLIGHT, Medium.COLD)
REGRET_MAX = 0.05


class Moment(NamedTuple):
    at_s: float
    phase: str
    bytes: int
    seconds: dict[Medium, float]

    @property
    def group(self) -> tuple[str, int]:
        return self.phase, size_class(self.bytes)


@pytest.fixture(scope="module")
def moments() -> list[Moment]:
    with RECORDED.open() as file:
        lines, found, phase, number = csv.DictReader(file), list[Moment](), "", 0
        for line in lines:
            number += line["phase"] != phase
            phase = line["phase"]
            seconds = {medium: float(line[medium]) for medium in MEDIA}
            found.append(Moment(float(line["at_s"]), f"{number} {phase}", int(line["bytes"]), seconds))
    return found


def replay(moments: list[Moment]) -> tuple[Router, list[Choice]]:
    clock, choices = ManualClock(), list[Choice]()
    router = Router(clock)
    for moment in moments:
        clock.now_s = max(clock.now_s, 1000.0 + moment.at_s)
        choice = router.choose("peer", moment.bytes, MEDIA)
        clock.pass_(moment.seconds[choice.medium])
        router.done(choice, moment.seconds[choice.medium])
        choices.append(choice)
    return router, choices


def best_in_hindsight(moments: list[Moment]) -> float:
    totals: dict[tuple[str, int], dict[Medium, float]] = defaultdict(lambda: dict.fromkeys(MEDIA, 0.0))
    for moment in moments:
        for medium in MEDIA:
            totals[moment.group][medium] += moment.seconds[medium]
    return sum(min(one.values()) for one in totals.values())


def test_regret_on_the_recorded_mix_is_small(moments: list[Moment]) -> None:
    router, choices = replay(moments)
    best_s = best_in_hindsight(moments)
    regret = sum(one.actual_s or 0.0 for one in choices) / best_s - 1
    fixed = {medium: sum(one.seconds[medium] for one in moments) / best_s - 1 for medium in MEDIA}
    assert regret <= REGRET_MAX, (regret, fixed, router.log.reasons)
    assert min(fixed.values()) > 2 * REGRET_MAX, "a mix in which one medium is always best proves nothing"


def test_routes_change_with_the_phases_and_do_not_swing(moments: list[Moment]) -> None:
    router, choices = replay(moments)
    phases = len({one.phase for one in moments})
    classes = len({size_class(one.bytes) for one in moments})
    assert 1 <= router.log.reasons[Why.SWITCHED] <= phases * classes
    assert router.log.reasons[Why.TRIAL] <= 0.2 * len(choices)


def test_predictions_are_near_what_came(moments: list[Moment]) -> None:
    router, _ = replay(moments)
    document = router.log.document()["media"]["stream"]
    assert document["predicted_s"] == pytest.approx(document["actual_s"], rel=0.25)
