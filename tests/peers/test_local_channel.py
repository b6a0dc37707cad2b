"""What the other side of a unix socket may say and do, and who may be there."""

import asyncio
import os
import socket
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from kvservice.access.principal import Principal, Role
from kvservice.model.errors import ForbiddenError, InvalidInputError, UnauthenticatedError, UnavailableError
from kvservice.model.segment import CacheKey, ContextId, SegmentId
from kvservice.peers import locality
from kvservice.peers.frames import HEADER, FrameError, Kind, pack_header, pack_opening, parse_header
from kvservice.peers.host import Authorize
from kvservice.peers.locality import boot_id, local_address, peer_uid, require_same_user
from kvservice.peers.member import Address, LocalAddress
from kvservice.peers.streams_channel import ClosedError, Source
from kvservice.peers.streams_limits import LinkLimits
from kvservice.peers.streams_local_channel import (
    ASK_BUFFER_BYTES,
    LENT_BYTES_MAX,
    SEND_BUFFER_BYTES,
    LocalChannel,
)
from kvservice.peers.streams_messages import decode_facts, encode_facts, encode_key
from kvservice.storage.arena import Arena, AttachedArenas
from kvservice.wire.v1 import peer_pb2 as wire
from tests.descriptors import nothing_left_open
from tests.peers import peer_process
from tests.peers.local_world import ends, local_link, memory, met_node
from tests.peers.stream_world import link_to, make_caller, make_facts, only_tenant, settled
from tests.peers.test_stream_greeting import error_of, everything, hello_frame, open_socket

OWN, PEER = 1 << 20, 1 << 16


@pytest.fixture
def own() -> Arena:
    return Arena(OWN)


def arena_frame(count: int) -> bytes:
    data = wire.PeerArena(bytes=count).SerializeToString()
    return pack_header(Kind.ARENA, 0, len(data)) + data


def lent(offset: int, count: int) -> bytes:
    data = wire.PeerLent(offset=offset, bytes=count).SerializeToString()
    return pack_header(Kind.LENT, 3, len(data)) + data


def hand_over(other: socket.socket, count: int, descriptors: list[int]) -> None:
    if descriptors:
        socket.send_fds(other, [arena_frame(count)], descriptors)
    else:
        other.sendall(arena_frame(count))
    for descriptor in descriptors:
        os.close(descriptor)


# Arenas


def test_an_arena_is_handed_over_to_be_read_only(own: Arena) -> None:
    with ends(own) as (channel, other):
        channel.send_arena()
        data, descriptors, _, _ = socket.recv_fds(other, 100, 2)
        assert data == arena_frame(own.bytes)
        (descriptor,) = descriptors
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.pwrite(descriptor, b"x", 0)
        os.close(descriptor)


@pytest.mark.parametrize("count", [0, 2, 20])
def test_one_descriptor_comes_and_no_other_is_kept(own: Arena, count: int) -> None:
    with ends(own) as (channel, other), nothing_left_open():
        hand_over(other, PEER, [memory(PEER) for _ in range(count)])
        with pytest.raises(FrameError, match="where an arena should be"):
            channel.receive_arena()


@pytest.mark.parametrize(("is_sealed", "said"), [(False, PEER), (True, PEER + 4096), (True, PEER - 4096)])
def test_a_file_that_could_shrink_or_has_another_size_is_no_arena(own: Arena, is_sealed: bool, said: int) -> None:
    with ends(own) as (channel, other), nothing_left_open():
        hand_over(other, said, [memory(PEER, is_sealed=is_sealed)])
        with pytest.raises(FrameError, match="no arena"):
            channel.receive_arena()


def test_a_pipe_is_no_arena(own: Arena) -> None:
    with ends(own) as (channel, other):
        hand_over(other, 0, list(os.pipe())[:1])
        with pytest.raises(FrameError, match="no arena"):
            channel.receive_arena()


def test_descriptors_at_any_other_time_are_dropped(own: Arena) -> None:
    with ends(own) as (channel, other):
        hand_over(other, PEER, [memory(PEER)])
        channel.receive_arena()
        with nothing_left_open():
            extra = memory(PEER)
            socket.send_fds(other, [lent(0, 100)], [extra])
            os.close(extra)
            assert channel.receive_header().payload_bytes == 100


