"""Row classes of a prompt."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvservice.client.reuse.rows import PromptRows, RowClass, Span, classify
from kvservice.model.errors import InvalidInputError
from tests.client.reuse.builders import candidate, exactly

LOCAL, EXACT, CANDIDATE, MUST = RowClass


def letters(rows: PromptRows) -> str:
    return "".join("LECM"[value] for value in rows.classes.tolist())


def test_what_no_span_covers_must_be_computed() -> None:
    assert letters(classify(9, [exactly(0, 2), candidate(3, 4)])) == "EEMCCCCMM"


def test_span_partly_below_local_is_cut() -> None:
    rows = classify(9, [candidate(1, 4), exactly(5, 2)], local=3)
    assert letters(rows) == "LLLCCEEMM"
    assert rows.candidates == (candidate(3, 2),)


def test_span_wholly_below_local_is_no_candidate() -> None:
    assert classify(6, [candidate(0, 3)], local=3).candidates == ()


def test_neighbouring_candidate_spans_stay_apart() -> None:
    assert classify(6, [candidate(0, 3), candidate(3, 3)]).candidates == (candidate(0, 3), candidate(3, 3))


def test_positions_and_counts_agree_by_class() -> None:
    rows = classify(9, [exactly(2, 2), candidate(5, 3)], local=1)
    assert rows.positions(MUST).tolist() == [1, 4, 8]
    assert rows.positions(CANDIDATE, MUST).tolist() == [1, 4, 5, 6, 7, 8]
    assert rows.counts() == {LOCAL: 1, EXACT: 2, CANDIDATE: 3, MUST: 3}


def test_without_candidates_keeps_exact_and_local_rows() -> None:
    assert letters(classify(7, [exactly(1, 2), candidate(4, 2)], local=1).without_candidates()) == "LEEMMMM"


@pytest.mark.parametrize(
    ("tokens", "spans", "local"),
    [
        (4, [candidate(0, 5)], 0),
        (4, [candidate(-1, 2)], 0),
        (4, [candidate(1, 0)], 0),
        (4, [candidate(0, 3), candidate(2, 2)], 0),
        (4, [candidate(2, 2), candidate(0, 2)], 0),
        (4, [Span(0, 2, MUST)], 0),
        (4, [Span(0, 2, LOCAL)], 0),
        (4, [], 5),
        (4, [], -1),
    ],
)
def test_spans_that_cannot_be_are_refused(tokens: int, spans: list[Span], local: int) -> None:
    with pytest.raises(InvalidInputError):
        classify(tokens, spans, local)


@given(st.data())
def test_every_row_has_one_class_and_candidate_spans_are_the_candidates(data: st.DataObject) -> None:
    spans, behind = [], 0
    for gap, length, is_exact in data.draw(
        st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6), st.booleans()), max_size=5)
    ):
        spans.append(Span(behind + gap, length, EXACT if is_exact else CANDIDATE))
        behind = spans[-1].end
    tokens = behind + data.draw(st.integers(0, 4))
    local = data.draw(st.integers(0, tokens))
    rows = classify(tokens, spans, local)
    assert sum(rows.counts().values()) == tokens
    assert rows.positions(LOCAL).tolist() == list(range(local))
    covered = [position for span in rows.candidates for position in range(span.start, span.end)]
    assert rows.positions(CANDIDATE).tolist() == covered
