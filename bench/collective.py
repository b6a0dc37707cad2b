"""What does a round gain by going together? Ten agents, one segment order, all reusing one leader's caches.

The reuse part (lookup, load, rotate, deviation, scatter) in one go, against prompt by prompt: with the same calls, and
with the plain form that is common elsewhere (a copy of every section, then torch operations one after the other).
Restoring a round of mirrors in one call, against ten calls, and against building every dense mirror first. The whole
pass on SmolLM2, against `refresh` prompt by prompt and in `deterministic` mode; one layer with fixed row tiles.
All arms of a figure take turns within a repetition, in rotating order, and a ratio is that of one repetition: other
load on the machine falls on all. One thread computes; what runs on it alone (pass and layer) is given in its CPU time,
the rest, where the client's worker and the node take part, by the wall clock.
Asked: reuse part 2.57, one call 1.5, dense mirrors 2.6, pass never slower.
"""

import argparse
import json
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear

from kvservice.client import Client, PartKind, Plans, ReusePolicy, RoundPrompt
from kvservice.client.demo.model import smollm2
from kvservice.client.demo.service_process import ServiceProcess
from kvservice.client.plans import PromptPlan
from kvservice.client.restore import RecordBook
from kvservice.client.reuse.collective import Member, refresh_round
from kvservice.client.reuse.decoder import Decoder
from kvservice.client.reuse.engine import Planes, Rows
from kvservice.client.reuse.paged_kv import KVShape, PagedKV
from kvservice.client.reuse.refresh import Prompt, deviation, refresh
from kvservice.client.reuse.rows import RowClass, Span, classify
from kvservice.client.reuse.selectors import Selector, parse_selector
from kvservice.client.rounds import CHECK_LAYER
from kvservice.client.store import StoreRequest
from kvservice.kernels.rotation import rotation_table
from kvservice.kernels.shapes import Bits, Rotation
from kvservice.model.geometry import attention_geometry
from kvservice.model.identity import Identity
from kvservice.model.plan import Match
from kvservice.model.rope import Rope

OUTPUT = Path("build/bench/collective.json")
AGENTS, SEGMENTS, SEGMENT_TOKENS, TAIL_TOKENS = 10, 8, 105, 14
HISTORY_TOKENS = range(90, 270, 18)
HOST_BYTES = 2 << 30
REFRESHED = 0.05
SELECTOR = f"hkvd:{REFRESHED}"
TILE_ROWS = 64

Arms = dict[str, Callable[[], object]]


@dataclass(frozen=True, slots=True)
class Figure:
    """One arm of a question: milliseconds, and its time over the first arm's, medians; quartiles of the ratio."""

    question: str
    arm: str
    p50_ms: float
    over_first: float
    over_first_p25: float
    over_first_p75: float


def take_turns(
    question: str,
    arms: Arms,
    repetitions: int,
    before: Callable[[], object] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Figure]:
    """Time all arms, in an order that rotates; ``before`` runs untimed before each."""
    names, taken = list(arms), {name: list[float]() for name in arms}
    for repetition in range(-1, repetitions):
        turn = max(repetition, 0) % len(names)
        for name in names[turn:] + names[:turn]:
            before()
            begun_s = clock()
            arms[name]()
            if repetition >= 0:  # the first time around is to warm up
                taken[name].append(clock() - begun_s)
    return [_figure(question, name, taken[name], taken[names[0]]) for name in names]


def _figure(question: str, arm: str, taken: Sequence[float], first: Sequence[float]) -> Figure:
    low, middle, high = np.quantile([one / other for one, other in zip(taken, first, strict=True)], [0.25, 0.5, 0.75])
    ratios = [round(float(one), 3) for one in (middle, low, high)]
    figure = Figure(question, arm, round(statistics.median(taken) * 1e3, 2), *ratios)
    spread = f"{figure.over_first_p25:.2f} - {figure.over_first_p75:.2f}"
    print(f"{question:34}{arm:42}{figure.p50_ms:10.1f} ms{figure.over_first:8.2f}   {spread}", flush=True)
    return figure


