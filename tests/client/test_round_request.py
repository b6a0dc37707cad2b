"""What a request says of its round: read strictly, with an error that says what to do."""

import json
import re
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvservice.client import PartKind
from kvservice.client.reuse.selectors import parse_selector
from kvservice.client.round_request import (
    Mistake,
    Plain,
    Reuse,
    RoundRequest,
    RoundRequestError,
)
from kvservice.model.errors import InvalidInputError

PRIVATE, SHARED, SYSTEM, TOOL = PartKind.PRIVATE, PartKind.SHARED, PartKind.SYSTEM, PartKind.TOOL
SEGMENTS: list[Any] = [["system", 4], ["private", 12], ["shared", 6], ["shared", 5], ["private", 3]]

ratios = st.integers(0, 10**6).map(lambda millionths: millionths / 10**6)
modes = st.one_of(
    st.sampled_from(Plain),
    st.builds(lambda ratio: Reuse("hkvd", ratio), ratios),
    st.builds(lambda ratio, rows: Reuse("blocks", ratio, rows), ratios, st.integers(1, 1 << 20)),
    st.builds(lambda ratio, rows: Reuse("mixed", ratio, rows), ratios, st.integers(1, 1 << 20)),
    st.builds(lambda rows: Reuse("head", rows=rows), st.integers(0, 1 << 20)),
    st.just(Reuse("none")),
)
requests = st.builds(
    RoundRequest,
    st.lists(st.tuples(st.sampled_from(PartKind), st.integers(1, 999)), min_size=1, max_size=9).map(tuple),
    st.dictionaries(st.sampled_from(PartKind), modes),
    st.just("r7"),
    st.text(min_size=1, max_size=9),
    st.integers(0, 64),
)


def read(tokens: int = 30, **ours: Any) -> RoundRequest:
    found = RoundRequest.from_params({"kvservice": {"segments": SEGMENTS, **ours}}, tokens)
    assert found is not None
    return found


@given(requests)
def test_what_is_written_is_read(request: RoundRequest) -> None:
    params = json.loads(json.dumps(request.to_params()))
    assert RoundRequest.from_params(params, request.tokens) == request


@given(modes)
def test_selectors_have_the_text_that_refreshing_reads(mode: Any) -> None:
    if isinstance(mode, Reuse):
        assert str(parse_selector(mode.text)) == mode.text


def test_segments_alone_are_enough_and_exact() -> None:
    request = read()
    assert request.boundaries == (4, 16, 22, 27)
    assert {request.mode(kind) for kind in PartKind} == {Plain.EXACT}
    assert (request.round, request.agent, request.expect, request.off_from) == ("", "", 0, None)


def test_modes_are_by_kind() -> None:
    request = read(
        round="r7",
        agent="ada",
        expect=4,
        modes={"shared": {"mode": "reuse", "selector": "hkvd", "ratio": 0.05}, "tool": "off", "system": "exact"},
    )
    assert request.mode(SHARED) == Reuse("hkvd", 0.05)
    assert request.mode(TOOL) is Plain.OFF
    assert request.mode(SYSTEM) is request.mode(PRIVATE) is Plain.EXACT
    assert request.off_from is None, "no tool segment is there"
    assert read(modes={"private": "off"}).off_from == 4
    assert read(modes={"private": {"mode": "off"}, "system": "off"}).off_from == 0
    assert read(modes={"shared": {"selector": "none"}}).mode(SHARED) == Reuse("none")


@pytest.mark.parametrize("params", [None, {}, {"other_connector": {"x": 1}}, {3: 4}, "text", ["kvservice"]])
def test_what_is_not_for_us_says_nothing(params: object) -> None:
    assert RoundRequest.from_params(params, 30) is None


