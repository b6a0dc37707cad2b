"""Restoring: what was found for a round's prompts, written to the engine's paged KV, layer by layer.

Targets are grouped by master: a layer of a master is read once and written to every prompt that uses it. No dense
mirror is ever built. Everything is checked before the first write.
"""

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from torch import Tensor

from kvservice.client.arrivals import Arrivals
from kvservice.client.paged import PagedMemory, PagedSegment, Slots, check_moves, check_target_slots, prompt_slots
from kvservice.client.plans import Plans, PromptPlan, RestoredSpan, span_of
from kvservice.client.rounds import PromptSegment
from kvservice.client.session import Session
from kvservice.kernels.cpu_tables import slot_bounds
from kvservice.kernels.shapes import Target
from kvservice.model.cache import CacheKind
from kvservice.model.errors import (
    CorruptError,
    InvalidInputError,
    RecordFormatError,
    TokenCountError,
    UnavailableError,
)
from kvservice.model.lease import LeaseId
from kvservice.model.plan import Location, PlannedSegment
from kvservice.model.segment import CacheKey
from kvservice.storage.record import RecordReader

_Wanted = tuple[PromptSegment, PlannedSegment, Slots]

WAIT_TIMEOUT_S = 60.0
VERIFIED_BYTES_MAX = 1 << 20
"""Of a batch whose checksums are verified: its rows are still in the cache, of 1 MiB or more, when they are moved."""

Progress = Callable[[int, int], None]
"""(layers or records done, how many there are). Called on the thread that does the work, after every batch of them."""


@dataclass(frozen=True, slots=True)
class MasterWork:
    """A master, where it goes, and for every target the mirror that corrects it; over all prompts of a round."""

    master: RecordReader
    targets: list[Target] = field(default_factory=list)
    mirrors: list[RecordReader | None] = field(default_factory=list)

    def add(self, position: int, slots: Slots, mirror: RecordReader | None) -> None:
        """Write it to these slots too."""
        self.targets.append(Target(position, slots))
        self.mirrors.append(mirror)

    @property
    def moves(self) -> set[int]:
        """By how many positions rows of the master and of its mirrors are moved."""
        pairs = zip(self.targets, self.mirrors, strict=True)
        of_mirrors = {target.position - mirror.meta.position for target, mirror in pairs if mirror is not None}
        return of_mirrors | {target.position - self.master.meta.position for target in self.targets}

    def verify_layer(self, layer: int) -> None:
        """Raise CorruptError, naming the cache, unless the layer's bytes have their checksums."""
        self.master.verify_layer(layer)
        for mirror in self.mirrors:
            if mirror is not None:
                mirror.verify_layer(layer)


class RecordBook:
    """Opens the records that plans name, each once, and checks that they are what the plan says.

    ``known``: whom to ask of what a lease has on its way, where somebody has been asked already.
    ``arriving``: those that were on SSD when they were found, each with whom to ask for more of it.
    """

    def __init__(self, session: Session, *known: tuple[LeaseId, Arrivals]) -> None:
        self._session = session
        self._readers: dict[Location, RecordReader] = {}
        self._arrivals = dict(known)
        self.arriving: list[tuple[Arrivals, Location]] = []

    def open_record(self, plan: PromptPlan, planned: PlannedSegment) -> RecordReader:
        """The found cache's record."""
        assert planned.record is not None, planned
        assert planned.key is not None, planned
        return self._open(plan, planned.key, planned.record)

    def open_master(self, plan: PromptPlan, planned: PlannedSegment) -> RecordReader:
        """The dense record that the found cache stands on: itself, or its master."""
        if planned.master is None:
            return self.open_record(plan, planned)
        assert planned.key is not None, planned
        assert planned.reference is not None, planned
        key = CacheKey(planned.key.segment, planned.reference.context)
        return self._open(plan, key, planned.master)

    def _open(self, plan: PromptPlan, key: CacheKey, place: Location) -> RecordReader:
        if place not in self._readers:
            self._wait_for_head(plan, place)
            try:
                self._readers[place] = RecordReader(self._session.read_view(place))
            except (CorruptError, RecordFormatError) as error:
                raise CorruptError(f"cache {key}: what the node leased is not its record: {error}") from error
        reader, namespace = self._readers[place], plan.prompt.namespace
        geometry = self._session.identity_of(namespace).geometry
        said = (reader.meta.namespace, reader.meta.key, reader.generation, reader.meta.geometry)
        if said != (namespace, key, place.generation, geometry):
            raise CorruptError(f"cache {key}: the leased bytes are the {reader}, generation {reader.generation:016x}")
        return reader

    def _wait_for_head(self, plan: PromptPlan, place: Location) -> None:
        if not place.is_arriving:
            return
        lease = plan.plan.lease
        arrivals = self._arrivals.setdefault(lease.id, Arrivals(self._session, lease))
        arrivals.wait_for(place, 1)
        self.arriving.append((arrivals, place))


