"""What is new is given away once, whole and with its master; what was deleted never; and no place holds up another."""

import asyncio
from collections.abc import Callable, Sequence

import pytest

from kvservice.caches import Cache
from kvservice.model.cache import CacheMeta, MasterReference
from kvservice.model.errors import CapacityError, MasterGoneError, UnavailableError
from kvservice.model.plan import Outcome
from kvservice.model.segment import ContextId
from kvservice.sharing.draining import Drain
from kvservice.sharing.lanes import TRIES_MAX
from kvservice.sharing.place import HOT_USES
from kvservice.sharing.pushes import Pushes
from kvservice.storage.buffer import Bytes
from kvservice.storage.record import read_head
from kvservice.storage.remote.contract import RemoteName
from kvservice.wire.v1 import cache_pb2 as wire
from tests.server.builders import (
    Client,
    cache_of,
    diff_of,
    encode_key,
    make_identity,
    make_meta,
    make_planes,
    make_relative,
)
from tests.sharing.shelf import SharingWorld, Shelf

IDENTITY = make_identity()
META = make_meta(IDENTITY)
OTHER = make_meta(IDENTITY, "other")
PLANES = make_planes(seed=3)


class SlowShelf(Shelf):
    """``pace``: a store waits for it. ``slow``: contexts that wait, all if empty. ``begun``: what was to be stored."""

    def __init__(self, *slow: ContextId) -> None:
        super().__init__()
        self.pace = asyncio.Event()
        self.slow = slow
        self.begun: list[ContextId] = []

    async def store(self, name: RemoteName, record: Bytes, prefill_s: float) -> bool:
        self.begun.append(name.context)
        if not self.slow or name.context in self.slow:
            await self.pace.wait()
        return await super().store(name, record, prefill_s)


class PickyShelf(Shelf):
    """As nodes do, it takes no mirror whose master it has not, and no key that is just being written."""

    def __init__(self) -> None:
        super().__init__()
        self.written: set[ContextId] = set()

    async def store(self, name: RemoteName, record: Bytes, prefill_s: float) -> bool:
        master = read_head(record).meta.master
        if master is not None and master.context not in contexts(self):
            raise MasterGoneError("its master is not here")
        if name.context in self.written:
            return False
        self.written.add(name.context)
        await asyncio.sleep(0.01)
        self.written.discard(name.context)
        return await super().store(name, record, prefill_s)


def contexts(shelf: Shelf) -> set[ContextId]:
    return {name.context for name in shelf.records}


def pushes_of(world: SharingWorld) -> Pushes:
    assert world.node.sharing is not None
    return world.node.sharing.pushes


def held(world: SharingWorld, meta: CacheMeta) -> Cache:
    cache = cache_of(world, meta)
    assert cache is not None
    return cache


async def until(world: SharingWorld, holds: Callable[[], object], step_s: float = 0.3) -> None:
    for _ in range(500):
        if holds():
            return
        world.clock.now_s += step_s
        await asyncio.sleep(0.01)
    raise AssertionError("it did not come to that")


async def store_mirror(client: Client, reference: MasterReference, name: str = "history") -> CacheMeta:
    meta = make_meta(IDENTITY, history=(name,), master=reference)
    planes = make_relative(IDENTITY, PLANES, META.position, meta.position, rows=(3,))
    await client.store(meta, planes, diff_of(IDENTITY, PLANES, META.position, planes, meta.position))
    return meta


# Deletes


async def test_a_deleted_master_does_not_go_with_its_mirror() -> None:
    shelf = Shelf()
    async with SharingWorld(shelf) as world:
        client = world.client()
        reference = await client.store(META, PLANES)
        await store_mirror(client, reference)
        await client.delete(META)
        await world.pushed()
        assert not shelf.records
        assert world.node.counters.pushes.dropped == 1
        found, _ = await client.find(META)
        assert found.outcome == Outcome.MISS


async def test_a_master_that_is_deleted_on_its_mirrors_turn_is_deleted_where_it_went() -> None:
    shelf = SlowShelf(META.key.context)
    async with SharingWorld(shelf) as world:
        client = world.client()
        reference = await client.store(META, PLANES)
        pushes_of(world).withdraw(lambda _: True)
        await store_mirror(client, reference)
        await until(world, lambda: shelf.begun)
        await client.delete(META)
        shelf.pace.set()
        await world.pushed()
        assert not shelf.records
        world.check()


