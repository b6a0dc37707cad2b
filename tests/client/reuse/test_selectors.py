"""Selectors: which rows they pick, and the one text each has."""

from decimal import Decimal

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from kvservice.client.reuse.rows import Span
from kvservice.client.reuse.selectors import (
    Selector,
    blocks,
    exact,
    head,
    hkvd,
    mixed,
    none,
    parse_selector,
    share_of,
)
from kvservice.model.errors import InvalidInputError
from tests.client.reuse.builders import candidate

ratios = st.decimals(0, 1, places=3)
selectors = st.one_of(
    st.just(none()),
    st.just(exact()),
    st.integers(0, 300).map(head),
    ratios.map(lambda ratio: hkvd(float(ratio))),
    st.tuples(ratios, st.integers(1, 64)).map(lambda pair: blocks(float(pair[0]), pair[1])),
    st.tuples(ratios, st.integers(1, 64)).map(lambda pair: mixed(float(pair[0]), pair[1])),
)


@st.composite
def candidates(draw: st.DrawFn) -> list[Span]:
    spans: list[Span] = []
    for gap, tokens in draw(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 12)), max_size=5)):
        spans.append(candidate((spans[-1].end if spans else 0) + gap, tokens))
    return spans


def positions_of(spans: list[Span]) -> list[int]:
    return [position for span in spans for position in range(span.start, span.end)]


def deviations_of(spans: list[Span], seed: int, distinct: int = 5) -> Tensor:
    # Few distinct values, so that ties are the rule.
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(0, distinct, (len(positions_of(spans)),), generator=draw).float()


@given(selectors, candidates(), st.integers(0, 99))
def test_picks_are_candidates_rise_and_repeat(selector: Selector, spans: list[Span], seed: int) -> None:
    deviation = deviations_of(spans, seed)
    picked = selector.pick(spans, deviation).tolist()
    assert picked == sorted(set(picked))
    assert set(picked) <= set(positions_of(spans))
    assert picked == selector.pick(spans, deviation.clone()).tolist()


@given(selectors, candidates())
def test_picks_without_deviation_need_none(selector: Selector, spans: list[Span]) -> None:
    assume(not selector.needs_deviation)
    picked = selector.pick(spans, None)
    assert picked.dtype == torch.int64
    assert picked.tolist() == selector.pick(spans, deviations_of(spans, 0)).tolist()


@given(ratios, candidates(), st.integers(0, 99))
def test_hkvd_picks_its_share_and_nothing_left_deviates_more(ratio: Decimal, spans: list[Span], seed: int) -> None:
    deviation = deviations_of(spans, seed)
    picked = hkvd(float(ratio)).pick(spans, deviation).tolist()
    assert len(picked) == share_of(ratio, len(deviation))
    order = sorted(zip((-deviation).tolist(), positions_of(spans), strict=True))
    assert picked == sorted(position for _, position in order[: len(picked)])


@given(candidates(), st.integers(0, 99), st.integers(1, 99))
def test_hkvd_of_a_larger_ratio_picks_at_least_the_same(spans: list[Span], seed: int, percent: int) -> None:
    deviation = deviations_of(spans, seed)
    few = hkvd(percent / 100).pick(spans, deviation).tolist()
    more = hkvd((percent + 1) / 100).pick(spans, deviation).tolist()
    assert set(few) <= set(more)


@given(candidates(), st.integers(0, 99), st.integers(1, 5))
def test_blocks_picks_whole_blocks_counted_from_each_segment(spans: list[Span], seed: int, size: int) -> None:
    picked = set(blocks(0.5, size).pick(spans, deviations_of(spans, seed)).tolist())
    for span in spans:
        for start in range(span.start, span.end, size):
            block = set(range(start, min(start + size, span.end)))
            assert block <= picked or not block & picked


def test_blocks_compares_means_so_a_short_last_block_can_win() -> None:
    deviation = torch.tensor([1.0, 1.0, 1.0, 1.0, 3.0])
    assert blocks(0.4, 4).pick([candidate(10, 5)], deviation).tolist() == [14]


def test_hkvd_breaks_ties_by_lower_position() -> None:
    assert hkvd(0.5).pick([candidate(3, 4)], torch.ones(4)).tolist() == [3, 4]


