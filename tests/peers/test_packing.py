"""Cutting a record into what goes packed and what goes as it lies, and taking it in: the very bits, whatever comes."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvservice.kernels.cpu_int8 import packed_bytes, unpack
from kvservice.model.errors import CapacityError
from kvservice.model.geometry import Geometry, Plane, attention_geometry, opaque_geometry
from kvservice.model.identity import Identity
from kvservice.model.rope import Rope
from kvservice.peers import packing
from kvservice.peers.frames import DATA_BYTES_MAX, FrameError, Kind, pack_header
from kvservice.peers.packed_counters import PackedCounters
from kvservice.peers.packing import (
    AREA_BYTES_MIN,
    FRAME_ROWS_BYTES,
    Packed,
    Packer,
    Piece,
    Unpacker,
    pieces_of,
    send_piece,
)
from kvservice.peers.packing_kernels import Kernels
from kvservice.peers.streams_channel import PIECE_BYTES, Channel, Source
from kvservice.storage.buffer import Bytes
from kvservice.storage.record import RecordReader
from kvservice.wire.v1 import peer_pb2 as wire
from tests.peers.packed_world import HALF, REPLACED, lossy, mirror_record, rounded_master, rounded_planes
from tests.peers.stream_world import BIG, BIG_TOKENS, make_record
from tests.server.builders import make_identity, make_meta, make_planes

WAIT_S = 20


@lru_cache
def record_of(kind: str, dtype: str) -> Bytes:
    identity = lossy(BIG if dtype == "bfloat16" else HALF)
    return mirror_record(identity) if kind == "mirror" else rounded_master(identity)[1]


def unpacked(piece: Piece) -> Bytes:
    assert piece.packed is not None
    said, rows = piece.packed.message, np.full((piece.last - piece.first) // 2, 0xABCD, np.uint16)
    unpack(piece.packed.payload, said.head_size, said.dtype, rows)
    return rows.view(np.uint8)


def cut_again(record: Bytes, start: int, end: int) -> tuple[Bytes, list[Piece]]:
    """What the pieces stand for; they may be of no use any more."""
    pieces, parts = list[Piece](), list[Bytes]()
    for piece in Packer(record).cut(start, end):
        parts.append(record[piece.first : piece.last] if piece.packed is None else unpacked(piece))
        pieces.append(piece)
    return np.concatenate(parts), pieces


def wire_bytes(pieces: list[Piece]) -> int:
    return sum(one.last - one.first if one.packed is None else one.packed.wire_bytes for one in pieces)


def is_dense(record: Bytes) -> bool:
    return all(one.packed is None for one in Packer(record).cut(0, len(record)))


# Cutting


@given(st.sampled_from(["master", "mirror"]), st.sampled_from(["bfloat16", "float16"]), st.data())
@settings(deadline=None, max_examples=60)
def test_pieces_cover_what_was_asked_once_and_stand_for_its_bits(kind: str, dtype: str, data: st.DataObject) -> None:
    record = record_of(kind, dtype)
    bounds = RecordReader(record).layout.bounds
    start = data.draw(st.integers(0, len(record) - 1))
    end = data.draw(st.sampled_from([one for one in bounds if one > start]) | st.integers(start + 1, len(record)))
    bits, pieces = cut_again(record, start, end)
    assert (pieces[0].first, pieces[-1].last) == (start, end)
    assert all(one.last == two.first for one, two in pairwise(pieces))
    assert all(one.first < one.last for one in pieces)
    assert np.array_equal(bits, record[start:end])
    for first, last, packed in pieces:
        if packed is not None:
            assert last - first == 2 * packed.message.heads * packed.message.head_size <= FRAME_ROWS_BYTES
            assert len(packed.payload) == packed_bytes(packed.message.heads, packed.message.head_size)
            assert first % 2 == 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_rounded_master_takes_half_its_bytes(dtype: str) -> None:
    record = record_of("master", dtype)
    _, pieces = cut_again(record, 0, len(record))
    assert wire_bytes(pieces) <= 0.53 * len(record)
    assert sum(one.packed is None for one in pieces) == 1, "prefix and header"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_of_a_mirror_the_replaced_rows_are_packed(dtype: str) -> None:
    record = record_of("mirror", dtype)
    _, pieces = cut_again(record, 0, len(record))
    rows_bytes = 2 * 8 * len(REPLACED) * 4 * 64 * 2
    assert sum(one.last - one.first for one in pieces if one.packed is not None) == rows_bytes


def test_layers_are_packed_as_they_arrive() -> None:
    """What has not come yet is not looked at: it may be of another record."""
    whole, arriving = record_of("mirror", "bfloat16"), np.full(len(record_of("mirror", "bfloat16")), 0xEE, np.uint8)
    packer, bounds = Packer(arriving), RecordReader(whole).layout.bounds
    packed_layers, came = 0, 0
    for end in bounds[1:]:
        arriving[came:end] = whole[came:end]
        for piece in packer.cut(came, end):
            packed_layers += piece.packed is not None
            if piece.packed is not None:
                assert np.array_equal(unpacked(piece), whole[piece.first : piece.last])
        came = end
    assert packed_layers == 8


def test_rows_that_would_not_come_back_go_as_they_lie() -> None:
    meta = make_meta(lossy(), "one", tokens=BIG_TOKENS)
    assert is_dense(make_record(meta, make_planes(BIG, BIG_TOKENS))[0])


def test_only_the_frame_that_would_not_come_back_goes_as_it_lies() -> None:
    record = record_of("master", "bfloat16").copy()
    at = RecordReader(record).layout.section_offsets[3]
    record[at : at + 2] = 1, 0  # 2^-133, beside values around 1
    bits, pieces = cut_again(record, 0, len(record))
    assert np.array_equal(bits, record)
    plain = [one for one in pieces if one.packed is None]
    assert len(plain) == 2
    assert plain[1].first <= at < plain[1].last <= plain[1].first + FRAME_ROWS_BYTES


def test_nobody_waits_while_more_and_more_would_not_come_back() -> None:
    geometry = attention_geometry(layers=24, heads=4, head_size=64, dtype="bfloat16")
    identity = lossy(geometry)
    planes = [*make_planes(geometry, BIG_TOKENS)[:20], *rounded_planes(geometry)[20:]]
    record, _ = make_record(make_meta(identity, "one", tokens=BIG_TOKENS), planes)
    bits, pieces = cut_again(record, 0, len(record))
    assert np.array_equal(bits, record)
    assert max(one.last - one.first for one in pieces) < DATA_BYTES_MAX + FRAME_ROWS_BYTES


@pytest.mark.parametrize("tokens", [4, 16])
def test_few_rows_go_with_what_is_around_them(tokens: int) -> None:
    """Layers with padding between them: nothing joins their rows."""
    geometry = attention_geometry(layers=3, heads=1, head_size=24, dtype="bfloat16")
    _, record, _ = rounded_master(lossy(geometry), tokens=tokens + 1)
    assert RecordReader(record).layout.section_bytes[0] < AREA_BYTES_MIN
    assert is_dense(record)


def test_short_planes_are_packed_together() -> None:
    geometry = attention_geometry(layers=4, heads=2, head_size=64, dtype="bfloat16")
    _, record, _ = rounded_master(lossy(geometry), tokens=40)  # 10 KiB a plane
    _, pieces = cut_again(record, 0, len(record))
    assert [one.packed is None for one in pieces] == [True, False]


def test_planes_with_heads_of_two_sizes_are_packed_each() -> None:
    geometry = Geometry(2, "bfloat16", (Plane("k", 2, 64, rotary_size=64), Plane("v", 2, 32)))
    _, record, _ = rounded_master(lossy(geometry), tokens=256)
    bits, pieces = cut_again(record, 0, len(record))
    assert np.array_equal(bits, record)
    assert [one.packed.message.head_size for one in pieces if one.packed is not None] == [64, 32, 64, 32]


@pytest.mark.parametrize("head_size", [2, 1 << 19])
def test_heads_that_take_no_less_or_do_not_fit_a_frame_go_as_they_lie(head_size: int) -> None:
    geometry = attention_geometry(layers=1, heads=1, head_size=head_size, dtype="bfloat16", rotary_size=2)
    assert is_dense(rounded_master(lossy(geometry), tokens=max(1, (1 << 16) // head_size))[1])


def rows_of_bytes() -> Identity:
    return Identity("test", "opaque", "r1", opaque_geometry(1 << 20), (Rope("none", False, 0, ()),))


@pytest.mark.parametrize("what", ["float32", "opaque"])
def test_other_storage_types_go_as_they_lie(what: str) -> None:
    if what == "opaque":
        identity, planes = rows_of_bytes(), [[np.zeros((1, 1 << 20), np.uint8)]]
    else:
        identity = make_identity(attention_geometry(layers=2, heads=4, head_size=64, dtype="float32"))
        planes = make_planes(identity.geometry, 128)
    assert is_dense(make_record(make_meta(identity, "one", tokens=len(planes[0][0])), planes)[0])


@pytest.mark.parametrize("at", [0, 9, 40, 200])
def test_what_is_no_record_goes_as_it_lies(at: int) -> None:
    record = record_of("master", "bfloat16").copy()
    record[at] ^= 0x55
    assert is_dense(record)


def test_a_layer_whose_table_is_wrong_goes_as_it_lies() -> None:
    record = record_of("mirror", "bfloat16").copy()
    at = RecordReader(record).layout.section_offsets[2]
    record[at : at + 4] = 0xFF
    bits, pieces = cut_again(record, 0, len(record))
    assert np.array_equal(bits, record)
    assert sum(one.packed is not None for one in pieces) == 7


# Over a channel


@contextmanager
def two_ends() -> Iterator[tuple[Channel, Channel, socket.socket]]:
    """A channel, the one at its other end, and the socket of that, for what no channel sends."""
    one, other = socket.socketpair()
    ends = Channel(one, sends_files=False), Channel(other, sends_files=False)
    for end in ends:
        end.set_timeout(WAIT_S)
    try:
        yield *ends, other
    finally:
        for end in ends:
            end.close()


@pytest.mark.parametrize("start", [0, 1, 2, 999_999, 1_000_000])
@pytest.mark.parametrize("kind", ["master", "mirror"])
def test_what_was_sent_is_what_is_there(kind: str, start: int) -> None:
    record, target = record_of(kind, "bfloat16"), np.full(len(record_of(kind, "bfloat16")) + 64, 0xEE, np.uint8)
    start = min(start, len(record) - 1)
    sent, came, source = PackedCounters(), PackedCounters(), Source(record.data)

    def send(channel: Channel) -> None:
        for piece in pieces_of(channel, source, start, len(record), Packer(record)):
            send_piece(channel, 7, source, piece, sent)

    with two_ends() as (near, far, _):
        thread = threading.Thread(target=send, args=(far,))
        thread.start()
        at, unpacker = start, Unpacker()
        while at < len(record):
            header, first = near.receive_header(), at
            assert header.request == 7
            if header.kind is Kind.PACKED:
                at = unpacker.receive(near, header, target.data[: len(record)], at)
                came.note_packed(at - first, header.frame_bytes)
            else:
                at += header.payload_bytes
                near.receive_piece(target.data[first:at])
        thread.join(WAIT_S)
    assert np.array_equal(target[start : len(record)], record[start:])
    assert (target[:start] == 0xEE).all()
    assert (target[len(record) :] == 0xEE).all()
    assert sent == came
    assert sent.packed_bytes > 0 or len(record) - start < AREA_BYTES_MIN


LIES = {
    "another type": (wire.PeerPacked(dtype="float32", head_size=64, heads=4), 264, 0),
    "no type": (wire.PeerPacked(head_size=64, heads=4), 264, 0),
    "no size": (wire.PeerPacked(dtype="bfloat16", heads=132), 264, 0),
    "no heads": (wire.PeerPacked(dtype="bfloat16", head_size=64), 264, 0),
    "fewer heads": (wire.PeerPacked(dtype="bfloat16", head_size=64, heads=3), 264, 0),
    "more heads": (wire.PeerPacked(dtype="bfloat16", head_size=64, heads=5), 264, 0),
    "odd start": (wire.PeerPacked(dtype="bfloat16", head_size=64, heads=4), 264, 1),
    "past the end": (wire.PeerPacked(dtype="float16", head_size=64, heads=4), 264, 514),
    "past the largest frame": (wire.PeerPacked(dtype="float16", head_size=1 << 15, heads=9), 9 * (2 + (1 << 15)), 0),
    "sizes beyond all": (wire.PeerPacked(dtype="float16", head_size=(1 << 32) - 1, heads=(1 << 32) - 1), 264, 0),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_frame_that_lies_is_refused_before_a_byte_of_it_is_taken(lie: str) -> None:
    said, payload_bytes, at = LIES[lie]
    total = 2 * FRAME_ROWS_BYTES if "largest" in lie else 1024
    memory, data = np.full(2 * FRAME_ROWS_BYTES, 0xEE, np.uint8), said.SerializeToString()
    with two_ends() as (near, _, other):
        other.sendall(pack_header(Kind.PACKED, 1, len(data), payload_bytes) + data)
        with pytest.raises(FrameError, match="packed frame of"):
            Unpacker().receive(near, near.receive_header(), memory.data[:total], at)
    assert (memory == 0xEE).all()


@given(st.binary(max_size=4 * 66))
@settings(deadline=None)
def test_any_payload_fills_its_rows_and_nothing_else(payload: bytes) -> None:
    said = wire.PeerPacked(dtype="float16", head_size=64, heads=4)
    memory = np.full(2048, 0xEE, np.uint8)
    with two_ends() as (near, far, _):
        far.send_packed(3, said, np.frombuffer(payload.ljust(4 * 66, b"\xff"), np.uint8))
        assert Unpacker().receive(near, near.receive_header(), memory.data[:1024], 64) == 64 + 512
    assert (memory[:64] == 0xEE).all()
    assert (memory[64 + 512 :] == 0xEE).all()


def test_without_memory_for_the_rows_that_is_what_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: memoryview) -> None:
        raise CapacityError("no page")

    monkeypatch.setattr(packing, "prefault", refuse)
    with two_ends() as (near, far, _):
        far.send_packed(3, wire.PeerPacked(dtype="float16", head_size=64, heads=1), np.zeros(66, np.uint8))
        with pytest.raises(CapacityError, match="no page"):
            Unpacker().receive(near, near.receive_header(), np.zeros(128, np.uint8).data, 0)


@pytest.mark.parametrize(
    ("message_bytes", "payload_bytes"), [(0, 66), (10, 0), (10, DATA_BYTES_MAX + 1), (1 << 20, 66)]
)
def test_a_packed_frame_has_a_message_and_payload(message_bytes: int, payload_bytes: int) -> None:
    with pytest.raises(FrameError):
        pack_header(Kind.PACKED, 1, message_bytes, payload_bytes)


def test_what_was_packed_is_counted_and_nothing_else() -> None:
    counters, source = PackedCounters(), Source(memoryview(bytes(100)))
    with two_ends() as (near, far, _):
        send_piece(far, 1, source, Piece(0, 100), counters)
        assert counters == PackedCounters()
        send_piece(far, 1, source, Piece(0, 128, Packed(wire.PeerPacked(heads=1), np.zeros(66, np.uint8))), counters)
        assert counters == PackedCounters(128, 16 + 2 + 66)
        assert near.receive_header().kind is Kind.DATA


@pytest.mark.parametrize("size", [4, 64, 128, 576])
def test_a_packed_frame_is_no_longer_on_the_wire_than_a_piece_of_data(size: int) -> None:
    """So that a slow link is seen to move as often."""
    geometry = attention_geometry(layers=2, heads=4, head_size=size, dtype="bfloat16", rotary_size=2)
    _, record, _ = rounded_master(lossy(geometry), tokens=3_000_000 // geometry.token_bytes)
    packed = [one.packed for one in Packer(record).cut(0, len(record)) if one.packed is not None]
    assert PIECE_BYTES // 2 < max(len(one.payload) for one in packed) <= PIECE_BYTES


# Kernels


def test_kernels_are_loaded_by_another_thread_and_once() -> None:
    gate, begun, threads = threading.Event(), threading.Event(), list[threading.Thread]()

    def load_all() -> None:
        threads.append(threading.current_thread())
        begun.set()
        assert gate.wait(WAIT_S)

    kernels = Kernels(load_all)
    assert not any(kernels.are_ready() for _ in range(3)), "and nobody waits"
    gate.set()
    assert begun.wait(WAIT_S)
    threads[0].join(WAIT_S)
    assert kernels.are_ready()
    assert len(threads) == 1
    assert threads[0] is not threading.current_thread()


def test_who_may_wait_has_kernels_at_once() -> None:
    kernels = Kernels()
    kernels.load()
    assert kernels.are_ready()


def test_kernels_that_cannot_be_loaded_are_not_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    failed = threading.Event()

    def load_all() -> None:
        failed.set()
        raise ImportError("no numba here")

    kernels = Kernels(load_all)
    assert not kernels.are_ready()
    assert failed.wait(WAIT_S)
    failed.clear()
    assert not kernels.are_ready()
    assert not failed.is_set()
