"""Why was there no hit, as a client asks: over every transport, with tokens beside reasons, and in words."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from kvservice.app import LocalNode
from kvservice.client import Client, PartKind, RoundPrompt
from kvservice.client.explain import Elsewhere, ExplainedSegment, Explanation
from kvservice.client.explain_text import explanation_lines, segment_text
from kvservice.model.cache import CacheKind, Tier
from kvservice.model.errors import InvalidIdentityError
from kvservice.model.explanation import HeldCache, Reason, SegmentExplanation
from kvservice.model.plan import Match
from kvservice.model.segment import PRECEDING_MAX
from tests.client.builders import POLICY, Engine, make_identity, make_prompt, make_tokens

Connect = Callable[..., Client]
IDENTITY = make_identity()


def store(client: Client, prompt: RoundPrompt) -> None:
    identity = client.session.identity_of(prompt.namespace)
    engine = Engine(identity.geometry)
    client.store(prompt, engine.planes, engine.allocate(prompt.token_count))


def reasons(explanation: Explanation) -> list[Reason]:
    return [one.why.reason for one in explanation.segments]


def test_what_is_found_and_what_is_not_over_every_transport(connect: Connect) -> None:
    client = connect(IDENTITY)
    prompt = make_prompt(IDENTITY, private=12)
    (before,) = client.explain([prompt])
    assert reasons(before) == [Reason.EMPTY_NAMESPACE] * 5
    store(client, prompt)
    found, other = client.explain([prompt, make_prompt(IDENTITY, private=12, seed=1)])
    assert found.is_found
    assert (found.tokens, found.exact_prefix_tokens, found.held_segments) == (23, 23, 5)
    assert [(one.start, one.tokens) for one in found.segments] == [(0, 4), (4, 4), (8, 4), (12, 6), (18, 5)]
    assert found.lengths[0] == (4, 3)
    assert sorted(found.lengths) == [(4, 3), (5, 1), (6, 1)]
    assert reasons(other) == [Reason.NEVER_STORED] * 3 + [Reason.OTHER_CONTEXT] * 2
    assert [one.why.nearest[0].affinity for one in other.segments[3:]] == [0, 1]
    assert not other.exact_prefix_tokens


def test_a_lookup_and_an_explanation_agree(local: Connect) -> None:
    client = local(IDENTITY)
    store(client, make_prompt(IDENTITY, policy=POLICY))
    for seed in (0, 1):
        prompt = make_prompt(IDENTITY, seed=seed, policy=POLICY)
        with client.lookup([prompt]) as plans:
            planned = plans[0].plan.segments
            (explanation,) = client.explain([prompt])
        assert [one.is_found for one in explanation.segments] == [one.is_hit for one in planned]
        assert [one.why.match for one in explanation.segments] == [one.match for one in planned]
        assert explanation.exact_prefix_tokens == plans[0].exact_prefix_tokens


def test_the_same_tokens_under_another_identity_are_counted(local: Connect) -> None:
    revised, stranger = make_identity(weights="r2"), make_identity(tenant="stranger", weights="r2")
    writer, theirs = local(revised), local(stranger)
    store(writer, make_prompt(revised))
    store(theirs, make_prompt(stranger))
    (explanation,) = local(IDENTITY, is_writer=False).explain([make_prompt(IDENTITY)])
    (other,) = explanation.elsewhere
    assert (other.identity, other.segments, other.found) == (revised, 5, 5)
    assert [one.field for one in other.differences] == ["weights"]


def test_each_prompt_that_is_not_found_hears_of_other_identities_and_no_other_does(local: Connect) -> None:
    revised, salted = make_identity(weights="r2"), make_identity(salt="mine")
    client = local(IDENTITY, revised, salted)
    held, half, none = (make_prompt(IDENTITY, seed=seed) for seed in range(3))
    store(client, held)
    store(client, make_prompt(revised, seed=1))
    store(client, make_prompt(salted, seed=1))
    found = client.explain([none, held, half, make_prompt(revised, seed=1)])
    assert [[one.found for one in explanation.elsewhere] for explanation in found] == [[0, 0], [], [5, 5], []]
    assert [one.identity.weights for one in found[0].elsewhere] in (["r2", "r1"], ["r1", "r2"])
    assert found[3].identity == revised


def test_other_identities_are_left_out_where_the_answer_would_be_too_long(
    local: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = [make_identity(salt=str(number)) for number in range(6)]
    client = local(IDENTITY, *others)
    prompt = make_prompt(IDENTITY)
    assert len(client.explain([prompt])[0].elsewhere) == 6
    monkeypatch.setattr("kvservice.calls.MESSAGE_BYTES_MAX", 2 * len(IDENTITY.canonical_json()))
    assert 0 < len(client.explain([prompt])[0].elsewhere) < 3


def test_other_chunks_of_the_same_tokens_are_told_by_their_length(local: Connect) -> None:
    client = local(IDENTITY)
    parts = [(PartKind.PRIVATE, make_tokens(24))]
    store(client, RoundPrompt.from_parts(IDENTITY.namespace(), parts, chunk_tokens=8))
    (explanation,) = client.explain([RoundPrompt.from_parts(IDENTITY.namespace(), parts, chunk_tokens=12)])
    assert reasons(explanation) == [Reason.OTHER_LENGTHS] * 2
    assert explanation.lengths == ((8, 3),)
    assert "but 8 tokens (3)" in explanation_lines(explanation)[1]


def test_a_namespace_that_is_not_registered_is_refused(local: Connect) -> None:
    with pytest.raises(InvalidIdentityError, match="not registered"):
        local(IDENTITY).explain([make_prompt(make_identity(weights="r2"))])


def test_another_identity_whose_caches_went_meanwhile_is_told_as_empty(
    local: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    revised = make_identity(weights="r2")
    with Client.in_process(_node_of(local(IDENTITY)), revised) as writer:
        store(writer, make_prompt(revised))
    client = local(IDENTITY)
    ask = client.session.explain

    def ask_and_lose(prompts: Sequence[object], **how: bool) -> object:
        reply = ask(prompts, **how)  # type: ignore[arg-type]
        with Client.in_process(_node_of(client), revised) as other:
            other.delete()
        return reply

    monkeypatch.setattr(client.session, "explain", ask_and_lose)
    (explanation,) = client.explain([make_prompt(IDENTITY)])
    assert [(one.segments, one.found) for one in explanation.elsewhere] == [(5, 0)]


def _node_of(client: Client) -> LocalNode:
    node = client.session._transport._node  # type: ignore[attr-defined]
    assert isinstance(node, LocalNode)
    return node


# In words


HELD = HeldCache(b"c" * 32, 8, "", CacheKind.MASTER, (Tier.HOST,), is_arriving=False, preceding=2, affinity=1)


def explained(*whys: SegmentExplanation, pinned: str = "", has_ssd: bool = True) -> Explanation:
    segments = tuple(ExplainedSegment(4 * index, 4, why) for index, why in enumerate(whys))
    return Explanation(IDENTITY, segments, pinned, 7, ((8, 6), (3, 1)), (), 90.0, has_ssd)


def text(why: SegmentExplanation, index: int = 2, **changes: object) -> str:
    """What is said of a segment with ``index`` found ones before it."""
    before = [SegmentExplanation(Reason.FOUND, Match.EXACT, HELD)] * index
    return segment_text(explained(*before, why, **changes), index)  # type: ignore[arg-type]


def other(**changes: object) -> SegmentExplanation:
    held = replace(HELD, **changes)  # type: ignore[arg-type]
    return SegmentExplanation(Reason.OTHER_CONTEXT, contexts=1, nearest=(held,), held_tokens=4)


@pytest.mark.parametrize(
    ("why", "says"),
    [
        (SegmentExplanation(Reason.FOUND, Match.EXACT, HELD), "found exact, in memory, a master"),
        (
            SegmentExplanation(Reason.FOUND, Match.SHIFTED, replace(HELD, position=3, kind=CacheKind.MIRROR)),
            "from position 3, where only 1 segment right before it agrees; in memory, a mirror",
        ),
        (SegmentExplanation(Reason.FOUND, Match.REFRESHED, replace(HELD, provenance="hkvd:0.02")), "(hkvd:0.02)"),
        (
            SegmentExplanation(Reason.FOUND, Match.EXACT, replace(HELD, tiers=(Tier.SSD,), is_arriving=True)),
            "on SSD and on its way into memory",
        ),
        (SegmentExplanation(Reason.WRONG_BYTES, found=HELD), "it is gone"),
        (SegmentExplanation(Reason.NO_ROOM, found=HELD), "host_bytes"),
        (SegmentExplanation(Reason.TOKEN_COUNT, held_tokens=9), "held with 9 tokens and asked for with 4"),
        (SegmentExplanation(Reason.BEING_WRITTEN), "once its writer has committed it"),
        (SegmentExplanation(Reason.EVICTED, age_s=12.4), "evicted from memory 12 s ago, and it was not on SSD"),
        (SegmentExplanation(Reason.EVICTED, age_s=600, detail="waiting"), "10 min ago, before it was written to SSD"),
        (SegmentExplanation(Reason.NOT_ADMITTED, age_s=8000, detail="once_used"), "2 h ago, and it was not admitted"),
        (SegmentExplanation(Reason.NOT_ADMITTED, age_s=8000, detail="floor"), "ssd_free_floor_bytes"),
        (SegmentExplanation(Reason.EVICTED_FROM_SSD, age_s=9e5), "evicted from SSD 10 days ago"),
        (SegmentExplanation(Reason.DELETED), "deleted by a client"),
        (SegmentExplanation(Reason.QUARANTINED, age_s=1), "quarantined 1 s ago"),
        (SegmentExplanation(Reason.REFUSED, age_s=1, detail="CAPACITY"), "with CAPACITY: leases and writes left no"),
        (SegmentExplanation(Reason.REFUSED, age_s=1, detail="INTERNAL"), "see the writer's log"),
        (other(), "at position 8, where only 1 segment right before it agrees. Exact reuse along the prompt needs"),
        (other(affinity=0), "behind another segment"),
        (other(affinity=2), "behind the same segments: what differs is no token"),
        (other(preceding=0, affinity=0), "at the start of a prompt, and here 2 segments before it"),
        (other(provenance="hkvd:0.02"), "as refreshed KV (hkvd:0.02), which no exact lookup is answered with"),
        (replace(other(), reason=Reason.LOW_AFFINITY), "affinity_min"),
        (SegmentExplanation(Reason.EMPTY_NAMESPACE), "nothing is stored for this identity"),
        (SegmentExplanation(Reason.OTHER_LENGTHS), "nothing held has 4 tokens, but 8 tokens (6), 3 tokens (1)"),
        (SegmentExplanation(Reason.NEVER_STORED), "as far as the service remembers (90 s back)"),
        (SegmentExplanation(Reason.EVICTED, is_of_other_context=True), "behind others it was evicted"),
    ],
)
def test_every_reason_has_words_of_its_own(why: SegmentExplanation, says: str) -> None:
    assert says in text(why)


def test_no_reason_is_without_words() -> None:
    for reason in Reason:
        assert text(SegmentExplanation(reason, Match.EXACT, HELD, nearest=(HELD,), contexts=2))


def test_words_depend_on_the_node_and_on_what_stands_before() -> None:
    assert "there is no SSD tier" in text(SegmentExplanation(Reason.EVICTED, age_s=1), has_ssd=False)
    assert "shared reuse (rounds) would find it" in text(other())
    assert "could not move it: dynamic NTK" in text(other(), pinned="dynamic NTK")
    assert "cannot be moved from there: NTK" in text(replace(other(), reason=Reason.PINNED), pinned="NTK")
    assert "behind 2 segments, and here at the start" in text(other(), index=0)
    assert "in 3 contexts, the nearest at position 8" in text(replace(other(), contexts=3))
    far = other(position=4 * 40, preceding=PRECEDING_MAX, affinity=PRECEDING_MAX)
    assert f"as far as is known, {PRECEDING_MAX} back" in text(far, index=40)
    on_ssd = SegmentExplanation(Reason.WRONG_BYTES, found=replace(HELD, tiers=(Tier.HOST, Tier.SSD)))
    assert "read from SSD again" in text(on_ssd)


def test_like_neighbours_share_a_line_and_the_prefix_is_told() -> None:
    found, never = SegmentExplanation(Reason.FOUND, Match.EXACT, HELD), SegmentExplanation(Reason.NEVER_STORED)
    lines = explanation_lines(explained(found, found, never, found))
    assert [line.partition(":")[0] for line in lines[1:]] == [
        "  segments 0-1, tokens 0-8", "  segment 2, tokens 8-12", "  segment 3, tokens 12-16",
        "exact reuse along the prompt",
    ]  # fmt: skip
    assert "8 of 16 tokens; it ends before segment 2, and 1 found behind that segment cannot be used" in lines[-1]
    assert explanation_lines(explained(found))[-1] == "exact reuse along the prompt: 4 of 4 tokens"


def test_an_identity_that_is_only_connected_is_told_as_such() -> None:
    explanation = replace(
        explained(SegmentExplanation(Reason.EMPTY_NAMESPACE)), elsewhere=(Elsewhere(IDENTITY, 0, 0, ()),)
    )
    assert "nothing held, an engine with it is connected" in explanation_lines(explanation)[-1]