def test_a_channel_closes_what_it_was_given(own: Arena) -> None:
    with nothing_left_open(), ends(own) as (channel, other):
        hand_over(other, PEER, [memory(PEER)])
        channel.receive_arena()


# What is lent


@pytest.mark.parametrize(
    ("offset", "count"),
    [(PEER, 1), (PEER - 9, 10), (0, 0), (0, PEER + 1), (1 << 63, 4096), ((1 << 64) - 1, (1 << 64) - 1)],
)
def test_what_does_not_lie_in_the_arena_is_refused(own: Arena, offset: int, count: int) -> None:
    with ends(own) as (channel, other):
        hand_over(other, PEER, [memory(PEER)])
        channel.receive_arena()
        other.sendall(lent(offset, count))
        with pytest.raises(FrameError, match="are lent"):
            channel.receive_header()


def test_no_frame_lends_more_than_one_may(own: Arena) -> None:
    with ends(own) as (channel, other):
        hand_over(other, 2 * LENT_BYTES_MAX, [memory(2 * LENT_BYTES_MAX)])
        channel.receive_arena()
        other.sendall(lent(0, LENT_BYTES_MAX + 1))
        with pytest.raises(FrameError, match="are lent"):
            channel.receive_header()


def test_nothing_can_be_lent_before_an_arena_came(own: Arena) -> None:
    with ends(own) as (channel, other):
        other.sendall(lent(0, 1))
        with pytest.raises(FrameError, match="an arena of 0"):
            channel.receive_header()


def test_an_arena_is_mapped_once_for_all_connections_and_goes_with_the_last() -> None:
    attached = AttachedArenas()
    one, other, unsealed = memory(PEER), memory(PEER), memory(PEER, is_sealed=False)
    with pytest.raises(InvalidInputError, match="could change its size"):
        attached.attach(unsealed, PEER)
    first = attached.attach(one, PEER)
    assert attached.attach(one, PEER) is first
    assert attached.attach(other, PEER) is not first
    with pytest.raises(ValueError, match="read-only"):
        first[0] = 1
    del first
    assert not attached._known
    for descriptor in (one, other, unsealed):
        os.close(descriptor)


def test_who_asks_never_waits_for_who_answers(own: Arena) -> None:
    """As many questions as a link has under way, the first with an identity, while the other side reads none."""
    one, other = socket.socketpair()
    channel = LocalChannel(one, own, AttachedArenas(), ASK_BUFFER_BYTES)
    channel.set_timeout(5)
    for number in range(LinkLimits().fetches_max):
        identities = [] if number else ["x" * 4096]
        key = encode_key(CacheKey(SegmentId(bytes(32)), ContextId(bytes(32))))
        channel.send(Kind.FETCH, number, wire.PeerFetch(identities=identities, namespace=bytes(32), key=key))
    channel.close()
    other.close()


def test_who_reads_while_the_connection_is_closed_hears_that(own: Arena) -> None:
    with ends(own) as (channel, other):
        hand_over(other, PEER, [memory(PEER)])
        channel.receive_arena()
        other.sendall(lent(4096, 4096))
        channel.receive_header()
        channel.close()
        with pytest.raises(ClosedError, match="was closed"):
            channel.receive_pieces(memoryview(bytearray(4096)), 0, 4096, lambda *_: None)


def test_bytes_from_elsewhere_are_sent_as_they_are(own: Arena) -> None:
    with ends(own) as (channel, other):
        channel.send_data(7, Source(memoryview(b"abcdef")), 1, 4)
        assert other.recv(100) == pack_header(Kind.DATA, 7, 0, 3) + b"bcd"


def test_bytes_may_follow_what_was_lent(own: Arena) -> None:
    with ends(own) as (channel, other):
        hand_over(other, PEER, [memory(PEER)])
        channel.receive_arena()
        other.sendall(lent(0, 3) + pack_header(Kind.DATA, 3, 0, 3) + b"abc")
        for expected in (bytes(3), b"abc"):
            header, target = channel.receive_header(), bytearray(3)
            assert (header.kind, header.payload_bytes) == (Kind.DATA, 3)
            channel.receive_pieces(memoryview(target), 0, 3, lambda *_: None)
            assert target == expected


