"""Passes on a real service, with an engine whose fresh rows are digests of what they stand for."""

import hashlib
import threading
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from kvservice.app import Service
from kvservice.client.connectors.breaker import Breaker, BreakerState
from kvservice.client.connectors.vllm.chunks import Chunk, ChunkChain
from kvservice.client.connectors.vllm.link import Link
from kvservice.client.connectors.vllm.loads import Loads
from kvservice.client.connectors.vllm.members import segment_chunk
from kvservice.client.connectors.vllm.metadata import LoadOrder, RefreshOrder, SaveOrder
from kvservice.client.connectors.vllm.metrics import Counts
from kvservice.client.connectors.vllm.paged import EnginePaged
from kvservice.client.connectors.vllm.passes import Ended, Passes
from kvservice.client.connectors.vllm.saves import Saves
from kvservice.client.connectors.vllm.staging import Staging
from kvservice.client.connectors.vllm.warm_up import warm_up
from kvservice.client.reuse.engine import Planes, Rows
from kvservice.client.rounds import PartKind, ReusePolicy, RoundPrompt
from kvservice.client.session import Session
from kvservice.client.shared_memory import SharedMemoryTransport
from kvservice.model.errors import KVServiceError
from kvservice.model.identity import Identity
from tests.client.builders import make_identity, make_settings
from tests.connectors.packed_engine import BLOCK_SIZE, GEOMETRIES, PackedEngine, all_rows, make_plain

GEOMETRY = GEOMETRIES["gqa-bf16"]
HISTORIES, SHARED, TAIL = (20, 33), (18, 25), 3
CHUNK = 16


class DigestEngine:
    """Fresh rows are digests of prompt, layer, position and token; a layer may raise, or take its time."""

    def __init__(self, paged: EnginePaged) -> None:
        self.paged = paged
        self.is_running = False
        self.fails_at: int | None = None
        self.calls: list[int] = []
        self.written: list[Tensor] = []

    @property
    def layers(self) -> int:
        return GEOMETRY.layers

    def embed(self, tokens: Tensor) -> Tensor:
        return tokens[:, None].clone()

    def probe(self, layer: int, hidden: Tensor, rows: Rows) -> Planes:
        plane = GEOMETRY.planes[0]
        found = []
        for place in range(2):
            values = [
                _digest_row(f"{layer} {place} {at} {token}", plane.row_elements)
                for at, token in zip(rows.positions.tolist(), hidden[:, 0].tolist(), strict=True)
            ]
            found.append(torch.stack(values).view(-1, plane.heads, plane.head_size))
        return tuple(found)

    def run_layer(self, layer: int, hidden: Tensor, rows: Rows, is_written: Tensor) -> Tensor:
        self.calls.append(layer)
        if layer == self.fails_at:
            raise RuntimeError("planted by the test")
        planes = self.probe(layer, hidden, rows)
        self.written.append(rows.slots[is_written])
        self.write_rows(layer, rows.slots[is_written], tuple(plane[is_written] for plane in planes))
        return hidden

    def read_rows(self, layer: int, slots: Tensor) -> Planes:
        plane = GEOMETRY.planes[0]
        found = torch.empty((2, len(slots), plane.row_elements), dtype=torch.bfloat16)
        self.paged.gather(layer, _place(slots), [found[0], found[1]])
        return tuple(one.view(-1, plane.heads, plane.head_size) for one in found)

    def write_rows(self, layer: int, slots: Tensor, planes: Planes) -> None:
        self.paged.scatter(layer, _place(slots), [plane.flatten(1).contiguous() for plane in planes])


def _place(slots: Tensor):  # type: ignore[no-untyped-def]
    from kvservice.client.connectors.vllm.paged import Place

    return Place(slots.contiguous())


def _digest_row(content: str, elements: int) -> Tensor:
    raw = np.frombuffer(hashlib.shake_128(content.encode()).digest(elements), np.uint8)
    return torch.from_numpy(raw.astype(np.float32) / 64 - 2).to(torch.bfloat16)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with Service(make_settings(tmp_path_factory.mktemp("service"))) as service:
        yield service


