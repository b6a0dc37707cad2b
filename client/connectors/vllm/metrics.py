"""What the connector counts, on either side, as one flat mapping of names to numbers. Imports no engine.

Counters are differences since the last ``take``; gauges are the state now. All of them are there from the start, at 0.
"""

import threading
from collections.abc import Collection, Mapping

COUNTERS: dict[str, str] = {
    "tokens_asked": "Tokens of requests that the engine's own prefix cache did not have.",
    "tokens_hit_host": "Tokens promised to the engine that lay in the service's memory.",
    "tokens_hit_ssd": "Tokens promised to the engine that lay on the service's SSD.",
    "tokens_loaded": "Tokens whose KV was loaded, in this rank.",
    "tokens_recomputed": "Tokens promised and then computed after all, since their load failed.",
    "bytes_loaded": "Bytes of KV written to the engine's blocks.",
    "load_seconds": "Time that loads took, added up.",
    "loads": "Loads of a request that brought at least one block.",
    "loads_failed": "Loads of a request that failed, in part or in full.",
    "chunks_corrupt": "Chunks whose bytes had other checksums than the service said. Their tokens were computed.",
    "lookups": "Lookups answered.",
    "lookups_failed": "Lookups that failed, or were not made while the breaker was open.",
    "lookups_late": "Lookups that had no answer when the deadline came; the request was computed.",
    "lookup_seconds": "Time that answered lookups took, added up.",
    "chunks_saved": "Chunks stored by this rank.",
    "chunks_existed": "Chunks that the service had already when this rank came to store them.",
    "bytes_saved": "Bytes of records stored by this rank.",
    "save_seconds": "Time that storing took in the background, added up.",
    "gather_seconds": "Time that copying rows to be stored took from the engine's steps, added up.",
    "saves_no_room": "Chunks not stored since too much waited to be stored already (saves_bytes_max).",
    "saves_refused": "Chunks that the service would not take.",
    "saves_dropped": "Chunks not stored since the service was away, or a load in the same step had failed.",
    "round_params_refused": "Requests whose words about their round were wrong; served as the log says.",
    "reuse_refused": "Requests that asked for reuse at other positions and got exact reuse only; the log says why.",
    "members_reusing": "Prompts that reused segments from other contexts.",
    "members_leading": "Prompts that computed their round's shared segments for all others.",
    "members_computing": "Prompts that asked for reuse and were computed, since what was found did not fit.",
    "passes": "Collective passes: restore and refresh of all prompts that were ready together.",
    "passes_failed": "Passes that failed; their prompts were computed.",
    "pass_seconds": "Time that passes took from the engine's thread, added up.",
    "rows_restored": "Rows that passes restored and left as they were.",
    "rows_refreshed": "Restored rows that passes computed again.",
    "rows_computed": "Rows that passes computed since nothing was stored for them.",
    "mirrors_saved": "Segments stored as what differs from their master.",
    "mirror_bytes_saved": "Bytes of those records.",
    "mirrors_whole": "Segments to be stored so whose master went meanwhile; they were stored whole.",
    "mirror_bytes_dense": "Bytes that those segments would have taken whole.",
    "hook_errors": "Exceptions that a hook kept from the engine. Every one is a defect: see the log.",
}
GAUGES: dict[str, str] = {
    "breaker_scheduler": "The breaker of the lookups: 0 closed, 1 half open, 2 open.",
    "breaker_worker": "The breaker of loads and saves: 0 closed, 1 half open, 2 open. The worst rank's.",
    "save_bytes_waiting": "Bytes of rows that wait to be stored, in the fullest rank.",
}

Figures = dict[str, float]


class Counts:
    """Figures of one side of the connector. Safe from any thread."""

    def __init__(self, counters: Collection[str] = COUNTERS, gauges: Collection[str] = GAUGES) -> None:
        self._names = frozenset(counters)
        self._gauge_names = frozenset(gauges)
        self._lock = threading.Lock()
        self._since: Figures = {}
        self._total: Figures = dict.fromkeys(counters, 0)
        self._gauges: Figures = {}
        self._told: Figures = {}

    def add(self, name: str, amount: float = 1) -> None:
        """Count."""
        assert name in self._names, name
        with self._lock:
            self._since[name] = self._since.get(name, 0) + amount
            self._total[name] += amount

    def set(self, name: str, value: float) -> None:
        """Say where a gauge stands."""
        assert name in self._gauge_names, name
        if self._gauges.get(name) != value:
            with self._lock:
                self._gauges[name] = value

    def total(self, name: str) -> float:
        """A counter since the start."""
        with self._lock:
            return self._total[name]

    def totals(self) -> Figures:
        """Every counter since the start, and every gauge."""
        with self._lock:
            return self._total | self._gauges

    def take(self) -> Figures | None:
        """What changed since the last call; None if nothing did. Costs no lock when there is nothing."""
        if not self._since and self._told == self._gauges:
            return None
        with self._lock:
            taken = self._since | self._gauges
            self._since, self._told = {}, dict(self._gauges)
        return taken


def merged(one: Mapping[str, float], other: Mapping[str, float]) -> Figures:
    """Figures of two ranks, sides or intervals as one: counters add up, of gauges the larger counts."""
    both = dict(one)
    for name, value in other.items():
        both[name] = max(both.get(name, 0), value) if name in GAUGES else both.get(name, 0) + value
    return both
