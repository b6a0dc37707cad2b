"""Segments and the contexts they stand in: content-addressed ids, equal in every process.

    segment id := BLAKE3(tag, namespace, token ids)          same content, same id, at any position
    chain      := BLAKE3(tag, chain before, segment id, tokens, provenance)
               |  BLAKE3(tag, chain before, extra)       what is there besides tokens: adapter, salt, image
    context id := BLAKE3(tag, chain before, own provenance)  what a cache of the next segment has seen

Every field is length-prefixed, so no two inputs share an encoding.
"""

import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NewType

from blake3 import blake3

from kvservice.model.errors import InvalidInputError
from kvservice.model.identity import Namespace

SegmentId = NewType("SegmentId", bytes)
ContextId = NewType("ContextId", bytes)

DIGEST_BYTES = 32
MARK_BYTES = 8
PRECEDING_MAX = 32
TOKEN_ID_MAX = (1 << 32) - 1
SEGMENT_TOKENS_MAX = 1 << 20

EXACT = ""
"""Provenance of KV that was computed, or exactly restored, with everything before it. Any other text is refreshed
provenance: the selector, its ratio and the check layer, such as ``hkvd:0.02/check=1``."""


@dataclass(frozen=True, slots=True, order=True)
class CacheKey:
    """Names one cache: a segment, computed in one context."""

    segment: SegmentId
    context: ContextId

    def __str__(self) -> str:
        return f"{self.segment.hex()[:12]}@{self.context.hex()[:12]}"


def digest(tag: bytes, *parts: bytes) -> bytes:
    """BLAKE3-256 over a tag and length-prefixed parts."""
    hasher = blake3(tag)
    for part in parts:
        hasher.update(struct.pack("<Q", len(part)))
        hasher.update(part)
    return hasher.digest()


def segment_id(namespace: Namespace, tokens: Sequence[int]) -> SegmentId:
    """Id of a token run in a namespace. Raises InvalidInputError for an empty run or ids outside 32 bits."""
    if not 0 < len(tokens) <= SEGMENT_TOKENS_MAX:
        raise InvalidInputError(f"a segment has 1 to {SEGMENT_TOKENS_MAX} tokens, this one has {len(tokens)}")
    try:
        content = array("I", tokens).tobytes()
    except (OverflowError, TypeError) as error:
        raise InvalidInputError(f"token ids must be integers of 0 to {TOKEN_ID_MAX}: {error}") from error
    return SegmentId(digest(b"kvservice segment\0", namespace, content))


def segment_mark(segment: SegmentId) -> bytes:
    """Short form of a segment id. It ranks caches by affinity and never decides equality."""
    return segment[:MARK_BYTES]


@dataclass(frozen=True, slots=True)
class Context:
    """All that stands before a segment in its prompt. ``marks``: the segments before, nearest first."""

    chain: bytes
    position: int
    marks: tuple[bytes, ...] = ()

    def cache_key(self, segment: SegmentId, provenance: str = EXACT) -> CacheKey:
        """Key of the cache that ``segment`` has here."""
        own = digest(b"kvservice context\0", self.chain, provenance.encode())
        return CacheKey(segment, ContextId(own))

    def extend(self, segment: SegmentId, tokens: int, provenance: str = EXACT) -> "Context":
        """The context of what follows ``segment``."""
        chain = digest(b"kvservice chain\0", self.chain, segment, struct.pack("<Q", tokens), provenance.encode())
        marks = (segment_mark(segment), *self.marks)[:PRECEDING_MAX]
        return Context(chain, self.position + tokens, marks)

    def with_extra(self, extra: bytes) -> "Context":
        """This context, with something mixed in that decides KV from here on and is no token (an image, say)."""
        return Context(digest(b"kvservice extra\0", self.chain, extra), self.position, self.marks)


def root_context(namespace: Namespace, extra: bytes = b"") -> Context:
    """The context of a prompt's first segment: nothing before it, position 0.

    ``extra``: what decides the whole prompt's KV besides its tokens (adapter, caller's salt). Without it the context is
    the one that prompts without such things have always had.
    """
    root = Context(digest(b"kvservice root\0", namespace), 0)
    return root.with_extra(extra) if extra else root


def affinity(preceding: Sequence[bytes], marks: Sequence[bytes]) -> int:
    """How many segments right before agree, counted from the nearest; both sequences hold marks, nearest first."""
    count = 0
    for ours, theirs in zip(preceding, marks, strict=False):
        if ours != theirs:
            break
        count += 1
    return count