class World:
    """A leader's caches in a node, and ten prompts of a round with room in paged KV, before anything is restored."""

    def __init__(self, client: Client, kv: PagedKV, identity: Identity) -> None:
        self.client, self.kv, self.identity = client, kv, identity
        self.views = [kv.plane_views(layer) for layer in range(kv.shape.layers)]
        self._random = random.Random(0)
        shared = [(PartKind.SHARED, self._draw(SEGMENT_TOKENS)) for _ in range(SEGMENTS)]
        self.prompts = [self._prompt(tokens, shared) for tokens in (80, *HISTORY_TOKENS)]
        self.leader = self.prompts.pop(0)
        self.slots = [kv.allocate(prompt.token_count) for prompt in self.prompts]
        self.selector = parse_selector(SELECTOR)

    def _draw(self, tokens: int) -> list[int]:
        return [self._random.randrange(40_000) for _ in range(tokens)]

    def _prompt(self, history: int, shared: Sequence[tuple[PartKind, list[int]]]) -> RoundPrompt:
        parts = [(PartKind.PRIVATE, self._draw(history)), *shared, (PartKind.PRIVATE, self._draw(TAIL_TOKENS))]
        return RoundPrompt.from_parts(self.client.namespace, parts, policy=ReusePolicy(SELECTOR, CHECK_LAYER))

    def lead(self) -> None:
        """Store the leader's prompt: random rows. The readers' histories are new: what is reused is the shared run."""
        slots = self.kv.allocate(self.leader.token_count)
        self.client.store(self.leader, self.views, slots)
        self.kv.free(slots)

    def lead_with(self, decoder: Decoder) -> None:
        """The same, computed; and every reader's history, as a round before this one would have left it."""
        slots = self.kv.allocate(max(one.token_count for one in (self.leader, *self.prompts)))
        for prompt in (self.leader, *self.prompts):
            count = prompt.token_count if prompt is self.leader else prompt.segments[0].end
            decoder.prefill(torch.tensor(prompt.tokens[:count]), slots[:count])
            stored = None if prompt is self.leader else [0]
            self.client.store(prompt, self.views, slots[: prompt.token_count], segments=stored)
        self.kv.free(slots)

    def members(self) -> list[Member]:
        """The round, looked up."""
        with self.client.lookup(self.prompts) as plans:
            self.client.restore(plans, self.views, self.slots).wait()
            classes = [classify(one.prompt.token_count, spans_of(one)) for one in plans]
        return [
            Member(Prompt(torch.tensor(prompt.tokens), slots, rows), self.selector)
            for prompt, slots, rows in zip(self.prompts, self.slots, classes, strict=True)
        ]


def spans_of(plan: PromptPlan) -> list[Span]:
    """What is restored: the history as it was, the shared segments from the leader's context."""
    classes = {Match.EXACT: RowClass.EXACT, Match.SHIFTED: RowClass.CANDIDATE}
    return [Span(one.start, one.tokens, classes[one.match]) for one in plan.spans()]


