"""Every metric's name in one place, with where in the stats document its value stands.

Names are stable: one may be added, none is renamed or gets another meaning. deploy/metrics.md is made of this table.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One Prometheus metric. ``path``: keys in the stats document; at ``*`` every key becomes a label's value.

    ``texts``: keys of what is found there whose texts are labels too; such a metric is always 1. ``is_histogram``: what
    is found there are buckets and their sum.
    """

    name: str
    help: str
    path: tuple[str, ...]
    is_counter: bool = False
    labels: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    is_histogram: bool = False

    def __post_init__(self) -> None:
        assert len(self.labels) == self.path.count("*") + len(self.texts), self.name

    @property
    def kind(self) -> str:
        """As Prometheus calls it."""
        return "histogram" if self.is_histogram else "counter" if self.is_counter else "gauge"

    def samples(self, document: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], float]]:
        """Label values and value of every sample of what is no histogram."""
        for labels, value in _walk(document, self.path, ()):
            if self.texts:
                yield (*labels, *(value[text] for text in self.texts)), 1.0
            else:
                yield labels, float(value)

    def histograms(self, document: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Mapping[str, int], float]]:
        """Label values, cumulative buckets by upper edge, and the sum of all values."""
        for labels, value in _walk(document, self.path, ()):
            yield labels, value["buckets"], value["sum"]


