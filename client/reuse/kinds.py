"""Selectors by kind of segment: one prompt may refresh its shared outputs at one ratio and its tools' at another.

text := selector | kind=selector [+kind=selector ...]     as `ReusePolicy.by_kind` makes it
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Final

import torch
from torch import Tensor

from kvservice.client.reuse.rows import Span
from kvservice.client.reuse.selectors import Blocks, Exact, Head, Hkvd, Mixed, Selector, parse_selector
from kvservice.client.rounds import SHIFTED_KINDS, PartKind, ReusePolicy, RoundPrompt
from kvservice.model.errors import InvalidInputError

RAISED_TIMES: Final = 3
RAISED_RATIO_MIN: Final = Decimal("0.15")
"""Where caches fit only in part the ratio is raised to this at least, or so many times, whichever is more."""


def parse_kinds(text: str) -> dict[PartKind, Selector]:
    """The selectors that a policy's text names; one for all gives one for every kind that may move."""
    if "=" not in text:
        return dict.fromkeys(SHIFTED_KINDS, parse_selector(text))
    known = {kind.value: kind for kind in SHIFTED_KINDS}
    found: dict[PartKind, Selector] = {}
    for part in text.split("+"):
        name, _, selector = part.partition("=")
        if name not in known:
            raise InvalidInputError(f"unknown kind {name!r} in {text!r}; use {', '.join(sorted(known))}")
        found[known[name]] = parse_selector(selector)
    return found


def raised(policy: ReusePolicy) -> ReusePolicy | None:
    """The same policy at the higher ratio, which its text names; None if a selector has nothing to raise."""
    selectors = parse_kinds(policy.selector)
    found = {kind: _raised(selectors[kind]) for kind in policy.kinds}
    texts = {kind: str(selector) for kind, selector in found.items() if selector is not None}
    if len(texts) < len(found):
        return None
    return replace(ReusePolicy.by_kind(texts, policy.check_layer), affinity_min=policy.affinity_min)


def _raised(selector: Selector) -> Selector | None:
    match selector:
        case Hkvd(ratio) if ratio:
            return Hkvd(_raised_ratio(ratio))
        case Blocks(ratio, size) if ratio:
            return Blocks(_raised_ratio(ratio), size)
        case Mixed(ratio, rows) if ratio:
            return Mixed(_raised_ratio(ratio), rows)
        case Head(rows) if rows:
            return Head(rows * RAISED_TIMES)
        case Exact():
            return selector
    return None


def _raised_ratio(ratio: Decimal) -> Decimal:
    return min(Decimal(1), max(ratio * RAISED_TIMES, RAISED_RATIO_MIN))


@dataclass(frozen=True, slots=True)
class ByKind:
    """A selector of one prompt that hands every candidate span to its kind's. ``of_end``: by the position where a
    span ends, since the engine may hold its first rows already."""

    of_end: Mapping[int, Selector]
    text: str

    @classmethod
    def of(cls, prompt: RoundPrompt, end: int | None = None) -> "ByKind":
        """For a prompt under a policy. ``end``: what lies behind it is no candidate, of no segment."""
        assert prompt.policy is not None
        selectors = parse_kinds(prompt.policy.selector)
        last = prompt.token_count if end is None else end
        own = [one for one in prompt.segments if one.kind in selectors and one.position < last]
        ends = {min(one.end, last): selectors[one.kind] for one in own}
        return cls(ends, prompt.policy.selector)

    def __str__(self) -> str:
        return self.text

    @property
    def needs_deviation(self) -> bool:
        """Whether a probe is needed for any of the kinds."""
        return any(one.needs_deviation for one in self.of_end.values())

    @property
    def is_reuse_off(self) -> bool:
        """Never: a kind that is not reused has no candidates."""
        return False

    def pick(self, candidates: Sequence[Span], deviation: Tensor | None) -> Tensor:
        """What every kind's selector picks of its own spans."""
        deviations = [None] * len(candidates) if deviation is None else _split(candidates, deviation)
        picked = [torch.empty(0, dtype=torch.int64)]
        for selector in dict.fromkeys(self.of_end[span.end] for span in candidates):
            own = [(span, one) for span, one in zip(candidates, deviations, strict=True) if self._is(span, selector)]
            rows = torch.cat([one for _, one in own if one is not None]) if deviation is not None else None
            picked.append(selector.pick([span for span, _ in own], rows if selector.needs_deviation else None))
        return torch.cat(picked).sort().values

    def _is(self, span: Span, selector: Selector) -> bool:
        return self.of_end[span.end] == selector


def _split(candidates: Sequence[Span], deviation: Tensor) -> list[Tensor]:
    return list(torch.split(deviation, [span.tokens for span in candidates]))
