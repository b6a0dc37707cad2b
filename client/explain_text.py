"""Explanations as text for people: what became of every segment, and what to do. One line a run of like segments."""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

from kvservice.client.explain import Elsewhere, ExplainedSegment, Explanation
from kvservice.model.cache import CacheKind, Tier
from kvservice.model.differences import Difference
from kvservice.model.explanation import HeldCache, Reason, place_text
from kvservice.model.identity import Namespace
from kvservice.model.plan import Match
from kvservice.model.segment import PRECEDING_MAX

_TIER_WORDS = {Tier.GPU: "in GPU memory", Tier.HOST: "in memory", Tier.SSD: "on SSD", Tier.REMOTE: "on another node"}
_NOT_ADMITTED = {
    "once_used": "a write budget is set (ssd_write_budget_bytes), and it was not used since it was stored",
    "budget": "the write budget of the day (ssd_write_budget_bytes) was spent",
    "floor": "the file system had less free room than ssd_free_floor_bytes",
    "too_large": "it is larger than ssd_bytes allows: cut the segment, or give the service more",
}
_REFUSED = {
    "CAPACITY": "leases and writes left no room in memory: give the service more host_bytes",
    "RECORD_TOO_LARGE": "it is larger than the arena: use smaller chunks, or give the service more host_bytes",
    "NON_FINITE": "K or V holds a NaN or an infinity",
    "CHECKSUM_MISMATCH": "the bytes written were not those that the writer summed up: a fault of the writer",
    "MASTER_GONE": "the master it stood on was gone: it is stored anew when it is computed next",
    "LIMIT": "a limit was reached: see the writer's log",
    "NOT_OWNED": "the writer's session had ended, or only reads: see the writer's log",
}
_SEE_LOG = "see the writer's log"


def difference_lines(differences: Sequence[Difference], left: str, right: str) -> list[str]:
    """One line a field; ``left`` and ``right``: what to call the two sides."""
    return [f"{one.field}: {one.left} in {left}, {one.right} in {right}; {one.advice}" for one in differences]


def namespace_text(namespace: Namespace) -> str:
    """Short form of a namespace, as everywhere in logs."""
    return namespace.hex()[:12]


def explanation_lines(explanation: Explanation) -> list[str]:
    """The whole explanation of one prompt."""
    return [
        _head(explanation),
        *_segment_lines(explanation),
        _prefix_line(explanation),
        *(line for one in explanation.elsewhere for line in _elsewhere_lines(explanation, one)),
    ]


def _head(explanation: Explanation) -> str:
    identity = explanation.identity
    held = f"{_count(explanation.held_segments, 'segment')} held"
    if explanation.lengths:
        held += f", of {_lengths_text(explanation.lengths)}"
    name = namespace_text(identity.namespace())
    return f"{identity.model} of tenant {identity.tenant!r}, namespace {name}: {held}"


def _segment_lines(explanation: Explanation) -> Iterator[str]:
    texts = [(index, segment_text(explanation, index)) for index in range(len(explanation.segments))]
    for text, run in groupby(texts, key=lambda pair: pair[1]):
        numbers = [index for index, _ in run]
        first, last = explanation.segments[numbers[0]], explanation.segments[numbers[-1]]
        which = f"segment {numbers[0]}" if len(numbers) == 1 else f"segments {numbers[0]}-{numbers[-1]}"
        yield f"  {which}, tokens {first.start}-{last.start + last.tokens}: {text}"


def _prefix_line(explanation: Explanation) -> str:
    end, total = explanation.exact_prefix_tokens, explanation.tokens
    line = f"exact reuse along the prompt: {end} of {total} tokens"
    stop = next((index for index, one in enumerate(explanation.segments) if one.start + one.tokens > end), None)
    if stop is not None:
        line += f"; it ends before segment {stop}"
        later = sum(one.is_found for one in explanation.segments[stop + 1 :])
        if later:
            line += f", and {later} found behind that segment cannot be used without it"
    return line


def _elsewhere_lines(explanation: Explanation, other: Elsewhere) -> Iterator[str]:
    total = len(explanation.segments)
    what = f"{_count(other.segments, 'segment')} held, {other.found} of this prompt's {total} would be found"
    if not other.segments:
        what = "nothing held, an engine with it is connected"
    name = namespace_text(other.identity.namespace())
    yield f"another identity of this tenant, {other.identity.model}, namespace {name}: {what}; what differs:"
    yield from (f"  {line}" for line in difference_lines(other.differences, "yours", "that one"))


