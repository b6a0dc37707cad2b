"""The secondary tier in the real vLLM: OffloadingConnector, tiering manager and our tier, one engine process a leg.

Only the worker that would copy to and from a GPU is a test's own.
"""

import json
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.connectors.vllm_tier.tier_world import PATIENT
from tests.vllm.legs import (
    LEG_TIMEOUT_S,
    ROOT,
    Result,
    ServiceProcess,
    _result,
    environment,
    make_prompts,
    run_leg,
    running_service,
)

PROMPTS = make_prompts()
WHOLE_BLOCKS = 4 * 6
"""Blocks of 32 tokens in four prompts of 200."""
SHARED_BLOCKS = 3
"""Of 100 tokens that all four begin with."""
DIFFERENT = WHOLE_BLOCKS - 3 * SHARED_BLOCKS
BLOCK_BYTES = 4 * 2 * 2 * 32 * 32 * 2
"""Layers, K and V, heads, tokens, head size, bfloat16."""


@pytest.fixture(scope="module")
def service() -> Iterator[ServiceProcess]:
    with running_service() as service:
        yield service


@pytest.fixture(scope="module")
def identity(tiny_model: Path) -> dict[str, str]:
    """What the helper prints for the engine's flags, as a user would put it into the options."""
    done = helper(tiny_model)
    assert done.returncode == 0, done.stderr[-2000:]
    printed: dict[str, str] = json.loads(done.stdout)
    return printed


def helper(model: Path, *flags: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "kvservice.client.connectors.vllm_tier", "--model", str(model)]
    return subprocess.run(
        [*command, "--dtype", "bfloat16", *flags],
        capture_output=True,
        text=True,
        timeout=LEG_TIMEOUT_S,
        check=False,
        cwd=ROOT,
        env=environment(),
    )


def tier_leg(
    model: Path, address: str, options: dict[str, Any], *, rounds: int = 2, is_multiprocess: bool = False, **more: Any
) -> Result:
    """One engine. Several rounds: what was computed in the last step of one is stored in the steps of the next."""
    entry = {"type": "KVServiceTier", "module_path": "kvservice.client.connectors.vllm_tier", "address": address}
    extra = {
        "spec_name": "CpuTieringSpec",
        "spec_module_path": "cpu_tiering",
        "cpu_bytes_to_use": 8 << 20,
        "secondary_tiers": [{**entry, **PATIENT, **options}],
        **more,
    }
    engine = f"kvservice-test-{uuid.uuid4()}"
    transfer = {"kv_connector": "OffloadingConnector", "kv_connector_module_path": None, "engine_id": engine}
    leg = {"model": str(model), "rounds": [PROMPTS] * rounds, "connector": extra, "transfer": transfer, "watch": False}
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("engine_leg.py"), json.dumps(leg)],
        capture_output=True,
        text=True,
        timeout=LEG_TIMEOUT_S,
        check=False,
        cwd=ROOT,
        env={
            **environment(is_multiprocess=is_multiprocess),
            "PYTHONPATH": str(Path(__file__).with_name("offload_spec")),
        },
    )
    for left in Path("/dev/shm").glob(f"vllm_offload_{engine}*"):  # vLLM's own, when its start fails
        left.unlink()
    return _result(done.stdout, done.stderr)


def metric(result: Result, name: str) -> float:
    return result.metrics[f"vllm:kvservice_tier_{name}"]


@pytest.fixture(scope="module")
def plain(tiny_model: Path) -> Result:
    """What vLLM says without us."""
    return run_leg(tiny_model, PROMPTS)


@pytest.fixture(scope="module")
def filled(tiny_model: Path, service: ServiceProcess, identity: dict[str, str]) -> Result:
    """The engine that computed everything and stored it."""
    return tier_leg(tiny_model, service.address, identity)


