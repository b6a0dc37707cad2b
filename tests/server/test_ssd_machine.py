"""A node with an SSD tier under any order of calls and ends, with workers that take their time.

What must hold, and what a client may count on, is worked out in tests/simulation/walk.py.
"""

import asyncio
import random
from collections.abc import Coroutine, Sequence
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvservice.ssd import SsdPolicy
from tests.simulation.payload import METAS, ROWS, VARIANTS
from tests.simulation.steps import KILLED, SHAKEN, step
from tests.simulation.walk import FLOOR_BYTES, End, IndexFate, Walk
from tests.simulation.world import PAGE_BYTES, Ground, SimPlace
from tests.storage.faulty_disk import FaultyDisk

NUMBERS = st.integers(0, len(METAS) - 1)
FEW = st.lists(NUMBERS, min_size=1, max_size=4, unique=True)
PICKS = st.integers(0, 9)


class SsdMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.walk: Walk | None = None

    @initialize(
        seed=st.integers(0, 2**32 - 1),
        is_durable=st.booleans(),
        is_through=st.booleans(),
        arena_pages=st.sampled_from([8, 11, 20]),
        slab_pages=st.sampled_from([12, 20, 40]),
    )
    def start(self, seed: int, is_durable: bool, is_through: bool, arena_pages: int, slab_pages: int) -> None:
        asyncio.set_event_loop(self.loop)
        chance = random.Random(seed)
        ground = Ground(
            chance,
            FaultyDisk(seed),
            SimPlace(chance, is_durable=is_durable),
            SsdPolicy(is_write_through=is_through, is_durable=is_durable, free_floor_bytes=FLOOR_BYTES),
            arena_bytes=arena_pages * PAGE_BYTES,
            slab_bytes=slab_pages * PAGE_BYTES,
        )
        self.walk = self.run(_begun(ground))

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(work)

    def beside(self, work: Coroutine[Any, Any, None]) -> None:
        """Begin it, and let it wait for its workers while the story goes on."""
        self.run(self._begin(work))

    async def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        assert self.walk is not None
        self.walk.begin(work)
        await asyncio.sleep(0)

    # What clients do

    @rule(number=NUMBERS, variant=st.integers(0, VARIANTS - 1))
    def store(self, number: int, variant: int) -> None:
        assert self.walk is not None
        self.beside(self.walk.store(number, variant))

    @rule(number=NUMBERS, pick=PICKS, rows=st.integers(0, len(ROWS) - 1))
    def store_mirror(self, number: int, pick: int, rows: int) -> None:
        assert self.walk is not None
        self.beside(self.walk.store_mirror(number, pick, rows))

    @rule(number=NUMBERS)
    def commit_round(self, number: int) -> None:
        assert self.walk is not None
        self.beside(self.walk.commit_round(number))

    @rule(numbers=FEW, may_shift=st.booleans())
    def look_up(self, numbers: Sequence[int], may_shift: bool) -> None:
        assert self.walk is not None
        self.run(self.walk.look_up(numbers, may_shift=may_shift))

    @rule(pick=PICKS)
    def read(self, pick: int) -> None:
        assert self.walk is not None
        if self.walk.leases:
            self.run(self.walk.read(self.walk.leases[pick % len(self.walk.leases)]))

    @rule(pick=PICKS)
    def release(self, pick: int) -> None:
        assert self.walk is not None
        self.run(self.walk.release(pick))

    @rule(numbers=FEW)
    def delete(self, numbers: Sequence[int]) -> None:
        assert self.walk is not None
        self.beside(self.walk.delete(numbers))

    # What else happens

    @rule(seconds=st.sampled_from([1.0, 11.0]))
    def let_time_pass(self, seconds: float) -> None:
        assert self.walk is not None
        self.run(self.walk.let_time_pass(seconds))

    @rule(turns=st.integers(1, 60))
    def let_others_run(self, turns: int) -> None:
        assert self.walk is not None
        self.run(self.walk.turn(turns))

    @rule(groups=st.integers(1, 9))
    def evict_from_memory(self, groups: int) -> None:
        assert self.walk is not None
        self.run(self.walk.evict_host(groups))

    @rule(groups=st.integers(1, 3))
    def evict_from_the_slab(self, groups: int) -> None:
        assert self.walk is not None
        self.run(self.walk.evict_ssd(groups))

    @rule(is_low=st.booleans())
    def upkeep(self, is_low: bool) -> None:
        assert self.walk is not None
        self.beside(self.walk.upkeep(is_low=is_low))

    @rule(number=NUMBERS)
    def scrub(self, number: int) -> None:
        assert self.walk is not None
        self.beside(self.walk.scrub(number))

    @rule(end=st.sampled_from(End), fate=st.sampled_from(IndexFate))
    def end_and_start(self, end: End, fate: IndexFate) -> None:
        assert self.walk is not None
        self.run(self.walk.restart(end, fate))

    @rule()
    def read_everything(self) -> None:
        assert self.walk is not None
        self.run(self.walk.read_everything())

    @rule(seed=st.integers(0, 2**32 - 1), steps=st.integers(1, 150), ends=st.sampled_from([KILLED, SHAKEN]))
    def much_happens(self, seed: int, steps: int, ends: Sequence[End]) -> None:
        """Hypothesis makes short stories; old forms, tombstones and full slabs take long ones."""
        self.run(self._much_happens(random.Random(seed), steps, ends))

    async def _much_happens(self, chance: random.Random, steps: int, ends: Sequence[End]) -> None:
        assert self.walk is not None
        for _ in range(steps):
            await step(self.walk, chance, ends=ends)
            self.walk.check()

    # What must hold

    @precondition(lambda self: self.walk is not None)
    @invariant()
    def all_invariants_hold(self) -> None:
        assert self.walk is not None
        self.walk.check()

    @precondition(lambda self: self.walk is not None)
    @invariant()
    def every_live_lease_reads_what_was_stored(self) -> None:
        assert self.walk is not None
        self.walk.read_again()

    def teardown(self) -> None:
        if self.walk is not None:
            self.run(self._end(self.walk))
        self.loop.close()
        asyncio.set_event_loop(None)

    async def _end(self, walk: Walk) -> None:
        await walk.empty()
        await walk.world.stop()


async def _begun(ground: Ground) -> Walk:
    return Walk(ground)


SsdMachine.TestCase.settings = settings(
    max_examples=20, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
test_any_order_of_calls_and_ends = SsdMachine.TestCase
