"""The data socket: hands the arena's descriptor to a session of the same host, and carries its calls.

Grammar: model/frames.py. The connection that got the arena stays open as long as the client has the arena mapped: it
is how the node knows that a lost session's process may still write (Store.detach). Calls go over further connections,
so that one which is given up can be closed. A session that does not write gets a read-only descriptor.
"""

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path

from kvservice.access.buckets import Buckets
from kvservice.calls import CacheCalls
from kvservice.control_socket import CallConnection
from kvservice.model.errors import StaleEpochError, UnknownSessionError
from kvservice.model.frames import (
    ARENA_MAGIC,
    CALLS_MAGIC,
    HELLO,
    STATUS_BAD_REQUEST,
    STATUS_OK,
    STATUS_TOO_MANY,
    STATUS_UNKNOWN_SESSION,
    WELCOME,
    WELCOME_TEXT_BYTES_MAX,
)
from kvservice.sessions import Session

REQUEST_TIMEOUT_S = 5.0
ANSWERING_MAX = 256
CONNECTIONS_MAX = 16384
CONNECTIONS_PER_SESSION_MAX = 8
ACCEPT_PAUSE_S = 0.1

log = logging.getLogger(__name__)


class DataSocket:
    """Serves arena and calls to sessions. Lives on the event loop that starts it."""

    def __init__(
        self,
        path: Path,
        arena_bytes: int,
        calls: CacheCalls,
        open_descriptor: Callable[[bool], int],
        buckets: Buckets | None = None,
    ) -> None:
        """``open_descriptor(is_writable)`` gives a new descriptor, which is closed here after it was sent.

        ``buckets``: of principals that may not call as often as they like.
        """
        self._path = path
        self._arena_bytes = arena_bytes
        self._calls = calls
        self._open_descriptor = open_descriptor
        self._buckets = buckets
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._answering: set[asyncio.Task[None]] = set()
        self._connections: set[CallConnection] = set()

    def start(self) -> None:
        """Bind (mode 0600) and answer until ``stop``."""
        self._listener = bind_private(self._path)
        self._accepting = asyncio.get_running_loop().create_task(self._accept(self._listener))

    async def stop(self) -> None:
        """Stop answering, close every connection and remove the socket. Safe to call twice."""
        tasks = [task for task in (self._accepting, *self._answering) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(connection.stop() for connection in self._connections))
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
            if len(self._answering) >= ANSWERING_MAX or len(self._connections) >= CONNECTIONS_MAX:
                peer.close()  # as if the queue of the listening socket were full
                continue
            task = loop.create_task(self._answer(peer))
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)

    async def _answer(self, peer: socket.socket) -> None:
        peer.setblocking(False)
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                hello = await _receive(peer, HELLO.size)
            await self._greet(peer, hello)
        except (OSError, TimeoutError) as error:
            log.warning("data socket: a client went away before it was greeted: %r", error)
            peer.close()
        except asyncio.CancelledError:
            peer.close()
            raise

    async def _greet(self, peer: socket.socket, hello: bytes) -> None:
        magic, id_, epoch = HELLO.unpack(hello) if len(hello) == HELLO.size else (b"", b"", 0)
        if magic not in (ARENA_MAGIC, CALLS_MAGIC):
            _refuse(peer, STATUS_BAD_REQUEST, "not a request for the arena or for calls: wrong magic or length")
            return
        try:
            session = self._calls.node.session(id_, epoch)
        except (StaleEpochError, UnknownSessionError):
            _refuse(peer, STATUS_UNKNOWN_SESSION, "the session is not open here; open one over gRPC first")
            return
        if session.connections >= CONNECTIONS_PER_SESSION_MAX:
            _refuse(peer, STATUS_TOO_MANY, f"a session may have {CONNECTIONS_PER_SESSION_MAX} connections; close some")
            return
        await self._welcome(peer, session, with_arena=magic == ARENA_MAGIC)

    async def _welcome(self, peer: socket.socket, session: Session, *, with_arena: bool) -> None:
        """Attached before the client knows of it: there is no moment at which it has the arena and does not count."""
        store = self._calls.node.store
        store.attach(session)
        try:
            self._send_welcome(peer, session, with_arena=with_arena)
        except BaseException:
            store.detach(session)
            raise
        connection = CallConnection(self._calls, session, self._connections.discard, self._buckets)
        self._connections.add(connection)
        await asyncio.get_running_loop().connect_accepted_socket(lambda: connection, peer)

    def _send_welcome(self, peer: socket.socket, session: Session, *, with_arena: bool) -> None:
        welcome = WELCOME.pack(STATUS_OK, self._arena_bytes)
        if not with_arena:
            peer.send(welcome)
            return
        descriptor = self._open_descriptor(session.may_write)
        try:
            socket.send_fds(peer, [welcome], [descriptor])
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


def _refuse(peer: socket.socket, status: int, text: str) -> None:
    peer.send(WELCOME.pack(status, 0) + text.encode()[:WELCOME_TEXT_BYTES_MAX])
    peer.close()
