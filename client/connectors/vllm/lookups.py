"""Lookups and their leases, on a thread of their own: the scheduler asks and goes on, and finds the answer later.

Nothing here blocks its caller: ``ask`` and ``give_up`` put a note into a queue, everything else is reading a field.
"""

import logging
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvservice.client.connectors.breaker import Breaker
from kvservice.client.connectors.vllm.chunks import Chunk
from kvservice.client.connectors.vllm.link import Link
from kvservice.client.connectors.vllm.metrics import Counts
from kvservice.client.plans import PromptPlan, prompt_plan, prompt_query
from kvservice.client.rounds import RoundPrompt
from kvservice.client.session import NO_LEASE, Session
from kvservice.model.errors import KVServiceError
from kvservice.model.identity import Namespace
from kvservice.model.lease import BootEpoch, Lease
from kvservice.model.plan import ARRIVES_FROM, Outcome
from kvservice.wire.v1 import cache_pb2 as wire

WAITING_MAX = 4096
"""Lookups that wait for the thread; one more is a miss at once. A lookup takes 0.1 ms."""
STOP_TIMEOUT_S = 5.0

log = logging.getLogger("vllm.kvservice")


@dataclass(frozen=True, slots=True)
class Answer:
    """What a lookup found. ``is_held``: one for each chunk asked, True if every rank has it. ``on_ssd``: likewise."""

    is_held: tuple[bool, ...] = ()
    on_ssd: tuple[bool, ...] = ()
    is_failed: bool = False

    @property
    def prefix(self) -> int:
        """How many chunks are held from the first on without a gap."""
        return self.is_held.index(False) if False in self.is_held else len(self.is_held)


MISS = Answer()
FAILED = Answer(is_failed=True)


class Asked(ABC):
    """One lookup under way, or answered and then leased until it is given up."""

    def __init__(self, asked_s: float) -> None:
        self.asked_s = asked_s
        self.is_given_up = False
        self._session: Session | None = None
        self._lease: Lease | None = None

    @property
    @abstractmethod
    def is_answered(self) -> bool:
        """True once there is an answer; it never changes then."""

    @property
    @abstractmethod
    def is_empty(self) -> bool:
        """True if the answer promises nothing, so that there is nothing to lease."""

    @abstractmethod
    def queries(self, namespaces: Sequence[Namespace], segments_max: int) -> list[wire.PromptQuery]:
        """What to ask the node for, in one call of at most so many segments."""

    @abstractmethod
    def take(self, reply: wire.LookupReply, lease: Lease) -> None:
        """Make the answer of the node's reply."""

    @abstractmethod
    def fail(self) -> None:
        """There will be no other answer: nothing is held."""


