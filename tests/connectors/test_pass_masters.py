"""Masters of a promised round that others want gone: leased they stay, bit for bit; gone, their rows are computed.

One node in this process whose arena another writer fills until everything goes that may; the order of eviction is LRU,
so that without a lease a master is the first of all.
"""

import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kvservice.app import LocalNode
from kvservice.client import Client, PartKind, RoundPrompt
from kvservice.client.connectors.breaker import Breaker
from kvservice.client.connectors.vllm.link import Link
from kvservice.client.connectors.vllm.lookups import Lookups, RoundTicket
from kvservice.client.connectors.vllm.metadata import RefreshOrder
from kvservice.client.in_process import InProcessTransport
from kvservice.client.plans import look_up
from kvservice.client.session import Session
from kvservice.model.identity import Identity
from kvservice.node import Node
from kvservice.storage.record import RecordReader
from tests.client.builders import ARENA_BYTES, Engine, make_identity, make_settings, make_tokens
from tests.connectors.test_mini_engine import wait_for
from tests.connectors.test_passes import GEOMETRY, SHARED, World

FILLER_TOKENS = 1500
FILLERS = 2 * ARENA_BYTES // (FILLER_TOKENS * GEOMETRY.token_bytes)
"""So many fill the arena twice."""
RUN = (1, 2)
"""Indices of the shared segments."""


