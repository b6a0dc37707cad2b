"""The data socket hands the arena to open sessions only, and read-only to those that do not write.

It is also how the node knows that a lost session's process may still write: no byte of it goes to others until then.
"""

import asyncio
import errno
import mmap
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvservice.data_socket import CONNECTIONS_PER_SESSION_MAX, DataSocket, bind_private
from kvservice.model.frames import (
    ARENA_MAGIC,
    CALLS_MAGIC,
    HELLO,
    STATUS_BAD_REQUEST,
    STATUS_OK,
    STATUS_TOO_MANY,
    STATUS_UNKNOWN_SESSION,
    WELCOME,
)
from tests.server.builders import EPOCH, Client, GatedWorker, World, make_identity, make_meta, make_planes, until_parked

META = make_meta(make_identity())


class Served:
    """A node's data socket, and the connections to it that a test holds."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.worker = GatedWorker()
        self.world = World(worker=self.worker)
        self.server = DataSocket(path, self.world.arena.bytes, self.world.calls, self._open_descriptor)
        self.peers: list[socket.socket] = []

    def _open_descriptor(self, is_writable: bool) -> int:
        arena = self.world.arena
        return os.dup(arena.descriptor()) if is_writable else arena.read_only_descriptor()

    async def ask(self, hello: bytes) -> tuple[int, int, str, list[int]]:
        """Status, arena bytes, text and descriptors; the connection stays open."""
        return await asyncio.to_thread(self._ask, hello)

    def _ask(self, hello: bytes) -> tuple[int, int, str, list[int]]:
        peer = socket.socket(socket.AF_UNIX)
        self.peers.append(peer)
        peer.settimeout(5)
        peer.connect(str(self.path))
        peer.sendall(hello)
        answer, descriptors, _, _ = socket.recv_fds(peer, 512, 1)
        status, size = WELCOME.unpack_from(answer)
        return status, size, answer[WELCOME.size :].decode(), descriptors

    async def map(self, client: Client) -> socket.socket:
        """A connection that holds the arena of a session."""
        status, _, _, descriptors = await self.ask(hello(client))
        assert status == STATUS_OK
        os.close(descriptors[0])
        return self.peers[-1]

    async def until_attached(self, client: Client, count: int) -> None:
        """Wait until the node knows of so many connections of a session that may have ended."""
        async with asyncio.timeout(5):
            while client.session.connections != count:  # noqa: ASYNC110  a socket closes without an event
                await asyncio.sleep(0.001)


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    found = Served(tmp_path / "runtime" / "d.sock")
    found.server.start()
    yield found
    for peer in found.peers:
        peer.close()
    await found.server.stop()
    await found.server.stop()
    await found.world.node.stop()
    found.world.check()
    assert found.world.is_empty_handed()
    assert not found.world.node.store.strays
    assert not found.path.exists()


def hello(client: Client, magic: bytes = ARENA_MAGIC, epoch: int = EPOCH) -> bytes:
    return HELLO.pack(magic, client.id, epoch)


async def test_a_writer_gets_a_descriptor_it_can_write(served: Served) -> None:
    status, size, _, descriptors = await served.ask(hello(served.world.client()))
    assert (status, size) == (STATUS_OK, served.world.arena.bytes)
    with mmap.mmap(descriptors[0], size) as mapped:
        mapped[0] = 1
    os.close(descriptors[0])


async def test_a_reader_cannot_map_the_arena_writable(served: Served) -> None:
    _, size, _, descriptors = await served.ask(hello(served.world.client(may_write=False)))
    with pytest.raises(PermissionError):
        mmap.mmap(descriptors[0], size, access=mmap.ACCESS_WRITE)
    os.close(descriptors[0])


async def test_a_connection_for_calls_brings_no_descriptor(served: Served) -> None:
    status, size, _, descriptors = await served.ask(hello(served.world.client(), CALLS_MAGIC))
    assert (status, size, descriptors) == (STATUS_OK, served.world.arena.bytes, [])


@pytest.mark.parametrize("magic", [ARENA_MAGIC, CALLS_MAGIC])
async def test_unknown_sessions_and_old_epochs_get_nothing(served: Served, magic: bytes) -> None:
    client = served.world.client()
    for bad in (HELLO.pack(magic, b"x" * 16, EPOCH), hello(client, magic, EPOCH + 1)):
        status, _, text, descriptors = await served.ask(bad)
        assert (status, descriptors) == (STATUS_UNKNOWN_SESSION, [])
        assert "open one" in text
    assert not client.session.connections


async def test_a_foreign_protocol_is_refused(served: Served) -> None:
    status, _, _, descriptors = await served.ask(b"GET / HTTP/1.1\r\nHost: somewhere\r\n\r\n")
    assert (status, descriptors) == (STATUS_BAD_REQUEST, [])


async def test_a_sessions_connections_are_bounded(served: Served) -> None:
    client, other = served.world.client(), served.world.client()
    for _ in range(CONNECTIONS_PER_SESSION_MAX):
        assert (await served.ask(hello(client, CALLS_MAGIC)))[0] == STATUS_OK
    status, _, text, _ = await served.ask(hello(client, CALLS_MAGIC))
    assert status == STATUS_TOO_MANY
    assert str(CONNECTIONS_PER_SESSION_MAX) in text
    assert (await served.ask(hello(other, CALLS_MAGIC)))[0] == STATUS_OK


async def test_the_socket_is_private(served: Served) -> None:
    assert served.path.stat().st_mode & 0o777 == 0o600
    assert served.path.parent.stat().st_mode & 0o777 == 0o700


async def test_a_client_that_says_nothing_does_not_stop_the_others(served: Served) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(str(served.path))
        await served.map(served.world.client())


async def test_running_out_of_descriptors_is_survived(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    accept, refused = loop.sock_accept, 0

    async def refuse_once(listener: socket.socket) -> tuple[socket.socket, object]:
        nonlocal refused
        if not refused:
            refused = 1
            raise OSError(errno.EMFILE, "Too many open files")
        return await accept(listener)

    monkeypatch.setattr("kvservice.data_socket.ACCEPT_PAUSE_S", 0.0)
    monkeypatch.setattr(loop, "sock_accept", refuse_once)
    for _ in range(3):  # the first accept was under way already
        await served.map(served.world.client())
    assert refused


async def test_a_client_that_cannot_be_given_the_arena_is_not_counted(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: bool) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    client = served.world.client()
    monkeypatch.setattr(served.server, "_open_descriptor", fail)
    with pytest.raises(Exception, match=r"unpack|reset"):  # closed without a welcome
        await served.ask(hello(client))
    assert not client.session.connections


# Who may still write


async def test_bytes_of_a_lost_session_go_to_nobody_while_its_process_may_write_them(served: Served) -> None:
    world = served.world
    lost, other = world.client(), world.client()
    peer = await served.map(lost)
    await lost.begin(META, make_planes())
    used_bytes = world.node.tier.used_bytes
    lost.close()
    world.check()
    assert not world.node.store.open
    assert world.node.tier.used_bytes == used_bytes
    reserved = await other.reserve(META, 4096)
    assert reserved.WhichOneof("outcome") == "reserved", "the key is free again, though its bytes are not"
    (strayed,) = world.node.store.strays[lost.session.id]
    extent = reserved.reserved.extent
    assert extent.offset >= strayed.end or extent.offset + extent.length <= strayed.offset
    peer.close()
    await served.until_attached(lost, 0)
    assert not world.node.store.strays
    assert world.node.tier.used_bytes == 4096
    other.close()
    assert world.node.tier.used_bytes == 0


async def test_strays_stay_until_the_last_connection_is_closed(served: Served) -> None:
    client = served.world.client()
    peers = [await served.map(client), await served.map(client)]
    await client.reserve(META, 4096)
    client.close()
    peers[1].close()
    await served.until_attached(client, 1)
    assert served.world.node.tier.used_bytes == 4096
    peers[0].close()
    await served.until_attached(client, 0)
    assert served.world.node.tier.used_bytes == 0


async def test_a_session_without_a_connection_leaves_no_strays(served: Served) -> None:
    client = served.world.client()
    (await served.map(client)).close()
    await served.until_attached(client, 0)
    await client.reserve(META, 4096)
    client.close()
    assert served.world.node.tier.used_bytes == 0


async def test_a_connection_that_closes_first_leaves_the_session_what_it_holds(served: Served) -> None:
    client = served.world.client()
    peer = await served.map(client)
    reserved = (await client.reserve(META, 4096)).reserved
    peer.close()
    await served.until_attached(client, 0)
    assert list(served.world.node.store.open) == [reserved.id]


async def test_a_commit_under_way_when_its_session_is_lost_frees_its_bytes_when_it_is_done(served: Served) -> None:
    """Who commits has written all that it will: nothing strays."""
    client = served.world.client()
    await served.map(client)
    commit = asyncio.create_task(client.commit(*await client.begin(META, make_planes())))
    await until_parked(served.worker)
    client.close()
    assert served.world.node.tier.used_bytes
    served.worker.release()
    assert (await commit).error.code == "NOT_OWNED"
    assert served.world.node.tier.used_bytes == 0


async def test_a_mirror_that_strays_lets_go_of_its_master(served: Served) -> None:
    world = served.world
    writer, lost = world.client(), world.client()
    storing = asyncio.create_task(writer.store(META, make_planes()))
    await until_parked(served.worker)
    served.worker.release()
    reference = await storing
    await served.map(lost)
    await lost.reserve(make_meta(make_identity(), history=("a",), master=reference), 4096)
    lost.close()
    world.check()
    assert await writer.delete(META) == 1
    assert not world.node.catalog.hidden


def test_a_stale_socket_is_replaced_and_a_live_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "s"
    bind_private(path).close()
    live = bind_private(path)
    with pytest.raises(FileExistsError, match="another server"):
        bind_private(path)
    live.close()


def test_a_file_in_the_way_is_kept_and_named(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.write_text("precious")
    with pytest.raises(FileExistsError, match="in the way"):
        bind_private(path)
    assert path.read_text() == "precious"
