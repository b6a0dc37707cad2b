"""What a model's config.json says of the size of its KV and the cost of its prefill. Pure.

Names are those of Hugging Face's configurations. What is not there is an error, never a guess.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvservice.model.errors import InvalidInputError
from kvservice.model.geometry import DTYPE_BYTES

CONFIG_BYTES_MAX = 1 << 20
DTYPES = DTYPE_BYTES | {"fp8": 1}
NUMBER_MAX = 10**12


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the closed forms need. ``row_elements``: values of one token in one layer, K and V or the latent.

    ``parameters``: that one token passes; 0: unknown. ``attention_elements``: query heads times head size, what a
    token's attention over one other costs. ``windowed_layers``: layers that do not attend to everything.
    """

    layers: int
    row_elements: int
    dtype: str
    parameters: int
    attention_elements: int
    windowed_layers: int = 0

    @property
    def token_bytes(self) -> int:
        """KV bytes of one token, all layers."""
        return self.layers * self.row_elements * DTYPES[self.dtype]


def read_model(path: str, dtype: str = "") -> ModelShape:
    """The shape of the model of a config.json, or of the folder it lies in. Raises InvalidInputError."""
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    try:
        text = file.read_bytes()[: CONFIG_BYTES_MAX + 1]
        config = json.loads(text)
    except (OSError, ValueError) as error:
        raise InvalidInputError(f"cannot read a model's configuration in {file}: {error}") from error
    if len(text) > CONFIG_BYTES_MAX or not isinstance(config, dict):
        raise InvalidInputError(f"{file} is no model's config.json")
    return model_shape(config, dtype)


def model_shape(config: Mapping[str, Any], dtype: str = "") -> ModelShape:
    """The shape that a configuration says; ``dtype`` of the KV cache, if it is another than the model's."""
    text = config.get("text_config")
    if isinstance(text, dict):
        config = {**config, **text}
    layers, heads = _number(config, "num_hidden_layers"), _number(config, "num_attention_heads")
    hidden = _number(config, "hidden_size")
    head_size = _number(config, "head_dim", hidden // heads)
    if not head_size:
        raise InvalidInputError(
            f"{heads} heads in a hidden size of {hidden} leave nothing for each: give head_dim (head_size)"
        )
    latent = _number(config, "kv_lora_rank", 0)
    if latent:
        row, query = (
            latent + _number(config, "qk_rope_head_dim"),
            heads * (latent + _number(config, "qk_rope_head_dim")),
        )
        parameters = 0  # of latent attention and its experts there are too many forms
    else:
        kv = (_number(config, "num_key_value_heads") if "num_key_value_heads" in config else heads) * head_size
        row, query = 2 * kv, heads * head_size
        parameters = _parameters(config, layers, hidden, query, kv)
    kinds = config.get("layer_types")
    windowed = sum("full" not in str(kind) for kind in kinds) if isinstance(kinds, list) else 0
    return ModelShape(layers, row, _dtype(config, dtype), parameters, query, windowed)


def _parameters(config: Mapping[str, Any], layers: int, hidden: int, query: int, kv: int) -> int:
    """Weights that one token passes: attention and gated feed-forward of every layer; of experts those it goes to."""
    if "intermediate_size" not in config and "moe_intermediate_size" not in config:
        return 0
    width = _number(config, "intermediate_size", 0)
    experts = _number(config, "num_experts_per_tok", 0)
    if experts:
        width = experts * _number(config, "moe_intermediate_size", width)
    return layers * (hidden * (2 * query + 2 * kv) + 3 * hidden * width)


def _dtype(config: Mapping[str, Any], given: str) -> str:
    return known_dtype(given or str(config.get("torch_dtype") or config.get("dtype") or "bfloat16"))


def known_dtype(dtype: str) -> str:
    """The same. Raises InvalidInputError for one of unknown size."""
    if dtype not in DTYPES:
        raise InvalidInputError(f"dtype {dtype!r} is not known; use one of {', '.join(sorted(DTYPES))}")
    return dtype


def _number(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = config.get(name)
    value = default if value is None else value
    if type(value) is not int or not 0 <= value <= NUMBER_MAX or (default is None and value < 1):
        rule = f"a whole number above 0 and at most {NUMBER_MAX}"
        raise InvalidInputError(f"config.json: {name} must be {rule}, it is {str(value)[:40]!r}")
    return value
