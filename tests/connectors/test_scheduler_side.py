"""What the scheduler's side promises, orders and lets go, on real lookups; vLLM's objects are small fakes."""

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kvservice.app import Service
from kvservice.client.connectors.breaker import Breaker, BreakerState
from kvservice.client.connectors.vllm.chunks import ChunkChain
from kvservice.client.connectors.vllm.link import Link
from kvservice.client.connectors.vllm.lookups import Lookups
from kvservice.client.connectors.vllm.metadata import IDLE, NOTHING, SaveOrder, WorkerNotice
from kvservice.client.connectors.vllm.metrics import Counts
from kvservice.client.connectors.vllm.options import ConnectorOptions
from kvservice.client.connectors.vllm.request_extras import ExtrasReader
from kvservice.client.connectors.vllm.requests import ChainMaker
from kvservice.client.connectors.vllm.saves import Saves
from kvservice.client.connectors.vllm.scheduler import LEASE_IDLE_S, SchedulerSide
from kvservice.client.session import Session
from kvservice.client.shared_memory import SharedMemoryTransport
from kvservice.model.errors import UnavailableError
from kvservice.model.identity import Identity
from tests.client.builders import make_settings
from tests.connectors.mini_engine import BLOCK, FakeRequest, engine_identity

CHUNK = 8
PROMPT = list(range(1, 31))


class Clock:
    """A clock that a test turns."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with Service(make_settings(tmp_path_factory.mktemp("service"))) as service:
        yield service


@pytest.fixture
def identities(request: pytest.FixtureRequest) -> list[Identity]:
    """Two ranks of a model that no other test has."""
    return [engine_identity(f"{request.node.name} {rank}") for rank in range(2)]


class World:
    """A scheduler's side of an engine with these ranks, and what stores for them."""

    def __init__(self, service: Service, identities: list[Identity], **options: Any) -> None:
        self.identities, self.clock, self.counts = identities, Clock(), Counts()
        self.namespaces = [one.namespace() for one in identities]
        self.address = f"unix:{service.addresses.socket}"
        self.options = ConnectorOptions.of({"address": self.address, "chunk_tokens": CHUNK, **options}, BLOCK)
        self.breaker = Breaker(self.clock, failures_max=2)
        self.link = Link(self.open_session, self.breaker)
        self.lookups = Lookups(self.link, self.namespaces, self.counts, self.clock)
        self.side = SchedulerSide(self.options, BLOCK, self.chain, self.lookups, self.counts, self.clock)

    def open_session(self, *, is_writer: bool = False) -> Session:
        return Session(SharedMemoryTransport(self.address), self.identities, is_writer=is_writer)

    def chain(self, request: Any) -> ChunkChain:
        return ChunkChain(self.namespaces, CHUNK, BLOCK)

    def store(self, tokens: list[int], *, ranks: tuple[int, ...] = (0, 1), tail: int = 0) -> None:
        """Have these ranks store the tokens' chunks."""
        chain = self.chain(None)
        chunks = chain.extend(tokens)
        last = chain.tail(tail)
        for rank in ranks:
            link = Link(lambda: self.open_session(is_writer=True), Breaker(self.clock))
            saves = Saves(link, self.identities[rank], rank, 1 << 20, Counts())
            gathered = saves.begin([SaveOrder("", chunk, ()) for chunk in [*chunks, *([last] if last else [])]])
            assert gathered is not None
            gathered.buffer[:] = 1
            saves.hand_over(gathered)
            saves.close()

    def answer(self, request: FakeRequest, local: int = 0) -> tuple[int | None, bool]:
        """What is promised once the lookup has been answered."""
        for _ in range(2000):
            found = self.side.matched_tokens(request, local)
            if found[0] is not None:
                return found
            threading.Event().wait(0.001)
        raise AssertionError("no answer")

    def node_leases(self) -> int:
        """Leases of ours that the node knows, once it has heard of all releases."""
        return self.link._session.leases_held if self.link._session is not None else 0


@pytest.fixture
def world(service: Service, identities: list[Identity]) -> Iterator[World]:
    world = World(service, identities)
    yield world
    world.side.close()


def settled(condition: Callable[[], bool]) -> bool:
    """True once it holds: another thread is about to make it so."""
    return any(condition() or threading.Event().wait(0.001) for _ in range(3000))


