"""A prompt's tokens cut into chunks, and the keys of their caches along the chain. Pure: no engine, no I/O.

    chunk := up to chunk_tokens tokens from the last cut on, or less where a segment boundary comes first
    none ends behind the reuse's end

Cuts lie on multiples of the block size, so that a chunk is whole blocks. Equal prefixes with equal boundaries have
equal chunks and keys in every process; a key depends on every token before it, on ``extra`` and on the items before
its end.
"""

import struct
import sys
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvservice.client.connectors.vllm.wishes import ReuseWish
from kvservice.client.round_request import RoundRequest
from kvservice.model.errors import InvalidInputError
from kvservice.model.identity import Namespace
from kvservice.model.segment import EXACT, CacheKey, Context, root_context, segment_id


@dataclass(frozen=True, slots=True)
class Chunk:
    """One chunk: the prompt's tokens ``[start, end)``. Plain data that may be pickled.

    ``keys``: of its cache, one for each namespace, in the chain's order. ``marks``: for each namespace the segments
    before it, nearest first, as a record's ``preceding`` wants them. ``provenance``: how its KV was made.
    """

    start: int
    end: int
    keys: tuple[CacheKey, ...]
    marks: tuple[tuple[bytes, ...], ...]
    provenance: str = EXACT

    @property
    def tokens(self) -> int:
        """How many tokens it has."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Item:
    """Something other than tokens that a prompt holds, such as an image: where it starts, and a digest of it."""

    position: int
    digest: bytes


class ChunkChain:
    """The chain of one prompt. Not safe from two threads at a time.

    ``namespaces``: one for each engine rank. ``extra``: whatever else decides the prompt's KV from its first token on
    (``request_extra``). ``items``: multimodal items; one changes the keys of the chunk it starts in and of all behind.
    ``asked``: what the request says of its segments; chunks end at their boundaries. ``wish``: what it wishes of reuse
    from other contexts. ``reuse_end``: tokens from there on are in no chunk.

    ``chunks`` holds all whole chunks so far. ``rounded`` are boundaries that were no multiple of the block size and
    were rounded down; ``late`` those that came when their place was cut already, and changed nothing.
    """

    def __init__(
        self,
        namespaces: Sequence[Namespace],
        chunk_tokens: int,
        block_size: int,
        extra: bytes = b"",
        items: Iterable[Item] = (),
        asked: RoundRequest | None = None,
        wish: ReuseWish | None = None,
        reuse_end: int | None = None,
    ) -> None:
        if not namespaces or block_size < 1 or chunk_tokens < 1 or chunk_tokens % block_size:
            raise InvalidInputError(
                f"chunks of {chunk_tokens} tokens over blocks of {block_size} for {len(namespaces)} namespaces; "
                "give at least one namespace, and a multiple of the block size"
            )
        self.chunks: list[Chunk] = []
        self.rounded: list[int] = []
        self.late: list[int] = []
        self.asked = asked
        self.wish = wish
        self._chunk_tokens, self._block_size = chunk_tokens, block_size
        self._namespaces = tuple(namespaces)
        self._contexts = tuple(root_context(namespace, extra) for namespace in namespaces)
        self._items = sorted(items, key=lambda item: (item.position, item.digest), reverse=True)
        self._boundaries: list[int] = []
        self._pending: list[int] = []
        self._reuse_end = sys.maxsize if reuse_end is None else reuse_end - reuse_end % block_size
        self._note(() if asked is None else asked.boundaries)

    @property
    def end(self) -> int:
        """End of the last whole chunk; what follows has no key yet."""
        return self.chunks[-1].end if self.chunks else 0

    @property
    def token_count(self) -> int:
        """Tokens taken in so far."""
        return self.end + len(self._pending)

    def extend(self, token_ids: Sequence[int], boundaries: Iterable[int] = ()) -> list[Chunk]:
        """Take in the tokens that follow those before, and return the chunks that became whole; O(new tokens).

        ``boundaries``: positions in the prompt where a segment ends, in any order; they may lie ahead of its end.
        Raises InvalidInputError for token ids outside 32 bits; those before the bad one's chunk stay taken in.
        """
        self._note(boundaries)
        self._pending.extend(token_ids)
        found: list[Chunk] = []
        taken = 0
        try:
            while (end := self._next_end()) - self.end <= len(self._pending) - taken:
                tokens = self._pending[taken : taken + end - self.end]
                found.append(self._cut(end, tokens))
                taken += len(tokens)
        finally:
            del self._pending[:taken]
        return found

    def tail(self, end: int) -> Chunk | None:
        """The chunk that would follow the last one if a cut lay at ``end``; None if it would be empty or no chunk.

        Changes nothing: a prompt's last whole blocks get a key, and the chain goes on as if nobody had asked.
        """
        if end > self._reuse_end:
            return None
        tokens = self._pending[: max(end - self.end, 0)]
        if end % self._block_size or not tokens or self.end + len(tokens) != end or end > self._next_end():
            return None
        items = list(self._items)
        contexts, self._items = self._with_items(self.end, end), items
        keys = tuple(
            context.cache_key(segment_id(namespace, tokens))
            for context, namespace in zip(contexts, self._namespaces, strict=True)
        )
        return Chunk(self.end, end, keys, tuple(context.marks for context in contexts))

    def _note(self, boundaries: Iterable[int]) -> None:
        for boundary in boundaries:
            place = boundary - boundary % self._block_size
            if place != boundary:
                self.rounded.append(boundary)
            if place > self.end:
                if place not in self._boundaries:
                    insort(self._boundaries, place)
            elif place > 0 and not self._is_cut(place):
                self.late.append(boundary)

    def _is_cut(self, place: int) -> bool:
        index = bisect_left(self.chunks, place, key=lambda chunk: chunk.end)
        return index < len(self.chunks) and self.chunks[index].end == place

    def _next_end(self) -> int:
        while self._boundaries and self._boundaries[0] <= self.end:
            self._boundaries.pop(0)
        full = self.end + self._chunk_tokens
        end = min(full, self._boundaries[0]) if self._boundaries else full
        if end <= self._reuse_end:
            return end
        return self._reuse_end if self.end < self._reuse_end else sys.maxsize

    def _cut(self, end: int, tokens: Sequence[int]) -> Chunk:
        start = self.end
        ids = [segment_id(namespace, tokens) for namespace in self._namespaces]
        contexts = self._with_items(start, end)
        chunk = Chunk(
            start,
            end,
            tuple(context.cache_key(one) for context, one in zip(contexts, ids, strict=True)),
            tuple(context.marks for context in contexts),
        )
        self._contexts = tuple(context.extend(one, end - start) for context, one in zip(contexts, ids, strict=True))
        self.chunks.append(chunk)
        return chunk

    def _with_items(self, start: int, end: int) -> tuple[Context, ...]:
        contexts = self._contexts
        while self._items and self._items[-1].position < end:
            item = self._items.pop()
            mixed = struct.pack("<q", item.position - start) + item.digest
            contexts = tuple(context.with_extra(mixed) for context in contexts)
        return contexts
