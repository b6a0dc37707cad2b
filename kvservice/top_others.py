"""Other nodes in ``kvservice top``: a bar of what came from them, and a line for each. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.text import Text

from kvservice.text import printable, text_of_bytes
from kvservice.top_rates import Document

STATE_STYLES = {"live": "green", "cold": "default", "draining": "yellow"}


def others_of(stats: Document) -> Sequence[Mapping[str, Any]]:
    """All that the node names; an older node names none."""
    found: Sequence[Mapping[str, Any]] = stats["network"].get("others", ())
    return found


def others_bar(stats: Document) -> tuple[list[tuple[float, str]], str] | None:
    """Parts and note: of the segments that others were asked for, what came and what is computed sooner; None: the node
    shares with nobody."""
    remote, network = stats["remote"], stats["network"]
    if not others_of(stats) and not network["peer_connections"]:
        return None
    asked, sooner = max(remote["asked"], 1), remote["computed_sooner"]
    brought = max(remote["found"] - sooner, 0)
    moved = f"{text_of_bytes(remote['record_bytes'])} from, {text_of_bytes(stats['pushes']['record_bytes'])} to them"
    lost = f", not reached {remote['unreachable']}" if remote["unreachable"] else ""
    note = f"{moved}, came {brought} of {remote['asked']}{lost}"
    return [(brought / asked, "green"), (sooner / asked, "yellow")], note


def other_lines(others: Sequence[Mapping[str, Any]], room: int) -> Iterator[Text]:
    """A title and a line each, ``room`` lines at most but for the title and one: so that one is always seen."""
    if not others:
        return
    yield Text("other nodes      state        way            latency      speed   brought     given", "bold")
    count = max(room - 1, 1)
    for one in others[:count]:
        yield _line(one)
    if len(others) > count:
        yield Text(f"and {len(others) - count} more")


def _line(other: Mapping[str, Any]) -> Text:
    """By the way that most of its last loads took."""
    state = other["state"] if other["is_answering"] or other["state"] != "live" else "no answer"
    text = Text(f"{_cut(other['name'], 16)} ")
    text.append(f"{printable(state):<13}", STATE_STYLES.get(state, "red"))
    medium, way = max(other["ways"].items(), key=lambda pair: pair[1]["chosen"], default=("", None))
    is_measured = way is not None and way["transfers"]
    latency = f"{way['latency_s'] * 1e3:.2f} ms" if is_measured and way else "-"
    speed = f"{text_of_bytes(way['bytes_per_s'])}/s" if is_measured and way else "-"
    moved = "".join(f"{text_of_bytes(other[name]):>10}" for name in ("brought_bytes", "given_bytes"))
    return text.append(f"{printable(medium):<13}{latency:>9}{speed:>11}{moved}", "default")


def _cut(name: str, cells: int) -> str:
    cut = Text(printable(name))
    cut.truncate(cells, overflow="ellipsis", pad=True)
    return cut.plain
