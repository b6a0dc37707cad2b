"""What POST /explain is asked: one JSON object about a prompt or about one key. Pure: it knows no node.

question := whose, (prompt | key)
whose    := "identity": an identity's JSON object  |  "namespace": its digest, 64 hexadecimal digits
prompt   := "tokens": [ids], and how the engine cuts and names prompts: "chunk_tokens", "block_size", "boundaries",
            "reuse_end", "salt", "adapter": {"name", "digest"}; "may_shift": would other contexts do?
            "asks_others": put one question to each node that owns what is not here?
key      := "key": {"segment", "context"}, both in hexadecimal
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from kvservice.model.chunks import ChunkRule, keyed_chunks
from kvservice.model.errors import InvalidInputError
from kvservice.model.identity import Identity, Namespace, identity_from_json
from kvservice.model.segment import DIGEST_BYTES, CacheKey, ContextId, SegmentId

BODY_BYTES_MAX = 16 << 20
"""A prompt of a million tokens takes half of it."""
TOKENS_MAX = 1 << 20
BOUNDARIES_MAX = 1024
TEXT_CHARS_MAX = 1024

_WHOSE = ("identity", "namespace")
_PROMPT = (
    "tokens", "chunk_tokens", "block_size", "boundaries", "reuse_end", "salt", "adapter", "may_shift", "asks_others",
)  # fmt: skip
_FIELDS = (*_WHOSE, *_PROMPT, "key")


@dataclass(frozen=True, slots=True)
class AskedSegment:
    """One segment, as a lookup would ask for it. ``marks``: the segments before it, flat, nearest first."""

    segment: SegmentId
    accepted_contexts: tuple[ContextId, ...]
    position: int
    tokens: int
    marks: bytes = b""
    may_shift: bool = False
    affinity_min: int = 0


@dataclass(frozen=True, slots=True)
class ExplainQuestion:
    """``identity``: None if only its ``namespace`` was given. ``key``: of one cache; else ``tokens`` of a prompt."""

    namespace: Namespace
    identity: Identity | None
    key: CacheKey | None
    tokens: tuple[int, ...]
    rule: ChunkRule
    may_shift: bool
    asks_others: bool = False

    def segments(self, namespace: Namespace) -> list[AskedSegment]:
        """The prompt's, in a namespace. Raises InvalidInputError for tokens that make no block, or are none."""
        found = [
            AskedSegment(
                chunk.key.segment, (chunk.key.context,), chunk.start, chunk.tokens, chunk.marks, self.may_shift
            )
            for chunk in keyed_chunks(namespace, self.tokens, self.rule)
        ]
        if not found:
            raise InvalidInputError(
                f"{len(self.tokens)} tokens make no block of {self.rule.block_size} that may be reused; give more"
            )
        return found


def parse_question(body: bytes) -> ExplainQuestion:
    """Raises InvalidInputError for what is no question; InvalidIdentityError for what is no identity."""
    try:
        given = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"the question is no JSON that can be read: {error}") from error
    asked = _object(given, "the question")
    for name in asked:
        if name not in _FIELDS:
            near = get_close_matches(str(name), _FIELDS, n=1)
            raise InvalidInputError(
                f"unknown name {str(name)[:40]!r}; {f'did you mean {near[0]!r}? ' if near else ''}"
                f"Known are {', '.join(_FIELDS)}"
            )
    namespace, identity = _whose(asked)
    if ("key" in asked) == ("tokens" in asked):
        raise InvalidInputError('give "tokens" of a prompt, or the "key" of one cache, and not both')
    if "key" not in asked:
        flags = (_flag(asked, name) for name in ("may_shift", "asks_others"))
        return ExplainQuestion(namespace, identity, None, _tokens(asked), _rule(asked), *flags)
    extra = [name for name in _PROMPT if name in asked]
    if extra:
        raise InvalidInputError(f"a key takes no {extra[0]!r}; leave it out")
    return ExplainQuestion(namespace, identity, _key(asked["key"]), (), ChunkRule(), may_shift=False)


def digest_of(text: object, what: str) -> bytes:
    """32 bytes from hexadecimal digits. Raises InvalidInputError."""
    try:
        found = bytes.fromhex(text) if isinstance(text, str) else b""
    except ValueError:
        found = b""
    if len(found) != DIGEST_BYTES:
        raise InvalidInputError(f"{what} {str(text)[:80]!r}: write its digest, {2 * DIGEST_BYTES} hexadecimal digits")
    return found


def _whose(asked: Mapping[str, object]) -> tuple[Namespace, Identity | None]:
    if ("identity" in asked) == ("namespace" in asked):
        raise InvalidInputError('give the "identity" whose prompt it is, or the digest of its "namespace"')
    if "namespace" in asked:
        return Namespace(digest_of(asked["namespace"], "namespace")), None
    identity = identity_from_json(json.dumps(_object(asked["identity"], "an identity")))
    return identity.namespace(), identity


def _tokens(asked: Mapping[str, object]) -> tuple[int, ...]:
    return _whole_numbers(asked["tokens"], "tokens", TOKENS_MAX)


def _rule(asked: Mapping[str, object]) -> ChunkRule:
    adapter = _object(asked.get("adapter") or {}, "an adapter")
    if adapter and set(adapter) != {"name", "digest"}:
        raise InvalidInputError('an adapter has a "name" and a "digest", as the engine\'s connector has them')
    reuse_end = asked.get("reuse_end")
    return ChunkRule(
        _whole_number(asked.get("chunk_tokens", 256), "chunk_tokens"),
        _whole_number(asked.get("block_size", 1), "block_size"),
        _whole_numbers(asked.get("boundaries", ()), "boundaries", BOUNDARIES_MAX),
        None if reuse_end is None else _whole_number(reuse_end, "reuse_end"),
        _text(asked.get("salt", ""), "salt"),
        tuple(_text(adapter[name], f"an adapter's {name}") for name in ("name", "digest")) if adapter else (),
    )


def _key(given: object) -> CacheKey:
    key = _object(given, "a key")
    if set(key) != {"segment", "context"}:
        raise InvalidInputError('a key has a "segment" and a "context"')
    segment, context = (digest_of(key[name], name) for name in ("segment", "context"))
    return CacheKey(SegmentId(segment), ContextId(context))


def _object(given: object, what: str) -> Mapping[str, object]:
    if not isinstance(given, dict):
        raise InvalidInputError(f"{what} is a JSON object, this is {str(given)[:40]!r}")
    return given


def _flag(asked: Mapping[str, object], name: str) -> bool:
    given = asked.get(name, False)
    if not isinstance(given, bool):
        raise InvalidInputError(f"{name} is true or false")
    return given


def _text(given: object, what: str) -> str:
    if not isinstance(given, str) or len(given) > TEXT_CHARS_MAX:
        raise InvalidInputError(f"{what} is a text of at most {TEXT_CHARS_MAX} characters")
    return given


def _whole_number(given: object, what: str) -> int:
    if type(given) is not int or not 0 <= given < 1 << 32:
        raise InvalidInputError(f"{what} is {str(given)[:40]!r}; give a whole number from 0 to {(1 << 32) - 1}")
    return given


def _whole_numbers(given: object, what: str, count_max: int) -> tuple[int, ...]:
    if not isinstance(given, Sequence) or isinstance(given, str) or len(given) > count_max:
        raise InvalidInputError(f"{what} is a list of at most {count_max} whole numbers")
    for one in given:
        if type(one) is not int:
            raise InvalidInputError(f"{what} hold {str(one)[:40]!r}; give whole numbers")
    return tuple(given)
