"""A node gives away what only it has, before it is stopped: from memory and SSD, whatever ``push`` says.

It goes through what is held again and again until all of it is elsewhere, or its time is up, or it is ended.
Without any place there is nothing to wait for.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator
from typing import Any

from kvservice.caches import Cache
from kvservice.catalog import Catalog
from kvservice.sharing.giving import Verdict
from kvservice.sharing.pushes import Pushes

AT_A_TIME = 8
AGAIN_S = 0.5
"""Between one look at what is held and the next."""
NO_TIME = "no time left for it"
_FOR_GOOD = (Verdict.GIVEN, Verdict.ORPHAN, Verdict.REFUSED, Verdict.FAILED)


class Drain:
    """One drain; the loop's. ``pushes``: None for a node that knows no other place. ``is_ended``: it must end now."""

    def __init__(self, catalog: Catalog, pushes: Pushes | None, is_ended: asyncio.Event) -> None:
        self._catalog = catalog
        self._pushes = pushes
        self._is_ended = is_ended
        self._verdicts: dict[Cache, Verdict] = {}

    async def run(self, timeout_s: float) -> dict[str, Any]:
        """``given``: caches that are elsewhere now; ``waiting``: those that are not; ``reasons``: how many by why."""
        if self._pushes is not None:
            work = asyncio.create_task(self._give_all(self._pushes))
            ended = asyncio.create_task(self._is_ended.wait())
            try:
                await asyncio.wait({work, ended}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in (work, ended):
                    task.cancel()
                results = await asyncio.gather(work, ended, return_exceptions=True)
            if isinstance(results[0], Exception):
                raise results[0]
        return self._report()

    async def _give_all(self, pushes: Pushes) -> None:
        while left := [cache for cache in self._held() if self._verdicts.get(cache) not in _FOR_GOOD]:
            caches = iter(left)
            async with asyncio.TaskGroup() as group:
                for _ in range(AT_A_TIME):
                    group.create_task(self._give(pushes, caches))
            if not pushes.has_places:
                return
            await asyncio.sleep(AGAIN_S)

    async def _give(self, pushes: Pushes, caches: Iterator[Cache]) -> None:
        for cache in caches:
            self._verdicts[cache] = await pushes.give_now(cache)
            await asyncio.sleep(0)  # other calls in between

    def _held(self) -> list[Cache]:
        return [cache for space in self._catalog.spaces.values() for cache in space.caches()]

    def _report(self) -> dict[str, Any]:
        none = Verdict.NOWHERE if self._pushes is None else None
        verdicts = Counter(self._verdicts.get(cache, none) for cache in self._held())
        given = verdicts.pop(Verdict.GIVEN, 0)
        reasons = {NO_TIME if why is None else why.value: count for why, count in verdicts.items()}
        return {"given": given, "waiting": verdicts.total(), "reasons": reasons}