@dataclass(frozen=True, slots=True)
class RestoreWork:
    """All that one restore writes: masters with where they go, and the spans that are restored, per prompt."""

    memory: PagedMemory
    masters: tuple[tuple[MasterWork, PagedSegment], ...]
    spans: tuple[tuple[RestoredSpan, ...], ...]
    arriving: tuple[tuple[Arrivals, Location], ...] = ()

    @property
    def layer_bytes(self) -> int:
        """Bytes that one layer writes, over all targets."""
        return sum(len(work.targets) * work.master.layout.section_bytes[0] for work, _ in self.masters)

    def open_layers(self, first: int, layers: int) -> int:
        """Wait until layer ``first`` of every record has arrived; returns the end of those that have, all noted.

        Raises what kept a record from arriving: CorruptError, DiskError, UnavailableError.
        """
        end = min((arrivals.wait_for(place, first + 1) for arrivals, place in self.arriving), default=layers)
        for _, segment in self.masters:
            segment.open_layers(first, end)
        return end

    def restore_layers(self, first: int, end: int, *, verify: bool) -> int:
        """Write layers ``[first, end)`` of everything; returns how many layers are in place."""
        for work, segment in self.masters:
            if verify:
                for layer in range(first, end):
                    work.verify_layer(layer)
            segment.restore_layers(first, end)
        return self.memory.finish_layer(end - 1)


def layer_batches(work: RestoreWork, layers: int, *, verify: bool) -> Iterator[tuple[int, int]]:
    """(first, end) of the layers to write in one go: layer 0 alone, then up to four times as many as are done already.

    So the engine may start after one layer, and waits for none more than five times as long as it would take on its
    own; 28 layers are four calls. Layers are opened before they are asked for.
    """
    bytes_max = min(work.memory.batch_bytes_max, VERIFIED_BYTES_MAX if verify else sys.maxsize)
    layers_max = bytes_max // max(1, work.layer_bytes)
    first = opened = 0
    while first < layers:
        if first == opened:
            opened = work.open_layers(first, layers)
        end = min(opened, first + max(1, min(4 * first, layers_max)))
        yield first, end
        first = end


def plan_restore(session: Session, plans: Plans, slots: Sequence[Tensor | Slots], memory: PagedMemory) -> RestoreWork:
    """Check everything and group all targets by master. Nothing is written here. Raises as ``Client.restore``.

    Waits for the first layer of records that are on their way from SSD: what a record says of itself comes with it.
    """
    if len(slots) != len(plans):
        raise TokenCountError(f"slots for {len(slots)} prompts, {len(plans)} were looked up; give one array each")
    plans.check()
    plans.ask_ahead()  # what can be checked without the records is checked while the first of them arrive
    arrivals = plans.take_arrivals()
    try:
        prompts = [prompt_slots(one, plan.prompt.token_count) for plan, one in zip(plans, slots, strict=True)]
        wanted = [_wanted_rows(plan, one) for plan, one in zip(plans, prompts, strict=True)]
        check_target_slots([rows for one in wanted for _, _, rows in one], memory.slot_count)
        return _plan_wanted(RecordBook(session, (plans.lease.id, arrivals)), plans, wanted, memory)
    finally:
        arrivals.give_up()  # nobody may have waited for it


def _plan_wanted(
    book: RecordBook, plans: Plans, wanted: Sequence[Sequence[_Wanted]], memory: PagedMemory
) -> RestoreWork:
    grouped = dict[int, MasterWork]()
    spans = [_add_targets(book, grouped, plan, one) for plan, one in zip(plans, wanted, strict=True)]
    works = list(grouped.values())
    check_moves(memory.rotations, {by for work in works for by in work.moves})
    masters = [(one, memory.prepare(one.master, one.targets, one.mirrors)) for one in works]
    return RestoreWork(memory, tuple(masters), tuple(spans), tuple(book.arriving))


def _wanted_rows(plan: PromptPlan, slots: Slots) -> list[_Wanted]:
    """What was found, with its slots; without what is all the engine's own already."""
    found = [(segment, planned, slots[segment.position : segment.end]) for segment, planned in plan.hits]
    if slot_bounds(slots)[0] >= 0:
        return found
    return [one for one in found if slot_bounds(one[2])[1] >= 0 or (one[2] != -1).any()]


def _add_targets(
    book: RecordBook, grouped: dict[int, MasterWork], plan: PromptPlan, wanted: Sequence[_Wanted]
) -> tuple[RestoredSpan, ...]:
    spans = []
    for segment, planned, rows in wanted:
        master, record = book.open_master(plan, planned), book.open_record(plan, planned)
        if record.meta.tokens != len(segment.tokens) or master.meta.tokens != len(segment.tokens):
            raise TokenCountError(f"{record} has {record.meta.tokens} tokens, the segment {len(segment.tokens)}")
        mirror = record if record.meta.kind is CacheKind.MIRROR else None
        grouped.setdefault(id(master), MasterWork(master)).add(segment.position, rows, mirror)
        spans.append(span_of(segment, planned))
    return tuple(spans)


