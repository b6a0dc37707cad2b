"""A prompt cut into chunks, and the keys of their caches along the exact chain: the rule that engines' connectors use.

    chunk := up to chunk_tokens tokens from the last cut on, or less where a boundary, the end of reuse or the prompt's
             last whole block comes first

Cuts lie on multiples of the block size. ``kvservice.client.connectors.vllm.chunks`` cuts prompts that grow, by the same
rule; a test compares the two.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvservice.model.errors import InvalidInputError
from kvservice.model.identity import Namespace
from kvservice.model.segment import CacheKey, digest, root_context, segment_id


@dataclass(frozen=True, slots=True)
class ChunkRule:
    """How a prompt is cut. ``boundaries``: where its segments end. ``reuse_end``: what is behind is in no chunk.

    ``salt``: the request's cache salt; ``adapter``: its LoRA adapter's name and digest, empty without one.
    Raises InvalidInputError for chunks that are not whole blocks.
    """

    chunk_tokens: int = 256
    block_size: int = 1
    boundaries: tuple[int, ...] = ()
    reuse_end: int | None = None
    salt: str = ""
    adapter: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.block_size < 1 or self.chunk_tokens < 1 or self.chunk_tokens % self.block_size:
            raise InvalidInputError(
                f"chunks of {self.chunk_tokens} tokens over blocks of {self.block_size}; give a multiple of the block "
                "size"
            )

    @property
    def extra(self) -> bytes:
        """What decides a prompt's KV besides its tokens; empty for a plain one."""
        parts = [part.encode() for part in (self.salt, *self.adapter)]
        return digest(b"kvservice request\0", *parts) if self.salt or self.adapter else b""

    def ends(self, tokens: int) -> Iterator[int]:
        """Where the chunks of a prompt of so many tokens end."""
        stop = self._whole(tokens if self.reuse_end is None else max(0, min(tokens, self.reuse_end)))
        cuts: Iterable[int] = sorted({self._whole(one) for one in self.boundaries if 0 < one < stop} | {stop})
        at = 0
        for cut in cuts:
            while at < cut:
                at = min(at + self.chunk_tokens, cut)
                yield at

    def _whole(self, tokens: int) -> int:
        return tokens - tokens % self.block_size


@dataclass(frozen=True, slots=True)
class KeyedChunk:
    """The prompt's tokens ``[start, start + tokens)``. ``marks``: the segments before it, flat, nearest first."""

    key: CacheKey
    start: int
    tokens: int
    marks: bytes


def keyed_chunks(namespace: Namespace, tokens: Sequence[int], rule: ChunkRule) -> list[KeyedChunk]:
    """The chunks of a prompt in a namespace. Raises InvalidInputError for token ids outside 32 bits."""
    context, start, found = root_context(namespace, rule.extra), 0, list[KeyedChunk]()
    for end in rule.ends(len(tokens)):
        segment = segment_id(namespace, tokens[start:end])
        found.append(KeyedChunk(context.cache_key(segment), start, end - start, b"".join(context.marks)))
        context, start = context.extend(segment, end - start), end
    return found
