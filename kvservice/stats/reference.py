"""deploy/metrics.md: every metric, its labels and its meaning. `python -m kvservice.stats.reference FILE` writes it."""

import sys
from collections.abc import Iterator
from pathlib import Path

from kvservice.stats.metrics import METRICS, MetricSpec

HEAD = """\
# Metrics

What `GET /metrics` tells, made of `kvservice/stats/metrics.py` by `python -m kvservice.stats.reference
deploy/metrics.md`; a test compares the two. All are there from zero. Names are stable: one may be added, none is
renamed or gets another meaning. The same numbers stand in `GET /stats`; its schema is `deploy/schemas/stats.json`.
A scrape may get the text of the one before if that is younger than nine times what making it took, a quarter second at
most; `/stats`, `/plan`, `/curves` and `/families` answer the same question likewise.

## What was asked and what became of it

Every segment that a lookup asks for is counted once in each unit, and a test holds that nothing is left over:

    kvservice_lookup_segments_total = sum over answer of kvservice_answered_segments_total
    kvservice_lookup_tokens_total   = sum over answer of kvservice_answered_tokens_total

| answer | meaning |
|---|---|
| `host` | found in the context asked for, and all of it is in memory |
| `ssd` | found in the context asked for, and some of it has to be read from SSD |
| `remote` | found in the context asked for, on another node or in cold storage |
| `moved` | found in another context, at whatever position and in whatever tier (`kvservice_moved_tokens_total`) |
| `miss` | nothing that would have answered is held (`kvservice_missed_tokens_total`) |
| `error` | held and not to be had, or a wrong question (`kvservice_error_tokens_total`) |

Errors: `corrupt` (wrong bytes that others lease), `no_room` (leases leave no room to read it into memory),
`token_count` and `unknown_namespace` (the client is wrong), `broken_off` (the lookup ended before it came to it).

Hit ratio without approximations: `rate(kvservice_exact_tokens_total) / rate(kvservice_lookup_tokens_total)`. With
`kvservice_lossy_tokens_total` in its place: what approximations add. These are refreshed KV, moved KV, and all of a
namespace whose identity says that its rows are rounded when they are stored (label `lossy` of
`kvservice_namespace_info`). What is stored comes back bit for bit, mirrors too: `kvservice_cache_ratio` loses nothing,
and neither do rows that go between nodes as 8 bits (`kvservice_peer_packed_bytes_total`): they were rounded to that.

## Tenants and namespaces

The first 16 tenants and 32 namespaces that are asked for have names; after a start with an SSD tier the largest that it
brought do. All others are counted together as `other`, and so is a tenant of that name, or one with more than 128
characters. A name stays until the node ends, and nothing that was counted as `other` moves to a name later: every
series rises by what it saw itself, so that `rate()` over each, and over their sum, is right. What has no name of its
own still counts in its tenant's.

## All of them
"""
GROUPS = {
    "build": "Build",
    "uptime_s": "Node",
    "host": "Memory",
    "caches": "Caches",
    "lookups": "Lookups",
    "accounting": "Accounting",
    "by_tenant": "Tenants",
    "by_namespace": "Namespaces",
    "writes": "Writes",
    "evictions": "Evictions",
    "folds": "Folding",
    "handles": "Sessions, leases, reservations",
    "ssd": "SSD",
    "loads": "Loads from SSD",
    "demotions": "Writes to SSD",
    "remote": "From other places",
    "pushes": "To other places",
    "network": "Other nodes",
    "integrity": "Integrity",
    "recovery": "The last start",
    "request_log": "Request log",
    "curves": "Curves",
}
"""Headings, by the part of the stats document that metrics come from."""


def reference() -> str:
    """The whole page."""
    return "\n".join([HEAD, *_tables()]) + "\n"


def _tables() -> Iterator[str]:
    for part, heading in GROUPS.items():
        yield f"### {heading}\n\n| metric | type | labels | meaning |\n|---|---|---|---|"
        yield from (_row(spec) for spec in METRICS if spec.path[0] == part)
        yield ""


def _row(spec: MetricSpec) -> str:
    labels = ", ".join(f"`{label}`" for label in spec.labels)
    return f"| `{spec.name}` | {spec.kind} | {labels} | {spec.help} |"


def main(file: str) -> None:
    """Write the page."""
    Path(file).write_text(reference().rstrip("\n") + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