def allocate(world: World, request: FakeRequest, count: int, first_block: int = 50) -> None:
    request.blocks = list(range(first_block, first_block + 20))
    world.side.allocated(request, lambda: [request.blocks], count)


def step(*new: tuple[FakeRequest, int, int]) -> Any:
    """A step in which new requests have so many tokens computed and compute so many more."""
    return SimpleNamespace(
        num_scheduled_tokens={one.request_id: count for one, _, count in new},
        total_num_scheduled_tokens=sum(count for *_, count in new),
        scheduled_new_reqs=[
            SimpleNamespace(req_id=one.request_id, block_ids=(one.blocks,), num_computed_tokens=computed)
            for one, computed, _ in new
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[], resumed_req_ids=set(), new_block_ids=[], num_computed_tokens=[]
        ),
    )


EMPTY = step()


def report(world: World, **parts: Any) -> None:
    known: dict[str, Any] = {"invalid_block_ids": set(), "finished_recving": None, "failed_recving": set()}
    world.side.update(SimpleNamespace(**known | {"kv_connector_worker_meta": None} | parts))


def test_nothing_is_promised_of_an_empty_store(world: World) -> None:
    assert world.answer(FakeRequest("a", PROMPT)) == (0, False)


def test_what_every_rank_holds_is_promised_in_whole_blocks_and_leased(world: World) -> None:
    world.store(PROMPT)
    assert world.answer(FakeRequest("a", PROMPT)) == (24, True)
    assert world.node_leases() == 1


def test_what_one_rank_lacks_is_not_promised(world: World) -> None:
    world.store(PROMPT[:8])
    world.store(PROMPT, ranks=(0,))
    assert world.answer(FakeRequest("a", PROMPT)) == (8, True)


def test_the_prompts_last_whole_blocks_are_found_by_the_same_prompt(world: World) -> None:
    world.store(PROMPT, tail=28)
    assert world.answer(FakeRequest("a", PROMPT)) == (28, True)
    assert world.answer(FakeRequest("b", [*PROMPT, 7, 8, 9, 10, 11])) == (24, True)


def test_one_token_is_always_left_to_compute(world: World) -> None:
    world.store(PROMPT[:16])
    assert world.answer(FakeRequest("a", PROMPT[:16])) == (12, True)


def test_only_what_the_engine_lacks_is_promised_and_loaded(world: World) -> None:
    world.store(PROMPT)
    request = FakeRequest("a", PROMPT)
    assert world.answer(request, local=12) == (12, True)
    allocate(world, request, 12)
    (order,) = world.side.build_orders(EMPTY).loads
    assert (order.start, order.end, order.block_ids) == (12, 24, (53, 54, 55))
    assert [chunk.start for chunk in order.chunks] == [8, 16]
    assert world.answer(FakeRequest("b", PROMPT), local=24) == (0, False)


def test_a_load_in_the_step_is_promised_as_such(service: Service, identities: list[Identity]) -> None:
    world = World(service, identities, is_async=False)
    world.store(PROMPT)
    assert world.answer(FakeRequest("a", PROMPT)) == (24, False)
    world.side.close()


def test_a_slow_service_is_not_waited_for(service: Service, identities: list[Identity]) -> None:
    world, gate = World(service, identities), threading.Event()
    open_session = world.open_session

    def hang() -> Session:
        gate.wait()
        return open_session()

    world.link._open_session = hang
    request = FakeRequest("a", PROMPT)
    world.side.on_new_request(request)
    assert world.side.matched_tokens(request, 0) == (None, False)
    world.clock.now_s += world.options.lookup_deadline_s
    assert world.side.matched_tokens(request, 0) == (0, False)
    assert world.counts.total("lookups_late") == 1
    gate.set()
    assert settled(lambda: world.node_leases() == 0)
    assert world.side.matched_tokens(request, 0) == (0, False), "not asked again before it is preempted"
    world.side.close()


def test_an_open_breaker_means_no_waiting_at_all(service: Service, identities: list[Identity]) -> None:
    world = World(service, identities)

    def refuse() -> Session:
        raise UnavailableError("nobody there")

    world.link._open_session = refuse
    for name in ("a", "b"):
        assert world.answer(FakeRequest(name, PROMPT)) == (0, False)
    assert settled(lambda: world.breaker.state is BreakerState.OPEN)
    assert world.side.matched_tokens(FakeRequest("c", PROMPT), 0) == (0, False)
    world.side.close()


