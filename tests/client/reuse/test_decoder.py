"""The torch decoder, held against transformers' own models."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvservice.client.reuse.decoder import Decoder
from kvservice.client.reuse.engine import Rows
from kvservice.client.reuse.weights import load_config
from kvservice.model.errors import InvalidInputError, SlotError
from tests.client.reuse.builders import make_decoder, make_tokens

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
KINDS = ["llama", "llama-tied", "llama-head24-bias", "qwen2"]


def write_model(directory: Path, kind: str) -> Any:
    """transformers' own model of that kind, random, saved to `directory`."""
    import transformers

    torch.manual_seed(3)
    if kind == "qwen2":
        model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SIZES, rope_theta=1e6))
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.5)
    else:
        extra = {"head_dim": 24, "attention_bias": True, "mlp_bias": True} if "head24" in kind else {}
        config = transformers.LlamaConfig(**SIZES, **extra, tie_word_embeddings="tied" in kind)
        model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(str(directory))
    return model.eval()


@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_greedy_tokens_equal_those_of_transformers(kind: str, tmp_path: Path) -> None:
    model = write_model(tmp_path, kind)
    decoder = Decoder.load(tmp_path, blocks=24, block_size=8, kv_dtype=torch.float32)
    tokens = make_tokens(50)
    slots = decoder.kv.allocate(66)
    logits = decoder.logits(decoder.prefill(tokens, slots))
    with torch.no_grad():
        wanted = model(tokens[None]).logits[0]
        continued = model.generate(tokens[None], max_new_tokens=16, do_sample=False)[0, 50:]
    torch.testing.assert_close(logits, wanted, atol=2e-4, rtol=1e-4)
    first = logits[-1:].argmax(-1)
    assert [*first.tolist(), *decoder.decode(first, torch.tensor([50]), [slots], 15)[0].tolist()] == continued.tolist()


def test_prompts_of_different_lengths_decode_together_as_alone() -> None:
    decoder = make_decoder(torch.float32)
    starts = torch.tensor([5, 33, 18])
    together, alone, tables = [], [], []
    for seed, start in enumerate(starts.tolist()):
        slots = decoder.kv.allocate(start + 12)
        hidden = decoder.prefill(make_tokens(start, seed), slots)
        together.append(decoder.logits(hidden[-1:]).argmax(-1))
        tables.append(slots)
    found = decoder.decode(torch.cat(together), starts, tables, 12)
    for seed, start in enumerate(starts.tolist()):
        slots = decoder.kv.allocate(start + 12)
        decoder.prefill(make_tokens(start, seed), slots)
        alone.append(decoder.decode(together[seed], starts[seed : seed + 1], [slots], 12))
    assert torch.equal(found, torch.cat(alone))


def test_decode_step_equals_extending_by_one_row() -> None:
    decoder = make_decoder(torch.float32)
    tokens = make_tokens(21)
    slots = decoder.kv.allocate(21)
    decoder.prefill(tokens[:20], slots)
    step = decoder.decode_step(tokens[20:], torch.tensor([20]), [slots])
    extended = decoder.logits(decoder.extend(tokens[20:], slots, 20))
    torch.testing.assert_close(step, extended, atol=1e-5, rtol=1e-5)


def test_prompt_in_two_parts_equals_the_whole() -> None:
    decoder = make_decoder(torch.float32)
    tokens = make_tokens(40)
    whole = decoder.prefill(tokens, decoder.kv.allocate(40))
    slots = decoder.kv.allocate(40)
    parts = torch.cat((decoder.prefill(tokens[:23], slots), decoder.extend(tokens[23:], slots, 23)))
    torch.testing.assert_close(parts, whole, atol=1e-4, rtol=1e-4)


def test_probe_gives_the_bits_that_run_layer_stores_and_writes_nothing() -> None:
    decoder = make_decoder()
    slots = decoder.kv.allocate(16)
    rows = Rows.at(torch.arange(16), slots)
    hidden = decoder.embed(make_tokens(16))
    kept = hidden.clone()
    probed = decoder.probe(0, hidden, rows)
    assert all(plane.isnan().all() for plane in decoder.read_rows(0, slots))
    decoder.run_layer(0, hidden, rows, torch.ones(16, dtype=torch.bool))
    assert all(torch.equal(a, b) for a, b in zip(probed, decoder.read_rows(0, slots), strict=True))
    assert torch.equal(hidden, kept)


def test_attention_sees_stored_rows_not_fresh_ones() -> None:
    decoder = make_decoder()
    slots = decoder.kv.allocate(16)
    tokens = make_tokens(16)
    decoder.prefill(tokens, slots)
    rows = Rows.at(torch.arange(16), slots)
    is_written = torch.zeros(16, dtype=torch.bool)
    hidden = decoder.embed(tokens)
    before = decoder.run_layer(0, hidden, rows, is_written)
    decoder.write_rows(0, slots[5:6], tuple(torch.zeros_like(p) for p in decoder.read_rows(0, slots[5:6])))
    after = decoder.run_layer(0, hidden, rows, is_written)
    assert torch.equal(after[:5], before[:5])
    assert (after[5:] != before[5:]).any(1).all()


def test_room_that_decoding_lacks_is_named() -> None:
    decoder = make_decoder()
    slots = decoder.kv.allocate(8)
    decoder.prefill(make_tokens(8), slots)
    with pytest.raises(SlotError, match="position 8 has no slot"):
        decoder.decode(torch.tensor([1]), torch.tensor([8]), [slots], 2)


def test_short_table_beside_a_long_one_does_not_write_into_another_prompt() -> None:
    decoder = make_decoder()
    long, short = decoder.kv.allocate(20), decoder.kv.allocate(8)
    decoder.prefill(make_tokens(12), long)
    decoder.prefill(make_tokens(8), short)
    before = decoder.read_rows(0, torch.arange(40))
    with pytest.raises(SlotError, match="position 8 has no slot"):
        decoder.decode_step(torch.tensor([1, 1]), torch.tensor([12, 8]), [long, short])
    assert all(
        torch.equal(a.nan_to_num(9), b.nan_to_num(9))
        for a, b in zip(before, decoder.read_rows(0, torch.arange(40)), strict=True)
    )


@pytest.mark.parametrize("missing", ["lm_head.weight", "model.layers.1.self_attn.k_proj.bias", "model.norm.weight"])
def test_model_that_lacks_a_tensor_is_refused(missing: str, tmp_path: Path) -> None:
    write_model(tmp_path, "llama-head24-bias")
    path = tmp_path / "model.safetensors"
    save_file({name: tensor for name, tensor in load_file(path).items() if name != missing}, path)
    with pytest.raises(InvalidInputError, match=missing):
        Decoder.load(tmp_path, blocks=2)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", "gemma3_text"),
        ("hidden_act", "gelu"),
        ("rope_scaling", {"rope_type": "llama3", "factor": 8.0}),
        ("rope_parameters", {"rope_type": "yarn", "rope_theta": 1e4}),
        ("use_sliding_window", True),
        ("quantization_config", {"bits": 4}),
    ],
)
def test_model_that_is_not_implemented_is_refused(key: str, value: object, tmp_path: Path) -> None:
    raw = {**SIZES, "model_type": "llama", "rms_norm_eps": 1e-5, key: value}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(InvalidInputError, match="not implemented"):
        load_config(tmp_path)
