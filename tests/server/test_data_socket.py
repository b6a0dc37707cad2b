"""The data socket hands the arena to open sessions only, and read-only to those that do not write."""

import asyncio
import errno
import mmap
import os
import socket
import struct
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvservice.data_socket import STATUS_BAD_REQUEST, STATUS_OK, STATUS_UNKNOWN_SESSION, DataSocket, bind_private

WRITER, READER, EPOCH, ARENA_BYTES = b"w" * 16, b"r" * 16, 7, 1 << 16
ACCESS = {(WRITER, EPOCH): True, (READER, EPOCH): False}


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Path]:
    descriptor = os.memfd_create("arena")
    os.ftruncate(descriptor, ARENA_BYTES)

    def open_descriptor(is_writable: bool) -> int:
        flags = os.O_RDWR if is_writable else os.O_RDONLY
        return os.open(f"/proc/self/fd/{descriptor}", flags)

    path = tmp_path / "runtime" / "d.sock"
    server = DataSocket(path, ARENA_BYTES, lambda session, epoch: ACCESS.get((session, epoch)), open_descriptor)
    server.start()
    yield path
    await server.stop()
    os.close(descriptor)
    assert not path.exists()


def ask(path: Path, request: bytes) -> tuple[int, int, str, list[int]]:
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(5)
        peer.connect(str(path))
        peer.sendall(request)
        reply, descriptors, _, _ = socket.recv_fds(peer, 512, 1)
    status, size = struct.unpack("<IQ", reply[:12])
    return status, size, reply[12:].decode(), descriptors


def request(session: bytes, epoch: int = EPOCH) -> bytes:
    return b"KVSARENA" + session + epoch.to_bytes(8, "little")


async def test_a_writer_gets_a_descriptor_it_can_write(served: Path) -> None:
    status, size, _, descriptors = await asyncio.to_thread(ask, served, request(WRITER))
    assert (status, size) == (STATUS_OK, ARENA_BYTES)
    with mmap.mmap(descriptors[0], size) as mapped:
        mapped[0] = 1
    os.close(descriptors[0])


async def test_a_reader_cannot_map_the_arena_writable(served: Path) -> None:
    _, size, _, descriptors = await asyncio.to_thread(ask, served, request(READER))
    with pytest.raises(PermissionError):
        mmap.mmap(descriptors[0], size, access=mmap.ACCESS_WRITE)
    os.close(descriptors[0])


@pytest.mark.parametrize("bad", [request(b"x" * 16), request(WRITER, EPOCH + 1)])
async def test_unknown_sessions_and_old_epochs_get_nothing(served: Path, bad: bytes) -> None:
    status, _, message, descriptors = await asyncio.to_thread(ask, served, bad)
    assert (status, descriptors) == (STATUS_UNKNOWN_SESSION, [])
    assert "open one" in message


async def test_a_foreign_protocol_is_refused(served: Path) -> None:
    status, _, _, descriptors = await asyncio.to_thread(ask, served, b"GET / HTTP/1.1\r\nHost: somewhere\r\n\r\n")
    assert (status, descriptors) == (STATUS_BAD_REQUEST, [])


async def test_the_socket_is_private(served: Path) -> None:
    assert served.stat().st_mode & 0o777 == 0o600
    assert served.parent.stat().st_mode & 0o777 == 0o700


async def test_a_client_that_says_nothing_does_not_stop_the_others(served: Path) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(str(served))
        status, _, _, descriptors = await asyncio.to_thread(ask, served, request(WRITER))
    assert status == STATUS_OK
    os.close(descriptors[0])


async def test_running_out_of_descriptors_is_survived(served: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        status, _, _, descriptors = await asyncio.to_thread(ask, served, request(WRITER))
        assert status == STATUS_OK
        os.close(descriptors[0])
    assert refused


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
