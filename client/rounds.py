"""Prompts of a round: parts cut into segments, and the keys under which each segment's cache may be found.

Pure: no torch, no I/O. The separator between parts is for cutting only; it never reaches the model.
"""

import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from kvservice.model.errors import InvalidInputError, TokenCountError
from kvservice.model.identity import Namespace
from kvservice.model.plan import SegmentQuery
from kvservice.model.segment import EXACT, CacheKey, Context, SegmentId, root_context, segment_id

CHUNK_TOKENS = 256
"""Private parts are cut into chunks of so many tokens: a shorter chunk finds more of a grown history, a longer one
costs fewer records."""
CHECK_LAYER = 1
"""At which layer fresh rows are compared with restored ones: the first whose KV depends on what stands before."""


def check_layer_of(layers: int) -> int:
    """The check layer for a model of so many layers: an eighth of them down, where deviations tell more than at the
    first layer, for a tenth of a full prefill (`bench/quality/README.md`).
    """
    return max(CHECK_LAYER, round(layers / 8))


class PartKind(enum.Enum):
    """What a part of a prompt is to the other agents of the round."""

    PRIVATE = "private"
    """One agent's own history: no boundaries to rely on, hence cut into chunks."""
    SHARED = "shared"
    """An output that several agents' prompts hold."""
    SYSTEM = "system"
    TOOL = "tool"


SHIFTED_KINDS = frozenset({PartKind.SHARED, PartKind.SYSTEM, PartKind.TOOL})
"""Kinds of which a cache from another context may stand in."""

Part = tuple[PartKind, Sequence[int]]


@dataclass(frozen=True, slots=True)
class ReusePolicy:
    """How segments computed elsewhere are refreshed. ``selector``: its name and ratio, such as ``hkvd:0.02``.

    ``affinity_min``: how many segments right before must agree for a cache from another context to be reused.
    ``kinds``: of which such a cache may stand in; PRIVATE is none of them.
    """

    selector: str
    check_layer: int
    affinity_min: int = 0
    kinds: frozenset[PartKind] = SHIFTED_KINDS

    def __post_init__(self) -> None:
        if not self.selector or self.check_layer < 0 or self.affinity_min < 0:
            raise InvalidInputError(f"{self}: give a selector, and a check layer and least affinity of 0 or more")
        if not self.kinds <= SHIFTED_KINDS:
            raise InvalidInputError(f"{self}: a private part is one agent's own; leave it out of the kinds")

    @classmethod
    def by_kind(cls, selectors: Mapping[PartKind, str], check_layer: int = CHECK_LAYER) -> "ReusePolicy":
        """A selector for every kind that may move. Where they differ its text is ``shared=hkvd:0.02+tool=head:8``, in
        order of the kinds' names. Raises InvalidInputError for none at all.
        """
        named = sorted((kind.value, selector) for kind, selector in selectors.items())
        is_one = len(set(selectors.values())) == 1
        text = named[0][1] if is_one else "+".join(f"{kind}={selector}" for kind, selector in named)
        return cls(text, check_layer, kinds=frozenset(selectors))

    @property
    def provenance(self) -> str:
        """The provenance of KV made under this policy: ``hkvd:0.02/check=1``."""
        return f"{self.selector}/check={self.check_layer}"


@dataclass(frozen=True, slots=True)
class PromptSegment:
    """One segment of a prompt; ``position`` is its first token's."""

    kind: PartKind
    tokens: tuple[int, ...]
    position: int
    id: SegmentId

    @property
    def end(self) -> int:
        """The first position behind it."""
        return self.position + len(self.tokens)


