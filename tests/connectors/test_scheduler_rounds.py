"""Rounds on the scheduler's side: gate, one lookup, roles, promises and orders, on a real service."""

import threading
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from kvservice.app import Service
from kvservice.client.connectors.breaker import Breaker
from kvservice.client.connectors.vllm.chunks import Chunk
from kvservice.client.connectors.vllm.link import Link
from kvservice.client.connectors.vllm.lookups import Lookups
from kvservice.client.connectors.vllm.members import segment_chunk
from kvservice.client.connectors.vllm.metadata import RefreshOrder, SaveOrder, WorkerNotice
from kvservice.client.connectors.vllm.metrics import Counts
from kvservice.client.connectors.vllm.options import ConnectorOptions
from kvservice.client.connectors.vllm.request_extras import ExtrasReader
from kvservice.client.connectors.vllm.requests import ChainMaker
from kvservice.client.connectors.vllm.rounds import STORING_S
from kvservice.client.connectors.vllm.saves import Saves
from kvservice.client.connectors.vllm.scheduler import LEASE_IDLE_S, SchedulerSide
from kvservice.client.round_request import RoundRequest
from kvservice.client.session import Session
from kvservice.client.shared_memory import SharedMemoryTransport
from kvservice.wire.v1 import cache_pb2 as wire
from tests.client.builders import make_settings
from tests.connectors.mini_engine import BLOCK, FakeRequest, engine_identity
from tests.connectors.test_mini_engine import wait_for
from tests.connectors.test_scheduler_side import EMPTY, Clock, step

SHARED = [list(range(100, 110)), list(range(200, 207)), list(range(300, 309))]
TAIL = [7, 8, 9]
REUSE = {"mode": "reuse", "selector": "hkvd", "ratio": 0.1}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with Service(make_settings(tmp_path_factory.mktemp("service"))) as service:
        yield service


def words(history: int, *, agent: str, expect: int, shared: Sequence[Sequence[int]] = SHARED, **more: Any) -> Any:
    segments = [["private", history], *[["shared", len(one)] for one in shared], ["private", len(TAIL)]]
    return {
        "kvservice": {
            "round": "r1",
            "agent": agent,
            "expect": expect,
            "segments": segments,
            "modes": {"shared": REUSE},
            **more,
        }
    }


def prompt_of(history: Sequence[int], shared: Sequence[Sequence[int]] = SHARED) -> list[int]:
    return [*history, *(token for one in shared for token in one), *TAIL]


