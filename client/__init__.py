"""The library that engines use. Names that need torch are imported when first asked for: looking needs no engine."""

from typing import TYPE_CHECKING, Any

from kvservice.client.plans import Plans, PromptPlan, RestoredSpan
from kvservice.client.rounds import PartKind, PromptSegment, ReusePolicy, RoundPrompt
from kvservice.client.session import Session
from kvservice.client.shared_memory import SharedMemoryTransport

if TYPE_CHECKING:
    from kvservice.client.client import Client
    from kvservice.client.restore import Restore
    from kvservice.client.store import StoredSegment, StoreOutcome, StoreRequest, StoreResult

_WITH_TORCH = {
    "Client": "client",
    "Restore": "restore",
    "StoreOutcome": "store",
    "StoreRequest": "store",
    "StoreResult": "store",
    "StoredSegment": "store",
}

__all__ = [
    "Client",
    "PartKind",
    "Plans",
    "PromptPlan",
    "PromptSegment",
    "Restore",
    "RestoredSpan",
    "ReusePolicy",
    "RoundPrompt",
    "Session",
    "SharedMemoryTransport",
    "StoreOutcome",
    "StoreRequest",
    "StoreResult",
    "StoredSegment",
]


def __getattr__(name: str) -> Any:
    if name not in _WITH_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_WITH_TORCH[name]}"), name)
