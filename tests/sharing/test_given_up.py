"""Lookups whose caller is gone while other places are asked: what is answered later is let go of, and nothing else."""

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvservice.app import LocalNode
from kvservice.model.plan import Outcome
from kvservice.model.segment import SegmentId
from kvservice.sharing import finder
from kvservice.sharing.place import Place
from kvservice.wire.v1 import cache_pb2 as wire
from tests.client.builders import free_port
from tests.server.builders import World, make_identity, make_meta, make_planes, query
from tests.sharing.nodes import live, shared_node, sidecar, until
from tests.sharing.shelf import SharingWorld, Shelves
from tests.sharing.test_bringing import Leased, SlowShelf, filled, leased
from tests.sharing.test_bringing_nodes import Caller

IDENTITY = make_identity()
META = make_meta(IDENTITY)
OTHER = make_meta(IDENTITY, "other")
PLANES = make_planes(seed=3)


async def given_up(lookup: "asyncio.Task[object]") -> None:
    lookup.cancel()
    await asyncio.gather(lookup, return_exceptions=True)
    assert lookup.cancelled()


async def test_what_is_answered_to_nobody_is_let_go_of() -> None:
    shelf = SlowShelf()
    (mirror,) = await filled(shelf, mirrors=1)
    async with SharingWorld(shelf) as world:
        found, client = leased(world), world.client()
        shelf.ask_slowly()
        lookup = asyncio.create_task(client.find(mirror))
        await shelf.was_asked.wait()
        await given_up(lookup)
        shelf.answers.set()
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(found.records) == 2
        found.check()
        assert not shelf.fetched
        world.check()


class Divided(Shelves):
    """Every segment has a shelf of its own to ask."""

    def __init__(self, shelves: dict[SegmentId, SlowShelf]) -> None:
        super().__init__(*shelves.values())
        self._index = {segment: index for index, segment in enumerate(shelves)}

    def sources(self, segment: SegmentId) -> Sequence[Place]:
        return [self.places[self._index[segment]]]


async def test_what_was_answered_already_is_let_go_of_when_another_place_is_not_waited_for() -> None:
    quick, slow = SlowShelf(), SlowShelf()
    for shelf, meta in ((quick, META), (slow, OTHER)):
        async with SharingWorld(shelf) as writer:
            await writer.client().store(meta, PLANES)
            await writer.pushed()
        shelf.fault = None
    world = World()
    world.node.share(Divided({META.key.segment: quick, OTHER.key.segment: slow}), "off", is_gated=False)
    assert world.node.sharing is not None
    founds = [Leased(place) for place in world.node.sharing.directory.everywhere()]
    slow.ask_slowly()
    lookup = asyncio.create_task(world.client().lookup(query(META), query(OTHER)))
    await slow.was_asked.wait()
    for _ in range(5):
        await asyncio.sleep(0)
    await given_up(lookup)
    slow.answers.set()
    for _ in range(20):
        await asyncio.sleep(0)
    for found in founds:
        found.check()
    await world.node.stop()


async def test_a_stop_ends_questions_that_nobody_waits_for() -> None:
    shelf = SlowShelf()
    await filled(shelf)
    async with SharingWorld(shelf) as world:
        shelf.ask_slowly()
        lookup = asyncio.create_task(world.client().find(META))
        await shelf.was_asked.wait()
        await given_up(lookup)
    assert not [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]


async def test_a_lookup_given_up_between_two_slices_lets_go_of_what_was_not_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(finder, "BEGIN_SLICE", 2)
    shelf = SlowShelf()
    metas = [make_meta(IDENTITY, index) for index in range(12)]
    async with SharingWorld(shelf) as world:
        for meta in metas:
            await world.client().store(meta, PLANES)
        await world.pushed()
    shelf.fault = None
    async with SharingWorld(shelf) as world:
        found, counters = leased(world), world.node.counters.remote
        shelf.gate.clear()
        lookup = asyncio.create_task(world.client().lookup(*map(query, metas)))
        for _ in range(1000):
            if counters.begun:
                break
            await asyncio.sleep(0)
        assert 0 < counters.begun < len(metas)
        await given_up(lookup)
        shelf.gate.set()
        await world.arrived()
        found.check()
        assert counters.done == counters.begun < len(metas)
        world.check()


def test_an_owner_that_answers_late_keeps_no_lease(tmp_path: Path) -> None:
    port = free_port()
    with shared_node(tmp_path / "s", port) as owner, sidecar(tmp_path / "a", port, push="off") as node:
        writer, reader = Caller(owner), Caller(node)
        for meta in (OTHER, META):
            writer.store(meta, PLANES)
        assert reader.find(OTHER) is Outcome.HIT  # a second connection, which outlives that of the question
        until(lambda: owner.on_loop(lambda one: not one.leases.live), "an owner without leases")
        granted = owner.on_loop(lambda one: one.counters.leases_granted)
        goes_on = threading.Event()
        held_up = threading.Thread(target=lambda: owner.on_loop(lambda _: goes_on.wait(30.0)))
        held_up.start()
        request = wire.LookupRequest(session=reader.session, prompts=[query(META)])
        node.run_on_loop(given_up_soon(node, request))
        goes_on.set()
        held_up.join()
        until(lambda: owner.on_loop(lambda one: one.counters.leases_granted) > granted, "an answer")
        until(lambda: owner.on_loop(lambda one: not one.leases.live), "an owner without leases")
        assert len(live(node)) == 1


async def given_up_soon(node: LocalNode, request: wire.LookupRequest) -> None:
    """A lookup whose caller goes while the owner is asked."""
    counters = node._node.counters.remote
    lookup = asyncio.create_task(node._calls.call("Lookup", request))
    asked = counters.asked
    await asyncio.wait([lookup], timeout=0.2)
    assert counters.asked > asked
    await given_up(lookup)
