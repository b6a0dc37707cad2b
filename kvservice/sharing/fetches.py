"""Records on their way from another place into the arena, while the client that asked already restores them.

The state is the loop's; bytes arrive on the place's threads. A cache on its way is held until nothing writes into its
extent any more, whatever becomes of the lease that wanted it.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from kvservice.allocation import Allocation
from kvservice.caches import Cache, SaidRecord, Space
from kvservice.catalog import Catalog
from kvservice.departures import Gone
from kvservice.loads import Load
from kvservice.lookup import FROM_REMOTE
from kvservice.model.errors import CorruptError, KVServiceError, UnavailableError
from kvservice.model.segment import DIGEST_BYTES
from kvservice.sharing.deletes import Deletes, Watch
from kvservice.sharing.place import Offer, Place, Question
from kvservice.stats.counters import Counters
from kvservice.storage.arrival import RecordArrival
from kvservice.storage.buffer import Bytes
from kvservice.storage.mapping import prefault
from kvservice.storage.remote.contract import OnPiece, RemoteRecord
from kvservice.worker import until_done

FETCHES_MAX = 256
"""Records that are asked of one place at a time: more wait here, without a deadline of their own, for a place has
limits too."""
_LOG = logging.getLogger(__name__)


class Source(NamedTuple):
    """Where a record comes from first, and whom to ask for the same one when that fails."""

    question: Question
    place: Place
    others: Sequence[Place] = ()


class Fetches:
    """``on_whole`` is told of every cache that arrived whole. ``deletes``: what runs of those.

    What a place offers is leased there: each of its records is let go of once, as soon as it is whole or not wanted.
    """

    def __init__(
        self,
        catalog: Catalog,
        allocation: Allocation,
        counters: Counters,
        clock: Callable[[], float],
        on_whole: Callable[[Cache], None],
    ) -> None:
        self.deletes = Deletes()
        self._catalog = catalog
        self._allocation = allocation
        self._counters = counters
        self._clock = clock
        self._on_whole = on_whole
        self._tasks: set[asyncio.Task[None]] = set()
        self._turns = WeakKeyDictionary[Place, asyncio.Semaphore]()

    def begin(self, source: Source, offer: Offer, watch: Watch) -> bool:
        """Publish what a place offers, its master first, and begin to bring it. False: it is refused, or here already.

        What is published before it is here is readable layer by layer, as loads from SSD are. ``watch``: deletes since
        the question; what they name is not published.
        """
        space, master = source.question.space, offer.master
        why = fault_of(source.question, offer, self._allocation.tier.capacity_bytes)
        if why:
            _LOG.warning("%s offered what was not asked for: %s", source.place.name, why)
            self._counters.remote.refused += 1
        records = [offer.record] if master is None else [master, offer.record]
        is_alive = self._catalog.spaces.get(space.namespace) is space  # it goes with its last session
        if why or not is_alive or any(watch.has(space.namespace, one.head.meta.key) for one in records):
            source.place.let_go(records)
            return False
        base = None
        if master is not None:
            base = self._find_or_bring(space, master, None, source)
            if base is None:
                source.place.let_go([offer.record])
                return False
        return self._find_or_bring(space, offer.record, base, source) is not None

    def _find_or_bring(self, space: Space, record: RemoteRecord, master: Cache | None, source: Source) -> Cache | None:
        """The cache, here already or on its way; None: it is not wanted. What is not brought is let go of."""
        key = record.head.meta.key
        held, family = space.find(key.segment, key.context), space.families.get(key.segment)
        cache = None
        if held is not None:
            is_same = held.generation == record.head.generation and (held.master is None) == (master is None)
            cache = held if is_same else None
        elif family is None or family.tokens == record.head.meta.tokens:
            cache = self._bring(space, record, master, source)
        if cache is None or cache is held:
            source.place.let_go([record])
        return cache

    def _bring(self, space: Space, record: RemoteRecord, master: Cache | None, source: Source) -> Cache | None:
        catalog, head = self._catalog, record.head
        said = SaidRecord(head.meta, record.record_bytes, head.generation, record.prefill_s)
        cache = catalog.adopt(space, said, master)
        catalog.hold(cache)
        extent = self._allocation.take_for_load(cache)
        if extent is None:
            self._counters.remote.refused += 1
            catalog.give_up(cache)
            catalog.unhold(cache)
            return None
        catalog.set_host(cache, extent.offset)
        self._counters.remote.begun += 1
        load = catalog.arriving[cache] = Load(cache, FROM_REMOTE)
        task = asyncio.get_running_loop().create_task(self._run(load, record, source))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return cache

    async def _run(self, load: Load, record: RemoteRecord, source: Source) -> None:
        cache, counters, started_s = load.cache, self._counters.remote, self._clock()
        error: KVServiceError | None = UnavailableError(
            f"cache {cache}: bringing it was given up, the node is stopping"
        )
        try:
            error = await self._bring_from_any(load, record, source)
        finally:
            del self._catalog.arriving[cache]
            counters.record_bytes += cache.record_bytes if error is None else 0
            counters.seconds += self._clock() - started_s
            if error is None:
                counters.done += 1
            else:
                counters.failed += 1
                why = Gone.QUARANTINED if isinstance(error, CorruptError) else Gone.NOT_BROUGHT
                self._catalog.hide_with_mirrors(cache, why)
            load.finish(error)
            self._catalog.unhold(cache)
        if error is None and not cache.is_hidden:
            self._on_whole(cache)

    async def _bring_from_any(self, load: Load, record: RemoteRecord, source: Source) -> KVServiceError | None:
        """What went wrong at the last place that was tried; None if the record is whole."""
        error = await self._bring_from(load, record, source.place)
        for place in source.others:
            if error is None or load.cache.is_hidden:
                break
            same = await self._ask_again(place, source.question, record)
            if same is not None:
                error = await self._bring_from(load, same, place)
        return error

    async def _bring_from(self, load: Load, record: RemoteRecord, place: Place) -> KVServiceError | None:
        """Fill what is not known to be right yet. Verified layers are never written again: somebody may read them.

        What came with the answer is put in its place while the rest is asked for.
        """
        head, cache = record.head, load.cache
        view = self._allocation.tier.view(cache.extent)
        meta, layers = head.meta, len(head.section_checksums)
        arrival = RecordArrival(view, meta.namespace, meta.key, head.generation, meta.master)
        ahead = None if load.layers else record.ahead
        start = head.layout.bounds[load.layers] if load.layers else 0
        loop = asyncio.get_running_loop()

        def on_piece(first: int, end: int) -> None:
            known = arrival.arrived(first, end)
            if known > load.layers:  # a guess that may be old: ``advance`` looks again, on the loop
                loop.call_soon_threadsafe(load.advance, known)

        try:
            if start:
                arrival.arrived(0, start)
            try:
                async with _put_in_place(ahead, view, on_piece) as came:
                    if start + came < len(view):
                        async with self._turns.setdefault(place, asyncio.Semaphore(FETCHES_MAX)):
                            await place.fetch(record, view, on_piece, start + came)
            finally:
                load.advance(arrival.layers)
            if load.layers < layers:
                raise CorruptError(f"cache {cache}: {place.name} sent {load.layers} of {layers} layers")
        except KVServiceError as error:
            self._counters.corrupt["remote"] += isinstance(error, CorruptError)
            _LOG.warning("cache %s did not arrive whole from %s: %s", cache, place.name, error)
            return error
        finally:
            place.let_go([record])
        return None

    async def _ask_again(self, place: Place, question: Question, record: RemoteRecord) -> RemoteRecord | None:
        """The same record at another place, unless it was deleted while that was asked."""
        with self.deletes.watched() as watch:
            try:
                offer = (await place.find([question]))[0]
            except KVServiceError as error:
                _LOG.warning("%s was not asked in the other's stead: %s", place.name, error)
                return None
            is_deleted = watch.has(record.name.namespace, record.head.meta.key)
        offered = [] if offer is None else [one for one in (offer.record, offer.master) if one is not None]
        same = None
        for one in () if is_deleted else offered:
            if (one.name, one.head) == (record.name, record.head):
                same = one
        place.let_go([one for one in offered if one is not same])
        return same

    async def stop(self) -> None:
        """End what is on its way: it is a miss for whoever waits."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@asynccontextmanager
