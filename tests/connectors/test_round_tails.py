"""What stands behind the reused segments of a prompt, a question: computed by the pass, down to the last token."""

import pytest

from tests.connectors.test_scheduler_rounds import MakeWorld, World, make_world, service
from tests.connectors.test_scheduler_side import EMPTY, step

__all__ = ["make_world", "service"]  # fixtures
HISTORIES, RUN, TAIL = (14, 17), 26, 3


def followers(world: World) -> list[tuple[int | None, bool]]:
    """What two are promised once the third has led."""
    requests = [world.agent(index) for index in range(3)]
    world.settle_round(requests)
    world.lead(requests[0])
    return world.settle_round(requests[1:])


@pytest.mark.parametrize("rows_max", [TAIL - 1, 64])
def test_a_pass_brings_a_short_question_up_to_its_last_token(make_world: MakeWorld, rows_max: int) -> None:
    assert followers(make_world(refresh_tail_rows=rows_max)) == [(one + RUN + TAIL - 1, True) for one in HISTORIES]


@pytest.mark.parametrize("rows_max", [0, TAIL - 2])
def test_a_longer_one_is_left_to_the_engine(make_world: MakeWorld, rows_max: int) -> None:
    assert followers(make_world(refresh_tail_rows=rows_max)) == [(one + RUN, True) for one in HISTORIES]


def test_rows_of_the_question_count_among_those_of_a_step(make_world: MakeWorld) -> None:
    world = make_world(refresh_tail_rows=64, refresh_rows_max=50)
    requests = [world.agent(index) for index in range(3)]
    world.settle_round(requests)
    world.lead(requests[0])
    (promised,) = world.settle_round(requests[1:2])
    assert promised == (HISTORIES[0] + RUN + TAIL - 1, True)
    world.allocate(requests[1], promised[0])
    assert world.settle_round(requests[2:]) == [(None, False)], "not in this step"


@pytest.mark.parametrize("rows_max", [0, 64])
def test_the_same_is_stored_of_it_whoever_computed_it(make_world: MakeWorld, rows_max: int) -> None:
    world = make_world(refresh_tail_rows=rows_max)
    requests = [world.agent(index) for index in range(3)]
    world.settle_round(requests)
    world.lead(requests[0])
    (promised, _), _ = world.settle_round(requests[1:])
    assert promised is not None
    world.allocate(requests[1], promised)
    world.side.build_orders(EMPTY)
    world.report(finished_recving={requests[1].request_id})
    rest = requests[1].num_tokens - promised
    saves = world.side.build_orders(step((requests[1], promised, rest))).saves
    start = HISTORIES[0] + RUN
    behind = [(save.chunk.start, save.chunk.end, save.prompt) for save in saves if save.chunk.end > HISTORIES[0]]
    assert behind == [(start, start + TAIL, None)]


@pytest.mark.parametrize("rows_max", [40, 41])
def test_a_question_that_no_step_has_room_for_keeps_nobody_waiting(make_world: MakeWorld, rows_max: int) -> None:
    world = make_world(refresh_tail_rows=64, refresh_rows_max=rows_max)
    requests = [world.agent(index) for index in range(3)]
    world.settle_round(requests)
    world.lead(requests[0])
    assert world.settle_round(requests[1:2]) == [(HISTORIES[0] + RUN, True)]
