"""The collective pass against the refresh prompt by prompt: same rows, in `deterministic` the same bits."""

import dataclasses
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from kvservice.client.reuse.collective import Member, refresh_round, refresh_round_by_layer
from kvservice.client.reuse.decoder import Decoder
from kvservice.client.reuse.engine import Planes, Rows
from kvservice.client.reuse.refresh import Prompt, Refreshed, refresh
from kvservice.client.reuse.rows import RowClass, classify
from kvservice.client.reuse.selectors import Selector, blocks, exact, head, hkvd, none
from kvservice.model.errors import InvalidInputError, SlotError
from tests.client.reuse.builders import (
    RecordingEngine,
    candidate,
    changed_rows,
    exactly,
    make_decoder,
    make_prompt,
    make_tokens,
    snapshot,
)

LAYERS = range(4)
SELECTORS = [hkvd(0.2), blocks(0.3, 4), head(3), none(), hkvd(1.0), exact(), hkvd(0.1), hkvd(0)]


def make_round(
    selectors: Sequence[Selector] = SELECTORS, kv_dtype: torch.dtype = torch.bfloat16
) -> tuple[Decoder, list[Member]]:
    """A member for each selector: prompts of different lengths, two shared segments behind histories of their own, the
    last but one without reuse, the last with nothing to compute. Equal arguments, equal bits in equal slots.
    """
    decoder = make_decoder(kv_dtype, blocks=160)
    members = []
    for index, selector in enumerate(selectors):
        start = 11 + 5 * index
        spans = [candidate(start, 24), candidate(start + 26, 20), exactly(start + 46, 9)]
        prompt = make_prompt(decoder, spans, tokens=start + 60, local=4 + index)
        members.append(Member(prompt, selector))
    members.append(Member(make_prompt(decoder, [], tokens=33), hkvd(0.5)))
    members.append(Member(make_prompt(decoder, [exactly(8, 32)], tokens=40, local=8), hkvd(0.5)))
    return decoder, members


def one_by_one(selectors: Sequence[Selector] = SELECTORS, check_layer: int = 1) -> tuple[list[Refreshed], list[Planes]]:
    decoder, members = make_round(selectors)
    done = [refresh(decoder, one.prompt, one.selector, check_layer) for one in members]
    return done, bits(decoder, members)


def bits(decoder: Decoder, members: Sequence[Member]) -> list[Planes]:
    return [planes for one in members for planes in snapshot(decoder, one.prompt)]


def is_equal(some: Sequence[Planes], others: Sequence[Planes]) -> bool:
    pairs = [pair for one, other in zip(some, others, strict=True) for pair in zip(one, other, strict=True)]
    return all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in pairs)


@pytest.mark.parametrize("check_layer", [0, 1, 3])
def test_deterministic_pass_equals_prompt_by_prompt_bit_for_bit(check_layer: int) -> None:
    decoder, members = make_round()
    found = refresh_round(decoder, members, check_layer, is_deterministic=True)
    wanted, stored = one_by_one(check_layer=check_layer)
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one.picked, other.picked)
        assert torch.equal(one.positions, other.positions)
        assert torch.equal(one.hidden, other.hidden)
        assert one.counts == other.counts
    assert is_equal(bits(decoder, members), stored)


@pytest.mark.parametrize("check_layer", [0, 1, 3])
@pytest.mark.parametrize("call_rows_max", [0, 150, 4096])
def test_pass_picks_the_rows_that_prompt_by_prompt_picks(check_layer: int, call_rows_max: int) -> None:
    decoder, members = make_round()
    found = refresh_round(decoder, members, check_layer, call_rows_max=call_rows_max)
    wanted, _ = one_by_one(check_layer=check_layer)
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one.picked, other.picked)
        assert torch.equal(one.positions, other.positions)
        torch.testing.assert_close(one.hidden, other.hidden, atol=0.05, rtol=0.05)


@pytest.mark.parametrize("check_layer", [0, 1, 3])
@pytest.mark.parametrize("is_deterministic", [False, True])
def test_picked_and_must_rows_are_exactly_what_changes(check_layer: int, is_deterministic: bool) -> None:
    decoder, members = make_round()
    before = [snapshot(decoder, one.prompt) for one in members]
    found = refresh_round(decoder, members, check_layer, is_deterministic=is_deterministic)
    for one, done, old in zip(members, found, before, strict=True):
        rows, new = one.prompt.under(one.selector).rows, snapshot(decoder, one.prompt)
        must = rows.positions(RowClass.MUST).tolist()
        first = check_layer if one.selector.needs_deviation else 0
        for layer in LAYERS:
            wanted = sorted({*must, *done.picked.tolist()}) if layer >= first else must
            assert changed_rows(old[layer], new[layer]).tolist() == wanted


@dataclasses.dataclass
class CountingEngine(RecordingEngine):
    """Also notes how many prompts with rows each call serves."""

    prompts: list[tuple[int, int]] = dataclasses.field(default_factory=list)

    def run_layer(self, layer: int, hidden: Tensor, rows: Rows, is_written: Tensor) -> Tensor:
        self.prompts.append((layer, rows.prompts.unique().numel()))  # type: ignore[no-untyped-call]
        return super().run_layer(layer, hidden, rows, is_written)


def test_each_layer_is_called_once_and_one_probe_serves_all() -> None:
    decoder, members = make_round()
    engine = CountingEngine(decoder)
    refresh_round(engine, members)
    assert engine.prompts == [(layer, 9) for layer in LAYERS]  # the tenth has nothing to compute
    assert [layer for layer, _ in engine.probes] == [1]
    asked = [one for one in members if one.selector.needs_deviation]
    assert len(engine.probes[0][1]) == sum(one.prompt.rows.counts()[RowClass.CANDIDATE] for one in asked)


