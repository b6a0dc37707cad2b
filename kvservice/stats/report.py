"""The stats document as a table for people: what lies in which tier, what was found where, how the last start went."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvservice.text import printable, text_of_bytes

UNKNOWN = "-"


def print_stats(document: Mapping[str, Any], console: Console | None = None) -> None:
    """Print the document of GET /stats."""
    (console or Console()).print(stats_tables(document))


def stats_tables(document: Mapping[str, Any]) -> RenderableType:
    """Tiers, lookups, tokens, health, and other nodes if there are any."""
    tables = [_tiers(document), _lookups(document), _tokens(document), _health(document)]
    others = document["network"].get("others", ())
    return Group(*tables, *([_others(others)] if others else ()))


def _tiers(document: Mapping[str, Any]) -> Table:
    table = Table("tier", "size", "used", "records", "caches", "evicted", "lost", "corrupt", title="Tiers")
    host, ssd, totals = document["host"], document["ssd"], document["caches"]
    corrupt = document["integrity"]["corrupt"]
    held = {"host": host["caches"], "ssd": ssd["caches"]}
    for name, tier in (("host", host), ("ssd", ssd)):
        if name == "ssd" and not ssd["is_open"]:
            continue
        evictions = document["evictions"][name]
        table.add_row(
            name,
            text_of_bytes(tier["capacity_bytes"]),
            text_of_bytes(tier["used_bytes"]),
            text_of_bytes(tier["record_bytes"]),
            str(held[name]),
            str(evictions["caches"]),
            str(evictions["lost"]),
            str(corrupt[name]),
        )
    table.caption = (
        f"{totals['master']['count']} masters, {totals['mirror']['count']} mirrors in {totals['families']} families; "
        f"they stand for {text_of_bytes(totals['dense_bytes'])}, {totals['ratio']:.1f} times their own bytes"
    )
    return table


def _lookups(document: Mapping[str, Any]) -> Table:
    lookups = document["lookups"]
    rounded = lookups.get("rounded", 0)
    found = lookups["exact"] + rounded + lookups["refreshed"] + lookups["shifted"]
    ssd, remote = lookups["from_ssd"], lookups["from_remote"]
    elsewhere = {"elsewhere": remote} if remote else {}
    counts = {
        "asked": lookups["asked"], "found": found, "in memory": found - ssd - remote, "on SSD": ssd, **elsewhere,
        "exact": lookups["exact"], **({"rounded": rounded} if rounded else {}), "refreshed": lookups["refreshed"],
        "shifted": lookups["shifted"], "missed": sum(lookups["missed"].values()),
    }  # fmt: skip
    table = Table(*counts, title="Segments")
    table.add_row(*map(str, counts.values()))
    missed = {reason: count for reason, count in lookups["missed"].items() if count}
    if missed:
        table.caption = "missed: " + ", ".join(f"{reason} {count}" for reason, count in missed.items())
    return table


def _tokens(document: Mapping[str, Any]) -> Table:
    accounting = document["accounting"]
    table = Table("asked", *accounting["tokens"], title="Tokens")
    table.add_row(str(accounting["asked_tokens"]), *(str(count) for count in accounting["tokens"].values()))
    table.caption = (
        f"{accounting['exact_ratio']:.1%} found exactly, {accounting['lossy_ratio']:.1%} more with an approximation"
    )
    return table


def _health(document: Mapping[str, Any]) -> Table:
    recovery, integrity, ssd = document["recovery"], document["integrity"], document["ssd"]
    table = Table("what", "how it stands", title="Health", show_header=False)
    table.add_row("version, uptime", f"{document['version']}, {document['uptime_s']:.0f} s")
    dropped = sum(recovery["dropped"].values())
    start = f"{recovery['kind']}: {recovery['records']} records in {recovery['seconds']:.3f} s, {dropped} dropped"
    table.add_row("last start", start if ssd["is_open"] else "no SSD tier")
    table.add_row("quarantined", text_of_bytes(ssd["quarantined_bytes"]))
    table.add_row("scrubbed", f"{integrity['scrub_passes']} passes, {text_of_bytes(integrity['scrubbed_bytes'])}")
    refused = {reason: count for reason, count in ssd["not_admitted"].items() if count}
    table.add_row(
        "not written to SSD", ", ".join(f"{reason} {count}" for reason, count in refused.items()) or "nothing"
    )
    members = {state: count for state, count in document["network"]["members"].items() if count}
    if members:
        table.add_row("shared nodes", ", ".join(f"{count} {state}" for state, count in members.items()))
    remote, pushes = document["remote"], document["pushes"]
    if remote["asked"] or pushes["stored"] or pushes["queued"]:
        brought = f"{remote['done']} brought, {text_of_bytes(remote['record_bytes'])}, {remote['failed']} failed"
        table.add_row("from other places", f"{brought}; {remote['computed_sooner']} left there")
        given = f"{pushes['stored']} given, {text_of_bytes(pushes['record_bytes'])}, {pushes['failed']} tries failed"
        table.add_row("to other places", f"{given}; {pushes['queued']} wait")
    handles = document["handles"]
    names = ("sessions", "leases", "reservations")
    table.add_row("held", ", ".join(f"{handles[name]} {name}" for name in names))
    return table


def _others(others: Sequence[Mapping[str, Any]]) -> Table:
    """One row a way. Names are what others say of themselves: no markup."""
    table = Table("node", "state", "way", "latency", "speed", "loads", "brought", "given", title="Other nodes")
    for other in others:
        head = [Text(printable(other[name])) for name in ("name", "state")]
        moved = [text_of_bytes(other["brought_bytes"]), text_of_bytes(other["given_bytes"])]
        for medium, way in other["ways"].items() or ((UNKNOWN, None),):
            table.add_row(*head, Text(printable(medium)), *_way(way), *moved)
            head, moved = [Text(), Text()], ["", ""]
    table.caption = "loads: of the last 1,024 of this node; latency and speed as measured"
    return table


def _way(way: Mapping[str, Any] | None) -> tuple[str, str, str]:
    if way is None:
        return UNKNOWN, UNKNOWN, UNKNOWN
    failed = f", {way['failed']} failed" if way["failed"] else ""
    loads = f"{way['chosen']}{failed}"
    if not way["transfers"]:
        return UNKNOWN, UNKNOWN, loads
    return f"{way['latency_s'] * 1e3:.2f} ms", f"{text_of_bytes(way['bytes_per_s'])}/s", loads
