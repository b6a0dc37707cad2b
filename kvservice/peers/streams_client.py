"""A link to one other node: what it holds is found and fetched, what is new here is given to it. A place (see sharing).

Everything here runs on the loop that made the link; connections and their threads are in pool.py. One deadline a call,
one breaker a peer: once a call was met with silence, all that wait for the peer end with it, and nobody asks again
until a ping of our own was answered.
"""

import asyncio
import logging
import math
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from kvservice.caches import Space
from kvservice.model.errors import KVServiceError, UnavailableError
from kvservice.model.identity import Namespace
from kvservice.model.segment import CacheKey
from kvservice.peers.ahead_buffers import AheadBuffers
from kvservice.peers.backoff import Backoff
from kvservice.peers.call import Call, SilentError
from kvservice.peers.frames import Kind
from kvservice.peers.host import Query
from kvservice.peers.member import Address, Facts, LocalAddress
from kvservice.peers.packed_counters import PackedCounters
from kvservice.peers.pool import Pool
from kvservice.peers.streams_channel import Source
from kvservice.peers.streams_client_calls import (
    CountCall,
    FetchCall,
    PeerFinding,
    PeerLease,
    PeerRecord,
    PingCall,
    StoreCall,
)
from kvservice.peers.streams_client_dialler import Caller, PeerDialler, WatchedDialler
from kvservice.peers.streams_find import FindCall, query_of
from kvservice.peers.streams_identities import KnownIdentities
from kvservice.peers.streams_limits import LinkLimits
from kvservice.peers.streams_local_dialler import LocalDialler
from kvservice.sharing.place import Offer, Parcel, Question
from kvservice.storage.arena import Arena
from kvservice.storage.buffer import Bytes
from kvservice.storage.remote.breaker import Breaker, BreakerState
from kvservice.storage.remote.contract import OnPiece, RemoteRecord
from kvservice.store import WriteRequest
from kvservice.wire.v1 import peer_pb2 as wire
from kvservice.worker import until_done

