"""What a node knows that a plan needs, read from its curves, counters and spaces. Changes nothing."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, TypedDict

from kvservice.accounting import MATCH_PLACES, NAME_CHARS_MAX, count_at
from kvservice.caches import PREFILL_TOKEN_S, Space
from kvservice.curves.histogram import EDGES
from kvservice.curves.scopes import NODE, OTHER, namespace_scope, tenant_scope
from kvservice.model.errors import InvalidInputError
from kvservice.planning.document import PlanDocument
from kvservice.planning.model_config import ModelShape
from kvservice.planning.planner import Measured, RegisteredModel, make_plan
from kvservice.planning.request import CURVE_NAMES, PlanRequest, parse_request
from kvservice.stats.accounting_document import node_ledger
from kvservice.stats.answers import finite

if TYPE_CHECKING:
    from kvservice.node import Node

NAMES_MAX = 20


class SimulatedDocument(TypedDict):
    """What the order of eviction in force finds with one size."""

    bytes: int
    hit_ratio: float
    seconds_ratio: float
    is_reliable: bool


class CurvesDocument(TypedDict):
    """The answer of GET /curves. ``bytes``: sizes; the ratios are what each finds, by reuse distance, of all lookups
    and of their prefill seconds. ``scopes``: whose curves there are. ``overflows``: times that events were lost."""

    scope: str
    scopes: list[str]
    host_bytes: int
    ssd_bytes: int
    references: int
    window_s: float
    rate: float
    segments_watched: int
    overflows: int
    memory_bytes_max: int
    bytes: list[int]
    hit_ratio: list[float]
    seconds_ratio: list[float]
    error: list[float]
    simulated: list[SimulatedDocument]


def plan_of(node: "Node", query: Mapping[str, str]) -> PlanDocument:
    """The answer to a query. Raises InvalidInputError."""
    request = parse_request(query)
    plan: PlanDocument = finite(make_plan(measure(node, request), request))
    return plan


def curves_of(node: "Node", query: Mapping[str, str]) -> CurvesDocument:
    """One scope's curve, of a query with ``tenant`` or ``namespace`` or neither. Raises InvalidInputError."""
    request = parse_request(query, CURVE_NAMES)
    measured, name = measure(node, request), scope_of(node, request)
    found, curves = measured.curve, node.curves
    document: CurvesDocument = finite(
        {
            "scope": name,
            "scopes": list(curves.names),
            "host_bytes": measured.host_bytes,
            "ssd_bytes": measured.ssd_bytes,
            "references": 0 if found is None else found.references,
            "window_s": 0.0 if found is None else round(found.window_s, 3),
            "rate": 1.0 if found is None else found.rate,
            "segments_watched": 0 if found is None else found.segments_watched,
            "overflows": curves.overflows,
            "memory_bytes_max": curves.memory_bytes_max,
            "bytes": [] if found is None else [int(edge) for edge in EDGES],
            "hit_ratio": [] if found is None else [round(one, 5) for one in found.curve.hits],
            "seconds_ratio": [] if found is None else [round(one, 5) for one in found.curve.seconds],
            "error": [] if found is None else [round(found.curve.error(one), 5) for one in found.curve.hits],
            "simulated": [
                {
                    "bytes": point.capacity_bytes,
                    "hit_ratio": round(point.hits, 5),
                    "seconds_ratio": round(point.seconds, 5),
                    "is_reliable": point.is_reliable,
                }
                for point in measured.points
            ],
        }
    )
    return document


