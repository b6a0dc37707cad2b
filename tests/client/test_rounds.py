"""Prompts in segments, and the keys that answer them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvservice.client import PartKind, ReusePolicy, RoundPrompt
from kvservice.client.rounds import CHUNK_TOKENS, split_tokens
from kvservice.model.errors import InvalidInputError, TokenCountError
from kvservice.model.segment import EXACT
from tests.client.builders import POLICY, SEPARATOR, make_identity, make_prompt, make_tokens

IDENTITY = make_identity()
NAMESPACE = IDENTITY.namespace()
PRIVATE, SHARED, SYSTEM, TOOL = PartKind.PRIVATE, PartKind.SHARED, PartKind.SYSTEM, PartKind.TOOL


def test_the_model_never_sees_a_separator() -> None:
    parts = [make_tokens(5, 1), make_tokens(3, 2), make_tokens(4, 3)]
    joined = [*parts[0], *SEPARATOR, *parts[1], *SEPARATOR, *parts[2]]
    prompt = RoundPrompt.split_at(NAMESPACE, joined, SEPARATOR)
    assert prompt.tokens == (*parts[0], *parts[1], *parts[2])
    assert prompt.boundaries == (5, 8, 12)
    assert [segment.kind for segment in prompt.segments] == [PRIVATE, SHARED, SHARED]


def test_kinds_count_empty_parts_which_are_left_out() -> None:
    joined = [*SEPARATOR, *make_tokens(3), *SEPARATOR, *SEPARATOR, 5]
    prompt = RoundPrompt.split_at(NAMESPACE, joined, SEPARATOR, [SYSTEM, PRIVATE, SHARED, TOOL])
    assert [(segment.kind, len(segment.tokens)) for segment in prompt.segments] == [(PRIVATE, 3), (TOOL, 1)]
    with pytest.raises(TokenCountError, match="2 kinds for 4 parts"):
        RoundPrompt.split_at(NAMESPACE, joined, SEPARATOR, [PRIVATE, SHARED])


def test_part_of_a_separator_is_content() -> None:
    assert split_tokens([7, 1, 7, 9, 9, 7], SEPARATOR) == [[7, 1], [9, 7]]
    assert split_tokens([7, 7, 9], SEPARATOR) == [[7], []]
    with pytest.raises(InvalidInputError, match="empty separator"):
        split_tokens([1], [])


@given(st.lists(st.lists(st.integers(10, 99), max_size=5), min_size=1, max_size=5))
def test_splitting_undoes_joining(parts: list[list[int]]) -> None:
    joined = [token for part in parts for token in (*SEPARATOR, *part)][len(SEPARATOR) :]
    assert split_tokens(joined, SEPARATOR) == parts


def test_lengths_must_make_the_prompt() -> None:
    prompt = RoundPrompt.from_lengths(NAMESPACE, range(1, 11), [(SYSTEM, 4), (SHARED, 0), (SHARED, 6)])
    assert prompt.boundaries == (4, 10)
    for lengths in ([(SHARED, 4), (SHARED, 5)], [(SHARED, 12), (SHARED, -2)]):
        with pytest.raises(TokenCountError):
            RoundPrompt.from_lengths(NAMESPACE, range(10), lengths)


def test_a_prompt_has_tokens() -> None:
    with pytest.raises(InvalidInputError, match="at least one token"):
        RoundPrompt.from_parts(NAMESPACE, [(SHARED, [])])
    with pytest.raises(InvalidInputError, match="token ids"):
        RoundPrompt.from_parts(NAMESPACE, [(SHARED, [-1])])


def test_a_grown_history_finds_its_old_chunks() -> None:
    history = make_tokens(2 * CHUNK_TOKENS + 40)
    before = RoundPrompt.from_parts(NAMESPACE, [(SYSTEM, [1, 2]), (PRIVATE, history)])
    after = RoundPrompt.from_parts(NAMESPACE, [(SYSTEM, [1, 2]), (PRIVATE, history + make_tokens(300, 5))])
    assert [len(segment.tokens) for segment in before.segments] == [2, CHUNK_TOKENS, CHUNK_TOKENS, 40]
    shared = [before.key(index) for index in range(3)]
    assert [after.key(index) for index in range(3)] == shared
    assert after.key(3) != before.key(3)


def test_chunks_are_counted_from_the_part() -> None:
    history = make_tokens(CHUNK_TOKENS)
    at_front = RoundPrompt.from_parts(NAMESPACE, [(PRIVATE, history)])
    behind = RoundPrompt.from_parts(NAMESPACE, [(SHARED, [1, 2, 3]), (PRIVATE, history)])
    assert at_front.segments[0].id == behind.segments[1].id


def test_shared_parts_are_never_cut() -> None:
    prompt = RoundPrompt.from_parts(NAMESPACE, [(SHARED, make_tokens(3 * CHUNK_TOKENS))])
    assert len(prompt.segments) == 1


def test_exact_prompts_accept_exact_keys_only() -> None:
    prompt = make_prompt(IDENTITY)
    for index in range(len(prompt.segments)):
        query = prompt.query(index)
        assert query.accepted == (prompt.key(index),)
        assert not query.may_shift
        assert prompt.provenance(index, is_refreshed=False) == EXACT


def test_from_the_first_shared_segment_on_both_chains_are_accepted() -> None:
    prompt = RoundPrompt.from_parts(
        NAMESPACE,
        [(SYSTEM, [1]), (PRIVATE, [2]), (SHARED, [3]), (PRIVATE, [4]), (TOOL, [5])],
        policy=ReusePolicy("hkvd:0.02", 1, affinity_min=2),
    )
    queries = [prompt.query(index) for index in range(5)]
    assert [len(query.accepted) for query in queries] == [1, 1, 2, 2, 2]
    assert [query.may_shift for query in queries] == [False, False, True, False, True]
    assert [query.affinity_min for query in queries] == [0, 0, 2, 0, 2]
    exact = RoundPrompt(NAMESPACE, prompt.segments)
    assert [query.accepted[0] for query in queries] == [exact.key(index) for index in range(5)]


def test_downstream_of_a_refreshed_segment_everything_is_refreshed() -> None:
    prompt = make_prompt(IDENTITY, private=4, shared=(3, 3), policy=POLICY)
    other = make_prompt(IDENTITY, private=4, shared=(3, 3), policy=ReusePolicy("hkvd:0.05", 1))
    assert prompt.first_shared == 1
    assert prompt.key(0, is_refreshed=True) == prompt.key(0) == other.key(0, is_refreshed=True)
    for index in (1, 2):
        assert prompt.provenance(index, is_refreshed=True) == "hkvd:0.02/check=1"
        assert len({prompt.key(index), prompt.key(index, is_refreshed=True), other.key(index, is_refreshed=True)}) == 3


def test_policies_are_checked() -> None:
    for arguments in (("", 1), ("hkvd:0.02", -1), ("hkvd:0.02", 1, -1)):
        with pytest.raises(InvalidInputError):
            ReusePolicy(*arguments)