def test_asking_again_costs_no_lookup_and_no_lease(world: World) -> None:
    world.store(PROMPT)
    request = FakeRequest("a", PROMPT)
    for _ in range(5):
        assert world.answer(request) == (24, True)
    assert world.counts.total("lookups") == world.node_leases() == 1


def test_leases_go_when_the_load_ends_not_before(world: World) -> None:
    world.store(PROMPT)
    request = FakeRequest("a", PROMPT)
    world.answer(request)
    allocate(world, request, 24)
    world.side.build_orders(EMPTY)
    report(world)
    world.side.ended(request)
    assert world.side.leases_held == world.node_leases() == 1, "the load still runs"
    report(world, finished_recving={"a"})
    assert world.side.leases_held == 0
    assert settled(lambda: world.node_leases() == 0)


def test_leases_go_when_nothing_is_loaded_or_the_request_ends(world: World) -> None:
    world.store(PROMPT)
    unused, aborted = FakeRequest("a", PROMPT), FakeRequest("b", PROMPT)
    for request in (unused, aborted):
        world.answer(request)
    allocate(world, unused, 0)
    world.side.ended(aborted)
    assert world.side.leases_held == 0
    assert settled(lambda: world.node_leases() == 0)


def test_a_lookup_that_nobody_comes_back_to_is_given_up_and_made_again(world: World) -> None:
    world.store(PROMPT)
    request = FakeRequest("a", PROMPT)
    world.answer(request)
    world.clock.now_s += LEASE_IDLE_S + 1
    world.side.build_orders(EMPTY)
    assert settled(lambda: world.node_leases() == 0)
    assert world.answer(request) == (24, True)
    assert world.counts.total("lookups") == 2


def test_being_told_twice_of_the_blocks_changes_nothing(world: World) -> None:
    world.store(PROMPT)
    request = FakeRequest("a", PROMPT)
    world.answer(request)
    allocate(world, request, 24)
    assert len(world.side.build_orders(EMPTY).loads) == 1
    report(world, finished_recving={"a"})
    allocate(world, request, 0)
    assert world.side.build_orders(EMPTY) is IDLE


@pytest.mark.parametrize(("bad", "failed", "lost"), [({53}, set(), 12), ({50, 51}, set(), 24), (set(), {"a"}, 24)])
def test_a_request_whose_load_failed_is_never_promised_again(
    world: World, bad: set[int], failed: set[str], lost: int
) -> None:
    world.store(PROMPT)
    request = FakeRequest("a", PROMPT)
    world.answer(request)
    allocate(world, request, 24)
    world.side.build_orders(EMPTY)
    report(world, invalid_block_ids=bad, failed_recving=failed, finished_recving={"a"})
    assert world.counts.total("tokens_recomputed") == lost
    assert world.side.matched_tokens(request, 0) == (0, False)
    request.num_preemptions += 1
    assert world.side.matched_tokens(request, 0) == (0, False)
    assert world.answer(FakeRequest("b", PROMPT)) == (24, True), "others may try"
    orders = world.side.build_orders(step((request, 0, 30)))
    first_lost = 24 - lost
    assert [one.chunk.start for one in orders.saves if one.chunk.start < 24] == [
        start for start in (0, 8, 16) if start + 8 > first_lost
    ], "what was computed after all is stored again"


def test_a_load_in_the_step_that_failed_is_not_promised_again(service: Service, identities: list[Identity]) -> None:
    world = World(service, identities, is_async=False)
    world.store(PROMPT)
    request = FakeRequest("a", PROMPT)
    world.answer(request)
    allocate(world, request, 24)
    world.side.build_orders(step((request, 24, 6)))
    report(world, invalid_block_ids={50}, kv_connector_worker_meta=WorkerNotice(loaded=("a",)))
    assert world.side.matched_tokens(request, 0) == (0, False)
    assert world.counts.total("tokens_recomputed") == 24
    assert world.side.leases_held == 0
    world.side.close()


