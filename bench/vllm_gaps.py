"""How long does a request that decodes wait for its next token: while a round's pass runs, while prompts are prefilled?

The real vLLM on this machine's CPU. One request decodes all the time. Beside it come the members of a round, whose
shared segments a leader has stored: one pass restores and refreshes them in slices between the engine's steps, and the
engine computes the last tokens. Then come strangers of the same lengths, which the engine prefills in chunks. Every
step gives the decoding request a token, so a step's time is a gap. Asked: the longest gap with a pass is not longer
than the longest with a prefill.

Run in vLLM's environment: make bench-vllm-gaps. Writes build/bench/vllm_gaps.json.
"""

import argparse
import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.vllm_ttft import LEG_TIMEOUT_S, ROOT, environment, kvservice

MARK = "DECODE-LEG-RESULT "
"""Before the line that `tests/vllm/decode_leg.py` prints."""
RESULT = Path("build/bench/vllm_gaps.json")
DECODER_TOKENS, TAIL, DECODED = 40, 12, 1500
Segments = list[tuple[str, int]]


def spec_of(options: argparse.Namespace, connector: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """What the leg is to run. Tokens are random: what is computed costs the same whatever it says."""
    chance = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [chance.randrange(1000, 40000) for _ in range(count)]

    run = [tokens(options.segment) for _ in range(options.segments)]

    def prompts(count: int) -> tuple[list[list[int]], list[Segments]]:
        lengths = [options.history + 37 * number for number in range(count)]
        shared = [("shared", len(one)) for one in run]
        texts = [[*tokens(own), *(token for one in run for token in one), *tokens(TAIL)] for own in lengths]
        return texts, [[("private", own), *shared, ("private", TAIL)] for own in lengths]

    spec: dict[str, Any] = {"model": str(options.model.resolve()), "connector": dict(connector), "tokens": DECODED}
    spec["connector"]["refresh_slice_s"] = options.slice_s
    spec["engine"] = {
        "dtype": "bfloat16", "max_model_len": 8192, "max_num_batched_tokens": options.chunk,
        "kv_cache_memory_bytes": 2 << 30,
    }  # fmt: skip
    spec["decoder"] = tokens(DECODER_TOKENS)
    for name, count in (("leader", 1), ("warm_up", options.agents), ("members", options.agents)):
        spec[name], segments = prompts(count)
        key = "words" if name == "members" else f"{name}_words"
        spec[key] = words(segments, name if count > 1 else "")
    spec["strangers"] = [tokens(len(one)) for one in spec["members"]]
    return spec


def words(segments: Sequence[Segments], name: str) -> list[dict[str, Any]]:
    """What the members of a round say; of nobody's round without a name."""
    modes = {"shared": {"mode": "reuse", "selector": "hkvd", "ratio": 0.02}}
    said: list[dict[str, Any]] = [{"segments": [list(one) for one in own], "modes": modes} for own in segments]
    for number, one in enumerate(said if name else ()):
        one |= {"round": name, "agent": f"agent {number}", "expect": len(said)}
    return [{"kvservice": one} for one in said]


def run_leg(spec: Mapping[str, Any], threads: int) -> dict[str, list[dict[str, float]]]:
    """Its steps."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.vllm.decode_leg"], input=json.dumps(spec), capture_output=True, text=True,
        timeout=LEG_TIMEOUT_S, check=False, cwd=ROOT, env=environment(threads),
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if not lines:
        raise SystemExit((done.stdout + done.stderr)[-4000:])
    found: dict[str, list[dict[str, float]]] = json.loads(lines[0][len(MARK) :])
    return found


def report(found: Sequence[Mapping[str, Sequence[Mapping[str, float]]]]) -> dict[str, Any]:
    """Median and longest gap of each, and the longest with a pass over the longest with a prefill.

    By the clock, and in CPU time of the engine's thread, which says more where others use the machine too.
    """
    summary: dict[str, Any] = {}
    for clock in ("seconds", "cpu_seconds"):
        for name in ("pass", "prefill"):
            gaps = [[step[clock] for step in one[name]] for one in found]
            most = statistics.median(max(one) for one in gaps)
            median = statistics.median(gap for leg in gaps for gap in leg)
            summary[f"{name} {clock}"] = {"longest": most, "median": median}
            print(f"{name:<8} longest gap {most * 1e3:7.1f} ms, median {median * 1e3:6.1f} ms   {clock}")
        longest = [summary[f"{name} {clock}"]["longest"] for name in ("pass", "prefill")]
        summary[f"ratio {clock}"] = longest[0] / longest[1]
        print(f"the longest gap with a pass takes {longest[0] / longest[1]:.2f} of that with a prefill")
    stalls = sum(step["decoded"] == 0 for one in found for name in ("pass", "prefill") for step in one[name])
    summary["steps without a token"] = stalls
    print(f"{stalls} steps gave the decoding request no token")
    return summary


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of the model")
    parser.add_argument("--agents", type=int, default=4)
    parser.add_argument("--segments", type=int, default=6, help="shared by all of them")
    parser.add_argument("--segment", type=int, default=100, help="tokens of each")
    parser.add_argument("--history", type=int, default=300, help="tokens of the shortest")
    parser.add_argument("--chunk", type=int, default=512, help="tokens of a step, at most")
    parser.add_argument("--slice-s", type=float, default=0.05, help="the connector's refresh_slice_s")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2, help="of the engine's matrix products")
    options = parser.parse_args()
    found = []
    for number in range(options.repetitions):
        folder = Path(tempfile.mkdtemp(prefix="kvb-", dir="/tmp"))  # a socket's path may have 107 characters
        try:
            with kvservice(folder) as ours:
                spec = spec_of(options, ours["kv_connector_extra_config"], number)
                found.append(run_leg(spec, options.threads))
        finally:
            shutil.rmtree(folder)
    summary = report(found)
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(json.dumps({"threads": options.threads, "summary": summary, "legs": found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
