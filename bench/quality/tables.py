"""The page's tables, made of cells; every one stands between two marks in README.md."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from bench.quality.results import Cell, Gain, gain, over_worlds

MIRROR_SMALLEST = 0.0005
"""A mirror without a single row is its header; a ratio to it says nothing."""


def arrangements(cells: Sequence[Cell], model: str, methods: Sequence[str]) -> str:
    """One line an arrangement: `none`, then every method against it, over the readers that tried both."""
    own = _of(cells, model)
    lines = [_line(["order, from", "overlap", "fit", "`none`", *(f"`{method}`" for method in methods)])]
    lines.append(_line(["---"] * (len(methods) + 4)))
    for plain in over_worlds(one for one in own if one.method == "none"):
        here = [one for one in own if one.arrangement == plain.arrangement]
        found = f"{plain.overlap:.2f}", f"{plain.fit:.2f}", f"{_quality(plain)} ({plain.readers})"
        lines.append(_line([plain.arrangement, *found, *(_gain(gain(here, method)) for method in methods)]))
    return "\n".join(lines)


def methods(cells: Sequence[Cell], model: str, arrangement: str) -> str:
    """One line a method, cheapest first: rows computed again, bytes, and what it gains over `none`."""
    own = [one for one in _of(cells, model) if one.arrangement == arrangement]
    heads = ["method", "rows", "mirror", "KL, of that of `none`", "more equal next tokens", "readers", "worlds"]
    lines = [_line(heads), _line(["---", *["--:"] * 6])]
    for one in sorted(over_worlds(own), key=lambda cell: cell.share):
        found = gain(own, one.method)
        if found and one.method not in ("none", "exact"):
            worlds = {cell.world for cell in own if cell.method == one.method}
            columns = f"{one.picked / one.rows:.1%}", mirror(one), f"{found.kl_ratio:.2f}", f"{found.agreement:+.3f}"
            lines.append(_line([f"`{one.method}`", *columns, str(found.readers), str(len(worlds))]))
    return "\n".join(lines)


def worlds(cells: Sequence[Cell], model: str, arrangement: str, methods: Sequence[str]) -> str:
    """One line a world, one column a method; in a world the same readers for all of them."""
    own = [one for one in _of(cells, model) if one.arrangement == arrangement and one.method in methods]
    lines = [_line(["world", "shared rows a reader", *(f"`{method}`" for method in methods)])]
    lines.append(_line(["---"] * (len(methods) + 2)))
    for world in dict.fromkeys(one.world for one in own):
        here = [one for one in own if one.world == world]
        tried = {method: {one.reader for one in here if one.method == method} for method in methods}
        common = set.intersection(*(readers for readers in tried.values() if readers))
        sums = {one.method: one for one in over_worlds(one for one in here if one.reader in common)}
        cells_of = [_quality(sums.get(method)) for method in methods]
        lines.append(_line([world, str(here[0].rows), *cells_of]))
    return "\n".join(lines)


def judges(cells: Sequence[Cell], model: str) -> str:
    """One line an arrangement and method that was judged."""
    lines = [_line(["order, from", "method", "verdicts as with a full prefill", "mean lead of that verdict, logits"])]
    lines.append(_line(["---", "---", "--:", "--:"]))
    for one in over_worlds(_of(cells, model)):
        if one.verdicts:
            same = f"{one.same_verdicts} of {one.verdicts} ({one.same_verdicts / one.verdicts:.0%})"
            lead = f"{one.margin_sum / one.verdicts:.2f}"
            lines.append(_line([one.arrangement, f"`{one.method}`", same, lead]))
    return "\n".join(lines)


def predictors(cells: Sequence[Cell], model: str, method: str) -> str:
    """What a threshold on either measure of a found cache would let through: one line a range, worst first."""
    own = [one for one in _of(cells, model) if one.method == method]
    lines = [_line(["measure", "from", "cells", "KL, mean", "KL, worst", "equal next tokens, mean", "worst"])]
    lines.append(_line(["---", *["--:"] * 6]))
    lines += [*_ranges("fit", own, lambda one: one.fit), *_ranges("overlap", own, lambda one: one.overlap)]
    return "\n".join(lines)


def _ranges(name: str, own: Sequence[Cell], measure: Callable[[Cell], float]) -> Iterator[str]:
    for low, high in ((0.0, 0.2), (0.2, 0.5), (0.5, 0.75), (0.75, 0.95), (0.95, 1.01)):
        found = [one for one in own if low <= measure(one) < high]
        if found:
            kl, same = [one.kl for one in found], [one.agreement for one in found]
            means = f"{sum(kl) / len(kl):.4f}", f"{max(kl):.4f}", f"{sum(same) / len(same):.3f}", f"{min(same):.3f}"
            yield _line([name, f"{low:g} to {min(high, 1):g}", str(len(found)), *means])


def mirror(cell: Cell) -> str:
    """How small the mirrors are, as 1/N."""
    return "empty" if cell.share < MIRROR_SMALLEST else f"1/{1 / cell.share:.3g}"


def fill(page: Path, tables: Mapping[str, str]) -> None:
    """Put every table between its marks. Raises ValueError for a mark without a table, or a table without one."""
    page.write_text(filled(page.read_text(), tables))


def filled(text: str, tables: Mapping[str, str]) -> str:
    """As ``fill``, of a text."""
    marks = re.findall(r"<!-- table (\S+) -->", text)
    if sorted(marks) != sorted(tables):
        raise ValueError(f"the page has marks for {sorted(marks)}, there are tables {sorted(tables)}")
    for name, table in tables.items():
        inside = re.compile(rf"(<!-- table {re.escape(name)} -->\n).*?(<!-- end -->)", re.DOTALL)
        text = inside.sub(lambda found, table=table: f"{found[1]}{table}\n{found[2]}", text)  # type: ignore[misc]
    return text


def _of(cells: Sequence[Cell], model: str) -> list[Cell]:
    return [one for one in cells if one.model == model]


def _quality(cell: Cell | None) -> str:
    return "" if cell is None else f"{_kl(cell)} / {cell.agreement:.3f}"


def _kl(cell: Cell) -> str:
    return f"{cell.kl:.4f}" if cell.kl >= 0.00005 else "0"


def _gain(found: Gain | None) -> str:
    return "" if found is None else f"x {found.kl_ratio:.2f}, {found.agreement:+.3f} ({found.readers})"


def _line(columns: Sequence[str]) -> str:
    return f"| {' | '.join(columns)} |"