IDENTITIES_MAX = 256
"""Namespaces whose JSON is kept at hand; making it takes 3 ms of the loop."""
PROBE_SHARE = 4
"""A peer that is doubted has this part of a deadline to answer."""
CLOSE_S = 10.0
UNSEEN_BYTES_PER_S = 128 << 20
"""At least so fast does a peer read what was lent to it, which nobody here sees."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class LinkCounters(PackedCounters):
    """Of one link. ``resumed``: records that were taken up where a connection broke. ``corrupt``: heads that lied."""

    calls: int = 0
    failed: int = 0
    expired: int = 0
    fetched: int = 0
    fetched_bytes: int = 0
    stored: int = 0
    stored_bytes: int = 0
    resumed: int = 0
    corrupt: int = 0


class Transfer(NamedTuple):
    """A record that was moved. ``first_s``: until its first piece was here; 0 for one that was given away."""

    is_fetch: bool
    record_bytes: int
    first_s: float
    seconds: float


class PeerLink:
    """See Place. ``arena``: where records that are given away lie, so that the kernel sends them without a copy, and
    the node behind a LocalAddress, which needs one, reads them there.

    ``identity_of``: the canonical JSON of a namespace that records were found in over another way; None: not known.
    ``on_change`` is told, on the loop, when the peer is lost (None), and what it says of itself whenever it greets.
    ``on_transfer`` is told of every record moved. ``clock``: monotonic seconds.
    """

    def __init__(
        self,
        address: Address | LocalAddress,
        caller: Caller,
        *,
        arena: Arena | None = None,
        identity_of: Callable[[Namespace], str | None] = lambda _: None,
        limits: LinkLimits | None = None,
        on_change: Callable[[Facts | None], None] = lambda _: None,
        on_transfer: Callable[[Transfer], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self.address = address
        self.limits = limits or LinkLimits()
        self.counters = LinkCounters()
        self.facts: Facts | None = None
        """What the peer said of itself last."""
        limits = self.limits
        pauses = {"pause_s": limits.pause_s, "pause_s_max": limits.pause_s_max}
        self.breaker = Breaker(clock, failures_max=limits.failures_max, **pauses)
        self._arena = arena
        self._on_change = on_change
        self._on_transfer = on_transfer
        self._clock = clock
        self._draw = draw
        self._loop = asyncio.get_running_loop()
        if isinstance(address, LocalAddress):
            assert arena is not None, "what the other side reads"
            self._dialler: PeerDialler = LocalDialler(address, caller, limits, self._note_greeted, arena)
        else:
            self._dialler = PeerDialler(address, caller, limits, self._note_greeted)
        self._pool = Pool(self.name, WatchedDialler(self._dialler, self.breaker, self._hear_broken), limits, clock)
        self._identities, self._ahead = KnownIdentities(IDENTITIES_MAX, identity_of), AheadBuffers()
        self._settling: asyncio.Task[None] | None = None
        self._reviving: asyncio.Task[None] | None = None
        self._reason: BaseException | None = None
        self._is_closed = False

    @property
    def name(self) -> str:
        """For messages and metrics."""
        return f"node {self.address}"

    @property
    def is_answering(self) -> bool:
        """Is it worth asking, as far as is known?"""
        return self.breaker.state is BreakerState.CLOSED

    # Questions

    async def ping(self) -> float:
        """Seconds of a round trip; also learns what the peer says of itself now."""
        call, started_s = PingCall(), self._clock()
        await self._run(call)
        self._take_facts(call.facts)
        return self._clock() - started_s

    async def find_all(
        self, queries: Sequence[Query], identities: Mapping[Namespace, str], *, ttl_s: float = 0.0, ahead_bytes: int = 0
    ) -> list[PeerFinding]:
        """What answers each query; all that is found is leased. ``identities``: canonical JSON of their namespaces.

        A long list is asked in several questions, each with a lease of its own. ``ahead_bytes``: see Carrier.
        """
        step, deadline_s = min(self.limits.find_queries_max, self._dialler.find_queries_max), self.limits.deadline_s
        for namespace, text in identities.items():
            self._identities.keep(namespace, text)
        calls = [
            FindCall(part, {one.namespace: identities[one.namespace] for one in part}, ttl_s, deadline_s / 2)
            for part in (queries[at : at + step] for at in range(0, len(queries), step))
        ]
        for call in calls[:1]:
            call.take_ahead(ahead_bytes, self._ahead)
        results = await asyncio.gather(*(self._run(call) for call in calls), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                for call in calls:
                    self._release(call.lease)
                raise result
        for lease in (one for call in calls for one in call.left):
            self._release(lease)
        self.counters.corrupt += sum(call.corrupt for call in calls)
        for call in calls:
            if call.lease is not None and not call.lease.records:
                self._release(call.lease)  # of heads that lied
        return [finding for call in calls for finding in call.findings]

    async def find(self, questions: Sequence[Question], ahead_bytes: int = 0) -> list[Offer | None]:
        """See Place."""
        queries = [query_of(question) for question in questions]
        identities = {one.space.namespace: self._identities.of(one.space) for one in questions}
        findings = await self.find_all(queries, identities, ttl_s=self.limits.lease_ttl_s, ahead_bytes=ahead_bytes)
        return [None if one.record is None else Offer(one.record, one.master) for one in findings]

    def let_go(self, records: Iterable[RemoteRecord]) -> None:
        """See Place. A lease ends with the last of its records."""
        for record in records:
            self._ahead.give_back(record.ahead)
            lease = record.lease if isinstance(record, PeerRecord) else None
            if lease is not None and lease.records > 0:
                lease.records -= 1
                if not lease.records:
                    self._release(lease)

    async def renew(self, leases: Iterable[PeerLease], ttl_s: float = 0.0) -> int:
        """How many are still held, for ``ttl_s`` from now."""
        message = wire.PeerRenew(lease_ids=[lease.id for lease in leases], lease_ttl_s=ttl_s)
        call = CountCall(Kind.RENEW, message, {})
        await self._run(call)
        return call.count

    def _release(self, lease: PeerLease | None) -> None:
        """Tell the peer, and do not wait for it: what is not heard runs out by itself."""
        if lease is None or not self.is_answering or self._is_closed:
            return
        call = CountCall(Kind.RELEASE, wire.PeerRelease(lease_ids=[lease.id]), {})
        with suppress(KVServiceError):
            self._pool.submit(call)

    async def delete(self, space: Space, keys: Sequence[CacheKey] | None) -> int:
        """See Place."""
        namespace, identities = space.namespace, {space.namespace: self._identities.of(space)}
        step = self.limits.keys_max
        parts = [None] if keys is None else [keys[at : at + step] for at in range(0, len(keys), step)]
        count = 0
        for part in parts:
            call = CountCall.delete(namespace, part, identities)
            await self._run(call)
            count += call.count
        return count

    # Records

    async def fetch(
        self, record: RemoteRecord, target: Bytes, on_piece: OnPiece, start: int = 0, *, packed: bool = False
    ) -> None:
        """See Place. Pieces come in order, those that are lent about so. ``packed``: rows may come as 8 bits."""
        identities, started_s = self._identities.find(record.name.namespace), self._clock()
        call = FetchCall(record, target.data, on_piece, start, identities, takes_packed=packed)
        try:
            await self._run(call)
        finally:
            self.counters.resumed += call.resumes if call.at > start else 0
        self.counters.fetched += 1
        self.counters.fetched_bytes += record.record_bytes - start
        seconds = self._clock() - started_s
        self._on_transfer(Transfer(True, record.record_bytes - start, max(0.0, call.first_s - started_s), seconds))

    async def store(self, parcel: Parcel, *, packed: bool = False) -> bool:
        """See Place. ``packed``: rows may go as 8 bits."""
        name = parcel.name
        key = CacheKey(name.segment, name.context)
        request = WriteRequest(name.namespace, key, len(parcel.view), parcel.master, parcel.prefill_s)
        identity = self._identities.of(parcel.space)
        return await self.give(request, parcel.view, parcel.header_checksum, identity, packed=packed)

    async def give(
        self, request: WriteRequest, view: Bytes, header_checksum: int, identity: str, *, packed: bool = False
    ) -> bool:
        """Give one whole record away; False if its key is held there. ``identity``: canonical JSON."""
        identities, started_s = {Namespace(request.namespace): identity}, self._clock()
        call = StoreCall(request, self._source(view), header_checksum, identities, packs=packed)
        await self._run(call)
        if call.is_stored:
            self.counters.stored += 1
            self.counters.stored_bytes += len(view)
            self._on_transfer(Transfer(False, len(view), 0.0, self._clock() - started_s))
        return call.is_stored

    def _source(self, view: Bytes) -> Source:
        offset = None if self._arena is None else self._arena.offset_of(view)
        if self._arena is None or offset is None:
            return Source(view.data)
        return Source(view.data, self._arena.descriptor(), offset)

    # Deadlines

    async def _run(self, call: Call, deadline_s: float = 0.0) -> None:
        """Have it answered. Ends within its deadline; when this ends, nothing writes to the caller's memory."""
        if self._settling is not None and not call.is_probe:
            await asyncio.wait([self._settling])
        if self._is_closed:
            raise UnavailableError(f"the link to {self.name} is closed")
        if not call.is_probe and not self.is_answering:
            raise UnavailableError(f"{self.name} is left alone until it answers again: {self._reason}")
        done = self._loop.create_future()
        call.on_done = partial(self._post, partial(_resolve, done))
        started_s, limits, pool = self._clock(), self.limits, self._pool
        expected = call.expected_bytes
        pool.outstanding_bytes += expected
        due_s = started_s + (deadline_s or limits.deadline_s)
        self.counters.calls += 1
        try:
            pool.submit(call)
            await self._wait(call, done, started_s, due_s)
        except asyncio.CancelledError:
            call.give_up(UnavailableError(f"a call to {self.name} was given up"))
            await until_done(done)
            raise
        finally:
            pool.outstanding_bytes -= expected
            self.counters.add_packed(call.packed)
        if call.error is not None:
            self.counters.failed += 1
            raise call.error

    async def _wait(self, call: Call, done: "asyncio.Future[None]", started_s: float, due_s: float) -> None:
        most_bytes = 0
        while not done.done():
            now_s, lane = self._clock(), call.lane
            limit_s, look_s = due_s, math.inf
            if call.expected_bytes:  # they share the link with all that are under way, also with those that came later
                most_bytes = max(most_bytes, self._pool.outstanding_bytes)
                limit_s = due_s + most_bytes / self.limits.bytes_per_s_min
                look_s = self.limits.deadline_s  # again: a lane may have it by then, and be silent
                if lane is not None:
                    unseen_s = call.unseen_bytes / UNSEEN_BYTES_PER_S
                    limit_s = min(limit_s, max(lane.moved_s, started_s) + self.limits.deadline_s + unseen_s)
            if now_s >= limit_s:
                self._expire(call, now_s)
                await asyncio.wait([done])
            else:
                await asyncio.wait([done], timeout=min(limit_s - now_s, look_s))

    def _expire(self, call: Call, now_s: float) -> None:
        """Its time is up. Where nothing else moved either, the peer is lost, and nobody else waits as long for it."""
        deadline_s = self.limits.deadline_s
        error = SilentError(f"{self.name} did not answer within {deadline_s:g} s")
        self.counters.expired += 1
        since_s = now_s - deadline_s
        if self._pool.moved_s > since_s and not call.is_probe:
            self.breaker.failed()
        else:
            self.breaker.timed_out()
        call.give_up(error)
        if not self.is_answering:
            self._lose(error)
            self._pool.give_up_silent(now_s - deadline_s / 2, error)

    # Lost and found

    def doubt(self) -> None:
        """The peer is lost another way: whether it answers here is asked at once, and not waited for long."""
        if self._settling is None and self.is_answering and not self._is_closed:
            self._settling = self._loop.create_task(self._settle())

    async def _settle(self) -> None:
        call = PingCall()
        call.is_probe = True
        try:
            await self._run(call, self.limits.deadline_s / PROBE_SHARE)
        except KVServiceError as error:
            log.info("%s does not answer either: %s", self.name, error)
        finally:
            self._settling = None

    def _lose(self, error: BaseException) -> None:
        """The breaker is open: end what waits, and look for the peer now and then."""
        self._reason = error
        reason = UnavailableError(f"{self.name} is lost: {error}")
        self._pool.fail_waiting(reason)
        if self._reviving is None and not self._is_closed:
            log.warning("%s; it is left alone until it answers a ping", reason)
            self._on_change(None)
            self._reviving = self._loop.create_task(self._revive())

    async def _revive(self) -> None:
        backoff = Backoff(self._draw, first_s=self.limits.pause_s, max_s=self.limits.pause_s_max)
        while not self.is_answering and not self._is_closed:
            await asyncio.sleep(backoff.next_s())
            if not self.breaker.allows():
                continue
            call = PingCall()
            call.is_probe = True
            try:
                await self._run(call)
            except KVServiceError as error:
                self._reason = error
            else:
                log.info("%s answers again", self.name)
                self._take_facts(call.facts)
        self._reviving = None

    def _note_greeted(self, facts: Facts) -> None:
        """From a lane's thread."""
        self._post(partial(self._take_facts, facts))

    def _take_facts(self, facts: Facts) -> None:
        self.facts = facts
        self._on_change(facts)

    def _hear_broken(self, error: BaseException) -> None:
        """From a lane's thread."""
        self._reason = error
        self._post(partial(self._note_broken, error))

    def _note_broken(self, error: BaseException) -> None:
        if not self.is_answering:
            self._lose(error)

    def _post(self, work: Callable[[], object]) -> None:
        with suppress(RuntimeError):  # the loop has ended, and with it whoever waited
            self._loop.call_soon_threadsafe(work)

    async def close(self) -> None:
        """See Place."""
        if self._is_closed:
            return
        self._is_closed = True
        tasks = [task for task in (self._reviving, self._settling) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        threads = self._pool.close()
        await asyncio.gather(*(asyncio.to_thread(thread.join, CLOSE_S) for thread in threads))


def _resolve(done: "asyncio.Future[None]") -> None:
    if not done.done():
        done.set_result(None)
