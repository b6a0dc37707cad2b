"""The curves of a node: of all its lookups, of every tenant's, of every namespace's; so many at most, others together.

The request path compares and appends (``watch``, ``events``); ``work`` takes the events in later, a slice at a time.
Owned by the node's thread.
"""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from operator import attrgetter
from time import perf_counter

from kvservice.caches import Cache, Space
from kvservice.curves.distances import Distances
from kvservice.curves.events import Deleted, Event, Missing, Stored, space_of
from kvservice.curves.histogram import MissRatioCurve
from kvservice.curves.sample import Sample, Segment
from kvservice.curves.simulation import Group, PolicySimulation, SimulatedPoint
from kvservice.orders import LoadRates
from kvservice.storage.eviction import EvictionOrder

_LOG = logging.getLogger(__name__)

RECORD_MEMORY_BYTES = 720
"""What a watched record takes at most, with its segment and its places; a test measures it."""
SIMULATED_RECORD_MEMORY_BYTES = 512
"""What a record takes in one miniature."""
EVENT_MEMORY_BYTES = 1024
SCOPE_MEMORY_BYTES = 16384
"""A scope without records: two histograms and the tables' least sizes."""
WATCHES_MAX = 1024
"""Namespaces whose watch is kept; with more it is made again as needed."""
WATCH_MEMORY_BYTES = 512
READ_SLICE_S = 0.005
"""Who reads a curve waits this long at most for events that were not taken in yet."""
NODE, OTHER = "node", "other"
AGE_FACTOR = 0.5
SIMULATED_SHARE_MIN = 1 / 8
"""Of the segments that curves watch."""
HOST_SIZES = (0.5, 1, 2, 4, 8)
SSD_SIZES = (1, 2)
"""Sizes that are simulated, times what there is."""
EVENTS_A_LOOK = 8
"""Events between two looks at the clock."""


def tenant_scope(tenant: str) -> str:
    """The name of a tenant's curve."""
    return f"tenant {tenant}"


def namespace_scope(namespace: bytes) -> str:
    """The name of a namespace's curve."""
    return f"namespace {namespace.hex()}"


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
    simulated_records_max: int = 2048
    scopes_max: int = 32
    events_max: int = 8192
    slice_s: float = 0.0005
    pause_s: float = 0.0245
    idle_s: float = 0.25
    half_life_s: float = 6 * 3600.0


