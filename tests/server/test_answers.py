"""Answers over HTTP: one computation for all who ask at about the same time, and JSON that every reader reads."""

import asyncio
import json
import math
from collections.abc import Mapping
from typing import Any

import pytest

from kvservice.model.errors import InvalidInputError
from kvservice.stats import http
from kvservice.stats.answers import KEPT_MAX, REST, REST_S_MAX, Resting, RestingAnswers, encoded
from kvservice.stats.http import StatsDocument
from tests.server.builders import World
from tests.server.http_world import http_of

MAKING_S = 0.01


class Slow:
    """Takes a while to answer, and counts how often it did."""

    def __init__(self) -> None:
        self.now_s, self.made = 0.0, 0

    def clock(self) -> float:
        return self.now_s

    def answer(self, query: Mapping[str, str]) -> StatsDocument:
        self.made += 1
        self.now_s += MAKING_S
        if query.get("host") == "nonsense":
            raise InvalidInputError("nonsense")
        return {"made": self.made, "host": query.get("host", "")}


def test_a_storm_gets_the_same_answer_for_a_while() -> None:
    slow = Slow()
    text = Resting(lambda: encoded(slow.answer({})), slow.clock)
    assert {text.get() for _ in range(100)} == {encoded({"made": 1, "host": ""})}
    slow.now_s += REST * MAKING_S * 1.01
    text.get()
    assert slow.made == 2


def test_an_answer_that_takes_long_rests_a_quarter_second_at_most() -> None:
    slow = Slow()
    text = Resting(lambda: encoded([slow.answer({}) for _ in range(100)]), slow.clock)
    text.get()
    slow.now_s += REST_S_MAX
    text.get()
    assert slow.made == 200


def test_every_question_has_its_own_answer_and_a_refusal_does_not_rest() -> None:
    slow = Slow()
    answers = RestingAnswers(slow.answer, slow.clock)
    for _ in range(10):
        assert json.loads(answers.get({"host": "2x"}))["host"] == "2x"
        assert json.loads(answers.get({}))["host"] == ""
    assert slow.made == 2
    for _ in range(3):
        with pytest.raises(InvalidInputError):
            answers.get({"host": "nonsense"})
    assert slow.made == 5
    for number in range(3 * KEPT_MAX):
        answers.get({"host": str(number)})
    assert len(answers._kept) == KEPT_MAX


@pytest.mark.parametrize("path", ["/plan?host=2x", "/curves", "/families?count=3", "/stats", "/metrics"])
async def test_many_who_ask_at_once_are_answered_by_one_computation(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of the answers stands still but for what making one takes."""
    slow, world = Slow(), World()
    for kind in (Resting, RestingAnswers):
        monkeypatch.setattr(http, kind.__name__, lambda make, kind=kind: kind(make, slow.clock))
    made: list[Any] = []
    document, curve = world.node.stats_document, world.node.curves.read
    monkeypatch.setattr(world.node, "stats_document", lambda: _noted(made, slow, document()))
    if path.startswith(("/plan", "/curves")):
        monkeypatch.setattr(world.node.curves, "read", lambda *names: _noted(made, slow, curve(*names)))
    if path.startswith("/families"):
        history = world.node.families.history
        monkeypatch.setattr(history, "newest", lambda count: _noted(made, slow, []))
    async with http_of(world.node) as asked:
        before = len(made)
        replies = await asyncio.gather(*(asked.get(path) for _ in range(30)))
    assert {reply.status for reply in replies} == {200}
    assert len({reply.body for reply in replies}) == 1
    assert len(made) == before + 1


def _noted(made: list[Any], slow: Slow, value: Any) -> Any:
    made.append(value)
    slow.now_s += MAKING_S
    return value


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_null(value: float) -> None:
    assert json.loads(encoded({"a": [value, 1.0]}), parse_constant=_refuse) == {"a": [None, 1.0]}


def _refuse(word: str) -> None:
    raise AssertionError(f"{word} is no JSON")
