"""What a place refused goes to whoever it belongs to later; what a drain cannot give to a node goes to storage."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvservice.app import LocalNode
from kvservice.model.errors import CapacityError, UnavailableError
from kvservice.model.plan import Outcome
from kvservice.model.segment import CacheKey, SegmentId
from kvservice.sharing import cluster
from kvservice.sharing.draining import Drain
from kvservice.sharing.place import Place
from kvservice.sharing.pushes import Pushes
from kvservice.storage.buffer import Bytes
from kvservice.storage.remote.contract import RemoteName
from tests.client.builders import free_port
from tests.server.builders import World, make_identity, make_meta, make_planes
from tests.sharing.nodes import addresses, group, held, live, prompt_of, shared_node, sidecar, until, worker
from tests.sharing.shelf import Shelf, Shelves
from tests.sharing.test_bringing_nodes import Caller, cluster_of, pushed, put_cold

IDENTITY = make_identity()
META = make_meta(IDENTITY)
PLANES = make_planes(seed=3)


class Moving(Shelves):
    """Caches belong to the shelves whose indexes are in ``owners``; ``stores`` are no node."""

    owners: Sequence[int] = (0,)
    stores: Sequence[int] = ()

    def homes(self, _: SegmentId, __: int) -> Sequence[Place]:
        return [self.places[index] for index in self.owners]

    def storages(self) -> Sequence[Place]:
        return [self.places[index] for index in self.stores]


class MovingWorld(World):
    """A node that gives what it has to shelves whose owners change."""

    def __init__(self, *shelves: Shelf, push: str = "back") -> None:
        super().__init__()
        self.directory = Moving(*shelves)
        self.node.share(self.directory, push, is_gated=False)

    @property
    def pushes(self) -> Pushes:
        assert self.node.sharing is not None
        return self.node.sharing.pushes

    async def __aenter__(self) -> "MovingWorld":
        self.node.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.node.stop()

    async def pushed(self) -> None:
        for _ in range(500):
            if self.pushes.is_idle:
                return
            self.clock.now_s += 10
            await asyncio.sleep(0.01)
        raise AssertionError("what waits to be given away does not become less")


def full() -> Shelf:
    shelf = Shelf()
    shelf.fault = CapacityError("draining")
    return shelf


async def test_what_was_refused_goes_to_the_next_owner() -> None:
    old, new = full(), Shelf()
    async with MovingWorld(old, new) as world:
        await world.client().store(META, PLANES)
        await world.pushed()
        assert world.node.counters.pushes.refused == 1
        world.pushes.wake()
        await world.pushed()
        assert world.node.counters.pushes.refused == 1, "who refused it is not asked again as long as it is the owner"
        world.directory.owners = (1,)
        world.pushes.wake()
        await world.pushed()
        assert len(new.records) == 1
        new.records.clear()
        world.pushes.wake()
        await world.pushed()
        assert not new.records, "given once"


@pytest.mark.parametrize("push", ["back", "through"])
async def test_what_is_refused_after_its_owner_has_changed_goes_there_at_once(push: str) -> None:
    old, new = full(), Shelf()
    async with MovingWorld(old, new, push=push) as world:
        store = old.store

        async def refuse(name: RemoteName, record: Bytes, prefill_s: float) -> bool:
            world.directory.owners = (1,)
            return await store(name, record, prefill_s)

        old.store = refuse  # type: ignore[method-assign]
        await world.client().store(META, PLANES)
        await world.pushed()
        assert len(new.records) == 1


async def test_what_was_refused_and_deleted_is_not_given() -> None:
    old, new = full(), Shelf()
    async with MovingWorld(old, new) as world:
        client = world.client()
        await client.store(META, PLANES)
        await world.pushed()
        old.fault = None
        await client.delete(META)
        world.directory.owners = (1,)
        world.pushes.wake()
        await world.pushed()
        assert not new.records


@pytest.mark.parametrize("fault", [None, CapacityError("full"), UnavailableError("away")])
async def test_a_drain_gives_to_storage_what_no_node_takes(fault: CapacityError | UnavailableError | None) -> None:
    owner, cold = Shelf(), Shelf()
    owner.fault = fault
    async with MovingWorld(owner, cold, push="off") as world:
        world.directory.owners = () if fault is None else (0,)
        world.directory.stores = (1,)
        await world.client().store(META, PLANES)
        told = await Drain(world.node.catalog, world.pushes, asyncio.Event()).run(5.0)
        assert told == {"given": 1, "waiting": 0, "reasons": {}}
        assert len(cold.records) == 1
        assert not owner.records


async def test_a_drain_names_what_neither_a_node_nor_storage_takes() -> None:
    cold = full()
    async with MovingWorld(cold, push="off") as world:
        world.directory.owners, world.directory.stores = (), (0,)
        await world.client().store(META, PLANES)
        told = await Drain(world.node.catalog, world.pushes, asyncio.Event()).run(5.0)
        assert told == {"given": 0, "waiting": 1, "reasons": {"refused": 1}}


# Real nodes


def keys(node: LocalNode) -> set[CacheKey]:
    return node.on_loop(lambda one: {cache.key for space in one.catalog.spaces.values() for cache in space.caches()})


def test_what_a_draining_node_refused_goes_to_the_other_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metas = [make_meta(IDENTITY, index) for index in range(24)]
    with group(tmp_path, 2) as (nodes, ports), sidecar(tmp_path / "a", *ports) as node:
        until(lambda: len(live(node)) == 2, "two live nodes")
        writer = Caller(node)
        for meta in metas[:8]:
            writer.store(meta, PLANES)  # over connections that are not greeted again
        pushed(node)
        before = keys(nodes[0])
        assert keys(node) == before | keys(nodes[1])
        monkeypatch.setattr(cluster, "ASK_S", 3600.0)
        nodes[0].peers._is_draining = True  # and the sidecar has not heard of it
        for meta in metas[8:]:
            writer.store(meta, PLANES)
        pushed(node)
        assert node.stats()["pushes"]["refused"] > 0
        assert keys(nodes[0]) == before
        monkeypatch.setattr(cluster, "ASK_S", 0.1)
        until(lambda: keys(node) <= before | keys(nodes[1]), "all of it at the node that stays")
        with sidecar(tmp_path / "b", ports[1]) as other:
            reader = Caller(other)
            assert all(reader.find(meta) is Outcome.HIT for meta in metas[8:])


def test_who_gives_caches_away_hears_of_a_drain(tmp_path: Path) -> None:
    port, heard = free_port(), list[str]()
    with shared_node(tmp_path / "s", port) as owner, sidecar(tmp_path / "a", port) as node:
        cluster_of(node).on_live = lambda: heard.append("a change")
        owner.run_on_loop(owner.peers.drain(1.0))
        until(lambda: bool(heard), "the word")


@pytest.mark.parametrize("push", ["back", "off"])
def test_the_only_node_drains_into_cold_storage(tmp_path: Path, push: str) -> None:
    port, shelf = free_port(), Shelf()
    with shared_node(tmp_path / "s", port, shared=addresses(port), push=push) as node, worker(node) as writer:
        until(lambda: len(live(node)) == 1, "the node itself")
        writer.store(prompt_of(2))
        writer.pushed()
        put_cold(node, shelf)
        told = node.run_on_loop(node.peers.drain(20.0))
        assert (told["given"], told["waiting"]) == (held(node), 0)
        assert len(shelf.records) == held(node) > 0
