"""One frame of ``kvservice top``: a node's documents as lines for a terminal, 80 columns and 24 lines at least. Pure.

Texts of clients (models, tenants, rounds) are made printable first: an escape sequence in a name is not obeyed.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from kvservice.accounting import OTHER
from kvservice.text import printable, text_of_bytes
from kvservice.top_others import other_lines, others_bar, others_of
from kvservice.top_rates import Document, answers_of

WIDTH_MIN, LINES_MIN = 40, 8
BAR_MIN = 10
FAMILY_LINES_MAX = 20
UNKNOWN = "-"
MARKS = "#=+~"
"""Of the parts of a bar, in their order."""
Rates = Mapping[str, float | None]


@dataclass(frozen=True, slots=True)
class Seen:
    """What a frame shows. ``plan`` and ``families``: None if the node did not answer that. ``problem``: in words."""

    address: str
    stats: Document | None
    rates: Rates
    plan: Document | None = None
    families: Document | None = None
    problem: str = ""


def frame(seen: Seen, width: int, lines: int) -> list[Text]:
    """At most ``lines`` lines of at most ``width`` cells."""
    width, lines = max(width, WIDTH_MIN), max(lines, LINES_MIN)
    made = [_head(seen)]
    if seen.stats is not None:
        made += [*_tiers(seen.stats, width), Text(), *_traffic(seen.stats, seen.rates, width), Text()]
        made += _advice(seen.plan)
        made += other_lines(others_of(seen.stats), (lines - len(made)) // 3)
        room = lines - len(made) - 1
        if seen.families is not None and room > 2:
            made += [Text(), *_families(seen.families, min(room, FAMILY_LINES_MAX))]
        made += [Text(), *_namespaces(seen.stats["by_namespace"], lines - len(made) - 2)]
    for line in made:
        line.truncate(width, overflow="ellipsis")
    return made[:lines]


def _head(seen: Seen) -> Text:
    text = Text("kvservice top ", "bold")
    text.append(printable(seen.address), "default")
    if seen.stats is not None:
        stats, handles = seen.stats, seen.stats["handles"]
        text.append(f"  {printable(str(stats['version']))}  up {_time(stats['uptime_s'])}", "not bold")
        text.append(f"  sessions {handles['sessions']}  leases {handles['leases']}", "not bold")
    if seen.problem:
        text.append(f"  {printable(seen.problem)}", "bold red")
    return text


def _tiers(stats: Document, width: int) -> Iterator[Text]:
    host, ssd, caches = stats["host"], stats["ssd"], stats["caches"]
    note = f"{_size(host)} caches {host['caches']}, evicted {stats['evictions']['host']['caches']}"
    yield _bar("memory", [(_share(host), "cyan")], note, width)
    if ssd["is_open"]:
        floor = ", TOO FULL" if ssd["is_below_floor"] else ""
        note = f"{_size(ssd)} caches {ssd['caches']}, to write {ssd['queued']}{floor}"
        yield _bar("SSD", [(_share(ssd), "magenta")], note, width)
    others = others_bar(stats)
    if others is not None:
        yield _bar("others", *others, width)
    dense, master, mirror = max(caches["dense_bytes"], 1), caches["master"], caches["mirror"]
    parts = [(master["record_bytes"] / dense, "blue"), (mirror["record_bytes"] / dense, "yellow")]
    note = f"masters {master['count']}, mirrors {mirror['count']}, {caches['ratio']:.1f} times their bytes"
    yield _bar("stored", parts, note, width)


def _traffic(stats: Document, rates: Rates, width: int) -> Iterator[Text]:
    answers = answers_of(stats["accounting"]["segments"])
    asked = max(answers.asked, 1)
    counts = [(answers.host, "cyan"), (answers.ssd, "magenta"), (answers.remote, "green"), (answers.moved, "yellow")]
    parts = [(count / asked, style) for count, style in counts]
    yield _bar("found", parts, f"{answers.found / asked:.1%} of {answers.asked} segments since the start", width)
    segments, found = rates.get("segments"), rates.get("found")
    now = UNKNOWN if not segments or found is None else f"{found / segments:.1%}"
    yield Text(f"now      {_count(rates, 'lookups')} lookups/s   {_count(rates, 'segments')} segments/s   {now} found")
    stored, loaded, evicted = (_bytes(rates, f"{name}_bytes") for name in ("stored", "loaded", "evicted"))
    yield Text(f"a second {stored} stored   {loaded} loaded   {evicted} evicted   {_count(rates, 'folded')} folded")
    if others_of(stats):
        brought, given = (_bytes(rates, f"{name}_bytes") for name in ("brought", "given"))
        yield Text(f"         {brought} brought from other nodes   {given} given to them")
    missed = {name: count for name, count in stats["lookups"]["missed"].items() if count}
    if missed:
        yield Text("missed   " + ", ".join(f"{printable(name)} {count}" for name, count in missed.items()))


def _advice(plan: Document | None) -> Iterator[Text]:
    for text in (plan or {}).get("advice", ())[:2]:
        yield Text(f"plan     {printable(text)}", "green")


def _families(families: Document, room: int) -> Iterator[Text]:
    rounds = families["rounds"][: max((room - 2) // 3, 1)]
    if rounds:
        yield Text("rounds                    age  caches    before     after", "bold")
        for one in rounds:
            sizes = f"{text_of_bytes(one['bytes_before']):>10}{text_of_bytes(one['bytes_after']):>10}"
            yield Text(f"{_cut(one['name'] or UNKNOWN, 22)}{_time(one['age_s']):>7}{one['members']:>8}{sizes}")
        room -= len(rounds) + 1
    if room > 1 and families["families"]:
        yield Text("families                  members  mirrors    stored  stands for", "bold")
        for one in families["families"][: room - 1]:
            name, mirrors = f"{one['segment'][:8]} {one['model']}", sum(group["mirrors"] for group in one["groups"])
            sizes = f"{text_of_bytes(one['record_bytes']):>10}{text_of_bytes(one['dense_bytes']):>12}"
            yield Text(f"{_cut(name, 25)}{one['members']:>8}{mirrors:>9}{sizes}")


def _namespaces(namespaces: Mapping[str, Any], room: int) -> Iterator[Text]:
    """Those that hold most; the node counts the less busy ones together."""
    held = {name: sum(one["held"]["bytes_by_tier"].values()) for name, one in namespaces.items()}
    names = sorted(
        (name for name in held if held[name] or namespaces[name]["asked_segments"]), key=lambda one: -held[one]
    )
    if room < 2 or not names:
        return
    yield Text("namespaces                 tenant              held     asked   found", "bold")
    for name in names[: room - 1]:
        one, answers = namespaces[name], answers_of(namespaces[name]["segments"])
        found = f"{answers.found / answers.asked:.1%}" if answers.asked else UNKNOWN
        sizes = f"{text_of_bytes(held[name]):>10}{one['asked_segments']:>10}{found:>8}"
        lossy = one.get("lossy", "")  # an older node's has none
        model = one["model"] if lossy in ("", OTHER) else f"{lossy} {one['model']}"
        yield Text(f"{_cut(model, 26)} {_cut(one['tenant'], 14)}{sizes}")


def _bar(name: str, parts: list[tuple[float, str]], note: str, width: int) -> Text:
    """Of ASCII, so that parts are told apart without colours."""
    size = max(width - 10 - len(note) - 3, BAR_MIN)
    text, used = Text(f"{name:<8} ["), 0
    for (share, style), mark in zip(parts, MARKS, strict=False):
        cells = min(round(max(share, 0.0) * size), size - used)
        text.append(mark * cells, style)
        used += cells
    return text.append("." * (size - used), "bright_black").append(f"] {note}", "default")


def _share(tier: Mapping[str, Any]) -> float:
    return float(tier["used_bytes"] / tier["capacity_bytes"]) if tier["capacity_bytes"] else 0.0


def _size(tier: Mapping[str, Any]) -> str:
    return f"{text_of_bytes(tier['used_bytes'])} of {text_of_bytes(tier['capacity_bytes'])},"


def _count(rates: Rates, name: str) -> str:
    rate = rates.get(name)
    return UNKNOWN if rate is None else f"{rate:.1f}" if rate < 100 else f"{rate:.0f}"


def _bytes(rates: Rates, name: str) -> str:
    rate = rates.get(name)
    return UNKNOWN if rate is None else text_of_bytes(rate)


def _time(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds:.0f}s"


def _cut(text: str, cells: int) -> str:
    """Padded or cut to so many cells, wide characters counted."""
    cut = Text(printable(text))
    cut.truncate(cells, overflow="ellipsis", pad=True)
    return cut.plain
