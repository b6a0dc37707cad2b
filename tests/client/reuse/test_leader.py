"""Who computes the shared run in full, who waits, who reuses."""

import pytest

from kvservice.client.plans import PromptPlan
from kvservice.client.reuse.leader import (
    Role,
    RoundMember,
    SharedSegment,
    Thresholds,
    choose_roles,
    fit,
    group_by_segment,
    judge,
    shared_run,
)
from kvservice.client.rounds import PartKind, ReusePolicy, RoundPrompt
from kvservice.model.errors import InvalidInputError
from kvservice.model.identity import Namespace
from kvservice.model.lease import BootEpoch, Lease, LeaseId, SessionId
from kvservice.model.plan import Match, MissReason, Outcome, Plan, PlannedSegment
from kvservice.model.segment import SegmentId

THRESHOLDS = Thresholds(raise_min=0.5)


def segment(name: str, affinity: int | None = None, tokens: int = 100, *, is_own: bool = False) -> SharedSegment:
    return SharedSegment(SegmentId(name.encode().ljust(32)), tokens, affinity, is_own)


def run_of(*affinities: int | None) -> tuple[SharedSegment, ...]:
    return tuple(segment(f"s{index}", affinity) for index, affinity in enumerate(affinities))


def member(
    agent: str, work: int, run: tuple[SharedSegment, ...], *, is_critical: bool = False, is_exact: bool = False
) -> RoundMember:
    return RoundMember(agent, work, run, is_critical, is_exact)


UNKNOWN = run_of(None, None, None, None)


@pytest.mark.parametrize(
    ("affinities", "expected", "role"),
    [
        ((0, 1, 2, 3, 4, 5, 6, 7), 1.0, Role.REUSE),  # a member of the round, the same order
        ((0, 1, 2, 3, 0, 1, 2), 5 / 7, Role.REUSE_MORE),  # one left out
        ((0, 1, 2, 3, 4, 0, 1, 2), 6 / 8, Role.REUSE_MORE),  # rotated by three
        ((0, 0, 0, 1, 0, 0, 0, 0), 1 / 8, Role.COMPUTE),  # shuffled, or each behind its producer's history
        ((None, None, None, None), 0.0, Role.COMPUTE),
        ((), 1.0, Role.REUSE),
    ],
)
def test_fit_tells_the_measured_worlds_apart(affinities: tuple[int | None, ...], expected: float, role: Role) -> None:
    assert fit(run_of(*affinities)) == pytest.approx(expected)
    assert judge(run_of(*affinities), THRESHOLDS) is role


def test_by_default_what_does_not_fit_is_computed_rather_than_refreshed_more() -> None:
    assert judge(run_of(0, 1, 2, 3, 0, 1, 2), Thresholds()) is Role.COMPUTE
    assert judge(run_of(0, 1, 2, 3, 4), Thresholds()) is Role.REUSE


def test_fit_counts_tokens_and_a_cache_of_this_very_context_always_fits() -> None:
    run = (segment("a", 0, 300), segment("b", 0, 100), segment("c", 0, 100, is_own=True))
    assert fit(run) == 0.8


def test_member_with_the_least_work_leads_and_the_others_wait() -> None:
    members = [member("a", 900, UNKNOWN), member("b", 700, UNKNOWN), member("c", 800, UNKNOWN)]
    assert choose_roles(members, THRESHOLDS) == (Role.FOLLOW, Role.LEAD, Role.FOLLOW)


def test_critical_member_leads_whatever_its_work_and_names_break_ties() -> None:
    members = [member("a", 700, UNKNOWN), member("b", 900, UNKNOWN, is_critical=True)]
    assert choose_roles(members, THRESHOLDS) == (Role.FOLLOW, Role.LEAD)
    assert choose_roles([member("y", 5, UNKNOWN), member("x", 5, UNKNOWN)], THRESHOLDS) == (Role.FOLLOW, Role.LEAD)


def test_enough_affinity_needs_no_leader() -> None:
    members = [member("a", 900, run_of(0, 1, 2)), member("b", 700, run_of(0, 1, 2, 0, 1, 2))]
    assert choose_roles(members, THRESHOLDS) == (Role.REUSE, Role.REUSE_MORE)


