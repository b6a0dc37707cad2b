"""A plain torch decoder of the Llama family over paged KV: the engine of the tests and the demo.

Attention reads K and V as stored (rounded to the KV dtype), never the fresh values, so that restored and computed rows
behave alike. Weights and arithmetic are in the weights' dtype (float32); RoPE and norms always in float32.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, rms_norm, scaled_dot_product_attention, silu
from torch.nn.utils.rnn import pad_sequence

from kvservice.client.reuse.engine import Planes, Rows
from kvservice.client.reuse.paged_kv import KVShape, PagedKV
from kvservice.client.reuse.weights import LayerWeights, ModelConfig, Weights, load_config, load_weights
from kvservice.model.errors import SlotError


class Decoder:
    """Implements `Engine`. One thread; `kv` is its own memory and may be written by others between calls."""

    def __init__(self, config: ModelConfig, weights: Weights, kv: PagedKV) -> None:
        self.config = config
        self.kv = kv
        self.frequencies = rope_frequencies(config.head_size, config.rope_theta)
        self._weights = weights
        self._rope = _rope_table(self.frequencies, config.positions_max)

    @classmethod
    def load(
        cls,
        directory: Path,
        blocks: int,
        block_size: int = 16,
        kv_dtype: torch.dtype = torch.bfloat16,
        dtype: torch.dtype = torch.float32,
    ) -> "Decoder":
        """The model of a Hugging Face directory with paged KV of `blocks` blocks. Raises what `load_config` raises."""
        config = load_config(directory)
        shape = KVShape(config.layers, config.kv_heads, config.head_size, blocks, block_size, kv_dtype)
        return cls(config, load_weights(directory, config, dtype), PagedKV(shape))

    @property
    def layers(self) -> int:
        """How many layers there are."""
        return self.config.layers

    def embed(self, tokens: Tensor) -> Tensor:
        """Hidden states [rows, hidden] of token ids int64 [rows]."""
        return embedding(tokens, self._weights.embedding)

    def probe(self, layer: int, hidden: Tensor, rows: Rows) -> Planes:
        """Fresh K and V [rows, kv heads, head_size] in the KV dtype; writes nothing."""
        _, keys, values = self._project(self._weights.layers[layer], hidden, rows.positions)
        return keys.to(self.kv.shape.dtype), values.to(self.kv.shape.dtype)

    def run_layer(self, layer: int, hidden: Tensor, rows: Rows, is_written: Tensor) -> Tensor:
        """Store the flagged rows, attend, return the next hidden states [rows, hidden]."""
        weights = self._weights.layers[layer]
        query, keys, values = self._project(weights, hidden, rows.positions)
        self.kv.write(layer, rows.slots[is_written], (keys[is_written], values[is_written]))
        return self._complete(weights, hidden, self._attend(layer, query, rows))

    def read_rows(self, layer: int, slots: Tensor) -> Planes:
        """Copies of K and V as stored at `slots`."""
        return self.kv.read(layer, slots)

    def write_rows(self, layer: int, slots: Tensor, planes: Planes) -> None:
        """Store K and V at `slots`."""
        self.kv.write(layer, slots, planes)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [rows, vocab] of final hidden states [rows, hidden]."""
        return linear(self._norm(hidden, self._weights.norm), self._weights.head)

    def prefill(self, tokens: Tensor, slots: Tensor) -> Tensor:
        """Compute and store a whole prompt, int64 [tokens] each; final hidden states [tokens, hidden]."""
        return self.extend(tokens, slots, 0)

    def extend(self, tokens: Tensor, prompt_slots: Tensor, start: int) -> Tensor:
        """Compute and store `tokens` int64 [rows] as positions `start`... of a prompt whose earlier rows are stored.

        `prompt_slots` int64 may be longer than the prompt. Returns final hidden states [rows, hidden].
        """
        rows = Rows.at(torch.arange(start, start + tokens.numel()), prompt_slots)
        is_written = torch.ones(len(rows), dtype=torch.bool)
        hidden = self.embed(tokens)
        for layer in range(self.layers):
            hidden = self.run_layer(layer, hidden, rows, is_written)
        return hidden

    def decode_step(self, tokens: Tensor, positions: Tensor, prompt_slots: Sequence[Tensor]) -> Tensor:
        """One token of each of N prompts: store token n at `positions[n]` of prompt n; logits [N, vocab].

        `tokens` and `positions` are int64 [N]; `prompt_slots[n]` int64 reaches at least up to that position, else
        SlotError is raised and nothing stored.
        """
        return self._step(tokens, positions, _table(prompt_slots))

    def decode(self, tokens: Tensor, positions: Tensor, prompt_slots: Sequence[Tensor], steps: int) -> Tensor:
        """Greedy decoding of N prompts at once: the `steps` tokens that follow `tokens` int64 [N]; int64 [N, steps].

        The first step stores `tokens` at `positions`; the last token returned is not stored. Lowest id wins a tie.
        """
        slots = _table(prompt_slots)
        found = []
        for step in range(steps):
            tokens = self._step(tokens, positions + step, slots).argmax(-1)
            found.append(tokens)
        return torch.stack(found, dim=1)

    def _step(self, tokens: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
        own = _own_slots(slots, positions)
        longest = int(positions.max()) + 1
        # Slots behind a prompt's end may hold NaN, which a mask would let through: look at its first slot instead.
        is_seen = torch.arange(longest) <= positions[:, None]
        seen = torch.where(is_seen, slots[:, :longest], slots[:, :1])
        hidden = self.embed(tokens)
        for layer, weights in enumerate(self._weights.layers):
            query, keys, values = self._project(weights, hidden, positions)
            self.kv.write(layer, own, (keys, values))
            attended = self._attend_each(layer, query, seen, is_seen)
            hidden = self._complete(weights, hidden, attended)
        return self.logits(hidden)

    def _project(self, weights: LayerWeights, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query [rows, heads, head_size], K and V [rows, kv heads, head_size], rotated to `positions`."""
        config = self.config
        normed = self._norm(hidden, weights.input_norm)
        heads = linear(normed, weights.qkv, weights.qkv_bias).view(len(hidden), -1, config.head_size)
        turned = self._rotate(heads[:, : -config.kv_heads], positions)
        return turned[:, : config.heads], turned[:, config.heads :], heads[:, -config.kv_heads :]

    def _rotate(self, heads: Tensor, positions: Tensor) -> Tensor:
        """Half-style RoPE in float32: element i turns with element i + head_size / 2."""
        cosine, sine = self._rope[:, positions, None]
        low, high = heads.float().chunk(2, dim=-1)
        return torch.cat((low * cosine - high * sine, high * cosine + low * sine), dim=-1).to(heads.dtype)

    def _attend(self, layer: int, query: Tensor, rows: Rows) -> Tensor:
        """Attention output [rows, heads * head_size] of every row over its own prompt's stored K and V."""
        parts = zip(torch.split(query, rows.counts()), rows.split(), strict=True)
        return torch.cat([self._attend_prompt(layer, own, part) for own, part in parts if len(part)])

    def _attend_prompt(self, layer: int, query: Tensor, rows: Rows) -> Tensor:
        seen = int(rows.positions[-1]) + 1
        keys, values = self.kv.read(layer, rows.prompt_slots[0][:seen])
        # Rising positions from 0 to the last without a gap: the kernel can skip the upper triangle.
        is_causal = len(rows) == seen
        mask = None if is_causal else torch.arange(seen) <= rows.positions[:, None]
        return _attention(query, keys, values, mask, is_causal).flatten(1)

    def _attend_each(self, layer: int, query: Tensor, seen: Tensor, is_seen: Tensor) -> Tensor:
        """As `_attend`, for one row of each of N prompts; `seen` are slots [N, longest]."""
        keys, values = (
            plane.view(*seen.shape, *plane.shape[1:]).transpose(1, 2).to(query.dtype)
            for plane in self.kv.read(layer, seen.flatten())
        )
        # [N, kv heads, group, head_size]: the query heads of one KV head share its keys, which are never repeated.
        grouped = query.view(len(query), self.config.kv_heads, -1, self.config.head_size)
        attended = scaled_dot_product_attention(grouped, keys, values, attn_mask=is_seen[:, None, None])
        return attended.flatten(1)

    def _complete(self, weights: LayerWeights, hidden: Tensor, attended: Tensor) -> Tensor:
        """The rest of a layer behind attention."""
        hidden = hidden + linear(attended, weights.output, weights.output_bias)
        normed = self._norm(hidden, weights.mlp_norm)
        gate, up = linear(normed, weights.gate_up, weights.gate_up_bias).chunk(2, dim=-1)
        return hidden + linear(silu(gate) * up, weights.down, weights.down_bias)

    def _norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        normed = rms_norm(hidden.float(), (self.config.hidden,), eps=self.config.norm_epsilon)
        return normed.to(hidden.dtype) * weight


def _table(prompt_slots: Sequence[Tensor]) -> Tensor:
    """Slots [N, longest]; -1 where a prompt has none."""
    return pad_sequence(list(prompt_slots), batch_first=True, padding_value=-1)


def _own_slots(slots: Tensor, positions: Tensor) -> Tensor:
    """The slot [N] at each prompt's position in a table [N, longest]."""
    within = positions.clamp(max=slots.shape[1] - 1)
    own = slots.gather(1, within[:, None]).flatten()
    is_lacking = (own < 0) | (within < positions)
    if bool(is_lacking.any()):
        position = int(positions[is_lacking][0])
        raise SlotError(f"position {position} has no slot; allocate room for what is decoded")
    return own


def rope_frequencies(head_size: int, theta: float) -> Tensor:
    """Angle per position of each rotating pair: float32 [head_size / 2], as Hugging Face computes them."""
    exponents = torch.arange(0, head_size, 2, dtype=torch.int64).float() / head_size
    return torch.as_tensor(1.0 / (theta**exponents))


def _rope_table(frequencies: Tensor, positions: int) -> Tensor:
    """Cosines and sines: float32 [2, positions, head_size / 2]."""
    angles = torch.arange(positions).float()[:, None] * frequencies
    return torch.stack((angles.cos(), angles.sin()))


def _attention(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
    """[rows, heads, head_size] of `query` over K and V [seen, kv heads, head_size]; `mask` bool [rows, seen]."""
    group = query.shape[1] // keys.shape[1]
    keys, values = (plane.to(query.dtype).repeat_interleave(group, dim=1).transpose(0, 1) for plane in (keys, values))
    attended = scaled_dot_product_attention(
        query.transpose(0, 1)[None], keys[None], values[None], attn_mask=mask, is_causal=is_causal
    )
    return attended[0].transpose(0, 1)
