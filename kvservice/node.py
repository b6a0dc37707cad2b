"""A node: the parts put together, and the calls that clients make, in the model's words.

One thread, the event loop's, owns all state; workers read held extents and post back. Nothing here knows gRPC or wire
messages (calls.py, rpc.py do).
"""

import asyncio
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from kvservice import __version__
from kvservice.access.principal import LOCAL, Principal
from kvservice.accounting import Accounts
from kvservice.allocation import Allocation
from kvservice.answering import Answering
from kvservice.caches import Cache, VerifiedRecord
from kvservice.catalog import Catalog, Freed, Removal
from kvservice.curves.scopes import CurveLimits, Curves
from kvservice.departures import Departures, Gone
from kvservice.explaining import why_not_on_ssd
from kvservice.families import Families, Round
from kvservice.heap import Heap
from kvservice.killpoints import Killer
from kvservice.leases import Grant, Leases
from kvservice.limits import NodeLimits
from kvservice.loads import AWAIT_S_MAX, Feed
from kvservice.model.errors import InvalidInputError, KVServiceError, LeaseExpiredError
from kvservice.model.identity import Namespace
from kvservice.model.lease import BootEpoch, SessionId
from kvservice.model.plan import Outcome
from kvservice.model.segment import CacheKey
from kvservice.orders import LOAD_RATES, Orders
from kvservice.request_log import RequestLog
from kvservice.scrubbing import Scrubber
from kvservice.sessions import Session, Sessions
from kvservice.sharing.place import Directory
from kvservice.sharing.sharing import Sharing
from kvservice.ssd import Ssd, SsdPolicy, Workers
from kvservice.stats.counters import Counters
from kvservice.stats.document import NodeDocument
from kvservice.stats.sharing_document import NetworkDocument, nobody
from kvservice.storage.disk import Disk
from kvservice.storage.eviction import ValueOrder
from kvservice.storage.host_tier import HostTier
from kvservice.storage.recovery import Opened
from kvservice.store import Reservation, Store, Verification, WriteRequest, batches_of, verify_all
from kvservice.worker import ThreadWorker, Worker

__all__ = ["Node", "NodeLimits"]

_LOG = logging.getLogger(__name__)
SESSION_ID_BYTES = 16


