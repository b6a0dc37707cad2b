"""Messages between nodes, to and from our own words. What is decoded here is hostile until each field was checked."""

import math
from collections.abc import Iterable
from uuid import UUID

from kvservice.model.cache import MasterReference
from kvservice.model.errors import ConfigError, InvalidInputError, KVServiceError
from kvservice.model.identity import Namespace
from kvservice.model.plan import Match, MissReason
from kvservice.model.segment import DIGEST_BYTES, CacheKey, ContextId, SegmentId
from kvservice.peers.host import Answer, Fetch, Found, FoundHead, Query
from kvservice.peers.member import Facts, NodeId
from kvservice.store import PREFILL_S_MAX, WriteRequest
from kvservice.wire.v1 import cache_pb2
from kvservice.wire.v1 import peer_pb2 as wire

ERROR_CHARS_MAX = 2000
UUID_BYTES = 16


def encode_facts(facts: Facts) -> wire.PeerFacts:
    """What a node says of itself."""
    return wire.PeerFacts(
        uuid=facts.node.uuid.bytes,
        epoch=facts.node.epoch,
        name=facts.name,
        weight=facts.weight,
        is_draining=facts.is_draining,
        empty_s=facts.empty_s,
        flight_port=facts.flight_port,
        boot_id=facts.boot_id,
        local_path=facts.local_path,
    )


def decode_facts(said: wire.PeerFacts) -> Facts:
    """Raises InvalidInputError for facts that cannot be."""
    if len(said.uuid) != UUID_BYTES:
        raise InvalidInputError(f"a node's uuid has {UUID_BYTES} bytes, not {len(said.uuid)}")
    empty_s = said.empty_s if said.HasField("empty_s") else None
    try:
        node = NodeId(UUID(bytes=said.uuid), said.epoch)
        flags = (said.is_draining, empty_s, said.flight_port)
        return Facts(node, said.name, said.weight, *flags, said.boot_id, said.local_path)
    except ConfigError as error:
        raise InvalidInputError(str(error)) from error


def encode_error(error: KVServiceError) -> wire.PeerError:
    """Its code, and as much of its text as fits a frame."""
    return wire.PeerError(code=error.code, message=str(error)[:ERROR_CHARS_MAX])


def encode_key(key: CacheKey) -> cache_pb2.CacheKey:
    """A key."""
    return cache_pb2.CacheKey(segment=key.segment, context=key.context)


def decode_key(key: cache_pb2.CacheKey) -> CacheKey:
    """Raises InvalidInputError unless both ids have the length of a digest."""
    if len(key.segment) != DIGEST_BYTES or len(key.context) != DIGEST_BYTES:
        raise InvalidInputError(f"segment and context ids have {DIGEST_BYTES} bytes")
    return CacheKey(SegmentId(key.segment), ContextId(key.context))


def encode_query(query: Query) -> wire.PeerQuery:
    """A question."""
    return wire.PeerQuery(
        namespace=query.namespace,
        segment=query.segment,
        accepted_contexts=query.accepted_contexts,
        position=query.position,
        tokens=query.tokens,
        may_shift=query.may_shift,
        affinity_min=query.affinity_min,
        marks=query.marks,
    )


def decode_query(said: wire.PeerQuery) -> Query:
    """A question."""
    return Query(
        Namespace(said.namespace),
        SegmentId(said.segment),
        [ContextId(one) for one in said.accepted_contexts],
        said.position,
        said.tokens,
        said.may_shift,
        said.affinity_min,
        said.marks,
    )


def encode_found(found: Found) -> wire.PeerFound:
    """Answers."""
    return wire.PeerFound(lease_id=found.lease_id, ttl_s=found.ttl_s, answers=map(_encode_answer, found.answers))


def _encode_answer(answer: Answer) -> wire.PeerAnswer:
    return wire.PeerAnswer(
        match=answer.match,
        miss_reason=answer.miss_reason,
        affinity=answer.affinity,
        record=_encode_head(answer.record),
        master=_encode_head(answer.master),
    )


def _encode_head(head: FoundHead | None) -> wire.PeerHead | None:
    return (
        None if head is None else wire.PeerHead(head=head.head, prefill_s=head.prefill_s, ahead_bytes=head.ahead_bytes)
    )


def decode_answer(said: wire.PeerAnswer) -> Answer:
    """An answer; heads are not looked at. Raises InvalidInputError for numbers that mean nothing here."""
    try:
        match, reason = Match(said.match), MissReason(said.miss_reason)
    except ValueError as error:
        raise InvalidInputError(f"the other node answers with what this one does not know: {error}") from error
    record = _decode_head(said.record) if said.HasField("record") else None
    master = _decode_head(said.master) if said.HasField("master") else None
    if (match is Match.NONE) is not (record is None):
        raise InvalidInputError("an answer has a record exactly if something was found")
    return Answer(match, reason, said.affinity, record, master)


def _decode_head(said: wire.PeerHead) -> FoundHead:
    is_time = math.isfinite(said.prefill_s) and 0 <= said.prefill_s <= PREFILL_S_MAX
    return FoundHead(said.head, said.prefill_s if is_time else 0.0, said.ahead_bytes)


def decode_fetch(said: wire.PeerFetch) -> Fetch:
    """Which record to send."""
    return Fetch(Namespace(said.namespace), decode_key(said.key), said.generation, said.lease_id)


def decode_store(said: wire.PeerStore) -> WriteRequest:
    """Which record is about to be sent."""
    master = None
    if said.master_context:
        master = MasterReference(ContextId(said.master_context), said.master_generation)
    return WriteRequest(said.namespace, decode_key(said.key), said.record_bytes, master, said.prefill_s)


def decode_keys(keys: Iterable[cache_pb2.CacheKey]) -> list[CacheKey]:
    """Keys, each checked."""
    return [decode_key(key) for key in keys]
