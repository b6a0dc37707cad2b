"""RoPE as part of an identity: one descriptor a layer, read from a Hugging Face config.

A descriptor knows its frequencies, or why it has none that a move could use (then it is position-pinned: exact use
only). Attention scaling (YaRN's factor) is already inside stored keys and is never applied again.
Frequencies are rounded to float32, as engines hold them.

Sources: Su et al. 2021 (RoPE); Chen et al. 2023 (linear); bloc97 2023 (NTK-aware); Peng et al. 2023 (YaRN);
the Llama 3.1 model card's reference code (llama3).
"""

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvservice.model.errors import InvalidIdentityError, UnknownRopeKindError

ROTATING_KINDS = ("default", "linear", "ntk", "yarn", "llama3")
PINNED_KINDS = {
    "dynamic": "dynamic NTK changes its frequencies with the current length",
    "longrope": "LongRoPE changes its frequencies between its two regimes",
    "su": "LongRoPE changes its frequencies between its two regimes",
    "mrope": "multimodal RoPE has several positions a token",
}


def float32(value: float) -> float:
    """``value`` rounded to float32."""
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


@dataclass(frozen=True, slots=True)
class Rope:
    """How one layer's keys depend on their position.

    ``frequencies``: radians a position for each rotating pair, ``rotary_size / 2`` of them.
    ``pinned_reason``: why the layer's keys cannot be moved; empty if they can.
    """

    kind: str
    is_interleaved: bool
    rotary_size: int
    frequencies: tuple[float, ...] = field(repr=False)
    attention_factor: float = 1.0
    pinned_reason: str = ""

    def __post_init__(self) -> None:
        if not self.pinned_reason and len(self.frequencies) * 2 != self.rotary_size:
            raise InvalidIdentityError(
                f"rope {self.kind!r}: {len(self.frequencies)} frequencies "
                f"do not make {self.rotary_size} rotating elements"
            )
        if not all(math.isfinite(value) for value in (*self.frequencies, self.attention_factor)):
            raise InvalidIdentityError(f"rope {self.kind!r}: frequencies and attention factor must be finite")

    @property
    def is_pinned(self) -> bool:
        """True if caches of this layer may only be used at the position they were computed at."""
        return bool(self.pinned_reason)


def pinned(kind: str, reason: str, *, rotary_size: int = 0, is_interleaved: bool = False) -> Rope:
    """A position-pinned descriptor: exact use only, and plans say ``reason``."""
    return Rope(kind, is_interleaved, rotary_size, (), pinned_reason=reason)


def opaque_rope() -> Rope:
    """The descriptor of opaque rows: keys are somewhere inside, where only their writer knows."""
    return pinned(
        "opaque", "opaque rows are another program's bytes, and only that program knows where keys are in them"
    )


def rope_from_parameters(
    parameters: Mapping[str, object], *, head_size: int, max_positions: int, is_interleaved: bool = False
) -> Rope:
    """Descriptor from a config's ``rope_parameters`` (or old ``rope_scaling`` with ``rope_theta`` put in).

    ``head_size``: elements of a head (for MLA the rotating part); ``max_positions``: ``max_position_embeddings``.
    Raises UnknownRopeKindError for a kind this program has never heard of.
    """
    kind = str(parameters.get("rope_type", parameters.get("type", "default")))
    partial = _number(parameters, "partial_rotary_factor", 1.0)
    size = int(head_size * partial)
    if kind in PINNED_KINDS:
        return pinned(kind, PINNED_KINDS[kind], rotary_size=size, is_interleaved=is_interleaved)
    if kind not in ROTATING_KINDS:
        raise UnknownRopeKindError(
            f"RoPE kind {kind!r} is unknown (known: {', '.join((*ROTATING_KINDS, *PINNED_KINDS))}). "
            "Give a descriptor made by rope.pinned(kind, reason) to use such caches at their own position only."
        )
    base = _number(parameters, "rope_theta", 10000.0)
    frequencies = _SCALINGS[kind](parameters, base, size, max_positions)
    factor = _yarn_attention_factor(parameters) if kind == "yarn" else 1.0
    return Rope(kind, is_interleaved, size, tuple(float32(f) for f in frequencies), attention_factor=factor)


def ropes_from_config(config: Mapping[str, object]) -> tuple[Rope, ...]:
    """One descriptor a layer from a Hugging Face ``config.json``.

    Reads ``rope_parameters`` (transformers 5, flat or by layer type), ``rope_scaling`` and ``rope_theta`` (older),
    ``layer_types``, ``sliding_window`` and ``no_rope_layers``. Sliding-window layers are position-pinned.
    """
    layers = int(_number(config, "num_hidden_layers"))
    types = _layer_types(config, layers)
    skipped = config.get("no_rope_layers")
    ropes = []
    for layer, layer_type in enumerate(types):
        if isinstance(skipped, Sequence) and skipped and not skipped[layer]:
            ropes.append(Rope("none", False, 0, ()))
        elif "sliding" in layer_type or "chunked" in layer_type:
            ropes.append(pinned(layer_type, "sliding-window layers keep only part of a segment"))
        else:
            ropes.append(_layer_rope(config, layer_type))
    return tuple(ropes)


