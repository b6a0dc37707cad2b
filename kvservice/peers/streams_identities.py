"""The JSON of namespaces that a link names: a connection may belong to a new session, which has to be told again."""

from collections import OrderedDict
from collections.abc import Callable

from kvservice.caches import Space
from kvservice.model.identity import Namespace
from kvservice.peers.streams_client_calls import Identities


class KnownIdentities:
    """The last ``count_max`` of them. ``identity_of``: of a namespace that was not named here; None: not known."""

    def __init__(self, count_max: int, identity_of: Callable[[Namespace], str | None]) -> None:
        self._count_max = count_max
        self._identity_of = identity_of
        self._kept: OrderedDict[Namespace, str] = OrderedDict()

    def keep(self, namespace: Namespace, identity: str) -> str:
        """Have it at hand."""
        self._kept[namespace] = identity
        self._kept.move_to_end(namespace)
        if len(self._kept) > self._count_max:
            self._kept.popitem(last=False)
        return identity

    def of(self, space: Space) -> str:
        """Of a space of this node."""
        return self._kept.get(space.namespace) or self.keep(space.namespace, space.identity.canonical_json())

    def find(self, namespace: Namespace) -> Identities:
        """Of a namespace, if it is known."""
        text = self._kept.get(namespace)
        if text is None:
            text = self._identity_of(namespace)
            if text is None:
                return {}
            self.keep(namespace, text)
        return {namespace: text}
