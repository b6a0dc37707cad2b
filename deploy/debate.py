"""A debate of agents against a running vLLM: every round each agent reads what all others said, and answers.

    python deploy/debate.py --model NAME [--url http://127.0.0.1:8000] [--agents 8] [--rounds 5]

Each round is asked twice, with the same prompts: without any reuse between agents (a salt of its own keeps the engine's
prefix cache to one agent's own history), and as a round. Prints per round the time to first token of both, how much was
reused and stored, and how the answers agree. The debate goes on with the answers of the second.
Needs aiohttp and transformers, and a server with the connector: see deploy/vllm.md.
"""

import argparse
import asyncio
import json
import re
import statistics
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from kvservice.client.chat import CutPrompt, MarkedText, Message, Output, canonical_order, chat_prompt
from kvservice.client.demo import texts
from kvservice.client.round_request import Mode, Reuse
from kvservice.client.rounds import PartKind

QUESTIONS = (
    "Speak now: say in four sentences what the money should be spent on, and why. Use your own facts.",
    "Which proposal of the others is the strongest, and what is wrong with it? Answer in four sentences.",
    "Can two proposals be joined? Say which, and what that would cost. Answer in four sentences.",
    "Has somebody changed your mind? Say who, and about what. Answer in four sentences.",
    "Now vote: name one proposal, and give your reason in four sentences.",
)
TIMEOUT_S = 600.0


@dataclass(slots=True)
class Agent:
    """Its part, and what it has read and said so far."""

    name: str
    messages: list[Message] = field(default_factory=list)

    def ask(self, said: Sequence[Output], question: str) -> None:
        """Put the others' words of the last round, and a question, before it."""
        parts = [MarkedText(PartKind.SHARED, one.text) for one in canonical_order(said)]
        self.messages.append(Message("user", (*parts, MarkedText(PartKind.PRIVATE, question))))

    def answered(self, text: str) -> None:
        """Remember what it said."""
        self.messages.append(Message("assistant", (MarkedText(PartKind.PRIVATE, text),)))


@dataclass(frozen=True, slots=True)
class Answer:
    """Token ids, their text, seconds to the first of them, and what the server says of the agent's part."""

    tokens: tuple[int, ...]
    text: str
    first_s: float
    part: dict[str, Any]


