"""Next to the real LMCache: equal tokens after its server, or its engine, was started anew; our counters say why."""

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvservice.client.session import Session
from kvservice.client.shared_memory import SharedMemoryTransport
from kvservice.model.geometry import opaque_geometry
from kvservice.model.identity import Identity
from kvservice.model.rope import opaque_rope
from tests.vllm.legs import Result, ServiceProcess, make_prompts, run_leg, running_service, with_ssd
from tests.vllm.lmcache_world import CHUNK, MODULE, LMCacheServer, run_lmcache_leg, running_lmcache

if importlib.util.find_spec("lmcache") is None:
    pytest.skip("LMCache is not in this environment; `make vllm-env` puts it there", allow_module_level=True)

PROMPTS = make_prompts(shared=0)
"""Without a common beginning: LMCache loads one object for one request at a time, and others compute it meanwhile."""
CHUNKS = 4 * 3
PREFIX = "remote_storage_plugin.kvservice."


def params(service: ServiceProcess, model: Path) -> dict[str, object]:
    return {"address": service.address, "model_path": str(model), "kv_format": "vllm cpu", "lookup_deadline_s": 5.0}


def stats(service: ServiceProcess) -> dict[str, Any]:
    looker = Identity("tests", "looker", "none", opaque_geometry(1), (opaque_rope(),))
    with Session(SharedMemoryTransport(service.address), [looker], is_writer=False) as session:
        document: dict[str, Any] = json.loads(session.stats_json())
        return document


@pytest.fixture(scope="module")
def plain(tiny_model: Path) -> Result:
    """What vLLM says without a cache."""
    return run_leg(tiny_model, PROMPTS)


@pytest.fixture(scope="module")
def service() -> Iterator[ServiceProcess]:
    with running_service() as service:
        yield service