# One segment


def segment_text(explanation: Explanation, index: int) -> str:
    """Why segment ``index`` is found or not, and what to do about it."""
    one = explanation.segments[index]
    text = _TEXTS[one.why.reason](explanation, one, index)
    if one.why.is_of_other_context:
        text = f"nothing is known of it behind these tokens; behind others it was {text}"
    return "; ".join([text, *map(place_text, one.why.places)])


Text = Callable[[Explanation, ExplainedSegment, int], str]


def _found(explanation: Explanation, one: ExplainedSegment, index: int) -> str:
    why = one.why
    assert why.found is not None, "what is found is told"
    kind = "mirror" if why.found.kind is CacheKind.MIRROR else "master"
    place = f"{_place(why.found)}, a {kind}"
    if why.match is Match.EXACT:
        return f"found exact, {place}"
    if why.match is Match.REFRESHED:
        return f"found as the same reuse stored it ({why.found.provenance}), not exact, {place}"
    moved = f"from position {why.found.position}" if why.found.position != one.start else "at its position"
    return f"found behind other tokens, {moved}, {_how_it_differs(why.found, one, index)}; {place}"


def _place(held: HeldCache) -> str:
    words = [_TIER_WORDS[tier] for tier in held.tiers]
    if held.is_arriving:
        words.append("on its way into memory")
    return " and ".join(words)


def _wrong_bytes(_: Explanation, one: ExplainedSegment, __: int) -> str:
    is_on_ssd = one.why.found is not None and Tier.SSD in one.why.found.tiers
    after = "it is read from SSD again" if is_on_ssd else "it is gone"
    return f"its bytes in memory are wrong, so it is not given out; when the leases on it end, {after}"


def _no_room(_: Explanation, __: ExplainedSegment, ___: int) -> str:
    return "on SSD, and leases leave no room to read it into memory: give the service more host_bytes"


def _token_count(_: Explanation, one: ExplainedSegment, __: int) -> str:
    return f"held with {one.why.held_tokens} tokens and asked for with {one.tokens}: the question is wrong"


def _being_written(_: Explanation, __: ExplainedSegment, ___: int) -> str:
    return "being written: it is found once its writer has committed it"


def _evicted(explanation: Explanation, one: ExplainedSegment, _: int) -> str:
    text = f"evicted from memory{_ago(one)}"
    if not explanation.has_ssd:
        return f"{text}, and there is no SSD tier: give the service more host_bytes, or an ssd_folder"
    if one.why.detail == "waiting":
        return f"{text}, before it was written to SSD: writes come faster than the disk takes them"
    return f"{text}, and it was not on SSD (`kvservice stats` counts why not): give the service more host_bytes"


def _not_admitted(_: Explanation, one: ExplainedSegment, __: int) -> str:
    why = _NOT_ADMITTED.get(one.why.detail, one.why.detail)
    return f"evicted from memory{_ago(one)}, and it was not admitted to SSD: {why}"


def _evicted_from_ssd(_: Explanation, one: ExplainedSegment, __: int) -> str:
    return f"evicted from SSD{_ago(one)} to make room: give the service more ssd_bytes"


def _deleted(_: Explanation, one: ExplainedSegment, __: int) -> str:
    return f"deleted by a client{_ago(one)}"


def _quarantined(_: Explanation, one: ExplainedSegment, __: int) -> str:
    return (
        f"quarantined{_ago(one)}: its bytes, or its master's, were wrong or could not be read, and there was no other "
        "copy; see the service's log, and suspect disk or memory if it happens again"
    )


def _refused(_: Explanation, one: ExplainedSegment, __: int) -> str:
    code = one.why.detail
    return f"not stored, the service refused it{_ago(one)} with {code}: {_REFUSED.get(code, _SEE_LOG)}"


def _other_context(explanation: Explanation, one: ExplainedSegment, index: int) -> str:
    return f"{_held_elsewhere(one, index)}. {_what_would_find_it(explanation)}"


def _pinned(explanation: Explanation, one: ExplainedSegment, index: int) -> str:
    return f"{_held_elsewhere(one, index)}, and it cannot be moved from there: {explanation.pinned_reason}"


