"""vLLM's door for a secondary tier: what its tiering manager builds, in the scheduler's process. Imports vLLM.

After its start nothing is raised into the engine: a hook that fails logs it, counts it, and answers as if there were
no tier. Wrong options and an identity that is not complete are raised, at start.
"""

import inspect
import logging
from collections.abc import Collection, Iterable
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from kvservice.client.connectors.guard import guarded, note_error, nothing
from kvservice.client.connectors.vllm.identity_file import write_identities
from kvservice.client.connectors.vllm_tier.identity import EngineFormat, row_identity
from kvservice.client.connectors.vllm_tier.lookups import Verdict
from kvservice.client.connectors.vllm_tier.metrics import COUNTERS, GAUGES
from kvservice.client.connectors.vllm_tier.options import WHERE, TierOptions
from kvservice.client.connectors.vllm_tier.side import TierSide
from kvservice.client.connectors.vllm_tier.transfers import Job, Order
from kvservice.model.errors import ConfigError

PREFIX = "vllm:kvservice_tier_"
OF_VLLM = ("type", "module_path", "backpressure", "locality")
"""Keys of a tier's entry that vLLM itself knows."""

log = logging.getLogger("vllm.kvservice")

_RESULTS = {Verdict.HIT: LookupResult.HIT, Verdict.MISS: LookupResult.MISS, Verdict.LATER: LookupResult.RETRY}


