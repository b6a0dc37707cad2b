"""Answers one segment of a lookup: what was found, leased, and on its way into the arena if need be. State only."""

from kvservice.caches import Cache, Space
from kvservice.catalog import Catalog
from kvservice.leases import Grant, Leases
from kvservice.limits import NodeLimits
from kvservice.loads import Load
from kvservice.lookup import CORRUPT, NO_ROOM, UNKNOWN_NAMESPACE, Asked, Finding, find
from kvservice.model.segment import SegmentId
from kvservice.sharing.sharing import Sharing
from kvservice.ssd import Ssd


class Answering:
    """``ssd``: where caches that are not in memory lie, ``sharing``: other places, if the node has such."""

    def __init__(self, catalog: Catalog, leases: Leases, limits: NodeLimits) -> None:
        self.ssd: Ssd | None = None
        self.sharing: Sharing | None = None
        self._catalog = catalog
        self._leases = leases
        self._candidates_max = limits.candidates_max

    def answer(self, space: Space | None, segment: SegmentId, asked: Asked, marks: bytes, grant: Grant) -> Finding:
        """What answers one segment of a prompt, leased under ``grant``; ``marks``: the segments before, flat."""
        finding, family = UNKNOWN_NAMESPACE, None
        if space is not None:
            family = space.families.get(segment)
            is_pinned = bool(space.pinned_reason)
            finding = find(family, asked, marks, is_pinned=is_pinned, candidates_max=self._candidates_max)
        cache = finding.cache
        if cache is not None and family is not None:
            finding = self._leased(finding, cache, grant)
            if len(family.members) > self._candidates_max:  # of smaller ones all members are ranked anyway
                self._catalog.touch(cache)
        return finding

    def _leased(self, finding: Finding, cache: Cache, grant: Grant) -> Finding:
        """The finding under the lease, on its way if need be; or why it cannot be read."""
        catalog = self._catalog
        if catalog.is_condemned(cache):
            return CORRUPT
        self._leases.add(grant, cache)
        if not (cache.is_on_host and cache.head.is_on_host) or catalog.arriving:
            loads = self._loads_of(cache)
            if loads is None:
                self._leases.take_back(grant)
                return NO_ROOM
            if loads:
                grant.loads.add(loads)
                finding = finding._replace(source=max(load.source for load in loads))
        if self.ssd is not None:
            self.ssd.note_used(cache)
        if self.sharing is not None:
            self.sharing.note_used(cache)
        return finding

    def _loads_of(self, cache: Cache) -> list[Load] | None:
        """The loads, begun or under way, that a held cache and its master need; None if leases leave no room."""
        loads, arriving = [], self._catalog.arriving
        for one in (cache,) if cache.master is None else (cache.master, cache):
            if one.is_on_host and one not in arriving:
                continue
            load = arriving.get(one)
            if load is None:
                assert self.ssd is not None, f"{one} is in no tier"
                load = self.ssd.begin_load(one)
            if load is None:
                return None
            loads.append(load)
        return loads
