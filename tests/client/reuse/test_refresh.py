"""The refresh loop: what is computed, what is written, and what must stay as restored."""

import pytest
import torch
from torch import Tensor

from kvservice.client.reuse.decoder import Decoder
from kvservice.client.reuse.refresh import Prompt, deviation, refresh, refresh_by_layer
from kvservice.client.reuse.rows import RowClass, classify
from kvservice.client.reuse.selectors import Selector, blocks, exact, head, hkvd, none
from kvservice.model.errors import InvalidInputError, TokenCountError
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

# History, two shared segments with a separator between them, an exact segment, a tail.
RESTORED = [candidate(20, 24), candidate(46, 20), exactly(66, 14)]
SELECTORS = [hkvd(0.2), blocks(0.3, 4), head(3), none(), hkvd(1.0), hkvd(0)]
LAYERS = range(4)


def kv_is_equal(decoder: Decoder, some: Tensor, others: Tensor) -> bool:
    pairs = ((decoder.read_rows(layer, some), decoder.read_rows(layer, others)) for layer in LAYERS)
    return all(torch.equal(a, b) for pair in pairs for a, b in zip(*pair, strict=True))


@pytest.mark.parametrize("selector", SELECTORS, ids=str)
@pytest.mark.parametrize("check_layer", [0, 1, 3])
def test_picked_and_must_rows_are_exactly_what_changes(selector: Selector, check_layer: int) -> None:
    decoder = make_decoder()
    prompt = make_prompt(decoder, RESTORED, local=8)
    before = snapshot(decoder, prompt)
    done = refresh(decoder, prompt, selector, check_layer)
    after = snapshot(decoder, prompt)
    must = prompt.rows.positions(RowClass.MUST).tolist()
    first = check_layer if selector.needs_deviation else 0
    for layer in LAYERS:
        wanted = sorted(must + done.picked.tolist()) if layer >= first else must
        assert changed_rows(before[layer], after[layer]).tolist() == wanted


@pytest.mark.parametrize("selector", [*SELECTORS, exact()], ids=str)
def test_local_and_exact_rows_are_never_run_probed_or_written(selector: Selector) -> None:
    decoder = make_decoder()
    prompt = make_prompt(decoder, RESTORED, local=8)
    engine = RecordingEngine(decoder)
    refresh(engine, prompt, selector)
    kept = set(prompt.rows.positions(RowClass.LOCAL, RowClass.EXACT).tolist())
    assert len(kept) == 22
    for _, positions, _ in engine.runs:
        assert not kept & set(positions)
    for _, positions in engine.probes:
        assert set(positions) == set(prompt.rows.positions(RowClass.CANDIDATE).tolist())


def test_candidates_below_the_check_layer_run_but_are_not_written() -> None:
    engine = RecordingEngine(make_decoder())
    prompt = make_prompt(engine.inner, RESTORED)  # type: ignore[arg-type]
    done = refresh(engine, prompt, hkvd(0.2), check_layer=2)
    must = prompt.rows.positions(RowClass.MUST).tolist()
    both = prompt.rows.positions(RowClass.CANDIDATE, RowClass.MUST).tolist()
    computed = sorted(must + done.picked.tolist())
    assert engine.runs == [(0, both, must), (1, both, must), (2, computed, computed), (3, computed, computed)]
    assert [layer for layer, _ in engine.probes] == [2]


@pytest.mark.parametrize("selector", [none(), head(3), exact(), hkvd(0)], ids=str)
def test_selectors_that_need_no_deviation_do_not_probe(selector: Selector) -> None:
    engine = RecordingEngine(make_decoder())
    prompt = make_prompt(engine.inner, RESTORED)  # type: ignore[arg-type]
    done = refresh(engine, prompt, selector)
    assert engine.probes == []
    assert engine.runs == [(layer, done.positions.tolist(), done.positions.tolist()) for layer in LAYERS]


def test_exact_mode_equals_the_prefill_bit_for_bit() -> None:
    decoder = make_decoder()
    prompt = make_prompt(decoder, [candidate(20, 60)])
    done = refresh(decoder, prompt, exact())
    slots = decoder.kv.allocate(96)
    hidden = decoder.prefill(prompt.tokens, slots)
    assert kv_is_equal(decoder, prompt.slots, slots)
    assert torch.equal(done.hidden, hidden)
    assert done.picked.numel() == 0
    assert done.counts[RowClass.CANDIDATE] == 60


def test_everything_must_equals_the_prefill_bit_for_bit() -> None:
    decoder = make_decoder()
    prompt = make_prompt(decoder, [])
    done = refresh(decoder, prompt, hkvd(1.0))
    slots = decoder.kv.allocate(96)
    assert torch.equal(done.hidden, decoder.prefill(prompt.tokens, slots))
    assert kv_is_equal(decoder, prompt.slots, slots)


