"""Builders of the curves' tests: caches without a node, traces, and the curve worked out slowly and exactly."""

from collections.abc import Iterable, Sequence
from hashlib import blake2b

import numpy as np

from kvservice.caches import Cache, Family, Space
from kvservice.curves.distances import Distances
from kvservice.curves.events import Event, Missing, Stored
from kvservice.curves.histogram import EDGES
from kvservice.curves.sample import Sample
from kvservice.model.cache import CacheMeta
from kvservice.model.geometry import attention_geometry
from kvservice.model.identity import Identity
from kvservice.model.rope import rope_from_parameters
from kvservice.model.segment import CacheKey, ContextId, SegmentId

TOKENS = 256
GEOMETRY = attention_geometry(layers=1, heads=1, head_size=16, dtype="bfloat16")
MIB = 1 << 20


def make_space(tenant: str = "test") -> Space:
    rope = rope_from_parameters({"rope_theta": 10000.0}, head_size=16, max_positions=4096)
    identity = Identity(tenant, "tiny", "r1", GEOMETRY, (rope,))
    return Space(identity.namespace(), identity)


def digest(kind: bytes, *numbers: int) -> bytes:
    return blake2b(repr(numbers).encode(), digest_size=32, person=kind).digest()


def segment_of(space: Space, number: int) -> SegmentId:
    return SegmentId(blake2b(number.to_bytes(8, "little"), digest_size=32, key=space.namespace[:32]).digest())


def make_cache(
    space: Space,
    number: int,
    record_bytes: int = MIB,
    *,
    context: int = 0,
    master: Cache | None = None,
    prefill_s: float = 0.0,
    tokens: int = TOKENS,
) -> Cache:
    """A cache of segment ``number``; of a mirror the family is its master's."""
    segment = segment_of(space, number)
    family = Family(space, segment, tokens) if master is None else master.family
    key = CacheKey(segment, ContextId(digest(b"context", context)))
    cache = Cache(family, CacheMeta(space.namespace, key, 0, tokens, GEOMETRY), record_bytes, 1, prefill_s)
    cache.master = master
    return cache


def make_missing(space: Space, number: int, *contexts: int, may_be_any: bool = False) -> Missing:
    marks = tuple(digest(b"context", context) for context in contexts)
    return Missing(space, segment_of(space, number), marks, TOKENS, may_be_any)


def make_sizes(count: int, seed: int = 0) -> list[int]:
    """Bytes of records, a quarter to four times a MiB."""
    return [int(MIB * 2**power) for power in np.random.default_rng(seed).uniform(-2, 2, count)]


def zipf(segments: int, references: int, exponent: float, seed: int = 0) -> list[int]:
    """Which segment is asked for, by a power law; names are shuffled."""
    rng = np.random.default_rng(seed)
    weights = 1 / np.arange(1, segments + 1) ** exponent
    names = rng.permutation(segments)
    picked = rng.choice(segments, references, p=weights / weights.sum())
    return [int(name) for name in names[picked]]


def events_of(space: Space, trace: Iterable[int], sizes: Sequence[int]) -> list[Event]:
    """Lookups, and a store after the first one of each segment."""
    caches: dict[int, Cache] = {}
    events: list[Event] = []
    for number in trace:
        cache = caches.get(number)
        if cache is None:
            cache = caches[number] = make_cache(space, number, sizes[number])
            events += [make_missing(space, number, 0), Stored(cache)]
        else:
            events.append(cache)
    return events


def is_reference(event: Event) -> bool:
    return isinstance(event, Cache | Missing)


def play(events: Sequence[Event], records_max: int, capacity_bytes: float = 4096.0 * MIB) -> tuple[Sample, Distances]:
    """A sample that has seen ``events``."""
    distances = Distances(capacity_bytes)
    sample = Sample(records_max, distances)
    for event in events:
        if is_reference(event):
            sample.expect(1)
        sample.take(event)
    return sample, distances


class NaiveStack:
    """What was used, the latest first; distances by walking. ``hits``: (distance, weight); misses have none."""

    def __init__(self) -> None:
        self.keys: list[object] = []
        self.sizes: dict[object, int] = {}

    def distance(self, key: object) -> int | None:
        """Bytes of all down to ``key``, itself included; None if it was never used."""
        if key not in self.keys:
            return None
        return sum(self.sizes[one] for one in self.keys[: self.keys.index(key) + 1])

    def use(self, key: object, size: int) -> None:
        if key in self.keys:
            self.keys.remove(key)
        self.keys.insert(0, key)
        self.sizes[key] = size


def exact_hits(distances: Sequence[float | None]) -> np.ndarray:
    """The share that is found at each of EDGES; None: at no size."""
    known = np.sort(np.array([one for one in distances if one is not None], float))
    return np.searchsorted(known, np.array(EDGES), side="right") / max(len(distances), 1)


def exact_distances(trace: Sequence[int], sizes: Sequence[int]) -> list[float | None]:
    """Of every reference, by a tree of its own over all references: O(n log n) for the long traces."""
    last: dict[int, int] = {}
    tree = [0] * (len(trace) + 2)
    total, distances = 0, list[float | None]()
    for now, number in enumerate(trace, 1):
        before = last.get(number)
        if before is None:
            distances.append(None)
        else:
            distances.append(total - _sum(tree, before) + sizes[number])
            _add(tree, before, -sizes[number])
            total -= sizes[number]
        _add(tree, now, sizes[number])
        total += sizes[number]
        last[number] = now
    return distances


def _sum(tree: list[int], at: int) -> int:
    found = 0
    while at:
        found += tree[at]
        at &= at - 1
    return found


def _add(tree: list[int], at: int, change: int) -> None:
    while at < len(tree):
        tree[at] += change
        at += at & -at
