"""Whose chunks these are: the identity of an engine's rows, from what vLLM tells a tier and what the user adds.

A row holds one chunk of every rank of the engine, so an engine has one identity. vLLM tells a tier the groups of
layers, the KV type, the ranks and the layout; it does not tell weights, RoPE and quantization. Without those, engines
that differ in them would read each other's chunks: then nothing is shared. Imports no engine and no torch.
"""

import json
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, is_dataclass, replace
from typing import Any

from kvservice.client.connectors.vllm.weights_digest import model_name
from kvservice.client.connectors.vllm_tier.options import WHERE, TierOptions
from kvservice.model.errors import ConfigError
from kvservice.model.geometry import opaque_geometry
from kvservice.model.identity import Identity
from kvservice.model.rope import opaque_rope
from kvservice.model.segment import digest

HELPER = "python -m kvservice.client.connectors.vllm_tier --model MODEL [the other flags of the engine]"
SHARED_NEEDS = ("weights", "config", "quantization")
RANKS = ("world_size", "tp_size", "pp_size", "pcp_size", "dcp_size")
SMALL_TYPES = ("fp8", "int8", "int4", "nvfp4", "uint8", "turboquant", "ultraquant")
"""KV types that mean nothing without scales."""


@dataclass(frozen=True, slots=True)
class EngineFormat:
    """What decides the order of a row's bytes and is no part of vLLM's ``OffloadingConfig``.

    ``release``: vLLM's, as major.minor: a new one may order them otherwise under the same name. ``device``: its kind.
    ``canonical``: vLLM's own name of its canonical format, versioned by it; empty when that is not in use.
    """

    release: str
    device: str
    canonical: str = ""


def row_identity(config: Any, row_bytes: int, options: TierOptions, form: EngineFormat) -> Identity:
    """Identity of an engine's rows. ``config``: vLLM's ``OffloadingConfig``.

    Raises ConfigError when the rows are to be shared and not all that decides their bytes is known.
    """
    if options.is_shared:
        _check_complete(options, str(config.model.dtype))
    return Identity(
        tenant=options.tenant,
        model=options.model or model_name(str(config.model.name)),
        weights=options.weights if options.is_shared else f"private:{config.engine_id}",
        geometry=opaque_geometry(row_bytes),
        rope=(opaque_rope(),),
        kv_scales=options.kv_scales or "none",
        salt=json.dumps(_meaning(config, options, form), sort_keys=True, separators=(",", ":")),
    )


def after_reset(identity: Identity) -> Identity:
    """An identity that finds nothing of before, and whose rows nobody else finds."""
    base = identity.salt.partition(";reset=")[0]
    return replace(identity, salt=f"{base};reset={secrets.token_hex(16)}")


def _check_complete(options: TierOptions, dtype: str) -> None:
    missing = [name for name in SHARED_NEEDS if not getattr(options, name)]
    if missing:
        raise ConfigError(
            f"{WHERE}: to share chunks with other engines it must be known what decides their bytes, and vLLM does not "
            f"tell a tier its {', '.join(missing)}; `{HELPER}` prints the options to put in; "
            'or set "is_shared": false to keep them to this engine'
        )
    if dtype.startswith(SMALL_TYPES) and not options.kv_scales:
        raise ConfigError(
            f'{WHERE}: KV of type {dtype} means nothing without its scales; give "kv_scales": "checkpoint" if they are '
            'part of the weights, "page" if vLLM keeps them within its blocks; scales calculated at start cannot be '
            'shared: set "is_shared": false'
        )


def _meaning(config: Any, options: TierOptions, form: EngineFormat) -> Mapping[str, object]:
    parallel = config.parallel
    is_topology_free = bool(form.canonical) and bool(parallel.is_parallelism_agnostic)
    ranks = {
        name: int(getattr(parallel, name)) for name in ("world_size", "tp_size", "pp_size", "pcp_size", "dcp_size")
    }
    return {
        "engine": "vllm",
        "format": f"canonical {form.canonical}" if form.canonical else f"direct {form.release} {form.device}",
        "kv_cache_layout": getattr(config, "kv_cache_layout", None),
        "replicated": bool(getattr(config, "replicated_layout", False)) and not is_topology_free,
        "ranks": None if is_topology_free else ranks,
        "worker_bytes_per_block": None if is_topology_free else int(config.worker_kv_bytes_per_block),
        "groups": [_group(group) for group in config.groups],
        "dtype": str(config.model.dtype),
        "tokens_per_hash": int(config.cache.tokens_per_hash),
        "blocks_per_chunk": int(config.cache.blocks_per_chunk),
        "config": options.config,
        "quantization": options.quantization,
        "layout": options.layout,
    }


def _group(group: Any) -> Mapping[str, object]:
    """All that vLLM says of a group, in this release and later ones; of its layers' names a digest."""
    said = asdict(group) if is_dataclass(group) and not isinstance(group, type) else dict(vars(group))
    names = [str(name) for name in said.pop("layer_names")]
    text = {name: value if isinstance(value, int | None) else str(value) for name, value in said.items()}
    return text | {"layers": len(names), "names": digest(b"kvservice layers\0", *map(str.encode, names)).hex()[:16]}
