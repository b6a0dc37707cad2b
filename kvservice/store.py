"""The way in: reserve, commit, abort. A state step returns the verification to run; it does not run it.

Nothing unpublished is visible, nothing published is torn. A reservation dies with its session; while a worker reads
its extent it is only marked, and its bytes go when the worker is done. Bytes that the session's process may still write
stay taken until its last data connection is closed: it has unmapped the arena then, or has ended.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvservice.allocation import Allocation
from kvservice.caches import Cache, Space, VerifiedRecord
from kvservice.catalog import Catalog
from kvservice.commit_check import CommitCheck
from kvservice.limits import NodeLimits
from kvservice.model.cache import CacheMeta, Extent, MasterReference
from kvservice.model.errors import (
    ChecksumMismatchError,
    CorruptError,
    InvalidInputError,
    KVServiceError,
    LimitError,
    MasterGoneError,
    NotOwnedError,
    TokenCountError,
)
from kvservice.model.lease import SessionId
from kvservice.model.segment import DIGEST_BYTES, CacheKey
from kvservice.sessions import Session
from kvservice.stats.counters import Counters

PREFILL_S_MAX = 86400.0


@dataclass(frozen=True, slots=True)
class WriteRequest:
    """One record that a client wants to write; ``master`` is set for a mirror.

    ``prefill_s``: seconds that computing the cache took, 0 if the client does not say.
    """

    namespace: bytes
    key: CacheKey
    record_bytes: int
    master: MasterReference | None = None
    prefill_s: float = 0.0


@dataclass(slots=True, eq=False)
class Reservation:
    """An extent that a session may write, until it commits, aborts or ends.

    It never runs out by the clock: a writer that was stopped for a while would then write into bytes of others.
    ``master`` is held from here to the end, so that a mirror never dangles. ``check``: set where the bytes are checked
    as they come, by who brings them.
    """

    id: int
    session: Session
    space: Space
    key: CacheKey
    extent: Extent
    reference: MasterReference | None
    master: Cache | None
    prefill_s: float = 0.0
    check: CommitCheck | None = None
    is_verifying: bool = False
    is_abandoned: bool = False


@dataclass(frozen=True, slots=True)
class Verification:
    """What a worker checks: the bytes, against what was reserved and what the commit says."""

    reservation: Reservation
    check: CommitCheck
    header_checksum: int


class Store:
    """Open reservations, and what becomes of them. Owned by one thread."""

    def __init__(self, catalog: Catalog, allocation: Allocation, limits: NodeLimits, counters: Counters) -> None:
        self.open: dict[int, Reservation] = {}
        self.strays: dict[SessionId, list[Extent]] = {}
        self._catalog = catalog
        self._allocation = allocation
        self._limits = limits
        self._counters = counters
        self._next_id = 1

    def reserve(self, session: Session, request: WriteRequest) -> Reservation | None:
        """An extent to write the record to; None if the key is published or being written.

        Raises KVServiceError for this one record; nothing was changed then, but for groups evicted to make room.
        """
        session.require_write()
        space = session.space(request.namespace)
        key = request.key
        if len(key.segment) != DIGEST_BYTES or len(key.context) != DIGEST_BYTES:
            raise InvalidInputError(f"cache {key}: segment and context ids have {DIGEST_BYTES} bytes")
        if not 0 <= request.prefill_s <= PREFILL_S_MAX:
            raise InvalidInputError(
                f"cache {key}: prefill_s = {request.prefill_s}; give the seconds that computing it took, at most "
                f"{PREFILL_S_MAX:.0f}, or 0 for unknown"
            )
        if (key.segment, key.context) in space.pending or space.find(key.segment, key.context) is not None:
            self._counters.existed += 1
            return None
        if len(session.reservations) >= self._limits.reservations_per_session_max:
            limit = self._limits.reservations_per_session_max
            raise LimitError(f"a session may have {limit} reservations; commit or abort some")
        master = self._master_of(space, request)
        return self._open(session, space, request, master)

    def _master_of(self, space: Space, request: WriteRequest) -> Cache | None:
        if request.master is None:
            return None
        master = space.find(request.key.segment, request.master.context)
        if master is None or master.master is not None or master.generation != request.master.generation:
            raise MasterGoneError(
                f"cache {request.key}: its master @{request.master.context.hex()[:12]} of generation "
                f"{request.master.generation:016x} is not held as a master (any more); store a dense cache"
            )
        return master

    def _open(self, session: Session, space: Space, request: WriteRequest, master: Cache | None) -> Reservation:
        if master is not None:
            self._catalog.hold(master)
        try:
            extent = self._allocation.take(request.record_bytes, tenant=space.identity.tenant)
        except KVServiceError:
            if master is not None:
                self._catalog.unhold(master)
            raise
        id_, self._next_id = self._next_id, self._next_id + 1
        reservation = Reservation(id_, session, space, request.key, extent, request.master, master, request.prefill_s)
        self.open[id_] = reservation
        session.reservations.add(id_)
        space.pending.add((request.key.segment, request.key.context))
        self._counters.reserved += 1
        return reservation

    def begin(self, session: Session, id_: int, header_checksum: int) -> Verification:
        """Start a commit: the reservation stays as it is until ``publish`` or ``drop``. Raises NotOwnedError."""
        reservation = self._own(session, id_)
        reservation.is_verifying = True
        return Verification(reservation, reservation.check or self.check(reservation), header_checksum)

    def check(self, reservation: Reservation) -> CommitCheck:
        """The checks of its record; kept for its commit if they begin before that, since nobody else writes there."""
        return CommitCheck(reservation, self._allocation.tier.view(reservation.extent))

    def _own(self, session: Session, id_: int) -> Reservation:
        reservation = self.open.get(id_)
        if reservation is None or reservation.session is not session:
            raise NotOwnedError(f"reservation {id_} is not (or no longer) this session's; reserve again")
        if reservation.is_verifying:
            raise NotOwnedError(f"reservation {id_} is being committed already; wait for that answer")
        return reservation

    def publish(self, reservation: Reservation, record: VerifiedRecord) -> Cache:
        """End a commit whose record was verified. Raises KVServiceError, and frees, if it may not be published now."""
        try:
            self._require_publishable(reservation, record.meta)
        except KVServiceError:
            self.drop(reservation)
            raise
        self._allocation.hand_over(reservation.extent)
        cache = self._catalog.publish(reservation.space, record, reservation.master)
        self._close(reservation)
        self._counters.published += 1
        self._counters.published_bytes += cache.record_bytes
        return cache

    def _require_publishable(self, reservation: Reservation, meta: CacheMeta) -> None:
        """What may have changed while the worker ran."""
        if reservation.is_abandoned:
            raise NotOwnedError(f"cache {meta.key}: its session ended before the commit was done")
        master = reservation.master
        if master is not None and master.is_hidden:
            raise MasterGoneError(f"cache {meta.key}: its master was deleted meanwhile; store a dense cache")
        family = reservation.space.families.get(meta.key.segment)
        if family is not None and family.tokens != meta.tokens:
            raise TokenCountError(f"cache {meta.key}: {meta.tokens} tokens, its segment is held with {family.tokens}")
        if master is not None and reservation.space.pinned_reason and master.position != meta.position:
            raise InvalidInputError(
                f"cache {meta.key}: a mirror at {meta.position} of a master at {master.position}, but "
                f"{reservation.space.pinned_reason}; store a dense cache"
            )

    def drop(self, reservation: Reservation) -> None:
        """Free a reservation without publishing."""
        self._allocation.give_back(reservation.extent)
        self._close(reservation)

    def drop_unfinished(self, reservations: Iterable[Reservation]) -> None:
        """Free those that are still open: their commit was cancelled or failed."""
        for reservation in reservations:
            if self.open.get(reservation.id) is reservation:
                self.drop(reservation)

    def _close(self, reservation: Reservation) -> None:
        del self.open[reservation.id]
        reservation.session.reservations.discard(reservation.id)
        space = reservation.space
        space.pending.discard((reservation.key.segment, reservation.key.context))
        if reservation.master is not None:
            self._catalog.unhold(reservation.master)
        self._catalog.drop_if_unused(space)

    def abort(self, session: Session, ids: Iterable[int]) -> int:
        """Free reservations; how many there were. Aborting twice is no error; one under commit is left to it."""
        name = session.principal.name  # what others reserved does not exist for it
        found = {id_: one for id_ in ids if (one := self.open.get(id_)) and one.session.principal.name == name}
        strange = [id_ for id_, reservation in found.items() if reservation.session is not session]
        if strange:
            raise NotOwnedError(f"reservations {strange} belong to another session; nothing was aborted")
        idle = [reservation for reservation in found.values() if not reservation.is_verifying]
        for reservation in idle:
            self.drop(reservation)
        self._counters.aborted += len(idle)
        return len(idle)

    def abandon_all(self, session: Session) -> None:
        """The session ended: its keys may be written by others. Its bytes go at once, or as ``strays`` with the last
        data connection, or when the worker that reads them is done: who commits has written all that it will.
        """
        for id_ in list(session.reservations):
            reservation = self.open[id_]
            if reservation.is_verifying:
                reservation.is_abandoned = True
                continue
            if session.connections:
                self.strays.setdefault(session.id, []).append(reservation.extent)
                self._close(reservation)
            else:
                self.drop(reservation)
            self._counters.aborted += 1

    def attach(self, session: Session) -> None:
        """One more data connection of an open session. Every one is detached once."""
        session.connections += 1

    def detach(self, session: Session) -> None:
        """A data connection is closed; after the last one nobody writes what a session left behind when it ended.

        There is no other way to that, and no bound in time: a stopped process that goes on would write into the bytes
        of others. What strays is bounded by what the session had reserved.
        """
        session.connections -= 1
        if not session.connections:
            for extent in self.strays.pop(session.id, ()):
                self._allocation.give_back(extent)


def verify(job: Verification) -> VerifiedRecord | KVServiceError:
    """Check a record in place, all sections that were not checked yet; runs in a worker thread and touches nothing but
    the bytes.

    A failure is returned, not raised: one bad record of a batch must not hide the others.
    """
    try:
        return job.check.finish(job.header_checksum)
    except CorruptError as error:
        return ChecksumMismatchError(f"cache {job.reservation.key}: {error}; write it again and commit anew")
    except KVServiceError as error:
        return error


def batches_of(begun: list[tuple[int, Verification]], bytes_max: int) -> list[list[tuple[int, Verification]]]:
    """Small records share a job, since a job costs 50-100 us of the loop; large ones get threads of their own."""
    batches: list[list[tuple[int, Verification]]] = []
    room = 0
    for item in begun:
        length = item[1].reservation.extent.length
        if not batches or length > room:
            batches.append([])
            room = bytes_max
        batches[-1].append(item)
        room -= length
    return batches


def verify_all(jobs: Sequence[Verification]) -> list[VerifiedRecord | KVServiceError]:
    """What became of each."""
    return [verify(job) for job in jobs]
