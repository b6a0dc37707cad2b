"""How much attention a question pays to every row behind which it stands, over all layers and heads."""

from collections.abc import Sequence

import torch
from torch import Tensor

from bench.quality.worlds import Tokens
from kvservice.client.reuse.decoder import Decoder
from kvservice.client.reuse.engine import Rows


class Watched(Decoder):
    """A decoder whose ``mass`` ``[prompt tokens]`` gathers the attention weights of all rows that run."""

    def __init__(self, decoder: Decoder) -> None:
        self.__dict__.update(decoder.__dict__)
        self.mass = torch.zeros(0)

    def _attend_prompt(self, layer: int, query: Tensor, rows: Rows) -> Tensor:
        seen = int(rows.positions[-1]) + 1
        keys = self.kv.read(layer, rows.prompt_slots[0][:seen])[0].to(query.dtype)
        keys = keys.repeat_interleave(query.shape[1] // keys.shape[1], dim=1)
        scores = torch.einsum("qhd,khd->hqk", query, keys) / query.shape[-1] ** 0.5
        scores.masked_fill_(torch.arange(seen) > rows.positions[:, None], -torch.inf)
        self.mass = self.mass + scores.softmax(-1).sum((0, 1))[: len(self.mass)]
        return super()._attend_prompt(layer, query, rows)


def attention_mass(decoder: Decoder, slots: Tensor, tails: Sequence[Tokens]) -> Tensor:
    """Attention ``[prompt tokens]`` that the tails pay to the prompt at ``slots``, as it lies there."""
    watched = Watched(decoder)
    watched.mass = torch.zeros(len(slots))
    for tail in tails:
        own = decoder.kv.allocate(len(tail))
        watched.extend(torch.tensor(tail), torch.cat((slots, own)), len(slots))
        decoder.kv.free(own)
    return watched.mass
