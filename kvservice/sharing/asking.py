"""Questions that are put to places, all of them at the same time, and what becomes of their answers.

Whoever asked may go before the last place has answered. What is offered then was leased for nobody: it is let go of.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from functools import partial

from kvservice.model.errors import KVServiceError, UnavailableError
from kvservice.model.explanation import PlaceAnswer
from kvservice.peers.call import SilentError
from kvservice.sharing.fetches import let_go
from kvservice.sharing.last_answers import LastAnswers
from kvservice.sharing.place import Offer, Place, Question
from kvservice.stats.counters import RemoteCounters

_LOG = logging.getLogger(__name__)
_Offers = list[Offer | None]


class Asking:
    """The loop's. A question that is out is never broken off but by ``stop``: its place ends it in bounded time."""

    def __init__(self, counters: RemoteCounters, answers: LastAnswers) -> None:
        self._counters = counters
        self._answers = answers
        self._unwanted: set[asyncio.Task[_Offers]] = set()

    async def ask(self, asked: Mapping[Place, Sequence[Question]]) -> list[_Offers]:
        """What each place offers for its questions, in order. A place that does not answer has nothing."""
        tasks = [asyncio.create_task(self._ask(place, questions)) for place, questions in asked.items()]
        try:
            await asyncio.wait(tasks)
            return [task.result() for task in tasks]
        except BaseException:
            for place, task in zip(asked, tasks, strict=True):
                self._unwanted.add(task)
                task.add_done_callback(partial(self._let_go, place))
            raise

    async def _ask(self, place: Place, questions: Sequence[Question]) -> _Offers:
        segments = [one.segment for one in questions]
        try:
            offers = await place.find(questions, place.ahead_bytes)
        except UnavailableError as error:
            is_silent = isinstance(error, SilentError)
            self._answers.note(place.name, segments, PlaceAnswer.TOO_SLOW if is_silent else PlaceAnswer.NOT_REACHED)
            self._counters.unreachable += len(questions)
            _LOG.warning("%d segments were not asked of %s: %s", len(questions), place.name, error)
        except KVServiceError as error:
            self._answers.note(place.name, segments, PlaceAnswer.REFUSED)
            _LOG.warning("%s refused a question: %s", place.name, error)
        else:
            for answer, has in ((PlaceAnswer.HAS, True), (PlaceAnswer.HAS_NOT, False)):
                some = [one for one, offer in zip(segments, offers, strict=True) if (offer is not None) is has]
                self._answers.note(place.name, some, answer)
            return offers
        return [None] * len(questions)

    def _let_go(self, place: Place, task: "asyncio.Task[_Offers]") -> None:
        self._unwanted.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            _LOG.error("a question to %s failed. Please report this", place.name, exc_info=error)
            return
        for offer in task.result():
            if offer is not None:
                let_go(place, offer)

    async def stop(self) -> None:
        """End what nobody waits for."""
        for task in self._unwanted:
            task.cancel()
        await asyncio.gather(*self._unwanted, return_exceptions=True)
