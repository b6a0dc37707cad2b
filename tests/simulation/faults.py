"""One life on a disk where everything goes wrong now and then: what is served is right, and nobody but the disk fails.

Every read is exact bytes, a miss or a named error; no commit fails because of the disk; and once the disk is well, so
is the node. Everything follows from the seed.
"""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from kvservice.ssd import SsdPolicy
from tests.server.builders import cache_of
from tests.simulation.payload import METAS
from tests.simulation.steps import KILLED, SHAKEN, step
from tests.simulation.walk import FLOOR_BYTES, NO_PROMISE, End, Promise, Walk
from tests.simulation.world import PAGE_BYTES, Ground, SimPlace
from tests.storage.faulty_disk import FAULT_NAMES, NO_FAULTS, Faults, FaultyDisk

PROBABILITIES = (0.03, 0.1, 0.2)
"""Of each fault for one operation of the disk; a write knows eight, a read three."""
TOLD_WRITES = ("write_error", "is_full", "short_write", "torn_write", "sync_error")
PROFILES: tuple[tuple[int, Sequence[str], Promise], ...] = (
    (5, FAULT_NAMES, NO_PROMISE),
    (1, TOLD_WRITES, replace(NO_PROMISE, is_survival=True, is_final=True)),
)
"""How often, which faults, what is promised under them: a disk that lies excuses what one that complains does not."""
CHECK_EVERY = 16
STIRRED = 4
NEW_NUMBERS = (0, 6, 12, 18)
"""One of each family: nothing is folded."""


async def faulty_life(seed: int, steps: int) -> Counter[str]:
    """Live, heal, and live on; the faults that struck, by name, and what became of reads and starts."""
    chance = random.Random(seed)
    (_, names, promise), *_ = chance.choices(PROFILES, [weight for weight, *_ in PROFILES])
    walk, probability = Walk(_ground(seed, chance), promise), chance.choice(PROBABILITIES)
    walk.world.disk.faults = Faults(**dict.fromkeys(names, probability))
    walk.ground.place.refusal = probability / 10
    ends = chance.choice((KILLED, SHAKEN))
    for number in range(steps):
        await step(walk, chance, ends=ends, restarts=1.0)
        await _stir(walk, chance)
        if number % CHECK_EVERY == 0:
            walk.check()
    walk.world.disk.faults, walk.ground.place.refusal = NO_FAULTS, 0.0
    await _works_on(walk)
    await _works_after_a_start(walk)
    await walk.world.stop()
    faults = Counter(walk.ground.disk.counts)
    faults["index_refused"] = walk.ground.place.faults
    return faults + Counter({f"({name})": count for name, count in walk.counts.items()})


async def _stir(walk: Walk, chance: random.Random) -> None:
    """Give the disk much to do: what is in memory only is written once more, what is on the slab is read."""
    caches = [cache for cache in walk.world.caches() if not cache.is_hidden]
    for cache in chance.sample(caches, min(len(caches), STIRRED)):
        if cache.is_hidden:
            continue  # gone while another one was read
        if cache.is_on_ssd:
            await walk.world.ssd.scrubber.check(cache)
        else:
            await walk.world.ssd.demotion.write(cache, is_required=True)


def _ground(seed: int, chance: random.Random) -> Ground:
    is_durable = chance.random() < 0.5
    return Ground(
        chance,
        FaultyDisk(seed),
        SimPlace(chance, is_durable=is_durable),
        SsdPolicy(is_write_through=chance.random() < 0.8, is_durable=is_durable, free_floor_bytes=FLOOR_BYTES),
        arena_bytes=chance.choice((8, 11, 20)) * PAGE_BYTES,
        slab_bytes=chance.choice((20, 80, 160)) * PAGE_BYTES,
    )


async def _works_on(walk: Walk) -> None:
    """The disk is well again, this boot goes on: memory serves whatever became of the slab."""
    await walk.rest()
    await _store_anew(walk)
    await walk.read_everything()
    walk.check()


async def _works_after_a_start(walk: Walk) -> None:
    """The next boot writes to the slab, reads from it, and finds it all once more after a kill."""
    await walk.restart(End.KILL)
    await _store_anew(walk)
    await walk.upkeep(is_low=False)
    for number in NEW_NUMBERS:
        cache = cache_of(walk.world, METAS[number])
        assert cache is not None
        assert await walk.world.ssd.demotion.write(cache, is_required=True)
    await walk.rest()
    for _ in range(2):
        await walk.evict_host(len(METAS))
        failed = walk.counts["failed_reads"]
        for number in NEW_NUMBERS:
            leased = await walk.look_up([number])
            assert leased is not None
            await walk.read(leased)
            await walk.release(walk.leases.index(leased))
        assert walk.counts["failed_reads"] == failed
        await walk.rest()
        await walk.restart(End.KILL)


async def _store_anew(walk: Walk) -> None:
    while walk.leases:
        await walk.release(0)
    await walk.delete(range(len(METAS)))
    await walk.evict_ssd(len(METAS))
    await walk.rest()
    for number in NEW_NUMBERS:
        await walk.store(number, 4)
