"""Records between two nodes over real sockets: what is found, fetched, stored and deleted, and nothing left behind."""

import asyncio
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from kvservice.model.cache import CacheMeta, MasterReference
from kvservice.model.errors import CapacityError, LeaseExpiredError, MasterGoneError
from kvservice.model.geometry import Geometry, Plane
from kvservice.model.identity import Identity
from kvservice.model.plan import Match, MissReason
from kvservice.model.rope import Rope
from kvservice.model.segment import ContextId
from kvservice.peers.call import UnsettledError
from kvservice.peers.frames import Header, Kind
from kvservice.peers.streams_server_connection import PeerConnection
from kvservice.sharing.place import Parcel, Question
from kvservice.storage.arena import Arena
from kvservice.storage.remote.contract import RemoteName
from kvservice.store import WriteRequest
from kvservice.wire.v1 import cache_pb2 as wire
from kvservice.wire.v1 import peer_pb2
from kvservice.worker import ThreadWorker
from tests.peers.stream_world import (
    BIG,
    BIG_ARENA_BYTES,
    BIG_TOKENS,
    BRISK,
    PATIENT,
    Owner,
    fetch_verified,
    find,
    find_record,
    give_new,
    link_to,
    make_facts,
    make_query,
    make_record,
    only_tenant,
    owner_node,
    settled,
)
from tests.server.builders import (
    TOKENS,
    GatedWorker,
    World,
    diff_of,
    make_identity,
    make_meta,
    make_planes,
    make_relative,
)


async def test_a_master_comes_as_it_was_stored() -> None:
    async with owner_node() as owner, link_to(owner.address) as link:
        meta = await owner.store("one")
        record = await find_record(link, owner, meta)
        assert (record.prefill_s, record.head.meta) == (0.5, meta)
        assert np.array_equal(await fetch_verified(link, record), owner.bytes_of(meta))
        assert (link.counters.fetched, link.counters.fetched_bytes) == (1, record.record_bytes)


async def store_mirror(owner: Owner) -> tuple[CacheMeta, CacheMeta]:
    identity, planes = owner.identity, make_planes(BIG, TOKENS, seed=3)
    first, plain = make_meta(identity, "s", ["x"]), make_meta(identity, "s", ["x", "y"])
    reference = await owner.client.store(first, planes)
    other = make_relative(identity, planes, first.position, plain.position, rows=[2, 5])
    mirror = replace(plain, master=reference)
    await owner.client.store(mirror, other, diff_of(identity, planes, first.position, other, plain.position))
    return first, mirror


async def test_a_mirror_comes_with_its_master() -> None:
    async with owner_node() as owner, link_to(owner.address) as link:
        first, mirror = await store_mirror(owner)
        finding = (await find(link, owner.identity, make_query(mirror)))[0]
        assert finding.record is not None
        assert finding.master is not None
        assert finding.match is Match.EXACT
        assert finding.record.head.meta.master == MasterReference(first.key.context, finding.master.head.generation)
        for record, meta in ((finding.master, first), (finding.record, mirror)):
            assert np.array_equal(await fetch_verified(link, record), owner.bytes_of(meta))


def opaque_identity() -> Identity:
    geometry = Geometry(2, "uint8", (Plane("bytes", 1, 512, 0, 0),))
    return Identity("test", "opaque", "r1", geometry, (Rope("none", False, 0, ()),) * 2)


async def test_opaque_rows_come_as_they_were_stored() -> None:
    identity = opaque_identity()
    async with owner_node() as owner, link_to(owner.address) as link:
        meta = make_meta(identity, "o", tokens=8)
        rows = [[np.random.default_rng(one).integers(0, 256, (8, 512), np.uint8)] for one in range(2)]
        client = owner.world.client(identity)
        await client.store(meta, rows)
        (finding,) = await find(link, identity, make_query(meta))
        assert finding.record is not None
        got = await fetch_verified(link, finding.record)
        assert rows[1][0].tobytes() in got.tobytes()
        client.close()


async def test_misses_say_why() -> None:
    async with owner_node() as owner, link_to(owner.address) as link:
        meta = make_meta(owner.identity, "s", ["x"])
        await owner.client.store(meta, make_planes(BIG, TOKENS))
        asked = make_query(meta)
        other = asked._replace(accepted_contexts=[ContextId(bytes(32))])
        queries = (
            asked._replace(segment=make_query(make_meta(owner.identity, "absent")).segment),
            other,
            other._replace(may_shift=True, affinity_min=5),
            asked._replace(tokens=TOKENS + 1),
            other._replace(may_shift=True, affinity_min=1),
        )
        findings = await find(link, owner.identity, *queries)
        assert [one.miss_reason for one in findings[:4]] == [
            MissReason.UNKNOWN_SEGMENT,
            MissReason.OTHER_CONTEXT,
            MissReason.LOW_AFFINITY,
            MissReason.TOKEN_COUNT,
        ]
        assert (findings[4].match, findings[4].affinity) == (Match.SHIFTED, 1)


