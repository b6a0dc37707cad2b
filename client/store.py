"""Storing: segments of prompts, from the engine's paged KV straight into reserved bytes of the arena.

One Reserve and one Commit for a whole round, or several of each where the node's limit needs them. Nothing is committed
before every record is written; an error until then gives all reservations back and publishes nothing. A commit that
fails may have published any of the call's records: earlier batches, or its own if only the answer was lost. Each is
whole and stays; the same call made again finds it EXISTS.
"""

import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from kvservice.client.paged import PagedMemory, Slots, layer_rotations, prompt_slots
from kvservice.client.plans import PromptPlan
from kvservice.client.restore import Progress, RecordBook
from kvservice.client.rounds import RoundPrompt
from kvservice.client.session import Session
from kvservice.client.store_draft import Diff, Draft
from kvservice.client.transport import Arena
from kvservice.kernels.shapes import Rotation
from kvservice.model.cache import CacheMeta
from kvservice.model.errors import (
    CorruptError,
    InvalidInputError,
    KVServiceError,
    LeaseExpiredError,
    MasterGoneError,
    SlotError,
    error_from_code,
)
from kvservice.model.identity import Identity, Namespace
from kvservice.model.lease import Lease
from kvservice.model.plan import PlannedSegment
from kvservice.model.segment import CacheKey
from kvservice.storage.record import RecordReader, WrittenRecord
from kvservice.wire.v1 import cache_pb2 as wire


class StoreOutcome(enum.Enum):
    """What became of one segment."""

    MASTER = "master"
    """Stored dense."""
    MIRROR = "mirror"
    """Stored as runs of rows that differ from a master."""
    EXISTS = "exists"
    """Held already, or being written by another client: the first writer wins."""
    REFUSED = "refused"
    """The node would not take it, or what it was to be made of is gone; ``error`` says why."""


@dataclass(frozen=True, slots=True)
class StoredSegment:
    """What became of segment ``index`` of a prompt. ``record_bytes`` and ``generation`` are 0 unless it was stored."""

    index: int
    namespace: Namespace
    key: CacheKey
    outcome: StoreOutcome
    record_bytes: int = 0
    generation: int = 0
    error: KVServiceError | None = None


@dataclass(frozen=True, slots=True)
class StoreResult:
    """What became of every segment asked for, in prompt order."""

    segments: tuple[StoredSegment, ...]

    @property
    def stored_bytes(self) -> int:
        """Bytes of the records that this call added."""
        return sum(segment.record_bytes for segment in self.segments)

    @property
    def keys(self) -> tuple[CacheKey, ...]:
        """Keys of all that is held now: stored, or there already."""
        return tuple(one.key for one in self.segments if one.outcome is not StoreOutcome.REFUSED)

    def count(self, outcome: StoreOutcome) -> int:
        """How many segments ended so."""
        return sum(segment.outcome is outcome for segment in self.segments)


@dataclass(frozen=True, slots=True)
class StoreRequest:
    """One prompt to store. ``slots`` int64 ``[prompt tokens]``; every row of a stored segment needs a slot.

    ``base``: what a lookup found for the prompt; its lease must be held. Segments found there under their own key are
    not stored again, those found under another are compared with its master. ``is_refreshed``: the prompt was not
    computed in full, so what follows its first shared segment is stored under the refreshed context.
    ``segments``: indices to store; None: all. ``diffs``: by index, how segments differ from the dense cache that the
    base found for them, where that is known: nothing is compared then, and their rows need no slots.
    """

    prompt: RoundPrompt
    slots: Tensor | Slots
    base: PromptPlan | None = None
    is_refreshed: bool = False
    segments: Sequence[int] | None = None
    diffs: Mapping[int, Diff] = field(default_factory=dict)


@dataclass(slots=True)
class _Item:
    """One segment on its way. Exactly one of ``draft`` and ``outcome`` says what is to become of it."""

    request: int
    index: int
    meta: CacheMeta
    draft: Draft | None
    outcome: StoreOutcome | None = None
    error: KVServiceError | None = None
    reservation: wire.Reservation | None = None
    written: WrittenRecord | None = None
    generation: int = 0
    record_bytes: int = 0

    def settle(self, outcome: StoreOutcome, error: KVServiceError | None = None) -> None:
        self.outcome, self.error, self.reservation = outcome, error, None

    def result(self) -> StoredSegment:
        assert self.outcome is not None, self.meta.key
        size = self.record_bytes if self.outcome in (StoreOutcome.MASTER, StoreOutcome.MIRROR) else 0
        return StoredSegment(
            self.index, self.meta.namespace, self.meta.key, self.outcome, size, self.generation, self.error
        )


