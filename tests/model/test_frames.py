"""Frames of the data socket: cut right however they arrive, and bounded before there is room for them."""

import random

import pytest

from kvservice.model.errors import LimitError
from kvservice.model.frames import BUFFER_BYTES, CALL, Call, CallBuffer, check_length, pack_answer, pack_call
from kvservice.model.limits import MESSAGE_BYTES_MAX


def feed(buffer: CallBuffer, data: bytes) -> list[Call]:
    """Put bytes in as the event loop does, as many as there is space for at a time."""
    found: list[Call] = []
    while data:
        space = buffer.space()
        assert len(space), "an event loop reads into nothing for ever"
        count = min(len(space), len(data))
        space[:count] = data[:count]
        data = data[count:]
        buffer.filled(count)
        while (call := buffer.take()) is not None:
            found.append(call)
    return found


@pytest.mark.parametrize("seed", range(8))
def test_calls_come_out_as_they_went_in_however_they_are_cut(seed: int) -> None:
    rng = random.Random(seed)
    sizes = [0, 1, 200, BUFFER_BYTES - CALL.size - 6, BUFFER_BYTES, BUFFER_BYTES + 1, 5 * BUFFER_BYTES]
    sent = [Call("Lookup", rng.randbytes(rng.choice(sizes)), rng.random() < 0.5) for _ in range(40)]
    stream = b"".join(pack_call(call.name, call.message, is_post=call.is_post) for call in sent)
    buffer, found = CallBuffer(), list[Call]()
    while stream:
        count = rng.choice([1, 5, 100, 4000, 100_000])
        found += feed(buffer, stream[:count])
        stream = stream[count:]
    assert found == sent


def test_room_for_a_long_call_is_given_back() -> None:
    buffer = CallBuffer()
    assert feed(buffer, pack_call("Lookup", bytes(10 * BUFFER_BYTES)))
    assert buffer.room_bytes <= BUFFER_BYTES


def test_a_call_that_is_too_long_is_refused_before_there_is_room_for_it() -> None:
    buffer = CallBuffer()
    with pytest.raises(LimitError, match="the limit is"):
        feed(buffer, CALL.pack(MESSAGE_BYTES_MAX + 1, 6, 0) + b"Lookup")
    assert buffer.room_bytes <= BUFFER_BYTES


def test_nobody_sends_what_nobody_takes() -> None:
    too_long = bytes(MESSAGE_BYTES_MAX + 1)
    with pytest.raises(LimitError, match="split it"):
        pack_call("Lookup", too_long)
    with pytest.raises(LimitError, match="split it"):
        pack_answer(too_long)
    check_length("a call", MESSAGE_BYTES_MAX)


def test_a_name_that_is_no_text_is_still_a_call() -> None:
    frame = CALL.pack(1, 2, 0) + b"\xff\xfe" + b"x"
    assert [call.message for call in feed(CallBuffer(), frame)] == [b"x"]
