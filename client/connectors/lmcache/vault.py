"""LMCache's objects at the service: over a session that comes back by itself, one opaque store for each kind.

Every method may block: never call one on a thread of LMCache's.
"""

import json
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvservice.client.connectors.breaker import Breaker
from kvservice.client.connectors.entrance import Entrance
from kvservice.client.connectors.lmcache.identity import ObjectKind, Owner
from kvservice.client.connectors.lmcache.options import LMCacheOptions
from kvservice.client.connectors.vllm.link import Link
from kvservice.client.opaque import FoundRows, OpaqueStore
from kvservice.client.session import Session
from kvservice.model.errors import InvalidInputError, KVServiceError, LimitError
from kvservice.model.geometry import opaque_geometry
from kvservice.model.identity import Identity
from kvservice.model.rope import opaque_rope

log = logging.getLogger("kvservice.lmcache")

SLOW_BYTES_PER_S = 200 << 20
"""A store may take this long for its bytes, copied and verified, before the service counts as slow."""


@dataclass(frozen=True, slots=True)
class Named:
    """One object: what it is, and its key inside its kind."""

    kind: ObjectKind
    key: bytes


@dataclass(frozen=True, slots=True)
class Place:
    """Where an object was found: under the lease of ``found``."""

    found: FoundRows
    index: int


@dataclass(frozen=True, slots=True)
class Stored:
    """What became of an object: held now, by this call or (``existed``) before it; or why it was refused."""

    error: KVServiceError | None = None
    existed: bool = False


@dataclass(frozen=True, slots=True)
class Room:
    """How full the service is, all tiers together, in bytes."""

    used_bytes: int = 0
    capacity_bytes: int = 0


class Vault:
    """Finds, stores and deletes objects of any kind. Safe from any thread."""

    def __init__(self, link: Link, owner: Owner) -> None:
        self.link = link
        self._owner = owner
        self._lock = threading.Lock()
        self._session: Session | None = None
        self._stores: dict[ObjectKind, OpaqueStore] = {}
        self._told: set[ObjectKind] = set()

    @classmethod
    def connect(cls, options: LMCacheOptions, owner: Owner, name: str) -> "Vault":
        """A vault whose session is opened when it is first needed."""
        breaker = Breaker(
            time.monotonic,
            failures_max=options.breaker_failures_max,
            slow_s=options.breaker_slow_s,
            pause_s=options.breaker_pause_s,
            pause_s_max=max(options.breaker_pause_s, 30.0),
        )

        entrance = Entrance(options, log)

        def open_session() -> Session:
            return entrance.open([_hello(options)], is_writer=True, client_name=name)

        return cls(Link(open_session, breaker), owner)

    @property
    def breaker(self) -> Breaker:
        """What stands before the service."""
        return self.link.breaker

    def find(self, wanted: Sequence[Named]) -> list[Place | None]:
        """Look objects up, one call a kind. The caller closes every ``found`` that it gets.

        Raises UnavailableError while the breaker is open or the service is away, and what the calls raise.
        """
        return self.link.run(lambda session: self._find(session, wanted), is_quick=True)

    def put(self, items: Sequence[tuple[Named, Any]]) -> list[Stored]:
        """Store (object, buffer) pairs; what became of each. Raises as ``find``."""
        return self.link.run(lambda session: self._put(session, items))

    def delete(self, wanted: Sequence[Named]) -> int:
        """Delete objects; how many were held. Raises as ``find``."""
        kinds = _by_kind([one.kind for one in wanted])

        def work(session: Session) -> int:
            sizes = {
                kind: [(wanted[index].key, kind.row_bytes) for index in indices] for kind, indices in kinds.items()
            }
            return sum(self._store(session, kind).delete(keys) for kind, keys in sizes.items())

        return self.link.run(work)

    def room(self) -> Room:
        """What the service says of itself. Raises as ``find``."""
        document = json.loads(self.link.run(lambda session: session.stats_json(), is_quick=True))
        tiers = [document.get(name) or {} for name in ("host", "ssd")]
        return Room(*(sum(int(tier.get(name, 0)) for tier in tiers) for name in ("used_bytes", "capacity_bytes")))

    def close(self) -> None:
        """End the session, and with it every lease."""
        self.link.close()

    def _find(self, session: Session, wanted: Sequence[Named]) -> list[Place | None]:
        places: list[Place | None] = [None] * len(wanted)
        opened: list[FoundRows] = []
        try:
            for kind, indices in _by_kind([one.kind for one in wanted]).items():
                try:
                    found = self._store(session, kind).find([(wanted[index].key, kind.row_bytes) for index in indices])
                except (InvalidInputError, LimitError) as error:
                    self._tell(kind, error)
                    continue
                opened.append(found)
                for at, (index, is_present) in enumerate(zip(indices, found.present, strict=True)):
                    places[index] = Place(found, at) if is_present else None
        except BaseException:
            for found in opened:
                found.close()
            raise
        return places

    def _tell(self, kind: ObjectKind, error: KVServiceError) -> None:
        """Say once why objects of a kind are neither kept nor found."""
        with self._lock:
            is_news = kind not in self._told
            self._told.add(kind)
        if is_news:
            log.warning("kvservice: no chunks of %s, rank %d, %s: %s", kind.model, kind.rank, kind.form, error)

    def _put(self, session: Session, items: Sequence[tuple[Named, Any]]) -> list[Stored]:
        stored = [Stored()] * len(items)
        began_s, count = time.monotonic(), 0
        for kind, indices in _by_kind([one.kind for one, _ in items]).items():
            batch, existed = [(items[index][0].key, items[index][1]) for index in indices], set[int]()
            said = self._store(session, kind).put(batch, prefill_s=self._owner.options.prefill_s, existed=existed)
            count += kind.row_bytes * len(batch)
            for at, (index, error) in enumerate(zip(indices, said, strict=True)):
                stored[index] = Stored(error, at in existed)
        self.breaker.succeeded(max(0.0, time.monotonic() - began_s - count / SLOW_BYTES_PER_S))
        return stored

    def _store(self, session: Session, kind: ObjectKind) -> OpaqueStore:
        with self._lock:
            if self._session is not session:
                self._session, self._stores = session, {}
            store = self._stores.get(kind)
            if store is None:
                store = self._stores[kind] = OpaqueStore(session, self._owner.identity_of(kind))
            return store


def _by_kind(kinds: Sequence[ObjectKind]) -> dict[ObjectKind, list[int]]:
    found: dict[ObjectKind, list[int]] = {}
    for index, kind in enumerate(kinds):
        found.setdefault(kind, []).append(index)
    return found


def _hello(options: LMCacheOptions) -> Identity:
    """A session needs an identity before the first object is met; nothing is ever stored under this one."""
    return Identity(options.tenant, "none yet", "none", opaque_geometry(1), (opaque_rope(),), salt="lmcache")