def test_deterministic_pass_calls_for_one_prompt_after_the_other_inside_a_layer() -> None:
    decoder, members = make_round()
    engine = CountingEngine(decoder)
    refresh_round(engine, members, is_deterministic=True)
    assert engine.prompts == [(layer, 1) for layer in LAYERS for _ in range(9)]


def test_calls_of_many_rows_are_cut_between_prompts() -> None:
    decoder, members = make_round([hkvd(0.2)] * 4)
    engine = CountingEngine(decoder)
    refresh_round(engine, members, call_rows_max=125)
    rows = [len(positions) for layer, positions, _ in engine.runs if layer == 0]
    # 44 candidates and 14 must rows, 4 more for each member; the prompt without reuse has 33.
    assert rows == [58 + 62, 66, 70 + 33]
    # 8 of 44 are picked.
    assert [len(positions) for layer, positions, _ in engine.runs if layer == 3] == [22 + 26 + 30 + 34, 33]


def test_nothing_of_one_prompt_leaks_into_another() -> None:
    decoder, members = make_round([hkvd(0.2), none(), head(3)])
    spoilt = members[1].prompt
    rows = spoilt.slots[spoilt.rows.positions(RowClass.CANDIDATE)]
    for layer in LAYERS:
        decoder.write_rows(layer, rows, tuple(torch.full_like(p, torch.nan) for p in decoder.read_rows(layer, rows)))
    found = refresh_round(decoder, members)
    assert found[1].hidden.isnan().any()
    clean, others = make_round([hkvd(0.2), none(), head(3)])
    wanted = refresh_round(clean, others)
    for index in (0, 2, 3, 4):
        assert torch.equal(found[index].hidden, wanted[index].hidden)
        assert is_equal(bits(decoder, [members[index]]), bits(clean, [others[index]]))


def test_exact_member_of_a_deterministic_pass_equals_its_own_prefill_bit_for_bit() -> None:
    decoder = make_decoder()
    members = [Member(make_prompt(decoder, [candidate(20, 60)]), selector) for selector in (exact(), hkvd(0.1))]
    found = refresh_round(decoder, members, is_deterministic=True)[0]
    slots = decoder.kv.allocate(96)
    assert torch.equal(found.hidden, decoder.prefill(members[0].prompt.tokens, slots))
    whole = Member(Prompt(make_tokens(96), slots, classify(96, [])), none())
    assert is_equal(bits(decoder, members[:1]), bits(decoder, [whole]))
    assert found.counts[RowClass.CANDIDATE] == 60


@pytest.mark.parametrize("is_deterministic", [False, True])
def test_steps_name_a_layer_before_they_touch_it(is_deterministic: bool) -> None:
    decoder, members = make_round()
    restored = [snapshot(decoder, one.prompt) for one in members]
    for one, planes in zip(members, restored, strict=True):
        for layer in LAYERS:
            decoder.write_rows(layer, one.prompt.slots, tuple(torch.full_like(p, torch.nan) for p in planes[layer]))
    steps, arrived = refresh_round_by_layer(decoder, members, is_deterministic=is_deterministic), []
    for layer in steps:
        # The layer's restored rows arrive only now, as they do behind wait_for_layer.
        for one, planes in zip(members, restored, strict=True):
            decoder.write_rows(layer, one.prompt.slots, planes[layer])
        arrived.append(layer)
    assert arrived == list(LAYERS)
    assert not any(plane.isnan().any() for planes in bits(decoder, members) for plane in planes)


def test_round_of_nobody_is_a_round() -> None:
    assert refresh_round(make_decoder(), []) == ()


def test_round_without_reuse_probes_nothing() -> None:
    decoder = make_decoder()
    engine = RecordingEngine(decoder)
    members = [Member(make_prompt(decoder, [candidate(8, 40)]), one) for one in (exact(), none(), head(2))]
    refresh_round(engine, members)
    assert engine.probes == []


def test_slot_that_two_prompts_would_write_is_refused_before_anything_is_written() -> None:
    decoder = make_decoder()
    prompt = make_prompt(decoder, [candidate(8, 40)])
    twin = Prompt(prompt.tokens, prompt.slots, prompt.rows)
    engine = RecordingEngine(decoder)
    with pytest.raises(SlotError, match="share a slot that is written"):
        refresh_round(engine, [Member(prompt, none()), Member(twin, none())])
    assert engine.runs == []


def test_row_that_one_reads_as_local_while_another_computes_it_is_refused() -> None:
    decoder = make_decoder()
    prompt = make_prompt(decoder, [], tokens=40)
    reader = Prompt(prompt.tokens, torch.cat((prompt.slots[:16], decoder.kv.allocate(24))), classify(40, [], local=16))
    with pytest.raises(SlotError, match="join the next pass"):
        refresh_round(decoder, [Member(prompt, none()), Member(reader, none())])


def test_local_rows_may_be_shared() -> None:
    decoder = make_decoder()
    prompt = make_prompt(decoder, [], tokens=40, local=16)
    reader = Prompt(prompt.tokens, torch.cat((prompt.slots[:16], decoder.kv.allocate(24))), classify(40, [], local=16))
    found = refresh_round(decoder, [Member(prompt, none()), Member(reader, none())], is_deterministic=True)
    assert torch.equal(found[0].hidden, found[1].hidden)


@pytest.mark.parametrize("check_layer", [-1, 4])
def test_check_layer_that_is_none_is_refused(check_layer: int) -> None:
    decoder, members = make_round([none()])
    with pytest.raises(InvalidInputError, match="check layer"):
        refresh_round(decoder, members, check_layer)
