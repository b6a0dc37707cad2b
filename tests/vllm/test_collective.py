"""Rounds in the real vLLM: one pass for all, exact where it must be, and found again by other processes.

In float32 with random weights whose output depends on the whole prompt: at ratio 1 tokens are those of full prefill,
whatever shapes the matrix products have; at any other ratio, and wherever a wrong row was read, they are not.
"""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.legs import Prompts, Result, ServiceProcess, run_leg, running_service, with_ssd

ENGINE: dict[str, Any] = {"dtype": "float32"}
HISTORIES, SHARED, TAIL = (126, 173, 64, 231), (105, 98, 110), 9
LEADER = 2
"""The agent with the least to compute."""
ALL: dict[str, Any] = {"mode": "reuse", "selector": "hkvd", "ratio": 1.0}
SOME: dict[str, Any] = {"mode": "reuse", "selector": "hkvd", "ratio": 0.05}
NONE: dict[str, Any] = {"mode": "reuse", "selector": "none"}


def make_round(seed: int = 3) -> Prompts:
    """Private histories of different lengths, then the same segments, then the same question."""
    generator = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [generator.randrange(3, 1024) for _ in range(count)]

    run = [token for length in SHARED for token in tokens(length)]
    tail = tokens(TAIL)
    return [[*tokens(history), *run, *tail] for history in HISTORIES]


def words_of(mode: dict[str, Any] | str, *, expect: int = len(HISTORIES), name: str = "r1") -> list[dict[str, Any]]:
    """What each agent's request says of the round."""
    return [
        {
            "kvservice": {
                "round": name,
                "agent": f"agent {index}",
                "expect": expect,
                "segments": [["private", history], *[["shared", length] for length in SHARED], ["private", TAIL]],
                "modes": {"shared": mode},
            }
        }
        for index, history in enumerate(HISTORIES)
    ]


PROMPTS = make_round()


@pytest.fixture(scope="module")
def service() -> Iterator[ServiceProcess]:
    with running_service() as service:
        yield service


@pytest.fixture(scope="module")
def plain(tiny_model: Path) -> list[list[int]]:
    """What vLLM says without us."""
    return run_leg(tiny_model, PROMPTS, engine=ENGINE).tokens


def run(model: Path, service: ServiceProcess, tenant: str, runs: Sequence[Any], **leg: Any) -> Result:
    """One engine; each of ``runs`` is what its requests say, or None. A tenant's caches are its own."""
    connector = {"address": service.address, "chunk_tokens": 64, "tenant": tenant, "load_deadline_s": 60.0}
    connector |= leg.pop("options", {})
    leg.setdefault("is_settled", True)
    result = run_leg(
        model, rounds=[PROMPTS] * len(runs), round_words=list(runs), connector=connector, engine=ENGINE, **leg
    )
    assert result.leases == 0
    return result


def test_a_round_at_ratio_one_says_what_full_prefill_says_and_its_leader_reuses_nothing(
    tiny_model: Path, service: ServiceProcess, plain: list[list[int]]
) -> None:
    result = run(tiny_model, service, "all", [words_of(ALL)])
    assert result.tokens == plain
    counts = result.counts
    assert (counts["members_leading"], counts["members_reusing"], counts["members_computing"]) == (1, 3, 0)
    assert (counts["passes"], counts["passes_failed"], counts["hook_errors"]) == (1, 0, 0)
    assert counts["rows_refreshed"] == 3 * sum(SHARED)
    questions = 3 * (TAIL - 1)  # down to the last token, which is the engine's
    assert counts["rows_computed"] == sum(HISTORIES) - HISTORIES[LEADER] + questions
    assert result.runs[0]["cached"][LEADER] == 0


def test_exact_stays_exact_behind_refreshed_and_would_not_without_other_names_for_its_blocks(
    tiny_model: Path, service: ServiceProcess, plain: list[list[int]]
) -> None:
    result = run(tiny_model, service, "splice", [words_of(NONE), None])
    refreshed, exact = result.runs
    assert refreshed["tokens"] != plain, "rows that nobody refreshed must show, or equality proves nothing"
    assert exact["tokens"] == plain
    assert exact["cached"][1] >= 160, "the exact history is shared in both directions"
    wrong = run(tiny_model, service, "no splice", [words_of(NONE), None], sabotage=["no splice"])
    assert wrong.runs[1]["tokens"] != plain


def test_mirrors_are_small_and_another_process_restores_them_exactly(tiny_model: Path, service: ServiceProcess) -> None:
    first = run(tiny_model, service, "mirrors", [words_of(SOME), words_of(SOME, name="r2")])
    assert first.counts["mirrors_saved"] == 3 * len(SHARED)
    assert first.counts["mirror_bytes_dense"] > 10 * first.counts["mirror_bytes_saved"]
    assert first.runs[1]["tokens"] == first.runs[0]["tokens"], "the engine's own renamed blocks"
    assert first.runs[1]["cached"][1] >= 416
    second = run(tiny_model, service, "mirrors", [words_of(SOME)])
    assert second.tokens == first.runs[0]["tokens"], "the same KV, from the store"
    assert second.counts["members_reusing"] == 4
    assert second.counts["rows_refreshed"] == 0
    assert second.counts["mirrors_saved"] == 0


