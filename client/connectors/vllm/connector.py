"""vLLM's door: the class that vLLM builds, once in its scheduler and once in every worker. Imports vLLM.

After its start nothing is raised into the engine: a hook that fails logs it, counts it, and answers as if there were
no cache. Wrong options and a wrong role are raised, at start.
"""

import logging
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvservice.client.connectors.breaker import Breaker
from kvservice.client.connectors.entrance import Entrance
from kvservice.client.connectors.guard import guarded, note_error, nothing
from kvservice.client.connectors.vllm.engine_identity import EngineModel, engine_identities
from kvservice.client.connectors.vllm.identity_file import write_identities
from kvservice.client.connectors.vllm.link import Link
from kvservice.client.connectors.vllm.loads import Loads
from kvservice.client.connectors.vllm.lookups import Lookups
from kvservice.client.connectors.vllm.metadata import NOTHING, StepOrders
from kvservice.client.connectors.vllm.metrics import Counts
from kvservice.client.connectors.vllm.options import ConnectorOptions
from kvservice.client.connectors.vllm.paged import EnginePaged
from kvservice.client.connectors.vllm.passes import MakeEngine, Passes, RunningEngine
from kvservice.client.connectors.vllm.plugin import NoEngineModelError, find_runner
from kvservice.client.connectors.vllm.request_extras import ExtrasReader
from kvservice.client.connectors.vllm.requests import ChainMaker
from kvservice.client.connectors.vllm.saves import Saves
from kvservice.client.connectors.vllm.scheduler import SchedulerSide
from kvservice.client.connectors.vllm.stats import KVServiceProm, KVServiceStats
from kvservice.client.connectors.vllm.wishes import engine_refusal
from kvservice.client.connectors.vllm.worker import WorkerSide
from kvservice.client.rounds import check_layer_of
from kvservice.client.session import Session

KVConnectorMetadata.register(StepOrders)

log = logging.getLogger("vllm.kvservice")


