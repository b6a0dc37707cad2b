"""What is being deleted while other places are asked. State only, the loop's.

An offer that is older than a delete says nothing of it: who asks watches from the question on until its answer is
published, and takes nothing that a delete named meanwhile. A delete lasts until every place was told.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from kvservice.caches import Space
from kvservice.model.identity import Namespace
from kvservice.model.segment import CacheKey

_Meant = tuple[frozenset[Namespace], frozenset[CacheKey] | None]


class Watch:
    """What was deleted since a question began."""

    def __init__(self, running: Iterable[_Meant]) -> None:
        self._meant = list(running)

    def note(self, meant: _Meant) -> None:
        """A delete begins."""
        self._meant.append(meant)

    def has(self, namespace: Namespace, key: CacheKey) -> bool:
        """Was this one deleted?"""
        return any(namespace in names and (keys is None or key in keys) for names, keys in self._meant)


class Deletes:
    """Deletes that run, and who watches for them."""

    def __init__(self) -> None:
        self._running: dict[int, _Meant] = {}
        self._watches: dict[int, Watch] = {}
        self._next = 0

    @contextmanager
    def running(self, spaces: Iterable[Space], keys: Sequence[CacheKey] | None) -> Iterator[None]:
        """Keys, or all (None), of namespaces are being deleted, here and everywhere else."""
        meant = frozenset(one.namespace for one in spaces), None if keys is None else frozenset(keys)
        self._next = number = self._next + 1
        self._running[number] = meant
        for watch in self._watches.values():
            watch.note(meant)
        try:
            yield
        finally:
            del self._running[number]

    @contextmanager
    def watched(self) -> Iterator[Watch]:
        """For as long as a question is open."""
        self._next = number = self._next + 1
        watch = self._watches[number] = Watch(self._running.values())
        try:
            yield watch
        finally:
            del self._watches[number]
