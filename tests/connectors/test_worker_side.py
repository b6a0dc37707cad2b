"""What the worker's side writes to and takes from an engine's blocks, with a real service and a fake engine."""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kvservice.app import Service
from kvservice.client.connectors.vllm.chunks import Chunk, ChunkChain
from kvservice.client.connectors.vllm.lookups import query
from kvservice.client.connectors.vllm.metadata import LoadOrder, SaveOrder, StepOrders
from kvservice.client.connectors.vllm.records import ChunkReader
from kvservice.kernels.cpu_int8 import round_rows
from kvservice.model.errors import CorruptError
from kvservice.storage.record_header import MAGIC
from kvservice.wire.v1 import cache_pb2 as wire
from tests.client.builders import make_settings
from tests.connectors.mini_engine import (
    BLOCK,
    GEOMETRY,
    HEAD_SIZE,
    LAYERS,
    NAMES,
    Bits,
    FakePaged,
    Sides,
    engine_identity,
)

TOKENS = list(range(1, 25))
BLOCKS = 32
FROM = (3, 9, 4, 20, 11, 7)
TO = (21, 2, 13, 5, 30, 8)
EVERY = tuple(range(6))


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with Service(make_settings(tmp_path_factory.mktemp("service"))) as service:
        yield service


class World:
    """Two engines of one model: what the first saves the second loads."""

    def __init__(self, address: str, name: str, **options: Any) -> None:
        self.identity = replace(engine_identity(name), lossy=options.get("lossy", ""))
        self.chunks = ChunkChain([self.identity.namespace()], 8, BLOCK).extend(TOKENS)
        self.first, self.second = FakePaged(BLOCKS, 1), FakePaged(BLOCKS, 2)
        self.saver = Sides(address, self.first, identity=self.identity, **options)
        self.loader = Sides(address, self.second, identity=self.identity, **options)

    def close(self) -> None:
        for sides in (self.saver, self.loader):
            sides.close()

    def save(self, chunks: Sequence[Chunk] | None = None, *, is_flushed: bool = True) -> None:
        """Have chunks saved from blocks FROM, as a step of the engine does."""
        orders = tuple(
            SaveOrder("a", chunk, FROM[chunk.start // BLOCK : chunk.end // BLOCK]) for chunk in chunks or self.chunks
        )
        worker = self.saver.worker
        worker.bind(StepOrders((), orders, 24))
        for name in NAMES[:-1]:  # an engine whose last layer has no hook
            worker.save_layer(name)
        worker.finish_saves()
        if is_flushed:
            assert settled(lambda: self.saver.saves.bytes_waiting == 0)

    def order(self, *, start: int = 0, end: int = 24, is_async: bool = True) -> LoadOrder:
        chunks = tuple(chunk for chunk in self.chunks if chunk.end > start and chunk.start < end)
        return LoadOrder("a", start, end, chunks, TO[start // BLOCK : -(-end // BLOCK)], is_async)

    def load(self, order: LoadOrder) -> tuple[set[str], set[str], set[int]]:
        """Run a load between steps: finished, failed, bad blocks."""
        worker = self.loader.worker
        worker.bind(StepOrders((order,)))
        worker.start_loads()
        finished: set[str] = set()
        failed: set[str] = set()
        for _ in range(3000):
            finished, failed = worker.take_finished()
            if finished:
                break
            threading.Event().wait(0.001)
        return finished, failed, worker.take_bad_blocks()


def settled(condition: Callable[[], bool]) -> bool:
    return any(condition() or threading.Event().wait(0.001) for _ in range(5000))


@pytest.fixture
def world(service: Service, request: pytest.FixtureRequest) -> Iterator[World]:
    world = World(f"unix:{service.addresses.socket}", request.node.name)
    yield world
    world.close()


def slots(blocks: Sequence[int], start: int = 0, end: int = 24) -> list[int]:
    return [blocks[at // BLOCK] * BLOCK + at % BLOCK for at in range(start, end)]


def rows(paged: FakePaged, where: Sequence[int]) -> list[list[Bits]]:
    return [[paged.rows(layer, plane, where).copy() for plane in range(2)] for layer in range(LAYERS)]


def assert_moved(world: World, start: int, end: int, before: dict[str, torch.Tensor]) -> None:
    """Tokens [start, end) are as the first engine had them, and nothing else of the second changed."""
    ours, theirs = rows(world.second, slots(TO, start, end)), rows(world.first, slots(FROM, start, end))
    for one, other in zip(ours, theirs, strict=True):
        assert all(map(np.array_equal, one, other))
    others = sorted(set(range(BLOCKS * BLOCK)) - set(slots(TO, start, end)))
    untouched = FakePaged(BLOCKS, 2)
    for name, cache in before.items():
        untouched.caches[name].copy_(cache)
    for one, other in zip(rows(world.second, others), rows(untouched, others), strict=True):
        assert all(map(np.array_equal, one, other))


def copies(paged: FakePaged) -> dict[str, torch.Tensor]:
    return {name: cache.clone() for name, cache in paged.caches.items()}


@pytest.mark.parametrize(("start", "end"), [(0, 24), (12, 24), (0, 20), (4, 12), (8, 16)])
def test_exactly_the_asked_rows_are_written(world: World, start: int, end: int) -> None:
    world.save()
    before = copies(world.second)
    assert world.load(world.order(start=start, end=end)) == ({"a"}, set(), set())
    assert_moved(world, start, end, before)
    assert world.loader.counts.total("tokens_loaded") == end - start


def test_a_lossy_engine_saves_rounded_rows(service: Service, request: pytest.FixtureRequest) -> None:
    world = World(f"unix:{service.addresses.socket}", request.node.name, lossy="int8")
    world.save()
    assert world.load(world.order()) == ({"a"}, set(), set())
    for layer, planes in enumerate(rows(world.first, slots(FROM))):
        for plane, wanted in enumerate(planes):
            round_rows(wanted, HEAD_SIZE, "bfloat16")
            assert np.array_equal(world.second.rows(layer, plane, slots(TO)), wanted)
    world.close()


def test_blocks_may_be_reused_as_soon_as_the_step_has_ended(world: World) -> None:
    before = rows(world.first, slots(FROM))
    world.save(is_flushed=False)
    for cache in world.first.caches.values():
        cache.zero_()
    assert settled(lambda: world.saver.saves.bytes_waiting == 0)
    world.load(world.order())
    for one, other in zip(rows(world.second, slots(TO)), before, strict=True):
        assert all(map(np.array_equal, one, other))


def test_a_chunk_that_is_not_there_fails_its_blocks_and_those_behind(world: World) -> None:
    world.save([world.chunks[0], world.chunks[2]])
    before = copies(world.second)
    assert world.load(world.order()) == ({"a"}, set(), set(TO[2:]))
    assert_moved(world, 0, 8, before)
    assert world.loader.counts.total("loads_failed") == 1


def test_wrong_bytes_are_never_written_and_the_service_hears_of_them(world: World) -> None:
    world.save()
    session = world.saver.saves._link._session
    assert session is not None
    namespace = bytes(world.identity.namespace())
    key = bytes(world.chunks[1].keys[0].context)
    places = [
        at
        for at in range(0, len(session.arena), 4096)
        if session.arena[at : at + 8].tobytes() == MAGIC
        and namespace in session.arena[at : at + 300].tobytes()
        and key in session.arena[at : at + 300].tobytes()
    ]
    session.arena[places[0] + 1000] ^= 4
    assert world.load(world.order()) == ({"a"}, set(), set(TO[2:]))
    assert world.loader.counts.total("chunks_corrupt") == 1
    world.load(world.order())
    assert world.loader.counts.total("chunks_corrupt") == 1, "it is not found any more"


def test_where_block_ids_are_ambiguous_requests_are_named(service: Service, request: pytest.FixtureRequest) -> None:
    world = World(f"unix:{service.addresses.socket}", request.node.name, groups=2)
    assert world.load(world.order()) == ({"a"}, {"a"}, set())
    world.close()


def test_without_a_service_loads_fail_and_saves_are_dropped(request: pytest.FixtureRequest) -> None:
    world = World("unix:/tmp/kvs-nobody.sock", request.node.name)
    assert world.load(world.order()) == ({"a"}, set(), set(TO))
    world.save()
    assert world.saver.counts.total("saves_dropped") == 3
    world.close()


def test_a_load_in_the_step_has_each_layer_in_place_when_the_engine_reads_it(world: World) -> None:
    world.save()
    worker = world.loader.worker
    worker.bind(StepOrders((world.order(is_async=False),)))
    worker.start_loads()
    for layer, name in enumerate(NAMES):
        worker.wait_for_layer(name)
        for plane in range(2):
            ours, theirs = world.second.rows(layer, plane, slots(TO)), world.first.rows(layer, plane, slots(FROM))
            assert np.array_equal(ours, theirs)
    assert worker.take_finished() == (set(), set())
    notice = worker.take_notice()
    assert notice is not None
    assert notice.loaded == ("a",)


def test_a_load_that_is_late_writes_nothing_after_it_was_given_up(
    service: Service, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, gate = World(f"unix:{service.addresses.socket}", request.node.name, load_deadline_s=0.05), threading.Event()
    world.save()
    original = ChunkReader.planes

    def hang(self: ChunkReader, layer: int, *more: Any) -> list[Any]:
        planes = original(self, layer, *more)
        gate.wait()
        return planes

    monkeypatch.setattr(ChunkReader, "planes", hang)
    worker, before = world.loader.worker, copies(world.second)
    worker.bind(StepOrders((world.order(is_async=False),)))
    worker.start_loads()
    for name in NAMES:
        worker.wait_for_layer(name)
    assert worker.take_finished() == (set(), set())
    assert worker.take_bad_blocks() == set(TO)
    gate.set()
    world.close()
    assert all(torch.equal(cache, before[name]) for name, cache in world.second.caches.items())


def test_what_a_step_computed_on_a_failed_load_is_not_saved(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: ChunkReader, layer: int, *more: Any) -> list[Any]:
        raise CorruptError("planted")

    world.save(world.chunks[:1])
    monkeypatch.setattr(ChunkReader, "planes", fail)
    worker = world.loader.worker
    saves = (SaveOrder("a", world.chunks[1], TO[2:4]),)
    worker.bind(StepOrders((world.order(end=8, is_async=False),), saves, 8))
    worker.start_loads()
    for name in NAMES:
        worker.wait_for_layer(name)
        worker.save_layer(name)
    worker.finish_saves()
    worker.take_finished()
    assert worker.take_bad_blocks() == set(TO[:2])
    assert world.loader.counts.total("saves_dropped") == 1
    assert world.loader.saves.bytes_waiting == 0


def test_what_finds_no_room_is_not_saved(service: Service, request: pytest.FixtureRequest) -> None:
    room = 8 * GEOMETRY.token_bytes
    world = World(f"unix:{service.addresses.socket}", request.node.name, saves_bytes_max=room)
    world.save()
    assert world.saver.counts.total("chunks_saved") == 1
    assert world.saver.counts.total("saves_no_room") == 2
    world.close()


def test_what_is_infinite_is_not_saved(world: World) -> None:
    world.first.write(1, 0, slots(FROM, 10, 11), np.full((1, 16), 0x7F80, np.uint16))
    world.save()
    assert world.saver.counts.total("chunks_saved") == 2
    assert world.saver.counts.total("saves_refused") == 1


def test_a_step_that_failed_leaves_nothing_to_be_saved(world: World) -> None:
    worker = world.saver.worker
    orders = StepOrders((), (SaveOrder("a", world.chunks[0], FROM[:2]),), 8)
    worker.bind(orders)
    worker.save_layer(NAMES[0])
    worker.preempted()
    worker.bind(StepOrders())
    worker.finish_saves()
    assert world.saver.saves.bytes_waiting == 0
    assert world.saver.counts.total("chunks_saved") == 0


def test_an_unknown_layout_is_told_once_and_fails_loads(world: World) -> None:
    worker = world.loader.worker
    worker._loads = worker._paged = None
    worker.register({})
    notice = worker.take_notice()
    assert notice is not None
    assert "no KV cache for layer" in notice.refusal
    assert world.load(world.order()) == ({"a"}, set(), set(TO))
    assert worker.take_notice() is None


def test_a_mirror_is_materialised(world: World) -> None:
    """The service folds the second of two near-equal caches; its load gives the bits that were saved."""
    salted = ChunkChain([world.identity.namespace()], 8, BLOCK, b"salt").extend(TOKENS)
    world.save([world.chunks[2]])
    changed = np.full((1, 16), 0x3F80, np.uint16)
    world.first.write(1, 1, slots(FROM, 18, 19), changed)
    world.save([salted[2]])
    session = world.saver.saves._link._session
    assert session is not None
    members = [chunk.keys[0] for chunk in (world.chunks[2], salted[2])]
    session.commit_round(
        wire.CommitRoundRequest(
            round="r",
            namespace=world.identity.namespace(),
            members=[wire.CacheKey(segment=key.segment, context=key.context) for key in members],
        )
    )
    reply, lease = session.lookup([query(world.identity.namespace(), 0, [salted[2]])])
    assert reply.prompts[0].segments[0].HasField("master"), "it was not folded: the test tests nothing"
    session.let_go(lease.id)
    before = copies(world.second)
    world.chunks = salted
    order = LoadOrder("a", 16, 24, (salted[2],), TO[4:], is_async=True)
    assert world.load(order) == ({"a"}, set(), set())
    assert_moved(world, 16, 24, before)


def test_a_load_that_cannot_begin_has_failed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> threading.Thread:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading, "Thread", refuse)
    worker = world.loader.worker
    worker.bind(StepOrders((world.order(),)))
    worker.start_loads()
    assert worker.take_finished() == ({"a"}, set())
    assert worker.take_bad_blocks() == set(TO)
    monkeypatch.undo()