WRONG: list[tuple[dict[str, Any], Mistake, str]] = [
    ({"rounds": "r7"}, Mistake.UNKNOWN_NAME, "unknown name 'rounds'; did you mean 'round'?"),
    ({"segments": None}, Mistake.SEGMENT, 'give segments as [["private", 120]'),
    ({"segments": []}, Mistake.SEGMENT, "0 segments"),
    ({"segments": [["private", 1]] * 1025}, Mistake.SEGMENT, "1025 segments"),
    ({"segments": [["private", 12], 5]}, Mistake.SEGMENT, "segment 1 is 5"),
    ({"segments": [["private", True]]}, Mistake.SEGMENT, "segment 0 is ['private', True]"),
    ({"segments": [["private", 30.0]]}, Mistake.SEGMENT, "its number of tokens"),
    ({"segments": [["privat", 30]]}, Mistake.SEGMENT, "did you mean 'private'?"),
    ({"segments": [[["private"], 30]]}, Mistake.SEGMENT, "unknown kind ['private']"),
    ({"segments": [["private", 31], ["shared", -1]]}, Mistake.LENGTHS, "leave out empty ones"),
    ({"segments": [["private", 0], ["shared", 30]]}, Mistake.LENGTHS, "segment of 0 tokens"),
    ({"segments": [["private", 29]]}, Mistake.LENGTHS, "segments of 29 tokens for a prompt of 30; count them in"),
    ({"segments": [["private", 1 << 62]]}, Mistake.LENGTHS, "give 1 to 1048576"),
    ({"round": "r7"}, Mistake.NAME, "give both, or neither"),
    ({"agent": "ada"}, Mistake.NAME, "give both, or neither"),
    ({"round": 7, "agent": "ada"}, Mistake.NAME, "write it in quotes"),
    ({"round": "r" * 129, "agent": "ada"}, Mistake.NAME, "more than 128 characters"),
    ({"expect": 3}, Mistake.NAME, "and the round's name"),
    ({"round": "r", "agent": "a", "expect": 1025}, Mistake.NAME, "1 to 1024 prompts"),
    ({"round": "r", "agent": "a", "expect": "3"}, Mistake.NAME, "without quotes"),
    ({"modes": "reuse"}, Mistake.NOT_AN_OBJECT, "modes by kind"),
    ({"modes": {"share": "off"}}, Mistake.MODE, "did you mean 'shared'?"),
    ({"modes": {"shared": "exakt"}}, Mistake.MODE, "did you mean 'exact'?"),
    ({"modes": {"shared": None}}, Mistake.MODE, "unknown mode None"),
    ({"modes": {"shared": {"mode": "off", "ratio": 1}}}, Mistake.MODE, "takes no 'ratio'"),
    ({"modes": {"shared": "reuse"}}, Mistake.SELECTOR, "needs a selector"),
    ({"modes": {"shared": {"selector": "hkdv", "ratio": 0.1}}}, Mistake.SELECTOR, "did you mean 'hkvd'?"),
    ({"modes": {"shared": {"selector": "hkvd"}}}, Mistake.SELECTOR, "takes ratio"),
    ({"modes": {"shared": {"selector": "none", "ratio": 0.1}}}, Mistake.SELECTOR, "takes nothing else"),
    ({"modes": {"shared": {"selector": "hkvd", "ratio": 5}}}, Mistake.SELECTOR, "0.05 is five of a hundred"),
    ({"modes": {"shared": {"selector": "hkvd", "ratio": 10**400}}}, Mistake.SELECTOR, "not within 0 to 1"),
    ({"modes": {"shared": {"selector": "hkvd", "ratio": float("nan")}}}, Mistake.SELECTOR, "not within 0 to 1"),
    ({"modes": {"shared": {"selector": "hkvd", "ratio": 0.12345678}}}, Mistake.SELECTOR, "round it"),
    ({"modes": {"shared": {"selector": "hkvd", "ratio": "0.1"}}}, Mistake.SELECTOR, "without quotes"),
    ({"modes": {"shared": {"selector": "hkvd", "ratios": 0.1}}}, Mistake.SELECTOR, "did you mean 'ratio'?"),
    ({"modes": {"shared": {"selector": "blocks", "ratio": 0.1, "rows": 0}}}, Mistake.SELECTOR, "give 1 to"),
    ({"modes": {"shared": {"selector": "head", "rows": True}}}, Mistake.SELECTOR, "no whole number"),
]


@pytest.mark.parametrize(("ours", "mistake", "text"), WRONG)
def test_every_mistake_is_named_and_says_what_to_do(ours: dict[str, Any], mistake: Mistake, text: str) -> None:
    with pytest.raises(RoundRequestError, match=re.escape(text)) as caught:
        read(**ours)
    assert caught.value.mistake is mistake
    assert isinstance(caught.value, InvalidInputError)
    assert str(caught.value).startswith("kvservice: ")
    assert caught.value.may_reuse == (mistake in (Mistake.SEGMENT, Mistake.LENGTHS, Mistake.NAME))


@pytest.mark.parametrize("ours", [{"segments": [["private", 29]]}, {"segments": 5}, {"round": "r7"}, {"expect": -1}])
def test_where_something_is_off_no_mistake_lets_it_be_stored(ours: dict[str, Any]) -> None:
    with pytest.raises(RoundRequestError) as caught:
        read(**({"modes": {"private": "off"}} | ours))
    assert not caught.value.may_reuse


def test_a_misspelt_key_and_a_value_that_is_no_object_are_mistakes() -> None:
    with pytest.raises(RoundRequestError, match="write 'kvservice'"):
        RoundRequest.from_params({"kvservise": {}}, 30)
    with pytest.raises(RoundRequestError, match="is no object") as caught:
        RoundRequest.from_params({"kvservice": [1]}, 30)
    assert not caught.value.may_reuse


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists, max_leaves=5))
def test_nothing_but_its_own_error_comes_out(value: Any) -> None:
    for name in ("round", "agent", "expect", "segments", "modes"):
        for ours in ({name: value}, {name: [[value, 1], ["private", value]]}, {name: {"shared": {"selector": value}}}):
            try:
                RoundRequest.from_params({"kvservice": {"segments": SEGMENTS, **ours}}, 30)
            except RoundRequestError:
                continue


@pytest.mark.parametrize("module", ["round_request", "chat", "token_cuts", "outputs"])
def test_saying_where_segments_begin_needs_no_torch(module: str) -> None:
    script = (
        f"import sys, kvservice.client.{module}; print({{'torch', 'numba', 'transformers', 'grpc'}} & {{*sys.modules}})"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