@dataclass(slots=True)
class StoreCall:
    """One call of ``store_round``: the state of every segment from first check to commit."""

    session: Session
    identity: Identity
    memory: PagedMemory
    on_progress: Progress | None
    items: list[_Item] = field(default_factory=list)
    leases: Sequence[Lease] = ()

    def add(self, number: int, request: StoreRequest, book: RecordBook) -> None:
        """Take in one prompt. Raises before anything is reserved."""
        slots = _checked_slots(request, self.memory.slot_count)
        taken = {item.meta.key for item in self.items}
        for index in _indices(request):
            meta = _meta(request, index, self.identity)
            item = _Item(number, index, meta, None)
            self.items.append(item)
            if meta.key in taken or _is_held(request.base, index, meta.key):
                item.settle(StoreOutcome.EXISTS)
                continue
            taken.add(meta.key)
            segment = request.prompt.segments[index]
            rows = slots[segment.position : segment.end]
            known = request.diffs.get(index)
            if known is None and (rows < 0).any():
                raise SlotError(f"segment {index} at position {segment.position}: a row to store has no slot (-1)")
            base = _base(request.base, index, book, self.identity, meta)
            item.draft = Draft(self.identity, meta, rows, base, known, is_known=known is not None)
            if known is not None:
                _check_known(item.draft, index)

    def run(self, leases: Iterable[PromptPlan]) -> None:
        """Compare, reserve, write, commit. On any error what is not published is given back."""
        for item in self._drafts():
            assert item.draft is not None
            if not item.draft.is_known:
                item.draft.find_diff(self.memory, layer_rotations(self.identity))
        self.leases = [plan.plan.lease for plan in leases]
        self._check_leases()  # diffs read after a lease was lost must not count
        try:
            self._publish(self.on_progress)
            if self._take_back_orphans():  # their masters went between reserve and commit
                self._publish(None)
        except BaseException:
            self._abort()
            raise

    def _drafts(self) -> Iterator[_Item]:
        return (item for item in self.items if item.outcome is None)

    def _publish(self, on_progress: Progress | None) -> None:
        """All drafts, from reservation to commit; a mirror whose master is gone is reserved once more, whole."""
        self._reserve(list(self._drafts()))
        self._reserve(self._take_back_orphans())
        self._write(on_progress)
        self._commit()

    def _take_back_orphans(self) -> Sequence[_Item]:
        """Mirrors refused because their master is gone, drafts again, whole now: they cannot be refused so twice."""
        orphans = [item for item in self.items if isinstance(item.error, MasterGoneError)]
        for item in orphans:
            assert item.draft is not None
            item.outcome = item.error = None
            item.draft.make_whole()
        return orphans

    def _check_leases(self) -> None:
        for lease in self.leases:
            self.session.check_lease(lease)

    def _reserve(self, items: Sequence[_Item]) -> None:
        if not items:
            return
        outcomes = self.session.reserve([_reserve_item(item) for item in items])
        for item, reply in zip(items, outcomes, strict=True):
            match reply.WhichOneof("outcome"):
                case "reserved":
                    item.reservation = reply.reserved
                case "exists":
                    item.settle(StoreOutcome.EXISTS)
                case _:
                    item.settle(StoreOutcome.REFUSED, error_from_code(reply.error.code, reply.error.message))

    def _write(self, on_progress: Progress | None) -> None:
        reserved, rotations = list(self._drafts()), layer_rotations(self.identity)
        for done, item in enumerate(reserved, start=1):
            assert item.draft is not None
            assert item.reservation is not None
            target = self.session.write_view(item.reservation.extent)
            if item.draft.is_rebuilt:
                self._rebuild(item, item.draft, target, rotations)
            else:
                item.written = item.draft.write(target, self.memory, rotations)
            if on_progress is not None:
                on_progress(done, len(reserved))

    def _rebuild(self, item: _Item, draft: Draft, target: Arena, rotations: Sequence[Rotation]) -> None:
        """Write whole what was known as a difference from a master that is gone. REFUSED, alone, if no lease of ours
        keeps that master's bytes any more.
        """
        assert item.reservation is not None
        try:
            item.written = draft.write(target, self.memory, rotations)
            self._check_leases()  # rows read after a lease was lost must not count
        except (CorruptError, LeaseExpiredError) as error:
            self.session.abort([item.reservation.id])
            item.settle(StoreOutcome.REFUSED, error)

    def _commit(self) -> None:
        written = list(self._drafts())
        if not written:
            return
        outcomes = self.session.commit([_commit_item(item) for item in written])
        for item, reply in zip(written, outcomes, strict=True):
            if reply.HasField("error"):
                item.settle(StoreOutcome.REFUSED, error_from_code(reply.error.code, reply.error.message))
                continue
            assert item.draft is not None
            item.generation = reply.generation
            item.settle(StoreOutcome.MIRROR if item.draft.is_mirror else StoreOutcome.MASTER)

    def _abort(self) -> None:
        """Give everything back. If the node is gone, so are the reservations: they die with the session."""
        reserved = [item.reservation.id for item in self.items if item.reservation is not None]
        try:
            self.session.abort(reserved)
        except KVServiceError:
            return