@pytest.fixture(scope="module")
def server(service: ServiceProcess, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with running_lmcache(params(service, tiny_model), tmp_path_factory.mktemp("lmcache")) as server:
        yield server


@pytest.fixture(scope="module")
def filled(server: LMCacheServer, tiny_model: Path) -> Result:
    return run_lmcache_leg(tiny_model, PROMPTS, server.connector)


def test_filling_changes_no_token_and_stores_every_chunk(
    filled: Result, plain: Result, server: LMCacheServer, service: ServiceProcess
) -> None:
    assert filled.tokens == plain.tokens
    status = server.status()
    assert (status["objects_stored"], status["objects_refused"], status["hook_errors"]) == (CHUNKS, 0, 0)
    assert stats(service)["writes"]["published"] == CHUNKS


def test_an_engine_behind_a_server_started_anew_loads_from_the_service(
    filled: Result, plain: Result, server: LMCacheServer, service: ServiceProcess, tiny_model: Path
) -> None:
    before = stats(service)["lookups"]["exact"]
    server.restart()
    result = run_lmcache_leg(tiny_model, PROMPTS, server.connector)
    assert result.tokens == plain.tokens
    assert result.runs[0]["cached"] == [3 * CHUNK] * 4
    assert result.metrics["vllm:external_prefix_cache_hits"] == CHUNKS * CHUNK
    status = server.status()
    assert (status["objects_loaded"], status["objects_load_failed"]) == (CHUNKS, 0)
    assert status["locks"] == 0, "every lock was given back"
    assert stats(service)["lookups"]["exact"] - before == status["objects_hit"] >= CHUNKS
    assert stats(service)["handles"]["leases"] == 0


def test_wrong_bytes_would_be_seen(
    filled: Result, plain: Result, service: ServiceProcess, tiny_model: Path, tmp_path: Path
) -> None:
    zeros = {"module": "lmcache_zeros", "class_name": "ZerosL2Adapter"}
    with running_lmcache(params(service, tiny_model), tmp_path, **zeros) as server:
        result = run_lmcache_leg(tiny_model, PROMPTS, server.connector)
        assert server.status()["objects_loaded"] == CHUNKS
    assert all(one != two for one, two in zip(result.tokens, plain.tokens, strict=True))


def test_what_another_format_stored_is_not_found(
    filled: Result, plain: Result, service: ServiceProcess, tiny_model: Path, tmp_path: Path
) -> None:
    other = params(service, tiny_model) | {"kv_format": "vllm gpu"}
    with running_lmcache(other, tmp_path) as server:
        result = run_lmcache_leg(tiny_model, PROMPTS, server.connector)
        assert server.status()["objects_hit"] == 0
    assert result.tokens == plain.tokens
    assert result.runs[0]["cached"] == [0] * 4


def test_a_service_that_is_away_costs_only_the_cache(plain: Result, tiny_model: Path, tmp_path: Path) -> None:
    nobody: dict[str, object] = {
        "address": "unix:/tmp/kvs-nobody.sock",
        "model_path": str(tiny_model),
        "kv_format": "vllm cpu",
    }
    with running_lmcache(nobody, tmp_path) as server:
        result = run_lmcache_leg(tiny_model, PROMPTS, server.connector)
        status = server.status()
    assert result.tokens == plain.tokens
    assert status["lookups_failed"] > 0
    assert status["objects_stored"] == status["hook_errors"] == 0


def test_chunks_outlive_service_and_server(plain: Result, tiny_model: Path, tmp_path: Path) -> None:
    with running_service(*with_ssd(tmp_path / "ssd")) as service:
        with running_lmcache(params(service, tiny_model), tmp_path) as server:
            run_lmcache_leg(tiny_model, PROMPTS, server.connector)
        service.restart()
        with running_lmcache(params(service, tiny_model), tmp_path) as server:
            result = run_lmcache_leg(tiny_model, PROMPTS, server.connector)
            status = server.status()
    assert result.tokens == plain.tokens
    assert status["objects_loaded"] == CHUNKS
    assert status["objects_hit_ssd"] >= CHUNKS


def test_a_server_with_a_misspelt_parameter_does_not_start(tmp_path: Path) -> None:
    with (
        pytest.raises(AssertionError, match="did you mean 'address'"),
        running_lmcache({"adress": "unix:/tmp/x.sock"}, tmp_path),
    ):
        pass


# ---------------------------------------------------------------------- in the engine's process


def in_process(
    folder: Path, model: Path, service: ServiceProcess, *, hash_algorithm: str = "sha256_cbor", **leg: Any
) -> Result:
    """One engine with LMCache inside it, and our remote connector inside that."""
    extra: dict[str, object] = {PREFIX + name: value for name, value in params(service, model).items()}
    extra |= {PREFIX + "module_path": MODULE, PREFIX + "class_name": "KVServiceConnectorAdapter"}
    settings = {
        "chunk_size": CHUNK,
        "local_cpu": False,
        "max_local_cpu_size": 0.25,
        "pre_caching_hash_algorithm": hash_algorithm,
        "remote_storage_plugins": ["kvservice"],
        "extra_config": extra,
    }
    path = folder / "lmcache.yaml"
    path.write_text(json.dumps(settings))  # JSON is YAML
    transfer = {"kv_connector": "LMCacheConnectorV1", "kv_connector_module_path": None}
    engine = {"enable_prefix_caching": False}
    return run_lmcache_leg(
        model, PROMPTS, {}, transfer=transfer, in_process=True, environment={"LMCACHE_CONFIG_FILE": str(path)},
        engine=engine, **leg,
    )  # fmt: skip


def test_a_second_engine_loads_what_the_first_stored(plain: Result, tiny_model: Path, tmp_path: Path) -> None:
    with running_service() as service:
        first = in_process(tmp_path, tiny_model, service)
        assert stats(service)["writes"]["published"] == CHUNKS
        second = in_process(tmp_path, tiny_model, service)
        zeros = in_process(tmp_path, tiny_model, service, zeros=True)
        document = stats(service)
    assert first.tokens == second.tokens == plain.tokens
    assert first.metrics["vllm:external_prefix_cache_hits"] == 0
    assert second.metrics["vllm:external_prefix_cache_hits"] == CHUNKS * CHUNK
    assert second.runs[0]["cached"] == [3 * CHUNK] * 4
    assert document["lookups"]["exact"] >= 2 * CHUNKS
    assert all(one != two for one, two in zip(zeros.tokens, plain.tokens, strict=True))


def test_what_is_wrong_ends_the_start_and_says_what_to_set(tiny_model: Path, tmp_path: Path) -> None:
    """LMCache's default is its builtin hash. LMCache alone would log what we say of it, and go on without a cache."""
    with running_service() as service:
        with pytest.raises(AssertionError, match=r"kvservice: .* set pre_caching_hash_algorithm: sha256_cbor"):
            in_process(tmp_path, tiny_model, service, hash_algorithm="builtin")
        assert stats(service)["writes"]["reserved"] == 0
