"""Trials: a reader's segments looked up, restored, refreshed, asked and stored, all through the real client."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from bench.quality.arrangements import Arrangement, Order, overlap, reader_parts, source_prompts
from bench.quality.methods import Case, apply, needs_mass
from bench.quality.reference import Reference, follow, refer, verdicts
from bench.quality.watched import attention_mass
from bench.quality.worlds import Model, World
from kvservice.app import LocalNode
from kvservice.client import Client, PartKind, PromptPlan, ReusePolicy, RoundPrompt
from kvservice.client.demo.measure import Closeness, closeness
from kvservice.client.reuse.leader import fit, shared_run
from kvservice.client.reuse.refresh import Prompt
from kvservice.client.reuse.rows import RowClass, Span, classify
from kvservice.client.rounds import CHECK_LAYER, Part
from kvservice.config import Settings
from kvservice.model.plan import Match

HOST_BYTES = 768 << 20
LEASE_TTL_S = RESTORE_TIMEOUT_S = 600.0  # a sweep may run beside anything


@dataclass(frozen=True, slots=True)
class Trial:
    """What one method gave one reader. ``fit`` and ``overlap``: of what was found, see `leader.fit` and
    `arrangements.overlap`. ``kl`` in nats; ``agreement`` of ``answer_tokens`` next tokens.

    ``rows`` candidates, of which ``picked`` were computed again. ``record_bytes``: of the mirrors that keep them,
    ``dense_bytes`` of the same segments kept densely. ``same_verdicts`` of ``verdicts`` judge questions; ``margin``:
    by how much, on average, the logit of the full prefill's verdict leads the best other one.
    """

    world: str
    source: str
    order: str
    method: str
    reader: int
    fit: float
    overlap: float
    kl: float
    agreement: float
    answer_tokens: int
    rows: int
    picked: int
    record_bytes: int
    dense_bytes: int
    verdicts: int = 0
    same_verdicts: int = 0
    margin: float = 0.0


Methods = Mapping[Arrangement, Sequence[str]]


class Laboratory:
    """A world, a node of its own, and what was computed in it. A context manager."""

    def __init__(self, model: Model, world: World, *, readers: int, judged: Sequence[str] = ()) -> None:
        self._model, self._world, self._judged = model, world, judged
        self._readers = world.readers(readers)
        kv = model.decoder.kv
        self._views = [kv.plane_views(layer) for layer in range(kv.shape.layers)]
        self._computed: dict[tuple[int, ...], Tensor] = {}

    def __enter__(self) -> Self:
        settings = Settings(
            socket="/nonexistent/kv.sock", grpc_port=-1, http_port=-1, host_bytes=HOST_BYTES, worker_threads=1
        )
        self._node = LocalNode(settings).__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._node.__exit__(kind, error, trace)
        for slots in self._computed.values():
            self._model.decoder.kv.free(slots)

    def run(self, methods: Methods) -> Iterator[Trial]:
        """Every method of every arrangement with every reader; references are made once an order."""
        for order in dict.fromkeys(one.order for one in methods):
            for reader in self._readers:
                reference = self._refer(order, reader)
                for arrangement, names in methods.items():
                    if arrangement.order is order:
                        yield from self._arranged(arrangement, reader, reference, names)

    def _refer(self, order: Order, reader: int) -> Reference:
        slots = self._compute(reader_parts(self._world, order, reader))
        return refer(self._model.decoder, self._world, slots, is_judged=bool(self._judged))

    def _compute(self, parts: Iterable[Part]) -> Tensor:
        """Slots of a prompt computed in full, once."""
        tokens = tuple(token for _, part in parts for token in part)
        if tokens not in self._computed:
            slots = self._model.decoder.kv.allocate(len(tokens))
            self._model.decoder.prefill(torch.tensor(tokens), slots)
            self._computed[tokens] = slots
        return self._computed[tokens]

    def _arranged(
        self, arrangement: Arrangement, reader: int, reference: Reference, methods: Sequence[str]
    ) -> Iterator[Trial]:
        salt = f"{self._world.name}/{arrangement.text}/{reader}"
        identity = replace(self._model.identity, salt=salt)
        with Client.in_process(self._node, identity, lease_ttl_s=LEASE_TTL_S) as client:
            self._store_sources(client, arrangement, reader)
            for method in methods:
                yield self._try(client, arrangement, reader, reference, method)
            client.delete()

    def _store_sources(self, client: Client, arrangement: Arrangement, reader: int) -> None:
        for source in source_prompts(self._world, arrangement.source, reader):
            prompt = RoundPrompt.from_parts(client.namespace, source.parts)
            kept = [len(prompt.segments) - 1] if source.is_last_only else None
            client.store(prompt, self._views, self._compute(source.parts), segments=kept)
        parts = reader_parts(self._world, arrangement.order, reader)
        prompt = RoundPrompt.from_parts(client.namespace, parts)
        history = [index for index, one in enumerate(prompt.segments) if one.kind is PartKind.PRIVATE]
        client.store(prompt, self._views, self._compute(parts), segments=history)

    def _try(self, client: Client, arrangement: Arrangement, reader: int, reference: Reference, method: str) -> Trial:
        decoder, kv = self._model.decoder, self._model.decoder.kv
        policy = ReusePolicy(method, CHECK_LAYER)
        parts = reader_parts(self._world, arrangement.order, reader)
        prompt = RoundPrompt.from_parts(client.namespace, parts, policy=policy)
        slots = kv.allocate(prompt.token_count)
        with client.lookup([prompt]) as plans:
            plan = plans[0]
            client.restore(plans, self._views, [slots]).wait(RESTORE_TIMEOUT_S)
            case = self._case(plan, slots, is_watched=needs_mass(method))
            picked = apply(decoder, case, method)
            logits = follow(decoder, slots, self._world.tails, reference.answers)
            shared = [index for index, one in enumerate(prompt.segments) if one.kind is PartKind.SHARED]
            stored = client.store(prompt, self._views, slots, base=plan, is_refreshed=True, segments=shared)
        pairs = zip(reference.logits, logits, strict=True)
        close = Closeness.mean([closeness(wanted, found) for wanted, found in pairs])
        judged = self._judge(reference, slots) if method in self._judged else ()
        kv.free(slots)
        client.delete(stored.keys)
        rows = case.prompt.rows.counts()[RowClass.CANDIDATE]
        return Trial(
            self._world.name,
            arrangement.source.value,
            arrangement.order.value,
            method,
            reader,
            round(fit(shared_run(plan)), 4),
            round(overlap(self._world, arrangement, reader), 4),
            close.kl,
            close.agreement,
            sum(len(one) for one in reference.answers),
            rows,
            picked,
            stored.stored_bytes,
            rows * self._model.token_bytes,
            *judged,
        )

    def _case(self, plan: PromptPlan, slots: Tensor, *, is_watched: bool) -> Case:
        spans = [
            Span(one.start, one.tokens, RowClass.CANDIDATE if one.match is Match.SHIFTED else RowClass.EXACT)
            for one in plan.spans()
        ]
        affinities = [one.affinity for one in plan.spans(Match.SHIFTED)]
        rows = classify(plan.prompt.token_count, spans)
        prompt = Prompt(torch.tensor(plan.prompt.tokens), slots, rows)
        if not is_watched:
            return Case(prompt, affinities)
        mass = attention_mass(self._model.decoder, slots, self._world.tails)
        return Case(prompt, affinities, mass[rows.positions(RowClass.CANDIDATE)])

    def _judge(self, reference: Reference, slots: Tensor) -> tuple[int, int, float]:
        """How many verdicts there are, how many stay the same, and the mean lead of the right ones."""
        if not len(reference.verdicts):
            return 0, 0, 0.0
        found = verdicts(self._model.decoder, self._world, slots)
        right = reference.verdicts.argmax(-1)
        return len(right), int((found.argmax(-1) == right).sum()), round(float(_lead(found, right)), 4)


def _lead(logits: Tensor, right: Tensor) -> Tensor:
    """Mean of how far the logit of ``right`` leads the best other one; below 0 where it does not."""
    own = logits.gather(1, right[:, None])[:, 0]
    others = logits.scatter(1, right[:, None], -torch.inf).max(-1).values
    return (own - others).mean()
