"""The secondary tier against vLLM's own tiering manager, in process: what fails here is a hook that vLLM changed, bytes
that come back wrong, or something that is raised or held."""

import inspect
import random
import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's, on the way
    from vllm.v1.kv_offload.base import (
        LookupResult,
        OffloadPolicy,
        ReqContext,
        RequestOffloadingContext,
        ScheduleEndContext,
        make_offload_key,
    )
    from vllm.v1.kv_offload.config import (
        OffloadingCacheConfig,
        OffloadingConfig,
        OffloadingGroupConfig,
        OffloadingModelConfig,
        OffloadingParallelConfig,
    )
    from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
    from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

    from kvservice.client.connectors.vllm_tier import KVServiceTier

from kvservice.client.connectors.vllm.metrics import Counts
from kvservice.client.connectors.vllm_tier.metrics import COUNTERS, GAUGES
from kvservice.client.connectors.vllm_tier.rows import RowStore
from kvservice.client.opaque import FoundRows
from kvservice.model.errors import ConfigError, CorruptError, LeaseExpiredError, UnavailableError
from kvservice.model.identity import identity_from_json
from tests.connectors.vllm_tier.tier_world import PATIENT, until
from tests.vllm.legs import ServiceProcess, running_service

CHUNKS, ROW_BYTES, TOKENS = 8, 8192, 32
MODULE = "kvservice.client.connectors.vllm_tier"
SHARED = {"weights": "r1", "config": "c1", "quantization": "none"}

SIGNATURES = {
    "__init__": ["self", "offloading_spec", "primary_kv_view", "tier_type", "backpressure_detector"],
    "lookup": ["self", "key", "req_context"],
    "submit_store": ["self", "job_metadata"],
    "submit_load": ["self", "job_metadata"],
    "get_finished_jobs": ["self"],
    "has_pending_work": ["self"],
    "take_events": ["self"],
    "touch": ["self", "keys", "req_context"],
    "on_new_request": ["self", "req_context"],
    "on_request_finished": ["self", "req_context"],
    "serve_external_requests": ["self", "parent"],
    "on_schedule_end": ["self", "context"],
    "drain_jobs": ["self"],
    "shutdown": ["self"],
    "build_metric_definitions": ["extra_config"],
    "get_stats": ["self"],
}
"""Every hook of a tier in the vLLM that this was written for."""


@pytest.fixture(scope="module")
def service() -> Iterator[ServiceProcess]:
    with running_service() as service:
        yield service


def entry(address: str, **changes: Any) -> dict[str, Any]:
    return {"type": "KVServiceTier", "module_path": MODULE, "address": address, **SHARED, **PATIENT, **changes}


def config(*tiers: dict[str, Any]) -> OffloadingConfig:
    return OffloadingConfig(
        groups=(OffloadingGroupConfig(TOKENS, ("l0",), 0),),
        worker_kv_bytes_per_block=ROW_BYTES,
        enable_kv_cache_events=False,
        extra_config={"cpu_bytes_to_use": CHUNKS * ROW_BYTES, "secondary_tiers": list(tiers)},
        engine_id=f"contract-{uuid.uuid4()}",
        model=OffloadingModelConfig("org/model", "bfloat16"),
        cache=OffloadingCacheConfig(TOKENS, 1),
        parallel=OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, True),
        kv_cache_layout="LBHNC",
    )


class Engine:
    """vLLM's manager with our tier below it, and requests that go the way of its scheduler."""

    def __init__(self, *tiers: dict[str, Any]) -> None:
        self.manager = TieringOffloadingSpec(config(*tiers)).get_manager()
        self.tier = self.manager.secondary_tiers[0]
        self.counts: Counts = self.tier._side.counts
        self._requests = 0

    def request(self) -> ReqContext:
        self._requests += 1
        context = ReqContext(req_id=f"request {self._requests}")
        assert self.manager.on_new_request(context).policy is OffloadPolicy.CHUNK_LEVEL
        return context

    def step(self, *running: str) -> None:
        self.manager.on_schedule_end(ScheduleEndContext(running, ()))

    def settle(self) -> None:
        def is_idle() -> bool:
            self.step()
            return not self.manager.has_pending_work()

        until(is_idle)

    def compute(self, keys: list[Any]) -> None:
        """A request whose chunks are computed, offloaded, and cascaded to the tier."""
        context = self.request()
        out = self.manager.prepare_store(keys, context)
        assert out is not None
        view = np.asarray(self.manager.primary_tier.get_kv_memoryview())
        for key, chunk in zip(out.keys_to_store, out.store_spec.chunk_ids, strict=True):
            view[chunk] = content(key)
        del view
        self.manager.complete_store(out.keys_to_store, context, True)
        self.manager.on_request_finished(context)
        self.settle()

    def read(self, keys: list[Any]) -> list[Any]:
        """A request that looks chunks up until it knows; the rows that it gets to load, in front of the first miss."""
        context = self.request()
        found: list[Any] = []

        def is_known() -> bool:
            found[:] = [self.manager.lookup(key, context) for key in keys]
            self.step()
            return LookupResult.RETRY not in found and LookupResult.HIT_PENDING not in found

        until(is_known)
        hits = keys[: found.index(LookupResult.MISS)] if LookupResult.MISS in found else keys
        spec = self.manager.prepare_load(hits, context)
        view = np.asarray(self.manager.primary_tier.get_kv_memoryview())
        rows = [view[chunk].copy() for chunk in spec.chunk_ids]
        del view
        self.manager.complete_load(hits, context)
        self.step(context.req_id)
        self.manager.on_request_finished(context)
        return rows

    def leases(self) -> int:
        session = self.tier._side._found._link._session
        return 0 if session is None else session.leases_held