async def test_a_peers_lookup_counts_as_any_other() -> None:
    async with owner_node() as owner, link_to(owner.address) as link:
        meta = await owner.store("one")
        before = owner.world.node.counters.lookups.asked
        await find(link, owner.identity, make_query(meta), make_query(make_meta(owner.identity, "no")))
        assert owner.world.node.counters.lookups.asked == before + 2
        ledger = owner.world.node.accounts.of(owner.client.session.spaces[meta.namespace])
        assert sum(ledger.segments) == 2


async def test_what_was_checked_as_it_came_waits_for_no_worker() -> None:
    worker = GatedWorker()
    world = World(arena_bytes=BIG_ARENA_BYTES, worker=worker)
    async with owner_node(world=world) as owner, link_to(owner.address) as link:
        await give_new(owner, link)
        assert not worker.parked


async def test_of_a_record_that_was_begun_nobody_knows_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The word that it is stored is lost: another try might find a record that is being given up."""
    reply = PeerConnection._reply

    def cut(self: PeerConnection, header: Header, kind: Kind, message: peer_pb2.PeerStored) -> None:
        if kind is Kind.STORED:
            self.shut()
        reply(self, header, kind, message)

    monkeypatch.setattr(PeerConnection, "_reply", cut)
    async with owner_node() as owner, link_to(owner.address) as link:
        with pytest.raises(UnsettledError, match="broke"):
            await give_new(owner, link)


async def test_what_is_given_away_is_found_bit_for_bit() -> None:
    async with owner_node() as owner, link_to(owner.address) as link:
        meta, planes = await give_new(owner, link)
        found, _ = await owner.client.find(meta)
        assert owner.world.read(owner.identity, found)[7][1].tobytes() == planes[7][1].tobytes()


async def test_records_in_an_arena_are_sent_from_its_file() -> None:
    """By the kernel, without a copy, as over a network card; a view from elsewhere is sent, too."""
    arena, limits = Arena(8 << 20), replace(PATIENT, sends_files=True)
    async with (
        owner_node(limits=replace(BRISK, sends_files=True)) as owner,
        link_to(owner.address, arena=arena, limits=limits) as link,
    ):
        for name, offset in (("inside", 4096), ("outside", -1)):
            meta = make_meta(owner.identity, name, tokens=BIG_TOKENS)
            view, checksum = make_record(meta, make_planes(BIG, BIG_TOKENS, seed=1))
            if offset >= 0:
                place = arena.view[offset : offset + len(view)]
                place[:] = view
                view = place
            request = WriteRequest(meta.namespace, meta.key, len(view))
            assert await link.give(request, view, checksum, owner.identity.canonical_json())
            assert np.array_equal(owner.bytes_of(meta), view)
            assert np.array_equal(await fetch_verified(link, await find_record(link, owner, meta)), view)
        counters = owner.server.counters
        assert (counters.sent, counters.taken, counters.sent_bytes) == (2, 2, counters.taken_bytes)
    arena.close()


async def test_a_mirror_without_its_master_is_refused() -> None:
    async with owner_node() as owner, link_to(owner.address) as link:
        identity, planes = owner.identity, make_planes(BIG, TOKENS, seed=3)
        meta = make_meta(identity, "s", ["x"], master=MasterReference(ContextId(bytes(32)), 5))
        runs = diff_of(identity, planes, 0, planes, 0)
        view, checksum = make_record(meta, planes, runs)
        request = WriteRequest(meta.namespace, meta.key, len(view), meta.master)
        with pytest.raises(MasterGoneError):
            await link.give(request, view, checksum, identity.canonical_json())
        assert await link.ping() > 0, "the connection goes on"


async def test_deleting_keys_and_a_whole_namespace() -> None:
    async with owner_node() as owner, link_to(owner.address) as link:
        metas = [await owner.store(name) for name in ("one", "three", "fifth1")]
        space = owner.client.session.spaces[owner.identity.namespace()]
        assert await link.delete(space, [metas[0].key, make_meta(owner.identity, "no").key]) == 1
        assert space.find(metas[0].key.segment, metas[0].key.context) is None
        assert await link.delete(space, None) == 2
        assert not space.caches()


async def test_a_lease_holds_until_it_is_let_go() -> None:
    async with owner_node() as owner, link_to(owner.address) as link:
        meta = await owner.store("one")
        record = await find_record(link, owner, meta)
        cache = owner.cache(meta)
        assert cache.holds == 1
        await owner.client.delete(meta)
        assert np.count_nonzero(await fetch_verified(link, record)), "leased, so it can still be fetched"
        assert record.lease is not None
        assert await link.renew([record.lease]) == 1
        link.let_go([record])
        await settled(lambda: not cache.holds)
        with pytest.raises(LeaseExpiredError):
            await fetch_verified(link, record)


async def test_leases_end_with_the_link() -> None:
    async with owner_node() as owner:
        async with link_to(owner.address) as link:
            cache = owner.cache(await owner.store("one"))
            await find(link, owner.identity, make_query(make_meta(owner.identity, "one", tokens=BIG_TOKENS)))
            assert (cache.holds, owner.server.sessions.count) == (1, 1)
        await settled(lambda: not cache.holds and not owner.server.sessions.count)


async def test_another_generation_is_not_sent_in_its_place() -> None:
    async with owner_node() as owner, link_to(owner.address) as link:
        meta = await owner.store("one")
        record = await find_record(link, owner, meta)
        link.let_go([record])
        await owner.client.delete(meta)
        await owner.client.store(meta, make_planes(BIG, BIG_TOKENS, seed=77))
        with pytest.raises(LeaseExpiredError):
            await fetch_verified(link, record)


async def test_many_records_at_once() -> None:
    """More than there are connections: they are sent one behind the other, and each is whole."""
    world = World(arena_bytes=2 * BIG_ARENA_BYTES, worker=ThreadWorker(1))
    async with owner_node(world=world) as owner, link_to(owner.address) as link:
        metas = [await owner.store("x" * (index + 1)) for index in range(12)]
        findings = await find(link, owner.identity, *map(make_query, metas))
        records = [one.record for one in findings if one.record is not None]
        got = await asyncio.gather(*(fetch_verified(link, record) for record in records))
        for view, meta in zip(got, metas, strict=True):
            assert np.array_equal(view, owner.bytes_of(meta))
        assert 2 <= owner.server.connections <= link.limits.connections
        assert owner.server.sessions.count == 1
    world.node.worker.close()


async def test_a_link_keeps_to_what_the_node_lets_it_ask() -> None:
    limits = replace(BRISK, fetches_max=2, find_queries_max=3)
    async with owner_node(limits=limits) as owner, link_to(owner.address) as link:
        await link.ping()
        meta = await owner.store("one")
        findings = await find(link, owner.identity, *[make_query(meta)] * 7)
        records = [one.record for one in findings if one.record is not None]
        assert len({id(one.lease) for one in records}) == 3
        await asyncio.gather(*(fetch_verified(link, record) for record in records))
        link.let_go(records)
        await settled(lambda: not owner.cache(meta).holds)


async def test_a_fetch_may_begin_in_the_middle() -> None:
    async with owner_node() as owner, link_to(owner.address) as link:
        meta = await owner.store("one")
        record = await find_record(link, owner, meta)
        target, told = np.zeros(record.record_bytes, np.uint8), list[tuple[int, int]]()
        start = 1_000_001
        await link.fetch(record, target, lambda first, last: told.append((first, last)), start)
        assert not target[:start].any()
        assert np.array_equal(target[start:], owner.bytes_of(meta)[start:])
        assert (told[0][0], told[-1][1]) == (start, record.record_bytes)
        assert all(one[1] == two[0] for one, two in pairwise(told)), "in order, without gaps"


async def test_a_link_is_a_place() -> None:
    """What the sharing of a node asks of it."""
    async with owner_node() as owner, link_to(owner.address) as link:
        meta = await owner.store("one")
        space = owner.client.session.spaces[meta.namespace]
        asked = wire.SegmentQuery(
            segment=meta.key.segment, accepted_contexts=[meta.key.context], position=meta.position, tokens=meta.tokens
        )
        absent = wire.SegmentQuery(segment=bytes(32), accepted_contexts=[meta.key.context], tokens=5)
        questions = [Question(space, meta.key.segment, asked, b""), Question(space, absent.segment, absent, b"")]  # type: ignore[arg-type]
        offer, nothing = await link.find(questions)
        assert nothing is None
        assert offer is not None
        assert offer.record.head.meta == meta
        link.let_go([offer.record])
        await settled(lambda: not owner.cache(meta).holds)
        view = owner.bytes_of(meta).copy()
        await owner.client.delete(meta)
        name = RemoteName(meta.namespace, meta.key.segment, meta.key.context)
        parcel = Parcel(space, name, view, offer.record.head.header_checksum, None, 0.5)
        assert await link.store(parcel)
        assert not await link.store(parcel)


async def test_a_namespace_that_may_not_be_seen_is_as_one_that_holds_nothing() -> None:
    async with owner_node(authorize=only_tenant("mine")) as owner, link_to(owner.address) as link:
        meta = await owner.store("one")  # of tenant test
        mine = make_identity(BIG, tenant="mine")
        absent = make_meta(mine, "one", tokens=BIG_TOKENS)
        texts = {one.namespace(): one.canonical_json() for one in (owner.identity, mine)}
        foreign, unknown = await link.find_all([make_query(meta), make_query(absent)], texts)
        assert foreign == unknown
        space = owner.client.session.spaces[meta.namespace]
        assert await link.delete(space, [meta.key]) == 0
        assert await link.delete(space, None) == 0
        owner.cache(meta)


async def test_a_node_that_drains_takes_nothing_and_is_still_read() -> None:
    facts = replace(make_facts("leaving"), is_draining=True)
    async with owner_node(facts=facts) as owner, link_to(owner.address) as link:
        meta = await owner.store("one")
        with pytest.raises(CapacityError, match="draining"):
            await give_new(owner, link)
        assert link.facts is not None
        assert link.facts.is_draining
        assert np.count_nonzero(await fetch_verified(link, await find_record(link, owner, meta)))