def measure(node: "Node", request: PlanRequest) -> Measured:
    """The numbers of the node, or of one tenant or namespace where there are such."""
    name, spaces = scope_of(node, request), _spaces(node, request)
    token_s, token_bytes = _means(spaces)
    measured = Measured(
        host_bytes=node.tier.capacity_bytes,
        ssd_bytes=0 if node.ssd is None else node.ssd.slab.capacity_bytes,
        half_life_s=node.curves.limits.half_life_s,
        curve=node.curves.read(name),
        points=(),
        asked=0,
        found=0,
        token_s=token_s,
        is_token_s_measured=any(space.token_s != PREFILL_TOKEN_S for space in spaces),
        token_bytes=token_bytes,
        ssd_load_bytes_per_s=0.0,
        written_bytes_per_s=None,
        published_bytes_per_s=0.0,
        stored_bytes=0,
        dense_bytes=0,
        wanted=0,
        written=0,
        model=_model(spaces),
        scope=name,
        is_split=node.curves.is_split(name),
        is_kept=node.curves.is_on,
    )
    return _with_the_whole_nodes(measured, node) if name == NODE else measured


def _with_the_whole_nodes(measured: Measured, node: "Node") -> Measured:
    """With what is counted of the node only."""
    counters, totals, answered = node.counters, node.catalog.totals, node_ledger(node).segments
    written, published, _, _ = node.recent.rates()
    _, _, loaded, load_s = node.recent.sums()
    return replace(
        measured,
        points=node.curves.simulated(),
        asked=sum(answered),
        found=sum(count_at(answered, places) for places in MATCH_PLACES.values()),
        ssd_load_bytes_per_s=loaded / load_s if load_s else 0.0,
        written_bytes_per_s=None if node.ssd is None else written,
        published_bytes_per_s=published,
        stored_bytes=totals.master_bytes + totals.mirror_bytes,
        dense_bytes=totals.dense_bytes,
        wanted=counters.published + counters.existed,
        written=counters.published,
    )


def scope_of(node: "Node", request: PlanRequest) -> str:
    """Whose curve is asked for. Raises InvalidInputError if there is none."""
    if not request.tenant and not request.namespace:
        return NODE
    try:
        name = tenant_scope(request.tenant) if request.tenant else namespace_scope(bytes.fromhex(request.namespace))
    except ValueError as error:
        raise InvalidInputError(f"namespace {request.namespace!r}: write its digest, 64 hexadecimal digits") from error
    names = node.curves.names
    if name in names:
        return name
    known = (
        ", ".join(one for one in names if one not in (NODE, OTHER)) if len(names) <= NAMES_MAX else "too many to name"
    )
    where = "; it may be one of those that are counted together, as there are more than have a curve" * (OTHER in names)
    raise InvalidInputError(f"there is no curve of {name!r}: no lookups so far{where}. There are: {known or 'none'}")


def _spaces(node: "Node", request: PlanRequest) -> list[Space]:
    return [
        space
        for space in node.catalog.spaces.values()
        if request.tenant in ("", space.identity.tenant) and request.namespace in ("", space.namespace.hex())
    ]


def _means(spaces: list[Space]) -> tuple[float, float]:
    """Prefill seconds and dense bytes of a token, weighted by the segments held; 0 and 0 without any space."""
    weights = [len(space.families) + 1e-9 for space in spaces]
    total = sum(weights)
    if not total:
        return 0.0, 0.0
    token_s = sum(space.token_s * weight for space, weight in zip(spaces, weights, strict=True))
    token_bytes = sum(space.token_bytes * weight for space, weight in zip(spaces, weights, strict=True))
    return token_s / total, token_bytes / total


def _model(spaces: list[Space]) -> RegisteredModel | None:
    """Of the namespace that most sessions use; of these, the one with most segments."""
    if not spaces:
        return None
    space = max(spaces, key=lambda one: (not one.geometry.is_opaque, one.sessions, len(one.families)))
    geometry, identity = space.geometry, space.identity
    row_elements = sum(plane.row_elements for plane in geometry.planes)
    shape = None if geometry.is_opaque else ModelShape(geometry.layers, row_elements, geometry.dtype, 0, 0)
    speed = 1 / space.token_s if space.token_s not in (0.0, PREFILL_TOKEN_S) else 0.0
    name = f"model {identity.model[:NAME_CHARS_MAX]} of tenant {identity.tenant[:NAME_CHARS_MAX]}"
    return RegisteredModel(name, shape, speed)
