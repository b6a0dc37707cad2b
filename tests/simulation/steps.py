"""Random steps of a walk: what is done, how often, and how many turns of the loop go by in between."""

import random
from collections.abc import Awaitable, Callable, Sequence

from tests.simulation.payload import METAS, ROWS, VARIANTS
from tests.simulation.walk import End, IndexFate, Walk

Step = Callable[[], Awaitable[None]]


KILLED = (End.KILL, End.KILL, End.STOP)
SHAKEN = (*KILLED, End.POWER_LOSS)


async def step(walk: Walk, chance: random.Random, *, ends: Sequence[End] = SHAKEN, restarts: float = 1.0) -> None:
    """One thing that may happen. ``ends``: how a boot may end; ``restarts``: how much likelier than usual it does."""
    number, few = chance.randrange(len(METAS)), chance.sample(range(len(METAS)), chance.randint(1, 4))
    index, variant = chance.randrange(100), chance.choice((0, 1, 1, 2, *range(VARIANTS)))
    steps: list[tuple[float, Step]] = [
        (12, _beside(walk, lambda: walk.store(number, variant))),
        (6, _beside(walk, lambda: walk.store_mirror(number, index, index % len(ROWS)))),
        (5, lambda: _look_up(walk, chance, few)),
        (4, lambda: _read(walk, index)),
        (5, lambda: walk.release(index)),
        (0.5, lambda: walk.let_time_pass(chance.choice((1.0, 11.0)))),
        (2, _beside(walk, lambda: walk.delete(few[:2]))),
        (2, _beside(walk, lambda: walk.commit_round(number))),
        (1, lambda: walk.evict_host(chance.randint(1, 9))),
        (0.7, lambda: walk.evict_ssd(chance.randint(1, 3))),
        (0.5, _beside(walk, lambda: walk.upkeep(is_low=chance.random() < 0.2))),
        (0.7, _beside(walk, lambda: walk.scrub(number))),
        (1, walk.rest),
        (0.2, walk.read_everything),
        (restarts, lambda: walk.restart(chance.choice(ends), fate(chance))),
    ]
    (chosen,) = chance.choices([action for _, action in steps], [weight for weight, _ in steps])
    await chosen()
    await walk.turn(chance.choice((0, 0, 1, 3, 20)))


def fate(chance: random.Random) -> IndexFate:
    """What becomes of the index: mostly it is kept."""
    return chance.choices(tuple(IndexFate), (6, 1, 1))[0]


def _beside(walk: Walk, make: Callable[[], Awaitable[None]]) -> Step:
    async def begin() -> None:
        walk.begin(make())  # type: ignore[arg-type]

    return begin


async def _look_up(walk: Walk, chance: random.Random, few: list[int]) -> None:
    await walk.look_up(few, may_shift=chance.random() < 0.3)


async def _read(walk: Walk, index: int) -> None:
    if walk.leases:
        await walk.read(walk.leases[index % len(walk.leases)])