def _low_affinity(_: Explanation, one: ExplainedSegment, index: int) -> str:
    return f"{_held_elsewhere(one, index)}: fewer segments agree than the policy's affinity_min asks for"


def _empty_namespace(_: Explanation, __: ExplainedSegment, ___: int) -> str:
    return "nothing is stored for this identity: either nobody stored yet, or writers have another identity"


def _other_lengths(explanation: Explanation, one: ExplainedSegment, _: int) -> str:
    lengths = _lengths_text(explanation.lengths)
    return (
        f"never stored, and nothing held has {_count(one.tokens, 'token')}, but {lengths}: the same tokens cut "
        "elsewhere are other segments; use the same chunk_tokens, block size and boundaries"
    )


def _never_stored(explanation: Explanation, _: ExplainedSegment, __: int) -> str:
    return f"never stored for this identity, as far as the service remembers ({_time(explanation.remembered_s)} back)"


def _not_brought(_: Explanation, one: ExplainedSegment, __: int) -> str:
    return (
        f"another place had it and it did not arrive whole{_ago(one)}; the next lookup asks again, and the service's "
        "log says which place failed and how"
    )


_TEXTS: dict[Reason, Text] = {
    Reason.FOUND: _found,
    Reason.WRONG_BYTES: _wrong_bytes,
    Reason.NO_ROOM: _no_room,
    Reason.TOKEN_COUNT: _token_count,
    Reason.BEING_WRITTEN: _being_written,
    Reason.EVICTED: _evicted,
    Reason.NOT_ADMITTED: _not_admitted,
    Reason.EVICTED_FROM_SSD: _evicted_from_ssd,
    Reason.DELETED: _deleted,
    Reason.QUARANTINED: _quarantined,
    Reason.REFUSED: _refused,
    Reason.OTHER_CONTEXT: _other_context,
    Reason.PINNED: _pinned,
    Reason.LOW_AFFINITY: _low_affinity,
    Reason.EMPTY_NAMESPACE: _empty_namespace,
    Reason.OTHER_LENGTHS: _other_lengths,
    Reason.NEVER_STORED: _never_stored,
    Reason.NOT_BROUGHT: _not_brought,
}


def _held_elsewhere(one: ExplainedSegment, index: int) -> str:
    nearest = one.why.nearest[0]
    count = one.why.contexts
    where = f"in {count} contexts, the nearest at position" if count > 1 else "at position"
    return f"held, but behind other tokens, {where} {nearest.position}, {_how_it_differs(nearest, one, index)}"


def _how_it_differs(held: HeldCache, one: ExplainedSegment, index: int) -> str:
    """``index``: how many segments stand before this one in the prompt."""
    if held.provenance:
        return f"as refreshed KV ({held.provenance}), which no exact lookup is answered with"
    here, there, agree = min(index, PRECEDING_MAX), held.preceding, held.affinity
    if held.position == one.start and agree == here == there:
        is_all = here < PRECEDING_MAX
        return "behind the same segments" + (
            ": what differs is no token, but a cache salt, an adapter or an image"
            if is_all
            else f" as far as is known, {here} back"
        )
    if there == 0:
        return f"at the start of a prompt, and here {_count(index, 'segment')} before it"
    if index == 0:
        return f"behind {_count(there, 'segment')}, and here at the start"
    if agree == 0:
        return "behind another segment"
    return f"where only {_count(agree, 'segment')} right before it agree{'s' * (agree == 1)}"


def _what_would_find_it(explanation: Explanation) -> str:
    exact = "Exact reuse along the prompt needs the same tokens before it"
    if explanation.pinned_reason:
        return f"{exact}, and shared reuse could not move it: {explanation.pinned_reason}"
    return f"{exact}; shared reuse (rounds) would find it"


def _ago(one: ExplainedSegment) -> str:
    return "" if one.why.age_s is None else f" {_time(one.why.age_s)} ago"


def _time(seconds: float) -> str:
    for unit, size in (("s", 1), ("min", 60), ("h", 3600)):
        if seconds < 120 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86400:.0f} days"


def _lengths_text(lengths: Sequence[tuple[int, int]]) -> str:
    return ", ".join(f"{tokens} tokens ({count})" for tokens, count in lengths)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"
