"""Which candidate rows are computed again. Pure functions of spans and deviations; equal input, equal answer.

A selector's text is part of context ids (which KV was refreshed, and how), so it is canonical: one text per meaning.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Final, Protocol

import torch
from torch import Tensor

from kvservice.client.reuse.rows import Span
from kvservice.model.errors import InvalidInputError

RATIO_DECIMALS_MAX: Final = 6
ROWS_MAX: Final = 1 << 20


class Selector(Protocol):
    """A rule that picks rows of one prompt's candidate spans. `str()` gives its canonical text."""

    @property
    def needs_deviation(self) -> bool:
        """Whether rows can be picked only after a probe."""
        ...

    @property
    def is_reuse_off(self) -> bool:
        """Whether candidates must all be computed, from layer 0 on."""
        ...

    def pick(self, candidates: Sequence[Span], deviation: Tensor | None) -> Tensor:
        """Positions int64, rising, of the rows to compute again.

        `deviation` is [candidate rows]: one value per row of the spans, one after the other. None unless
        `needs_deviation`.
        """
        ...


@dataclass(frozen=True, slots=True)
class Exact:
    """Reuse off, for prompts that must not be perturbed: candidates are computed like all others."""

    needs_deviation = False
    is_reuse_off = True

    def __str__(self) -> str:
        return "exact"

    def pick(self, candidates: Sequence[Span], deviation: Tensor | None) -> Tensor:
        """Every row."""
        return _positions(candidates)


@dataclass(frozen=True, slots=True)
class Nothing:
    """No candidate is computed again."""

    needs_deviation = False
    is_reuse_off = False

    def __str__(self) -> str:
        return "none"

    def pick(self, candidates: Sequence[Span], deviation: Tensor | None) -> Tensor:
        """No row."""
        return torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True, slots=True)
class Head:
    """The first `rows` rows of every candidate segment (LegoLink)."""

    rows: int
    needs_deviation = False
    is_reuse_off = False

    def __post_init__(self) -> None:
        _check_rows("head", self.rows)

    def __str__(self) -> str:
        return f"head:{self.rows}"

    def pick(self, candidates: Sequence[Span], deviation: Tensor | None) -> Tensor:
        """The heads of the spans; a span shorter than `rows` is picked whole."""
        return _join([torch.arange(s.start, min(s.start + self.rows, s.end)) for s in candidates])


@dataclass(frozen=True, slots=True)
class Hkvd:
    """The rows with the largest deviation (CacheBlend), `ratio` of all candidate rows of the prompt."""

    ratio: Decimal
    is_reuse_off = False

    def __post_init__(self) -> None:
        _check_ratio("hkvd", self.ratio)

    def __str__(self) -> str:
        return f"hkvd:{_ratio_text(self.ratio)}"

    @property
    def needs_deviation(self) -> bool:
        """False at ratio 0, which picks nothing."""
        return self.ratio > 0

    def pick(self, candidates: Sequence[Span], deviation: Tensor | None) -> Tensor:
        """`share_of(ratio, rows)` rows; among equal deviations the lower position goes first."""
        positions = _positions(candidates)
        return positions[_largest(deviation, positions.numel(), self.ratio)]


@dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks of `size` rows with the largest mean deviation, `ratio` of all blocks of the prompt.

    Blocks are counted from each segment's first row, so that a segment has the same ones wherever it stands; its last
    block may be short.
    """

    ratio: Decimal
    size: int
    is_reuse_off = False

    def __post_init__(self) -> None:
        _check_ratio("blocks", self.ratio)
        _check_rows("blocks", self.size, least=1)

    def __str__(self) -> str:
        return f"blocks:{_ratio_text(self.ratio)}:{self.size}"

    @property
    def needs_deviation(self) -> bool:
        """False at ratio 0, which picks nothing."""
        return self.ratio > 0

    def pick(self, candidates: Sequence[Span], deviation: Tensor | None) -> Tensor:
        """The rows of `share_of(ratio, blocks)` blocks; among equal means the lower position goes first."""
        lengths = torch.tensor([n for span in candidates for n in _block_lengths(span.tokens, self.size)])
        chosen = torch.zeros(lengths.numel(), dtype=torch.bool)
        chosen[_largest(_block_means(deviation, lengths), lengths.numel(), self.ratio)] = True
        return _positions(candidates)[chosen.repeat_interleave(lengths.long())]


@dataclass(frozen=True, slots=True)
class Mixed:
    """The first `rows` rows of every candidate segment, and of all others those with the largest deviation: `ratio` of
    all candidate rows.

    The deviation does not see what the heads are good for: behind long histories four rows a segment and 1 % of the
    rest come closer to a full prefill than 5 % by deviation alone (`bench/quality/README.md`).
    """

    ratio: Decimal
    rows: int
    is_reuse_off = False

    def __post_init__(self) -> None:
        _check_ratio("mixed", self.ratio)
        _check_rows("mixed", self.rows, least=1)

    def __str__(self) -> str:
        return f"mixed:{_ratio_text(self.ratio)}:{self.rows}"

    @property
    def needs_deviation(self) -> bool:
        """False at ratio 0, which picks the heads alone."""
        return self.ratio > 0

    def pick(self, candidates: Sequence[Span], deviation: Tensor | None) -> Tensor:
        """The heads, and `share_of(ratio, rows)` other rows as far as there are; the lower position goes first."""
        positions, heads = _positions(candidates), Head(self.rows).pick(candidates, None)
        rest = ~torch.isin(positions, heads)
        if self.ratio == 0 or not bool(rest.any()):
            return heads
        if deviation is None or deviation.shape != positions.shape:
            raise InvalidInputError(f"this selector needs one deviation for each of {positions.numel()}; probe first")
        order = torch.sort(deviation[rest], descending=True, stable=True).indices
        best = positions[rest][order[: share_of(self.ratio, positions.numel())]]
        return torch.cat((heads, best)).sort().values


def none() -> Selector:
    """Compute nothing again."""
    return Nothing()


def exact() -> Selector:
    """Reuse nothing from elsewhere."""
    return Exact()


def head(rows: int) -> Selector:
    """Compute the first `rows` rows of every candidate segment again."""
    return Head(rows)


def hkvd(ratio: float) -> Selector:
    """Compute `ratio` of the candidate rows again, those with the largest deviation."""
    return Hkvd(_decimal(ratio))


def blocks(ratio: float, size: int) -> Selector:
    """Compute `ratio` of the candidate blocks of `size` rows again, those with the largest mean deviation."""
    return Blocks(_decimal(ratio), size)


def mixed(ratio: float, rows: int) -> Selector:
    """Compute the first `rows` rows of every candidate segment again, and `ratio` of all by deviation."""
    return Mixed(_decimal(ratio), rows)


def share_of(ratio: Decimal, count: int) -> int:
    """floor(ratio * count), but one when that is nought and ratio is not. In decimals: 0.29 of 100 is 29, not 28."""
    return min(count, max(int(ratio * count), int(ratio > 0)))


_RATIO = r"(\d{1,2}(?:\.\d{1,6})?)"
_COUNT = r"(\d{1,7})"
_FORMS: Final[tuple[tuple[str, Callable[..., Selector]], ...]] = (
    (r"none", Nothing),
    (r"exact", Exact),
    (rf"head:{_COUNT}", lambda rows: Head(int(rows))),
    (rf"hkvd:{_RATIO}", lambda ratio: Hkvd(Decimal(ratio))),
    (rf"blocks:{_RATIO}:{_COUNT}", lambda ratio, size: Blocks(Decimal(ratio), int(size))),
    (rf"mixed:{_RATIO}:{_COUNT}", lambda ratio, rows: Mixed(Decimal(ratio), int(rows))),
)


def parse_selector(text: str) -> Selector:
    """The selector that `text` names, for example `hkvd:0.02`. Raises InvalidInputError on any other text."""
    for form, build in _FORMS:
        if found := re.fullmatch(form, text, re.ASCII):
            return build(*found.groups())
    known = "none, exact, head:ROWS, hkvd:RATIO, blocks:RATIO:SIZE or mixed:RATIO:ROWS"
    raise InvalidInputError(f"unknown selector {text!r}; use {known}")


def _decimal(ratio: float) -> Decimal:
    return Decimal(repr(float(ratio)))


def _ratio_text(ratio: Decimal) -> str:
    return format(ratio.normalize(), "f") if ratio else "0"


def _check_ratio(name: str, ratio: Decimal) -> None:
    if not ratio.is_finite() or not 0 <= ratio <= 1:
        raise InvalidInputError(f"{name}: ratio {ratio} is not within 0..1")
    if ratio != round(ratio, RATIO_DECIMALS_MAX):
        raise InvalidInputError(f"{name}: ratio {ratio} has more than {RATIO_DECIMALS_MAX} decimals; round it")


def _check_rows(name: str, rows: int, least: int = 0) -> None:
    if not least <= rows <= ROWS_MAX:
        raise InvalidInputError(f"{name}: {rows} rows are not within {least}..{ROWS_MAX}")


def _positions(candidates: Sequence[Span]) -> Tensor:
    return _join([torch.arange(span.start, span.end) for span in candidates])


def _join(parts: list[Tensor]) -> Tensor:
    return torch.cat([torch.empty(0, dtype=torch.int64), *parts])


def _largest(values: Tensor | None, count: int, ratio: Decimal) -> Tensor:
    """Rising indices of the largest share of `values` [count]. NaN counts as largest, so it is computed again."""
    if ratio == 0 or count == 0:
        return torch.empty(0, dtype=torch.int64)
    if values is None or values.shape != (count,):
        raise InvalidInputError(f"this selector needs one deviation for each of {count}; probe first")
    order = torch.sort(values, descending=True, stable=True).indices
    return order[: share_of(ratio, count)].sort().values


def _block_lengths(tokens: int, size: int) -> list[int]:
    whole, rest = divmod(tokens, size)
    return [size] * whole + [rest] * (rest > 0)


def _block_means(deviation: Tensor | None, lengths: Tensor) -> Tensor | None:
    if deviation is None or deviation.numel() != int(lengths.sum()):
        return None
    means = [float(part.double().mean()) for part in torch.split(deviation, lengths.tolist())]
    return torch.tensor(means, dtype=torch.float64)
