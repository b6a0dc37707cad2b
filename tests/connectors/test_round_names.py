"""Names of rounds that are used again: a new round gathers, and whoever is late for the old one is not held up."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from kvservice.app import Service
from kvservice.client.connectors.vllm.members import Stage
from kvservice.client.reuse.leader import Role
from tests.client.builders import make_settings
from tests.connectors.mini_engine import FakeRequest
from tests.connectors.test_scheduler_rounds import SHARED, World

WAIT_S = 2.0


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with Service(make_settings(tmp_path_factory.mktemp("service"))) as service:
        yield service


@pytest.fixture
def world(service: Service, request: pytest.FixtureRequest) -> Iterator[World]:
    world = World(service, request.node.name, round_wait_s=WAIT_S)
    yield world
    world.side.close()


def incomplete(world: World) -> list[FakeRequest]:
    """Two of three came in time, and have gone: the first leads, the second reuses."""
    requests = [world.agent(0), world.agent(1)]
    world.settle_round(requests)
    world.clock.now_s += WAIT_S
    assert world.settle_round(requests) == [(0, False), (None, False)]
    world.lead(requests[0])
    assert world.settle_round(requests[1:]) == [(40, True)]
    return requests


def end(world: World, requests: Sequence[FakeRequest]) -> None:
    for request in requests:
        world.side.ended(request)


def are_waiting(world: World, requests: Sequence[FakeRequest]) -> list[bool]:
    world.settle_round(requests)
    members = [world.side._tracked[one.request_id].member for one in requests]
    return [member is not None and member.stage is Stage.GATE for member in members]


def test_a_name_used_again_after_an_incomplete_round_gathers_again(world: World) -> None:
    end(world, incomplete(world))
    world.clock.now_s += 60.0
    again = [world.agent(index, twin=" again") for index in (1, 0)]
    assert are_waiting(world, again) == [True, True], "the third may come this time"
    again.append(world.agent(2, twin=" again"))
    lookups = world.counts.total("lookups")
    assert world.settle_round(again) == [(40, True), (39, True), (43, True)]
    assert world.counts.total("lookups") == lookups + 2, "its own history, and one for all of them"


def test_it_waits_no_longer_than_the_first_time(world: World) -> None:
    end(world, incomplete(world))
    again = [world.agent(index, twin=" again") for index in (0, 1)]
    assert are_waiting(world, again) == [True, True]
    world.clock.now_s += WAIT_S
    assert world.settle_round(again) == [(39, True), (40, True)]


def test_a_straggler_of_the_old_round_is_not_held_up(world: World) -> None:
    end(world, incomplete(world))
    late = world.agent(2)
    assert world.settle_round([late]) == [(43, True)]
    end(world, [late])
    assert are_waiting(world, [world.agent(0, twin=" again")]) == [True]


def test_a_straggler_that_comes_when_the_next_round_gathers_goes_with_it(world: World) -> None:
    end(world, incomplete(world))
    again = [world.agent(index, twin=" again") for index in (0, 1)]
    assert are_waiting(world, again) == [True, True]
    assert world.settle_round([*again, world.agent(2)]) == [(39, True), (40, True), (43, True)]


def test_while_one_of_the_old_round_is_under_way_its_agents_are_not_new(world: World) -> None:
    """A client that gave up and asked once more: nobody else will."""
    requests = incomplete(world)
    end(world, requests[:1])
    assert are_waiting(world, [world.agent(0, twin=" again")]) == [False]


def test_a_smaller_round_of_the_same_name_is_another_one(world: World) -> None:
    end(world, incomplete(world))
    assert are_waiting(world, [world.agent(2, expect=2)]) == [True]
    assert world.counts.total("round_params_refused") == 0


def test_a_judge_that_comes_first_stands_aside_in_the_new_round(world: World) -> None:
    judge: dict[str, Any] = {"expect": 4, "modes": {"shared": "exact"}}
    requests = [world.agent(3, **judge), world.agent(0, expect=4), world.agent(1, expect=4)]
    world.settle_round(requests[1:])
    world.clock.now_s += WAIT_S
    world.settle_round(requests)
    end(world, requests)
    world.agent(3, twin=" again", **judge)
    again = [world.agent(index, expect=4, twin=" again") for index in (0, 1)]
    assert are_waiting(world, again) == [True, True]
    again.append(world.agent(2, expect=4))
    assert are_waiting(world, again) == [False] * 3, "three are all that are waited for"


def test_blocks_are_named_by_how_they_are_refreshed_in_the_end(service: Service) -> None:
    """Who is refreshed more than it asked for must not lend its blocks to those who are not, nor borrow theirs."""
    world = World(service, "raised", raise_fit_min=0.1)
    leader = world.agent(0, expect=0)
    world.settle_round([leader])
    world.lead(leader)
    turned = [SHARED[1], SHARED[2], SHARED[0]]
    request = world.agent(5, expect=0, shared=turned)
    named = world.side._tracked[request.request_id].mark
    assert world.settle_round([request])[0] == (26 + 26, True)
    member = world.side._tracked[request.request_id].member
    assert member is not None
    assert member.role is Role.REUSE_MORE
    assert (named, member.mark) == (b"hkvd:0.1/check=1", b"hkvd:0.3/check=1")
    assert world.side._tracked[request.request_id].mark == member.mark
    request.num_preemptions += 1
    assert world.ask(request) == (26 + 26, True), "it is looked up again, and named again"
    world.side.close()
