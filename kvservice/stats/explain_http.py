"""POST /explain: why a prompt's segments, or one key, are found or not. Reads the node, changes nothing.

Parsing and hashing run in a thread, explaining in slices on the loop; so many questions at a time, others are told to
come back. The question must be JSON by its type, so that no page of another site can ask without being allowed to.
"""

import asyncio
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from aiohttp import web

from kvservice.caches import Space
from kvservice.explaining import SpaceExplainer
from kvservice.explaining_others import Unfound, with_places
from kvservice.lookup import find
from kvservice.model.differences import differences
from kvservice.model.errors import InvalidInputError, KVServiceError, LimitError
from kvservice.model.segment import CacheKey
from kvservice.stats.explain_document import (
    ElsewhereDocument,
    ExplainDocument,
    ExplainedSegmentDocument,
    elsewhere_document,
    explain_document,
    segment_document,
)
from kvservice.stats.explain_request import AskedSegment, ExplainQuestion, parse_question
from kvservice.stats.http import refusal

if TYPE_CHECKING:
    from kvservice.node import Node

ENCODED_SLICE = 64
QUESTIONS_MAX = 2
"""Answered at a time; a question may cost a second of the loop, in slices."""


def add_explain(application: web.Application, node: "Node") -> None:
    """Let ``application`` answer POST /explain."""
    turns = asyncio.Semaphore(QUESTIONS_MAX)

    async def explain(request: web.Request) -> web.Response:
        if request.content_type != "application/json":
            return refusal(InvalidInputError("ask with Content-Type: application/json"), status=415)
        if turns.locked():
            return refusal(LimitError(f"{QUESTIONS_MAX} questions are being answered; ask again"), status=429)
        async with turns:
            try:
                question = await asyncio.to_thread(parse_question, await request.read())
                return web.json_response(text=await _encoded(await explain_question(node, question)))
            except KVServiceError as error:
                return refusal(error)

    application.router.add_post("/explain", explain)


async def explain_question(node: "Node", question: ExplainQuestion) -> ExplainDocument:
    """The answer. Raises InvalidInputError, LimitError."""
    space = _space(node, question)
    explainer, key = SpaceExplainer(node, space), question.key
    if key is None:
        asked = await asyncio.to_thread(question.segments, space.namespace)
    else:
        asked = [_asked_for_key(space, explainer, key)]
    limit = node.limits.explain_segments_max
    if len(asked) > limit:
        raise LimitError(f"{len(asked)} segments to explain, the limit is {limit}; ask about the prompt's start")
    whys = await with_places(node, space, await _explained(node, explainer, asked), asks=question.asks_others)
    explained, segments = list(zip(asked, whys, strict=True)), list[ExplainedSegmentDocument]()
    for index, (one, why) in enumerate(explained):
        if index % node.limits.explain_slice == 0:
            await asyncio.sleep(0)
        segments.append(segment_document(one, why))
    return explain_document(
        space.identity,
        explained,
        segments=segments,
        held_segments=len(space.families),
        lengths=explainer.lengths(),
        remembered_s=node.departures.remembered_s,
        has_ssd=node.ssd is not None,
        elsewhere=await _elsewhere(node, explainer, question) if explainer.has_missed and key is None else [],
    )


async def _explained(node: "Node", explainer: SpaceExplainer, asked: Sequence[AskedSegment]) -> list[Unfound]:
    explained = list[Unfound]()
    for index, one in enumerate(asked):
        if index % node.limits.explain_slice == 0:
            await asyncio.sleep(0)
        explained.append(Unfound(one.segment, one, one.marks, explainer.explain(one.segment, one, one.marks)))
    return explained


async def _encoded(document: ExplainDocument) -> str:
    """As JSON, in slices: the encoder lets nobody else run, and 8,192 segments are 10 MB."""
    parts = list[str]()
    for index, segment in enumerate(document["segments"]):
        if index % ENCODED_SLICE == 0:
            await asyncio.sleep(0)
        parts.append(json.dumps(segment))
    rest = json.dumps({name: value for name, value in document.items() if name != "segments"})
    return f'{rest[:-1]}, "segments": [{", ".join(parts)}]}}'


def _space(node: "Node", question: ExplainQuestion) -> Space:
    space = node.catalog.spaces.get(question.namespace)
    if space is not None:
        return space
    if question.identity is None:
        raise InvalidInputError(
            f"nothing is held for namespace {question.namespace.hex()} and no session has it; give its identity, to "
            "hear what differs from those that are"
        )
    return Space(question.namespace, question.identity)


def _asked_for_key(space: Space, explainer: SpaceExplainer, key: CacheKey) -> AskedSegment:
    """The question that a lookup which knows the segment would ask."""
    family = space.families.get(key.segment)
    if family is None:
        tokens = next((tokens for tokens, _ in explainer.lengths()), 0)  # any that does not seem strange
        return AskedSegment(key.segment, (key.context,), 0, tokens)
    cache = family.members.get(key.context)
    position = 0 if cache is None else cache.position
    return AskedSegment(key.segment, (key.context,), position, family.tokens, b"" if cache is None else cache.marks)


async def _elsewhere(node: "Node", explainer: SpaceExplainer, question: ExplainQuestion) -> list[ElsewhereDocument]:
    """Other identities of the tenant, and how much of the prompt each would find."""
    found = []
    for other in explainer.known_spaces():
        await asyncio.sleep(0)  # comparing two identities takes up to 3 ms
        asked = await asyncio.to_thread(question.segments, other.namespace) if other.families else []
        what = differences(explainer.space.identity, other.identity)
        found.append(elsewhere_document(other.identity, len(other.families), _count(node, other, asked), what))
    return found


def _count(node: "Node", space: Space, asked: Sequence[AskedSegment]) -> int:
    is_pinned, limit = bool(space.pinned_reason), node.limits.candidates_max
    findings = (
        find(space.families.get(one.segment), one, one.marks, is_pinned=is_pinned, candidates_max=limit)
        for one in asked
    )
    return sum(finding.cache is not None for finding in findings)
