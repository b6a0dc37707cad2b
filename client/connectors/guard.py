"""Hooks that vLLM calls: what goes wrong in them stays in them, is counted, and is logged once a kind."""

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar

from kvservice.client.connectors.vllm.metrics import Counts

log = logging.getLogger("vllm.kvservice")

F = TypeVar("F", bound=Callable[..., Any])


def guarded(neutral: Callable[[], Any]) -> Callable[[F], F]:
    """Keep exceptions of a hook from the engine; it then answers what ``neutral`` gives.

    The hook's object has ``_note_error(hook, error)``.
    """

    def decorate(hook: F) -> F:
        @functools.wraps(hook)
        def guarded_hook(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return hook(self, *args, **kwargs)
            except Exception as error:  # noqa: BLE001  the engine must go on whatever happens here
                self._note_error(hook.__name__, error)
                return neutral()

        return guarded_hook  # type: ignore[return-value]

    return decorate


def nothing() -> None:
    """The neutral answer of a hook that gives none."""
    return


def note_error(counts: Counts, seen: set[tuple[str, str]], hook: str, error: Exception) -> None:
    """Count an error that a hook kept from the engine; ``seen``: the kinds that were logged already."""
    counts.add("hook_errors")
    kind = (hook, type(error).__name__)
    if kind not in seen:
        seen.add(kind)
        log.error("kvservice: %s failed, the engine goes on without it (told once)", hook, exc_info=error)
