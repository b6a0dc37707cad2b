"""Builders of the server tests: identities, prompts, payload, and a node with an injected clock and worker."""

import asyncio
import zlib
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from kvservice.caches import Cache, group_of
from kvservice.calls import CacheCalls
from kvservice.kernels.cpu import diff_layer, materialise_layer, move_rows
from kvservice.kernels.shapes import MirrorRows, Rotation
from kvservice.limits import NodeLimits
from kvservice.model.cache import CacheMeta, MasterReference
from kvservice.model.geometry import Geometry, attention_geometry
from kvservice.model.identity import Identity
from kvservice.model.rope import pinned, rope_from_parameters
from kvservice.model.segment import (
    EXACT,
    CacheKey,
    Context,
    ContextId,
    SegmentId,
    root_context,
    segment_id,
)
from kvservice.node import Node
from kvservice.storage.arena import Arena
from kvservice.storage.host_tier import HostTier
from kvservice.storage.record import RecordReader, RecordWriter, master_layout, mirror_layout
from kvservice.wire.v1 import cache_pb2 as wire
from kvservice.worker import InlineWorker, Worker
from tests.server.accounts import check_accounts

T = TypeVar("T")
Planes = list[list[npt.NDArray[Any]]]
"""``planes[layer][plane]``: storage bits [tokens, row_elements]."""

EPOCH = 7
ARENA_BYTES = 1 << 20
TOKENS = 16
GEOMETRY = attention_geometry(layers=4, heads=2, head_size=16, dtype="bfloat16")


def make_identity(geometry: Geometry = GEOMETRY, *, is_pinned: bool = False, tenant: str = "test") -> Identity:
    size = max(plane.rotary_size for plane in geometry.planes)
    rotating = rope_from_parameters({"rope_theta": 10000.0}, head_size=size, max_positions=4096)
    rope = pinned("dynamic", "dynamic NTK, for a test", rotary_size=size) if is_pinned else rotating
    return Identity(tenant, "tiny", "r1", geometry, (rope,) * geometry.layers)


def make_segment(identity: Identity, name: object, tokens: int = TOKENS) -> SegmentId:
    """A segment that depends on ``name``."""
    seed = zlib.crc32(repr(name).encode())
    return segment_id(identity.namespace(), np.random.default_rng(seed).integers(0, 50_000, tokens).tolist())


def make_context(identity: Identity, history: Sequence[object] = (), tokens: int = TOKENS) -> Context:
    """What stands behind the segments that ``history`` names."""
    context = root_context(identity.namespace())
    for name in history:
        context = context.extend(make_segment(identity, name, tokens), tokens)
    return context


def make_meta(
    identity: Identity,
    name: object = "shared",
    history: Sequence[object] = (),
    *,
    tokens: int = TOKENS,
    provenance: str = EXACT,
    master: MasterReference | None = None,
) -> CacheMeta:
    """The cache of segment ``name`` behind ``history``."""
    context = make_context(identity, history)
    key = context.cache_key(make_segment(identity, name, tokens), provenance)
    return CacheMeta(
        identity.namespace(), key, context.position, tokens, identity.geometry, provenance, context.marks, master
    )


def make_planes(geometry: Geometry = GEOMETRY, tokens: int = TOKENS, seed: int = 0) -> Planes:
    """Random finite values as bits."""
    rng = np.random.default_rng(seed)
    bits = np.uint16 if geometry.element_bytes == 2 else np.uint32
    planes: Planes = []
    for _ in range(geometry.layers):
        planes.append([make_bits(rng, (tokens, plane.row_elements), bits) for plane in geometry.planes])
    return planes


def make_bits(rng: np.random.Generator, shape: tuple[int, ...], bits: Any) -> npt.NDArray[Any]:
    """Finite bfloat16 or float32 values, as bits."""
    values = rng.standard_normal(shape, np.float32).view(np.uint32) >> (32 - 8 * np.dtype(bits).itemsize)
    return np.asarray(values.astype(bits))


def rotation(identity: Identity, layer: int) -> Rotation:
    return Rotation(identity.rope[layer].frequencies, identity.rope[layer].is_interleaved)


