"""vLLM's connector: prompts that any engine computed before are loaded instead of computed.

    --kv-transfer-config '{"kv_connector": "KVServiceConnector", "kv_role": "kv_both",
        "kv_connector_module_path": "kvservice.client.connectors.vllm", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"address": "unix:/run/user/1000/kvservice.sock"}}'

Importing this package imports no engine: the logic is tested without one. vLLM asks for ``KVServiceConnector``.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvservice.client.connectors.vllm.connector import KVServiceConnector

__all__ = ["KVServiceConnector"]


def __getattr__(name: str) -> Any:
    if name != "KVServiceConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvservice.client.connectors.vllm.connector import KVServiceConnector

    return KVServiceConnector
