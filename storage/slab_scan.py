"""The scan of a slab: which records and notes on it are whole. Reads only, believes nothing that it did not check."""

from collections.abc import Callable, Iterator, Mapping
from uuid import UUID

import numpy as np

from kvservice.model.cache import Extent
from kvservice.model.errors import CorruptError, DiskError, RecordFormatError
from kvservice.storage.buffer import Bytes, round_up
from kvservice.storage.disk import BLOCK_BYTES, File, block_buffer
from kvservice.storage.record import HEADER_BYTES_MAX, PREFIX_BYTES, read_head
from kvservice.storage.record_header import MAGIC, PREFIX
from kvservice.storage.slab_format import (
    FOOTER_BYTES,
    NOTE_MAGIC,
    Found,
    FoundNote,
    FoundRecord,
    Lost,
    note_length,
    read_footer,
    read_note,
    taken_bytes,
)

WINDOW_BYTES_MIN, WINDOW_BYTES_MAX = 4 * BLOCK_BYTES, 1 << 20
"""Read ahead: little behind a large record, where the next one is likely to start, else more and more."""
SPARSE_BYTES = 96 << 10
"""Places of fewer bytes each are read whole, a window at a time: that is sooner than two blocks of each."""
HEAD_BYTES_MAX = round_up(PREFIX_BYTES + HEADER_BYTES_MAX, BLOCK_BYTES)

_RECORD, _NOTE = np.frombuffer(MAGIC + NOTE_MAGIC, np.uint64)
_NOT_WHOLE = (CorruptError, RecordFormatError, DiskError)


