"""The far link itself: what it delays, holds up and cuts. Only lower bounds of time: a busy machine is later still."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.peers.far_link import LOCALHOST, WINDOW_BYTES, FarLink

MIB = 1 << 20
WAIT_S = 30.0


@contextmanager
def echo() -> Iterator[tuple[str, int]]:
    """A server that sends back what it receives, at once."""
    listener = socket.create_server((LOCALHOST, 0))
    threads: list[threading.Thread] = []

    def answer(sock: socket.socket) -> None:
        with sock:
            while data := sock.recv(MIB):
                sock.sendall(data)

    def accept() -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            threads.append(threading.Thread(target=answer, args=(sock,), daemon=True))
            threads[-1].start()

    threads.append(threading.Thread(target=accept, daemon=True))
    threads[0].start()
    try:
        yield (LOCALHOST, listener.getsockname()[1])
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        for thread in threads:
            thread.join(WAIT_S)
            assert not thread.is_alive()


@contextmanager
def called(link: FarLink) -> Iterator[socket.socket]:
    with socket.create_connection(link.address, WAIT_S) as sock:
        yield sock


def received(sock: socket.socket, count: int) -> bytes:
    data, at = memoryview(bytearray(count)), 0
    while at < count:
        taken = sock.recv_into(data[at:])
        assert taken, "it ended"
        at += taken
    return bytes(data)


def sent_and_received(sock: socket.socket, data: bytes) -> bytes:
    """What comes back, taken while it is sent."""
    thread = threading.Thread(target=sock.sendall, args=(data,), daemon=True)
    thread.start()
    back = received(sock, len(data))
    thread.join(WAIT_S)
    return back


def test_a_round_trip_takes_both_ways_and_a_connection_one_more() -> None:
    with echo() as address, FarLink(address, 0.03) as link:
        began_s = time.monotonic()
        with called(link) as sock:
            for round_trips in (2, 3):
                assert sent_and_received(sock, b"hello") == b"hello"
                assert time.monotonic() - began_s >= round_trips * 0.06


def test_what_is_in_flight_is_not_limited_by_the_delay_and_comes_in_order() -> None:
    data = bytes(range(256)) * (24 * MIB // 256)
    with echo() as address, FarLink(address, 0.02) as link, called(link) as sock:
        assert sent_and_received(sock, data) == data
        link.back.stall()
        sock.sendall(data)  # in memory at once, though nothing comes back
        link.thaw()
        assert received(sock, len(data)) == data
        assert all(wire.wait_passed(2 * len(data), WAIT_S) for wire in (link.there, link.back))
        assert link.there.passed == link.back.passed == 2 * len(data)


def test_what_does_not_fit_waits_with_who_sends_and_goes_round() -> None:
    with echo() as address, FarLink(address, 0.0) as link, called(link) as sock:
        link.back.stall()
        data = b"abcdefgh" * (WINDOW_BYTES // 2)  # both directions hold a window, and the kernel some buffers
        thread = threading.Thread(target=sock.sendall, args=(data,), daemon=True)
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
        link.thaw()
        assert received(sock, len(data)) == data
        thread.join(WAIT_S)


def test_a_stall_ends_by_itself() -> None:
    with echo() as address, FarLink(address) as link, called(link) as sock:
        began_s = time.monotonic()
        link.stall(0.2)
        assert sent_and_received(sock, b"hello") == b"hello"
        assert time.monotonic() - began_s >= 0.2


def test_a_slow_link_is_shared_and_keeps_its_speed() -> None:
    with echo() as address, FarLink(address, bytes_per_s=1e6) as link, called(link) as one, called(link) as other:
        began_s = time.monotonic()
        thread = threading.Thread(target=sent_and_received, args=(one, b"a" * 200_000), daemon=True)
        thread.start()
        sent_and_received(other, b"b" * 200_000)
        thread.join(WAIT_S)
        assert time.monotonic() - began_s >= 0.4 - 0.01


def test_a_cut_ends_both_sides_and_others_may_come() -> None:
    with echo() as address, FarLink(address) as link:
        with called(link) as sock:
            link.back.after(MIB, link.cut)
            sock.sendall(b"a" * MIB)
            assert len(received(sock, MIB)) == MIB
            sock.sendall(b"b")
            assert sock.recv(1) == b"", "it is cut before one byte more"
        with called(link) as sock:
            assert sent_and_received(sock, b"again") == b"again"
        assert link.connections == 2


def test_an_end_arrives_behind_what_was_sent_before() -> None:
    with echo() as address, FarLink(address, 0.01) as link, called(link) as sock:
        sock.sendall(b"a" * MIB)
        sock.shutdown(socket.SHUT_WR)
        assert received(sock, MIB) == b"a" * MIB
        assert sock.recv(1) == b""


def test_nobody_there_is_an_end() -> None:
    with socket.create_server((LOCALHOST, 0)) as probe:
        address = probe.getsockname()
    with FarLink(address) as link, called(link) as sock, pytest.raises(AssertionError, match="ended"):
        received(sock, 1)
