"""Who an engine is: one identity for each of its ranks, from vLLM's configuration, or the reason why it has none.

Two engines share KV when all that decides its bytes is equal: weights, dtype, heads, RoPE, shard. What this program
does not know to be complete is refused, in one line that says what to do: never guessed. Imports no torch.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvservice.client.connectors.vllm.options import ConnectorOptions
from kvservice.client.connectors.vllm.weights_digest import weights_digest
from kvservice.model.errors import InvalidIdentityError, InvalidInputError, UnknownRopeKindError
from kvservice.model.geometry import DTYPE_BYTES, Geometry, attention_geometry
from kvservice.model.identity import Identity, Shard
from kvservice.model.rope import Rope, pinned, ropes_from_config
from kvservice.model.segment import digest

DRAFTERS_WITHOUT_KV = ("ngram", "ngram_gpu", "suffix")
"""Speculative methods that add no attention layers of their own."""

_POSITION_NAMES = (
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "rope_local_base_freq",
    "partial_rotary_factor",
    "max_position_embeddings",
    "original_max_position_embeddings",
    "position_embedding_type",
    "layer_types",
    "sliding_window",
    "attention_chunk_size",
    "no_rope_layers",
)


@dataclass(frozen=True, slots=True)
class EngineModel:
    """What an engine computes, in our words.

    ``identities``: one for each rank, pipeline rank by pipeline rank, tensor rank by tensor rank inside; all must hold
    a chunk for it to count. ``rank``: this process's index among them (0 on the scheduler's side). ``layer_names``:
    this rank's attention layers as vLLM names them, in the order of a record's sections.
    ``refusal``: why nothing is reused, in one line for the log; empty if all is well. Then the others are filled.
    """

    identities: tuple[Identity, ...] = ()
    rank: int = 0
    layer_names: tuple[str, ...] = ()
    refusal: str = ""

    @property
    def identity(self) -> Identity:
        """This rank's own."""
        return self.identities[self.rank]


class _RefusedError(Exception):
    """Why an engine has no identity."""


