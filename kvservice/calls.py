"""The calls of a node in wire messages: decode, call, encode; no decisions. gRPC and in-process clients share it."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvservice import __version__
from kvservice.access.principal import LOCAL, Principal
from kvservice.accounting import place_of
from kvservice.caches import Cache, Space
from kvservice.curves.events import Missing
from kvservice.curves.records import SEEN_MASK
from kvservice.curves.watching import NOTHING
from kvservice.explaining import SpaceExplainer, space_to_explain
from kvservice.explaining_others import Unfound, with_places
from kvservice.explanation_wire import encode_explanation
from kvservice.leases import Grant
from kvservice.loads import Load
from kvservice.lookup import Finding, marks_behind
from kvservice.model.cache import MasterReference, Tier
from kvservice.model.errors import InvalidInputError, KVServiceError, LeaseExpiredError, LimitError
from kvservice.model.identity import Namespace
from kvservice.model.lease import SessionId
from kvservice.model.limits import MESSAGE_BYTES_MAX
from kvservice.model.plan import MissReason, Outcome
from kvservice.model.segment import CacheKey, ContextId, SegmentId
from kvservice.node import Node
from kvservice.request_log import Begun
from kvservice.sessions import Session
from kvservice.store import Reservation, WriteRequest
from kvservice.wire.v1 import cache_pb2 as wire

HIT, MISS, CORRUPT = int(Outcome.HIT), int(Outcome.MISS), int(Outcome.CORRUPT)
HOST = int(Tier.HOST)
TIERS = (HOST, int(Tier.SSD), int(Tier.REMOTE))
"""By where bytes come from: see ``kvservice.lookup``."""


@dataclass(slots=True)
class _Trail:
    """How far a prompt is answered. ``marks``: of the segments before; ``begun``: in the log of requests."""

    at: int = 0
    marks: bytes = b""
    begun: Begun | None = None


class CacheCalls:
    """A node's calls by message. Any of them may raise KVServiceError. Use it from the node's loop only."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self._by_name: dict[str, Callable[[Any], Awaitable[Any]]] = {
            "Lookup": self.lookup,
            "Await": self.await_loads,
            "Reserve": self.reserve,
            "Commit": self.commit,
            "Abort": self.abort,
            "CommitRound": self.commit_round,
            "Renew": self.renew,
            "Release": self.release,
            "Delete": self.delete,
            "Verify": self.verify,
            "Stats": self.stats,
            "Explain": self.explain,
        }

    async def call(self, name: str, request: Any) -> Any:
        """Any unary call by its gRPC method name, such as ``Lookup``."""
        if name not in self._by_name:
            raise InvalidInputError(f"there is no call {name!r}; there are {', '.join(self._by_name)}")
        return await self._by_name[name](request)

    # Session

    def open_session(self, hello: wire.Hello, principal: Principal = LOCAL) -> wire.Welcome:
        """Open a session of ``principal``. Whoever calls this must call ``close_session``, whatever happens."""
        node, names = self.node, list(hello.identities)
        session = node.open_session(hello.client_name, names, may_write=hello.wants_write, principal=principal)
        limits = node.limits
        return wire.Welcome(
            session_id=session.id,
            boot_epoch=node.boot_epoch,
            namespaces=node.sessions.register(session, list(hello.identities)),
            limits=wire.Limits(
                lookup_segments_max=limits.lookup_segments_max,
                reserve_items_max=limits.reserve_items_max,
                lease_ttl_s_max=limits.lease_ttl_s_max,
                record_bytes_max=node.tier.capacity_bytes,
            ),
            arena=wire.Arena(bytes=node.tier.arena.bytes, data_socket=node.data_socket),
            version=__version__,
        )

    def register(self, session_id: bytes, request: wire.RegisterIdentities) -> wire.Registered:
        """Register more identities in an open session."""
        session = self.node.session(session_id, self.node.boot_epoch)
        return wire.Registered(namespaces=self.node.sessions.register(session, list(request.identities)))

    def close_session(self, session_id: bytes) -> None:
        """Free all that the session holds; closing twice is no error."""
        self.node.close_session(session_id)

    def _session(self, reference: wire.SessionRef) -> Session:
        return self.node.session(reference.session_id, reference.boot_epoch)

    # Lookup

    async def lookup(self, request: wire.LookupRequest) -> wire.LookupReply:
        """Answer all segments of all prompts under one lease. Long requests let other calls in between."""
        node, session, prompts = self.node, self._session(request.session), request.prompts
        total, limit = sum(len(prompt.segments) for prompt in prompts), node.limits.lookup_segments_max
        if max(total, len(prompts)) > limit:
            raise LimitError(f"a lookup of {total} segments in {len(prompts)} prompts, the limit is {limit}; split it")
        if node.sharing is not None:
            await node.sharing.bring(session, prompts)
            session = self._session(request.session)  # it may have ended meanwhile
        reply, spaces = wire.LookupReply(), dict(session.spaces)
        grant = node.grant(session, request.lease_ttl_s)
        node.counters.lookups.asked += total
        try:
            left = node.limits.lookup_slice
            for prompt in prompts:
                trail, answer = _Trail(), reply.prompts.add()
                while True:
                    left -= max(1, self._answer(session, grant, prompt, answer, trail, left))
                    if trail.at == len(prompt.segments):
                        break
                    left = await self._let_others_in(grant)
                if left <= 0:
                    left = await self._let_others_in(grant)
        except BaseException:
            self.node.leases.end_if_live(grant)
            self._break_off(spaces, request, reply)
            raise
        self._conclude(grant, reply)
        return reply

    def _break_off(
        self, spaces: Mapping[Namespace, Space], request: wire.LookupRequest, reply: wire.LookupReply
    ) -> None:
        """Account for what was not answered. ``spaces``: of the session, before it may have ended."""
        for index, prompt in enumerate(request.prompts):
            ledger = self.node.accounts.of(spaces.get(Namespace(prompt.namespace)))
            answered = len(reply.prompts[index].segments) if index < len(reply.prompts) else 0
            for asked in prompt.segments[answered:]:
                ledger.count_broken_off(asked.tokens)

    async def _let_others_in(self, grant: Grant) -> int:
        """How many segments may then be answered."""
        await asyncio.sleep(0)
        if grant.id not in self.node.leases.live:
            raise LeaseExpiredError("the session ended, or its lease ran out, during its lookup; look up again")
        return self.node.limits.lookup_slice

    def _conclude(self, grant: Grant, reply: wire.LookupReply) -> None:
        self.node.counters.lookups.calls += 1
        if not grant.caches:
            self.node.leases.end_if_live(grant)
            return
        self.node.counters.leases_granted += 1
        reply.lease.id = grant.id
        reply.lease.ttl_s = grant.ttl_s

    def _answer(
        self,
        session: Session,
        grant: Grant,
        prompt: wire.PromptQuery,
        reply: wire.PromptReply,
        trail: _Trail,
        count: int,
    ) -> int:
        """Answer so many more segments of a prompt, or all that it has; how many."""
        node, space, marks = self.node, session.spaces.get(Namespace(prompt.namespace)), trail.marks
        start, end = trail.at, min(trail.at + max(1, count), len(prompt.segments))
        some = prompt.segments if end - start == len(prompt.segments) else prompt.segments[start:end]
        arriving, watch, events, strangers = node.catalog.arriving, NOTHING, node.curves.events, 0
        if space is not None:
            reply.pinned_reason = space.pinned_reason
            watch = node.curves.note_asked(space, end - start)
        below, known, seen = watch.below, watch.known, watch.seen
        log, ledger = node.request_log, node.accounts.of(space)
        segments, tokens = ledger.segments, ledger.tokens
        if log is not None:
            trail.begun = log.begin(space, grant.id, trail.begun)
        for asked in some:
            segment = asked.segment
            finding = node.answer(space, SegmentId(segment), asked, marks, grant)
            if segment < below and space is not None:  # a comparison of 30 ns, and of few segments more
                if finding.cache is not None:
                    events.append(finding.cache)
                elif seen[hash(segment) & SEEN_MASK] and segment in known:
                    events.append(Missing.of(space, segment, asked, finding))
                else:
                    strangers += 1
            marks = marks_behind(segment, marks)
            _encode_finding(finding, reply.segments.add(), arriving)
            place = place_of(finding)
            segments[place] += 1
            tokens[place] += asked.tokens
            if log is not None:
                log.note(asked, segment, finding, place)
        watch.strangers += strangers
        trail.at, trail.marks = end, marks
        return end - start

    async def await_loads(self, request: wire.AwaitRequest) -> wire.AwaitReply:
        """What has arrived of a lease's records after a step, once there is something or some seconds went by."""
        feed = await self.node.wait_for_loads(self._session(request.session), request.lease_id, request.step)
        arrivals = [_encode_arrival(load) for load in feed.since(request.step)]
        return wire.AwaitReply(step=feed.step, arrivals=arrivals, pending=feed.pending)

    # Writing

    async def reserve(self, request: wire.ReserveRequest) -> wire.ReserveReply:
        """An outcome for every item, in order."""
        session = self._session(request.session)
        self._check_items("a reserve", len(request.items))
        self.node.expire()
        reply = wire.ReserveReply()
        for item in request.items:
            try:
                outcome = _encode_reserved(self.node.reserve(session, _decode_item(item)))
            except KVServiceError as error:
                outcome = wire.ReserveOutcome(error=encode_error(error))
            reply.outcomes.append(outcome)
        return reply

    def take_back(self, request: wire.ReserveRequest, reply: wire.ReserveReply) -> None:
        """Free what a Reserve gave whose reply never left: nobody knows the ids, and the keys would stay taken."""
        session = self.node.sessions.open.get(SessionId(request.session.session_id))
        if session is not None:  # otherwise they went with it
            ids = [one.reserved.id for one in reply.outcomes if one.WhichOneof("outcome") == "reserved"]
            self.node.abort(session, ids)

    async def commit(self, request: wire.CommitRequest) -> wire.CommitReply:
        """An outcome for every item, in order."""
        session = self._session(request.session)
        self._check_items("a commit", len(request.items))
        items = [(item.reservation_id, item.header_checksum) for item in request.items]
        outcomes = await self.node.commit(session, items)
        if self.node.sharing is not None:
            await self.node.sharing.note_committed(one for one in outcomes if isinstance(one, Cache))
        return wire.CommitReply(outcomes=[_encode_committed(outcome) for outcome in outcomes])

    async def abort(self, request: wire.AbortRequest) -> wire.AbortReply:
        """Free reservations."""
        session = self._session(request.session)
        self._check_items("an abort", len(request.reservation_ids))
        return wire.AbortReply(aborted=self.node.abort(session, request.reservation_ids))

    def _check_items(self, what: str, count: int) -> None:
        limit = self.node.limits.reserve_items_max
        if count > limit:
            raise LimitError(f"{what} of {count} items, the limit is {limit}; split it")

    async def commit_round(self, request: wire.CommitRoundRequest) -> wire.CommitRoundReply:
        """Elect masters of a round."""
        session = self._session(request.session)
        keys = [_decode_key(key) for key in request.members]
        outcome = await self.node.commit_round(session, request.namespace, keys)
        sizes, history = (outcome.bytes_before, outcome.bytes_after), self.node.families.history
        history.note(request.round, request.namespace, keys, len(outcome.elections), sizes, self.node.uptime_s)
        reply = wire.CommitRoundReply(bytes_before=outcome.bytes_before, bytes_after=outcome.bytes_after)
        for election in outcome.elections:
            one = reply.elections.add(segment=election.segment, master_context=election.master)
            for candidate in election.candidates:
                one.candidates.add(
                    context=candidate.context,
                    deviation=candidate.deviation,
                    is_mirror=candidate.is_mirror,
                    record_bytes=candidate.record_bytes,
                )
        return reply

    # Leases and upkeep

    async def renew(self, request: wire.RenewRequest) -> wire.RenewReply:
        """Which leases live on."""
        session = self._session(request.session)
        return wire.RenewReply(renewed=self.node.renew(session, request.lease_ids, request.lease_ttl_s))

    async def release(self, request: wire.ReleaseRequest) -> wire.ReleaseReply:
        """End leases."""
        return wire.ReleaseReply(released=self.node.release(self._session(request.session), request.lease_ids))

    async def delete(self, request: wire.DeleteRequest) -> wire.DeleteReply:
        """Delete caches; how many there were, here or in all other places, whichever is more."""
        session, keys = self._session(request.session), [_decode_key(key) for key in request.keys]
        sharing = self.node.sharing
        if sharing is None:
            return wire.DeleteReply(deleted=await self.node.delete(session, keys, request.namespace))
        session.require_may_delete(request.namespace)
        spaces = [session.space(request.namespace)] if request.namespace else list(session.spaces.values())
        held = [cache.key for cache in spaces[0].caches()] if request.namespace else []
        with sharing.deleting(spaces, None if request.namespace else keys):
            here = await self.node.delete(session, keys, request.namespace)
            elsewhere = await sharing.delete(spaces, None if request.namespace else keys, held)
        return wire.DeleteReply(deleted=max(here, elsewhere))

    async def verify(self, request: wire.VerifyRequest) -> wire.VerifyReply:
        """Look at the bytes of caches anew."""
        session = self._session(request.session)
        self._check_items("a verify", len(request.keys))
        keys = [_decode_key(key) for key in request.keys]
        return wire.VerifyReply(outcomes=await self.node.verify(session, request.namespace, keys))

    async def stats(self, _: wire.StatsRequest) -> wire.StatsReply:
        """The stats document."""
        return wire.StatsReply(json=json.dumps(self.node.stats_document()))

    async def explain(self, request: wire.ExplainRequest) -> wire.ExplainReply:
        """Why every segment of every prompt is found or not. Lets other calls in between."""
        session, node = self._session(request.session), self.node
        asked = (max(1, len(segment.accepted_contexts)) for prompt in request.prompts for segment in prompt.segments)
        total, limit = max(len(request.prompts), sum(asked)), node.limits.explain_segments_max
        if total > limit:
            raise LimitError(
                f"{total} prompts, or contexts of segments, to explain, the limit is {limit}; ask about their start"
            )
        spaces = [space_to_explain(node.catalog, session, prompt.namespace) for prompt in request.prompts]
        explainers = {space: SpaceExplainer(node, space) for space in spaces}
        reply = wire.ExplainReply(remembered_s=node.departures.remembered_s, has_ssd=node.ssd is not None)
        for prompt, space in zip(request.prompts, spaces, strict=True):
            explained = await self._explain(explainers[space], prompt)
            whole = await with_places(node, space, explained, asks=request.asks_others)
            segments = reply.prompts.add().segments
            for one in whole:
                encode_explanation(one, segments.add())
        for explainer in explainers.values():
            await _describe(explainer, reply)
        return reply

    async def _explain(self, explainer: SpaceExplainer, prompt: wire.PromptQuery) -> list[Unfound]:
        marks, explained = b"", []
        for index, asked in enumerate(prompt.segments):
            if index % self.node.limits.explain_slice == 0:
                await asyncio.sleep(0)
            segment = SegmentId(asked.segment)
            explained.append(Unfound(segment, asked, marks, explainer.explain(segment, asked, marks)))
            marks = marks_behind(asked.segment, marks)
        return explained


