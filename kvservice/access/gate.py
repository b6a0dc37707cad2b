"""The gate: who a caller is, by the access file in force. Owned by the node's loop; ``authorize`` from any thread.

The file is read again when it changes or when it is told to. A file that is wrong changes nothing: what was in force
stays, and the log and ``problem`` say what is wrong.
"""

import hashlib
import hmac
import logging
import time
from collections.abc import Callable
from pathlib import Path

from blake3 import blake3

from kvservice.access.access_file import AccessTable, read_access_file
from kvservice.access.buckets import Buckets
from kvservice.access.principal import INTERNAL, LOCAL, Credentials, Principal
from kvservice.access.quotas import Quotas
from kvservice.model.errors import ConfigError, UnauthenticatedError

TOKEN_CHARS_MAX = 4096
_LOG = logging.getLogger(__name__)
_UNKNOWN = "not a caller that this node knows: give a token of its access file, or a certificate that it names"
Stamp = tuple[int, int, int] | None


class Gate:
    """Callers, their buckets and tenants' quotas. ``path`` None: no access file, everybody who is let in is LOCAL.

    ``wall_clock``: seconds of the epoch, for expiry; ``clock``: monotonic ones, for rates. ``on_change`` is called
    after a new file is in force. Raises ConfigError for a file that is wrong from the start.
    """

    def __init__(
        self,
        path: Path | None = None,
        *,
        wall_clock: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path = path
        self.problem = ""
        self.reloads = 0
        self.refused = 0
        self.on_change: list[Callable[[], None]] = []
        self.buckets = Buckets(clock)
        self._wall_clock = wall_clock
        self._stamp = _stamp(path)
        self._table = AccessTable() if path is None else read_access_file(path)
        self.quotas = Quotas(self._table.quotas)

    @property
    def local(self) -> Principal:
        """Who comes over the unix socket."""
        return self._table.local

    def authorize(self, credentials: Credentials) -> Principal:
        """Whom the credentials prove. Raises UnauthenticatedError, which never says which part was wrong, but for a
        token that was right and has expired.

        A token counts before a certificate; who is local and shows neither is the principal of section ``local``.
        """
        if self.path is None:
            return LOCAL
        if credentials.token:
            return self._of_token(credentials.token)
        for name in credentials.certificate_names:
            found = self._table.certificates.get(name)
            if found is not None:
                return found
        if credentials.is_local:
            return self._table.local
        self.refused += 1
        raise UnauthenticatedError(_UNKNOWN)

    def _of_token(self, token: str) -> Principal:
        """Compares with every token there is, in constant time each: how long it takes tells nothing of any digest."""
        found: Principal | None = None
        raw = token[:TOKEN_CHARS_MAX].encode(errors="surrogateescape")
        digests = {"blake3": blake3(raw).digest(), "sha256": hashlib.sha256(raw).digest()}
        for proof in self._table.tokens:
            if hmac.compare_digest(digests[proof.hash], proof.digest):
                found = proof.principal
        if found is None or len(token) > TOKEN_CHARS_MAX:
            self.refused += 1
            raise UnauthenticatedError(_UNKNOWN)
        if found.expires_s <= self._wall_clock():
            self.refused += 1
            raise UnauthenticatedError(f"the token of {found.name} has expired; get a new one from who runs this node")
        return found

    def is_current(self, principal: Principal) -> bool:
        """Is what proved it still in force, with the same role and tenants?"""
        return self.current(principal) is not None

    def current(self, principal: Principal) -> Principal | None:
        """The principal as it is now, maybe with other limits; None if what proved it is in force no more."""
        if principal is INTERNAL:
            return principal
        table, now_s = self._table, self._wall_clock()
        known = (table.local, *table.certificates.values(), *(one.principal for one in table.tokens))
        return next((one for one in known if _is_same(one, principal) and one.expires_s > now_s), None)

    def reload_if_changed(self) -> bool:
        """Read the file again if it is not what it was; cheap. Did something change?"""
        stamp = _stamp(self.path)
        return stamp != self._stamp and self.reload()

    def reload(self) -> bool:
        """Read the file again, now. False, and all stays as it was, if it is wrong."""
        if self.path is None:
            return False
        self._stamp = _stamp(self.path)
        try:
            self._table = read_access_file(self.path)
        except ConfigError as error:
            self.problem = str(error)
            _LOG.error("the old access rules stay in force: %s", error)
            return False
        self.problem = ""
        self.reloads += 1
        self.quotas.table = self._table.quotas
        for tell in self.on_change:
            tell()
        _LOG.info("access file %s: new rules are in force", self.path)
        return True


def _is_same(one: Principal, other: Principal) -> bool:
    return (one.name, one.role, one.tenants, one.proof) == (other.name, other.role, other.tenants, other.proof)


def _stamp(path: Path | None) -> Stamp:
    """What changes when a file is written or replaced; None if it cannot be looked at."""
    if path is None:
        return None
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
