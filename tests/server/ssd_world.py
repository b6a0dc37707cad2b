"""A node with an SSD tier on a disk in memory, which a test may stop, kill and start again."""

import asyncio
from collections.abc import Sequence
from typing import Any, Self

from kvservice.calls import CacheCalls
from kvservice.killpoints import Killer
from kvservice.limits import NodeLimits
from kvservice.model.cache import CacheMeta
from kvservice.model.identity import Identity
from kvservice.node import Node
from kvservice.ssd import Ssd, SsdPolicy, Workers
from kvservice.storage.arena import Arena
from kvservice.storage.host_tier import HostTier
from kvservice.storage.recovery import recover
from kvservice.storage.ssd_index import NaivePlace
from kvservice.wire.v1 import cache_pb2 as wire
from kvservice.worker import InlineWorker, Worker
from tests.server.builders import GEOMETRY, Client, FakeClock, Planes, World, cache_of, equal_planes
from tests.storage.faulty_disk import NO_FAULTS, Faults, FaultyDisk

SLAB_BYTES = 4 << 20
STAGING_BYTES = 64 << 10
LONG_AGO_NS = 7


class SsdWorld(World):
    """``async with SsdWorld() as world``. Writes and reads run in place, so that every await ends at once."""

    def __init__(
        self,
        disk: FaultyDisk | None = None,
        *,
        seed: int = 1,
        faults: Faults = NO_FAULTS,
        arena_bytes: int = 1 << 20,
        staging_bytes: int = STAGING_BYTES,
        slab_bytes: int = SLAB_BYTES,
        policy: SsdPolicy | None = None,
        limits: NodeLimits | None = None,
        place: NaivePlace | None = None,
        reads: Worker | None = None,
        worker: Worker | None = None,
        workers: Workers | None = None,
        killer: Killer | None = None,
    ) -> None:
        self.is_dead = False
        self.disk = disk or FaultyDisk(seed, faults)
        self.place = place or NaivePlace()
        self.clock = FakeClock()
        self.arena = Arena(arena_bytes)
        self.opened = recover(
            self.disk, slab_bytes, place=self.place, clock=self.clock, wall_clock_ns=lambda: LONG_AGO_NS
        )
        self.node = Node(
            limits or NodeLimits(),
            HostTier(self.arena, staging_bytes),
            clock=self.clock,
            boot_epoch=self.opened.boot_epoch,
            data_socket="/nowhere",
            worker=worker or InlineWorker(),
            killer=killer,
        )
        inline = InlineWorker()
        workers = workers or Workers(reads or inline, inline, inline, inline)
        self.node.attach_ssd(self.disk, self.opened, policy or SsdPolicy(), workers)
        self.calls = CacheCalls(self.node)

    async def __aenter__(self) -> Self:
        self.node.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        if not self.is_dead:
            await self.node.stop()
            self.disk = self.disk.kill()

    async def kill(self) -> None:
        """End it at once: nothing is flushed, nothing that is under way goes on. ``disk`` is what it leaves."""
        self.is_dead, self.disk = True, self.disk.kill()
        await end_tasks()

    def again(self, **changes: Any) -> "SsdWorld":
        """The next start in the same folder."""
        return SsdWorld(self.disk, place=self.place, **changes)

    @property
    def ssd(self) -> Ssd:
        assert self.node.ssd is not None
        return self.node.ssd


async def end_tasks() -> None:
    """Cancel all but this one, until none is left: one whose last job fails on the dead disk may try to go on.

    None is cancelled before its first step: a job that never began would be waited for in vain.
    """
    begun, ended = set[asyncio.Task[Any]](), set[asyncio.Task[Any]]()
    for _ in range(1000):
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        if not tasks:
            for task in ended:
                task.cancelled() or task.exception()  # seen: nobody hears a dead process
            return
        ended |= tasks
        for task in tasks & begun:
            task.cancel()
        begun = tasks
        await asyncio.sleep(0)
    raise AssertionError("a dead process does not end")


async def written(world: SsdWorld) -> None:
    """Until all that waits to be written is, and all that is to go is gone."""
    for _ in range(1000):
        ssd = world.ssd
        if not ssd.queue and not ssd.demotion.writing:
            await ssd.demotion.settle()
            return
        await asyncio.sleep(0)
    raise AssertionError("the queue does not get empty")


def where(world: World, meta: CacheMeta) -> str:
    """The tiers that hold a cache: "host", "ssd", "both" or "none"."""
    cache = cache_of(world, meta)
    if cache is None:
        return "none"
    if cache.is_on_host and cache.is_on_ssd:
        return "both"
    return "host" if cache.is_on_host else "ssd"


async def leave_host(world: World, *metas: CacheMeta) -> None:
    """Evict everything from memory."""
    while world.node.catalog.evict_host():
        pass
    assert [where(world, meta) for meta in metas] == ["ssd"] * len(metas)


async def arrived(client: Client, lease: int, layers: int = GEOMETRY.layers) -> list[wire.Arrival]:
    """Wait until all that a lease promised is there, as a client would; what was heard last."""
    step, known = 0, dict[int, wire.Arrival]()
    for _ in range(100):
        reply = await client.call("Await", wire.AwaitRequest(lease_id=lease, step=step))
        step, known = reply.step, known | {one.offset: one for one in reply.arrivals}
        if not reply.pending:
            assert all(one.layers == layers or one.error.code for one in known.values()), known
            return list(known.values())
    raise AssertionError(f"not all arrived: {known}")


async def read_back(world: World, client: Client, identity: Identity, meta: CacheMeta) -> Planes | None:
    """What a lookup of a cache restores; None for a miss."""
    found, lease = await client.find(meta)
    if not lease:
        return None
    for arrival in await arrived(client, lease):
        assert not arrival.error.code, arrival.error
    planes = [[bits.copy() for bits in layer] for layer in world.read(identity, found)]
    await client.release(lease)
    return planes


async def assert_all_read(
    world: World, client: Client, identity: Identity, stored: Sequence[tuple[CacheMeta, Planes]]
) -> None:
    for meta, planes in stored:
        found = await read_back(world, client, identity, meta)
        assert found is not None, meta.key
        assert equal_planes(found, planes)
        world.check()
