"""Byte objects in another program's layout, stored as they are and given back bit for bit, or not at all.

    object := master of one token at position 0, in the namespace of an identity whose rows have the object's size
    key    := (BLAKE3(tag, namespace, the object's key), root context of the namespace)

What an engine or another cache calls a block is one object here, with our checksums, leases, tiers and SSD. Nothing is
known of what is inside: no moves, no mirrors, no kernels. Imports no torch.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64

from kvservice.client.arrivals import ARRIVE_TIMEOUT_S, Arrivals
from kvservice.client.session import NO_LEASE, Session, location_of
from kvservice.model.cache import CacheKind, CacheMeta, Tier
from kvservice.model.errors import (
    CorruptError,
    GeometryMismatchError,
    InvalidIdentityError,
    InvalidInputError,
    KVServiceError,
    LimitError,
    RecordFormatError,
    error_from_code,
)
from kvservice.model.geometry import opaque_geometry
from kvservice.model.identity import Identity, Namespace
from kvservice.model.lease import Lease
from kvservice.model.plan import Location, Outcome
from kvservice.model.segment import CacheKey, SegmentId, digest, root_context
from kvservice.storage.buffer import Bytes
from kvservice.storage.record import RecordReader, RecordWriter, master_layout
from kvservice.wire.v1 import cache_pb2 as wire

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

    Source = ReadableBuffer | npt.NDArray[Any]
    Target = WriteableBuffer | npt.NDArray[Any]

COPY_BYTES = 512 << 10
"""Copied in one go: its checksum then finds it in the core's cache."""

IdentityOf = Callable[[int], Identity]
"""Identity of objects of so many bytes: all that decides what they mean, and ``opaque_geometry`` of that size."""


def opaque_key(namespace: Namespace, key: bytes) -> CacheKey:
    """The cache's key of an object that its owner calls ``key``."""
    segment = SegmentId(digest(b"kvservice opaque\0", namespace, key))
    return root_context(namespace).cache_key(segment)


class OpaqueStore:
    """Objects of one owner, by keys of its own; objects of different sizes never answer for each other.

    Safe from any thread. The session is the caller's: after ``reconnect`` the store goes on, what was found is void.
    """

    def __init__(self, session: Session, identity_of: IdentityOf) -> None:
        """``identity_of``: called once for each size that is met; the identity is registered then."""
        self._session = session
        self._identity_of = identity_of
        self._lock = threading.Lock()
        self._namespaces: dict[int, Namespace] = {}

    def put(
        self, items: "Sequence[tuple[bytes, Source]]", *, prefill_s: float = 0.0, existed: set[int] | None = None
    ) -> list[KVServiceError | None]:
        """Store (key, bytes) objects; per item None if it is held now, or why it was refused.

        The first writer of a key wins: what is held already, or being written by another, is not written again and
        counts as held; ``existed`` gets the indices of those. ``prefill_s``: seconds that computing one object took,
        for eviction; 0: not known.

        Raises what a call to the node raises when that is lost. Any of the items may be stored then, each whole; the
        same call made again tells.
        """
        batch = _Batch(self._session, prefill_s)
        verdicts: list[KVServiceError | CacheKey] = []
        for key, content in items:
            try:
                verdicts.append(batch.add(self, key, content))
            except (InvalidInputError, LimitError) as error:
                verdicts.append(error)
        errors = batch.run()
        if existed is not None:
            existed.update(index for index, one in enumerate(verdicts) if one in batch.existed)
        return [one if isinstance(one, KVServiceError) else errors.get(one) for one in verdicts]

    def find(self, keys: Sequence[tuple[bytes, int]]) -> "FoundRows":
        """Look (key, row_bytes) objects up in one call; what is there is leased until the answer is closed.

        Raises LimitError when they are more than the node takes in one call, UnavailableError when it is lost.
        """
        metas = [self.meta(key, row_bytes) for key, row_bytes in keys]
        asked: dict[Namespace, list[int]] = {}
        for index, meta in enumerate(metas):
            asked.setdefault(meta.namespace, []).append(index)
        prompts = [
            wire.PromptQuery(namespace=namespace, segments=[_query(metas[index].key) for index in indices])
            for namespace, indices in asked.items()
        ]
        if not prompts:
            return FoundRows(self._session, Lease(NO_LEASE, self._session.session_id, self._session.boot_epoch, 0), [])
        reply, lease = self._session.lookup(prompts)
        places: list[tuple[CacheMeta, Location | None]] = [(meta, None) for meta in metas]
        for indices, prompt in zip(asked.values(), reply.prompts, strict=True):
            for index, answer in zip(indices, prompt.segments, strict=True):
                places[index] = metas[index], _place(answer)
        return FoundRows(self._session, lease, places)

    def delete(self, keys: Sequence[tuple[bytes, int]]) -> int:
        """Delete (key, row_bytes) objects; returns how many were held. What is leased stays readable to its reader."""
        if not keys:
            return 0
        named = [self.meta(key, row_bytes).key for key, row_bytes in keys]
        wired = [wire.CacheKey(segment=key.segment, context=key.context) for key in named]
        return self._session.delete(wire.DeleteRequest(keys=wired))

    def meta(self, key: bytes, row_bytes: int) -> CacheMeta:
        """What the record of an object says of itself. Raises InvalidIdentityError for a size that has no identity."""
        namespace = self._namespace(row_bytes)
        geometry = self._session.identity_of(namespace).geometry
        return CacheMeta(namespace, opaque_key(namespace, key), position=0, tokens=1, geometry=geometry)

    def _namespace(self, row_bytes: int) -> Namespace:
        known = self._namespaces.get(row_bytes)
        if known is not None:
            return known
        if row_bytes < 1:
            raise InvalidInputError(f"an object has at least one byte, not {row_bytes}")
        identity = self._identity_of(row_bytes)
        if identity.geometry != opaque_geometry(row_bytes) or not identity.pinned_reason:
            raise InvalidIdentityError(
                f"the identity of objects of {row_bytes} bytes has {identity.geometry} and RoPE "
                f"{[one.kind for one in identity.rope]}; give it opaque_geometry({row_bytes}) and opaque_rope()"
            )
        with self._lock:
            namespace = self._namespaces[row_bytes] = self._session.register(identity)
        return namespace