def test_hkvd_picks_rows_that_deviate_by_nan() -> None:
    deviation = torch.tensor([0.0, 9.0, torch.nan, 1.0])
    assert hkvd(0.25).pick([candidate(0, 4)], deviation).tolist() == [2]


def test_hkvd_of_a_tiny_ratio_picks_one_row_and_of_nought_none() -> None:
    spans, deviation = [candidate(0, 4)], torch.arange(4.0)
    assert hkvd(0.001).pick(spans, deviation).tolist() == [3]
    assert hkvd(0).pick(spans, None).tolist() == []


def test_hkvd_share_is_counted_in_decimals() -> None:
    # 0.29 * 100 is 28.999999999999996 in binary.
    assert hkvd(0.29).pick([candidate(0, 100)], torch.rand(100)).numel() == 29


def test_hkvd_without_enough_deviations_says_so() -> None:
    for deviation in (None, torch.zeros(3)):
        with pytest.raises(InvalidInputError, match="one deviation for each of 4"):
            hkvd(0.5).pick([candidate(0, 4)], deviation)
        with pytest.raises(InvalidInputError, match="one deviation for each of 2"):
            blocks(0.5, 2).pick([candidate(0, 4)], deviation)


@given(ratios, candidates(), st.integers(0, 99), st.integers(1, 5))
def test_mixed_picks_heads_and_behind_them_what_deviates_most(
    ratio: Decimal, spans: list[Span], seed: int, rows: int
) -> None:
    deviation = deviations_of(spans, seed)
    picked = mixed(float(ratio), rows).pick(spans, deviation).tolist()
    heads = head(rows).pick(spans, None).tolist()
    rest = [pair for pair in zip((-deviation).tolist(), positions_of(spans), strict=True) if pair[1] not in heads]
    others = sorted(rest)[: share_of(ratio, len(deviation))]
    assert picked == sorted([*heads, *(position for _, position in others)])


def test_mixed_breaks_ties_by_lower_position_and_needs_its_deviations() -> None:
    assert mixed(0.25, 1).pick([candidate(3, 4)], torch.ones(4)).tolist() == [3, 4]
    with pytest.raises(InvalidInputError, match="one deviation for each of 4"):
        mixed(0.25, 1).pick([candidate(3, 4)], torch.ones(3))


def test_head_picks_the_first_rows_of_every_segment() -> None:
    assert head(2).pick([candidate(0, 1), candidate(1, 3), candidate(8, 4)], None).tolist() == [0, 1, 2, 8, 9]


@given(selectors)
def test_text_parses_back_to_the_selector(selector: Selector) -> None:
    assert parse_selector(str(selector)) == selector
    assert str(parse_selector(str(selector))) == str(selector)


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("hkvd:0.02", "hkvd:0.02"),
        ("hkvd:0.020", "hkvd:0.02"),
        ("hkvd:1.0", "hkvd:1"),
        ("hkvd:0.0", "hkvd:0"),
        ("hkvd:0.000001", "hkvd:0.000001"),
        ("blocks:0.10:08", "blocks:0.1:8"),
        ("mixed:0.010:04", "mixed:0.01:4"),
        ("head:016", "head:16"),
        ("none", "none"),
        ("exact", "exact"),
    ],
)
def test_each_meaning_has_one_text(text: str, canonical: str) -> None:
    assert str(parse_selector(text)) == canonical


@pytest.mark.parametrize(
    "text",
    [
        *("", "hkvd", "hkvd:", "hkvd:2", "hkvd:-0.1", "hkvd:nan", "hkvd:1e-2", "hkvd:0.02 ", "HKVD:0.02"),
        *(
            "hkvd:0.1234567",
            "hkvd:0.1\n",
            "hkvd:\u0660.\u0665",
            "blocks:0.1",
            "blocks:0.1:0",
            "mixed:0.1",
            "mixed:0.1:0",
        ),
        *("none:1", "head", "head:-1", "head:1.5"),
    ],
)
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(InvalidInputError):
        parse_selector(text)


@pytest.mark.parametrize("ratio", [-0.1, 1.1, float("nan"), float("inf"), 1 / 3])
def test_ratio_without_a_short_text_is_refused(ratio: float) -> None:
    with pytest.raises(InvalidInputError):
        hkvd(ratio)