async def test_a_mirror_that_is_deleted_while_its_master_goes_stays(caplog: pytest.LogCaptureFixture) -> None:
    shelf = SlowShelf(META.key.context)
    async with SharingWorld(shelf) as world:
        client = world.client()
        reference = await client.store(META, PLANES)
        pushes_of(world).withdraw(lambda _: True)
        mirror = await store_mirror(client, reference)
        await until(world, lambda: shelf.begun)
        await client.delete(mirror)
        shelf.pace.set()
        await world.pushed()
        assert shelf.begun == [META.key.context]
        assert not [one for one in caplog.records if one.levelname == "ERROR"]
        world.check()


async def test_a_delete_behind_a_running_push_is_tried_again_as_a_delete() -> None:
    shelf = SlowShelf()
    async with SharingWorld(shelf) as world:
        client = world.client()
        await client.store(META, PLANES)
        await until(world, lambda: shelf.begun)
        await client.delete(META)
        real, tried = shelf.delete, []

        async def lose(name: RemoteName) -> bool:
            tried.append(name)
            if len(tried) < 3:
                raise UnavailableError("lost")
            return await real(name)

        shelf.delete = lose  # type: ignore[method-assign]
        shelf.pace.set()
        await world.pushed()
        assert len(tried) == 3
        assert not shelf.records
        assert shelf.begun == [META.key.context]


async def test_what_is_stored_deleted_and_stored_again_is_given_again() -> None:
    shelf = Shelf()
    async with SharingWorld(shelf) as world:
        client = world.client()
        for _ in range(2):
            await client.store(META, PLANES)
            await world.pushed()
            assert shelf.records
            await client.delete(META)
            assert not shelf.records


async def test_a_delete_tells_how_many_there_were_though_none_was_here() -> None:
    shelf = Shelf()
    async with SharingWorld(shelf) as world:
        client = world.client()
        await client.store(META, PLANES)
        await world.pushed()
        world.node.catalog.evict_host()
        reply = await client.call("Delete", wire.DeleteRequest(keys=[encode_key(META.key)] * 2))
        assert (reply.deleted, len(shelf.records)) == (1, 0)


# Whom it is given to


async def test_hot_use_gives_nothing_that_another_node_owns() -> None:
    shelf = Shelf()
    async with SharingWorld(shelf) as world:
        await world.client().store(META, PLANES)
        await world.pushed()
    shelf.fault = None
    async with SharingWorld(shelf) as world:
        client = world.client()
        await client.find(META)
        await world.arrived()
        shelf.records.clear()  # another node deleted it, or the place has evicted it
        for _ in range(HOT_USES + 2):
            await client.find(META)
        await world.pushed()
        assert not shelf.records


async def test_hot_use_gives_a_copy_of_what_is_owned_to_where_it_belongs_then() -> None:
    shelf, replica = Shelf(), Shelf()
    async with SharingWorld(shelf, replica) as world:
        directory, client = world.node.sharing.directory, world.client()  # type: ignore[union-attr]
        places = list(directory.everywhere())
        directory.homes = lambda _, uses: places if uses >= HOT_USES else places[:1]  # type: ignore[method-assign]
        await client.store(META, PLANES)
        await world.pushed()
        assert not replica.records
        for _ in range(HOT_USES + 2):
            await client.find(META)
        await world.pushed()
        assert contexts(replica) == {META.key.context}


async def test_what_has_no_home_now_waits_and_is_given_when_there_is_one() -> None:
    shelf = Shelf()
    async with SharingWorld(shelf) as world:
        directory = world.node.sharing.directory  # type: ignore[union-attr]
        homes = directory.homes
        directory.homes = lambda *_: ()  # type: ignore[method-assign]
        await world.client().store(META, PLANES)
        await world.pushed()
        assert world.node.stats_document()["pushes"]["queued"] == 1
        directory.homes = homes  # type: ignore[method-assign]
        pushes_of(world).wake()
        await world.pushed()
        assert contexts(shelf) == {META.key.context}
        assert world.node.stats_document()["pushes"]["queued"] == 0


async def test_a_place_that_is_lost_for_long_uses_up_no_tries() -> None:
    shelf = Shelf()
    shelf.fault = UnavailableError("away")
    async with SharingWorld(shelf) as world:
        await world.client().store(META, PLANES)
        await until(world, lambda: world.node.counters.pushes.failed > 2 * TRIES_MAX, step_s=40.0)
        shelf.fault = None
        await world.pushed()
        assert contexts(shelf) == {META.key.context}