class Restore:
    """A restore under way. ``spans``: what is restored, per prompt. Any thread may wait.

    Keep the plans open until ``wait`` has returned: a layer read after the lease was lost is never reported done.
    """

    def __init__(self, work: RestoreWork, layers: int) -> None:
        self.spans = work.spans
        self.layers = layers
        self._lock = threading.Lock()
        # A lock a waiter: one that woke for every layer would take the GIL from the worker each time (x1.4), and an
        # event a layer costs 0.1 ms for layers that nobody waits for.
        self._waiting: list[tuple[int, threading.Lock]] = []
        self._done_layers = 0
        self._error: BaseException | None = None
        self._batches: Iterator[tuple[int, int]] | None = None

    @property
    def is_done(self) -> bool:
        """True once nothing more will be written: all is restored, or it failed."""
        return self.is_layer_over(self.layers - 1)

    def is_layer_over(self, layer: int) -> bool:
        """True once ``wait_for_layer`` would not wait: the layer is in place, or the restore has failed."""
        return layer < self._done_layers or self._error is not None

    def wait_for_layer(self, layer: int, timeout_s: float = WAIT_TIMEOUT_S) -> None:
        """Return once ``layer`` is in place, in every slot. Raises what the restore failed with.

        Raises UnavailableError when the layer is not there in time; the restore then still goes on.
        """
        if not 0 <= layer < self.layers:
            raise InvalidInputError(f"layer {layer} of a restore of {self.layers} layers")
        if layer < self._done_layers:
            return
        if not self._wait_until_over(layer, timeout_s):
            raise UnavailableError(f"layer {layer} was not restored within {timeout_s:g} s")
        if layer >= self._done_layers:
            assert self._error is not None
            raise self._error

    def wait(self, timeout_s: float = WAIT_TIMEOUT_S) -> None:
        """Return once every layer is in place. Raises as ``wait_for_layer``."""
        self.wait_for_layer(self.layers - 1, timeout_s)

    def start(self, work: RestoreWork, plans: Plans, *, verify: bool) -> None:
        """Write the first batch of layers; ``run`` goes on behind it. Never raises: waiting does."""
        self._batches = layer_batches(work, self.layers, verify=verify)
        self._write(islice(self._batches, 1), work, plans, verify=verify, on_progress=None)

    def run(self, work: RestoreWork, plans: Plans, *, verify: bool, on_progress: Progress | None) -> None:
        """Write every layer that is not in place yet; the worker thread's body. Never raises: waiting does."""
        batches = self._batches or layer_batches(work, self.layers, verify=verify)
        if self._error is None:
            self._write(batches, work, plans, verify=verify, on_progress=on_progress)

    def _write(
        self,
        batches: Iterator[tuple[int, int]],
        work: RestoreWork,
        plans: Plans,
        *,
        verify: bool,
        on_progress: Progress | None,
    ) -> None:
        try:
            for first, end in batches:
                done_layers = work.restore_layers(first, end, verify=verify)
                plans.check()  # what was read after the lease was lost must not count
                self._report(done_layers)
                if on_progress is not None:
                    on_progress(done_layers, self.layers)
        except BaseException as error:  # noqa: BLE001  a thread's top: whoever waits gets it
            _settle(work.memory, error)
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """End it: whoever waits gets ``error``. Nothing may be written from here on."""
        with self._lock:
            self._error = error
            self._wake()

    def _report(self, done_layers: int) -> None:
        with self._lock:
            self._done_layers = done_layers
            self._wake()

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for layer, woken in waiting:
            if self.is_layer_over(layer):
                woken.release()
            else:
                self._waiting.append((layer, woken))

    def _wait_until_over(self, layer: int, timeout_s: float) -> bool:
        """False if it took longer."""
        with self._lock:
            if self.is_layer_over(layer):
                return True
            woken = threading.Lock()
            woken.acquire()
            own = (layer, woken)
            self._waiting.append(own)
        if woken.acquire(timeout=max(timeout_s, 0.0)):
            return True
        with self._lock:
            self._waiting = [one for one in self._waiting if one is not own]
            return self.is_layer_over(layer)


def _settle(memory: PagedMemory, failure: BaseException) -> None:
    """Wait for what a failed restore left queued. What goes wrong here becomes a note of the failure."""
    try:
        memory.settle()
    except BaseException as error:  # noqa: BLE001  part of the thread's top: the waiters must be told in any case
        failure.add_note(f"waiting for queued copies failed too, slots of the restore may be written still: {error}")
