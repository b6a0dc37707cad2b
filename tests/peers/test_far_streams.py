"""Streams over a link that is far, slow, still for a while, or cut: time passes, and nothing else happens."""

import asyncio
from functools import partial

import numpy as np
import pytest

from kvservice.model.cache import CacheMeta
from kvservice.model.errors import UnavailableError
from kvservice.peers.member import Address
from kvservice.peers.streams_client import PeerLink
from kvservice.peers.streams_client_calls import PeerRecord
from kvservice.peers.streams_limits import LinkLimits
from kvservice.storage.buffer import Bytes
from tests.peers.far_link import FarLink
from tests.peers.stream_world import (
    BIG,
    HASTY,
    Owner,
    arrival_of,
    fetch_verified,
    fetched_at_last,
    find,
    find_record,
    give_new,
    link_to,
    make_query,
    owner_node,
)
from tests.server.builders import make_meta, make_planes

MIB = 1 << 20
FAR_S = 0.02
PIECE_BYTES = 256 << 10
BOUND_S = 20.0
"""What is far below this on any machine is bounded."""


def far_from(owner: Owner, delay_s: float = FAR_S, **changes: float) -> FarLink:
    return FarLink(owner.address, delay_s, **changes)


async def fetch_pieces(link: PeerLink, record: PeerRecord) -> tuple[Bytes, list[tuple[int, int]]]:
    """The record's bytes, verified, and the pieces in which they came."""
    target = np.zeros(record.record_bytes, np.uint8)
    arrival, pieces = arrival_of(record, target), list[tuple[int, int]]()

    def on_piece(start: int, end: int) -> None:
        pieces.append((start, end))
        arrival.arrived(start, end)

    await link.fetch(record, target, on_piece)
    assert arrival.layers == len(record.head.section_checksums)
    return target, pieces


def assert_each_byte_once(pieces: list[tuple[int, int]], total: int) -> None:
    starts, ends = [start for start, _ in pieces], [end for _, end in pieces]
    assert starts == [0, *ends[:-1]]
    assert ends[-1] == total


async def test_what_is_far_away_is_found_brought_and_given() -> None:
    async with owner_node() as owner:
        meta = await owner.store("one")
        with far_from(owner) as far:
            async with link_to(Address(*far.address)) as link:
                assert await link.ping() >= 2 * FAR_S - 0.001
                got = await fetch_verified(link, await find_record(link, owner, meta))
                assert np.array_equal(got, owner.bytes_of(meta))
                await give_new(owner, link)
                assert (link.counters.failed, link.counters.resumed, link.is_answering) == (0, 0, True)


async def store_many(owner: Owner, count: int) -> list[CacheMeta]:
    """Masters of 1 MiB."""
    metas = [make_meta(owner.identity, f"of many {number}", tokens=128) for number in range(count)]
    for number, meta in enumerate(metas):
        await owner.client.store(meta, make_planes(BIG, 128, seed=number), prefill_s=0.5)
    return metas


async def test_records_that_are_asked_for_together_share_their_round_trips() -> None:
    async with owner_node() as owner:
        metas = await store_many(owner, 16)
        with far_from(owner, 0.0) as far:
            async with link_to(Address(*far.address)) as link:
                findings = await find(link, owner.identity, *map(make_query, metas))
                records = [one.record for one in findings if one.record is not None]
                assert len(records) == 16
                await asyncio.gather(*(fetch_verified(link, record) for record in records))  # connects
                far.delay_s = 0.1
                began_s = asyncio.get_running_loop().time()
                got = await asyncio.gather(*(fetch_verified(link, record) for record in records))
                round_trips = (asyncio.get_running_loop().time() - began_s) / (2 * far.delay_s)
                assert round_trips < 13, "sixteen, one after the other"
                for meta, one in zip(metas, got, strict=True):
                    assert np.array_equal(one, owner.bytes_of(meta))


