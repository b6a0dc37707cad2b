"""Blocking calls to one peer, made by a few threads, for a loop that none of them may hold up. Knows nothing of Flight.

One deadline a call, one breaker a peer: once a call was met with silence, all that wait for the peer end with it, and
nobody asks again until a probe was answered. A call that is given up ends at once, whatever its thread still waits for.
"""

import asyncio
import logging
import math
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from kvservice.model.errors import KVServiceError, LimitError, UnavailableError
from kvservice.peers.backoff import Backoff
from kvservice.peers.call import SilentError, StoppedError
from kvservice.peers.streams_client import LinkCounters
from kvservice.peers.streams_limits import LinkLimits
from kvservice.storage.remote.breaker import Breaker, BreakerState

QUESTION_THREADS = 2
PROBE_SHARE = 4
"""The first call to a peer that is doubted waits for a probe, for this part of a deadline."""
LATE_SHARE = 1.5
"""A thread's own time for a call: the loop has ended it before, if all is well."""
CLOSE_S = 10.0
T = TypeVar("T")
log = logging.getLogger(__name__)


class GivenUpError(Exception):
    """Nobody waits for this call any more."""


class Moving:
    """What a call that moves a record tells whoever waits for it, and hears from him. ``clock``: monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.moved_s = clock()
        self.first_s = 0.0
        self.at = 0
        """Up to where a fetched record is there."""
        self.has_answered = self.has_begun = False
        self._clock = clock
        self._lock = threading.Lock()
        self._free = threading.Condition(self._lock)
        self._is_given_up = self._is_touching = False
        self._cancel: Callable[[], None] = lambda: None

    def begin(self) -> None:
        """A thread has taken it up."""
        self.moved_s = self._clock()
        self.has_begun = True

    def moved(self) -> None:
        """Something came, or was taken."""
        self.moved_s = self._clock()
        self.has_answered = True

    @contextmanager
    def under_way(self, cancel: Callable[[], None]) -> Iterator[None]:
        """``cancel`` ends what waits for the network in here. Raises GivenUpError."""
        with self._lock:
            self._check()
            self._cancel = cancel
        try:
            yield
        finally:
            with self._lock:
                self._cancel = lambda: None

    @contextmanager
    def touching(self) -> Iterator[None]:
        """The caller's memory is used in here. Raises GivenUpError."""
        with self._lock:
            self._check()
            self._is_touching = True
        try:
            yield
        finally:
            with self._lock:
                self._is_touching = False
                self._free.notify_all()

    def give_up(self, when_free: Callable[[], None]) -> None:
        """End it. ``when_free`` is called, by some thread, once the caller's memory is not used any more."""
        with self._lock:
            self._is_given_up = True
            is_free, cancel = not self._is_touching, self._cancel
        cancel()
        if is_free:
            when_free()
        else:
            threading.Thread(target=self._wait_free, args=(when_free,), name="kvservice-flight-end").start()

    def _wait_free(self, when_free: Callable[[], None]) -> None:
        with self._lock:
            self._free.wait_for(lambda: not self._is_touching)
        when_free()

    @property
    def is_given_up(self) -> bool:
        """Does nobody wait for it any more?"""
        return self._is_given_up

    def _check(self) -> None:
        if self._is_given_up:
            raise GivenUpError


@dataclass(slots=True, eq=False)
class _Job(Generic[T]):
    """A call under way. ``done`` is the loop's; nothing of the caller's is used once it is resolved."""

    moving: Moving
    done: "asyncio.Future[T]"
    is_record: bool
    is_probe: bool