def test_who_lends_waits_for_who_reads(own: Arena) -> None:
    with ends(own) as (channel, _):
        channel.set_timeout(0.05)
        source, sent = Source(own.view.data, own.descriptor(), 0), list[int]()

        def lend() -> None:
            for number in range(SEND_BUFFER_BYTES):
                channel.send_data(1, source, 0, 1024)
                sent.append(number)

        with pytest.raises(TimeoutError):
            lend()
        assert len(sent) < 64


# Who is there


def test_the_kernel_says_who_is_at_the_other_end() -> None:
    one, other = socket.socketpair()
    with one, other:
        assert peer_uid(one) == os.geteuid()
        require_same_user(one)


@pytest.fixture
def foreign(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locality, "peer_uid", lambda _: os.geteuid() + 1)


@pytest.mark.usefixtures("foreign")
async def test_another_users_process_is_told_nothing(tmp_path: Path) -> None:
    heard = await what_is_heard(tmp_path, b"", "may not read the memory")
    assert heard == b""


async def what_is_heard(folder: Path, answer: bytes, error: str) -> bytes:
    """By something else that listens where a node should; what the caller then says is wrong."""
    path, heard = folder / "other.sock", list[bytes]()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def serve() -> None:
            sock, _ = listener.accept()
            with sock:
                with suppress(BrokenPipeError):  # who called has gone without a word
                    sock.sendall(answer)
                heard.append(everything(sock))

        serving = asyncio.create_task(asyncio.to_thread(serve))
        address, arena = LocalAddress(str(path), make_facts().node), Arena(OWN)
        async with link_to(address, caller=make_caller(token="secret"), arena=arena) as link:
            with pytest.raises(UnavailableError, match=error):
                await link.ping()
        await serving
        arena.close()
    return b"".join(heard)


@pytest.mark.usefixtures("foreign")
async def test_another_users_process_is_refused(tmp_path: Path) -> None:
    async with met_node(tmp_path) as met:
        answer = await asyncio.to_thread(call, str(met.path))
        assert "may not read the memory" in error_of(answer)
        assert met.owner.server.sessions.count == 0


def call(path: str) -> bytes:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(path)
        sock.sendall(pack_opening() + hello_frame())
        return everything(sock)


async def test_who_may_not_see_every_tenant_shares_over_the_port(tmp_path: Path) -> None:
    async with met_node(tmp_path, authorize=only_tenant("mine")) as met, local_link(met) as link:
        with pytest.raises(UnavailableError, match="memory of all tenants"):
            await link.ping()
        async with link_to(met.owner.address) as stream:
            await stream.ping()


async def test_who_is_no_node_is_refused_as_at_the_port(tmp_path: Path) -> None:
    engine = Principal("engine", Role.ENGINE)
    async with met_node(tmp_path, authorize=lambda _: engine) as met, local_link(met) as link:
        with pytest.raises(UnavailableError, match="is no node"):
            await link.ping()


async def test_who_cannot_prove_who_it_is_is_refused_as_at_the_port(tmp_path: Path) -> None:
    def refuse(_: object) -> None:
        raise UnauthenticatedError("nobody")

    async with met_node(tmp_path, authorize=cast("Authorize", refuse)) as met, local_link(met) as link:
        with pytest.raises(UnavailableError, match="nobody"):
            await link.ping()


async def test_a_token_is_shown_to_nobody_but_a_node(tmp_path: Path) -> None:
    """Whoever listens there must speak our protocol first."""
    heard = await what_is_heard(tmp_path, b"HTTP/1.1 400 Bad", "not one of a node")
    assert heard == pack_opening()


# Where it can be met


