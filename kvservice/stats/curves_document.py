"""The part of the stats document that tells how the curves stand, and what other sizes of memory would find."""

from typing import TYPE_CHECKING, TypedDict

from kvservice.curves.bounds import HOST_SIZES
from kvservice.planning.planner import Expectation

if TYPE_CHECKING:
    from kvservice.node import Node


class CurvesStateDocument(TypedDict):
    """How the curves stand. ``watched``: records of all of them; ``waiting``: events not taken in yet; ``overflows``:
    times that events were lost, after which less is watched. ``references``: lookups in the node's curve.

    ``expected_hit_ratio``: what memory of so many times the present size would find, without an SSD; 0 before any
    lookup. A plan says more, and whether there is data enough.
    """

    is_kept: bool
    scopes: int
    watched: int
    waiting: int
    overflows: int
    memory_bytes_max: int
    references: int
    expected_hit_ratio: dict[str, float]


def curves_document(node: "Node") -> CurvesStateDocument:
    """As they stand; events that wait are not taken in for it."""
    curves = node.curves
    found, names = curves.read(wait_s=0.0), {f"{times:g}x": times for times in HOST_SIZES}
    expected = dict.fromkeys(names, 0.0)
    if found is not None and found.references:
        expectation, size = Expectation(found, curves.simulated(wait_s=0.0)), node.tier.capacity_bytes
        expected = {name: round(expectation.hit_ratio(size * times), 4) for name, times in names.items()}
    return {
        "is_kept": curves.is_on,
        "scopes": sum(1 for _ in curves),
        "watched": curves.records,
        "waiting": len(curves.events),
        "overflows": curves.overflows,
        "memory_bytes_max": curves.memory_bytes_max,
        "references": 0 if found is None else found.references,
        "expected_hit_ratio": expected,
    }
