"""`kvservice explain`: what keeps two identities apart, or why a running node has no hit for a prompt.

Reading what the user gave raises InvalidInputError (exit status 2); asking the node raises what its calls raise.
"""

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace

from kvservice.client.connectors.vllm.chunks import ChunkChain
from kvservice.client.connectors.vllm.metrics import Counts
from kvservice.client.connectors.vllm.request_extras import request_extra
from kvservice.client.connectors.vllm.wishes import ReuseWish, WishReader
from kvservice.client.explain import AsQuery, Explanation, explain_queries, round_query
from kvservice.client.explain_text import difference_lines, explanation_lines, namespace_text, segment_text
from kvservice.client.round_request import RoundRequest
from kvservice.client.security import TOKEN_FILE, Security
from kvservice.client.session import Session
from kvservice.client.shared_memory import SharedMemoryTransport
from kvservice.model.differences import differences
from kvservice.model.errors import InvalidIdentityError, InvalidInputError
from kvservice.model.explanation import HeldCache
from kvservice.model.identity import Identity, Namespace, identity_from_json
from kvservice.model.segment import TOKEN_ID_MAX
from kvservice.wire.v1 import cache_pb2 as wire

FILE_BYTES_MAX = 64 << 20
SAME = "same namespace"
REUSED = "\n\nits segments, which may come from other contexts:\n"


@dataclass(frozen=True, slots=True)
class Where:
    """Which node is asked: at its unix ``socket``, or at ``node``, its port, with what that asks for (``Security``).

    Raises InvalidInputError for what would not be looked at, or must not stand in a command.
    """

    socket: str
    node: str = ""
    token: str = field(default="", repr=False)
    ca: str = ""
    client_cert: str = ""
    client_key: str = ""

    def __post_init__(self) -> None:
        if not self.node and (self.token or self.ca or self.client_cert or self.client_key):
            raise InvalidInputError("--token, --ca, --client-cert, --client-key are for --node: a socket asks for none")
        if self.token and not self.token.startswith(TOKEN_FILE):
            raise InvalidInputError("--token is file:PATH: everybody on this host sees a command's arguments")

    def transport(self) -> SharedMemoryTransport:
        """The way there. Raises ConfigError for files that cannot be read."""
        if not self.node:
            return SharedMemoryTransport(f"unix:{self.socket}")
        security = Security(self.token, self.ca, self.client_cert, self.client_key)
        security.check(self.node)
        return SharedMemoryTransport(self.node, security)


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt, as an engine's connector would ask for it.

    ``chunk_tokens``: tokens of a segment, a multiple of ``block_size``; what follows the last whole block has none.
    ``salt``: the request's cache salt. ``adapter``: its LoRA adapter's name and digest; empty: none. ``words``: what
    the request says of its round; chunks end at its segments' boundaries.
    """

    identity: Identity
    tokens: Sequence[int]
    chunk_tokens: int
    block_size: int = 1
    salt: str = ""
    adapter: tuple[str, ...] = ()
    words: RoundRequest | None = None

    def queries(self) -> list[AsQuery]:
        """The prompt's chunks; and, if it may be reused from other contexts, its segments, as the connector asks too.

        Raises InvalidInputError for chunks that are not whole blocks, and for token ids outside 32 bits.
        """
        wish = self._wish()
        if wish is None or wish.is_plain:
            return [self._exact_query(None if self.words is None else self.words.off_from)]
        exact = [self._exact_query(wish.first_shared_token)] if wish.first_shared_token >= self.block_size else []
        return [*exact, round_query(wish.prompt)]

    def _wish(self) -> ReuseWish | None:
        """Who has a salt or an adapter gets none, which is logged as in the engine."""
        request = SimpleNamespace(
            prompt_token_ids=list(self.tokens), cache_salt=self.salt or None, lora_request=self.adapter or None
        )
        return WishReader(self.identity.namespace(), self.identity.pinned_reason, Counts()).of(request, self.words)

    def _exact_query(self, reuse_end: int | None) -> AsQuery:
        extra = request_extra(self.salt, *self.adapter)

        def in_namespace(namespace: Namespace) -> wire.PromptQuery:
            chain = ChunkChain(
                [namespace], self.chunk_tokens, self.block_size, extra, asked=self.words, reuse_end=reuse_end
            )
            chunks = chain.extend(self.tokens)
            tail = chain.tail(len(self.tokens) - len(self.tokens) % self.block_size)
            segments = [
                wire.SegmentQuery(
                    segment=chunk.keys[0].segment,
                    accepted_contexts=[chunk.keys[0].context],
                    position=chunk.start,
                    tokens=chunk.tokens,
                )
                for chunk in (chunks if tail is None else [*chunks, tail])
            ]
            return wire.PromptQuery(namespace=namespace, segments=segments)

        if not in_namespace(self.identity.namespace()).segments:
            raise InvalidInputError(f"{len(self.tokens)} tokens make no block of {self.block_size}; give a whole block")
        return in_namespace


def read_identity(file: str) -> Identity:
    """An identity from a file of JSON, as ``Identity.canonical_json`` or a connector's ``identity_file`` writes it."""
    try:
        return identity_from_json(_read(file))
    except InvalidIdentityError as error:
        raise InvalidIdentityError(f"{file}: {error}") from error


