"""The curves of a node: of all its lookups, of every tenant's, of every namespace's; so many at most, others together.

The request path compares and appends (``watch``, ``events``); ``work`` takes the events in later, a slice at a time.
Owned by the node's thread.
"""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import inf
from time import perf_counter

from kvservice.caches import Cache, Space
from kvservice.curves.bounds import HOST_SIZES, SSD_SIZES, WATCHES_MAX, CurveLimits, memory_bytes_max
from kvservice.curves.distances import Distances
from kvservice.curves.events import Deleted, Event, Missing, Stored, space_of
from kvservice.curves.histogram import MissRatioCurve
from kvservice.curves.sample import Sample
from kvservice.curves.simulation import PolicySimulation, SimulatedPoint
from kvservice.curves.watching import NOTHING, Owed, Scope, Watch
from kvservice.orders import LoadRates
from kvservice.storage.eviction import EvictionOrder

__all__ = ["CurveLimits", "Curves", "ScopeCurve", "namespace_scope", "tenant_scope"]

_LOG = logging.getLogger(__name__)

READ_SLICE_S = 0.005
"""Who reads a curve waits this long at most for events that were not taken in yet."""
NODE, OTHER = "node", "other"
AGE_FACTOR = 0.5
SIMULATED_SHARE_MIN = 1 / 8
"""Of the segments that curves watch."""
FORGOTTEN_A_LOOK = 64
EVENTS_A_LOOK = 8
"""Records looked at, and events taken in, between two looks at the clock."""


def tenant_scope(tenant: str) -> str:
    """The name of a tenant's curve."""
    return f"tenant {tenant}"


def namespace_scope(namespace: bytes) -> str:
    """The name of a namespace's curve."""
    return f"namespace {namespace.hex()}"


