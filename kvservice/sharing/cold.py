"""Storage behind an engine (S3, Redis, Mooncake) as a place: who asks it ranks what it holds."""

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence

from kvservice.access.quotas import Quotas
from kvservice.caches import Cache, Family, Space
from kvservice.lookup import find
from kvservice.model.errors import ConfigError, KVServiceError, NotListedError, QuotaError, UnavailableError
from kvservice.model.identity import Namespace
from kvservice.model.segment import CacheKey, ContextId
from kvservice.peers.backoff import Backoff
from kvservice.sharing.place import Offer, Parcel, Question
from kvservice.storage.buffer import Bytes
from kvservice.storage.remote.contract import OnPiece, RemoteName, RemoteRecord, RemoteTier, Wanted
from kvservice.storage.remote.unreachable import UnreachableError

_LOG = logging.getLogger(__name__)

DELETES_MAX = 16
"""Keys of one call that are deleted at a time."""
OTHERS_MAX = 8
"""Caches of other contexts that are looked at for one segment; each costs the engine a request."""


class ColdPlace:
    """The storage that a URL names, as a place. ``open_tier`` opens it; it is tried again while it does not answer.

    Until it was opened nothing is found there, and what should be stored there waits. ``quotas``: of what tenants may
    put there.
    """

    def __init__(self, name: str, open_tier: Callable[[], Awaitable[RemoteTier]], quotas: Quotas | None = None) -> None:
        self._name = name
        self._open_tier = open_tier
        self._quotas = quotas or Quotas()
        self._stored = Counter[Namespace]()
        """Bytes that this node put there since its start, as far as they were not deleted."""
        self._tier: RemoteTier | None = None
        self._opening: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Open it once, or go on trying in the background. Raises ConfigError for what no waiting mends."""
        try:
            self._tier = await self._open_tier()
        except UnreachableError as error:
            _LOG.warning("%s does not answer, and is tried again: %s", self._name, error)
            self._opening = asyncio.create_task(self._go_on_trying())

    async def _go_on_trying(self) -> None:
        backoff = Backoff(random.random)
        while self._tier is None:
            await asyncio.sleep(backoff.next_s())
            try:
                self._tier = await self._open_tier()
            except KVServiceError as error:
                is_wrong = isinstance(error, ConfigError) and not isinstance(error, UnreachableError)
                level = logging.WARNING if is_wrong else logging.INFO
                _LOG.log(level, "%s is not open yet: %s", self._name, error)

    @property
    def name(self) -> str:
        """See Place."""
        return self._name

    def _opened(self) -> RemoteTier:
        if self._tier is None:
            raise UnavailableError(f"{self._name} has not answered since this node started")
        return self._tier

    async def find(self, questions: Sequence[Question], ahead_bytes: int = 0) -> list[Offer | None]:
        """See Place. Two round trips where a mirror is found, for its master's head; else one."""
        tier = self._opened()
        others_max = OTHERS_MAX if tier.features.lists_segments else 0
        held = await tier.find([_wanted(one, others_max) for one in questions])
        masters = await self._masters(record for records in held for record in records)
        return [_best(question, records, masters) for question, records in zip(questions, held, strict=True)]

    async def _masters(self, records: Iterable[RemoteRecord]) -> dict[RemoteName, RemoteRecord]:
        known = {record.name: record for record in records}
        missing = dict.fromkeys(
            name for record in known.values() if (name := master_name(record)) is not None and name not in known
        )
        if missing:
            found = await self._opened().find([Wanted(one.namespace, one.segment, (one.context,)) for one in missing])
            known |= {record.name: record for records in found for record in records}
        return known

    async def fetch(self, record: RemoteRecord, target: Bytes, on_piece: OnPiece, start: int = 0) -> None:
        """See Place."""
        await self._opened().fetch(record, target, on_piece, start)

    def let_go(self, records: Iterable[RemoteRecord]) -> None:
        """See Place. An engine leases nothing."""

    async def store(self, parcel: Parcel) -> bool:
        """See Place. Nobody looks whether the master is there: a mirror without it is not offered.

        Raises QuotaError for a tenant that may put no more here.
        """
        tenant, count, is_new = parcel.space.identity.tenant, len(parcel.view), False
        if not self._quotas.take_remote(tenant, count):
            limit = self._quotas.of(tenant).remote_bytes
            raise QuotaError(f"tenant {tenant!r} may put {limit} bytes into {self.name}; {count} more are too many")
        try:
            is_new = await self._opened().store(parcel.name, parcel.view, parcel.prefill_s)
        finally:
            if is_new:
                self._stored[parcel.space.namespace] += count
            else:
                self._quotas.give_back_remote(tenant, count)
        return is_new

    async def delete(self, space: Space, keys: Sequence[CacheKey] | None) -> int:
        """See Place. Keys are deleted side by side; a whole namespace as far as the engine can list."""
        tier, deleted = self._opened(), 0
        if keys is None:
            try:
                deleted = await tier.delete_all(space.namespace)
            except NotListedError as error:
                raise NotListedError(f"{self._name}: {error}") from error
            self._give_back(space, self._stored[space.namespace])
            return deleted
        turns = asyncio.Semaphore(DELETES_MAX)

        async def delete(key: CacheKey) -> bool:
            async with turns:
                return await self._delete(tier, space, key)

        results = await asyncio.gather(*map(delete, keys), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results.count(True)

    async def _delete(self, tier: RemoteTier, space: Space, key: CacheKey) -> bool:
        name = RemoteName(space.namespace, key.segment, key.context)
        found = await tier.find([Wanted(*name[:2], (name.context,))])
        was_there = await tier.delete(name)
        if was_there:
            self._give_back(space, sum(one.record_bytes for one in found[0]))
        return was_there

    def _give_back(self, space: Space, count: int) -> None:
        self._stored[space.namespace] = max(0, self._stored[space.namespace] - count)
        self._quotas.give_back_remote(space.identity.tenant, count)

    async def close(self) -> None:
        """See Place."""
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.gather(self._opening, return_exceptions=True)
        if self._tier is not None:
            await self._tier.close()


def _wanted(question: Question, others_max: int) -> Wanted:
    contexts = tuple(ContextId(one) for one in question.asked.accepted_contexts)
    return Wanted(question.space.namespace, question.segment, contexts, others_max if question.asked.may_shift else 0)


def master_name(record: RemoteRecord) -> RemoteName | None:
    """What the master of a mirror is called; None for a master."""
    meta = record.head.meta
    return None if meta.master is None else RemoteName(meta.namespace, meta.key.segment, meta.master.context)


def _best(question: Question, records: Sequence[RemoteRecord], masters: dict[RemoteName, RemoteRecord]) -> Offer | None:
    """By the rules of a lookup, over a family of what the engine holds."""
    family = Family(question.space, question.segment, question.asked.tokens)
    offers: dict[bytes, Offer] = {}
    for record in reversed(records):  # the family's newest member stands last
        head, name = record.head, master_name(record)
        base = None if name is None else masters.get(name)
        is_based = head.meta.master is None or (
            base is not None and base.head.generation == head.meta.master.generation
        )
        if head.meta.tokens != question.asked.tokens or not is_based:
            continue
        cache = Cache(family, head.meta, record.record_bytes, head.generation, record.prefill_s)
        if base is not None:
            cache.master = Cache(family, base.head.meta, base.record_bytes, base.head.generation, base.prefill_s)
        family.members[cache.context] = cache
        offers[cache.context] = Offer(record, base)
    finding = find(
        family if family.members else None,
        question.asked,
        question.marks,
        is_pinned=bool(question.space.pinned_reason),
        candidates_max=len(records) or 1,
    )
    return None if finding.cache is None else offers[finding.cache.context]
