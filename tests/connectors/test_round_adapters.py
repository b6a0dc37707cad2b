"""Rounds in which some requests have LoRA adapters: these get exact reuse and no other, and nobody waits for them."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvservice.app import Service
from kvservice.client.connectors.vllm.wishes import engine_refusal
from tests.client.builders import make_settings
from tests.connectors.mini_engine import FakeRequest, engine_identity
from tests.connectors.test_request_extras import make_adapter
from tests.connectors.test_scheduler_rounds import World, prompt_of, words
from tests.connectors.test_scheduler_side import step

WAIT_S = 2.0
TOKENS = 12 + 26 + 3
WHOLE = 40
"""Of so many tokens the last whole block is the last that is loaded."""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with Service(make_settings(tmp_path_factory.mktemp("service"))) as service:
        yield service


@pytest.fixture
def world(service: Service, request: pytest.FixtureRequest) -> Iterator[World]:
    world = World(service, request.node.name, round_wait_s=WAIT_S)
    yield world
    world.side.close()


def adapted(world: World, agent: str, adapter: Any, history: Sequence[int] = range(7000, 7012)) -> FakeRequest:
    """A member of the round of four, with an adapter."""
    said = words(len(history), agent=agent, expect=4)
    request = FakeRequest(f"request of {agent}", prompt_of(history), kv_transfer_params=said)
    request.lora_request = adapter
    world.side.on_new_request(request)
    return request


def test_others_of_the_round_go_as_soon_as_those_with_adapters_have_come(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = [world.agent(0, expect=4), world.agent(1, expect=4)]
    one = adapted(world, "one", make_adapter(tmp_path / "1"))
    assert world.settle_round([*plain, one]) == [(None, False), (None, False), (0, False)], "one is missing still"
    two = adapted(world, "two", make_adapter(tmp_path / "2", name="css", number=2, value=2.0))
    assert world.settle_round([*plain, two]) == [(0, False), (None, False), (0, False)]
    world.lead(plain[0])
    assert world.settle_round(plain[1:]) == [(40, True)], "and reuse what one of them has computed"
    assert world.counts.total("reuse_refused") == 2
    assert caplog.text.count("the request has a LoRA adapter") == 1


def test_others_wait_no_longer_than_said_for_one_that_comes_late(world: World, tmp_path: Path) -> None:
    plain = [world.agent(index, expect=4) for index in range(3)]
    assert world.settle_round(plain) == [(None, False)] * 3
    world.clock.now_s += WAIT_S
    assert world.settle_round(plain) == [(0, False), (None, False), (None, False)]
    late = adapted(world, "late", make_adapter(tmp_path / "1"))
    assert world.ask(late) == (0, False)


def test_an_adapter_that_cannot_be_named_gets_nothing_and_holds_nobody_up(world: World) -> None:
    plain = [world.agent(index, expect=4) for index in range(3)]
    unknown = adapted(world, "unknown", SimpleNamespace(lora_name="x", lora_int_id=1, lora_path="/nowhere"))
    assert world.settle_round([*plain, unknown]) == [(0, False), (None, False), (None, False), (0, False)]
    world.allocate(unknown, 0)
    assert world.side.build_orders(step((unknown, 0, TOKENS))).saves == ()
    world.side.ended(unknown)


def test_with_an_adapter_what_the_same_adapter_has_computed_is_found_and_nothing_else(
    world: World, tmp_path: Path
) -> None:
    sql, css = make_adapter(tmp_path / "1"), make_adapter(tmp_path / "2", name="css", number=2, value=2.0)
    first = adapted(world, "first", sql)
    assert world.ask(first) == (0, False)
    saves = world.compute(first)
    assert {save.prompt for save in saves} == {None}
    world.store([save.chunk for save in saves])
    assert world.ask(adapted(world, "again", sql)) == (WHOLE, True)
    assert world.ask(adapted(world, "other", css)) == (0, False)
    assert world.counts.total("members_reusing") == 0


def test_without_an_adapter_nothing_of_an_adapters_is_reused_at_any_position(world: World, tmp_path: Path) -> None:
    first = adapted(world, "first", make_adapter(tmp_path / "1"))
    world.ask(first)
    world.store([save.chunk for save in world.compute(first)])
    plain = world.agent(0, expect=0)
    assert world.settle_round([plain]) == [(0, False)]


def test_an_engine_that_serves_adapters_refreshes_nothing_and_says_so() -> None:
    parallel = SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1)
    config = SimpleNamespace(parallel_config=parallel, speculative_config=None, lora_config=None)
    assert engine_refusal(config, engine_identity()) == ""
    config.lora_config = object()
    assert engine_refusal(config, engine_identity()).startswith("LoRA: ")
