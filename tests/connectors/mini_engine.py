"""A small engine with vLLM's protocol towards a connector: a queue, blocks, chunked prefill, preemption, recompute.

Its KV rows are digests of all tokens up to their position, so every row has one right value, and the engine checks all
of them after every step: whatever was loaded, saved, lost or preempted, a wrong row cannot hide.
"""

import copy
import hashlib
import logging
import random
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from kvservice.client.connectors.breaker import Breaker
from kvservice.client.connectors.entrance import Entrance
from kvservice.client.connectors.vllm.link import Link, OpenSession
from kvservice.client.connectors.vllm.loads import Loads
from kvservice.client.connectors.vllm.lookups import Lookups
from kvservice.client.connectors.vllm.metadata import StepOrders, WorkerNotice
from kvservice.client.connectors.vllm.metrics import Counts
from kvservice.client.connectors.vllm.options import ConnectorOptions
from kvservice.client.connectors.vllm.paged import EnginePaged
from kvservice.client.connectors.vllm.request_extras import ExtrasReader
from kvservice.client.connectors.vllm.requests import ChainMaker
from kvservice.client.connectors.vllm.saves import Saves
from kvservice.client.connectors.vllm.scheduler import SchedulerSide
from kvservice.client.connectors.vllm.worker import WorkerSide
from kvservice.client.session import Session
from kvservice.model.geometry import attention_geometry
from kvservice.model.identity import Identity
from tests.client.builders import make_identity
from tests.connectors.test_layout import FakeAttention

LAYERS, HEADS, HEAD_SIZE, BLOCK = 3, 2, 8, 4
GEOMETRY = attention_geometry(layers=LAYERS, heads=HEADS, head_size=HEAD_SIZE, dtype="bfloat16")
STEPS_MAX = 20_000
Bits = np.ndarray[Any, np.dtype[np.uint16]]
NAMES = tuple(f"model.layers.{layer}.self_attn.attn" for layer in range(LAYERS))


def engine_identity(model: str = "tiny") -> Identity:
    return make_identity(GEOMETRY, model=model)


@lru_cache(maxsize=50_000)
def _right_row(tokens: tuple[int, ...], layer: int, plane: int) -> Bits:
    content = f"{layer}/{plane}/{tokens}".encode()
    digest = hashlib.blake2b(content, digest_size=2 * HEADS * HEAD_SIZE).digest()
    return np.frombuffer(digest, np.uint16) & np.uint16(0xBFFF)


def right_rows(tokens: Sequence[int], start: int, end: int, layer: int, plane: int) -> Bits:
    """The one right value of the rows of tokens ``[start, end)``, never infinite."""
    rows = [_right_row(tuple(tokens[: at + 1]), layer, plane) for at in range(start, end)]
    return np.stack(rows) if rows else np.empty((0, HEADS * HEAD_SIZE), np.uint16)


def write_rows(key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """[blocks, heads, 2 * tokens, head size]: per head all K rows, then all V rows."""
    block, inside = slots // BLOCK, slots % BLOCK
    cache[block, :, inside] = key
    cache[block, :, inside + BLOCK] = value


@dataclass
class FakeRequest:
    """vLLM's Request, as far as the connector reads it."""

    request_id: str
    prompt_token_ids: list[int]
    max_tokens: int = 4
    cache_salt: str | None = None
    kv_transfer_params: dict[str, Any] | None = None
    outputs: list[int] = field(default_factory=list)
    num_preemptions: int = 0
    num_computed_tokens: int = 0
    blocks: list[int] = field(default_factory=list)
    status: str = "waiting"
    prompt_embeds: None = None
    lora_request: None = None
    mm_features: tuple[()] = ()
    resumable: bool = False
    priority: int = 0
    _block_hasher: None = None

    @property
    def all_token_ids(self) -> list[int]:
        return self.prompt_token_ids + self.outputs

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.outputs)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)


