"""A secondary tier for vLLM's OffloadingConnector: chunks that left the engine's host memory are kept by a service.

    --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config":
        {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 10737418240, "secondary_tiers": [
            {"type": "KVServiceTier", "module_path": "kvservice.client.connectors.vllm_tier",
             "address": "unix:/run/user/1000/kvservice.sock", "weights": ..., "config": ..., "quantization": ...}]}}'

Importing this package imports no engine: the logic is tested without one. vLLM asks for ``KVServiceTier``.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvservice.client.connectors.vllm_tier.tier import KVServiceTier

__all__ = ["KVServiceTier"]


def __getattr__(name: str) -> Any:
    if name != "KVServiceTier":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvservice.client.connectors.vllm_tier.tier import KVServiceTier

    return KVServiceTier