async def test_a_place_that_lost_the_master_is_given_it_once_more() -> None:
    shelf = PickyShelf()
    async with SharingWorld(shelf) as world:
        client = world.client()
        reference = await client.store(META, PLANES)
        await world.pushed()
        shelf.records.clear()
        mirror = await store_mirror(client, reference)
        await world.pushed()
        assert contexts(shelf) == {META.key.context, mirror.key.context}
        assert world.node.counters.pushes.refused == 0


async def test_two_mirrors_of_one_master_that_go_together_both_arrive() -> None:
    shelf = PickyShelf()
    async with SharingWorld(shelf) as world:
        client = world.client()
        reference = await client.store(META, PLANES)
        pushes_of(world).withdraw(lambda _: True)
        mirrors = [await store_mirror(client, reference, name) for name in ("one", "two")]
        await world.pushed()
        assert contexts(shelf) == {META.key.context, *(one.key.context for one in mirrors)}
        assert world.node.counters.pushes.existed == 0


# When


async def test_a_note_while_a_cache_is_on_its_way_means_once_more() -> None:
    shelf = SlowShelf()
    async with SharingWorld(shelf) as world:
        await world.client().store(META, PLANES)
        await until(world, lambda: shelf.begun)
        pushes_of(world).note(held(world, META))
        world.clock.now_s += 1
        await asyncio.sleep(0.3)
        assert len(shelf.begun) == 1, "one at a time"
        shelf.pace.set()
        await world.pushed()
        assert (world.node.counters.pushes.stored, world.node.counters.pushes.existed) == (1, 1)
        await world.client().store(OTHER, PLANES)
        await world.pushed()
        assert OTHER.key.context in contexts(shelf), "nobody who gives has died"


async def test_a_commit_that_gave_nothing_is_followed_by_another_try() -> None:
    shelf = SlowShelf()
    async with SharingWorld(shelf, push="through") as world:
        stored = asyncio.ensure_future(world.client().store(META, PLANES))
        await until(world, lambda: shelf.begun)
        await asyncio.sleep(0.3)  # who gives in the background has seen an empty queue meanwhile
        shelf.fault = UnavailableError("away")
        shelf.pace.set()
        await stored
        assert world.node.counters.pushes.failed == 1
        shelf.fault = None
        await world.pushed()
        assert shelf.records


async def test_what_a_commit_gave_that_was_broken_off_is_given_in_its_turn() -> None:
    shelf = SlowShelf()
    async with SharingWorld(shelf, push="through") as world:
        stored = asyncio.ensure_future(world.client().store(META, PLANES))
        await until(world, lambda: shelf.begun)
        stored.cancel()
        shelf.pace.set()
        await asyncio.wait([stored])
        await world.pushed()
        assert shelf.records


async def test_who_waits_for_an_empty_queue_hears_that_it_was_withdrawn() -> None:
    async with SharingWorld(Shelf()) as world:
        client = world.client()
        await client.store(META, PLANES)
        finished = asyncio.ensure_future(pushes_of(world).finish())
        await asyncio.sleep(0)
        await client.delete(META)
        await asyncio.wait_for(finished, 1.0)


async def test_what_is_tried_again_later_holds_up_nothing_new() -> None:
    shelf, good = Shelf(), Shelf()
    shelf.fault = UnavailableError("away")
    async with SharingWorld(shelf, good) as world:
        own_places(world, META)
        client = world.client()
        await client.store(META, PLANES)
        await until(world, lambda: world.node.counters.pushes.failed)
        await client.store(OTHER, PLANES)
        world.clock.now_s += 0.25
        for _ in range(100):
            await asyncio.sleep(0.01)
        assert contexts(good) == {OTHER.key.context}


async def test_a_frozen_place_holds_up_no_other_one() -> None:
    frozen, good = SlowShelf(), Shelf()
    metas = [make_meta(IDENTITY, ("frozen", number)) for number in range(12)]
    async with SharingWorld(frozen, good) as world:
        own_places(world, *metas)
        client = world.client()
        for meta in (*metas, OTHER):
            await client.store(meta, PLANES)
        await until(world, lambda: good.records)
        assert not frozen.records
        frozen.pace.set()
        await world.pushed()
        assert len(frozen.records) == 12


