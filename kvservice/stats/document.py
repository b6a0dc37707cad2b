"""The stats document of a node: one JSON object, the same over gRPC and HTTP. Its schema is the types below.

Counters rise from zero at the start; the rest is how things stand. Sizes are bytes.
"""

from itertools import accumulate
from typing import TYPE_CHECKING, TypedDict

from kvservice.accounting import (
    BROKEN_OFF,
    ERROR_PLACES,
    FROM_REMOTE_PLACES,
    FROM_SSD_PLACES,
    MATCH_PLACES,
    MISS_PLACES,
    LedgerSum,
    count_at,
)
from kvservice.model.plan import Match
from kvservice.stats.accounting_document import (
    AccountingDocument,
    NamespaceDocument,
    TenantDocument,
    accounting_document,
    namespaces_document,
    node_ledger,
    tenants_document,
)
from kvservice.stats.counters import AGE_EDGES_S, EvictionCounters
from kvservice.stats.curves_document import CurvesStateDocument, curves_document
from kvservice.stats.sharing_document import (
    NetworkDocument,
    PushesDocument,
    RemoteDocument,
    pushes_document,
    remote_document,
)
from kvservice.stats.ssd_document import (
    DemotionsDocument,
    IntegrityDocument,
    LoadsDocument,
    RecoveryDocument,
    SsdDocument,
    demotions_document,
    integrity_document,
    loads_document,
    recovery_document,
    ssd_document,
)

if TYPE_CHECKING:
    from kvservice.node import Node

_EDGES = (*(f"{edge:g}" for edge in AGE_EDGES_S), "+Inf")


class HostDocument(TypedDict):
    """The host tier. ``used_bytes`` includes rounding and what is being written.

    ``record_bytes``: records only, of hidden caches and in the staging area too; ``mirror_bytes``: of these the
    mirrors'. ``unpublished_bytes``: reserved, verified or being folded. ``held_bytes``: leased or being read.
    """

    capacity_bytes: int
    used_bytes: int
    record_bytes: int
    mirror_bytes: int
    caches: int
    unpublished_bytes: int
    held_bytes: int


class KindDocument(TypedDict):
    """Caches of one kind. ``hidden``: deleted or replaced, but still leased or standing under mirrors."""

    count: int
    record_bytes: int


class CachesDocument(TypedDict):
    """What is held. ``dense_bytes``: what the published caches stand for; ``ratio``: that over their record bytes.

    ``namespaces``: those with a cache, a reservation or an open session.
    """

    master: KindDocument
    mirror: KindDocument
    hidden: KindDocument
    dense_bytes: int
    ratio: float
    families: int
    groups: int
    namespaces: int


class LookupsDocument(TypedDict):
    """Counters of segments, by how what was found matches; ``accounting`` has them by where it was found.

    asked = exact + rounded + refreshed + shifted + the sum of ``missed`` + broken_off: lookups that ended before they
    came to it. ``rounded``: of the context asked for, in a namespace that rounds what it stores.
    ``from_ssd``: found, and some of it was read from SSD; ``from_remote``: some came from another place.
    """

    calls: int
    asked: int
    exact: int
    rounded: int
    refreshed: int
    shifted: int
    from_ssd: int
    from_remote: int
    missed: dict[str, int]
    broken_off: int


class WritesDocument(TypedDict):
    """Counters of reservations and commits; refused by error code."""

    reserved: int
    existed: int
    reserves_refused: dict[str, int]
    published: int
    published_bytes: int
    commits_refused: dict[str, int]
    aborted: int
    deleted: int


class HistogramDocument(TypedDict):
    """``buckets``: how many were at most so large, by the upper edge, rising to +Inf; ``sum`` of all values."""

    buckets: dict[str, int]
    sum: float


class EvictionsDocument(TypedDict):
    """Counters of one tier: groups, the caches in them, their bytes; ``lost``: caches that were in no other tier.

    ``groups_for``: by what room was made for. ``age_s``: seconds from the last use, or from storing, to the eviction.
    """

    groups: int
    caches: int
    record_bytes: int
    lost: int
    groups_for: dict[str, int]
    age_s: HistogramDocument


class FoldsDocument(TypedDict):
    """Counters of folding, and how many dense caches wait for it."""

    folded: int
    kept: int
    refused: int
    dropped: int
    rebased: int
    saved_bytes: int
    elections: int
    queued: int


class HandlesDocument(TypedDict):
    """What clients hold now, and how much was given out.

    ``leased_caches``: holds of all leases. ``stray_bytes``: reserved by sessions that were lost, whose processes may
    still write there.
    """

    sessions: int
    sessions_opened: int
    leases: int
    leases_granted: int
    leases_expired: int
    leased_caches: int
    reservations: int
    stray_bytes: int


class RequestLogDocument(TypedDict):
    """The request log: how many segments it holds at most, 0 if it is off, and how many were noted so far."""

    capacity: int
    noted: int


class BuildDocument(TypedDict):
    """Which build runs, in which boot; as texts, since a boot's number is too large for a double."""

    version: str
    boot_epoch: str


class NodeDocument(TypedDict):
    """All of it."""

    build: BuildDocument
    version: str
    boot_epoch: int
    uptime_s: float
    host: HostDocument
    ssd: SsdDocument
    caches: CachesDocument
    lookups: LookupsDocument
    accounting: AccountingDocument
    by_tenant: dict[str, TenantDocument]
    by_namespace: dict[str, NamespaceDocument]
    writes: WritesDocument
    evictions: dict[str, EvictionsDocument]
    loads: LoadsDocument
    demotions: DemotionsDocument
    remote: RemoteDocument
    pushes: PushesDocument
    network: NetworkDocument
    folds: FoldsDocument
    handles: HandlesDocument
    integrity: IntegrityDocument
    recovery: RecoveryDocument
    request_log: RequestLogDocument
    curves: CurvesStateDocument


