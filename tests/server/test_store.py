"""Reserve, commit, abort: nothing unpublished is visible, nothing published is torn, nothing is left behind."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from kvservice.limits import NodeLimits
from kvservice.model.cache import CacheMeta
from kvservice.model.errors import LimitError, NotOwnedError
from kvservice.model.geometry import attention_geometry
from kvservice.model.segment import ContextId
from kvservice.storage.record import master_layout
from kvservice.wire.v1 import cache_pb2 as wire
from tests.server.builders import (
    ARENA_BYTES,
    GEOMETRY,
    TOKENS,
    Client,
    GatedWorker,
    Planes,
    World,
    cache_of,
    diff_of,
    equal_planes,
    make_identity,
    make_meta,
    make_planes,
    make_relative,
    until_parked,
    write_record,
)

IDENTITY = make_identity()
META = make_meta(IDENTITY)


async def store_master(client: Client) -> tuple[CacheMeta, Planes]:
    reference = await client.store(META, make_planes())
    member = make_meta(IDENTITY, history=["a"], master=reference)
    planes = make_relative(IDENTITY, make_planes(), META.position, member.position, rows=[3])
    return member, planes


async def test_nothing_is_visible_before_the_commit() -> None:
    world = World()
    client = world.client()
    reservation, checksum = await client.begin(META, make_planes())
    assert (await client.find(META))[1] == 0
    await client.commit(reservation, checksum)
    assert (await client.find(META))[1] != 0
    world.check()


async def test_first_writer_wins_and_later_ones_are_told_that_it_exists() -> None:
    world = World()
    first, second = world.client(), world.client()
    reservation, checksum = await first.begin(META, make_planes())
    assert (await second.reserve(META, 4096)).exists, "being written"
    await first.commit(reservation, checksum)
    assert (await second.reserve(META, 4096)).exists, "published"
    assert world.node.counters.existed == 2
    world.check()


async def test_a_record_larger_than_the_arena_is_refused_for_good() -> None:
    world = World()
    outcome = await world.client().reserve(META, ARENA_BYTES + 1)
    assert outcome.error.code == "RECORD_TOO_LARGE"
    assert world.is_empty_handed()


async def test_a_record_of_no_bytes_is_invalid() -> None:
    outcome = await World().client().reserve(META, 0)
    assert outcome.error.code == "INVALID_INPUT"


async def test_an_id_of_the_wrong_length_is_invalid() -> None:
    client = World().client()
    item = wire.ReserveItem(namespace=META.namespace, key=wire.CacheKey(segment=b"x", context=b"y"), record_bytes=9)
    reply = await client.call("Reserve", wire.ReserveRequest(items=[item]))
    assert reply.outcomes[0].error.code == "INVALID_INPUT"


async def test_a_namespace_that_the_session_did_not_register_is_refused() -> None:
    client = World().client()
    outcome = await client.reserve(make_meta(make_identity(tenant="stranger")), 4096)
    assert outcome.error.code == "INVALID_INPUT"


async def test_a_session_that_only_reads_may_not_write() -> None:
    world = World()
    reader = world.client(may_write=False)
    assert (await reader.reserve(META, 4096)).error.code == "NOT_OWNED"
    for name, request in (
        ("Commit", wire.CommitRequest()),
        ("Delete", wire.DeleteRequest()),
        ("CommitRound", wire.CommitRoundRequest(namespace=META.namespace)),
    ):
        with pytest.raises(NotOwnedError):
            await reader.call(name, request)


async def test_when_all_is_leased_there_is_no_room_and_nothing_is_evicted() -> None:
    record_bytes = master_layout(META).record_bytes
    world = World(arena_bytes=2 * (record_bytes + 4096) - 4096)
    client, other = world.client(), make_meta(IDENTITY, "other")
    await client.store(META, make_planes())
    await client.find(META)
    outcome = await client.reserve(other, record_bytes * 2)
    assert outcome.error.code == "CAPACITY"
    assert cache_of(world, META) is not None
    world.check()


async def test_a_commit_with_another_checksum_is_refused_and_freed() -> None:
    world = World()
    client = world.client()
    reservation, checksum = await client.begin(META, make_planes())
    outcome = await client.commit(reservation, checksum ^ 1)
    assert outcome.error.code == "CHECKSUM_MISMATCH"
    assert world.is_empty_handed()
    assert world.node.tier.used_bytes == 0
    assert world.node.counters.commits_refused["CHECKSUM_MISMATCH"] == 1
    world.check()


async def test_one_flipped_bit_anywhere_in_the_record_is_refused() -> None:
    world = World()
    client = world.client()
    layout = master_layout(META)
    rng = np.random.default_rng(5)
    for at in [*range(layout.header_bytes), *rng.integers(0, layout.record_bytes, 60).tolist()]:
        reservation, checksum = await client.begin(META, make_planes())
        extent = world.node.store.open[reservation].extent
        world.arena.view[extent.offset + at] ^= 1 << int(rng.integers(8))
        assert (await client.commit(reservation, checksum)).error.code, f"byte {at}"
    assert world.node.tier.used_bytes == 0
    world.check()


async def test_a_record_that_was_never_written_is_refused() -> None:
    world = World()
    client = world.client()
    outcome = await client.reserve(META, 4096)
    assert (await client.commit(outcome.reserved.id, 0)).error.code == "RECORD_FORMAT"
    assert world.is_empty_handed()


@pytest.mark.parametrize(
    ("written", "code"),
    [
        (make_meta(IDENTITY, "other"), "INVALID_INPUT"),
        (replace(META, namespace=make_identity(tenant="stranger").namespace()), "INVALID_INPUT"),
        (replace(META, position=2**32 - 1), "TOKEN_COUNT"),
        (replace(META, geometry=attention_geometry(layers=4, heads=1, head_size=32, dtype="bfloat16")),
         "GEOMETRY_MISMATCH"),
    ],
    ids=["key", "namespace", "position", "geometry"],
)  # fmt: skip
async def test_a_record_that_says_other_than_what_was_reserved_is_refused(written: CacheMeta, code: str) -> None:
    world = World()
    client = world.client()
    outcome = await client.reserve(META, master_layout(written).record_bytes)
    checksum = write_record(world.view(outcome.reserved.extent), written, make_planes(written.geometry))
    assert (await client.commit(outcome.reserved.id, checksum)).error.code == code
    assert world.is_empty_handed()
    world.check()


async def test_a_record_shorter_than_its_reservation_is_refused() -> None:
    world = World()
    client = world.client()
    outcome = await client.reserve(META, master_layout(META).record_bytes + 64)
    checksum = write_record(world.view(outcome.reserved.extent), META, make_planes())
    assert (await client.commit(outcome.reserved.id, checksum)).error.code == "INVALID_INPUT"


async def test_a_segment_is_never_held_with_two_token_counts() -> None:
    world = World()
    client = world.client()
    await client.store(META, make_planes())
    lying = replace(make_meta(IDENTITY, history=["a"]), tokens=TOKENS - 1)
    reservation, checksum = await client.begin(lying, make_planes(tokens=TOKENS - 1))
    assert (await client.commit(reservation, checksum)).error.code == "TOKEN_COUNT"
    world.check()


async def test_a_reservation_of_another_session_can_be_neither_committed_nor_aborted() -> None:
    world = World()
    owner, thief = world.client(), world.client()
    reservation, checksum = await owner.begin(META, make_planes())
    assert (await thief.commit(reservation, checksum)).error.code == "NOT_OWNED"
    with pytest.raises(NotOwnedError):
        await thief.call("Abort", wire.AbortRequest(reservation_ids=[reservation]))
    assert not (await owner.commit(reservation, checksum)).error.code
    world.check()


async def test_a_reservation_is_committed_once() -> None:
    world = World()
    client = world.client()
    reservation, checksum = await client.begin(META, make_planes())
    items = [wire.CommitItem(reservation_id=reservation, header_checksum=checksum)] * 2
    reply = await client.call("Commit", wire.CommitRequest(items=items))
    assert [outcome.error.code for outcome in reply.outcomes] == ["", "NOT_OWNED"]
    assert (await client.commit(reservation, checksum)).error.code == "NOT_OWNED"
    world.check()


async def test_one_bad_record_of_a_batch_does_not_hide_the_others() -> None:
    world = World()
    client = world.client()
    metas = [make_meta(IDENTITY, name) for name in range(5)]
    begun = [await client.begin(meta, make_planes()) for meta in metas]
    items = [wire.CommitItem(reservation_id=id_, header_checksum=checksum) for id_, checksum in begun]
    items[2].header_checksum ^= 1
    reply = await client.call("Commit", wire.CommitRequest(items=items))
    assert [bool(outcome.error.code) for outcome in reply.outcomes] == [False, False, True, False, False]
    assert world.node.counters.published == 4
    world.check()


async def test_aborting_frees_and_twice_is_no_error() -> None:
    world = World()
    client = world.client()
    reservation, _ = await client.begin(META, make_planes())
    request = wire.AbortRequest(reservation_ids=[reservation, reservation, 999])
    assert (await client.call("Abort", request)).aborted == 1
    assert (await client.call("Abort", request)).aborted == 0
    assert world.node.tier.used_bytes == 0
    assert not (await client.reserve(META, 4096)).exists
    world.check()


async def test_a_client_killed_between_reserve_and_commit_leaves_nothing() -> None:
    world = World()
    client = world.client()
    await store_master(client)
    member, _ = make_meta(IDENTITY, history=["a"]), None
    await client.begin(make_meta(IDENTITY, "other"), make_planes())
    await client.reserve(member, 4096)
    client.close()
    assert world.is_empty_handed()
    cache = cache_of(world, META)
    assert cache is not None
    assert cache.holds == 0
    world.check()


async def test_a_client_killed_while_its_commit_is_verified_leaves_nothing() -> None:
    worker = GatedWorker()
    world = World(worker=worker)
    client = world.client()
    reservation, checksum = await client.begin(META, make_planes())
    commit = asyncio.create_task(client.commit(reservation, checksum))
    await until_parked(worker)
    client.close()
    assert world.node.tier.used_bytes > 0, "the worker still reads the extent"
    world.check()
    worker.release()
    assert (await commit).error.code == "NOT_OWNED"
    assert world.node.tier.used_bytes == 0
    assert world.is_empty_handed()
    assert cache_of(world, META) is None
    world.check()


@pytest.mark.parametrize("turns", [1, 2, 3, 4])
async def test_a_commit_cancelled_at_any_step_leaves_nothing(turns: int) -> None:
    worker = GatedWorker()
    world = World(worker=worker)
    client = world.client()
    reservation, checksum = await client.begin(META, make_planes())
    commit = asyncio.create_task(client.commit(reservation, checksum))
    for _ in range(turns):
        await asyncio.sleep(0)
    commit.cancel()
    with pytest.raises(asyncio.CancelledError):
        await commit
    assert world.node.tier.used_bytes == 0
    world.check()


async def test_a_reservation_under_commit_is_not_aborted() -> None:
    worker = GatedWorker()
    world = World(worker=worker)
    client = world.client()
    reservation, checksum = await client.begin(META, make_planes())
    commit = asyncio.create_task(client.commit(reservation, checksum))
    await until_parked(worker)
    assert (await client.call("Abort", wire.AbortRequest(reservation_ids=[reservation]))).aborted == 0
    worker.release()
    assert not (await commit).error.code
    world.check()


async def test_a_mirror_is_stored_and_reads_back() -> None:
    world = World()
    client = world.client()
    member, planes = await store_master(client)
    runs = diff_of(IDENTITY, make_planes(), META.position, planes, member.position)
    await client.store(member, planes, runs)
    found, _ = await client.find(member)
    assert found.master_context == META.key.context
    assert equal_planes(world.read(IDENTITY, found), planes)
    assert found.record.extent.length < found.master.extent.length / 2
    world.check()


@pytest.mark.parametrize("what", ["unknown", "generation", "mirror", "deleted"])
async def test_a_mirror_needs_its_very_master(what: str) -> None:
    world = World()
    client = world.client()
    member, planes = await store_master(client)
    assert member.master is not None
    reference = member.master
    if what == "unknown":
        reference = replace(reference, context=ContextId(bytes(32)))
    elif what == "generation":
        reference = replace(reference, generation=reference.generation ^ 1)
    elif what == "mirror":
        runs = diff_of(IDENTITY, make_planes(), META.position, planes, member.position)
        reference = await client.store(member, planes, runs)
        member = make_meta(IDENTITY, history=["b"], master=reference)
    else:
        await client.delete(META)
    outcome = await client.reserve(replace(member, master=reference), 4096)
    assert outcome.error.code == "MASTER_GONE"
    world.check()


async def test_a_mirror_whose_master_was_deleted_before_its_commit_is_refused() -> None:
    world = World()
    client = world.client()
    member, planes = await store_master(client)
    runs = diff_of(IDENTITY, make_planes(), META.position, planes, member.position)
    reservation, checksum = await client.begin(member, planes, runs)
    await client.delete(META)
    assert world.node.catalog.hidden, "the reservation keeps the master's bytes"
    world.check()
    assert (await client.commit(reservation, checksum)).error.code == "MASTER_GONE"
    assert world.node.tier.used_bytes == 0
    world.check()


async def test_a_dense_record_in_a_mirrors_reservation_is_refused() -> None:
    world = World()
    client = world.client()
    member, planes = await store_master(client)
    dense = replace(member, master=None)
    outcome = await client.reserve(member, master_layout(dense).record_bytes)
    checksum = write_record(world.view(outcome.reserved.extent), dense, planes)
    assert (await client.commit(outcome.reserved.id, checksum)).error.code == "INVALID_INPUT"
    world.check()


async def test_a_pinned_mirror_must_stand_where_its_master_stands() -> None:
    identity = make_identity(is_pinned=True)
    world = World()
    client = world.client(identity)
    meta = make_meta(identity)
    reference = await client.store(meta, make_planes())
    member = make_meta(identity, history=["a"], master=reference)
    runs = [[np.array([[0, 1]], np.int32)] * 2 for _ in range(GEOMETRY.layers)]
    reservation, checksum = await client.begin(member, make_planes(), runs)
    assert (await client.commit(reservation, checksum)).error.code == "INVALID_INPUT"
    world.check()


async def test_reservations_of_a_session_are_bounded() -> None:
    world = World(limits=NodeLimits(reservations_per_session_max=2, reserve_items_max=3))
    client = world.client()
    outcomes = [await client.reserve(make_meta(IDENTITY, name), 4096) for name in range(3)]
    assert [outcome.error.code for outcome in outcomes] == ["", "", "LIMIT"]
    with pytest.raises(LimitError):
        await client.call("Reserve", wire.ReserveRequest(items=[wire.ReserveItem()] * 4))
    world.check()


# Limits of messages


async def test_commits_and_aborts_are_bounded_like_reserves() -> None:
    client = World(limits=NodeLimits(reserve_items_max=2)).client()
    with pytest.raises(LimitError, match="limit is 2"):
        await client.call("Commit", wire.CommitRequest(items=[wire.CommitItem(reservation_id=9)] * 3))
    with pytest.raises(LimitError, match="limit is 2"):
        await client.call("Abort", wire.AbortRequest(reservation_ids=[9, 9, 9]))


# Reservations do not run out


async def test_an_open_reservation_is_never_taken_from_a_writer_that_was_stopped_for_long() -> None:
    world = World()
    client = world.client()
    reservation, checksum = await client.begin(META, make_planes())
    world.clock.now_s += 1e6
    world.node.expire()
    assert not (await client.commit(reservation, checksum)).error.code
    world.check()
