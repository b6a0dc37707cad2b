"""Found records, read layer by layer as dense planes: verified first, then handed out, never the other way round.

A master's layer is copied out of the arena and the copy is verified: what the engine gets are the bytes that were
checked, whatever happens to the arena meanwhile. The copy stays in the CPU's cache. A mirror is materialised, which
needs kernels and so numba: they are imported when the first mirror comes, in the worker, after the model was built.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvservice.client.arrivals import Arrivals
from kvservice.client.session import Session, location_of
from kvservice.model.cache import CacheKind
from kvservice.model.errors import CorruptError, InvalidInputError, RecordFormatError, UnavailableError
from kvservice.model.identity import Identity, Namespace
from kvservice.model.plan import Location
from kvservice.model.segment import CacheKey
from kvservice.storage.buffer import StorageBits, checksum
from kvservice.storage.record import RecordReader
from kvservice.storage.record_layout import RowSizes
from kvservice.wire.v1 import cache_pb2 as wire

RemainingTime = Callable[[], float]


@dataclass(frozen=True, slots=True)
class FoundRecord:
    """Where a found cache lies, and its master if it is a mirror."""

    key: CacheKey
    tokens: int
    record: Location
    master: Location | None

    @classmethod
    def of(cls, key: CacheKey, tokens: int, reply: wire.SegmentReply) -> "FoundRecord":
        """What a lookup's reply says of a hit."""
        master = location_of(reply.master) if reply.HasField("master") else None
        return cls(key, tokens, location_of(reply.record), master)


class ChunkReader:
    """One found chunk. Used by one thread."""

    def __init__(
        self, session: Session, identity: Identity, namespace: Namespace, arrivals: Arrivals, found: FoundRecord
    ) -> None:
        self.found = found
        self._session = session
        self._identity = identity
        self._namespace = namespace
        self._arrivals = arrivals
        self._rows = RowSizes.of(identity.geometry)
        self._record: RecordReader | None = None
        self._master: RecordReader | None = None

    def planes(self, layer: int, scratch: "Scratch", remaining_s: RemainingTime) -> list[StorageBits]:
        """Per plane ``[tokens, row_elements]``, verified; valid until the next call with the same scratch.

        Raises CorruptError for bytes that are not what was published, UnavailableError when they do not arrive in time,
        and what the session raises.
        """
        self._arrive(layer, remaining_s)
        if self._record is None:
            self._open()
        record, master = self._record, self._master
        assert record is not None
        if master is None:
            return self._verified_copy(record, layer, scratch)
        return _materialise(self._identity, record, master, layer)

    def _arrive(self, layer: int, remaining_s: RemainingTime) -> None:
        for place in (self.found.record, self.found.master):
            if place is not None and place.is_arriving:
                left_s = remaining_s()
                if left_s <= 0:
                    raise UnavailableError(
                        f"layer {layer} of a record on {place.tier.name} did not arrive in time; it is computed"
                    )
                self._arrivals.wait_for(place, layer + 1, left_s)

    def _open(self) -> None:
        self._record = self._reader(self.found.record)
        if self.found.master is not None:
            self._master = self._reader(self.found.master)
        meta = self._record.meta
        said = (meta.namespace, meta.key, meta.tokens, meta.geometry, self._record.generation)
        wanted = (
            self._namespace,
            self.found.key,
            self.found.tokens,
            self._identity.geometry,
            self.found.record.generation,
        )
        if said != wanted or (meta.kind is CacheKind.MIRROR) != (self._master is not None):
            raise CorruptError(f"cache {self.found.key}: the leased bytes are the {self._record}")
        self._check_master(self._record, self._master)

    def _check_master(self, record: RecordReader, master: RecordReader | None) -> None:
        if master is None:
            return
        reference = record.meta.master
        assert reference is not None
        said = (master.meta.key.context, master.generation, master.meta.tokens, master.meta.kind)
        if said != (reference.context, reference.generation, record.meta.tokens, CacheKind.MASTER):
            raise CorruptError(f"cache {self.found.key}: its leased master is the {master}")

    def _reader(self, place: Location) -> RecordReader:
        try:
            return RecordReader(self._session.read_view(place))
        except RecordFormatError as error:
            raise CorruptError(f"cache {self.found.key}: what was leased is not its record: {error}") from error

    def _verified_copy(self, record: RecordReader, layer: int, scratch: "Scratch") -> list[StorageBits]:
        section = record.section(layer)
        copy = scratch.bytes(len(section))
        np.copyto(copy, section)
        found, said = checksum(copy), record.section_checksums[layer]
        if found != said:
            raise CorruptError(f"{record}, layer {layer}: checksum {found:016x}, the header says {said:016x}")
        return self._rows.split(copy, [record.meta.tokens] * len(self._identity.geometry.planes))


class Scratch:
    """A thread's room for one layer of one chunk."""

    def __init__(self) -> None:
        self._bytes = np.empty(0, np.uint8)

    def bytes(self, length: int) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
        """Room for ``length`` bytes; what it held before is gone."""
        if len(self._bytes) < length:
            self._bytes = np.empty(length, np.uint8)
        return self._bytes[:length]


def _materialise(identity: Identity, record: RecordReader, master: RecordReader, layer: int) -> list[StorageBits]:
    from kvservice.kernels.cpu import materialise_layer
    from kvservice.kernels.shapes import KernelInputError, MirrorRows, Rotation

    master.verify_layer(layer)
    record.verify_layer(layer)
    rope = identity.rope[layer]
    runs, rows = record.mirror(layer)
    try:
        return materialise_layer(
            master.master_planes(layer),
            master.meta.position,
            MirrorRows(record.meta.position, runs, rows),
            identity.geometry.planes,
            Rotation(rope.frequencies, rope.is_interleaved),
            identity.geometry.dtype,
        )
    except KernelInputError as error:
        raise InvalidInputError(f"{record}, layer {layer}: it cannot be restored from the {master}: {error}") from error
