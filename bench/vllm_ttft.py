"""How much sooner comes the first token when another process has computed the prompt: with kvservice, with LMCache?

The real vLLM on this machine's CPU, SmolLM2-135M, prompts of 1,000 tokens that share nothing, one after the other. In
each round new prompts: an engine without connector computes them; one with kvservice and one with LMCache in front of
empty stores compute and store them; then a second process of each loads them. Every leg is a process of its own, and
LMCache's server keeps running and answers from its memory. Asked: loading at least 5 times as fast as computing and 2
times as fast as LMCache; storing at most 1.05 times the time of no connector.

Run in vLLM's environment (make vllm-env) with LMCache in it: make bench-vllm. Writes build/bench/vllm_ttft.json.
"""

import argparse
import json
import os
import random
import runpy
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MARK = "BENCH-VLLM "
ROOT = Path(__file__).resolve().parent.parent
LMCACHE_LEG = ROOT / "tests/vllm/lmcache_leg.py"
RESULT = Path("build/bench/vllm_ttft.json")
TOKENS, CHUNK, BLOCK = 1000, 256, 32
STORE_BYTES = 2 << 30
LEG_TIMEOUT_S, START_TIMEOUT_S = 600, 120
LEGS = ("none", "kvservice stores", "LMCache stores", "kvservice loads", "LMCache loads")
Legs = dict[str, list[dict[str, Any]]]


# A leg, in a process of its own