class FakePaged:
    """Caches and attention modules of the engine, every bit random."""

    def __init__(self, blocks: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        shape = (blocks, HEADS, 2 * BLOCK, HEAD_SIZE)
        self.caches = {name: torch.randn(shape, generator=generator).to(torch.bfloat16) for name in NAMES}
        self.modules = {name: FakeAttention(write_rows, HEADS, HEAD_SIZE, layer_name=name) for name in NAMES}

        self._bits = [cache.view(torch.int16).numpy().view(np.uint16) for cache in self.caches.values()]

    def write(self, layer: int, plane: int, slots: Sequence[int], rows: Bits) -> None:
        block, inside = self._places(plane, slots)
        self._bits[layer][block, :, inside] = rows.reshape(-1, HEADS, HEAD_SIZE)

    def rows(self, layer: int, plane: int, slots: Sequence[int]) -> Bits:
        """[slots, elements], a copy."""
        block, inside = self._places(plane, slots)
        found: Bits = self._bits[layer][block, :, inside].reshape(len(slots), HEADS * HEAD_SIZE)
        return found

    def _places(self, plane: int, slots: Sequence[int]) -> tuple[Any, Any]:
        where = np.asarray(slots, np.int64)
        return where // BLOCK, where % BLOCK + plane * BLOCK


class Sides:
    """Both sides of a connector as `connector.py` builds them, with a service at ``address``."""

    def __init__(
        self, address: str, paged: FakePaged, *, identity: Identity | None = None, groups: int = 1, **options: Any
    ) -> None:
        self.identity = identity or engine_identity()
        self.options = ConnectorOptions.of({"address": address, "chunk_tokens": 8, **options}, BLOCK)
        self.entrance = Entrance(self.options, logging.getLogger("vllm.kvservice"))
        self.counts = Counts()
        self.breaker = Breaker(time.monotonic, pause_s=0.02, pause_s_max=0.05)
        reader: OpenSession = lambda: self._open(is_writer=False)  # noqa: E731
        self.lookups = Lookups(Link(reader, self.breaker), [self.identity.namespace()], self.counts)
        namespaces, extras = [self.identity.namespace()], ExtrasReader({})
        self.chains = ChainMaker(namespaces, self.options.chunk_tokens, BLOCK, extras, self.counts)
        self.scheduler = SchedulerSide(self.options, BLOCK, self.chains, self.lookups, self.counts)
        saves = Link(lambda: self._open(is_writer=True), self.breaker)
        self.saves = Saves(saves, self.identity, 0, self.options.saves_bytes_max, self.counts)
        deadline_s = self.options.load_deadline_s

        def make_loads(engine: EnginePaged) -> Loads:
            return Loads(Link(reader, self.breaker), self.identity, 0, engine, deadline_s, self.counts)

        self.worker = WorkerSide(
            self.identity, NAMES, paged.modules, BLOCK, groups, make_loads, self.saves, self.counts
        )
        self.worker.register(paged.caches)

    def _open(self, *, is_writer: bool) -> Session:
        return self.entrance.open([self.identity], is_writer=is_writer, client_name="mini engine")

    def close(self) -> None:
        self.scheduler.close()
        self.worker.close()


class MiniEngine:
    """Runs requests to their end, checking every row after every step. ``budget``: tokens a step."""

    def __init__(self, sides: Sides, paged: FakePaged, *, blocks: int, budget: int = 24, seed: int = 0) -> None:
        self.sides, self.paged, self.budget = sides, paged, budget
        self.free = list(range(blocks))
        self.random = random.Random(seed)
        self.random.shuffle(self.free)
        self.waiting: list[FakeRequest] = []
        self.running: list[FakeRequest] = []
        self.loading: list[FakeRequest] = []
        self.failures = 0
        self.preemptions = 0

    def add(self, request: FakeRequest) -> None:
        self.waiting.append(request)
        self.sides.scheduler.on_new_request(request)

    def run(self) -> None:
        """Until every request has ended, and what is to be stored of them is: the next ones are to find it."""
        for _ in range(STEPS_MAX):
            if not (self.waiting or self.running or self.loading):
                self._wait_for_saves()
                return
            if not self.step():
                threading.Event().wait(0.0005)
        raise AssertionError(f"not done: {self.waiting}, {self.running}, {self.loading}")

    def _wait_for_saves(self) -> None:
        for _ in range(5000):
            if not self.sides.saves.bytes_waiting:
                return
            threading.Event().wait(0.001)

    def step(self) -> bool:
        """One step of the engine; False if it computed nothing."""
        scheduled = self._schedule()
        output = self._output(scheduled)
        orders = copy.deepcopy(self.sides.scheduler.build_orders(output))  # as if it had crossed processes
        bad, failed, finished, notice = self._execute(orders, scheduled)
        self._settle(scheduled, bad, failed, finished)
        self.sides.scheduler.update(
            SimpleNamespace(
                invalid_block_ids=bad, failed_recving=failed, finished_recving=finished, kv_connector_worker_meta=notice
            )
        )
        self._advance(scheduled, bad)
        self._check()
        return bool(scheduled)

    def preempt(self, request: FakeRequest) -> None:
        self.running.remove(request)
        self._release(request)
        request.status, request.num_preemptions = "preempted", request.num_preemptions + 1
        self.waiting.insert(0, request)
        self.preemptions += 1

    def abort(self, request: FakeRequest) -> None:
        """The user went away. A request that is loading keeps its blocks until the load has ended."""
        request.status = "aborted"
        self.sides.scheduler.ended(request)
        for line in (self.waiting, self.running):
            if request in line:
                line.remove(request)
                self._release(request)

    # ------------------------------------------------------------------ scheduling

    def _schedule(self) -> dict[str, tuple[FakeRequest, int, list[int], str]]:
        """Per request: itself, tokens, blocks to name, and how vLLM would list it."""
        scheduled: dict[str, tuple[FakeRequest, int, list[int], str]] = {}
        budget = self.budget
        for request in list(self.running):
            count = min(request.num_tokens - request.num_computed_tokens, budget)
            if request not in self.running or count <= 0:
                continue
            fresh = self._grow(request, request.num_computed_tokens + count)
            if fresh is None:
                continue
            scheduled[request.request_id] = (request, count, fresh, "cached")
            budget -= count
        for request in list(self.waiting):
            if budget <= 0 or not self._admit(request, scheduled, budget):
                continue
            budget -= scheduled[request.request_id][1] if request.request_id in scheduled else 0
        return {key: one for key, one in scheduled.items() if one[0] in self.running}

    def _grow(self, request: FakeRequest, tokens: int) -> list[int] | None:
        """Blocks for so many tokens; who came last is preempted to get them. None if it was this one."""
        needed = -(-tokens // BLOCK) - len(request.blocks)
        while len(self.free) < needed:
            victim = self.running[-1]
            self.preempt(victim)
            if victim is request:
                return None
        fresh = [self.free.pop() for _ in range(needed)]
        request.blocks += fresh
        return fresh

    def _admit(self, request: FakeRequest, scheduled: dict[str, Any], budget: int) -> bool:
        external, is_async = 0, False
        if request.num_computed_tokens == 0:
            found, is_async = self.sides.scheduler.matched_tokens(request, 0)
            if found is None:
                return False
            assert found < request.num_tokens
            assert found % BLOCK == 0
            assert found > 0 or not is_async
            external = found
        start = request.num_computed_tokens + external
        count = 0 if is_async else min(request.num_tokens - start, budget)
        needed = -(-(start + count) // BLOCK) - len(request.blocks)
        if len(self.free) < (self._needed(request) + self._promised_blocks() if is_async else needed):
            return False
        request.blocks += [self.free.pop() for _ in range(needed)]
        self.sides.scheduler.allocated(request, lambda: [list(request.blocks)], external)
        self.waiting.remove(request)
        request.num_computed_tokens = start
        if is_async:
            self.loading.append(request)
            return True
        kind = "resumed" if request.status == "preempted" else "new"
        request.status = "running"
        self.running.append(request)
        scheduled[request.request_id] = (request, count, list(request.blocks), kind)
        return True

    @staticmethod
    def _needed(request: FakeRequest) -> int:
        return -(-(request.num_tokens + 1) // BLOCK) - len(request.blocks)

    def _promised_blocks(self) -> int:
        """What loads between steps still need to begin: they hold blocks that nobody can take back."""
        holding = [one for one in self.waiting if one.blocks] + self.loading
        return sum(self._needed(one) for one in holding)

    def _output(self, scheduled: dict[str, Any]) -> Any:
        new = [
            SimpleNamespace(req_id=key, block_ids=(blocks,), num_computed_tokens=one.num_computed_tokens)
            for key, (one, _, blocks, kind) in scheduled.items()
            if kind == "new"
        ]
        cached = [(key, *one) for key, one in scheduled.items() if one[3] != "new"]
        return SimpleNamespace(
            num_scheduled_tokens={key: one[1] for key, one in scheduled.items()},
            total_num_scheduled_tokens=sum(one[1] for one in scheduled.values()),
            scheduled_new_reqs=new,
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[one[0] for one in cached],
                resumed_req_ids={one[0] for one in cached if one[4] == "resumed"},
                new_block_ids=[(one[3],) if one[3] else None for one in cached],
                num_computed_tokens=[one[1].num_computed_tokens for one in cached],
            ),
        )

    # ------------------------------------------------------------------ a step of the worker

    def _execute(
        self, orders: StepOrders, scheduled: dict[str, Any]
    ) -> tuple[set[int], set[str], set[str], WorkerNotice | None]:
        worker = self.sides.worker
        worker.preempted()
        worker.bind(orders)
        is_sync = any(not load.is_async for load in orders.loads)
        if is_sync:
            worker.start_loads()
        for layer in range(LAYERS if scheduled else 0):
            worker.wait_for_layer(NAMES[layer])
            for request, count, _, _ in scheduled.values():
                self._compute(layer, request, request.num_computed_tokens, count)
            worker.save_layer(NAMES[layer])
        if not is_sync:
            worker.start_loads()
        worker.finish_saves()
        finished, failed = worker.take_finished()
        return worker.take_bad_blocks(), failed, finished, worker.take_notice()

    def _compute(self, layer: int, request: FakeRequest, start: int, count: int) -> None:
        """KV of the next tokens: right only if all rows before are."""
        is_right = self._is_right(layer, request, start)
        slots = self._slots(request, start, start + count)
        for plane in range(2):
            rows = right_rows(request.all_token_ids, start, start + count, layer, plane)
            self.paged.write(layer, plane, slots, rows if is_right else rows ^ np.uint16(1))

    @staticmethod
    def _slots(request: FakeRequest, start: int, end: int) -> list[int]:
        return [request.blocks[at // BLOCK] * BLOCK + at % BLOCK for at in range(start, end)]

    def _is_right(self, layer: int, request: FakeRequest, end: int) -> bool:
        slots, tokens = self._slots(request, 0, end), request.all_token_ids
        return all(
            np.array_equal(self.paged.rows(layer, plane, slots), right_rows(tokens, 0, end, layer, plane))
            for plane in range(2)
        )

    # ------------------------------------------------------------------ what came of it

    def _settle(self, scheduled: dict[str, Any], bad: set[int], failed: set[str], finished: set[str]) -> None:
        for request in list(self.loading):
            if request.request_id in failed:
                request.num_computed_tokens = 0
            request.num_computed_tokens = self._cut(request, request.num_computed_tokens, bad)
        for request_id in finished:
            (request,) = [one for one in self.loading if one.request_id == request_id]
            self.loading.remove(request)
            if request.status == "aborted":
                self._release(request)
                continue
            if not request.num_computed_tokens:
                self._release(request)
            self.waiting.insert(0, request)

    def _cut(self, request: FakeRequest, computed: int, bad: set[int]) -> int:
        for index, block in enumerate(request.blocks[: -(-computed // BLOCK)]):
            if block in bad:
                self.failures += 1
                return index * BLOCK
        return computed

    def _advance(self, scheduled: dict[str, Any], bad: set[int]) -> None:
        for request, count, _, _ in scheduled.values():
            cut = self._cut(request, request.num_computed_tokens, bad)
            if cut < request.num_computed_tokens:
                request.num_computed_tokens = cut
                continue
            request.num_computed_tokens += count
            if request.num_computed_tokens == request.num_tokens:
                self._sample(request)

    def _sample(self, request: FakeRequest) -> None:
        if len(request.outputs) == request.max_tokens:
            self.running.remove(request)
            request.status = "done"
            self.sides.scheduler.ended(request)
            self._release(request)
        else:
            request.outputs.append(1000 + len(request.outputs))

    def _release(self, request: FakeRequest) -> None:
        self.free += request.blocks
        request.blocks, request.num_computed_tokens = [], 0
        self.random.shuffle(self.free)

    def _check(self) -> None:
        for request in self.running:
            for layer in range(LAYERS):
                assert self._is_right(layer, request, request.num_computed_tokens), (request.request_id, layer)


def requests(count: int, *, tokens: int, shared: int, seed: int = 0, prefix: str = "r") -> Iterator[FakeRequest]:
    """Prompts that begin alike."""
    generator = random.Random(seed)
    head = [generator.randrange(1, 900) for _ in range(shared)]
    for index in range(count):
        rest = [generator.randrange(1, 900) for _ in range(tokens - shared)]
        yield FakeRequest(f"{prefix}{index}", head + rest)
