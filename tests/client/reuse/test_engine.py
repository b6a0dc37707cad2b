"""Rows know their slots and refuse what is no row."""

import pytest
import torch

from kvservice.client.reuse.engine import Rows
from kvservice.model.errors import SlotError

SLOTS = torch.tensor([40, 41, 8, 9, 24])


def test_rows_know_their_slots() -> None:
    rows = Rows.at(torch.tensor([1, 2, 4]), SLOTS)
    assert rows.slots.tolist() == [41, 8, 24]
    assert len(rows) == 3


def test_taken_rows_still_see_the_whole_prompt() -> None:
    taken = Rows.at(torch.arange(5), SLOTS).take(torch.tensor([False, True, False, False, True]))
    assert (taken.positions.tolist(), taken.slots.tolist()) == ([1, 4], [41, 24])
    assert taken.prompt_slots is SLOTS


@pytest.mark.parametrize("positions", [[2, 1], [1, 1], [-1, 0], [3, 5]])
def test_rows_out_of_order_or_prompt_are_refused(positions: list[int]) -> None:
    with pytest.raises(SlotError):
        Rows.at(torch.tensor(positions), SLOTS)


def test_no_rows_are_rows() -> None:
    assert len(Rows.at(torch.empty(0, dtype=torch.int64), SLOTS)) == 0
