"""Storing what a pass has refreshed: each prompt's segments against the masters they were restored from."""

from collections.abc import Sequence

from kvservice.client.connectors.vllm.metrics import Counts
from kvservice.client.connectors.vllm.pass_work import PassWork
from kvservice.client.connectors.vllm.snapshot import Snapshot
from kvservice.client.session import Session
from kvservice.client.store import StoredSegment, StoreOutcome, store_round
from kvservice.model.identity import Identity
from kvservice.wire.v1 import cache_pb2 as wire


def store_pass(
    session: Session,
    identity: Identity,
    work: PassWork,
    stores: Sequence[Sequence[int]],
    snapshot: Snapshot,
    counts: Counts,
) -> None:
    """Reserve, write and commit all of them in one go, and have each round's masters elected.

    ``stores``: per prompt the indices of its segments. Raises what ``store_round`` and the session raise.
    """
    slots = [snapshot.slots_of(index) for index in range(len(work.prompts))]
    results = store_round(session, identity, snapshot, work.requests(stores, slots), None)
    rounds: dict[str, list[StoredSegment]] = {}
    for prompt, result in zip(work.prompts, results, strict=True):
        for stored in result.segments:
            tokens = len(prompt.order.prompt.segments[stored.index].tokens)
            _count(counts, stored, tokens * identity.geometry.token_bytes)
        rounds.setdefault(prompt.order.round, []).extend(result.segments)
    for name, segments in rounds.items():
        held = [one for one in segments if one.outcome is not StoreOutcome.REFUSED]
        if name and held:
            members = [wire.CacheKey(segment=one.key.segment, context=one.key.context) for one in held]
            session.commit_round(wire.CommitRoundRequest(round=name, namespace=identity.namespace(), members=members))


def _count(counts: Counts, stored: StoredSegment, dense_bytes: int) -> None:
    match stored.outcome:
        case StoreOutcome.MIRROR:
            counts.add("mirrors_saved")
            counts.add("mirror_bytes_saved", stored.record_bytes)
            counts.add("mirror_bytes_dense", dense_bytes)
        case StoreOutcome.MASTER:
            counts.add("chunks_saved")
            counts.add("bytes_saved", stored.record_bytes)
        case StoreOutcome.EXISTS:
            counts.add("chunks_existed")
        case StoreOutcome.REFUSED:
            counts.add("saves_refused")
