"""A link to a node far away, on loopback: what goes through a port of ours arrives so much later at another one.

    caller -> takes -> line: bytes, and when they may leave -> gives -> node        and the same the other way

A line takes bytes as they come, up to its window, and gives them on in order, ``delay_s`` later, as a long cable does.
Opening a connection takes a round trip. Nothing is lost, but for ``cut``. Also a program, for a process of its own:
python tests/peers/far_link.py 127.0.0.1:50153 --delay-ms 20 prints its port and ends when its standard input does.
"""

import argparse
import math
import mmap
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import NamedTuple

LOCALHOST = "127.0.0.1"
WINDOW_BYTES = 64 << 20
"""In flight in one direction of one connection: 64 ms at 1 GB/s."""
PIECE_BYTES = 256 << 10
BLOCK_BYTES = 2 << 20
"""Of the window, whose page tables are made at once: page by page they cost more than the copy."""
MADV_POPULATE_WRITE = 23
SLOW_PIECE_S = 0.005
"""A piece takes a slow link so long at most, so that connections share it evenly."""
QUEUE_S = 0.02
"""What a slow link takes before it has room: more waits with who sends, as with TCP."""
CONNECTIONS_MAX = 64
JOIN_S = 10.0


class FarLink:
    """``with FarLink(address) as link``: who connects to ``link.address`` talks to ``target``, a host and a port.

    ``delay_s``: one way; may be changed at any time. ``bytes_per_s``: of each direction, of all connections together.
    ``there`` and ``back`` are its directions.
    """

    def __init__(self, target: tuple[str, int], delay_s: float = 0.0, bytes_per_s: float = math.inf) -> None:
        self.delay_s = delay_s
        self.there, self.back = Wire(bytes_per_s), Wire(bytes_per_s)
        self.connections = 0
        self._target = target
        self._listener = socket.create_server((LOCALHOST, 0), backlog=64)
        self.address: tuple[str, int] = (LOCALHOST, self._listener.getsockname()[1])
        self._lock = threading.Lock()
        self._is_closed = False
        self._open: set[_Connection] = set()
        self._threads = [threading.Thread(target=self._accept, name="far link", daemon=True)]
        self._threads[0].start()

    def __enter__(self) -> "FarLink":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def stall(self, seconds: float = math.inf) -> None:
        """Nothing arrives anywhere for so long, or until ``thaw``; then all of it does, in order."""
        self.there.stall(seconds)
        self.back.stall(seconds)

    def thaw(self) -> None:
        """A stall ends."""
        self.there.thaw()
        self.back.thaw()

    def cut(self) -> None:
        """Break all connections; what was on its way is lost. New ones may come."""
        with self._lock:
            connections = list(self._open)
        for one in connections:
            one.cut()

    def close(self) -> None:
        """Break all, take nobody any more, and wait for the threads."""
        with self._lock:
            self._is_closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        self._threads[0].join(JOIN_S)
        self.there.close()
        self.back.close()
        self.cut()
        for thread in self._threads:
            thread.join(JOIN_S)

    # Connections

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                caller, _ = self._listener.accept()
                if len(self._open) >= CONNECTIONS_MAX:
                    caller.close()
                    continue
                thread = threading.Thread(target=self._serve, args=(caller,), name="far link", daemon=True)
                self._threads.append(thread)
                thread.start()

    def _serve(self, caller: socket.socket) -> None:
        came_s = time.monotonic()
        try:
            node = socket.create_connection(self._target)
        except OSError:
            caller.close()
            return
        connection = _Connection(self, caller, node, came_s + 2 * self.delay_s)
        with self._lock:
            self.connections += 1
            self._open.add(connection)
            is_late = self._is_closed
        if is_late:
            connection.cut()
        connection.run()
        with self._lock:
            self._open.discard(connection)


class Wire:
    """One direction of a link, for all its connections. ``passed``: bytes that arrived at its end."""

    def __init__(self, bytes_per_s: float) -> None:
        self.passed = 0
        self._bytes_per_s = bytes_per_s
        self._free_s = self._still_until_s = -math.inf
        self._is_closed = False
        self._act: tuple[int, Callable[[], None]] | None = None
        self._changed = threading.Condition()

    def after(self, count: int, act: Callable[[], None]) -> None:
        """Call ``act``, once, as soon as so many further bytes have arrived, and before any more do."""
        with self._changed:
            self._act = (self.passed + count, act)

    def stall(self, seconds: float = math.inf) -> None:
        """Nothing arrives for so long, or until ``thaw``."""
        with self._changed:
            self._still_until_s = max(self._still_until_s, time.monotonic() + seconds)

    def thaw(self) -> None:
        """A stall ends."""
        with self._changed:
            self._still_until_s = -math.inf
            self._changed.notify_all()

    def close(self) -> None:
        """Nobody waits any more."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    # For lines

    @property
    def piece_bytes(self) -> int:
        """So many are taken at a time."""
        return int(min(PIECE_BYTES, max(512.0, self._bytes_per_s * SLOW_PIECE_S)))

    def full_s(self) -> float:
        """Seconds until it has room for more; 0: it has."""
        return max(0.0, self._free_s - QUEUE_S - time.monotonic())

    def take(self, count: int, now_s: float) -> float:
        """When the last of so many bytes has left this end."""
        with self._changed:
            self._free_s = max(self._free_s, now_s) + count / self._bytes_per_s
            return self._free_s

    def wait_until(self, due_s: float) -> None:
        """Return once what is due then may arrive."""
        self._look()
        if max(due_s, self._still_until_s) <= time.monotonic():  # the usual case of a short link, without the lock
            return
        with self._changed:
            while not self._is_closed:
                left_s = max(due_s, self._still_until_s) - time.monotonic()
                if left_s <= 0:
                    return
                self._changed.wait(None if math.isinf(left_s) else left_s)

    def _look(self) -> None:
        with self._changed:
            if self._act is None or self.passed < self._act[0]:
                return
            act, self._act = self._act[1], None
        act()

    def give(self, count: int) -> None:
        """So many arrived."""
        with self._changed:
            self.passed += count
            self._changed.notify_all()

    def wait_passed(self, count: int, seconds: float) -> bool:
        """Until so many arrived; who receives may have them a moment before they are counted. False: they did not."""
        with self._changed:
            return self._changed.wait_for(lambda: self.passed >= count, seconds)


class _Piece(NamedTuple):
    """Bytes ``[start, start + length)`` of a line's ring; none: whoever sends has ended."""

    due_s: float
    start: int
    length: int


