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
    assert taken.prompt_slots == (SLOTS,)


@pytest.mark.parametrize("positions", [[2, 1], [1, 1], [-1, 0], [3, 5]])
def test_rows_out_of_order_or_prompt_are_refused(positions: list[int]) -> None:
    with pytest.raises(SlotError):
        Rows.at(torch.tensor(positions), SLOTS)


def test_no_rows_are_rows() -> None:
    assert len(Rows.at(torch.empty(0, dtype=torch.int64), SLOTS)) == 0


def test_joined_rows_split_into_each_prompt_s_own() -> None:
    others = torch.tensor([70, 71, 72])
    parts = [
        Rows.at(torch.tensor(at, dtype=torch.int64), slots)
        for at, slots in (([1, 4], SLOTS), ([], SLOTS), ([0, 2], others))
    ]
    joined = Rows.join(parts)
    assert joined.prompts.tolist() == [0, 0, 2, 2]
    assert joined.slots.tolist() == [41, 24, 70, 72]
    assert joined.counts() == [2, 0, 2]
    for part, own in zip(joined.split(), parts, strict=True):
        assert (part.positions.tolist(), part.slots.tolist()) == (own.positions.tolist(), own.slots.tolist())
        assert part.prompts.tolist() == own.prompts.tolist()
        assert part.prompt_slots == own.prompt_slots


def test_prompt_whose_rows_were_all_left_out_is_still_counted() -> None:
    joined = Rows.join([Rows.at(torch.arange(2), SLOTS), Rows.at(torch.arange(3), SLOTS)])
    taken = joined.take(joined.prompts == 1)
    assert taken.counts() == [0, 3]
    again = Rows.join([taken, Rows.at(torch.arange(1), SLOTS)])
    assert again.prompts.tolist() == [1, 1, 1, 2]
    assert len(again.prompt_slots) == 3
