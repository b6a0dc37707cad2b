"""Rows of one engine at the service: opaque objects of one size, over a session that comes back by itself.

Every method may block: never call one on the engine's thread.
"""

import threading
import time
from collections.abc import Sequence

from kvservice.client.connectors.breaker import Breaker
from kvservice.client.connectors.vllm.link import Link
from kvservice.client.opaque import FoundRows, OpaqueStore
from kvservice.client.session import Session
from kvservice.model.errors import KVServiceError
from kvservice.model.identity import Identity
from kvservice.storage.buffer import Bytes

Found = list[tuple[FoundRows, range]]
"""Answers, and which of the keys that were asked each covers: more than one where a call's limit needs it."""


class RowStore:
    """Finds and stores rows of ``row_bytes`` bytes. Safe from any thread.

    ``identity``: whose the rows are; may be exchanged, and then nothing stored before is found.
    """

    def __init__(self, link: Link, identity: Identity, row_bytes: int) -> None:
        self._link = link
        self._identity = identity
        self._row_bytes = row_bytes
        self._lock = threading.Lock()
        self._of_session: tuple[Session, Identity, OpaqueStore] | None = None

    @property
    def breaker(self) -> Breaker:
        """What stands before the service."""
        return self._link.breaker

    @property
    def probe_interval_s(self) -> float | None:
        """As ``Link``."""
        return self._link.probe_interval_s

    def probe(self) -> None:
        """As ``Link``."""
        self._link.probe()

    def find(self, keys: Sequence[bytes]) -> Found:
        """Look keys up, in as many calls as the node's limit needs. The caller closes what it gets.

        Raises UnavailableError while the breaker is open or the service is away, and what the calls raise.
        """
        return self._link.run(lambda session: self._find(session, keys), is_quick=True)

    def put(self, rows: Sequence[tuple[bytes, Bytes]]) -> list[KVServiceError | None]:
        """Store rows; per row None if it is held now. Raises as ``find``."""
        return self._link.run(lambda session: self._put(session, rows))

    def exchange(self, identity: Identity) -> None:
        """From now on find and store under another identity."""
        self._identity = identity

    def close(self) -> None:
        """End the session, and with it every lease."""
        self._link.close()

    def _find(self, session: Session, keys: Sequence[bytes]) -> Found:
        store, step = self._store(session), max(session.limits.lookup_segments_max, 1)
        found: Found = []
        try:
            for start in range(0, len(keys), step):
                part = range(start, min(start + step, len(keys)))
                found.append((store.find([(keys[index], self._row_bytes) for index in part]), part))
        except BaseException:
            for rows, _ in found:
                rows.close()
            raise
        return found

    def _put(self, session: Session, rows: Sequence[tuple[bytes, Bytes]]) -> list[KVServiceError | None]:
        began_s = time.monotonic()
        verdicts = self._store(session).put(rows)
        bytes_put = sum(len(row) for _, row in rows)
        self._link.breaker.succeeded(max(0.0, time.monotonic() - began_s - bytes_put / SLOW_BYTES_PER_S))
        return verdicts

    def _store(self, session: Session) -> OpaqueStore:
        identity = self._identity
        with self._lock:
            known = self._of_session
            if known is None or known[0] is not session or known[1] is not identity:
                known = self._of_session = session, identity, OpaqueStore(session, lambda row_bytes: identity)
            return known[2]


SLOW_BYTES_PER_S = 200 << 20
"""A store may take this long for its bytes, copied and verified, before the service counts as slow."""
