"""One engine, one process, some prompts: run by the tests of this folder in vLLM's own environment.

    engine_leg.py '{"model": ..., "prompts": [[...]], "connector": {...} or null, ...}'

Prints one line of JSON behind a mark: tokens of every prompt, what the connector counted, and vLLM's own metrics.
"""

import json
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

MARK = "ENGINE-LEG-RESULT "
ROUND_MARK = "ENGINE-LEG-ROUND"
STORES_TIMEOUT_S = 60.0
CONNECTOR = {
    "kv_connector": "KVServiceConnector",
    "kv_connector_module_path": "kvservice.client.connectors.vllm",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}


def main() -> None:
    leg = json.loads(sys.argv[1])
    _arrange(leg)
    from vllm import LLM

    started_s = time.monotonic()
    llm = LLM(model=leg["model"], **_engine_options(leg))
    result: dict[str, Any] = {"start_s": time.monotonic() - started_s, "runs": []}
    for number, prompts in enumerate(leg.get("rounds") or [leg["prompts"]]):
        if leg.get("is_stepwise"):
            _say(ROUND_MARK)
            sys.stdin.readline()
        words = leg["round_words"][number] if "round_words" in leg else leg.get("words")
        result["runs"].append(_run(llm, prompts, words, leg))
        if leg.get("is_settled"):
            _wait_for_stores()
    result["tokens"] = [tokens for run in result["runs"] for tokens in run["tokens"]]
    result["metrics"] = _metrics(llm)
    result["idle"] = _idle(llm)
    llm.llm_engine.engine_core.shutdown()
    result["counts"] = _counts()
    _say(MARK + json.dumps(result))


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _engine_options(leg: Mapping[str, Any]) -> dict[str, Any]:
    from vllm.config import KVTransferConfig

    options: dict[str, Any] = {
        "enforce_eager": True,
        "dtype": "bfloat16",
        "block_size": 32,
        "max_model_len": 1024,
        "kv_cache_memory_bytes": 64 << 20,
        "disable_log_stats": False,
        "skip_tokenizer_init": True,
        **leg.get("engine", {}),
    }
    if leg.get("connector") is not None:
        options["kv_transfer_config"] = KVTransferConfig(
            **{**CONNECTOR, **leg.get("transfer", {})}, kv_connector_extra_config=leg["connector"]
        )
    return options


def _run(llm: Any, prompts: list[list[int] | str], words: list[Any] | None, leg: Mapping[str, Any]) -> dict[str, Any]:
    from vllm import SamplingParams

    def params_of(words: dict[str, Any] | None) -> Any:
        extra = None if words is None else {"kv_transfer_params": words}
        tokens = leg.get("max_tokens", 16)
        return SamplingParams(
            temperature=0,
            ignore_eos=True,
            detokenize=False,
            max_tokens=tokens,
            stop_token_ids=leg.get("stop"),
            extra_args=extra,
        )

    params = [params_of(said) for said in words or [None] * len(prompts)]
    asked = [prompt if isinstance(prompt, str) else {"prompt_token_ids": prompt} for prompt in prompts]
    started_s = time.monotonic()
    outputs = llm.generate(asked, params, use_tqdm=False, lora_request=_adapters(leg))
    return {
        "seconds": time.monotonic() - started_s,
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "cached": [output.num_cached_tokens for output in outputs],
    }


def _adapters(leg: Mapping[str, Any]) -> list[Any] | None:
    """Of each prompt, if the leg has ``adapters``: a folder or null for each."""
    if "adapters" not in leg:
        return None
    from vllm.lora.request import LoRARequest

    names = sorted({folder for folder in leg["adapters"] if folder})
    numbers = {folder: number for number, folder in enumerate(names, start=1)}
    return [folder and LoRARequest(f"adapter {numbers[folder]}", numbers[folder], folder) for folder in leg["adapters"]]


def _metrics(llm: Any) -> dict[str, float]:
    found: dict[str, float] = {}
    for metric in llm.get_metrics():
        if hasattr(metric, "value") and (
            "kvservice" in metric.name or "prefix_cache" in metric.name or "preempt" in metric.name
        ):
            found[metric.name] = found.get(metric.name, 0) + metric.value
    return found


_CONNECTORS: list[Any] = []


def _arrange(leg: Mapping[str, Any]) -> None:
    """Before the engine is built: what the leg wants to be different, and a way to the connectors of this process."""
    if leg.get("connector") is not None and leg.get("watch", True):
        from kvservice.client.connectors.vllm import KVServiceConnector

        original = KVServiceConnector.__init__

        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            original(self, *args, **kwargs)
            _CONNECTORS.append(self)

        setattr(KVServiceConnector, "__init__", __init__)  # noqa: B010
    if leg.get("without_amx"):
        import torch

        torch.cpu._is_amx_tile_supported = lambda: False
    for name in leg.get("sabotage", ()):
        SABOTAGE[name](leg)


