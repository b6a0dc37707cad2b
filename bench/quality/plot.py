"""Quality against bytes, as an SVG written by hand: one curve an arrangement, along the ratios of hkvd.

A method's height is the KL of `none` times what it gains over `none`, both over readers that tried both: methods were
not all tried by the same readers, and their plain means would not compare.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from bench.quality.results import Cell, gain, over_worlds

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 860, 470, 74, 34, 250, 58
SHARE_MIN, SHARE_MAX = 0.004, 0.5
KL_MIN, KL_MAX = 1e-4, 1.0
EMPTY_AT = 0.0055
"""Where the mirrors without rows stand, left of the scale's break."""
COLOURS = ("#1b6ca8", "#c0392b", "#2e8b57", "#8e44ad", "#d68910", "#34495e", "#16a085", "#7f8c8d", "#e75480", "#a0522d")


def draw(cells: Sequence[Cell], model: str) -> str:
    """The plot of one model. Curves: ``none`` and ``hkvd``; crosses: ``head`` and ``blocks``; rings: variants."""
    own = [one for one in cells if one.model == model and one.method != "exact"]
    names = list(dict.fromkeys(one.arrangement for one in own))
    parts = [*_frame(model)]
    for index, name in enumerate(names):
        colour = COLOURS[index % len(COLOURS)]
        points = _points([one for one in own if one.arrangement == name])
        parts += _curve([one for one in points if _is_curve(one.method)], colour)
        parts += [_mark(one, colour) for one in points if not _is_curve(one.method)]
        parts.append(_text(WIDTH - RIGHT + 34, TOP + 16 + 20 * index, name))
        parts.append(
            _line(WIDTH - RIGHT + 10, TOP + 12 + 20 * index, WIDTH - RIGHT + 28, TOP + 12 + 20 * index, colour, 3)
        )
    legend = ("dots: none and hkvd, by ratio", "crosses: head, blocks", "rings: variants tried")
    parts += [_text(WIDTH - RIGHT + 10, TOP + 250 + 18 * index, one) for index, one in enumerate(legend)]
    return "\n".join(parts) + "\n</svg>\n"


def x_of(share: float) -> float:
    """Pixels from the left of mirror bytes over dense bytes."""
    held = max(share, EMPTY_AT)
    return LEFT + math.log(held / SHARE_MIN) / math.log(SHARE_MAX / SHARE_MIN) * (WIDTH - LEFT - RIGHT)


def y_of(kl: float) -> float:
    """Pixels from the top of a KL divergence."""
    held = min(max(kl, KL_MIN), KL_MAX)
    return TOP + math.log(KL_MAX / held) / math.log(KL_MAX / KL_MIN) * (HEIGHT - TOP - BOTTOM)


class _Point(NamedTuple):
    method: str
    share: float
    kl: float


def _points(cells: Sequence[Cell]) -> list[_Point]:
    sums = over_worlds(cells)
    plain = [one for one in sums if one.method == "none"]
    found = [(one, gain(cells, one.method)) for one in sums]
    return [_Point(one.method, one.share, plain[0].kl * gained.kl_ratio) for one, gained in found if gained]


def _is_curve(method: str) -> bool:
    return method == "none" or (method.startswith("hkvd") and "@" not in method)


def _curve(cells: Iterable[_Point], colour: str) -> list[str]:
    points = [(x_of(one.share), y_of(one.kl)) for one in sorted(cells, key=lambda cell: cell.share)]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dots = [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>' for x, y in points]
    return [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>', *dots]


def _mark(cell: _Point, colour: str) -> str:
    x, y = x_of(cell.share), y_of(cell.kl)
    if cell.method.startswith(("head", "blocks")):
        return _line(x - 4, y - 4, x + 4, y + 4, colour, 1.5) + _line(x - 4, y + 4, x + 4, y - 4, colour, 1.5)
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="none" stroke="{colour}" stroke-width="1.2"/>'


def _frame(model: str) -> list[str]:
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    style = 'font-family="sans-serif" font-size="12"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>']
    parts.append(f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>')
    for power in range(-4, 1):
        y = y_of(10.0**power)
        parts += [_line(LEFT, y, right, y, "#dddddd", 1), _text(LEFT - 8, y + 4, f"{10.0**power:g}", "end")]
    for share in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5):
        x = x_of(share)
        parts += [_line(x, TOP, x, bottom, "#eeeeee", 1), _text(x, bottom + 18, f"1/{1 / share:g}", "middle")]
    parts.append(_text(x_of(0), bottom + 18, "empty", "middle"))
    parts.append(_text((LEFT + right) / 2, bottom + 42, "bytes of a mirror, over a dense copy", "middle"))
    parts.append(_text(LEFT, TOP - 14, f"KL divergence to the full prefill, nats a token ({model})"))
    return parts


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, width: float) -> str:
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} stroke="{colour}" stroke-width="{width}"/>'


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="#333333">{text}</text>'