def content(key: bytes) -> Any:
    return np.random.default_rng(list(key)).integers(-128, 128, ROW_BYTES, np.int8)


def keys_of(first: int, count: int = 4) -> list[Any]:
    return [make_offload_key(number.to_bytes(32, "big"), 0) for number in range(first, first + count)]


def check_rows(rows: list[Any], keys: list[Any]) -> None:
    assert len(rows) == len(keys)
    assert all((row == content(key)).all() for row, key in zip(rows, keys, strict=True))


@pytest.fixture
def engine(service: ServiceProcess, request: pytest.FixtureRequest) -> Iterator[Engine]:
    engine = Engine(entry(service.address, tenant=request.node.name))
    yield engine
    assert engine.counts.total("hook_errors") == 0
    engine.manager.shutdown()


def test_chunks_that_left_the_primary_tier_come_back_with_their_bytes(engine: Engine) -> None:
    parts = [keys_of(first) for first in (0, 10, 20)]  # 12 chunks through a primary tier of 8
    for keys in parts:
        engine.compute(keys)
    for keys in parts:
        check_rows(engine.read(keys), keys)
    assert engine.counts.total("rows_stored") == 12
    assert 4 <= engine.counts.total("rows_loaded") <= 12
    until(lambda: engine.leases() == 0)


def test_another_engine_of_the_same_model_finds_them_and_one_of_another_model_does_not(
    engine: Engine, service: ServiceProcess, request: pytest.FixtureRequest
) -> None:
    keys = keys_of(0)
    engine.compute(keys)
    same = Engine(entry(service.address, tenant=request.node.name))
    other = Engine(entry(service.address, tenant=request.node.name, config="c2"))
    check_rows(same.read(keys), keys)
    assert other.read(keys) == []
    for one in (same, other):
        one.manager.shutdown()


def test_requests_that_need_the_same_chunks_load_them_once(engine: Engine) -> None:
    for first in (0, 10, 20):
        engine.compute(keys_of(first))
    before = engine.counts.total("rows_loaded")
    one, other = engine.request(), engine.request()
    keys = keys_of(0)

    def is_known() -> bool:
        found = [engine.manager.lookup(key, context) for key in keys for context in (one, other)]
        engine.step()
        return set(found) == {LookupResult.HIT}

    until(is_known)
    assert engine.counts.total("rows_loaded") - before == len(keys)
    for context in (one, other):
        engine.manager.on_request_finished(context)
    until(lambda: engine.leases() == 0)