class Runner:
    """Lives on the loop that made it. ``probe`` asks the peer whether it is there, by ``run`` with ``is_probe``.

    ``on_lost`` is told, on the loop, that the peer is not there.
    """

    def __init__(
        self,
        name: str,
        limits: LinkLimits,
        probe: Callable[[float], Awaitable[object]],
        on_lost: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = lambda: 1.0,
    ) -> None:
        self.counters = LinkCounters()
        pauses = {"pause_s": limits.pause_s, "pause_s_max": limits.pause_s_max}
        self.breaker = Breaker(clock, failures_max=limits.failures_max, **pauses)
        self._name, self._limits = name, limits
        self._probe, self._on_lost = probe, on_lost
        self._clock, self._draw = clock, draw
        self._loop = asyncio.get_running_loop()
        self._threads = {
            False: ThreadPoolExecutor(QUESTION_THREADS, f"{name} questions"),
            True: ThreadPoolExecutor(max(1, limits.connections - 1), f"{name} records"),
        }
        self._jobs: set[_Job[Any]] = set()
        self._outstanding_bytes = 0
        self._moved_s = float("-inf")
        self._is_doubted = self._is_closed = False
        self._reviving: asyncio.Task[None] | None = None
        self._settling: asyncio.Future[object] | None = None
        self._reason: BaseException | None = None

    @property
    def is_answering(self) -> bool:
        """Is it worth asking, as far as is known?"""
        return self.breaker.state is BreakerState.CLOSED

    def doubt(self) -> None:
        """The peer is lost in another way: the next call waits for a probe first, and not for long."""
        self._is_doubted = True

    async def run(
        self,
        work: Callable[[Moving, float], T],
        *,
        is_record: bool = False,
        is_probe: bool = False,
        expected_bytes: int = 0,
        deadline_s: float | None = None,
    ) -> T:
        """What ``work`` returns, within the deadline; it is told how long its own calls may take.

        Raises UnavailableError, LimitError, and what the peer says. When this ends nothing of the caller's is used.
        """
        if self._is_closed:
            raise UnavailableError(f"the link to {self._name} is closed")
        if not is_probe and not self.is_answering:
            raise UnavailableError(f"{self._name} is left alone until it answers again: {self._reason}")
        if len(self._jobs) >= self._limits.waiting_max:
            raise LimitError(f"{len(self._jobs)} calls wait for {self._name}, that is the limit")
        if not is_probe:
            await self._settle_doubt()
        allowed_s = self._limits.deadline_s if deadline_s is None else deadline_s
        job: _Job[T] = _Job(Moving(self._clock), self._loop.create_future(), is_record, is_probe)
        started_s, self._outstanding_bytes = self._clock(), self._outstanding_bytes + expected_bytes
        due_s = started_s + allowed_s + (self._outstanding_bytes / self._limits.bytes_per_s_min if is_record else 0.0)
        self.counters.calls += 1
        self._jobs.add(job)
        try:
            self._threads[is_record].submit(self._work, job, work, (due_s - started_s) * LATE_SHARE)
            await self._wait(job, started_s, due_s, allowed_s)
            return job.done.result()
        except asyncio.CancelledError:
            await self._abandon(job)
            raise
        except KVServiceError:
            self.counters.failed += 1
            raise
        finally:
            self._jobs.discard(job)
            self._outstanding_bytes -= expected_bytes

    def tell(self, work: Callable[[], object]) -> None:
        """Have a question asked that nobody waits for."""
        if self._is_closed or not self.is_answering:
            return
        with suppress(RuntimeError):  # it was closed just now
            self._threads[False].submit(_quietly, work)

    async def close(self, last: Callable[[], None]) -> None:
        """End every call, then do ``last``. Safe to call twice."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._reviving is not None:
            self._reviving.cancel()
            await asyncio.gather(self._reviving, return_exceptions=True)
        self._give_up_all(lambda _: True, UnavailableError(f"the link to {self._name} is closed"))
        await asyncio.to_thread(last)
        for threads in self._threads.values():
            threads.shutdown(wait=False, cancel_futures=True)

    # A thread

    def _work(self, job: "_Job[T]", work: Callable[[Moving, float], T], timeout_s: float) -> None:
        if job.moving.is_given_up:
            return
        job.moving.begin()
        try:
            result = work(job.moving, timeout_s)
        except GivenUpError:
            return
        except StoppedError as stopped:
            self._answered(job)
            self.post(partial(_fail, job, stopped.error))
        except KVServiceError as error:
            self._judge(job, error)
            self.post(partial(self._note, job, error))
        except Exception as error:
            log.exception("a call to %s failed; this is a fault of the service, please report it", self._name)
            said = UnavailableError(f"a call to {self._name} failed inside this node: {error}")
            self.post(partial(_fail, job, said))
        else:
            self._answered(job)
            self.post(partial(_succeed, job, result))

    def _answered(self, job: "_Job[Any]") -> None:
        job.moving.moved()
        self._moved_s = job.moving.moved_s
        self.breaker.succeeded()

    def _judge(self, job: "_Job[Any]", error: KVServiceError) -> None:
        """Is the peer there, for what a call met with?"""
        if job.moving.is_given_up:
            return
        if isinstance(error, SilentError):
            self.breaker.timed_out()
        elif isinstance(error, UnavailableError):
            self.breaker.failed()
        else:
            self._answered(job)

    def post(self, work: Callable[[], object]) -> None:
        """Have the loop do something, from any thread."""
        with suppress(RuntimeError):  # the loop has ended, and with it whoever waited
            self._loop.call_soon_threadsafe(work)

    # Deadlines, on the loop

    def _note(self, job: "_Job[Any]", error: KVServiceError) -> None:
        _fail(job, error)
        if not self.is_answering:
            self._lose(error)

    async def _wait(self, job: "_Job[Any]", started_s: float, due_s: float, allowed_s: float) -> None:
        while not job.done.done():
            now_s, limit_s = self._clock(), due_s
            look_s = allowed_s if job.is_record else math.inf  # again: it may have begun by then, and be silent
            if job.is_record and job.moving.has_begun:
                limit_s = min(due_s, max(job.moving.moved_s, started_s) + allowed_s)
            if now_s >= limit_s:
                self._expire(job, now_s, allowed_s)
                await asyncio.wait([job.done])
            else:
                await asyncio.wait([job.done], timeout=min(limit_s - now_s, look_s))

    def _expire(self, job: "_Job[Any]", now_s: float, allowed_s: float) -> None:
        """Its time is up. Where nothing else moved either, the peer is lost, and nobody else waits as long for it."""
        error = UnavailableError(f"{self._name} did not answer within {allowed_s:g} s")
        self.counters.expired += 1
        moved_s = max([self._moved_s, *(one.moving.moved_s for one in self._jobs if one.moving.has_answered)])
        if moved_s > now_s - allowed_s and not job.is_probe:
            self.breaker.failed()
        else:
            self.breaker.timed_out()
        self._give_up(job, error)
        if not self.is_answering:
            self._lose(error)

    def _give_up(self, job: "_Job[Any]", error: KVServiceError) -> None:
        job.moving.give_up(partial(self.post, partial(_fail, job, error)))

    def _give_up_all(self, which: Callable[["_Job[Any]"], bool], error: KVServiceError) -> None:
        for job in [one for one in self._jobs if which(one)]:
            self._give_up(job, error)

    async def _abandon(self, job: "_Job[Any]") -> None:
        """Whoever waited is cancelled; he may go when nothing uses his memory."""
        self._give_up(job, UnavailableError(f"a call to {self._name} was given up"))
        while not job.done.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([job.done])
        job.done.exception()

    # Lost and found

    async def _settle_doubt(self) -> None:
        """All that ask meanwhile wait for the same probe."""
        if self._is_doubted:
            self._is_doubted = False
            self._settling = asyncio.ensure_future(self._probe(self._limits.deadline_s / PROBE_SHARE))
            self._settling.add_done_callback(_look_at)
        if self._settling is not None and not self._settling.done():
            await asyncio.shield(self._settling)

    def _lose(self, error: BaseException) -> None:
        """The breaker is open: end what waits without an answer, and look for the peer now and then."""
        self._reason = error
        silent_s = self._clock() - self._limits.deadline_s / 2
        reason = UnavailableError(f"{self._name} is lost: {error}")
        self._give_up_all(lambda one: not one.is_probe and one.moving.moved_s <= silent_s, reason)
        if self._reviving is None and not self._is_closed:
            log.warning("%s; it is left alone until it answers a ping", reason)
            self._on_lost()
            self._reviving = self._loop.create_task(self._revive())

    async def _revive(self) -> None:
        backoff = Backoff(self._draw, first_s=self._limits.pause_s, max_s=self._limits.pause_s_max)
        while not self.is_answering and not self._is_closed:
            await asyncio.sleep(backoff.next_s())
            if not self.breaker.allows():
                continue
            try:
                await self._probe(self._limits.deadline_s)
            except KVServiceError as error:
                self._reason = error
            else:
                log.info("%s answers again", self._name)
        self._reviving = None


def _look_at(done: "asyncio.Future[object]") -> None:
    """It is raised where somebody waits for it, if anybody does."""
    if not done.cancelled():
        done.exception()


def _quietly(work: Callable[[], object]) -> None:
    with suppress(KVServiceError):
        work()


def _succeed(job: _Job[T], result: T) -> None:
    if not job.done.done():
        job.done.set_result(result)


def _fail(job: _Job[Any], error: BaseException) -> None:
    if not job.done.done():
        job.done.set_exception(error)