async def test_a_stall_that_is_shorter_than_a_deadline_costs_nothing_but_its_time() -> None:
    async with owner_node() as owner:
        meta = await owner.store("one")
        with far_from(owner) as far:
            async with link_to(Address(*far.address)) as link:
                record = await find_record(link, owner, meta)
                await fetch_verified(link, record)  # whoever brings it is connected
                connections, before = far.connections, far.back.passed
                far.back.after(MIB, partial(far.stall, 0.3))
                got, pieces = await fetch_pieces(link, record)
                assert np.array_equal(got, owner.bytes_of(meta))
                assert_each_byte_once(pieces, record.record_bytes)
                assert far.back.passed - before < record.record_bytes + PIECE_BYTES, "no byte was sent again"
                assert far.connections == connections
                counters = link.counters
                assert (counters.failed, counters.expired, counters.resumed, link.is_answering) == (0, 0, 0, True)


async def test_a_stall_that_is_longer_is_an_error_soon_and_mends_itself() -> None:
    async with owner_node() as owner:
        meta = await owner.store("one")
        with far_from(owner) as far:
            async with link_to(Address(*far.address), limits=HASTY) as link:
                record = await find_record(link, owner, meta)
                far.back.after(MIB, far.stall)
                async with asyncio.timeout(BOUND_S):
                    with pytest.raises(UnavailableError, match="did not answer"):
                        await fetch_verified(link, record)
                assert not link.is_answering
                with pytest.raises(UnavailableError, match="left alone"):
                    await find(link, owner.identity, make_query(meta))
                far.thaw()
                assert np.array_equal(await fetched_at_last(link, record), owner.bytes_of(meta))


async def test_a_record_that_is_cut_goes_on_over_another_connection_without_a_byte_twice() -> None:
    async with owner_node() as owner:
        meta = await owner.store("one")
        with far_from(owner) as far:
            async with link_to(Address(*far.address)) as link:
                record = await find_record(link, owner, meta)
                before, connections = far.back.passed, far.connections
                far.back.after(2 * MIB, far.cut)
                got, pieces = await fetch_pieces(link, record)
                assert np.array_equal(got, owner.bytes_of(meta))
                assert_each_byte_once(pieces, record.record_bytes)
                assert far.back.passed - before < record.record_bytes + MIB, "it went on where it was"
                assert far.connections >= connections + 2
                assert (link.counters.resumed, link.counters.failed, link.is_answering) == (1, 0, True)


async def test_a_slow_link_is_not_taken_for_a_dead_one() -> None:
    """4 MiB take two deadlines, and more than one goes by between the first and the last byte."""
    async with owner_node() as owner:
        meta = await owner.store("one")
        with far_from(owner, bytes_per_s=2e6) as far:
            async with link_to(Address(*far.address), limits=LinkLimits()) as link:
                record = await find_record(link, owner, meta)
                bringing = asyncio.create_task(fetch_pieces(link, record))
                while not bringing.done():
                    assert link.is_answering
                    assert await link.ping() < BOUND_S
                    await asyncio.sleep(0.2)
                got, pieces = await bringing
                assert np.array_equal(got, owner.bytes_of(meta))
                assert_each_byte_once(pieces, record.record_bytes)
                assert (link.counters.expired, link.counters.failed, link.counters.resumed) == (0, 0, 0)


async def test_records_side_by_side_on_a_slow_link_have_the_time_that_they_take_together() -> None:
    """Each shares the link with those that begin right behind it."""
    limits = LinkLimits(bytes_per_s_min=3.0 * MIB)
    async with owner_node() as owner:
        metas = [await owner.store(name) for name in ("one", "two", "three")]
        with far_from(owner, bytes_per_s=4e6) as far:
            async with link_to(Address(*far.address), limits=limits) as link:
                records = [await find_record(link, owner, meta) for meta in metas]
                for meta, (got, _) in zip(
                    metas, await asyncio.gather(*(fetch_pieces(link, one) for one in records)), strict=True
                ):
                    assert np.array_equal(got, owner.bytes_of(meta))
                assert (link.counters.expired, link.is_answering) == (0, True)