def test_a_round_outlives_its_service_on_ssd(tiny_model: Path, tmp_path: Path) -> None:
    with running_service(*with_ssd(tmp_path)) as service:
        first = run(tiny_model, service, "ssd", [words_of(SOME)])
        service.restart()
        second = run(tiny_model, service, "ssd", [words_of(SOME)])
    assert second.tokens == first.tokens
    assert (second.counts["members_reusing"], second.counts["passes_failed"]) == (4, 0)
    assert second.counts["rows_refreshed"] == 0


def test_a_pass_that_fails_costs_time_and_no_token(
    tiny_model: Path, service: ServiceProcess, plain: list[list[int]]
) -> None:
    result = run(tiny_model, service, "failing", [words_of(SOME)], sabotage=["pass"])
    assert result.tokens == plain
    assert (result.counts["passes"], result.counts["passes_failed"]) == (0, 1)


def test_in_slices_and_prompt_by_prompt_tokens_are_the_same(
    tiny_model: Path, service: ServiceProcess, plain: list[list[int]]
) -> None:
    options = {"refresh_slice_s": 1e-6, "is_deterministic": True, "refresh_rows_max": 1000}
    result = run(tiny_model, service, "slices", [words_of(ALL)], options=options)
    assert result.tokens == plain
    assert result.counts["passes"] == 2, "a step may order 1,000 rows, and three prompts have more"


def test_one_that_never_comes_is_waited_for_no_longer_than_said(
    tiny_model: Path, service: ServiceProcess, plain: list[list[int]]
) -> None:
    result = run(tiny_model, service, "missing", [words_of(ALL, expect=5)], options={"round_wait_s": 0.3})
    assert result.tokens == plain
    assert (result.counts["members_leading"], result.counts["passes"]) == (1, 1)


def test_what_an_agent_has_said_is_a_segment_of_later_prompts(
    tiny_model: Path, service: ServiceProcess, plain: list[list[int]]
) -> None:
    speaker, opening, said = PROMPTS[0], 4, 12
    words = {"segments": [["private", len(speaker)]], "opening": opening, "modes": {"shared": NONE}}
    connector = {"address": service.address, "chunk_tokens": 64, "tenant": "outputs"}
    first = run_leg(
        tiny_model,
        rounds=[[speaker], [PROMPTS[1]]],  # in one process nothing is stepped, hence copied, before the next request
        round_words=[[{"kvservice": words}], [None]],
        stop=[plain[0][said]],
        connector=connector,
        engine=ENGINE,
    )
    output = first.tokens[0][:-1]
    assert output == plain[0][: len(output)]
    segment = [*speaker[-opening:], *output]
    reader = [*PROMPTS[1][:90], *segment, *PROMPTS[1][:9]]
    parts = [["private", 90], ["shared", len(segment)], ["private", 9]]
    asked = {"kvservice": {"segments": parts, "modes": {"shared": NONE}}}
    second = run_leg(tiny_model, [reader], words=[asked], connector=connector, engine=ENGINE)
    assert second.counts["members_reusing"] == 1
    assert second.counts["rows_restored"] == len(segment) + 64, "the segment, and a chunk of the exact history"
    assert first.leases == second.leases == first.counts["hook_errors"] == second.counts["hook_errors"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("plugins", ["all", "none"])
def test_in_an_engine_of_several_processes_the_model_is_found_with_and_without_the_plugin(
    tiny_model: Path, service: ServiceProcess, plain: list[list[int]], plugins: str
) -> None:
    variables = {"VLLM_PLUGINS": ""} if plugins == "none" else {}
    result = run(tiny_model, service, f"plugins {plugins}", [words_of(ALL)], is_multiprocess=True, variables=variables)
    assert result.tokens == plain
    assert result.metric("passes") == 1
    assert result.metric("members_reusing") == 3


@pytest.mark.slow
def test_preempted_members_are_restored_again(tiny_model: Path, service: ServiceProcess) -> None:
    small = {**ENGINE, "kv_cache_memory_bytes": 3 << 20}
    connector = {"address": service.address, "chunk_tokens": 64, "tenant": "preempted"}
    plain = run_leg(tiny_model, PROMPTS, engine=ENGINE, max_tokens=320)
    result = run_leg(tiny_model, PROMPTS, words=words_of(ALL), connector=connector, engine=small, max_tokens=320)
    assert result.metrics["vllm:num_preemptions"] > 0
    assert result.tokens == plain.tokens
    assert result.leases == result.counts["hook_errors"] == 0
