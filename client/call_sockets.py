"""Connections to a node's data socket, blocking: the one that brings the arena, and those that carry calls.

The grammar is kvservice/model/frames.py. Foreign errors become ours here. A connection whose call was given up is
closed: the node then cancels what it still does for it, and takes back what nobody read.
"""

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from kvservice.model.errors import StaleEpochError, UnavailableError, error_from_code
from kvservice.model.frames import (
    ANSWER,
    BUFFER_BYTES,
    CALLS_MAGIC,
    HELLO,
    STATUS_UNKNOWN_SESSION,
    WELCOME,
    WELCOME_TEXT_BYTES_MAX,
    check_length,
    pack_call,
)
from kvservice.wire.v1.cache_pb2 import Welcome

GREETING_TIMEOUT_S = 5.0
CONNECTIONS_MAX = 4
"""Calls of one session that are under way at a time; one more goes over gRPC. A node takes 8 connections a session."""
ADVICE = "check that `kvservice serve` runs there, then open a new session"
_FAREWELL = pack_call("", b"", is_post=True)


def greet(magic: bytes, welcome: Welcome) -> tuple[socket.socket, int, list[int]]:
    """A connection for the session that ``welcome`` opened, the arena's size, and the descriptors that came with it.

    Raises UnavailableError when the data socket does not answer, StaleEpochError when it does not know the session.
    """
    path = welcome.arena.data_socket
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    descriptors: list[int] = []
    try:
        peer.settimeout(GREETING_TIMEOUT_S)
        peer.connect(path)
        peer.sendall(HELLO.pack(magic, welcome.session_id, welcome.boot_epoch))
        answer, descriptors, _, _ = socket.recv_fds(peer, WELCOME.size + WELCOME_TEXT_BYTES_MAX, 1)
        return peer, _check_welcome(path, answer), descriptors
    except BaseException as error:
        for descriptor in descriptors:
            os.close(descriptor)
        peer.close()
        if isinstance(error, OSError):
            raise UnavailableError(f"the data socket {path} does not answer: {error}; {ADVICE}") from error
        raise


def _check_welcome(path: str, answer: bytes) -> int:
    if len(answer) < WELCOME.size:
        raise UnavailableError(f"the data socket {path} closed without an answer; is the node stopping?")
    status, arena_bytes = WELCOME.unpack_from(answer)
    text = f"{path}: {answer[WELCOME.size :].decode(errors='replace')}"
    if status == STATUS_UNKNOWN_SESSION:
        raise StaleEpochError(f"{text}; open a new session")
    if status:
        raise UnavailableError(text)
    return int(arena_bytes)