class FoundRows:
    """What of the objects that were asked for is there, in the order of asking. Safe from any thread.

    A context manager: closing it ends the lease. ``present``: one a key. ``tiers``: where each was found, or None.
    """

    def __init__(self, session: Session, lease: Lease, places: Sequence[tuple[CacheMeta, Location | None]]) -> None:
        self._session = session
        self._lease = lease
        self._places = tuple(places)
        self._arrivals = Arrivals(session, lease)
        self.present = tuple(place is not None for _, place in self._places)
        self.tiers: tuple[Tier | None, ...] = tuple(None if place is None else place.tier for _, place in self._places)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def read(
        self,
        index: int,
        target: "Target",
        *,
        verify: bool = True,
        timeout_s: float = ARRIVE_TIMEOUT_S,
    ) -> None:
        """Copy object ``index`` to ``target``, which has just its size; from SSD wait for it, ``timeout_s`` at most.

        When this returns the target holds what was stored; when it raises, the target holds nothing of worth. Raises
        CorruptError for bytes that are not what was stored (the node is told, and finds them no more),
        LeaseExpiredError or StaleEpochError when the lease was lost before the copy ended, UnavailableError when it
        does not arrive in time or the node is lost. Without ``verify`` the bytes are those that the node verified.
        """
        meta, place = self._place(index)
        room = _flat(target, is_written=True)
        if len(room) != meta.dense_bytes:
            raise GeometryMismatchError(f"object {index} has {meta.dense_bytes} bytes, the target has {len(room)}")
        self.check()
        self._arrivals.wait_for(place, 1, timeout_s)
        try:
            _copy(self._open(meta, place), room, verify=verify)
        except CorruptError:
            self.check()  # bytes of a lost lease may be another's by now: nothing is wrong with them
            self._denounce(meta)
            raise
        self.check()

    def check(self) -> None:
        """Raise LeaseExpiredError or StaleEpochError unless what was found is certain to be readable now."""
        if self._lease.id != NO_LEASE:
            self._session.check_lease(self._lease)

    def close(self) -> None:
        """End the lease without waiting for the node. From any thread; doing it twice is no error."""
        try:
            self._session.let_go(self._lease.id)
        except KVServiceError:  # the node frees it with the session, or when it runs out
            return

    def _place(self, index: int) -> tuple[CacheMeta, Location]:
        if not 0 <= index < len(self._places):
            raise InvalidInputError(f"there is no object {index}; {len(self._places)} were asked for")
        meta, place = self._places[index]
        if place is None:
            raise InvalidInputError(f"object {index} was not found; read those that `present` names")
        return meta, place

    def _open(self, meta: CacheMeta, place: Location) -> RecordReader:
        try:
            record = RecordReader(self._session.read_view(place))
        except RecordFormatError as error:
            raise CorruptError(f"object {meta.key}: what was leased is not its record: {error}") from error
        said = record.meta
        is_same = (said.namespace, said.key, said.geometry) == (meta.namespace, meta.key, meta.geometry)
        is_whole = (said.position, said.tokens, said.kind) == (0, 1, CacheKind.MASTER)
        if not (is_same and is_whole and record.generation == place.generation):
            raise CorruptError(f"object {meta.key}: the leased bytes are the {record}")
        return record

    def _denounce(self, meta: CacheMeta) -> None:
        try:
            self._session.verify(meta.namespace, [meta.key])
        except KVServiceError:  # the scrubber will find it
            return


