"""All that a node does with other places, for the node: built once, told of what is new, asked before a lookup."""

import asyncio
from collections.abc import Callable, Iterable, Sequence

from kvservice.allocation import Allocation
from kvservice.caches import Cache, Space, group_of
from kvservice.catalog import Catalog
from kvservice.limits import NodeLimits
from kvservice.lookup import Asked
from kvservice.model.segment import CacheKey, SegmentId
from kvservice.sessions import Session
from kvservice.sharing.fetches import Fetches
from kvservice.sharing.finder import Finder
from kvservice.sharing.place import HOT_USES, Directory
from kvservice.sharing.pushes import Pushes
from kvservice.stats.counters import Counters
from kvservice.wire.v1 import cache_pb2 as wire

PUSH_POLICIES = ("back", "through", "off")


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
    ) -> None:
        assert push in PUSH_POLICIES, push
        self.directory = directory
        self.fetches = Fetches(catalog, allocation, counters, clock, on_whole)
        self.finder = Finder(directory, self.fetches, counters.remote, limits.candidates_max, clock, is_gated=is_gated)
        self.pushes = Pushes(catalog, allocation.tier, directory, counters.pushes, clock)
        self._push = push

    def start(self) -> None:
        """Begin to give away, in the running loop."""
        if self._push != "off":
            self.pushes.start()

    async def stop(self) -> None:
        """End what is on its way, in both directions, and close every place."""
        await self.fetches.stop()
        await self.pushes.stop()
        await asyncio.gather(*(place.close() for place in self.directory.everywhere()))

    async def bring(self, session: Session, prompts: Iterable[wire.PromptQuery]) -> int:
        """See Finder."""
        return await self.finder.bring(session, prompts)

    async def bring_for_peer(self, asked: Iterable[tuple[Space, SegmentId, Asked, bytes]]) -> int:
        """On behalf of another node: from places that are no node, so that no question goes round in circles."""
        questions = [question for one in asked if (question := self.finder.question(*one)) is not None]
        return await self.finder.bring_questions(questions, self.directory.behind)

    def note_published(self, cache: Cache) -> None:
        """A client, or a fold, made a cache."""
        if self._push != "off":
            self.pushes.note(cache)

    def note_used(self, cache: Cache) -> None:
        """A lookup was answered with a cache: one that is hot now is worth another copy."""
        if self._push != "off" and group_of(cache).uses == HOT_USES:
            self.pushes.note(cache)

    async def note_committed(self, caches: Iterable[Cache]) -> None:
        """A commit is about to return. What cannot be given away now is tried again behind it."""
        if self._push == "through":
            await self.pushes.push_now(caches)

    async def delete(self, spaces: Iterable[Space], keys: Sequence[CacheKey] | None) -> int:
        """Delete keys, or all (None), of namespaces everywhere else; how many there were.

        Raises the first error once every place was told, or was not reached: those must be told again.
        """
        names = {space.namespace for space in spaces}
        meant = None if keys is None else set(keys)
        self.pushes.withdraw(
            lambda cache: cache.family.space.namespace in names and (meant is None or cache.key in meant)
        )
        told = (place.delete(space, keys) for place in self.directory.everywhere() for space in spaces)
        results = await asyncio.gather(*told, return_exceptions=True)
        errors = [result for result in results if isinstance(result, BaseException)]
        if errors:
            raise errors[0]
        return sum(result for result in results if not isinstance(result, BaseException))
