"""The way to the engine's model: vLLM hands a connector its KV, never the runner whose layers a refresh calls.

vLLM calls ``register`` in all of its processes, with a connector or without, before anything is built: imports nothing
of ours that is heavy, raises nothing, and keeps nothing alive.
"""

import functools
import logging
import sys
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, Final

from kvservice.model.errors import KVServiceError

log = logging.getLogger("vllm.kvservice")

_MARK: Final = "_is_seen_by_kvservice"
_workers: list[weakref.ref[Any]] = []


class NoEngineModelError(KVServiceError):
    """The engine's model runner was not found, so that nothing can be refreshed. Says what was tried."""

    code = "NO_ENGINE_MODEL"


def register() -> None:
    """vLLM's general plugin. From here on every worker that is built is remembered by a weak reference.

    Workers, not runners: their base class is one for all platforms and runners, and costs no import of a runner (0.7 s
    in processes that have none). Safe to call again.
    """
    try:
        from vllm.v1.worker.worker_base import WorkerBase
    except ImportError as error:  # vLLM does not catch what a plugin raises
        log.debug("kvservice: no worker class to watch: %s", error)
        return
    watch(WorkerBase)


def watch(worker_class: Any) -> None:
    """Remember instances of this class, and of those below it, when they are built. Once is enough."""
    if _MARK in vars(worker_class):
        return
    original = worker_class.__init__

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        original(self, *args, **kwargs)
        _workers[:] = [*(one for one in _workers if one() is not None), weakref.ref(self)]

    worker_class.__init__ = __init__
    setattr(worker_class, _MARK, True)


def find_runner(kv_caches: Mapping[str, Any] | None = None) -> Any:
    """The model runner of this process's worker; the plugin's, else that of a caller.

    ``kv_caches``: by layer name, as vLLM registers them; of several runners the one that owns them is meant, and no
    other will do. Without the plugin (``VLLM_PLUGINS``) it is found only under a call of the worker's, as
    ``register_kv_caches`` is. Raises NoEngineModelError.
    """
    remembered = [one for one in _remembered() if kv_caches is None or _owns(one, kv_caches)]
    if remembered:
        return remembered[-1]
    for runner in _callers():
        if kv_caches is None or _owns(runner, kv_caches):
            return runner
    raise NoEngineModelError(
        f"no model runner: of {len(_workers)} workers seen by the plugin kvservice (entry point vllm.general_plugins, "
        f"filtered by VLLM_PLUGINS) and of the callers' own, none has {'these KV caches' if kv_caches else 'one'}"
    )


def _remembered() -> Iterator[Any]:
    for one in _workers:
        runner = getattr(one(), "model_runner", None)  # set some time after the worker is built
        if runner is not None:
            yield runner


def _callers() -> Iterator[Any]:
    """Runners of the workers in whose methods we are, innermost first."""
    frame = sys._getframe(1)
    while frame is not None:
        runner = getattr(frame.f_locals.get("self"), "__dict__", {}).get("model_runner")
        if runner is not None:
            yield runner
        frame = frame.f_back  # type: ignore[assignment]


def _owns(runner: Any, kv_caches: Mapping[str, Any]) -> bool:
    try:
        modules = runner.vllm_config.compilation_config.static_forward_context
        return all(modules[name].kv_cache.data_ptr() == cache.data_ptr() for name, cache in kv_caches.items())
    except (AttributeError, KeyError, TypeError):
        return False
