"""Trials summed over readers and worlds. Pure arithmetic: what is measured and what is written meet here."""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from bench.quality.trial import Trial

KL_FLOOR = 1e-6
"""Below it a divergence is rounding, and a ratio of two says nothing."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One method in one arrangement of one world with one reader, or a sum of such; then ``reader`` is the first one's.

    ``kl_sum`` and ``same`` are summed over ``tokens`` answer tokens, ``margin_sum`` over ``verdicts``, ``fit_sum`` and
    ``overlap_sum`` over readers.
    """

    model: str
    world: str
    source: str
    order: str
    method: str
    reader: int
    readers: int
    fit_sum: float
    overlap_sum: float
    kl_sum: float
    same: int
    tokens: int
    rows: int
    picked: int
    record_bytes: int
    dense_bytes: int
    verdicts: int
    same_verdicts: int
    margin_sum: float

    @classmethod
    def of(cls, model: str, trial: Trial) -> "Cell":
        """A single trial as a cell."""
        return cls(
            model,
            trial.world,
            trial.source,
            trial.order,
            trial.method,
            trial.reader,
            1,
            trial.fit,
            trial.overlap,
            trial.kl * trial.answer_tokens,
            round(trial.agreement * trial.answer_tokens),
            trial.answer_tokens,
            trial.rows,
            trial.picked,
            trial.record_bytes,
            trial.dense_bytes,
            trial.verdicts,
            trial.same_verdicts,
            trial.margin * trial.verdicts,
        )

    @property
    def place(self) -> tuple[str, str, str, int]:
        """What two methods must share to be compared."""
        return self.model, self.world, self.arrangement, self.reader

    @property
    def arrangement(self) -> str:
        """As ``Arrangement.text``."""
        return f"{self.order}, from {self.source}"

    @property
    def kl(self) -> float:
        """Mean over answer tokens, nats."""
        return self.kl_sum / self.tokens

    @property
    def agreement(self) -> float:
        """Share of answer tokens that are the full prefill's."""
        return self.same / self.tokens

    @property
    def share(self) -> float:
        """Bytes of the mirrors over those of dense copies."""
        return self.record_bytes / self.dense_bytes

    @property
    def fit(self) -> float:
        """Mean ``leader.fit`` of what was found."""
        return self.fit_sum / self.readers

    @property
    def overlap(self) -> float:
        """Mean ``arrangements.overlap`` of what was found."""
        return self.overlap_sum / self.readers


def load_trials(path: Path) -> list[Trial]:
    """What ``measure`` wrote."""
    return [Trial(**json.loads(line)) for line in path.read_text().splitlines()]


def add(cells: Iterable[Cell], by: Callable[[Cell], object]) -> list[Cell]:
    """Cells with equal keys as one, in the order of the first; texts are the first one's."""
    groups: dict[object, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(by(cell), []).append(cell)
    return [_sum(group) for group in groups.values()]


def distinct(cells: Iterable[Cell]) -> list[Cell]:
    """Without what was measured twice; the last one stays."""
    return list({(one.place, one.method): one for one in cells}.values())


@dataclass(frozen=True, slots=True)
class Gain:
    """A method against ``none``, over the ``readers`` that tried both. ``kl_ratio``: geometric mean of its KL over that
    of ``none``, so that a world of large divergences does not drown the others. ``agreement``: mean difference.
    """

    readers: int
    kl_ratio: float
    agreement: float


def gain(cells: Iterable[Cell], method: str) -> Gain | None:
    """Of a method, in these cells; None if no reader tried both."""
    given = list(cells)
    plain = {one.place: one for one in given if one.method == "none"}
    pairs = [(one, plain[one.place]) for one in given if one.method == method and one.place in plain]
    if not pairs:
        return None
    ratios = [math.log(max(one.kl, KL_FLOOR) / max(other.kl, KL_FLOOR)) for one, other in pairs]
    differences = [one.agreement - other.agreement for one, other in pairs]
    return Gain(len(pairs), math.exp(sum(ratios) / len(ratios)), sum(differences) / len(differences))


def over_worlds(cells: Iterable[Cell]) -> list[Cell]:
    """One cell a model, arrangement and method."""
    return add(cells, lambda one: (one.model, one.arrangement, one.method))


def write(path: Path, cells: Iterable[Cell]) -> None:
    """One JSON array a line behind the names of its columns."""
    lines = [json.dumps([field.name for field in fields(Cell)])]
    lines += [json.dumps([_short(value) for value in asdict(cell).values()]) for cell in cells]
    path.write_text("\n".join(lines) + "\n")


def read(path: Path) -> list[Cell]:
    """What ``write`` wrote."""
    names, *rows = (json.loads(line) for line in path.read_text().splitlines())
    return [Cell(**dict(zip(names, row, strict=True))) for row in rows]


def _sum(cells: Sequence[Cell]) -> Cell:
    first = cells[0]
    texts = (first.model, first.world, first.source, first.order, first.method, first.reader)
    return Cell(*texts, *(sum(column) for column in zip(*map(_numbers, cells), strict=True)))


def _numbers(cell: Cell) -> Iterator[float]:
    values = asdict(cell)
    return (value for name, value in values.items() if name != "reader" and not isinstance(value, str))


def _short(value: object) -> object:
    return float(f"{value:.6g}") if isinstance(value, float) else value
