"""A node on ground that outlives it: a disk that misbehaves, an index that may be lost, threads that take their time.

Everything random comes from one ``random.Random``, so that a seed always gives the same life.
"""

import asyncio
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from kvservice.caches import Cache
from kvservice.limits import NodeLimits
from kvservice.model.cache import Extent
from kvservice.model.errors import DiskError
from kvservice.ssd import SsdPolicy, Workers
from kvservice.storage.buffer import round_up
from kvservice.storage.disk import BLOCK_BYTES
from kvservice.storage.slab_format import FOOTER_BYTES, NoteKind
from kvservice.storage.ssd_index import Change, NaiveIndex, NaivePlace
from tests.server.ssd_world import SsdWorld, end_tasks
from tests.storage.faulty_disk import FaultyDisk

T = TypeVar("T")

PAGE_BYTES = 12288
"""What a dense record of the builders' geometry takes of the arena."""
TURNS = (0, 0, 0, 1, 2, 7)
"""Turns of the loop that a job of a worker takes."""
NEVER_S = 1e9


class SimIndex(NaiveIndex):
    """Survives a power failure if it is durable; may refuse a change, and then takes no more until opened again."""

    def __init__(self, place: "SimPlace") -> None:
        super().__init__()
        self.place = place
        self.is_failed = False

    def apply(self, changes: Sequence[Change]) -> None:
        self.is_failed = self.is_failed or self.place.strikes()
        if self.is_failed:
            raise DiskError("the simulated index takes no more changes")
        super().apply(changes)
        if self.place.is_durable:
            self.sync()


class SimPlace(NaivePlace):
    """Where a SimIndex lies from start to start. ``refusal``: how likely a change is refused; counted in ``faults``."""

    def __init__(self, chance: random.Random, *, is_durable: bool = False) -> None:
        super().__init__()
        self.chance, self.is_durable = chance, is_durable
        self.refusal = 0.0
        self.faults = 0

    def open(self) -> NaiveIndex:
        if self.index is None:
            self.index = SimIndex(self)
        index = super().open()
        assert isinstance(index, SimIndex)
        index.is_failed = False
        return index

    def strikes(self) -> bool:
        is_struck = bool(self.refusal) and self.chance.random() < self.refusal
        self.faults += is_struck
        return is_struck

    def heir(self) -> "SimPlace":
        """The same index as a process finds it that starts now; what the dying one still does changes nothing."""
        heir = SimPlace(self.chance, is_durable=self.is_durable)
        heir.refusal, heir.faults, heir.is_damaged = self.refusal, self.faults, self.is_damaged
        if self.index is not None:
            heir.index = SimIndex(heir)
            heir.index.batches, heir.index.synced = list(self.index.batches), self.index.synced
        return heir


@dataclass(slots=True)
class Ground:
    """What outlives a process, and how a node is set up on it."""

    chance: random.Random
    disk: FaultyDisk
    place: SimPlace
    policy: SsdPolicy = field(default_factory=SsdPolicy)
    arena_bytes: int = 11 * PAGE_BYTES
    staging_bytes: int = 2 * PAGE_BYTES
    slab_bytes: int = 20 * PAGE_BYTES
    boots: int = 0


