"""A plan from what was measured: a curve, the simulated points of the policy, and a node's counters. Pure.

Found in memory at a size: what the curve says. Found on SSD: what the larger of both tiers finds, less that, since an
SSD tier holds what memory holds too. Every ratio has the error of its sample; nothing says how traffic will change.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from kvservice.curves.histogram import EDGES
from kvservice.curves.scopes import NODE, ScopeCurve
from kvservice.curves.simulation import SimulatedPoint
from kvservice.model.errors import InvalidInputError
from kvservice.planning.advice import PUBLISHED, advise
from kvservice.planning.closed_forms import Speed, what_if
from kvservice.planning.document import (
    BreakEvenDocument,
    EnduranceDocument,
    PlanDocument,
    SizesDocument,
    StorageDocument,
    WindowDocument,
)
from kvservice.planning.model_config import ModelShape
from kvservice.planning.request import RATED_DWPD, PlanRequest, size_of
from kvservice.planning.rising import RisingRatio

REFERENCES_MIN = 1000
SEGMENTS_MIN = 30
WINDOW_MIN_S = 60.0
"""Less than this is no traffic to plan by."""
DAY_S, HOUR_S = 86400.0, 3600.0
WORKING_SET_SHARES = (0.9, 0.99, 1.0)
WHAT_A_MODEL_IS = "its layers, heads and head_size"
SAMPLE, SIMULATION = "sample", "sample and simulation"


@dataclass(frozen=True, slots=True)
class RegisteredModel:
    """The model of most sessions. ``shape``: None if its rows are opaque. ``tokens_per_s``: 0 if no writer said."""

    name: str
    shape: ModelShape | None
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Measured:
    """What a node knows. ``curve``: None if nobody looked anything up. ``points``: empty unless for the whole node.

    ``token_s``: prefill seconds a token; ``is_token_s_measured``: did a writer say? ``token_bytes``: dense, of the
    namespaces in use. ``ssd_load_bytes_per_s``: 0 if nothing was loaded. ``written_bytes_per_s``: to SSD,
    None without one; ``published_bytes_per_s``: of all caches, as they were stored, 0 if none were.
    ``stored_bytes`` and ``dense_bytes``: of what is held. ``wanted`` caches were asked to be stored, ``written`` were.

    ``scope``: whose. Of one that is not the node, all that is the whole node's is 0 or None. ``is_split``: was it alone
    for a while, so that its first lookups are in the node's curve only? ``is_kept``: are there curves at all?
    """

    host_bytes: int
    ssd_bytes: int
    half_life_s: float
    curve: ScopeCurve | None
    points: Sequence[SimulatedPoint]
    asked: int
    found: int
    token_s: float
    is_token_s_measured: bool
    token_bytes: float
    ssd_load_bytes_per_s: float
    written_bytes_per_s: float | None
    published_bytes_per_s: float
    stored_bytes: int
    dense_bytes: int
    wanted: int
    written: int
    model: RegisteredModel | None = None
    scope: str = NODE
    is_split: bool = False
    is_kept: bool = True


def make_plan(measured: Measured, request: PlanRequest) -> PlanDocument:
    """The answer. Raises InvalidInputError for sizes that are none."""
    host_bytes = size_of(request.host, measured.host_bytes, "host")
    ssd_bytes = size_of(request.ssd, measured.ssd_bytes, "ssd")
    if request.rated_dwpd and not ssd_bytes:
        raise InvalidInputError(
            f"dwpd = {request.rated_dwpd:g}: it is of an SSD, and there is none; say how large one is, such as ssd=1TiB"
        )
    curve, missing = measured.curve, _missing(measured)
    document: PlanDocument = {
        "is_measured": not missing,
        "missing": missing,
        "assumes": _assumes(measured),
        "window": None if curve is None else _window(curve, measured),
        "observed_hit_ratio": round(measured.found / measured.asked, 4) if measured.asked else None,
        "now": None,
        "planned": None,
        "storage": None,
        "endurance": None,
        "break_even": _break_even(measured),
        "what_if": what_if(request.model, request.round, request.speed, host_bytes) if request.model else None,
        "what_if_of": "the model that was asked about" if request.model else "",
        "advice": [],
    }
    if missing or curve is None:
        document["advice"] = [missing]
        if request.model is None:
            _add_registered(document, measured, request, host_bytes)
        return document
    expectation = Expectation(curve, measured.points)
    now = expectation.sizes(measured.host_bytes, measured.ssd_bytes)
    planned = expectation.sizes(host_bytes, ssd_bytes)
    document["now"], document["planned"] = now, planned
    document["storage"] = _storage(measured, curve)
    document["endurance"] = _endurance(measured, now, planned, request.rated_dwpd or RATED_DWPD)
    document["advice"] = advise(now, planned, expectation.sizes, document["endurance"], document["break_even"])
    if planned["ssd_bytes"] and document["endurance"] is None:
        document["advice"].append(_unknown_wear(measured))
    if document["assumes"]:
        document["advice"].append(document["assumes"])
    return document


def _add_registered(document: PlanDocument, measured: Measured, request: PlanRequest, host_bytes: int) -> None:
    """The closed forms of what an engine registered, as long as nothing was measured; or what they lack."""
    model = measured.model
    if model is None:
        document["advice"].append(f"no engine has registered a model yet: connect one, or say {WHAT_A_MODEL_IS}")
    elif model.shape is None:
        document["advice"].append(f"of {model.name} only the bytes of its rows are known: say {WHAT_A_MODEL_IS}")
    else:
        speed = Speed(prefill_tokens_per_s=model.tokens_per_s)
        document["what_if"] = what_if(model.shape, request.round, speed, host_bytes)
        document["what_if_of"] = f"{model.name}, as registered"


def _assumes(measured: Measured) -> str:
    if measured.scope == NODE:
        return ""
    return f"of {measured.scope} as if it had the node alone: what others take of memory and SSD is left out"


def _unknown_wear(measured: Measured) -> str:
    why = "nothing was stored so far" if measured.scope == NODE else "they are counted of the whole node: ask its plan"
    return f"writes to the SSD are not known: {why}"


def _missing(measured: Measured) -> str:
    """Why there is no plan yet; empty if there can be one."""
    curve = measured.curve
    if not measured.is_kept:
        return "no curves are kept: curve_records is 0, or it failed to keep them, as the log says"
    split = f" since another {measured.scope.partition(' ')[0]} appeared" if measured.is_split else ""
    if curve is None or not curve.references:
        return _nothing(measured, split)
    if curve.references < REFERENCES_MIN:
        return f"not enough data yet: {curve.references} segments looked up{split}, a plan needs {REFERENCES_MIN}"
    if curve.segments_watched < SEGMENTS_MIN:
        return f"not enough data yet: {curve.segments_watched} segments are watched, a plan needs {SEGMENTS_MIN}"
    if curve.window_s < WINDOW_MIN_S:
        return f"not enough data yet: the curve began {curve.window_s:.0f} s ago, a plan needs {WINDOW_MIN_S:.0f}"
    return ""


def _nothing(measured: Measured, split: str) -> str:
    """Why there is no curve."""
    if split:
        return f"too little was noted of {measured.scope}{split}; look again later, or at the node's plan"
    if measured.scope != NODE:
        return f"there were no lookups of {measured.scope} of late; look again later, or at the node's plan"
    when, why = ("of late", "the curve begins anew") if measured.asked else ("yet", "nobody looked anything up")
    return f"no traffic {when}: {why}. Ask a what-if (layers, heads, head_size, agents, ...) meanwhile"


class Expectation:
    """What sizes find.

    Reuse distances know every size, but for the oldest-first order; simulated points know the order in force, but a few
    sizes. What these differ by is added, interpolated between points by the logarithm of the size; and what then falls
    with the size, which no memory does, is evened out.
    """

    def __init__(self, curve: ScopeCurve, points: Sequence[SimulatedPoint]) -> None:
        self._curve = curve.curve
        self._points = [point for point in points if point.is_reliable and point.capacity_bytes > 0]
        self._seconds_per_s = curve.curve.references / max(curve.recent_s, 1e-9) * curve.curve.seconds_each
        sizes = sorted({*EDGES, *(float(point.capacity_bytes) for point in self._points)})
        self._hits = RisingRatio(sizes, [self._corrected_hits(size) for size in sizes])
        self._seconds = RisingRatio(sizes, [self._corrected_seconds(size) for size in sizes])

    def sizes(self, host_bytes: int, ssd_bytes: int) -> SizesDocument:
        """Of a memory and an SSD tier of these sizes."""
        total_bytes = max(host_bytes, ssd_bytes)
        host, total, saved = self.hit_ratio(host_bytes), self.hit_ratio(total_bytes), self.seconds_ratio(total_bytes)
        hour_s = self._seconds_per_s * HOUR_S
        return {
            "host_bytes": host_bytes,
            "ssd_bytes": ssd_bytes,
            "host_hit_ratio": round(host, 4),
            "ssd_hit_ratio": round(total - host, 4),
            "hit_ratio": round(total, 4),
            "error": round(self.error(total_bytes), 4),
            "error_covers": SIMULATION if self._points else SAMPLE,
            "policy": "simulated" if self._points else "lru",
            "prefill_saved_s_per_hour": saved * hour_s,
            "prefill_lost_s_per_hour": (1 - saved) * hour_s,
        }

    def hit_ratio(self, size_bytes: float) -> float:
        """Share of lookups that a tier of this size finds."""
        return self._hits.at(size_bytes)

    def seconds_ratio(self, size_bytes: float) -> float:
        """Share of prefill seconds that it saves."""
        return self._seconds.at(size_bytes)

    def error(self, size_bytes: float) -> float:
        """Two standard errors of the hit ratio: of the sample, and of the smaller one that the simulation has."""
        of_points = _between([(point.capacity_bytes, point.error) for point in self._points], size_bytes)
        return min(1.0, math.hypot(self._curve.error(self.hit_ratio(size_bytes)), of_points))

    def _corrected_hits(self, size_bytes: float) -> float:
        more = _between([(point.capacity_bytes, point.more_hits) for point in self._points], size_bytes)
        return min(max(self._curve.hit_ratio(size_bytes) + more, 0.0), self._curve.hit_ratio_max)

    def _corrected_seconds(self, size_bytes: float) -> float:
        more = _between([(point.capacity_bytes, point.more_seconds) for point in self._points], size_bytes)
        return min(max(self._curve.seconds_ratio(size_bytes) + more, 0.0), self._curve.seconds[-1])


def _between(points: Sequence[tuple[int, float]], size_bytes: float) -> float:
    """Linear in the logarithm of the size; beyond the ends what the end has."""
    if not points or size_bytes <= 0:
        return 0.0
    index = bisect_left([size for size, _ in points], size_bytes)
    if index == 0 or index == len(points):
        return points[min(index, len(points) - 1)][1]
    (low, at_low), (high, at_high) = points[index - 1], points[index]
    part = math.log(size_bytes / low) / math.log(high / low)
    return at_low + part * (at_high - at_low)


def _window(curve: ScopeCurve, measured: Measured) -> WindowDocument:
    return {
        "scope": curve.name,
        "seconds": round(curve.window_s, 3),
        "half_life_s": measured.half_life_s,
        "references": curve.references,
        "segments_watched": curve.segments_watched,
        "rate": round(curve.rate, 6),
    }


def _storage(measured: Measured, curve: ScopeCurve) -> StorageDocument:
    return {
        "bytes_per_token": curve.token_bytes or None,
        "dense_bytes_per_token": measured.token_bytes or None,
        "mirror_gain": round(measured.dense_bytes / measured.stored_bytes, 4) if measured.stored_bytes else None,
        "dedup_gain": round(measured.wanted / measured.written, 4) if measured.written else None,
        "working_set_bytes": {f"{share:.0%}": int(curve.curve.size_for(share)) for share in WORKING_SET_SHARES},
    }


def _endurance(
    measured: Measured, now: SizesDocument, planned: SizesDocument, rated_dwpd: float
) -> EnduranceDocument | None:
    """Writes follow misses: what is found is not written again. None without an SSD, or if nothing tells of writes."""
    rate, rests_on = measured.written_bytes_per_s, "written"
    if rate is None:
        rate, rests_on = measured.published_bytes_per_s or None, PUBLISHED
    if not planned["ssd_bytes"] or rate is None:
        return None
    missed, missed_then = 1 - now["hit_ratio"], 1 - planned["hit_ratio"]
    written = rate * DAY_S * (missed_then / missed if missed > 0 else 1.0)
    dwpd = written / planned["ssd_bytes"]
    return {
        "ssd_bytes": planned["ssd_bytes"],
        "written_bytes_per_day": written,
        "dwpd": dwpd,
        "rated_dwpd": rated_dwpd,
        "life_share": dwpd / rated_dwpd,
        "rests_on": rests_on,
    }


def _break_even(measured: Measured) -> BreakEvenDocument | None:
    if not measured.token_bytes or not measured.token_s:
        return None
    return {
        "bandwidth_bytes_per_s": measured.token_bytes / measured.token_s,
        "prefill_tokens_per_s": 1 / measured.token_s,
        "is_prefill_measured": measured.is_token_s_measured,
        "ssd_bytes_per_s": measured.ssd_load_bytes_per_s or None,
    }
