"""The demo's round, phase by phase: agents write, one leads, the others reuse, all is dropped and restored.

Every phase leaves its facts in the `Round`; nothing here prints.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvservice.client.client import Client
from kvservice.client.demo.measure import Closeness, Speed, closeness, continuation_logits, restore_speed
from kvservice.client.demo.world import CONTINUE_TOKENS, World
from kvservice.client.plans import PromptPlan
from kvservice.client.reuse.collective import Member, refresh_round
from kvservice.client.reuse.refresh import Prompt, refresh
from kvservice.client.reuse.rows import RowClass, Span, classify
from kvservice.client.reuse.selectors import parse_selector
from kvservice.client.rounds import CHECK_LAYER, PartKind, ReusePolicy, RoundPrompt
from kvservice.client.store import StoredSegment, StoreOutcome, StoreRequest, StoreResult
from kvservice.model.plan import Match

ROUND_ID = "demo-round-2"


@dataclass(slots=True, eq=False)
class Reader:
    """One agent's prompt of the second round, and where it lies in paged KV."""

    prompt: RoundPrompt
    tokens: Tensor
    slots: Tensor
    first: Tensor = field(default_factory=lambda: torch.empty(0))
    """Logits behind the prompt as reused, ``[1, vocab]``."""
    stored: StoreResult | None = None

    @property
    def count(self) -> int:
        """Tokens of the prompt."""
        return self.tokens.numel()

    @property
    def prompt_slots(self) -> Tensor:
        """Slots of the prompt alone."""
        return self.slots[: self.count]


@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    """A prompt's full prefill: its greedy continuation, and the logits before each of those tokens."""

    tokens: Tensor
    logits: Tensor