def test_a_load_that_fails_in_part_keeps_the_rest_and_ends(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    for first in (0, 10, 20):
        engine.compute(keys_of(first))
    read = FoundRows.read

    def fails_on_third(self: FoundRows, index: int, target: Any, **options: Any) -> None:
        if index == 2:
            target[:] = 7  # half a copy
            raise CorruptError("planted by the test")
        read(self, index, target, **options)

    monkeypatch.setattr(FoundRows, "read", fails_on_third)
    keys = keys_of(0)
    check_rows(engine.read(keys), keys[:2])
    assert engine.counts.total("rows_load_failed") == 1


def test_a_reset_frees_the_primary_tier_while_copies_are_under_way(engine: Engine) -> None:
    keys = keys_of(0, 8)
    engine.compute(keys)
    engine.manager.reset_cache()
    assert engine.read(keys) == [], "weights may have changed"
    engine.compute(keys)
    check_rows(engine.read(keys), keys)


def test_a_reset_with_unchanged_weights_loads_from_the_tier(service: ServiceProcess) -> None:
    engine = Engine(entry(service.address, tenant="unchanged", keeps_on_reset=True))
    keys = keys_of(0, 8)
    engine.compute(keys)
    context = engine.request()
    engine.manager.lookup(keys_of(90)[0], context)
    engine.manager.reset_cache()
    check_rows(engine.read(keys), keys)
    assert engine.counts.total("rows_loaded") == 8
    engine.manager.on_request_finished(context)
    engine.manager.shutdown()


def test_without_a_service_the_manager_goes_on() -> None:
    engine = Engine(entry("unix:/tmp/kvs-nobody.sock", breaker_failures_max=1))
    keys = keys_of(0)
    engine.compute(keys)
    check_rows(engine.read(keys), keys)  # the primary tier has them
    assert engine.read(keys_of(10)) == []
    assert engine.counts.total("rows_store_dropped") == 4
    engine.manager.shutdown()


class Walk:
    """Requests that come, wait, load, are aborted or preempted, with failures planted in between."""

    def __init__(self, engine: Engine, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine, self.random = engine, random.Random(seed)
        self.active: list[tuple[ReqContext, list[Any]]] = []
        self.read_rows = 0
        for kind, name in ((FoundRows, "read"), (RowStore, "find"), (RowStore, "put")):
            monkeypatch.setattr(kind, name, self._unsteady(getattr(kind, name)))

    def _unsteady(self, method: Any) -> Any:
        def unsteady(*args: Any, **options: Any) -> Any:
            if self.random.random() < 0.1:
                raise self.random.choice([UnavailableError, CorruptError, LeaseExpiredError])("planted by the test")
            return method(*args, **options)

        return unsteady

    def step(self) -> None:
        match self.random.randrange(8):
            case 0 | 1:
                self._compute()
            case 2 | 3:
                self.active.append(
                    (self.engine.request(), keys_of(self.random.randrange(12), self.random.randint(1, 4)))
                )
            case 4 if self.active:
                context, _ = self.active.pop(self.random.randrange(len(self.active)))  # aborted
                self.engine.manager.on_request_finished(context)
            case 5 if self.random.random() < 0.2:
                self.engine.manager.reset_cache()
        for request in list(self.active):
            self._look(*request)
        self.engine.step(*(context.req_id for context, _ in self.active if self.random.random() < 0.1))

    def _compute(self) -> None:
        context, manager = self.engine.request(), self.engine.manager
        out = manager.prepare_store(keys_of(self.random.randrange(12), self.random.randint(1, 3)), context)
        if out is not None and out.keys_to_store:
            for key, chunk in zip(out.keys_to_store, out.store_spec.chunk_ids, strict=True):
                np.asarray(manager.primary_tier.get_kv_memoryview())[chunk] = content(key)
            manager.complete_store(out.keys_to_store, context, True)
        manager.on_request_finished(context)

    def _look(self, context: ReqContext, keys: list[Any]) -> None:
        manager = self.engine.manager
        found = [manager.lookup(key, context) for key in keys]
        if LookupResult.RETRY in found or LookupResult.HIT_PENDING in found:
            return
        hits = keys[: found.index(LookupResult.MISS)] if LookupResult.MISS in found else keys
        chunks = manager.prepare_load(hits, context).chunk_ids
        check_rows([np.asarray(manager.primary_tier.get_kv_memoryview())[chunk] for chunk in chunks], hits)
        self.read_rows += len(hits)
        manager.complete_load(hits, context)
        self.active.remove((context, keys))
        manager.on_request_finished(context)


@pytest.mark.parametrize("seed", range(4))
def test_whatever_happens_rows_are_right_and_nothing_stays_behind(
    service: ServiceProcess, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(
        entry(service.address, tenant=f"walk {seed}", keeps_on_reset=True, breaker_failures_max=1000, load_threads=3)
    )
    walk = Walk(engine, seed, monkeypatch)
    for _ in range(1500):
        walk.step()
    for context, _ in walk.active:
        engine.manager.on_request_finished(context)
    engine.settle()
    until(lambda: engine.leases() == 0)
    assert walk.read_rows > 100, seed
    assert engine.counts.total("rows_loaded") > 5, seed  # how many depends on how busy the machine is
    assert engine.counts.total("rows_load_failed") > 0, seed
    assert engine.counts.total("hook_errors") == 0, seed
    engine.manager.shutdown()


@pytest.mark.parametrize("name", SIGNATURES)
def test_hooks_are_called_as_they_were_when_this_was_written(name: str) -> None:
    theirs = list(inspect.signature(getattr(SecondaryTierManager, name)).parameters)
    assert theirs == SIGNATURES[name]
    own = inspect.signature(getattr(KVServiceTier, name)).parameters
    assert [one for one in own if own[one].kind is not inspect.Parameter.VAR_KEYWORD][: len(theirs)] == theirs


def test_vllm_has_no_hooks_that_we_have_not_seen() -> None:
    hooks = {name for name, value in vars(SecondaryTierManager).items() if callable(value) or "__func__" in dir(value)}
    assert {name for name in hooks if not name.startswith("_")} | {"__init__"} == set(SIGNATURES)
    assert not inspect.isabstract(KVServiceTier)


def test_jobs_and_contexts_have_the_fields_that_are_read() -> None:
    assert {"job_id", "keys", "chunk_ids", "req_context"} <= set(TransferJob.__dataclass_fields__)
    fields = {"job_id", "success", "successful_keys", "transfer_time", "transfer_bytes"}
    assert fields <= set(JobResult.__dataclass_fields__)
    assert ScheduleEndContext._fields == ("new_req_ids", "preempted_req_ids")
    assert "req_id" in ReqContext.__dataclass_fields__


NEUTRAL: dict[str, tuple[list[Any], Any]] = {
    "lookup": ([None, None], LookupResult.MISS),
    "get_finished_jobs": ([], []),
    "on_new_request": ([None], RequestOffloadingContext()),
    "on_request_finished": ([None], None),
    "on_schedule_end": ([None], None),
    "touch": ([[], None], None),
    "drain_jobs": ([], None),
    "has_pending_work": ([], False),
    "get_stats": ([], None),
}


class Broken:
    """A side of which every method raises."""

    counts = Counts(COUNTERS, GAUGES)

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"planted in {name}")


def broken_tier() -> KVServiceTier:
    tier = KVServiceTier.__new__(KVServiceTier)
    tier._side, tier._refused, tier._seen_errors, tier._is_told = Broken(), [], set(), True  # type: ignore[assignment]
    return tier


@pytest.mark.parametrize("name", NEUTRAL)
def test_nothing_is_raised_into_the_engine(name: str) -> None:
    arguments, neutral = NEUTRAL[name]
    tier = broken_tier()
    for _ in range(2):
        assert getattr(tier, name)(*arguments) == neutral
    assert len(tier._seen_errors) <= 1, "logged once a kind"


@pytest.mark.parametrize("name", ["submit_store", "submit_load"])
def test_an_order_that_cannot_begin_ends_all_the_same(name: str) -> None:
    tier = broken_tier()
    job = TransferJob(3, keys_of(0), np.arange(4), name == "submit_load", ReqContext("r"))
    getattr(tier, name)(job)
    assert list(tier.get_finished_jobs()) == [JobResult(job_id=3, success=False)]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"weigths": "r1"}, "did you mean 'weights'"),
        ({"weights": ""}, "does not tell a tier its weights"),
        ({"address": "nowhere"}, "neither"),
        ({"locality": "FAR"}, "locality must be one of LOCAL, REMOTE"),
    ],
)
def test_wrong_options_stop_the_start(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        TieringOffloadingSpec(config({**entry("unix:/tmp/kvs-nobody.sock"), **changes})).get_manager()


def test_what_a_newer_vllm_hands_to_tiers_is_no_wrong_option(tmp_path: Path) -> None:
    spec = TieringOffloadingSpec(config(entry("unix:/tmp/kvs-nobody.sock", locality="REMOTE")))
    view: memoryview = np.zeros((CHUNKS, ROW_BYTES), np.int8).data
    given = {
        "address": "unix:/tmp/kvs-nobody.sock",
        **SHARED,
        "locality": "REMOTE",
        "identity_file": str(tmp_path / "identity.json"),
    }
    tier = KVServiceTier(spec, view, "KVServiceTier", None, **given, something_new=object())
    assert tier.locality is not None
    assert identity_from_json((tmp_path / "identity.json").read_text().strip()) == tier._side.identity
    tier.shutdown()


def test_vllm_builds_it_with_a_backpressure_detector(service: ServiceProcess) -> None:
    detector = {"backpressure_cls": "EMABackpressureDetector", "policy_cls": "DropStorePolicy"}
    engine = Engine(entry(service.address, tenant="pressed", locality="REMOTE", backpressure=detector))
    assert engine.tier.bp_detector is not None
    engine.compute(keys_of(0))
    assert engine.counts.total("rows_stored") == 4
    engine.manager.shutdown()


def test_metrics_are_defined_and_there_from_the_first_step(engine: Engine) -> None:
    tier_class = SecondaryTierFactory.get_tier_class(entry("unix:/x"))
    names = set(tier_class.build_metric_definitions(entry("unix:/x")))
    assert names == {f"vllm:kvservice_tier_{name}" for name in (*COUNTERS, *GAUGES)}
    first = engine.manager.get_stats()
    assert first is not None
    said = first.reduce()
    assert all(said[name] == 0 for name in names)
    engine.compute(keys_of(0))
    stats = engine.manager.get_stats()
    assert stats is not None
    assert stats.reduce()["vllm:kvservice_tier_rows_stored"] == 4
    assert TieringOffloadingSpec.build_metric_definitions({"secondary_tiers": [entry("unix:/x")]}).keys() >= names
