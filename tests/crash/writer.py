"""A client under whose load the service is killed: stores, folds, elects, deletes, and reads all back at once.

A writer has keys of its own, so what it may find follows from its own calls and their answers alone.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random

from kvservice.client.session import Session
from kvservice.client.shared_memory import SharedMemoryTransport
from kvservice.model.errors import (
    InvalidInputError,
    KVServiceError,
    NotOwnedError,
    UnavailableError,
    UnknownSessionError,
)
from kvservice.model.plan import Outcome
from kvservice.model.segment import CacheKey
from kvservice.wire.v1 import cache_pb2 as wire
from tests.crash.content import Draft, Kind, anew, dense_draft, far_draft, near_draft
from tests.crash.oracle import Book, BrokenError
from tests.crash.reading import Reader, Seen
from tests.server.builders import encode_key, write_record

STEPS_MAX = 100_000
READ_TRIES_MAX = 3
MAY_BE_REFUSED = {"CAPACITY", "MASTER_GONE"}
"""A full arena of leases; a master that was folded, deleted or evicted meanwhile."""

# How often each step is taken, by name. A fold needs near bytes, an election several dense caches of one segment.
WEIGHTS = {
    "store_new": 6,
    "store_mirrors": 4,
    "store_near": 4,
    "store_far": 1,
    "store_again": 2,
    "elect": 3,
    "delete": 3,
    "delete_all": 0.2,
    "abort": 1,
    "read": 6,
    "read_shifted": 2,
    "verify": 1,
}


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """``may_lose_folded``: memory is small, so what a fold puts in the place of a record may be evicted from it."""

    kinds: Sequence[Kind]
    held_bytes_max: int
    may_lose_folded: bool
    weights: dict[str, float]


class Writer:
    """One session and its load. ``lost``: how it was told that the service went away in the middle."""

    def __init__(self, socket: str, book: Book, plan: LoadPlan, rng: Random, seen: Seen) -> None:
        self.lost: KVServiceError | None = None
        self.steps = 0
        self._socket = socket
        self._book = book
        self._plan = plan
        self._rng = rng
        self._seen = seen
        self._names, self._weights = list(plan.weights), list(plan.weights.values())

    def run(self, stop: threading.Event, steps_max: int = STEPS_MAX) -> None:
        """Work until told to stop, until there was enough, or until the service is gone."""
        identities = [kind.identity for kind in self._plan.kinds]
        try:
            with Session(SharedMemoryTransport(f"unix:{self._socket}"), identities, client_name="crash") as session:
                self._session, self._reader = session, Reader(session, self._book, self._seen)
                while not stop.is_set() and self.steps < steps_max:
                    self._step()
                    self.steps += 1
        except (UnavailableError, UnknownSessionError) as error:
            self.lost = error

    def _step(self) -> None:
        if self._book.held_bytes > self._plan.held_bytes_max:
            self._delete(self._some_held(8))
        (name,) = self._rng.choices(self._names, self._weights)
        steps: dict[str, Callable[[], None]] = {
            "store_new": self._store_new,
            "store_mirrors": self._store_mirrors,
            "store_near": lambda: self._store_beside(near_draft, self._rng.randrange(1, 3)),
            "store_far": lambda: self._store_beside(far_draft, 1),
            "store_again": self._store_again,
            "elect": self._elect,
            "delete": lambda: self._delete(self._some_held(self._rng.choice([1, 1, 1, 3]))),
            "delete_all": self._delete_all,
            "abort": self._abort,
            "read": self._read,
            "read_shifted": self._read_shifted,
            "verify": self._verify,
        }
        steps[name]()

    # Choices

    def _some_held(self, count: int) -> list[CacheKey]:
        held = self._book.held()
        return self._rng.sample(held, min(count, len(held)))

    def _base(self) -> Draft | None:
        """A cache whose bytes are known, to store others beside it."""
        known = [key for key in self._some_held(8) if len(self._book.entries[key].allowed) == 1]
        return self._book.entries[known[0]].allowed[0] if known else None

    # Storing

    def _store_new(self) -> None:
        count = self._rng.choice([1, 1, 2, 4])
        kinds = self._rng.choices(self._plan.kinds, k=count)
        self._store([dense_draft(self._rng, kind, f"segment {self._book.next_number()}") for kind in kinds])

    def _store_mirrors(self) -> None:
        base = self._base()
        reference = None if base is None else self._book.entries[base.meta.key].reference
        if base is None or reference is None:
            return
        count = self._rng.randrange(1, 4)
        self._store([near_draft(self._rng, base, self._book.next_number(), reference) for _ in range(count)])

    def _store_beside(self, make: Callable[[Random, Draft, int], Draft], count: int) -> None:
        base = self._base()
        if base is not None:
            self._store([make(self._rng, base, self._book.next_number()) for _ in range(count)])

    def _store_again(self) -> None:
        gone = self._book.gone()
        for key in self._rng.sample(gone, min(2, len(gone))):
            last = self._book.last(key)
            self._store([anew(self._rng, last.kind, last.name, replace(last.meta, master=None))])

    def _store(self, drafts: Sequence[Draft]) -> None:
        if self._plan.may_lose_folded:
            for draft in drafts:
                self._book.may_lose(draft.meta.key.segment)
        outcomes = self._session.reserve([_reserve_item(draft) for draft in drafts])
        reserved: list[tuple[Draft, wire.CommitItem]] = []
        for draft, outcome in zip(drafts, outcomes, strict=True):
            if outcome.HasField("error"):
                _require_refusal(draft, outcome.error)
            elif outcome.exists:
                raise BrokenError(f"a phantom: {draft.meta.key} exists, and nothing is stored under it")
            else:
                view = self._session.write_view(outcome.reserved.extent)
                checksum = write_record(view, draft.meta, draft.planes, draft.runs)
                item = wire.CommitItem(reservation_id=outcome.reserved.id, header_checksum=checksum)
                reserved.append((draft, item))
        if reserved:
            self._commit(reserved)

    def _commit(self, reserved: Sequence[tuple[Draft, wire.CommitItem]]) -> None:
        for draft, _ in reserved:
            self._book.begin_store(draft)
        outcomes = self._session.commit([item for _, item in reserved])
        for (draft, _), outcome in zip(reserved, outcomes, strict=True):
            if outcome.HasField("error"):
                self._book.refused(draft, outcome.error.code)
                _require_refusal(draft, outcome.error)
            else:
                self._book.stored(draft, outcome.generation)

    def _abort(self) -> None:
        """Reserve and write nothing: given back, or left to the end of the session."""
        draft = dense_draft(self._rng, self._plan.kinds[0], f"never {self._book.next_number()}")
        outcomes = self._session.reserve([_reserve_item(draft)])
        if self._rng.random() < 0.5:
            self._session.abort([one.reserved.id for one in outcomes if one.HasField("reserved")])

    # Electing, deleting

    def _elect(self) -> None:
        base = self._base()
        if base is None:
            return
        segment = base.meta.key.segment
        keys = [key for key in self._book.of_segment(segment) if self._book.entries[key].is_held]
        if self._plan.may_lose_folded:
            self._book.may_lose(segment)
        request = wire.CommitRoundRequest(round="crash", namespace=base.meta.namespace)
        request.members.extend(encode_key(key) for key in keys)
        try:
            self._session.commit_round(request)
        except InvalidInputError as error:  # a member is gone
            if any(self._book.entries[key].is_due for key in keys):
                raise BrokenError(f"an election of caches that are held was refused: {error}") from error

    def _delete(self, keys: Sequence[CacheKey]) -> None:
        self._book.begin_delete(keys)
        self._session.delete(wire.DeleteRequest(keys=[encode_key(key) for key in keys]))
        self._book.deleted(keys)

    def _delete_all(self) -> None:
        """All of one namespace."""
        namespace = self._rng.choice(self._plan.kinds).identity.namespace()
        keys = [key for key in self._book.entries if self._book.last(key).meta.namespace == namespace]
        self._book.begin_delete(keys)
        self._session.delete(wire.DeleteRequest(namespace=namespace))
        self._book.deleted(keys)

    # Reading

    def _read(self) -> None:
        left = self._some_held(self._rng.choice([1, 2, 4]))
        for _ in range(READ_TRIES_MAX):
            left = self._reader.read(left) if left else []

    def _read_shifted(self) -> None:
        for key in self._some_held(1):
            self._reader.read_shifted(key)

    def _verify(self) -> None:
        for key in self._some_held(1):
            entry = self._book.entries[key]
            (outcome,) = self._session.verify(self._book.last(key).meta.namespace, [key])
            if outcome is Outcome.CORRUPT and not entry.is_tainted:
                raise BrokenError(f"{key} was verified to be corrupt, and nobody touched it: {entry}")
            if outcome is Outcome.MISS and entry.is_due:
                raise BrokenError(f"{key} cannot be verified, it is not there: {entry}")


def _reserve_item(draft: Draft) -> wire.ReserveItem:
    meta = draft.meta
    item = wire.ReserveItem(namespace=meta.namespace, key=encode_key(meta.key), record_bytes=draft.record_bytes)
    if meta.master is not None:
        item.master_context, item.master_generation = meta.master.context, meta.master.generation
    return item


def _require_refusal(draft: Draft, error: wire.ItemError) -> None:
    if error.code == NotOwnedError.code:  # a stop ends sessions, and this one with calls under way
        raise UnavailableError(error.message)
    if error.code not in MAY_BE_REFUSED:
        raise BrokenError(f"storing {draft.meta.key} was refused: {error.code}: {error.message}")
