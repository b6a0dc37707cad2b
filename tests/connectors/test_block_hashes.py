"""Names of blocks that may hold refreshed KV, against a hasher that chains as the engine's does."""

import hashlib

import pytest

from kvservice.client.connectors.vllm.block_hashes import splice_block_hashes

BLOCK = 4


class Request:
    """The fields of an engine's request that hold its block hashes."""

    def __init__(self, tokens: list[int], *, has_cache: bool = True) -> None:
        self.all_token_ids = list(tokens)
        self.block_hashes: list[bytes] = []
        self._block_hasher = chained if has_cache else None
        self.update_block_hashes()

    def update_block_hashes(self) -> None:
        if self._block_hasher is not None:
            self.block_hashes.extend(self._block_hasher(self))

    def append(self, tokens: list[int]) -> None:
        self.all_token_ids += tokens
        self.update_block_hashes()


def chained(request: Request) -> list[bytes]:
    found = list(request.block_hashes)
    start = len(found)
    for index in range(start, len(request.all_token_ids) // BLOCK):
        tokens = request.all_token_ids[index * BLOCK : (index + 1) * BLOCK]
        found.append(hashlib.sha256((found[-1] if found else b"") + repr(tokens).encode()).digest())
    return found[start:]


@pytest.mark.parametrize("first_token", [0, 3, 8, 9, 15, 16, 17, 40])
def test_blocks_before_the_first_refreshed_row_keep_their_names_and_all_behind_get_others(first_token: int) -> None:
    exact, spliced = Request(list(range(18))), Request(list(range(18)))
    splice_block_hashes(spliced, first_token, BLOCK, b"hkvd:0.05")
    for request in (exact, spliced):
        request.append([7])
        request.append(list(range(30)))
    same = [one == other for one, other in zip(exact.block_hashes, spliced.block_hashes, strict=True)]
    assert same == [index < first_token // BLOCK for index in range(len(exact.block_hashes))]
    assert {len(one) for one in spliced.block_hashes} == {32}


def test_names_do_not_depend_on_when_tokens_came() -> None:
    at_once, one_by_one = Request(list(range(40))), Request(list(range(5)))
    for request in (at_once, one_by_one):
        splice_block_hashes(request, 10, BLOCK, b"mark")
    for token in range(5, 40):
        one_by_one.append([token])
    assert at_once.block_hashes == one_by_one.block_hashes


def test_equal_marks_share_and_others_do_not() -> None:
    requests = [Request(list(range(20))) for _ in range(3)]
    for request, mark in zip(requests, (b"a", b"a", b"b"), strict=True):
        splice_block_hashes(request, 5, BLOCK, mark)
    first, second, other = (request.block_hashes for request in requests)
    assert first == second
    assert first[0] == other[0]
    assert not set(first[1:]) & set(other[1:])


def test_a_second_mark_takes_the_place_of_the_first() -> None:
    twice, once = Request(list(range(20))), Request(list(range(20)))
    splice_block_hashes(twice, 5, BLOCK, b"a")
    splice_block_hashes(twice, 5, BLOCK, b"b")
    splice_block_hashes(once, 5, BLOCK, b"b")
    for request in (twice, once):
        request.append(list(range(9)))
    assert twice.block_hashes == once.block_hashes


def test_without_prefix_caching_there_is_nothing_to_rename() -> None:
    request = Request(list(range(20)), has_cache=False)
    splice_block_hashes(request, 5, BLOCK, b"mark")
    request.append([1, 2, 3, 4])
    assert request.block_hashes == []
