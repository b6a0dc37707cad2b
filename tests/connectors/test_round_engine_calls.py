"""What a pass gives its attention, with a builder whose results stand in one buffer, as some of vLLM's do."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvservice.client.connectors.vllm import round_engine
from kvservice.client.connectors.vllm.round_engine import VllmEngine
from kvservice.client.reuse.engine import Rows

SLOTS = torch.arange(16)
ALL = torch.ones(4, dtype=torch.bool)


class OneBuffer:
    """What is built stands where the last one stood."""

    def __init__(self) -> None:
        self.buffer = torch.zeros(64, dtype=torch.int64)
        self.built = 0

    def build(self, _: int, positions: Tensor) -> Tensor:
        self.built += 1
        self.buffer[: len(positions)] = positions
        return self.buffer[: len(positions)]


@pytest.fixture
def builder(monkeypatch: pytest.MonkeyPatch) -> OneBuffer:
    monkeypatch.setattr(round_engine, "_metadata", lambda rows, slots, tables: rows.positions.clone())
    return OneBuffer()


def make_engine(builder: OneBuffer, rows_max: int = 0) -> VllmEngine:
    model: Any = SimpleNamespace(attentions=[], device="cpu", builder=builder, rows_max=rows_max, runs_max=0)
    paged: Any = SimpleNamespace(layouts=[SimpleNamespace(block_size=4)])
    return VllmEngine(model, paged)


def check(engine: VllmEngine, rows: Rows, is_written: Tensor) -> None:
    for call in engine._calls_of(rows, is_written):
        assert torch.equal(call.metadata, rows.positions[call.cut])
        assert torch.equal(call.positions, rows.positions[call.cut])


def test_it_is_made_once_for_all_layers(builder: OneBuffer) -> None:
    engine, rows = make_engine(builder), Rows.at(torch.arange(4, 8), SLOTS)
    for _ in range(5):
        check(engine, rows, ALL)
    assert builder.built == 1


def test_of_two_calls_in_turns_each_sees_its_own(builder: OneBuffer) -> None:
    engine = make_engine(builder)
    first, second = Rows.at(torch.arange(4), SLOTS), Rows.at(torch.arange(8, 12), SLOTS)
    for _ in range(3):
        check(engine, first, ALL)
        check(engine, second, ALL)


def test_rows_in_pieces_are_made_piece_by_piece(builder: OneBuffer) -> None:
    engine, rows = make_engine(builder, rows_max=4), Rows.at(torch.arange(8), SLOTS)
    for _ in range(3):
        check(engine, rows, torch.ones(8, dtype=torch.bool))


def test_other_flags_are_other_slots(builder: OneBuffer) -> None:
    engine, rows = make_engine(builder), Rows.at(torch.arange(4), SLOTS)
    for is_written, slots in ((ALL, [0, 1, 2, 3]), (~ALL, [round_engine.NO_SLOT] * 4)):
        (call,) = engine._calls_of(rows, is_written)
        assert call.slots.tolist() == slots
