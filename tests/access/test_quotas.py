"""Quotas: never one byte more, by whatever way it comes, and never at another tenant's cost."""

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvservice.access.quotas import Quota, Quotas, QuotaTable
from kvservice.model.errors import BY_CODE, LimitError
from kvservice.wire.v1 import cache_pb2 as wire
from tests.access.quota_world import SLOT, check_room, host_taken, limit, slots, taken_of
from tests.server.builders import Client, World, cache_of, make_identity, make_meta, make_planes, make_relative

ACME, RIVAL = make_identity(tenant="acme"), make_identity(tenant="rival")


def world_of(count: int = 64) -> World:
    return World(arena_bytes=count * SLOT)


async def fill(client: Client, identity: Any, *names: object) -> None:
    for name in names:
        await client.store(make_meta(identity, name), make_planes())


async def test_a_tenant_at_its_quota_loses_its_own_oldest_and_nobody_elses() -> None:
    world = world_of()
    limit(world, acme=slots(3))
    rival, acme = world.client(RIVAL), world.client(ACME)
    await fill(rival, RIVAL, *range(5))
    await fill(acme, ACME, *range(5))
    assert [cache_of(world, make_meta(ACME, name)) is not None for name in range(5)] == [False] * 2 + [True] * 3
    assert all(cache_of(world, make_meta(RIVAL, name)) for name in range(5))
    assert taken_of(world, "acme") == 3 * SLOT
    check_room(world.node)
    world.check()


async def test_what_was_used_stays_longer() -> None:
    world = world_of()
    limit(world, acme=slots(3))
    client = world.client(ACME)
    await fill(client, ACME, 0, 1, 2)
    for _ in range(4):
        _, lease = await client.find(make_meta(ACME, 0))
        await client.release(lease)
    await fill(client, ACME, 3, 4)
    assert [cache_of(world, make_meta(ACME, name)) is not None for name in range(5)] == [True, False, False, True, True]


async def test_leased_caches_stay_and_the_writer_is_refused() -> None:
    world = world_of()
    limit(world, acme=slots(2))
    client = world.client(ACME)
    await fill(client, ACME, 0, 1)
    leases = [(await client.find(make_meta(ACME, name)))[1] for name in (0, 1)]
    outcome = await client.reserve(make_meta(ACME, 2), SLOT)
    assert (outcome.error.code, issubclass(BY_CODE["QUOTA"], LimitError)) == ("QUOTA", True)
    assert f"'acme' may have {2 * SLOT} bytes" in outcome.error.message
    assert cache_of(world, make_meta(ACME, 0)) is not None
    await client.release(leases[0])
    assert (await client.reserve(make_meta(ACME, 2), SLOT)).WhichOneof("outcome") == "reserved"
    check_room(world.node)


async def test_what_cannot_fit_evicts_nothing() -> None:
    world = world_of()
    limit(world, acme=slots(3))
    client = world.client(ACME)
    await fill(client, ACME, 0, 1, 2)
    await client.find(make_meta(ACME, 0))
    assert (await client.reserve(make_meta(ACME, 9), 3 * SLOT)).error.code == "QUOTA"
    assert (await client.reserve(make_meta(ACME, 9), 4 * SLOT)).error.code == "QUOTA"
    assert world.node.counters.host_evictions.groups == 0


async def test_reservations_count_and_no_byte_gets_past_them() -> None:
    world = world_of()
    limit(world, acme=slots(4))
    clients = [world.client(ACME) for _ in range(3)]
    requests = [
        (client, make_meta(ACME, f"{number} {turn}")) for turn in range(4) for number, client in enumerate(clients)
    ]
    outcomes = await asyncio.gather(*(client.reserve(meta, SLOT) for client, meta in requests))
    assert [one.WhichOneof("outcome") for one in outcomes].count("reserved") == 4
    assert taken_of(world, "acme") == 4 * SLOT
    assert (await clients[0].reserve(make_meta(ACME, "tiny"), 1)).error.code == "QUOTA"
    clients[0].close()
    assert (await clients[1].reserve(make_meta(ACME, "more"), SLOT)).WhichOneof("outcome") == "reserved"
    check_room(world.node)


async def test_a_record_takes_whole_pages() -> None:
    world = world_of()
    limit(world, acme=Quota(host_bytes=2 * 4096 - 1))
    client = world.client(ACME)
    assert (await client.reserve(make_meta(ACME, 0), 1)).WhichOneof("outcome") == "reserved"
    assert (await client.reserve(make_meta(ACME, 1), 1)).error.code == "QUOTA"


async def test_a_quota_of_nothing_admits_nothing() -> None:
    world = world_of()
    limit(world, acme=Quota(host_bytes=0))
    assert (await world.client(ACME).reserve(make_meta(ACME, 0), 1)).error.code == "QUOTA"