class Node:
    """Everything one boot of a service holds. Calls must come from the thread of one event loop.

    ``clock``: monotonic seconds. ``data_socket``: the path that clients get the arena from, told in the welcome.
    ``worker``: where checksums and folding run, instead of ``worker_threads`` threads. ``owns_process``: the node may
    tune the process's garbage collector; never in an engine's process. ``orders``: which groups are evicted first.
    """

    def __init__(
        self,
        limits: NodeLimits,
        tier: HostTier,
        *,
        clock: Callable[[], float],
        boot_epoch: int,
        data_socket: str = "",
        worker_threads: int = 2,
        worker: Worker | None = None,
        owns_process: bool = False,
        orders: Orders | None = None,
        killer: Killer | None = None,
        curve_limits: CurveLimits | None = None,
    ) -> None:
        self.tier = tier
        self.boot_epoch = BootEpoch(boot_epoch)
        self.data_socket = data_socket
        self.limits = limits
        self.counters = Counters()
        self.ssd: Ssd | None = None
        self.sharing: Sharing | None = None
        self.describe_network: Callable[[], NetworkDocument] = nobody
        freed = Freed(tier.free, self._erase, tier.staging_offset)
        self.departures = Departures(clock, self.limits.departures_max)
        orders = orders or Orders(ValueOrder(), ValueOrder(), LOAD_RATES)
        self.catalog = Catalog(freed, orders, self._note_gone)
        limits_of_curves, granularity = curve_limits or CurveLimits(), tier.allocator.granularity
        self.accounts = Accounts()
        self.recent = self.counters.recent(clock, limits_of_curves.half_life_s)
        self.request_log: RequestLog | None = None
        self.curves = Curves(limits_of_curves, clock, tier.capacity_bytes, orders.kind, orders.rates, granularity)
        self.allocation = Allocation(tier, self.catalog, self.limits, self.counters)
        self.sessions = Sessions(self.catalog, self.boot_epoch, self.limits)
        self.leases = Leases(self.catalog, self.boot_epoch, self.limits, self.counters)
        self.answering = Answering(self.catalog, self.leases, self.limits)
        self.answer = self.answering.answer
        self.store = Store(self.catalog, self.allocation, self.limits, self.counters)
        self.worker = worker or ThreadWorker(worker_threads)
        self.scrubber = Scrubber(None, None, self.catalog, tier, self.worker, None, self.counters)
        self._killer = killer or Killer()
        self.families = Families(self.catalog, self.allocation, self.worker, self.limits, self.counters, self._killer)
        self.families.on_published = self._note_published
        self._clock = clock
        self._started_s = self.catalog.now_s = clock()
        self.heap = Heap() if owns_process else None
        self._tasks: list[asyncio.Task[None]] = []
        self._has_folds = asyncio.Event()
        self._is_stopping = False

    # Start and stop

    def attach_ssd(self, disk: Disk, opened: Opened, policy: SsdPolicy, workers: Workers | None = None) -> None:
        """Stand on an SSD tier too; before ``start``. The node closes slab and index, not the disk."""
        assert self.ssd is None, "one SSD tier a node"
        self.ssd = Ssd(
            disk,
            opened,
            policy,
            self.catalog,
            self.allocation,
            self.limits,
            self.counters,
            self._killer,
            self._clock,
            workers,
        )
        self.answering.ssd = self.ssd
        self.curves.simulate_ssd(opened.slab.capacity_bytes)
        self.scrubber = self.ssd.scrubber
        self.departures.why_not_on_ssd = partial(why_not_on_ssd, self.ssd)

    def share(self, directory: Directory, push: str = "back", *, is_gated: bool = True) -> None:
        """Bring what other places hold, and give away what is new. The node closes the places."""
        assert self.sharing is None, "a node shares with one directory"
        self.sharing = self.answering.sharing = Sharing(
            directory,
            self.catalog,
            self.allocation,
            self.limits,
            self.counters,
            self._clock,
            self._note_here,
            push,
            is_gated=is_gated,
            ssd=self.ssd,
        )
        if self._tasks:
            self.sharing.start()

    def _note_gone(self, cache: Cache, why: Gone) -> None:
        self.departures.note_gone(cache, why)
        if why is Gone.DELETED:
            self.curves.note_deleted(cache)

    def _note_published(self, cache: Cache) -> None:
        self._note_here(cache)
        if self.sharing is not None:
            self.sharing.note_published(cache)

    def _note_here(self, cache: Cache) -> None:
        """A cache is new in memory, made by a client or brought from elsewhere."""
        self.curves.note_stored(cache)
        if self.ssd is not None:
            self.ssd.note_published(cache)

    def _erase(self, removal: Removal) -> None:
        assert self.ssd is not None, "nothing is on a slab that is not there"
        self.ssd.demotion.remove(removal)

    def start(self) -> None:
        """Take up what the SSD tier holds; begin to expire leases, to fold and to demote, in the running loop."""
        assert not self._tasks, "a node is started once"
        if self.ssd is not None:
            self.ssd.restore()
            self.ssd.start()
            self.accounts.note_restored(self.catalog.spaces.values())
            if self.heap is not None:
                self.heap.freeze()
        if self.sharing is not None:
            self.sharing.start()
        endless = (self._keep_up(), self._fold_forever(), self.curves.run())
        self._tasks = [asyncio.create_task(one) for one in endless]

    async def stop(self) -> None:
        """End every session and what runs in the background; the tier may be closed afterwards."""
        self._is_stopping = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        for session in list(self.sessions.open.values()):
            self._close(session)
        if self.sharing is not None:
            await self.sharing.stop()
        if self.ssd is not None:
            await self.ssd.stop()
        self.worker.close()

    async def _keep_up(self) -> None:
        while not self._is_stopping:
            await asyncio.sleep(self.limits.upkeep_interval_s)
            self.expire()
            self.recent.note()

    async def _fold_forever(self) -> None:
        while not self._is_stopping:
            await self._has_folds.wait()
            self._has_folds.clear()
            try:
                await self.fold_pending()
            except Exception:  # noqa: BLE001  a task's top: folding is an optimisation, the dense cache stays
                _LOG.exception("folding a cache failed; it stays dense. Please report this")
                self._has_folds.set()

    async def fold_pending(self) -> int:
        """Fold until the queue is empty; how many were looked at."""
        count = 0
        while await self.families.fold_next():
            count += 1
        return count

    def expire(self) -> float:
        """End the leases whose time has come; the time."""
        now_s = self.catalog.now_s = self._clock()
        self.leases.expire(now_s)
        return now_s

    # Sessions

    def open_session(
        self, client_name: str, identities: Sequence[str], *, may_write: bool, principal: Principal = LOCAL
    ) -> Session:
        """A session with the namespaces of ``identities`` (JSON). Nothing is left of it if one of them is refused."""
        id_ = SessionId(os.urandom(SESSION_ID_BYTES))
        session = self.sessions.add(id_, client_name, may_write=may_write, principal=principal)
        try:
            self.sessions.register(session, identities)
        except BaseException:
            self.sessions.remove(session)
            raise
        self.counters.sessions_opened += 1
        return session

    def session(self, id_: bytes, boot_epoch: int) -> Session:
        """The open session that a request names. Raises StaleEpochError or UnknownSessionError."""
        return self.sessions.require(id_, boot_epoch)

    def close_session(self, id_: bytes) -> None:
        """Free all that a session holds. Closing twice is no error."""
        session = self.sessions.open.get(SessionId(id_))
        if session is not None:
            self._close(session)

    def _close(self, session: Session) -> None:
        self.leases.end_all(session)
        self.store.abandon_all(session)
        self.sessions.remove(session)

    # Lookup and leases

    async def wait_for_loads(self, session: Session, lease_id: int, step: int) -> Feed:
        """Where a lease hears of its loads, once there is news after ``step``, or after AWAIT_S_MAX.

        Raises LeaseExpiredError for a lease that is over.
        """
        grant = self.leases.find(session, lease_id)
        if grant is None:
            raise LeaseExpiredError(f"lease {lease_id} ran out or was released; look up again")
        await grant.loads.wait(step, AWAIT_S_MAX)
        return grant.loads

    def grant(self, session: Session, ttl_s: float) -> Grant:
        """A lease for what a lookup is about to find; ends leases whose time has come first."""
        now_s = self.expire()
        return self.leases.grant(session, now_s, ttl_s)

    def renew(self, session: Session, ids: Iterable[int], ttl_s: float) -> list[bool]:
        """Which leases live on, for ``ttl_s`` from now at least."""
        return self.leases.renew(session, ids, self.expire() + self.leases.ttl_s(ttl_s))

    def release(self, session: Session, ids: Iterable[int]) -> int:
        """End leases; how many were live."""
        return self.leases.release(session, ids)

    # Writing

    def reserve(self, session: Session, request: WriteRequest) -> Reservation | None:
        """An extent for one record; None if its key exists. Raises KVServiceError for this one."""
        try:
            return self.store.reserve(session, request)
        except KVServiceError as error:
            self.counters.reserves_refused[error.code] += 1
            if Namespace(request.namespace) in session.spaces:
                self.departures.note_refused(request.namespace, request.key, error)
            raise

    async def commit(self, session: Session, items: Sequence[tuple[int, int]]) -> list[Cache | KVServiceError]:
        """Verify and publish (reservation id, header checksum) pairs; a refused one is freed and its error returned.

        If the call is cancelled, what was not published yet is freed.
        """
        session.require_write()
        outcomes: list[Cache | KVServiceError | None] = [None] * len(items)
        begun: list[tuple[int, Verification]] = []
        for index, (id_, checksum) in enumerate(items):
            try:
                begun.append((index, self.store.begin(session, id_, checksum)))
            except KVServiceError as error:
                outcomes[index] = self._refused(error)
        try:
            jobs = batches_of(begun, self.limits.verify_job_bytes)
            batches = await asyncio.gather(*(self._commit_batch(job) for job in jobs), return_exceptions=True)
        finally:  # gather waits for every worker, so what is left is read by nobody and finished by nobody
            self.store.drop_unfinished(job.reservation for _, job in begun)
        for finished in batches:
            if isinstance(finished, BaseException):
                raise finished
            for index, outcome in finished:
                outcomes[index] = outcome
        return [outcome for outcome in outcomes if outcome is not None]

    async def _commit_batch(self, batch: list[tuple[int, Verification]]) -> list[tuple[int, Cache | KVServiceError]]:
        jobs = [job for _, job in batch]
        is_over = all(job.check.is_over for job in jobs)  # checked while they came
        checked = verify_all(jobs) if is_over else await self.worker.run(partial(verify_all, jobs))
        return [
            (index, self._publish(job.reservation, record)) for (index, job), record in zip(batch, checked, strict=True)
        ]

    def _publish(self, reservation: Reservation, record: VerifiedRecord | KVServiceError) -> Cache | KVServiceError:
        if isinstance(record, KVServiceError):
            self.store.drop(reservation)
            return self._refused(record, reservation)
        try:
            cache = self.store.publish(reservation, record)
        except KVServiceError as error:
            return self._refused(error, reservation)
        self._note_published(cache)
        self.families.enqueue(cache)
        if self.families.queue:
            self._has_folds.set()
        if self.heap is not None:
            self.heap.note_growth()
        return cache

    def _refused(self, error: KVServiceError, reservation: Reservation | None = None) -> KVServiceError:
        self.counters.commits_refused[error.code] += 1
        if reservation is not None:
            self.departures.note_refused(reservation.space.namespace, reservation.key, error)
        return error

    def abort(self, session: Session, ids: Iterable[int]) -> int:
        """Free reservations; how many there were."""
        return self.store.abort(session, ids)

    async def commit_round(self, session: Session, namespace: bytes, keys: Sequence[CacheKey]) -> Round:
        """Elect masters for a round's segments and fold the rest."""
        session.require_write()
        return await self.families.commit_round(session.space(namespace), keys)

    # Deleting

    async def delete(self, session: Session, keys: Sequence[CacheKey], namespace: bytes = b"") -> int:
        """Hide caches at once, all of ``namespace`` or those of ``keys``; how many were held.

        Their bytes go when the last lease, and of a master the last mirror, goes. When this returns no restart brings
        one of them back.
        """
        session.require_may_delete(namespace)
        if namespace and keys:
            raise InvalidInputError("a delete names keys or a whole namespace, not both")
        found = session.space(namespace).caches() if namespace else self._named(session, keys)
        for cache in found:
            if not cache.is_hidden:
                self.catalog.hide(cache, Gone.DELETED)
        self.counters.deleted += len(found)
        if self.ssd is not None:
            await self.ssd.bury(found, partial(_is_meant, set(session.spaces), set(keys), namespace))
        return len(found)

    async def verify(self, session: Session, namespace: bytes, keys: Sequence[CacheKey]) -> list[Outcome]:
        """Look at the bytes of caches anew, in every tier: HIT if all of a cache is right, CORRUPT if not, or MISS."""
        space = session.space(namespace)
        return [await self._verify(space.find(key.segment, key.context)) for key in keys]

    async def _verify(self, cache: Cache | None) -> Outcome:
        if cache is None:
            return Outcome.MISS
        found = [await self.scrubber.check(one) for one in dict.fromkeys((cache.head, cache)) if not one.is_hidden]
        is_right = all(found)
        return Outcome.HIT if is_right else Outcome.CORRUPT

    def _named(self, session: Session, keys: Iterable[CacheKey]) -> list[Cache]:
        spaces = list(session.spaces.values())
        found = (space.find(key.segment, key.context) for key in keys for space in spaces)
        return list(dict.fromkeys(cache for cache in found if cache is not None))

    # Stats

    def stats_document(self) -> NodeDocument:
        """What the node holds and has done; see stats/document.py for the schema."""
        from kvservice.stats.document import node_document

        return node_document(self, __version__, self.uptime_s)

    @property
    def uptime_s(self) -> float:
        """Seconds since it was made."""
        return self._clock() - self._started_s


def _is_meant(spaces: set[Namespace], keys: set[CacheKey], namespace: bytes, cache: Cache) -> bool:
    """Does a delete of ``keys`` in ``spaces``, or of all of ``namespace``, mean this cache?"""
    of_cache = cache.family.space.namespace
    return of_cache == namespace if namespace else of_cache in spaces and cache.key in keys