class World:
    """The scheduler's side of an engine of one rank, and agents whose histories differ in length."""

    def __init__(self, service: Service, name: str, **options: Any) -> None:
        self.identity, self.clock, self.counts = engine_identity(name), Clock(), Counts()
        self.address = f"unix:{service.addresses.socket}"
        given = {"address": self.address, "chunk_tokens": 8, "refresh_tail_rows": 0, **options}
        self.options = ConnectorOptions.of(given, BLOCK)
        self.link = Link(self.open_session, Breaker(self.clock, failures_max=2, slow_s=60.0))
        namespaces = [self.identity.namespace()]
        self.lookups = Lookups(self.link, namespaces, self.counts, self.clock)
        self.chains = ChainMaker(namespaces, 8, BLOCK, ExtrasReader({}), self.counts)
        self.side = SchedulerSide(
            self.options,
            BLOCK,
            self.chains,
            self.lookups,
            self.counts,
            self.clock,
            refuse_reuse=self.chains.refuse_reuse,
        )
        self.blocks = 1000

    def open_session(self, *, is_writer: bool = False) -> Session:
        return Session(SharedMemoryTransport(self.address), [self.identity], is_writer=is_writer)

    def store(self, chunks: Sequence[Chunk]) -> None:
        link = Link(lambda: self.open_session(is_writer=True), Breaker(self.clock))
        saves = Saves(link, self.identity, 0, 1 << 20, Counts())
        gathered = saves.begin([SaveOrder("", chunk, ()) for chunk in chunks])
        assert gathered is not None
        gathered.buffer[:] = 1
        saves.hand_over(gathered)
        assert wait_for(lambda: not saves.bytes_waiting)  # closing waits for some seconds only
        saves.close()

    def agent(self, index: int, *, expect: int = 3, history: int = 0, twin: str = "", **more: Any) -> FakeRequest:
        tokens = list(range(1000 * (index + 1), 1000 * (index + 1) + (history or 11 + 3 * index)))
        name = f"agent {index}"
        said = words(len(tokens), agent=name, expect=expect, **more)
        shared = more.get("shared", SHARED)
        request = FakeRequest(f"request {index}{twin}", prompt_of(tokens, shared), kv_transfer_params=said)
        self.side.on_new_request(request)
        return request

    def ask(self, request: FakeRequest, local: int = 0) -> tuple[int | None, bool]:
        """What is promised once all lookups under way have been answered."""
        for _ in range(10_000):
            found = self.side.matched_tokens(request, local)
            if found[0] is not None or self.lookups._asked == self.lookups._answered:
                return self.side.matched_tokens(request, local)
            threading.Event().wait(0.001)
        return found

    def settle_round(self, requests: Sequence[FakeRequest]) -> list[tuple[int | None, bool]]:
        """Ask for all until answers stay as they are."""
        for _ in range(4):
            found = [self.ask(request) for request in requests]
        return found

    def allocate(self, request: FakeRequest, count: int) -> None:
        self.blocks += 30
        request.blocks = list(range(self.blocks, self.blocks + 30))
        self.side.allocated(request, lambda: [request.blocks], count)

    def compute(self, request: FakeRequest) -> list[SaveOrder]:
        """The engine computes all of a prompt; what is to be saved of it."""
        self.allocate(request, 0)
        return list(self.side.build_orders(step((request, 0, request.num_tokens))).saves)

    def report(self, **parts: Any) -> None:
        known: dict[str, Any] = {"invalid_block_ids": set(), "finished_recving": None, "failed_recving": set()}
        self.side.update(SimpleNamespace(**known | {"kv_connector_worker_meta": None} | parts))

    def lead(self, leader: FakeRequest) -> None:
        """The leader computes and stores; the workers say so."""
        saves = self.compute(leader)
        self.store([save.chunk for save in saves])
        awaited = tuple(leader.request_id for save in saves if save.is_awaited)
        self.report(kv_connector_worker_meta=WorkerNotice(settled=awaited))


MakeWorld = Callable[..., World]


@pytest.fixture
def make_world(service: Service, request: pytest.FixtureRequest) -> Iterator[MakeWorld]:
    worlds: list[World] = []

    def make(**options: Any) -> World:
        worlds.append(World(service, f"{request.node.name} {len(worlds)}", **options))
        return worlds[-1]

    yield make
    for world in worlds:
        world.side.close()


@pytest.fixture
def world(make_world: MakeWorld) -> World:
    return make_world()


def test_a_round_waits_for_all_then_the_shortest_leads_and_the_others_reuse_from_it(world: World) -> None:
    first, second = world.agent(1), world.agent(2)
    assert world.settle_round([first, second]) == [(None, False)] * 2, "one is missing"
    leader = world.agent(0)
    assert world.settle_round([first, second, leader]) == [(None, False), (None, False), (0, False)]
    world.lead(leader)
    run_end = [14 + 26, 17 + 26]
    assert world.settle_round([first, second]) == [(end, True) for end in run_end]
    for request, end in zip((first, second), run_end, strict=True):
        world.allocate(request, end)
    orders = world.side.build_orders(EMPTY)
    assert [order.load.request_id for order in orders.refreshes] == ["request 1", "request 2"]
    assert orders.loads == ()
    assert world.counts.total("members_leading") == 1
    assert world.counts.total("members_reusing") == 2
    assert world.counts.total("lookups") == 3 + 2, "one of each history, one of the round, one of the followers"


def test_what_the_leader_saves_is_its_history_by_chunks_and_its_run_by_segments(world: World) -> None:
    requests = [world.agent(index) for index in range(3)]
    world.settle_round(requests)
    saves = world.compute(requests[0])
    places = [(save.chunk.start, save.chunk.end, save.skip, save.is_awaited) for save in saves]
    assert places == [(0, 8, 0, False), (11, 21, 3, True), (21, 28, 1, True), (28, 37, 0, True), (37, 40, 1, True)]
    asked = RoundRequest.from_params(requests[0].kv_transfer_params, 40)
    wish = world.chains(requests[0]).wish  # type: ignore[union-attr]
    assert asked is not None
    assert wish is not None
    assert saves[1].chunk == segment_chunk(wish.prompt, 1, is_refreshed=False)


