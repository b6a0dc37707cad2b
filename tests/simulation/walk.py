"""The life of a node in steps, and what its clients may count on: exact bytes, or a miss that has a reason.

Steps run side by side; a stop or a crash comes at any moment between two turns of the loop.
"""

import asyncio
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from kvservice.model.cache import CacheMeta
from kvservice.model.errors import ConfigError, DiskError, KVServiceError
from kvservice.model.plan import Match, MissReason
from kvservice.model.segment import CacheKey, ContextId, SegmentId
from kvservice.storage.recovery import RecoveryKind
from kvservice.wire.v1 import cache_pb2 as wire
from tests.server.builders import GEOMETRY, Planes, cache_of, equal_planes, query
from tests.simulation.payload import (
    BY_KEY,
    IDENTITIES,
    METAS,
    as_mirror,
    dense_planes,
    identity_of,
    mirror_planes,
)
from tests.simulation.world import Ground, SimWorld

TTL_S = 10.0
TURNS_MAX = 20_000
BOOTS_MAX = 200
AWAITS_MAX = 1000
STORE_ERRORS = {"CAPACITY", "MASTER_GONE"}
"""What a client that makes no mistake may be told, on any disk."""
ARRIVAL_ERRORS = {"CORRUPT", "DISK"}
FLOOR_BYTES, ROOM_BYTES = 1 << 30, 1 << 40


class End(Enum):
    """How a boot ends."""

    STOP = "stop"
    KILL = "kill"
    POWER_LOSS = "power loss"


class IndexFate(Enum):
    """What becomes of the index between two boots."""

    KEPT = "kept"
    LOST = "lost"
    DAMAGED = "damaged"


@dataclass(frozen=True, slots=True)
class Promise:
    """What the ground allows to be promised. On a disk that lies, only: no wrong bytes.

    ``is_survival``: what was written is there after a start. ``is_final``: what was deleted never comes back.
    ``is_exact``: every place on the slab is accounted for. ``is_readable``: no read and no start fails.
    """

    is_survival: bool = True
    is_final: bool = True
    is_exact: bool = True
    is_readable: bool = True


STRICT = Promise()
NO_PROMISE = Promise(is_survival=False, is_final=False, is_exact=False, is_readable=False)


@dataclass(slots=True, eq=False)
class Version:
    """What was stored under a key, until that is deleted. ``variant``: of a dense one, else -1.

    ``losses``: the world's when the node was last known to have it; None if it may have gone. ``is_hidden``: a delete
    that was not answered yet has taken it out of sight; a crash may bring it back.
    """

    planes: Planes
    variant: int
    is_committing: bool = True
    losses: int | None = None
    is_hidden: bool = False


@dataclass(slots=True, eq=False)
class Leased:
    """What a lease promised. ``found``: what, the answer, and all that it may stand for. ``errors``: by offset."""

    id: int
    deadline_s: float
    found: list[tuple[CacheMeta, wire.SegmentReply, list[Planes]]]
    has_arrived: bool = False
    errors: dict[int, str] = field(default_factory=dict)


