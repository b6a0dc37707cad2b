"""Families: which cache of a segment is the master, and which dense ones become its mirrors.

Policy and its order of steps. The arithmetic runs in a worker (folding.py) over held caches; after every wait the
catalog is looked at again, for anything but what is held may have gone meanwhile.
"""

import asyncio
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np

from kvservice import folding
from kvservice.allocation import Allocation
from kvservice.caches import Cache, Family, Space, VerifiedRecord
from kvservice.catalog import Catalog
from kvservice.folding import Deviations, FoldRefusedError, Source
from kvservice.killpoints import Killer, KillPoint
from kvservice.limits import NodeLimits
from kvservice.model.errors import CapacityError, InvalidInputError, LimitError, QuotaError
from kvservice.model.segment import CacheKey, ContextId, SegmentId
from kvservice.round_history import RoundHistory
from kvservice.stats.counters import Counters, Room
from kvservice.worker import Worker


@dataclass(frozen=True, slots=True)
class Candidate:
    """A dense cache of an election and what became of it. ``deviation``: to all other candidates, summed."""

    context: ContextId
    deviation: float
    is_mirror: bool
    record_bytes: int


@dataclass(frozen=True, slots=True)
class Election:
    """One segment's (for pinned caches: one position's) choice of master."""

    segment: SegmentId
    master: ContextId
    candidates: tuple[Candidate, ...]


@dataclass(frozen=True, slots=True)
class Round:
    """What a round's commit did; bytes of the records of all its families, before and after."""

    elections: tuple[Election, ...]
    bytes_before: int
    bytes_after: int