class SlabScan(Iterator[Found]):
    """Yields first, for every known extent in ascending order, what was found there; then what else is whole.

    A known extent gives FoundRecord or FoundNote of exactly that extent, or Lost. All other places are searched block
    by block for records and notes that nobody named; those lie between the known ones that are whole. What is yielded
    as found never overlaps: of two known extents that do, the one written last is kept. Used by one thread, once.
    """

    def __init__(
        self, file: File, slab_uuid: UUID, known: Mapping[int, Extent], see_sequence: Callable[[int], None]
    ) -> None:
        """``see_sequence`` is called with the sequence number of all that is whole, yielded or not."""
        self._blocks = BlockReader(file)
        self._slab_uuid, self._see_sequence = slab_uuid, see_sequence
        self._file, self._end = file, file.size_bytes
        self._found = self._walk(sorted(known.values(), key=lambda extent: extent.offset))

    def __next__(self) -> Found:
        return next(self._found)

    @property
    def read_bytes(self) -> int:
        """Bytes read from the file so far."""
        return self._blocks.read_bytes

    @property
    def unreadable_blocks(self) -> int:
        """Blocks outside of what is known that the disk could not read, so far. Whatever began there is not found."""
        return self._blocks.unreadable_blocks

    def _walk(self, known: list[Extent]) -> Iterator[Found]:
        whole = []
        for found in self._check_known(known):
            yield found
            if not isinstance(found, Lost):
                whole.append(_place(found))
        position = BLOCK_BYTES
        for start, end in [*whole, (self._end, self._end)]:
            yield from self._search(position, start)
            position = end

    def _check_known(self, known: list[Extent]) -> Iterator[Found]:
        last: FoundRecord | FoundNote | None = None
        for extent in self._held(known):
            found = self._check(extent)
            if isinstance(found, Lost):
                yield found
                continue
            if last is not None and _place(found)[0] < _place(last)[1]:
                older, last = sorted((last, found), key=_sequence)
                yield Lost(_extent(older), f"overlaps {_extent(last)}, which was written later")
                continue
            if last is not None:
                yield last
            last = found
        if last is not None:
            yield last

    def _held(self, known: list[Extent]) -> Iterator[Extent]:
        """The same extents; where they lie close together, read ahead."""
        first = 0
        while first < len(known):
            start, stop, end = known[first].offset, 0, first
            while end < len(known) and self._can_be(known[end]):
                next_stop = max(stop, known[end].offset + taken_bytes(known[end].length))
                if next_stop - start > min(WINDOW_BYTES_MAX, (end - first + 1) * SPARSE_BYTES):
                    break
                stop, end = next_stop, end + 1
            if end - first > 1:
                self._blocks.hold(start, stop)
            end = max(end, first + 1)
            yield from known[first:end]
            first = end

    def _check(self, extent: Extent) -> Found:
        if not self._can_be(extent):
            return Lost(extent, f"no place on a slab of {self._end} bytes")
        try:
            found = self._look(extent.offset, extent.offset + taken_bytes(extent.length))
        except _NOT_WHOLE as error:
            return Lost(extent, str(error))
        if _extent(found) != extent:
            return Lost(extent, f"something else lies there, of {_extent(found).length} bytes")
        return found

    def _can_be(self, extent: Extent) -> bool:
        at, length = extent.offset, extent.length
        return length > 0 and at >= BLOCK_BYTES and at % BLOCK_BYTES == 0 and at + taken_bytes(length) <= self._end

    def _search(self, start: int, end: int) -> Iterator[Found]:
        """All that is whole in [start, end)."""
        length = WINDOW_BYTES_MIN
        while (start := self._skip_hole(start, end)) < end:
            stop = min(start + length, end)
            behind, largest = start, 0
            for at in self._blocks.read_ahead(start, stop):
                if at < behind:
                    continue  # inside a record that is whole: payload, whatever it looks like
                try:
                    found = self._look(at, end)
                except _NOT_WHOLE:
                    continue
                yield found
                behind = _place(found)[1]
                largest = max(largest, behind - at)
            length = WINDOW_BYTES_MIN if largest > SPARSE_BYTES else min(2 * length, WINDOW_BYTES_MAX)
            start = max(stop, behind)

    def _skip_hole(self, start: int, end: int) -> int:
        if start >= end:
            return end
        data = self._file.next_data(start)
        return end if data is None else min(end, max(start, data // BLOCK_BYTES * BLOCK_BYTES))

    def _look(self, at: int, limit: int) -> FoundRecord | FoundNote:
        """What starts at ``at`` and ends at ``limit`` or before. Raises one of _NOT_WHOLE if nothing does."""
        first = self._blocks.read(at, at + BLOCK_BYTES)
        is_note = first[: len(NOTE_MAGIC)].tobytes() == NOTE_MAGIC
        found = self._look_for_note(at, limit, first) if is_note else self._look_for_record(at, limit, first)
        self._see_sequence(_sequence(found))
        return found

    def _look_for_record(self, at: int, limit: int, first: Bytes) -> FoundRecord:
        header_bytes = PREFIX.unpack(first[:PREFIX_BYTES].tobytes())[3]
        head_bytes = min(PREFIX_BYTES + header_bytes, HEAD_BYTES_MAX, limit - at)
        is_longer = head_bytes > BLOCK_BYTES
        head = read_head(self._blocks.read(at, at + round_up(head_bytes, BLOCK_BYTES)) if is_longer else first)
        extent = Extent(at, head.layout.record_bytes)
        end = _end_within(extent, limit)
        footer = self._blocks.read(end - BLOCK_BYTES, end)[-FOOTER_BYTES:].tobytes()
        return FoundRecord(extent, head, read_footer(footer, self._slab_uuid, head))

    def _look_for_note(self, at: int, limit: int, first: Bytes) -> FoundNote:
        extent = Extent(at, note_length(first, self._slab_uuid))
        end = _end_within(extent, limit)
        return FoundNote(read_note(at, self._blocks.read(at, end)[: extent.length].tobytes()))


class BlockReader:
    """Blocks of a file, by offset. ``read_ahead`` and ``hold`` keep a window of them, ``read`` gives from it
    what lies inside."""

    def __init__(self, file: File) -> None:
        self.read_bytes = 0
        self.unreadable_blocks = 0
        self._file = file
        self._window, self._scratch = block_buffer(WINDOW_BYTES_MAX), block_buffer(HEAD_BYTES_MAX)
        self._start = self._stop = 0

    def hold(self, start: int, stop: int) -> None:
        """Hold these blocks, or none if not all of them can be read."""
        self._start = self._stop = start
        try:
            self._read(start, self._window[: stop - start])
        except DiskError:
            return
        self._stop = stop

    def read_ahead(self, start: int, stop: int) -> list[int]:
        """Hold these blocks; returns where in them a record or a note may start. What is unreadable counts as zeros."""
        self._start = self._stop = start
        window = self._window[: stop - start]
        try:
            self._read(start, window)
        except DiskError:
            self._read_one_by_one(start, window)
        self._stop = stop
        words = window.view(np.uint64)[:: BLOCK_BYTES // 8]
        return [start + int(index) * BLOCK_BYTES for index in np.flatnonzero((words == _RECORD) | (words == _NOTE))]

    def read(self, start: int, stop: int) -> Bytes:
        """The blocks [start, stop), until the next call. Raises DiskError."""
        if self._start <= start and stop <= self._stop:
            return self._window[start - self._start : stop - self._start]
        length = stop - start
        target = self._scratch[:length] if length <= HEAD_BYTES_MAX else block_buffer(length)
        self._read(start, target)
        return target

    def _read(self, start: int, target: Bytes) -> None:
        self._file.read_into(start, [target])
        self.read_bytes += len(target)

    def _read_one_by_one(self, start: int, target: Bytes) -> None:
        for at in range(0, len(target), BLOCK_BYTES):
            block = target[at : at + BLOCK_BYTES]
            try:
                self._read(start + at, block)
            except DiskError:
                self.unreadable_blocks += 1
                block[:] = 0


def _end_within(extent: Extent, limit: int) -> int:
    """End of the place that ``extent`` takes. Raises CorruptError if that is not all its own."""
    end = extent.offset + taken_bytes(extent.length)
    if end > limit:
        raise CorruptError(f"{extent} reaches to {end}, its place ends at {limit}")
    return end


def _place(found: FoundRecord | FoundNote) -> tuple[int, int]:
    extent = _extent(found)
    return extent.offset, extent.offset + taken_bytes(extent.length)


def _extent(found: FoundRecord | FoundNote) -> Extent:
    return found.extent if isinstance(found, FoundRecord) else found.note.extent


def _sequence(found: FoundRecord | FoundNote) -> int:
    return found.stamp.sequence if isinstance(found, FoundRecord) else found.note.sequence
