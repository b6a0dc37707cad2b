"""Arithmetic that kernels refuse, and distances that are no numbers: the caches stay dense, nothing fails."""

import numpy as np
import pytest

from kvservice.families import election_totals
from kvservice.kernels import cpu
from kvservice.kernels.shapes import KernelInputError
from tests.server.builders import World, make_identity, make_meta, make_planes, make_relative

IDENTITY = make_identity()


@pytest.mark.parametrize("name", ["deviation_layer", "diff_layer", "materialise_layer"])
async def test_what_kernels_cannot_do_is_a_refused_fold_and_no_failure(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    world = World()
    client = world.client()
    metas = [make_meta(IDENTITY, history=[number]) for number in range(3)]
    for number, meta in enumerate(metas):
        await client.store(meta, make_relative(IDENTITY, make_planes(), 0, meta.position, rows=[number]))

    def refuse(*_: object) -> None:
        raise KernelInputError("too far")

    with monkeypatch.context() as patch:
        patch.setattr(cpu, name, refuse)
        assert await world.node.fold_pending() == 2
        assert world.node.counters.folds.refused > 0
        reply = await client.commit_round(IDENTITY, *metas)
        assert len(reply.elections) == (name != "deviation_layer")
    assert world.node.catalog.totals.mirrors == 0 or name == "deviation_layer"
    assert world.is_empty_handed()
    world.check()


@pytest.mark.parametrize("sick", range(4))
def test_a_candidate_without_distances_never_wins_and_does_not_hide_the_others(sick: int) -> None:
    table = np.array([[0, 3, 9, 4], [3, 0, 8, 2], [9, 8, 0, 7], [4, 2, 7, 0]], np.float64)
    healthy = [one for one in range(4) if one != sick]
    expected = table[np.ix_(healthy, healthy)].sum(axis=1)
    table[sick, :] = table[:, sick] = np.nan
    table[sick, sick] = 0.0
    totals = election_totals(table)
    assert totals[sick] == np.inf
    assert [totals[one] for one in healthy] == expected.tolist()


def test_candidates_without_any_distance_are_all_infinitely_far() -> None:
    assert election_totals(np.array([[0, np.nan], [np.nan, 0]])) == [np.inf, np.inf]


def test_one_distance_that_is_no_number_makes_both_its_ends_infinitely_far() -> None:
    table = np.array([[0, np.nan, 1], [np.nan, 0, 2], [1, 2, 0]])
    assert election_totals(table) == [np.inf, np.inf, 3.0]