class Families:
    """Folds dense caches in the background and elects masters. One at a time: the arithmetic has a thread at most.

    ``on_published`` is called with every mirror that took the place of a dense cache.
    """

    def __init__(
        self,
        catalog: Catalog,
        allocation: Allocation,
        worker: Worker,
        limits: NodeLimits,
        counters: Counters,
        killer: Killer,
    ) -> None:
        self.on_published: Callable[[Cache], None] = _ignore
        self.queue: deque[Cache] = deque()
        self.held: Counter[Cache] = Counter()
        self.history = RoundHistory()
        self._catalog = catalog
        self._allocation = allocation
        self._worker = worker
        self._limits = limits
        self._counters = counters
        self._killer = killer
        self._turn = asyncio.Lock()

    # Folding

    def enqueue(self, cache: Cache) -> None:
        """Note a cache that was just published; a dense one that meets other masters is folded later."""
        if cache.master is not None or len(cache.family.masters(2)) < 2:
            return
        if len(self.queue) >= self._limits.fold_queue_max:
            self._counters.folds.dropped += 1
            return
        self.queue.append(cache)

    async def fold_next(self) -> bool:
        """Fold the oldest cache of the queue; False if the queue is empty."""
        async with self._turn:
            if not self.queue:
                return False
            cache = self.queue.popleft()
            if not cache.is_hidden and not cache.mirrors and self._catalog.is_readable(cache):
                await self._fold(cache)
            return True

    async def _fold(self, cache: Cache) -> None:
        masters = self._comparable(cache, cache.family.masters(self._limits.masters_tried_max + 1))
        with self._holding([cache, *masters]):
            intact = await self._quarantine([cache, *masters])
            if cache not in intact or len(intact) < 2:
                return
            master = await self._nearest(cache, [one for one in intact if one is not cache])
            records = None if master is None else await self._rebase([cache], master)
            if master is None or records is None:
                return
            if cache.mirrors or not _may_join([cache], master):
                self._give_back(records)
                self._counters.folds.dropped += 1
                return
            self._adopt([cache], records, master)
            self._killer.reach(KillPoint.AFTER_FOLD)

    def _comparable(self, cache: Cache, masters: Iterable[Cache]) -> list[Cache]:
        """Masters that ``cache`` may be a mirror of: those in host memory; pinned caches cannot be moved."""
        is_pinned = bool(cache.family.space.pinned_reason)
        return [
            one
            for one in masters
            if one is not cache
            and not (is_pinned and one.position != cache.position)
            and self._catalog.is_readable(one)
        ]

    async def _nearest(self, cache: Cache, masters: Sequence[Cache]) -> Cache | None:
        if len(masters) == 1:
            return masters[0]
        table = await self._deviations(cache.family.space, [cache, *masters])
        if table is None:
            return None
        distances = np.nan_to_num(table[0, 1:], nan=np.inf, posinf=np.inf).tolist()
        return min(zip(distances, masters, strict=True), key=lambda pair: (pair[0], pair[1].context))[1]

    # Rounds

    async def commit_round(self, space: Space, keys: Iterable[CacheKey]) -> Round:
        """Elect the master of every segment that ``keys`` name. Raises InvalidInputError for keys that are not held."""
        segments = self._members_of_round(space, list(keys))
        families = [space.families[segment] for segment in segments]
        before = sum(_record_bytes(family) for family in families)
        elections: list[Election] = []
        for segment, contexts in segments.items():
            async with self._turn:
                elections += await self._elect_segment(space, segment, contexts)
        return Round(tuple(elections), before, sum(_record_bytes(family) for family in families))

    def _members_of_round(self, space: Space, keys: Sequence[CacheKey]) -> dict[SegmentId, set[ContextId]]:
        if len(keys) > self._limits.round_members_max:
            raise LimitError(f"a round of {len(keys)} members, the limit is {self._limits.round_members_max}")
        unknown = [str(key) for key in keys if space.find(key.segment, key.context) is None]
        if unknown:
            raise InvalidInputError(f"a round names caches that are not held: {', '.join(unknown)}; commit them first")
        segments: dict[SegmentId, set[ContextId]] = {}
        for key in keys:
            segments.setdefault(key.segment, set()).add(key.context)
        most, limit = max(map(len, segments.values()), default=0), self._limits.election_candidates_max
        if most > limit:
            raise LimitError(f"{most} caches of one segment in a round, the limit is {limit}; commit smaller rounds")
        return segments

    async def _elect_segment(self, space: Space, segment: SegmentId, contexts: set[ContextId]) -> list[Election]:
        family = space.families.get(segment)
        if family is None:
            return []  # deleted or evicted while other segments were at work
        members = [cache for cache in family.members.values() if cache.master is None and cache.context in contexts]
        masters = (*members, *family.masters(self._limits.masters_tried_max))
        found = {cache.context: cache for cache in masters if self._catalog.is_readable(cache)}
        elections = []
        for candidates in _electorates(space, [found[context] for context in sorted(found)]):
            with self._holding(candidates):
                intact = await self._quarantine(candidates)
                election = await self._elect(space, intact) if len(intact) > 1 else None
                if election is not None:
                    elections.append(election)
        return elections

    async def _elect(self, space: Space, candidates: Sequence[Cache]) -> Election | None:
        table = await self._deviations(space, candidates)
        if table is None:
            return None
        totals = election_totals(table)
        winner = candidates[min(range(len(totals)), key=totals.__getitem__)]  # sorted by key: the lowest wins a tie
        for cache in candidates:
            if cache is not winner:
                await self._join(cache, winner)
                self._killer.reach(KillPoint.AFTER_ELECTION_STEP)
        self._counters.elections += 1
        return _election(winner, candidates, totals)

    async def _join(self, loser: Cache, winner: Cache) -> None:
        """Make a loser and all its mirrors mirrors of the winner, if that saves; otherwise its group stays."""
        mirrors = [mirror for mirror in loser.mirrors or () if not mirror.is_hidden]
        group = [*mirrors, loser]
        if not all(self._catalog.is_readable(cache) for cache in group):
            self._counters.folds.kept += 1
            return
        with self._holding(group):
            if len(await self._quarantine(group)) < len(group):
                return
            records = await self._rebase(group, winner)
            if records is None:
                return
            new_mirrors = [mirror for mirror in loser.mirrors or () if mirror not in mirrors]
            old_bytes, new_bytes = (sum(sizes) for sizes in zip(*_sizes(group, records), strict=True))
            if new_mirrors or new_bytes >= old_bytes or not _may_join(group, winner):
                self._give_back(records)
                return
            self._adopt(group, records, winner)
            self._counters.rebased += len(mirrors)

    # Steps of both

    async def _deviations(self, space: Space, caches: Sequence[Cache]) -> Deviations | None:
        """See folding.deviations; None, and counted, if the kernels refuse."""
        sources = [self._source(cache) for cache in caches]
        try:
            return await self._worker.run(partial(folding.deviations, space.identity, sources))
        except FoldRefusedError:
            self._counters.folds.refused += 1
            return None

    async def _rebase(self, group: Sequence[Cache], master: Cache) -> list[VerifiedRecord] | None:
        """Unpublished mirror records of ``master`` for every cache of ``group``; None unless all of them save."""
        records: list[VerifiedRecord] = []
        try:
            for cache in group:
                record = await self._mirror_of(cache, master)
                if record is None:
                    break
                records.append(record)
        except FoldRefusedError:
            self._counters.folds.refused += 1
        except BaseException:
            self._give_back(records)
            raise
        if len(records) == len(group):
            return records
        self._give_back(records)
        return None

    async def _mirror_of(self, cache: Cache, master: Cache) -> VerifiedRecord | None:
        identity, folds = cache.family.space.identity, self._counters.folds
        bytes_max = int(cache.dense_bytes * self._limits.mirror_share_max)
        member, base = self._source(cache), self._source(master)
        difference = await self._worker.run(partial(folding.diff, identity, member, base, bytes_max))
        if difference is None:
            folds.kept += 1
            return None
        try:
            extent = self._allocation.take(difference.record_bytes, Room.FOLD, identity.tenant)
        except (CapacityError, QuotaError):
            folds.dropped += 1
            return None
        generation = None
        try:
            target = self._allocation.tier.view(extent)
            generation = await self._worker.run(
                partial(folding.write_mirror, identity, member, base, difference, target)
            )
        finally:
            if generation is None:
                self._allocation.give_back(extent)
        if generation is None:
            folds.refused += 1
            return None
        return VerifiedRecord(difference.meta, extent, generation)

    def _adopt(self, group: Sequence[Cache], records: Sequence[VerifiedRecord], master: Cache) -> None:
        for cache, record in zip(group, records, strict=True):
            self._counters.folds.folded += cache.master is None
            self._counters.folds.saved_bytes += max(cache.record_bytes - record.extent.length, 0)
            self._allocation.hand_over(record.extent)
            self.on_published(self._catalog.replace(cache, record, master))

    def _give_back(self, records: Iterable[VerifiedRecord]) -> None:
        for record in records:
            self._allocation.give_back(record.extent)

    async def _quarantine(self, caches: Sequence[Cache]) -> list[Cache]:
        """The caches whose bytes are still what was committed; the others are condemned."""
        sources = [self._source(cache) for cache in caches]
        corrupt = await self._worker.run(partial(folding.find_corrupt, sources))
        for index in corrupt:
            self._counters.corrupt["host"] += 1
            self._catalog.condemn(caches[index])
        return [cache for cache in caches if not cache.is_hidden and self._catalog.is_readable(cache)]

    def _source(self, cache: Cache) -> Source:
        view = self._allocation.tier.view
        return Source(view(cache.extent), None if cache.master is None else view(cache.master.extent))

    @contextmanager
    def _holding(self, caches: Iterable[Cache]) -> Iterator[None]:
        taken = list(caches)
        for cache in taken:
            self._catalog.hold(cache)
            self.held[cache] += 1
        try:
            yield
        finally:
            for cache in taken:
                self.held[cache] -= 1
                if not self.held[cache]:
                    del self.held[cache]
                self._catalog.unhold(cache)


