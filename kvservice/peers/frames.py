"""The bytes between two nodes: an opening, then frames. No I/O.

    connection := opening opening hello (welcome request* | error)      the caller opens first
    opening    := magic:8 version:u16 zero:u16
    frame      := kind:u8 zero:u8 zero:u16 request:u32 message_bytes:u32 payload_bytes:u32 message payload
    request    := find | fetch | store | delete | renew | release | ping     answered in the order in which they came
    fetch      -> part* | part* error                  the record's bytes from the asked one on; who has them all says
                                                       got, which is not answered: until then they stay where they are
    store      -> go, then part* commit from the caller, then stored | error;   or exists | error
    part       := data | packed                        packed if the caller of a fetch, or the go of a store, said so
    packed     : its payload := largest:u16 [heads] q:i8 [heads, head_size]     rows as 8 bits, see kernels/cpu_int8.py,
                                                       for the next 2 * heads * head_size bytes of the record

    over a unix socket: welcome arena arena, the node's and the caller's; from then on lent may stand for data, and
                                                       nothing is packed

Little endian. ``request`` is the caller's number, repeated in all that belongs to it. Messages are those of peer.proto;
only ``data`` and ``packed`` have payload, and ``data`` no message. A length is checked before room is made for it.
"""

import enum
import struct
from typing import NamedTuple

from google.protobuf.message import DecodeError, Message

from kvservice.model.errors import InvalidInputError, RecordFormatError

MAGIC = b"KVSPEER\n"
VERSION = 1
OPENING = struct.Struct("<8sHH")
HEADER = struct.Struct("<BBHIII")
DATA_BYTES_MAX = 2 << 20
"""One data frame. Its head costs 0.01 of it; a failure in the middle of a record is told between two of them."""
GREETING_BYTES_MAX = 16 << 10
"""Of what a stranger sends."""
MESSAGE_BYTES_MAX = 16 << 20
SMALL_BYTES_MAX = 1 << 20
REQUEST_MAX = (1 << 32) - 1


class FrameError(InvalidInputError):
    """What came is not what may come: nothing more of this connection can be understood."""


class Kind(enum.IntEnum):
    """What a frame is. The numbers are on the wire; never change them."""

    HELLO = 1
    FIND = 2
    FETCH = 3
    STORE = 4
    COMMIT = 5
    DELETE = 6
    RENEW = 7
    RELEASE = 8
    PING = 9
    GOT = 10
    ARENA = 11
    DATA = 32
    LENT = 33
    PACKED = 34
    WELCOME = 64
    FOUND = 65
    GO = 66
    EXISTS = 67
    STORED = 68
    COUNT = 69
    PONG = 70
    ERROR = 127


MESSAGE_LIMITS = {
    Kind.HELLO: GREETING_BYTES_MAX,
    Kind.FIND: MESSAGE_BYTES_MAX,
    Kind.FETCH: MESSAGE_BYTES_MAX,
    Kind.STORE: MESSAGE_BYTES_MAX,
    Kind.COMMIT: GREETING_BYTES_MAX,
    Kind.DELETE: MESSAGE_BYTES_MAX,
    Kind.RENEW: SMALL_BYTES_MAX,
    Kind.RELEASE: SMALL_BYTES_MAX,
    Kind.PING: GREETING_BYTES_MAX,
    Kind.GOT: 0,
    Kind.ARENA: GREETING_BYTES_MAX,
    Kind.DATA: 0,
    Kind.LENT: GREETING_BYTES_MAX,
    Kind.PACKED: GREETING_BYTES_MAX,
    Kind.WELCOME: GREETING_BYTES_MAX,
    Kind.FOUND: MESSAGE_BYTES_MAX,
    Kind.GO: GREETING_BYTES_MAX,
    Kind.EXISTS: GREETING_BYTES_MAX,
    Kind.STORED: GREETING_BYTES_MAX,
    Kind.COUNT: GREETING_BYTES_MAX,
    Kind.PONG: GREETING_BYTES_MAX,
    Kind.ERROR: GREETING_BYTES_MAX,
}
assert MESSAGE_LIMITS.keys() == set(Kind)
WITH_PAYLOAD = frozenset({Kind.DATA, Kind.PACKED})


class Header(NamedTuple):
    """What a frame says of itself, checked."""

    kind: Kind
    request: int
    message_bytes: int
    payload_bytes: int

    @property
    def frame_bytes(self) -> int:
        """Of all of it."""
        return HEADER.size + self.message_bytes + self.payload_bytes


def pack_opening() -> bytes:
    """Ours."""
    return OPENING.pack(MAGIC, VERSION, 0)


def check_opening(data: bytes | bytearray) -> None:
    """Raise FrameError for what is not this protocol, RecordFormatError for another version of it."""
    magic, version, _ = OPENING.unpack(data)
    if magic != MAGIC:
        raise FrameError(f"a connection that opens with {bytes(magic)!r} is not one of a node; check the port")
    if version != VERSION:
        raise RecordFormatError(
            f"the other node speaks version {version} of the protocol between nodes, this one {VERSION}; "
            "run versions of the service that speak the same"
        )


def pack_header(kind: Kind, request: int, message_bytes: int = 0, payload_bytes: int = 0) -> bytes:
    """A frame's first bytes. Raises FrameError for a frame that nobody takes."""
    _check(kind, message_bytes, payload_bytes)
    return HEADER.pack(kind, 0, 0, request, message_bytes, payload_bytes)


def parse_header(data: bytes | bytearray) -> Header:
    """A frame's first bytes, checked. Raises FrameError for what no node would send."""
    number, zero, zeros, request, message_bytes, payload_bytes = HEADER.unpack(data)
    if zero or zeros:
        raise FrameError(f"a frame of kind {number} has bytes set that are 0 in version {VERSION}")
    try:
        kind = Kind(number)
    except ValueError:
        raise FrameError(f"there is no frame of kind {number} in version {VERSION}") from None
    _check(kind, message_bytes, payload_bytes)
    return Header(kind, request, message_bytes, payload_bytes)


def _check(kind: Kind, message_bytes: int, payload_bytes: int) -> None:
    limit = MESSAGE_LIMITS[kind]
    if message_bytes > limit:
        raise FrameError(f"a {kind.name} frame says {message_bytes} bytes of message, the limit is {limit}")
    if (payload_bytes > 0) is not (kind in WITH_PAYLOAD) or payload_bytes > DATA_BYTES_MAX:
        raise FrameError(
            f"a {kind.name} frame says {payload_bytes} bytes of payload; "
            f"data and packed have 1 to {DATA_BYTES_MAX}, others none"
        )
    if kind is Kind.PACKED and not message_bytes:
        raise FrameError("a PACKED frame does not say what it stands for")


def parse_message(data: bytes, message: Message) -> None:
    """Fill ``message``. Raises FrameError if it is none of its kind."""
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        name = message.DESCRIPTOR.name
        raise FrameError(f"{len(data)} bytes are no {name}: {error}") from error