@dataclass(slots=True, eq=False)
class Round:
    """Two rounds of one conversation, against a running node."""

    world: World
    client: Client
    selector: str
    segments: list[Tensor] = field(default_factory=list)
    readers: list[Reader] = field(default_factory=list)
    references: list[Reference] = field(default_factory=list)
    leader: int = 0
    history_bytes: int = 0
    """Records of the private histories, each stored once."""

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's dense KV."""
        return self.world.identity.geometry.token_bytes

    # Round 1

    def write_outputs(self) -> None:
        """Every agent reads its history and speaks; histories are stored, and each output as its producer made it."""
        decoder, agents = self.world.decoder, self.world.agents
        prompts = [torch.cat((agent.history, agent.request, agent.opening)) for agent in agents]
        slots = [decoder.kv.allocate(prompt.numel() + self.world.output_tokens) for prompt in prompts]
        pairs = zip(prompts, slots, strict=True)
        first = torch.cat([decoder.logits(decoder.prefill(prompt, place)[-1:]) for prompt, place in pairs]).argmax(-1)
        positions = torch.tensor([prompt.numel() for prompt in prompts])
        behind = decoder.decode(first, positions, slots, self.world.output_tokens - 1)
        outputs = [self._until_end(row) for row in torch.cat((first[:, None], behind), dim=1)[:, :-1]]
        self.segments = [torch.cat((agent.opening, row)) for agent, row in zip(agents, outputs, strict=True)]
        self._store_outputs(slots)
        for place in slots:
            decoder.kv.free(place)

    def _until_end(self, tokens: Tensor) -> Tensor:
        ends = [index for index, token in enumerate(tokens.tolist()) if token in self.world.end_tokens]
        return tokens[: ends[0]] if ends else tokens

    def _store_outputs(self, slots: Sequence[Tensor]) -> None:
        views = self._views()
        for agent, segment, place in zip(self.world.agents, self.segments, slots, strict=True):
            parts = [
                (PartKind.PRIVATE, agent.history.tolist()),
                (PartKind.PRIVATE, agent.request.tolist()),
                (PartKind.SHARED, segment.tolist()),
            ]
            own = RoundPrompt.from_parts(self.client.namespace, parts)
            histories = [index for index, one in enumerate(own.segments) if one.end <= agent.history.numel()]
            stored = self.client.store(own, views, place[: own.token_count], segments=histories)
            self.history_bytes += stored.stored_bytes
            produced = RoundPrompt.from_parts(self.world.producers_identity.namespace(), parts)
            last = len(produced.segments) - 1
            self.client.store(produced, views, place[: produced.token_count], segments=[last])

    # Round 2

    def make_prompts(self) -> None:
        """Private history, then all outputs in one order, then the question. The leader has the least to compute."""
        for agent in self.world.agents:
            prompt = self._prompt(agent.history, self.client.namespace, self.selector)
            tokens = torch.tensor(prompt.tokens)
            self.readers.append(Reader(prompt, tokens, self._room(tokens)))
        self.leader = min(range(len(self.readers)), key=lambda index: self.readers[index].count)

    def _prompt(self, history: Tensor, namespace: bytes, selector: str) -> RoundPrompt:
        parts = [(PartKind.PRIVATE, history.tolist())]
        parts += [(PartKind.SHARED, segment.tolist()) for segment in self.segments]
        parts += [(PartKind.PRIVATE, self.world.tail.tolist())]
        policy = ReusePolicy(selector, CHECK_LAYER)
        return RoundPrompt.from_parts(type(self.client.namespace)(namespace), parts, policy=policy)

    def lead(self) -> None:
        """The leader restores its history and computes the run in full; its caches become the masters."""
        reader, views = self.readers[self.leader], self._views()
        with self.client.lookup([reader.prompt]) as plans:
            self.client.restore(plans, views, [reader.prompt_slots]).wait()
            reader.first = self._refresh(reader.tokens, reader.prompt_slots, plans[0], "exact")
            reader.stored = self.client.store(reader.prompt, views, reader.prompt_slots, base=plans[0])

    def follow(self) -> None:
        """All others: one lookup, one restore of the leader's masters, one refresh, one store of the mirrors."""
        others = self._others()
        with self.client.lookup([reader.prompt for reader in others]) as plans:
            self.client.restore(plans, self._views(), [reader.prompt_slots for reader in others]).wait()
            self._refresh_together(others, plans)
            requests = [
                StoreRequest(reader.prompt, reader.prompt_slots.numpy(), base=plan, is_refreshed=True)
                for reader, plan in zip(others, plans, strict=True)
            ]
            for reader, result in zip(others, self.client.store_round(requests, self._views()), strict=True):
                reader.stored = result
        self.client.commit_round(ROUND_ID, [reader.stored for reader in self.readers if reader.stored is not None])

    def _refresh_together(self, readers: Sequence[Reader], plans: Sequence[PromptPlan]) -> None:
        """One pass for all: every layer is called once."""
        decoder = self.world.decoder
        members = [
            _member(reader.tokens, reader.prompt_slots, plan, self.selector)
            for reader, plan in zip(readers, plans, strict=True)
        ]
        for reader, done in zip(readers, refresh_round(decoder, members), strict=True):
            reader.first = decoder.logits(done.hidden_at(reader.count - 1))

    def _refresh(self, tokens: Tensor, slots: Tensor, plan: PromptPlan, selector: str) -> Tensor:
        member = _member(tokens, slots, plan, selector)
        done = refresh(self.world.decoder, member.prompt, member.selector)
        return self.world.decoder.logits(done.hidden_at(tokens.numel() - 1))

    # What it costs in quality

    def compute_references(self) -> None:
        """Prefill every prompt in full beside the reused ones, and continue all of them greedily."""
        decoder, counts = self.world.decoder, torch.tensor([reader.count for reader in self.readers])
        slots = [self._room(reader.tokens) for reader in self.readers]
        places = list(zip(self.readers, slots, strict=True))
        first = [decoder.logits(decoder.prefill(reader.tokens, at[: reader.count])[-1:]) for reader, at in places]
        start = torch.cat(first).argmax(-1)
        tokens = torch.cat((start[:, None], decoder.decode(start, counts, slots, CONTINUE_TOKENS - 1)), dim=1)
        for (reader, at), logits, own in zip(places, first, tokens, strict=True):
            self.references.append(Reference(own, continuation_logits(decoder, at, reader.count, logits, own)))
            decoder.kv.free(at)

    def closeness_as_stored(self) -> Closeness:
        """Of the reused prompts to their full prefill, over all agents but the leader."""
        others = [index for index in range(len(self.readers)) if index != self.leader]
        return Closeness.mean(
            [closeness(self.references[index].logits, self.continue_reader(index)) for index in others]
        )

    def continue_reader(self, index: int) -> Tensor:
        """Logits of the reference's continuation over the reader's KV as it lies in the engine now."""
        reader = self.readers[index]
        tokens = self.references[index].tokens
        return continuation_logits(self.world.decoder, reader.slots, reader.count, reader.first, tokens)

    def closeness_of(self, selector: str, *, from_producers: bool = False) -> Closeness:
        """Of another way of reuse, tried and not stored: another selector, or the producers' own caches as source.

        To be asked before ``follow``: afterwards a reader's own refreshed caches would be the nearest source.
        """
        namespace = self.world.producers_identity.namespace() if from_producers else self.client.namespace
        found = []
        for index, reader in enumerate(self.readers):
            if index != self.leader:
                history = self.world.agents[index].history
                prompt = self._prompt(history, namespace, selector)
                found.append(self._try(index, reader.tokens, prompt, selector))
        return Closeness.mean(found)

    def _try(self, index: int, tokens: Tensor, prompt: RoundPrompt, selector: str) -> Closeness:
        decoder, count = self.world.decoder, tokens.numel()
        slots = self._room(tokens)
        with self.client.lookup([prompt]) as plans:
            self.client.restore(plans, self._views(), [slots[:count]]).wait()
            first = self._refresh(tokens, slots[:count], plans[0], selector)
        reference = self.references[index]
        logits = continuation_logits(decoder, slots, count, first, reference.tokens)
        decoder.kv.free(slots)
        return closeness(reference.logits, logits)

    # Drop and restore

    def snapshot(self) -> list[list[Tensor]]:
        """Bits of every prompt's rows, per reader and plane of a layer."""
        return [self._bits(reader.prompt_slots) for reader in self.readers]

    def drop_engine(self) -> None:
        """Forget every row: fresh paged KV, filled with NaN, and new slots for all."""
        decoder = self.world.decoder
        for reader in self.readers:
            decoder.kv.free(reader.slots)
        for tensor in decoder.kv.tensors:
            tensor.fill_(torch.nan)
        for reader in reversed(self.readers):
            reader.slots = self._room(reader.tokens)

    def restore_all(self) -> Speed:
        """One lookup and one restore of all prompts, repeated for the clock; every repetition writes the same rows."""
        prompts = [reader.prompt for reader in self.readers]
        slots = [reader.prompt_slots for reader in self.readers]
        views = self._views()
        with self.client.lookup(prompts) as plans:
            restored = plans.hit_tokens * self.token_bytes
            return restore_speed(lambda: self.client.restore(plans, views, slots).wait(), restored)

    def is_exact(self, snapshot: Sequence[Sequence[Tensor]]) -> bool:
        """True if every row of every prompt has the bits it had."""
        found = self.snapshot()
        pairs = [pair for ours, theirs in zip(found, snapshot, strict=True) for pair in zip(ours, theirs, strict=True)]
        return all(torch.equal(one, other) for one, other in pairs)

    def stored_segments(self) -> list[tuple[int, StoredSegment]]:
        """What the second round stored, with the reader it belongs to."""
        results = [(index, reader.stored) for index, reader in enumerate(self.readers)]
        return [(index, one) for index, stored in results if stored is not None for one in stored.segments]

    def mirrors(self) -> list[tuple[int, StoredSegment]]:
        """Those that are mirrors."""
        return [(index, one) for index, one in self.stored_segments() if one.outcome is StoreOutcome.MIRROR]

    def _others(self) -> list[Reader]:
        return [reader for index, reader in enumerate(self.readers) if index != self.leader]

    def _room(self, tokens: Tensor) -> Tensor:
        return self.world.decoder.kv.allocate(tokens.numel() + CONTINUE_TOKENS)

    def _views(self) -> list[list[Tensor]]:
        kv = self.world.decoder.kv
        return [kv.plane_views(layer) for layer in range(kv.shape.layers)]

    def _bits(self, slots: Tensor) -> list[Tensor]:
        kv = self.world.decoder.kv
        return [plane.view(torch.int16) for layer in range(kv.shape.layers) for plane in kv.read(layer, slots)]


def _member(tokens: Tensor, slots: Tensor, plan: PromptPlan, selector: str) -> Member:
    """A prompt whose found segments are restored at `slots`."""
    spans = [
        Span(span.start, span.tokens, RowClass.CANDIDATE if span.match is Match.SHIFTED else RowClass.EXACT)
        for span in plan.spans()
    ]
    return Member(Prompt(tokens, slots, classify(tokens.numel(), spans)), parse_selector(selector))