class CrowdedWorld(World):
    """A pass's world whose node is in this process, beside a writer that needs all of it."""

    def __init__(self, node: LocalNode, identity: Identity) -> None:
        self.node = node
        super().__init__(SimpleNamespace(addresses=SimpleNamespace(socket="")), identity)  # type: ignore[arg-type]
        self.lookups = Lookups(Link(self.open_session, Breaker(lambda: 0.0)), [identity.namespace()], self.counts)
        self.filler = make_identity(GEOMETRY, model="filler")
        self.fillings = 0

    def open_session(self, *, is_writer: bool = False) -> Session:
        return Session(InProcessTransport(self.node), [self.identity], is_writer=is_writer)

    def promise(self) -> RoundTicket:
        """What the scheduler's side has looked up and holds until the pass is over."""
        ticket = self.lookups.ask_round(self.prompts)
        assert wait_for(lambda: ticket.is_answered)
        assert ticket.plans is not None
        assert all(plan.plan.segments[index].is_hit for plan in ticket.plans for index in RUN)
        return ticket

    def fill(self) -> None:
        """Another program stores more than the arena holds, twice."""
        before = self.evictions()
        engine = Engine(GEOMETRY, blocks=FILLER_TOKENS // 4)
        slots = engine.allocate(FILLER_TOKENS)
        with Client.in_process(self.node, self.filler) as client:
            for _ in range(FILLERS):
                self.fillings += 1
                tokens = make_tokens(FILLER_TOKENS, seed=self.fillings)
                prompt = RoundPrompt.from_parts(client.namespace, [(PartKind.SYSTEM, tokens)])
                result = client.store(prompt, engine.planes, slots)
                assert result.stored_bytes > 0, result
        assert self.evictions() - before >= FILLERS // 2

    def evictions(self) -> int:
        return self.node.on_loop(lambda node: node.counters.host_evictions.caches)

    def delete_masters(self) -> None:
        with Client.in_process(self.node, self.identity) as client:
            assert client.delete([self.leader.key(index) for index in RUN]) == len(RUN)

    def is_found(self) -> list[bool]:
        with self.open_session() as session, look_up(session, [self.leader]) as plans:
            return [plans[0].plan.segments[index].is_hit for index in RUN]

    def orders(self) -> list[RefreshOrder]:
        return [self.order(0, first_block=0), self.order(1, first_block=8)]

    def run_late(self) -> None:
        """The pass of what was promised: every row is the master's, moved, or computed where it stands."""
        orders = self.orders()
        assert [one.is_failed for one in self.run(*orders)] == [False, False]
        assert [self.wrong_values(order) for order in orders] == [0, 0]

    def in_the_middle(self, hook: Callable[[], None]) -> None:
        """Do it when the next pass has looked up and leased, and has not read a byte yet."""
        self.paged.fence = lambda: hook  # type: ignore[method-assign]

    def close(self) -> None:
        self.lookups.close()
        super().close()


@pytest.fixture
def world(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[CrowdedWorld]:
    with LocalNode(make_settings(tmp_path, eviction="lru")) as node:
        world = CrowdedWorld(node, make_identity(GEOMETRY, model=request.node.name))
        yield world
        world.close()


def test_nobody_may_evict_what_is_promised_and_afterwards_it_goes(world: CrowdedWorld) -> None:
    ticket = world.promise()
    world.fill()
    assert world.is_found() == [True, True]
    world.run_late()
    assert world.counts.total("rows_computed") == sum(order.prompt.segments[0].end for order in world.orders())
    assert world.counts.total("rows_restored") > sum(SHARED)
    assert wait_for(lambda: world.counts.total("mirrors_saved") == 2 * len(RUN))
    world.lookups.give_up(ticket)
    assert wait_for(lambda: world.node.on_loop(lambda node: not node.leases.live))
    world.fill()
    assert world.is_found() == [False, False]


def test_without_a_promise_it_would_have_gone(world: CrowdedWorld) -> None:
    world.fill()
    assert world.is_found() == [False, False]


def test_bytes_of_a_promise_stay_when_they_are_deleted_and_a_later_pass_computes(world: CrowdedWorld) -> None:
    """Deleted is not found again, by no pass either; whoever reads it under a lease reads what was there."""
    ticket = world.promise()
    assert ticket.plans is not None
    places = [ticket.plans[0].plan.segments[index].record for index in RUN]
    world.delete_masters()
    world.fill()
    session = ticket._session
    assert session is not None
    for place in places:
        assert place is not None
        RecordReader(session.read_view(place)).verify()
    world.run_late()
    assert world.counts.total("rows_computed") == sum(order.load.end for order in world.orders())
    assert world.counts.total("rows_restored") == 0


def test_a_pass_restores_what_is_deleted_and_crowded_out_after_it_has_leased_it(world: CrowdedWorld) -> None:
    def crowd() -> None:
        world.delete_masters()
        world.fill()

    world.in_the_middle(crowd)
    world.run_late()
    assert world.counts.total("rows_computed") == sum(order.prompt.segments[0].end for order in world.orders())
    assert world.counts.total("rows_restored") > sum(SHARED)
    assert wait_for(lambda: world.counts.total("mirrors_whole") == len(RUN) * len(world.orders()))
    assert world.counts.total("saves_dropped") == world.counts.total("saves_refused") == 0
    assert world.is_found() == [True, True], "what the pass has made of it is stored whole"


def expire(node: Node) -> None:
    node.leases.expire(math.inf)


def test_a_promise_that_ran_out_before_the_pass_costs_a_prefill_and_no_bit(world: CrowdedWorld) -> None:
    world.promise()
    world.node.on_loop(expire)
    world.fill()
    assert world.is_found() == [False, False]
    world.run_late()
    assert world.counts.total("rows_restored") == 0


@pytest.mark.parametrize("is_noticed", [True, False], ids=["noticed", "not noticed"])
def test_a_lease_that_runs_out_while_the_pass_reads_fails_it_whatever_was_read(
    world: CrowdedWorld, is_noticed: bool
) -> None:
    """``is_noticed``: the client's clock knows it. Where it does not, the bytes have other checksums by then."""

    def lose() -> None:
        world.node.on_loop(expire)
        if is_noticed:
            session = world.link._session
            assert session is not None
            session._leases.clear()
        world.fill()

    world.in_the_middle(lose)
    assert [one.is_failed for one in world.run(*world.orders())] == [True, True]
    assert world.counts.total("passes_failed") == 1
    assert world.counts.total("hook_errors") == 0


def test_fillers_do_not_stop_for_a_pass(world: CrowdedWorld) -> None:
    """Both at once, for as long as it takes: whatever goes when, no row is wrong."""
    is_over = threading.Event()
    ticket = world.promise()

    def crowd() -> None:
        while not is_over.is_set():
            world.fill()

    thread = threading.Thread(target=crowd)
    thread.start()
    try:
        for _ in range(5):
            world.run_late()
            for cache in world.paged.caches:
                cache.copy_(torch.full_like(cache, 7))
    finally:
        is_over.set()
        thread.join()
    world.lookups.give_up(ticket)
