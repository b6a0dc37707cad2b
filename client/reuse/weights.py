"""The Llama family's configuration and weights, read from a Hugging Face directory without transformers.

Refuses what the decoder does not implement; never guesses, never reads pickle.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open
from torch import Tensor

from kvservice.model.errors import InvalidInputError

MODEL_TYPES: Final = ("llama", "qwen2")
PLAIN_ROPE: Final = ("default", None)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The part of config.json that the arithmetic depends on."""

    model_type: str
    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    positions_max: int
    norm_epsilon: float
    rope_theta: float
    is_tied: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """One layer. Matrices are [outputs, inputs]; q, k, v lie one below the other, and so do gate and up."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    output: Tensor
    output_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """All layers, the embedding [vocab, hidden], the final norm, and the head, which may be the embedding itself."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Tensor


def load_config(directory: Path) -> ModelConfig:
    """Read config.json.

    Raises FileNotFoundError, and InvalidInputError on a model that the decoder does not implement.
    """
    raw = json.loads((directory / "config.json").read_text())
    _refuse_unknown(raw, directory)
    heads = int(raw["num_attention_heads"])
    return ModelConfig(
        model_type=raw["model_type"],
        vocab=int(raw["vocab_size"]),
        hidden=int(raw["hidden_size"]),
        layers=int(raw["num_hidden_layers"]),
        heads=heads,
        kv_heads=int(raw.get("num_key_value_heads") or heads),
        head_size=int(raw.get("head_dim") or raw["hidden_size"] // heads),
        positions_max=int(raw["max_position_embeddings"]),
        norm_epsilon=float(raw["rms_norm_eps"]),
        rope_theta=float(_rope(raw).get("rope_theta", 10000.0)),
        is_tied=bool(raw.get("tie_word_embeddings", False)),
    )


def load_weights(directory: Path, config: ModelConfig, dtype: torch.dtype = torch.float32) -> Weights:
    """Read every *.safetensors of the directory, converted to `dtype`.

    Raises FileNotFoundError when there is none, and InvalidInputError when a tensor is missing.
    """
    tensors = _read_tensors(directory, dtype)

    def get(name: str) -> Tensor:
        if name not in tensors:
            raise InvalidInputError(f"{directory} holds no tensor {name}; convert the model again")
        return tensors[name]

    embedding = get("model.embed_tokens.weight")
    layers = tuple(_layer(get, tensors, f"model.layers.{layer}") for layer in range(config.layers))
    head = embedding if config.is_tied else get("lm_head.weight")
    return Weights(embedding, layers, get("model.norm.weight"), head)


def _layer(get: Callable[[str], Tensor], tensors: Mapping[str, Tensor], name: str) -> LayerWeights:
    def matrix(*parts: str) -> Tensor:
        return torch.cat([get(f"{name}.{part}.weight") for part in parts])

    def bias(*parts: str) -> Tensor | None:
        names = [f"{name}.{part}.bias" for part in parts]
        return torch.cat([get(bias) for bias in names]) if any(bias in tensors for bias in names) else None

    qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    gate_up = ("mlp.gate_proj", "mlp.up_proj")
    return LayerWeights(
        input_norm=matrix("input_layernorm"),
        qkv=matrix(*qkv),
        qkv_bias=bias(*qkv),
        output=matrix("self_attn.o_proj"),
        output_bias=bias("self_attn.o_proj"),
        mlp_norm=matrix("post_attention_layernorm"),
        gate_up=matrix(*gate_up),
        gate_up_bias=bias(*gate_up),
        down=matrix("mlp.down_proj"),
        down_bias=bias("mlp.down_proj"),
    )


def _read_tensors(directory: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    paths = sorted(directory.glob("*.safetensors"))
    if not paths:
        raise FileNotFoundError(f"no *.safetensors in {directory}")
    tensors: dict[str, Tensor] = {}
    for path in paths:
        with safe_open(path, framework="pt") as file:
            tensors |= {name: file.get_tensor(name).to(dtype) for name in file.keys()}  # noqa: SIM118
    return tensors


def _rope(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Theta and kind; transformers 5 keeps both in rope_parameters, older releases apart."""
    scaling = raw.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type"))
    theta = {"rope_theta": raw["rope_theta"]} if "rope_theta" in raw else {}
    return {"rope_type": kind, **theta, **(raw.get("rope_parameters") or {})}


def _refuse_unknown(raw: Mapping[str, Any], directory: Path) -> None:
    wrong = {
        "model_type": raw.get("model_type") not in MODEL_TYPES,
        "hidden_act": raw.get("hidden_act", "silu") != "silu",
        "rope_parameters": _rope(raw).get("rope_type") not in PLAIN_ROPE,
        "use_sliding_window": bool(raw.get("use_sliding_window", False)),
        "quantization_config": raw.get("quantization_config") is not None,
    }
    for key, is_wrong in wrong.items():
        if is_wrong:
            raise InvalidInputError(f"{directory}: {key} = {raw.get(key)!r} is not implemented by the torch decoder")
