"""What the refresh loop needs of an engine: five calls, and the rows they are about.

The loop never sees a model, attention metadata or a block layout; whoever implements `Engine` runs its own layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from kvservice.model.errors import SlotError

Planes = tuple[Tensor, ...]
"""One tensor `[rows, heads, head_size]` per plane, in the KV dtype: (K, V), or the one latent plane of MLA."""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Rows:
    """Some rows of one or several prompts, ordered by (prompt, position), and where each whole prompt lies in paged KV.

    `positions`, `slots` and `prompts` are int64 [rows]; `prompts` names each row's prompt. `prompt_slots` holds for
    every prompt int64 [prompt tokens]: the slot of every position, also of those that are no rows here. A prompt may
    have no row at all.
    """

    positions: Tensor
    slots: Tensor
    prompts: Tensor
    prompt_slots: tuple[Tensor, ...]

    @classmethod
    def at(cls, positions: Tensor, prompt_slots: Tensor) -> "Rows":
        """Rows of one prompt, at `positions` (int64, rising).

        Raises SlotError when they do not rise or leave the prompt.
        """
        if positions.numel() and not _rise(positions, prompt_slots.numel()):
            raise SlotError(f"positions must rise within 0..{prompt_slots.numel() - 1}; sort them and drop doubles")
        return cls(positions, prompt_slots[positions], torch.zeros_like(positions), (prompt_slots,))

    @classmethod
    def join(cls, parts: Sequence["Rows"]) -> "Rows":
        """The rows of several prompts as one, in this order. `parts` must not be empty."""
        firsts = accumulate([0, *(len(one.prompt_slots) for one in parts)])
        return cls(
            torch.cat([one.positions for one in parts]),
            torch.cat([one.slots for one in parts]),
            torch.cat([one.prompts + first for one, first in zip(parts, firsts, strict=False)]),
            tuple(slots for one in parts for slots in one.prompt_slots),
        )

    def __len__(self) -> int:
        return self.positions.numel()

    def counts(self) -> list[int]:
        """How many rows each prompt has; the sum is `len`."""
        return [int(count) for count in torch.bincount(self.prompts, minlength=len(self.prompt_slots)).tolist()]

    def take(self, index: Tensor) -> "Rows":
        """Those rows that `index` (bool [rows], or rising int64) names. A prompt left without rows stays one."""
        return Rows(self.positions[index], self.slots[index], self.prompts[index], self.prompt_slots)

    def split(self) -> list["Rows"]:
        """Every prompt's rows as rows of one prompt; views."""
        counts = self.counts()
        positions, slots = torch.split(self.positions, counts), torch.split(self.slots, counts)
        own = zip(positions, slots, self.prompt_slots, strict=True)
        return [Rows(at, place, torch.zeros_like(at), (whole,)) for at, place, whole in own]


def _rise(positions: Tensor, tokens: int) -> bool:
    inside = int(positions[0]) >= 0 and int(positions[-1]) < tokens
    return inside and bool(torch.all(positions[1:] > positions[:-1]))


class Engine(Protocol):
    """The five calls. All run on the caller's thread and keep no reference to what they are given.

    `probe` and `run_layer` are never called without rows.

    `hidden` is `[rows, ...]` in whatever form the engine passes from layer to layer: callers only pick rows of it. An
    engine that carries a residual apart stacks the two along axis 1.
    """

    @property
    def layers(self) -> int:
        """How many layers there are."""
        ...

    def embed(self, tokens: Tensor) -> Tensor:
        """Hidden states before layer 0 of token ids int64 [rows]."""
        ...

    def probe(self, layer: int, hidden: Tensor, rows: Rows) -> Planes:
        """Fresh planes of the rows as `run_layer` would store them: after norms and RoPE, in the KV dtype.

        Writes nothing.
        """
        ...

    def run_layer(self, layer: int, hidden: Tensor, rows: Rows, is_written: Tensor) -> Tensor:
        """Hidden states after `layer`; `hidden` is left as it was.

        First the planes of the rows flagged in `is_written` (bool [rows]) are stored in their slots. Then every row
        attends to what paged KV holds of all positions of its prompt up to and including its own, rows here or not.
        No two prompts of a call may write one slot, nor one read what the other writes.
        """
        ...

    def read_rows(self, layer: int, slots: Tensor) -> Planes:
        """Copies of the stored planes at `slots` int64 [rows]."""
        ...

    def write_rows(self, layer: int, slots: Tensor, planes: Planes) -> None:
        """Store `planes` at `slots` int64 [rows], no slot twice."""
        ...