class Debate:
    """Agents at one server."""

    def __init__(self, options: argparse.Namespace, session: aiohttp.ClientSession, tokenizer: Any) -> None:
        self.options, self.session, self.tokenizer = options, session, tokenizer
        self.name = f"debate {uuid.uuid4().hex[:8]}"
        scene = list(texts.AGENTS.items())[: options.agents]
        self.agents = [
            Agent(name, [Message("system", (MarkedText(PartKind.PRIVATE, f"{text} {texts.SCENE}"),))])
            for name, text in scene
        ]
        self.modes: dict[PartKind, Mode] = {PartKind.SHARED: Reuse(options.selector, options.ratio, options.rows)}

    async def run(self) -> None:
        """All rounds, with a line each."""
        said: list[Output] = []
        print(
            f"{self.options.agents} agents, {self.options.rounds} rounds; seconds to the first token: median, slowest"
        )
        for number in range(self.options.rounds):
            for agent in self.agents:
                agent.ask(said, QUESTIONS[number % len(QUESTIONS)])
            prompts = [chat_prompt(self.tokenizer, agent.messages) for agent in self.agents]
            apart = await self.ask_all(prompts, number, is_round=False)
            before = await self.figures()
            together = await self.ask_all(prompts, number, is_round=True)
            await asyncio.sleep(1.0)  # what is stored behind a round is counted by then
            self.report(number, prompts, apart, together, before, await self.figures())
            said = []
            for agent, answer in zip(self.agents, together, strict=True):
                agent.answered(answer.text)
                said.append(Output(agent.name, f"\n{agent.name} said: {answer.text.strip()}\n", number))

    async def ask_all(self, prompts: Sequence[CutPrompt], number: int, *, is_round: bool) -> list[Answer]:
        """Every agent at once."""
        asked = zip(self.agents, prompts, strict=True)
        return await asyncio.gather(*(self.ask(agent, prompt, number, is_round) for agent, prompt in asked))

    async def ask(self, agent: Agent, prompt: CutPrompt, number: int, is_round: bool) -> Answer:
        """One agent's answer, as it streams in."""
        body: dict[str, Any] = {
            "model": self.options.model, "prompt": prompt.prompt_token_ids, "max_tokens": self.options.tokens,
            "temperature": 0, "stream": True, "return_token_ids": True,
        }  # fmt: skip
        if is_round:
            body["kv_transfer_params"] = prompt.kv_transfer_params(
                round_name=f"{self.name}, round {number}", agent=agent.name, expect=len(self.agents), modes=self.modes
            )
        else:
            body["cache_salt"] = f"{self.name}, {agent.name}"
        began_s, first_s = time.monotonic(), 0.0
        tokens, text, part = list[int](), "", dict[str, Any]()
        async with self.session.post(f"{self.options.url}/v1/completions", json=body) as reply:
            if reply.status != 200:
                raise SystemExit(f"the server answers {reply.status}: {(await reply.text())[:500]}")
            async for line in reply.content:
                if not line.startswith(b"data: {"):
                    continue
                piece = json.loads(line[6:])
                part = (piece.get("kv_transfer_params") or {}).get("kvservice", part)
                for choice in piece["choices"]:
                    first_s = first_s or time.monotonic() - began_s
                    text += choice["text"]
                    tokens += choice.get("token_ids") or []
        return Answer(tuple(tokens), text, first_s, part)

    async def figures(self) -> dict[str, float]:
        """Our figures in the server's /metrics."""
        async with self.session.get(f"{self.options.url}/metrics") as reply:
            page = await reply.text()
        found = re.findall(r"^vllm:kvservice_(\w+?)(?:_total)?\{[^}]*\} (\S+)$", page, re.MULTILINE)
        return {name: float(value) for name, value in found}

    def report(
        self,
        number: int,
        prompts: Sequence[CutPrompt],
        apart: Sequence[Answer],
        together: Sequence[Answer],
        before: dict[str, float],
        after: dict[str, float],
    ) -> None:
        """A line for the round."""

        def more(name: str) -> float:
            return after.get(name, 0.0) - before.get(name, 0.0)

        seconds = [sorted(one.first_s for one in answers) for answers in (apart, together)]
        words = [f"{statistics.median(one):.2f}, {one[-1]:.2f}" for one in seconds]
        agreed = statistics.mean(agreement(one, other) for one, other in zip(apart, together, strict=True))
        stored = ""
        if more("mirror_bytes_saved"):
            dense, mirrors = more("mirror_bytes_dense"), more("mirror_bytes_saved")
            stored = f"; {dense / 2**20:.1f} MiB of shared KV stored in {mirrors / 2**20:.2f}"
        print(
            f"round {number + 1}: {sum(len(one.prompt_token_ids) for one in prompts)} tokens; apart {words[0]}; "
            f"as a round {words[1]}; {int(more('rows_restored'))} rows restored, {int(more('rows_refreshed'))} of them "
            f"computed again{stored}; answers agree in {agreed:.0%} of their tokens",
            flush=True,
        )


def agreement(one: Answer, other: Answer) -> float:
    """The share of the longer answer up to where the two part."""
    longest = max(len(one.tokens), len(other.tokens), 1)
    pairs = zip(one.tokens, other.tokens, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one.tokens), len(other.tokens))) / longest


async def debate(options: argparse.Namespace) -> None:
    """Connect and run."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer or options.model)
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        await Debate(options, session, tokenizer).run()


def main() -> int:
    """Read the options and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="vLLM's server")
    parser.add_argument("--model", required=True, help="as the server calls it")
    parser.add_argument("--tokenizer", help="name or folder, if it is not the model's")
    parser.add_argument("--agents", type=int, default=8, choices=range(2, len(texts.AGENTS) + 1), metavar="N")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=96, help="of an answer, at most")
    parser.add_argument("--selector", default="hkvd", help="which rows are computed again: hkvd, blocks, head, none")
    parser.add_argument("--ratio", type=float, help="of the rows; 0.02 for hkvd if nothing else is said")
    parser.add_argument("--rows", type=int, help="of a block, or of a head")
    options = parser.parse_args()
    if options.selector == "hkvd" and options.ratio is None:
        options.ratio = 0.02
    asyncio.run(debate(options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