class Ticket(Asked):
    """Of the chunks of one request, where they stand and nowhere else, for all ranks."""

    def __init__(self, chunks: Sequence[Chunk], asked_s: float) -> None:
        super().__init__(asked_s)
        self.chunks = tuple(chunks)
        self.answer: Answer | None = None

    @property
    def is_answered(self) -> bool:
        """See Asked."""
        return self.answer is not None

    @property
    def is_empty(self) -> bool:
        """See Asked."""
        return self.answer is not None and not any(self.answer.is_held)

    def queries(self, namespaces: Sequence[Namespace], segments_max: int) -> list[wire.PromptQuery]:
        """Chunks beyond the limit are left out; their answer is a miss."""
        asked = self.chunks[: segments_max // len(namespaces)]
        return [query(namespace, rank, asked) for rank, namespace in enumerate(namespaces)]

    def take(self, reply: wire.LookupReply, lease: Lease) -> None:
        """See Asked."""
        self.answer = _answer(reply)

    def fail(self) -> None:
        """See Asked."""
        self.answer = FAILED


class RoundTicket(Asked):
    """Of all segments of several prompts, wherever they may come from. ``plans``: one a prompt, once answered.

    ``users``: who still relies on the lease.
    """

    def __init__(self, prompts: Sequence[RoundPrompt], asked_s: float) -> None:
        super().__init__(asked_s)
        self.prompts = tuple(prompts)
        self.plans: tuple[PromptPlan, ...] | None = None
        self.is_failed = False
        self.users: set[str] = set()

    @property
    def is_answered(self) -> bool:
        """See Asked."""
        return self.plans is not None or self.is_failed

    @property
    def is_empty(self) -> bool:
        """See Asked."""
        return self.is_answered and not any(plan.hits for plan in self.plans or ())

    def queries(self, namespaces: Sequence[Namespace], segments_max: int) -> list[wire.PromptQuery]:
        """Raises LimitError, from the session, if these are too many."""
        return [prompt_query(prompt) for prompt in self.prompts]

    def take(self, reply: wire.LookupReply, lease: Lease) -> None:
        """See Asked."""
        replies = zip(self.prompts, reply.prompts, strict=True)
        self.plans = tuple(prompt_plan(prompt, found, lease) for prompt, found in replies)

    def fail(self) -> None:
        """See Asked."""
        self.is_failed = True


A = TypeVar("A", bound=Asked)


class Lookups:
    """Answers tickets in order. ``ask`` and ``give_up`` are called from one thread, the engine's."""

    def __init__(
        self,
        link: Link,
        namespaces: Sequence[Namespace],
        counts: Counts,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._link = link
        self._namespaces = tuple(namespaces)
        self._counts = counts
        self._clock = clock
        self.epoch = BootEpoch(0)
        """Which start of the service answered last; 0 before the first answer."""
        self._notes: queue.Queue[Asked | None] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._asked = self._answered = 0
        self._changed = threading.Condition()

    def ask(self, chunks: Sequence[Chunk]) -> Ticket:
        """Begin a lookup. Answered at once if there is nothing to ask, or too much waits."""
        ticket = Ticket(chunks, self._clock())
        if not ticket.chunks:
            ticket.answer = MISS
            return ticket
        return self._begin(ticket)

    def ask_round(self, prompts: Sequence[RoundPrompt]) -> RoundTicket:
        """Begin a lookup of all segments of these prompts, in one call. Answered at once if too much waits."""
        return self._begin(RoundTicket(prompts, self._clock()))

    def _begin(self, ticket: A) -> A:
        if self._notes.qsize() >= WAITING_MAX:
            ticket.fail()
            self._counts.add("lookups_failed")
        else:
            self._asked += 1
            self._put(ticket)
        return ticket

    def wait_for_answer(self, timeout_s: float) -> None:
        """Return when the next lookup has been answered, at once if none is under way."""
        if self._asked != self._answered:
            with self._changed:
                before = self._answered
                self._changed.wait_for(lambda: self._answered != before or self._asked == before, timeout_s)

    def give_up(self, ticket: Asked) -> None:
        """Let go of what the ticket holds, or will hold. Doing it twice is no error."""
        if not ticket.is_given_up:
            ticket.is_given_up = True
            self._put(ticket)

    def is_good(self, ticket: Asked) -> bool:
        """True if what the ticket's answer promises is certain to be leased still. Asks nobody."""
        session, lease = ticket._session, ticket._lease
        if session is None or lease is None or lease.id == NO_LEASE:
            return ticket.is_empty
        if not self._link.is_current(session):
            return False
        try:
            session.check_lease(lease)
        except KVServiceError:
            return False
        return True

    def late(self) -> None:
        """Note that an answer did not come before the deadline: the service, or the way to it, is in trouble."""
        self._counts.add("lookups_late")
        self._link.breaker.failed()

    @property
    def breaker(self) -> Breaker:
        """What stands before the service."""
        return self._link.breaker

    def close(self) -> None:
        """End the thread and the session, and with it every lease."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._notes.put(None)
            thread.join(STOP_TIMEOUT_S)
        self._link.close()

    def _put(self, ticket: Asked) -> None:
        self._notes.put(ticket)
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="kvservice-lookups", daemon=True)
            thread.start()
            self._thread = thread

    def _run(self) -> None:
        while True:
            try:
                ticket = self._notes.get(timeout=self._link.probe_interval_s)
            except queue.Empty:
                self._link.probe()
                continue
            if ticket is None:
                return
            try:
                self._serve(ticket)
            except Exception:  # a thread's top: the engine must get an answer whatever happens
                log.exception("kvservice: a lookup failed in a way nobody expected; the request is computed")
                self._counts.add("hook_errors")
                if not ticket.is_answered:
                    ticket.fail()
                    self._count_answer()

    def _count_answer(self) -> None:
        with self._changed:
            self._answered += 1
            self._changed.notify_all()

    def _serve(self, ticket: Asked) -> None:
        if not ticket.is_answered:
            if ticket.is_given_up:
                ticket.fail()
            else:
                self._look_up(ticket)
            self._count_answer()
        if ticket.is_given_up:
            self._release(ticket)

    def _release(self, ticket: Asked) -> None:
        session, lease, ticket._session, ticket._lease = ticket._session, ticket._lease, None, None
        if session is None or lease is None or lease.id == NO_LEASE or not self._link.is_current(session):
            return
        try:
            session.let_go(lease.id)
        except KVServiceError:  # the node frees it when it runs out, or with the session
            return

    def _look_up(self, ticket: Asked) -> None:
        began_s = self._clock()
        try:
            reply, lease = self._link.run(lambda session: self._call(session, ticket), is_quick=True)
        except KVServiceError as error:
            self._counts.add("lookups_failed")
            log.debug("kvservice: a lookup failed: %s", error)
            ticket.fail()
            return
        self._counts.add("lookups")
        self._counts.add("lookup_seconds", self._clock() - began_s)
        ticket.take(reply, lease)

    def _call(self, session: Session, ticket: Asked) -> tuple[wire.LookupReply, Lease]:
        reply, lease = session.lookup(ticket.queries(self._namespaces, session.limits.lookup_segments_max))
        ticket._session, ticket._lease = session, lease
        self.epoch = session.boot_epoch
        return reply, lease


def query(namespace: Namespace, rank: int, chunks: Sequence[Chunk]) -> wire.PromptQuery:
    """Ask for one rank's caches of these chunks, where they stand and nowhere else."""
    segments = [
        wire.SegmentQuery(
            segment=chunk.keys[rank].segment,
            accepted_contexts=[chunk.keys[rank].context],
            position=chunk.start,
            tokens=chunk.tokens,
        )
        for chunk in chunks
    ]
    return wire.PromptQuery(namespace=namespace, segments=segments)


def _answer(reply: wire.LookupReply) -> Answer:
    ranks = [prompt.segments for prompt in reply.prompts]
    is_held = tuple(all(one.outcome == Outcome.HIT for one in chunk) for chunk in zip(*ranks, strict=True))
    on_ssd = tuple(
        any(place.tier in ARRIVES_FROM for one in chunk for place in (one.record, one.master))
        for chunk in zip(*ranks, strict=True)
    )
    return Answer(is_held, on_ssd)