class KVServiceConnector(KVConnectorBase_V1):  # type: ignore[misc]  # vLLM is not installed where mypy runs
    """One side of the connector. Thin: ``SchedulerSide`` or ``WorkerSide`` decide."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        block_size = vllm_config.cache_config.block_size
        self._options = ConnectorOptions.of(self._kv_transfer_config.kv_connector_extra_config, block_size)
        self._entrance = Entrance(self._options, log)
        self.counts = Counts()
        self._seen_errors: set[tuple[str, str]] = set()
        self._chains: ChainMaker | None = None
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._breakers: list[Breaker] = []
        model = engine_identities(vllm_config, kv_cache_config, self._options)
        if model.refusal:
            log.warning("kvservice: no reuse with this engine: %s", model.refusal)
            return
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = self._build_scheduler(model, block_size)
        else:
            self._worker = self._build_worker(model, block_size)

    def _build_scheduler(self, model: EngineModel, block_size: int) -> SchedulerSide:
        namespaces = [identity.namespace() for identity in model.identities]
        link = self._link(model, "scheduler", is_writer=False)
        lookups = Lookups(link, namespaces, self.counts)
        self._chains = ChainMaker(
            namespaces,
            self._options.chunk_tokens,
            block_size,
            ExtrasReader(self._options.adapters),
            self.counts,
            self._reuse_refusal(model),
            self._options.check_layer or check_layer_of(model.identity.geometry.layers),
        )
        if self._kv_transfer_config.kv_load_failure_policy != "recompute":
            log.warning(
                "kvservice: kv_load_failure_policy is %r: a request whose load fails would fail, instead of being "
                'computed; set "kv_load_failure_policy": "recompute"',
                self._kv_transfer_config.kv_load_failure_policy,
            )
        log.info(
            "kvservice: %s, namespace %s, chunks of %d tokens, blocks of %d",
            self._options.address,
            namespaces[0].hex()[:12],
            self._options.chunk_tokens,
            block_size,
        )
        write_identities(self._options.identity_file, model.identities)
        options = self._bounded(model.identity.geometry.layers)
        return SchedulerSide(
            options, block_size, self._chains, lookups, self.counts, refuse_reuse=self._chains.refuse_reuse
        )

    def _bounded(self, layers: int) -> ConnectorOptions:
        """With passes of so few rows that one layer of them is less work than a full step: a slice is a layer at least,
        and who decodes waits no longer for it than for a chunk of a prefill.
        """
        most = int(self._vllm_config.scheduler_config.max_num_batched_tokens) * layers
        return replace(self._options, refresh_rows_max=min(self._options.refresh_rows_max, most))

    def _reuse_refusal(self, model: EngineModel) -> str:
        if not self._options.reuse:
            return 'it is turned off ("reuse": false)'
        return engine_refusal(self._vllm_config, model.identity, self._options.check_layer)

    def _build_worker(self, model: EngineModel, block_size: int) -> WorkerSide:
        rank, identity = model.rank, model.identity

        def make_loads(paged: EnginePaged) -> Loads:
            link = self._link(model, f"loads {rank}", is_writer=False)
            return Loads(link, identity, rank, paged, self._options.load_deadline_s, self.counts)

        link = self._link(model, f"saves {rank}", is_writer=True)
        saves = Saves(link, identity, rank, self._options.saves_bytes_max, self.counts)
        modules = self._vllm_config.compilation_config.static_forward_context
        groups = len(self._kv_cache_config.kv_cache_groups)
        is_reusing = not self._reuse_refusal(model)
        return WorkerSide(
            identity,
            model.layer_names,
            modules,
            block_size,
            groups,
            make_loads,
            saves,
            self.counts,
            make_passes=partial(self._make_passes, model, saves) if is_reusing else None,
            slice_s=self._options.refresh_slice_s,
        )

    def _make_passes(
        self, model: EngineModel, saves: Saves, paged: EnginePaged, loads: Loads, caches: Mapping[str, Any]
    ) -> Passes:
        """Called while vLLM registers its KV caches: only then is the model's runner among the callers, if need be."""
        link = self._link(model, f"rounds {model.rank}", is_writer=True)
        make_engine = engine_maker(self._vllm_config, paged, caches)
        return Passes(
            link,
            model.identity,
            paged,
            loads,
            make_engine,
            saves.staging,
            self.counts,
            deadline_s=self._options.load_deadline_s,
            is_deterministic=self._options.is_deterministic,
        )

    def _link(self, model: EngineModel, name: str, *, is_writer: bool) -> Link:
        """A way to the service with a breaker of its own: slow saves must not keep loads away."""
        options = self._options
        breaker = Breaker(
            time.monotonic,
            failures_max=options.breaker_failures_max,
            slow_s=options.breaker_slow_s,
            pause_s=options.breaker_pause_s,
        )
        self._breakers.append(breaker)
        first = model.identity
        identities = [first, *(one for one in model.identities if one is not first)]
        client_name = f"vllm {os.getpid()} {name}"

        def open_session() -> Session:
            return self._entrance.open(identities, is_writer=is_writer, client_name=client_name)

        return Link(open_session, breaker)

    def _note_error(self, hook: str, error: Exception) -> None:
        note_error(self.counts, self._seen_errors, hook, error)

    # ------------------------------------------------------------------ what vLLM reads of the class

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache: what is not delivered is computed."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Loads within a step are waited for layer by layer, which a whole graph would skip."""
        return not extra_config.get("is_async", True)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVServiceStats:
        """vLLM makes our figures from what a worker sent."""
        return KVServiceStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVServiceProm:
        """Our metrics in vLLM's /metrics."""
        return KVServiceProm(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @guarded(nothing)
    def get_kv_connector_stats(self) -> KVServiceStats | None:
        """What changed since the last step; called on both sides."""
        gauge = "breaker_scheduler" if self._scheduler is not None else "breaker_worker"
        self.counts.set(gauge, max((one.state for one in self._breakers), default=0))
        taken = self.counts.take()
        return None if taken is None else KVServiceStats(data=taken)

    # ------------------------------------------------------------------ scheduler

    @guarded(nothing)
    def on_new_request(self, request: Any) -> None:
        """A request arrived."""
        if self._scheduler is not None:
            self._scheduler.on_new_request(request)

    @guarded(lambda: (0, False))
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many more tokens can be loaded, and whether between steps."""
        if self._scheduler is None:
            return 0, False
        return self._scheduler.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The request has blocks."""
        if self._scheduler is None:
            return
        try:
            self._scheduler.allocated(request, blocks.get_block_ids, num_external_tokens)
        except Exception as error:  # noqa: BLE001  the engine must go on whatever happens here
            self._note_error("update_state_after_alloc", error)
            self._scheduler.order_failure(request.request_id, num_external_tokens)

    @guarded(dict)
    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[CacheHitSource, int]:
        """Which tier the promised tokens come from."""
        if self._scheduler is None or not num_external_tokens:
            return {}
        in_memory, on_ssd = self._scheduler.hit_tokens(request)
        sources = {CacheHitSource.HOST: in_memory, CacheHitSource.DISK: on_ssd}
        return {source: tokens for source, tokens in sources.items() if tokens}

    @guarded(lambda: NOTHING)
    def build_connector_meta(self, scheduler_output: Any) -> StepOrders:
        """What the workers have to do in this step."""
        return NOTHING if self._scheduler is None else self._scheduler.build_orders(scheduler_output)

    @guarded(nothing)
    def update_connector_output(self, connector_output: Any) -> None:
        """What the workers reported of a step."""
        if self._scheduler is not None:
            self._scheduler.update(connector_output)

    @guarded(lambda: (False, None))
    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """A request ended. Its blocks may be freed at once, unless it is an agent's whose output is to be kept."""
        return (False, None) if self._scheduler is None else self._scheduler.ended(request)

    @guarded(lambda: False)
    def reset_cache(self) -> bool:
        """Nothing stored before is found by this engine any more. Other engines keep theirs."""
        if self._scheduler is None or self._chains is None:
            return True
        if not self._scheduler.reset():
            return False
        self._chains.reset()
        return True

    # ------------------------------------------------------------------ worker

    @guarded(nothing)
    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """The engine's paged KV."""
        if self._worker is not None:
            self._worker.register(kv_caches)

    @guarded(nothing)
    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """A step's orders."""
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None:
            self._worker.bind(connector_metadata)

    @guarded(nothing)
    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Blocks may be given to others."""
        if self._worker is not None:
            self._worker.preempted()

    @guarded(nothing)
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin the step's loads."""
        if self._worker is not None:
            self._worker.start_loads()

    @guarded(nothing)
    def wait_for_layer_load(self, layer_name: str) -> None:
        """The engine is about to read this layer."""
        if self._worker is not None:
            self._worker.wait_for_layer(layer_name)

    @guarded(nothing)
    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """The engine has written this layer."""
        if self._worker is not None:
            self._worker.save_layer(layer_name)

    @guarded(nothing)
    def wait_for_save(self) -> None:
        """The forward is over."""
        if self._worker is not None:
            self._worker.finish_saves()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """For engines that do not know ``get_transfer_results``."""
        results = self.get_transfer_results(finished_req_ids)
        return results.finished_sending or None, results.finished_recving or None

    @guarded(KVConnectorTransferResults)
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Requests whose load between steps has ended, and those whose blocks were copied for the last time."""
        if self._worker is None:
            return KVConnectorTransferResults()
        copied = self._worker.take_copied()  # first: what fails behind it must not keep blocks for ever
        try:
            finished, failed = self._worker.take_finished()
        except Exception as error:  # noqa: BLE001  the engine must go on whatever happens here
            self._note_error("get_transfer_results", error)
            return KVConnectorTransferResults(finished_sending=copied)
        return KVConnectorTransferResults(finished_sending=copied, finished_recving=finished, failed_recving=failed)

    @guarded(set)
    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that loads left unfilled."""
        return set() if self._worker is None else self._worker.take_bad_blocks()

    @guarded(nothing)
    def build_connector_worker_meta(self) -> Any:
        """What the scheduler's side has to know besides."""
        return None if self._worker is None else self._worker.take_notice()

    @guarded(nothing)
    def shutdown(self) -> None:
        """Store what waits, end threads and sessions."""
        if self._scheduler is not None:
            self._scheduler.close()
        if self._worker is not None:
            self._worker.close()


def engine_maker(vllm_config: Any, paged: EnginePaged, caches: Mapping[str, Any]) -> MakeEngine:
    """How to get at the model's layers, once they are needed; its runner is looked for now."""
    try:
        runner = find_runner(caches)
    except NoEngineModelError as error:
        missing = error

        def fail() -> RunningEngine:
            raise missing

        return fail

    def make() -> RunningEngine:
        from kvservice.client.connectors.vllm.round_engine import VllmEngine

        return VllmEngine.of(runner, vllm_config, paged)

    return make
