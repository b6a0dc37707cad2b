"""One connection between nodes of one host: frames over a unix socket, payload out of the other side's arena.

Each side has a read-only descriptor of the other's arena. Where the other end would send bytes of it, it says where
they lie, and they are copied from there, into memory of one's own. Nobody writes to another node's arena, and what is
mapped is a sealed file that keeps its size, so that no access can fault. What a frame says is hostile until checked.
"""

import os
import socket
import struct

import numpy as np

from kvservice.model.errors import InvalidInputError
from kvservice.peers.frames import DATA_BYTES_MAX, HEADER, FrameError, Header, Kind, pack_header, parse_header
from kvservice.peers.streams_channel import Channel, ClosedError, Part, Source, cut
from kvservice.peers.two_threads import do_each
from kvservice.storage.arena import Arena, AttachedArenas
from kvservice.storage.buffer import Bytes
from kvservice.storage.mapping import prefault
from kvservice.storage.remote.contract import OnPiece
from kvservice.wire.v1 import peer_pb2 as wire

SEND_BUFFER_BYTES = 8 << 10
"""Of who answers, room for some 20 frames: who lends waits for who reads, as it would with bytes, and silence is seen.

Not of who asks: it must never wait for room, since it reads no answers meanwhile, and who answers would wait for that.
"""
ASK_BUFFER_BYTES = 256 << 10
"""Room for all short questions that may be under way: the kernel counts 3-5 KiB for each. Long ones go alone."""
LOCAL_IDLE_S = 2.5
"""A connection without calls is closed sooner than one of TCP: it keeps the memory of a node that has ended. A little
more than between two pings."""
DESCRIPTORS_MAX = 8
"""In one frame; the kernel drops more, and all but one are closed again."""
LENT_BYTES_MAX = 4 << 20
"""In one frame: no byte of it is on the way, and whoever reads it does so on two threads, which meet at its end."""
FIRST_LENT_BYTES = 1 << 20
"""So few are read by one thread: the first layer is there before two get into each other's way."""
LENT_PIECE_BYTES = 512 << 10
"""Read in one go. Two threads wait for the GIL after every copy, and wait less with twice PIECE_BYTES."""
_NOWHERE = -1
_DESCRIPTOR = struct.Struct("i")
_NOTHING: Bytes = np.empty(0, np.uint8)


class LocalChannel(Channel):
    """See Channel. ``arena``: this side's. ``attached``: those of others, which their connections share.

    ``buffer_bytes``: of the socket, for what is sent.
    """

    is_narrow = lends = True

    def __init__(
        self, sock: socket.socket, arena: Arena, attached: AttachedArenas, buffer_bytes: int = SEND_BUFFER_BYTES
    ) -> None:
        super().__init__(sock, sends_files=False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
        self.sock = sock
        self._arena = arena
        self._own = arena.descriptor()
        self._attached = attached
        self._peer = _NOTHING
        self._at = _NOWHERE

    # Greeting

    def send_arena(self) -> None:
        """Let the other side read what lies here."""
        data = wire.PeerArena(bytes=self._arena.bytes).SerializeToString()
        descriptor = self._arena.read_only_descriptor()
        try:
            socket.send_fds(self.sock, [pack_header(Kind.ARENA, 0, len(data)) + data], [descriptor])
        finally:
            os.close(descriptor)

    def receive_arena(self) -> None:
        """Take the other side's. Raises FrameError for what is none."""
        assert not len(self._peer), "one arena a connection"
        found = list[int]()
        try:
            header = self._receive_described(found)
            if header.kind is not Kind.ARENA or len(found) != 1:
                raise FrameError(f"a {header.kind.name} frame with {len(found)} descriptors where an arena should be")
            said = self.receive_message(header, wire.PeerArena())
            try:
                self._peer = self._attached.attach(found[0], said.bytes)
            except InvalidInputError as error:
                raise FrameError(f"what came is no arena: {error}") from error
        finally:
            for descriptor in found:
                os.close(descriptor)

    def _receive_described(self, found: list[int]) -> Header:
        """A header; the descriptors that come with it go to ``found``, and are the caller's to close."""
        data, room = b"", socket.CMSG_SPACE(DESCRIPTORS_MAX * _DESCRIPTOR.size)
        while len(data) < HEADER.size:
            part, ancillary, _, _ = self.sock.recvmsg(HEADER.size - len(data), room, socket.MSG_CMSG_CLOEXEC)
            for level, kind, raw in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    whole = len(raw) // _DESCRIPTOR.size * _DESCRIPTOR.size
                    found += [one for (one,) in _DESCRIPTOR.iter_unpack(raw[:whole])]
            if not part:
                raise ClosedError("the other side closed the connection")
            data += part
        return parse_header(data)

    # Frames

    def frames_of(self, source: Source, start: int, end: int, frame_bytes: int = DATA_BYTES_MAX) -> list[Part]:
        """See Channel. What is lent is cut into larger parts, but for a record's first."""
        if source.descriptor != self._own:
            return cut(start, end, frame_bytes)
        first = min(end, FIRST_LENT_BYTES) if start == 0 else start
        return [*cut(start, first, LENT_BYTES_MAX), *cut(first, end, LENT_BYTES_MAX)]

    def send_data(self, request: int, source: Source, start: int, end: int) -> None:
        """See Channel. What lies in the arena is lent; other bytes are sent."""
        if source.descriptor != self._own:
            super().send_data(request, source, start, end)
        else:
            self.send(Kind.LENT, request, wire.PeerLent(offset=source.offset + start, bytes=end - start))

    def receive_header(self) -> Header:
        """See Channel. What is lent looks like data, which ``receive_pieces`` then reads."""
        self._at = _NOWHERE
        header = super().receive_header()
        if header.kind is not Kind.LENT:
            return header
        lent = self.receive_message(header, wire.PeerLent())
        if not 1 <= lent.bytes <= LENT_BYTES_MAX or lent.offset + lent.bytes > len(self._peer):
            where = f"{lent.bytes} bytes at {lent.offset} of an arena of {len(self._peer)}"
            raise FrameError(f"{where} are lent; a frame lends 1 to {LENT_BYTES_MAX}, all of them inside")
        self._at = lent.offset
        return Header(Kind.DATA, header.request, 0, lent.bytes)

    def receive_pieces(self, target: memoryview, start: int, end: int, on_piece: OnPiece) -> None:
        """See Channel. What is lent is read on two threads: pieces are told by both, and not in order."""
        if self._at == _NOWHERE:
            super().receive_pieces(target, start, end, on_piece)
            return
        lent = [self._take_lent(end - start)]  # no frame of a traceback may hold it

        def read(first: int, last: int) -> None:
            prefault(target[first:last])
            np.copyto(np.frombuffer(target[first:last], np.uint8), lent[0][first - start : last - start])  # no GIL
            on_piece(first, last)

        try:
            do_each(cut(start, end, LENT_PIECE_BYTES), read)
        finally:
            lent.clear()  # else the other side's memory stays mapped until the collector comes

    def _take_lent(self, count: int) -> Bytes:
        """What this frame lends."""
        lent = self._peer[self._at : self._at + count]
        if len(lent) != count:
            raise ClosedError("the connection was closed")
        return lent

    # The end

    def close(self, *, at_once: bool = False) -> None:
        """See Channel."""
        super().close(at_once=at_once)
        self._peer = _NOTHING
