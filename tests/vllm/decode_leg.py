"""One engine in which a request decodes while a round's pass runs, and while a prompt is prefilled in chunks.

    decode_leg.py < {"model": ..., "connector": {...}, "leader": [[...]], "members": [[...]], "words": [...], ...}

Prints one line of JSON behind a mark: for every step of the engine, which is what lies between two tokens of the
decoding request, rows and layers that ran for a pass. Seconds beside them, for `bench/vllm_gaps.py`.
"""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tests.vllm.engine_leg import CONNECTOR

MARK = "DECODE-LEG-RESULT "
STEPS_MAX = 50_000


def main() -> None:
    spec = json.loads(sys.stdin.read())
    result = Leg(spec).run()
    sys.stdout.write(f"{MARK}{json.dumps(result)}\n")
    sys.stdout.flush()


class Leg:
    """The engine, and what its steps did. ``rows``: of layers that ran for passes, as they come."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        self.spec, self.rows = spec, list[int]()
        watch(self.rows)
        transfer = KVTransferConfig(**CONNECTOR, kv_connector_extra_config=spec["connector"])
        options: dict[str, Any] = {
            "enforce_eager": True,
            "dtype": "float32",
            "block_size": 32,
            "max_model_len": 1024,
            "kv_cache_memory_bytes": 64 << 20,
            "skip_tokenizer_init": True,
            "kv_transfer_config": transfer,
            "enable_prefix_caching": False,
        }
        self.llm = LLM(model=spec["model"], **{**options, **spec.get("engine", {})})
        self.engine = self.llm.llm_engine
        self.totals: dict[str, int] = {}

    def run(self) -> dict[str, Any]:
        """First the leader, and a round like the one that counts: what is slow the first time is none of it."""
        for name in ("leader", "warm_up"):
            self.beside(self.spec[name], self.spec[f"{name}_words"])
        found = {
            "pass": self.beside(self.spec["members"], self.spec["words"]),
            "prefill": self.beside(self.spec["strangers"], [None] * len(self.spec["strangers"])),
        }
        self.engine.engine_core.shutdown()
        return found

    def beside(self, prompts: Sequence[Sequence[int]], words: Sequence[Any]) -> list[dict[str, float]]:
        """The steps from when the prompts come until all have their first token, while another request decodes.

        ``decoded``: tokens of the decoding request, or of two where the next one takes its place.
        """
        decoders = [self.add(self.spec["decoder"], None, self.spec["tokens"])]
        while not self.step().get(decoders[0]):
            pass
        waiting = {self.add(one, said, 1) for one, said in zip(prompts, words, strict=True)}
        steps: list[dict[str, float]] = []
        while waiting and len(steps) < STEPS_MAX:
            if self.totals[decoders[-1]] > self.spec["tokens"] // 2:  # whoever waits may do so for long
                decoders.append(self.add(self.spec["decoder"], None, self.spec["tokens"]))
            before, began_s, cpu_began_s = len(self.rows), time.perf_counter(), time.thread_time()
            said = self.step()
            took = {"seconds": time.perf_counter() - began_s, "cpu_seconds": time.thread_time() - cpu_began_s}
            ran, decoded = self.rows[before:], sum(said.get(one, 0) for one in decoders)
            steps.append({"layers": len(ran), "rows": sum(ran), "decoded": decoded, **took})
            waiting -= set(said)
        self.engine.abort_request(decoders)
        while self.engine.has_unfinished_requests():
            self.step()
        return [] if waiting else steps

    def add(self, prompt: Sequence[int], words: Any, tokens: int) -> str:
        """Hand the engine a request for so many tokens; its name."""
        from vllm import SamplingParams

        name, extra = f"request {len(self.totals)}", words and {"kv_transfer_params": words}
        params = SamplingParams(temperature=0, ignore_eos=True, detokenize=False, max_tokens=tokens, extra_args=extra)
        self.totals[name] = 0
        self.engine.add_request(name, {"prompt_token_ids": list(prompt)}, params)
        return name

    def step(self) -> dict[str, int]:
        """How many tokens who said in one step of the engine."""
        said: dict[str, int] = {}
        for output in self.engine.step():
            total = len(output.outputs[0].token_ids)
            said[output.request_id] = total - self.totals[output.request_id]
            self.totals[output.request_id] = total
        return said


def watch(rows: list[int]) -> None:
    """Note the rows of every layer that runs for a pass, but for the engine's check of itself."""
    from kvservice.client.connectors.vllm.round_engine import VllmEngine

    original = VllmEngine.run_layer

    def run_layer(self: Any, layer: int, hidden: Any, these: Any, is_written: Any) -> Any:
        if len(self._paged.caches[0]) > 10:
            rows.append(len(these))
        return original(self, layer, hidden, these, is_written)

    setattr(VllmEngine, "run_layer", run_layer)  # noqa: B010


if __name__ == "__main__":
    main()
