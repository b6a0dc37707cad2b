"""An explanation as a wire message."""

from kvservice.model.explanation import HeldCache, SegmentExplanation
from kvservice.wire.v1 import cache_pb2 as wire


def encode_explanation(explanation: SegmentExplanation, reply: wire.SegmentExplanation) -> None:
    """Why one segment is found or not."""
    reply.reason, reply.match, reply.detail = explanation.reason, explanation.match, explanation.detail
    reply.is_of_other_context = explanation.is_of_other_context
    reply.contexts, reply.held_tokens = explanation.contexts, explanation.held_tokens
    if explanation.found is not None:
        reply.found.CopyFrom(_encode_held(explanation.found))
    if explanation.age_s is not None:
        reply.age_s = explanation.age_s
    reply.nearest.extend(map(_encode_held, explanation.nearest))
    for one in explanation.places:
        place = reply.places.add(name=one.name, state=one.state, is_answering=one.is_answering, answer=one.answer)
        if one.age_s is not None:
            place.age_s = one.age_s


def _encode_held(held: HeldCache) -> wire.HeldCache:
    return wire.HeldCache(
        context=held.context,
        position=held.position,
        provenance=held.provenance,
        kind=held.kind,
        tiers=held.tiers,
        is_arriving=held.is_arriving,
        preceding=held.preceding,
        affinity=held.affinity,
    )
