"""A connector of the tests': loads nothing, finds the runner as ours does, and lets a leg work where ours will.

In the engine's process, its module holds what it saw. In a worker's process of its own it writes a report.
"""

import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata

from kvservice.client.connectors.vllm import plugin
from kvservice.client.connectors.vllm.layout import learn_layouts
from kvservice.client.connectors.vllm.paged import EnginePaged
from kvservice.client.connectors.vllm.round_engine import NoRefreshError, VllmEngine
from kvservice.model.errors import KVServiceError
from kvservice.model.geometry import attention_geometry

BLOCKS: dict[tuple[int, ...], list[int]] = {}
"""Where each prompt lies."""
WORK: list[Callable[[], None]] = []
"""What to do in the next call of ``start_load_kv``."""
HOOKS: list[bool] = []
"""For every layer that vLLM told us of: whether it was one of a refresh."""
FOUND: dict[str, Any] = {}


class NothingToLoad(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is not installed where mypy runs
    """Orders of a step."""


class SpyConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """One side of it."""

    def get_num_new_matched_tokens(self, request: Any, computed: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, count: int) -> None:
        return

    def build_connector_meta(self, scheduled: Any) -> NothingToLoad:
        for new in scheduled.scheduled_new_reqs:
            BLOCKS[tuple(new.prompt_token_ids)] = list(new.block_ids[0])
        return NothingToLoad()

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        report: dict[str, Any] = {"pid": os.getpid(), "seen": len(plugin._workers)}
        try:
            runner = plugin.find_runner(kv_caches)
            report["runner"] = type(runner).__name__
            FOUND.update(runner=runner, config=self._vllm_config, paged=paged_of(self._vllm_config, kv_caches))
            FOUND["engine"] = VllmEngine.of(runner, self._vllm_config, FOUND["paged"])
            report["layers"] = FOUND["engine"].layers
        except KVServiceError as error:
            report["error"], report["is_named"] = str(error), isinstance(error, NoRefreshError)
        folder = self._kv_transfer_config.kv_connector_extra_config["folder"]
        (Path(folder) / "report.json").write_text(json.dumps(report))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        while WORK:
            WORK.pop()()

    def wait_for_layer_load(self, layer_name: str) -> None:
        if "engine" in FOUND:
            HOOKS.append(FOUND["engine"].is_running)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        return

    def wait_for_save(self) -> None:
        return


def paged_of(config: Any, kv_caches: Mapping[str, Any]) -> EnginePaged:
    """The registered KV, layers in order of their numbers."""
    names = sorted(kv_caches, key=lambda name: [int(number) for number in re.findall(r"\d+", name)])
    modules = config.compilation_config.static_forward_context
    layouts = learn_layouts(modules, kv_caches)
    first = modules[names[0]]
    dtype = str(kv_caches[names[0]].dtype).removeprefix("torch.")
    geometry = attention_geometry(
        layers=len(names), heads=first.num_kv_heads, head_size=first.head_size, dtype=dtype, rotary_size=0
    )
    return EnginePaged(
        [kv_caches[name] for name in names],
        [layouts[name] for name in names],
        {name: index for index, name in enumerate(names)},
        config.cache_config.block_size,
        geometry,
    )
