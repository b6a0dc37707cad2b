"""Records between two nodes of one host: read from the other's arena, verified as those that come over a socket."""

import asyncio
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from kvservice.model.cache import CacheMeta
from kvservice.model.errors import ConfigError, CorruptError, LeaseExpiredError, UnavailableError
from kvservice.peers.streams_client import PeerLink
from kvservice.storage.buffer import Bytes
from kvservice.store import WriteRequest
from tests.descriptors import opened_for_good
from tests.peers.local_world import LocalOwner, local_link, met_beside, met_node, no_bytes_over_sockets
from tests.peers.stream_world import (
    BIG,
    BIG_TOKENS,
    arrival_of,
    fetch_verified,
    find,
    find_record,
    give_new,
    link_to,
    make_caller,
    make_facts,
    make_query,
    make_record,
    only_tenant,
    owner_node,
    settled,
)
from tests.peers.test_stream_ssd import MIB, PIECE, owner_on_ssd, release
from tests.peers.test_streams import opaque_identity, store_mirror
from tests.server.builders import GatedWorker, make_meta, make_planes


def placed(met: LocalOwner, name: str) -> tuple[CacheMeta, Bytes, int]:
    """A new record in the caller's arena."""
    meta = make_meta(met.owner.identity, name, tokens=BIG_TOKENS)
    view, checksum = make_record(meta, make_planes(BIG, BIG_TOKENS, seed=5))
    place = met.arena.view[8192 : 8192 + len(view)]
    place[:] = view
    return meta, place, checksum


async def give(met: LocalOwner, link: PeerLink, name: str) -> tuple[CacheMeta, Bytes]:
    meta, view, checksum = placed(met, name)
    request = WriteRequest(meta.namespace, meta.key, len(view))
    assert await link.give(request, view, checksum, met.owner.identity.canonical_json())
    return meta, view


# What comes and goes


async def test_a_master_is_read_where_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_bytes_over_sockets(monkeypatch)
    async with met_node(tmp_path) as met, local_link(met) as link:
        meta = await met.owner.store("one")
        record = await find_record(link, met.owner, meta)
        assert np.array_equal(await fetch_verified(link, record), met.owner.bytes_of(meta))
        assert (link.counters.fetched, link.counters.fetched_bytes) == (1, record.record_bytes)
        assert met.local.counters.sent_bytes == record.record_bytes


