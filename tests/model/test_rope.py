"""RoPE descriptors read from Hugging Face configs, held against transformers' own initialisers."""

import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kvservice.model.errors import InvalidIdentityError, UnknownRopeKindError
from kvservice.model.rope import PINNED_KINDS, rope_from_parameters, ropes_from_config

SHAPE = {"hidden_size": 256, "num_attention_heads": 4, "num_hidden_layers": 2, "max_position_embeddings": 4096}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "linear", "factor": 4.0},
        YARN,
        {**YARN, "factor": 16.0, "beta_fast": 16.0, "beta_slow": 2.0},
        {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5},
        {**YARN, "attention_factor": 1.3},
        {**YARN, "truncate": False},
        LLAMA3,
    ],
    ids=lambda parameters: "-".join(str(value) for value in parameters.values()),
)
def test_scaled_kinds_agree_with_transformers(parameters: dict[str, object]) -> None:
    full = {"rope_theta": 500000.0, **parameters}
    config = LlamaConfig(**SHAPE, rope_parameters=full)
    frequencies, factor = ROPE_INIT_FUNCTIONS[str(full["rope_type"])](config, torch.device("cpu"))
    ours = ropes_from_config({**SHAPE, "rope_parameters": full})[0]
    torch.testing.assert_close(torch.tensor(ours.frequencies), frequencies, rtol=3e-6, atol=0)
    assert math.isclose(ours.attention_factor, factor, rel_tol=1e-9)
    assert not ours.is_pinned


def test_default_kind_is_the_paper_formula_rounded_to_float32() -> None:
    rope = rope_from_parameters({"rope_theta": 10000.0}, head_size=64, max_positions=2048)
    wanted = torch.tensor([10000.0 ** (-2 * j / 64) for j in range(32)], dtype=torch.float64).float()
    assert torch.equal(torch.tensor(rope.frequencies, dtype=torch.float64), wanted.double())


def test_static_ntk_scales_the_base() -> None:
    rope = rope_from_parameters(
        {"rope_type": "ntk", "rope_theta": 10000.0, "factor": 2.0}, head_size=64, max_positions=2048
    )
    assert math.isclose(rope.frequencies[1], (10000.0 * 2.0 ** (64 / 62)) ** (-2 / 64), rel_tol=1e-6)


def test_old_style_scaling_and_theta_are_read() -> None:
    new = ropes_from_config({**SHAPE, "rope_parameters": {"rope_theta": 5e5, **LLAMA3}})
    old = ropes_from_config(
        {
            **SHAPE,
            "rope_theta": 5e5,
            "rope_scaling": {"type": "llama3", **{k: v for k, v in LLAMA3.items() if k != "rope_type"}},
        }
    )
    assert new == old


@pytest.mark.parametrize("kind", PINNED_KINDS)
def test_length_dependent_kinds_are_pinned_with_the_reason(kind: str) -> None:
    rope = ropes_from_config({**SHAPE, "rope_parameters": {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}})[0]
    assert rope.pinned_reason == PINNED_KINDS[kind]


def test_unknown_kind_is_an_error_that_says_how_to_go_on() -> None:
    with pytest.raises(UnknownRopeKindError, match=r"rope\.pinned"):
        ropes_from_config({**SHAPE, "rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}})


def test_sliding_window_layers_are_pinned_one_by_one() -> None:
    config = {**SHAPE, "rope_theta": 1e4, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 512}
    assert [rope.is_pinned for rope in ropes_from_config(config)] == [True, False]
    whole = {**SHAPE, "rope_theta": 1e4, "sliding_window": 512}
    assert all(rope.is_pinned for rope in ropes_from_config(whole))
    assert not any(rope.is_pinned for rope in ropes_from_config({**whole, "use_sliding_window": False}))


def test_layers_may_have_bases_of_their_own() -> None:
    config = {
        **SHAPE,
        "layer_types": ["full_attention", "other_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            "other_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    }
    first, second = ropes_from_config(config)
    assert first.frequencies[1] < second.frequencies[1]


def test_layers_without_rope_do_not_rotate() -> None:
    first, second = ropes_from_config({**SHAPE, "rope_theta": 1e4, "no_rope_layers": [1, 0]})
    assert len(first.frequencies) == 32
    assert second.frequencies == ()
    assert not second.is_pinned


def test_partial_rotary_and_interleaved_models() -> None:
    rope = ropes_from_config({**SHAPE, "rope_theta": 1e4, "partial_rotary_factor": 0.25, "model_type": "glm"})[0]
    assert (rope.rotary_size, rope.is_interleaved) == (16, True)


def test_latent_attention_rotates_its_rope_part() -> None:
    config = {**SHAPE, "rope_theta": 1e4, "qk_rope_head_dim": 64, "kv_lora_rank": 512}
    rope = ropes_from_config(config)[0]
    assert (rope.rotary_size, rope.is_interleaved) == (64, True)


@pytest.mark.parametrize("missing", ["num_hidden_layers", "max_position_embeddings", "hidden_size"])
def test_missing_numbers_are_named(missing: str) -> None:
    config = {key: value for key, value in SHAPE.items() if key != missing}
    with pytest.raises(InvalidIdentityError, match=missing):
        ropes_from_config(config)