def own_places(world: SharingWorld, *metas: CacheMeta) -> None:
    """These belong to the first shelf, all others to the second one."""
    assert world.node.sharing is not None
    directory = world.node.sharing.directory
    first, second = directory.everywhere()
    own = {meta.key.segment for meta in metas}
    directory.homes = lambda segment, _: [first if segment in own else second]  # type: ignore[method-assign,assignment]


async def test_what_is_on_its_way_is_not_evicted_between_master_and_mirror() -> None:
    shelf = SlowShelf(META.key.context)
    async with SharingWorld(shelf) as world:
        client = world.client()
        reference = await client.store(META, PLANES)
        pushes_of(world).withdraw(lambda _: True)
        mirror = await store_mirror(client, reference)
        await until(world, lambda: shelf.begun)
        assert held(world, mirror).holds
        shelf.pace.set()
        await world.pushed()
        assert contexts(shelf) == {META.key.context, mirror.key.context}
        assert not held(world, mirror).holds
        world.check()


async def test_what_was_folded_before_its_turn_is_not_counted_as_dropped() -> None:
    shelf = Shelf()
    async with SharingWorld(shelf) as world:
        client = world.client()
        await client.store(META, PLANES)
        folded = make_meta(IDENTITY, history=("x",))
        await client.store(folded, make_relative(IDENTITY, PLANES, META.position, folded.position, rows=(3,)))
        await until(world, lambda: held(world, folded).master is not None, step_s=0.0)
        await world.pushed()
        assert contexts(shelf) == {META.key.context, folded.key.context}
        assert world.node.counters.pushes.dropped == 0


# Drains and the end


async def drain(world: SharingWorld, timeout_s: float = 5.0) -> dict[str, object]:
    return await Drain(world.node.catalog, pushes_of(world), asyncio.Event()).run(timeout_s)


async def test_a_drain_gives_also_what_is_never_pushed() -> None:
    shelf = Shelf()
    async with SharingWorld(shelf, push="off") as world:
        await world.client().store(META, PLANES)
        assert await drain(world) == {"given": 1, "waiting": 0, "reasons": {}}
        assert shelf.records


async def test_a_drain_says_what_was_not_given_and_why() -> None:
    shelf = Shelf()
    shelf.fault = CapacityError("full")
    async with SharingWorld(shelf, push="off") as world:
        await world.client().store(META, PLANES)
        assert await drain(world) == {"given": 0, "waiting": 1, "reasons": {"refused": 1}}
        shelf.fault = UnavailableError("away")
        assert await drain(world, 0.3) == {"given": 0, "waiting": 1, "reasons": {"not reached": 1}}


async def test_a_drain_goes_on_when_a_place_is_back() -> None:
    shelf = Shelf()
    shelf.fault = UnavailableError("away")
    async with SharingWorld(shelf, push="off") as world:
        await world.client().store(META, PLANES)
        told = asyncio.ensure_future(drain(world))
        await until(world, lambda: world.node.counters.pushes.failed)
        shelf.fault = None
        assert (await told)["waiting"] == 0


async def test_a_drain_that_is_ended_says_so_at_once() -> None:
    shelf, is_ended = SlowShelf(), asyncio.Event()
    async with SharingWorld(shelf, push="off") as world:
        await world.client().store(META, PLANES)
        drain = asyncio.ensure_future(Drain(world.node.catalog, pushes_of(world), is_ended).run(300.0))
        await until(world, lambda: shelf.begun)
        is_ended.set()
        told = await asyncio.wait_for(drain, 1.0)
        assert (told["given"], told["waiting"]) == (0, 1)


@pytest.mark.parametrize("bad", [0, 1])
async def test_every_place_is_closed_though_one_fails_to(bad: int) -> None:
    shelves = Shelf(), Shelf()
    closed = []

    def closing(index: int) -> Callable[[], object]:
        async def close() -> None:
            closed.append(index)
            if index == bad:
                raise OSError("it cannot be closed")

        return close

    world = SharingWorld(*shelves)
    places: Sequence[object] = world.node.sharing.directory.everywhere()  # type: ignore[union-attr]
    async with world:
        for index, place in enumerate(places):
            place.close = closing(index)  # type: ignore[attr-defined]
    assert sorted(closed) == [0, 1]
