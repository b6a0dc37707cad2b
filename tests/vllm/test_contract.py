"""The connector against vLLM's own base class: what fails here is a hook that vLLM changed, or one that raises."""

import inspect
import warnings
from types import SimpleNamespace
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's, on the way
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorMetadata,
        KVConnectorRole,
        KVConnectorTransferResults,
        supports_hma,
    )

    from kvservice.client.connectors.vllm import KVServiceConnector
    from kvservice.client.connectors.vllm.stats import KVServiceStats

from kvservice.client.connectors.vllm.metadata import NOTHING
from kvservice.client.connectors.vllm.metrics import COUNTERS, GAUGES, Counts
from tests.vllm.engine_leg import CONNECTOR

NEUTRAL: dict[str, tuple[list[Any], Any]] = {
    "on_new_request": ([None], None),
    "get_num_new_matched_tokens": ([None, 0], (0, False)),
    "build_connector_meta": ([None], NOTHING),
    "update_connector_output": ([None], None),
    "request_finished": ([None, []], (False, None)),
    "register_kv_caches": ([{}], None),
    "handle_preemptions": ([None], None),
    "start_load_kv": ([None], None),
    "wait_for_layer_load": (["x"], None),
    "save_kv_layer": (["x", None, None], None),
    "wait_for_save": ([], None),
    "get_finished": ([set()], (None, None)),
    "get_transfer_results": ([set()], KVConnectorTransferResults()),
    "get_block_ids_with_load_errors": ([], set()),
    "build_connector_worker_meta": ([], None),
    "reset_cache": ([], False),
    "shutdown": ([], None),
}
"""Every hook: arguments, and what it answers when all within it fails."""


class Broken:
    """A side of which every method raises."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"planted in {name}")


def broken_connector() -> KVServiceConnector:
    connector = KVServiceConnector.__new__(KVServiceConnector)
    connector.counts, connector._seen_errors = Counts(), set()
    connector._scheduler = connector._worker = connector._chains = Broken()  # type: ignore[assignment]
    return connector


def ours() -> list[str]:
    names = [name for name, value in vars(KVServiceConnector).items() if inspect.isfunction(value)]
    return [name for name in names if not name.startswith("_")]


def test_vllm_finds_the_class_and_does_not_take_it_for_a_hybrid_one() -> None:
    config = SimpleNamespace(**CONNECTOR)
    assert KVConnectorFactory.get_connector_class(config) is KVServiceConnector
    assert not supports_hma(KVServiceConnector)
    assert not inspect.isabstract(KVServiceConnector)


@pytest.mark.parametrize("name", ours())
def test_hooks_take_what_vllm_gives(name: str) -> None:
    theirs = inspect.signature(getattr(KVConnectorBase_V1, name))
    own = inspect.signature(getattr(KVServiceConnector, name))
    assert list(own.parameters) == list(theirs.parameters)


@pytest.mark.parametrize("name", NEUTRAL)
def test_nothing_is_raised_into_the_engine(name: str) -> None:
    arguments, neutral = NEUTRAL[name]
    connector = broken_connector()
    for _ in range(2):
        assert getattr(connector, name)(*arguments) == neutral
    assert connector.counts.total("hook_errors") == 2
    assert len(connector._seen_errors) == 1, "logged once a kind"


def test_no_hook_is_left_out() -> None:
    unguarded = {"bind_connector_metadata", "update_state_after_alloc", "get_kv_connector_stats"}
    hooks = set(ours()) - unguarded - {"get_external_cache_hit_sources"}
    assert hooks == set(NEUTRAL)


def test_orders_are_metadata_of_vllms_kind() -> None:
    assert isinstance(NOTHING, KVConnectorMetadata)


def test_a_cache_needs_no_delivery() -> None:
    assert KVServiceConnector.requires_kv_delivery.fget(broken_connector()) is False  # type: ignore[attr-defined]


def test_figures_of_two_workers_become_one() -> None:
    one = KVServiceStats(data={"loads": 2, "breaker_worker": 0})
    other = KVServiceStats(data={"loads": 3, "breaker_worker": 2})
    assert one.aggregate(other).data == {"loads": 5, "breaker_worker": 2}
    assert set(one.data) <= set(COUNTERS) | set(GAUGES)
    assert not one.is_empty()


def test_the_roles_are_the_two_we_build_for() -> None:
    assert {role.name for role in KVConnectorRole} == {"SCHEDULER", "WORKER"}