def _ignore(_: Cache) -> None:
    """Nobody wants to know."""


def _may_join(group: Iterable[Cache], master: Cache) -> bool:
    """Is all of it still there? Anything may have been deleted while a worker was at it."""
    return not master.is_hidden and not any(cache.is_hidden for cache in group)


def _electorates(space: Space, candidates: Sequence[Cache]) -> list[list[Cache]]:
    """Candidates that can be compared: all of them, or of pinned caches those at one position; two at least."""
    by_position: dict[int, list[Cache]] = {}
    for cache in candidates:
        by_position.setdefault(cache.position if space.pinned_reason else 0, []).append(cache)
    return [group for _, group in sorted(by_position.items()) if len(group) > 1]


def _election(winner: Cache, candidates: Sequence[Cache], totals: Sequence[float]) -> Election:
    outcome = []
    for cache, total in zip(candidates, totals, strict=True):
        now = cache.family.members.get(cache.context, cache)
        outcome.append(Candidate(cache.context, total, now.master is not None, now.record_bytes))
    return Election(winner.family.segment, winner.context, tuple(outcome))


def election_totals(table: Deviations) -> list[float]:
    """Each candidate's deviation from the others, summed. What is no number is infinitely far.

    A candidate that has no finite distance to any other is left out of the others' sums: a NaN in one cache must not
    decide for all of them.
    """
    others = ~np.eye(len(table), dtype=np.bool_)
    is_sound = (np.isfinite(table) & others).any(axis=1)
    totals = np.where(is_sound, table[:, is_sound].sum(axis=1), np.inf)
    return [math.inf if math.isnan(total) else total for total in totals.tolist()]


def _record_bytes(family: Family) -> int:
    return sum(cache.record_bytes for cache in family.members.values())


def _sizes(group: Sequence[Cache], records: Sequence[VerifiedRecord]) -> Iterator[tuple[int, int]]:
    return ((cache.record_bytes, record.extent.length) for cache, record in zip(group, records, strict=True))