class CallSocket:
    """One connection for the calls of a session, one at a time. Its pool gives it to one thread at a time.

    ``is_usable`` is False once a call was given up: what comes next on it may be the answer to that one.
    """

    def __init__(self, welcome: Welcome) -> None:
        self.is_usable = True
        self._path = welcome.arena.data_socket
        self._socket, _, _ = greet(CALLS_MAGIC, welcome)
        self._timeout_s = GREETING_TIMEOUT_S
        self._buffer = bytearray(BUFFER_BYTES)

    def call(self, name: str, message: bytes, timeout_s: float) -> bytes:
        """The reply to one call. Raises the error that the node named, or UnavailableError when it does not answer."""
        self.begin(name, message, timeout_s)
        return self.finish(name, timeout_s)

    def begin(self, name: str, message: bytes, timeout_s: float) -> None:
        """Send a call, whose answer ``finish`` reads: until then the connection is of no use for anything else."""
        frame = pack_call(name, message)
        try:
            self._wait_at_most(timeout_s)
            self._socket.sendall(frame)
        except BaseException as error:
            self.is_usable = False
            if isinstance(error, OSError):
                raise self._unavailable(name, timeout_s, error) from error
            raise

    def finish(self, name: str, timeout_s: float) -> bytes:
        """The reply to the call that ``begin`` sent, within so many seconds from now. Raises as ``call``."""
        deadline_s = time.monotonic() + timeout_s
        try:
            self._wait_at_most(timeout_s)
            code, answer = self._receive(deadline_s)
        except BaseException as error:
            self.is_usable = False
            if isinstance(error, OSError):
                raise self._unavailable(name, timeout_s, error) from error
            raise
        if code:
            raise error_from_code(code, answer.decode(errors="replace"))
        return answer

    def post(self, name: str, message: bytes) -> None:
        """Send a call that gets no answer. Raises UnavailableError when it cannot be sent.

        It waits for nothing but room in the socket, 200 KiB, and no longer than the call before it might have.
        """
        frame = pack_call(name, message, is_post=True)
        try:
            self._socket.sendall(frame)
        except OSError as error:
            self.is_usable = False
            raise UnavailableError(f"{self._path} does not take {name}: {error}; {ADVICE}") from error
        except BaseException:
            self.is_usable = False
            raise

    def close(self) -> None:
        """Close. If the last answer was read, the node hears so first: what it gave is then not taken back."""
        if self.is_usable:
            with suppress(OSError):  # the other end may have closed already
                self._socket.sendall(_FAREWELL)
        self._socket.close()

    def shut_down(self) -> None:
        """End what another thread waits for on it."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _unavailable(self, name: str, timeout_s: float, error: OSError) -> UnavailableError:
        if isinstance(error, TimeoutError):
            return UnavailableError(f"{self._path} did not answer {name} within {timeout_s:g} s; {ADVICE}")
        return UnavailableError(f"{self._path} cannot be reached for {name}: {error}; {ADVICE}")

    def _wait_at_most(self, timeout_s: float) -> None:
        if timeout_s != self._timeout_s:  # setting it costs a system call, 2 us
            self._socket.settimeout(timeout_s)
            self._timeout_s = timeout_s

    def _receive(self, deadline_s: float) -> tuple[str, bytes]:
        view = memoryview(self._buffer)
        held = self._read(view, ANSWER.size, deadline_s)  # mostly all of it: one system call
        message_bytes, code_bytes = ANSWER.unpack_from(view)
        check_length("an answer", message_bytes)
        start = ANSWER.size + code_bytes
        end = start + message_bytes
        if end > len(view):
            view = memoryview(bytearray(end))
            view[:held] = self._buffer[:held]
        held += self._read(view[held:end], end - held, deadline_s)
        if held != end:
            raise ConnectionError(f"{held - end} bytes behind the answer; client and node are of different versions")
        return str(view[ANSWER.size : start], "ascii", "replace"), bytes(view[start:end])

    def _read(self, view: memoryview, wanted: int, deadline_s: float) -> int:
        """Read ``wanted`` bytes, and more if they are there and there is room; how many there were."""
        held = 0
        while held < wanted:
            if held:
                self._wait_at_most(max(deadline_s - time.monotonic(), 0.001))
            count = self._socket.recv_into(view[held:])
            if not count:
                raise ConnectionResetError("the connection was closed")
            held += count
        return held


class BegunCall:
    """A call that was sent, and the connection over which its answer comes. One thread at a time."""

    def __init__(self, taken: CallSocket, name: str, give_back: Callable[[CallSocket], None]) -> None:
        self._taken: CallSocket | None = taken
        self._name = name
        self._give_back = give_back

    def finish(self, timeout_s: float) -> bytes:
        """The reply. Once only. Raises as ``CallSocket.call``."""
        taken, self._taken = self._taken, None
        assert taken is not None, self._name
        try:
            return taken.finish(self._name, timeout_s)
        finally:
            self._give_back(taken)

    def give_up(self) -> None:
        """Nobody wants the answer any more: the connection is closed. Does nothing once it was read."""
        taken, self._taken = self._taken, None
        if taken is not None:
            taken.is_usable = False
            self._give_back(taken)


class CallSockets:
    """The call connections of one session, opened as they are needed. Safe from any thread.

    A pool and not a lock on one connection: a Commit waits for its verification, an Await for a disk, and neither may
    hold up another thread's lookup. A thread that is alone always gets the same connection.
    """

    def __init__(self, welcome: Welcome) -> None:
        self._welcome = welcome
        self._lock = threading.Lock()
        self._idle: list[CallSocket] = []
        self._busy: set[CallSocket] = set()
        self._count = 0
        self._is_closed = False

    def call(self, name: str, message: bytes, timeout_s: float) -> bytes | None:
        """The reply to a call; None if every connection is in use. Raises as ``CallSocket.call``."""
        taken = self._take()
        if taken is None:
            return None
        try:
            return taken.call(name, message, timeout_s)
        finally:
            self._give_back(taken)

    def begin(self, name: str, message: bytes, timeout_s: float) -> "BegunCall | None":
        """Send a call whose answer is read later; None if every connection is in use. Raises as ``CallSocket.call``."""
        taken = self._take()
        if taken is None:
            return None
        try:
            taken.begin(name, message, timeout_s)
        except BaseException:
            self._give_back(taken)
            raise
        return BegunCall(taken, name, self._give_back)

    def post(self, name: str, message: bytes) -> bool:
        """Send a call that nobody waits for; False if every connection is in use. Raises UnavailableError.

        The node reads it before what this thread sends later, which goes over the same connection, or over another that
        becomes readable later.
        """
        taken = self._take()
        if taken is None:
            return False
        try:
            taken.post(name, message)
        finally:
            self._give_back(taken)
        return True

    def close(self) -> None:
        """Close all; calls that wait for an answer fail. Safe to call twice."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
            for one in self._busy:
                one.shut_down()
        for one in idle:
            one.close()

    def _take(self) -> CallSocket | None:
        with self._lock:
            if self._is_closed:
                raise UnavailableError("the session was closed meanwhile; open a new session")
            if not self._idle and self._count >= CONNECTIONS_MAX:
                return None
            taken = self._idle.pop() if self._idle else None  # the one used last: its posts come before this call
            if taken is not None:
                self._busy.add(taken)
                return taken
            self._count += 1
        return self._open()

    def _open(self) -> CallSocket:
        try:
            opened = CallSocket(self._welcome)
        except BaseException:
            with self._lock:
                self._count -= 1
            raise
        with self._lock:
            self._busy.add(opened)
        return opened

    def _give_back(self, taken: CallSocket) -> None:
        with self._lock:
            self._busy.discard(taken)
            if taken.is_usable and not self._is_closed:
                self._idle.append(taken)
                return
            self._count -= 1
        taken.close()
