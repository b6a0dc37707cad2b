"""Which class each row of a prompt is in. Pure: no engine, no KV."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

import torch
from torch import Tensor

from kvservice.model.errors import InvalidInputError


class RowClass(IntEnum):
    """What may be done with a row.

    LOCAL: in the engine already, perhaps shared with other requests; only read, never written.
    EXACT: restored at the position and in the context it was computed in; never computed again.
    CANDIDATE: restored from a segment computed elsewhere; computed again when a selector picks it.
    MUST: everything else; always computed and written.
    """

    LOCAL = 0
    EXACT = 1
    CANDIDATE = 2
    MUST = 3


@dataclass(frozen=True, slots=True)
class Span:
    """`tokens` rows of a prompt from position `start` on: one restored segment."""

    start: int
    tokens: int
    row_class: RowClass

    @property
    def end(self) -> int:
        """The first position behind the span."""
        return self.start + self.tokens


@dataclass(frozen=True, slots=True, eq=False)
class PromptRows:
    """The class of every row of a prompt: `classes` int8 [tokens], and its candidate spans in order."""

    classes: Tensor
    candidates: tuple[Span, ...]

    @property
    def tokens(self) -> int:
        """Length of the prompt."""
        return self.classes.numel()

    def positions(self, *row_classes: RowClass) -> Tensor:
        """Positions int64, rising, of the rows in any of these classes."""
        wanted = torch.zeros(len(RowClass), dtype=torch.bool)
        wanted[list(row_classes)] = True
        return wanted[self.classes.long()].nonzero().flatten()

    def counts(self) -> dict[RowClass, int]:
        """How many rows each class holds."""
        found = torch.bincount(self.classes.long(), minlength=len(RowClass)).tolist()
        return {row_class: found[row_class] for row_class in RowClass}

    def without_candidates(self) -> "PromptRows":
        """The same prompt with reuse off: what was restored from elsewhere must be computed."""
        classes = torch.where(self.classes == RowClass.CANDIDATE, RowClass.MUST, self.classes).to(torch.int8)
        return PromptRows(classes, ())


def classify(tokens: int, restored: Sequence[Span], local: int = 0) -> PromptRows:
    """Classes of a prompt of `tokens` rows, of which the engine holds the first `local` already.

    `restored` are EXACT and CANDIDATE spans in order of position. A span that lies partly below `local` is cut: those
    rows belong to other requests too. Whatever no span covers is MUST. Raises InvalidInputError on spans that overlap,
    leave the prompt, are empty or of another class.
    """
    if not 0 <= local <= tokens:
        raise InvalidInputError(f"{local} local rows in a prompt of {tokens}; give 0..{tokens}")
    _check_spans(tokens, restored)
    classes = torch.full((tokens,), RowClass.MUST, dtype=torch.int8)
    for span in restored:
        classes[span.start : span.end] = span.row_class
    classes[:local] = RowClass.LOCAL
    return PromptRows(classes, tuple(_cut(restored, local)))


def _check_spans(tokens: int, spans: Sequence[Span]) -> None:
    behind = 0
    for span in spans:
        if span.row_class not in (RowClass.EXACT, RowClass.CANDIDATE):
            raise InvalidInputError(f"{span}: a restored span is EXACT or CANDIDATE; leave other rows out")
        if span.tokens < 1 or span.start < behind or span.end > tokens:
            raise InvalidInputError(f"{span} is empty, overlaps the one before or leaves the prompt of {tokens} tokens")
        behind = span.end


def _cut(spans: Iterable[Span], local: int) -> Iterable[Span]:
    for span in spans:
        start = max(span.start, local)
        if span.row_class == RowClass.CANDIDATE and start < span.end:
            yield replace(span, start=start, tokens=span.end - start)
