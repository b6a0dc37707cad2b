"""What do rounds inside vLLM bring: time to all first tokens of a round, bytes, and agreement with full prefill?

The real vLLM on this machine's CPU, SmolLM2-135M, N agents of the demo's scene in several rounds: each prompt is an
agent's private history, all outputs of the round before in one order, and a question. What becomes of older outputs is
up to --history:
    own         an agent keeps what it said itself, from the next round on: rows that nobody shares
    twice       the same at once, so that it stands twice
    transcript  all keep all that was said, as in a debate whose context accumulates
The engine without connector answers first: its outputs make the prompts of every other leg. Legs, each a process of its
own, in turns:
    full         no connector; the engine's own prefix cache keeps histories
    collective   rounds: a leader, one pass for all others, mirrors
    one by one   the same reuse, a prompt at a time
    restored     collective again in a new process: all segments come back as they were stored
Agreement: of the reference's own continuation, teacher-forced, the share of tokens that are the likeliest still; over
the agents that reuse, where some do.

Run in vLLM's environment: make bench-vllm-rounds. Writes build/bench/vllm_rounds.json.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.vllm_ttft import BLOCK, LEG_TIMEOUT_S, ROOT, environment, kvservice, quartiles
from kvservice.client.demo import texts

MARK = "BENCH-ROUNDS "
RESULT = Path("build/bench/vllm_rounds.json")
OUTPUT_TOKENS, SCORED_TOKENS, END_TOKENS = 105, 32, frozenset({0, 1, 2})
LEGS = ("full", "collective", "one by one", "restored")
DEFAULT_MODE = {"mode": "reuse", "selector": "hkvd", "ratio": 0.02}


# A leg, in a process of its own


class Leg:
    """One engine. ``spec``: model, agents, rounds, transfer, mode, and for all but the first leg its prompts."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        from vllm import LLM, SamplingParams
        from vllm.config import KVTransferConfig

        transfer = spec["transfer"] and KVTransferConfig(**spec["transfer"])
        self.connectors = watch_connectors() if transfer else []
        self.llm = LLM(
            model=spec["model"], enforce_eager=True, dtype="bfloat16", block_size=BLOCK, max_model_len=4096,
            kv_cache_memory_bytes=1 << 30, max_num_batched_tokens=2048, max_num_seqs=32,
            kv_transfer_config=transfer or None,
        )  # fmt: skip
        self.params = SamplingParams
        self.spec = spec

    def ask(self, prompts: Sequence[Sequence[int]], words: Sequence[Any] | None, **params: Any) -> Any:
        """vLLM's outputs and the seconds that they took."""
        said = words or [None] * len(prompts)
        options = [
            self.params(temperature=0, detokenize=False, extra_args=one and {"kv_transfer_params": one}, **params)
            for one in said
        ]
        began_s = time.perf_counter()
        outputs = self.llm.generate([{"prompt_token_ids": list(one)} for one in prompts], options, use_tqdm=False)
        return outputs, time.perf_counter() - began_s

    def run(self) -> dict[str, Any]:
        """All rounds."""
        found: list[dict[str, Any]] = []
        world = self.spec.get("rounds_said") or self.write_rounds()
        self.warm_up(world[0])
        for number, one in enumerate(world):
            words = self.words(one, number) if self.spec["transfer"] else None
            before = self.counts()
            seconds, first, roles = self.first_tokens(one["prompts"], words)
            time.sleep(1.0)  # what is stored behind a round is stored by then
            stored = {name: value - before.get(name, 0) for name, value in self.counts().items()}
            found.append(
                {"seconds": seconds, "first": first, "roles": roles, "counts": stored, **self.scores(one, number)}
            )
        if self.counts().get("round_params_refused"):
            raise SystemExit("the connector refused what the requests say of their round: see --mode and its log")
        self.llm.llm_engine.engine_core.shutdown()
        return {"rounds": found, "said": world}

    def first_tokens(
        self, prompts: Sequence[Sequence[int]], words: Sequence[Any] | None
    ) -> tuple[float, list[int], list[str]]:
        """Seconds until every prompt of the round has its first token, those tokens, and what each agent did."""
        outputs: list[Any] = []
        total = 0.0
        if self.spec["name"] != "one by one":
            outputs, total = self.ask(prompts, words, max_tokens=1, ignore_eos=True)
        else:
            for index, prompt in enumerate(prompts):
                one, seconds = self.ask([prompt], words and [words[index]], max_tokens=1, ignore_eos=True)
                outputs += one
                total += seconds
        said = [(one.kv_transfer_params or {}).get("kvservice", {}) for one in outputs]
        return total, [one.outputs[0].token_ids[0] for one in outputs], [one.get("role", "") for one in said]

    def scores(self, one: Mapping[str, Any], number: int) -> dict[str, Any]:
        """Per agent, the share of the reference's next tokens that are the likeliest behind what this leg holds."""
        prompts = [[*prompt, *said] for prompt, said in zip(one["prompts"], one["reference"], strict=True)]
        words = self.words(one, number, more=SCORED_TOKENS) if self.spec["transfer"] else None
        is_plain = words is None  # its cache holds the reference's own tokens, of which nothing would be computed
        outputs, _ = self.ask(
            prompts, words, max_tokens=1, ignore_eos=True, prompt_logprobs=1, skip_reading_prefix_cache=is_plain
        )
        agreed = []
        for prompt, said, output in zip(one["prompts"], one["reference"], outputs, strict=True):
            places = [output.prompt_logprobs[len(prompt) + at].get(token) for at, token in enumerate(said)]
            known = [place.rank == 1 for place in places if place is not None]  # the first is not, behind whole blocks
            agreed.append(sum(known) / len(known))
        return {"agreed": agreed}

    def words(self, one: Mapping[str, Any], number: int, more: int = 0) -> list[dict[str, Any]]:
        """What each request says. ``more``: tokens at its end that the round's own prompt has not; these, and the
        question before them, are then computed whatever is stored."""
        found = []
        for agent, segments in zip(one["agents"], one["segments"], strict=True):
            (kind, tokens), *_ = reversed(segments)
            last = ["tool", tokens + more] if more else [kind, tokens]
            modes = {"shared": self.spec["mode"]} | ({"tool": "off"} if more else {})
            said: dict[str, Any] = {"segments": [*segments[:-1], last], "modes": modes}
            if self.spec["name"] != "one by one":
                name = f"round {number}{' scored' if more else ''}"
                said |= {"round": name, "agent": agent, "expect": len(one["agents"])}
            found.append({"kvservice": said})
        return found

    def warm_up(self, first: Mapping[str, Any]) -> None:
        """Have everything loaded that a first prompt loads; and every agent has spoken before the first round, so that
        its history is in the engine's cache."""
        self.ask([list(range(1000, 1600))], None, max_tokens=2, ignore_eos=True)
        histories = [
            prompt[: segments[0][1]] for prompt, segments in zip(first["prompts"], first["segments"], strict=True)
        ]
        self.ask(histories, None, max_tokens=1, ignore_eos=True)

    def counts(self) -> dict[str, float]:
        """What the connectors have counted so far."""
        total: dict[str, float] = {}
        for connector in self.connectors:
            for name, value in connector.counts.totals().items():
                total[name] = total.get(name, 0) + value
        return total

    def write_rounds(self) -> list[dict[str, Any]]:
        """The debate as plain vLLM has it: prompts of every round, and how the reference goes on behind each."""
        encode = self.llm.get_tokenizer().encode
        scene = list(texts.AGENTS.items())
        names = [f"{name} {number // len(scene)}".removesuffix(" 0") for number, (name, _) in enumerate(scene * 2)]
        agents = names[: self.spec["agents"]]
        histories = [encode(texts.history((scene * 2)[index][1])) for index in range(len(agents))]
        tail = encode(texts.TAIL)
        openings = [encode(texts.opening(name)) for name in agents]
        past: list[list[int]] = []
        shared: list[list[int]] = []
        world = []
        for number in range(self.spec["rounds"] + 1):
            ask = tail if number else encode(texts.request())
            public = [*past, *shared]
            prompts = [[*history, *(t for one in public for t in one), *ask] for history in histories]
            if number:
                segments = [
                    [["private", len(history)], *[["shared", len(one)] for one in public], ["private", len(ask)]]
                    for history in histories
                ]
                reference, _ = self.ask(prompts, None, max_tokens=SCORED_TOKENS, ignore_eos=True)
                world.append(
                    {"agents": agents, "prompts": prompts, "segments": segments,
                     "reference": [list(one.outputs[0].token_ids) for one in reference]}
                )  # fmt: skip
            if self.spec["history"] == "transcript":
                past = public
            elif self.spec["history"] == "own":  # what an agent said stands once in its prompt
                histories = [
                    [*history, *said] for history, said in zip(histories, shared or [[]] * len(agents), strict=True)
                ]
            spoken = [[*prompt, *opening] for prompt, opening in zip(prompts, openings, strict=True)]
            outputs, _ = self.ask(spoken, None, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
            shared = [
                [*opening, *until_end(list(output.outputs[0].token_ids))]
                for opening, output in zip(openings, outputs, strict=True)
            ]
            if self.spec["history"] == "twice":
                histories = [[*history, *said] for history, said in zip(histories, shared, strict=True)]
        return world


def until_end(tokens: list[int]) -> list[int]:
    """An output up to where the model would have ended it, 8 tokens at least."""
    end = next((index for index, token in enumerate(tokens) if token in END_TOKENS), len(tokens))
    return tokens[: max(end, 8)]


def watch_connectors() -> list[Any]:
    """Connectors that are built from here on."""
    from kvservice.client.connectors.vllm import KVServiceConnector

    original, found = KVServiceConnector.__init__, list[Any]()

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        original(self, *args, **kwargs)
        found.append(self)

    setattr(KVServiceConnector, "__init__", __init__)  # noqa: B010
    return found


# The parent


def run_leg(spec: Mapping[str, Any], threads: int, folder: Path) -> dict[str, Any]:
    """Its figures; ``spec`` goes by a file, since prompts are long."""
    path = folder / "leg.json"
    path.write_text(json.dumps(spec))
    command = [sys.executable, "-m", "bench.vllm_rounds", "--leg", str(path)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=LEG_TIMEOUT_S, check=False, cwd=ROOT,
        env=environment(threads),
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if not lines:
        raise SystemExit((done.stdout + done.stderr)[-4000:])
    figures: dict[str, Any] = json.loads(lines[0][len(MARK) :])
    return figures


def measure(model: Path, options: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """Figures of every leg, one of each a repetition; each repetition has a store of its own."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in options.legs}
    said: list[dict[str, Any]] = []
    base = {"model": str(model), "agents": options.agents, "rounds": options.rounds, "mode": options.mode,
            "history": options.history}  # fmt: skip
    for _ in range(options.repetitions):
        folder, other = (Path(tempfile.mkdtemp(prefix="kvb-", dir="/tmp")) for _ in range(2))
        try:
            with kvservice(folder) as ours, kvservice(other) as theirs:
                if not said:  # in an engine of its own: it leaves prompts in the engine's cache
                    spec = base | {"name": "full", "transfer": None, "rounds_said": []}
                    said = run_leg(spec, options.threads, folder)["said"]
                for one in (ours, theirs):
                    one["kv_connector_extra_config"] |= options.options
                transfers = {"full": None, "collective": ours, "one by one": theirs, "restored": ours}
                for name in options.legs:
                    spec = base | {"name": name, "transfer": transfers[name], "rounds_said": said}
                    found[name].append(run_leg(spec, options.threads, folder) | {"said": None})
        finally:
            shutil.rmtree(folder)
            shutil.rmtree(other)
    return found


def report(found: Mapping[str, Sequence[Mapping[str, Any]]], agents: int) -> dict[str, Any]:
    """A table; ratios are of the same round in the same repetition."""
    summary: dict[str, Any] = {}
    base = [one["seconds"] for run in found["full"] for one in run["rounds"]]
    for name in found:
        rounds = [one for run in found[name] for one in run["rounds"]]
        ratios = [full / one["seconds"] for one, full in zip(rounds, base, strict=True)]
        leaders = [sum(one["counts"].get("members_leading", 0) for one in rounds)]
        pairs = [pair for one in rounds for pair in zip(one["agreed"], one["roles"], strict=True)]
        agreed = [share for share, role in pairs if role.startswith("reuse")] or [share for share, _ in pairs]
        summary[name] = {
            "seconds": [round(one["seconds"], 3) for one in rounds], "full_over": quartiles(ratios),
            "agreement": statistics.mean(agreed), "agreement_least": min(agreed), "leaders": leaders[0],
        }  # fmt: skip
        print(
            f"{name:<11} {statistics.median(one['seconds'] for one in rounds):7.3f} s a round   full prefill takes "
            "{1:.2f} ({0:.2f}-{2:.2f}) times as long".format(*quartiles(ratios))
            + f"   agreement {statistics.mean(agreed):.4f}, least {min(agreed):.3f}"
        )
    saved = {
        key: sum(one["counts"].get(key, 0) for run in found["collective"] for one in run["rounds"])
        for key in ("mirrors_saved", "mirror_bytes_saved", "mirror_bytes_dense", "members_reusing", "members_leading")
    }
    if saved["mirror_bytes_saved"]:
        mirror = saved["mirror_bytes_dense"] / saved["mirror_bytes_saved"]
        shared = saved["mirror_bytes_dense"] / max(saved["members_reusing"], 1)
        whole = agents * shared / (shared + (agents - 1) * shared / mirror)
        summary["stored"] = saved | {"mirror_ratio": mirror, "round_ratio": whole,
                                     "bytes_an_added_agent": shared / mirror}  # fmt: skip
        print(
            f"a mirror is {mirror:.1f} times smaller than its segment, the shared part of a round of {agents} "
            f"{whole:.1f} times; an added agent takes {shared / mirror / 2**20:.2f} MiB of {shared / 2**20:.1f}"
        )
    return summary


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of the model")
    parser.add_argument("--agents", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repetitions", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2, help="of the engine's matrix products")
    parser.add_argument("--mode", type=json.loads, default=DEFAULT_MODE, help="how shared segments are reused, as JSON")
    parser.add_argument("--history", choices=("own", "twice", "transcript"), default="own", help="of older outputs")
    parser.add_argument("--options", type=json.loads, default={}, help="of the connector besides, as JSON")
    parser.add_argument("--legs", nargs="+", default=list(LEGS), choices=LEGS)
    parser.add_argument("--leg", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.leg:
        figures = Leg(json.loads(Path(options.leg).read_text())).run()
        sys.stdout.write(MARK + json.dumps(figures) + "\n")
        sys.stdout.flush()
        os._exit(0)  # some engines' threads never end
    found = measure(options.model.resolve(), options)
    summary = report(found, options.agents)
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(json.dumps({"threads": options.threads, "summary": summary, "legs": found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
