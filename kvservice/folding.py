"""The arithmetic of families, for worker threads: deviations, diffs, and mirror records that were proven to restore.

It reads held extents and writes one unpublished extent; it knows no catalog. Only here are kernels imported, lazily:
a node that never folds compiles nothing.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvservice.model.cache import CacheMeta, MasterReference
from kvservice.model.errors import CorruptError, KVServiceError, RecordFormatError
from kvservice.model.identity import Identity
from kvservice.storage.buffer import Bytes, Runs, StorageBits
from kvservice.storage.record import RecordReader, RecordWriter, count_rows, mirror_layout

if TYPE_CHECKING:
    from kvservice.kernels.shapes import Rotation

Deviations = npt.NDArray[np.float64]
"""[candidates, candidates]: squared L2 distances over the check layers."""


@dataclass(frozen=True, slots=True)
class Source:
    """A held record to read; ``master`` is set for a mirror."""

    record: Bytes
    master: Bytes | None = None


@dataclass(frozen=True, slots=True)
class Diff:
    """What a member differs in from a master, ``runs[layer][plane]``, and how large a mirror record that makes."""

    meta: CacheMeta
    runs: list[list[Runs]]
    record_bytes: int


class FoldRefusedError(KVServiceError):
    """The kernels cannot do this arithmetic with these caches; they stay as they are. Never leaves the node."""


@contextmanager
def _refusing() -> Iterator[None]:
    """Raise FoldRefusedError for what kernels refuse."""
    from kvservice.kernels.shapes import KernelInputError

    try:
        yield
    except KernelInputError as error:
        raise FoldRefusedError(str(error)) from error


def check_layers(layers: int) -> list[int]:
    """The layers that deviation is taken over: first, middle, last. All of them would cost layers/3 times as much."""
    return sorted({0, layers // 2, layers - 1})


def find_corrupt(sources: Sequence[Source]) -> list[int]:
    """Which sources are no longer the bytes that were committed. Folding those would make new checksums for them."""
    return [index for index, source in enumerate(sources) if not _is_intact(source)]


def _is_intact(source: Source) -> bool:
    try:
        for view in (source.record, source.master):
            if view is not None:
                RecordReader(view).verify()
    except (CorruptError, RecordFormatError):
        return False
    return True


@_refusing()
def deviations(identity: Identity, sources: Sequence[Source]) -> Deviations:
    """Deviation of each source from each, in a common position frame, over the check layers."""
    from kvservice.kernels.cpu import deviation_layer

    caches = [_DenseReader(identity, source) for source in sources]
    positions = [cache.meta.position for cache in caches]
    shapes = identity.geometry.planes
    total = np.zeros((len(caches), len(caches)))
    for layer in check_layers(identity.geometry.layers):
        planes = [cache.planes(layer) for cache in caches]
        total += deviation_layer(planes, positions, shapes, _rotation(identity, layer), identity.geometry.dtype)
    return total


@_refusing()
def diff(identity: Identity, member: Source, master: Source, bytes_max: int) -> Diff | None:
    """The member as a diff from a dense ``master``; None if its record would be larger than ``bytes_max``."""
    from kvservice.kernels.cpu import diff_layer

    ours, theirs = _DenseReader(identity, member), _DenseReader(identity, master)
    assert theirs.master is None, "a master is never a mirror"
    reference = MasterReference(theirs.meta.key.context, theirs.record.generation)
    meta = replace(ours.meta, master=reference)
    shapes, runs = identity.geometry.planes, list[list[Runs]]()
    rows_bytes = 0
    for layer in range(identity.geometry.layers):
        found = diff_layer(
            theirs.planes(layer),
            theirs.meta.position,
            ours.planes(layer),
            ours.meta.position,
            shapes,
            _rotation(identity, layer),
            identity.geometry.dtype,
        )
        for plane, plane_runs in zip(shapes, found, strict=True):
            rows_bytes += count_rows(plane_runs, meta.tokens) * identity.geometry.row_bytes(plane)
        if rows_bytes > bytes_max:
            return None
        runs.append(found)
    record_bytes = mirror_layout(meta, runs).record_bytes
    return Diff(meta, runs, record_bytes) if record_bytes <= bytes_max else None


@_refusing()
def write_mirror(identity: Identity, member: Source, master: Source, difference: Diff, target: Bytes) -> int | None:
    """Write the mirror record and read it back; its generation, or None if it does not restore to the member's bits."""
    ours = _DenseReader(identity, member)
    writer = RecordWriter(target, difference.meta, mirror_layout(difference.meta, difference.runs))
    for layer, runs in enumerate(difference.runs):
        for plane, run, rows in zip(ours.planes(layer), runs, writer.mirror_rows(layer, runs), strict=True):
            np.take(plane, _rows_of(run), axis=0, out=rows, mode="clip")
    generation = writer.finish().generation
    return generation if _restores(identity, ours, Source(target, master.record)) else None


def _restores(identity: Identity, ours: "_DenseReader", written: Source) -> bool:
    if not _is_intact(written):
        return False
    restored = _DenseReader(identity, written)
    return all(
        np.array_equal(stored, back)
        for layer in range(identity.geometry.layers)
        for stored, back in zip(ours.planes(layer), restored.planes(layer), strict=True)
    )


def _rows_of(runs: Runs) -> npt.NDArray[np.int64]:
    if not len(runs):
        return np.empty(0, np.int64)
    return np.concatenate([np.arange(first, first + count, dtype=np.int64) for first, count in runs.tolist()])


def _rotation(identity: Identity, layer: int) -> "Rotation":
    from kvservice.kernels.shapes import Rotation

    rope = identity.rope[layer]
    return Rotation(rope.frequencies, rope.is_interleaved)


class _DenseReader:
    """A record read as dense planes at its own position, whichever kind it is."""

    def __init__(self, identity: Identity, source: Source) -> None:
        self.identity = identity
        self.record = RecordReader(source.record)
        self.master = None if source.master is None else RecordReader(source.master)
        self.meta = self.record.meta

    def planes(self, layer: int) -> list[StorageBits]:
        """Per plane ``[tokens, row_elements]``: views of a master, fresh arrays of a mirror."""
        if self.master is None:
            return self.record.master_planes(layer)
        from kvservice.kernels.cpu import materialise_layer
        from kvservice.kernels.shapes import MirrorRows

        runs, rows = self.record.mirror(layer)
        return materialise_layer(
            self.master.master_planes(layer),
            self.master.meta.position,
            MirrorRows(self.meta.position, runs, rows),
            self.identity.geometry.planes,
            _rotation(self.identity, layer),
            self.identity.geometry.dtype,
        )
