"""Which segments of a lookup to ask other places for, and whom. Nothing is asked that is here already."""

import asyncio
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from kvservice.caches import Space
from kvservice.limits import NodeLimits
from kvservice.lookup import Asked, affinity_of, find, marks_behind
from kvservice.model.explanation import PlaceAnswer
from kvservice.model.identity import Namespace
from kvservice.model.plan import Match, MissReason
from kvservice.model.segment import MARK_BYTES, SegmentId
from kvservice.sessions import Session
from kvservice.sharing.asking import Asking
from kvservice.sharing.deletes import Watch
from kvservice.sharing.fetches import Fetches, Source, let_go
from kvservice.sharing.last_answers import LastAnswers
from kvservice.sharing.place import Directory, Offer, Place, Question
from kvservice.sharing.worth import Found, Step, worth_loading
from kvservice.stats.counters import RemoteCounters
from kvservice.wire.v1 import cache_pb2 as wire

_ELSEWHERE = (
    MissReason.UNKNOWN_SEGMENT,
    MissReason.OTHER_CONTEXT,
    MissReason.PINNED,
    MissReason.LOW_AFFINITY,
)
"""Misses that another place may answer."""
ASK_AGAIN_S = 2.0
"""An approximation is held, and a better one is looked for elsewhere this often at most."""
SETTLED_MAX = 65536
SLICE = 256
"""Segments that are looked at before other calls get a turn, 5 to 10 us each."""
BEGIN_SLICE = 64
"""The same of those whose transfer begins, 0.1 ms each."""


_Trail = tuple[Space, list[Step]]


class _Offered(NamedTuple):
    source: Source
    found: Found


