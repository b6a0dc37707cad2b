"""Records to keep in remote places, under keys of their own."""

import dataclasses

import numpy as np

from kvservice.model.geometry import attention_geometry
from kvservice.model.segment import CacheKey, ContextId, SegmentId
from kvservice.storage.arrival import RecordArrival
from kvservice.storage.buffer import Bytes
from kvservice.storage.record import read_head
from kvservice.storage.remote.contract import OnPiece, RemoteName, RemoteRecord, RemoteTier, Wanted
from tests.storage.conftest import RecordBuilder

SEGMENT = 7
SMALL, LARGE, DEEP = (2, 5), (5, 1100), (1300, 1)
"""(layers, tokens): 1 KB; 11 MB, which no place moves in one piece; a head of 14 KB."""


def make_record(
    segment: int = SEGMENT, context: int = 0, *, size: tuple[int, int] = SMALL, seed: int = 0
) -> tuple[RemoteName, Bytes]:
    """A master with the given key; equal arguments give equal bytes."""
    build, (layers, tokens) = RecordBuilder(), size
    heads, head_size = (8, 64) if size == LARGE else (2, 4)
    geometry = attention_geometry(layers=layers, heads=heads, head_size=head_size, dtype="bfloat16")
    meta = build.meta(tokens=tokens, geometry=geometry)
    key = CacheKey(SegmentId(bytes([segment]) * 32), ContextId(context.to_bytes(32, "little")))
    meta = dataclasses.replace(meta, key=key)
    return RemoteName(meta.namespace, key.segment, key.context), build.master(meta, seed)


def wanted(*names: RemoteName, others_max: int = 0) -> Wanted:
    """All these contexts of the first one's segment."""
    return Wanted(names[0].namespace, names[0].segment, tuple(name.context for name in names), others_max)


async def find_one(tier: RemoteTier, name: RemoteName) -> RemoteRecord | None:
    """What the place says of one name."""
    ((*found,),) = await tier.find([wanted(name)])
    assert len(found) <= 1
    return found[0] if found else None


class Target:
    """Memory for a record, dirty before, and what was told of it. ``layers``: how many were known to be right, then."""

    def __init__(self, record: RemoteRecord) -> None:
        self.bytes: Bytes = np.full(record.record_bytes, 0xEE, np.uint8)
        self.pieces: list[tuple[int, int]] = []
        self.layers: list[int] = []
        meta = record.head.meta
        self._arrival = RecordArrival(self.bytes, meta.namespace, meta.key, record.head.generation, meta.master)

    def on_piece(self, start: int, end: int) -> None:
        self.pieces.append((start, end))
        self.layers.append(self._arrival.arrived(start, end))


async def fetch(tier: RemoteTier, record: RemoteRecord, on_piece: OnPiece | None = None) -> Target:
    """The whole record, verified as a node would."""
    target = Target(record)
    await tier.fetch(record, target.bytes, on_piece or target.on_piece)
    return target


def same(left: Bytes, right: Bytes) -> bool:
    return bool(np.array_equal(left, right))


assert read_head(make_record(size=DEEP)[1]).layout.header_bytes > 8192
