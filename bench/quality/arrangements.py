"""Where a reader's segments were cached, and in which order it reads them. Pure: token ids in, token ids out."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

from bench.quality.worlds import Tokens, World
from kvservice.client.rounds import Part, PartKind

GROWN_TOKENS = 24
"""So much longer is a reader's history now than when it read the run before."""


class Order(Enum):
    """The order of the segments in a reader's prompt, against the order in which the round knows them."""

    SAME = "same"
    LEFT_OUT = "one left out"
    ROTATED = "rotated"
    SHUFFLED = "shuffled"


class Source(Enum):
    """Whose caches of the segments there are."""

    MEMBER = "a member"
    """Another member of the round, behind its own history, in the round's order."""
    OWN = "itself, before"
    """The reader, behind a shorter form of its own history, in the round's order."""
    BARE = "the run alone"
    """The run with nothing before it, in the round's order."""
    PRODUCERS = "producers"
    """Each segment as its producer computed it, behind the producer's history and request."""
    ALONE = "each alone"
    """Each segment with nothing before it."""
    THREE_MEMBERS = "three members"
    """Three members, each with an order of its own: three masters a family."""


@dataclass(frozen=True, slots=True)
class Arrangement:
    """A source and an order."""

    source: Source
    order: Order

    @property
    def text(self) -> str:
        """For a table."""
        return f"{self.order.value}, from {self.source.value}"


@dataclass(frozen=True, slots=True)
class SourcePrompt:
    """A prompt that was computed in full before. ``is_run_only``: of it only the last segment is kept."""

    parts: tuple[Part, ...]
    is_last_only: bool = False


def read_order(world: World, order: Order, reader: int) -> list[int]:
    """Indices of the segments in the reader's prompt."""
    indices = list(range(len(world.segments)))
    if order is Order.LEFT_OUT:
        indices.remove(world.own_segment(reader))
    elif order is Order.ROTATED:
        turn = max(1, len(indices) * 3 // 8)
        indices = indices[turn:] + indices[:turn]
    elif order is Order.SHUFFLED:
        indices = shuffled(len(indices), seed=100 + reader)
    return indices


def shuffled(count: int, seed: int) -> list[int]:
    """An order in which no segment follows the one that it follows in the round's order."""
    draw = random.Random(seed)
    indices = list(range(count))
    for _ in range(1000):
        draw.shuffle(indices)
        if all(later - earlier != 1 for earlier, later in pairwise(indices)) and indices[0]:
            return indices
    return indices[::-1]  # of three segments only the reverse is left


def reader_parts(world: World, order: Order, reader: int) -> tuple[Part, ...]:
    """The reader's prompt without the question."""
    return _behind(world, world.agents[reader].history, read_order(world, order, reader))


def overlap(world: World, arrangement: Arrangement, reader: int) -> float:
    """How far the segments before each cached segment are those before it in the reader's prompt, 0 to 1.

    Of each segment: those that stand before it in both, over those that stand before it in either, order apart; 1 where
    there are none. The best source counts. The mean over the reader's segments, weighted by tokens.
    """
    mine = _shared(reader_parts(world, arrangement.order, reader))
    stored = [_shared(one.parts) for one in source_prompts(world, arrangement.source, reader)]
    total = 0.0
    for index, segment in enumerate(mine):
        before = set(mine[:index])
        found = [set(theirs[: theirs.index(segment)]) for theirs in stored if segment in theirs]
        total += len(segment) * max(_jaccard(before, theirs) for theirs in found)
    return total / sum(len(segment) for segment in mine)


def _shared(parts: Sequence[Part]) -> list[Tokens]:
    return [tuple(tokens) for kind, tokens in parts if kind is PartKind.SHARED]


def _jaccard(one: set[Tokens], other: set[Tokens]) -> float:
    return len(one & other) / len(one | other) if one | other else 1.0


def source_prompts(world: World, source: Source, reader: int) -> list[SourcePrompt]:
    """What was computed and stored before the reader comes."""
    in_order = range(len(world.segments))
    history = world.agents[reader].history
    match source:
        case Source.MEMBER:
            return [SourcePrompt(_behind(world, world.agents[world.leader].history, in_order))]
        case Source.OWN:
            return [SourcePrompt(_behind(world, history[:-GROWN_TOKENS], in_order))]
        case Source.BARE:
            return [SourcePrompt(_behind(world, (), in_order))]
        case Source.PRODUCERS:
            return [
                SourcePrompt(_behind(world, world.agents[producer].history + world.request, [index]), is_last_only=True)
                for index, producer in enumerate(world.producers)
            ]
        case Source.ALONE:
            return [SourcePrompt(_behind(world, (), [index])) for index in in_order]
        case Source.THREE_MEMBERS:
            others = [world.leader, *(one for one in range(len(world.agents)) if one not in (world.leader, reader))]
            return [
                SourcePrompt(_behind(world, world.agents[one].history, shuffled(len(world.segments), 500 + one)))
                for one in others[:3]
            ]


def _behind(world: World, history: Tokens, order: Sequence[int]) -> tuple[Part, ...]:
    own: tuple[Part, ...] = ((PartKind.PRIVATE, history),) if history else ()
    return (*own, *((PartKind.SHARED, world.segments[index]) for index in order))
