"""How much curves may take: watched records, scopes, events, time, and the memory that follows."""

from dataclasses import dataclass

RECORD_MEMORY_BYTES = 125
"""What a watched record takes at most, with its segment and its places: 8,192 are a MiB. A test measures it."""
SIMULATED_RECORD_MEMORY_BYTES = 180
"""What it takes in one miniature. The simulation of all sizes is one curve more, of a MiB."""
SIMULATED_PART = 12
"""Of the node's watched records a twelfth: each is in every miniature."""
EVENT_MEMORY_BYTES = 1024
SCOPE_MEMORY_BYTES = 16384
"""A scope without records: two histograms and the tables' least sizes."""
WATCHES_MAX = 1024
"""Namespaces whose watch is kept; with more it is made again as needed."""
WATCH_MEMORY_BYTES = 512
HOST_SIZES = (0.5, 1, 2, 4, 8)
SSD_SIZES = (1, 2)
"""Sizes that are simulated, times what there is."""


@dataclass(frozen=True, slots=True)
class CurveLimits:
    """Bounds of the curves.

    ``node_records_max``, ``scope_records_max``, ``simulated_records_max``: watched records of the node's curve, of
    every other, and of the simulation. ``scopes_max``: curves of tenants and namespaces. ``events_max``: noted and not
    worked in. ``slice_s`` and ``pause_s``: how long they are worked in at a time, and how long other work has then;
    ``idle_s``: if none wait.
    ``half_life_s``: after it what was counted counts half, and what was not used in it is forgotten.
    """

    node_records_max: int = 8192
    scope_records_max: int = 2048
    simulated_records_max: int = 682
    scopes_max: int = 32
    events_max: int = 8192
    slice_s: float = 0.0005
    pause_s: float = 0.0245
    idle_s: float = 0.25
    half_life_s: float = 6 * 3600.0


def curve_limits(node_records_max: int) -> CurveLimits:
    """Of a node whose own curve watches so many caches; every other scope watches a quarter of them."""
    return CurveLimits(node_records_max, max(node_records_max // 4, 1), max(node_records_max // SIMULATED_PART, 1))


def simulation_memory_bytes(records_max: int) -> int:
    """What the simulation takes at most."""
    sizes = len(HOST_SIZES) + len(SSD_SIZES)
    return records_max * (RECORD_MEMORY_BYTES + sizes * SIMULATED_RECORD_MEMORY_BYTES) + SCOPE_MEMORY_BYTES


def memory_bytes_max(limits: CurveLimits) -> int:
    """What all curves together take at most."""
    records = limits.node_records_max + (limits.scopes_max + 1) * limits.scope_records_max
    fixed = (limits.scopes_max + 2) * SCOPE_MEMORY_BYTES + WATCHES_MAX * WATCH_MEMORY_BYTES
    simulated = simulation_memory_bytes(limits.simulated_records_max)
    return records * RECORD_MEMORY_BYTES + simulated + limits.events_max * EVENT_MEMORY_BYTES + fixed
