"""What is saved of members whose shared run a pass has brought in part: cut by the engine's own rows, or by its end."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from kvservice.app import Service
from kvservice.client.connectors.vllm.metadata import SaveOrder
from kvservice.client.connectors.vllm.rounds import STORING_S
from tests.client.builders import make_settings
from tests.connectors.mini_engine import FakeRequest
from tests.connectors.test_scheduler_rounds import REUSE, SHARED, TAIL, World
from tests.connectors.test_scheduler_side import EMPTY, step

RUN = sum(map(len, SHARED))


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with Service(make_settings(tmp_path_factory.mktemp("service"))) as service:
        yield service


@pytest.fixture
def world(service: Service, request: pytest.FixtureRequest) -> Iterator[World]:
    world = World(service, request.node.name)
    leader = world.agent(0, expect=0)
    world.settle_round([leader])
    world.lead(leader)
    yield world
    world.side.close()


def reader(world: World, tail: Sequence[int] = (), name: str = "reader") -> FakeRequest:
    """A prompt of 14 tokens of its own and the shared run, and nothing behind it but ``tail``."""
    history = list(range(5000, 5014))
    segments = [["private", len(history)], *[["shared", len(one)] for one in SHARED]]
    segments += [["private", len(tail)]] if tail else []
    tokens = [*history, *(token for one in SHARED for token in one), *tail]
    words = {"kvservice": {"segments": segments, "modes": {"shared": REUSE}}}
    request = FakeRequest(name, tokens, kv_transfer_params=words)
    world.side.on_new_request(request)
    return request


def brought(world: World, request: FakeRequest, local: int, end: int) -> list[SaveOrder]:
    """A pass brings the rows from ``local`` to ``end``, the engine computes the rest: what is saved of it then."""
    for _ in range(4):
        found = world.ask(request, local)
    assert found == (end - local, True)
    world.allocate(request, end - local)
    assert len(world.side.build_orders(EMPTY).refreshes) == 1
    world.report(finished_recving={request.request_id})
    return list(world.side.build_orders(step((request, end, request.num_tokens - end))).saves)


def places(saves: Sequence[SaveOrder]) -> list[tuple[int, int, bool]]:
    """Behind the history."""
    found = [(save.chunk.start, save.chunk.end, save.prompt is not None) for save in saves]
    return [place for place in found if place[0] >= 14]


def test_a_segment_that_ends_with_the_prompt_is_saved_as_a_difference_once_its_last_row_is_there(world: World) -> None:
    request = reader(world)
    saves = brought(world, request, 0, 14 + RUN - 1)
    assert places(saves) == [(14 + 17, 14 + RUN, True)]
    last = saves[-1]
    assert last.prompt is not None
    assert last.prompt.segments[last.index].position == 14 + 17
    assert last.chunk.keys[0] == last.prompt.key(last.index, is_refreshed=True)
    assert last.is_awaited
    assert len(last.block_ids) * 4 >= last.skip + last.chunk.tokens


def test_a_segment_that_local_rows_reach_into_is_saved_as_a_difference(world: World) -> None:
    saves = brought(world, reader(world, TAIL), 28, 14 + RUN)
    assert places(saves) == [(14 + 10, 14 + 17, True), (14 + RUN, 14 + RUN + 3, False)]


def test_a_segment_that_is_the_engines_own_is_not(world: World) -> None:
    saves = brought(world, reader(world, TAIL), 24, 14 + RUN)
    assert places(saves) == [(14 + RUN, 14 + RUN + 3, False)], "24 is where the first one ends"


def test_a_segment_that_is_found_where_it_stands_is_not_saved_again(world: World) -> None:
    """The leader comes back: its own caches are exact, and a pass only brings them."""
    again = world.agent(0, expect=0, twin=" again")
    saves = brought(world, again, 32, 39)
    assert [save for save in saves if save.prompt is not None] == []


def test_what_ends_with_the_prompt_and_begins_before_local_rows_end_is_saved_once(world: World) -> None:
    saves = brought(world, reader(world), 36, 14 + RUN - 1)
    assert places(saves) == [(14 + 17, 14 + RUN, True)]


def test_a_pass_that_failed_leaves_no_differences(world: World) -> None:
    request = reader(world)
    for _ in range(4):
        world.ask(request)
    world.allocate(request, 14 + RUN - 1)
    world.side.build_orders(EMPTY)
    world.report(invalid_block_ids=set(request.blocks[:1]), finished_recving={request.request_id})
    assert world.side.matched_tokens(request, 0) == (0, False)
    world.allocate(request, 0)
    saves = world.side.build_orders(step((request, 0, request.num_tokens))).saves
    assert [save for save in saves if save.prompt is not None] == []


def test_others_may_store_whole_what_is_saved_as_a_difference(world: World) -> None:
    """It says nothing to those who find that it does not fit them."""
    world.clock.now_s += STORING_S
    request = reader(world)
    for _ in range(4):
        world.ask(request)
    world.allocate(request, 14 + RUN - 1)
    storing: Callable[[Any], bool] = world.side._rounds._is_storing
    member = world.side._tracked[request.request_id].member
    assert member is not None
    assert member.saves is not None
    assert [(save.is_brought, storing(save.chunk)) for save in member.saves] == [(True, False)]