async def test_what_a_lost_sessions_process_may_still_write_counts() -> None:
    world = world_of()
    limit(world, acme=slots(2))
    lost, other = world.client(ACME), world.client(ACME)
    for name in range(2):
        await lost.reserve(make_meta(ACME, name), SLOT)
    world.node.store.attach(lost.session)
    session = lost.session
    lost.close()
    assert (await other.reserve(make_meta(ACME, 5), SLOT)).error.code == "QUOTA"
    other.close()  # and it goes on to count when the tenant has no namespace left
    assert "acme" not in world.node.catalog.tenants._by_name
    assert (await world.client(ACME).reserve(make_meta(ACME, 5), SLOT)).error.code == "QUOTA"
    world.node.store.detach(session)
    assert (await world.client(ACME).reserve(make_meta(ACME, 5), SLOT)).WhichOneof("outcome") == "reserved"


async def test_bytes_that_outlive_the_tenants_last_namespace_count() -> None:
    world = world_of()
    limit(world, acme=slots(2))
    client = world.client(ACME)
    await fill(client, ACME, 0)
    cache = cache_of(world, make_meta(ACME, 0))
    assert cache is not None
    world.node.catalog.hold(cache)  # as a thread that copies it to SSD does
    await client.delete(make_meta(ACME, 0))
    client.close()
    assert world.node.catalog.tenants.get("acme") is None
    again = world.client(ACME)
    assert (await again.reserve(make_meta(ACME, 1), 2 * SLOT)).error.code == "QUOTA"
    world.node.catalog.unhold(cache)
    assert (await again.reserve(make_meta(ACME, 1), 2 * SLOT)).WhichOneof("outcome") == "reserved"


async def test_deleted_caches_count_as_long_as_they_are_leased() -> None:
    world = world_of()
    limit(world, acme=slots(2))
    client = world.client(ACME)
    await fill(client, ACME, 0, 1)
    _, lease = await client.find(make_meta(ACME, 0))
    await client.delete(make_meta(ACME, 0), make_meta(ACME, 1))
    assert (await client.reserve(make_meta(ACME, 2), 2 * SLOT)).error.code == "QUOTA"
    await client.release(lease)
    assert (await client.reserve(make_meta(ACME, 2), 2 * SLOT)).WhichOneof("outcome") == "reserved"
    check_room(world.node)


async def test_a_mirrors_own_master_is_not_evicted_for_it() -> None:
    world = world_of()
    limit(world, acme=Quota(host_bytes=SLOT + 2 * 4096))
    client = world.client(ACME)
    planes = make_planes()
    await client.store(make_meta(ACME, "old"), make_planes(seed=3))
    reference = await client.store(make_meta(ACME, "seg"), planes)
    assert cache_of(world, make_meta(ACME, "old")) is None
    outcome = await client.reserve(make_meta(ACME, "seg", ["x"], master=reference), 3 * 4096)
    assert outcome.error.code == "QUOTA"
    outcome = await client.reserve(make_meta(ACME, "seg", ["x"], master=reference), 2 * 4096)
    assert outcome.WhichOneof("outcome") == "reserved"


async def test_a_fold_that_has_no_room_leaves_the_dense_cache() -> None:
    world = world_of()
    client = world.client(ACME)
    planes = make_planes()
    await client.store(make_meta(ACME, "seg"), planes)
    meta = make_meta(ACME, "seg", ["before"])
    limit(world, acme=slots(2))
    await client.store(meta, make_relative(ACME, planes, 0, meta.position, rows=[3]))
    await world.node.fold_pending()
    folds = world.node.counters.folds
    assert (folds.dropped, folds.folded, taken_of(world, "acme")) == (1, 0, 2 * SLOT)
    limit(world, acme=slots(3))
    await client.commit_round(ACME, make_meta(ACME, "seg"), meta)
    assert folds.folded == 1
    check_room(world.node)


async def test_a_lowered_quota_is_enforced_at_once_as_far_as_leases_allow() -> None:
    world = world_of()
    rival, client = world.client(RIVAL), world.client(ACME)
    await fill(rival, RIVAL, 0, 1)
    await fill(client, ACME, *range(6))
    _, lease = await client.find(make_meta(ACME, 5))
    limit(world, acme=slots(0))
    world.node.allocation.room.enforce_all()
    assert host_taken(world.node) == {"acme": SLOT, "rival": 2 * SLOT}
    await client.release(lease)
    world.node.allocation.room.enforce_all()
    assert host_taken(world.node) == {"rival": 2 * SLOT}
    limit(world)
    world.node.allocation.room.enforce_all()
    assert not world.node.catalog.orders.own
    check_room(world.node)


async def test_every_tenant_without_a_section_has_the_default_for_itself() -> None:
    world = world_of()
    world.node.allocation.room.quotas.table = QuotaTable({"acme": slots(3)}, slots(1))
    for identity in (ACME, RIVAL, make_identity(tenant="third")):
        await fill(world.client(identity), identity, 0, 1, 2)
    assert host_taken(world.node) == {"acme": 3 * SLOT, "rival": SLOT, "third": SLOT}


