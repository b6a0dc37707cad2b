"""Sessions: who is connected, what it may do and what it holds. State only, owned by one thread."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvservice.access.principal import LOCAL, Principal
from kvservice.caches import Space
from kvservice.catalog import Catalog
from kvservice.limits import NodeLimits
from kvservice.model.errors import (
    ForbiddenError,
    InvalidInputError,
    LimitError,
    NotOwnedError,
    StaleEpochError,
    UnknownSessionError,
)
from kvservice.model.identity import Namespace, identity_from_json
from kvservice.model.lease import BootEpoch, LeaseId, SessionId


@dataclass(slots=True)
class Session:
    """One client: its namespaces, and the ids of all it holds. ``principal``: who opened it, and alone may use it."""

    id: SessionId
    client_name: str
    may_write: bool
    principal: Principal = LOCAL
    spaces: dict[Namespace, Space] = field(default_factory=dict)
    leases: set[LeaseId] = field(default_factory=set)
    reservations: set[int] = field(default_factory=set)
    connections: int = 0
    """Open data connections. While there is one, the client's process may still write what it had reserved."""

    def space(self, namespace: bytes) -> Space:
        """A registered namespace. Raises InvalidInputError for any other: nobody reaches into a stranger's."""
        space = self.spaces.get(Namespace(namespace))
        if space is None:
            raise InvalidInputError(
                f"namespace {namespace.hex()[:12]} is not registered in this session; register its identity first"
            )
        return space

    def require_write(self) -> None:
        """Raise NotOwnedError unless the session said that it writes."""
        if not self.may_write:
            name = f"{self.id.hex()[:8]} ({self.client_name or 'no name'})"
            raise NotOwnedError(f"session {name} only reads; open one with wants_write")

    def require_may_delete(self, namespace: bytes) -> None:
        """Raise NotOwnedError unless it writes, ForbiddenError if a whole namespace is to go and it is no admin's."""
        self.require_write()
        if namespace and not self.principal.is_admin:
            name = self.principal.name
            raise ForbiddenError(f"{name} may delete caches by their keys; a whole namespace is deleted by an admin")


class Sessions:
    """The open sessions of one boot epoch."""

    def __init__(self, catalog: Catalog, boot_epoch: BootEpoch, limits: NodeLimits) -> None:
        self.open: dict[SessionId, Session] = {}
        self.boot_epoch = boot_epoch
        self._catalog = catalog
        self._limits = limits

    def add(self, id_: SessionId, client_name: str, *, may_write: bool, principal: Principal = LOCAL) -> Session:
        """A new session without namespaces. ``id_`` must be fresh."""
        length, limit = len(client_name), self._limits.client_name_chars_max
        if length > limit:
            raise LimitError(f"a client's name of {length} characters, the limit is {limit}; give a shorter one")
        if len(self.open) >= self._limits.sessions_max:
            raise LimitError(f"{len(self.open)} sessions are open, the limit is {self._limits.sessions_max}")
        assert id_ not in self.open, "session ids are random"
        session = self.open[id_] = Session(id_, client_name, may_write, principal)
        return session

    def register(self, session: Session, identities: Sequence[str]) -> list[Namespace]:
        """Namespaces of identities given as JSON, in order; all or none. The node computes them, not the client.

        A namespace is the digest of an identity, tenant included, and only a tenant of the session's principal gets
        this far: so nobody has a namespace of a tenant that is not proved. Raises ForbiddenError, before anything is
        looked up.
        """
        parsed = [identity_from_json(text) for text in identities]
        for identity in parsed:
            _require_tenant(session.principal, identity.tenant)
        namespaces = [identity.namespace() for identity in parsed]
        found = dict(zip(namespaces, parsed, strict=True))
        new = found.keys() - session.spaces.keys()
        total, limit = len(session.spaces) + len(new), self._limits.identities_per_session_max
        if total > limit:
            raise LimitError(f"{total} identities in one session, the limit is {limit}; open another session")
        for namespace, identity in found.items():
            if namespace in new:
                session.spaces[namespace] = self._catalog.open_space(identity)
        return namespaces

    def require(self, id_: bytes, boot_epoch: int, principal: Principal | None = None) -> Session:
        """The open session that a request names. Raises StaleEpochError or UnknownSessionError.

        ``principal``: who asks; somebody else's session is as unknown as one that never was. None: its connection is
        the session's own.
        """
        if boot_epoch != self.boot_epoch:
            raise StaleEpochError(
                f"the handle is of boot epoch {boot_epoch}, this is {self.boot_epoch}: the service was restarted. "
                "Open a new session and look up again"
            )
        session = self.open.get(SessionId(id_))
        if session is None or (principal is not None and session.principal.name != principal.name):
            raise UnknownSessionError(f"session {id_.hex()[:8]} is not open (any more); open a new one")
        return session

    def remove(self, session: Session) -> None:
        """Forget a session whose leases and reservations are gone already."""
        del self.open[session.id]
        for space in session.spaces.values():
            self._catalog.close_space(space)
        session.spaces.clear()


def _require_tenant(principal: Principal, tenant: str) -> None:
    if not principal.may(tenant):
        raise ForbiddenError(
            f"{principal.name} may name {principal.tenants_text()} in an identity, not tenant {tenant!r}; set the "
            "tenant that its token or certificate is for"
        )