@dataclass(frozen=True)
class RoundPrompt:
    """One agent's prompt, in segments. Immutable; threads may share it.

    Under a ``policy`` everything from its first segment that may come from another context on may be refreshed KV: its
    exact and its refreshed key are both accepted. That segment is the first SHARED one, or a SYSTEM or TOOL one behind
    a private part, of the policy's kinds; at a prompt's head, instructions are equal for all and exact anyway. What
    stands before it is exact always, and so is every prompt without a policy.
    """

    namespace: Namespace
    segments: tuple[PromptSegment, ...]
    policy: ReusePolicy | None = None

    @classmethod
    def from_parts(
        cls,
        namespace: Namespace,
        parts: Iterable[Part],
        *,
        policy: ReusePolicy | None = None,
        chunk_tokens: int = CHUNK_TOKENS,
    ) -> "RoundPrompt":
        """A prompt of parts in order; empty parts are left out.

        Raises InvalidInputError when nothing is left, or for token ids outside 32 bits.
        """
        if chunk_tokens < 1:
            raise InvalidInputError(f"chunks of {chunk_tokens} tokens; give 1 or more")
        segments: list[PromptSegment] = []
        position = 0
        for kind, tokens in _cut_parts(parts, chunk_tokens):
            segments.append(PromptSegment(kind, tokens, position, segment_id(namespace, tokens)))
            position += len(tokens)
        if not segments:
            raise InvalidInputError("a prompt needs at least one token")
        return cls(namespace, tuple(segments), policy)

    @classmethod
    def from_lengths(
        cls,
        namespace: Namespace,
        tokens: Sequence[int],
        lengths: Sequence[tuple[PartKind, int]],
        *,
        policy: ReusePolicy | None = None,
        chunk_tokens: int = CHUNK_TOKENS,
    ) -> "RoundPrompt":
        """A prompt whose parts have these lengths. Raises TokenCountError unless they add up to ``tokens``."""
        total = sum(length for _, length in lengths)
        if total != len(tokens) or any(length < 0 for _, length in lengths):
            raise TokenCountError(f"parts of {[n for _, n in lengths]} tokens do not make a prompt of {len(tokens)}")
        return cls.from_parts(namespace, _take(tokens, lengths), policy=policy, chunk_tokens=chunk_tokens)

    @classmethod
    def split_at(
        cls,
        namespace: Namespace,
        tokens: Sequence[int],
        separator: Sequence[int],
        kinds: Sequence[PartKind] | None = None,
        *,
        policy: ReusePolicy | None = None,
        chunk_tokens: int = CHUNK_TOKENS,
    ) -> "RoundPrompt":
        """A prompt cut at every ``separator`` (token ids), which is removed: the model never sees it.

        ``kinds``: one for every part, empty parts too; left out, the first part is PRIVATE and the rest SHARED.
        Raises TokenCountError when ``kinds`` do not fit the parts found.
        """
        parts = split_tokens(tokens, separator)
        if kinds is None:
            kinds = [PartKind.PRIVATE, *[PartKind.SHARED] * (len(parts) - 1)]
        if len(kinds) != len(parts):
            raise TokenCountError(f"{len(kinds)} kinds for {len(parts)} parts; give one for each, empty ones too")
        together = zip(kinds, parts, strict=True)
        return cls.from_parts(namespace, together, policy=policy, chunk_tokens=chunk_tokens)

    @cached_property
    def tokens(self) -> tuple[int, ...]:
        """What the model computes: all token ids, no separators."""
        return tuple(token for segment in self.segments for token in segment.tokens)

    @property
    def token_count(self) -> int:
        """Length of the prompt."""
        return self.segments[-1].end

    @property
    def boundaries(self) -> tuple[int, ...]:
        """The position behind every segment; the last one is the prompt's length."""
        return tuple(segment.end for segment in self.segments)

    @cached_property
    def first_shared(self) -> int:
        """Index of the first segment that may be refreshed; the number of segments if none may."""
        if self.policy is None:
            return len(self.segments)
        is_behind = False
        for index, segment in enumerate(self.segments):
            if segment.kind in self.policy.kinds and (is_behind or segment.kind is PartKind.SHARED):
                return index
            is_behind = is_behind or segment.kind is PartKind.PRIVATE
        return len(self.segments)

    def may_shift(self, index: int) -> bool:
        """True if a cache from another context may stand in for segment ``index``."""
        kinds = frozenset() if self.policy is None else self.policy.kinds
        return index >= self.first_shared and self.segments[index].kind in kinds

    def provenance(self, index: int, *, is_refreshed: bool) -> str:
        """Provenance of segment ``index``: exact before the first shared one whatever happened behind it."""
        is_exact = not is_refreshed or self.policy is None or index < self.first_shared
        return EXACT if is_exact or self.policy is None else self.policy.provenance

    def contexts(self, *, is_refreshed: bool = False) -> tuple[Context, ...]:
        """What stands before every segment, when the prompt was computed in full or ``is_refreshed``."""
        return self._refreshed_contexts if is_refreshed else self._exact_contexts

    def key(self, index: int, *, is_refreshed: bool = False) -> CacheKey:
        """The key of segment ``index``'s cache, when the prompt was computed in full or ``is_refreshed``."""
        return (self._refreshed_keys if is_refreshed else self._exact_keys)[index]

    def query(self, index: int) -> SegmentQuery:
        """What to ask for segment ``index``: the exact key first, then the refreshed one if it differs."""
        accepted = [self.key(index)]
        if index >= self.first_shared:
            accepted.append(self.key(index, is_refreshed=True))
        segment = self.segments[index]
        affinity_min = 0 if self.policy is None else self.policy.affinity_min
        may_shift = self.may_shift(index)
        return SegmentQuery(
            tuple(accepted), segment.position, len(segment.tokens), may_shift, affinity_min if may_shift else 0
        )

    @cached_property
    def _exact_keys(self) -> tuple[CacheKey, ...]:
        return tuple(self._keys(is_refreshed=False))

    @cached_property
    def _refreshed_keys(self) -> tuple[CacheKey, ...]:
        return tuple(self._keys(is_refreshed=True))

    def _keys(self, *, is_refreshed: bool) -> Iterator[CacheKey]:
        """Made once a prompt, a digest each: a lookup asks for them, and the store behind it again."""
        together = zip(self.segments, self.contexts(is_refreshed=is_refreshed), strict=True)
        for index, (segment, context) in enumerate(together):
            yield context.cache_key(segment.id, self.provenance(index, is_refreshed=is_refreshed))

    @cached_property
    def _exact_contexts(self) -> tuple[Context, ...]:
        return tuple(self._chain(is_refreshed=False))

    @cached_property
    def _refreshed_contexts(self) -> tuple[Context, ...]:
        return tuple(self._chain(is_refreshed=True))

    def _chain(self, *, is_refreshed: bool) -> Iterator[Context]:
        context = root_context(self.namespace)
        for index, segment in enumerate(self.segments):
            yield context
            provenance = self.provenance(index, is_refreshed=is_refreshed)
            context = context.extend(segment.id, len(segment.tokens), provenance)


