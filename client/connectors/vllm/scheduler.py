"""The connector inside vLLM's scheduler: what to promise, what to load, what to save. Runs on the engine's thread.

It never waits and does no I/O: lookups run elsewhere. It promises only what is leased, and not twice what failed once.
Imports no engine: vLLM's requests and outputs are read through the few fields used here.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from kvservice.client.connectors.breaker import BreakerState
from kvservice.client.connectors.vllm.block_hashes import splice_block_hashes
from kvservice.client.connectors.vllm.chunks import ChunkChain
from kvservice.client.connectors.vllm.lookups import Lookups
from kvservice.client.connectors.vllm.members import Member
from kvservice.client.connectors.vllm.metadata import (
    IDLE,
    IDLE_WAIT_S,
    NOTHING,
    LoadOrder,
    RefreshOrder,
    SaveOrder,
    StepOrders,
    WorkerNotice,
)
from kvservice.client.connectors.vllm.metrics import Counts
from kvservice.client.connectors.vllm.options import ConnectorOptions
from kvservice.client.connectors.vllm.rounds import Rounds
from kvservice.client.connectors.vllm.save_orders import SaveOrders
from kvservice.client.connectors.vllm.tracked import KnownKeys, LoadUnderWay, Request, Tracked
from kvservice.client.round_request import KEY

LEASE_IDLE_S = 10.0
"""A lookup that the scheduler has not come back to for so long is given up, and made again when it does: requests that
wait in a long queue must not pin the whole arena."""
SWEEP_S = 1.0
LOOKUPS_AHEAD_MAX = 64
"""Requests looked up before the scheduler asks for them. Those further back in the queue wait for their turn."""

log = logging.getLogger("vllm.kvservice")


def ignore(reason: str) -> None:
    """For engines whose refusals concern nobody."""


MakeChain = Callable[[Request], ChunkChain | None]
"""The chain of a request; None if nothing of it may be reused."""


class SchedulerSide:
    """All hooks of the scheduler's role. One thread, the engine's."""

    def __init__(
        self,
        options: ConnectorOptions,
        block_size: int,
        make_chain: MakeChain,
        lookups: Lookups,
        counts: Counts,
        clock: Callable[[], float] = time.monotonic,
        refuse_reuse: Callable[[str], None] = ignore,
    ) -> None:
        self._options = options
        self._block_size = block_size
        self._make_chain = make_chain
        self._lookups = lookups
        self._counts = counts
        self._clock = clock
        self._tracked: dict[str, Tracked] = {}
        self._refuse_reuse = refuse_reuse
        self._rounds = Rounds(options, lookups, counts, clock)
        self._orders: list[LoadOrder] = []
        self._refreshes: list[RefreshOrder] = []
        self._last_saves: list[SaveOrder] = []
        self._rest = threading.Event()
        self._known = KnownKeys(clock)
        self._saves = SaveOrders(block_size, options.chunk_tokens, self._known)
        self._epoch = lookups.epoch
        self._refusal = ""
        self._swept_s = clock()
        self._tickets = 0

    @property
    def leases_held(self) -> int:
        """Requests with something looked up or loading; 0 once the engine is idle."""
        held = sum(one.ticket is not None or one.load is not None for one in self._tracked.values())
        return held + self._rounds.leases_held

    def reset(self) -> bool:
        """Forget every request's keys; False, and nothing done, while something is being loaded.

        Waiting requests get new keys when the scheduler comes back to them.
        """
        if self._orders or self._refreshes or any(one.load is not None for one in self._tracked.values()):
            return False
        for tracked in list(self._tracked.values()):
            self._drop_ticket(tracked)
            if tracked.member is not None:
                self._rounds.end(tracked.member)
        self._tracked.clear()
        self._known.clear()
        return True

    def close(self) -> None:
        """Let everything go."""
        self._tracked.clear()
        self._rounds.close()
        self._lookups.close()

    # ------------------------------------------------------------------ promises

    def on_new_request(self, request: Request) -> None:
        """Begin to look a request up before the scheduler comes to it, unless many are ahead of it.

        Before the engine looks for its blocks: what may be refreshed is named apart from exact KV, for good.
        """
        tracked = self._track(request)
        if tracked is not None and tracked.chain.wish is not None and tracked.member is None:
            tracked.member = self._rounds.join(request.request_id, tracked.chain.wish)
            if not tracked.chain.wish.is_plain:
                self._name_blocks(tracked, tracked.member)
        elif tracked is not None and tracked.member is None and tracked.asked is not None:
            self._rounds.stand_aside(tracked.asked, request.request_id)
        if tracked is not None and tracked.ticket is None and self._tickets < LOOKUPS_AHEAD_MAX:
            self._ask(tracked)

    def matched_tokens(self, request: Request, local: int) -> tuple[int | None, bool]:
        """How many tokens behind the first ``local`` ones can be loaded; None: not known yet. Never waits.

        May be called any number of times: with an answer at hand it reads a few fields.
        """
        tracked = self._track(request)
        if tracked is None:
            return 0, False
        self._begin_life(tracked)
        tracked.local, tracked.seen_s = local, self._clock()
        if tracked.is_refused or tracked.is_late or self._refusal:
            if tracked.member is not None:
                self._rounds.drop_out(tracked.member)
            return 0, False
        ticket = tracked.ticket
        if ticket is not None and ticket.answer is not None and not self._lookups.is_good(ticket):
            self._drop_ticket(tracked)  # the service was restarted, or the lease ran out
        if tracked.ticket is None:
            self._ask(tracked)
        if tracked.ticket is None or tracked.ticket.answer is None:
            return self._not_yet(tracked)
        if tracked.member is not None and not self._rounds.is_decided(tracked.member, tracked.exact_end):
            return None, False
        if tracked.member is not None and tracked.member.is_reusing:
            if self._name_blocks(tracked, tracked.member):
                return None, False  # the engine looks again, under the new names
            end = self._rounds.promised_end(tracked.member, tracked.exact_end, int(request.num_tokens) - 1)
            if end is None or end > tracked.exact_end:
                return (None, False) if end is None else (end - local, True)
        count = tracked.held_end() - local
        if count < self._options.load_tokens_min:
            return 0, False
        return count, self._options.is_async

    def allocated(self, request: Request, block_ids: Callable[[], Sequence[Sequence[int]]], count: int) -> None:
        """The scheduler has given the request blocks, and takes ``count`` tokens of what was promised."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return
        if not tracked.is_admitted:
            tracked.is_admitted = True
            self._counts.add("tokens_asked", max(request.num_tokens - tracked.local, 0))
        member = tracked.member
        if member is not None:  # the engine may have asked nothing, and then nobody may wait for it
            self._rounds.drop_out(member)
        exact_end = tracked.exact_end
        is_refreshed = member is not None and member.is_reusing and tracked.local + count > exact_end
        if member is not None and member.saves is None and member.role is not None:
            self._rounds.admit(member, tracked.local, tracked.local + count if is_refreshed else 0)
        if member is not None and not is_refreshed:
            self._rounds.let_go(member)
        if count <= 0:
            self._drop_ticket(tracked)
            return
        blocks = tuple(block_ids()[0])
        order = self._load_order(tracked, blocks, count, is_refreshed=is_refreshed)
        ticket, tracked.ticket = tracked.ticket, None
        if ticket is not None:
            self._tickets -= 1
            self._known.learn(ticket)
        if member is not None and is_refreshed:
            tracked.load = LoadUnderWay(ticket, order, member.missing_rows(exact_end, order.end))
            member.is_loading = True
            self._rounds.ordered(order.end - exact_end)
            self._refreshes.append(RefreshOrder(order, exact_end, blocks, member.prompt, member.wish.asked.round))
        else:
            tracked.load = LoadUnderWay(ticket, order)
            self._orders.append(order)
        in_memory, on_ssd = tracked.load.hits
        self._counts.add("tokens_hit_host", in_memory)
        self._counts.add("tokens_hit_ssd", on_ssd)

    def order_failure(self, request_id: str, count: int) -> None:
        """Have the workers report a load of which nothing is known as failed: else the engine waits for it for ever."""
        tracked = self._tracked.get(request_id)
        is_reusing = tracked is not None and tracked.member is not None and tracked.member.is_reusing
        if count > 0 and (self._options.is_async or is_reusing):
            self._orders.append(LoadOrder(request_id, 0, count, (), (), is_async=True))

    def hit_tokens(self, request: Request) -> tuple[int, int]:
        """Of what is being loaded for a request, how many tokens come from memory and how many from SSD."""
        tracked = self._tracked.get(request.request_id)
        return (0, 0) if tracked is None or tracked.load is None else tracked.load.hits

    def _name_blocks(self, tracked: Tracked, member: Member) -> bool:
        """Name blocks that may hold refreshed KV by how it is refreshed; True if they had other names.

        How is known for certain once the member has its role: what fits in part only is refreshed more.
        """
        if tracked.mark == member.mark:
            return False
        tracked.mark = member.mark
        splice_block_hashes(tracked.request, member.wish.first_shared_token, self._block_size, member.mark)
        return True

    def _not_yet(self, tracked: Tracked) -> tuple[int | None, bool]:
        now_s = self._clock()
        if tracked.asked_s is None:  # since the scheduler asked: waiting in its queue costs nobody anything
            tracked.asked_s = now_s
        is_open = self._lookups.breaker.state is BreakerState.OPEN
        if now_s - tracked.asked_s < self._options.lookup_deadline_s and not is_open:
            return None, False
        tracked.is_late = True
        self._drop_ticket(tracked)
        if not is_open:
            self._lookups.late()
        return 0, False

    def _load_order(
        self, tracked: Tracked, block_ids: Sequence[int], count: int, *, is_refreshed: bool = False
    ) -> LoadOrder:
        start, end = tracked.local, tracked.local + count
        size = self._block_size
        known = () if tracked.ticket is None else tracked.ticket.chunks
        exact_end = tracked.exact_end if is_refreshed else end
        chunks = tuple(chunk for chunk in known if chunk.end > start and chunk.start < exact_end)
        blocks = tuple(block_ids[start // size : -(-end // size)])
        is_async = is_refreshed or self._options.is_async
        return LoadOrder(tracked.request.request_id, start, end, chunks, blocks, is_async)

    # ------------------------------------------------------------------ orders

    def build_orders(self, output: Any) -> StepOrders:
        """What the workers have to do in the step that ``output`` (SchedulerOutput) describes."""
        self._rounds.begin_step()
        self._sweep()
        is_computing = bool(output.num_scheduled_tokens) and not self._refusal
        saves = tuple(self._saves.of_step(output, self._tracked)) if is_computing else ()
        loads, self._orders = tuple(self._orders), []  # last: what raises before keeps them for the next step
        refreshes, self._refreshes = tuple(self._refreshes), []
        last_saves, self._last_saves = tuple(self._last_saves), []
        if not output.num_scheduled_tokens:
            if loads or refreshes or last_saves:
                return StepOrders(loads, last_saves, is_idle=True, refreshes=refreshes)
            self._wait()
            return IDLE
        saves = (*last_saves, *saves)
        if not loads and not saves and not refreshes:
            return NOTHING
        return StepOrders(loads, saves, output.total_num_scheduled_tokens, refreshes=refreshes)

    def _wait(self) -> None:
        """Nothing is to be computed: let other threads have their turn."""
        if self._rounds.is_waiting:
            self._rest.wait(IDLE_WAIT_S)
        else:
            self._lookups.wait_for_answer(IDLE_WAIT_S)

    # ------------------------------------------------------------------ what came of it

    def update(self, output: Any) -> None:
        """What the workers reported of a step (KVConnectorOutput)."""
        bad, failed = set(output.invalid_block_ids or ()), getattr(output, "failed_recving", None) or ()
        if bad or failed:
            for tracked in self._tracked.values():
                self._take_failure(tracked, bad, failed)
        notice = getattr(output, "kv_connector_worker_meta", None)
        if isinstance(notice, WorkerNotice):
            self._take_notice(notice)
        for request_id in output.finished_recving or ():
            self._finish_load(request_id)

    def ended(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        """The engine is done with a request. A load between steps goes on, and its lease with it.

        Returns whether its blocks are still to be read, and what its answer says of its part in a round.
        """
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return False, None
        self._drop_ticket(tracked)
        tracked.is_ended = True
        words = None if tracked.member is None else {KEY: tracked.member.words()}
        output = None if self._refusal or tracked.load is not None else self._saves.of_output(tracked)
        if output is not None:
            self._last_saves.append(output)
        if tracked.load is None or not tracked.load.order.is_async:
            self._forget(tracked)
        return output is not None, words

    def _take_notice(self, notice: WorkerNotice) -> None:
        if notice.refusal and not self._refusal:
            self._refusal = notice.refusal
            log.warning("kvservice: no reuse with this engine: %s", notice.refusal)
        if notice.reuse_refusal:
            self._refuse_reuse(notice.reuse_refusal)
        for request_id in notice.loaded:
            self._finish_load(request_id)
        for request_id in notice.settled:
            self._rounds.settled(request_id)

    def _take_failure(self, tracked: Tracked, bad: set[int], failed: Collection[str]) -> None:
        load = tracked.load
        if load is None:
            return
        lost = load.tokens if load.order.request_id in failed else load.lost_tokens(bad, self._block_size)
        if not lost:
            return
        tracked.is_refused = True
        if tracked.member is not None:
            self._rounds.refuse(tracked.member)
        self._counts.add("tokens_recomputed", lost)
        first = load.order.end - lost
        for chunk in load.order.chunks:
            if chunk.end > first:
                self._known.discard(chunk)
        tracked.unsave_from(first)

    def _finish_load(self, request_id: str) -> None:
        tracked = self._tracked.get(request_id)
        if tracked is None or tracked.load is None:
            return
        if tracked.is_ended:
            self._forget(tracked)
        else:
            self._give_up_load(tracked)

    # ------------------------------------------------------------------ upkeep

    def _track(self, request: Request) -> Tracked | None:
        known = self._tracked.get(request.request_id)
        if known is not None:
            return known
        chain = None if self._refusal else self._make_chain(request)
        if chain is None:
            return None
        tracked = Tracked(request, chain, self._block_size, seen_s=self._clock())
        self._tracked[request.request_id] = tracked
        return tracked

    def _begin_life(self, tracked: Tracked) -> None:
        """A preempted request comes back without blocks, and with more tokens than it was looked up with."""
        if tracked.life == tracked.request.num_preemptions:
            return
        tracked.life = tracked.request.num_preemptions
        self._drop_ticket(tracked)
        if tracked.member is not None:
            self._rounds.restart(tracked.member)
        tracked.is_late, tracked.is_admitted = False, False
        tracked.blocks = []

    def _ask(self, tracked: Tracked) -> None:
        before, self._epoch = self._epoch, self._lookups.epoch
        if before and before != self._epoch:  # restarted: what it held may be gone
            self._known.clear()
        tracked.ticket = self._lookups.ask(tracked.chunks_to_ask())
        self._tickets += 1

    def _drop_ticket(self, tracked: Tracked) -> None:
        ticket, tracked.ticket, tracked.asked_s = tracked.ticket, None, None
        if ticket is not None:
            self._tickets -= 1
            self._known.learn(ticket)
            self._lookups.give_up(ticket)

    def _give_up_load(self, tracked: Tracked) -> None:
        load, tracked.load = tracked.load, None
        if load is not None and load.ticket is not None:
            self._lookups.give_up(load.ticket)
        if load is not None and tracked.member is not None:
            tracked.member.is_loading = False
            self._rounds.let_go(tracked.member)

    def _forget(self, tracked: Tracked) -> None:
        self._give_up_load(tracked)
        if tracked.member is not None:
            self._rounds.end(tracked.member)
        self._tracked.pop(tracked.request.request_id, None)

    def _sweep(self) -> None:
        """Once a second: give up lookups that nobody came back to."""
        now_s = self._clock()
        if now_s - self._swept_s < SWEEP_S:
            return
        self._swept_s = now_s
        for tracked in self._tracked.values():
            if tracked.ticket is not None and now_s - tracked.seen_s > LEASE_IDLE_S:
                self._drop_ticket(tracked)
        self._rounds.sweep(LEASE_IDLE_S)