async def test_a_mirror_comes_with_its_master(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_bytes_over_sockets(monkeypatch)
    async with met_node(tmp_path) as met, local_link(met) as link:
        first, mirror = await store_mirror(met.owner)
        finding = (await find(link, met.owner.identity, make_query(mirror)))[0]
        for record, meta in ((finding.master, first), (finding.record, mirror)):
            assert record is not None
            assert np.array_equal(await fetch_verified(link, record), met.owner.bytes_of(meta))


async def test_opaque_rows_come_as_they_were_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_bytes_over_sockets(monkeypatch)
    identity = opaque_identity()
    async with met_node(tmp_path) as met, local_link(met) as link:
        meta = make_meta(identity, "o", tokens=8)
        rows = [[np.random.default_rng(one).integers(0, 256, (8, 512), np.uint8)] for one in range(2)]
        client = met.owner.world.client(identity)
        await client.store(meta, rows)
        (finding,) = await find(link, identity, make_query(meta))
        assert finding.record is not None
        assert rows[1][0].tobytes() in (await fetch_verified(link, finding.record)).tobytes()
        client.close()


async def test_what_lies_in_the_callers_arena_is_read_by_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_bytes_over_sockets(monkeypatch)
    async with met_node(tmp_path) as met, local_link(met) as link:
        meta, view = await give(met, link, "given")
        assert np.array_equal(met.owner.bytes_of(meta), view)
        request = WriteRequest(meta.namespace, meta.key, len(view))
        assert not await link.give(request, view, 0, met.owner.identity.canonical_json()), "the first writer wins"


async def test_what_lies_elsewhere_goes_over_the_socket(tmp_path: Path) -> None:
    async with met_node(tmp_path) as met, local_link(met) as link:
        await give_new(met.owner, link)
        assert met.local.counters.taken == 1


async def test_many_records_at_once_both_ways(tmp_path: Path) -> None:
    async with met_node(tmp_path) as met, local_link(met) as link:
        metas = [await met.owner.store("x" * (index + 1)) for index in range(4)]
        findings = await find(link, met.owner.identity, *map(make_query, metas))
        records = [one.record for one in findings if one.record is not None]
        got, _ = await asyncio.gather(
            asyncio.gather(*(fetch_verified(link, record) for record in records * 3)), give(met, link, "given")
        )
        for view, meta in zip(got, metas * 3, strict=True):
            assert np.array_equal(view, met.owner.bytes_of(meta))


async def test_every_piece_is_told_once_from_where_it_begins(tmp_path: Path) -> None:
    async with met_node(tmp_path) as met, local_link(met) as link:
        meta = await met.owner.store("one")
        record = await find_record(link, met.owner, meta)
        target, told, start = np.zeros(record.record_bytes, np.uint8), list[tuple[int, int]](), 1_000_001
        await link.fetch(record, target, lambda first, last: told.append((first, last)), start)
        assert not target[:start].any()
        assert np.array_equal(target[start:], met.owner.bytes_of(meta)[start:])
        told.sort()
        assert (told[0][0], told[-1][1]) == (start, record.record_bytes)
        assert all(one[1] == two[0] for one, two in pairwise(told)), "without gaps"


async def test_layers_are_there_while_later_ones_are_still_read_from_ssd(tmp_path: Path) -> None:
    reads = GatedWorker()
    async with (
        owner_on_ssd(reads) as (owner, meta, _),
        met_beside(owner, tmp_path) as met,
        local_link(met) as link,
    ):
        finding = asyncio.create_task(find_record(link, owner, meta))
        await release(reads)
        record = await finding
        target = np.zeros(record.record_bytes, np.uint8)
        arrival = arrival_of(record, target)

        def on_piece(start: int, end: int) -> None:
            arrival.arrived(start, end)

        fetching = asyncio.create_task(link.fetch(record, target, on_piece))
        await settled(lambda: arrival.layers == 3)
        assert not fetching.done()
        assert not target[PIECE:].any()
        await release(reads)
        await settled(lambda: arrival.layers == 7)
        await release(reads)
        await fetching
        assert np.array_equal(target, owner.bytes_of(meta))


# What was leased over another way


async def test_what_was_found_over_the_stream_is_held_for_this_way_too(tmp_path: Path) -> None:
    """Nothing but the stream's lease holds it any more."""
    caller = make_caller(make_facts("caller"))
    async with (
        met_node(tmp_path) as met,
        link_to(met.owner.address, caller=caller) as stream,
        local_link(met, caller=caller) as link,
    ):
        meta = await met.owner.store("one")
        record = await find_record(stream, met.owner, meta)
        before = met.owner.bytes_of(meta).copy()
        await met.owner.client.delete(meta)
        assert np.array_equal(await fetch_verified(link, record), before)
        stream.let_go([record])
        await settled(lambda: not met.owner.world.node.catalog.held)
        with pytest.raises(LeaseExpiredError):
            await fetch_verified(link, record)


async def test_what_somebody_else_leased_is_not_held_for_this_caller(tmp_path: Path) -> None:
    async with (
        met_node(tmp_path) as met,
        link_to(met.owner.address) as stream,
        local_link(met) as link,
    ):
        meta = await met.owner.store("one")
        record = await find_record(stream, met.owner, meta)
        await met.owner.client.delete(meta)
        with pytest.raises(LeaseExpiredError):
            await fetch_verified(link, record)


async def test_a_lease_that_ends_in_the_middle_lets_nothing_go_that_is_read(tmp_path: Path) -> None:
    async with met_node(tmp_path) as met, local_link(met) as link:
        meta = await met.owner.store("one")
        record, cache = await find_record(link, met.owner, meta), met.owner.cache(meta)
        before, target = met.owner.bytes_of(meta).copy(), np.zeros(cache.record_bytes, np.uint8)
        loop, arrival, ended = asyncio.get_running_loop(), arrival_of(record, target), list[int]()

        async def end_it() -> None:
            grant = next(iter(met.owner.world.node.leases.live.values()))
            met.owner.world.node.leases.end(grant)
            await met.owner.client.delete(meta)
            ended.append(cache.holds)

        def on_piece(start: int, end: int) -> None:
            if start <= MIB < end:
                asyncio.run_coroutine_threadsafe(end_it(), loop).result(20)
            arrival.arrived(start, end)

        await link.fetch(record, target, on_piece)
        assert ended == [1], "what is read is held, whatever becomes of the lease"
        assert np.array_equal(target, before)
        await settled(lambda: not met.owner.world.node.catalog.held)


async def test_what_is_overwritten_while_it_is_read_is_corrupt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after the node cut off a slow reader: what it read may have gone to others."""
    monkeypatch.setattr("kvservice.peers.streams_local_channel.LENT_BYTES_MAX", MIB)  # read in order
    async with met_node(tmp_path) as met, local_link(met) as link:
        meta = await met.owner.store("one")
        record = await find_record(link, met.owner, meta)
        target, lies = np.zeros(record.record_bytes, np.uint8), met.owner.bytes_of(meta)
        arrival, right = arrival_of(record, target), lies.copy()

        def on_piece(start: int, end: int) -> None:
            if start <= MIB < end:
                lies[2 * MIB :] ^= 1
            arrival.arrived(start, end)

        with pytest.raises(CorruptError):
            await link.fetch(record, target, on_piece)
        assert arrival.layers < BIG.layers
        assert np.array_equal(target[:MIB], right[:MIB])
        lies[:] = right
        assert np.array_equal(await fetch_verified(link, record), right)


async def test_what_changes_while_it_is_given_is_not_published(tmp_path: Path) -> None:
    async with met_node(tmp_path) as met, local_link(met) as link:
        meta, view, checksum = placed(met, "given")
        view[2 * MIB] ^= 4
        with pytest.raises(CorruptError):
            await link.give(
                WriteRequest(meta.namespace, meta.key, len(view)), view, checksum, met.owner.identity.canonical_json()
            )
        assert not met.owner.client.session.spaces[meta.namespace].caches()


# The end of the way


async def test_the_end_of_the_socket_in_the_middle_of_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvservice.peers.streams_local_channel.LENT_BYTES_MAX", 64 << 10)
    async with met_node(tmp_path) as met, local_link(met) as link:
        meta = await met.owner.store("one")
        record = await find_record(link, met.owner, meta)
        target, told = np.zeros(record.record_bytes, np.uint8), list[int]()

        def on_piece(start: int, end: int) -> None:
            told.append(end)
            if len(told) == 3:
                met.local.stop()

        with pytest.raises(UnavailableError):
            await link.fetch(record, target, on_piece)
        assert told[-1] < record.record_bytes, "who lends waits for who reads: not all was told before"
        text = met.owner.identity.canonical_json()
        async with link_to(met.owner.address, identity_of=lambda _: text) as stream:
            await stream.fetch(record, target, lambda start, end: None, told[-1])
        assert np.array_equal(target, met.owner.bytes_of(meta))


async def test_a_connection_that_breaks_is_taken_up_over_the_same_socket(tmp_path: Path) -> None:
    async with met_node(tmp_path) as met, local_link(met) as link:
        meta = await met.owner.store("one")
        record = await find_record(link, met.owner, meta)
        target, broken = np.zeros(record.record_bytes, np.uint8), list[int]()

        def on_piece(start: int, end: int) -> None:
            if start <= MIB < end and not broken:
                broken.append(end)
                for connection in list(met.local._connections):
                    connection.shut()

        await link.fetch(record, target, on_piece)
        assert np.array_equal(target, met.owner.bytes_of(meta))


async def test_another_boot_at_the_same_path_is_not_used(tmp_path: Path) -> None:
    async with met_node(tmp_path) as met:
        other = met.address._replace(node=met.address.node._replace(epoch=8))
        async with link_to(other, arena=met.arena) as link:
            with pytest.raises(UnavailableError, match="is now of node"):
                await link.ping()


async def test_a_stale_socket_is_replaced_and_a_live_one_is_not(tmp_path: Path) -> None:
    async with met_node(tmp_path) as met:
        with pytest.raises(ConfigError, match="another server answers"):
            async with met_node(tmp_path):
                pass
        async with local_link(met) as link:
            await link.ping()
            assert met.path.stat().st_mode & 0o777 == 0o600


async def test_descriptors_come_back(tmp_path: Path) -> None:
    async def once() -> None:
        async with met_node(tmp_path) as met, local_link(met) as link:
            meta = await met.owner.store("one")
            await fetch_verified(link, await find_record(link, met.owner, meta))
            await give(met, link, "given")

    await once()
    before = len(opened_for_good())
    for _ in range(6):
        await once()
    assert len(opened_for_good()) <= before


async def test_facts_tell_the_way_to_those_who_may_see_every_tenant() -> None:
    facts = replace(make_facts("owner"), boot_id="b", local_path="/run/kv.sock.peers")
    for changes, said in (({}, "/run/kv.sock.peers"), ({"authorize": only_tenant("test")}, "")):
        async with owner_node(facts=facts, **changes) as owner, link_to(owner.address) as link:  # type: ignore[arg-type]
            await link.ping()
            assert link.facts is not None
            assert link.facts.local_path == said
