"""What lookups asked for and what became of every segment, by namespace and tenant: so many by name, the rest together.

    asked = host + ssd + remote + moved + miss + error          in segments, and in tokens

host, ssd, remote: found in the context asked for, from where its bytes come; from SSD if any of them have to be read.
remote is another node's memory. moved: from another context, in any tier. miss: nothing that would have answered is
held. error: held and not to be had, or a question that is wrong. State only, owned by the node's thread.

What is found is exact or lossy: refreshed, moved, or anything of a namespace whose identity rounds what is stored. So
no ledger counts both kinds of namespaces, and an answer costs no look at the identity.
"""

import heapq
from collections.abc import Iterable, Iterator, Sequence
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
_MISSES = _MATCHES * len(SOURCES)
_BROKEN_OFF = _MISSES + len(MissReason)
PLACES = _BROKEN_OFF + 1


def place_of(finding: Finding) -> int:
    """The index of an answer, at which it is counted."""
    match = finding[1]  # by number: a lookup comes here for every segment
    if match:
        return match + finding[4] * _MATCHES
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
_EXACT_PLACES, _APPROXIMATE_PLACES = MATCH_PLACES[Match.EXACT], _places((Match.REFRESHED, Match.SHIFTED))
MOVED_PLACES = {name: _places((Match.SHIFTED,), (source,)) for source, name in enumerate(SOURCES)}
FROM_SSD_PLACES = _places((Match.EXACT, Match.REFRESHED, Match.SHIFTED), (1,))
FROM_REMOTE_PLACES = _places((Match.EXACT, Match.REFRESHED, Match.SHIFTED), (2,))
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

    ``segments`` and ``tokens``: by place. ``lossy``: how all of its namespaces round; empty: none of them does.
    """

    __slots__ = ("lossy", "model", "namespace", "segments", "tenant", "tokens")

    def __init__(self, tenant: str, namespace: str, model: str = "", lossy: str = "") -> None:
        self.tenant = tenant
        self.namespace = namespace
        self.model = model
        self.lossy = lossy
        self.segments = [0] * PLACES
        self.tokens = [0] * PLACES

    def count_broken_off(self, tokens: int) -> None:
        """One segment was not."""
        self.segments[_BROKEN_OFF] += 1
        self.tokens[_BROKEN_OFF] += tokens


class LedgerSum:
    """Of ledgers. ``rounded_segments`` and ``rounded_tokens``: found in the context asked for and not refreshed, but of
    a namespace that rounds."""

    def __init__(self, ledgers: Iterable[Ledger]) -> None:
        self.segments = [0] * PLACES
        self.tokens = [0] * PLACES
        self.rounded_segments = self.rounded_tokens = 0
        for one in ledgers:
            for place in range(PLACES):
                self.segments[place] += one.segments[place]
                self.tokens[place] += one.tokens[place]
            if one.lossy:
                self.rounded_segments += count_at(one.segments, _EXACT_PLACES)
                self.rounded_tokens += count_at(one.tokens, _EXACT_PLACES)

    @property
    def exact_segments(self) -> int:
        """Found with the very KV that was computed in the context asked for."""
        return count_at(self.segments, _EXACT_PLACES) - self.rounded_segments

    @property
    def exact_tokens(self) -> int:
        """The same in tokens."""
        return count_at(self.tokens, _EXACT_PLACES) - self.rounded_tokens

    @property
    def lossy_tokens(self) -> int:
        """Found with an approximation: refreshed, moved or rounded."""
        return count_at(self.tokens, _APPROXIMATE_PLACES) + self.rounded_tokens


@dataclass(frozen=True, slots=True)
class AccountLimits:
    """How many have a name."""

    namespaces_max: int = 32
    tenants_max: int = 16


class Nameless:
    """The namespaces of a tenant, or of all without a name, that have no ledger of their own."""

    def __init__(self, tenant: str) -> None:
        self.exact, self.lossy = Ledger(tenant, OTHER), Ledger(tenant, OTHER, lossy=OTHER)

    def __iter__(self) -> Iterator[Ledger]:
        return iter((self.exact, self.lossy))


class Accounts:
    """The ledgers. The first namespaces and tenants that are asked for have names, until the node ends.

    A name is neither taken away nor given later to what was counted under OTHER: a series that changed hands would rise
    or fall by what it never saw, and a monitor would take that for traffic.
    """

    def __init__(self, limits: AccountLimits | None = None) -> None:
        self.limits = limits or AccountLimits()
        self.rest = Nameless(OTHER)
        self._named: dict[bytes, Ledger] = {}
        self._tenants: dict[str, Nameless] = {}

    def __iter__(self) -> Iterator[Ledger]:
        yield from self._named.values()
        for nameless in (*self._tenants.values(), self.rest):
            yield from nameless

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
            return self.rest.exact
        return self._named.get(space.namespace) or self._name(space) or self._nameless(space)

    def note_restored(self, spaces: Iterable[Space]) -> None:
        """Give names to the largest namespaces that a start brought, as long as there is room."""
        for space in heapq.nlargest(self.limits.namespaces_max, spaces, key=lambda one: one.totals.ssd_bytes):
            self._name(space)

    def _nameless(self, space: Space) -> Ledger:
        nameless = self._tenants.get(_tenant_of(space), self.rest)
        return nameless.lossy if space.identity.is_lossy else nameless.exact

    def _name(self, space: Space) -> Ledger | None:
        """A ledger of its own, if there is room for it and for its tenant."""
        tenant, limits = _tenant_of(space), self.limits
        if tenant != OTHER and tenant not in self._tenants:
            if len(self._tenants) >= limits.tenants_max:
                return None
            self._tenants[tenant] = Nameless(tenant)
        if len(self._named) >= limits.namespaces_max:
            return None
        identity = space.identity
        ledger = Ledger(tenant, space.namespace.hex(), identity.model[:NAME_CHARS_MAX], identity.lossy)
        self._named[space.namespace] = ledger
        return ledger


def _tenant_of(space: Space) -> str:
    tenant = space.identity.tenant
    return tenant if len(tenant) <= NAME_CHARS_MAX else OTHER
