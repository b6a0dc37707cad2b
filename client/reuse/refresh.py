"""The refresh of one prompt: layer after layer, compute what must be, pick what matters, leave the rest as restored.

Must never write a LOCAL or EXACT row, nor a CANDIDATE row that was not picked: every row it writes is a mirror's run.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvservice.client.reuse.engine import Engine, Planes, Rows
from kvservice.client.reuse.rows import PromptRows, RowClass
from kvservice.client.reuse.selectors import Selector
from kvservice.client.rounds import CHECK_LAYER
from kvservice.kernels.dispatch import row_deviation
from kvservice.kernels.shapes import PlaneShape
from kvservice.model.errors import InvalidInputError, TokenCountError


@dataclass(frozen=True, slots=True, eq=False)
class Refreshed:
    """What a refresh did.

    `positions` int64 [rows] are the rows that ran through the last layer and `hidden` [rows, ...] their states behind
    it (before the final norm). `picked` int64, rising, are the candidates computed again: the mirror's runs. `counts`
    is the number of rows by class, before the selector had its say.
    """

    positions: Tensor
    hidden: Tensor
    picked: Tensor
    counts: dict[RowClass, int]

    @property
    def computed(self) -> int:
        """Rows that ran through the last layer."""
        return self.positions.numel()

    def hidden_at(self, position: int) -> Tensor:
        """Final state [1, ...] of the row at `position`. Raises KeyError when that row was not computed.

        At the prompt's last position it gives the next token's logits.
        """
        index = int(torch.searchsorted(self.positions, position))
        if index == self.computed or int(self.positions[index]) != position:
            raise KeyError(f"row {position} was not computed; only MUST rows and picked rows have a final state")
        return self.hidden[index : index + 1]


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """A prompt in paged KV: `tokens` int64 [tokens], `slots` int64 [tokens], and the class of every row."""

    tokens: Tensor
    slots: Tensor
    rows: PromptRows

    def __post_init__(self) -> None:
        counts = (self.tokens.numel(), self.slots.numel(), self.rows.tokens)
        if len(set(counts)) > 1:
            raise TokenCountError("a prompt of {} tokens, {} slots and {} classes; give one each".format(*counts))

    def under(self, selector: Selector) -> "Prompt":
        """The prompt as `selector` sees it: without candidates when it turns reuse off."""
        return Prompt(self.tokens, self.slots, self.rows.without_candidates()) if selector.is_reuse_off else self


def refresh(engine: Engine, prompt: Prompt, selector: Selector, check_layer: int = CHECK_LAYER) -> Refreshed:
    """Refresh a prompt whose restored rows are all in paged KV. Raises what `refresh_by_layer` raises."""
    steps = refresh_by_layer(engine, prompt, selector, check_layer)
    while True:
        try:
            next(steps)
        except StopIteration as finished:
            return _returned(finished)


def refresh_by_layer(
    engine: Engine, prompt: Prompt, selector: Selector, check_layer: int = CHECK_LAYER
) -> Generator[int, None, Refreshed]:
    """The refresh in steps: yields each layer's number before it touches that layer, so that a caller may wait for the
    layer's restored rows, or let other work run in between. Returns `Refreshed`.

    With a selector that needs deviations, layers below `check_layer` run all candidate and must rows but store only the
    must rows; at the check layer the fresh rows are compared with the restored ones; from there on only picked and must
    rows run, and all that run are stored. Other selectors know their rows before layer 0.
    Raises InvalidInputError when the engine has no layer `check_layer`.
    """
    check_layer_is_one(engine, check_layer)
    counts = prompt.rows.counts()
    prompt = prompt.under(selector)
    run, picked = start_run(engine, prompt, selector)
    for layer in range(engine.layers):
        yield layer
        if picked is None and layer == check_layer:
            picked = _pick_deviating(engine, prompt, run, selector, layer)
            run = run.keep(computed_rows(prompt.rows, picked)[run.rows.positions])
        if len(run.rows):
            run = run.behind(engine.run_layer(layer, run.hidden, run.rows, run.is_written))
    assert picked is not None
    return Refreshed(run.rows.positions, run.hidden, picked, counts)


def check_layer_is_one(engine: Engine, check_layer: int) -> None:
    """Raise InvalidInputError when the engine has no layer `check_layer`."""
    if not 0 <= check_layer < engine.layers:
        raise InvalidInputError(f"check layer {check_layer} of {engine.layers} layers; give 0..{engine.layers - 1}")


def deviation(fresh: Planes, restored: Planes) -> Tensor:
    """Squared L2 distance of each row, summed over the planes: float32 [rows].

    By the kernels' law, so that a row has the same bits in whatever company it is compared; 3.3 times as fast as plain
    torch. Raises KernelInputError for a KV dtype without kernels.
    """
    return torch.stack([_plane_deviation(one, other) for one, other in zip(fresh, restored, strict=True)]).sum(0)


def _plane_deviation(fresh: Tensor, restored: Tensor) -> Tensor:
    left, right = fresh.flatten(1).contiguous(), restored.flatten(1).contiguous()
    return row_deviation(left, right, PlaneShape(heads=fresh.shape[1], head_size=fresh.shape[2]))


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """Rows under way, their hidden states before the next layer, and which of them that layer stores."""

    hidden: Tensor
    rows: Rows
    is_written: Tensor

    @classmethod
    def join(cls, parts: Sequence["Run"]) -> "Run":
        """The runs of several prompts as one, in this order."""
        hidden, is_written = torch.cat([one.hidden for one in parts]), torch.cat([one.is_written for one in parts])
        return cls(hidden, Rows.join([one.rows for one in parts]), is_written)

    def split(self) -> list["Run"]:
        """Every prompt's run; views."""
        counts = self.rows.counts()
        hidden, is_written = torch.split(self.hidden, counts), torch.split(self.is_written, counts)
        return [Run(*parts) for parts in zip(hidden, self.rows.split(), is_written, strict=True)]

    def behind(self, hidden: Tensor) -> "Run":
        """The same rows one layer on."""
        return Run(hidden, self.rows, self.is_written)

    def keep(self, is_kept: Tensor) -> "Run":
        """Those rows alone; from here on all of them are stored."""
        rows = self.rows.take(is_kept)
        return Run(self.hidden[is_kept], rows, torch.ones(len(rows), dtype=torch.bool))


