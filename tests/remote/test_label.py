"""Labels and names: what is written is read, anything else is refused."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvservice.model.errors import ConfigError, CorruptError
from kvservice.model.identity import Namespace
from kvservice.model.segment import ContextId, SegmentId
from kvservice.storage.record import read_head
from kvservice.storage.remote.contract import RemoteName
from kvservice.storage.remote.label import LABEL, LABEL_BYTES, Label, boxed, label_of, read_label
from kvservice.storage.remote.object_names import ObjectNames, context_of
from tests.remote.records import make_record

NAME = RemoteName(Namespace(b"n" * 32), SegmentId(b"s" * 32), ContextId(b"c" * 32))


def test_a_label_is_read_as_it_was_written() -> None:
    _, record = make_record()
    label = label_of(read_head(record), 0.5)
    assert read_label(label.pack() + b"more") == label
    assert label.record_bytes == len(record)
    assert label_of(read_head(record), 0.5).writer != label.writer
    box = boxed(label, record)
    assert box[:LABEL_BYTES].tobytes() == label.pack()
    assert np.array_equal(box[LABEL_BYTES:], record)
    assert not np.shares_memory(box, record)


def test_the_bytes_of_a_label_do_not_change() -> None:
    packed = Label(head_bytes=200, record_bytes=4096, prefill_s=1.5, writer=7).pack()
    assert packed.hex() == (
        "4b56534f424a0d0a"
        "01000000c80000000010000000000000000000000000f83f0700000000000000" + "00" * 16 + packed[-8:].hex()
    )


@given(st.integers(0, LABEL_BYTES * 8 - 1))
def test_no_flipped_bit_is_read(bit: int) -> None:
    packed = bytearray(Label(200, 4096, 1.5, 7).pack())
    packed[bit // 8] ^= 1 << bit % 8
    with pytest.raises(CorruptError):
        read_label(bytes(packed))


@given(st.binary(max_size=200))
def test_what_is_no_label_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptError):
        read_label(data)


@pytest.mark.parametrize(
    "label",
    [
        Label(32, 4096, 0.0, 1),
        Label(5000, 4096, 0.0, 1),
        Label(1 << 20, 1 << 30, 0.0, 1),
        Label(200, 4096, math.nan, 1),
        Label(200, 4096, -1.0, 1),
        Label(200, 4096, math.inf, 1),
    ],
)
def test_a_label_with_a_right_checksum_and_wrong_values_is_refused(label: Label) -> None:
    with pytest.raises(CorruptError):
        read_label(label.pack())


def test_a_label_has_64_bytes() -> None:
    assert LABEL.size == LABEL_BYTES == 64


def test_names_hold_prefix_versions_and_digests() -> None:
    names = ObjectNames("team/kv")
    assert names.record(NAME) == f"team/kv/v1.1/{'6e' * 32}/{'73' * 32}/{'63' * 32}"
    assert names.record(NAME) == f"{names.segment(NAME.namespace, NAME.segment)}/{NAME.context.hex()}"
    assert ObjectNames("", ":").record(NAME).startswith("v1.1:6e6e")
    assert ObjectNames("a/b", ":").start == "a:b:v1.1"


@pytest.mark.parametrize("prefix", ["/", "a/", "/a", "a//b", "..", "a/../b", "a b", "a*", "ä", "a\n", "x" * 257])
def test_a_prefix_that_some_place_reads_otherwise_is_refused(prefix: str) -> None:
    with pytest.raises(ConfigError):
        ObjectNames(prefix)


def test_a_context_is_read_from_a_name_and_nothing_else_is() -> None:
    assert context_of("ab" * 32) == b"\xab" * 32
    for other in ("AB" * 32, "ab" * 31, "zz" * 32, "", "ab " * 32, "ab" * 33):
        assert context_of(other) is None
