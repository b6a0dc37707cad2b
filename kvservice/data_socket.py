"""The data socket: hands the arena's descriptor to a session of the same host, once.

    request := b"KVSARENA" session_id:16 boot_epoch:u64
    reply   := status:u32 arena_bytes:u64 message:utf-8        status 0 comes with one descriptor (SCM_RIGHTS)

A session that does not write gets a read-only descriptor. Little endian. It must never carry payload.
"""

import asyncio
import logging
import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path

REQUEST_BYTES = 32
MESSAGE_BYTES_MAX = 240
REQUEST_TIMEOUT_S = 5.0
ANSWERING_MAX = 256
ACCEPT_PAUSE_S = 0.1
_MAGIC = b"KVSARENA"
_REPLY = struct.Struct("<IQ")
STATUS_OK, STATUS_BAD_REQUEST, STATUS_UNKNOWN_SESSION = 0, 1, 2

log = logging.getLogger(__name__)

SessionAccess = Callable[[bytes, int], "bool | None"]
"""(session id, boot epoch) -> does the session write? None if there is no such session."""


class DataSocket:
    """Serves the arena's descriptor. Lives on the event loop that starts it."""

    def __init__(
        self, path: Path, arena_bytes: int, access: SessionAccess, open_descriptor: Callable[[bool], int]
    ) -> None:
        """``open_descriptor(is_writable)`` gives a new descriptor, which is closed here after it was sent."""
        self._path = path
        self._arena_bytes = arena_bytes
        self._access = access
        self._open_descriptor = open_descriptor
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._answering: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Bind (mode 0600) and answer until ``stop``."""
        self._listener = bind_private(self._path)
        self._accepting = asyncio.get_running_loop().create_task(self._accept(self._listener))

    async def stop(self) -> None:
        """Stop answering and remove the socket. Safe to call twice."""
        tasks = [task for task in (self._accepting, *self._answering) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()
            self._path.unlink(missing_ok=True)
        self._listener = self._accepting = None

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                peer, _ = await loop.sock_accept(listener)
            except OSError as error:
                log.warning("data socket: cannot take a client, out of descriptors? %r; trying again", error)
                await asyncio.sleep(ACCEPT_PAUSE_S)
                continue
            if len(self._answering) >= ANSWERING_MAX:
                peer.close()  # as if the queue of the listening socket were full
                continue
            task = loop.create_task(self._answer(peer))
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)

    async def _answer(self, peer: socket.socket) -> None:
        with peer:
            peer.setblocking(False)
            try:
                async with asyncio.timeout(REQUEST_TIMEOUT_S):
                    self._reply(peer, await _receive(peer, REQUEST_BYTES))
            except (OSError, TimeoutError) as error:
                log.warning("data socket: a client went away before its descriptor was sent: %r", error)

    def _reply(self, peer: socket.socket, request: bytes) -> None:
        if len(request) != REQUEST_BYTES or not request.startswith(_MAGIC):
            _send(peer, STATUS_BAD_REQUEST, "not a request for the arena: wrong magic or length")
            return
        session, epoch = request[8:24], int.from_bytes(request[24:], "little")
        is_writable = self._access(session, epoch)
        if is_writable is None:
            _send(peer, STATUS_UNKNOWN_SESSION, "the session is not open here; open one over gRPC first")
            return
        descriptor = self._open_descriptor(is_writable)
        try:
            socket.send_fds(peer, [_REPLY.pack(STATUS_OK, self._arena_bytes)], [descriptor])
        finally:
            os.close(descriptor)


def bind_private(path: Path) -> socket.socket:
    """A listening unix socket only this user can connect to. A stale socket file is replaced, a live one is not."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    remove_stale_socket(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o177)
    try:
        listener.bind(str(path))
    except OSError:
        listener.close()
        raise
    finally:
        os.umask(mask)
    listener.listen(128)
    listener.setblocking(False)
    return listener


def remove_stale_socket(path: Path) -> None:
    """Remove a socket file that nobody answers on. Raises FileExistsError if a server does, or if it is no socket."""
    if not path.exists():
        return
    if not path.is_socket():
        raise FileExistsError(f"{path} is in the way and is no socket; remove it or choose another --socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
    raise FileExistsError(f"another server answers on {path}; stop it or give this one another --socket")


async def _receive(peer: socket.socket, length: int) -> bytes:
    loop, received = asyncio.get_running_loop(), b""
    while len(received) < length:
        part = await loop.sock_recv(peer, length - len(received))
        if not part:
            break
        received += part
    return received


def _send(peer: socket.socket, status: int, message: str) -> None:
    peer.send(_REPLY.pack(status, 0) + message.encode()[:MESSAGE_BYTES_MAX])
