"""Chunks and their keys: equal prefixes have equal keys, everything before decides, cuts lie on blocks."""

import copy
import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvservice.client.connectors.vllm.chunks import Chunk, ChunkChain, Item
from kvservice.model.errors import InvalidInputError
from kvservice.model.identity import Namespace
from kvservice.model.segment import PRECEDING_MAX, root_context, segment_id, segment_mark

BLOCK = 4
ONE, TWO = Namespace(b"1" * 32), Namespace(b"2" * 32)
prompts = st.lists(st.integers(0, 3), max_size=60)
positions = st.lists(st.integers(0, 80), max_size=6)


def make_chain(
    chunk_blocks: int = 2, *, namespaces: Sequence[Namespace] = (ONE,), extra: bytes = b"", items: Sequence[Item] = ()
) -> ChunkChain:
    return ChunkChain(namespaces, chunk_blocks * BLOCK, BLOCK, extra, items)


def chunks_of(tokens: Sequence[int], boundaries: Sequence[int] = (), **options: object) -> list[Chunk]:
    return make_chain(**options).extend(tokens, boundaries)  # type: ignore[arg-type]


@given(prompts, prompts, positions)
def test_equal_prefixes_have_equal_keys_and_others_do_not(one: list[int], other: list[int], cuts: list[int]) -> None:
    for mine, theirs in zip(chunks_of(one, cuts), chunks_of(other, cuts), strict=False):
        assert (mine.start, mine.end) == (theirs.start, theirs.end)
        assert (mine.keys == theirs.keys) == (one[: mine.end] == other[: mine.end])


@given(prompts, prompts)
def test_a_prompts_chunks_are_those_of_its_continuation(one: list[int], more: list[int]) -> None:
    own = chunks_of(one)
    assert chunks_of(one + more)[: len(own)] == own


@given(st.lists(st.integers(0, 3), min_size=40, max_size=40), st.integers(0, 39))
def test_a_key_depends_on_every_token_before_it(tokens: list[int], place: int) -> None:
    changed = [*tokens[:place], tokens[place] + 1, *tokens[place + 1 :]]
    for mine, theirs in zip(chunks_of(tokens), chunks_of(changed), strict=True):
        assert (mine.keys == theirs.keys) == (mine.end <= place)


@given(prompts, positions, st.lists(st.integers(0, 60), max_size=4))
def test_pieces_give_the_same_chunks_as_the_whole(tokens: list[int], boundaries: list[int], splits: list[int]) -> None:
    whole, chain = chunks_of(tokens, boundaries), make_chain()
    places = [0, *sorted(min(split, len(tokens)) for split in splits), len(tokens)]
    found = chain.extend([], boundaries)
    for start, end in itertools.pairwise(places):
        found += chain.extend(tokens[start:end])
    assert found == whole == chain.chunks
    assert chain.token_count == len(tokens)


@given(prompts, positions, st.integers(1, 4))
def test_chunks_cover_whole_blocks_and_end_at_boundaries(
    tokens: list[int], boundaries: list[int], chunk_blocks: int
) -> None:
    chain = make_chain(chunk_blocks)
    chunks = chain.extend(tokens, boundaries)
    ends = [chunk.end for chunk in chunks]
    assert [chunk.start for chunk in chunks] == [0, *ends[:-1]][: len(chunks)]
    assert all(chunk.end % BLOCK == 0 and 0 < chunk.tokens <= chunk_blocks * BLOCK for chunk in chunks)
    whole = {place - place % BLOCK for place in boundaries}
    assert {place for place in whole if 0 < place <= len(tokens)} <= set(ends)
    assert all(chunk.tokens == chunk_blocks * BLOCK or chunk.end in whole for chunk in chunks)
    rest = len(tokens) - chain.end
    assert rest < chunk_blocks * BLOCK
    assert chain.rounded == [place for place in boundaries if place % BLOCK]
    assert chain.late == []


def test_keys_are_those_of_the_models_chain_with_exact_provenance() -> None:
    tokens = list(range(20))
    first, second = chunks_of(tokens, namespaces=(ONE, TWO))
    for index, namespace in enumerate((ONE, TWO)):
        one, two = segment_id(namespace, tokens[:8]), segment_id(namespace, tokens[8:16])
        root = root_context(namespace)
        assert first.keys[index] == root.cache_key(one)
        assert second.keys[index] == root.extend(one, 8).cache_key(two)
        assert first.marks[index] == ()
        assert second.marks[index] == (segment_mark(one),)


def test_marks_are_bounded() -> None:
    chunks = chunks_of(range(8 * (PRECEDING_MAX + 3)))
    assert len(chunks[-1].marks[0]) == PRECEDING_MAX


@given(prompts, st.binary(min_size=1, max_size=4), st.binary(max_size=4))
def test_extras_separate_every_key(tokens: list[int], one: bytes, other: bytes) -> None:
    for mine, theirs in zip(chunks_of(tokens, extra=one), chunks_of(tokens, extra=other), strict=True):
        assert (mine.keys == theirs.keys) == (one == other)


def test_an_item_changes_the_keys_from_its_chunk_on() -> None:
    tokens = [0] * 32
    plain, cat = chunks_of(tokens), chunks_of(tokens, items=[Item(13, b"cat")])
    dog, moved = chunks_of(tokens, items=[Item(13, b"dog")]), chunks_of(tokens, items=[Item(14, b"cat")])
    assert [chunk.keys for chunk in plain[:1]] == [chunk.keys for chunk in cat[:1]]
    for four in zip(plain[1:], cat[1:], dog[1:], moved[1:], strict=True):
        assert len({chunk.keys for chunk in four}) == 4


def test_items_are_taken_in_order_of_their_place() -> None:
    tokens, items = [0] * 32, [Item(25, b"b"), Item(3, b"a")]
    assert chunks_of(tokens, items=items) == chunks_of(tokens, items=items[::-1])


def test_a_boundary_whose_place_is_cut_already_is_noted_and_changes_nothing() -> None:
    chain = make_chain()
    chain.extend(range(16))
    assert chain.extend(range(8), [4, 8, 16, 21]) == chain.chunks[2:]
    assert chain.late == [4]
    assert chain.rounded == [21]
    assert [chunk.end for chunk in chain.chunks] == [8, 16, 20]


def test_a_bad_token_leaves_the_chunks_before_it() -> None:
    chain = make_chain()
    with pytest.raises(InvalidInputError):
        chain.extend([*range(8), -1, *range(20)])
    assert chain.end == 8


@pytest.mark.parametrize("arguments", [((), 8, 4), ((ONE,), 6, 4), ((ONE,), 0, 4), ((ONE,), 8, 0)])
def test_wrong_sizes_are_refused(arguments: tuple[Sequence[Namespace], int, int]) -> None:
    with pytest.raises(InvalidInputError):
        ChunkChain(*arguments)


def test_chunks_can_be_copied_as_they_are_between_processes() -> None:
    chunk = chunks_of(range(8))[0]
    assert copy.deepcopy(chunk) == chunk