def test_full_ratio_from_layer_0_on_equals_the_prefill_bit_for_bit() -> None:
    decoder = make_decoder()
    prompt = make_prompt(decoder, [candidate(20, 60)])
    done = refresh(decoder, prompt, hkvd(1.0), check_layer=0)
    assert done.picked.tolist() == list(range(20, 80))
    assert torch.equal(done.hidden, decoder.prefill(prompt.tokens, decoder.kv.allocate(96)))


def test_exact_rows_behind_a_prefix_equal_the_prefill_within_rounding() -> None:
    decoder = make_decoder(torch.float32)
    prompt = make_prompt(decoder, [exactly(10, 60)])
    logits = decoder.logits(refresh(decoder, prompt, none()).hidden_at(95))
    full = decoder.logits(decoder.prefill(prompt.tokens, decoder.kv.allocate(96))[-1:])
    torch.testing.assert_close(logits, full, atol=1e-4, rtol=1e-4)


def test_full_ratio_equals_the_prefill_bit_for_bit_where_the_layers_below_did() -> None:
    decoder = make_decoder()
    prompt = make_prompt(decoder, [candidate(20, 60)], noise=(0, 0.5, 0.5, 0.5))
    done = refresh(decoder, prompt, hkvd(1.0))
    slots = decoder.kv.allocate(96)
    assert torch.equal(done.hidden, decoder.prefill(prompt.tokens, slots))
    assert kv_is_equal(decoder, prompt.slots, slots)


def test_full_ratio_from_the_check_layer_on_gives_the_prefill_s_logits() -> None:
    decoder = make_decoder(torch.float32)
    # Layer 0 stays as restored: what a rotation's rounding costs there is all that may be wrong in the end.
    prompts = [make_prompt(decoder, [candidate(20, 60)], noise=(1e-4, 0.1, 0.1, 0.1)) for _ in range(2)]
    logits, stale = (
        decoder.logits(refresh(decoder, prompt, selector).hidden_at(95))
        for prompt, selector in zip(prompts, [hkvd(1.0), none()], strict=True)
    )
    full = decoder.logits(decoder.prefill(prompts[0].tokens, decoder.kv.allocate(96))[-1:])
    torch.testing.assert_close(logits, full, atol=3e-3, rtol=0)
    assert (stale - full).abs().max() > 0.1


def test_hkvd_picks_the_rows_that_were_spoilt() -> None:
    decoder = make_decoder()
    prompt = make_prompt(decoder, RESTORED, noise=(0, 0, 0, 0))
    spoilt = prompt.slots[[23, 31, 50]]
    for layer in LAYERS[1:]:
        planes = decoder.read_rows(layer, spoilt)
        decoder.write_rows(layer, spoilt, tuple(plane + 4 for plane in planes))
    assert refresh(decoder, prompt, hkvd(0.07)).picked.tolist() == [23, 31, 50]


def test_steps_name_a_layer_before_they_touch_it() -> None:
    decoder = make_decoder()
    prompt = make_prompt(decoder, RESTORED)
    restored = snapshot(decoder, prompt)
    for layer in LAYERS:
        decoder.write_rows(layer, prompt.slots, tuple(torch.full_like(plane, torch.nan) for plane in restored[layer]))
    arrived = []
    for layer in refresh_by_layer(decoder, prompt, hkvd(0.1)):
        # The layer's restored rows arrive only now, as they do behind wait_for_layer.
        decoder.write_rows(layer, prompt.slots, restored[layer])
        arrived.append(layer)
    assert arrived == list(LAYERS)
    assert not any(plane.isnan().any() for planes in snapshot(decoder, prompt) for plane in planes)


def test_prompt_that_needs_nothing_computes_nothing() -> None:
    decoder = make_decoder()
    prompt = make_prompt(decoder, [exactly(8, 88)], local=8)
    done = refresh(decoder, prompt, hkvd(0.5))
    assert done.computed == 0
    with pytest.raises(KeyError, match="row 95 was not computed"):
        done.hidden_at(95)


def test_deviation_sums_planes_in_float32() -> None:
    fresh = (torch.tensor([[[1.0, 2.0]], [[256.0, 0.0]]]).bfloat16(), torch.tensor([[[0.0]], [[1.0]]]).bfloat16())
    restored = tuple(torch.zeros_like(plane) for plane in fresh)
    # 256 ** 2 + 1 has no bfloat16.
    assert deviation(fresh, restored).tolist() == [5.0, 65537.0]


@pytest.mark.parametrize("check_layer", [-1, 4])
def test_check_layer_that_is_none_is_refused(check_layer: int) -> None:
    decoder = make_decoder()
    with pytest.raises(InvalidInputError, match="check layer"):
        refresh(decoder, make_prompt(decoder, RESTORED), hkvd(0.1), check_layer)


def test_prompt_whose_counts_disagree_is_refused() -> None:
    with pytest.raises(TokenCountError, match="8 tokens, 9 slots and 8 classes"):
        Prompt(make_tokens(8), torch.arange(9), classify(8, []))