@dataclass(slots=True)
class _Draft:
    """One object on its way."""

    meta: CacheMeta
    content: Bytes
    reservation: wire.Reservation | None = None


class _Batch:
    """One call of ``put``: reserved in one call, written in place, committed in one call."""

    def __init__(self, session: Session, prefill_s: float) -> None:
        self._session = session
        self._prefill_s = prefill_s
        self._drafts: dict[CacheKey, _Draft] = {}
        self.existed: set[CacheKey | KVServiceError] = set()

    def add(self, store: OpaqueStore, key: bytes, content: "Source") -> CacheKey:
        """Take in one object; of two with one key the first. Raises InvalidInputError, LimitError."""
        view = _flat(content)
        meta = store.meta(key, len(view))
        master_layout(meta)
        self._drafts.setdefault(meta.key, _Draft(meta, view))
        return meta.key

    def run(self) -> dict[CacheKey, KVServiceError]:
        """Why objects were refused. What an error leaves unpublished is given back."""
        if not self._drafts:
            return {}
        drafts = list(self._drafts.values())
        outcomes = self._session.reserve([self._reserve_item(draft) for draft in drafts])
        errors: dict[CacheKey, KVServiceError] = {}
        for draft, outcome in zip(drafts, outcomes, strict=True):
            if outcome.HasField("reserved"):
                draft.reservation = outcome.reserved
            elif outcome.exists:
                self.existed.add(draft.meta.key)
            else:
                errors[draft.meta.key] = error_from_code(outcome.error.code, outcome.error.message)
        reserved = [draft for draft in drafts if draft.reservation is not None]
        try:
            return errors | self._publish(reserved)
        except BaseException:
            self._abort(reserved)
            raise

    def _publish(self, drafts: Sequence[_Draft]) -> dict[CacheKey, KVServiceError]:
        outcomes = self._session.commit([self._write(draft) for draft in drafts])
        refused = (pair for pair in zip(drafts, outcomes, strict=True) if pair[1].HasField("error"))
        return {draft.meta.key: error_from_code(said.error.code, said.error.message) for draft, said in refused}

    def _write(self, draft: _Draft) -> wire.CommitItem:
        assert draft.reservation is not None, draft.meta.key
        view = self._session.write_view(draft.reservation.extent)
        writer = RecordWriter(view, draft.meta, master_layout(draft.meta))
        (rows,) = writer.master_planes(0)
        np.copyto(rows[0], draft.content)
        return wire.CommitItem(reservation_id=draft.reservation.id, header_checksum=writer.finish().header_checksum)

    def _abort(self, drafts: Sequence[_Draft]) -> None:
        """If the node is gone, so are the reservations: they die with the session."""
        try:
            self._session.abort([draft.reservation.id for draft in drafts if draft.reservation is not None])
        except KVServiceError:
            return

    def _reserve_item(self, draft: _Draft) -> wire.ReserveItem:
        key = draft.meta.key
        return wire.ReserveItem(
            namespace=draft.meta.namespace,
            key=wire.CacheKey(segment=key.segment, context=key.context),
            record_bytes=master_layout(draft.meta).record_bytes,
            prefill_s=self._prefill_s,
        )


def _copy(record: RecordReader, room: Bytes, *, verify: bool) -> None:
    """Copy the object, and check the copy: what the caller gets is what was checked, whatever the arena does."""
    section, hasher = record.section(0), xxh3_64()
    for start in range(0, len(room), COPY_BYTES):
        piece = room[start : start + COPY_BYTES]
        np.copyto(piece, section[start : start + COPY_BYTES])
        if verify:
            hasher.update(piece.data)
    found, said = hasher.intdigest(), record.section_checksums[0]
    if verify and found != said:
        raise CorruptError(f"{record}: checksum {found:016x}, the header says {said:016x}")


def _flat(buffer: "Source", *, is_written: bool = False) -> Bytes:
    """The bytes of any contiguous buffer, without a copy. Raises InvalidInputError for what is none."""
    try:
        view = memoryview(buffer)  # type: ignore[arg-type]  # typeshed knows arrays as buffers from Python 3.12 on
        flat = np.frombuffer(view.cast("B") if view.nbytes else b"", np.uint8)
    except (TypeError, ValueError, BufferError) as error:
        raise InvalidInputError(f"an object must be a contiguous buffer of bytes: {error}") from error
    if is_written and view.readonly:
        raise InvalidInputError("the target is read-only; give a buffer that may be written")
    return flat


def _query(key: CacheKey) -> wire.SegmentQuery:
    return wire.SegmentQuery(segment=key.segment, accepted_contexts=[key.context], position=0, tokens=1)


def _place(answer: wire.SegmentReply) -> Location | None:
    return location_of(answer.record) if answer.outcome == Outcome.HIT else None