async def _put_in_place(ahead: Bytes | None, view: Bytes, on_piece: OnPiece) -> AsyncIterator[int]:
    """While the body runs, a thread copies ``ahead``, of so many bytes, to the start of ``view`` and tells of it.

    Nothing writes there any more when this ends. Raises what ``on_piece`` raised.
    """
    if ahead is None:
        yield 0
        return

    def put() -> None:
        target = view[: len(ahead)]
        prefault(target)
        np.copyto(target, ahead)
        on_piece(0, len(ahead))

    putting = asyncio.get_running_loop().run_in_executor(None, put)
    try:
        yield len(ahead)
    finally:
        await _settled(putting)
        error = putting.exception()
    if error is not None:
        raise error


async def _settled(future: "asyncio.Future[None]") -> None:
    """Until it is over, which nothing can hasten; who is cancelled meanwhile is so behind it."""
    try:
        await asyncio.wait([future])
    except asyncio.CancelledError:
        await until_done(future)
        raise


def let_go(place: Place, offer: Offer) -> None:
    """Nothing of an offer is wanted."""
    place.let_go([offer.record] if offer.master is None else [offer.master, offer.record])


def fault_of(question: Question, offer: Offer, capacity_bytes: int) -> str:
    """What is wrong with an offer; empty if nothing is. Heads are verified, but a place may offer another's record."""
    space, meta = question.space, offer.record.head.meta
    master = None if offer.master is None else offer.master.head
    reference = meta.master
    if meta.namespace != space.namespace or meta.key.segment != question.segment:
        return f"a record of {meta.key} for segment {question.segment.hex()[:12]}"
    if meta.tokens != question.asked.tokens or meta.geometry != space.geometry:
        return f"{meta.key} with {meta.tokens} tokens of another geometry or number than asked"
    if meta.position + meta.tokens > space.end_max:
        return f"{meta.key} at position {meta.position}, behind what this identity can have"
    if len(meta.key.context) != DIGEST_BYTES:
        return f"{meta.key} with a context id of {len(meta.key.context)} bytes"
    if max(offer.record.record_bytes, 0 if master is None else master.layout.record_bytes) > capacity_bytes:
        return f"{meta.key} of {offer.record.record_bytes} bytes, more than this node's memory"
    if (reference is None) != (master is None):
        return f"{meta.key}, a mirror without its master or a master with one"
    if reference is None or master is None:
        return ""
    said = (master.meta.namespace, master.meta.key.segment, master.meta.key.context, master.generation)
    if said != (meta.namespace, meta.key.segment, reference.context, reference.generation) or master.meta.master:
        return f"{meta.key} with a master that it does not stand on"
    if (master.meta.tokens, master.meta.geometry) != (meta.tokens, meta.geometry):
        return f"{meta.key} with a master of another shape"
    if master.meta.position + master.meta.tokens > space.end_max:
        return f"{meta.key} with a master at position {master.meta.position}, behind what this identity can have"
    if space.pinned_reason and master.meta.position != meta.position:
        return f"{meta.key} at another position than its master, but {space.pinned_reason}"
    return ""
