"""The label in front of a record in a remote place: what is known of the record that it does not say itself.

    object := label record
    label  := magic:"KVSOBJ\r\n" version:u16 zero:u16 head_bytes:u32 record_bytes:u64 prefill_s:f64 writer:u64
              zero[16] checksum:u64

Little endian, 64 bytes; checksum is XXH3-64 over all before it. It stands in front, so that one read of the first
bytes gives it together with the record's head, in places that keep no metadata too. ``writer`` is drawn anew for every
object: it tells who won where two create one name, and whether what is fetched is what was found.
"""

import math
import secrets
import struct
from typing import NamedTuple

import numpy as np
from xxhash import xxh3_64_intdigest

from kvservice.model.errors import CorruptError
from kvservice.storage.buffer import Bytes
from kvservice.storage.record import HEADER_BYTES_MAX, PREFIX_BYTES, RecordHead

LABEL_VERSION = 1
LABEL = struct.Struct("<8sHHIQdQ16sQ")
LABEL_BYTES = LABEL.size
_MAGIC = b"KVSOBJ\r\n"
_CHECKED_BYTES = LABEL_BYTES - 8

assert LABEL_BYTES == 64


class Label(NamedTuple):
    """``head_bytes``: of the record's prefix and header. ``prefill_s``: seconds that computing it took, 0 unknown."""

    head_bytes: int
    record_bytes: int
    prefill_s: float
    writer: int

    @property
    def version(self) -> str:
        """The word for these very bytes, in places that have none of their own."""
        return f"{self.writer:016x}"

    def pack(self) -> bytes:
        """The 64 bytes."""
        fields = (_MAGIC, LABEL_VERSION, 0, self.head_bytes, self.record_bytes, self.prefill_s, self.writer)
        checked = LABEL.pack(*fields, bytes(16), 0)[:_CHECKED_BYTES]
        return checked + struct.pack("<Q", xxh3_64_intdigest(checked))


def label_of(head: RecordHead, prefill_s: float) -> Label:
    """A new label for a record with this head."""
    assert math.isfinite(prefill_s), prefill_s
    assert prefill_s >= 0, prefill_s
    layout = head.layout
    return Label(PREFIX_BYTES + layout.header_bytes, layout.record_bytes, prefill_s, secrets.randbits(64))


def read_label(data: bytes) -> Label:
    """The label at the start of ``data``. Raises CorruptError for anything that ``pack`` never wrote."""
    if len(data) < LABEL_BYTES or not data.startswith(_MAGIC):
        raise CorruptError(f"no object of ours: {len(data)} bytes that start with {data[: len(_MAGIC)]!r}")
    _, version, _, head_bytes, record_bytes, prefill_s, writer, _, said = LABEL.unpack_from(data)
    found = xxh3_64_intdigest(data[:_CHECKED_BYTES])
    if found != said or version != LABEL_VERSION:
        raise CorruptError(f"a label of version {version} whose checksum is {found:016x}, it says {said:016x}")
    if not PREFIX_BYTES < head_bytes <= min(PREFIX_BYTES + HEADER_BYTES_MAX, record_bytes):
        raise CorruptError(f"a label that says a head of {head_bytes} bytes in a record of {record_bytes}")
    if not (math.isfinite(prefill_s) and prefill_s >= 0):
        raise CorruptError(f"a label that says {prefill_s} seconds of prefill")
    return Label(head_bytes, record_bytes, prefill_s, writer)


def boxed(label: Label, record: Bytes) -> Bytes:
    """The whole object in memory of its own: who sends it may hold on to it after the call was given up."""
    box: Bytes = np.empty(LABEL_BYTES + len(record), np.uint8)
    box[:LABEL_BYTES] = np.frombuffer(label.pack(), np.uint8)
    np.copyto(box[LABEL_BYTES:], record)
    return box