def start_run(engine: Engine, prompt: Prompt, selector: Selector) -> tuple[Run, Tensor | None]:
    """The rows that run through layer 0, and those picked, if that is known without a probe."""
    if selector.needs_deviation and prompt.rows.candidates:
        picked = None
        is_run = prompt.rows.classes >= RowClass.CANDIDATE
        is_written = prompt.rows.classes[is_run] == RowClass.MUST
    else:
        picked = selector.pick(prompt.rows.candidates, None)
        is_run = computed_rows(prompt.rows, picked)
        is_written = torch.ones(int(is_run.sum()), dtype=torch.bool)
    rows = Rows.at(is_run.nonzero().flatten(), prompt.slots)
    return Run(engine.embed(prompt.tokens[rows.positions]), rows, is_written), picked


def _pick_deviating(engine: Engine, prompt: Prompt, run: Run, selector: Selector, layer: int) -> Tensor:
    is_candidate = ~run.is_written
    fresh = engine.probe(layer, run.hidden[is_candidate], run.rows.take(is_candidate))
    restored = engine.read_rows(layer, run.rows.slots[is_candidate])
    return selector.pick(prompt.rows.candidates, deviation(fresh, restored))


def computed_rows(rows: PromptRows, picked: Tensor) -> Tensor:
    """Which rows run from here on: bool [tokens], true for must rows and for those at `picked`."""
    is_computed = rows.classes == RowClass.MUST
    is_computed[picked] = True
    return is_computed


def _returned(finished: StopIteration) -> Refreshed:
    assert isinstance(finished.value, Refreshed)
    return finished.value
