"""Looks caches up and compares every byte of every layer with the oracle, while the record still comes from SSD."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvservice.client.arrivals import Arrivals
from kvservice.client.session import NO_LEASE, Session
from kvservice.kernels.cpu import materialise_layer
from kvservice.kernels.shapes import MirrorRows
from kvservice.model.cache import Extent, MasterReference, Tier
from kvservice.model.errors import CorruptError
from kvservice.model.identity import Identity
from kvservice.model.plan import Location, MissReason, Outcome
from kvservice.model.segment import CacheKey, ContextId
from kvservice.storage.record import RecordReader
from kvservice.wire.v1 import cache_pb2 as wire
from tests.crash.oracle import Book, BrokenError
from tests.server.builders import query, rotation

Bits = list[np.ndarray]  # of one layer, by plane
UNKNOWN = (MissReason.NO_ROOM,)
"""Such a miss says nothing of what is there."""


@dataclass(slots=True)
class Seen:
    """Counts of what reads gave."""

    hits: int = 0
    from_ssd: int = 0
    misses: int = 0
    corrupt: int = 0
    no_room: int = 0


class Reader:
    """Reads keys of one book through one session. ``is_final``: nothing is written meanwhile, a miss is for good."""

    def __init__(self, session: Session, book: Book, seen: Seen, *, is_final: bool = False) -> None:
        self._session = session
        self._book = book
        self._seen = seen
        self._is_final = is_final

    def read(self, keys: Sequence[CacheKey]) -> list[CacheKey]:
        """Look all up under one lease and judge each. Returns those that nothing can be said of: ask again."""
        found, lease = self._session.lookup([query(self._book.last(key).meta) for key in keys])
        arrivals = Arrivals(self._session, lease)
        try:
            replies = [prompt.segments[0] for prompt in found.prompts]
            return [key for key, reply in zip(keys, replies, strict=True) if not self._judge(key, reply, arrivals)]
        finally:
            if lease.id != NO_LEASE:
                self._session.release([lease.id])

    def read_shifted(self, key: CacheKey) -> None:
        """Ask for the segment in a context that nobody stored: whatever answers must be what its own key holds."""
        asked = query(self._book.last(key).meta, accepted_contexts=[], may_shift=True)
        found, lease = self._session.lookup([asked])
        reply = found.prompts[0].segments[0]
        if lease.id == NO_LEASE:
            return
        try:
            self._judge(CacheKey(key.segment, ContextId(reply.context)), reply, Arrivals(self._session, lease))
        finally:
            self._session.release([lease.id])

    def _judge(self, key: CacheKey, reply: wire.SegmentReply, arrivals: Arrivals) -> bool:
        if reply.outcome == Outcome.HIT:
            self._judge_hit(key, reply, arrivals)
            return True
        reason = MissReason(reply.miss_reason)
        if reason in UNKNOWN:
            self._seen.no_room += 1
            return False
        entry = self._book.entries[key]
        if reply.outcome == Outcome.CORRUPT:
            self._judge_corrupt(key, "the lookup said so")
        elif entry.is_due:
            raise BrokenError(f"a cache is not back: {key} {reason.name}: {self._book.story(key)}")
        else:
            self._seen.misses += 1
            self._book.missed(key, reason.name.lower(), is_final=self._is_final)
        return True

    def _judge_hit(self, key: CacheKey, reply: wire.SegmentReply, arrivals: Arrivals) -> None:
        entry = self._book.entries.get(key)
        if entry is None or not entry.allowed:
            raise BrokenError(f"a phantom: {key} is a hit, and nothing is stored under it: {self._book.story(key)}")
        self._seen.from_ssd += Tier.SSD in (reply.record.tier, reply.master.tier)
        left = list(entry.allowed)
        try:
            for layer, planes in enumerate(self._layers(entry.allowed[0].kind.identity, reply, arrivals)):
                left = [draft for draft in left if _are_equal(draft.planes[layer], planes)]
                if not left:
                    raise BrokenError(f"wrong bytes: {key}, layer {layer} of a {_kind(reply)}: {self._book.story(key)}")
        except CorruptError as error:
            self._judge_corrupt(key, str(error))
            return
        self._seen.hits += 1
        is_dense = not reply.master_context
        reference = MasterReference(key.context, reply.record.generation) if is_dense else None
        self._book.seen(key, left, reference, is_final=self._is_final)

    def _judge_corrupt(self, key: CacheKey, why: str) -> None:
        if not self._book.entries[key].is_tainted:
            raise BrokenError(f"{key} is corrupt, and nobody touched it: {why}: {self._book.story(key)}")
        self._seen.corrupt += 1
        self._book.missed(key, "corrupt", is_final=False)

    def _layers(self, identity: Identity, found: wire.SegmentReply, arrivals: Arrivals) -> Iterator[Bits]:
        """The cache's bits at its own position, each layer as soon as it is there."""
        is_mirror = bool(found.master_context)
        places = [_location(found.record), *([_location(found.master)] if is_mirror else [])]
        readers: list[RecordReader] = []
        for layer in range(identity.geometry.layers):
            for place in places:
                arrivals.wait_for(place, layer + 1)
            readers = readers or [_opened(self._session, place) for place in places]
            for reader in readers:
                reader.verify_layer(layer)
            if is_mirror:
                yield _restored(identity, readers[0], readers[1], layer)
            else:
                yield list(readers[0].master_planes(layer))


def _opened(session: Session, place: Location) -> RecordReader:
    reader = RecordReader(session.read_view(place))
    if reader.generation != place.generation:
        raise BrokenError(f"{reader}: generation {reader.generation:016x}, the lookup said {place.generation:016x}")
    return reader


def _restored(identity: Identity, mirror: RecordReader, master: RecordReader, layer: int) -> Bits:
    reference = mirror.meta.master
    if reference is None or reference.generation != master.generation:
        raise BrokenError(f"{mirror} stands on {reference}, the lookup gave {master} of {master.generation:016x}")
    runs, rows = mirror.mirror(layer)
    return list(
        materialise_layer(
            master.master_planes(layer),
            master.meta.position,
            MirrorRows(mirror.meta.position, runs, rows),
            identity.geometry.planes,
            rotation(identity, layer),
            identity.geometry.dtype,
        )
    )


def _are_equal(ours: Sequence[np.ndarray], theirs: Bits) -> bool:
    return all(np.array_equal(one, other) for one, other in zip(ours, theirs, strict=True))


def _kind(reply: wire.SegmentReply) -> str:
    return "mirror" if reply.master_context else "dense cache"


def _location(place: wire.Location) -> Location:
    return Location(Tier(place.tier), Extent(place.extent.offset, place.extent.length), place.generation)
