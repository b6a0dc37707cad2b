"""Builders of the reuse tests: a tiny random model, prompts of it, and an engine that notes what is written."""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from kvservice.client.reuse.decoder import Decoder
from kvservice.client.reuse.engine import Engine, Planes, Rows
from kvservice.client.reuse.paged_kv import KVShape, PagedKV
from kvservice.client.reuse.refresh import Prompt
from kvservice.client.reuse.rows import RowClass, Span, classify
from kvservice.client.reuse.weights import LayerWeights, ModelConfig, Weights

CONFIG = ModelConfig(
    model_type="llama",
    vocab=96,
    hidden=64,
    layers=4,
    heads=4,
    kv_heads=2,
    head_size=16,
    positions_max=512,
    norm_epsilon=1e-5,
    rope_theta=10000.0,
)


def make_decoder(kv_dtype: torch.dtype = torch.bfloat16, seed: int = 0, blocks: int = 64) -> Decoder:
    config = CONFIG
    draw = torch.Generator().manual_seed(seed)

    def matrix(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw) * 0.15

    def layer() -> LayerWeights:
        return LayerWeights(
            input_norm=torch.ones(64),
            qkv=matrix(128, 64),
            qkv_bias=None,
            output=matrix(64, 64),
            output_bias=None,
            mlp_norm=torch.ones(64),
            gate_up=matrix(256, 64),
            gate_up_bias=None,
            down=matrix(64, 128),
            down_bias=None,
        )

    embedding = matrix(config.vocab, config.hidden)
    weights = Weights(embedding, tuple(layer() for _ in range(config.layers)), torch.ones(64), embedding)
    shape = KVShape(config.layers, config.kv_heads, config.head_size, blocks, 8, kv_dtype)
    return Decoder(config, weights, PagedKV(shape))


def make_tokens(count: int, seed: int = 1) -> Tensor:
    return torch.randint(0, CONFIG.vocab, (count,), generator=torch.Generator().manual_seed(seed))


def candidate(start: int, tokens: int) -> Span:
    return Span(start, tokens, RowClass.CANDIDATE)


def exactly(start: int, tokens: int) -> Span:
    return Span(start, tokens, RowClass.EXACT)


def make_prompt(
    decoder: Decoder,
    restored: Sequence[Span],
    tokens: int = 96,
    local: int = 0,
    noise: Sequence[float] = (0.5, 0.5, 0.5, 0.5),
) -> Prompt:
    """A prompt whose local and exact rows hold its own prefill, its candidates that plus noise, its must rows NaN.

    `noise` is the standard deviation by layer.
    """
    ids = make_tokens(tokens)
    rows = classify(tokens, restored, local)
    slots = decoder.kv.allocate(tokens)
    decoder.prefill(ids, slots)
    draw = torch.Generator().manual_seed(7)
    candidates = slots[rows.positions(RowClass.CANDIDATE)]
    musts = slots[rows.positions(RowClass.MUST)]
    for layer in range(decoder.layers):
        planes = decoder.read_rows(layer, candidates)
        noisy = tuple(p + noise[layer] * torch.randn(p.shape, generator=draw).to(p.dtype) for p in planes)
        decoder.write_rows(layer, candidates, noisy)
        poison = tuple(torch.full_like(p, torch.nan) for p in decoder.read_rows(layer, musts))
        decoder.write_rows(layer, musts, poison)
    return Prompt(ids, slots, rows)


def snapshot(engine: Engine, prompt: Prompt) -> list[Planes]:
    """All planes of a prompt, layer by layer, in order of position."""
    return [engine.read_rows(layer, prompt.slots) for layer in range(engine.layers)]


def changed_rows(before: Planes, after: Planes) -> Tensor:
    """Positions where any bit of any plane differs."""
    differs = [
        (a.view(torch.int16) != b.view(torch.int16)).flatten(1).any(1) for a, b in zip(before, after, strict=True)
    ]
    return torch.stack(differs).any(0).nonzero().flatten()


@dataclasses.dataclass
class RecordingEngine:
    """Passes calls on to an engine and notes them: (layer, positions run, positions written)."""

    inner: Engine
    runs: list[tuple[int, list[int], list[int]]] = dataclasses.field(default_factory=list)
    probes: list[tuple[int, list[int]]] = dataclasses.field(default_factory=list)

    @property
    def layers(self) -> int:
        return self.inner.layers

    def embed(self, tokens: Tensor) -> Tensor:
        return self.inner.embed(tokens)

    def probe(self, layer: int, hidden: Tensor, rows: Rows) -> Planes:
        self.probes.append((layer, rows.positions.tolist()))
        return self.inner.probe(layer, hidden, rows)

    def run_layer(self, layer: int, hidden: Tensor, rows: Rows, is_written: Tensor) -> Tensor:
        self.runs.append((layer, rows.positions.tolist(), rows.positions[is_written].tolist()))
        return self.inner.run_layer(layer, hidden, rows, is_written)

    def read_rows(self, layer: int, slots: Tensor) -> Planes:
        return self.inner.read_rows(layer, slots)

    def write_rows(self, layer: int, slots: Tensor, planes: Planes) -> None:
        self.inner.write_rows(layer, slots, planes)
