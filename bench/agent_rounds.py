"""Debates of agents over a real client: every prompt is looked up, restored, and what is missing is stored.

A debate has a system prompt and some agents; each round an agent is asked with its own growing history and what all
said in the round before. Popular debates go on more often (Zipf), some rounds are asked again, old debates begin anew.
The model is a stand-in: rows are random, and of restored ones a few are computed anew, so that mirrors come about.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from kvservice.client import Client, PartKind, ReusePolicy, RoundPrompt
from kvservice.model.geometry import attention_geometry
from kvservice.model.identity import Identity, Namespace
from kvservice.model.rope import rope_from_parameters

GEOMETRY = attention_geometry(layers=4, heads=2, head_size=16, dtype="bfloat16")
CHUNK_TOKENS, OUTPUT_TOKENS, BLOCK, BLOCKS = 32, 32, 16, 64
HISTORY_MAX = 12
"""Chunks; then the debate begins anew."""
SHARE_ASKED_AGAIN = 0.3
POLICY = ReusePolicy("hkvd:0.02", check_layer=1)
REFRESHED_ROWS = 2
PREFILL_TOKEN_S = 1e-4
Tokens = tuple[int, ...]


def make_identity(tenant: str, model: str = "tiny") -> Identity:
    """Of a model whose caches are small: 512 bytes a token."""
    rope = rope_from_parameters({"rope_theta": 10000.0}, head_size=16, max_positions=4096)
    return Identity(tenant, model, "r1", GEOMETRY, (rope,) * GEOMETRY.layers)


@dataclass(slots=True)
class Debate:
    """How far it is. ``histories``: of every agent; ``outputs``: of the round before."""

    system: Tokens
    histories: list[Tokens]
    outputs: list[Tokens] = field(default_factory=list)


class Debates:
    """Rounds without end, each some prompts; the same for the same seed."""

    def __init__(self, namespace: Namespace, *, debates: int, agents: int, seed: int, exponent: float = 0.8) -> None:
        self._namespace, self._agents = namespace, agents
        self._rng = np.random.default_rng(seed)
        self._weights = 1 / np.arange(1, debates + 1) ** exponent
        self._weights /= self._weights.sum()
        self._debates = [self._begin() for _ in range(debates)]

    def rounds(self, count: int) -> Iterator[list[RoundPrompt]]:
        """So many rounds."""
        for _ in range(count):
            number = int(self._rng.choice(len(self._debates), p=self._weights))
            debate = self._debates[number]
            if not debate.outputs or self._rng.random() >= SHARE_ASKED_AGAIN:
                self._advance(debate)
            yield [self._prompt(debate, agent) for agent in range(self._agents)]
            if len(debate.histories[0]) > HISTORY_MAX * CHUNK_TOKENS:
                self._debates[number] = self._begin()

    def _tokens(self, count: int) -> Tokens:
        return tuple(int(one) for one in self._rng.integers(100, 50_000, count))

    def _begin(self) -> Debate:
        return Debate(self._tokens(CHUNK_TOKENS), [self._tokens(CHUNK_TOKENS) for _ in range(self._agents)])

    def _advance(self, debate: Debate) -> None:
        for agent, output in enumerate(debate.outputs):
            debate.histories[agent] += output
        debate.outputs = [self._tokens(OUTPUT_TOKENS) for _ in range(self._agents)]

    def _prompt(self, debate: Debate, agent: int) -> RoundPrompt:
        parts = [(PartKind.SYSTEM, debate.system), (PartKind.PRIVATE, debate.histories[agent])]
        parts += [(PartKind.SHARED, output) for output in debate.outputs]
        return RoundPrompt.from_parts(self._namespace, parts, policy=POLICY, chunk_tokens=CHUNK_TOKENS)


class Engine:
    """Paged KV of a model that is not there, and a client."""

    def __init__(self, client: Client, seed: int = 0) -> None:
        self._client = client
        self._generator = torch.Generator().manual_seed(seed)
        self._planes = [
            [self._random((BLOCKS, BLOCK, plane.heads, plane.head_size)) for plane in GEOMETRY.planes]
            for _ in range(GEOMETRY.layers)
        ]

    def play(self, prompts: Sequence[RoundPrompt]) -> None:
        """One round: the first computes what nobody has, the others take it over and refresh a few rows."""
        for number, prompt in enumerate(prompts):
            slots = torch.arange(prompt.token_count)
            with self._client.lookup([prompt]) as plans:
                if plans.hit_tokens == prompt.token_count and not any(span.is_moved for span in plans[0].spans()):
                    continue
                self._compute(slots)
                self._client.restore(plans, self._planes, [slots]).wait()
                self._compute(slots[-REFRESHED_ROWS:])
                self._client.store(prompt, self._planes, slots, base=plans[0], is_refreshed=number > 0)

    def _compute(self, slots: torch.Tensor) -> None:
        """New values at these slots."""
        for layer in self._planes:
            for plane in layer:
                plane.flatten(0, 1)[slots] = self._random((len(slots), *plane.shape[2:]))

    def _random(self, shape: Sequence[int]) -> torch.Tensor:
        return torch.randn(tuple(shape), generator=self._generator).to(torch.bfloat16)
