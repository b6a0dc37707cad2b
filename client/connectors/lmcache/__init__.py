"""What plugs a service into LMCache: an L2 adapter for its server, and a remote connector for its in-process form.

    lmcache server ... --l2-adapter '{"type": "plugin", "module_path": "kvservice.client.connectors.lmcache",
        "class_name": "KVServiceL2Adapter", "adapter_params": {"address": "unix:/run/user/1000/kvservice.sock",
        "model_path": "/models/llama", "kv_format": "vllm 0.32 FLASH_ATTN"}}'

Importing this package imports no LMCache: the logic is tested without it. The classes are imported when asked for.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvservice.client.connectors.lmcache.l2_adapter import KVServiceL2Adapter, KVServiceL2AdapterConfig
    from kvservice.client.connectors.lmcache.remote import KVServiceConnectorAdapter, KVServiceRemoteConnector

_MODULES = {
    "KVServiceConnectorAdapter": "remote",
    "KVServiceL2Adapter": "l2_adapter",
    "KVServiceL2AdapterConfig": "l2_adapter",
    "KVServiceRemoteConnector": "remote",
}

__all__ = ["KVServiceConnectorAdapter", "KVServiceL2Adapter", "KVServiceL2AdapterConfig", "KVServiceRemoteConnector"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
