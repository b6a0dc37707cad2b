"""The engine's own decoder layers, found in its runner, or the reason why they cannot be called one by one.

What is not known to be the standard call is refused by name, never guessed. Imports no engine.
"""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor

from kvservice.client.connectors.vllm.paged import EnginePaged
from kvservice.model.errors import KVServiceError

LAYER_ARGUMENTS: Final = ("positions", "hidden_states", "residual")


class NoRefreshError(KVServiceError):
    """The engine's layers cannot be run on chosen rows: nothing is refreshed, all else works. Says why, in one line."""

    code = "NO_REFRESH"


@dataclass(frozen=True, slots=True, eq=False)
class EngineLayers:
    """What a refresh calls of an engine.

    ``inner``: the model without its head; ``layers`` and ``attentions``: its layers and their attention modules, in
    order. ``builder``: makes attention metadata of the backend in use, for nobody else. ``device``: where tensors lie.
    ``rows_max``, ``runs_max``: what one call may have of each, as devices' buffers are sized; 0 is no limit.
    """

    config: Any
    inner: Any
    layers: tuple[Any, ...]
    attentions: tuple[Any, ...]
    builder: Any
    device: Any
    rows_max: int
    runs_max: int

    @classmethod
    def of(cls, runner: Any, vllm_config: Any, paged: EnginePaged) -> "EngineLayers":
        """The layers of this runner's model, whose KV is ``paged``. Raises NoRefreshError."""
        try:
            _check_config(vllm_config)
            inner, layers = _layers(runner)
            attentions = tuple(_attention(number, layer) for number, layer in enumerate(layers))
            _check_caches(attentions, paged)
            builder = _builder(runner)
            scheduler, device = vllm_config.scheduler_config, paged.caches[0].device
            is_limited = device.type != "cpu"
            rows_max, runs_max = int(scheduler.max_num_batched_tokens), int(scheduler.max_num_seqs)
        except (AttributeError, TypeError, ValueError) as error:
            raise NoRefreshError(f"this engine is not understood: {error}") from error
        limits = (rows_max, runs_max) if is_limited else (0, 0)
        return cls(vllm_config, inner, layers, attentions, builder, device, *limits)


def _check_config(config: Any) -> None:
    for is_so, reason in _refusals(config):
        if is_so:
            raise NoRefreshError(reason)


def _refusals(config: Any) -> Iterator[tuple[bool, str]]:
    model, parallel = config.model_config, config.parallel_config
    for name, what in (
        ("tensor_parallel_size", "tensor parallelism: every rank would have to pick the same rows"),
        ("pipeline_parallel_size", "pipeline parallelism: a rank has only some of the layers"),
        ("decode_context_parallel_size", "decode context parallelism splits tokens over ranks"),
        ("prefill_context_parallel_size", "prefill context parallelism splits tokens over ranks"),
    ):
        yield int(getattr(parallel, name, 1)) > 1, what
    is_dense = getattr(parallel, "is_moe_model", None) is False
    yield int(parallel.data_parallel_size) > 1 and not is_dense, "data parallelism: experts' ranks run in step"
    yield (
        bool(getattr(parallel, "enable_eplb", False)),
        "expert load balancing would count rows that are computed again",
    )
    yield config.speculative_config is not None, "speculative decoding: a drafter would miss the rows"
    yield config.lora_config is not None, "LoRA: adapters are mapped to the engine's own batch only"
    yield bool(model.is_multimodal_model), "multimodal models embed more than tokens"
    yield bool(getattr(model, "uses_mrope", False)), "positions of several dimensions (M-RoPE)"


def _layers(runner: Any) -> tuple[Any, tuple[Any, ...]]:
    unwrap = getattr(runner, "get_model", None)
    model = unwrap() if callable(unwrap) else runner.model
    name = type(model).__name__
    inner = getattr(model, "model", None)
    layers = getattr(inner, "layers", None)
    if not layers:
        raise NoRefreshError(f"{name} has no .model.layers")
    if not callable(getattr(inner, "embed_input_ids", None)):
        raise NoRefreshError(f"{name} has no .model.embed_input_ids")
    return inner, tuple(layers)


def _attention(number: int, layer: Any) -> Any:
    """The layer's attention module; refuses a layer that is not called like all standard ones."""
    name = f"layer {number} ({type(layer).__name__})"
    found = list(inspect.signature(type(layer).forward).parameters.values())[1:]
    extra = [one.name for one in found[3:] if one.default is one.empty and one.kind in _NEEDED]
    if tuple(one.name for one in found[:3]) != LAYER_ARGUMENTS or extra:
        raise NoRefreshError(
            f"{name} is called with ({', '.join(one.name for one in found)}), not ({', '.join(LAYER_ARGUMENTS)})"
        )
    attention = getattr(getattr(layer, "self_attn", None), "attn", None)
    if attention is None:
        raise NoRefreshError(f"{name} has no .self_attn.attn")
    if getattr(attention, "kv_sharing_target_layer_name", None) is not None:
        raise NoRefreshError(f"{name} reads the KV of {attention.kv_sharing_target_layer_name}")
    if getattr(attention, "attn_type", "decoder") != "decoder":
        raise NoRefreshError(f"{name} has attention of type {attention.attn_type}")
    return attention


_NEEDED = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def _check_caches(attentions: tuple[Any, ...], paged: EnginePaged) -> None:
    """Layer by layer, what attention reads is what we read."""
    if len(paged.caches) != len(attentions):
        raise NoRefreshError(f"{len(paged.caches)} layers hold KV, {len(attentions)} are called")
    if len({layout.block_size for layout in paged.layouts}) > 1:
        raise NoRefreshError("layers with blocks of different sizes")
    for number, (attention, cache) in enumerate(zip(attentions, paged.caches, strict=True)):
        if paged.indices.get(attention.layer_name) != number or not _is_same(attention.kv_cache, cache):
            raise NoRefreshError(f"layer {number} attends to other KV ({attention.layer_name}) than was registered")


def _is_same(one: Tensor, other: Tensor) -> bool:
    return (one.data_ptr(), one.shape, one.stride()) == (other.data_ptr(), other.shape, other.stride())


def _builder(runner: Any) -> Any:
    """One of our own: some keep what they built for the step under way, which a refresh must not replace."""
    groups = getattr(runner, "attn_groups", None)
    if groups is None:
        raise NoRefreshError(f"{type(runner).__name__} has no attention groups where they were expected (attn_groups)")
    kinds = [group for of_cache in groups for group in of_cache]
    if len(groups) != 1 or len(kinds) != 1:
        raise NoRefreshError(
            f"{len(groups)} groups of KV layers with {len(kinds)} kinds of attention; one is supported"
        )
    if getattr(kinds[0], "kernel_block_size", None) is not None:
        raise NoRefreshError("attention in blocks smaller than the KV cache's, packed among others")
    shared = kinds[0].get_metadata_builder()
    return type(shared)(shared.kv_cache_spec, shared.layer_names, shared.vllm_config, shared.device)