def test_chunks_are_saved_once_they_are_whole_and_only_once(world: World) -> None:
    request, twin = FakeRequest("a", PROMPT), FakeRequest("b", PROMPT)
    for one in (request, twin):
        world.answer(one)
        allocate(world, one, 0)
    orders = world.side.build_orders(step((request, 0, 17)))
    assert [(one.chunk.start, one.chunk.end, one.block_ids) for one in orders.saves] == [
        (0, 8, (50, 51)),
        (8, 16, (52, 53)),
    ]
    assert orders.tokens == 17
    rest = world.side.build_orders(step((request, 17, 13)))
    assert [(one.chunk.start, one.chunk.end) for one in rest.saves] == [(16, 24), (24, 28)]
    assert world.side.build_orders(step((twin, 0, 30))) is NOTHING


def test_what_the_service_holds_is_not_saved_again(world: World) -> None:
    world.store(PROMPT[:16])
    request = FakeRequest("a", PROMPT)
    world.answer(request)
    allocate(world, request, 16)
    orders = world.side.build_orders(step((request, 16, 14)))
    assert [one.chunk.start for one in orders.saves] == [16, 24]


def test_drafted_tokens_are_not_saved(world: World) -> None:
    request = FakeRequest("a", PROMPT[:14])
    world.answer(request)
    allocate(world, request, 0)
    orders = world.side.build_orders(step((request, 0, 20)))
    assert [one.chunk.end for one in orders.saves] == [8, 12]


def test_a_preempted_request_is_looked_up_with_what_it_has_said(world: World) -> None:
    request = FakeRequest("a", PROMPT[:15])
    assert world.answer(request) == (0, False)
    allocate(world, request, 0)
    request.outputs += PROMPT[15:]
    world.store(PROMPT)
    request.num_preemptions += 1
    assert world.answer(request) == (24, True)


def test_empty_steps_make_nothing(world: World) -> None:
    world.side.on_new_request(FakeRequest("a", PROMPT))
    assert world.side.build_orders(EMPTY) is IDLE


def test_a_workers_refusal_ends_promises_and_saves(world: World) -> None:
    world.store(PROMPT)
    known, request = FakeRequest("a", PROMPT), FakeRequest("b", PROMPT)
    world.answer(known)
    report(world, kv_connector_worker_meta=WorkerNotice(refusal="unknown layout"))
    assert world.side.matched_tokens(known, 0) == (0, False)
    assert world.side.matched_tokens(request, 0) == (0, False)
    allocate(world, known, 0)
    assert world.side.build_orders(step((known, 0, 30))) is NOTHING or not world.side.build_orders(EMPTY).saves


def test_a_hook_that_broke_still_ends_the_load(world: World) -> None:
    world.side.order_failure("a", 24)
    (order,) = world.side.build_orders(EMPTY).loads
    assert (order.request_id, order.chunks, order.block_ids) == ("a", (), ())


def test_segment_boundaries_of_a_request_cut_its_chunks(world: World) -> None:
    world.side._make_chain = ChainMaker(world.namespaces, CHUNK, BLOCK, ExtrasReader({}), world.counts)
    words = {"kvservice": {"segments": [["private", 12], ["shared", 18]]}}
    request = FakeRequest("a", PROMPT, kv_transfer_params=words)
    world.answer(request)
    allocate(world, request, 0)
    orders = world.side.build_orders(step((request, 0, 30)))
    assert [one.chunk.end for one in orders.saves] == [8, 12, 20, 28]


def test_a_service_that_was_restarted_is_asked_again(world: World) -> None:
    world.store(PROMPT)
    request = FakeRequest("a", PROMPT)
    world.answer(request)
    assert world.link._session is not None
    world.link._session._leases.clear()  # as its keeper does when the node knows the session no more
    assert world.side.matched_tokens(request, 0) == (None, False)
    assert world.answer(request) == (24, True)


@pytest.mark.parametrize(("least", "promised"), [(16, 16), (17, 0)])
def test_fewer_tokens_than_are_worth_a_load_are_not_promised(
    service: Service, identities: list[Identity], least: int, promised: int
) -> None:
    world = World(service, identities, load_tokens_min=least)
    request = FakeRequest("a", PROMPT)
    world.store(PROMPT)
    assert world.answer(request, local=8) == (promised, promised > 0)
    allocate(world, request, promised)
    world.side.ended(request)
    world.side.close()