def _walk(value: Any, path: tuple[str, ...], labels: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if not path:
        yield labels, value
    elif path[0] != "*":
        yield from _walk(value[path[0]], path[1:], labels)
    else:
        for key, below in value.items():
            if len(path) == 1 or isinstance(below, Mapping):
                yield from _walk(below, path[1:], (*labels, key))


def _gauge(name: str, text: str, *path: str, labels: tuple[str, ...] = ()) -> MetricSpec:
    return MetricSpec(f"kvservice_{name}", text, path, labels=labels)


def _counter(name: str, text: str, *path: str, labels: tuple[str, ...] = ()) -> MetricSpec:
    return MetricSpec(f"kvservice_{name}_total", text, path, is_counter=True, labels=labels)


def _by(whose: str) -> tuple[MetricSpec, ...]:
    """What is told of every tenant or namespace that has a name, and of the others together."""
    of, base = f"of a {whose}", f"by_{whose}"
    return (
        _counter(
            f"{whose}_answered_tokens", f"Tokens asked for {of}, by what became of them.",
            base, "*", "tokens", "*", labels=(whose, "answer"),
        ),
        _counter(f"{whose}_exact_tokens", f"Tokens found exact {of}.", base, "*", "exact_tokens", labels=(whose,)),
        _counter(f"{whose}_lossy_tokens", f"Tokens found as an approximation {of}.",
                 base, "*", "lossy_tokens", labels=(whose,)),
        _gauge(f"{whose}_kind_bytes", f"Bytes of published records {of}, by kind.",
               base, "*", "held", "bytes_by_kind", "*", labels=(whose, "kind")),
        _gauge(f"{whose}_tier_bytes", f"Bytes of records {of}, by tier.",
               base, "*", "held", "bytes_by_tier", "*", labels=(whose, "tier")),
        _gauge(f"{whose}_dense_bytes", f"What the published records {of} stand for.",
               base, "*", "held", "dense_bytes", labels=(whose,)),
    )  # fmt: skip


_GIVEN_ROUTES = (
    _counter("push_route_choices", "Tries to give a record where a medium is chosen for that, by medium.",
             "network", "given_media", "*", "choices", labels=("medium",)),
    _counter("push_route_failures", "Of these, tries that failed, by medium.",
             "network", "given_media", "*", "failures", labels=("medium",)),
    _counter("push_route_bytes", "Bytes of these that were taken, by medium.",
             "network", "given_media", "*", "bytes", labels=("medium",)),
    _counter("push_route_predicted_seconds", "Seconds that giving them should take, by medium.",
             "network", "given_media", "*", "predicted_s", labels=("medium",)),
    _counter("push_route_actual_seconds", "Seconds that it took, by medium.",
             "network", "given_media", "*", "actual_s", labels=("medium",)),
    _counter("push_route_reasons", "Why the medium was chosen.",
             "network", "given_reasons", "*", labels=("reason",)),
)  # fmt: skip
_ANSWER = "host, ssd, remote, moved, miss or error"

METRICS = (
    MetricSpec(
        "kvservice_build_info", "Which build runs, in which boot; always 1.", ("build",),
        labels=("version", "boot_epoch"), texts=("version", "boot_epoch"),
    ),
    _gauge("uptime_seconds", "Seconds since the node started.", "uptime_s"),
    _gauge("host_capacity_bytes", "Size of the host arena.", "host", "capacity_bytes"),
    _gauge("host_used_bytes", "Allocated bytes, with rounding and what is being written.", "host", "used_bytes"),
    _gauge("host_record_bytes", "Bytes of records, of hidden ones too.", "host", "record_bytes"),
    _gauge("host_mirror_bytes", "Of these, bytes of mirrors.", "host", "mirror_bytes"),
    _gauge("host_caches", "Caches with a record in host memory.", "host", "caches"),
    _gauge("host_unpublished_bytes", "Bytes reserved or being folded, not published.", "host", "unpublished_bytes"),
    _gauge("host_held_bytes", "Bytes that leases or workers hold.", "host", "held_bytes"),
    _gauge("caches", "Caches by kind.", "caches", "*", "count", labels=("kind",)),
    _gauge("cache_record_bytes", "Bytes of records by kind.", "caches", "*", "record_bytes", labels=("kind",)),
    _gauge("cache_dense_bytes", "Bytes the published caches would take if all were dense.", "caches", "dense_bytes"),
    _gauge("cache_ratio", "Dense bytes over the record bytes that stand for them.", "caches", "ratio"),
    _gauge("families", "Segments with at least one cache.", "caches", "families"),
    _gauge("groups", "Masters with their mirrors.", "caches", "groups"),
    _gauge("namespaces", "Identities with a cache, a reservation or a session.", "caches", "namespaces"),
    _counter("lookups", "Lookup calls.", "lookups", "calls"),
    _counter("lookup_segments", "Segments asked for.", "lookups", "asked"),
    _counter("lookup_exact", "Segments answered with exact KV of an equal context.", "lookups", "exact"),
    _counter("lookup_rounded", "Segments answered with KV of an equal context, of a namespace that rounds.",
             "lookups", "rounded"),
    _counter("lookup_refreshed", "Segments answered with refreshed KV of an equal context.", "lookups", "refreshed"),
    _counter("lookup_shifted", "Segments answered from another context.", "lookups", "shifted"),
    _counter("lookup_missed", "Segments not found, by reason.", "lookups", "missed", "*", labels=("reason",)),
    _counter("lookup_broken_off", "Segments that a lookup did not come to before it ended.", "lookups", "broken_off"),
    _counter("lookup_tokens", "Tokens asked for.", "accounting", "asked_tokens"),
    _counter(
        "answered_segments", f"Segments asked for, by what became of them: {_ANSWER}.",
        "accounting", "segments", "*", labels=("answer",),
    ),
    _counter(
        "answered_tokens", f"Tokens asked for, by what became of them: {_ANSWER}.",
        "accounting", "tokens", "*", labels=("answer",),
    ),
    _counter("exact_tokens", "Tokens found with exact KV of the context asked for.", "accounting", "exact_tokens"),
    _counter("lossy_tokens", "Tokens found with an approximation: refreshed, moved, or of a namespace that rounds.",
             "accounting", "lossy_tokens"),
    _counter(
        "moved_tokens", "Tokens found in another context, by where their bytes come from.",
        "accounting", "moved_tokens", "*", labels=("source",),
    ),
    _counter("missed_tokens", "Tokens not found, by reason.", "accounting", "missed_tokens", "*", labels=("reason",)),
    _counter("error_tokens", "Tokens not to be had, by reason.", "accounting", "error_tokens", "*", labels=("reason",)),
    *_by("tenant"),
    *_by("namespace"),
    MetricSpec(
        "kvservice_namespace_info", "Whose namespace it is, and how it rounds; always 1.", ("by_namespace", "*"),
        labels=("namespace", "tenant", "model", "lossy"), texts=("tenant", "model", "lossy"),
    ),
    _counter("reserved", "Reservations given.", "writes", "reserved"),
    _counter("reserve_existed", "Reservations not needed, since the cache was there.", "writes", "existed"),
    _counter("reserve_refused", "Reservations refused, by error.", "writes", "reserves_refused", "*", labels=("code",)),
    _counter("published", "Caches published.", "writes", "published"),
    _counter("published_bytes", "Bytes of published records.", "writes", "published_bytes"),
    _counter("commit_refused", "Commits refused, by error.", "writes", "commits_refused", "*", labels=("code",)),
    _counter("aborted", "Reservations given back unwritten.", "writes", "aborted"),
    _counter("deleted", "Caches deleted.", "writes", "deleted"),
    _counter("lookup_from_ssd", "Segments found of which some had to be read from SSD.", "lookups", "from_ssd"),
    _counter("lookup_from_remote", "Segments found of which some came from another place.", "lookups", "from_remote"),
    _counter("evicted_groups", "Groups evicted, by tier.", "evictions", "*", "groups", labels=("tier",)),
    _counter("evicted_caches", "Caches evicted, by tier.", "evictions", "*", "caches", labels=("tier",)),
    _counter("evicted_bytes", "Bytes of records evicted, by tier.", "evictions", "*", "record_bytes", labels=("tier",)),
    _counter("evicted_lost", "Evicted caches that no other tier held.", "evictions", "*", "lost", labels=("tier",)),
    _counter(
        "evicted_groups_for", "Groups evicted, by tier and by what room was made for.",
        "evictions", "*", "groups_for", "*", labels=("tier", "reason"),
    ),
    MetricSpec(
        "kvservice_eviction_age_seconds", "Seconds from a group's last use, or its storing, to its eviction.",
        ("evictions", "*", "age_s"), labels=("tier",), is_histogram=True,
    ),
    _counter("folded", "Dense caches folded into mirrors.", "folds", "folded"),
    _counter("fold_kept", "Dense caches that no master was near enough to.", "folds", "kept"),
    _counter("fold_refused", "Mirrors that did not restore and were not published.", "folds", "refused"),
    _counter("fold_dropped", "Folds given up: queue full, no room, or the cache went away.", "folds", "dropped"),
    _counter("rebased", "Mirrors moved to a newly elected master.", "folds", "rebased"),
    _counter("fold_saved_bytes", "Bytes that folding freed.", "folds", "saved_bytes"),
    _counter("elections", "Masters elected over rounds.", "folds", "elections"),
    _gauge("fold_queue", "Dense caches that wait to be folded.", "folds", "queued"),
    _gauge("sessions", "Sessions open.", "handles", "sessions"),
    _counter("sessions_opened", "Sessions opened.", "handles", "sessions_opened"),
    _gauge("leases", "Leases held.", "handles", "leases"),
    _counter("leases_granted", "Leases granted.", "handles", "leases_granted"),
    _counter("leases_expired", "Leases that ran out.", "handles", "leases_expired"),
    _gauge("leased_caches", "Caches that leases hold, once a lease.", "handles", "leased_caches"),
    _gauge("reservations", "Reservations open.", "handles", "reservations"),
    _gauge("stray_bytes", "Bytes that lost sessions had reserved and may still write.", "handles", "stray_bytes"),
    _gauge("ssd_capacity_bytes", "Size of the slab, 0 without one.", "ssd", "capacity_bytes"),
    _gauge("ssd_used_bytes", "Bytes taken on the slab, with footers and rounding.", "ssd", "used_bytes"),
    _gauge("ssd_physical_bytes", "Bytes that the slab takes on its file system.", "ssd", "physical_bytes"),
    _gauge("ssd_record_bytes", "Bytes of records on the slab.", "ssd", "record_bytes"),
    _gauge("ssd_mirror_bytes", "Of these, bytes of mirrors.", "ssd", "mirror_bytes"),
    _gauge("ssd_caches", "Caches with a record on the slab.", "ssd", "caches"),
    _gauge("ssd_superseded", "Old forms of folded caches that wait for the new ones.", "ssd", "superseded"),
    _gauge("ssd_queue", "Caches that wait to be written to SSD.", "ssd", "queued"),
    _gauge("ssd_below_floor", "1 while the file system has less room than the floor.", "ssd", "is_below_floor"),
    _gauge("quarantined_bytes", "Places on the slab that are not used again.", "ssd", "quarantined_bytes"),
    _counter("not_admitted", "Records not written, by reason.", "ssd", "not_admitted", "*", labels=("reason",)),
    _counter("loads", "Records that lookups had read from SSD.", "loads", "done"),
    _counter("load_staged", "Of these, through the staging area.", "loads", "staged"),
    _counter("load_failed", "Of these, corrupt or unreadable.", "loads", "failed"),
    _counter("load_bytes", "Bytes of records read from SSD.", "loads", "record_bytes"),
    _counter("load_seconds", "Seconds from the lookup to the last verified layer.", "loads", "seconds"),
    _gauge("loads_running", "Records on their way from SSD.", "loads", "running"),
    _counter("demoted", "Records written to SSD.", "demotions", "written"),
    _counter("demoted_bytes", "Bytes of records written to SSD.", "demotions", "record_bytes"),
    _counter("demoted_seconds", "Seconds of writing to SSD.", "demotions", "seconds"),
    _counter("demotion_dropped", "Writes given up: the cache went, or was wrong.", "demotions", "dropped"),
    _counter("demotion_failed", "Writes that the disk refused.", "demotions", "failed"),
    _counter("ssd_erased", "Records erased from SSD.", "demotions", "erased"),
    _counter("remote_asked", "Segments that other places were asked for.", "remote", "asked"),
    _counter("remote_found", "Of these, found there.", "remote", "found"),
    _counter("remote_computed_sooner", "Of these, left there: computing is sooner.", "remote", "computed_sooner"),
    _counter("remote_refused", "Offers that were not what was asked, or had no room.", "remote", "refused"),
    _counter("remote_unreachable", "Segments whose place did not answer in time.", "remote", "unreachable"),
    _counter("remote_loads", "Records brought from other places.", "remote", "done"),
    _counter("remote_failed", "Records that did not arrive whole.", "remote", "failed"),
    _counter("remote_bytes", "Bytes of records brought.", "remote", "record_bytes"),
    _counter("remote_seconds", "Seconds from the offer to the last verified layer.", "remote", "seconds"),
    _gauge("remote_running", "Records on their way from other places.", "remote", "running"),
    _counter("pushed", "Records given to other places.", "pushes", "stored"),
    _counter("push_existed", "Records that the place had already.", "pushes", "existed"),
    _counter("push_refused", "Records that the place refused.", "pushes", "refused"),
    _counter("push_failed", "Tries to give a record that did not reach the place.", "pushes", "failed"),
    _counter("push_dropped", "Records not given: queue full, or gone before their turn.", "pushes", "dropped"),
    _counter("pushed_bytes", "Bytes of records given.", "pushes", "record_bytes"),
    _counter("push_seconds", "Seconds of giving.", "pushes", "seconds"),
    _gauge("push_queue", "Records that wait to be given.", "pushes", "queued"),
    _gauge("members", "Shared nodes, by state.", "network", "members", "*", labels=("state",)),
    _gauge("peers_lost", "Shared nodes that do not answer and are left alone for a while.", "network", "lost"),
    _gauge("peer_connections", "Connections of other nodes to this one.", "network", "peer_connections"),
    _counter("peer_refused", "Callers that the peer port turned away.", "network", "peer_refused"),
    _counter("route_choices", "Transfers, by medium.", "network", "media", "*", "choices", labels=("medium",)),
    _counter("route_failures", "Transfers that failed, by medium.",
             "network", "media", "*", "failures", labels=("medium",)),
    _counter("route_bytes", "Bytes that came, by medium.", "network", "media", "*", "bytes", labels=("medium",)),
    _counter("route_predicted_seconds", "Seconds that transfers should take, by medium.",
             "network", "media", "*", "predicted_s", labels=("medium",)),
    _counter("route_actual_seconds", "Seconds that they took, by medium.",
             "network", "media", "*", "actual_s", labels=("medium",)),
    _counter("route_reasons", "Why the medium was chosen.", "network", "reasons", "*", labels=("reason",)),
    *_GIVEN_ROUTES,
    _counter("peer_packed_bytes", "Bytes of records that came or went as 8 bits.", "network", "packed_bytes"),
    _counter("peer_packed_wire_bytes", "Bytes that these took on the wire.", "network", "packed_wire_bytes"),
    _counter("corrupt", "Copies whose bytes were wrong, by tier.", "integrity", "corrupt", "*", labels=("tier",)),
    _counter("scrubbed_caches", "Caches that the scrubber looked at.", "integrity", "scrubbed_caches"),
    _counter("scrubbed_bytes", "Bytes that the scrubber looked at.", "integrity", "scrubbed_bytes"),
    _counter("scrub_passes", "Passes of the scrubber over all caches.", "integrity", "scrub_passes"),
    _gauge("recovered_records", "Records found on SSD at the start.", "recovery", "records"),
    _gauge("recovery_seconds", "Seconds that finding them took.", "recovery", "seconds"),
    _gauge("recovery_dropped", "Records not taken over at the start.", "recovery", "dropped", "*", labels=("reason",)),
    _gauge("request_log_segments", "Segments that the request log holds at most, 0: off.", "request_log", "capacity"),
    _counter("request_log_noted", "Segments noted in the request log.", "request_log", "noted"),
    _gauge("curves_kept", "1 while miss-ratio curves are kept.", "curves", "is_kept"),
    _gauge("curve_scopes", "Curves that are kept: the node's, of tenants, of namespaces.", "curves", "scopes"),
    _gauge("curve_records", "Caches that all curves watch.", "curves", "watched"),
    _gauge("curve_events", "Events that wait to be taken in.", "curves", "waiting"),
    _counter("curve_overflows", "Times that events were lost, and less is watched since.", "curves", "overflows"),
    _gauge("curve_memory_max_bytes", "What all curves take at most.", "curves", "memory_bytes_max"),
    _gauge(
        "expected_hit_ratio", "Share of segments that memory of so many times the present size would find; 0: unknown.",
        "curves", "expected_hit_ratio", "*", labels=("memory",),
    ),
)  # fmt: skip
