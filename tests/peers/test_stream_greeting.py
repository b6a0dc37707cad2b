"""Who is let in at the peer port, and what is said to who is not. Nothing that a stranger sends costs memory."""

import asyncio
import socket
import uuid

import pytest

from kvservice.access.principal import Credentials, Principal, Role
from kvservice.model.errors import (
    ConfigError,
    ForbiddenError,
    RecordFormatError,
    StaleEpochError,
    UnauthenticatedError,
    UnavailableError,
)
from kvservice.peers import frames
from kvservice.peers.frames import HEADER, OPENING, Kind, pack_header, pack_opening, parse_header
from kvservice.peers.member import Address
from kvservice.peers.streams_limits import ServerLimits
from kvservice.peers.streams_messages import encode_facts
from kvservice.peers.streams_server import StreamServer
from kvservice.wire.v1 import peer_pb2 as wire
from tests.peers.stream_world import link_to, make_caller, make_facts, owner_node, settled


def open_socket(address: Address) -> socket.socket:
    return socket.create_connection(address, 10)


def hello_frame(facts: wire.PeerFacts | None = None, **changes: object) -> bytes:
    message = wire.PeerHello(facts=facts or encode_facts(make_facts()), **changes).SerializeToString()  # type: ignore[arg-type]
    return pack_header(Kind.HELLO, 1, len(message)) + message


def everything(sock: socket.socket) -> bytes:
    """What comes until the other side closes."""
    found = b""
    while True:
        try:
            data = sock.recv(1 << 16)
        except ConnectionResetError:
            return found
        if not data:
            return found
        found += data


def error_of(answer: bytes) -> str:
    """The text of the error frame behind the opening."""
    assert answer.startswith(pack_opening())
    header = parse_header(answer[OPENING.size : OPENING.size + HEADER.size])
    assert header.kind is Kind.ERROR
    return wire.PeerError.FromString(answer[OPENING.size + HEADER.size :]).message


def send_and_hear(address: Address, data: bytes) -> bytes:
    with open_socket(address) as sock:
        sock.sendall(data)
        return everything(sock)


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "check the port"),
        (OPENING.pack(frames.MAGIC, 1, 0) + HEADER.pack(1, 0, 0, 1, 1 << 30, 0), "the limit is 16384"),
        (OPENING.pack(frames.MAGIC, 1, 0) + HEADER.pack(32, 0, 0, 1, 0, 3 << 20), "bytes of payload"),
        (OPENING.pack(frames.MAGIC, 1, 0) + HEADER.pack(99, 0, 0, 1, 0, 0), "no frame of kind 99"),
        (OPENING.pack(frames.MAGIC, 1, 0) + HEADER.pack(1, 7, 0, 1, 0, 0), "bytes set that are 0"),
        (OPENING.pack(frames.MAGIC, 1, 0) + pack_header(Kind.PING, 1), "begins with hello"),
        (OPENING.pack(frames.MAGIC, 1, 0) + pack_header(Kind.HELLO, 1, 3) + b"\xff\xff\xff", "are no PeerHello"),
        (OPENING.pack(frames.MAGIC, 9, 0), "speaks version 9"),
    ],
)
async def test_what_no_node_sends_is_cut_off(sent: bytes, said: str, caplog: pytest.LogCaptureFixture) -> None:
    async with owner_node() as owner:
        await asyncio.to_thread(send_and_hear, owner.address, sent)
        await settled(lambda: said in caplog.text)
        await settled(lambda: owner.server.connections == 0)


async def test_another_version_is_told_which_one_is_spoken_here() -> None:
    async with owner_node() as owner:
        answer = await asyncio.to_thread(send_and_hear, owner.address, OPENING.pack(frames.MAGIC, 9, 0))
        assert "this one 1" in error_of(answer)


async def test_a_node_of_another_version_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    async with owner_node() as owner, link_to(owner.address) as link:
        monkeypatch.setattr(frames, "VERSION", 2)  # of both sides: what is packed here, and what is checked
        monkeypatch.setattr("kvservice.peers.streams_channel.pack_opening", lambda: OPENING.pack(frames.MAGIC, 1, 0))
        with pytest.raises(RecordFormatError, match="speaks version 1"):
            await link.ping()


@pytest.mark.parametrize("size", [0, 15, 17])
async def test_a_uuid_of_another_length_is_refused(size: int) -> None:
    async with owner_node() as owner:
        facts = wire.PeerFacts(uuid=bytes(size), epoch=1, weight=1)
        answer = await asyncio.to_thread(send_and_hear, owner.address, pack_opening() + hello_frame(facts))
        assert "16 bytes" in error_of(answer)


async def test_who_greets_too_slowly_is_cut_off(caplog: pytest.LogCaptureFixture) -> None:
    limits = ServerLimits(handshake_s=0.1, watch_interval_s=0.02)
    async with owner_node(limits=limits) as owner:
        assert await asyncio.to_thread(send_and_hear, owner.address, pack_opening()[:5]) == b""
        await settled(lambda: "waiting for a greeting" in caplog.text)


