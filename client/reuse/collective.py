"""The refresh of a round: all prompts that are ready together go through one pass, layer by layer.

Each prompt's rows are what `refresh` makes of them; a pass must never write a row that `refresh` would leave alone.
"""

from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from kvservice.client.reuse.engine import Engine, Planes
from kvservice.client.reuse.refresh import (
    Prompt,
    Refreshed,
    Run,
    check_layer_is_one,
    computed_rows,
    deviation,
    start_run,
)
from kvservice.client.reuse.rows import RowClass
from kvservice.client.reuse.selectors import Selector
from kvservice.client.rounds import CHECK_LAYER
from kvservice.model.errors import SlotError

CALL_ROWS_MAX: Final = 2048
"""On a CPU larger calls leave the cache: ten prompts of 840 rows take 1.17 times as long in one call as in ten, ten of
16 rows 0.62 (SmolLM2, `bench/collective.py`). An engine on a GPU gives a larger number."""


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """One prompt of a round and the rule that picks its rows.

    Lengths, spans and selectors may differ from member to member. A prompt without candidates, or under `exact`, takes
    part with all its must rows.
    """

    prompt: Prompt
    selector: Selector


def refresh_round(
    engine: Engine,
    members: Sequence[Member],
    check_layer: int = CHECK_LAYER,
    *,
    is_deterministic: bool = False,
    call_rows_max: int = CALL_ROWS_MAX,
) -> tuple[Refreshed, ...]:
    """Refresh prompts whose restored rows are all in paged KV. Raises what `refresh_round_by_layer` raises."""
    steps = refresh_round_by_layer(
        engine, members, check_layer, is_deterministic=is_deterministic, call_rows_max=call_rows_max
    )
    while True:
        try:
            next(steps)
        except StopIteration as finished:
            found: tuple[Refreshed, ...] = finished.value
            return found


def refresh_round_by_layer(
    engine: Engine,
    members: Sequence[Member],
    check_layer: int = CHECK_LAYER,
    *,
    is_deterministic: bool = False,
    call_rows_max: int = CALL_ROWS_MAX,
) -> Generator[int, None, tuple[Refreshed, ...]]:
    """The pass in steps, as `refresh_by_layer`: yields each layer's number before it touches that layer.

    Returns one `Refreshed` a member, in order. A layer is called once for the rows of all prompts; more than
    `call_rows_max` rows are cut between prompts, never inside one. At the check layer one deviation serves all, and
    each prompt's selector picks from its own rows.

    A matrix product's bits depend on how many rows a call has, so this equals `refresh` within rounding, and picks the
    same rows unless two deviate equally within rounding. `is_deterministic` calls the engine for one prompt after the
    other inside every layer: equal to `refresh` bit for bit, without the gain of larger calls. Fixed row tiles would be
    equal too, but take 1.6 of that where all rows run and 0.98 where 60 of a prompt do (`bench/collective.py`).

    Raises InvalidInputError when the engine has no layer `check_layer`, and SlotError when two prompts share a slot
    that one of them may write; nothing is written then.
    """
    check_layer_is_one(engine, check_layer)
    _check_slots([member.prompt for member in members])
    rows_max = 0 if is_deterministic else call_rows_max
    prompts = [member.prompt.under(member.selector) for member in members]
    starts = [start_run(engine, prompt, one.selector) for prompt, one in zip(prompts, members, strict=True)]
    picked = [rows for _, rows in starts]
    calls = _calls([run for run, _ in starts], rows_max)
    for layer in range(engine.layers):
        yield layer
        if layer == check_layer and any(rows is None for rows in picked):
            found = _pick_deviating(engine, prompts, members, calls, layer)
            kept = [_keep(*one) for one in zip(_runs(calls), prompts, found, strict=True)]
            picked = [new if rows is None else rows for rows, new in zip(picked, found, strict=True)]
            calls = _calls(kept, rows_max)
        calls = [_behind(engine, layer, call) for call in calls]
    return tuple(_results(members, _runs(calls), picked))


def _check_slots(prompts: Sequence[Prompt]) -> None:
    """Inside a pass the order of prompts is open: nobody may read or write what another one writes."""
    if not prompts:
        return
    is_local = [prompt.rows.classes == RowClass.LOCAL for prompt in prompts]
    pairs = list(zip(prompts, is_local, strict=True))
    own = torch.cat([prompt.slots[~local] for prompt, local in pairs]).sort().values
    if bool((own[1:] == own[:-1]).any()):
        raise SlotError("two rows of the round share a slot that is written; give every prompt slots of its own")
    shared = torch.cat([prompt.slots[local] for prompt, local in pairs])
    if bool(torch.isin(shared, own).any()):
        raise SlotError("a row that is LOCAL in one prompt is written by another; let it join the next pass")


def _calls(runs: Sequence[Run], rows_max: int) -> list[Run]:
    """The prompts' runs joined to calls of at most `rows_max` rows, in order; a longer one stands alone."""
    calls: list[list[Run]] = []
    rows = 0
    for run in runs:
        rows += len(run.rows)
        if not calls or rows > rows_max:
            calls.append([])
            rows = len(run.rows)
        calls[-1].append(run)
    return [Run.join(parts) for parts in calls]


def _runs(calls: Iterable[Run]) -> list[Run]:
    return [run for call in calls for run in call.split()]


def _behind(engine: Engine, layer: int, call: Run) -> Run:
    if not len(call.rows):
        return call
    return call.behind(engine.run_layer(layer, call.hidden, call.rows, call.is_written))


def _pick_deviating(
    engine: Engine, prompts: Sequence[Prompt], members: Sequence[Member], calls: Sequence[Run], layer: int
) -> list[Tensor | None]:
    """What each prompt's selector picks; None for prompts whose rows were known before layer 0."""
    deviations = _deviations(engine, calls, layer)
    counts = [int((~run.is_written).sum()) for run in _runs(calls)]
    own = zip(prompts, members, torch.split(deviations, counts), strict=True)
    return [one.selector.pick(prompt.rows.candidates, rows) if len(rows) else None for prompt, one, rows in own]


def _deviations(engine: Engine, calls: Sequence[Run], layer: int) -> Tensor:
    """One value for each candidate row of the round, in order. Rows that run and are not written are candidates."""
    fresh: list[Planes] = []
    slots: list[Tensor] = []
    for call in calls:
        is_candidate = ~call.is_written
        if bool(is_candidate.any()):
            rows = call.rows.take(is_candidate)
            fresh.append(engine.probe(layer, call.hidden[is_candidate], rows))
            slots.append(rows.slots)
    together = tuple(torch.cat(planes) for planes in zip(*fresh, strict=True))
    return deviation(together, engine.read_rows(layer, torch.cat(slots)))


def _keep(run: Run, prompt: Prompt, picked: Tensor | None) -> Run:
    return run if picked is None else run.keep(computed_rows(prompt.rows, picked)[run.rows.positions])


def _results(members: Sequence[Member], runs: Sequence[Run], picked: Sequence[Tensor | None]) -> Iterable[Refreshed]:
    for member, run, rows in zip(members, runs, picked, strict=True):
        assert rows is not None
        yield Refreshed(run.rows.positions, run.hidden, rows, member.prompt.rows.counts())