def engine_identities(vllm_config: Any, kv_cache_config: Any, options: ConnectorOptions) -> EngineModel:
    """Identities of an engine's ranks. What cannot be reused, or not be named, is a ``refusal``, never an exception.

    Reads the weights' headers (``weights_digest``) unless ``options.weights`` or the hub's commit names them.
    """
    try:
        _check_engine(vllm_config)
        spec, names = _one_group(kv_cache_config)
        parallel = vllm_config.parallel_config
        rank = int(parallel.rank) % (int(parallel.pipeline_parallel_size) * int(parallel.tensor_parallel_size))
        parts = list(_layer_parts(vllm_config))
        own = parts[rank // int(parallel.tensor_parallel_size)]
        _check_layers(names, own)
        identities = tuple(_identities(vllm_config, spec, parts, options))
    except _RefusedError as refused:
        return EngineModel(refusal=f"kvservice reuses nothing for this engine: {refused}")
    except (InvalidIdentityError, AttributeError, TypeError, ValueError) as error:
        return EngineModel(refusal=f"kvservice reuses nothing: the engine's configuration is not understood: {error}")
    return EngineModel(identities, rank, names)


def _check_layers(names: tuple[str, ...], own: range) -> None:
    if len(names) != len(own):
        raise _RefusedError(
            f"{len(names)} attention layers hold KV, the model has {len(own)} here: a hybrid model, or one with layers "
            "of another kind"
        )


def _check_engine(config: Any) -> None:
    model, parallel, cache = config.model_config, config.parallel_config, config.cache_config
    for is_so, reason in (
        (_is_set(model, "use_mla"), "latent attention (MLA) is not supported yet"),
        (_is_set(model, "is_hybrid"), "hybrid models (state layers beside attention) are not supported yet"),
        (_is_set(model, "is_encoder_decoder"), "encoder-decoder models are not supported"),
        (getattr(model, "runner_type", "generate") == "pooling", "pooling models do not reuse KV"),
        (_is_set(parallel, "decode_context_parallel_size", 1), "decode context parallelism splits tokens over ranks"),
        (_is_set(parallel, "prefill_context_parallel_size", 1), "prefill context parallelism splits tokens over ranks"),
        (_is_set(cache, "kv_cache_dtype_skip_layers"), "layers with different KV types are not supported"),
        (_is_set(model.hf_text_config, "num_kv_shared_layers"), "the model shares KV between layers"),
    ):
        if is_so:
            raise _RefusedError(reason)
    drafter = getattr(config, "speculative_config", None)
    if drafter is not None and getattr(drafter, "method", None) not in DRAFTERS_WITHOUT_KV:
        raise _RefusedError(f"speculative decoding by {drafter.method!r} has KV of its own, which is not stored yet")
    if str(cache.cache_dtype).startswith(("fp8", "int8", "int4", "nvfp4", "turboquant", "ultraquant")):
        raise _RefusedError(
            f"KV of type {cache.cache_dtype} has scales outside its blocks; start vLLM with --kv-cache-dtype auto"
        )


def _is_set(source: Any, name: str, neutral: object = None) -> bool:
    value = getattr(source, name, neutral)
    return bool(value) and value != neutral


def _one_group(kv_cache_config: Any) -> tuple[Any, tuple[str, ...]]:
    """The one group's spec, and its layers in order of their numbers: as text, 10 would come before 2."""
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        raise _RefusedError(f"a hybrid model: {len(groups)} groups of KV layers, and only one is supported yet")
    spec = groups[0].kv_cache_spec
    if type(spec).__name__ != "FullAttentionSpec":  # its subclasses hold other things; by name, to import no engine
        raise _RefusedError(f"its KV is of kind {type(spec).__name__}; only full attention is supported yet")
    if getattr(spec, "non_causal", False):
        raise _RefusedError("its attention is not causal: KV depends on what comes later")
    if spec.head_size_v != spec.head_size or getattr(spec, "tokens_per_state", 1) != 1:
        raise _RefusedError("its K and V rows differ in size, or hold several tokens")
    numbers = {name: tuple(map(int, re.findall(r"(?<![^.])\d+(?![^.])", name))) for name in groups[0].layer_names}
    if len(set(numbers.values())) != len(numbers) or () in numbers.values():
        raise _RefusedError(f"its attention layers have no numbers to order them by: {sorted(numbers)[:3]}")
    return spec, tuple(sorted(numbers, key=lambda name: numbers[name]))


def _layer_parts(config: Any) -> Iterator[range]:
    """The model's layers on each pipeline rank."""
    total, ranks = (
        int(config.model_config.get_total_num_hidden_layers()),
        int(config.parallel_config.pipeline_parallel_size),
    )
    if ranks == 1:
        yield range(total)
        return
    from vllm.distributed.utils import get_pp_indices

    for rank in range(ranks):
        yield range(*get_pp_indices(total, rank, ranks))


def _identities(config: Any, spec: Any, parts: list[range], options: ConnectorOptions) -> Iterator[Identity]:
    dtype = str(spec.dtype).removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise _RefusedError(f"KV of type {dtype} is not supported; start vLLM with --kv-cache-dtype auto")
    weights = options.weights or _weights(config, options)
    text = _plain(config.model_config.hf_text_config.to_dict())
    ropes = _ropes(text, parts[-1].stop, int(spec.head_size))
    tensor_ranks = int(config.parallel_config.tensor_parallel_size)
    for pp_rank, part in enumerate(parts):
        rope = ropes[part.start : part.stop]
        geometry = _geometry(spec, dtype, rope)
        for tp_rank in range(tensor_ranks):
            yield Identity(
                options.tenant,
                options.model or _model_name(config.model_config),
                weights,
                geometry,
                rope,
                shard=Shard(tp_rank, tensor_ranks, pp_rank, len(parts)),
                lossy=options.lossy,
                salt=_salt(config.model_config, text) + (f";layers={part.start}-{part.stop}" if len(parts) > 1 else ""),
            )


def _geometry(spec: Any, dtype: str, ropes: tuple[Rope, ...]) -> Geometry:
    rotary_size = max((rope.rotary_size for rope in ropes if rope.frequencies), default=0)
    heads, head_size = int(spec.num_kv_heads), int(spec.head_size)
    return attention_geometry(layers=len(ropes), heads=heads, head_size=head_size, dtype=dtype, rotary_size=rotary_size)


def _ropes(text: Mapping[str, object], layers: int, head_size: int) -> tuple[Rope, ...]:
    """One descriptor a layer. What is not understood is pinned: exact reuse needs no frequencies, and the salt holds
    the configuration's own words, so that two kinds that are not understood are never taken for the same."""
    try:
        ropes = ropes_from_config(text)
    except (UnknownRopeKindError, InvalidIdentityError) as error:
        return tuple(pinned("unknown", str(error)) for _ in range(layers))
    sizes = {rope.rotary_size for rope in ropes if rope.frequencies}
    if len(ropes) != layers or len(sizes) > 1 or max(sizes, default=0) > head_size:
        return tuple(pinned("unknown", "its RoPE does not fit its heads or layers") for _ in range(layers))
    return ropes


def _weights(config: Any, options: ConnectorOptions) -> str:
    if not options.is_shared:
        return f"private:{config.kv_transfer_config.engine_id}"
    try:
        return weights_name(config.model_config, config.load_config)
    except UnnamedWeightsError as error:
        how = 'give "weights" in kv_connector_extra_config, a name that changes with the weights, or "is_shared": false'
        raise _RefusedError(f"{error}; {how}") from error


class UnnamedWeightsError(Exception):
    """Why nothing names an engine's weights."""


def weights_name(model: Any, load_config: Any) -> str:
    """What weights are called: the hub's commit, or a digest of a folder (``weights_digest``).

    ``model``, ``load_config``: vLLM's ``ModelConfig`` and ``LoadConfig``. Raises UnnamedWeightsError.
    """
    if getattr(load_config, "load_format", "auto") == "dummy":
        raise UnnamedWeightsError("its weights are random (load format dummy)")
    path = Path(model.model)
    if not path.exists():
        commit = getattr(model.revision, "resolved", None) or _config_commit(model)
        if not commit:
            raise UnnamedWeightsError(f"the revision of {model.model!r} is not known")
        return str(commit)
    try:
        return f"files:{weights_digest(path)}"
    except InvalidInputError as error:
        raise UnnamedWeightsError(f"no digest of its weights: {error}") from error


def config_digest(model: Any) -> str:
    """A digest of all that a model's configuration says, RoPE above all, with overrides and compute type.

    ``model``: vLLM's ``ModelConfig``. 32 hexadecimal digits.
    """
    dtype = str(model.dtype).removeprefix("torch.")
    return _short_digest({"dtype": dtype, "text": _whole(_plain(model.hf_text_config.to_dict()))})


def _config_commit(model: Any) -> object:
    is_of_weights = getattr(model, "hf_config_path", None) in (None, model.model)
    return getattr(model.hf_config, "_commit_hash", None) if is_of_weights else None


def _model_name(model: Any) -> str:
    """The hub's name; for a local folder its architecture, since the folder is called otherwise on every machine."""
    if not Path(model.model).exists():
        return str(model.model)
    return "+".join(getattr(model.hf_config, "architectures", None) or [str(model.hf_config.model_type)])


def _salt(model: Any, text: Mapping[str, object]) -> str:
    """What else changes KV and is no part of the weights: compute type, quantisation at load, positions, overrides."""
    positions = {name: text[name] for name in _POSITION_NAMES if name in text}
    parts = [f"dtype={str(model.dtype).removeprefix('torch.')}", f"quantization={model.quantization}"]
    parts.append(f"positions={_short_digest(positions)}")
    if model.hf_overrides:
        parts.append(f"overrides={_short_digest(_whole(text))}")
    return ";".join(parts)


def _whole(text: Mapping[str, object]) -> Mapping[str, object]:
    return {name: value for name, value in text.items() if name not in ("transformers_version", "_name_or_path")}


def _short_digest(values: object) -> str:
    return digest(b"kvservice config\0", json.dumps(values, sort_keys=True, default=str).encode()).hex()[:32]


def _plain(config: Any) -> Mapping[str, object]:
    """The configuration as JSON would hold it: equal in every process and release of Python."""
    plain: Mapping[str, object] = json.loads(json.dumps(config, default=str))
    return plain