def store_round(
    session: Session,
    identity: Identity,
    memory: PagedMemory,
    requests: Sequence[StoreRequest],
    on_progress: Progress | None,
) -> tuple[StoreResult, ...]:
    """Store all prompts of a round; one result a prompt. Raises as ``Client.store_round``."""
    if not session.is_writer:
        raise InvalidInputError("this session only reads; connect with is_writer=True to store")
    call, book = StoreCall(session, identity, memory, on_progress), RecordBook(session)
    bases = [request.base for request in requests if request.base is not None and request.base.hits]
    for plan in bases:
        session.check_lease(plan.plan.lease)
    for number, request in enumerate(requests):
        call.add(number, request, book)
    call.run(bases)
    return tuple(
        StoreResult(tuple(item.result() for item in call.items if item.request == number))
        for number in range(len(requests))
    )


def _checked_slots(request: StoreRequest, slot_count: int) -> Slots:
    if request.is_refreshed and request.prompt.policy is None:
        raise InvalidInputError("a prompt without a reuse policy is exact; store it with is_refreshed=False")
    if request.base is not None and request.base.prompt != request.prompt:
        raise InvalidInputError("the base is the plan of another prompt; give the one looked up for this prompt")
    slots = prompt_slots(request.slots, request.prompt.token_count)
    if len(slots) and (int(slots.min()) < -1 or int(slots.max()) >= slot_count):
        raise SlotError(f"slots {int(slots.min())}..{int(slots.max())} do not fit paged KV of {slot_count} slots")
    return slots


def _indices(request: StoreRequest) -> Sequence[int]:
    count = len(request.prompt.segments)
    indices = range(count) if request.segments is None else request.segments
    if any(not 0 <= index < count for index in indices):
        raise InvalidInputError(f"segments {list(indices)} of a prompt that has {count}")
    return indices


def _meta(request: StoreRequest, index: int, identity: Identity) -> CacheMeta:
    prompt, is_refreshed = request.prompt, request.is_refreshed
    segment = prompt.segments[index]
    return CacheMeta(
        namespace=prompt.namespace,
        key=prompt.key(index, is_refreshed=is_refreshed),
        position=segment.position,
        tokens=len(segment.tokens),
        geometry=identity.geometry,
        provenance=prompt.provenance(index, is_refreshed=is_refreshed),
        preceding=prompt.contexts(is_refreshed=is_refreshed)[index].marks,
    )


def _planned(base: PromptPlan | None, index: int) -> PlannedSegment | None:
    planned = None if base is None else base.plan.segments[index]
    return planned if planned is not None and planned.is_hit else None


def _is_held(base: PromptPlan | None, index: int, key: CacheKey) -> bool:
    planned = _planned(base, index)
    return planned is not None and planned.key == key


def _base(
    base: PromptPlan | None, index: int, book: RecordBook, identity: Identity, meta: CacheMeta
) -> RecordReader | None:
    """The master to compare with: the found cache's own, at depth one; None where keys cannot be moved to it."""
    planned = _planned(base, index)
    if base is None or planned is None:
        return None
    master = book.open_master(base, planned)
    is_reachable = not identity.pinned_reason or master.meta.position == meta.position
    return master if is_reachable and master.meta.tokens == meta.tokens else None


def _check_known(draft: Draft, index: int) -> None:
    """Raise InvalidInputError unless a known difference is one from a dense cache that the base holds."""
    if draft.base is None:
        raise InvalidInputError(f"segment {index}: a known difference, but the base holds no cache that it is from")
    assert draft.diff is not None
    counts = {len(draft.diff.runs), len(draft.diff.rows), draft.meta.geometry.layers}
    if len(counts) > 1:
        raise InvalidInputError(f"segment {index}: a difference of {sorted(counts)} layers; give runs and rows of all")


def _reserve_item(item: _Item) -> wire.ReserveItem:
    assert item.draft is not None
    _, layout = item.draft.record()
    reference, key = item.draft.reference, item.meta.key
    item.record_bytes = layout.record_bytes
    return wire.ReserveItem(
        namespace=item.meta.namespace,
        key=wire.CacheKey(segment=key.segment, context=key.context),
        record_bytes=layout.record_bytes,
        master_context=reference.context if reference is not None else b"",
        master_generation=reference.generation if reference is not None else 0,
    )


def _commit_item(item: _Item) -> wire.CommitItem:
    assert item.reservation is not None
    assert item.written is not None
    return wire.CommitItem(reservation_id=item.reservation.id, header_checksum=item.written.header_checksum)