def leg(spec: Mapping[str, Any]) -> None:
    """Serve the prompts one by one; print seconds to the first token, and the token, of each."""
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    hook_us = time_hook() if "kvservice" in str(spec["transfer"]) else []
    transfer = spec["transfer"] and KVTransferConfig(**spec["transfer"])
    llm = LLM(
        model=spec["model"], enforce_eager=True, dtype="bfloat16", block_size=BLOCK, max_model_len=2048,
        kv_cache_memory_bytes=256 << 20, skip_tokenizer_init=True, kv_transfer_config=transfer or None,
    )  # fmt: skip
    params = SamplingParams(temperature=0, ignore_eos=True, detokenize=False, max_tokens=1)
    seconds, tokens, cached = [], [], []
    for prompt in [*spec["warm_up"], *spec["prompts"]]:
        started_s = time.perf_counter()
        (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        seconds.append(time.perf_counter() - started_s)
        tokens.append(output.outputs[0].token_ids[0])
        cached.append(output.num_cached_tokens)
        time.sleep(spec["pause_s"])
    llm.llm_engine.engine_core.shutdown()
    skip = len(spec["warm_up"])
    figures = {"seconds": seconds[skip:], "tokens": tokens[skip:], "cached": cached[skip:], "hook_us": hook_us}
    sys.stdout.write(MARK + json.dumps(figures) + "\n")
    sys.stdout.flush()
    os._exit(0)  # some connectors' threads never end


def time_hook() -> list[float]:
    """Microseconds of every call of get_num_new_matched_tokens from here on that has an answer."""
    from kvservice.client.connectors.vllm import KVServiceConnector

    original, spent = KVServiceConnector.get_num_new_matched_tokens, list[float]()

    def timed(self: Any, *args: Any) -> Any:
        started_s = time.perf_counter()
        answer = original(self, *args)
        if answer[0] is not None:
            spent.append((time.perf_counter() - started_s) * 1e6)
        return answer

    setattr(KVServiceConnector, "get_num_new_matched_tokens", timed)  # noqa: B010
    return spent


# The parent


def run_leg(spec: Mapping[str, Any], threads: int) -> dict[str, Any]:
    """Its figures."""
    command = [sys.executable, __file__, "--leg", json.dumps(spec)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=LEG_TIMEOUT_S, check=False, env=environment(threads)
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if not lines:
        raise SystemExit((done.stdout + done.stderr)[-4000:])
    figures: dict[str, Any] = json.loads(lines[0][len(MARK) :])
    return figures


def environment(threads: int) -> dict[str, str]:
    """No network, one process an engine."""
    return {
        "PATH": "/usr/bin:/bin", "HOME": tempfile.gettempdir(), "PYTHONSAFEPATH": "1", "PYTHONHASHSEED": "0",
        "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads), "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1", "LMCACHE_TRACK_USAGE": "false", "PYTHONPATH": str(ROOT),
    }  # fmt: skip


@contextmanager
def kvservice(folder: Path) -> Iterator[dict[str, Any]]:
    """A service; yields vLLM's setting for it."""
    address = f"unix:{folder}/kv.sock"
    command = [sys.executable, "-m", "kvservice", "serve", "--socket", f"{folder}/kv.sock"]
    command += ["--host-bytes", str(STORE_BYTES), "--grpc-port", "-1", "--http-port", "-1"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=environment(1))
    try:
        assert process.stdout is not None
        if "unix:" not in process.stdout.readline():
            raise SystemExit("kvservice did not start")
        yield {
            "kv_connector": "KVServiceConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
            "kv_connector_module_path": "kvservice.client.connectors.vllm",
            "kv_connector_extra_config": {"address": address, "chunk_tokens": CHUNK},
        }  # fmt: skip
    finally:
        process.terminate()
        process.wait(START_TIMEOUT_S)


@contextmanager
def lmcache(folder: Path) -> Iterator[dict[str, Any]]:
    """`lmcache server` with its own memory and nothing behind it; yields vLLM's setting for it."""
    port, http_port = free_port(), free_port()
    command = [str(Path(sys.executable).with_name("lmcache")), "server", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--http-host", "127.0.0.1", "--http-port", str(http_port), "--chunk-size", str(CHUNK)]
    command += ["--l1-size-gb", str(STORE_BYTES >> 30), "--eviction-policy", "LRU"]
    command += ["--supported-transfer-mode", "engine_driven"]
    with (folder / "lmcache.log").open("ab") as log:
        process = subprocess.Popen(
            command, cwd=folder, stdout=log, stderr=log, env=environment(1), start_new_session=True
        )
    try:
        wait_for(f"http://127.0.0.1:{http_port}/status", process)
        yield {
            "kv_connector": "LMCacheMPConnector", "kv_role": "kv_both",
            "kv_connector_extra_config": {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port},
        }  # fmt: skip
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(START_TIMEOUT_S)


def wait_for(url: str, process: "subprocess.Popen[bytes]") -> None:
    """Until the server answers."""
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s and process.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=30).close()  # noqa: S310  loopback
        except urllib.error.HTTPError:
            return
        except OSError:
            time.sleep(0.2)
        else:
            return
    raise SystemExit("lmcache server did not start")


def free_port() -> int:
    """A port that nobody has now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def measure(model: Path, rounds: int, prompts: int, threads: int) -> Legs:
    """Figures of every leg, one of each a round."""
    found: Legs = {name: [] for name in LEGS}
    for number in range(rounds):
        chance = random.Random(number)
        texts = [[chance.randrange(1000, 40000) for _ in range(TOKENS)] for _ in range(prompts + 2)]
        spec = {"model": str(model), "warm_up": texts[:2], "prompts": texts[2:], "pause_s": 0.3}
        folder = Path(tempfile.mkdtemp(prefix="kvb-", dir="/tmp"))  # a socket's path may have 107 characters
        try:
            with kvservice(folder) as ours, lmcache(folder) as theirs:
                for name, transfer in zip(LEGS, (None, ours, theirs, ours, theirs), strict=True):
                    found[name].append(run_leg(spec | {"transfer": transfer}, threads))
        finally:
            shutil.rmtree(folder)
    return found


def report(found: Legs) -> dict[str, Any]:
    """A table; ratios are of the same prompt in the same round."""
    print(f"seconds to the first token of {TOKENS} tokens; ratios over pairs of the same prompt, median and quartiles")
    summary: dict[str, Any] = {}
    base = [one for run in found["none"] for one in run["seconds"]]
    for name in LEGS:
        seconds = [one for run in found[name] for one in run["seconds"]]
        ratio = quartiles([one / none for one, none in zip(seconds, base, strict=True)])
        cached = statistics.mean(one for run in found[name] for one in run["cached"])
        equal = same_tokens(found[name], found["none"])
        summary[name] = {"median_s": statistics.median(seconds), "of_none": ratio, "cached": cached, "equal": equal}
        print(
            f"{name:<17} {summary[name]['median_s']:.3f} s   {ratio[1]:.3f} ({ratio[0]:.3f}-{ratio[2]:.3f}) of none   "
            f"{cached:.0f} tokens loaded   {equal:.3f} first tokens equal"
        )
    pairs = [
        theirs / ours
        for mine, other in zip(found["kvservice loads"], found["LMCache loads"], strict=True)
        for ours, theirs in zip(mine["seconds"], other["seconds"], strict=True)
    ]
    summary["lmcache_over_kvservice"] = quartiles(pairs)
    hook_us = sorted(one for run in found["kvservice loads"] for one in run["hook_us"])
    summary["hook_us"] = {"calls": len(hook_us), "p50": statistics.median(hook_us), "max": hook_us[-1]}
    print(f"get_num_new_matched_tokens: {summary['hook_us']}")
    print("LMCache's time over ours, loading: {1:.2f} ({0:.2f}-{2:.2f})".format(*quartiles(pairs)))
    return summary


def same_tokens(runs: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]]) -> float:
    """Share of first tokens that are those of no connector."""
    pairs: list[bool] = [
        one == other
        for run, plain in zip(runs, others, strict=True)
        for one, other in zip(run["tokens"], plain["tokens"], strict=True)
    ]
    return sum(pairs) / len(pairs)


def quartiles(values: Sequence[float]) -> list[float]:
    """Lower, middle, upper."""
    return [round(one, 4) for one in statistics.quantiles(values, n=4)]


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of the model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=12, help="of every round")
    parser.add_argument("--threads", type=int, default=1, help="of the engine's matrix products")
    parser.add_argument("--leg", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.leg:
        spec = json.loads(options.leg)
        if spec["transfer"] and spec["transfer"]["kv_connector"].startswith("LMCache"):
            runpy.run_path(str(LMCACHE_LEG))["_let_numba_be_there_before_the_worker"]()
        leg(spec)
    found = measure(options.model.resolve(), options.rounds, options.prompts, options.threads)
    summary = report(found)
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(json.dumps({"threads": options.threads, "summary": summary, "legs": found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
