"""Questions that are asked on behalf of other nodes, which wait for a while only: the asking goes on behind them.

Whoever asks for the same thing meanwhile waits for the question that is open already.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from kvservice.model.errors import LimitError, UnavailableError
from kvservice.model.identity import Namespace
from kvservice.model.segment import SegmentId
from kvservice.sharing.place import Question

DELETES_MAX = 64
DELETE_WAIT_S = 0.4
"""A node that told this one to delete waits so long for storage behind it: less than its deadline, since what it asks
next waits behind that on the same connection."""
ASKING_MAX = 4096
"""Questions that are open at a time; what comes on top is not asked, and is a miss."""
_LOG = logging.getLogger(__name__)
_Key = tuple[Namespace, SegmentId, tuple[bytes, ...], int, bool, bytes, int]


class Behind:
    """``ask`` has on its way here what is found for questions; it ends in bounded time. The loop's."""

    def __init__(self, ask: Callable[[Sequence[Question]], Awaitable[object]]) -> None:
        self._ask = ask
        self._asking: dict[_Key, asyncio.Task[None]] = {}
        self._deleting: set[asyncio.Task[int]] = set()

    async def bring(self, questions: Sequence[Question], wait_s: float) -> None:
        """Return once all of these were asked, or the time is up."""
        new = {key: one for one in questions if (key := _key(one)) not in self._asking}
        if new and len(self._asking) + len(new) <= ASKING_MAX:
            task = asyncio.create_task(self._run(new))
            self._asking |= dict.fromkeys(new, task)
        tasks = {self._asking[key] for key in map(_key, questions) if key in self._asking}
        if tasks:
            done, _ = await asyncio.wait(tasks, timeout=wait_s)
            for task in done:
                task.result()

    async def _run(self, questions: dict[_Key, Question]) -> None:
        try:
            await self._ask(list(questions.values()))
        finally:
            for key in questions:
                del self._asking[key]

    async def delete(self, work: Coroutine[Any, Any, int], wait_s: float) -> int:
        """What ``work`` counts. Raises what it raises, and UnavailableError if it takes longer: then it goes on."""
        if len(self._deleting) >= DELETES_MAX:
            work.close()
            raise LimitError(f"{DELETES_MAX} deletes are under way in storage behind this node; repeat it later")
        task = asyncio.create_task(work)
        self._deleting.add(task)
        task.add_done_callback(self._note_deleted)
        await asyncio.wait([task], timeout=wait_s)
        if not task.done():
            raise UnavailableError("deleted on this node; storage behind it is still at it: repeat it until it is done")
        return task.result()

    def _note_deleted(self, task: "asyncio.Task[int]") -> None:
        self._deleting.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _LOG.warning("a delete for another node failed: %s", task.exception())

    async def stop(self) -> None:
        """End what is open."""
        tasks = {*self._asking.values(), *self._deleting}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _key(question: Question) -> _Key:
    asked = question.asked
    contexts = tuple(asked.accepted_contexts)
    where = question.marks, question.affinity
    return question.space.namespace, question.segment, contexts, asked.position, asked.may_shift, *where