def test_an_order_says_what_is_exact_and_all_blocks(world: World) -> None:
    requests = [world.agent(index) for index in range(3)]
    world.settle_round(requests)
    world.lead(requests[0])
    chain = world.chains(requests[1])
    assert chain is not None
    world.store(chain.extend(requests[1].prompt_token_ids))
    again = world.agent(1, expect=0, twin=" again")
    (found,) = world.settle_round([again])
    assert found == (14 + 26, True)
    world.allocate(again, 40)
    (order,) = world.side.build_orders(EMPTY).refreshes
    assert isinstance(order, RefreshOrder)
    assert (order.load.start, order.exact_end, order.load.end) == (0, 12, 40)
    assert [(chunk.start, chunk.end) for chunk in order.load.chunks] == [(0, 8), (8, 12)]
    assert order.load.block_ids == tuple(again.blocks[:10])
    assert order.block_ids == tuple(again.blocks)
    assert world.side.hit_tokens(again) == (38, 0), "two rows of the history are computed"


def test_an_agent_that_never_comes_is_waited_for_no_longer_than_said(make_world: MakeWorld) -> None:
    world = make_world(round_wait_s=2.0)
    first, second = world.agent(0), world.agent(1)
    assert world.settle_round([first, second]) == [(None, False)] * 2
    world.clock.now_s += 2.0
    assert world.settle_round([first, second]) == [(0, False), (None, False)], "one leads, one follows"
    world.lead(first)
    assert world.settle_round([second]) == [(40, True)]
    late = world.agent(2)
    assert world.settle_round([late]) == [(43, True)], "behind its round it reuses by itself"


def test_a_leader_that_is_aborted_or_too_slow_is_not_waited_for(make_world: MakeWorld) -> None:
    world = make_world(leader_wait_s=5.0)
    requests = [world.agent(index) for index in range(3)]
    world.settle_round(requests)
    world.side.ended(requests[0])
    assert world.settle_round(requests[1:]) == [(0, False), (None, False)], "nothing was stored: the next one leads"
    world.lead(requests[1])
    assert world.settle_round(requests[2:]) == [(43, True)], "and what the first one never stored is stored by it"
    slow = make_world(leader_wait_s=5.0)
    requests = [slow.agent(index) for index in range(3)]
    slow.settle_round(requests)
    assert slow.settle_round(requests[1:]) == [(None, False)] * 2
    slow.clock.now_s += 5.0
    assert slow.settle_round(requests[1:]) == [(0, False)] * 2


def test_a_member_that_is_served_without_an_answer_does_not_lead(world: World) -> None:
    requests = [world.agent(index) for index in range(3)]
    tracked = world.side._tracked[requests[0].request_id]
    tracked.is_late = True
    assert world.settle_round(requests[:1]) == [(0, False)]
    assert world.settle_round(requests[1:]) == [(0, False), (None, False)], "the next shortest leads"


def test_a_member_that_the_engine_never_asked_about_does_not_lead(world: World) -> None:
    requests = [world.agent(index) for index in range(3)]
    world.allocate(requests[0], 0)
    assert world.settle_round(requests[1:]) == [(0, False), (None, False)]


def test_a_judge_of_the_round_is_not_waited_for(world: World) -> None:
    world.agent(3, expect=4, modes={"shared": "exact"})
    salted = FakeRequest("salted", prompt_of([1] * 12), kv_transfer_params=words(12, agent="salted", expect=4))
    salted.cache_salt = "mine"
    world.side.on_new_request(salted)
    first, second = world.agent(0, expect=4), world.agent(1, expect=4)
    assert world.settle_round([first, second]) == [(0, False), (None, False)]


def test_what_does_not_fit_is_stored_by_who_computes_it_alone(world: World) -> None:
    requests = [world.agent(index) for index in range(3)]
    world.settle_round(requests)
    world.lead(requests[0])
    turned = SHARED[::-1]
    other = world.agent(7, expect=0, shared=turned)
    assert world.settle_round([other]) == [(0, False)]
    world.clock.now_s += STORING_S
    again = world.agent(8, expect=0, shared=turned)
    assert world.settle_round([again]) == [(0, False)]
    world.lead(again)
    assert world.settle_round([world.agent(9, expect=0, shared=turned)]) == [(38 + 26, True)]


