"""Selectors by kind of segment: one text per meaning, and each kind's own rows."""

from decimal import Decimal

import pytest
import torch

from kvservice.client.reuse.kinds import ByKind, parse_kinds, raised
from kvservice.client.reuse.rows import RowClass, Span
from kvservice.client.reuse.selectors import Head, Hkvd, Nothing
from kvservice.client.rounds import PartKind, ReusePolicy, RoundPrompt
from kvservice.model.errors import InvalidInputError
from kvservice.model.identity import Namespace

NAMESPACE = Namespace(b"n" * 32)
SHARED, TOOL, SYSTEM, PRIVATE = PartKind.SHARED, PartKind.TOOL, PartKind.SYSTEM, PartKind.PRIVATE
MIXED = {TOOL: "head:2", SHARED: "hkvd:0.5"}


def test_one_selector_for_all_has_its_own_text_and_several_are_named_in_order() -> None:
    assert ReusePolicy.by_kind({SHARED: "hkvd:0.02", TOOL: "hkvd:0.02"}).selector == "hkvd:0.02"
    policy = ReusePolicy.by_kind(MIXED)
    assert (policy.selector, policy.kinds) == ("shared=hkvd:0.5+tool=head:2", frozenset(MIXED))
    assert parse_kinds(policy.selector) == {SHARED: Hkvd(Decimal("0.5")), TOOL: Head(2)}
    assert policy.provenance == "shared=hkvd:0.5+tool=head:2/check=1"


@pytest.mark.parametrize("text", ["private=none", "shared=hkvd", "shared=none+tools=none", ""])
def test_texts_that_name_no_selectors_are_refused(text: str) -> None:
    with pytest.raises(InvalidInputError, match=r"use|unknown"):
        parse_kinds(text)


def test_private_parts_are_of_no_policy() -> None:
    with pytest.raises(InvalidInputError, match="one agent's own"):
        ReusePolicy.by_kind({PRIVATE: "none"})


def test_instructions_at_the_head_are_exact_and_tools_behind_a_history_may_move() -> None:
    parts = [(SYSTEM, [1, 2]), (TOOL, [3]), (PRIVATE, [4, 5]), (TOOL, [6]), (SHARED, [7])]
    prompt = RoundPrompt.from_parts(NAMESPACE, parts, policy=ReusePolicy.by_kind({TOOL: "none", SYSTEM: "none"}))
    assert prompt.first_shared == 3
    assert [prompt.may_shift(index) for index in range(5)] == [False, False, False, True, False]


def test_each_kind_picks_among_its_own_rows() -> None:
    parts = [(PRIVATE, [1]), (SHARED, [2] * 4), (TOOL, [3] * 3), (SHARED, [4] * 2)]
    selector = ByKind.of(RoundPrompt.from_parts(NAMESPACE, parts, policy=ReusePolicy.by_kind(MIXED)))
    spans = [Span(1, 4, RowClass.CANDIDATE), Span(5, 3, RowClass.CANDIDATE), Span(8, 2, RowClass.CANDIDATE)]
    deviation = torch.tensor([1.0, 9, 2, 3, 99, 99, 99, 8, 7])
    assert selector.needs_deviation
    assert str(selector) == "shared=hkvd:0.5+tool=head:2"
    assert selector.pick(spans, deviation).tolist() == [2, 5, 6, 8, 9]


def test_spans_cut_at_either_end_keep_their_kind() -> None:
    parts = [(PRIVATE, [1]), (SHARED, [2] * 4), (TOOL, [3] * 3)]
    policy = ReusePolicy.by_kind({SHARED: "none", TOOL: "head:1"})
    selector = ByKind.of(RoundPrompt.from_parts(NAMESPACE, parts, policy=policy), end=7)
    assert not selector.needs_deviation
    spans = [Span(3, 2, RowClass.CANDIDATE), Span(5, 2, RowClass.CANDIDATE)]
    assert selector.pick(spans, None).tolist() == [5]


@pytest.mark.parametrize(
    ("selectors", "expected"),
    [
        ({SHARED: "hkvd:0.02"}, "hkvd:0.15"),
        ({SHARED: "hkvd:0.1"}, "hkvd:0.3"),
        ({SHARED: "hkvd:0.5"}, "hkvd:1"),
        ({SHARED: "blocks:0.1:32", TOOL: "head:8"}, "shared=blocks:0.3:32+tool=head:24"),
        ({SHARED: "none"}, None),
        ({SHARED: "hkvd:0.1", TOOL: "none"}, None),
    ],
)
def test_the_higher_ratio_is_a_policy_of_its_own(selectors: dict[PartKind, str], expected: str | None) -> None:
    policy = ReusePolicy.by_kind(selectors)
    found = raised(policy)
    assert (found and found.selector) == expected
    assert found is None or found.kinds == policy.kinds
    assert Nothing() == parse_kinds("none")[SHARED]
