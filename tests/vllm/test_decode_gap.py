"""A request that decodes while a round's pass runs in the real vLLM: it has a token between any two slices.

Counted, not timed: in rows of layers, of which a chunk of a prefill has its tokens times the model's layers.
"""

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.decode_leg import MARK
from tests.vllm.legs import LEG_TIMEOUT_S, ROOT, ServiceProcess, environment, running_service
from tests.vllm.test_collective import HISTORIES, PROMPTS, SHARED, TAIL, words_of

LAYERS, CHUNK = 4, 512
SOME: dict[str, Any] = {"mode": "reuse", "selector": "hkvd", "ratio": 0.05}
LEADER = 2
MEMBERS = [index for index in range(len(HISTORIES)) if index != LEADER]
Steps = list[dict[str, float]]


@pytest.fixture(scope="module")
def service() -> Iterator[ServiceProcess]:
    with running_service() as service:
        yield service


def run(model: Path, service: ServiceProcess, tenant: str, **options: Any) -> tuple[Steps, Steps]:
    """Steps of a pass, and of a prefill in chunks of prompts as long as the members'."""
    generator = random.Random(11)
    said = words_of(SOME, expect=len(MEMBERS))
    leader_words = words_of(SOME)[LEADER : LEADER + 1]
    for one in leader_words:
        for name in ("round", "agent", "expect"):
            del one["kvservice"][name]
    spec = {
        "model": str(model),
        "connector": {"address": service.address, "chunk_tokens": 64, "tenant": tenant, "load_deadline_s": 60.0}
        | options,
        "engine": {"max_num_batched_tokens": CHUNK},
        "decoder": [generator.randrange(3, 1024) for _ in range(20)],
        "tokens": 900,
        "leader": [PROMPTS[LEADER]],
        "leader_words": leader_words,
        "warm_up": [PROMPTS[0][-sum(SHARED) - TAIL - 60 :]],
        "warm_up_words": [None],
        "members": [PROMPTS[index] for index in MEMBERS],
        "words": [said[index] for index in MEMBERS],
        "strangers": [[generator.randrange(3, 1024) for _ in PROMPTS[index]] for index in MEMBERS],
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.vllm.decode_leg"],
        input=json.dumps(spec),
        capture_output=True,
        text=True,
        timeout=LEG_TIMEOUT_S,
        check=False,
        cwd=ROOT,
        env={**environment(), "PYTHONPATH": str(ROOT)},
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    assert lines, (done.stdout + done.stderr)[-4000:]
    found = json.loads(lines[0][len(MARK) :])
    assert found["pass"]
    assert found["prefill"], "somebody had no token"
    return found["pass"], found["prefill"]


def test_between_two_tokens_there_is_one_layer_of_a_pass_where_no_time_is_given(
    tiny_model: Path, service: ServiceProcess
) -> None:
    steps, prefill = run(tiny_model, service, "no time", refresh_slice_s=1e-6, load_deadline_s=60.0)
    assert min(step["decoded"] for step in steps) > 0, "a token in every step, whatever is restored meanwhile"
    assert min(step["decoded"] for step in prefill) > 0
    assert max(step["layers"] for step in steps) == 1
    assert sum(step["layers"] for step in steps) == LAYERS
    rows = sum(HISTORIES[index] + sum(SHARED) for index in MEMBERS)
    assert max(step["rows"] for step in steps) <= rows
    assert sum(step["layers"] for step in prefill) == 0, "strangers need no pass"


def test_between_two_tokens_a_pass_runs_fewer_rows_of_layers_than_a_chunk_of_a_prefill(
    tiny_model: Path, service: ServiceProcess
) -> None:
    steps, _ = run(tiny_model, service, "bounded", refresh_slice_s=1e-6, load_deadline_s=60.0)
    assert sum(step["rows"] for step in steps) > CHUNK * LAYERS / 2, "all of it at once would be as long as a chunk"
    assert max(step["rows"] for step in steps) <= CHUNK * LAYERS