def test_exact_member_never_follows_but_may_lead() -> None:
    judge_prompt = member("judge", 100, UNKNOWN, is_exact=True)
    assert choose_roles([judge_prompt, member("a", 900, UNKNOWN)], THRESHOLDS) == (Role.LEAD, Role.FOLLOW)
    late = member("judge", 1000, UNKNOWN, is_exact=True)
    pair = [late, member("a", 900, UNKNOWN), member("b", 950, UNKNOWN)]
    assert choose_roles(pair, THRESHOLDS) == (Role.COMPUTE, Role.LEAD, Role.FOLLOW)
    assert choose_roles([late, member("a", 900, UNKNOWN)], THRESHOLDS) == (Role.COMPUTE, Role.COMPUTE)
    found = member("judge", 1000, run_of(0, 1, 2), is_exact=True)
    assert choose_roles([found], THRESHOLDS) == (Role.COMPUTE,)


def test_each_group_of_shared_segments_has_a_leader_of_its_own() -> None:
    others = tuple(segment(f"t{index}") for index in range(3))
    members = [member("a", 2, UNKNOWN), member("b", 1, others), member("c", 1, UNKNOWN[:2]), member("d", 3, others)]
    assert choose_roles(members, THRESHOLDS) == (Role.FOLLOW, Role.LEAD, Role.LEAD, Role.FOLLOW)
    alone = member("e", 1, (segment("u"),))
    assert choose_roles([alone], THRESHOLDS) == (Role.COMPUTE,)


def test_two_members_of_one_name_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="one name"):
        choose_roles([member("a", 1, UNKNOWN)] * 2, THRESHOLDS)


@pytest.mark.parametrize("numbers", [(0.4, 0.5, 2), (1.1, 0.5, 2), (0.9, -0.1, 2), (0.9, 0.5, -1)])
def test_thresholds_out_of_order_are_refused(numbers: tuple[float, float, int]) -> None:
    with pytest.raises(InvalidInputError, match="raise_min <= reuse_min"):
        Thresholds(*numbers)


def test_groups_are_by_segment_whatever_lengths_and_orders() -> None:
    a, b, c, d = (SegmentId(name * 32) for name in (b"a", b"b", b"c", b"d"))
    assert group_by_segment([[a, b], [c], [b], [], [d, c], [a]]) == [[0, 2, 5], [1, 4], [3]]
    assert group_by_segment([[a], [b], [a, b]]) == [[0, 1, 2]]


def test_run_of_a_looked_up_prompt_is_its_shared_segments() -> None:
    shared = PartKind.SHARED
    parts = [(PartKind.PRIVATE, [1, 2]), (shared, [3]), (PartKind.TOOL, [4]), (shared, [5, 6]), (shared, [7])]
    prompt = RoundPrompt.from_parts(Namespace(b"n" * 32), parts, policy=ReusePolicy("hkvd:0.02", 1))
    miss = PlannedSegment(Outcome.MISS, miss_reason=MissReason.UNKNOWN_SEGMENT)
    found = [PlannedSegment(Outcome.HIT, match, affinity=3) for match in (Match.EXACT, Match.SHIFTED, Match.SHIFTED)]
    own = PlannedSegment(Outcome.HIT, Match.REFRESHED, affinity=4)
    lease = Lease(LeaseId(1), SessionId(b"s"), BootEpoch(1), 0.0)
    plan = PromptPlan(prompt, Plan((found[0], miss, found[1], found[2], own), lease))
    ids = [one.id for one in prompt.segments]
    assert shared_run(plan) == (
        SharedSegment(ids[1], 1, before=0),
        SharedSegment(ids[3], 2, 3, before=2),
        SharedSegment(ids[4], 1, 4, is_own=True, before=3),
    )


def test_behind_an_agents_own_words_nothing_can_agree_so_any_cache_fits() -> None:
    shared, own = PartKind.SHARED, PartKind.PRIVATE
    parts = [(own, [1]), (shared, [2]), (shared, [3]), (own, [4]), (shared, [5]), (shared, [6])]
    prompt = RoundPrompt.from_parts(Namespace(b"n" * 32), parts, policy=ReusePolicy("hkvd:0.02", 1))
    found = [PlannedSegment(Outcome.HIT, Match.SHIFTED, affinity=count) for count in (0, 0, 1, 0, 0, 1)]
    run = shared_run(PromptPlan(prompt, Plan(tuple(found), Lease(LeaseId(1), SessionId(b"s"), BootEpoch(1), 0.0))))
    assert [one.before for one in run] == [0, 1, 0, 1]
    assert fit(run) == 1.0
