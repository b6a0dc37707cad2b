"""The connector in the real vLLM: equal tokens, whatever is loaded, lost, late or wrong. One engine process a leg."""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.legs import (
    CHUNK,
    TEXTS,
    Prompts,
    Result,
    ServiceProcess,
    make_prompts,
    run_leg,
    running_service,
    stepwise_leg,
    with_ssd,
)

PROMPTS = make_prompts()
WHOLE = 4 * 192
"""Tokens of the prompts in whole chunks."""
LOADABLE = WHOLE - 3 * 96
"""The same less what the engine's own prefix cache has for the last three, if the first is there in time."""


def options(service: ServiceProcess, **more: object) -> dict[str, object]:
    return {"address": service.address, "chunk_tokens": CHUNK, **more}


@pytest.fixture(scope="module")
def plain(tiny_model: Path) -> Result:
    """What vLLM says without us."""
    return run_leg(tiny_model, PROMPTS)


@pytest.fixture(scope="module")
def service() -> Iterator[ServiceProcess]:
    with running_service() as service:
        yield service


@pytest.fixture(scope="module")
def filled(tiny_model: Path, service: ServiceProcess) -> Result:
    """The engine that computed everything and stored it."""
    return run_leg(tiny_model, PROMPTS, connector=options(service))


def check_equal(result: Result, plain: Result) -> None:
    assert result.tokens == plain.tokens
    assert result.leases == 0
    assert result.counts["hook_errors"] == 0


def check_loaded(result: Result) -> None:
    """All that could be loaded was, and vLLM says so too."""
    loaded = result.metric("tokens_loaded")
    assert LOADABLE <= loaded <= WHOLE
    assert loaded == result.metrics["vllm:external_prefix_cache_hits"]


def test_filling_changes_no_token_and_stores_every_chunk_once(filled: Result, plain: Result) -> None:
    check_equal(filled, plain)
    assert filled.counts["chunks_saved"] == 1 + 4 * 2
    assert filled.counts["tokens_loaded"] == filled.counts["saves_dropped"] == 0
    assert filled.metric("tokens_loaded") == 0, "present from the start"


@pytest.mark.parametrize("is_async", [True, False])
def test_a_second_process_loads_what_the_first_computed(
    tiny_model: Path, service: ServiceProcess, filled: Result, plain: Result, is_async: bool
) -> None:
    result = run_leg(tiny_model, PROMPTS, connector=options(service, is_async=is_async))
    check_equal(result, plain)
    check_loaded(result)
    assert result.counts["tokens_hit_host"] == result.counts["tokens_loaded"] == result.metric("tokens_loaded")
    assert result.runs[0]["cached"] == [192] * 4
    assert result.counts["chunks_saved"] == result.counts["loads_failed"] == 0


def test_wrong_bytes_would_be_seen(tiny_model: Path, service: ServiceProcess, filled: Result, plain: Result) -> None:
    result = run_leg(tiny_model, PROMPTS, connector=options(service), sabotage=["zeros"])
    check_loaded(result)
    assert all(one != other for one, other in zip(result.tokens, plain.tokens, strict=True))


@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize("sabotage", ["corrupt", "corrupt second chunk", "slow"])
def test_failed_loads_are_computed(
    tiny_model: Path, service: ServiceProcess, filled: Result, plain: Result, sabotage: str, is_async: bool
) -> None:
    connector = options(service, is_async=is_async, load_deadline_s=1 if sabotage == "slow" else 10)
    result = run_leg(tiny_model, PROMPTS, connector=connector, sabotage=[sabotage])
    check_equal(result, plain)
    assert result.counts["loads_failed"] > 0
    assert result.counts["tokens_recomputed"] > 0
    assert (result.counts["tokens_loaded"] > 0) == (sabotage == "corrupt second chunk")


def test_without_a_service_the_engine_computes(tiny_model: Path, plain: Result) -> None:
    connector = {"address": "unix:/tmp/kvs-nobody.sock", "chunk_tokens": CHUNK}
    result = run_leg(tiny_model, PROMPTS, connector=connector)
    check_equal(result, plain)
    assert result.counts["lookups_failed"] > 0
    assert result.counts["chunks_saved"] == 0


@pytest.mark.parametrize("is_async", [True, False])
def test_a_service_killed_in_mid_load_costs_computing_only(tiny_model: Path, plain: Result, is_async: bool) -> None:
    with running_service() as service:
        run_leg(tiny_model, PROMPTS, connector=options(service))
        connector, pid = options(service, is_async=is_async), service.pid
        result = run_leg(
            tiny_model, PROMPTS, connector=connector, sabotage=["kill service"], service_pid=pid, max_tokens=16
        )
    check_equal(result, plain)
    assert result.counts["loads"] + result.counts["loads_failed"] > 0