@dataclass(frozen=True, slots=True)
class ScopeCurve:
    """A curve to read. ``window_s``: since its first lookup; of older ones half counts in every ``half_life_s``.
    ``recent_s``: the same seconds, weighted as the lookups in them are: what counts in the curve came in so many.

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
    recent_s: float


class Curves:
    """All of it. ``host_bytes``: of the memory that there is. ``order`` makes an empty order of the kind in force.

    ``rates``: what the tiers give in bytes a second. ``granularity``: bytes that extents are rounded up to.
    """

    def __init__(
        self,
        limits: CurveLimits,
        clock: Callable[[], float],
        host_bytes: int,
        order: Callable[[], EvictionOrder[int]],
        rates: LoadRates,
        granularity: int = 1,
    ) -> None:
        self.limits = limits
        self.events: deque[Event] = deque(maxlen=limits.events_max or 1)
        self.overflows = 0
        self._uncounted = self._waiting = 0
        self._owed: list[Owed] = []
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
        self._aged_s = self._counted_s = clock()
        self._aging: list[Scope | None] = []  # what was not used in a while is still to be forgotten; None: simulated
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
            await asyncio.sleep(self.limits.pause_s if self.events or self._aging else self.limits.idle_s)
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
        while self._aging and perf_counter() < until_s:
            self._forget()
        waiting = len(self.events)
        while self.events and perf_counter() < until_s:
            for _ in range(min(EVENTS_A_LOOK, len(self.events))):
                self._take(self.events.popleft())
        self._pay(waiting - len(self.events))
        for watch in self._watches.values():
            watch.lower()
        return bool(self.events or self._aging)

    def _take(self, event: Event) -> None:
        is_reference = isinstance(event, Cache | Missing)
        for sample in self.watch(space_of(event)).samples:
            if sample.take(event) and is_reference and self._uncounted:
                sample.reader.expect(1.0)
        self._uncounted = max(0, self._uncounted - 1)

    def _count_asked(self) -> None:
        """Note how many references the samples should see in the events that wait, and no others before these.

        If some were lost, as many as they will have seen: nothing is known of the others.
        """
        now_s, is_full = self._clock(), len(self.events) == self.events.maxlen
        for watch in self._watches.values():
            asked, watch.asked = watch.asked, 0
            strangers, watch.strangers = watch.strangers, 0
            if asked:
                self._owed.append(Owed(watch.samples, asked, strangers, watch.rate))
            for scope in watch.scopes if asked else ():
                scope.note_asked(asked, self._counted_s, now_s)
        self._counted_s = now_s
        self._waiting = len(self.events)
        if is_full:
            for owed in self._owed:
                owed.forgive()
            self.overflows += 1
            self._uncounted = len(self.events)
            self._watch_less()
        if not self.events:
            self._pay(0)

    def _pay(self, taken: int) -> None:
        """So many of the events that waited were taken in: their samples should have seen as large a part of all."""
        part = min(taken / self._waiting, 1.0) if self._waiting else 1.0
        for owed in self._owed:
            owed.pay(part)
        self._waiting -= min(taken, self._waiting)
        if not self._waiting:
            self._owed.clear()

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
        """After a half-life: all counts half at once, and what was not used is forgotten a piece at a time."""
        now_s, half_life_s = self._clock(), self.limits.half_life_s
        if now_s - self._aged_s < half_life_s:
            return
        self._count_asked()
        self._aged_s = now_s
        for scope in self._scopes.values():
            scope.age(AGE_FACTOR, now_s)
        self._simulated.age(AGE_FACTOR)
        self._aging = [None, *self._scopes.values()]

    def _forget(self) -> None:
        scope = self._aging[-1]
        sample = self._simulated if scope is None else scope.sample
        if sample.forget(FORGOTTEN_A_LOOK):
            return
        self._aging.pop()
        if scope is not None and (sample.is_sparse or self._aged_s - scope.last_s > self.limits.half_life_s):
            self._close(scope.name)  # its place is another's, or it begins anew and watches more
        elif scope is None and sample.is_sparse:
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
        simulation = PolicySimulation(self._tiers(), self._order, self.capacity_bytes, self._ssd_bytes)
        return simulation, Sample(max(self.limits.simulated_records_max, 1), simulation, self._granularity)

    # Reading

    @property
    def names(self) -> tuple[str, ...]:
        """Scopes that have a curve, and those whose curve begins with their next lookup."""
        return tuple(dict.fromkeys((*self._scopes, *self._tenants, *self._namespaces)))

    def is_split(self, name: str) -> bool:
        """Was it the only one for a while? What it looked up then is in the node's curve, and not in its own."""
        return any(len(seen) > 1 and seen[0] == name for seen in (self._tenants, self._namespaces))

    def read(self, name: str = NODE, wait_s: float = READ_SLICE_S) -> ScopeCurve | None:
        """The curve of one scope; None if there is none. Takes in what waits first, for ``wait_s`` at most."""
        self.work(wait_s)
        is_alone = self._tenants == [name] or self._namespaces == [name]
        scope = self._scopes.get(NODE if is_alone else name)
        if scope is None:
            return None
        sample, now_s = scope.sample, self._clock()
        return ScopeCurve(
            name,
            scope.distances.curve(sample),
            max(now_s - scope.since_s, 0.0),
            scope.references,
            sample.records.segments,
            sample.rate,
            scope.distances.bytes,
            sample.token_bytes(),
            scope.recent_s(now_s),
        )

    def simulated(self, wait_s: float = READ_SLICE_S) -> tuple[SimulatedPoint, ...]:
        """What the policy in force finds with the sizes that are simulated."""
        self.work(wait_s)
        return self._simulation.points(self._simulated.rate, self._simulated.clustering())

    @property
    def records(self) -> int:
        """Watched records of all scopes."""
        return sum(scope.sample.records.count for scope in self._scopes.values()) + self._simulated.records.count

    @property
    def memory_bytes_max(self) -> int:
        """What all of it takes at most, however many segments, tenants and namespaces there are."""
        return memory_bytes_max(self.limits) if self.is_on else 0

    def __iter__(self) -> Iterator[Scope]:
        return iter(self._scopes.values())
