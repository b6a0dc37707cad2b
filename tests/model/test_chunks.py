"""The rule by which prompts are cut agrees with the connector's, which cuts them as they grow."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvservice.client.connectors.vllm.chunks import ChunkChain
from kvservice.client.connectors.vllm.request_extras import request_extra
from kvservice.model.chunks import ChunkRule, keyed_chunks
from kvservice.model.errors import InvalidInputError
from kvservice.model.identity import Namespace

NAMESPACE = Namespace(b"n" * 32)
PLACES = st.integers(0, 80)


@given(
    tokens=st.integers(0, 70),
    block=st.integers(1, 5),
    blocks=st.integers(1, 4),
    boundaries=st.lists(PLACES, max_size=4),
    reuse_end=st.none() | PLACES,
    salt=st.sampled_from(["", "s"]),
    adapter=st.sampled_from([(), ("name", "digest")]),
)
def test_chunks_and_keys_are_the_connectors(
    tokens: int,
    block: int,
    blocks: int,
    boundaries: list[int],
    reuse_end: int | None,
    salt: str,
    adapter: tuple[str, ...],
) -> None:
    ids = list(range(tokens))
    chain = ChunkChain([NAMESPACE], block * blocks, block, request_extra(salt, *adapter), reuse_end=reuse_end)
    chunks = chain.extend(ids, boundaries)
    tail = chain.tail(tokens - tokens % block)
    expected = [*chunks, *([] if tail is None else [tail])]
    rule = ChunkRule(block * blocks, block, tuple(boundaries), reuse_end, salt, adapter)
    found = keyed_chunks(NAMESPACE, ids, rule)
    assert [(one.start, one.tokens, one.key) for one in found] == [(c.start, c.tokens, c.keys[0]) for c in expected]
    assert [one.marks for one in found] == [b"".join(c.marks[0]) for c in expected]


def test_chunks_that_are_not_whole_blocks_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="multiple of the block"):
        ChunkRule(10, 4)