async def test_who_asks_nothing_for_long_is_cut_off_and_comes_back() -> None:
    limits = ServerLimits(idle_s=0.1, watch_interval_s=0.02)
    async with owner_node(limits=limits) as owner, link_to(owner.address) as link:
        await link.ping()
        await settled(lambda: owner.server.connections == 0)
        await link.ping()
        assert link.counters.failed == 0


def authorize(credentials: Credentials) -> Principal:
    match credentials.token:
        case "right":
            return Principal("peer", Role.NODE)
        case "engine":
            return Principal("some engine", Role.ENGINE)
        case _:
            raise UnauthenticatedError("not a caller that this node knows")


async def test_tokens(caplog: pytest.LogCaptureFixture) -> None:
    async with owner_node(authorize=authorize) as owner:
        async with link_to(owner.address, caller=make_caller(token="right")) as link:
            await link.ping()
        for token, kind in (("wrong", UnauthenticatedError), ("", UnauthenticatedError), ("engine", ForbiddenError)):
            async with link_to(owner.address, caller=make_caller(token=token)) as link:
                with pytest.raises(kind, match=r"refuses this node"):
                    await link.ping()
        assert caplog.text.count("is refused") == 3
        assert "right" not in caplog.text
        assert "wrong" not in caplog.text


async def test_who_is_let_in_no_more_is_cut_off(caplog: pytest.LogCaptureFixture) -> None:
    known = {"peer"}
    limits = ServerLimits(proof_s=0.0, watch_interval_s=0.02)

    def admit(credentials: Credentials) -> Principal:
        if not known:
            raise UnauthenticatedError("not a caller that this node knows")
        return authorize(credentials)

    async with (
        owner_node(authorize=admit, is_current=lambda one: one.name in known, limits=limits) as owner,
        link_to(owner.address, caller=make_caller(token="right")) as link,
    ):
        await link.ping()
        known.clear()
        with pytest.raises(UnavailableError, match="not in force"):
            await link.ping()
        with pytest.raises(UnauthenticatedError):
            await link.ping()
        assert "is cut off: what proved peer" in caplog.text


async def test_two_nodes_with_one_uuid() -> None:
    """The other one has this node's uuid, or a third node's."""
    async with owner_node() as owner:
        twin = make_facts("twin", id_=owner.facts.node.uuid, epoch=owner.facts.node.epoch + 1)
        async with link_to(owner.address, caller=make_caller(twin)) as link:
            with pytest.raises(ConfigError, match=r"remove node\.json from the copy"):
                await link.ping()
        async with link_to(owner.address, caller=make_caller(owner.facts)) as link:
            with pytest.raises(ConfigError, match="leave its address out"):
                await link.ping()


async def test_a_boot_that_a_later_one_followed_is_a_zombie() -> None:
    id_ = uuid.uuid4()
    async with (
        owner_node() as owner,
        link_to(owner.address, caller=make_caller(make_facts(id_=id_, epoch=5))) as old,
        link_to(owner.address, caller=make_caller(make_facts(id_=id_, epoch=6))) as new,
    ):
        await old.ping()
        await new.ping()
        await settled(lambda: owner.server.connections == 1)
        with pytest.raises(StaleEpochError, match="End this process"):
            await old.ping()
        await new.ping()


async def test_connections_of_one_node_are_limited() -> None:
    limits = ServerLimits(connections_per_peer_max=2, watch_interval_s=0.02)
    facts = encode_facts(make_facts())
    async with owner_node(limits=limits) as owner:
        socks = [open_socket(owner.address) for _ in range(2)]
        for sock in socks:
            sock.sendall(pack_opening() + hello_frame(facts))
            await asyncio.to_thread(sock.recv, 1 << 16)
        await settled(lambda: owner.server.sessions.count == 2)
        answer = await asyncio.to_thread(send_and_hear, owner.address, pack_opening() + hello_frame(facts))
        assert "that is the limit" in error_of(answer)
        for sock in socks:
            sock.close()


async def test_connections_in_all_are_limited(caplog: pytest.LogCaptureFixture) -> None:
    async with owner_node(limits=ServerLimits(connections_max=2, watch_interval_s=0.02)) as owner:
        socks = [open_socket(owner.address) for _ in range(2)]
        await settled(lambda: owner.server.connections == 2)
        assert await asyncio.to_thread(send_and_hear, owner.address, b"") == b""
        await settled(lambda: owner.server.refused == 1)
        assert "2 connections are open" in caplog.text
        for sock in socks:
            sock.close()


async def test_a_port_that_is_taken_stops_the_start() -> None:
    async with owner_node() as owner:
        other = StreamServer(owner.server._host, owner.address)
        with pytest.raises(ConfigError, match="set another port"):
            other.start()