def test_a_reset_leaves_refreshed_blocks_refreshed(world: World) -> None:
    request = world.agent(0)
    world.settle_round([request])
    assert world.side.reset()
    world.chains.reset()
    assert world.ask(request) == (0, False)
    request.blocks = list(range(50, 80))
    world.side.allocated(request, lambda: [request.blocks], 0)
    saves = world.side.build_orders(step((request, 16, request.num_tokens - 16))).saves
    assert [save.chunk.end for save in saves] == [8], "its blocks behind may hold refreshed KV for as long as it lives"


def test_a_pass_under_way_keeps_what_it_was_promised(world: World) -> None:
    requests = [world.agent(index) for index in range(3)]
    world.settle_round(requests)
    world.lead(requests[0])
    world.settle_round(requests[1:2])
    world.allocate(requests[1], 40)
    world.clock.now_s += LEASE_IDLE_S + 1
    world.side.build_orders(EMPTY)
    assert requests[1].request_id in world.side._rounds._members
    assert world.side._rounds._members[requests[1].request_id].ticket is not None


def test_an_agent_that_leaves_before_its_round_is_complete_is_not_waited_for(world: World) -> None:
    requests = [world.agent(index) for index in range(2)]
    world.settle_round(requests)
    world.side.ended(requests[1])
    third = world.agent(2)
    assert world.settle_round([requests[0], third]) == [(0, False), (None, False)]


def test_the_same_agent_twice_and_one_too_many_go_alone_and_are_counted(world: World) -> None:
    world.agent(0)
    twin = world.agent(0, history=20, twin=" again")
    assert world.settle_round([twin]) == [(0, False)]
    assert world.counts.total("round_params_refused") == 1
    world.agent(1), world.agent(2)
    world.agent(3, history=30)
    assert world.counts.total("round_params_refused") == 2


def test_the_next_round_finds_the_segments_by_content_wherever_they_stand(world: World) -> None:
    requests = [world.agent(index) for index in range(3)]
    world.settle_round(requests)
    world.lead(requests[0])
    for request in requests:
        world.side.ended(request)
    later = [world.agent(index, history=50 + index) for index in range(3)]
    for request in later:
        request.kv_transfer_params["kvservice"]["round"] = "r2"  # type: ignore[index]
    assert world.settle_round(later) == [(76 + index, True) for index in range(3)], "nobody needs to lead"


def test_what_was_found_in_another_order_is_computed_rather_than_reused(world: World) -> None:
    requests = [world.agent(index) for index in range(3)]
    world.settle_round(requests)
    world.lead(requests[0])
    other = world.agent(7, expect=0, shared=[SHARED[2], SHARED[0], SHARED[1]])
    assert world.settle_round([other]) == [(0, False)], "two of three stand behind others than when they were made"


def test_leases_last_from_the_promise_to_the_end_of_the_pass_and_no_longer(world: World) -> None:
    requests = [world.agent(index) for index in range(3)]
    world.settle_round(requests)
    world.lead(requests[0])
    world.settle_round(requests[1:])
    for request in requests[1:]:
        world.allocate(request, 40)
    world.side.build_orders(EMPTY)
    session = world.link._session
    assert session is not None
    assert session.leases_held == 1, "one for all followers"
    world.report(finished_recving={"request 1"})
    assert session.leases_held == 1
    world.report(finished_recving={"request 2"})
    for _ in range(1000):
        if not session.leases_held:
            break
        threading.Event().wait(0.001)
    assert session.leases_held == 0
    for request in requests:
        world.side.ended(request)
    assert world.side.leases_held == 0


@pytest.mark.parametrize("is_gone", [False, True])
def test_a_promise_whose_lease_ran_out_is_looked_up_again_before_it_is_taken(world: World, is_gone: bool) -> None:
    requests = [world.agent(index) for index in range(3)]
    world.settle_round(requests)
    world.lead(requests[0])
    assert world.settle_round(requests[1:]) == [(40, True), (43, True)]
    session = world.link._session
    assert session is not None
    session._leases.clear()
    if is_gone:
        with world.open_session(is_writer=True) as other:
            other.delete(wire.DeleteRequest(namespace=world.identity.namespace()))
    found = [(0, False)] * 2 if is_gone else [(40, True), (43, True)]
    assert world.settle_round(requests[1:]) == found