class UnhurriedWorker:
    """Runs a job some turns of the loop later; a dead process's fail on its disk. ``jobs``: how many are under way."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.jobs = 0

    async def run(self, function: Callable[[], T]) -> T:
        self.jobs += 1
        try:
            return await self._run(function)
        finally:
            self.jobs -= 1

    async def _run(self, function: Callable[[], T]) -> T:
        try:
            for _ in range(self.chance.choice(TURNS)):
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            function()  # as a thread would: it ends its work whatever becomes of its caller
            raise
        return function()

    def close(self) -> None:
        """Nothing waits."""


class SimWorld(SsdWorld):
    """One boot on ``ground``. Raises what recovery raises; the next boot then starts from ``ground`` again."""

    def __init__(self, ground: Ground) -> None:
        self.ground, self.worker = ground, UnhurriedWorker(ground.chance)
        ground.boots += 1
        worker = self.worker
        try:
            super().__init__(
                ground.disk,
                arena_bytes=ground.arena_bytes,
                staging_bytes=ground.staging_bytes,
                slab_bytes=ground.slab_bytes,
                policy=ground.policy,
                limits=NodeLimits(upkeep_interval_s=NEVER_S),
                place=ground.place,
                worker=worker,
                workers=Workers(worker, worker, worker, worker),
            )
        except BaseException:
            self.arena.close()
            ground.disk, ground.place = ground.disk.kill(), ground.place.heir()
            raise
        self.node.start()

    async def stop(self) -> None:
        """As SIGTERM does it."""
        await self.node.stop()
        self.ground.disk, self.ground.place = self.ground.disk.kill(), self.ground.place.heir()
        await self._end()

    async def kill(self) -> None:
        """As SIGKILL does it: what is written is there, nothing goes on."""
        self.ground.disk, self.ground.place = self.ground.disk.kill(), self.ground.place.heir()
        await self._end()

    async def lose_power(self) -> None:
        """What was not synced may be gone."""
        ground = self.ground
        ground.disk, ground.place = ground.disk.crash(), ground.place.heir()
        if ground.place.index is not None:
            unsynced = len(ground.place.index.batches) - ground.place.index.synced
            ground.place.index.lose_unsynced(ground.chance.randint(0, unsynced))
        await self._end()

    async def _end(self) -> None:
        self.is_dead = True
        await end_tasks()
        self.arena.close()

    @property
    def is_busy(self) -> bool:
        """Is anything under way that ends by itself?"""
        ssd, families = self.ssd, self.node.families
        tasks = (ssd.demotion._removing, ssd.index._task)
        return bool(
            self.worker.jobs
            or ssd.queue
            or ssd.demotion.writing
            or self.node.catalog.arriving
            or families.queue
            or families.held
            or any(task is not None and not task.done() for task in tasks)
        )

    def caches(self) -> Iterable[Cache]:
        """All that are held, hidden ones too."""
        for space in self.node.catalog.spaces.values():
            for family in space.families.values():
                yield from family.members.values()
        yield from self.node.catalog.hidden

    def check_slab(self, *, is_strict: bool) -> None:
        """While nothing is under way: every place on the slab is a cache's, an old form's, a note's or out of use."""
        forms = self.node.catalog.superseded._forms.values()
        index = self.ground.place.index
        assert index is not None
        needed = [cache.ssd_extent for cache in self.caches() if cache.is_on_ssd]
        needed += [form.extent for form in forms]
        notes = [note.extent for note in index.notes()] if not getattr(index, "is_failed", False) else []
        allocator = self.ssd.slab._allocator
        taken = {at: extent for at, extent in allocator._taken.items() if at >= BLOCK_BYTES}
        for extent in (*needed, *(notes if is_strict else ())):
            assert taken.pop(extent.offset, None) == Extent(extent.offset, extent.length + FOOTER_BYTES), extent
        allocator.check()
        left = sum(extent.length - FOOTER_BYTES for extent in taken.values())
        if is_strict:
            assert left == self.node.counters.quarantined_bytes, f"nobody needs {list(taken.values())}"
            used = sum(round_up(extent.length + FOOTER_BYTES, BLOCK_BYTES) for extent in (*needed, *notes))
            used += sum(round_up(extent.length, BLOCK_BYTES) for extent in taken.values())
            assert used == self.ssd.slab.used_bytes

    def check_emptied(self) -> None:
        """After all was deleted and nothing is held, only identities are left."""
        index = self.ground.place.index
        assert index is not None
        assert not list(self.caches())
        assert not len(self.node.catalog.superseded)
        assert self.node.tier.used_bytes == 0
        assert not list(index.entries())
        assert all(note.kind is NoteKind.IDENTITY for note in index.notes())
