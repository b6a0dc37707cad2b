"""Where other nodes stand with segments that are not found here: who owns them, and what they say. For people.

Nothing is brought here; to who is asked it is a question like that of a lookup. A place that is asked is asked once,
with the usual deadline, in the names of the one tenant whose prompt it is; what it leases for its answer is let go of
at once. Cold storage is not asked: that costs a request a key.
"""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from kvservice.caches import Space
from kvservice.lookup import Asked
from kvservice.model.errors import KVServiceError, UnavailableError
from kvservice.model.explanation import PlaceAnswer, PlaceExplanation, Reason, SegmentExplanation
from kvservice.model.segment import SegmentId
from kvservice.peers.call import SilentError
from kvservice.sharing.cluster import Cluster
from kvservice.sharing.fetches import let_go
from kvservice.sharing.place import Place, Question
from kvservice.sharing.sharing import Sharing

if TYPE_CHECKING:
    from kvservice.node import Node  # which imports what this explains to

ASKED_MAX = 512
"""Segments that places are asked about: one question of a link."""
SELF, COLD = "self", "cold"
_NOT_HERE = frozenset(Reason) - {Reason.FOUND, Reason.WRONG_BYTES, Reason.NO_ROOM, Reason.TOKEN_COUNT}
_running: set["asyncio.Task[dict[int, PlaceAnswer]]"] = set()


class Unfound(NamedTuple):
    """A segment, how it was asked for, the segments before it (flat), and why it is not found."""

    segment: SegmentId
    asked: Asked
    marks: bytes
    why: SegmentExplanation


async def with_places(
    node: "Node", space: Space, explained: Sequence[Unfound], *, asks: bool
) -> list[SegmentExplanation]:
    """Each explanation, those of what is not here with the places where it belongs. ``asks``: put one question to each
    node that owns some of it.
    """
    sharing, found = node.sharing, [one.why for one in explained]
    if sharing is None:
        return found
    standing: dict[int, list[tuple[Place | None, PlaceExplanation]]] = {}
    for index, one in enumerate(explained):
        if index % node.limits.explain_slice == 0:
            await asyncio.sleep(0)
        if one.why.reason in _NOT_HERE:
            standing[index] = list(_standing(sharing, one.segment))
    said = await _ask_all(space, explained, standing) if asks else {}
    for index, places in standing.items():
        told = [_told(sharing, place, one, explained[index].segment, said, index) for place, one in places]
        found[index] = replace(found[index], places=tuple(told))
    return found


_Said = dict[tuple[str, int], PlaceAnswer]


def _standing(sharing: Sharing, segment: SegmentId) -> Iterator[tuple[Place | None, PlaceExplanation]]:
    """Its owners, whatever state they are in, who else is asked for it, and storage behind all of them."""
    directory = sharing.directory
    if isinstance(directory, Cluster):
        for member, place, is_us in directory.standing(segment):
            state = SELF if is_us else member.state.value
            yield place, PlaceExplanation(member.name or str(member.address), state, member.is_answering)
    for storage in directory.storages():
        yield storage, PlaceExplanation(storage.name, COLD, is_answering=True)


def _told(
    sharing: Sharing, place: Place | None, one: PlaceExplanation, segment: SegmentId, said: _Said, index: int
) -> PlaceExplanation:
    if place is None:
        return one
    answer = said.get((place.name, index))
    if answer is not None:
        return replace(one, answer=answer)
    last = sharing.finder.answers.of(place.name, segment)
    return one if last is None else replace(one, answer=last[0], age_s=last[1])


async def _ask_all(
    space: Space,
    explained: Sequence[Unfound],
    standing: "dict[int, list[tuple[Place | None, PlaceExplanation]]]",
) -> _Said:
    """What each place that answers says of the first ASKED_MAX segments of its."""
    by_place: dict[Place, list[int]] = {}
    for index, places in standing.items():
        for place, one in places:
            asked = by_place.setdefault(place, []) if place is not None and one.state not in (SELF, COLD) else None
            if asked is not None and len(asked) < ASKED_MAX:
                asked.append(index)
    tasks = {place: asyncio.create_task(_ask(place, space, explained, some)) for place, some in by_place.items()}
    for task in tasks.values():  # each ends by itself and lets go, also if nobody waits for it any more
        _running.add(task)
        task.add_done_callback(_running.discard)
    if tasks:
        await asyncio.wait(tasks.values())
    return {(place.name, index): answer for place, task in tasks.items() for index, answer in task.result().items()}


async def _ask(
    place: Place, space: Space, explained: Sequence[Unfound], indexes: Sequence[int]
) -> dict[int, PlaceAnswer]:
    questions = [
        Question(space, explained[index].segment, explained[index].asked, explained[index].marks) for index in indexes
    ]
    try:
        offers = await place.find(questions)
    except SilentError:
        return dict.fromkeys(indexes, PlaceAnswer.TOO_SLOW)
    except UnavailableError:
        return dict.fromkeys(indexes, PlaceAnswer.NOT_REACHED)
    except KVServiceError:
        return dict.fromkeys(indexes, PlaceAnswer.REFUSED)
    for offer in offers:
        if offer is not None:
            let_go(place, offer)
    return {
        index: PlaceAnswer.HAS_NOT if offer is None else PlaceAnswer.HAS
        for index, offer in zip(indexes, offers, strict=True)
    }
