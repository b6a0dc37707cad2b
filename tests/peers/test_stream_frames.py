"""Frames of any content: what is understood is what was said, and anything else ends a connection and nothing more."""

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvservice.model.errors import KVServiceError, RecordFormatError, UnavailableError
from kvservice.peers.frames import (
    DATA_BYTES_MAX,
    HEADER,
    MESSAGE_LIMITS,
    OPENING,
    WITH_PAYLOAD,
    FrameError,
    Kind,
    check_opening,
    pack_header,
    pack_opening,
    parse_header,
)
from kvservice.peers.member import Address
from kvservice.peers.streams_channel import cut
from kvservice.peers.streams_messages import encode_facts
from kvservice.wire.v1 import peer_pb2 as wire
from tests.peers.stream_world import (
    BIG,
    HASTY,
    LOCALHOST,
    Owner,
    find,
    find_record,
    link_to,
    make_facts,
    make_query,
    owner_node,
    settled,
)
from tests.server.builders import make_identity, make_meta, make_planes

KINDS = st.sampled_from(list(Kind))


@given(KINDS, st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
def test_a_header_is_read_as_it_was_written_or_never_written(
    kind: Kind, request: int, message_bytes: int, payload_bytes: int
) -> None:
    is_right = message_bytes <= MESSAGE_LIMITS[kind] and (
        1 <= payload_bytes <= DATA_BYTES_MAX if kind in WITH_PAYLOAD else payload_bytes == 0
    )
    is_right = is_right and (message_bytes > 0 or kind is not Kind.PACKED)
    if is_right:
        assert parse_header(pack_header(kind, request, message_bytes, payload_bytes)) == (
            kind,
            request,
            message_bytes,
            payload_bytes,
        )
        return
    with pytest.raises(FrameError):
        pack_header(kind, request, message_bytes, payload_bytes)
    with pytest.raises(FrameError):
        parse_header(HEADER.pack(kind, 0, 0, request, message_bytes, payload_bytes))


@given(st.binary(min_size=HEADER.size, max_size=HEADER.size))
def test_any_header_is_within_the_limits_or_refused(data: bytes) -> None:
    try:
        header = parse_header(data)
    except FrameError:
        return
    assert header.message_bytes <= MESSAGE_LIMITS[header.kind]
    assert header.payload_bytes <= DATA_BYTES_MAX


@given(st.binary(min_size=OPENING.size, max_size=OPENING.size))
def test_any_opening_but_ours_is_refused(data: bytes) -> None:
    try:
        check_opening(data)
    except (FrameError, RecordFormatError):
        return
    assert data[:10] == pack_opening()[:10]


@given(st.integers(0, 10_000_000), st.integers(0, 10_000_000), st.integers(100_000, 8 << 20))
def test_parts_cover_everything_once(start: int, length: int, part: int) -> None:
    parts = cut(start, start + length, part)
    assert sum(end - first for first, end in parts) == length
    assert all(first < end <= min(first + part, start + length) for first, end in parts)
    assert [first for first, _ in parts] == sorted({start, *(end for _, end in parts)})[: len(parts)]


# A node that is sent anything

MESSAGES: dict[Kind, Callable[[], bytes]] = {
    Kind.FIND: lambda: wire.PeerFind(queries=[wire.PeerQuery(namespace=b"x" * 32)]).SerializeToString(),
    Kind.FETCH: lambda: wire.PeerFetch(namespace=b"x" * 32).SerializeToString(),
    Kind.STORE: lambda: wire.PeerStore(namespace=b"x" * 32, record_bytes=1 << 40).SerializeToString(),
    Kind.DELETE: lambda: wire.PeerDelete(namespace=b"x" * 32, is_whole_namespace=True).SerializeToString(),
    Kind.RENEW: lambda: wire.PeerRenew(lease_ids=[1, 2], lease_ttl_s=float("nan")).SerializeToString(),
    Kind.RELEASE: lambda: wire.PeerRelease(lease_ids=[2**64 - 1]).SerializeToString(),
    Kind.PACKED: lambda: wire.PeerPacked(dtype="bfloat16", head_size=6, heads=4).SerializeToString(),
}


@st.composite
def frames(draw: st.DrawFn) -> bytes:
    kind = draw(KINDS)
    shape = draw(st.sampled_from(["sensible", "random", "raw"]))
    if shape == "raw":
        return draw(st.binary(max_size=64))
    message = MESSAGES.get(kind, bytes)() if shape == "sensible" else draw(st.binary(max_size=48))
    payload = draw(st.binary(max_size=32)) if kind in WITH_PAYLOAD else b""
    header = HEADER.pack(int(kind), 0, 0, draw(st.integers(0, 5)), len(message), len(payload))
    return header + message + payload


def send_all(address: Address, sent: bytes) -> None:
    """Greet, send, hear what is said until the other side has had enough."""
    message = wire.PeerHello(facts=encode_facts(make_facts("fuzz"))).SerializeToString()
    with socket.create_connection(address, 10) as sock:
        try:
            sock.sendall(pack_opening() + pack_header(Kind.HELLO, 1, len(message)) + message + sent)
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(1 << 16):
                pass
        except OSError:
            return


async def test_a_node_that_is_sent_anything_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    async with owner_node() as owner:
        await asyncio.to_thread(fuzz, owner)
        await settled(lambda: owner.server.connections == 0)
        assert "please report it" not in caplog.text
        async with link_to(owner.address) as link:
            await link.ping()


def fuzz(owner: Owner) -> None:
    @settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(st.lists(frames(), max_size=4))
    def run(sent: list[bytes]) -> None:
        send_all(owner.address, b"".join(sent))

    run()


# A node that answers anything


class Babbler:
    """Greets as a node does, then answers every request with what it is given."""

    def __init__(self, answers: list[bytes]) -> None:
        self._listener = socket.create_server((LOCALHOST, 0))
        self.address = Address(LOCALHOST, self._listener.getsockname()[1])
        self._answers = answers
        self._facts = encode_facts(make_facts("babbler"))
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(sock,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, sock: socket.socket) -> None:
        with sock:
            try:
                sock.recv(OPENING.size, socket.MSG_WAITALL)
                self._take(sock)
                message = wire.PeerWelcome(facts=self._facts, session=b"s" * 16).SerializeToString()
                sock.sendall(pack_opening() + pack_header(Kind.WELCOME, 1, len(message)) + message)
                while self._take(sock):
                    sock.sendall(b"".join(self._answers))
            except OSError:
                return

    def _take(self, sock: socket.socket) -> bool:
        data = sock.recv(HEADER.size, socket.MSG_WAITALL)
        if len(data) < HEADER.size:
            return False
        header = parse_header(data)
        if header.message_bytes:
            sock.recv(header.message_bytes, socket.MSG_WAITALL)
        return True

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(10)


@contextmanager
def babbling(answers: list[bytes]) -> Iterator[Babbler]:
    babbler = Babbler(answers)
    try:
        yield babbler
    finally:
        babbler.close()


def framed(kind: Kind, message: bytes = b"", payload: bytes = b"", request: int = 1) -> bytes:
    return HEADER.pack(kind, 0, 0, request, len(message), len(payload)) + message + payload


@pytest.mark.parametrize(
    "answer",
    [
        framed(Kind.PONG),
        framed(Kind.FOUND),
        framed(Kind.FOUND, wire.PeerFound(answers=[wire.PeerAnswer(match=9)]).SerializeToString()),
        framed(Kind.FOUND, wire.PeerFound(answers=[wire.PeerAnswer(match=1)]).SerializeToString()),
        framed(Kind.FOUND, wire.PeerFound(answers=[wire.PeerAnswer()] * 2).SerializeToString()),
        framed(Kind.FOUND, wire.PeerFound(answers=[wire.PeerAnswer()]).SerializeToString(), request=7),
        framed(Kind.FOUND, b"\xff\xff"),
        framed(Kind.FIND),
        framed(Kind.DATA, payload=b"x"),
        framed(Kind.ERROR, wire.PeerError(code="NO SUCH", message="?").SerializeToString(), request=0),
        HEADER.pack(Kind.FOUND, 0, 0, 1, 1 << 31, 0),
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
    ],
)
async def test_nonsense_for_an_answer_is_an_unavailable_node(answer: bytes) -> None:
    with babbling([answer]) as babbler:
        async with link_to(babbler.address, limits=HASTY) as link:
            identity = make_identity()
            with pytest.raises(UnavailableError):
                await find(link, identity, make_query(make_meta(identity)))


async def test_a_head_that_lies_is_a_miss() -> None:
    head = wire.PeerHead(head=bytes(100), prefill_s=float("nan"))
    found = wire.PeerFound(lease_id=5, answers=[wire.PeerAnswer(match=1, record=head)])
    with babbling([framed(Kind.FOUND, found.SerializeToString())]) as babbler:
        async with link_to(babbler.address, limits=HASTY) as link:
            identity = make_identity()
            (finding,) = await find(link, identity, make_query(make_meta(identity)))
            assert finding.record is None
            assert link.counters.corrupt == 1


@given(st.lists(frames(), min_size=1, max_size=3))
@settings(max_examples=60, deadline=None, database=None)
def test_a_link_to_a_node_that_answers_anything_ends_with_an_error(answers: list[bytes]) -> None:
    async def run(address: Address) -> None:
        async with link_to(address, limits=HASTY) as link:
            identity = make_identity()
            try:
                (finding,) = await find(link, identity, make_query(make_meta(identity)))
            except KVServiceError:
                return
            assert finding.record is None

    with babbling(answers) as babbler:
        asyncio.run(run(babbler.address))


@pytest.mark.parametrize("payload_bytes", [5000, 100])
async def test_a_record_of_another_length_is_not_written_past_its_end(payload_bytes: int) -> None:
    async with owner_node() as owner:
        meta = make_meta(owner.identity, "s")
        await owner.client.store(meta, make_planes(BIG, meta.tokens))
        async with link_to(owner.address) as link:
            record = await find_record(link, owner, meta)
    short = replace(record, lease=None)
    memory = np.zeros(short.record_bytes + 8192, np.uint8)
    told: list[tuple[int, int]] = []
    start = short.record_bytes - 1000
    with babbling([framed(Kind.DATA, payload=b"x" * payload_bytes)]) as babbler:
        async with link_to(babbler.address, limits=HASTY) as link:
            with pytest.raises(UnavailableError):
                await link.fetch(short, memory, lambda first, last: told.append((first, last)), start)
    assert not memory[short.record_bytes :].any()
    assert told == ([] if payload_bytes > 1000 else [(start, start + payload_bytes)])
