"""Rounds on the scheduler's side: who goes together, what was found for them, who leads and who reuses.

A member passes from its round's gate to one lookup for all who came, and on to a role. Followers wait for their leader
and are looked up once more, together. Nothing here waits: whoever asks again, at the next step, hears what is new.
One thread, the engine's.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from kvservice.client.connectors.vllm.chunks import Chunk
from kvservice.client.connectors.vllm.lookups import Lookups
from kvservice.client.connectors.vllm.members import REUSING, Member, Stage
from kvservice.client.connectors.vllm.metrics import Counts
from kvservice.client.connectors.vllm.options import ConnectorOptions
from kvservice.client.connectors.vllm.wishes import ReuseWish
from kvservice.client.reuse.gate import IDLE_S, RoundGate, Waiting
from kvservice.client.reuse.kinds import raised
from kvservice.client.reuse.leader import (
    REUSE_FIT_MIN,
    Role,
    RoundMember,
    SharedSegment,
    Thresholds,
    choose_roles,
    judge,
    shared_run,
)
from kvservice.client.round_request import RoundRequest
from kvservice.model.errors import InvalidInputError, LimitError
from kvservice.model.segment import SegmentId

STORING_MAX = 1 << 16
"""Segments remembered as being stored by a member, so that others need not store them too."""
STORING_S = 30.0
"""For so long; later the service may have evicted them."""

log = logging.getLogger("vllm.kvservice")


class Rounds:
    """Members of all rounds under way."""

    def __init__(self, options: ConnectorOptions, lookups: Lookups, counts: Counts, clock: Callable[[], float]) -> None:
        self._options = options
        self._lookups = lookups
        self._counts = counts
        self._clock = clock
        self._gate = RoundGate(clock)
        self._thresholds = Thresholds(raise_min=min(options.raise_fit_min, REUSE_FIT_MIN))
        self._members: dict[str, Member] = {}
        self._at_gate: dict[tuple[str, str], Member] = {}
        self._rows_ordered = 0
        self._storing_s: OrderedDict[SegmentId, float] = OrderedDict()

    @property
    def leases_held(self) -> int:
        """Members for whom something is looked up or leased."""
        return sum(member.ticket is not None for member in self._members.values())

    @property
    def is_waiting(self) -> bool:
        """True while a member waits for others: there is nothing to do but to ask again a little later."""
        return any(member.stage in (Stage.GATE, Stage.FOLLOW) for member in self._members.values())

    # ------------------------------------------------------------------ from arrival to role

    def join(self, request_id: str, wish: ReuseWish) -> Member:
        """A request arrived."""
        member = Member(request_id, wish, Stage.GATE, wish.prompt, seen_s=self._clock())
        self._members[request_id] = member
        if wish.is_plain:
            self.stand_aside(wish.asked, request_id)
            self._decide(member, Role.COMPUTE)
        elif not self._enter(member):
            self._ask_alone(member)
        return member

    def stand_aside(self, asked: RoundRequest, request_id: str) -> None:
        """A prompt of the round that takes no part in its pass: nobody is to wait for it."""
        if asked.round and asked.expect > 1:
            try:
                self._announce(asked, request_id)
            except (InvalidInputError, LimitError) as error:
                self._refuse_words(str(error))
            else:
                self._gate.withdraw(asked.round, asked.agent)

    def is_decided(self, member: Member, known_tokens: int) -> bool:
        """True once the member has its role. ``known_tokens``: how many of its tokens it need not compute anyway.

        Asks the gate, reads answers and starts lookups, as far as they have come.
        """
        member.seen_s, member.known_tokens = self._clock(), known_tokens
        if member.stage is Stage.GATE:
            self._open(member)
        if member.stage is Stage.FOLLOW:
            self._behind_leader(member)
        if member.stage is Stage.STALE:
            self._ask_alone(member)
        if member.stage is Stage.LOOKUP:
            self._read_answer(member)
        if member.is_reusing and member.ticket is not None and not self._lookups.is_good(member.ticket):
            self._ask_alone(member)  # the service was restarted, or the lease ran out
        return member.stage is Stage.DECIDED

    def restart(self, member: Member) -> None:
        """It was preempted: it comes back alone, with nothing found."""
        if member.wish.is_plain:
            return
        self._leave_gate(member)
        self._let_go(member)
        self._forget_storing(member)
        member.prompt = member.wish.prompt
        member.stage, member.is_judged_alone, member.saves = Stage.STALE, True, None

    def drop_out(self, member: Member) -> None:
        """It is computed without having been asked for its role: nobody may wait for it as their leader."""
        if member.stage is not Stage.DECIDED:
            self._leave_gate(member)
            self._let_go(member)
            self._decide(member, Role.COMPUTE)

    def refuse(self, member: Member) -> None:
        """Its pass failed: it is computed, and its segments are saved like those of any other."""
        self._let_go(member)
        member.reused_tokens, member.saves = 0, None
        self._decide(member, Role.COMPUTE)

    def let_go(self, member: Member) -> None:
        """What was found for it is in the engine, or not needed any more."""
        self._let_go(member)

    def end(self, member: Member) -> None:
        """The request is over; whoever waits for it hears so."""
        self._leave_gate(member)
        self._let_go(member)
        self._forget_storing(member)
        member.is_over = True
        self._members.pop(member.request_id, None)

    def settled(self, request_id: str) -> None:
        """One of a request's ordered segments was stored, or will not be. Its leader may be over meanwhile."""
        leaders = (leader for member in self._members.values() for leader in member.leaders)
        for member in {id(one): one for one in (*self._members.values(), *leaders)}.values():
            if member.request_id == request_id:
                member.unsettled = max(member.unsettled - 1, 0)

    def sweep(self, idle_s: float) -> None:
        """Let go of what was found for members whom nobody asked about for so long."""
        old_s = self._clock() - idle_s
        for member in self._members.values():
            is_idle = member.seen_s < old_s and not member.is_loading
            if member.ticket is not None and is_idle and member.stage in (Stage.LOOKUP, Stage.DECIDED):
                self._let_go(member)
                member.stage, member.is_judged_alone = Stage.STALE, True

    def close(self) -> None:
        """Forget everybody."""
        self._members.clear()
        self._at_gate.clear()

    def admit(self, member: Member, local: int, promised_end: int) -> None:
        """It has blocks: count its role, and note what is to be saved of it."""
        assert member.role is not None
        if promised_end:
            self._counts.add("members_reusing")
        elif member.role not in REUSING and not member.wish.is_plain:
            self._counts.add("members_leading" if member.role is Role.LEAD else "members_computing")
        member.plan_saves(local, promised_end)
        assert member.saves is not None
        if member.role is Role.COMPUTE:  # one cache of a segment is of use to others, a second one hardly
            member.saves = [save for save in member.saves if not self._is_storing(save.chunk)]
        for save in member.saves:
            if not save.is_brought:
                self._note_storing(save.chunk)

    # ------------------------------------------------------------------ what a pass may bring

    def promised_end(self, member: Member, exact_end: int, end_max: int) -> int | None:
        """Up to where a pass can bring a reusing member's tokens; None: not in this step; ``exact_end``: not worth one.

        ``exact_end``: up to where they need no pass. ``end_max``: at least one token is left to the engine.
        """
        end = min(member.reuse_end, end_max)
        rows = end - exact_end
        if rows - member.missing_rows(exact_end, end) < self._options.load_tokens_min:
            return exact_end
        if rows > self._options.refresh_rows_max:
            return exact_end
        rows_left = self._options.refresh_rows_max - self._rows_ordered
        fitting = (one for one in (self._with_tail(member, end, end_max), end) if one - exact_end <= rows_left)
        return next(fitting, None)

    def _with_tail(self, member: Member, end: int, end_max: int) -> int:
        """A step of the engine for a question alone costs what a step costs, however few rows it has."""
        last = min(member.prompt.token_count, end_max)
        return last if last - end <= self._options.refresh_tail_rows else end

    def ordered(self, rows: int) -> None:
        """So many rows of this step's passes are spoken for."""
        self._rows_ordered += rows

    def begin_step(self) -> None:
        """The step's orders are made; the next may order as many rows again."""
        self._rows_ordered = 0

    # ------------------------------------------------------------------ the gate

    def _enter(self, member: Member) -> bool:
        asked, place = member.wish.asked, (member.wish.asked.round, member.wish.asked.agent)
        if not asked.round or asked.expect < 2:
            return False
        if place in self._at_gate:
            self._refuse_words(f"agent {asked.agent!r} has a prompt in round {asked.round!r} already")
            return False
        try:
            self._announce(asked, member.request_id)
            self._gate.arrive(asked.round, asked.agent)
        except (InvalidInputError, LimitError) as error:
            self._refuse_words(str(error))
            return False
        self._at_gate[place] = member
        return True

    def _announce(self, asked: RoundRequest, request_id: str) -> None:
        """Raises InvalidInputError and LimitError. An earlier round of this name is over once nobody is at it."""
        others = (one for one in self._members.values() if one.request_id != request_id)
        if not any(one.wish.asked.round == asked.round for one in others):
            self._gate.renew(asked.round, asked.agent, asked.expect)
        self._gate.announce(asked.round, asked.expect, min(self._options.round_wait_s, IDLE_S))

    def _refuse_words(self, why: str) -> None:
        self._counts.add("round_params_refused")
        log.warning("kvservice: a prompt is looked up alone, not with its round: %s", why)

    def _open(self, member: Member) -> None:
        try:
            found = self._gate.take(member.wish.asked.round)
        except InvalidInputError:  # forgotten: too many rounds came since
            self._leave_gate(member)
            self._ask_alone(member)
            return
        if isinstance(found, Waiting):
            return
        arrived = [self._at_gate.pop((member.wish.asked.round, agent), None) for agent in found.members]
        self._ask([one for one in arrived if one is not None], is_judged_alone=False)
        if member.stage is Stage.GATE:  # its round was forgotten, and this is another of the same name
            self._leave_gate(member)
            self._ask_alone(member)

    def _leave_gate(self, member: Member) -> None:
        place = (member.wish.asked.round, member.wish.asked.agent)
        if self._at_gate.get(place) is member:
            del self._at_gate[place]
        if member.stage is Stage.GATE:
            self._gate.withdraw(*place)

    # ------------------------------------------------------------------ lookups

    def _ask_alone(self, member: Member) -> None:
        self._ask([member], is_judged_alone=True)

    def _ask(self, members: Sequence[Member], *, is_judged_alone: bool) -> None:
        if not members:
            return
        ticket = self._lookups.ask_round([member.prompt for member in members])
        for place, member in enumerate(members):
            self._let_go(member)
            member.ticket, member.place = ticket, place
            member.stage, member.is_judged_alone = Stage.LOOKUP, is_judged_alone
            ticket.users.add(member.request_id)

    def _let_go(self, member: Member) -> None:
        ticket, member.ticket = member.ticket, None
        if ticket is None:
            return
        ticket.users.discard(member.request_id)
        if not ticket.users:
            self._lookups.give_up(ticket)

    def _read_answer(self, member: Member) -> None:
        ticket = member.ticket
        assert ticket is not None
        together = [one for one in self._members.values() if one.ticket is ticket and one.stage is Stage.LOOKUP]
        if not ticket.is_answered:
            if self._clock() - ticket.asked_s >= self._options.lookup_deadline_s:
                self._lookups.late()
                self._without_answer(together)
        elif ticket.is_failed:
            self._without_answer(together)
        elif member.is_judged_alone:
            for one in together:
                self._decide(one, judge(_run_of(one), self._thresholds))
        else:
            self._choose_roles(together)

    def _without_answer(self, members: Iterable[Member]) -> None:
        for member in members:
            self._let_go(member)
            self._decide(member, Role.COMPUTE)

    # ------------------------------------------------------------------ roles

    def _choose_roles(self, members: Sequence[Member]) -> None:
        most = min(member.wish.priority for member in members)
        is_ranked = any(member.wish.priority > most for member in members)
        asked = [
            RoundMember(
                member.request_id,
                member.prompt.token_count - min(member.known_tokens, member.prompt.token_count),
                _run_of(member),
                is_critical=is_ranked and member.wish.priority == most,
            )
            for member in members
        ]
        roles = list(zip(members, choose_roles(asked, self._thresholds), strict=True))
        leaders = [member for member, role in roles if role is Role.LEAD]
        for member, role in roles:
            if role is Role.FOLLOW:
                self._follow(member, leaders)
            else:
                self._decide(member, role)

    def _decide(self, member: Member, role: Role) -> None:
        policy = member.wish.prompt.policy
        assert policy is not None
        member.prompt = member.wish.prompt
        if role is Role.REUSE_MORE:
            more = raised(policy)
            role = Role.COMPUTE if more is None else role
            member.prompt = replace(member.prompt, policy=more or policy)
        if role in REUSING and not member.reuse_end:
            role = Role.COMPUTE
        member.role, member.stage = role, Stage.DECIDED

    def _follow(self, member: Member, leaders: Sequence[Member]) -> None:
        own = {segment.id for segment in _run_of(member)}
        member.leaders = tuple(one for one in leaders if own & {segment.id for segment in _run_of(one)})
        self._let_go(member)
        member.stage, member.follows_s = Stage.FOLLOW, self._clock()

    def _behind_leader(self, member: Member) -> None:
        is_late = self._clock() - member.follows_s >= self._options.leader_wait_s
        if not is_late and not all(leader.is_settled for leader in member.leaders):
            return
        together = [
            one for one in self._members.values() if one.stage is Stage.FOLLOW and one.leaders == member.leaders
        ]
        self._ask(together, is_judged_alone=is_late)  # a leader that left without storing is followed by another

    def _forget_storing(self, member: Member) -> None:
        """What was to be saved and has not been ordered will not be."""
        for save in member.saves or ():
            if not save.is_brought:
                self._storing_s.pop(save.chunk.keys[0].segment, None)

    def _note_storing(self, chunk: Chunk) -> None:
        self._storing_s[chunk.keys[0].segment] = self._clock()
        self._storing_s.move_to_end(chunk.keys[0].segment)
        if len(self._storing_s) > STORING_MAX:
            self._storing_s.popitem(last=False)

    def _is_storing(self, chunk: Chunk) -> bool:
        since_s = self._storing_s.get(chunk.keys[0].segment)
        return since_s is not None and self._clock() - since_s < STORING_S


def _run_of(member: Member) -> tuple[SharedSegment, ...]:
    return () if member.plan is None else shared_run(member.plan)