def node_document(node: "Node", version: str, uptime_s: float) -> NodeDocument:
    """How ``node`` stands."""
    ledger = node_ledger(node)
    return {
        "build": {"version": version, "boot_epoch": str(node.boot_epoch)},
        "version": version,
        "boot_epoch": node.boot_epoch,
        "uptime_s": round(uptime_s, 3),
        "host": _host(node),
        "ssd": ssd_document(node),
        "caches": _caches(node),
        "lookups": _lookups(node, ledger),
        "accounting": accounting_document(node, ledger),
        "by_tenant": tenants_document(node),
        "by_namespace": namespaces_document(node),
        "writes": _writes(node),
        "evictions": {
            "host": _evictions(node.counters.host_evictions),
            "ssd": _evictions(node.counters.ssd_evictions),
        },
        "loads": loads_document(node),
        "demotions": demotions_document(node),
        "remote": remote_document(node),
        "pushes": pushes_document(node),
        "network": node.describe_network(),
        "folds": _folds(node),
        "handles": _handles(node),
        "integrity": integrity_document(node),
        "recovery": recovery_document(node),
        "request_log": _request_log(node),
        "curves": curves_document(node),
    }


def _host(node: "Node") -> HostDocument:
    totals = node.catalog.totals
    return {
        "capacity_bytes": node.tier.capacity_bytes,
        "used_bytes": node.tier.used_bytes,
        "record_bytes": totals.host_bytes,
        "mirror_bytes": totals.host_mirror_bytes,
        "caches": totals.host_caches,
        "unpublished_bytes": node.allocation.unpublished_bytes,
        "held_bytes": totals.held_bytes,
    }


def _caches(node: "Node") -> CachesDocument:
    totals = node.catalog.totals
    stored = totals.master_bytes + totals.mirror_bytes
    return {
        "master": {"count": totals.masters, "record_bytes": totals.master_bytes},
        "mirror": {"count": totals.mirrors, "record_bytes": totals.mirror_bytes},
        "hidden": {"count": totals.hidden, "record_bytes": totals.hidden_bytes},
        "dense_bytes": totals.dense_bytes,
        "ratio": round(totals.dense_bytes / stored, 4) if stored else 1.0,
        "families": totals.families,
        "groups": totals.groups,
        "namespaces": len(node.catalog.spaces),
    }


def _lookups(node: "Node", ledger: LedgerSum) -> LookupsDocument:
    counts = ledger.segments
    return {
        "calls": node.counters.lookups.calls,
        "asked": node.counters.lookups.asked,
        "exact": ledger.exact_segments,
        "rounded": ledger.rounded_segments,
        "refreshed": count_at(counts, MATCH_PLACES[Match.REFRESHED]),
        "shifted": count_at(counts, MATCH_PLACES[Match.SHIFTED]),
        "from_ssd": count_at(counts, FROM_SSD_PLACES),
        "from_remote": count_at(counts, FROM_REMOTE_PLACES),
        "missed": {reason.name.lower(): counts[place] for reason, place in MISS_PLACES.items()},
        "broken_off": counts[ERROR_PLACES[BROKEN_OFF]],
    }


def _writes(node: "Node") -> WritesDocument:
    counters = node.counters
    return {
        "reserved": counters.reserved,
        "existed": counters.existed,
        "reserves_refused": dict(counters.reserves_refused),
        "published": counters.published,
        "published_bytes": counters.published_bytes,
        "commits_refused": dict(counters.commits_refused),
        "aborted": counters.aborted,
        "deleted": counters.deleted,
    }


def _evictions(counters: EvictionCounters) -> EvictionsDocument:
    return {
        "groups": counters.groups,
        "caches": counters.caches,
        "record_bytes": counters.record_bytes,
        "lost": counters.lost,
        "groups_for": dict(counters.groups_for),
        "age_s": {
            "buckets": dict(zip(_EDGES, accumulate(counters.ages), strict=True)),
            "sum": round(counters.age_s, 3),
        },
    }


def _folds(node: "Node") -> FoldsDocument:
    folds = node.counters.folds
    return {
        "folded": folds.folded,
        "kept": folds.kept,
        "refused": folds.refused,
        "dropped": folds.dropped,
        "rebased": node.counters.rebased,
        "saved_bytes": folds.saved_bytes,
        "elections": node.counters.elections,
        "queued": len(node.families.queue),
    }


def _handles(node: "Node") -> HandlesDocument:
    counters = node.counters
    return {
        "sessions": len(node.sessions.open),
        "sessions_opened": counters.sessions_opened,
        "leases": len(node.leases.live),
        "leases_granted": counters.leases_granted,
        "leases_expired": counters.leases_expired,
        "leased_caches": sum(len(grant.caches) for grant in node.leases.live.values()),
        "reservations": len(node.store.open),
        "stray_bytes": sum(extent.length for extents in node.store.strays.values() for extent in extents),
    }


def _request_log(node: "Node") -> RequestLogDocument:
    log = node.request_log
    return {"capacity": 0, "noted": 0} if log is None else {"capacity": log.rows_max, "noted": log.count}