def test_after_a_restart_of_the_service_its_ssd_answers(tiny_model: Path, plain: Result, tmp_path: Path) -> None:
    with running_service(*with_ssd(tmp_path / "ssd")) as service:
        run_leg(tiny_model, PROMPTS, connector=options(service))
        service.restart()
        result = run_leg(tiny_model, PROMPTS, connector=options(service))
    check_equal(result, plain)
    check_loaded(result)
    assert result.metric("tokens_hit_ssd") > 0


def test_an_engine_outlives_its_service_and_comes_back_to_it(tiny_model: Path, plain: Result) -> None:
    others = make_prompts(seed=1)
    rounds: list[Prompts] = [PROMPTS, others, others, PROMPTS]
    with (
        running_service() as service,
        stepwise_leg(tiny_model, rounds, connector=options(service, breaker_pause_s=0.2), engine=FRESH) as leg,
    ):
        leg.wait()
        leg.go_on()  # stored
        leg.wait()
        service.stop(signal.SIGKILL)
        leg.go_on()  # computed, with nobody there
        leg.wait()
        service.start()
        leg.go_on()  # computed again, stored with the new one if it is back by then
        leg.wait()
        leg.go_on()
        result = leg.result()
    assert result.tokens[:4] == result.tokens[12:] == plain.tokens
    assert result.tokens[4:8] == result.tokens[8:12]
    assert result.counts["hook_errors"] == 0
    assert result.leases == 0


FRESH: dict[str, Any] = {"enable_prefix_caching": False}
"""So that each round asks us for all of it."""


def test_engines_with_other_block_sizes_share_a_store(
    tiny_model: Path, service: ServiceProcess, filled: Result, plain: Result
) -> None:
    result = run_leg(tiny_model, PROMPTS, connector=options(service), engine={"block_size": 64})
    check_equal(result, plain)
    assert result.counts["tokens_loaded"] > 0


def test_engines_with_other_chunk_sizes_only_miss(
    tiny_model: Path, service: ServiceProcess, filled: Result, plain: Result
) -> None:
    result = run_leg(tiny_model, PROMPTS, connector=options(service, chunk_tokens=96))
    check_equal(result, plain)
    assert result.counts["chunks_saved"] > 0


def test_what_an_engine_with_amx_stored_is_read_by_one_without(smollm2_model: Path, service: ServiceProcess) -> None:
    """A real model: the two engines round differently, which makes the random one say other things."""
    import torch

    if not torch.cpu._is_amx_tile_supported():
        pytest.skip("this machine has no AMX")
    shared: dict[str, Any] = {"engine": {"skip_tokenizer_init": False}, "max_tokens": 12}
    plain = run_leg(smollm2_model, TEXTS, without_amx=True, **shared)
    stored = run_leg(smollm2_model, TEXTS, connector=options(service), **shared)
    result = run_leg(smollm2_model, TEXTS, connector=options(service), without_amx=True, **shared)
    check_equal(result, plain)
    assert result.counts["tokens_loaded"] > 0
    assert stored.counts["chunks_saved"] > 0


def test_an_engine_of_several_processes_loads_too(
    tiny_model: Path, service: ServiceProcess, filled: Result, plain: Result
) -> None:
    result = run_leg(tiny_model, PROMPTS, connector=options(service), is_multiprocess=True)
    assert result.tokens == plain.tokens
    check_loaded(result)
    assert result.metric("hook_errors") == 0


def test_sixty_four_requests_with_preemptions_say_what_they_say_without_us(
    tiny_model: Path, service: ServiceProcess
) -> None:
    prompts = make_prompts(64, seed=2)
    crowded: dict[str, Any] = {"engine": {"kv_cache_memory_bytes": 4 << 20, "max_num_seqs": 64}, "max_tokens": 64}
    plain = run_leg(tiny_model, prompts, **crowded)
    assert plain.metrics["vllm:num_preemptions"] > 0
    for _ in range(2):
        result = run_leg(tiny_model, prompts, connector=options(service), **crowded)
        check_equal(result, plain)
        assert result.metrics["vllm:num_preemptions"] > 0
    assert result.counts["tokens_loaded"] > 64 * CHUNK


def test_a_misspelt_option_stops_the_engine_and_names_the_nearest(tiny_model: Path, service: ServiceProcess) -> None:
    with pytest.raises(AssertionError, match="did you mean 'chunk_tokens'"):
        run_leg(tiny_model, PROMPTS, connector={"address": service.address, "chunk_token": 64}, watch=False)
