"""Closed forms of a round, and what a model's configuration says."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvservice.model.errors import InvalidInputError
from kvservice.planning.closed_forms import RoundShape, Speed, what_if
from kvservice.planning.model_config import ModelShape, model_shape, read_model

QWEN_7B = {
    "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "hidden_size": 3584,
    "intermediate_size": 18944, "torch_dtype": "bfloat16",
}  # fmt: skip
DEEPSEEK = {
    "num_hidden_layers": 61, "num_attention_heads": 128, "hidden_size": 7168, "kv_lora_rank": 512,
    "qk_rope_head_dim": 64, "torch_dtype": "bfloat16",
}  # fmt: skip


def test_bytes_per_token_are_those_of_known_models() -> None:
    assert model_shape(QWEN_7B).token_bytes == 57344
    assert model_shape(DEEPSEEK).token_bytes == 70272
    assert model_shape(QWEN_7B, "fp8").token_bytes == 57344 // 2


def test_parameters_are_those_that_a_token_passes() -> None:
    assert model_shape(QWEN_7B).parameters == pytest.approx(6.5e9, rel=0.02)
    moe = QWEN_7B | {"num_experts_per_tok": 8, "num_experts": 128, "moe_intermediate_size": 768}
    assert model_shape(moe).parameters < model_shape(QWEN_7B).parameters
    assert model_shape(DEEPSEEK).parameters == 0


def test_a_vision_models_text_part_counts() -> None:
    assert model_shape({"text_config": QWEN_7B, "hidden_size": 1}).token_bytes == 57344


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"num_hidden_layers": "28"}, "num_hidden_layers"),
        ({"num_key_value_heads": -4}, "num_key_value_heads"),
        ({"torch_dtype": "int3"}, "dtype"),
        ({"num_attention_heads": 4000}, "head_dim"),
        ({"num_key_value_heads": 0}, "num_key_value_heads"),
        ({"hidden_size": 10**400}, "hidden_size"),
    ],
)
def test_a_configuration_that_says_nothing_usable_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        model_shape(QWEN_7B | change)


def test_files_that_are_no_configuration_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    for text in ("", "[]", "{", "\xff"):
        file.write_text(text)
        with pytest.raises(InvalidInputError, match=r"config\.json"):
            read_model(str(file))
    with pytest.raises(InvalidInputError, match="nowhere"):
        read_model(str(tmp_path / "nowhere"))
    file.write_text(json.dumps(QWEN_7B))
    assert read_model(str(tmp_path)) == model_shape(QWEN_7B)


def test_a_round_of_ten_takes_a_sixth_where_a_mirror_takes_a_seventeenth() -> None:
    """N = 10, T / (P + r S) = 17.5: 10 / (1 + 9 / 17.5) = 6.6."""
    shape = RoundShape(agents=10, tokens=100_000, private_share=0.0, refresh_ratio=1 / 17.5)
    assert what_if(model_shape(QWEN_7B), shape, Speed())["ratio"] == pytest.approx(6.60, abs=0.01)


@pytest.mark.parametrize(("private", "limit"), [(0.05, 9.6), (0.1, 6.6), (0.2, 4.1), (0.5, 1.9)])
def test_what_is_private_bounds_what_any_number_of_agents_saves(private: float, limit: float) -> None:
    shape = RoundShape(agents=1_000_000, tokens=8192, private_share=private, refresh_ratio=0.057)
    found = what_if(model_shape(QWEN_7B), shape, Speed())
    assert found["ratio_limit"] == pytest.approx(limit, abs=0.06)
    assert found["ratio"] == pytest.approx(found["ratio_limit"], rel=0.001)


def test_break_even_bandwidth_and_seconds_follow_from_the_flops() -> None:
    found = what_if(model_shape(QWEN_7B), RoundShape(tokens=8192), Speed(flops=445e12), 64 << 30)
    assert found["break_even_bytes_per_s"] == pytest.approx(1.68e9, rel=0.15)
    saved, token_s = found["prefill_saved_s"], 57344 / (found["break_even_bytes_per_s"] or 1)
    assert saved == pytest.approx((found["prefill_tokens_without"] - found["prefill_tokens"]) * token_s, rel=1e-3)
    assert found["rounds_in_host"] == pytest.approx((64 << 30) / found["stored_bytes"])


def test_without_a_speed_seconds_are_unknown_and_the_answer_says_what_to_give() -> None:
    found = what_if(model_shape(DEEPSEEK), RoundShape(), Speed(flops=1e14))
    assert found["prefill_saved_s"] is None
    assert found["break_even_bytes_per_s"] is None
    assert any("prefill_tokens_per_s" in note for note in found["notes"])


def test_a_limit_too_large_for_a_number_is_none() -> None:
    assert (
        what_if(model_shape(QWEN_7B), RoundShape(private_share=5e-324, refresh_ratio=0.0), Speed())["ratio_limit"]
        is None
    )


@settings(deadline=None)
@given(st.integers(1, 1000), st.integers(1, 100_000), st.floats(0, 1), st.floats(0, 1), st.integers(1, 100))
def test_a_round_never_takes_more_than_dense_nor_less_than_one_prompt(
    agents: int, tokens: int, private: float, refresh: float, layers: int
) -> None:
    model = ModelShape(layers, 256, "bfloat16", 0, 0)
    found = what_if(model, RoundShape(agents, tokens, private, refresh), Speed())
    assert model.token_bytes * tokens - 1 <= found["stored_bytes"] <= found["dense_bytes"] + 1
    assert 1.0 <= found["ratio"] <= agents


@pytest.mark.parametrize(
    "values", [{"agents": 0}, {"tokens": 0}, {"private_share": 1.1}, {"refresh_ratio": -0.1}, {"refresh_ratio": 2.0}]
)
def test_rounds_that_cannot_be_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match=next(iter(values))):
        RoundShape(**values)
