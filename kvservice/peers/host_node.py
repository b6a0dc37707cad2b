"""The node behind the streams: what connections ask for, posted to the loop that owns it.

Connections' threads wait here, the loop never does. Heads and payload are read by those threads, in place, under a hold
of their own: a lease may run out in the middle of a record.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from kvservice.access.buckets import Buckets
from kvservice.access.principal import Principal
from kvservice.accounting import place_of
from kvservice.caches import Cache, Space
from kvservice.curves.events import Missing
from kvservice.leases import Grant
from kvservice.loads import Feed, Load
from kvservice.lookup import CORRUPT, MARKS_BYTES_MAX, NO_ROOM, Finding, find
from kvservice.model.errors import (
    CapacityError,
    CorruptError,
    ForbiddenError,
    InvalidInputError,
    KVServiceError,
    LeaseExpiredError,
    LimitError,
)
from kvservice.model.identity import Namespace, identity_from_json
from kvservice.model.limits import IDENTITIES_PER_SESSION_MAX
from kvservice.model.segment import MARK_BYTES, CacheKey
from kvservice.node import Node
from kvservice.peers.host import Fetch, Found, Held, Query, Room
from kvservice.peers.host_found import FoundPlace, answers_of, places_of
from kvservice.peers.host_held import NodeHeld
from kvservice.peers.host_loop import LOOP_S_MAX, NodeLoop
from kvservice.peers.member import Facts
from kvservice.sessions import Session
from kvservice.store import WriteRequest

FIND_WAIT_S_MAX = 5.0
BRING_SHARE = 0.5
"""Of what a caller waits: for storage behind this node. The rest is for what then is on its way, from SSD too."""
T = TypeVar("T")


class NodeHost:
    """See Host. ``loop``: the node's. ``facts``: what the node says of itself, asked for every greeting and ping.

    ``buckets``: how often callers may call, and how much they may send.
    """

    def __init__(
        self,
        node: Node,
        loop: asyncio.AbstractEventLoop,
        facts: Callable[[], Facts],
        buckets: Buckets | None = None,
    ) -> None:
        self.node = node
        self.buckets = buckets or Buckets(time.monotonic)
        self.loop = NodeLoop(loop)
        self._facts = facts

    @property
    def facts(self) -> Facts:
        """See Host."""
        return self._facts()

    @property
    def record_bytes_max(self) -> int:
        """See Host."""
        return self.node.tier.capacity_bytes

    def open(self, principal: Principal, name: str) -> "NodeSession":
        """See Host."""
        return NodeSession(self, self.loop.call(lambda: self._open(principal, name)), principal)

    def _open(self, principal: Principal, name: str) -> Session:
        """Attached until its last connection has ended: whoever ends the session before that, a thread may still be
        filling an extent of it, which must go to nobody else meanwhile."""
        session = self.node.open_session(f"peer {name}", [], may_write=True, principal=principal)
        self.node.store.attach(session)
        return session


class NodeSession:
    """See HostSession: a session of the node, and whose it is."""

    def __init__(self, host: NodeHost, session: Session, principal: Principal) -> None:
        self._host = host
        self._loop = host.loop
        self._node = host.node
        self._session = session
        self._principal = principal
        self._foreign: set[Namespace] = set()

    def register(self, identities: Sequence[str]) -> None:
        """See HostSession. What the caller may not see is remembered by name only: it is found to hold nothing."""
        parsed = [(identity_from_json(text), text) for text in identities]
        own = [text for identity, text in parsed if self._principal.may(identity.tenant)]
        self._foreign |= {one.namespace() for one, _ in parsed if not self._principal.may(one.tenant)}
        if len(self._foreign) > IDENTITIES_PER_SESSION_MAX:
            raise LimitError(f"more than {IDENTITIES_PER_SESSION_MAX} identities in one session; open another")
        if own:
            self._loop.call(lambda: self._node.sessions.register(self._session, own))

    # Finding

    def find(self, queries: Sequence[Query], ttl_s: float, wait_s: float, ahead_bytes: int = 0) -> Found:
        """See HostSession."""
        for query in queries:
            if len(query.marks) > MARKS_BYTES_MAX or len(query.marks) % MARK_BYTES:
                raise InvalidInputError(f"marks have {MARK_BYTES} bytes each, {MARKS_BYTES_MAX} at most")
        wait_s = min(max(wait_s, 0.0), FIND_WAIT_S_MAX)
        finding = self._find(queries, ttl_s, wait_s, ahead_bytes)
        lease_id, granted_s, places = self._loop.wait_for(finding, LOOP_S_MAX + wait_s, self._take_back)
        return Found(lease_id, granted_s, *answers_of(places, ahead_bytes))

    def _take_back(self, found: tuple[int, float, list[FoundPlace]]) -> None:
        lease_id, _, places = found
        for held in (one.held for place in places for one in place.records):
            if held is not None:
                held.release()
        self._node.release(self._session, [lease_id] if lease_id else [])

    async def _find(
        self, queries: Sequence[Query], ttl_s: float, wait_s: float, ahead_bytes: int
    ) -> tuple[int, float, list[FoundPlace]]:
        node, session = self._node, self._session
        self._host.buckets.admit(self._principal)
        spaces = [self._space(query.namespace) for query in queries]
        end_s = asyncio.get_running_loop().time() + wait_s
        if node.sharing is not None:
            pairs = zip(queries, spaces, strict=True)
            wanted = ((one, asked.segment, asked, asked.marks) for asked, one in pairs if one)
            await node.sharing.bring_for_peer(wanted, wait_s * BRING_SHARE)
        grant = node.grant(session, ttl_s)
        node.counters.lookups.asked += len(queries)
        findings: list[Finding] = []
        try:
            for query, space in zip(queries, spaces, strict=True):
                if space is None:
                    findings.append(find(None, query, query.marks, is_pinned=False, candidates_max=0))
                else:
                    findings.append(self._answer(space, query, grant))
            loads = [load for finding in findings for load in _loads(node, finding)]
            if loads:
                await _until_begun(loads, end_s)
                findings = [_readable(node, finding) for finding in findings]
        except BaseException:
            for query, space in zip(queries, spaces, strict=True):
                node.accounts.of(space).count_broken_off(query.tokens)
            node.leases.end_if_live(grant)
            raise
        self._note(queries, spaces, findings, grant)
        is_leased = bool(grant.caches)
        if not is_leased:
            node.leases.end_if_live(grant)
        places = places_of(node, self._loop, findings, ahead_bytes)
        return (grant.id, grant.ttl_s, places) if is_leased else (0, 0.0, places)

    def _answer(self, space: Space, query: Query, grant: Grant) -> Finding:
        """A mirror whose master was deleted is no answer: with it the master would be found again there."""
        finding = self._node.answer(space, query.segment, query, query.marks, grant)
        cache = finding.cache
        if cache is None or not cache.head.is_hidden:
            return finding
        self._node.leases.take_back(grant)
        return find(None, query, query.marks, is_pinned=False, candidates_max=0)

    def _space(self, namespace: Namespace) -> Space | None:
        return None if namespace in self._foreign else self._session.space(namespace)

    def _note(
        self, queries: Sequence[Query], spaces: Sequence[Space | None], findings: Sequence[Finding], grant: Grant
    ) -> None:
        """Account for the answers, as for those of any other lookup."""
        node = self._node
        for query, space, finding in zip(queries, spaces, findings, strict=True):
            ledger, place = node.accounts.of(space), place_of(finding)
            ledger.segments[place] += 1
            ledger.tokens[place] += query.tokens
            if space is not None:
                self._note_for_curves(query, space, finding)
            if node.request_log is not None:
                node.request_log.begin(space, grant.id)
                node.request_log.note(query, query.segment, finding, place)
        node.counters.lookups.calls += 1
        node.counters.leases_granted += bool(grant.caches)

    def _note_for_curves(self, query: Query, space: Space, finding: Finding) -> None:
        watch, events = self._node.curves.note_asked(space, 1), self._node.curves.events
        if query.segment < watch.below:
            if finding.cache is not None:
                events.append(finding.cache)
            elif query.segment in watch.known:
                events.append(Missing.of(space, query.segment, query, finding))
            else:
                watch.strangers += 1

    def renew(self, lease_ids: Sequence[int], ttl_s: float) -> int:
        """See HostSession."""
        return sum(self._loop.call(lambda: self._node.renew(self._session, lease_ids, ttl_s)))

    def release(self, lease_ids: Sequence[int]) -> int:
        """See HostSession."""
        return self._loop.call(lambda: self._node.release(self._session, lease_ids))

    # Reading

    def hold(self, wanted: Fetch) -> Held:
        """See HostSession."""
        return self._loop.call(lambda: self._hold(wanted))

    def _hold(self, wanted: Fetch) -> "NodeHeld":
        node, cache = self._node, self._named(wanted)
        if cache is None:
            raise LeaseExpiredError(
                f"cache {wanted.key} of generation {wanted.generation:016x} is not held here (any more); find it again"
            )
        if node.catalog.is_condemned(cache):
            raise CorruptError(f"cache {wanted.key}: its bytes here are wrong; it is found again when others let it go")
        node.catalog.hold(cache)
        load = node.catalog.arriving.get(cache)
        if load is None and not cache.is_on_host:
            assert node.ssd is not None, f"{cache} is in no tier"
            load = node.ssd.begin_load(cache)
            if load is None:
                node.catalog.unhold(cache)
                raise CapacityError(f"cache {wanted.key} is on SSD, and leases leave no room to read it into memory")
        return NodeHeld(self._node, self._loop, cache, load)

    def _named(self, wanted: Fetch) -> Cache | None:
        """A published cache, or one that the caller leased before it was superseded or deleted."""
        space = self._session.spaces.get(wanted.namespace)
        grant = self._node.leases.find(self._session, wanted.lease_id) if wanted.lease_id else None
        leased = () if grant is None else (one for cache in grant.caches for one in (cache, cache.head))
        published = None if space is None else space.find(wanted.key.segment, wanted.key.context)
        candidates = (*leased, *(() if published is None else (published,)))
        return next((one for one in candidates if _is(one, wanted)), None)

    # Writing

    def reserve(self, request: WriteRequest) -> Room | None:
        """See HostSession."""
        if request.namespace in self._foreign:
            raise ForbiddenError(f"{self._principal.name} may not write in namespace {request.namespace.hex()[:12]}")
        if self._host.facts.is_draining:
            raise CapacityError("this node is draining: it takes no new caches and will leave; ask another one")
        return self._loop.call(lambda: self._reserve(request))

    def _reserve(self, request: WriteRequest) -> Room | None:
        self._host.buckets.admit(self._principal)
        self._host.buckets.charge(self._principal, request.record_bytes)
        self._node.expire()
        reservation = self._node.reserve(self._session, request)
        if reservation is None:
            return None
        reservation.check = check = self._node.store.check(reservation)
        return Room(reservation.id, self._node.tier.view(reservation.extent).data, check.arrived)

    def commit(self, room: Room, header_checksum: int) -> int:
        """See HostSession."""
        work = self._node.commit(self._session, [(room.id, header_checksum)])
        (outcome,) = self._loop.wait_for(work, LOOP_S_MAX)
        if isinstance(outcome, KVServiceError):
            raise outcome
        return outcome.generation

    def abort(self, room: Room) -> None:
        """See HostSession."""
        self._loop.post(lambda: self._node.abort(self._session, [room.id]))

    def delete(self, namespace: Namespace, keys: Sequence[CacheKey] | None) -> int:
        """See HostSession."""
        if namespace in self._foreign:
            return 0
        return self._loop.wait_for(self._delete(namespace, keys), LOOP_S_MAX)

    async def _delete(self, namespace: Namespace, keys: Sequence[CacheKey] | None) -> int:
        self._host.buckets.admit(self._principal)
        space = self._session.space(namespace)  # keys are digests of it too: they name nothing in another one
        sharing, named = self._node.sharing, (namespace, []) if keys is None else (b"", keys)
        self._session.require_may_delete(named[0])
        if sharing is None:
            return await self._node.delete(self._session, named[1], named[0])
        held = [cache.key for cache in space.caches()] if keys is None else keys
        with sharing.deleting([space], keys):
            count = await self._node.delete(self._session, named[1], named[0])
            return max(count, await sharing.delete_behind(space, keys, held))

    def close(self) -> None:
        """See HostSession."""
        self._loop.post(self._close)

    def _close(self) -> None:
        self._node.close_session(self._session.id)
        self._node.store.detach(self._session)


def _is(cache: Cache, wanted: Fetch) -> bool:
    return (
        cache.generation == wanted.generation
        and cache.context == wanted.key.context
        and cache.family.segment == wanted.key.segment
        and cache.family.space.namespace == wanted.namespace
    )


def _loads(node: Node, finding: Finding) -> list[Load]:
    """What brings a found record, and its master, into memory."""
    cache, arriving = finding.cache, node.catalog.arriving
    if cache is None or not arriving:
        return []
    return [arriving[one] for one in dict.fromkeys((cache.head, cache)) if one in arriving]


async def _until_begun(loads: Sequence[Load], end_s: float) -> None:
    """Until a first layer of each is there, and with it the head; or until the time is up."""
    feed, step = Feed(), 0
    feed.add(loads)
    loop = asyncio.get_running_loop()
    try:
        while loop.time() < end_s and any(not load.layers and not load.is_done for load in loads):
            await feed.wait(step, end_s - loop.time())
            step = feed.step
    finally:
        feed.close()


def _readable(node: Node, finding: Finding) -> Finding:
    """The finding, if its head has come."""
    if finding.cache is None:
        return finding
    if node.catalog.is_condemned(finding.cache) or any(load.error is not None for load in _loads(node, finding)):
        return CORRUPT
    return NO_ROOM if any(not load.layers for load in _loads(node, finding)) else finding