class KVServiceTier(SecondaryTierManager):  # type: ignore[misc]  # vLLM is not installed where mypy runs
    """The tier. Thin: ``TierSide`` decides. All hooks are called by one thread at a time, under the manager's lock."""

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        *,
        locality: str | None = None,
        **given: Any,
    ) -> None:
        """``given``: our options, and whatever a newer vLLM hands to tiers. Raises ConfigError."""
        takes = inspect.signature(SecondaryTierManager.__init__).parameters
        extra = {"backpressure_detector": backpressure_detector} if "backpressure_detector" in takes else {}
        super().__init__(offloading_spec, primary_kv_view, tier_type, **extra)
        self.locality = _locality(locality)
        options = TierOptions.of(given, _written_by_user(offloading_spec, tier_type))
        config, row_bytes = offloading_spec.config, self.block_size_bytes
        identity = row_identity(config, row_bytes, options, _format(config))
        tokens = {group.group_id: group.tokens_per_block * config.cache.blocks_per_chunk for group in config.groups}
        self._side = TierSide(primary_kv_view, identity, options, tokens)
        self._refused: list[int] = []
        self._seen_errors: set[tuple[str, str]] = set()
        self._is_told = False
        log.info(
            "kvservice: secondary tier at %s, chunks of %d bytes, %s",
            options.address,
            row_bytes,
            "shared" if options.is_shared else "for this engine alone",
        )
        write_identities(options.identity_file, [identity])

    @guarded(lambda: LookupResult.MISS)
    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        """Whether the service has a chunk; RETRY while that is not known."""
        return _RESULTS[self._side.ask(req_context.req_id, key)]

    def submit_store(self, job_metadata: Any) -> None:
        """Begin to copy chunks to the service."""
        self._submit("submit_store", job_metadata, is_load=False)

    def submit_load(self, job_metadata: Any) -> None:
        """Begin to copy chunks from the service."""
        self._submit("submit_load", job_metadata, is_load=True)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Jobs that ended since the last call."""
        refused, self._refused = self._refused, []
        return [JobResult(job_id=number, success=False) for number in refused] + self._finished()

    @guarded(RequestOffloadingContext)
    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        """Chunks as they are computed are enough: what is held already is not stored again."""
        return RequestOffloadingContext()

    @guarded(nothing)
    def on_request_finished(self, req_context: Any) -> None:
        """What was found for the request is let go."""
        self._side.ended(req_context.req_id)

    @guarded(nothing)
    def on_schedule_end(self, context: Any) -> None:
        """Send the step's questions. Requests that begin to run ask no more: what was found for them is let go."""
        self._side.flush(list(context.new_req_ids))

    @guarded(nothing)
    def touch(self, keys: Collection[bytes], req_context: Any) -> None:
        """The service counts use by what is looked up and loaded."""

    @guarded(nothing)
    def drain_jobs(self) -> None:
        """Block until no copy touches vLLM's memory; see ``TierSide.drain`` for what is found afterwards."""
        self._side.drain()

    @guarded(lambda: False)
    def has_pending_work(self) -> bool:
        """The manager steps on by itself while a job is under way, and nothing else here needs steps."""
        return False

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        """Our metrics in vLLM's /metrics."""
        counters = {PREFIX + name: OffloadingCounterMetadata(documentation=text) for name, text in COUNTERS.items()}
        return counters | {PREFIX + name: OffloadingGaugeMetadata(documentation=text) for name, text in GAUGES.items()}

    @guarded(nothing)
    def get_stats(self) -> OffloadingConnectorStats | None:
        """What changed since the last call; all of it, at 0, the first time."""
        changed = self._side.figures()
        if not self._is_told:
            self._is_told = True
            changed = dict.fromkeys((*COUNTERS, *GAUGES), 0) | (changed or {})
        if changed is None:
            return None
        stats = OffloadingConnectorStats()
        for name, value in changed.items():
            (stats.set_gauge if name in GAUGES else stats.increase_counter)(PREFIX + name, value)
        return stats

    def shutdown(self) -> None:
        """End threads and sessions, drop every view of vLLM's memory.

        Raises UnavailableError if a copy does not end: the manager then keeps the memory mapped, as it must.
        """
        self._side.close()

    def _submit(self, hook: str, job: Any, *, is_load: bool) -> None:
        """vLLM waits for the end of every job, so one that cannot begin ends at once."""
        try:
            chunks = [int(chunk) for chunk in job.chunk_ids]
            begin = self._side.load if is_load else self._side.store
            begin(Order(job.job_id, job.req_context.req_id, list(job.keys), chunks))
        except Exception as error:  # noqa: BLE001  the engine must go on whatever happens here
            self._note_error(hook, error)
            self._refused.append(job.job_id)

    @guarded(list)
    def _finished(self) -> list[JobResult]:
        return [self._result(job) for job in self._side.take_finished()]

    def _result(self, job: Job) -> JobResult:
        done = job.done
        return JobResult(
            job_id=job.order.number,
            success=job.is_good,
            successful_keys=tuple(done) if job.is_load and done and not job.is_good else None,
            transfer_time=job.seconds,
            transfer_bytes=len(done) * self.block_size_bytes,
        )

    def _note_error(self, hook: str, error: Exception) -> None:
        note_error(self._side.counts, self._seen_errors, hook, error)


def _written_by_user(offloading_spec: Any, tier_type: str) -> set[str]:
    """Names of options in the user's own words: others that are unknown come from vLLM."""
    entries = offloading_spec.config.extra_config.get("secondary_tiers", [])
    ours = (entry for entry in entries if entry.get("type") == tier_type)
    return {name for entry in ours for name in entry} - set(OF_VLLM)


def _locality(given: str | None) -> Locality | None:
    known = [one.value for one in Locality]
    if given is not None and given not in known:
        raise ConfigError(f"{WHERE}: locality must be one of {', '.join(known)}, it is {given!r}")
    return None if given is None else Locality(given)


def _format(config: Any) -> EngineFormat:
    from vllm import __version__
    from vllm.platforms import current_platform

    release = ".".join(__version__.split(".")[:2])
    if not getattr(config, "canonical_layout", False):
        return EngineFormat(release, str(current_platform.device_type))
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.canonical_mapping import canonical_format_id

    return EngineFormat(release, str(current_platform.device_type), str(canonical_format_id(config.kv_cache_layout)))