def _layer_types(config: Mapping[str, object], layers: int) -> list[str]:
    types = config.get("layer_types")
    if isinstance(types, Sequence) and not isinstance(types, str):
        if len(types) != layers:
            raise InvalidIdentityError(f"config: layer_types has {len(types)} entries for {layers} layers")
        return [str(name) for name in types]
    uses_window = bool(config.get("sliding_window")) and config.get("use_sliding_window", True)
    return ["sliding_attention" if uses_window else "full_attention"] * layers


def _layer_rope(config: Mapping[str, object], layer_type: str) -> Rope:
    parameters = _rope_parameters(config, layer_type)
    latent = config.get("qk_rope_head_dim")
    if isinstance(latent, int):
        head_size, interleaved = latent, bool(config.get("rope_interleave", True))
    else:
        head_size, interleaved = _head_size(config), config.get("model_type") in _INTERLEAVED_MODELS
    if "mrope_section" in parameters:
        return pinned("mrope", PINNED_KINDS["mrope"], rotary_size=head_size)
    if config.get("position_embedding_type") in ("absolute", "learned"):
        return pinned("learned", "learned positions cannot be moved")
    return rope_from_parameters(
        parameters,
        head_size=head_size,
        max_positions=int(_number(config, "max_position_embeddings")),
        is_interleaved=interleaved,
    )


_INTERLEAVED_MODELS = ("gptj", "cohere", "cohere2", "glm", "glm4", "ernie4_5")


def _rope_parameters(config: Mapping[str, object], layer_type: str) -> dict[str, object]:
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(found, Mapping):
        raise InvalidIdentityError("config: rope_parameters must be an object")
    if isinstance(found.get(layer_type), Mapping):
        found = found[layer_type]
    parameters = dict(found)
    for name in ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings"):
        if name in config:
            parameters.setdefault(name, config[name])
    return parameters


def _head_size(config: Mapping[str, object]) -> int:
    size = config.get("head_dim")
    if isinstance(size, int):
        return size
    return int(_number(config, "hidden_size")) // int(_number(config, "num_attention_heads"))


def _number(source: Mapping[str, object], name: str, default: float | None = None) -> float:
    value = source.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidIdentityError(f"config: {name} must be a number, it is {value!r}")
    return float(value)


def _default(_: Mapping[str, object], base: float, size: int, __: int) -> list[float]:
    return [base ** (-pair / size) for pair in range(0, size, 2)]


def _linear(parameters: Mapping[str, object], base: float, size: int, limit: int) -> list[float]:
    factor = _number(parameters, "factor")
    return [f / factor for f in _default(parameters, base, size, limit)]


def _ntk(parameters: Mapping[str, object], base: float, size: int, limit: int) -> list[float]:
    scaled = base * _number(parameters, "factor") ** (size / (size - 2))
    return _default(parameters, scaled, size, limit)


def _yarn(parameters: Mapping[str, object], base: float, size: int, limit: int) -> list[float]:
    factor = _number(parameters, "factor")
    original = _number(parameters, "original_max_position_embeddings", float(limit))
    low, high = (
        size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))
        for turns in (_number(parameters, "beta_fast", 32.0), _number(parameters, "beta_slow", 1.0))
    )
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    frequencies = []
    for pair, f in enumerate(_default(parameters, base, size, limit)):
        ramp = min(max((pair - low) / max(high - low, 0.001), 0.0), 1.0)
        frequencies.append(f / factor * ramp + f * (1.0 - ramp))
    return frequencies


def _yarn_attention_factor(parameters: Mapping[str, object]) -> float:
    given = parameters.get("attention_factor")
    if isinstance(given, int | float):
        return float(given)

    def scale(weight: float) -> float:
        factor = _number(parameters, "factor")
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if parameters.get("mscale") and parameters.get("mscale_all_dim"):
        return scale(_number(parameters, "mscale")) / scale(_number(parameters, "mscale_all_dim"))
    return scale(1.0)


def _llama3(parameters: Mapping[str, object], base: float, size: int, limit: int) -> list[float]:
    factor = _number(parameters, "factor")
    low, high = _number(parameters, "low_freq_factor"), _number(parameters, "high_freq_factor")
    original = _number(parameters, "original_max_position_embeddings")
    frequencies = []
    for f in _default(parameters, base, size, limit):
        turns = original * f / (2 * math.pi)  # original context over wavelength
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        frequencies.append((1.0 - smooth) * f / factor + smooth * f)
    return frequencies


_SCALINGS = {"default": _default, "linear": _linear, "ntk": _ntk, "yarn": _yarn, "llama3": _llama3}