def curve_limits(node_records_max: int) -> CurveLimits:
    """Of a node whose own curve watches so many caches: the simulation, and every other scope, a quarter of them."""
    part = max(node_records_max // 4, 1)
    return CurveLimits(node_records_max, part, part)


@dataclass(slots=True, eq=False)
class Scope:
    """One curve. ``references``: lookups in it, watched or not; ``since_s``, ``last_s``: the first and the last."""

    name: str
    sample: Sample
    distances: Distances
    since_s: float
    last_s: float
    references: int = 0


@dataclass(slots=True, eq=False)
class Watch:
    """What the request path needs of a namespace. ``below``: segments below it are noted. ``asked``: lookups counted.

    ``known``: the watched segments by id; ``strangers``: of misses below, those of others,
    which are counted and no more. ``samples``: who takes in what was noted: those of ``scopes`` and the simulation's.
    ``rate``: the share of segments that ``below`` is.
    """

    below: bytes
    scopes: tuple[Scope, ...] = ()
    samples: tuple[Sample, ...] = ()
    asked: int = 0
    known: Mapping[bytes, Segment] = field(default_factory=dict)
    strangers: int = 0
    rate: float = 1.0

    def lower(self) -> None:
        """Note what one of the samples wants, and no more."""
        widest = max(self.samples, key=attrgetter("rate"))
        self.below, self.known, self.rate = widest.below, widest.segments, widest.rate


NOTHING = Watch(b"")
"""Of a node that keeps no curves, and of a namespace that is not known."""


@dataclass(frozen=True, slots=True)
class ScopeCurve:
    """A curve to read. ``window_s``: since its first lookup; of older ones half counts in every ``half_life_s``.

    ``stored_bytes``: of all that was used in the window; ``token_bytes``: stored bytes a token, 0 if that is unknown.
    """

    name: str
    curve: MissRatioCurve
    window_s: float
    references: int
    segments_watched: int
    rate: float
    stored_bytes: float
    token_bytes: float


class Curves:
    """All of it. ``host_bytes``: of the memory that there is. ``order`` makes an empty order of the kind in force.

    ``rates``: what the tiers give in bytes a second. ``granularity``: bytes that extents are rounded up to.
    """

    def __init__(
        self,
        limits: CurveLimits,
        clock: Callable[[], float],
        host_bytes: int,
        order: Callable[[], EvictionOrder[Group]],
        rates: LoadRates,
        granularity: int = 1,
    ) -> None:
        self.limits = limits
        self.events: deque[Event] = deque(maxlen=limits.events_max or 1)
        self.overflows = 0
        self._uncounted = 0
        self._clock = clock
        self._order = order
        self._rates = rates
        self._granularity = granularity
        self._host_bytes = host_bytes
        self._ssd_bytes = 0
        self._watches: dict[bytes, Watch] = {}
        self._scopes: dict[str, Scope] = {}
        self._tenants: list[str] = []  # the first two
        self._namespaces: list[str] = []
        self._aged_s = clock()
        self._simulation, self._simulated = self._new_simulation()

    def simulate_ssd(self, ssd_bytes: int) -> None:
        """There is an SSD tier of this size too. Before the first lookup."""
        self._ssd_bytes = ssd_bytes
        self._simulation, self._simulated = self._new_simulation()

    def turn_off(self) -> None:
        """Keep no curves from now on."""
        self.limits = replace(self.limits, node_records_max=0)
        self._scopes.clear()
        self._watches.clear()
        self.events.clear()

    async def run(self) -> None:
        """Take events in, a slice at a time, until cancelled."""
        while self.is_on:
            await asyncio.sleep(self.limits.pause_s if self.events else self.limits.idle_s)
            try:
                self.work(self.limits.slice_s)
            except Exception:  # noqa: BLE001  a task's top: no curve is worth a lookup
                _LOG.exception("miss-ratio curves could not be kept, and are not from now on. Please report this")
                self.turn_off()

    def _tiers(self) -> list[tuple[int, float]]:
        """Sizes to simulate, and what their tier gives in bytes a second."""
        host = [(int(self._host_bytes * times), self._rates.host) for times in HOST_SIZES]
        return host + [(int(self._ssd_bytes * times), self._rates.ssd) for times in SSD_SIZES if self._ssd_bytes]

    @property
    def capacity_bytes(self) -> int:
        """Of the largest tier there is."""
        return max(self._host_bytes, self._ssd_bytes)

    @property
    def is_on(self) -> bool:
        """Are curves kept at all?"""
        return self.limits.node_records_max > 0

    # The request path

    def watch(self, space: Space) -> Watch:
        """What of a namespace is to be noted. O(1), but for its first call."""
        return self._watches.get(space.namespace) or self._open(space)

    def note_asked(self, space: Space, segments: int) -> Watch:
        """A prompt of so many segments is looked up in ``space``; what is to be noted of them."""
        watch = self.watch(space)
        watch.asked += segments
        return watch

    def note_stored(self, cache: Cache) -> None:
        """A cache was published, or has a new form."""
        if cache.family.segment < self.watch(cache.family.space).below:
            self.events.append(Stored(cache))

    def note_deleted(self, cache: Cache) -> None:
        """A client deleted a cache."""
        if cache.family.segment < self.watch(cache.family.space).below:
            self.events.append(Deleted(cache))

    # Later

    def work(self, slice_s: float | None = None) -> bool:
        """Take in events for about ``slice_s``, or all of them; True if more wait."""
        if not self.is_on:
            return False
        self._age()
        self._count_asked()
        until_s = inf if slice_s is None else perf_counter() + slice_s
        while self.events and perf_counter() < until_s:
            for _ in range(min(EVENTS_A_LOOK, len(self.events))):
                self._take(self.events.popleft())
        for watch in self._watches.values():
            watch.lower()
        return bool(self.events)

    def _take(self, event: Event) -> None:
        is_reference = isinstance(event, Cache | Missing)
        for sample in self.watch(space_of(event)).samples:
            if sample.take(event) and is_reference and self._uncounted:
                sample.reader.expect(1.0)
        self._uncounted = max(0, self._uncounted - 1)

    def _count_asked(self) -> None:
        """How many references the samples should have seen, once the events noted so far are taken in.

        If some were lost, as many as they will have seen: nothing is known of the others.
        """
        now_s, is_full = self._clock(), len(self.events) == self.events.maxlen
        for watch in self._watches.values():
            asked, watch.asked = watch.asked, 0
            strangers, watch.strangers = watch.strangers, 0
            for sample in watch.samples if asked else ():
                missed = strangers * sample.rate / watch.rate
                sample.miss_strangers(missed)
                sample.reader.expect(missed if is_full else asked * sample.rate)
            for scope in watch.scopes if asked else ():
                scope.references += asked
                scope.last_s = now_s
        if is_full:
            self.overflows += 1
            self._uncounted = len(self.events)
            self._watch_less()

    def _watch_less(self) -> None:
        """The busiest namespace is watched half as closely: more is noted than is worked in.

        The simulation first, which takes ten times as long; but what remains of it must still say something.
        """
        busiest = self.watch(Counter(map(space_of, self.events)).most_common(1)[0][0])
        closest = max(scope.sample.rate for scope in busiest.scopes)
        if self._simulated.rate > closest * SIMULATED_SHARE_MIN:
            self._simulated.halve()
        else:
            for sample in busiest.samples:
                sample.halve()

    def _age(self) -> None:
        now_s, half_life_s = self._clock(), self.limits.half_life_s
        if now_s - self._aged_s < half_life_s:
            return
        self._count_asked()
        self._aged_s = now_s
        for name, scope in list(self._scopes.items()):
            scope.sample.age(AGE_FACTOR)
            if now_s - scope.last_s > half_life_s or scope.sample.is_sparse:
                self._close(name)  # its place is another's, or it begins anew and watches more
        self._simulated.age(AGE_FACTOR)
        if self._simulated.is_sparse:
            self._simulation, self._simulated = self._new_simulation()
            self._watches.clear()

    # Scopes

    def _open(self, space: Space) -> Watch:
        """The watch of a namespace that was not asked for before, or whose curve was closed."""
        if not self.is_on:
            return NOTHING
        if len(self._watches) >= WATCHES_MAX:
            self._count_asked()
            self._watches.clear()
        scopes = tuple(dict.fromkeys(self._scope(name) for name in self._names_of(space)))
        watch = Watch(b"", scopes, (*(scope.sample for scope in scopes), self._simulated))
        watch.lower()
        self._watches[space.namespace] = watch
        return watch

    def _names_of(self, space: Space) -> list[str]:
        """Its scopes. An only tenant's curve is the node's, and an only namespace's too: none is kept twice."""
        names, tenant, namespace = [NODE], tenant_scope(space.identity.tenant), namespace_scope(space.namespace)
        for name, seen in ((tenant, self._tenants), (namespace, self._namespaces)):
            if len(seen) < 2 and name not in seen:
                seen.append(name)
                self._count_asked()
                self._watches.clear()  # the first one is no longer alone
            if len(seen) > 1:
                names.append(name)
        return names

    def _scope(self, name: str) -> Scope:
        found = self._scopes.get(name)
        if found is None and name not in (NODE, OTHER):
            has_room = sum(one not in (NODE, OTHER) for one in self._scopes) < self.limits.scopes_max
            found = None if has_room else self._scope(OTHER)
        if found is None:
            distances, now_s = Distances(self.capacity_bytes), self._clock()
            most = self.limits.node_records_max if name == NODE else self.limits.scope_records_max
            found = self._scopes[name] = Scope(
                name, Sample(most, distances, self._granularity), distances, now_s, now_s
            )
        return found

    def _close(self, name: str) -> None:
        del self._scopes[name]
        self._watches.clear()  # also of those that were counted together for want of a place

    def _new_simulation(self) -> tuple[PolicySimulation, Sample]:
        simulation = PolicySimulation(self._tiers(), self._order, self.capacity_bytes)
        return simulation, Sample(max(self.limits.simulated_records_max, 1), simulation, self._granularity)

    # Reading

    @property
    def names(self) -> tuple[str, ...]:
        """Scopes that have a curve, and those whose curve begins with their next lookup."""
        return tuple(dict.fromkeys((*self._scopes, *self._tenants, *self._namespaces)))

    def is_split(self, name: str) -> bool:
        """Was it the only one for a while? What it looked up then is in the node's curve, and not in its own."""
        return any(len(seen) > 1 and seen[0] == name for seen in (self._tenants, self._namespaces))

    def read(self, name: str = NODE) -> ScopeCurve | None:
        """The curve of one scope; None if there is none. Takes in what waits first, a bounded number of events."""
        self.work(READ_SLICE_S)
        is_alone = self._tenants == [name] or self._namespaces == [name]
        scope = self._scopes.get(NODE if is_alone else name)
        if scope is None:
            return None
        sample = scope.sample
        tokens = size = 0
        for record in sample.watched():
            tokens += record.tokens
            size += record.record_bytes
        return ScopeCurve(
            name,
            scope.distances.curve(sample),
            self._clock() - scope.since_s,
            scope.references,
            len(sample.segments),
            sample.rate,
            scope.distances.bytes,
            size / tokens if tokens else 0.0,
        )

    def simulated(self) -> tuple[SimulatedPoint, ...]:
        """What the policy in force finds with the sizes that are simulated."""
        self.work(READ_SLICE_S)
        return self._simulation.points()

    @property
    def records(self) -> int:
        """Watched records of all scopes."""
        return sum(scope.sample.records for scope in self._scopes.values()) + self._simulated.records

    @property
    def memory_bytes_max(self) -> int:
        """What all of it takes at most, however many segments, tenants and namespaces there are."""
        limits = self.limits
        if not self.is_on:
            return 0
        scopes = limits.node_records_max + (limits.scopes_max + 1) * limits.scope_records_max
        simulated = (
            limits.simulated_records_max * SIMULATED_RECORD_MEMORY_BYTES * (len(HOST_SIZES) + len(SSD_SIZES) + 1)
        )
        fixed = (limits.scopes_max + 2) * SCOPE_MEMORY_BYTES + WATCHES_MAX * WATCH_MEMORY_BYTES
        return scopes * RECORD_MEMORY_BYTES + simulated + limits.events_max * EVENT_MEMORY_BYTES + fixed

    def __iter__(self) -> Iterator[Scope]:
        return iter(self._scopes.values())
