"""A place that can be reached in several ways, and how its bytes come: by the way that is predicted to be the fastest.

Questions go over the first way, and over another one when that is known to be lost. Every transfer is measured, so that
the choice, and what loading is said to cost, stand on what was seen; see ``kvservice.peers.routes``. What is given away
over a stream that can pack is measured too, apart from what comes.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from kvservice.caches import Space
from kvservice.model.errors import UnavailableError
from kvservice.model.identity import Namespace
from kvservice.model.segment import CacheKey
from kvservice.peers.call import SilentError, UnsettledError
from kvservice.peers.routes import Router
from kvservice.peers.routes_estimate import Speed
from kvservice.peers.routes_log import Medium
from kvservice.sharing.place import Carrier, Offer, Parcel, Question
from kvservice.sharing.shares import Shares
from kvservice.storage.arrival import Contiguous
from kvservice.storage.buffer import Bytes
from kvservice.storage.remote.contract import OnPiece, RemoteRecord

AT_ONCE_S = 0.25
"""A way that fails so soon is followed by another; after a whole deadline the caller has waited long enough."""
FOUND_MAX = 65536
AHEAD_S, AHEAD_BYTES_FIRST, AHEAD_BYTES_MAX = 0.01, 256 << 10, 4 << 20
"""First layers that come with an answer hold up other questions for so long."""
T = TypeVar("T")


class RoutedPlace:
    """See Place. ``ways``: at least one; the first that answers also carries questions, and what is given away if the
    place does not read that in this node's memory.

    ``packed``: records over the stream among the ways, with rows as 8 bits, for namespaces of which ``is_lossy`` holds;
    whoever closes the stream closes it. ``given``: chooses how records go there, where ``packed`` is a choice.
    """

    def __init__(
        self,
        router: Router,
        ways: Mapping[Medium, Carrier],
        clock: Callable[[], float] = time.monotonic,
        *,
        packed: Carrier | None = None,
        given: Router | None = None,
        is_lossy: Callable[[Namespace], bool] = lambda _: False,
    ) -> None:
        self.ways = dict(ways)
        self.unused: set[Carrier] = set()
        """Ways that may be added, or were removed for now; they are closed with the place."""
        self.given = self.given_bytes = 0
        """Records that it took, and their bytes."""
        self._is_slower_than_known = self._has_lossy = False
        self._router = router
        self._given = given
        self._packed: dict[Medium, Carrier] = {} if packed is None else {Medium.INT8_STREAM: packed}
        self._is_lossy = is_lossy
        self._clock = clock
        self._moved = _Moved()
        self._shares = Shares(clock)
        self._first, self._main = next(iter(ways.items()))
        self._found_elsewhere: OrderedDict[int, tuple[RemoteRecord, Carrier]] = OrderedDict()
        """What another way than the first one found and has leased, by the record's ``id``."""

    @property
    def name(self) -> str:
        """See Place."""
        return self._main.name

    @property
    def way(self) -> str:
        """See Place."""
        return f"{self.name} {self._first}"

    @property
    def brought_bytes(self) -> int:
        """Bytes that came from there, also of records that did not arrive whole."""
        return self._moved.total

    @property
    def media(self) -> list[Medium]:
        """How records can come now; as 8 bits once any were asked for that may."""
        return list(self._carriers(may_pack=self._can_pack and self._has_lossy))

    @property
    def given_media(self) -> list[Medium]:
        """How records can go there, as far as that is chosen by what was measured."""
        packed = self._packed if self._has_lossy else ()
        return [Medium.STREAM, *packed] if self._is_giving_measured else []

    def speed_of(self, namespace: Namespace) -> Speed:
        """See Place: of the fastest way, for large records."""
        media = self._carriers(may_pack=self._may_pack(namespace))
        return max((self._router.speed(self.name, medium) for medium in media), key=lambda one: one.bytes_per_s)

    @property
    def ahead_bytes(self) -> int:
        """See Place: what the first way, which carries questions, brings in AHEAD_S; and no more than came from there
        before, for how fast it is may be a guess. None where its memory is read: nothing is nearer."""
        if Medium.SHARED_MEMORY in self.ways or self._is_slower_than_known:
            return 0
        speed = self._router.speed(self.name, self._first)
        return min(AHEAD_BYTES_MAX, int(speed.bytes_per_s * AHEAD_S), max(AHEAD_BYTES_FIRST, self.brought_bytes))

    async def find(self, questions: Sequence[Question], ahead_bytes: int = 0) -> list[Offer | None]:
        """See Place. One that fails with first layers to come is the last until a record shows how fast the way is."""
        try:
            way, offers = await self._ask(lambda one: one.find(questions, ahead_bytes))
        except UnavailableError:
            self._is_slower_than_known |= ahead_bytes > 0
            raise
        found = (one for offer in offers if offer is not None for one in (offer.record, offer.master))
        for record in (one for one in found if one is not None):
            self._moved.add(0 if record.ahead is None else len(record.ahead))
            if way is not self._main:
                self._found_elsewhere[id(record)] = record, way
        while len(self._found_elsewhere) > FOUND_MAX:
            self._found_elsewhere.popitem(last=False)  # its lease runs out by itself
        return offers

    async def fetch(self, record: RemoteRecord, target: Bytes, on_piece: OnPiece, start: int = 0) -> None:
        """See Place. A way that fails is left; another one goes on behind what is there without a gap.

        Transfers that run together share the link: each is taken to have had it for its share of the bytes. A node of
        this host that is silent is frozen: no other way to it is waited for.
        """
        may_pack = self._may_pack(record.name.namespace)
        ways, known = self._carriers(may_pack=may_pack), _Contiguous(on_piece, start, self._moved)
        media = list(ways)
        while True:
            began_s, count = self._clock(), record.record_bytes - known.end
            choice, before = self._router.choose(self.name, count, media, may_pack=may_pack), self._moved.total
            try:
                await ways[choice.medium].fetch(record, target, known.note, known.end)
            except UnavailableError as error:
                self._router.failed(choice)
                media = _without(media, choice.medium, error)
                is_frozen = choice.medium is Medium.SHARED_MEMORY and isinstance(error, SilentError)
                if is_frozen or not media:
                    raise
            else:
                self._is_slower_than_known = False
                if count:
                    share = count / max(count, self._moved.total - before)
                    self._router.done(choice, (self._clock() - began_s) * share)
                return

    def let_go(self, records: Iterable[RemoteRecord]) -> None:
        """See Place."""
        for record in records:
            _, way = self._found_elsewhere.pop(id(record), (record, self._main))
            way.let_go([record])

    async def store(self, parcel: Parcel) -> bool:
        """See Place."""
        given = self._given if self._is_giving_measured else None
        is_new = await (self._give(parcel) if given is None else self._give_measured(parcel, given))
        if is_new:
            self.given += 1
            self.given_bytes += len(parcel.view)
        return is_new

    async def _give(self, parcel: Parcel) -> bool:
        media = sorted(self.ways, key=lambda medium: medium is not Medium.SHARED_MEMORY)
        return (await self._ask(lambda one: one.store(parcel), [self.ways[medium] for medium in media]))[1]

    async def _give_measured(self, parcel: Parcel, given: Router) -> bool:
        """Over the stream, packed where that is faster. If it cannot be reached that way: over the others, as ever."""
        began_s, may_pack = self._clock(), self._may_pack(parcel.name.namespace)
        ways = self._carriers(may_pack=may_pack)
        media = [Medium.STREAM, *(self._packed if may_pack else ())]
        others = [way for medium, way in self.ways.items() if medium is not Medium.STREAM]
        while media:
            choice = given.choose(self.name, len(parcel.view), media, may_pack=may_pack)
            shared_s = self._shares.begin()
            try:
                is_new = await ways[choice.medium].store(parcel)
            except UnavailableError as error:
                given.failed(choice)
                media = _without(media, choice.medium, error)
                if self._must_end(error, began_s) or not (media or others):
                    raise
            else:
                if is_new:
                    given.done(choice, self._shares.now() - shared_s)
                return is_new
            finally:
                self._shares.end()
        return (await self._ask(lambda one: one.store(parcel), others, began_s))[1]

    async def delete(self, space: Space, keys: Sequence[CacheKey] | None) -> int:
        """See Place."""
        return (await self._ask(lambda one: one.delete(space, keys)))[1]

    async def _ask(
        self, question: Callable[[Carrier], Awaitable[T]], ways: Sequence[Carrier] = (), began_s: float | None = None
    ) -> tuple[Carrier, T]:
        """The answer of the first way that is there, in order. ``began_s``: when ways before these were asked."""
        began_s, ways = self._clock() if began_s is None else began_s, ways or list(self.ways.values())
        for way in ways[:-1]:
            try:
                return way, await question(way)
            except UnavailableError as error:
                if self._must_end(error, began_s):
                    raise
        return ways[-1], await question(ways[-1])

    def _must_end(self, error: UnavailableError, began_s: float) -> bool:
        """Is no other way asked? What may have been done is not asked for again: a record that is being written, and is
        about to be given up, would seem to be there."""
        return self._clock() - began_s > AT_ONCE_S or isinstance(error, UnsettledError)

    @property
    def _can_pack(self) -> bool:
        return bool(self._packed) and Medium.STREAM in self.ways

    def _may_pack(self, namespace: Namespace) -> bool:
        """Can records of a namespace come and go as 8 bits now?"""
        may_pack = self._can_pack and self._is_lossy(namespace)
        self._has_lossy |= may_pack
        return may_pack

    @property
    def _is_giving_measured(self) -> bool:
        return self._given is not None and self._can_pack and Medium.SHARED_MEMORY not in self.ways

    def _carriers(self, *, may_pack: bool) -> dict[Medium, Carrier]:
        return self.ways | self._packed if may_pack else dict(self.ways)

    def add_way(self, medium: Medium, way: Carrier) -> None:
        """There is another way now, behind those that were there."""
        self.ways[medium] = way
        self.unused.discard(way)

    def remove_way(self, medium: Medium) -> None:
        """It is not used any more; whoever uses it already goes on with it."""
        way = self.ways.pop(medium, None)
        if way is not None:
            self.unused.add(way)

    async def close(self) -> None:
        """See Place."""
        for router in (self._router, self._given):
            if router is not None:
                router.forget(self.name)
        for way in (*self.ways.values(), *self.unused):
            await way.close()


def _without(media: Sequence[Medium], failed: Medium, error: UnavailableError) -> list[Medium]:
    """Those that are left. Rows as they lie and as 8 bits share a link: if it is silent, nobody waits for it twice."""
    is_gone = failed is Medium.STREAM or (failed is Medium.INT8_STREAM and isinstance(error, SilentError))
    gone = (Medium.STREAM, Medium.INT8_STREAM) if is_gone else (failed,)
    return [medium for medium in media if medium not in gone]


class _Moved:
    """Bytes that came from one place so far; pieces are noted by any thread."""

    def __init__(self) -> None:
        self.total = 0
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        with self._lock:
            self.total += count


class _Contiguous:
    """Passes pieces on, and knows up to where there is no gap."""

    def __init__(self, on_piece: OnPiece, start: int, moved: _Moved) -> None:
        self._on_piece = on_piece
        self._moved = moved
        self._pieces = Contiguous(start)
        self._lock = threading.Lock()

    @property
    def end(self) -> int:
        return self._pieces.end

    def note(self, start: int, end: int) -> None:
        self._on_piece(start, end)
        self._moved.add(end - start)
        with self._lock:
            self._pieces.add(start, end)
