"""What the scheduler's side remembers: of every request of the engine, and of what the service holds. State only."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvservice.client.connectors.vllm.chunks import Chunk, ChunkChain
from kvservice.client.connectors.vllm.lookups import Ticket
from kvservice.client.connectors.vllm.members import Member
from kvservice.client.connectors.vllm.metadata import LoadOrder
from kvservice.client.round_request import RoundRequest
from kvservice.model.segment import CacheKey

KNOWN_MAX = 1 << 16
"""Keys remembered as held by the service."""

Request = Any
"""vllm.v1.request.Request, through the few fields read here."""


@dataclass(frozen=True, slots=True)
class LoadUnderWay:
    """A load that the workers are at, and the lease that keeps it possible.

    ``computed``: tokens of it that a pass computes, since nothing was found for them.
    """

    ticket: Ticket | None
    order: LoadOrder
    computed: int = 0

    @property
    def tokens(self) -> int:
        """How many it is to bring."""
        return self.order.end - self.order.start

    @property
    def hits(self) -> tuple[int, int]:
        """Tokens that were promised from memory, and from SSD."""
        found = self.tokens - self.computed
        if self.ticket is None or self.ticket.answer is None:
            return found, 0
        answered = zip(self.ticket.chunks, self.ticket.answer.on_ssd, strict=False)
        parts = [chunk for chunk, on_ssd in answered if on_ssd]
        on_ssd = sum(max(min(one.end, self.order.end) - max(one.start, self.order.start), 0) for one in parts)
        return found - on_ssd, on_ssd

    def lost_tokens(self, bad_blocks: set[int], block_size: int) -> int:
        """How many of its last tokens are behind the first of these blocks; 0 if it has none of them."""
        hit = [index for index, block in enumerate(self.order.block_ids) if block in bad_blocks]
        return self.tokens - hit[0] * block_size if hit else 0


@dataclass(slots=True)
class Tracked:
    """One request, from its arrival to its end.

    ``local``: tokens that the engine has by itself, as of its last question. ``life``: how often it was preempted; a
    resumed request is looked up anew. ``is_refused``: a load failed, so nothing is promised again. ``is_late``: no
    answer came in time, so nothing is promised in this life. ``saved``: chunks that need no saving any more.
    ``blocks``: the engine's, from the first token on. ``member``: its part in a round, if it may reuse from other
    contexts. ``mark``: what its blocks behind the exact ones are named by.
    """

    request: Request
    chain: ChunkChain
    block_size: int
    taken: int = 0
    ticket: Ticket | None = None
    seen_s: float = 0.0
    asked_s: float | None = None
    local: int = 0
    life: int = 0
    is_refused: bool = False
    is_late: bool = False
    is_admitted: bool = False
    is_ended: bool = False
    load: LoadUnderWay | None = None
    blocks: list[int] = field(default_factory=list)
    saved: int = 0
    is_tail_done: bool = False
    member: Member | None = None
    mark: bytes = b""

    @property
    def asked(self) -> RoundRequest | None:
        """What the request says of its round, its segments and their reuse; None if it says nothing."""
        return self.chain.asked

    def extend(self) -> None:
        """Take tokens that came since into the chain."""
        tokens = self.request.all_token_ids
        if len(tokens) > self.taken:
            fresh = tokens[self.taken :]
            self.taken = len(tokens)
            self.chain.extend(fresh)

    def tail(self) -> Chunk | None:
        """The last whole blocks of the prompt, too few for a chunk: who asks for the same prompt again finds them."""
        prompt = self.request.num_prompt_tokens
        return self.chain.tail(prompt - prompt % self.block_size)

    def chunks_to_ask(self) -> list[Chunk]:
        """All that could be loaded of the tokens so far: at least one token is left to compute."""
        self.extend()
        chunks = [chunk for chunk in self.chain.chunks if chunk.start < self.request.num_tokens - 1]
        tail = self.tail()
        return chunks if tail is None else [*chunks, tail]

    @property
    def exact_end(self) -> int:
        """Up to where its tokens need not be computed even if nothing is reused from other contexts."""
        is_known = self.ticket is not None and self.ticket.answer is not None
        return max(self.local, self.held_end() if is_known else 0)

    def held_end(self) -> int:
        """Where what the lookup found ends: behind a whole block, and at least one token before the request's end."""
        assert self.ticket is not None
        assert self.ticket.answer is not None
        prefix = self.ticket.answer.prefix
        held = self.ticket.chunks[prefix - 1].end if prefix else 0
        end = min(held, int(self.request.num_tokens) - 1)
        return end - end % self.block_size

    def unsave_from(self, end: int) -> None:
        """What lies behind ``end`` is computed, or computed again, and may be saved then."""
        self.saved = sum(chunk.end <= end for chunk in self.chain.chunks[: self.saved])
        self.is_tail_done = False


class KnownKeys:
    """Keys that the service is known to hold, with when that was learnt. The oldest are forgotten."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since_s: OrderedDict[CacheKey, float] = OrderedDict()

    def __contains__(self, chunk: Chunk) -> bool:
        return chunk.keys[0] in self._since_s

    def add(self, chunk: Chunk) -> None:
        """The chunk is held, or is about to be."""
        self._since_s[chunk.keys[0]] = self._clock()
        if len(self._since_s) > KNOWN_MAX:
            self._since_s.popitem(last=False)

    def clear(self) -> None:
        """Nothing is known: the service was restarted."""
        self._since_s.clear()

    def discard(self, chunk: Chunk) -> None:
        """Nothing is known of the chunk."""
        self._since_s.pop(chunk.keys[0], None)

    def learn(self, ticket: Ticket) -> None:
        """Take in what a lookup found."""
        if ticket.answer is None or ticket.answer.is_failed:
            return
        for chunk, is_held in zip(ticket.chunks, ticket.answer.is_held, strict=False):
            if is_held:
                self.add(chunk)
            elif self._since_s.get(chunk.keys[0], ticket.asked_s) < ticket.asked_s:
                self.discard(chunk)  # evicted, or never stored; what was saved after asking is neither
