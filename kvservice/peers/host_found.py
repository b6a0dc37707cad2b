"""What a question of another node found: noted by the loop, made into an answer by the thread of a connection.

With the answer may go the first layer of what was found, so that it is usable after one round trip. Such records are
held until they were taken: the lease may run out while a slow caller reads.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from kvservice.caches import Cache
from kvservice.lookup import Finding
from kvservice.model.errors import CorruptError, RecordFormatError
from kvservice.node import Node
from kvservice.peers.host import Ahead, Answer, FoundHead
from kvservice.peers.host_held import NodeHeld
from kvservice.peers.host_loop import NodeLoop
from kvservice.storage.buffer import Bytes
from kvservice.storage.record_header import PREFIX_BYTES, said_header_bytes

AHEAD_RECORDS_MAX = 64
"""Of one question, whose first layers go with the answer."""


class FoundRecord(NamedTuple):
    """Where a record lies that was found; ``held``: if its first layer may go along."""

    view: Bytes
    prefill_s: float
    held: NodeHeld | None = None

    def read(self, ahead_bytes: int = 0) -> FoundHead:
        """A copy of prefix and header; whoever gets it verifies it."""
        header_bytes = said_header_bytes(self.view[:PREFIX_BYTES].tobytes())
        return FoundHead(self.view[: PREFIX_BYTES + header_bytes].tobytes(), self.prefill_s, ahead_bytes)


class FoundPlace(NamedTuple):
    """A finding and where its records lie, as the loop knew it: the lease holds what is read there; if that ran out,
    rubbish is read, which nobody believes."""

    finding: Finding
    record: FoundRecord | None = None
    master: FoundRecord | None = None

    @property
    def records(self) -> Iterator[FoundRecord]:
        """A master before its mirror."""
        return (one for one in (self.master, self.record) if one is not None)


def places_of(node: Node, loop: NodeLoop, findings: Iterable[Finding], ahead_bytes: int) -> list[FoundPlace]:
    """On the loop. Holds, once each, records whose first layers have ``ahead_bytes`` in all, more or less."""
    held: dict[Cache, NodeHeld] = {}
    left = ahead_bytes

    def found(cache: Cache | None) -> FoundRecord | None:
        nonlocal left
        if cache is None:
            return None
        view = node.tier.arena.slice(cache.extent)
        layer_bytes = cache.record_bytes // cache.family.space.geometry.layers
        if cache in held or layer_bytes > left or len(held) >= AHEAD_RECORDS_MAX:
            return FoundRecord(view, cache.prefill_s)
        left -= layer_bytes
        node.catalog.hold(cache)
        held[cache] = NodeHeld(node, loop, cache, node.catalog.arriving.get(cache))
        return FoundRecord(view, cache.prefill_s, held[cache])

    places = []
    for finding in findings:
        master = found(None if finding.cache is None else finding.cache.master)  # sent before its mirror
        places.append(FoundPlace(finding, found(finding.cache), master))
    return places


def answers_of(places: Sequence[FoundPlace], ahead_bytes: int) -> tuple[tuple[Answer, ...], tuple[Ahead, ...]]:
    """By a connection's thread: answers, and what goes along: ``ahead_bytes`` at most. The rest is held no longer."""
    ahead: dict[int, Ahead] = {}
    left = ahead_bytes
    waiting = [one.held for place in places for one in place.records if one.held is not None]
    try:
        while waiting:
            first_bytes = _first_bytes(waiting[0])
            if not 0 < first_bytes <= left:
                break
            left -= first_bytes
            held = waiting.pop(0)
            ahead[id(held)] = Ahead(held, first_bytes)
        answers = tuple(_answer(place, ahead) for place in places)
    except BaseException:
        for one in ahead.values():
            one.held.release()
        raise
    finally:
        for held in waiting:
            held.release()
    return answers, tuple(ahead.values())


def _first_bytes(held: NodeHeld) -> int:
    """Up to the end of the first layer; 0 for rubbish, as where the lease ran out."""
    try:
        return held.first_layer_end
    except (CorruptError, RecordFormatError):
        return 0


def _answer(place: FoundPlace, ahead: dict[int, Ahead]) -> Answer:
    def read(one: FoundRecord | None) -> FoundHead | None:
        if one is None:
            return None
        found = ahead.get(id(one.held))
        return one.read(0 if found is None else found.bytes)

    finding = place.finding
    return Answer(finding.match, finding.miss_reason, finding.affinity, read(place.record), read(place.master))
