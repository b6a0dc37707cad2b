"""What the demo plays with: a model, its identity, and the token ids of every agent's part."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from blake3 import blake3
from torch import Tensor

from kvservice.client.demo import texts
from kvservice.client.demo.model import CONFIG_FILE, WEIGHTS_FILE, load_tokenizer, smollm2, tiny_model
from kvservice.client.reuse.decoder import Decoder
from kvservice.model.errors import InvalidInputError
from kvservice.model.geometry import attention_geometry
from kvservice.model.identity import Identity
from kvservice.model.rope import ropes_from_config

CONTINUE_TOKENS = 32
"""How far every prompt is continued to compare next tokens."""
BLOCK_SIZE = 16
TINY_SEED = 7
_COPIES = 3
"""A prompt lies in paged KV up to so many times at once: in full, reused, and as another variant."""


@dataclass(frozen=True, slots=True, eq=False)
class Agent:
    """One agent's own token ids, int64 ``[tokens]`` each: private history, request to speak, opening of its output."""

    name: str
    history: Tensor
    request: Tensor
    opening: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class World:
    """The model, who it is, and who takes part. ``end_tokens``: ids that end an output."""

    model_name: str
    decoder: Decoder
    identity: Identity
    agents: Sequence[Agent]
    tail: Tensor
    output_tokens: int
    end_tokens: frozenset[int] = field(default=frozenset())

    @property
    def producers_identity(self) -> Identity:
        """A namespace of its own for the caches that the outputs' producers made while they spoke."""
        return replace(self.identity, salt="producers")


def load_world(cache: Path, agents: int, *, is_tiny: bool) -> World:
    """The real model with its scene, or a tiny random one with random tokens.

    Raises InvalidInputError for more agents than there are parts for.
    """
    most = len(texts.AGENTS)
    if not 2 <= agents <= most:
        raise InvalidInputError(f"{agents} agents; the demo has parts for 2 to {most}")
    return _tiny_world(cache, agents) if is_tiny else _real_world(cache, agents)


def _real_world(cache: Path, count: int) -> World:
    folder = smollm2(cache / "models")
    tokenizer = load_tokenizer(folder)

    def encode(text: str) -> Tensor:
        return torch.tensor(tokenizer.encode(text, add_special_tokens=False).ids)

    scene = list(texts.AGENTS.items())[:count]
    agents = [
        Agent(name, encode(texts.history(text)), encode(texts.request()), encode(texts.opening(name)))
        for name, text in scene
    ]
    ends = frozenset({0, 1, 2})  # SmolLM2: end of text, start and end of a turn
    return _world("SmolLM2-135M-Instruct", folder, agents, encode(texts.TAIL), 105, ends)


def _tiny_world(cache: Path, count: int) -> World:
    folder = cache / "models" / f"tiny-{TINY_SEED}"
    if not folder.is_dir():
        tiny_model(folder, TINY_SEED)
    generator = torch.Generator().manual_seed(TINY_SEED)

    def draw(tokens: int) -> Tensor:
        return torch.randint(3, 1000, (tokens,), generator=generator)

    agents = [Agent(f"agent {number}", draw(24 + 9 * number), draw(4), draw(3)) for number in range(count)]
    return _world("tiny random Llama", folder, agents, draw(6), 48, frozenset())


def _world(
    name: str, folder: Path, agents: Sequence[Agent], tail: Tensor, output_tokens: int, ends: frozenset[int]
) -> World:
    shared = sum(agent.opening.numel() + output_tokens for agent in agents)
    tokens = sum(agent.history.numel() + shared + tail.numel() + CONTINUE_TOKENS + BLOCK_SIZE for agent in agents)
    decoder = Decoder.load(folder, blocks=_COPIES * tokens // BLOCK_SIZE, block_size=BLOCK_SIZE)
    return World(name, decoder, _identity(name, folder, decoder), agents, tail, output_tokens, ends)


def _identity(name: str, folder: Path, decoder: Decoder) -> Identity:
    config = json.loads((folder / CONFIG_FILE).read_text())
    weights = blake3(max_threads=2).update_mmap(folder / WEIGHTS_FILE).hexdigest()
    shape = decoder.kv.shape
    geometry = attention_geometry(
        layers=shape.layers, heads=shape.heads, head_size=shape.head_size, dtype=str(shape.dtype).removeprefix("torch.")
    )
    return Identity("demo", name, f"blake3:{weights}", geometry, ropes_from_config(config))