async def _describe(explainer: SpaceExplainer, reply: wire.ExplainReply) -> None:
    """What else is held for a namespace and its tenant, as long as it is not too long for one message."""
    space = explainer.space
    found = reply.namespaces.add(
        namespace=space.namespace,
        pinned_reason=space.pinned_reason,
        held_segments=len(space.families),
        lengths=[wire.SegmentLength(tokens=tokens, segments=count) for tokens, count in explainer.lengths()],
    )
    for other in explainer.known_spaces() if explainer.has_missed else ():
        await asyncio.sleep(0)  # an identity's JSON takes 3 ms
        if reply.ByteSize() < MESSAGE_BYTES_MAX // 2:  # one identity more has 1 MiB at most
            found.known.add(identity=other.identity.canonical_json(), segments=len(other.families))


def encode_error(error: KVServiceError) -> wire.ItemError:
    """The error of one item."""
    return wire.ItemError(code=error.code, message=str(error))


def _encode_arrival(load: Load) -> wire.Arrival:
    error = None if load.error is None else encode_error(load.error)
    return wire.Arrival(offset=load.offset, layers=load.layers, error=error)


def _encode_finding(finding: Finding, reply: wire.SegmentReply, arriving: Mapping[Cache, Load]) -> None:
    cache = finding.cache
    reply.affinity = finding.affinity
    if cache is None:
        reply.outcome = CORRUPT if finding.miss_reason is MissReason.CORRUPT else MISS
        reply.miss_reason = finding.miss_reason
        return
    reply.outcome = HIT
    reply.match = finding.match
    reply.context = cache.context
    reply.provenance = cache.provenance
    reply.position = cache.position
    _encode_location(cache, reply.record, arriving)
    if cache.master is not None:
        reply.master_context = cache.master.context
        _encode_location(cache.master, reply.master, arriving)