class Walk:
    """Steps of one life on one ground, from inside a running loop. Numbers are indices of METAS.

    ``versions``: what a lookup may find. ``ghosts``: what was deleted. ``counts``: what was seen, by name.
    ``may_be_torn``: power was lost, and nothing had been synced. ``syncs_failed_before``: this boot; what an
    earlier one wrote then is read, and is not on the device, and no later sync says so.
    """

    def __init__(self, ground: Ground, promise: Promise = STRICT) -> None:
        self.ground, self.promise = ground, promise
        self.versions: dict[CacheKey, list[Version]] = {meta.key: [] for meta in METAS}
        self.ghosts: dict[CacheKey, list[Version]] = {meta.key: [] for meta in METAS}
        self.leases: list[Leased] = []
        self.tasks: set[asyncio.Task[None]] = set()
        self.may_be_torn, self.syncs_failed_before = False, 0
        self.counts = dict.fromkeys(("hits", "failed_reads", "failed_deletes", "failed_boots", "formatted"), 0)
        self._begin_boot()

    @property
    def is_readable(self) -> bool:
        """Must every read succeed?"""
        return self.promise.is_readable and not self.may_be_torn

    def _begin_boot(self) -> None:
        self.world = self._boot()
        self.client = self.world.client(*IDENTITIES)
        self.lost_by_steps = 0
        self.leases.clear()
        self.tasks.clear()

    # Running

    def begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Let it run beside the next steps."""
        self.tasks.add(asyncio.get_running_loop().create_task(work))

    async def turn(self, turns: int) -> None:
        """Let the loop run."""
        for _ in range(turns):
            await asyncio.sleep(0)
        self.reap()

    def reap(self) -> None:
        """Raise what went wrong beside."""
        for task in [task for task in self.tasks if task.done()]:
            self.tasks.remove(task)
            task.result()

    async def rest(self) -> None:
        """Until nothing is under way; then every place on the slab has its reason."""
        for _ in range(TURNS_MAX):
            self.reap()
            if not self.tasks and not self.world.is_busy:
                break
            await asyncio.sleep(0)
        else:
            raise AssertionError(f"it does not come to rest: {self.tasks}, {self.world.ssd.queue}")
        self.world.check()
        self.world.check_slab(is_strict=self.promise.is_exact)

    def check(self) -> None:
        """What must hold between any two turns."""
        self.reap()
        self.world.check()
        for cache in self.world.caches():
            assert cache.is_hidden or self.visible(cache.key), f"{cache} was never stored, or was deleted"

    # Storing

    async def store(self, number: int, variant: int) -> None:
        """A dense cache."""
        await self._store(METAS[number], Version(dense_planes(number, variant), variant))

    async def store_mirror(self, number: int, pick: int, rows: int) -> None:
        """A mirror of one of its family's masters."""
        segment = METAS[number].key.segment
        masters = [at for at, one in enumerate(METAS) if one.key.segment == segment and self._has_plain_master(at)]
        if masters and masters != [number]:
            master = [at for at in masters if at != number][pick % (len(masters) - (number in masters))]
            cache, (version,) = cache_of(self.world, METAS[master]), self.visible(METAS[master].key)
            assert cache is not None
            planes, runs = mirror_planes(master, version.variant, number, rows)
            await self._store(as_mirror(number, METAS[master], cache.generation), Version(planes, -1), runs)

    def _has_plain_master(self, number: int) -> bool:
        meta = METAS[number]
        cache, versions = cache_of(self.world, meta), self.visible(meta.key)
        return cache is not None and cache.master is None and len(versions) == 1 and versions[0].variant >= 0

    async def _store(self, meta: CacheMeta, version: Version, runs: Any = None) -> None:
        world = self.world
        if world.is_dead:
            return
        try:
            begun = await self.client.begin(meta, version.planes, runs)
        except AssertionError as refused:
            outcome = refused.args[0]
            assert outcome.exists or outcome.error.code in STORE_ERRORS, outcome
            return
        versions = self.versions[meta.key]
        versions.append(version)
        losses = self.losses()  # it may be evicted before we hear that it was published
        outcome = await self.client.commit(*begun)
        if world.is_dead:
            return  # nobody hears what a dead process says
        version.is_committing = False
        if not outcome.error.code:
            version.losses = None if version.is_hidden else losses
            return
        assert outcome.error.code in STORE_ERRORS, outcome.error
        versions.remove(version)

    # Looking up

    def visible(self, key: CacheKey) -> list[Version]:
        """What the node may now find under a key."""
        found = [version for version in self.versions[key] if not version.is_hidden]
        return found if self.promise.is_final else [*self.versions[key], *self.ghosts[key]]

    async def look_up(self, numbers: Sequence[int], *, may_shift: bool = False) -> Leased | None:
        """Lease what is found."""
        metas = [METAS[number] for number in numbers]
        reply = await self.client.lookup(*(query(meta, may_shift=may_shift) for meta in metas), ttl_s=TTL_S)
        found = []
        for meta, prompt in zip(metas, reply.prompts, strict=True):
            answer = prompt.segments[0]
            if answer.match == Match.NONE:
                self._check_miss(meta, answer)
                continue
            key = CacheKey(SegmentId(meta.key.segment), ContextId(answer.context))
            assert may_shift or key == meta.key
            versions = self.visible(key)
            assert versions, f"{key} was never stored, or was deleted"
            found.append((BY_KEY[key], answer, [version.planes for version in versions]))
        assert bool(found) == bool(reply.lease.id)
        if not found:
            return None
        leased = Leased(reply.lease.id, self.world.clock.now_s + TTL_S, found)
        self.leases.append(leased)
        return leased

    def _check_miss(self, meta: CacheMeta, answer: wire.SegmentReply) -> None:
        if self.may_be_torn or not self.promise.is_survival or answer.miss_reason == MissReason.NO_ROOM:
            return
        assert answer.miss_reason != MissReason.CORRUPT, meta.key
        for version in self.visible(meta.key):
            assert version.losses is None or version.losses < self.losses(), f"{meta.key} is gone without a reason"
            version.losses = None

    def losses(self) -> int:
        """Caches that evictions took from the last tier they were in."""
        counters = self.world.node.counters
        return counters.host_evictions.lost + counters.ssd_evictions.lost + self.lost_by_steps

    async def read(self, leased: Leased) -> None:
        """Wait until all has arrived, and compare."""
        if not leased.has_arrived:
            await self._arrive(leased)
        if leased in self.leases:  # it may be over by now
            self._compare_bytes(leased)

    def read_again(self) -> None:
        """What was read under a lease that lives on is still there."""
        for leased in self.leases:
            if leased.has_arrived:
                self._compare_bytes(leased)

    def _compare_bytes(self, leased: Leased) -> None:
        for meta, answer, candidates in leased.found:
            places = {answer.record.extent.offset} | ({answer.master.extent.offset} if answer.master_context else set())
            if places & leased.errors.keys():
                self.counts["failed_reads"] += 1
                continue
            got = self.world.read(identity_of(meta), answer)
            assert any(equal_planes(got, one) for one in candidates), f"wrong bytes for {meta.key}"
            self.counts["hits"] += 1

    async def _arrive(self, leased: Leased) -> None:
        step, known = 0, dict[int, wire.Arrival]()
        for _ in range(AWAITS_MAX):
            if leased not in self.leases:
                return
            try:
                reply = await self.client.call("Await", wire.AwaitRequest(lease_id=leased.id, step=step))
            except KVServiceError:
                assert leased not in self.leases, "a live lease is waited for"
                return
            step, known = reply.step, known | {one.offset: one for one in reply.arrivals}
            if not reply.pending:
                assert all(one.layers == GEOMETRY.layers or one.error.code for one in known.values()), known
                break
        else:
            raise AssertionError(f"not all arrives: {known}")
        leased.errors = {one.offset: one.error.code for one in known.values() if one.error.code}
        assert set(leased.errors.values()) <= (set() if self.is_readable else ARRIVAL_ERRORS), known
        leased.has_arrived = True

    async def release(self, index: int) -> None:
        """End a lease."""
        self._forget_expired()
        if self.leases:
            leased = self.leases.pop(index % len(self.leases))
            assert await self.client.release(leased.id) == 1

    async def let_time_pass(self, seconds: float) -> None:
        """Leases run out."""
        self.world.clock.now_s += seconds
        self.world.node.expire()
        self._forget_expired()
        assert set(self.world.node.leases.live) == {leased.id for leased in self.leases}

    def _forget_expired(self) -> None:
        self.leases[:] = [leased for leased in self.leases if leased.deadline_s > self.world.clock.now_s]

    async def read_everything(self) -> None:
        """Every key once, alone."""
        for number in range(len(METAS)):
            leased = await self.look_up([number])
            if leased is not None:
                await self.read(leased)
                self.leases.remove(leased)
                await self.client.release(leased.id)

    async def empty(self) -> None:
        """Read it all, end all leases, delete it all: nothing is left, in no tier."""
        await self.rest()
        await self.read_everything()
        while self.leases:
            await self.release(0)
        await self.delete(range(len(METAS)))
        await self.rest()
        self.world.check_emptied()

    # Upkeep

    async def delete(self, numbers: Sequence[int]) -> None:
        """When it returns, nothing brings them back."""
        world, metas, dying = self.world, [METAS[number] for number in numbers], list[tuple[CacheKey, Version]]()
        if world.is_dead:
            return
        for meta in metas:
            is_there = cache_of(self.world, meta) is not None
            dying += [(meta.key, one) for one in self.versions[meta.key] if is_there or not one.is_committing]
        for _, version in dying:
            version.is_hidden = True
        try:
            await self.client.delete(*metas)
            if world.is_dead:
                return
        except DiskError:
            self.counts["failed_deletes"] += 1
            assert not self.promise.is_readable
            return
        for key, version in dying:
            if version in self.versions[key]:
                self.versions[key].remove(version)
                self.ghosts[key].append(version)

    async def commit_round(self, number: int) -> None:
        """Elect masters among all that is held of some segments."""
        namespace = METAS[number].namespace
        metas = [one for one in METAS[number:] if one.namespace == namespace and cache_of(self.world, one)]
        await self.client.commit_round(identity_of(METAS[number]), *metas)

    async def evict_host(self, groups: int) -> None:
        """Make room in memory."""
        for _ in range(groups):
            evicted = self.world.node.catalog.evict_host()
            self.lost_by_steps += evicted.lost if evicted else 0

    async def evict_ssd(self, groups: int) -> None:
        """Make room on the slab."""
        for _ in range(groups):
            evicted = self.world.node.catalog.evict_ssd()
            self.lost_by_steps += evicted.lost if evicted else 0

    async def upkeep(self, *, is_low: bool) -> None:
        """What happens once a second; the file system may be nearly full."""
        self.world.disk._medium.capacity_bytes = FLOOR_BYTES // 2 if is_low else ROOM_BYTES
        with suppress(DiskError):
            await self.world.ssd._watch_floor()
        self.world.ssd._has_work.set()

    async def scrub(self, number: int) -> None:
        """Look at every copy of one cache."""
        cache = cache_of(self.world, METAS[number])
        if cache is not None:
            is_right = await self.world.ssd.scrubber.check(cache)
            assert is_right or not self.is_readable

    # Ends and starts

    async def restart(self, end: End, fate: IndexFate = IndexFate.KEPT) -> None:
        """End this boot and begin the next; what must survive has survived."""
        if end is End.STOP:
            await self._finish_calls()
            await self.world.stop()
        self.reap()
        expected = self._on_slab()
        if end is End.KILL:
            await self.world.kill()
        elif end is End.POWER_LOSS:
            await self.world.lose_power()
        is_safe = end is not End.POWER_LOSS or (self.ground.policy.is_durable and not self.syncs_failed_before)
        if not is_safe:
            expected, self.may_be_torn = set(), True
            self._raise_ghosts()
        self._damage_index(fate)
        self._begin_boot()
        self.syncs_failed_before = self.ground.disk.counts["sync_error"]
        self._compare(expected if self.promise.is_survival and not self.may_be_torn else set())
        if self.promise.is_exact and end is End.STOP and fate is IndexFate.KEPT:
            assert self.world.opened.report.kind is RecoveryKind.CLEAN, self.world.opened.report

    async def _finish_calls(self) -> None:
        for _ in range(TURNS_MAX):
            self.reap()
            if not self.tasks:
                return
            await asyncio.sleep(0)
        raise AssertionError(f"calls do not end: {self.tasks}")

    def _on_slab(self) -> set[CacheKey]:
        """What a start must find: caches that are on the slab, or an old form of them."""
        superseded = self.world.node.catalog.superseded
        return {one.key for one in self.world.caches() if not one.is_hidden and (one.is_on_ssd or one in superseded)}

    def _raise_ghosts(self) -> None:
        """A power failure may undo the erasing of what was deleted, where nothing is synced."""
        for key, ghosts in self.ghosts.items():
            self.versions[key] += ghosts
            ghosts.clear()

    def _damage_index(self, fate: IndexFate) -> None:
        if fate is IndexFate.LOST:
            self.ground.place.index = None
        self.ground.place.is_damaged = fate is IndexFate.DAMAGED and self.ground.place.index is not None

    def _boot(self) -> SimWorld:
        for _ in range(BOOTS_MAX):
            try:
                return SimWorld(self.ground)
            except DiskError:
                assert not self.promise.is_readable
                self.counts["failed_boots"] += 1
            except ConfigError:
                assert not self.promise.is_readable
                self._format()
        raise AssertionError(f"no start in {BOOTS_MAX}")

    def _format(self) -> None:
        """The first block is damaged, and the error says: remove the folder."""
        medium = self.ground.disk._medium
        medium.files.clear()
        medium.small.clear()
        self.ground.place.index, self.ground.place.is_damaged = None, False
        for versions in (*self.versions.values(), *self.ghosts.values()):
            versions.clear()
        self.counts["formatted"] += 1

    def _compare(self, expected: set[CacheKey]) -> None:
        """What must be there is. What was hidden by a delete that failed stays so while a newer one is there."""
        for key in expected:
            assert cache_of(self.world, BY_KEY[key]) is not None, f"{key} was on the slab, and is gone"
        for key, versions in self.versions.items():
            for version in versions:
                version.is_committing, version.losses = False, 0 if key in expected else None
                version.is_hidden &= key in expected
        self.check()
        self.world.check_slab(is_strict=self.promise.is_exact)
