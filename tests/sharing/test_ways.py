"""Several ways to one node: which of them its place has, and what the loss of one says of the others."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from kvservice.model.errors import UnavailableError
from kvservice.peers.directory import Directory
from kvservice.peers.member import Facts, LocalAddress, MemberState, NodeId
from kvservice.peers.routes import Router
from kvservice.peers.routes_log import Medium
from kvservice.peers.sources import member_source
from kvservice.sharing.cluster import Cluster
from kvservice.sharing.routed import RoutedPlace
from tests.peers.stream_world import make_facts, settled

SOCKET = "/run/kv.sock.peers"
THERE = Facts(NodeId(uuid.UUID(int=5), 7), "shared", flight_port=9, boot_id="b", local_path=SOCKET)


@dataclass(eq=False)
class FakeLink:
    """Says what it is told to say."""

    where: Any
    on_change: Callable[[Facts | None], None]
    name: str = "a link"
    is_answering: bool = True
    doubted: int = 0
    closed: int = 0
    greets: Facts | None = None

    def doubt(self) -> None:
        self.doubted += 1

    async def ping(self) -> float:
        if self.greets is None:
            raise UnavailableError("nobody")
        self.on_change(self.greets)
        return 0.001

    async def close(self) -> None:
        self.closed += 1

    def lose(self) -> None:
        self.is_answering, self.greets = False, None
        self.on_change(None)


@dataclass
class Ways:
    """A cluster that knows one address, and the links that it made, by medium."""

    cluster: Cluster
    made: dict[Medium, list[FakeLink]] = field(default_factory=dict)

    def link(self, medium: Medium) -> FakeLink:
        return self.made[medium][-1]

    @property
    def used(self) -> set[Medium]:
        return {medium for place in self.cluster.places.values() for medium in place.ways}

    @property
    def states(self) -> list[MemberState]:
        return [one.state for one in self.cluster.directory.members]


@asynccontextmanager
async def ways(address: str = "127.0.0.1:7", *, is_here: bool = True) -> AsyncIterator[Ways]:
    made: dict[Medium, list[FakeLink]] = {}

    def opener(medium: Medium) -> Callable[[Any, Any], Any]:
        def make(where: Any, on_change: Any) -> FakeLink:
            made.setdefault(medium, []).append(FakeLink(where, on_change))
            return made[medium][-1]

        return make

    source = member_source(address, "", time.time)
    assert source is not None
    router = Router(time.monotonic)
    media = (Medium.STREAM, Medium.FLIGHT, Medium.SHARED_MEMORY)
    cluster = Cluster(
        source,
        Directory(time.monotonic, knows_liveness=False),
        {medium: opener(medium) for medium in media},
        lambda: make_facts("here"),
        lambda _: False,
        lambda medium, link: RoutedPlace(router, {medium: link}),
        met_at=lambda facts: LocalAddress(facts.local_path, facts.node) if is_here and facts.local_path else None,
    )
    await cluster.start()
    try:
        await settled(lambda: bool(cluster.links))
        yield Ways(cluster, made)
    finally:
        await cluster.stop()
        for place in cluster.everywhere():
            await place.close()
        assert all(link.closed for links in made.values() for link in links)


async def test_a_further_way_is_used_once_it_was_answered_and_not_while_it_is_lost() -> None:
    async with ways() as world:
        world.link(Medium.STREAM).on_change(THERE)
        local = world.link(Medium.SHARED_MEMORY)
        assert local.where == LocalAddress(SOCKET, THERE.node)
        assert world.used == {Medium.STREAM}
        local.on_change(THERE)
        assert world.used == {Medium.STREAM, Medium.SHARED_MEMORY}
        local.lose()
        assert world.used == {Medium.STREAM}
        local.is_answering = True
        local.on_change(THERE)
        assert world.used == {Medium.STREAM, Medium.SHARED_MEMORY}


async def test_silence_in_shared_memory_makes_the_stream_doubtful_and_that_of_flight_does_not() -> None:
    async with ways() as world:
        world.link(Medium.STREAM).on_change(THERE)
        for medium, doubted in ((Medium.FLIGHT, 0), (Medium.SHARED_MEMORY, 1)):
            world.link(medium).on_change(THERE)
            world.link(medium).lose()
            assert world.link(Medium.STREAM).doubted == doubted
        assert world.states == [MemberState.LIVE]


async def test_a_node_is_lost_when_no_way_is_answered() -> None:
    async with ways() as world:
        stream = world.link(Medium.STREAM)
        stream.on_change(THERE)
        local, flight = world.link(Medium.SHARED_MEMORY), world.link(Medium.FLIGHT)
        local.greets = THERE
        stream.lose()
        assert (local.doubted, flight.doubted) == (1, 1)
        await asyncio.sleep(0)
        assert world.states == [MemberState.LIVE], "it answers in shared memory"
        flight.lose()
        local.lose()
        assert world.states == [MemberState.DISCONNECTED]


async def test_another_boot_is_met_anew_and_one_that_says_nothing_is_not() -> None:
    async with ways() as world:
        stream = world.link(Medium.STREAM)
        stream.on_change(THERE)
        first = world.link(Medium.SHARED_MEMORY)
        first.on_change(THERE)
        stream.on_change(THERE)
        assert world.link(Medium.SHARED_MEMORY) is first
        again = replace(THERE, node=NodeId(THERE.node.uuid, 8))
        stream.on_change(again)
        second = world.link(Medium.SHARED_MEMORY)
        assert second is not first
        await settled(lambda: bool(first.closed))
        first.on_change(THERE)
        assert world.used == {Medium.STREAM}, "what a closed link still heard counts for nothing"
        second.on_change(again)
        stream.on_change(replace(again, local_path=""))
        assert world.used == {Medium.STREAM}
        await settled(lambda: bool(second.closed))


async def test_a_node_that_is_not_met_here_has_no_such_way() -> None:
    async with ways(is_here=False) as world:
        world.link(Medium.STREAM).on_change(THERE)
        assert Medium.SHARED_MEMORY not in world.made


async def test_what_is_named_by_its_flight_port_is_reached_over_flight() -> None:
    async with ways("flight://127.0.0.1:7") as world:
        world.link(Medium.FLIGHT).on_change(THERE)
        assert world.made.keys() == {Medium.FLIGHT}
        assert world.used == {Medium.FLIGHT}
