"""Who computes a round's shared segments in full, and who reuses them. Pure and torch-free.

What a segment is reused from matters more than what is refreshed, so a round never reuses from far-off contexts: one
member leads, and its caches become the masters.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvservice.client.plans import PromptPlan
from kvservice.client.rounds import PartKind
from kvservice.model.errors import InvalidInputError
from kvservice.model.plan import Match
from kvservice.model.segment import SegmentId

AFFINITY_FULL: Final = 2
REUSE_FIT_MIN: Final = 0.95


@dataclass(frozen=True, slots=True)
class SharedSegment:
    """One segment of a prompt's shared run, and what a lookup found for it.

    `affinity`: how many segments right before it agree with those that the found cache was computed behind; None when
    nothing was found. `is_own`: the found cache was made in this very context. `before`: how many shared segments stand
    right before it, since what is private agrees with nobody's; None: all that the run has before it.
    """

    id: SegmentId
    tokens: int
    affinity: int | None = None
    is_own: bool = False
    before: int | None = None


@dataclass(frozen=True, slots=True)
class RoundMember:
    """One prompt of a round as the choice of a leader sees it.

    `work_tokens`: what it must compute when it computes the shared run in full. `is_critical`: others wait for its
    answer. `is_exact`: it must not be perturbed, so it never follows; it may lead.
    """

    agent: str
    work_tokens: int
    run: tuple[SharedSegment, ...]
    is_critical: bool = False
    is_exact: bool = False


@dataclass(frozen=True, slots=True)
class Thresholds:
    """From which `fit` of a run on it is reused, and from which with the higher ratio; below, it is computed in full.

    Measured (`bench/quality/README.md`): in the same order nothing is lost that a small refresh does not bring back;
    where segments stand behind others than before, agreement with a full prefill falls to .89, and a refresh of 15 %
    makes little of it good. So what does not fit is computed, once a round. ``raise_min`` below ``reuse_min`` takes the
    higher ratio instead. `affinity_full`: so many agreeing segments right before make a cache as good as all of them.
    """

    reuse_min: float = REUSE_FIT_MIN
    raise_min: float = REUSE_FIT_MIN
    affinity_full: int = AFFINITY_FULL

    def __post_init__(self) -> None:
        if not 0 <= self.raise_min <= self.reuse_min <= 1 or self.affinity_full < 0:
            raise InvalidInputError(f"{self}: give 0 <= raise_min <= reuse_min <= 1 and an affinity of 0 or more")


class Role(enum.Enum):
    """What a member does with its shared run."""

    REUSE = "reuse"
    """Restore what was found and refresh it at the policy's ratio."""
    REUSE_MORE = "reuse more"
    """The same at the higher ratio, stored under a policy that names it: the key says how KV was refreshed."""
    LEAD = "lead"
    """Compute the run in full now, and store it: its caches become the masters."""
    FOLLOW = "follow"
    """Wait for the leader within the limit, then look up and judge again."""
    COMPUTE = "compute"
    """Compute the run in full, for itself alone."""


def shared_run(plan: PromptPlan) -> tuple[SharedSegment, ...]:
    """The SHARED segments of a looked-up prompt, from the first one on."""
    pairs = list(zip(plan.prompt.segments, plan.plan.segments, strict=True))[plan.prompt.first_shared :]
    run: list[SharedSegment] = []
    before = 0
    for segment, found in pairs:
        if segment.kind is PartKind.SHARED:
            affinity = found.affinity if found.is_hit else None
            is_own = found.is_hit and found.match in (Match.EXACT, Match.REFRESHED)
            run.append(SharedSegment(segment.id, len(segment.tokens), affinity, is_own, before))
        before = 0 if segment.kind is PartKind.PRIVATE else before + 1
    return tuple(run)


def fit(run: Sequence[SharedSegment], affinity_full: int = AFFINITY_FULL) -> float:
    """The share of a run's tokens whose found caches were computed behind the same segments; 1 for an empty run.

    The first segment behind a private one has none before it that could agree: any cache of it fits.
    """
    tokens = sum(one.tokens for one in run)
    places = (index if one.before is None else one.before for index, one in enumerate(run))
    fitting = sum(one.tokens for one, before in zip(run, places, strict=True) if _fits(one, min(before, affinity_full)))
    return fitting / tokens if tokens else 1.0


def _fits(segment: SharedSegment, affinity_min: int) -> bool:
    return segment.affinity is not None and (segment.is_own or segment.affinity >= affinity_min)


def judge(run: Sequence[SharedSegment], thresholds: Thresholds) -> Role:
    """What the caches found for a run are good for, by themselves: REUSE, REUSE_MORE or COMPUTE."""
    found = fit(run, thresholds.affinity_full)
    if found >= thresholds.reuse_min:
        return Role.REUSE
    return Role.REUSE_MORE if found >= thresholds.raise_min else Role.COMPUTE


def choose_roles(members: Sequence[RoundMember], thresholds: Thresholds) -> tuple[Role, ...]:
    """One role a member, in order.

    Among those whose found caches do not fit, every group that shares segments gets one leader: the critical one, else
    the one with the least work, else the first by name. Who shares no segment with another computes for itself.
    Raises InvalidInputError for two members of one name.
    """
    if len({one.agent for one in members}) < len(members):
        raise InvalidInputError("two members of a round have one name; name every agent once")
    roles = [Role.COMPUTE if one.is_exact else judge(one.run, thresholds) for one in members]
    needy = [index for index, role in enumerate(roles) if role is Role.COMPUTE]
    for group in group_by_segment([[one.id for one in members[index].run] for index in needy]):
        waiting = [needy[at] for at in group]
        followers = [index for index in waiting if not members[index].is_exact]
        leader = min(waiting, key=lambda index: _rank(members[index]))
        if set(followers) - {leader}:
            for index in followers:
                roles[index] = Role.FOLLOW
            roles[leader] = Role.LEAD
    return tuple(roles)


def _rank(member: RoundMember) -> tuple[bool, int, str]:
    return not member.is_critical, member.work_tokens, member.agent


def group_by_segment(runs: Sequence[Sequence[SegmentId]]) -> list[list[int]]:
    """Which runs belong together: those that share a segment, and whatever shares one with these, whatever their
    lengths and orders. Indices, in order of the first; an empty run is a group of its own.
    """
    groups: list[tuple[set[SegmentId], list[int]]] = []
    for index, run in enumerate(runs):
        segments, members = set(run), [index]
        touched = [group for group in groups if group[0] & segments]
        for group in touched:
            segments |= group[0]
            members += group[1]
        groups = [group for group in groups if group not in touched] + [(segments, sorted(members))]
    return sorted(members for _, members in groups)
