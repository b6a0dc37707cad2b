"""Writes kvservice.json, Grafana's dashboard of kvservice nodes, to the standard output.

The panels are the table below; ids, places and what every panel shares are made. A test holds the file to this program.
"""

import json
import sys
from dataclasses import dataclass

NODE = 'job="$job", instance=~"$instance"'
KINDS = 'kind=~"master|mirror"'
ONCE, TWICE = 'memory="1x"', 'memory="2x"'
IS_FOUND = 'answer=~"host|ssd|remote|moved"'
WIDTH, STAT_HEIGHT, GRAPH_HEIGHT = 24, 4, 8


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel: expressions with their legends. ``width``: of 24 columns. ``top``: the most a share can be."""

    title: str
    unit: str
    targets: tuple[tuple[str, str], ...]
    width: int = 8
    kind: str = "timeseries"
    is_stacked: bool = False
    top: float | None = None
    text: str = ""


def metric(name: str, matchers: str = "") -> str:
    """A selector of the chosen nodes."""
    return f"kvservice_{name}{{{NODE}{', ' + matchers if matchers else ''}}}"


def rate(name: str, by: str = "", matchers: str = "") -> str:
    """Change a second, summed over the chosen nodes."""
    group = f" by ({by})" if by else ""
    return f"sum{group} (rate({metric(name, matchers)}[$__rate_interval]))"


def total(name: str, by: str = "") -> str:
    """A gauge, summed over the chosen nodes."""
    return f"sum{f' by ({by})' if by else ''} ({metric(name)})"


def expected(memory: str) -> str:
    """What a node would find."""
    return f"max by (instance) ({metric('expected_hit_ratio', memory)})"


def share(part: str, whole: str) -> str:
    """One expression over another."""
    return f"{part} / {whole}"


def by_name(whose: str) -> tuple[Panel, ...]:
    """What is told of tenants, or of namespaces, that have a name."""
    asked = f"{whose}_answered_tokens_total"
    found, label = f"topk(10, {rate(asked, whose, IS_FOUND)})", f"{{{{{whose}}}}}"
    text = "The first since the node's start have names, the others are other. A namespace's: kvservice_namespace_info."
    return (
        Panel(
            f"Tokens asked for, top 10 by {whose}",
            "short",
            ((f"topk(10, {rate(asked, whose)})", label),),
            is_stacked=True,
            text=text,
        ),
        Panel(f"Tokens found, top 10 by {whose}", "percentunit", ((share(found, rate(asked, whose)), label),), top=1),
        Panel(
            f"Bytes, top 10 by {whose}",
            "bytes",
            ((f"topk(10, {total(f'{whose}_tier_bytes', whose)})", label),),
            is_stacked=True,
        ),
    )


FOUND_SHARE = share(rate("answered_tokens_total", matchers=IS_FOUND), rate("answered_tokens_total"))
STORED_BYTES = f"sum ({metric('cache_record_bytes', KINDS)})"
AGE_BUCKETS = rate("eviction_age_seconds_bucket", "le, tier")
AGES = tuple((f"histogram_quantile({q}, {AGE_BUCKETS})", f"{{{{tier}}}} {q:.0%}") for q in (0.5, 0.9))
ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "Overview",
        (
            Panel("Nodes that answer", "short", (('sum(up{job="$job", instance=~"$instance"})', ""),), 3, "stat"),
            Panel("Tokens found", "percentunit", ((FOUND_SHARE, ""),), 3, "stat", top=1),
            Panel(
                "Found exactly",
                "percentunit",
                ((share(rate("exact_tokens_total"), rate("lookup_tokens_total")), ""),),
                3,
                "stat",
                top=1,
            ),
            Panel(
                "Memory used",
                "percentunit",
                ((share(total("host_used_bytes"), total("host_capacity_bytes")), ""),),
                3,
                "stat",
                top=1,
            ),
            Panel(
                "SSD used",
                "percentunit",
                ((share(total("ssd_used_bytes"), total("ssd_capacity_bytes")), ""),),
                3,
                "stat",
                top=1,
            ),
            Panel(
                "Stored bytes stand for",
                "none",
                ((share(total("cache_dense_bytes"), STORED_BYTES), ""),),
                3,
                "stat",
                text="Dense bytes over the bytes of masters and mirrors.",
            ),
            Panel("Sessions", "short", ((total("sessions"), ""),), 3, "stat"),
            Panel(
                "Wrong bytes, a day",
                "short",
                ((f"sum(increase({metric('corrupt_total')}[1d]))", ""),),
                3,
                "stat",
                text="Copies whose checksums were wrong. They were answered as misses.",
            ),
        ),
    ),
    (
        "Lookups",
        (
            Panel(
                "Tokens by answer",
                "short",
                ((rate("answered_tokens_total", "answer"), "{{answer}}"),),
                12,
                is_stacked=True,
                text="host, ssd, remote: found in the context asked for, by where its bytes are.",
            ),
            Panel(
                "Tokens found, by node",
                "percentunit",
                (
                    (
                        share(
                            rate("answered_tokens_total", "instance", IS_FOUND),
                            rate("answered_tokens_total", "instance"),
                        ),
                        "{{instance}}",
                    ),
                ),
                12,
                top=1,
            ),
            Panel(
                "Exact and lossy",
                "percentunit",
                (
                    (share(rate("exact_tokens_total"), rate("lookup_tokens_total")), "exact"),
                    (share(rate("lossy_tokens_total"), rate("lookup_tokens_total")), "refreshed, moved or rounded"),
                ),
                top=1,
            ),
            Panel(
                "Misses by reason", "short", ((rate("missed_tokens_total", "reason"), "{{reason}}"),), is_stacked=True
            ),
            Panel(
                "Errors by reason", "short", ((rate("error_tokens_total", "reason"), "{{reason}}"),), is_stacked=True
            ),
            Panel("Lookups a second", "reqps", ((rate("lookups_total", "instance"), "{{instance}}"),), 12),
            Panel("Segments a second", "short", ((rate("lookup_segments_total", "instance"), "{{instance}}"),), 12),
        ),
    ),
    (
        "Tiers",
        (
            Panel(
                "Memory",
                "bytes",
                (
                    (total("host_used_bytes"), "used"),
                    (total("host_held_bytes"), "held by leases"),
                    (total("host_capacity_bytes"), "size"),
                ),
                12,
            ),
            Panel(
                "SSD",
                "bytes",
                (
                    (total("ssd_used_bytes"), "used"),
                    (total("ssd_physical_bytes"), "on the file system"),
                    (total("ssd_capacity_bytes"), "size"),
                ),
                12,
            ),
            Panel("Evicted bytes", "Bps", ((rate("evicted_bytes_total", "tier"), "{{tier}}"),)),
            Panel(
                "Evicted groups by reason",
                "short",
                ((rate("evicted_groups_for_total", "tier, reason"), "{{tier}} for {{reason}}"),),
                is_stacked=True,
            ),
            Panel("Age at eviction", "s", AGES, text="Seconds since the last use, of what was evicted."),
            Panel(
                "Lost by eviction",
                "short",
                ((rate("evicted_lost_total", "tier"), "{{tier}}"),),
                text="Evicted caches that no other tier held.",
            ),
            Panel(
                "Not written to SSD", "short", ((rate("not_admitted_total", "reason"), "{{reason}}"),), is_stacked=True
            ),
            Panel(
                "Written and read",
                "Bps",
                ((rate("demoted_bytes_total"), "written to SSD"), (rate("load_bytes_total"), "read from SSD")),
            ),
            Panel(
                "Seconds a load",
                "s",
                ((share(rate("load_seconds_total", "instance"), rate("loads_total", "instance")), "{{instance}}"),),
            ),
            Panel(
                "Waiting",
                "short",
                (
                    (total("ssd_queue"), "to be written"),
                    (total("loads_running"), "being read"),
                    (total("fold_queue"), "to be folded"),
                ),
            ),
            Panel("Stored", "Bps", ((rate("published_bytes_total", "instance"), "{{instance}}"),)),
        ),
    ),
    (
        "Families",
        (
            Panel(
                "Bytes by kind",
                "bytes",
                (
                    (total("cache_record_bytes", "kind"), "{{kind}}"),
                    (total("cache_dense_bytes"), "what they stand for"),
                ),
            ),
            Panel("Caches by kind", "short", ((total("caches", "kind"), "{{kind}}"),), is_stacked=True),
            Panel(
                "Folding",
                "short",
                (
                    (rate("folded_total"), "folded"),
                    (rate("fold_kept_total"), "kept dense"),
                    (rate("elections_total"), "elections"),
                    (rate("fold_dropped_total"), "dropped"),
                ),
            ),
        ),
    ),
    ("Tenants", by_name("tenant")),
    ("Namespaces", by_name("namespace")),
    (
        "Curves and plans",
        (
            Panel(
                "Expected hits by size of memory",
                "percentunit",
                ((f"min by (memory) ({metric('expected_hit_ratio')})", "{{memory}}"),),
                12,
                top=1,
                text="Of segments, without an SSD, of the node that finds least; see GET /plan.",
            ),
            Panel(
                "What twice the memory would bring",
                "percentunit",
                ((f"{expected(TWICE)} - {expected(ONCE)}", "{{instance}}"),),
                12,
            ),
            Panel("Watched caches", "short", ((total("curve_records", "instance"), "{{instance}}"),)),
            Panel("Events that wait", "short", ((total("curve_events", "instance"), "{{instance}}"),)),
            Panel(
                "Curves watch less, a second",
                "short",
                ((rate("curve_overflows_total", "instance"), "{{instance}}"),),
                text="More is asked for than curves take in: each time they watch half as many segments.",
            ),
        ),
    ),
    (
        "Health",
        (
            Panel(
                "Wrong or failed",
                "short",
                (
                    (rate("corrupt_total", "tier"), "wrong bytes in {{tier}}"),
                    (rate("load_failed_total"), "reads failed"),
                    (rate("demotion_failed_total"), "writes failed"),
                ),
            ),
            Panel(
                "Refused",
                "short",
                (
                    (rate("reserve_refused_total", "code"), "no room: {{code}}"),
                    (rate("commit_refused_total", "code"), "commit: {{code}}"),
                ),
            ),
            Panel("Leases", "short", ((total("leases"), "held"), (rate("leases_expired_total"), "ran out, a second"))),
        ),
    ),
)


def dashboard() -> dict[str, object]:
    """The whole dashboard."""
    return {
        "title": "kvservice",
        "uid": "kvservice",
        "tags": ["kvservice", "llm"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "timezone": "",
        "templating": {"list": _variables()},
        "panels": _panels(),
    }


def _variables() -> list[dict[str, object]]:
    source = {"type": "prometheus", "uid": "${datasource}"}
    query = "label_values(kvservice_uptime_seconds, {})"
    instances = 'label_values(kvservice_uptime_seconds{job="$job"}, instance)'
    shared: dict[str, object] = {"type": "query", "datasource": source, "refresh": 2, "sort": 1}
    return [
        {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"},
        {**shared, "name": "job", "label": "Job", "query": query.format("job")},
        {**shared, "name": "instance", "label": "Node", "query": instances,
         "includeAll": True, "multi": True, "allValue": ".*"},
    ]  # fmt: skip


def _panels() -> list[dict[str, object]]:
    made: list[dict[str, object]] = []
    y = 0
    for title, panels in ROWS:
        made.append({"id": len(made) + 1, "type": "row", "title": title, "gridPos": _place(0, y, WIDTH, 1)})
        x, y, height = 0, y + 1, 0
        for panel in panels:
            if x + panel.width > WIDTH:
                x, y, height = 0, y + height, 0
            height = STAT_HEIGHT if panel.kind == "stat" else GRAPH_HEIGHT
            made.append(_panel(panel, len(made) + 1, _place(x, y, panel.width, height)))
            x += panel.width
        y += height
    return made


def _place(x: int, y: int, width: int, height: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": width, "h": height}


def _panel(panel: Panel, id_: int, place: dict[str, int]) -> dict[str, object]:
    defaults: dict[str, object] = {"unit": panel.unit, "min": 0}
    if panel.top is not None:
        defaults["max"] = panel.top
    if panel.is_stacked:
        defaults["custom"] = {"stacking": {"mode": "normal"}, "fillOpacity": 30}
    source = {"type": "prometheus", "uid": "${datasource}"}
    return {
        "id": id_,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.text,
        "datasource": source,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + number), "datasource": source, "expr": expression, "legendFormat": legend}
            for number, (expression, legend) in enumerate(panel.targets)
        ],
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(dashboard(), indent=1, ensure_ascii=False) + "\n")
