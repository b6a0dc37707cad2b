"""The parts of the stats document that tell of the SSD tier, of integrity and of the last start."""

from typing import TYPE_CHECKING, TypedDict

from kvservice.lookup import FROM_SSD
from kvservice.storage.admission import NotAdmitted
from kvservice.storage.recovery_plan import Drop

if TYPE_CHECKING:
    from kvservice.node import Node


class SsdDocument(TypedDict):
    """The SSD tier; all zero without one. ``used_bytes`` includes footers and rounding.

    ``mirror_bytes``: of ``record_bytes`` the mirrors'. ``physical_bytes``: what the slab takes on its file system.
    ``superseded``: old forms of folded caches that wait for the new ones. ``queued``: caches that wait to be written.
    ``quarantined_bytes``: places that are not used again.
    """

    is_open: bool
    capacity_bytes: int
    used_bytes: int
    physical_bytes: int
    record_bytes: int
    mirror_bytes: int
    caches: int
    superseded: int
    queued: int
    quarantined_bytes: int
    is_below_floor: bool
    not_admitted: dict[str, int]


class LoadsDocument(TypedDict):
    """Counters of records read from SSD for lookups; ``running`` is how many are on their way now."""

    begun: int
    staged: int
    done: int
    failed: int
    record_bytes: int
    seconds: float
    running: int


class DemotionsDocument(TypedDict):
    """Counters of records written to SSD and erased from it."""

    written: int
    record_bytes: int
    seconds: float
    dropped: int
    failed: int
    erased: int


class IntegrityDocument(TypedDict):
    """Counters: copies whose bytes were wrong, by tier; what the scrubber looked at."""

    corrupt: dict[str, int]
    scrubbed_caches: int
    scrubbed_bytes: int
    scrub_passes: int


class RecoveryDocument(TypedDict):
    """How the last start found the SSD tier: none, new, clean, checked or rebuilt; dropped records by reason."""

    kind: str
    records: int
    record_bytes: int
    seconds: float
    dropped: dict[str, int]


def ssd_document(node: "Node") -> SsdDocument:
    """How the SSD tier stands."""
    ssd, totals = node.ssd, node.catalog.totals
    refused = dict.fromkeys(NotAdmitted, 0) if ssd is None else ssd.admission.refused
    return {
        "is_open": ssd is not None,
        "capacity_bytes": 0 if ssd is None else ssd.slab.capacity_bytes,
        "used_bytes": 0 if ssd is None else ssd.slab.used_bytes,
        "physical_bytes": 0 if ssd is None else ssd.slab.physical_bytes(),
        "record_bytes": totals.ssd_bytes,
        "mirror_bytes": totals.ssd_mirror_bytes,
        "caches": totals.ssd_caches,
        "superseded": len(node.catalog.superseded),
        "queued": 0 if ssd is None else len(ssd.queue),
        "quarantined_bytes": node.counters.quarantined_bytes,
        "is_below_floor": ssd is not None and ssd.admission.is_below_floor,
        "not_admitted": {reason.name.lower(): count for reason, count in refused.items()},
    }


def loads_document(node: "Node") -> LoadsDocument:
    """What was read from SSD."""
    loads = node.counters.loads
    return {
        "begun": loads.begun,
        "staged": loads.staged,
        "done": loads.done,
        "failed": loads.failed,
        "record_bytes": loads.record_bytes,
        "seconds": round(loads.seconds, 6),
        "running": sum(load.source == FROM_SSD for load in node.catalog.arriving.values()),
    }


def demotions_document(node: "Node") -> DemotionsDocument:
    """What was written to SSD."""
    demotions = node.counters.demotions
    return {
        "written": demotions.written,
        "record_bytes": demotions.record_bytes,
        "seconds": round(demotions.seconds, 6),
        "dropped": demotions.dropped,
        "failed": demotions.failed,
        "erased": demotions.erased,
    }


def integrity_document(node: "Node") -> IntegrityDocument:
    """What was found to be wrong, and how much was looked at."""
    counters = node.counters
    return {
        "corrupt": dict(counters.corrupt),
        "scrubbed_caches": counters.scrubbed_caches,
        "scrubbed_bytes": counters.scrubbed_bytes,
        "scrub_passes": counters.scrub_passes,
    }


def recovery_document(node: "Node") -> RecoveryDocument:
    """How the last start went."""
    if node.ssd is None:
        dropped = {reason.value: 0 for reason in Drop}
        return {"kind": "none", "records": 0, "record_bytes": 0, "seconds": 0.0, "dropped": dropped}
    report = node.ssd.opened.report
    return {
        "kind": report.kind.value,
        "records": report.records,
        "record_bytes": report.record_bytes,
        "seconds": round(report.seconds, 6),
        "dropped": {reason.value: report.dropped.get(reason, 0) for reason in Drop},
    }
