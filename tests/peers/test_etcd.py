"""Membership by a real etcd: leases, twins, zombies, watches, and an etcd that stops, forgets or freezes."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from time import monotonic, time

import pytest

from kvservice.model.errors import ConfigError, KVServiceError, StaleEpochError, UnavailableError
from kvservice.peers.directory import Change, Directory
from kvservice.peers.etcd import EtcdRegistration, EtcdSource, decode_member, encode_member
from kvservice.peers.etcd_gateway import EtcdGateway
from kvservice.peers.etcd_place import parse_etcd_url
from kvservice.peers.member import Address, Facts, Listing, MemberState, NodeId, Roll, SourceState
from kvservice.peers.membership import Membership
from tests.peers.etcd_process import EtcdProcess, encoded, require_etcd
from tests.peers.members import facts, node_uuid, place, segment

TTL_S = 2  # etcd grants no less with the elections of these tests
WAIT_S = 30.0
_numbers = count()


@pytest.fixture(scope="module")
def etcd(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdProcess]:
    """Shared by tests that leave it as it is, each with a prefix of its own."""
    with EtcdProcess(require_etcd(request), tmp_path_factory.mktemp("etcd")) as process:
        yield process


@pytest.fixture
def own_etcd(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EtcdProcess]:
    """For a test that breaks it."""
    with EtcdProcess(require_etcd(request), tmp_path / "etcd") as process:
        yield process


@dataclass
class Node:
    """A registered node of a test."""

    told: list[Facts]
    registration: EtcdRegistration
    refused: list[KVServiceError]


class World:
    """A prefix of an etcd: registers nodes and watches them."""

    def __init__(self, url: str, stack: AsyncExitStack) -> None:
        self.url, self.stack = url, stack
        self.rolls: list[Roll] = []

    def gateway(self, *, deadline_s: float = 5.0, quiet_s: float = 30.0) -> EtcdGateway:
        gateway = EtcdGateway(parse_etcd_url(self.url), deadline_s=deadline_s, quiet_s=quiet_s)
        self.stack.push_async_callback(gateway.close)
        return gateway

    def make(self, said: Facts, address: Address, gateway: EtcdGateway | None = None) -> Node:
        told: list[Facts] = [said]
        refused: list[KVServiceError] = []
        registration = EtcdRegistration(
            gateway or self.gateway(), address, lambda: told[-1], clock=time, on_refused=refused.append, ttl_s=TTL_S
        )
        node = Node(told, registration, refused)
        self.stack.push_async_callback(registration.stop)
        return node

    async def register(self, number: int, epoch: int = 1, *, at: int | None = None) -> Node:
        node = self.make(facts(number, epoch), place(number if at is None else at))
        await node.registration.start()
        return node

    def watch(self, gateway: EtcdGateway | None = None) -> None:
        source = EtcdSource(gateway or self.gateway(), clock=time)

        async def follow() -> None:
            async for roll in source.watch():
                self.rolls.append(roll)

        task = asyncio.create_task(follow())

        async def end() -> None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        self.stack.push_async_callback(end)

    @property
    def last(self) -> Roll:
        return self.rolls[-1] if self.rolls else Roll(SourceState.STARTING)

    @property
    def names(self) -> list[str]:
        return sorted(one.facts.name for one in self.last.listings if one.facts)

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not holds():  # noqa: ASYNC110  what others do is looked at from outside
                await asyncio.sleep(0.01)


@asynccontextmanager
async def world_of(url: str, name: str) -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        yield World(f"{url}/{name}", stack)


@pytest.fixture
async def world(etcd: EtcdProcess) -> AsyncIterator[World]:
    async with world_of(etcd.url, f"test-{next(_numbers)}") as found:
        yield found


def abandon(node: Node) -> None:
    """What a kill does: no keepalive any more, no revoke."""
    task = node.registration._task
    assert task is not None
    task.cancel()
    node.registration._lease = 0


# Registering and watching


async def test_members_are_listed_with_all_they_say_and_watched(world: World) -> None:
    world.watch()
    await world.until(lambda: world.last.state is SourceState.EMPTY)
    assert "no node has registered below" in world.last.reason
    said = Facts(NodeId(node_uuid(1), 77), "première", 2.5e9, is_draining=False, empty_s=100.0)
    node = world.make(said, Address("::1", 7001))
    await node.registration.start()
    assert node.registration.is_registered
    await world.until(lambda: world.names == ["première"])
    (listing,) = world.last.listings
    assert listing.address == Address("::1", 7001)
    assert listing.facts is not None
    assert (listing.facts.node, listing.facts.weight) == (said.node, 2.5e9)
    assert 100 <= (listing.facts.empty_s or 0) < 130
    await world.register(2)
    await world.until(lambda: len(world.last.listings) == 2)
    await node.registration.stop()
    await world.until(lambda: world.names == ["n2"])


async def test_a_node_that_drains_says_so_before_it_leaves(world: World) -> None:
    world.watch()
    node = await world.register(1)
    node.told.append(replace(node.told[0], is_draining=True))
    await node.registration.update()
    await world.until(lambda: any(one.facts and one.facts.is_draining for one in world.last.listings))
    await node.registration.stop()
    await world.until(lambda: world.last.state is SourceState.EMPTY)


async def test_a_lease_is_kept_longer_than_it_lives_and_lapses_when_its_node_is_gone(world: World) -> None:
    world.watch()
    node = await world.register(1)
    await asyncio.sleep(2.5 * TTL_S)
    assert world.names == ["n1"]
    abandon(node)
    await world.until(lambda: world.last.state is SourceState.EMPTY)


async def test_a_lease_that_was_lost_is_taken_anew(world: World, etcd: EtcdProcess) -> None:
    world.watch()
    node = await world.register(1)
    await world.until(lambda: world.names == ["n1"])
    etcd.call("lease/revoke", {"ID": str(node.registration._lease)})
    await world.until(lambda: world.last.state is SourceState.EMPTY)
    await world.until(lambda: world.names == ["n1"])
    assert not node.refused


# Twins and zombies


async def test_a_twin_of_a_live_node_is_refused_and_the_first_stays(world: World) -> None:
    world.watch()
    first = await world.register(1)
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:7001 is live with the same uuid.*was copied"):
        await world.register(1, epoch=2, at=5)
    await world.until(lambda: world.names == ["n1"])
    assert world.last.listings[0].facts == first.told[0]
    assert not first.refused


async def test_a_node_that_was_killed_comes_back_at_another_address_when_its_lease_has_lapsed(world: World) -> None:
    first = await world.register(1)
    abandon(first)
    second = await world.register(1, epoch=2, at=5)
    assert second.registration.is_registered


async def test_a_node_that_was_killed_comes_back_at_its_own_address_at_once(world: World, etcd: EtcdProcess) -> None:
    first = await world.register(1)
    abandon(first)
    naps: list[float] = []

    async def nap(seconds: float) -> None:
        naps.append(seconds)
        await asyncio.sleep(seconds)

    second = world.make(facts(1, epoch=2), place(1))
    second.registration._sleep = nap
    await second.registration.start()
    assert TTL_S / 5 not in naps  # nothing was waited for
    assert second.registration.is_registered


async def test_a_zombie_is_refused_at_its_start_and_while_it_runs(world: World, etcd: EtcdProcess) -> None:
    zombie = await world.register(1, epoch=1)
    lease = zombie.registration._lease
    later = await world.register(1, epoch=2)  # at the same address: the first is known to be gone
    etcd.call("lease/revoke", {"ID": str(lease)})
    await world.until(lambda: bool(zombie.refused))
    assert isinstance(zombie.refused[0], StaleEpochError)
    assert not zombie.registration.is_registered
    await later.registration.stop()
    with pytest.raises(StaleEpochError, match=r"booted again since \(epoch 2\)"):
        await world.register(1, epoch=1, at=9)


async def test_of_two_boots_that_register_at_once_one_is_let_in(world: World) -> None:
    world.watch()
    results = await asyncio.gather(
        *(world.register(1, epoch=epoch, at=epoch) for epoch in (1, 2, 3)), return_exceptions=True
    )
    good = [one for one in results if isinstance(one, Node)]
    assert all(isinstance(one, Node | ConfigError | StaleEpochError) for one in results), results
    assert len(good) == 1
    await world.until(lambda: len(world.last.listings) == 1)
    assert world.last.listings[0].facts == good[0].told[0]


# What stands in etcd is hostile


RIGHT = {
    "version": 1,
    "epoch": 1,
    "address": "a:1",
    "name": "",
    "weight": 1,
    "draining": False,
    "empty_since": None,
}


@pytest.mark.parametrize(
    "value",
    [
        *("", "{", "[]", "null", "[" * 5000, '{"version": 1}'),
        json.dumps({"version": 2, "epoch": 1}),
        *(json.dumps(RIGHT | wrong) for wrong in ({"epoch": -1}, {"epoch": "1"}, {"epoch": True}, {"address": "a"})),
        *(json.dumps(RIGHT | wrong) for wrong in ({"weight": "1"}, {"weight": 0}, {"draining": 0}, {"name": None})),
        json.dumps(RIGHT).replace('"weight": 1', '"weight": 1e999'),
    ],
)
async def test_an_entry_that_cannot_be_read_is_left_out_and_said_once(
    world: World, etcd: EtcdProcess, value: str, caplog: pytest.LogCaptureFixture
) -> None:
    await world.register(1)
    place_ = parse_etcd_url(world.url)
    key = f"{place_.prefix}/members/{node_uuid(2)}"
    etcd.call("kv/put", {"key": encoded(key), "value": encoded(value)})
    source = EtcdSource(world.gateway(), clock=time)
    for _ in range(2):
        found = await source.members()
        assert [one.facts.name for one in found.listings if one.facts] == ["n1"]
    assert caplog.text.count("it is left out") == 1
    mended = world.make(facts(2), place(2))
    await mended.registration.start()
    assert len((await source.members()).listings) == 2


def test_the_entry_that_others_are_made_wrong_from_is_right() -> None:
    listing = decode_member(str(node_uuid(2)), json.dumps(RIGHT).encode(), 0.0)
    assert listing == Listing(Address("a", 1), Facts(NodeId(node_uuid(2), 1)))
    value = encode_member(place(1), facts(2, empty_s=5.0), 100.0)
    behind = decode_member(str(node_uuid(2)), value, 90.0)
    assert behind == Listing(place(1), facts(2, empty_s=0.0)), "a clock that is behind makes no negative age"


# An etcd that fails


async def test_a_compacted_history_is_listed_anew(world: World, etcd: EtcdProcess) -> None:
    await world.register(1)
    gateway = world.gateway(quiet_s=0.2)
    revision, _ = await gateway.list_keys(b"/")
    etcd.call("kv/put", {"key": encoded("other"), "value": encoded("x")})
    etcd.call("kv/put", {"key": encoded("other"), "value": encoded("y")})
    now, _ = await gateway.list_keys(b"/")
    etcd.call("kv/compaction", {"revision": str(now)})
    with pytest.raises(KVServiceError, match="forgot what was before"):
        async for _ in gateway.watch(b"/", revision):
            pass
    world.watch(gateway)
    await world.until(lambda: world.names == ["n1"])
    await world.register(2)
    await world.until(lambda: world.names == ["n1", "n2"])


async def test_an_etcd_that_stops_is_named_and_all_resumes_by_itself(own_etcd: EtcdProcess) -> None:
    async with world_of(own_etcd.url, "w") as world:
        world.watch()
        node = await world.register(1)
        await world.until(lambda: world.names == ["n1"])
        own_etcd.kill()
        await world.until(lambda: world.last.state is SourceState.UNREACHABLE)
        assert own_etcd.url in world.last.reason
        own_etcd.start()
        await world.until(lambda: world.names == ["n1"])
        assert not node.refused
        own_etcd.kill()
        own_etcd.forget()
        own_etcd.start()
        await world.until(lambda: world.names == ["n1"])  # registered anew: nothing of it was there


async def test_an_etcd_that_is_away_at_the_start_is_no_error(own_etcd: EtcdProcess) -> None:
    own_etcd.kill()
    async with world_of(own_etcd.url, "w") as world:
        assert (await EtcdSource(world.gateway(), clock=time).members()).state is SourceState.UNREACHABLE
        world.watch()
        node = await world.register(1)
        assert not node.registration.is_registered
        own_etcd.start()
        await world.until(lambda: world.names == ["n1"])


async def test_a_frozen_etcd_costs_one_deadline_and_is_left_for_another(
    own_etcd: EtcdProcess, etcd: EtcdProcess
) -> None:
    async with world_of(f"{own_etcd.url},127.0.0.1:{etcd.port}", "frozen") as world:
        gateway = world.gateway(deadline_s=0.5)
        await gateway.list_keys(b"/")
        own_etcd.freeze()
        with pytest.raises(UnavailableError, match=r"did not answer within 0\.5 s"):
            await gateway.list_keys(b"/")
        await gateway.list_keys(b"/")
        own_etcd.thaw()
        dead = EtcdGateway(parse_etcd_url(f"http://127.0.0.1:1,127.0.0.1:{etcd.port}"))
        await dead.list_keys(b"/")  # refused: the next is asked in the same call
        await dead.close()


async def test_a_watch_of_a_frozen_etcd_is_given_up(own_etcd: EtcdProcess) -> None:
    async with world_of(own_etcd.url, "w") as world:
        world.watch(world.gateway(deadline_s=0.3, quiet_s=0.3))
        await world.register(1)
        await world.until(lambda: world.names == ["n1"])
        own_etcd.freeze()
        await world.until(lambda: world.last.state is SourceState.UNREACHABLE)
        own_etcd.thaw()
        await world.until(lambda: world.names == ["n1"])


async def test_a_directory_follows_leases(world: World) -> None:
    changes: list[Change] = []
    source = EtcdSource(world.gateway(), clock=time)
    directory = Directory(monotonic, knows_liveness=source.knows_liveness)
    membership = Membership(source, directory, changes.append)
    await membership.start()
    await world.register(1)
    second = await world.register(2)
    await world.until(lambda: len(changes) == 2)
    assert {len(directory.owners(segment(number)).write) for number in range(50)} == {1}
    abandon(second)
    await world.until(lambda: len(changes) == 3)
    assert [(str(one.before), str(one.after)) for one in changes[2:]] == [("live", "disconnected")]
    await world.register(2, epoch=2)
    await world.until(lambda: changes[-1].after is MemberState.LIVE and len(changes) > 3)
    assert [one.node.epoch for one in directory.members if one.name == "n2"] == [2]
    await membership.stop()
