"""Ways to refresh a reused prompt: the selectors that ship, and variants that are only tried here.

A text names each: ``hkvd:0.02``, ``hkvd:0.02@4`` (checked at layer 4), ``values:0.02``, ``gradual:0.1>0.01``.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from kvservice.client.reuse.decoder import Decoder
from kvservice.client.reuse.engine import Planes
from kvservice.client.reuse.refresh import Prompt, Run, computed_rows, refresh, start_run
from kvservice.client.reuse.rows import RowClass
from kvservice.client.reuse.selectors import head, hkvd, parse_selector
from kvservice.client.rounds import CHECK_LAYER
from kvservice.model.errors import InvalidInputError

GRADUAL_AT: Final = (0.0, 0.2, 0.47, 0.74)


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """A prompt to refresh. ``affinities``: of each candidate span, in order. ``mass`` ``[candidate rows]``: what the
    question attends to; empty unless asked for."""

    prompt: Prompt
    affinities: Sequence[int]
    mass: Tensor = field(default_factory=lambda: torch.empty(0))


def apply(decoder: Decoder, case: Case, text: str) -> int:
    """Refresh by the method of this name; returns how many candidate rows run through the last layer."""
    if found := re.fullmatch(r"((?:hkvd|mixed):[.:\d]+)@(\d+)", text):
        return refresh(decoder, case.prompt, parse_selector(found[1]), int(found[2])).picked.numel()
    name, _, rest = text.partition(":")
    if name in _SCORES or name in ("gradual", "each", "seam", "mass"):
        return _refresh_variant(decoder, case, _variant(case, name, rest, decoder.layers))
    return refresh(decoder, case.prompt, parse_selector(text)).picked.numel()


def needs_mass(text: str) -> bool:
    """Whether the method asks what the question attends to."""
    return text.startswith("mass")


@dataclass(frozen=True, slots=True, eq=False)
class _Variant:
    """``ratios``: at these layers only this share of the candidate rows goes on. ``weight``: factor of each candidate
    row's score. ``kept``: rows that always go on, at most. ``spans``: rows of each segment, when each has its share."""

    ratios: Mapping[int, float]
    score: str = "both"
    weight: Tensor = field(default_factory=lambda: torch.empty(0))
    kept: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    spans: Sequence[int] = ()


_SCORES = ("both", "keys", "values", "scaled", "cosine")


def _variant(case: Case, name: str, rest: str, layers: int) -> _Variant:
    """Raises InvalidInputError for a text that names no variant."""
    candidates = case.prompt.rows.candidates
    if name == "gradual":  # RATIO>RATIO>...: first at the check layer, then at these parts of the depth
        ratios = [float(one) for one in rest.split(">")]
        depths = [max(CHECK_LAYER + index, int(part * layers)) for index, part in enumerate(GRADUAL_AT)]
        return _Variant(dict(zip(depths, ratios, strict=False)))
    if name == "each":
        return _Variant({CHECK_LAYER: float(rest)}, spans=[span.tokens for span in candidates])
    if name == "seam":  # ROWS+RATIO
        rows, _, ratio = rest.partition("+")
        return _Variant({CHECK_LAYER: float(ratio or 0)}, kept=_seam_heads(case, int(rows)))
    if name == "mass":
        return _Variant({CHECK_LAYER: float(rest)}, score="scaled", weight=case.mass)
    if name in _SCORES:
        return _Variant({CHECK_LAYER: float(rest)}, score=name)
    raise InvalidInputError(f"unknown method {name}:{rest}")


def _seam_heads(case: Case, rows: int) -> Tensor:
    """Positions of the first rows of every segment that stands behind another one than where it was computed."""
    pairs = zip(case.prompt.rows.candidates, case.affinities, strict=True)
    return head(rows).pick([span for span, affinity in pairs if affinity == 0], None)


def _refresh_variant(decoder: Decoder, case: Case, variant: _Variant) -> int:
    """As `refresh_by_layer`, with another choice of rows, made at one layer or again at later ones."""
    prompt = case.prompt
    run, _ = start_run(decoder, prompt, hkvd(1.0))
    is_candidate = prompt.rows.classes == RowClass.CANDIDATE
    order = torch.cumsum(is_candidate, 0) - 1  # a candidate row's place among all of them
    picked = is_candidate.nonzero().flatten()
    for layer in range(decoder.layers):
        if layer in variant.ratios:
            picked = _keep_best(decoder, run, layer, variant, order, picked)
            run = run.keep(computed_rows(prompt.rows, picked)[run.rows.positions])
        if len(run.rows):
            run = run.behind(decoder.run_layer(layer, run.hidden, run.rows, run.is_written))
    return picked.numel()


def _keep_best(decoder: Decoder, run: Run, layer: int, variant: _Variant, order: Tensor, picked: Tensor) -> Tensor:
    """Positions, rising, of the candidate rows that go on from those at ``picked``."""
    total = int(order[-1]) + 1
    running = torch.isin(run.rows.positions, picked)
    rows = run.rows.take(running)
    fresh, restored = decoder.probe(layer, run.hidden[running], rows), decoder.read_rows(layer, rows.slots)
    score = _score(variant.score, fresh, restored)
    if len(variant.weight):
        score = score * variant.weight[order[rows.positions]]
    is_kept = torch.isin(rows.positions, variant.kept)
    score[is_kept] = torch.inf
    share = variant.ratios[layer]
    if variant.spans:
        parts = torch.split(torch.arange(total), list(variant.spans))
        best = torch.cat([part[score[part].topk(max(1, round(share * len(part)))).indices] for part in parts])
    else:
        best = score.topk(max(int(is_kept.sum()) + int(share * total), 1)).indices
    return rows.positions[best].sort().values


def _score(name: str, fresh: Planes, restored: Planes) -> Tensor:
    """One value a row, float32."""
    pairs = [(one.float().flatten(1), other.float().flatten(1)) for one, other in zip(fresh, restored, strict=True)]
    if name == "cosine":
        return torch.stack([1 - torch.cosine_similarity(one, other) for one, other in pairs]).sum(0)
    parts = [(one - other).square().sum(1) for one, other in pairs]
    if name == "keys":
        return parts[0]
    if name == "values":
        return parts[1]
    if name == "scaled":
        return torch.stack([part / part.mean().clamp(min=1e-30) for part in parts]).sum(0)
    return torch.stack(parts).sum(0)
