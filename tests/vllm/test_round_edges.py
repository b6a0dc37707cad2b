"""Rounds in the real vLLM where segments meet the edges of what a pass brings, and where requests have LoRA adapters.

As in test_collective.py: in float32, with weights whose output depends on the whole prompt.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.vllm import models
from tests.vllm.legs import Prompts, Result, ServiceProcess, run_leg, running_service
from tests.vllm.test_collective import ALL, ENGINE, HISTORIES, PROMPTS, SHARED, SOME, TAIL, words_of

HISTORY = HISTORIES[0]
RUN = sum(SHARED)
CUT = 30
"""Of the second segment's tokens so many are in the engine's own cache, but for what is no whole block."""


@pytest.fixture(scope="module")
def service() -> Iterator[ServiceProcess]:
    with running_service() as service:
        yield service


def said(*segments: tuple[str, int], mode: Any = SOME) -> list[dict[str, Any]]:
    return [{"kvservice": {"segments": [list(one) for one in segments], "modes": {"shared": mode}}}]


def shared() -> list[tuple[str, int]]:
    return [("shared", length) for length in SHARED]


def run(
    model: Path, service: ServiceProcess, tenant: str, rounds: list[Prompts], words: list[list[dict[str, Any]]]
) -> Result:
    connector = {"address": service.address, "chunk_tokens": 64, "tenant": tenant, "load_deadline_s": 60.0}
    result = run_leg(model, rounds=rounds, round_words=words, connector=connector, engine=ENGINE, is_settled=True)
    assert result.leases == result.counts["hook_errors"] == result.counts["passes_failed"] == 0
    return result


LEADER: Prompts = [PROMPTS[2]]
LEADER_SAID = said(("private", HISTORIES[2]), *shared(), ("private", TAIL))


def test_a_segment_that_ends_with_the_prompt_becomes_a_mirror_too(tiny_model: Path, service: ServiceProcess) -> None:
    reader = [PROMPTS[0][: HISTORY + RUN]]
    words = said(("private", HISTORY), *shared())
    first = run(tiny_model, service, "end", [LEADER, reader], [LEADER_SAID, words])
    assert first.counts["mirrors_saved"] == len(SHARED)
    assert first.counts["mirror_bytes_dense"] > 10 * first.counts["mirror_bytes_saved"]
    second = run(tiny_model, service, "end", [reader], [words])
    assert second.runs[0]["tokens"] == first.runs[1]["tokens"]
    assert (second.counts["rows_refreshed"], second.counts["mirrors_saved"]) == (0, 0)


def test_a_segment_that_the_engines_own_rows_reach_into_becomes_a_mirror_too(
    tiny_model: Path, service: ServiceProcess
) -> None:
    begun = [PROMPTS[0][: HISTORY + SHARED[0] + CUT]]
    begun_said = said(("private", HISTORY), ("shared", SHARED[0]), ("private", CUT))
    reader, words = [PROMPTS[0]], said(("private", HISTORY), *shared(), ("private", TAIL))
    rounds, all_words = [LEADER, begun, reader], [LEADER_SAID, begun_said, words]
    first = run(tiny_model, service, "local", rounds, all_words)
    local = (HISTORY + SHARED[0] + CUT) // 32 * 32
    assert HISTORY + SHARED[0] < local
    assert first.counts["rows_restored"] + first.counts["rows_refreshed"] == SHARED[0] + HISTORY + RUN - local
    assert first.counts["mirrors_saved"] == len(SHARED)
    second = run(tiny_model, service, "local", rounds[2:], all_words[2:])
    assert second.runs[0]["tokens"] == first.runs[2]["tokens"]
    assert (second.counts["rows_refreshed"], second.counts["mirrors_saved"]) == (0, 0)


def test_a_round_of_requests_with_and_without_adapters_is_computed_and_each_finds_its_own_again(
    tiny_model: Path, service: ServiceProcess, tmp_path: Path
) -> None:
    one, two = (str(models.tiny_adapter(tmp_path / name, seed=seed)) for seed, name in enumerate(("one", "two")))
    adapters = [None, one, two, None]
    # One more than there are: on a CPU vLLM takes the last one's weights, here zeros, for tokens without an adapter.
    engine = {**ENGINE, "enable_lora": True, "max_loras": 3, "max_lora_rank": 8}
    plain = run_leg(tiny_model, PROMPTS, engine=engine, adapters=adapters)
    assert plain.tokens != run_leg(tiny_model, PROMPTS, engine=ENGINE).tokens, "the adapters change what is said"
    connector = {"address": service.address, "chunk_tokens": 64, "tenant": "lora", "round_wait_s": 60}
    runs = [
        run_leg(tiny_model, PROMPTS, words=words_of(ALL), connector=connector, engine=engine, adapters=adapters)
        for _ in range(2)
    ]
    for result in runs:
        assert result.tokens == plain.tokens
        assert result.leases == result.counts["hook_errors"] == 0
        assert (result.counts["reuse_refused"], result.counts["passes"]) == (4, 0)
        assert "reuse at other positions refused, exact reuse goes on: LoRA" in result.log
    assert runs[0].runs[0]["cached"] == [0] * 4
    assert runs[1].runs[0]["cached"] == [(len(one) - 1) // 32 * 32 for one in PROMPTS], "all of them their own"
