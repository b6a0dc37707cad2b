"""The library that engines use. A name's module is imported when the name is first asked for.

So ``import kvservice.client.<part>`` costs what the part costs: a tool that only looks needs no torch, and an engine
that imports its connector loads neither numba nor kernels (vLLM's CPU worker dies if numba was there before it).
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvservice.client.chat import Message, chat_prompt
    from kvservice.client.client import Client
    from kvservice.client.explain import Explanation
    from kvservice.client.opaque import OpaqueStore
    from kvservice.client.outputs import Output, canonical_order
    from kvservice.client.plans import Plans, PromptPlan, RestoredSpan
    from kvservice.client.restore import Restore
    from kvservice.client.round_request import RoundRequest
    from kvservice.client.rounds import PartKind, PromptSegment, ReusePolicy, RoundPrompt
    from kvservice.client.session import Session
    from kvservice.client.shared_memory import SharedMemoryTransport
    from kvservice.client.store import StoredSegment, StoreOutcome, StoreRequest, StoreResult

_MODULES = {
    "Client": "client",
    "Explanation": "explain",
    "Message": "chat",
    "OpaqueStore": "opaque",
    "Output": "outputs",
    "PartKind": "rounds",
    "Plans": "plans",
    "PromptPlan": "plans",
    "PromptSegment": "rounds",
    "Restore": "restore",
    "RestoredSpan": "plans",
    "ReusePolicy": "rounds",
    "RoundPrompt": "rounds",
    "RoundRequest": "round_request",
    "Session": "session",
    "SharedMemoryTransport": "shared_memory",
    "StoreOutcome": "store",
    "StoreRequest": "store",
    "StoreResult": "store",
    "StoredSegment": "store",
    "canonical_order": "outputs",
    "chat_prompt": "chat",
}

__all__ = [
    "Client",
    "Explanation",
    "Message",
    "OpaqueStore",
    "Output",
    "PartKind",
    "Plans",
    "PromptPlan",
    "PromptSegment",
    "Restore",
    "RestoredSpan",
    "ReusePolicy",
    "RoundPrompt",
    "RoundRequest",
    "Session",
    "SharedMemoryTransport",
    "StoreOutcome",
    "StoreRequest",
    "StoreResult",
    "StoredSegment",
    "canonical_order",
    "chat_prompt",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    found = globals()[name] = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