def test_filling_changes_no_token_and_stores_every_block_once(filled: Result, plain: Result) -> None:
    assert filled.runs[0]["tokens"] == filled.runs[1]["tokens"] == plain.tokens
    assert metric(filled, "rows_stored") == DIFFERENT
    assert metric(filled, "bytes_stored") == DIFFERENT * BLOCK_BYTES
    assert metric(filled, "rows_loaded") == metric(filled, "hook_errors") == 0, "present at zero"


def test_a_second_process_reads_what_the_first_computed(
    tiny_model: Path, service: ServiceProcess, identity: dict[str, str], filled: Result, plain: Result
) -> None:
    result = tier_leg(tiny_model, service.address, identity)
    assert result.runs[0]["tokens"] == plain.tokens
    assert metric(result, "rows_loaded") == metric(result, "rows_hit_host") == DIFFERENT
    assert metric(result, "bytes_loaded") == DIFFERENT * BLOCK_BYTES
    assert metric(result, "tokens_loaded") == DIFFERENT * 32
    assert result.metrics["vllm:external_prefix_cache_hits"] >= DIFFERENT * 32
    assert metric(result, "rows_asked") == metric(result, "rows_missed") + metric(result, "rows_hit_host")
    assert metric(result, "rows_load_failed") == metric(result, "hook_errors") == 0
    assert metric(result, "breaker_lookups") == metric(result, "breaker_stores") == 0
    assert result.runs[0]["cached"] == [192] * 4


def test_an_engine_of_several_processes_reads_it_too(
    tiny_model: Path, service: ServiceProcess, identity: dict[str, str], filled: Result, plain: Result
) -> None:
    result = tier_leg(tiny_model, service.address, identity, is_multiprocess=True)
    assert result.runs[0]["tokens"] == plain.tokens
    assert metric(result, "rows_loaded") == DIFFERENT
    assert metric(result, "rows_load_failed") == metric(result, "hook_errors") == 0


def test_wrong_bytes_would_be_seen(
    tiny_model: Path, service: ServiceProcess, identity: dict[str, str], filled: Result, plain: Result
) -> None:
    result = tier_leg(tiny_model, service.address, identity, rounds=1, zeroes_rows=True)
    assert metric(result, "rows_loaded") > 0
    assert all(one != other for one, other in zip(result.runs[0]["tokens"], plain.tokens, strict=True))


def test_another_model_finds_nothing_of_it(
    tiny_model: Path, service: ServiceProcess, identity: dict[str, str], filled: Result, plain: Result
) -> None:
    result = tier_leg(tiny_model, service.address, {**identity, "config": "another"}, rounds=1)
    assert result.tokens == plain.tokens
    assert metric(result, "rows_loaded") == 0
    assert metric(result, "rows_missed") > 0


def test_without_a_service_the_engine_computes(tiny_model: Path, identity: dict[str, str], plain: Result) -> None:
    result = tier_leg(tiny_model, "unix:/tmp/kvs-nobody.sock", identity)
    assert result.runs[0]["tokens"] == plain.tokens
    assert metric(result, "lookups_failed") > 0
    assert metric(result, "rows_stored") == metric(result, "hook_errors") == 0


def test_a_shared_tier_without_an_identity_stops_the_start_and_says_what_to_do(
    tiny_model: Path, service: ServiceProcess
) -> None:
    with pytest.raises(AssertionError, match="does not tell a tier its weights, config, quantization"):
        tier_leg(tiny_model, service.address, {}, rounds=1)


def test_the_helper_tells_overrides_apart_and_refuses_random_weights(
    tiny_model: Path, identity: dict[str, str]
) -> None:
    assert identity["weights"].startswith("files:")
    assert identity["quantization"] == "none"
    other = helper(tiny_model, "--hf-overrides", '{"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}')
    changed = json.loads(other.stdout)
    assert changed["weights"] == identity["weights"]
    assert changed["config"] != identity["config"]
    dummy = helper(tiny_model, "--load-format", "dummy")
    assert dummy.returncode == 1
    assert "random" in dummy.stderr
