"""What lookups asked for and what became of every segment, by namespace and tenant: so many by name, the rest together.

    asked = host + ssd + remote + moved + miss + error          in segments, and in tokens

host, ssd, remote: found in the context asked for, from where its bytes come; from SSD if any of them have to be read.
remote is another node's memory. moved: from another context, in any tier. miss: nothing that would have answered is
held. error: held and not to be had, or a question that is wrong. State only, owned by the node's thread.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvservice.caches import Space
from kvservice.lookup import Finding
from kvservice.model.plan import Match, MissReason

OTHER = "other"
"""What has no name of its own here; so has a tenant of this name."""
NAME_CHARS_MAX = 128
"""Tenants with longer names have none here."""
SOURCES = ("host", "ssd", "remote")
ANSWERS = (*SOURCES, "moved", "miss", "error")
ERRORS = (MissReason.UNKNOWN_NAMESPACE, MissReason.TOKEN_COUNT, MissReason.NO_ROOM, MissReason.CORRUPT)
BROKEN_OFF = "broken_off"
"""A lookup ended, with an error or with its caller, before it came to the segment."""
MISSED = {one: one.name.lower() for one in MissReason if one is not MissReason.NONE and one not in ERRORS}
FAILED = {one: one.name.lower() for one in ERRORS}

# place := source x match | missed by reason | broken off        one index, so that counting is two additions
_MATCHES = len(Match)
_SSD = _MATCHES
_MISSES = _MATCHES * len(SOURCES)
_BROKEN_OFF = _MISSES + len(MissReason)
PLACES = _BROKEN_OFF + 1


def place_of(finding: Finding) -> int:
    """The index of an answer, at which it is counted."""
    match = finding[1]  # by number: a lookup comes here for every segment
    if match:
        return match + _SSD if finding[4] else match
    return _MISSES + finding[2]


def _places(matches: tuple[Match, ...], sources: tuple[int, ...] = (0, 1, 2)) -> tuple[int, ...]:
    return tuple(source * _MATCHES + match for source in sources for match in matches)


ANSWER_PLACES: dict[str, tuple[int, ...]] = {
    **{name: _places((Match.EXACT, Match.REFRESHED), (source,)) for source, name in enumerate(SOURCES)},
    "moved": _places((Match.SHIFTED,)),
    "miss": tuple(_MISSES + reason for reason in MISSED),
    "error": (*(_MISSES + reason for reason in FAILED), _BROKEN_OFF),
}
MATCH_PLACES = {match: _places((match,)) for match in Match if match is not Match.NONE}
MOVED_PLACES = {name: _places((Match.SHIFTED,), (source,)) for source, name in enumerate(SOURCES)}
FROM_SSD_PLACES = _places((Match.EXACT, Match.REFRESHED, Match.SHIFTED), (1,))
MISS_PLACES = {reason: _MISSES + reason for reason in (*MISSED, *FAILED)}
ERROR_PLACES = {**{name: _MISSES + reason for reason, name in FAILED.items()}, BROKEN_OFF: _BROKEN_OFF}
NAME_OF_PLACE = {
    **{source * _MATCHES + match: name for source, name in enumerate(SOURCES) for match in MATCH_PLACES},
    **{_MISSES + reason: name for reason, name in (*MISSED.items(), *FAILED.items())},
    _BROKEN_OFF: BROKEN_OFF,
}
"""Where an answer came from, or why there was none."""
assert sorted(place for places in ANSWER_PLACES.values() for place in places) == sorted(NAME_OF_PLACE)


def count_at(counts: Sequence[int], places: Iterable[int]) -> int:
    """Segments or tokens at some places."""
    return sum(counts[place] for place in places)


class Ledger:
    """The answers of one namespace, or of those of a tenant that have no ledger of their own.

    ``segments`` and ``tokens``: by place. ``prompts``: in this window, by which it keeps its name.
    """

    __slots__ = ("model", "namespace", "prompts", "segments", "tenant", "tokens")

    def __init__(self, tenant: str, namespace: str, model: str = "") -> None:
        self.tenant = tenant
        self.namespace = namespace
        self.model = model
        self.segments = [0] * PLACES
        self.tokens = [0] * PLACES
        self.prompts = 0

    def count_broken_off(self, tokens: int) -> None:
        """One segment was not."""
        self.segments[_BROKEN_OFF] += 1
        self.tokens[_BROKEN_OFF] += tokens

    def take_over(self, other: "Ledger") -> None:
        """What ``other`` counted is counted here from now on."""
        for place in range(PLACES):
            self.segments[place] += other.segments[place]
            self.tokens[place] += other.tokens[place]


@dataclass(frozen=True, slots=True)
class AccountLimits:
    """``candidates_max``: namespaces without a name that are watched, so that the busiest get one at a window's end."""

    namespaces_max: int = 32
    tenants_max: int = 16
    candidates_max: int = 4096
    window_s: float = 60.0


