"""Builders of the slab tests: whole records on page boundaries, put on a slab of a disk in memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from kvservice.model.cache import Extent
from kvservice.model.geometry import attention_geometry
from kvservice.storage.buffer import Bytes
from kvservice.storage.disk import BLOCK_BYTES, block_buffer
from kvservice.storage.record import read_head
from kvservice.storage.slab import Found, FoundNote, FoundRecord, Lost, Slab, Stamp
from tests.storage.conftest import RecordBuilder
from tests.storage.faulty_disk import FaultyDisk, FaultyFile

MIB = 1 << 20
GEOMETRY = attention_geometry(layers=2, heads=1, head_size=16, dtype="bfloat16")  # a token has 2 x 64 bytes


class Died(Exception):  # noqa: N818  what happens to a process is not its error
    """The process ends here."""


@dataclass(frozen=True, slots=True)
class Put:
    """A record that was put on a slab."""

    extent: Extent
    record: Bytes
    stamp: Stamp


def make_slab(slab_bytes: int = 4 * MIB, seed: int = 0) -> tuple[Slab, FaultyDisk]:
    disk = FaultyDisk(seed)
    return Slab.create(disk, slab_bytes), disk


def on_blocks(content: Bytes) -> Bytes:
    """A copy that starts on a page boundary, as in an arena."""
    buffer = block_buffer(max(1, len(content)))[: len(content)]
    np.copyto(buffer, content)
    return buffer


def noise(length: int, seed: int = 0) -> Bytes:
    return on_blocks(np.random.default_rng(seed).integers(0, 256, length, np.uint8))


def make_record(tokens: int = 5, seed: int = 0, segment: bytes | None = None) -> Bytes:
    """A master of about ``tokens`` * 128 bytes; another seed, another key and content."""
    build = RecordBuilder()
    meta = build.meta(tokens=tokens, geometry=GEOMETRY, segment=segment or seed.to_bytes(32, "little"))
    return on_blocks(build.master(meta, seed))


def tokens_of_blocks(blocks: int) -> int:
    """Tokens of a record that takes so many blocks."""
    return blocks * (BLOCK_BYTES // 128) - 8


def stamp_of(slab: Slab, record: Bytes, prefill_s: float = 0.25) -> Stamp:
    return Stamp(slab.next_sequence(), read_head(record).header_checksum, prefill_s)


def reserved(slab: Slab, record_bytes: int) -> Extent:
    extent = slab.reserve(record_bytes)
    assert extent is not None
    return extent


def put(slab: Slab, record: Bytes, extent: Extent | None = None) -> Put:
    """Write a record where there is room, or where it is told to."""
    if extent is None:
        extent = reserved(slab, len(record))
    stamp = stamp_of(slab, record)
    slab.write(extent, record, stamp)
    return Put(extent, record, stamp)


def take_away(slab: Slab, extent: Extent) -> None:
    slab.erase(extent)
    slab.free(extent)


def read(slab: Slab, extent: Extent) -> Bytes:
    target = block_buffer(extent.length)
    for start, end in slab.pieces(extent):
        slab.read_piece(extent, start, end, target[start:end])
    return target


def scan(slab: Slab, known: Sequence[Extent] = ()) -> list[Found]:
    return list(slab.scan({extent.offset: extent for extent in known}))


def found_extents(found: Sequence[Found]) -> list[Extent]:
    """Where something whole was found, in the order of the scan."""
    return [extent_of(one) for one in found if not isinstance(one, Lost)]


def extent_of(found: Found) -> Extent:
    return found.note.extent if isinstance(found, FoundNote) else found.extent


def lost_extents(found: Sequence[Found]) -> list[Extent]:
    return [one.extent for one in found if isinstance(one, Lost)]


def is_of(found: Found, expected: Put) -> bool:
    return isinstance(found, FoundRecord) and found == FoundRecord(
        expected.extent, read_head(expected.record), expected.stamp
    )


def die_after(monkeypatch: pytest.MonkeyPatch, calls: int) -> Callable[[], int]:
    """The process ends at the write behind so many; gives how many there were so far."""
    made = 0
    write_from = FaultyFile.write_from

    def counted(file: FaultyFile, offset: int, sources: Sequence[Bytes]) -> None:
        nonlocal made
        if made == calls:
            raise Died
        made += 1
        write_from(file, offset, sources)

    monkeypatch.setattr(FaultyFile, "write_from", counted)
    return lambda: made