class World:
    """An engine with packed blocks, the passes of its worker, and two agents whose shared run a leader has stored."""

    def __init__(self, service: Service, identity: Identity, **options: float) -> None:
        self.identity, self.counts = identity, Counts()
        self.address = f"unix:{service.addresses.socket}"
        self.packed = PackedEngine(make_plain(GEOMETRY), "amx")
        self.paged = self.packed.paged
        self.engine = DigestEngine(self.paged)
        self.staging = Staging(64 << 20)
        self.link = Link(lambda: self.open_session(is_writer=True), Breaker(lambda: 0.0, failures_max=2))
        self.loads = Loads(Link(self.open_session, Breaker(lambda: 0.0)), identity, 0, self.paged, 10.0, self.counts)
        self.passes = Passes(
            self.link,
            identity,
            self.paged,
            self.loads,
            lambda: self.engine,
            self.staging,
            self.counts,
            deadline_s=options.get("deadline_s", 10.0),
        )
        run = [list(range(500 + 100 * index, 500 + 100 * index + tokens)) for index, tokens in enumerate(SHARED)]
        self.prompts = [
            self.prompt(list(range(1000 * (index + 1), 1000 * (index + 1) + tokens)), run)
            for index, tokens in enumerate(HISTORIES)
        ]
        self.leader = self.prompt(list(range(9000, 9011)), run)
        self.store_exact(self.leader, (1, 2))

    def open_session(self, *, is_writer: bool = False) -> Session:
        return Session(SharedMemoryTransport(self.address), [self.identity], is_writer=is_writer)

    def prompt(self, history: list[int], run: list[list[int]]) -> RoundPrompt:
        parts = [(PartKind.PRIVATE, history), *((PartKind.SHARED, one) for one in run), (PartKind.PRIVATE, [7] * TAIL)]
        policy = ReusePolicy("hkvd:0.1", 1)
        return RoundPrompt.from_parts(self.identity.namespace(), parts, policy=policy)

    def store_exact(self, prompt: RoundPrompt, indices: Sequence[int]) -> None:
        """As the engine would have computed them: digests."""
        self._store(prompt, [segment_chunk(prompt, index, is_refreshed=False) for index in indices])

    def store_history(self, prompt: RoundPrompt, tokens: int) -> tuple:  # type: ignore[type-arg]
        chain = ChunkChain([self.identity.namespace()], CHUNK, BLOCK_SIZE)
        chunks = tuple(chain.extend(prompt.tokens[:tokens]))
        self._store(prompt, chunks)
        return chunks

    def saves(self) -> Saves:
        link = Link(lambda: self.open_session(is_writer=True), Breaker(lambda: 0.0))
        return Saves(link, self.identity, 0, 1 << 26, Counts())

    def _store(self, prompt: RoundPrompt, chunks: Sequence[Chunk]) -> None:
        saves = self.saves()
        gathered = saves.begin([SaveOrder("", one, ()) for one in chunks])
        assert gathered is not None
        for draft in gathered.drafts:
            start, end = draft.order.chunk.start, draft.order.chunk.end
            rows = Rows.at(torch.arange(start, end), torch.arange(end))
            for layer in range(GEOMETRY.layers):
                planes = self.engine.probe(layer, torch.tensor(prompt.tokens[start:end])[:, None], rows)
                for target, plane in zip(draft.planes[layer], planes, strict=True):
                    target[:] = plane.flatten(1).view(torch.int16).numpy().view(np.uint16)
        saves.hand_over(gathered)
        saves.close()

    def order(self, index: int, *, first_block: int, chunks: tuple = (), exact_end: int = 0) -> RefreshOrder:  # type: ignore[type-arg]
        prompt = self.prompts[index]
        end = prompt.token_count - TAIL
        blocks = tuple(range(first_block, first_block + -(-end // BLOCK_SIZE)))[::-1]
        load = LoadOrder(f"request {index}", 0, end, chunks, blocks, is_async=True)
        return RefreshOrder(load, exact_end, blocks, prompt, "round")

    def run(self, *orders: RefreshOrder, budget_s: float = 1.0) -> list[Ended]:
        self.passes.begin(orders)
        ended: list[Ended] = []
        for _ in range(5000):
            self.passes.advance(budget_s, 0.005)
            ended += self.passes.take()
            if len(ended) == len(orders):
                return ended
        raise AssertionError("the pass does not end")

    def rows(self, order: RefreshOrder) -> list[list[Tensor]]:
        slots = self.paged.place(order.block_ids, 0, order.load.end).slots
        return self.packed.rows(slots)

    def wrong_values(self, order: RefreshOrder) -> int:
        """Rows of V that are neither computed where they stand nor, in the shared run, the leader's own."""
        history, shift = order.prompt.segments[0].end, order.prompt.segments[0].end - self.leader.segments[0].end
        tokens = torch.tensor(order.prompt.tokens[: order.load.end])[:, None]
        wrong = 0
        for layer, (_, values) in enumerate(self.rows(order)):
            fresh, theirs = (
                self.engine.probe(layer, tokens, Rows(torch.arange(len(tokens)) - by, tokens, tokens, ()))[1]
                for by in (0, shift)
            )
            for at, row in enumerate(values.view(torch.bfloat16)):
                is_right = torch.equal(row, fresh[at]) or (at >= history and torch.equal(row, theirs[at]))
                wrong += not is_right
        return wrong

    def close(self) -> None:
        self.passes.close()
        self.loads.close()


@pytest.fixture
def world(service: Service, request: pytest.FixtureRequest) -> Iterator[World]:
    world = World(service, make_identity(GEOMETRY, model=request.node.name))
    yield world
    world.close()


def test_all_prompts_go_through_one_pass_and_every_row_is_what_it_should_be(world: World) -> None:
    orders = [world.order(0, first_block=0), world.order(1, first_block=8)]
    assert [one.is_failed for one in world.run(*orders)] == [False, False]
    assert world.engine.calls == [0, 1, 2], "one call a layer for all"
    refreshed = sum(max(int(0.1 * sum(SHARED)), 1) for _ in orders)
    assert world.counts.total("rows_refreshed") == refreshed
    assert world.counts.total("rows_computed") == sum(HISTORIES)
    assert world.counts.total("rows_restored") == 2 * sum(SHARED) - refreshed
    for order in orders:
        assert world.wrong_values(order) == 0


def test_what_was_refreshed_is_stored_as_mirrors_and_restored_bit_by_bit(world: World) -> None:
    first = world.order(0, first_block=0)
    world.run(first)
    before = world.rows(first)
    for _ in range(2000):
        if world.counts.total("mirrors_saved") == len(SHARED):
            break
        threading.Event().wait(0.005)
    assert world.counts.total("mirrors_saved") == len(SHARED)
    assert world.counts.total("mirror_bytes_dense") > 2 * world.counts.total("mirror_bytes_saved")
    again = world.order(0, first_block=8)
    world.run(again)
    history = again.prompt.segments[0].end
    for planes, others in zip(before, world.rows(again), strict=True):
        for one, other in zip(planes, others, strict=True):
            assert torch.equal(one[history:].view(torch.int16), other[history:].view(torch.int16))
    assert world.counts.total("mirrors_saved") == len(SHARED), "held already"
    assert world.staging.used_bytes == 0


def test_exact_history_is_loaded_and_not_computed(world: World) -> None:
    chunks = world.store_history(world.prompts[1], 32)
    order = world.order(1, first_block=0, chunks=chunks, exact_end=32)
    world.run(order)
    assert world.counts.total("rows_computed") == 1
    assert world.counts.total("tokens_loaded") == 32


def test_rows_that_the_engine_has_are_not_touched(world: World) -> None:
    local = 2 * BLOCK_SIZE
    order = world.order(1, first_block=0)
    load = order.load
    shared = RefreshOrder(
        LoadOrder(load.request_id, local, load.end, (), load.block_ids[2:], is_async=True),
        local,
        order.block_ids,
        order.prompt,
    )
    before = [[plane[:local].clone() for plane in planes] for planes in world.rows(order)]
    world.run(shared)
    for planes, others in zip(before, world.rows(order), strict=True):
        for one, other in zip(planes, others, strict=True):
            assert torch.equal(one.view(torch.int16), other[:local].view(torch.int16))
    assert world.counts.total("rows_computed") == 1


@pytest.mark.parametrize("layer", range(GEOMETRY.layers))
def test_a_pass_that_raises_fails_all_its_prompts_once_and_leaves_no_lease(world: World, layer: int) -> None:
    world.engine.fails_at = layer
    ended = world.run(world.order(0, first_block=0), world.order(1, first_block=8))
    assert [one.is_failed for one in ended] == [True, True]
    assert world.counts.total("passes_failed") == 1
    session = world.link._session
    assert session is not None
    assert session.leases_held == 0
    world.engine.fails_at = None
    assert not world.run(world.order(0, first_block=0))[0].is_failed, "the next one does better"


def test_an_engine_without_layers_fails_every_pass_and_says_why_once(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    class NoLayersError(KVServiceError):
        code = "NO_REFRESH"

    def refuse() -> DigestEngine:
        raise NoLayersError("its layers are of another kind")

    world.passes._make_engine = refuse
    assert world.run(world.order(0, first_block=0))[0].is_failed
    assert world.passes.refusal == "its layers are of another kind"
    assert world.run(world.order(1, first_block=8))[0].is_failed
    assert caplog.text.count("its layers are of another kind") == 1


def test_slices_end_after_a_layer_when_there_is_no_time(world: World) -> None:
    world.passes.begin([world.order(0, first_block=0)])
    seen: list[int] = []
    for _ in range(5000):
        before = len(world.engine.calls)
        world.passes.advance(0.0, 0.005)
        seen.append(len(world.engine.calls) - before)
        if world.passes.take():
            break
    assert max(seen) == 1
    assert sum(seen) == GEOMETRY.layers


def test_passes_that_succeed_are_heard_of_by_the_breaker(world: World) -> None:
    for index in range(4):
        world.engine.fails_at = None
        world.run(world.order(index % 2, first_block=0))
        world.link.breaker.failed()  # one of two in a row
    assert world.link.breaker.state is not BreakerState.OPEN


def test_without_a_service_a_pass_fails_at_once(service: Service, request: pytest.FixtureRequest) -> None:
    world = World(service, make_identity(GEOMETRY, model=request.node.name))
    world.address = "unix:/tmp/nobody-is-there.sock"
    ended = world.run(world.order(0, first_block=0))
    assert ended[0].is_failed
    world.close()


def test_a_dry_run_touches_nothing_of_the_engine(world: World) -> None:
    before = world.packed.memory.clone()
    warm_up(world.paged, world.identity)
    assert torch.equal(before.view(torch.int16), world.packed.memory.view(torch.int16))
    assert len(all_rows(world.packed)) == GEOMETRY.layers