def read_tokens(file: str) -> list[int]:
    """Token ids from a file, or ``-`` for standard input: a JSON list, or numbers with spaces or commas between."""
    text = sys.stdin.read(FILE_BYTES_MAX + 1) if file == "-" else _read(file)
    words = re.split(r"[\s,]+", text.strip().removeprefix("[").removesuffix("]").strip(" \t\r\n,"))
    wrong = next((word for word in words if not word.isdecimal() or len(word) > len(str(TOKEN_ID_MAX))), None)
    if wrong is not None:
        what = f"{wrong[:40]!r} is no token id" if wrong else "there are no token ids"
        raise InvalidInputError(f"{file}: {what}; give a JSON list, or numbers with spaces or commas between")
    return [int(word) for word in words]


def read_words(file: str, tokens: int) -> RoundRequest | None:
    """What a request says of its round, from a file with its body, or with its ``kv_transfer_params`` alone.

    None if it says nothing. Raises RoundRequestError for words that a prompt of so many tokens cannot have.
    """
    try:
        given = json.loads(_read(file))
    except ValueError as error:
        raise InvalidInputError(f"{file} is no JSON: {error}") from error
    params = given.get("kv_transfer_params", given) if isinstance(given, dict) else None
    if not isinstance(params, dict):
        raise InvalidInputError(f"{file}: give a request's JSON object, or its kv_transfer_params")
    return RoundRequest.from_params(params, tokens)


def read_adapter(text: str) -> tuple[str, ...]:
    """``NAME=DIGEST``, or nothing."""
    name, _, digest = text.rpartition("=")
    if text and not (name and digest):
        raise InvalidInputError(f"adapter {text!r}: give NAME=DIGEST, both as the engine's connector has them")
    return (name, digest) if text else ()


def compare(left: str, right: str, *, as_json: bool) -> tuple[int, str]:
    """Exit status and text for two files of identities: 0 for one namespace, 1 for two."""
    ours, theirs = read_identity(left), read_identity(right)
    found = differences(ours, theirs)
    names = [namespace_text(one.namespace()) for one in (ours, theirs)]
    if as_json:
        document = {"is_same": not found, "namespaces": names, "differences": [asdict(one) for one in found]}
        return int(bool(found)), json.dumps(document, indent=2)
    if not found:
        return 0, f"{SAME} {names[0]}: these two share KV"
    head = f"namespaces {names[0]} and {names[1]} share nothing; what differs:"
    return 1, "\n".join([head, *(f"  {line}" for line in difference_lines(found, left, right))])


def ask(where: Where, question: Question, *, as_json: bool) -> tuple[int, str]:
    """Exit status and text for a prompt and a node: 0 if all of it is found, 1 if not."""
    queries, identity = question.queries(), question.identity
    with Session(where.transport(), [identity], is_writer=False, client_name="kvservice explain") as session:
        found = explain_queries(session, [(identity.namespace(), query) for query in queries], asks_others=True)
    status = int(not all(one.is_found for one in found))
    if as_json:
        document = explanation_document(found[0])
        return status, json.dumps(document | {"reused": [explanation_document(one) for one in found[1:]]}, indent=2)
    return status, REUSED.join("\n".join(explanation_lines(one)) for one in found)


def explanation_document(explanation: Explanation) -> dict[str, object]:
    """An explanation for programs; ``text`` of a segment is for people and may change."""
    return {
        "namespace": explanation.identity.namespace().hex(),
        "is_found": explanation.is_found,
        "tokens": explanation.tokens,
        "exact_prefix_tokens": explanation.exact_prefix_tokens,
        "held_segments": explanation.held_segments,
        "lengths": [{"tokens": tokens, "segments": count} for tokens, count in explanation.lengths],
        "pinned_reason": explanation.pinned_reason,
        "remembered_s": explanation.remembered_s,
        "has_ssd": explanation.has_ssd,
        "segments": [_segment_document(explanation, index) for index in range(len(explanation.segments))],
        "elsewhere": [
            {
                "namespace": one.identity.namespace().hex(),
                "held_segments": one.segments,
                "found": one.found,
                "differences": [asdict(difference) for difference in one.differences],
            }
            for one in explanation.elsewhere
        ],
    }


def _segment_document(explanation: Explanation, index: int) -> dict[str, object]:
    one = explanation.segments[index]
    why = one.why
    return {
        "start": one.start,
        "tokens": one.tokens,
        "reason": why.reason.name,
        "match": why.match.name,
        "text": segment_text(explanation, index),
        "age_s": why.age_s,
        "detail": why.detail,
        "is_of_other_context": why.is_of_other_context,
        "found": None if why.found is None else _held_document(why.found),
        "contexts": why.contexts,
        "nearest": [_held_document(held) for held in why.nearest],
        "places": [asdict(place) | {"answer": place.answer.name} for place in why.places],
    }


def _held_document(held: HeldCache) -> dict[str, object]:
    return {
        "context": held.context.hex(),
        "position": held.position,
        "provenance": held.provenance,
        "kind": held.kind.name,
        "tiers": [tier.name for tier in held.tiers],
        "is_arriving": held.is_arriving,
        "preceding": held.preceding,
        "affinity": held.affinity,
    }


def _read(file: str) -> str:
    try:
        with Path(file).open(encoding="utf-8") as stream:
            text = stream.read(FILE_BYTES_MAX + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"{file} cannot be read: {error}") from error
    if len(text) > FILE_BYTES_MAX:
        raise InvalidInputError(f"{file} is larger than {FILE_BYTES_MAX} characters, the limit")
    return text
