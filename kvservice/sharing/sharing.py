"""All that a node does with other places, for the node: built once, told of what is new, asked before a lookup."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager

from kvservice.allocation import Allocation
from kvservice.caches import Cache, Space, group_of
from kvservice.catalog import Catalog
from kvservice.limits import NodeLimits
from kvservice.lookup import Asked
from kvservice.model.errors import NotListedError
from kvservice.model.segment import CacheKey, SegmentId
from kvservice.sessions import Session
from kvservice.sharing.behind import DELETE_WAIT_S, Behind
from kvservice.sharing.fetches import Fetches
from kvservice.sharing.finder import Finder
from kvservice.sharing.place import HOT_USES, Directory, Place
from kvservice.sharing.pushes import Pushes
from kvservice.ssd import Ssd
from kvservice.stats.counters import Counters
from kvservice.wire.v1 import cache_pb2 as wire

PUSH_POLICIES = ("back", "through", "off")
_LOG = logging.getLogger(__name__)


class Sharing:
    """``push``: new caches are given away soon (``back``), before a commit returns (``through``), or never (``off``).

    ``on_whole`` is told of caches that arrived from elsewhere.
    """

    def __init__(
        self,
        directory: Directory,
        catalog: Catalog,
        allocation: Allocation,
        limits: NodeLimits,
        counters: Counters,
        clock: Callable[[], float],
        on_whole: Callable[[Cache], None],
        push: str = "back",
        *,
        is_gated: bool = True,
        ssd: Ssd | None = None,
    ) -> None:
        assert push in PUSH_POLICIES, push
        self.directory = directory
        self.fetches = Fetches(catalog, allocation, counters, clock, on_whole)
        self.finder = Finder(directory, self.fetches, counters.remote, limits, clock, is_gated=is_gated)
        self.behind = Behind(lambda questions: self.finder.bring_questions(questions, directory.behind))
        begin_load = _load_nothing if ssd is None else ssd.begin_load
        self.pushes = Pushes(catalog, allocation.tier, directory, counters.pushes, clock, begin_load)
        self._push = push

    def start(self) -> None:
        """Begin to give away, in the running loop: also with ``off``, for who drains the node."""
        self.pushes.start()

    async def stop(self) -> None:
        """End what is on its way, in both directions, and close every place."""
        await self.behind.stop()
        await self.finder.stop()
        await self.fetches.stop()
        await self.pushes.stop()
        places = self.directory.everywhere()
        for place, result in zip(
            places, await asyncio.gather(*(one.close() for one in places), return_exceptions=True), strict=True
        ):
            if isinstance(result, Exception):
                _LOG.warning("closing %s failed: %s", place.name, result)

    async def bring(self, session: Session, prompts: Iterable[wire.PromptQuery]) -> int:
        """See Finder."""
        return await self.finder.bring(session, prompts)

    async def bring_for_peer(self, asked: Iterable[tuple[Space, SegmentId, Asked, bytes]], wait_s: float) -> None:
        """On behalf of another node: from places that are no node, so that no question goes round in circles.

        Returns after ``wait_s`` at the latest; the asking goes on behind it, for whoever asks next.
        """
        questions = [question for one in asked if (question := self.finder.question(*one)) is not None]
        await self.behind.bring([one for one in questions if self.directory.behind(one.segment)], wait_s)

    def note_published(self, cache: Cache) -> None:
        """A client, or a fold, made a cache."""
        if self._push != "off":
            self.pushes.note(cache)

    def note_used(self, cache: Cache) -> None:
        """A lookup was answered with a cache: one that is hot now is worth another copy, which its owner gives."""
        if self._push != "off" and group_of(cache).uses == HOT_USES:
            self.pushes.note(cache, is_copy=True)

    async def note_committed(self, caches: Iterable[Cache]) -> None:
        """A commit is about to return. What cannot be given away now is tried again behind it."""
        if self._push == "through":
            await self.pushes.push_now(caches)

    def deleting(self, spaces: Iterable[Space], keys: Sequence[CacheKey] | None) -> AbstractContextManager[None]:
        """While keys, or all (None), of namespaces are being deleted, here and everywhere: nobody brings them back."""
        return self.fetches.deletes.running(spaces, keys)

    async def delete(
        self, spaces: Sequence[Space], keys: Sequence[CacheKey] | None, held: Sequence[CacheKey] = ()
    ) -> int:
        """Delete keys, or all (None), of namespaces everywhere else; how many there were.

        ``held``: what was here of a whole namespace, for places that cannot list what they have.
        Raises the first error once every place was told, or was not reached: those must be told again.
        """
        return await self._delete_at(self.directory.everywhere(), spaces, keys, held)

    async def delete_behind(
        self,
        space: Space,
        keys: Sequence[CacheKey] | None,
        held: Sequence[CacheKey] = (),
        wait_s: float = DELETE_WAIT_S,
    ) -> int:
        """The same since another node said so: only in places that are no node, so that nothing goes round in circles.

        Raises UnavailableError after ``wait_s``; it goes on behind that.
        """
        self._withdraw([space], keys)
        places = self.directory.storages()
        if not places:
            return 0

        async def delete() -> int:
            with self.deleting([space], keys):
                return await self._delete_at(places, [space], keys, held)

        return await self.behind.delete(delete(), wait_s)

    async def _delete_at(
        self,
        places: Sequence[Place],
        spaces: Sequence[Space],
        keys: Sequence[CacheKey] | None,
        held: Sequence[CacheKey],
    ) -> int:
        self._withdraw(spaces, keys)
        told = (_delete_at(place, space, keys, held) for place in places for space in spaces)
        results = await asyncio.gather(*told, return_exceptions=True)
        errors = [result for result in results if isinstance(result, BaseException)]
        if errors:
            raise errors[0]
        total = sum(result for result in results if not isinstance(result, BaseException))
        return total if keys is None else min(total, len(set(keys)))  # some are in several places

    def _withdraw(self, spaces: Iterable[Space], keys: Sequence[CacheKey] | None) -> None:
        names = {space.namespace for space in spaces}
        meant = None if keys is None else set(keys)
        self.pushes.withdraw(
            lambda cache: cache.family.space.namespace in names and (meant is None or cache.key in meant)
        )


async def _delete_at(place: Place, space: Space, keys: Sequence[CacheKey] | None, held: Sequence[CacheKey]) -> int:
    try:
        return await place.delete(space, keys)
    except NotListedError:
        await place.delete(space, held)
        raise


def _load_nothing(_: Cache) -> None:
    """Of a node without SSD."""
