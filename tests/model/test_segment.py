"""Segment and context ids: content decides, nothing else does."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvservice.model.errors import InvalidInputError
from kvservice.model.identity import Namespace
from kvservice.model.segment import PRECEDING_MAX, affinity, root_context, segment_id, segment_mark

NAMESPACE = Namespace(b"n" * 32)
tokens = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=8)


@given(tokens, tokens)
def test_ids_are_equal_iff_tokens_are(one: list[int], other: list[int]) -> None:
    assert (segment_id(NAMESPACE, one) == segment_id(NAMESPACE, other)) == (one == other)


def test_ids_are_pinned_for_ever() -> None:
    """Stored caches outlive the program: this digest may only change with the format version."""
    assert segment_id(NAMESPACE, [1, 2, 3]).hex() == PINNED_SEGMENT
    key = root_context(NAMESPACE).extend(segment_id(NAMESPACE, [9]), 1).cache_key(segment_id(NAMESPACE, [1, 2, 3]))
    assert key.context.hex() == PINNED_CONTEXT


PINNED_SEGMENT = "fa1ca6228c18b42afdf580a9f8eb010508bd3f84fae3925ba14792df62c60c4d"
PINNED_CONTEXT = "5e106528b897302089c4f078df9cf56be1dbd7ec9d86079f6d45047570bb4b8e"


@given(st.binary(max_size=8), st.binary(max_size=8), tokens)
def test_extras_decide_every_key_behind_them(one: bytes, other: bytes, own: list[int]) -> None:
    mine = segment_id(NAMESPACE, own)
    first, second = root_context(NAMESPACE, one), root_context(NAMESPACE, other)
    assert (first.cache_key(mine) == second.cache_key(mine)) == (one == other)
    later = first.extend(mine, len(own)), second.extend(mine, len(own))
    assert (later[0].cache_key(mine) == later[1].cache_key(mine)) == (one == other)


def test_no_extra_leaves_the_ids_of_before() -> None:
    assert root_context(NAMESPACE, b"") == root_context(NAMESPACE)
    segment = segment_id(NAMESPACE, [1, 2, 3])
    key = root_context(NAMESPACE, b"").extend(segment_id(NAMESPACE, [9]), 1).cache_key(segment)
    assert key.context.hex() == PINNED_CONTEXT


def test_an_extra_is_pinned_for_ever_and_moves_no_position() -> None:
    context = root_context(NAMESPACE, b"adapter")
    assert context.cache_key(segment_id(NAMESPACE, [1, 2, 3])).context.hex() == PINNED_EXTRA_CONTEXT
    assert (context.position, context.marks) == (0, ())


PINNED_EXTRA_CONTEXT = "988dd2422793c5f35c5758b60abcc620c6b82d90d69ae96ce729cc29b3e8d9cd"


def test_namespaces_do_not_share_segments() -> None:
    assert segment_id(NAMESPACE, [1]) != segment_id(Namespace(b"m" * 32), [1])


@pytest.mark.parametrize("bad", [[], [-1], [2**32], ["a"]])
def test_bad_tokens_are_refused(bad: list[int]) -> None:
    with pytest.raises(InvalidInputError):
        segment_id(NAMESPACE, bad)


@given(tokens, tokens, tokens)
def test_context_depends_on_order_and_content(a: list[int], b: list[int], own: list[int]) -> None:
    one, two, mine = (segment_id(NAMESPACE, part) for part in (a, b, own))
    root = root_context(NAMESPACE)
    forward = root.extend(one, len(a)).extend(two, len(b))
    backward = root.extend(two, len(b)).extend(one, len(a))
    assert (forward.cache_key(mine) == backward.cache_key(mine)) == (a == b)
    assert forward.position == len(a) + len(b)


def test_refreshed_provenance_never_shares_a_key_with_exact() -> None:
    segment, root = segment_id(NAMESPACE, [1, 2]), root_context(NAMESPACE)
    exact, refreshed = root.extend(segment, 2), root.extend(segment, 2, "hkvd:0.02/check=1")
    assert root.cache_key(segment) != root.cache_key(segment, "hkvd:0.02/check=1")
    assert exact.cache_key(segment) != refreshed.cache_key(segment)


def test_affinity_counts_agreeing_segments_from_the_nearest() -> None:
    a, b, c = (segment_mark(segment_id(NAMESPACE, [value])) for value in (1, 2, 3))
    assert affinity((a, b, c), (a, b, c)) == 3
    assert affinity((a, b), (a, c)) == 1
    assert affinity((b, a), (a, b)) == 0
    assert affinity((), (a,)) == 0


def test_context_remembers_a_bounded_number_of_segments() -> None:
    context = root_context(NAMESPACE)
    for value in range(PRECEDING_MAX + 5):
        context = context.extend(segment_id(NAMESPACE, [value]), 1)
    assert len(context.marks) == PRECEDING_MAX
    assert context.marks[0] == segment_mark(segment_id(NAMESPACE, [PRECEDING_MAX + 4]))
