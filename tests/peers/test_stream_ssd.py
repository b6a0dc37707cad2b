"""Records that a node has on SSD: another node gets them layer by layer, while they are read there."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest

from kvservice.model.cache import CacheMeta
from kvservice.model.errors import CorruptError, KVServiceError
from kvservice.model.plan import MissReason
from kvservice.peers.streams_limits import LinkLimits
from kvservice.worker import InlineWorker, Worker
from tests.peers.stream_world import (
    HASTY,
    Owner,
    arrival_of,
    fetch_verified,
    find,
    find_record,
    link_to,
    make_query,
    owner_node,
    settled,
)
from tests.server.builders import GatedWorker
from tests.server.ssd_world import SsdWorld, leave_host, written
from tests.server.test_ssd_integrity import flip_on_slab

MIB = 1 << 20
PIECE = 2 * MIB
"""What is read of an SSD in one go."""


@asynccontextmanager
async def owner_on_ssd(reads: Worker) -> AsyncIterator[tuple[Owner, CacheMeta, SsdWorld]]:
    """One record of 4 MiB, on SSD only."""
    async with (
        SsdWorld(arena_bytes=24 * MIB, staging_bytes=8 * MIB, slab_bytes=32 * MIB, reads=reads) as world,
        owner_node(world=world) as owner,
    ):
        meta = await owner.store("one")
        await written(world)
        await leave_host(world, meta)
        yield owner, meta, world


async def release(reads: GatedWorker) -> None:
    await settled(lambda: bool(reads.parked))
    reads.release()


async def test_layers_are_sent_while_later_ones_are_still_read() -> None:
    reads = GatedWorker()
    async with owner_on_ssd(reads) as (owner, meta, _), link_to(owner.address) as link:
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
        assert arrival.layers == 8
        assert np.array_equal(target, owner.bytes_of(meta))


async def test_a_record_that_rotted_on_ssd_ends_where_it_is_wrong() -> None:
    reads = GatedWorker()
    async with owner_on_ssd(reads) as (owner, meta, world), link_to(owner.address) as link:
        flip_on_slab(world, owner.cache(meta).ssd_offset, 3 * MIB)
        finding = asyncio.create_task(find_record(link, owner, meta))
        await release(reads)
        record = await finding
        fetching = asyncio.create_task(fetch_verified(link, record))
        await release(reads)
        await release(reads)
        with pytest.raises(CorruptError):
            await fetching
        (again,) = await find(link, owner.identity, make_query(meta))
        assert again.miss_reason is MissReason.UNKNOWN_SEGMENT
        assert link.is_answering


async def test_a_head_that_is_wrong_on_ssd_is_a_miss() -> None:
    async with owner_on_ssd(InlineWorker()) as (owner, meta, world), link_to(owner.address) as link:
        flip_on_slab(world, owner.cache(meta).ssd_offset, 40)
        (finding,) = await find(link, owner.identity, make_query(meta))
        assert finding.miss_reason is MissReason.CORRUPT
        assert world.node.counters.corrupt["ssd"] == 1


async def test_a_head_that_does_not_come_in_time_is_a_miss() -> None:
    reads = GatedWorker()
    limits = LinkLimits(deadline_s=0.2, pause_s=HASTY.pause_s)
    async with owner_on_ssd(reads) as (owner, meta, _), link_to(owner.address, limits=limits) as link:
        try:
            (finding,) = await find(link, owner.identity, make_query(meta))
            assert finding.miss_reason is MissReason.NO_ROOM
        except KVServiceError:
            assert link.counters.expired, "on a machine that is busy"
        for _ in range(3):
            await release(reads)


async def test_what_went_back_to_ssd_is_read_again_for_a_fetch() -> None:
    async with owner_on_ssd(InlineWorker()) as (owner, meta, world), link_to(owner.address) as link:
        record = await find_record(link, owner, meta)
        link.let_go([record])
        await settled(lambda: not owner.cache(meta).holds)
        await leave_host(world, meta)
        got = await fetch_verified(link, record)
        assert np.count_nonzero(got)
