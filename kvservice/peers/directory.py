"""Who is there and who owns what: the members' states, from what a source lists and what links report. State only.

    (unmet address) --greeted-->  LIVE  <-------answers again------- DISCONNECTED --grace_s over--> LEFT
    (listed, etcd)  ---------->   LIVE  --link lost, or unlisted-->  DISCONNECTED
                                  LIVE  --says so--> DRAINING --link lost, or unlisted--> LEFT

A member that is DISCONNECTED keeps its segments: nothing is written to it, reads of them miss at once. As long as a
source that knows who lives (etcd) lists it, it never leaves, since others still reach it. A source that answers with
nobody changes nothing for a grace time; one that does not answer changes nothing.

Who asks gets two lists. Writes go to the first ``replicas`` members by rank. Reads go on behind them while a member is
draining (it has what newer owners lack) or warming (the owner before it has).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypedDict
from uuid import UUID

from kvservice.model.errors import KVServiceError, LimitError
from kvservice.peers.fence import Fence, twin_error, zombie_error
from kvservice.peers.member import Address, Facts, Listing, MemberState, NodeId, Roll, SourceState
from kvservice.peers.rendezvous import Candidate, rank
from kvservice.peers.weights import Ramp

_LIVE, _DRAINING, _DISCONNECTED = MemberState.LIVE, MemberState.DRAINING, MemberState.DISCONNECTED
REFUSED_MAX = 64
DEPARTED_MAX = 16


@dataclass(frozen=True, slots=True)
class DirectoryLimits:
    """``grace_s``: how long who is gone keeps its segments. ``ramp``: how an empty node is warmed.

    ``replicas``: nodes that keep a segment. ``spare_reads``: nodes that are asked beyond those while some of them are
    warming or draining.
    """

    grace_s: float = 60.0
    ramp: Ramp = field(default_factory=Ramp)
    replicas: int = 1
    spare_reads: int = 2
    members_max: int = 256


@dataclass(slots=True, eq=False)
class Member:
    """A node as others see it. ``listed_as``: addresses that lead to it; ``address``: the one to use.

    ``flight_port``: where it also speaks Arrow Flight, 0: nowhere. ``is_answering``: some link to it works, as far as
    is known. ``empty_since_s``: when it began empty, None: it is warm. ``gone_since_s``: since when it may leave.
    """

    node: NodeId
    address: Address
    name: str = ""
    weight: float = 1.0
    state: MemberState = _LIVE
    listed_as: set[Address] = field(default_factory=set)
    flight_port: int = 0
    is_draining: bool = False
    is_answering: bool = True
    empty_since_s: float | None = None
    gone_since_s: float | None = None

    def __str__(self) -> str:
        return f"{self.name or self.node.uuid} at {self.address}"


class Change(NamedTuple):
    """A member went from one state to another; ``before`` is None for a new one. ``has_rebooted``: its epoch rose."""

    member: Member
    before: MemberState | None
    after: MemberState
    has_rebooted: bool = False


class Owners(NamedTuple):
    """Members to ask for a segment, in this order, and members to give it to. Either may be empty: a miss, no write."""

    read: tuple[Member, ...]
    write: tuple[Member, ...]


class MemberDocument(TypedDict):
    """A member in /stats. ``warmth``: the share of its weight that it has now."""

    uuid: str
    epoch: int
    name: str
    address: str
    state: str
    weight: float
    warmth: float


class _Ring(NamedTuple):
    candidates: list[Candidate]
    members: list[Member]
    is_settled: list[bool]
    until_s: float


class Directory:
    """All members. ``clock``: monotonic seconds. ``knows_liveness``: a listing of the source proves that who is listed
    lives. One thread owns it. What changes a state answers with the changes, for whoever logs and connects."""

    def __init__(
        self, clock: Callable[[], float], *, knows_liveness: bool, limits: DirectoryLimits | None = None
    ) -> None:
        self.limits = limits or DirectoryLimits()
        self.source_state, self.source_reason = SourceState.STARTING, "the source was not asked yet"
        self.refused: dict[Address, str] = {}
        """Who was refused and why, by address; the last ones."""
        self._clock = clock
        self._knows_liveness = knows_liveness
        self.departed: dict[UUID, Member] = {}
        """Who left and was not seen again; the last ones, for people."""
        self._members: dict[UUID, Member] = {}
        self._fence = Fence()
        self._listed: dict[Address, None] = {}
        self._started_s = clock()
        self._empty_since_s: float | None = None
        self._ring: _Ring | None = None

    # What is known

    @property
    def members(self) -> list[Member]:
        """All that have not left."""
        return list(self._members.values())

    def get(self, uuid: UUID) -> Member | None:
        """The member with this uuid, unless it left."""
        return self._members.get(uuid)

    def to_greet(self) -> list[Address]:
        """Listed addresses of which nobody answers: somebody should knock there."""
        reached = {address for one in self._members.values() if one.is_answering for address in one.listed_as}
        return [address for address in self._listed if address not in reached]

    def document(self) -> list[MemberDocument]:
        """All members, for /stats."""
        now_s = self._clock()
        return [
            MemberDocument(
                uuid=str(one.node.uuid),
                epoch=one.node.epoch,
                name=one.name,
                address=str(one.address),
                state=one.state,
                weight=one.weight,
                warmth=self._warmth(one, now_s),
            )
            for one in self._members.values()
        ]

    # What happens

    def apply(self, roll: Roll) -> list[Change]:
        """What the source says now, whole. Listings that are refused stand in ``refused``."""
        self.source_state, self.source_reason = roll.state, roll.reason
        changes: list[Change] = []
        if roll.state is SourceState.EMPTY and self._empty_since_s is None:
            self._empty_since_s = self._clock()
        elif roll.state is SourceState.LISTED:
            self._empty_since_s = None
            changes = self._take(roll.listings)
        return changes + self.advance()

    def heard(self, address: Address, facts: Facts) -> list[Change]:
        """The node at a listed address greeted, or answered again, and says this of itself.

        Raises StaleEpochError for a boot that a later one followed, ConfigError for the twin of a live node.
        """
        changes = self._meet(address, facts, is_listing=False) if address in self._listed else []
        return changes + self.advance()

    def lost(self, node: NodeId) -> list[Change]:
        """The link to this boot of a node is broken. Of an earlier boot it says nothing."""
        member = self._members.get(node.uuid)
        if member is not None and member.node == node:
            member.is_answering = False
        return self.advance()

    def advance(self) -> list[Change]:
        """What time alone changes."""
        now_s, changes = self._clock(), []
        if self._empty_since_s is not None and now_s - self._empty_since_s >= self.limits.grace_s:
            self._listed.clear()
            for member in self._members.values():
                member.listed_as.clear()
                member.gone_since_s = self._empty_since_s
        for member in list(self._members.values()):
            change = self._settle(member, now_s)
            if change is not None:
                changes.append(change)
        return changes

    # Who owns what

    def owners(self, segment: bytes, replicas: int | None = None) -> Owners:
        """Who should have a segment and who should get it. ``replicas``: instead of the usual number."""
        ring = self._ring_now()
        count = self.limits.replicas if replicas is None else replicas
        read: list[Member] = []
        write: list[Member] = []
        settled = taking = 0
        ranked = rank(segment, ring.candidates) if len(ring.candidates) > 1 else range(len(ring.candidates))
        for place, index in enumerate(ranked):
            member = ring.members[index]
            if member.state is not _DISCONNECTED and (settled < count and place < count + self.limits.spare_reads):
                read.append(member)
            if member.state is not _DRAINING:
                if member.state is _LIVE and taking < count:
                    write.append(member)
                taking += 1
            settled += ring.is_settled[index]
            if settled >= count and taking >= count:
                break
        return Owners(tuple(read), tuple(write))

    def standing(self, segment: bytes) -> list[Member]:
        """Who owns a segment, whatever its state, and who else is asked for it; for people."""
        ring = self._ring_now()
        ranked = rank(segment, ring.candidates) if len(ring.candidates) > 1 else range(len(ring.candidates))
        first = [ring.members[index] for index, _ in zip(ranked, range(self.limits.replicas), strict=False)]
        return list(dict.fromkeys([*first, *self.owners(segment).read]))

    def _ring_now(self) -> _Ring:
        now_s = self._clock()
        if self._ring is None or now_s >= self._ring.until_s:
            members, ramp = list(self._members.values()), self.limits.ramp
            warmths = [self._warmth(one, now_s) for one in members]
            candidates = [
                Candidate(one.node.uuid.bytes, one.weight * warmth)
                for one, warmth in zip(members, warmths, strict=True)
            ]
            settled = [one.state is not _DRAINING and warmth == 1 for one, warmth in zip(members, warmths, strict=True)]
            steps = [ramp.next_step_s(now_s - one.empty_since_s) for one in members if one.empty_since_s is not None]
            until_s = now_s + min((step for step in steps if step is not None), default=float("inf"))
            self._ring = _Ring(candidates, members, settled, until_s)
        return self._ring

    def _warmth(self, member: Member, now_s: float) -> float:
        return 1.0 if member.empty_since_s is None else self.limits.ramp.warmth(now_s - member.empty_since_s)

    # State steps

    def _take(self, listings: Sequence[Listing]) -> list[Change]:
        """Exactly these are listed now."""
        changes: list[Change] = []
        kept = listings[: self.limits.members_max]
        self._listed = {listing.address: None for listing in kept}
        for address in [one for one in self.refused if one not in self._listed]:
            del self.refused[address]
        for listing in listings[self.limits.members_max :]:
            self._refuse(listing.address, f"more than {self.limits.members_max} members are listed")
        named = {listing.facts.node.uuid for listing in kept if listing.facts is not None}
        for member in self._members.values():
            member.listed_as &= self._listed.keys()
            if self._knows_liveness and member.node.uuid not in named:
                member.listed_as.clear()
        for listing in kept:
            if listing.facts is None:
                self._bind_known(listing.address)
                continue
            try:
                changes += self._meet(listing.address, listing.facts, is_listing=True)
            except KVServiceError as error:
                self._refuse(listing.address, str(error))
        return changes

    def _bind_known(self, address: Address) -> None:
        """An address that is listed again, of a member that is known to live there."""
        for member in self._members.values():
            if member.address == address:
                member.listed_as.add(address)

    def _meet(self, address: Address, facts: Facts, *, is_listing: bool) -> list[Change]:
        member = self._members.get(facts.node.uuid)
        changes = []
        try:
            if member is None:
                member = self._join(address, facts)
                changes.append(Change(member, None, member.state))
            elif member.node.epoch != facts.node.epoch:
                self._take_over(member, address, facts, is_listing=is_listing)
                changes.append(Change(member, member.state, member.state, has_rebooted=True))
        except KVServiceError as error:
            self._refuse(address, str(error))
            raise
        self.refused.pop(address, None)
        self._bind(member, address, is_listing=is_listing)
        if not is_listing or changes:
            member.is_answering = True
        member.name, member.is_draining = facts.name, facts.is_draining
        member.flight_port = facts.flight_port
        if member.weight != facts.weight:
            member.weight, self._ring = facts.weight, None
        return changes

    def _join(self, address: Address, facts: Facts) -> Member:
        if len(self._members) >= self.limits.members_max:
            raise LimitError(f"node {facts.node} at {address}: {self.limits.members_max} members are the limit")
        is_back = self._fence.epoch_of(facts.node.uuid) is not None
        self._fence.admit(facts.node, str(address))
        member = Member(facts.node, address, facts.name, facts.weight, is_draining=facts.is_draining)
        member.state = _DRAINING if facts.is_draining else _LIVE
        now_s = self._clock()
        if is_back:
            member.empty_since_s = now_s  # its segments were others' meanwhile, whatever it still holds
        elif facts.empty_s is not None:
            member.empty_since_s = now_s - facts.empty_s
        elif now_s - self._started_s >= self.limits.grace_s:
            member.empty_since_s = now_s
        self._members[facts.node.uuid] = member
        self.departed.pop(facts.node.uuid, None)
        self._ring = None
        return member

    def _take_over(self, member: Member, address: Address, facts: Facts, *, is_listing: bool) -> None:
        """Another epoch of a known node speaks: it has booted again, or is a twin or a zombie."""
        is_live_elsewhere = member.state is not _DISCONNECTED and address not in {member.address, *member.listed_as}
        if is_live_elsewhere and not is_listing:
            raise twin_error(facts.node, str(address), member.node, str(member))
        if facts.node.epoch < member.node.epoch:
            raise zombie_error(facts.node, str(address), member.node.epoch)
        self._fence.admit(facts.node, str(address))
        member.node, member.address, member.gone_since_s = facts.node, address, None
        member.listed_as.clear()
        member.empty_since_s = self._clock() - (facts.empty_s or 0.0)
        self._ring = None

    def _bind(self, member: Member, address: Address, *, is_listing: bool) -> None:
        for other in self._members.values():
            if other is not member:
                other.listed_as.discard(address)
        if address in self._listed:
            member.listed_as.add(address)
        if is_listing or not member.is_answering or member.address not in member.listed_as:
            member.address = address

    def _settle(self, member: Member, now_s: float) -> Change | None:
        before = member.state
        if member.listed_as and member.is_answering:
            after, member.gone_since_s = (_DRAINING if member.is_draining else _LIVE), None
        else:
            after = self._gone(member, now_s)
        if after is before:
            return None
        member.state, self._ring = after, None
        return Change(member, before, after)

    def _gone(self, member: Member, now_s: float) -> MemberState:
        """Not there: since when, and is it forgotten?"""
        if self._knows_liveness and member.listed_as:
            member.gone_since_s = None
            return _DISCONNECTED
        if member.gone_since_s is None:
            member.gone_since_s = now_s
        if member.is_draining or now_s - member.gone_since_s >= self.limits.grace_s:
            self._forget(member)
            return MemberState.LEFT
        return _DISCONNECTED

    def _forget(self, member: Member) -> None:
        del self._members[member.node.uuid]
        self.departed[member.node.uuid] = member
        while len(self.departed) > DEPARTED_MAX:
            del self.departed[next(iter(self.departed))]

    def _refuse(self, address: Address, reason: str) -> None:
        self.refused.pop(address, None)
        self.refused[address] = reason
        while len(self.refused) > REFUSED_MAX:
            del self.refused[next(iter(self.refused))]
