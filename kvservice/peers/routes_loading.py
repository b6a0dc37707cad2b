"""Load or compute: of what a lookup found elsewhere, which part is loaded sooner than it is computed. Pure.

    load_s(run)    = latency + bytes / bandwidth        neighbouring parts that come the same way are one run
    compute_s      = tokens * seconds of prefill a token of the namespace

Exact caches are a chain: one is of use only with all before it. So a prefix of it is loaded and the rest computed, and
the prefix is the one with the least sum. Approximations stand for themselves: every run is loaded that loads sooner.
Runs of different peers are added up, as if they shared one link: the one into this host.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from typing import NamedTuple

from kvservice.peers.routes_estimate import Speed


class WhyLoad(StrEnum):
    """Why so much is loaded."""

    NOTHING = "nothing"
    """Nothing was found."""
    UNKNOWN_PREFILL = "unknown_prefill"
    """Nobody has said yet how fast prefill is: what was found is loaded."""
    ALL_SOONER = "all_sooner"
    """Loading all of it is soonest."""
    PART_SOONER = "part_sooner"
    """Loading some and computing the rest is soonest."""
    COMPUTE_SOONER = "compute_sooner"
    """Computing all of it is soonest: the link is too slow."""


@dataclass(frozen=True, slots=True)
class Part:
    """One found segment. ``way``: names peer and medium; the same way right after is the same run. ``speed``: of it.

    What is here already has no bytes to move: ``bytes`` 0 and any way, its latency is not counted.
    """

    tokens: int
    bytes: int
    way: str
    speed: Speed


class Loading(NamedTuple):
    """Which parts to load, in order, and what was predicted: for that, for loading all, and for computing all."""

    is_loaded: tuple[bool, ...]
    seconds: float
    all_loaded_s: float
    all_computed_s: float
    why: WhyLoad

    @property
    def loaded(self) -> int:
        """How many parts are loaded."""
        return sum(self.is_loaded)

    def __str__(self) -> str:
        return (
            f"{self.loaded} of {len(self.is_loaded)} loaded ({self.why}): {1e3 * self.seconds:.2f} ms; all loaded "
            f"{1e3 * self.all_loaded_s:.2f} ms, all computed {1e3 * self.all_computed_s:.2f} ms"
        )


def load_chain(parts: Sequence[Part], token_s: float) -> Loading:
    """How far to load a chain of exact caches. ``token_s``: seconds of prefill a token, 0 if nobody has said."""
    loads, computes = _load_seconds(parts), [part.tokens * token_s for part in parts]
    all_loaded_s, all_computed_s = sum(loads), sum(computes)
    if not parts or token_s <= 0:
        return _all(parts, all_loaded_s, all_computed_s)
    best, best_s, seconds = 0, all_computed_s, all_computed_s
    for index, (load_s, compute_s) in enumerate(zip(loads, computes, strict=True)):
        seconds += load_s - compute_s
        if seconds <= best_s:  # as soon loaded as computed: loaded, the engine has other work
            best, best_s = index + 1, seconds
    is_loaded = tuple(index < best for index in range(len(parts)))
    return Loading(is_loaded, best_s, all_loaded_s, all_computed_s, _why(is_loaded))


def load_each(parts: Sequence[Part], token_s: float) -> Loading:
    """Which runs of approximations to load, each for itself. ``token_s``: as in ``load_chain``."""
    computes = [part.tokens * token_s for part in parts]
    all_loaded_s, all_computed_s = sum(_load_seconds(parts)), sum(computes)
    if not parts or token_s <= 0:
        return _all(parts, all_loaded_s, all_computed_s)
    is_loaded: list[bool] = []
    total_s = 0.0
    for _, run in groupby(range(len(parts)), key=lambda index: (parts[index].way, parts[index].bytes > 0)):
        indexes = list(run)
        load_s = sum(_load_seconds([parts[one] for one in indexes]))
        compute_s = sum(computes[one] for one in indexes)
        is_loaded += [load_s <= compute_s] * len(indexes)
        total_s += min(load_s, compute_s)
    return Loading(tuple(is_loaded), total_s, all_loaded_s, all_computed_s, _why(is_loaded))


def _load_seconds(parts: Sequence[Part]) -> list[float]:
    """Of every part; a run's first one bears its latency."""
    found, way = [], None
    for part in parts:
        if part.bytes == 0:
            found.append(0.0)
            continue
        latency_s = 0.0 if part.way == way else part.speed.latency_s
        found.append(latency_s + part.bytes / part.speed.bytes_per_s)
        way = part.way
    return found


def _all(parts: Sequence[Part], all_loaded_s: float, all_computed_s: float) -> Loading:
    why = WhyLoad.UNKNOWN_PREFILL if parts else WhyLoad.NOTHING
    return Loading((True,) * len(parts), all_loaded_s, all_loaded_s, all_computed_s, why)


def _why(is_loaded: Sequence[bool]) -> WhyLoad:
    if all(is_loaded):
        return WhyLoad.ALL_SOONER
    return WhyLoad.PART_SOONER if any(is_loaded) else WhyLoad.COMPUTE_SOONER
