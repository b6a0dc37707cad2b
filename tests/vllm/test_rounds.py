"""Requests that say where their segments begin, in the real vLLM: equal tokens, shared up to the boundary."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.legs import CHUNK, ROOT, Result, ServiceProcess, environment, make_prompts, run_leg, running_service
from tests.vllm.test_server import running_server, settled

WORDS: dict[str, Any] = {
    "kvservice": {
        "round": "r7",
        "agent": "ada",
        "segments": [["shared", 100], ["private", 100]],
        "modes": {"shared": "exact"},
    }
}
WRONG = {"kvservice": {"segments": [["shared", 100], ["private", 101]]}}
UNSURE = {"kvservice": {**WORDS["kvservice"], "mode": {"shared": "off"}}}
OFF = {"kvservice": {**WORDS["kvservice"], "modes": {"private": "off"}}}
CASES: dict[str, tuple[dict[str, Any] | None, dict[str, Any] | None, int, int]] = {
    "words": (WORDS, WORDS, 1, 96),
    "no words": (None, None, 1, 64),
    "wrong lengths": (WRONG, None, 0, 192),
    "wrong names": (UNSURE, None, 0, 0),
    "off": (OFF, OFF, 0, 96),
}
"""What is said when a prompt is stored, and when the same (0) or the other (1) of its pair is asked; what is loaded."""
PAIRS = [make_prompts(2, seed=seed) for seed in range(len(CASES))]
STORED = [pair[0] for pair in PAIRS]
ASKED = [pair[other] for pair, (_, _, other, _) in zip(PAIRS, CASES.values(), strict=True)]
FRESH: dict[str, Any] = {"enable_prefix_caching": False}
"""So that all that an engine has before it computes comes from us."""


@pytest.fixture(scope="module")
def service() -> Iterator[ServiceProcess]:
    with running_service() as service:
        yield service


@pytest.fixture(scope="module")
def plain(tiny_model: Path) -> Result:
    """What vLLM says without us."""
    return run_leg(tiny_model, rounds=[STORED, ASKED], engine=FRESH)


def ask(model: Path, service: ServiceProcess, prompts: list[list[int]], words: list[dict[str, Any] | None]) -> Result:
    """A new engine answers."""
    connector = {"address": service.address, "chunk_tokens": CHUNK}
    result = run_leg(model, prompts, connector=connector, words=words, engine=FRESH)
    assert result.leases == result.counts["hook_errors"] == result.counts["loads_failed"] == 0
    return result


@pytest.fixture(scope="module")
def stored(tiny_model: Path, service: ServiceProcess) -> Result:
    return ask(tiny_model, service, STORED, [case[0] for case in CASES.values()])


def test_words_change_no_token_and_wrong_ones_are_counted_and_told(stored: Result, plain: Result) -> None:
    assert stored.tokens == plain.tokens[: len(STORED)]
    assert stored.metric("round_params_refused") == 2
    assert "segments of 201 tokens for a prompt of 200" in stored.log
    assert "unknown name 'mode'; did you mean 'modes'?" in stored.log
    cut_at_the_boundary, in_full, up_to_it = 4, 3, 2
    assert stored.counts["chunks_saved"] == cut_at_the_boundary + 2 * in_full + up_to_it


def test_a_second_process_loads_up_to_the_boundary_and_not_what_is_off(
    tiny_model: Path, service: ServiceProcess, stored: Result, plain: Result
) -> None:
    result = ask(tiny_model, service, ASKED, [case[1] for case in CASES.values()])
    assert result.tokens == plain.tokens[len(STORED) :]
    assert dict(zip(CASES, result.runs[0]["cached"], strict=True)) == {name: case[3] for name, case in CASES.items()}
    assert result.metric("round_params_refused") == 0


@pytest.mark.slow
def test_the_page_and_the_debate_do_what_they_say(smollm2_model: Path, service: ServiceProcess, tmp_path: Path) -> None:
    page = (ROOT / "deploy/vllm.md").read_text().partition("## Rounds")[2]
    found = re.search(r"<<'END'\n(.*?)\nEND\n", page, re.DOTALL)
    assert found is not None
    script = found[1].replace('= "HuggingFaceTB/SmolLM2-135M-Instruct"', '= "smol"')
    script = script.replace("from_pretrained(model)", f"from_pretrained({str(smollm2_model)!r})")
    with running_server(smollm2_model, service, tmp_path / "server.log") as server:
        port = server._url.rpartition(":")[2]
        said = _run(["-c", script.replace("127.0.0.1:8000", f"127.0.0.1:{port}")], tmp_path)
        assert [line.split()[0] for line in said] == ["ada", "bob"], "no notes"
        sent, answered = re.findall(r"```json\n(.*)\n", page)[:2]
        assert repr(json.loads(sent)) in said[0], "the page shows what is sent"
        assert repr(json.loads(answered)) in said[1], "and what is answered"
        assert settled(server, "mirrors_saved") == 2
        debate = [str(ROOT / "deploy/debate.py"), "--model", "smol", "--tokenizer", str(smollm2_model)]
        debate += ["--url", server._url, "--agents", "3", "--rounds", "2", "--tokens", "32"]
        rounds = _run(debate, tmp_path)[1:]
        assert [re.search(r" (\d+) rows restored, (\d+) of them", line) is not None for line in rounds] == [True] * 2
        assert " 0 rows restored" not in rounds[1]
        assert server.metric("round_params_refused") == server.metric("passes_failed") == 0


def _run(arguments: list[str], folder: Path) -> list[str]:
    """The lines that a script prints."""
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=environment(),
        timeout=240,
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip().splitlines()