class ReusePart:
    """Everything of a reuse but the model: its fresh rows at the check layer are given."""

    def __init__(self, world: World) -> None:
        self.world = world
        members = world.members()
        self.spans = [member.prompt.rows.candidates for member in members]
        self.candidates = [one.prompt.slots[one.prompt.rows.positions(RowClass.CANDIDATE)] for one in members]
        self.all_candidates = torch.cat(self.candidates)
        self.fresh = [self._near(slots) for slots in self.candidates]
        self.all_fresh = tuple(torch.cat(planes) for planes in zip(*self.fresh, strict=True))

    def _near(self, slots: Tensor) -> Planes:
        planes = self.world.kv.read(CHECK_LAYER, slots)
        return tuple((plane.float() + 0.1 * torch.randn(plane.shape)).to(plane.dtype) for plane in planes)

    def together(self) -> list[Tensor]:
        """One lookup, one restore, one deviation."""
        world = self.world
        with world.client.lookup(world.prompts) as plans:
            world.client.restore(plans, world.views, world.slots).wait()
            found = deviation(self.all_fresh, world.kv.read(CHECK_LAYER, self.all_candidates))
        parts = torch.split(found, [len(slots) for slots in self.candidates])
        return [world.selector.pick(spans, part) for spans, part in zip(self.spans, parts, strict=True)]

    def one_by_one(self) -> list[Tensor]:
        """The same calls for each prompt."""
        world, picked = self.world, []
        each = zip(world.prompts, world.slots, self.spans, self.candidates, self.fresh, strict=True)
        for prompt, slots, spans, candidates, fresh in each:
            with world.client.lookup([prompt]) as plans:
                world.client.restore(plans, world.views, [slots]).wait()
                found = deviation(fresh, world.kv.read(CHECK_LAYER, candidates))
            picked.append(world.selector.pick(spans, found))
        return picked

    def plain(self) -> list[Tensor]:
        """For each prompt and segment: copy, widen, rotate, round, compare, scatter; one torch operation each."""
        world, picked = self.world, []
        each = zip(world.prompts, world.slots, self.spans, self.fresh, strict=True)
        for prompt, slots, spans, fresh in each:
            with world.client.lookup([prompt]) as plans:
                restored = self._plain_restore(plans, slots)
            pairs = zip(fresh, restored, strict=True)
            parts = [(one.float() - other.float()).flatten(1).square().sum(1) for one, other in pairs]
            picked.append(world.selector.pick(spans, torch.stack(parts).sum(0)))
        return picked

    def _plain_restore(self, plans: Plans, slots: Tensor) -> Planes:
        world = self.world
        book, checked = RecordBook(world.client.session), list[Planes]()
        for segment, planned in plans[0].hits:
            record = book.open_master(plans[0], planned)
            own, by = slots[segment.position : segment.end], segment.position - record.meta.position
            rotation = Rotation(world.identity.rope[0].frequencies)
            cosine, sine = (torch.tensor(part) for part in rotation_table(rotation, by))
            for layer in range(world.kv.shape.layers):
                keys, values = (self._loaded(plane) for plane in record.master_planes(layer))
                low, high = keys.float().chunk(2, dim=-1)
                keys = torch.cat((low * cosine - high * sine, high * cosine + low * sine), dim=-1).bfloat16()
                if layer == CHECK_LAYER:
                    checked.append((keys, values))
                world.kv.write(layer, own, (keys, values))
        return tuple(torch.cat(planes) for planes in zip(*checked, strict=True))

    def _loaded(self, plane: Bits) -> Tensor:
        shape = self.world.kv.shape
        rows = torch.from_numpy(plane.copy().view(np.int16)).view(torch.bfloat16)
        return rows.view(-1, shape.heads, shape.head_size)


