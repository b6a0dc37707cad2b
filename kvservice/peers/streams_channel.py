"""One connection between nodes, in frames. Blocking: every call lets go of the GIL while it waits for the network.

One thread at a time sends and receives. Nothing times out here, but for a greeting: whoever watches the clock calls
``shut``, from any thread, and what waits then raises. Payload goes straight between socket and arena, by recv_into and
sendfile; with TLS the library's own buffers lie between.
"""

import ipaddress
import os
import socket
import ssl
import struct
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from google.protobuf.message import Message

from kvservice.access.tls import names_in_peercert
from kvservice.model.errors import DiskError
from kvservice.peers.frames import (
    DATA_BYTES_MAX,
    HEADER,
    OPENING,
    Header,
    Kind,
    check_opening,
    pack_header,
    pack_opening,
    parse_header,
    parse_message,
)
from kvservice.storage.buffer import Bytes
from kvservice.storage.mapping import prefault
from kvservice.storage.remote.contract import OnPiece

PIECE_BYTES = 256 << 10
"""Received in one go where the kernel has it: told and verified while the core's cache still holds it."""
NO_DESCRIPTOR = -1
Part = tuple[int, int]
M = TypeVar("M", bound=Message)


@dataclass(frozen=True, slots=True)
class Source:
    """Bytes to send: ``view``, and where the same bytes lie in a file, from which the kernel sends without a copy."""

    view: memoryview
    descriptor: int = NO_DESCRIPTOR
    offset: int = 0


class ClosedError(OSError):
    """The other side closed the connection, or we did."""


class Channel:
    """Frames over ``sock``, a connected blocking socket that is the channel's from now on.

    ``sends_files``: let the kernel send payload from the arena's file. Not by default on loopback: there the receiver
    copies from those very pages, one by one, and both sides pay more CPU than for a copy into the socket (0.54 and 0.46
    s/GB); over a network card the sender saves that copy.
    """

    is_narrow = False
    """Has it so little room that long questions and answers must take turns?"""
    lends = False
    """Does the other side read bytes where they lie, with nothing to tell how far it is?"""

    def __init__(self, sock: socket.socket, *, sends_files: bool | None = None) -> None:
        self._sock = sock
        self._header = bytearray(HEADER.size)
        self.is_tls = isinstance(sock, ssl.SSLSocket)
        if sends_files is None:
            sends_files = not _is_loopback(sock)
        self._sends_files = sends_files and not self.is_tls
        self._wait_all = 0 if self.is_tls else socket.MSG_WAITALL
        self._more = 0 if self.is_tls else socket.MSG_MORE
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def handshake(self) -> None:
        """What must be done before the first byte of ours, by who was called."""
        if isinstance(self._sock, ssl.SSLSocket):
            self._sock.do_handshake()

    def set_timeout(self, seconds: float | None) -> None:
        """How long a step may wait, for who has no clock watched: while a connection is greeted."""
        self._sock.settimeout(seconds)

    # Opening

    def send_opening(self) -> None:
        """Say what is spoken here."""
        self._sock.sendall(pack_opening())

    def receive_opening(self) -> None:
        """Raises FrameError or RecordFormatError unless the other side speaks the same."""
        data = bytearray(OPENING.size)
        self._fill(memoryview(data))
        check_opening(data)

    # Frames

    def send(self, kind: Kind, request: int, message: Message | None = None) -> None:
        """One frame without payload."""
        data = b"" if message is None else message.SerializeToString()
        self._sock.sendall(pack_header(kind, request, len(data)) + data)

    def frames_of(self, source: Source, start: int, end: int, frame_bytes: int = DATA_BYTES_MAX) -> list[Part]:
        """Bytes [start, end) of a source, cut into what one frame of at most ``frame_bytes`` carries."""
        return cut(start, end, frame_bytes)

    def send_data(self, request: int, source: Source, start: int, end: int) -> None:
        """Bytes [start, end) of a source as one data frame."""
        self._sock.sendall(pack_header(Kind.DATA, request, 0, end - start), self._more)
        if not self._sends_files or source.descriptor == NO_DESCRIPTOR:
            self._sock.sendall(source.view[start:end])
            return
        out, at, last = self._sock.fileno(), source.offset + start, source.offset + end
        while at < last:
            count = os.sendfile(out, source.descriptor, at, last - at)
            if not count:
                raise DiskError(f"a file that should be sent ends at {at}, before {last}")
            at += count

    def send_packed(self, request: int, message: Message, payload: Bytes) -> None:
        """One packed frame."""
        data = message.SerializeToString()
        self._sock.sendall(pack_header(Kind.PACKED, request, len(data), len(payload)) + data, self._more)
        self._sock.sendall(payload.data)

    def receive_header(self) -> Header:
        """The next frame's, checked. Raises ClosedError, FrameError."""
        self._fill(memoryview(self._header))
        return parse_header(self._header)

    def receive_message(self, header: Header, message: M) -> M:
        """The frame's message."""
        data = bytearray(header.message_bytes)
        self._fill(memoryview(data))
        parse_message(bytes(data), message)
        return message

    def receive_piece(self, target: memoryview) -> None:
        """Fill ``target`` with payload. Raises CapacityError if the system has no memory for it."""
        prefault(target)
        self._fill(target)

    def receive_pieces(self, target: memoryview, start: int, end: int, on_piece: OnPiece) -> None:
        """Fill ``target`` from ``start`` to ``end`` with payload, and tell of every piece that is there: in order, on
        this thread. Raises CapacityError, and what ``on_piece`` raises.
        """
        for first, last in cut(start, end, PIECE_BYTES):
            self.receive_piece(target[first:last])
            on_piece(first, last)

    def _fill(self, target: memoryview) -> None:
        at, length, receive, flags = 0, len(target), self._sock.recv_into, self._wait_all
        while at < length:
            count = receive(target[at:], 0, flags)
            if not count:
                raise ClosedError("the other side closed the connection")
            at += count

    # The end

    @property
    def peer_certificate(self) -> tuple[str, ...]:
        """The names in what the other side showed and TLS verified; none without TLS."""
        return names_in_peercert(self._sock.getpeercert()) if isinstance(self._sock, ssl.SSLSocket) else ()

    @property
    def is_stale(self) -> bool:
        """Has the other side sent anything, such as its goodbye, while nothing was asked? Then use another channel."""
        try:
            socket.socket.recv(self._sock, 1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def shut(self) -> None:
        """End it: what waits, on any thread, raises. Safe to call again, and after ``close``."""
        with suppress(OSError):  # it has ended already
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    def close(self, *, at_once: bool = False) -> None:
        """Give the socket back; by the thread that uses it, or when none does. ``at_once``: drop what was not sent yet:
        the kernel would read it from an arena where other bytes may lie by then.
        """
        if at_once:
            with suppress(OSError):
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._sock.close()


def _is_loopback(sock: socket.socket) -> bool:
    try:
        return ipaddress.ip_address(sock.getpeername()[0].partition("%")[0]).is_loopback
    except (OSError, ValueError):  # it has ended
        return True


def cut(start: int, end: int, length: int) -> list[Part]:
    """[start, end) in parts of at most ``length``."""
    return [(at, min(at + length, end)) for at in range(start, end, length)]