def _counts() -> dict[str, float]:
    total: dict[str, float] = {}
    for connector in _CONNECTORS:
        for name, value in connector.counts.totals().items():
            total[name] = total.get(name, 0) + value
    return total


def _wait_for_stores() -> None:
    """Until what the run has left to be stored is stored: a machine that compiles kernels first takes long."""
    workers = [one._worker for one in _CONNECTORS if one._worker is not None]
    deadline_s = time.monotonic() + STORES_TIMEOUT_S
    while any(one._saves.bytes_waiting for one in workers) and time.monotonic() < deadline_s:
        threading.Event().wait(0.01)


def _idle(llm: Any) -> dict[str, float]:
    """What is still held once every request has ended."""
    held = [one._scheduler.leases_held for one in _CONNECTORS if one._scheduler is not None]
    return {"leases": sum(held)}


def _zero_scatter(leg: Mapping[str, Any]) -> None:
    """What is loaded is written as zeros: tokens must come out different, or equality proves nothing."""
    from kvservice.client.connectors.vllm.paged import EnginePaged

    original = EnginePaged.scatter

    def scatter(self: Any, layer: int, slots: Any, planes: Any) -> None:
        import numpy as np

        original(self, layer, slots, [np.zeros_like(plane) for plane in planes])

    setattr(EnginePaged, "scatter", scatter)  # noqa: B010


def _fail_reads(leg: Mapping[str, Any]) -> None:
    """Every other layer that is read is said to be corrupt."""
    from kvservice.client.connectors.vllm.records import ChunkReader
    from kvservice.model.errors import CorruptError

    original = ChunkReader.planes

    def planes(self: Any, layer: int, *args: Any) -> Any:
        if layer == 2:
            raise CorruptError("planted by the test")
        return original(self, layer, *args)

    setattr(ChunkReader, "planes", planes)  # noqa: B010


def _fail_second_chunk(leg: Mapping[str, Any]) -> None:
    """From the second chunk on, reading fails in the last layers."""
    from kvservice.client.connectors.vllm.records import ChunkReader
    from kvservice.model.errors import CorruptError

    original = ChunkReader.planes

    def planes(self: Any, layer: int, *args: Any) -> Any:
        if layer == 2 and self._record is not None and self._record.meta.position > 0:
            raise CorruptError("planted by the test")
        return original(self, layer, *args)

    setattr(ChunkReader, "planes", planes)  # noqa: B010


def _slow_reads(leg: Mapping[str, Any]) -> None:
    """Reading a layer takes longer than the load may."""
    import threading

    from kvservice.client.connectors.vllm.records import ChunkReader

    original = ChunkReader.planes

    def planes(self: Any, layer: int, *args: Any) -> Any:
        threading.Event().wait(0.4)
        return original(self, layer, *args)

    setattr(ChunkReader, "planes", planes)  # noqa: B010


def _no_splice(leg: Mapping[str, Any]) -> None:
    """Blocks of refreshed KV keep the names of exact ones."""
    from kvservice.client.connectors.vllm import scheduler

    setattr(scheduler, "splice_block_hashes", lambda *_: None)  # noqa: B010


def _fail_pass(leg: Mapping[str, Any]) -> None:
    """In the middle of the first pass something raises."""
    from kvservice.client.connectors.vllm.round_engine import VllmEngine

    original, failed = VllmEngine.run_layer, list[int]()

    def run_layer(self: Any, layer: int, *args: Any) -> Any:
        if layer == 2 and len(self._paged.caches[0]) > 10 and not failed:  # not in its check at the start
            failed.append(layer)
            raise RuntimeError("planted by the test")
        return original(self, layer, *args)

    setattr(VllmEngine, "run_layer", run_layer)  # noqa: B010


def _kill_service(leg: Mapping[str, Any]) -> None:
    """In the middle of the first load the service is killed."""
    import os
    import signal

    from kvservice.client.connectors.vllm.records import ChunkReader

    original, killed = ChunkReader.planes, list[int]()

    def planes(self: Any, layer: int, *args: Any) -> Any:
        if layer == 2 and not killed:
            killed.append(leg["service_pid"])
            os.kill(leg["service_pid"], signal.SIGKILL)
        return original(self, layer, *args)

    setattr(ChunkReader, "planes", planes)  # noqa: B010


SABOTAGE = {
    "kill service": _kill_service,
    "no splice": _no_splice,
    "pass": _fail_pass,
    "zeros": _zero_scatter,
    "corrupt": _fail_reads,
    "corrupt second chunk": _fail_second_chunk,
    "slow": _slow_reads,
}

if __name__ == "__main__":
    main()
