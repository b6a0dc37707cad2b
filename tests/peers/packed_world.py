"""Records whose rows have a form of 8 bits, and a node of a namespace that says so."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from kvservice.kernels.cpu_int8 import round_rows
from kvservice.model.cache import CacheMeta, MasterReference
from kvservice.model.geometry import Geometry, attention_geometry
from kvservice.model.identity import INT8, Identity
from kvservice.storage.buffer import Bytes
from tests.peers.stream_world import BIG, BIG_TOKENS, Owner, make_record, owner_node
from tests.server.builders import Planes, diff_of, make_identity, make_meta, make_planes, make_relative

HALF = attention_geometry(layers=8, heads=4, head_size=64, dtype="float16")
"""BIG with another storage type."""
REPLACED = range(100, 164)
"""Rows of a mirror that are its own: 32 KiB a plane."""


def lossy(geometry: Geometry = BIG) -> Identity:
    return replace(make_identity(geometry), lossy=INT8)


def rounded_planes(geometry: Geometry = BIG, tokens: int = BIG_TOKENS, seed: int = 0) -> Planes:
    planes = make_planes(geometry, tokens, seed)
    for layer in planes:
        for bits, plane in zip(layer, geometry.planes, strict=True):
            round_rows(bits, plane.head_size, geometry.dtype)
    return planes


def rounded_master(
    identity: Identity, name: object = "one", tokens: int = BIG_TOKENS, seed: int = 0
) -> tuple[CacheMeta, Bytes, int]:
    """Its record and its header's checksum."""
    meta = make_meta(identity, name, tokens=tokens)
    return meta, *make_record(meta, rounded_planes(identity.geometry, tokens, seed))


def rounded_mirror(
    identity: Identity, master: CacheMeta, planes: Planes, reference: MasterReference, rows: Sequence[int] = REPLACED
) -> tuple[CacheMeta, Planes, Any]:
    """A cache of the master's segment elsewhere: its meta, its dense planes, and in which rows it is its own."""
    geometry = identity.geometry
    meta = make_meta(identity, "one", ["x"], tokens=master.tokens, master=reference)
    moved = make_relative(identity, planes, master.position, meta.position, rows=rows)
    for layer in moved:
        for bits, plane in zip(layer, geometry.planes, strict=True):
            own = bits[rows]
            round_rows(own, plane.head_size, geometry.dtype)
            bits[rows] = own
    return meta, moved, diff_of(identity, planes, master.position, moved, meta.position)


def mirror_record(identity: Identity, rows: Sequence[int] = REPLACED) -> Bytes:
    planes, master = rounded_planes(identity.geometry), make_meta(identity, "one", tokens=BIG_TOKENS)
    meta, moved, runs = rounded_mirror(identity, master, planes, MasterReference(master.key.context, 5), rows)
    return make_record(meta, moved, runs)[0]


async def store_rounded(owner: Owner, name: str = "one") -> CacheMeta:
    """A master of 4 MiB at the owner."""
    meta = make_meta(owner.identity, name, tokens=BIG_TOKENS)
    await owner.client.store(meta, rounded_planes(owner.identity.geometry, seed=len(name)), prefill_s=0.5)
    return meta


@asynccontextmanager
async def lossy_node(identity: Identity | None = None, **changes: Any) -> AsyncIterator[Owner]:
    """See ``owner_node``. ``identity``: of the namespace that its client stores in."""
    async with owner_node(**changes) as owner:
        owner.client.close()
        owner.identity = identity or lossy()
        owner.client = owner.world.client(owner.identity)
        yield owner