def test_a_pass_that_failed_is_computed_and_never_asked_again(world: World) -> None:
    requests = [world.agent(index) for index in range(3)]
    world.settle_round(requests)
    world.lead(requests[0])
    world.settle_round(requests[1:])
    world.allocate(requests[1], 40)
    world.side.build_orders(EMPTY)
    world.report(invalid_block_ids=set(requests[1].blocks[:1]), finished_recving={"request 1"})
    assert world.side.matched_tokens(requests[1], 0) == (0, False)
    assert world.counts.total("tokens_recomputed") == 40


def test_a_preempted_member_comes_back_alone_and_is_found_again(world: World) -> None:
    requests = [world.agent(index) for index in range(3)]
    world.settle_round(requests)
    world.lead(requests[0])
    world.settle_round(requests[1:])
    world.allocate(requests[1], 40)
    world.side.build_orders(EMPTY)
    world.report(finished_recving={"request 1"})
    requests[1].num_preemptions += 1
    requests[1].outputs += [1, 2, 3]
    assert world.settle_round([requests[1]]) == [(40, True)], "up to its run's end, whatever it has said since"


def test_no_step_orders_more_rows_than_it_may(make_world: MakeWorld) -> None:
    world = make_world(refresh_rows_max=50)
    requests = [world.agent(index) for index in range(3)]
    world.settle_round(requests)
    world.lead(requests[0])
    assert world.settle_round(requests[1:2]) == [(40, True)]
    world.allocate(requests[1], 40)
    assert world.settle_round(requests[2:]) == [(None, False)]
    world.side.build_orders(EMPTY)
    assert world.settle_round(requests[2:]) == [(43, True)]
    large = world.agent(5, expect=0, history=60)
    assert world.settle_round([large]) == [(0, False)], "more than any step may order"


def test_what_nobody_came_back_for_is_let_go_and_found_again(world: World) -> None:
    requests = [world.agent(index) for index in range(3)]
    world.settle_round(requests)
    world.lead(requests[0])
    world.settle_round(requests[1:])
    world.clock.now_s += LEASE_IDLE_S + 1
    world.side.build_orders(EMPTY)
    assert world.side.leases_held == 0
    assert world.settle_round(requests[1:]) == [(40, True), (43, True)]


@pytest.mark.parametrize(
    ("part", "value", "reason"),
    [
        ("lora_request", SimpleNamespace(lora_name="x", lora_int_id=1, lora_path="/nowhere"), ""),
        ("cache_salt", "mine", "cache salt"),
    ],
)
def test_requests_that_a_refresh_would_wrong_get_exact_reuse(
    world: World, caplog: pytest.LogCaptureFixture, part: str, value: object, reason: str
) -> None:
    request = FakeRequest("a", prompt_of([1] * 12), kv_transfer_params=words(12, agent="a", expect=1))
    setattr(request, part, value)
    world.side.on_new_request(request)
    assert world.ask(request) == (0, False)
    assert world.counts.total("members_computing") == 0
    if reason:
        assert reason in caplog.text
        assert world.counts.total("reuse_refused") == 1


def test_an_engine_that_turns_out_to_refuse_serves_later_requests_by_exact_reuse(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.report(kv_connector_worker_meta=WorkerNotice(reuse_refusal="its layers are of another kind"))
    request = world.agent(0)
    assert world.ask(request) == (0, False)
    assert "its layers are of another kind" in caplog.text
    world.allocate(request, 0)
    saves = world.side.build_orders(step((request, 0, request.num_tokens))).saves
    assert [save.chunk.end for save in saves] == [8, 16, 20, 28, 36, 40]


def test_kinds_that_are_exact_are_no_part_of_it(world: World) -> None:
    judge = world.agent(4, modes={"shared": "exact"})
    assert world.ask(judge) == (0, False)
    chain = world.chains(judge)
    assert chain is not None
    assert chain.wish is None
