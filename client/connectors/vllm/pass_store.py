"""Storing what a pass has refreshed: each prompt's segments against the masters they were restored from.

Which rows a pass has computed is known, and all others are the master's, moved: so these few rows are the difference,
and nothing has to be compared. Where that is not so (a segment restored from a mirror, or mostly computed) all of its
rows are there, and are compared or stored whole.
"""

from collections.abc import Sequence

import numpy as np

from kvservice.client.connectors.vllm.metrics import Counts
from kvservice.client.connectors.vllm.pass_work import Made, PassWork, PromptWork
from kvservice.client.connectors.vllm.snapshot import Snapshot
from kvservice.client.paged import Slots
from kvservice.client.session import Session
from kvservice.client.store import StoredSegment, StoreOutcome, StoreRequest, store_round
from kvservice.client.store_draft import Diff
from kvservice.model.errors import NonFiniteError
from kvservice.model.identity import Identity
from kvservice.storage.record_layout import RowSizes
from kvservice.wire.v1 import cache_pb2 as wire


def store_pass(
    session: Session,
    identity: Identity,
    work: PassWork,
    makes: Sequence[Sequence[Made]],
    snapshot: Snapshot,
    counts: Counts,
) -> None:
    """Reserve, write and commit all of them in one go, and have each round's masters elected.

    ``makes``: per prompt the segments that it has made. Raises what ``store_round`` and the session raise.
    """
    requests = [
        StoreRequest(
            prompt.order.prompt,
            snapshot.slots_of(number),
            base=plan,
            is_refreshed=True,
            segments=[made.index for made in own],
            diffs=_diffs(prompt, own, identity, snapshot, snapshot.slots_of(number)),
        )
        for number, (prompt, plan, own) in enumerate(zip(work.prompts, work.plans, makes, strict=True))
    ]
    results = store_round(session, identity, snapshot, requests, None)
    rounds: dict[str, list[StoredSegment]] = {}
    for prompt, request, result in zip(work.prompts, requests, results, strict=True):
        for stored in result.segments:
            tokens = len(prompt.order.prompt.segments[stored.index].tokens)
            count_stored(counts, stored, tokens * identity.geometry.token_bytes)
            is_whole = stored.outcome is StoreOutcome.MASTER and stored.index in request.diffs
            counts.add("mirrors_whole", is_whole)
        rounds.setdefault(prompt.order.round, []).extend(result.segments)
    for name, segments in rounds.items():
        held = [one for one in segments if one.outcome is not StoreOutcome.REFUSED]
        if name and held:
            members = [wire.CacheKey(segment=one.key.segment, context=one.key.context) for one in held]
            session.commit_round(wire.CommitRoundRequest(round=name, namespace=identity.namespace(), members=members))


def _diffs(
    prompt: PromptWork, makes: Sequence[Made], identity: Identity, snapshot: Snapshot, slots: Slots
) -> dict[int, Diff]:
    """The segments whose differences are known. Layers below the check layer have none, if rows were picked there."""
    policy = prompt.order.prompt.policy
    assert policy is not None
    first_layer = policy.check_layer if prompt.selector.needs_deviation else 0
    found = {}
    for made in makes:
        if made.rows is not None:
            segment = prompt.order.prompt.segments[made.index]
            found[made.index] = _diff(made.rows, slots[segment.position + made.rows], first_layer, identity, snapshot)
    return found


def _diff(rows: Slots, slots: Slots, first_layer: int, identity: Identity, snapshot: Snapshot) -> Diff:
    geometry, sizes = identity.geometry, RowSizes.of(identity.geometry)
    planes = len(geometry.planes)
    runs, none = row_runs(rows), np.empty((0, 2), np.int32)
    room = np.empty((geometry.layers, len(rows) * geometry.token_layer_bytes), np.uint8)
    empty = sizes.split(room[0, :0], [0] * planes)
    all_runs, all_rows = [], []
    for layer in range(geometry.layers):
        if layer < first_layer:
            all_runs.append([none] * planes)
            all_rows.append(empty)
            continue
        own = sizes.split(room[layer], [len(rows)] * planes)
        if snapshot.gather_layer(layer, slots, own):
            raise NonFiniteError(f"layer {layer} of a refreshed segment holds NaN or infinity; nothing was stored")
        all_runs.append([runs] * planes)
        all_rows.append(own)
    return Diff(tuple(all_runs), tuple(all_rows))


def row_runs(rows: Slots) -> "np.ndarray[tuple[int, int], np.dtype[np.int32]]":
    """Rising row numbers as runs of neighbours, int32 ``[runs, (first, count)]``."""
    if not len(rows):
        return np.empty((0, 2), np.int32)
    starts = np.flatnonzero(np.diff(rows, prepend=rows[0] - 2) != 1)
    lengths = np.diff(np.append(starts, len(rows)))
    return np.stack((rows[starts], lengths), axis=1).astype(np.int32)


def count_stored(counts: Counts, stored: StoredSegment, dense_bytes: int) -> None:
    """Count what became of a segment whose rows take ``dense_bytes``."""
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
