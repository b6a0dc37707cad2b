"""Ownership: balanced, as weighted, minimal in what moves, and the same in every process."""

import math
import subprocess
import sys
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvservice.peers.rendezvous import Candidate, ln, rank
from kvservice.peers.weights import Ramp
from tests.peers.members import node_uuid, segment

SEGMENTS = 8_000
KNOWN_RANKS = [
    ([1.0, 1.0, 1.0, 1.0], "1302 0312 1023 1023 2031 1320 1032 1320"),
    ([1.0, 2.0, 0.5, 8.0], "3102 3012 1302 3102 3210 3102 1302 1302"),
]
"""Of the first eight segments. These may never change: nodes of two versions would disagree about owners."""


def candidates(*weights: float) -> list[Candidate]:
    return [Candidate(node_uuid(number).bytes, weight) for number, weight in enumerate(weights)]


def owners(*weights: float) -> list[int]:
    nodes = candidates(*weights)
    return [rank(segment(number), nodes)[0] for number in range(SEGMENTS)]


def assert_shares(owned: list[int], weights: list[float]) -> None:
    """Counts within five standard deviations of a binomial."""
    counts = Counter(owned)
    for index, weight in enumerate(weights):
        share = weight / sum(weights)
        expected, spread = SEGMENTS * share, math.sqrt(SEGMENTS * share * (1 - share))
        assert abs(counts[index] - expected) < 5 * spread, (index, counts[index], expected)


@pytest.mark.parametrize("weights", [[1.0] * 2, [1.0] * 7, [1.0, 2.0, 3.0, 10.0], [0.01, 1.0], [1e12, 3e12]])
def test_every_node_owns_its_share(weights: list[float]) -> None:
    assert_shares(owners(*weights), weights)


def test_a_node_that_joins_takes_its_share_and_nothing_else_moves() -> None:
    before, after = owners(1, 1, 1), owners(1, 1, 1, 1)
    moved = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
    assert {new for _, new in moved} == {3}
    assert abs(len(moved) / SEGMENTS - 1 / 4) < 0.03


def test_a_node_that_leaves_gives_only_its_own_away_to_those_that_came_second() -> None:
    nodes = candidates(1, 2, 1, 1)
    for number in range(2000):
        before = rank(segment(number), nodes)
        after = [index + (index >= 1) for index in rank(segment(number), [nodes[0], *nodes[2:]])]
        assert after == [index for index in before if index != 1]


def test_a_weight_that_grows_only_takes() -> None:
    seen = [owners(1, 1, weight) for weight in (0.25, 0.5, 0.75, 1.0)]
    for before, after in pairwise(seen):
        assert all(new in (old, 2) for old, new in zip(before, after, strict=True))
    assert_shares(seen[-1], [1.0, 1.0, 1.0])


def test_the_scale_of_weights_and_the_order_of_nodes_do_not_matter() -> None:
    nodes = candidates(1, 2, 3)
    scaled = [Candidate(one.id, one.weight * 4096) for one in nodes]
    for number in range(500):
        ranked = [nodes[index].id for index in rank(segment(number), nodes)]
        assert [scaled[index].id for index in rank(segment(number), scaled)] == ranked
        turned = nodes[::-1]
        assert [turned[index].id for index in rank(segment(number), turned)] == ranked


def test_a_tie_goes_to_the_lower_id_in_any_order() -> None:
    twins = [Candidate(b"same", 1.0), Candidate(b"same", 1.0)]
    assert rank(b"key", twins) == [0, 1]
    assert rank(b"key", []) == []


@pytest.mark.parametrize(("weights", "expected"), KNOWN_RANKS)
def test_ranks_are_what_they_always_were(weights: list[float], expected: str) -> None:
    found = ["".join(map(str, rank(segment(number), candidates(*weights)))) for number in range(8)]
    assert " ".join(found) == expected


def test_ranks_are_equal_in_another_process_with_another_hash_seed() -> None:
    code = (
        "from kvservice.peers.rendezvous import Candidate, rank\n"
        "from tests.peers.members import node_uuid, segment\n"
        "nodes = [Candidate(node_uuid(n).bytes, weight) for n, weight in enumerate((1, 2, 3, 1, 5))]\n"
        "print([rank(segment(n), nodes) for n in range(200)])"
    )
    outputs = {
        subprocess.run(
            (sys.executable, "-c", code),
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": "."},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "77")
    }
    here = [rank(segment(number), candidates(1, 2, 3, 1, 5)) for number in range(200)]
    assert outputs == {f"{here}\n".encode()}


@given(st.integers(0, (1 << 52) - 1))
def test_the_logarithm_agrees_with_the_library_to_the_last_bits(number: int) -> None:
    u = (number + 0.5) / (1 << 52)
    assert u not in (0.0, 1.0)
    assert math.isclose(ln(u), math.log(u), rel_tol=4e-16)


def test_the_logarithm_is_below_zero_at_both_ends_and_rises() -> None:
    ends = [0.5 / (1 << 52), 0.25, 0.5, math.sqrt(0.5), 0.9, ((1 << 52) - 0.5) / (1 << 52)]
    assert all(low < high for low, high in pairwise(map(ln, ends)))
    assert ln(ends[-1]) < 0


def test_a_ramp_rises_in_steps_from_more_than_nothing_to_all() -> None:
    ramp = Ramp(over_s=160, steps=16)
    assert [ramp.warmth(age) for age in (0, 9.9, 10, 80, 149.9, 150, 159, 160, 1e9)] == [
        *(1 / 16, 1 / 16, 2 / 16, 9 / 16, 15 / 16, 1.0, 1.0, 1.0, 1.0),
    ]
    assert ramp.next_step_s(0) == 10
    assert ramp.next_step_s(12) == 8
    assert ramp.next_step_s(150) is None
    assert Ramp(over_s=0).warmth(0) == 1.0
    assert Ramp(over_s=0).next_step_s(0) is None


@given(st.lists(st.binary(min_size=16, max_size=16), min_size=2, max_size=9, unique=True), st.binary(max_size=40))
def test_the_short_way_for_equal_weights_gives_the_order_of_the_scores(ids: list[bytes], key: bytes) -> None:
    equal = [Candidate(one, 3.0) for one in ids]
    forced = [*equal, Candidate(b"another that makes weights differ", 5.0)]
    assert [index for index in rank(key, forced) if index < len(equal)] == rank(key, equal)
