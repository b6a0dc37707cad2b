"""Restoring: what was found for a round's prompts, written to the engine's paged KV, layer by layer.

Targets are grouped by master: a layer of a master is read once and written to every prompt that uses it. No dense
mirror is ever built. Everything is checked before the first write.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from kvservice.client.paged import PagedMemory, PagedSegment, Slots, check_moves, check_target_slots, prompt_slots
from kvservice.client.plans import Plans, PromptPlan, RestoredSpan, span_of
from kvservice.client.session import Session
from kvservice.kernels.shapes import MirrorRows, Target
from kvservice.model.cache import CacheKind
from kvservice.model.errors import (
    CorruptError,
    InvalidInputError,
    RecordFormatError,
    TokenCountError,
    UnavailableError,
)
from kvservice.model.plan import Location, PlannedSegment
from kvservice.model.segment import CacheKey
from kvservice.storage.record import RecordReader

WAIT_TIMEOUT_S = 60.0

Progress = Callable[[int, int], None]
"""(layers or records done, how many there are). Called on the thread that does the work."""


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

    def restore_layer(self, layer: int, segment: PagedSegment) -> None:
        """Read the master's layer once and write every target."""
        segment.restore_layer(
            layer, self.master.master_planes(layer), [_mirror_rows(mirror, layer) for mirror in self.mirrors]
        )


def _mirror_rows(mirror: RecordReader | None, layer: int) -> MirrorRows | None:
    return None if mirror is None else MirrorRows(mirror.meta.position, *mirror.mirror(layer))


class RecordBook:
    """Opens the records that plans name, each once, and checks that they are what the plan says."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._readers: dict[Location, RecordReader] = {}

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


@dataclass(frozen=True, slots=True)
class RestoreWork:
    """All that one restore writes: masters with where they go, and the spans that are restored, per prompt."""

    memory: PagedMemory
    masters: tuple[tuple[MasterWork, PagedSegment], ...]
    spans: tuple[tuple[RestoredSpan, ...], ...]

    def restore_layer(self, layer: int, *, verify: bool) -> int:
        """Write one layer of everything; returns how many layers are in place."""
        for work, segment in self.masters:
            if verify:
                work.verify_layer(layer)
            work.restore_layer(layer, segment)
        return self.memory.finish_layer(layer)


def plan_restore(session: Session, plans: Plans, slots: Sequence[Tensor | Slots], memory: PagedMemory) -> RestoreWork:
    """Check everything and group all targets by master. Nothing is written here. Raises as ``Client.restore``."""
    if len(slots) != len(plans):
        raise TokenCountError(f"slots for {len(slots)} prompts, {len(plans)} were looked up; give one array each")
    plans.check()
    prompts = [prompt_slots(one, plan.prompt.token_count) for plan, one in zip(plans, slots, strict=True)]
    book, grouped = RecordBook(session), dict[int, MasterWork]()
    spans = [_add_targets(book, grouped, plan, one) for plan, one in zip(plans, prompts, strict=True)]
    works = list(grouped.values())
    check_target_slots([target.slots for work in works for target in work.targets], memory.slot_count)
    check_moves(memory.rotations, {by for work in works for by in work.moves})
    masters = [(one, memory.prepare(one.master.meta.tokens, one.master.meta.position, one.targets)) for one in works]
    return RestoreWork(memory, tuple(masters), tuple(spans))


def _add_targets(
    book: RecordBook, grouped: dict[int, MasterWork], plan: PromptPlan, slots: Slots
) -> tuple[RestoredSpan, ...]:
    spans = []
    for segment, planned in plan.hits:
        rows = slots[segment.position : segment.end]
        if (rows == -1).all():
            continue  # all of it is the engine's own already
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
        # One event a layer: a waiter that woke for every layer would take the GIL from the worker each time (x1.4).
        self._in_place = [threading.Event() for _ in range(layers)]
        self._done_layers = 0
        self._error: BaseException | None = None

    @property
    def layers(self) -> int:
        """How many layers there are to wait for."""
        return len(self._in_place)

    @property
    def is_done(self) -> bool:
        """True once nothing more will be written: all is restored, or it failed."""
        return self._in_place[-1].is_set()

    def wait_for_layer(self, layer: int, timeout_s: float = WAIT_TIMEOUT_S) -> None:
        """Return once ``layer`` is in place, in every slot. Raises what the restore failed with.

        Raises UnavailableError when the layer is not there in time; the restore then still goes on.
        """
        if not 0 <= layer < self.layers:
            raise InvalidInputError(f"layer {layer} of a restore of {self.layers} layers")
        if not self._in_place[layer].wait(timeout_s):
            raise UnavailableError(f"layer {layer} was not restored within {timeout_s:g} s")
        if layer >= self._done_layers:
            assert self._error is not None
            raise self._error

    def wait(self, timeout_s: float = WAIT_TIMEOUT_S) -> None:
        """Return once every layer is in place. Raises as ``wait_for_layer``."""
        self.wait_for_layer(self.layers - 1, timeout_s)

    def run(self, work: RestoreWork, plans: Plans, *, verify: bool, on_progress: Progress | None) -> None:
        """Write every layer; the worker thread's body. Never raises: waiting does."""
        try:
            for layer in range(self.layers):
                done_layers = work.restore_layer(layer, verify=verify)
                plans.check()  # what was read after the lease was lost must not count
                self._report(done_layers)
                if on_progress is not None:
                    on_progress(done_layers, self.layers)
        except BaseException as error:  # noqa: BLE001  a thread's top: whoever waits gets it
            _settle(work.memory, error)
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """End it: whoever waits gets ``error``. Nothing may be written from here on."""
        self._error = error
        for event in self._in_place[self._done_layers :]:
            event.set()

    def _report(self, done_layers: int) -> None:
        before, self._done_layers = self._done_layers, done_layers
        for event in self._in_place[before:done_layers]:
            event.set()


def _settle(memory: PagedMemory, failure: BaseException) -> None:
    """Wait for what a failed restore left queued. What goes wrong here becomes a note of the failure."""
    try:
        memory.settle()
    except BaseException as error:  # noqa: BLE001  part of the thread's top: the waiters must be told in any case
        failure.add_note(f"waiting for queued copies failed too, slots of the restore may be written still: {error}")