class _Line:
    """One direction of one connection. ``opens_s``: nothing leaves before. A thread takes, another one gives."""

    def __init__(self, link: FarLink, wire: Wire, ends: tuple[socket.socket, socket.socket], opens_s: float) -> None:
        self._link = link
        self._wire = wire
        self._source, self._sink = ends
        self._opens_s = opens_s
        self._pages = mmap.mmap(-1, WINDOW_BYTES)  # taken from memory as it is used
        self._ring = memoryview(self._pages)
        self._pieces: deque[_Piece] = deque()
        self._taken = self._given = self._populated = 0
        self._is_cut = False
        self._changed = threading.Condition()

    def cut(self) -> None:
        with self._changed:
            self._is_cut = True
            self._changed.notify_all()

    def close(self) -> None:
        self._ring.release()
        self._pages.close()

    def take(self) -> None:
        """Until whoever sends has ended."""
        count = 1
        while count and (room := self._room()) is not None:
            if (full_s := self._wire.full_s()) > 0:
                with self._changed:
                    self._changed.wait(full_s)
                continue
            start, end = room
            self._populate(end)
            try:
                count = self._source.recv_into(self._ring[start:end])
            except OSError:
                count = 0
            left_s = self._wire.take(count, max(time.monotonic(), self._opens_s))
            self._put(_Piece(left_s + self._link.delay_s, start, count))

    def _room(self) -> tuple[int, int] | None:
        """Where to take more bytes; None: they are not wanted any more."""
        with self._changed:
            while self._taken - self._given == WINDOW_BYTES and not self._is_cut:
                self._changed.wait()
            if self._is_cut:
                return None
            if self._taken == self._given:  # from the start again: those pages are in the core's cache
                self._taken = self._given = 0
            start, free = self._taken % WINDOW_BYTES, WINDOW_BYTES - (self._taken - self._given)
            return start, min(start + free, start + self._wire.piece_bytes, WINDOW_BYTES)

    def _populate(self, end: int) -> None:
        while self._populated < end:
            with suppress(OSError):  # an older kernel
                self._pages.madvise(MADV_POPULATE_WRITE, self._populated, BLOCK_BYTES)
            self._populated += BLOCK_BYTES

    def _put(self, piece: _Piece) -> None:
        with self._changed:
            self._taken += piece.length
            self._pieces.append(piece)
            self._changed.notify_all()

    def give(self) -> bool:
        """Until all was given; False: nobody takes it any more."""
        with suppress(OSError):
            while (piece := self._next()) is not None:
                self._wire.wait_until(piece.due_s)
                if self._is_cut:
                    return False
                if not piece.length:
                    self._sink.shutdown(socket.SHUT_WR)
                    return True
                self._sink.sendall(self._ring[piece.start : piece.start + piece.length])
                self._wire.give(piece.length)
                with self._changed:
                    self._given += piece.length
                    self._changed.notify_all()
        return False

    def _next(self) -> _Piece | None:
        with self._changed:
            while not self._pieces and not self._is_cut:
                self._changed.wait()
            return None if self._is_cut else self._pieces.popleft()


class _Connection:
    """A caller and the node, and a line each way."""

    def __init__(self, link: FarLink, caller: socket.socket, node: socket.socket, opens_s: float) -> None:
        self._socks = caller, node
        for sock in self._socks:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._lines = (
            _Line(link, link.there, (caller, node), opens_s),
            _Line(link, link.back, (node, caller), -math.inf),
        )

    def run(self) -> None:
        """Until both ends have ended."""
        works = [work for line in self._lines for work in (line.take, partial(self._give, line))]
        threads = [threading.Thread(target=work, name="far line", daemon=True) for work in works]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for one in (*self._lines, *self._socks):
            one.close()

    def _give(self, line: _Line) -> None:
        if not line.give():
            self.cut()

    def cut(self) -> None:
        """Break it. From any thread."""
        for sock in self._socks:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for line in self._lines:
            line.cut()


def main() -> int:
    """A link until standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("target", help="host:port")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="one way")
    parser.add_argument("--bytes-per-s", type=float, default=math.inf, help="of each direction")
    asked = parser.parse_args()
    host, _, port = asked.target.rpartition(":")
    with FarLink((host, int(port)), asked.delay_ms / 1e3, asked.bytes_per_s) as link:
        sys.stdout.write(f"{link.address[1]}\n")
        sys.stdout.flush()
        sys.stdin.read()
    return 0


if __name__ == "__main__":
    sys.exit(main())