class MirrorRound:
    """Ten agents' mirrors of the shared segments in the node, 5 % of the rows replaced, and leases on all of them."""

    def __init__(self, world: World) -> None:
        self.world = world
        with world.client.lookup(world.prompts) as plans:
            world.client.restore(plans, world.views, world.slots).wait()
            for plan, slots in zip(plans, world.slots, strict=True):
                for span in plan.spans():
                    self._replace_some(slots[span.start : span.end])
            pairs = zip(world.prompts, world.slots, plans, strict=True)
            requests = [StoreRequest(prompt, slots, plan, is_refreshed=True) for prompt, slots, plan in pairs]
            world.client.store_round(requests, world.views)
        self.together = world.client.lookup(world.prompts)
        self.each = [world.client.lookup([prompt]) for prompt in world.prompts]
        mirrors = [planned for plan in self.together for _, planned in plan.hits if planned.master is not None]
        assert len(mirrors) == AGENTS * SEGMENTS, len(mirrors)
        shape = world.kv.shape
        longest = max(prompt.token_count for prompt in world.prompts)
        blocks = -(-longest // shape.block_size)
        self.staging = PagedKV(replace(shape, blocks=blocks))
        self.staging_views = [self.staging.plane_views(layer) for layer in range(shape.layers)]

    def _replace_some(self, slots: Tensor) -> None:
        kv = self.world.kv
        rows = slots[torch.randperm(len(slots))[: round(REFRESHED * len(slots))]]
        for layer in range(CHECK_LAYER, kv.shape.layers):
            kv.write(layer, rows, tuple(torch.randn_like(plane) for plane in kv.read(layer, rows)))

    def in_one_call(self) -> None:
        """The round's restore."""
        self.world.client.restore(self.together, self.world.views, self.world.slots).wait()

    def in_ten_calls(self) -> None:
        """A restore for each prompt."""
        for plans, slots in zip(self.each, self.world.slots, strict=True):
            self.world.client.restore(plans, self.world.views, [slots]).wait()

    def dense_first(self) -> None:
        """For each prompt: every mirror built as a dense cache, by the fused restore, then one copy of each plane."""
        for plans, slots in zip(self.each, self.world.slots, strict=True):
            staged = torch.arange(len(slots))
            self.world.client.restore(plans, self.staging_views, [staged]).wait()
            for planes, dense in zip(self.world.views, self.staging_views, strict=True):
                for plane, rows in zip(planes, dense, strict=True):
                    plane.flatten(0, 1).index_copy_(0, slots, rows.flatten(0, 1)[: len(slots)])


def identity_of(shape: KVShape, theta: float) -> Identity:
    """Who these rows are of."""
    geometry = attention_geometry(layers=shape.layers, heads=shape.heads, head_size=shape.head_size, dtype="bfloat16")
    half = shape.head_size // 2
    rope = Rope("default", False, shape.head_size, tuple(theta ** (-index / half) for index in range(half)))
    return Identity("bench", "model", "r1", geometry, (rope,) * shape.layers)


def blocks_of_round(block_size: int = 16) -> int:
    """Room for the ten prompts and the leader's."""
    tokens = SEGMENTS * SEGMENT_TOKENS + TAIL_TOKENS + max(HISTORY_TOKENS) + block_size
    return (AGENTS + 1) * tokens // block_size + 1


def measure_bytes(name: str, shape: KVShape, repetitions: int) -> list[Figure]:
    """The figures without a model, of one geometry."""
    kv, identity = PagedKV(shape), identity_of(shape, 1e6)
    for tensor in kv.tensors:
        tensor.normal_()
    with (
        ServiceProcess(HOST_BYTES) as service,
        Client.connect(service.address, identity, client_name="bench") as client,
    ):
        world = World(client, kv, identity)
        world.lead()
        part = ReusePart(world)
        arms: Arms = {"together": part.together, "one by one": part.one_by_one, "one by one, plain torch": part.plain}
        figures = take_turns(f"reuse part, {name}", arms, repetitions)
        mirrors = MirrorRound(world)
        arms = {
            "one call": mirrors.in_one_call,
            "ten calls": mirrors.in_ten_calls,
            "dense mirrors first": mirrors.dense_first,
        }
        return figures + take_turns(f"restore of mirrors, {name}", arms, repetitions)


class Pass:
    """The whole pass on a real model; every arm starts from the same restored rows."""

    def __init__(self, decoder: Decoder, world: World) -> None:
        self.decoder = decoder
        self.members = world.members()
        self.restored = [tensor.clone() for tensor in decoder.kv.tensors]

    def reset(self) -> None:
        """As restored."""
        for tensor, kept in zip(self.decoder.kv.tensors, self.restored, strict=True):
            tensor.copy_(kept)

    def measure(self, selector: Selector, repetitions: int) -> tuple[list[Figure], int]:
        """The three forms, and how many rows were picked in another way than prompt by prompt."""
        members = [Member(one.prompt, selector) for one in self.members]
        found: dict[str, list[Tensor]] = {}

        def one_by_one() -> None:
            found["one"] = [refresh(self.decoder, member.prompt, selector).picked for member in members]

        def together() -> None:
            found["all"] = [one.picked for one in refresh_round(self.decoder, members)]

        def deterministic() -> None:
            found["bits"] = [one.picked for one in refresh_round(self.decoder, members, is_deterministic=True)]

        arms: Arms = {"one by one": one_by_one, "together": together, "deterministic": deterministic}
        figures = take_turns(f"whole pass, {selector}", arms, repetitions, self.reset, time.thread_time)
        pairs = [pair for other in ("all", "bits") for pair in zip(found["one"], found[other], strict=True)]
        return figures, sum(len(set(a.tolist()) ^ set(b.tolist())) for a, b in pairs)

    def measure_tiles(self, rows_each: int, repetitions: int) -> list[Figure]:
        """One layer over a few rows of every prompt: each alone, all in one call, and in fixed tiles of rows."""
        parts = [
            Rows.at(torch.randperm(one.prompt.slots.numel())[:rows_each].sort().values, one.prompt.slots)
            for one in self.members
        ]
        hidden = torch.randn(AGENTS, rows_each, self.decoder.config.hidden)
        is_written = torch.ones(AGENTS * rows_each, dtype=torch.bool)
        joined = Rows.join(parts)

        def each() -> None:
            for own, rows in zip(hidden, parts, strict=True):
                self.decoder.run_layer(CHECK_LAYER, own, rows, is_written[:rows_each])

        def together() -> None:
            self.decoder.run_layer(CHECK_LAYER, hidden.flatten(0, 1), joined, is_written)

        def tiled() -> None:
            with mock.patch("kvservice.client.reuse.decoder.linear", linear_in_tiles):
                together()

        arms: Arms = {"each prompt alone": each, "one call": together, f"one call, tiles of {TILE_ROWS}": tiled}
        return take_turns(f"one layer, {rows_each} rows a prompt", arms, repetitions, clock=time.thread_time)


def linear_in_tiles(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``linear`` whose products always have as many rows: a row's bits do not depend on its company."""
    padded = torch.cat((rows, rows.new_zeros(-len(rows) % TILE_ROWS, rows.shape[1])))
    return torch.cat([linear(tile, weight, bias) for tile in torch.split(padded, TILE_ROWS)])[: len(rows)]


def measure_pass(cache: Path, repetitions: int) -> tuple[list[Figure], int]:
    """The figures of the real model."""
    decoder = Decoder.load(smollm2(cache / "models"), blocks=blocks_of_round())
    identity = identity_of(decoder.kv.shape, decoder.config.rope_theta)
    figures, different = list[Figure](), 0
    with (
        ServiceProcess(HOST_BYTES) as service,
        Client.connect(service.address, identity, client_name="bench") as client,
    ):
        world = World(client, decoder.kv, identity)
        world.lead_with(decoder)
        whole = Pass(decoder, world)
        for rows in (16, 60, 150, 840):
            figures += whole.measure_tiles(rows, 3 * repetitions if rows < SEGMENT_TOKENS * 2 else repetitions)
        for text in (SELECTOR, "none"):
            more, others = whole.measure(parse_selector(text), repetitions)
            figures, different = figures + more, different + others
    return figures, different


def main() -> None:
    """Measure, print the table, write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few repetitions")
    parser.add_argument("--only", choices=["bytes", "pass"], help="half of the figures")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "kvservice", help="where models lie")
    options = parser.parse_args()
    torch.set_num_threads(1)
    load, scale = [os.getloadavg()[0]], 1 if options.quick else 3
    print(f"{'':76}{'median':>13}{'/ first':>8}   quartiles of / first", flush=True)
    figures, different = list[Figure](), 0
    if options.only != "pass":
        figures += measure_bytes("SmolLM2", KVShape(30, 3, 64, blocks_of_round()), 5 * scale)
        figures += measure_bytes("28 x 4 x 128", KVShape(28, 4, 128, blocks_of_round()), 5 * scale)
    if options.only != "bytes":
        more, different = measure_pass(options.cache, 2 * scale)
        figures += more
        print(f"rows picked otherwise than prompt by prompt: {different}")
    load.append(os.getloadavg()[0])
    print(f"load average {load[0]:.1f} to {load[1]:.1f}")
    report = {"figures": [asdict(one) for one in figures], "rows_picked_otherwise": different, "load": load}
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    OUTPUT.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