class Accounts:
    """The ledgers. The busiest namespaces and tenants have names; what loses its own is counted under OTHER.

    So sums over all never fall, and a name's counters begin at zero whenever it gets it. ``clock``: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float], limits: AccountLimits | None = None) -> None:
        self.limits = limits or AccountLimits()
        self.rest = Ledger(OTHER, OTHER)
        self._clock = clock
        self._named: dict[bytes, Ledger] = {}
        self._tenants: dict[str, Ledger] = {}  # what their nameless namespaces count
        self._candidates: Counter[tuple[str, str]] = Counter()
        self._spaces: dict[tuple[str, str], Space] = {}
        self._window_end_s = clock() + self.limits.window_s

    def __iter__(self) -> Iterator[Ledger]:
        yield from self._named.values()
        yield from self._tenants.values()
        yield self.rest

    @property
    def named(self) -> dict[bytes, Ledger]:
        """Of namespaces with a name."""
        return self._named

    @property
    def tenants(self) -> tuple[str, ...]:
        """Tenants with a name."""
        return tuple(self._tenants)

    def of(self, space: Space | None) -> Ledger:
        """Where a prompt of a namespace is counted; None: of one that is not known."""
        if space is None:
            return self.rest
        ledger = self._named.get(space.namespace)
        if ledger is None:
            ledger = self._nameless(space)
        ledger.prompts += 1
        return ledger

    def note_restored(self, spaces: Iterable[Space]) -> None:
        """Give names to the largest namespaces that a start brought, as long as there is room."""
        for space in heapq.nlargest(self.limits.namespaces_max, spaces, key=lambda one: one.totals.ssd_bytes):
            self._name(space)

    def turn(self) -> None:
        """Once a window is over, names go from those that were asked for least to those asked for more often."""
        now_s = self._clock()
        if now_s < self._window_end_s:
            return
        self._window_end_s = now_s + self.limits.window_s
        for key, prompts in self._candidates.most_common(self.limits.namespaces_max):
            self._make_room(self._spaces[key], prompts)
            ledger = self._name(self._spaces[key])
            if ledger is not None:
                ledger.prompts = prompts  # the next one must not take its name away
        self._candidates.clear()
        self._spaces.clear()
        for ledger in self:
            ledger.prompts = 0

    # Names

    def _nameless(self, space: Space) -> Ledger:
        ledger = self._name(space)
        if ledger is not None:
            return ledger
        tenant = _tenant_of(space)
        key = (tenant, space.namespace.hex())
        if key in self._candidates or len(self._candidates) < self.limits.candidates_max:
            self._candidates[key] += 1
            self._spaces[key] = space
        return self._tenants.get(tenant, self.rest)

    def _name(self, space: Space) -> Ledger | None:
        """A ledger of its own, if there is room for it and for its tenant."""
        tenant, limits = _tenant_of(space), self.limits
        if space.namespace in self._named:
            return self._named[space.namespace]
        if self._is_stranger(tenant):
            if len(self._tenants) >= limits.tenants_max:
                return None
            self._tenants[tenant] = Ledger(tenant, OTHER)
        if len(self._named) >= limits.namespaces_max:
            return None
        ledger = Ledger(tenant, space.namespace.hex(), space.identity.model[:NAME_CHARS_MAX])
        self._named[space.namespace] = ledger
        return ledger

    def _is_stranger(self, tenant: str) -> bool:
        return tenant != OTHER and tenant not in self._tenants

    def _make_room(self, space: Space, prompts: int) -> None:
        """Take names away from those that were asked for less often than ``prompts`` times."""
        if self._is_stranger(_tenant_of(space)) and len(self._tenants) >= self.limits.tenants_max:
            asked = Counter({name: ledger.prompts for name, ledger in self._tenants.items()})
            for ledger in self._named.values():
                asked[ledger.tenant] += ledger.prompts if ledger.tenant in asked else 0
            name, least = min(asked.items(), key=lambda one: one[1])
            if least < prompts:
                self._drop_tenant(name)
        if len(self._named) >= self.limits.namespaces_max:
            namespace, ledger = min(self._named.items(), key=lambda one: one[1].prompts)
            if ledger.prompts < prompts:
                self._drop_namespace(namespace)

    def _drop_tenant(self, tenant: str) -> None:
        for namespace in [one for one, ledger in self._named.items() if ledger.tenant == tenant]:
            self._drop_namespace(namespace)
        self.rest.take_over(self._tenants.pop(tenant))

    def _drop_namespace(self, namespace: bytes) -> None:
        ledger = self._named.pop(namespace)
        self._tenants.get(ledger.tenant, self.rest).take_over(ledger)


def _tenant_of(space: Space) -> str:
    tenant = space.identity.tenant
    return tenant if len(tenant) <= NAME_CHARS_MAX else OTHER