def make_relative(
    identity: Identity, planes: Planes, position: int, new_position: int, *, rows: Sequence[int] = (), seed: int = 1
) -> Planes:
    """The same cache at another position, with new values in some rows of the last layers: a cheap mirror."""
    rng, geometry, moved = np.random.default_rng(seed), identity.geometry, []
    for layer, old in enumerate(planes):
        new = [
            move_rows(bits, position, new_position, plane, rotation(identity, layer), geometry.dtype)
            for bits, plane in zip(old, geometry.planes, strict=True)
        ]
        for bits in new:
            for row in rows:
                bits[row] = make_bits(rng, bits[row].shape, bits.dtype)
        moved.append(new)
    return moved


def diff_of(identity: Identity, master: Planes, position: int, member: Planes, member_position: int) -> Any:
    """``runs[layer][plane]`` as a client makes them."""
    return [
        diff_layer(
            theirs, position, ours, member_position, identity.geometry.planes, rotation(identity, layer),
            identity.geometry.dtype,
        )
        for layer, (theirs, ours) in enumerate(zip(master, member, strict=True))
    ]  # fmt: skip


class FakeClock:
    """Time that stands still until it is told."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class GatedWorker:
    """Parks every job until ``release``: what runs between a job's start and its end is the test's to say."""

    def __init__(self) -> None:
        self.parked: deque[asyncio.Event] = deque()

    async def run(self, function: Callable[[], T]) -> T:
        gate = asyncio.Event()
        self.parked.append(gate)
        try:
            await gate.wait()
        finally:
            result = function()  # as a thread would: it ends its work whatever becomes of its caller
        return result

    def release(self) -> None:
        self.parked.popleft().set()

    def close(self) -> None:
        assert not self.parked


async def until_parked(worker: GatedWorker) -> None:
    """Let tasks run until one of them waits for the worker."""
    for _ in range(20):
        if worker.parked:
            return
        await asyncio.sleep(0)
    raise AssertionError("no job was started")


class Client:
    """One session, by message."""

    def __init__(self, world: "World", welcome: wire.Welcome) -> None:
        self.world = world
        self.id = welcome.session_id
        self.welcome = welcome
        self.session = world.node.session(welcome.session_id, welcome.boot_epoch)
        self.ref = wire.SessionRef(session_id=welcome.session_id, boot_epoch=welcome.boot_epoch)

    async def call(self, name: str, request: Any) -> Any:
        request.session.CopyFrom(self.ref)
        return await self.world.calls.call(name, request)

    async def reserve(self, meta: CacheMeta, record_bytes: int, prefill_s: float = 0.0) -> wire.ReserveOutcome:
        item = wire.ReserveItem(
            namespace=meta.namespace, key=encode_key(meta.key), record_bytes=record_bytes, prefill_s=prefill_s
        )
        if meta.master is not None:
            item.master_context, item.master_generation = meta.master.context, meta.master.generation
        reply = await self.call("Reserve", wire.ReserveRequest(items=[item]))
        outcome: wire.ReserveOutcome = reply.outcomes[0]
        return outcome

    async def begin(self, meta: CacheMeta, planes: Planes, runs: Any = None, prefill_s: float = 0.0) -> tuple[int, int]:
        """Reserve and write: the reservation and the header checksum to commit it with."""
        layout = master_layout(meta) if meta.master is None else mirror_layout(meta, runs)
        outcome = await self.reserve(meta, layout.record_bytes, prefill_s)
        assert outcome.WhichOneof("outcome") == "reserved", outcome
        written = write_record(self.world.view(outcome.reserved.extent), meta, planes, runs)
        return outcome.reserved.id, written

    async def commit(self, reservation_id: int, header_checksum: int) -> wire.CommitOutcome:
        item = wire.CommitItem(reservation_id=reservation_id, header_checksum=header_checksum)
        reply = await self.call("Commit", wire.CommitRequest(items=[item]))
        outcome: wire.CommitOutcome = reply.outcomes[0]
        return outcome

    async def store(self, meta: CacheMeta, planes: Planes, runs: Any = None, prefill_s: float = 0.0) -> MasterReference:
        """Store a cache; the reference that mirrors of it need."""
        outcome = await self.commit(*await self.begin(meta, planes, runs, prefill_s))
        assert not outcome.error.code, outcome.error
        return MasterReference(meta.key.context, outcome.generation)

    async def lookup(self, *prompts: wire.PromptQuery, ttl_s: float = 0.0) -> wire.LookupReply:
        reply: wire.LookupReply = await self.call("Lookup", wire.LookupRequest(prompts=prompts, lease_ttl_s=ttl_s))
        return reply

    async def find(self, meta: CacheMeta, **changes: Any) -> tuple[wire.SegmentReply, int]:
        """Look up one cache by its own context: the answer, and the lease (0: none)."""
        reply = await self.lookup(query(meta, **changes))
        return reply.prompts[0].segments[0], reply.lease.id

    async def release(self, *leases: int) -> int:
        reply: wire.ReleaseReply = await self.call("Release", wire.ReleaseRequest(lease_ids=leases))
        return reply.released

    async def delete(self, *metas: CacheMeta) -> int:
        keys = [encode_key(meta.key) for meta in metas]
        reply: wire.DeleteReply = await self.call("Delete", wire.DeleteRequest(keys=keys))
        return reply.deleted

    async def commit_round(self, identity: Identity, *metas: CacheMeta) -> wire.CommitRoundReply:
        members = [encode_key(meta.key) for meta in metas]
        request = wire.CommitRoundRequest(round="r", namespace=identity.namespace(), members=members)
        reply: wire.CommitRoundReply = await self.call("CommitRound", request)
        return reply

    def close(self) -> None:
        self.world.calls.close_session(self.id)


class World:
    """A node with nothing real but its arithmetic and memory."""

    def __init__(
        self, *, arena_bytes: int = ARENA_BYTES, limits: NodeLimits | None = None, worker: Worker | None = None
    ) -> None:
        self.clock = FakeClock()
        self.arena = Arena(arena_bytes)
        self.node = Node(
            limits or NodeLimits(),
            HostTier(self.arena),
            clock=self.clock,
            boot_epoch=EPOCH,
            data_socket="/nowhere",
            worker=worker or InlineWorker(),
        )
        self.calls = CacheCalls(self.node)

    def client(self, *identities: Identity, may_write: bool = True) -> Client:
        texts = [identity.canonical_json() for identity in identities or (make_identity(),)]
        hello = wire.Hello(client_name="test", wants_write=may_write, identities=texts)
        return Client(self, self.calls.open_session(hello))

    def view(self, extent: wire.Extent) -> npt.NDArray[np.uint8]:
        return self.arena.view[extent.offset : extent.offset + extent.length]

    def read(self, identity: Identity, found: wire.SegmentReply) -> Planes:
        """A leased record, restored at its own position, as a client would."""
        reader = RecordReader(self.view(found.record.extent))
        reader.verify()
        assert reader.generation == found.record.generation
        if not found.master_context:
            return [reader.master_planes(layer) for layer in range(reader.meta.geometry.layers)]
        master = RecordReader(self.view(found.master.extent))
        master.verify()
        assert master.generation == found.master.generation == reader.meta.master.generation  # type: ignore[union-attr]
        return [_restore(identity, reader, master, layer) for layer in range(reader.meta.geometry.layers)]

    def check(self) -> None:
        """Every invariant of the node."""
        check_node(self.node)

    def is_empty_handed(self) -> bool:
        """No lease, reservation or worker holds anything; what is hidden stands under mirrors that are not."""
        node = self.node
        is_held = node.leases.live or node.store.open or node.allocation.unpublished or node.families.held
        return not is_held and all(cache.mirrors for cache in node.catalog.hidden)


def _restore(identity: Identity, reader: RecordReader, master: RecordReader, layer: int) -> list[npt.NDArray[Any]]:
    runs, rows = reader.mirror(layer)
    return materialise_layer(
        master.master_planes(layer), master.meta.position, MirrorRows(reader.meta.position, runs, rows),
        identity.geometry.planes, rotation(identity, layer), identity.geometry.dtype,
    )  # fmt: skip


def write_record(view: npt.NDArray[np.uint8], meta: CacheMeta, planes: Planes, runs: Any = None) -> int:
    """Write a record; its header checksum."""
    layout = master_layout(meta) if meta.master is None else mirror_layout(meta, runs)
    writer = RecordWriter(view, meta, layout)
    for layer, bits in enumerate(planes):
        if meta.master is None:
            for target, source in zip(writer.master_planes(layer), bits, strict=True):
                np.copyto(target, source)
            continue
        for target, source, run in zip(writer.mirror_rows(layer, runs[layer]), bits, runs[layer], strict=True):
            picked = [row for first, count in run.tolist() for row in range(first, first + count)]
            np.copyto(target, source[picked])
    return writer.finish().header_checksum


def encode_key(key: CacheKey) -> wire.CacheKey:
    return wire.CacheKey(segment=key.segment, context=key.context)


def query(meta: CacheMeta, history: Sequence[bytes] = (), **changes: Any) -> wire.PromptQuery:
    """A prompt of unknown segments ``history`` and then the one that ``meta`` names."""
    values: dict[str, Any] = {
        "accepted_contexts": [meta.key.context],
        "position": meta.position,
        "tokens": meta.tokens,
    } | changes
    before = [wire.SegmentQuery(segment=segment, position=0, tokens=1) for segment in history]
    last = wire.SegmentQuery(segment=meta.key.segment, **values)
    return wire.PromptQuery(namespace=meta.namespace, segments=[*before, last])


def cache_of(world: World, meta: CacheMeta) -> Cache | None:
    space = world.node.catalog.spaces.get(meta.namespace)
    return None if space is None else space.find(meta.key.segment, meta.key.context)


def other_context(number: int) -> ContextId:
    return ContextId(number.to_bytes(32, "little"))


def equal_planes(left: Planes, right: Planes) -> bool:
    return all(
        np.array_equal(one, other)
        for ours, theirs in zip(left, right, strict=True)
        for one, other in zip(ours, theirs, strict=True)
    )


def check_node(node: Node) -> None:
    """What must be true of a node between any two steps, worked out anew."""
    catalog = node.catalog
    published = [
        cache
        for space in catalog.spaces.values()
        for family in space.families.values()
        for cache in family.members.values()
    ]
    _check_families(node)
    everything = [*published, *catalog.hidden]
    assert len(set(everything)) == len(everything)
    _check_groups(everything)
    _check_holds(node, everything)
    _check_bytes(node, published)
    _check_handles(node)


def _check_families(node: Node) -> None:
    for namespace, space in node.catalog.spaces.items():
        assert space.namespace == namespace
        assert space.families or space.pending or space.sessions
        for segment, family in space.families.items():
            assert family.members
            assert (family.segment, family.space) == (segment, space)
            for context, cache in family.members.items():
                assert cache.context == context
                assert cache.family is family
                assert not cache.is_hidden
    assert all(cache.is_hidden for cache in node.catalog.hidden)


def _check_groups(everything: Sequence[Cache]) -> None:
    held = set(everything)
    for cache in everything:
        if cache.master is not None:
            assert cache.master in held, "a mirror dangles"
            assert cache.master.master is None, "a master is a mirror"
            assert cache.mirrors is None, "a mirror has mirrors"
            assert cache in (cache.master.mirrors or ())
            if cache.family.space.pinned_reason:
                assert cache.position == cache.master.position
        for mirror in cache.mirrors or ():
            assert mirror in held
            assert mirror.master is cache
        if cache.is_hidden:
            assert cache.holds or cache.mirrors, "a hidden cache that nobody needs was not freed"


def _check_holds(node: Node, everything: Sequence[Cache]) -> None:
    holds: Counter[Cache] = Counter()
    for grant in node.leases.live.values():
        holds.update(grant.caches)
    holds.update(reservation.master for reservation in node.store.open.values() if reservation.master is not None)
    holds.update(node.families.held)
    holds.update(node.scrubber.held)
    if node.ssd is not None:
        holds.update(node.catalog.arriving.keys())
        holds.update(node.ssd.demotion.writing.keys())
    for cache, count in list(holds.items()):
        if cache.master is not None:
            holds[cache.master] += count
    for cache in everything:
        assert cache.holds == holds.pop(cache, 0)
    assert not holds, "something is held that is not there"
    heads = {cache for cache in everything if cache.master is None}
    orders = node.catalog.orders
    for order, where in ((orders.host, "is_on_host"), (orders.ssd, "is_on_ssd")):
        in_order = set(order)
        assert len(in_order) == len(order)
        assert in_order <= heads
        assert in_order - set(node.catalog.held) == {one for one in heads if not one.holds and _sum(one, where)}
    assert set(node.catalog.held) == {cache for cache in heads if cache.holds}
    for cache in heads:
        assert group_of(cache).host_bytes == _sum(cache, "is_on_host")
        assert group_of(cache).ssd_bytes == _sum(cache, "is_on_ssd")
        assert group_of(cache).tokens == sum(one.family.tokens for one in cache.members())


def _sum(head: Cache, where: str) -> int:
    return sum(cache.record_bytes for cache in head.members() if getattr(cache, where))


def _check_bytes(node: Node, published: Sequence[Cache]) -> None:
    totals, hidden, tier = node.catalog.totals, node.catalog.hidden, node.tier
    masters = [cache for cache in published if cache.master is None]
    mirrors = [cache for cache in published if cache.master is not None]
    assert (totals.masters, totals.mirrors, totals.hidden) == (len(masters), len(mirrors), len(hidden))
    assert totals.master_bytes == sum(cache.record_bytes for cache in masters)
    assert totals.mirror_bytes == sum(cache.record_bytes for cache in mirrors)
    assert totals.hidden_bytes == sum(cache.record_bytes for cache in hidden)
    assert totals.dense_bytes == sum(cache.dense_bytes for cache in published)
    assert totals.families == sum(len(space.families) for space in node.catalog.spaces.values())
    assert totals.groups == len({cache.master or cache for cache in (*published, *hidden)})
    assert totals.held_bytes == sum(cache.record_bytes for cache in (*published, *hidden) if cache.holds)
    everything = (*published, *hidden)
    nowhere = [cache for cache in everything if not (cache.is_on_host or cache.is_on_ssd)]
    assert all(cache.is_hidden and cache.holds for cache in nowhere), "a cache is somewhere"
    on_host = [cache for cache in everything if cache.is_on_host]
    on_ssd = [cache for cache in everything if cache.is_on_ssd]
    assert (totals.host_caches, totals.host_bytes) == (len(on_host), sum(cache.record_bytes for cache in on_host))
    assert (totals.ssd_caches, totals.ssd_bytes) == (len(on_ssd), sum(cache.record_bytes for cache in on_ssd))
    extents = [cache.extent for cache in on_host] + list(node.allocation.unpublished.values())
    assert node.allocation.unpublished_bytes == sum(e.length for e in node.allocation.unpublished.values())
    page = tier.allocator.granularity
    in_tier = [extent for extent in extents if extent.offset < tier.staging_offset]
    assert tier.used_bytes == sum(-(-extent.length // page) * page for extent in in_tier)
    assert all(tier.holds(extent) for extent in extents)
    tier.allocator.check()


def _check_handles(node: Node) -> None:
    leases, reservations = node.leases.live, node.store.open
    sessions = node.sessions.open.values()
    assert {id_ for session in sessions for id_ in session.leases} == set(leases)
    open_ones = {id_ for id_, one in reservations.items() if node.sessions.open.get(one.session.id) is one.session}
    assert {id_ for session in sessions for id_ in session.reservations} == open_ones
    assert all(one.is_abandoned for id_, one in reservations.items() if id_ not in open_ones)
    pending = {(space.namespace, *key) for space in node.catalog.spaces.values() for key in space.pending}
    assert pending == {(one.space.namespace, one.key.segment, one.key.context) for one in reservations.values()}
    check_accounts(node)
