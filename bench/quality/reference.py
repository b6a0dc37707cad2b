"""What a full prefill says: greedy answers to every question, and the logits before each of their tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.quality.worlds import Tokens, World
from kvservice.client.reuse.decoder import Decoder
from kvservice.client.reuse.engine import Rows

CONTINUE_TOKENS = 32


@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    """``answers[n]``: the greedy answer to question n, and ``logits[n]`` ``[tokens, vocab]`` before its tokens.

    ``verdicts`` ``[judge questions, agents]``: the logits of the agents' labels.
    """

    answers: tuple[Tokens, ...]
    logits: tuple[Tensor, ...]
    verdicts: Tensor


def refer(decoder: Decoder, world: World, slots: Tensor, *, is_judged: bool) -> Reference:
    """Ask everything behind a prompt that lies computed at ``slots`` int64 ``[prompt tokens]``."""
    answers = _answer(decoder, slots, world.tails)
    logits = follow(decoder, slots, world.tails, answers)
    return Reference(answers, tuple(logits), verdicts(decoder, world, slots) if is_judged else torch.empty(0, 0))


def follow(decoder: Decoder, slots: Tensor, tails: Sequence[Tokens], answers: Sequence[Tokens]) -> list[Tensor]:
    """Logits ``[answer tokens, vocab]`` before each token of each answer, which are fed whatever is predicted."""
    pairs = list(zip(tails, answers, strict=True))
    parts = _run_behind(decoder, slots, [tail + answer[:-1] for tail, answer in pairs])
    return [decoder.logits(part[len(tail) - 1 :]) for part, (tail, _) in zip(parts, pairs, strict=True)]


def verdicts(decoder: Decoder, world: World, slots: Tensor) -> Tensor:
    """Logits ``[judge questions, agents]`` of the agents' labels behind each question."""
    if not world.verdicts:
        return torch.empty(0, len(world.agents))
    states = torch.cat([part[-1:] for part in _run_behind(decoder, slots, world.verdicts)])
    return decoder.logits(states)[:, torch.tensor([agent.label for agent in world.agents])]


def _run_behind(decoder: Decoder, slots: Tensor, tails: Sequence[Tokens]) -> list[Tensor]:
    """Final states ``[tail tokens, hidden]`` of every tail, each behind the same prompt; nothing of them is kept."""
    own = [decoder.kv.allocate(len(tail)) for tail in tails]
    places = [torch.cat((slots, at)) for at in own]
    rows = Rows.join([Rows.at(torch.arange(len(slots), len(place)), place) for place in places])
    hidden = decoder.embed(torch.tensor([token for tail in tails for token in tail]))
    is_written = torch.ones(len(rows), dtype=torch.bool)
    for layer in range(decoder.layers):
        hidden = decoder.run_layer(layer, hidden, rows, is_written)
    for at in own:
        decoder.kv.free(at)
    return list(torch.split(hidden, [len(tail) for tail in tails]))


def _answer(decoder: Decoder, slots: Tensor, tails: Sequence[Tokens]) -> tuple[Tokens, ...]:
    own = [decoder.kv.allocate(len(tail) + CONTINUE_TOKENS) for tail in tails]
    places = [torch.cat((slots, at)) for at in own]
    start = len(slots)
    states = [decoder.extend(torch.tensor(tail), place, start)[-1:] for tail, place in zip(tails, places, strict=True)]
    first = decoder.logits(torch.cat(states)).argmax(-1)
    positions = torch.tensor([start + len(tail) for tail in tails])
    behind = decoder.decode(first, positions, places, CONTINUE_TOKENS - 1)
    for at in own:
        decoder.kv.free(at)
    rows = torch.cat((first[:, None], behind), dim=1).tolist()
    return tuple(tuple(int(token) for token in row) for row in rows)