class Finder:
    """Asks places in the order of the directory, all of one order at the same time, and begins what they offer.

    ``is_gated``: what the engine computes sooner is left where it is. Long lookups let other calls in between.
    """

    def __init__(
        self,
        directory: Directory,
        fetches: Fetches,
        counters: RemoteCounters,
        limits: NodeLimits,
        clock: Callable[[], float],
        *,
        is_gated: bool = True,
    ) -> None:
        self._directory = directory
        self._fetches = fetches
        self._counters = counters
        self.answers = LastAnswers(clock)
        """For people who ask why there was no hit."""
        self._asking = Asking(counters, self.answers)
        self._candidates_max, self._slice = limits.candidates_max, min(limits.lookup_slice, SLICE)
        self._clock = clock
        self._is_gated = is_gated
        self._settled: OrderedDict[tuple[SegmentId, bytes], float] = OrderedDict()

    async def bring(self, session: Session, prompts: Iterable[wire.PromptQuery]) -> int:
        """Have on its way what other places hold of a lookup and this node does not; how many segments.

        Segments that are asked for twice are asked once. Takes one round trip a place and order of places. What the
        engine computes sooner than it comes stays where it is.
        """
        with self._fetches.deletes.watched() as watch:
            questions, trails = await self._questions(session, prompts)
            offers = await self._offers(questions, self._directory.sources)
            return await self._begin_all(offers, trails if self._is_gated else None, watch)

    async def bring_questions(
        self, questions: Sequence[Question], sources: Callable[[SegmentId], Sequence[Place]]
    ) -> int:
        """The same, for what is known not to be here, and wanted in any case."""
        with self._fetches.deletes.watched() as watch:
            return await self._begin_all(await self._offers(questions, sources), None, watch)

    async def stop(self) -> None:
        """End questions that nobody waits for any more."""
        await self._asking.stop()

    async def _offers(
        self, questions: Sequence[Question], sources: Callable[[SegmentId], Sequence[Place]]
    ) -> "dict[int, _Offered]":
        """By question. ``sources``: whom to ask for a segment, in order."""
        tries: dict[int, list[Place]] = {}
        for index, one in enumerate(questions):
            await self._let_others_in(index)
            tries[index] = list(sources(one.segment))
        self._counters.asked += sum(bool(places) for places in tries.values())
        offered: dict[int, _Offered] = {}
        try:
            while any(tries.values()):
                await self._ask_next(questions, tries, offered)
        except BaseException:
            _let_go_all(offered.values())
            raise
        return offered

    async def _ask_next(
        self, questions: Sequence[Question], tries: dict[int, list[Place]], offered: "dict[int, _Offered]"
    ) -> None:
        """Ask the next place of each question; ``tries``: whom to ask still."""
        by_place: dict[Place, list[int]] = {}
        for index, places in tries.items():
            if places:
                by_place.setdefault(places.pop(0), []).append(index)
        asked = {place: [questions[index] for index in some] for place, some in by_place.items()}
        for (place, some), offers in zip(by_place.items(), await self._asking.ask(asked), strict=True):
            way, namespaces = place.way, {one.space.namespace for one in asked[place]}
            speeds = {namespace: place.speed_of(namespace) for namespace in namespaces}
            for index, offer in zip(some, offers, strict=True):
                if offer is not None:
                    question = questions[index]
                    found = Found(question, offer, way, speeds[question.space.namespace])
                    offered[index] = _Offered(Source(question, place, tries[index]), found)
                    tries[index] = []

    async def _begin_all(self, offers: "dict[int, _Offered]", trails: Sequence[_Trail] | None, watch: Watch) -> int:
        """Begin what is worth it: all without ``trails``. Each offer is begun or let go of, whatever happens."""
        begun, left, slice_ = 0, deque(offers.items()), min(self._slice, BEGIN_SLICE)
        try:
            worth = offers.keys() if trails is None else await self._worth(offers, trails)
            self._counters.found += len(offers)
            self._counters.computed_sooner += len(offers) - len(worth)
            while left:
                index, (source, found) = left.popleft()
                if index in worth and is_better(source.question, found.offer):
                    begun += self._fetches.begin(source, found.offer, watch)
                else:
                    let_go(source.place, found.offer)
                if index not in worth:
                    self.answers.note(source.place.name, [source.question.segment], PlaceAnswer.COMPUTED_SOONER)
                if len(left) % slice_ == 0:
                    await asyncio.sleep(0)
        except BaseException:
            _let_go_all(one for _, one in left)
            raise
        return begun

    async def _worth(self, offers: "dict[int, _Offered]", trails: Sequence[_Trail]) -> set[int]:
        found = {index: one.found for index, one in offers.items()}
        worth: set[int] = set()
        for space, steps in trails:
            worth |= await worth_loading(steps, found, space, self._slice)
        return worth

    async def _let_others_in(self, count: int) -> None:
        """``count``: what was done before, one by one."""
        if count % self._slice == self._slice - 1:
            await asyncio.sleep(0)

    async def _questions(
        self, session: Session, prompts: Iterable[wire.PromptQuery]
    ) -> tuple[list[Question], list[_Trail]]:
        """What to ask, each once; and of every prompt its segments with what was asked for them."""
        questions: list[Question] = []
        known: dict[tuple[bytes, bytes, bytes], int] = {}
        trails: list[_Trail] = []
        looked_at = 0
        for prompt in prompts:
            space, marks = session.spaces.get(Namespace(prompt.namespace)), b""
            if space is None:
                continue
            steps: list[Step] = []
            for asked in prompt.segments:
                await self._let_others_in(looked_at)
                looked_at += 1
                key = (prompt.namespace, asked.segment, marks)
                question = None if key in known else self.question(space, SegmentId(asked.segment), asked, marks)
                if question is not None:
                    known[key] = len(questions)
                    questions.append(question)
                index = known.get(key)
                steps.append(Step(asked.tokens, index, index is None))
                marks = marks_behind(asked.segment, marks)
            trails.append((space, steps))
        return questions, trails

    def question(self, space: Space, segment: SegmentId, asked: Asked, marks: bytes) -> Question | None:
        """None if what is here will do. An approximation will if all segments before it agree, or if nobody had a
        better one some moments ago.
        """
        family, is_pinned = space.families.get(segment), bool(space.pinned_reason)
        finding = find(family, asked, marks, is_pinned=is_pinned, candidates_max=self._candidates_max)
        if finding.cache is None:
            return Question(space, segment, asked, marks) if finding.miss_reason in _ELSEWHERE else None
        if finding.match is not Match.SHIFTED or finding.affinity == len(marks) // MARK_BYTES:
            return None
        return Question(space, segment, asked, marks, finding.affinity) if self._is_due(segment, marks) else None

    def _is_due(self, segment: SegmentId, marks: bytes) -> bool:
        now_s, key = self._clock(), (segment, marks)
        if self._settled.get(key, -math.inf) > now_s - ASK_AGAIN_S:
            return False
        if len(self._settled) >= SETTLED_MAX:
            self._settled.popitem(last=False)
        self._settled[key] = now_s
        return True


def is_better(question: Question, offer: Offer) -> bool:
    """Does an offer answer a question, and better than what is here?"""
    meta, asked = offer.record.head.meta, question.asked
    if meta.position == asked.position and meta.key.context in asked.accepted_contexts:
        return True
    return asked.may_shift and affinity_of(b"".join(meta.preceding), question.marks) > question.affinity


def _let_go_all(offered: Iterable[_Offered]) -> None:
    for source, found in offered:
        let_go(source.place, found.offer)
