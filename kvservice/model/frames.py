"""The bytes of the data socket, which both sides share: a greeting, then calls. No I/O, and never payload.

    connection := hello welcome (call answer | post)*       one call at a time; answers come in the order of the calls
    hello      := magic:8 session_id:16 boot_epoch:u64      b"KVSARENA" asks for the arena, b"KVSCALLS" for calls only
    welcome    := status:u32 arena_bytes:u64 text           status 0: no text, and the arena's descriptor (SCM_RIGHTS)
                                                            if it was asked for; else the connection is closed
    call       := message_bytes:u32 name_bytes:u8 is_post:u8 name message       is_post 0
    post       := the same with is_post 1                   gets no answer, not even an error
    answer     := message_bytes:u32 code_bytes:u8 code message                  no code: the reply
                                                            a code of model/errors.py: the error's text

Little endian. A name is that of a unary method of CacheService; names and codes are ASCII, texts UTF-8.
"""

import struct
from dataclasses import dataclass

from kvservice.model.errors import KVServiceError, LimitError
from kvservice.model.limits import MESSAGE_BYTES_MAX

ARENA_MAGIC, CALLS_MAGIC = b"KVSARENA", b"KVSCALLS"
STATUS_OK, STATUS_BAD_REQUEST, STATUS_UNKNOWN_SESSION, STATUS_TOO_MANY = 0, 1, 2, 3
WELCOME_TEXT_BYTES_MAX = 240
BUFFER_BYTES = 16 << 10
"""Room for the frames of a usual call; a lookup of 64 segments takes 8 KiB. Longer ones get room of their own."""

HELLO = struct.Struct("<8s16sQ")
WELCOME = struct.Struct("<IQ")
CALL = struct.Struct("<IBB")
ANSWER = struct.Struct("<IB")


@dataclass(frozen=True, slots=True)
class Call:
    """One call as it came in. ``message`` is not decoded."""

    name: str
    message: bytes
    is_post: bool


def pack_call(name: str, message: bytes, *, is_post: bool = False) -> bytes:
    """A call's frame. Raises LimitError for a message that no node takes."""
    check_length(f"call {name}", len(message))
    said = name.encode()
    return CALL.pack(len(message), len(said), is_post) + said + message


def pack_answer(message: bytes, error: KVServiceError | None = None) -> bytes:
    """An answer's frame. Raises LimitError for a message that no client takes."""
    check_length("an answer", len(message))
    code = b"" if error is None else error.code.encode()
    return ANSWER.pack(len(message), len(code)) + code + message


def check_length(what: str, message_bytes: int) -> None:
    """Raise LimitError for a message longer than any may be."""
    if message_bytes > MESSAGE_BYTES_MAX:
        raise LimitError(f"{what} of {message_bytes} bytes, the limit is {MESSAGE_BYTES_MAX}; split it")


class CallBuffer:
    """Bytes as they arrive, cut into calls. A frame's length is checked before room is made for it.

    Fill ``space()``, say how much with ``filled``, then ``take`` until it gives None; only then is there space again.
    """

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._start = self._end = 0

    @property
    def room_bytes(self) -> int:
        """How many bytes are set aside for what arrives."""
        return len(self._bytes)

    def space(self) -> memoryview:
        """Where the next bytes go; never empty after ``take`` gave None."""
        if not self._bytes:
            self._bytes = bytearray(BUFFER_BYTES)
        return memoryview(self._bytes)[self._end :]

    def filled(self, count: int) -> None:
        """So many bytes were put into the space."""
        self._end += count

    def take(self) -> Call | None:
        """The next whole call; None if more bytes must come first. Raises LimitError for one that is too long."""
        held = self._end - self._start
        if held < CALL.size:
            self._make_room(CALL.size)
            return None
        message_bytes, name_bytes, is_post = CALL.unpack_from(self._bytes, self._start)
        check_length("a call", message_bytes)
        head_bytes = CALL.size + name_bytes
        if held < head_bytes + message_bytes:
            self._make_room(head_bytes + message_bytes)
            return None
        name_at, message_at = self._start + CALL.size, self._start + head_bytes
        end = message_at + message_bytes
        name = self._bytes[name_at:message_at].decode("ascii", errors="replace")
        call = Call(name, bytes(memoryview(self._bytes)[message_at:end]), bool(is_post))
        self._forget_until(end)
        return call

    def _forget_until(self, end: int) -> None:
        self._start = end
        if self._start == self._end:
            self._start = self._end = 0
            if len(self._bytes) > BUFFER_BYTES:
                self._bytes = bytearray()

    def _make_room(self, frame_bytes: int) -> None:
        """Let a frame of this length fit behind what is held of it."""
        if self._start + frame_bytes <= len(self._bytes):
            return
        held = self._bytes[self._start : self._end]
        self._bytes = bytearray(max(frame_bytes, BUFFER_BYTES))
        self._bytes[: len(held)] = held
        self._start, self._end = 0, len(held)
