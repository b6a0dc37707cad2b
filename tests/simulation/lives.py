"""One life on a disk that keeps its word: stops, kills, power failures and lost indexes, and all that was promised."""

import random

from kvservice.ssd import SsdPolicy
from tests.simulation.steps import KILLED, SHAKEN, step
from tests.simulation.walk import FLOOR_BYTES, Walk
from tests.simulation.world import PAGE_BYTES, Ground, SimPlace
from tests.storage.faulty_disk import FaultyDisk


async def honest_life(seed: int, steps: int) -> int:
    """Live, check everything between any two steps, and leave nothing behind; how many records were compared."""
    chance = random.Random(seed)
    is_durable = chance.random() < 0.5
    policy = SsdPolicy(is_write_through=chance.random() < 0.7, is_durable=is_durable, free_floor_bytes=FLOOR_BYTES)
    ground = Ground(
        chance,
        FaultyDisk(seed),
        SimPlace(chance, is_durable=is_durable),
        policy,
        arena_bytes=chance.choice((8, 11, 20)) * PAGE_BYTES,
        slab_bytes=chance.choice((12, 20, 40)) * PAGE_BYTES,
    )
    # Where nothing is synced, a power failure ends what can be promised; most lives are spared one.
    ends = SHAKEN if is_durable or chance.random() < 0.2 else KILLED
    walk = Walk(ground)
    for _ in range(steps):
        await step(walk, chance, ends=ends)
        walk.check()
    await walk.empty()
    await walk.world.stop()
    return walk.counts["hits"]
