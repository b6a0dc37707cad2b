"""How long a pass keeps the engine from its own steps: counted in rows of layers, not by a clock."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor

from kvservice.app import Service
from kvservice.client.connectors.vllm.metadata import IDLE, RefreshOrder, StepOrders
from kvservice.client.connectors.vllm.passes import IDLE_SLICE_S
from kvservice.client.reuse.engine import Rows
from tests.client.builders import make_identity, make_settings
from tests.connectors.mini_engine import FakePaged, Sides
from tests.connectors.test_passes import GEOMETRY, HISTORIES, SHARED, World

UNIT = sum(HISTORIES) + 2 * sum(SHARED)
"""Rows of a layer before the check: the least that a slice can do."""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with Service(make_settings(tmp_path_factory.mktemp("service"))) as service:
        yield service


@pytest.fixture
def world(service: Service, request: pytest.FixtureRequest) -> Iterator[World]:
    world = World(service, make_identity(GEOMETRY, model=request.node.name))
    yield world
    world.close()


class Work:
    """A clock that only goes on while the engine's layers run: a row of a layer takes a second."""

    def __init__(self, world: World) -> None:
        self.now_s = 0.0
        self.layers: list[int] = []
        world.passes._clock = lambda: self.now_s
        world.passes._deadline_s = float("inf")
        original = world.engine.run_layer

        def run_layer(layer: int, hidden: Tensor, rows: Rows, is_written: Tensor) -> Tensor:
            self.now_s += len(rows)
            self.layers.append(layer)
            return original(layer, hidden, rows, is_written)

        world.engine.run_layer = run_layer  # type: ignore[method-assign]


def slices(world: World, work: Work, budget_s: float) -> list[float]:
    """What each turn of a pass of two prompts took, as long as it takes. Whoever decodes has a step between two."""
    world.passes.begin([world.order(0, first_block=0), world.order(1, first_block=8)])
    taken = []
    for _ in range(20_000):
        before = work.now_s
        world.passes.advance(budget_s)
        taken.append(work.now_s - before)
        ended = world.passes.take()
        if ended:
            assert [one.is_failed for one in ended] == [False, False]
            return [one for one in taken if one]
        world.passes._news.wait(0.001)
    raise AssertionError("the pass does not end")


@pytest.mark.parametrize("budget_s", [0, 10, UNIT - 1, UNIT + 1, 10 * UNIT])
def test_a_slice_ends_with_the_layer_in_which_its_time_is_over(world: World, budget_s: int) -> None:
    work = Work(world)
    taken = slices(world, work, budget_s)
    assert max(taken) < budget_s + UNIT or budget_s == 0
    assert max(taken) <= budget_s + UNIT
    assert sum(taken) == work.now_s > UNIT
    assert work.layers == [0, 1, 2], "whatever the slices, nothing runs twice"
    if budget_s <= 10:
        assert len(taken) == GEOMETRY.layers, "a layer a slice: somebody decodes between any two"
    if budget_s > 5 * UNIT and len(taken) > 1:
        assert min(taken) > 0, "only bytes that were not there yet end a slice before its time"


def test_what_follows_the_check_is_a_small_part_of_a_layer(world: World) -> None:
    work = Work(world)
    taken = slices(world, work, 0)
    assert taken[0] == UNIT
    assert max(taken[1:]) < UNIT * 0.6, "the histories, and a tenth of the shared rows"


class Spy:
    """Passes that note how long they may take."""

    refusal = ""
    is_idle = is_running = False

    def __init__(self) -> None:
        self.turns: list[tuple[float, float]] = []

    def begin(self, orders: Any) -> None:
        self.turns.append((len(orders), -1))

    def advance(self, budget_s: float, wait_s: float) -> None:
        self.turns.append((budget_s, wait_s))


def test_a_step_that_computes_gives_a_pass_one_slice_and_waits_for_nothing(service: Service) -> None:
    sides = Sides(f"unix:{service.addresses.socket}", FakePaged(8))
    spy, worker = Spy(), sides.worker
    worker._passes, worker._slice_s = spy, 0.02  # type: ignore[assignment]
    order: RefreshOrder = SimpleNamespace()  # type: ignore[assignment]
    for orders in (StepOrders(tokens=3, refreshes=(order,)), StepOrders(tokens=1), IDLE):
        worker.bind(orders)
        worker.start_loads()
    assert spy.turns[:3] == [(1, -1), (0.02, 0.0), (0.02, 0.0)]
    assert spy.turns[3][0] == IDLE_SLICE_S
    assert spy.turns[3][1] > 0
    assert len(spy.turns) == 4
    worker._passes = None
    sides.close()