def test_facts_say_where_a_node_can_be_met() -> None:
    facts = replace(make_facts(), boot_id=boot_id(), local_path="/run/kv/kv.sock.peers")
    assert decode_facts(encode_facts(facts)) == facts
    said = encode_facts(facts)
    for path in ("relative", "/" + "x" * 107, "/a\nb"):
        said.local_path = path
        with pytest.raises(InvalidInputError):
            decode_facts(said)


def test_a_node_is_met_where_its_socket_is_and_nowhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "s"
    facts = replace(make_facts(), boot_id=boot_id(), local_path=str(path))
    assert boot_id(), "a kernel that says its boot"
    assert local_address(facts) is None, "the path is not there"
    path.write_text("no socket")
    assert local_address(facts) is None
    path.unlink()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        assert local_address(facts) == LocalAddress(str(path), facts.node)
        assert local_address(replace(facts, boot_id="another")) is None
        assert local_address(replace(facts, boot_id="")) is None
        assert local_address(replace(facts, local_path="")) is None
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
        assert local_address(facts) is None, "another user's"


def test_a_closed_channel_may_be_closed_again(own: Arena) -> None:
    one, other = socket.socketpair()
    channel = LocalChannel(one, own, AttachedArenas())
    channel.close(at_once=True)
    channel.close()
    channel.shut()
    other.close()


def test_a_foreign_user_is_named() -> None:
    one, other = socket.socketpair()
    with one, other, pytest.MonkeyPatch.context() as patch:
        patch.setattr(locality, "peer_uid", lambda _: 4242)
        with pytest.raises(ForbiddenError, match="4242"):
            require_same_user(one)


# A caller that lies


def told(sock: socket.socket) -> str:
    """What the node says before it ends the connection, by its last frame."""
    return wire.PeerError.FromString(everything(sock)[HEADER.size :]).message


def greeted(path: str) -> socket.socket:
    """A caller whose arena has ``PEER`` bytes."""
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(20)
    sock.connect(path)
    sock.sendall(pack_opening() + hello_frame())
    sock.recv(len(pack_opening()), socket.MSG_WAITALL)
    for kind in (Kind.WELCOME, Kind.ARENA):
        header = parse_header(sock.recv(HEADER.size, socket.MSG_WAITALL))
        assert header.kind is kind
        sock.recv(header.message_bytes, socket.MSG_WAITALL)
    hand_over(sock, PEER, [memory(PEER)])
    return sock


@pytest.mark.parametrize(
    ("offset", "count", "said"),
    [
        (0, 5000, "to byte 5000 where data of a record of 4096"),
        (PEER - 100, 4096, "are lent"),
        (1 << 40, 4096, "are lent"),
    ],
)
async def test_a_caller_that_lends_what_it_has_not_is_cut_off(
    tmp_path: Path, offset: int, count: int, said: str
) -> None:
    def lie(path: str, store: wire.PeerStore) -> str:
        with greeted(path) as sock:
            data = store.SerializeToString()
            sock.sendall(pack_header(Kind.STORE, 3, len(data)) + data)
            assert parse_header(sock.recv(HEADER.size, socket.MSG_WAITALL)).kind is Kind.GO
            sock.sendall(lent(offset, count))
            return told(sock)

    async with met_node(tmp_path) as met:
        meta = peer_process.meta()
        store = wire.PeerStore(
            identities=[met.owner.identity.canonical_json()],
            namespace=meta.namespace,
            key=encode_key(meta.key),
            record_bytes=4096,
        )
        assert said in await asyncio.to_thread(lie, str(met.path), store)
        await settled(lambda: not met.owner.world.node.store.open)


async def test_nothing_is_lent_over_a_peer_port(tmp_path: Path) -> None:
    def lie(address: Address) -> str:
        with open_socket(address) as sock:
            sock.sendall(pack_opening() + hello_frame())
            sock.recv(len(pack_opening()), socket.MSG_WAITALL)
            header = parse_header(sock.recv(HEADER.size, socket.MSG_WAITALL))
            sock.recv(header.message_bytes, socket.MSG_WAITALL)
            sock.sendall(lent(0, 100))
            return told(sock)

    async with met_node(tmp_path) as met:
        assert "LENT frame where a request" in await asyncio.to_thread(lie, met.owner.address)