def _encode_location(cache: Cache, location: wire.Location, arriving: Mapping[Cache, Load]) -> None:
    location.tier = TIERS[arriving[cache].source] if cache in arriving else HOST
    location.generation = cache.generation
    extent = location.extent
    extent.offset = cache.offset
    extent.length = cache.record_bytes


def _encode_reserved(reservation: Reservation | None) -> wire.ReserveOutcome:
    if reservation is None:
        return wire.ReserveOutcome(exists=True)
    extent = wire.Extent(offset=reservation.extent.offset, length=reservation.extent.length)
    return wire.ReserveOutcome(reserved=wire.Reservation(id=reservation.id, extent=extent))


def _encode_committed(outcome: Cache | KVServiceError) -> wire.CommitOutcome:
    if isinstance(outcome, KVServiceError):
        return wire.CommitOutcome(error=encode_error(outcome))
    return wire.CommitOutcome(generation=outcome.generation)


def _decode_key(key: wire.CacheKey) -> CacheKey:
    return CacheKey(SegmentId(key.segment), ContextId(key.context))


def _decode_item(item: wire.ReserveItem) -> WriteRequest:
    master = None
    if item.master_context:
        master = MasterReference(ContextId(item.master_context), item.master_generation)
    return WriteRequest(item.namespace, _decode_key(item.key), item.record_bytes, master, item.prefill_s)