def split_tokens(tokens: Sequence[int], separator: Sequence[int]) -> list[list[int]]:
    """The runs between separators, found from the left; neighbours, or one at an end, leave an empty run.

    Raises InvalidInputError for an empty separator.
    """
    if not len(separator):
        raise InvalidInputError("an empty separator would cut everywhere; give the token ids of the separator")
    whole, mark = list(tokens), list(separator)
    parts: list[list[int]] = [[]]
    index = 0
    while index < len(whole):
        if whole[index] == mark[0] and whole[index : index + len(mark)] == mark:
            parts.append([])
            index += len(mark)
        else:
            parts[-1].append(whole[index])
            index += 1
    return parts


def _cut_parts(parts: Iterable[Part], chunk_tokens: int) -> Iterator[tuple[PartKind, tuple[int, ...]]]:
    for kind, part in parts:
        tokens = tuple(int(token) for token in part)
        step = chunk_tokens if kind is PartKind.PRIVATE else max(len(tokens), 1)
        for start in range(0, len(tokens), step):
            yield kind, tokens[start : start + step]


def _take(tokens: Sequence[int], lengths: Iterable[tuple[PartKind, int]]) -> Iterator[Part]:
    start = 0
    for kind, length in lengths:
        yield kind, tokens[start : start + length]
        start += length