def test_cold_storage_counts_what_this_node_put_there() -> None:
    quotas = Quotas(QuotaTable({"acme": Quota(remote_bytes=100)}))
    assert quotas.take_remote("acme", 100)
    assert not quotas.take_remote("acme", 1)
    quotas.give_back_remote("acme", 60)
    assert quotas.take_remote("acme", 60)
    assert quotas.take_remote("rival", 1 << 60)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["store", "reserve", "lease", "release", "abort", "delete", "close", "detach", "quota", "fold"]
        ),
        st.integers(0, 1),
        st.integers(0, 11),
    ),
    max_size=60,
)


@settings(max_examples=120, deadline=None)
@given(steps=STEPS, acme=st.integers(0, 6), rival=st.integers(0, 6))
def test_no_sequence_of_calls_gets_past_a_quota(steps: list[tuple[str, int, int]], acme: int, rival: int) -> None:
    asyncio.run(_play(steps, [acme, rival]))


async def _play(steps: list[tuple[str, int, int]], counts: list[int]) -> None:
    """Random calls of two tenants in a tier where only quotas are ever short, checked after each."""
    world, play = world_of(), None
    play = _Play(world, counts)
    for what, who, number in steps:
        evicted = world.node.counters.host_evictions.groups
        before = [play.names(one) for one in (0, 1)]
        await play.step(what, who, number)
        check_room(world.node)
        world.check()
        for one, tenant in enumerate(("acme", "rival")):
            assert taken_of(world, tenant) <= play.allowed[one]
        if world.node.counters.host_evictions.groups > evicted:
            assert play.names(1 - who) >= before[1 - who], "another tenant paid"


class _Play:
    """``allowed``: the quota, or what a tenant had when it was lowered and leases kept it."""

    def __init__(self, world: World, counts: list[int]) -> None:
        self.world, self.counts = world, counts
        self.identities = [ACME, RIVAL]
        self.clients = [world.client(one) for one in self.identities]
        self.leases: list[list[int]] = [[], []]
        self.reserved: list[list[int]] = [[], []]
        self.gone: list[Any] = []
        self.allowed = [0, 0]
        self._limit()

    def _limit(self) -> None:
        limit(self.world, acme=slots(self.counts[0]), rival=slots(self.counts[1]))
        self.world.node.allocation.room.enforce_all()
        for one, tenant in enumerate(("acme", "rival")):
            self.allowed[one] = max(self.counts[one] * SLOT, taken_of(self.world, tenant))

    def names(self, who: int) -> set[object]:
        space = self.world.node.catalog.spaces.get(self.identities[who].namespace())
        return set() if space is None else {cache.key for cache in space.caches()}

    async def step(self, what: str, who: int, number: int) -> None:
        client, identity = self.clients[who], self.identities[who]
        meta = make_meta(identity, number % 4, ["x"] * (number // 4))
        match what:
            case "store" | "reserve":
                outcome = await client.reserve(meta, SLOT if what == "reserve" else 8704)
                if outcome.WhichOneof("outcome") == "reserved" and what == "store":
                    await client.call("Abort", wire.AbortRequest(reservation_ids=[outcome.reserved.id]))
                    await client.store(meta, make_relative(identity, make_planes(), 0, meta.position, rows=[1]))
                elif outcome.WhichOneof("outcome") == "reserved":
                    self.reserved[who].append(outcome.reserved.id)
            case "lease":
                self.leases[who].append((await client.find(meta))[1])
            case "release":
                await client.release(*filter(None, self.leases[who]))
                self.leases[who] = []
            case "abort":
                await client.call("Abort", wire.AbortRequest(reservation_ids=self.reserved[who]))
                self.reserved[who] = []
            case "delete":
                await client.delete(meta)
            case "close":
                self._close(who, is_attached=number % 2 == 0)
            case "detach":
                for session in self.gone:
                    self.world.node.store.detach(session)
                self.gone = []
            case "quota":
                self.counts[who] = number % 7
                self._limit()
            case "fold":
                await self.world.node.fold_pending()

    def _close(self, who: int, *, is_attached: bool) -> None:
        client = self.clients[who]
        if is_attached:
            self.world.node.store.attach(client.session)
            self.gone.append(client.session)
        client.close()
        self.clients[who] = self.world.client(self.identities[who])
        self.leases[who], self.reserved[who] = [], []


@pytest.mark.parametrize("tenant", ["acme", "rival"])
async def test_a_storm_of_one_tenant_takes_nothing_from_the_other(tenant: str) -> None:
    world = world_of(8)
    limit(world, acme=slots(4), rival=slots(4))
    calm, wild = (RIVAL, ACME) if tenant == "acme" else (ACME, RIVAL)
    await fill(world.client(calm), calm, *range(4))
    clients = [world.client(wild) for _ in range(4)]
    names = [f"{turn}" for turn in range(40)]
    await asyncio.gather(*(fill(client, wild, *(f"{n} {name}" for name in names)) for n, client in enumerate(clients)))
    assert all(cache_of(world, make_meta(calm, name)) for name in range(4))
    assert host_taken(world.node) == {"acme": 4 * SLOT, "rival": 4 * SLOT}
    world.check()
