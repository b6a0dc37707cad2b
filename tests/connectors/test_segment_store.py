"""Segments that a pass has brought in part: stored as what differs, whoever made their rows, restored exactly."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from kvservice.app import Service
from kvservice.client.connectors.breaker import Breaker
from kvservice.client.connectors.vllm.link import Link
from kvservice.client.connectors.vllm.members import segment_chunk
from kvservice.client.connectors.vllm.metadata import LoadOrder, RefreshOrder, SaveOrder
from kvservice.client.connectors.vllm.metrics import Counts
from kvservice.client.connectors.vllm.saves import Saves
from kvservice.client.plans import look_up
from kvservice.client.reuse.engine import Rows
from kvservice.client.rounds import PartKind, ReusePolicy, RoundPrompt
from kvservice.model.plan import Match
from tests.client.builders import make_identity, make_settings
from tests.connectors.packed_engine import BLOCK_SIZE
from tests.connectors.test_mini_engine import wait_for
from tests.connectors.test_passes import GEOMETRY, World

HISTORY = 20
FIRST, LAST = 1, 2
"""Indices of the two shared segments."""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with Service(make_settings(tmp_path_factory.mktemp("service"))) as service:
        yield service


@pytest.fixture
def world(service: Service, request: pytest.FixtureRequest) -> Iterator[World]:
    world = World(service, make_identity(GEOMETRY, model=request.node.name))
    yield world
    world.close()


def prompt_to_the_end(world: World) -> RoundPrompt:
    """A history, and the leader's run, with which it ends."""
    run = [(PartKind.SHARED, segment.tokens) for segment in world.leader.segments[1:3]]
    parts = [(PartKind.PRIVATE, list(range(3000, 3000 + HISTORY))), *run]
    return RoundPrompt.from_parts(world.identity.namespace(), parts, policy=ReusePolicy("hkvd:0.1", 1))


def order_of(prompt: RoundPrompt, start: int, end: int) -> RefreshOrder:
    blocks = tuple(range(-(-prompt.token_count // BLOCK_SIZE)))
    load = LoadOrder("reader", start, end, (), blocks[start // BLOCK_SIZE :], is_async=True)
    return RefreshOrder(load, start, blocks, prompt)


def compute(world: World, order: RefreshOrder, start: int, end: int, seed: int) -> None:
    """The engine computes rows by itself: other bits than any master's."""
    slots = world.paged.place(order.block_ids, 0, order.prompt.token_count).slots[start:end]
    rows = Rows(torch.arange(start, end), slots, torch.zeros_like(slots), ())
    for layer in range(GEOMETRY.layers):
        planes = world.engine.probe(layer, torch.full((end - start, 1), seed), rows)
        world.engine.write_rows(layer, slots, planes)


def save(world: World, order: RefreshOrder, index: int) -> Counts:
    """As the worker does once all rows are there."""
    counts, prompt = Counts(), order.prompt
    chunk = segment_chunk(prompt, index, is_refreshed=True)
    first = chunk.start // BLOCK_SIZE
    blocks, skip = order.block_ids[first : -(-chunk.end // BLOCK_SIZE)], chunk.start % BLOCK_SIZE
    link = Link(lambda: world.open_session(is_writer=True), Breaker(lambda: 0.0))
    saves = Saves(link, world.identity, 0, 1 << 26, counts)
    gathered = saves.begin([SaveOrder("reader", chunk, blocks, skip, prompt=prompt, index=index)])
    assert gathered is not None
    place = world.paged.place(blocks, skip, chunk.tokens)
    for layer in range(GEOMETRY.layers):
        world.paged.gather(layer, place, gathered.planes[layer])
    saves.hand_over(gathered)
    assert wait_for(lambda: not saves.bytes_waiting)
    saves.close()
    return counts


def rows_of(world: World, order: RefreshOrder, index: int) -> list[np.ndarray]:
    slots = world.paged.place(order.block_ids, 0, order.prompt.token_count).slots
    segment = order.prompt.segments[index]
    return [plane.numpy() for layer in world.packed.rows(slots[segment.position : segment.end]) for plane in layer]


def assert_restored(world: World, order: RefreshOrder, index: int) -> None:
    """Asked again, the segment is found under its own key; a pass brings the very bits that the engine had."""
    wanted = rows_of(world, order, index)
    with world.link.session() as session, look_up(session, [order.prompt]) as plans:
        assert plans[0].plan.segments[index].match is Match.REFRESHED
    for cache in world.paged.caches:
        cache.zero_()
    again = order_of(order.prompt, 0, order.prompt.segments[index].end)
    assert not world.run(again)[0].is_failed
    assert all(map(np.array_equal, rows_of(world, again, index), wanted))


def test_where_the_engine_computed_the_last_row_only_few_rows_differ(world: World) -> None:
    prompt = prompt_to_the_end(world)
    order = order_of(prompt, 0, prompt.token_count - 1)
    assert not world.run(order)[0].is_failed
    compute(world, order, prompt.token_count - 1, prompt.token_count, seed=1)
    counts = save(world, order, LAST)
    assert (counts.total("mirrors_saved"), counts.total("chunks_saved")) == (1, 0)
    assert counts.total("mirror_bytes_dense") > 2 * counts.total("mirror_bytes_saved")
    assert_restored(world, order, LAST)


def test_rows_that_the_engine_had_are_compared_like_all_others(world: World) -> None:
    prompt, local = prompt_to_the_end(world), 2 * BLOCK_SIZE
    order = order_of(prompt, local, prompt.token_count - 1)
    assert HISTORY < local < prompt.segments[FIRST].end
    compute(world, order, 0, local, seed=2)
    assert not world.run(order)[0].is_failed
    before = rows_of(world, order, FIRST)
    counts = save(world, order, FIRST)
    assert counts.total("mirrors_saved") + counts.total("chunks_saved") == 1, "12 of 18 rows may be too many"
    assert all(map(np.array_equal, rows_of(world, order, FIRST), before))
    assert_restored(world, order, FIRST)


def test_where_the_engine_had_the_masters_own_rows_they_are_no_difference(world: World) -> None:
    """Its rows came from the same master an hour ago: equal bits are clean, wherever they came from."""
    prompt, local = prompt_to_the_end(world), 2 * BLOCK_SIZE
    whole = order_of(prompt, 0, prompt.token_count - 1)
    assert not world.run(whole)[0].is_failed
    assert wait_for(lambda: world.counts.total("mirrors_saved") == 1), "the pass itself stores it"
    assert save(world, whole, FIRST).total("chunks_existed") == 1
    rival = RoundPrompt(prompt.namespace, prompt.segments, ReusePolicy("hkvd:0.2", 1))
    again = order_of(rival, local, rival.token_count - 1)
    assert not world.run(again)[0].is_failed
    counts = save(world, again, FIRST)
    assert counts.total("mirrors_saved") == 1
    assert counts.total("mirror_bytes_dense") > counts.total("mirror_bytes_saved") * 1.5
    assert_restored(world, again, FIRST)
