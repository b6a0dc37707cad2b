"""Worlds in token ids: agents, shared segments as the model itself wrote them, what is asked behind them."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from blake3 import blake3
from torch import Tensor

from bench.quality.scenes import Scene, opening, tail
from kvservice.client.demo.model import CONFIG_FILE, WEIGHTS_FILE, load_tokenizer
from kvservice.client.reuse.decoder import Decoder
from kvservice.model.errors import InvalidInputError
from kvservice.model.geometry import attention_geometry
from kvservice.model.identity import Identity
from kvservice.model.rope import ropes_from_config

KV_TOKENS = 48_000
"""Room in paged KV for all that is computed in one world."""
BLOCK_SIZE = 16
SPEECH_SEED, TEMPERATURE, REPEAT_PENALTY = 5, 0.7, 1.5
END_TEXTS = ("<|im_end|>", "<|im_start|>", "<|endoftext|>")

Tokens = tuple[int, ...]
Encode = Callable[[str], Tokens]


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    """A decoder, who it is, and its tokenizer. ``ends``: ids that end an output."""

    name: str
    decoder: Decoder
    identity: Identity
    encode: Encode
    ends: frozenset[int]

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's dense KV."""
        return self.identity.geometry.token_bytes


@dataclass(frozen=True, slots=True)
class Agent:
    """One agent's own token ids, and the first token of its name as an answer."""

    name: str
    history: Tokens
    label: int


@dataclass(frozen=True, slots=True)
class World:
    """Everything of a world as token ids. ``producers[n]``: the agent behind whose history segment n came to be.

    ``tails``: questions that are answered freely. ``verdicts``: questions whose answer is an agent's label.
    """

    name: str
    agents: tuple[Agent, ...]
    request: Tokens
    segments: tuple[Tokens, ...]
    producers: tuple[int, ...]
    tails: tuple[Tokens, ...]
    verdicts: tuple[Tokens, ...]

    @property
    def leader(self) -> int:
        """The agent with the least to compute."""
        return min(range(len(self.agents)), key=lambda index: len(self.agents[index].history))

    def readers(self, most: int) -> list[int]:
        """Up to ``most`` agents that are not the leader, spread over all of them."""
        others = [index for index in range(len(self.agents)) if index != self.leader]
        count = min(most, len(others))
        return [others[index * len(others) // count] for index in range(count)]

    def own_segment(self, agent: int) -> int:
        """The segment that this agent produced first."""
        return self.producers.index(agent)


def load_model(name: str, folder: Path) -> Model:
    """A model of a Hugging Face directory that the torch decoder implements. Raises what ``Decoder.load`` raises."""
    tokenizer = load_tokenizer(folder)
    decoder = Decoder.load(folder, blocks=KV_TOKENS // BLOCK_SIZE, block_size=BLOCK_SIZE)
    ends = (tokenizer.token_to_id(text) for text in END_TEXTS)

    def encode(text: str) -> Tokens:
        return tuple(tokenizer.encode(text, add_special_tokens=False).ids)

    known = frozenset(one for one in ends if one is not None)
    return Model(name, decoder, _identity(name, folder, decoder), encode, known)


def _identity(name: str, folder: Path, decoder: Decoder) -> Identity:
    config = json.loads((folder / CONFIG_FILE).read_text())
    weights = blake3(max_threads=2).update_mmap(folder / WEIGHTS_FILE).hexdigest()
    shape = decoder.kv.shape
    geometry = attention_geometry(
        layers=shape.layers, heads=shape.heads, head_size=shape.head_size, dtype=str(shape.dtype).removeprefix("torch.")
    )
    return Identity("quality", name, f"blake3:{weights}", geometry, ropes_from_config(config))


def build_world(model: Model, scene: Scene) -> World:
    """The scene as the model reads it, and what its agents say in it. Equal for equal weights and arithmetic.

    Raises InvalidInputError when two agents' labels begin with one token: a judge's answer could not be told.
    """
    encode = model.encode
    agents = tuple(
        Agent(name, encode(scene.history(name)), encode(" " + name.split()[-1].lower())[0]) for name in scene.agents
    )
    if scene.verdicts and len({agent.label for agent in agents}) < len(agents):
        raise InvalidInputError(f"{scene.name}: two agents' names begin with one token; rename one")
    request = encode(scene.request)
    if scene.blocks:
        segments = tuple(encode(block) for block in scene.blocks)
    else:
        openings = [encode(opening(agent.name)) for agent in agents]
        spoken = _speak(model, [one.history + request + at for one, at in zip(agents, openings, strict=True)], scene)
        segments = tuple(at + said for at, said in zip(openings, spoken, strict=True))
    return World(
        scene.name,
        agents,
        request,
        segments,
        tuple(index % len(agents) for index in range(len(segments))),
        tuple(encode(tail(question)) for question in scene.questions),
        tuple(encode(scene.verdict(question)) for question in scene.verdicts),
    )


def _speak(model: Model, prompts: Sequence[Tokens], scene: Scene) -> list[Tokens]:
    """What follows each prompt, drawn with a fixed seed, until an end token or the scene's limit.

    Drawn, and with a penalty for what was said before: a small model's greedy speech repeats its prompt over and over,
    and segments that are copies of each other would flatter every way of reuse.
    """
    decoder, draw = model.decoder, torch.Generator().manual_seed(SPEECH_SEED)
    slots = [decoder.kv.allocate(len(prompt) + scene.output_tokens) for prompt in prompts]
    pairs = zip(prompts, slots, strict=True)
    states = [decoder.prefill(torch.tensor(prompt), at[: len(prompt)])[-1:] for prompt, at in pairs]
    logits = decoder.logits(torch.cat(states))
    positions = torch.tensor([len(prompt) for prompt in prompts])
    spoken: list[Tensor] = []
    for step in range(scene.output_tokens):
        spoken.append(_draw(logits, spoken, [] if 2 * step > scene.output_tokens else list(model.ends), draw))
        logits = decoder.decode_step(spoken[-1], positions + step, slots)
    for at in slots:
        decoder.kv.free(at)
    return [_until_end(row, model.ends) for row in torch.stack(spoken, dim=1)]


def _draw(logits: Tensor, spoken: Sequence[Tensor], banned: Sequence[int], draw: torch.Generator) -> Tensor:
    """One token int64 ``[prompts]`` for each row of logits ``[prompts, vocab]``."""
    rows = torch.arange(len(logits))
    for tokens in spoken:
        logits[rows, tokens] -= REPEAT_PENALTY
    logits[:, banned] = -torch.inf
    return torch.multinomial((logits / TEMPERATURE).softmax(-1), 1, generator=draw)[:, 0]


def _until_end(tokens: Tensor, ends: frozenset[int]) -> Tokens:
    found = [int(token) for token in tokens.tolist()]
    stop = next((index for index, token in enumerate(found) if token in ends), len(found))
    return tuple(found[:stop])
