"""What breaks between two nodes: a miss in bounded time, nothing wrong, and it mends itself."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvservice.config import process_environment
from kvservice.model.cache import CacheMeta
from kvservice.model.errors import CorruptError, KVServiceError, UnavailableError
from kvservice.model.plan import MissReason
from kvservice.peers.frames import HEADER, Kind, pack_header, pack_opening, parse_header
from kvservice.peers.member import Address, Facts
from kvservice.peers.streams_client import PeerLink
from kvservice.peers.streams_client_calls import PeerRecord
from kvservice.peers.streams_limits import LinkLimits, ServerLimits
from kvservice.peers.streams_messages import encode_facts, encode_key
from kvservice.wire.v1 import peer_pb2 as wire
from tests.descriptors import opened_for_good
from tests.freezing import freeze
from tests.peers import peer_process
from tests.peers.stream_world import (
    BIG,
    HASTY,
    LOCALHOST,
    PATIENT,
    Proxy,
    fetch_verified,
    fetched_at_last,
    find,
    find_record,
    link_to,
    make_facts,
    make_query,
    owner_node,
    settled,
)
from tests.server.builders import make_identity

MIB = 1 << 20
ROOT = Path(__file__).resolve().parents[2]


# A connection that breaks


async def test_a_record_is_taken_up_where_it_broke_off() -> None:
    broken: list[int] = []

    def cut_once(number: int, passed: int, data: bytearray) -> None:
        if passed > MIB and not broken:
            broken.append(number)
            raise ConnectionError

    async with owner_node() as owner:
        meta = await owner.store("one")
        with Proxy(owner.address, cut_once) as proxy:
            async with link_to(proxy.address) as link:
                got = await fetch_verified(link, await find_record(link, owner, meta))
                assert np.array_equal(got, owner.bytes_of(meta))
                assert broken
                assert (link.counters.resumed, link.counters.failed, link.is_answering) == (1, 0, True)


async def test_a_connection_that_breaks_behind_the_last_byte_costs_nothing() -> None:
    """The word that all is here cannot be said any more."""
    async with owner_node() as owner:
        meta = await owner.store("one")
        with Proxy(owner.address) as proxy:
            async with link_to(proxy.address) as link:
                record = await find_record(link, owner, meta)

                def on_piece(start: int, end: int) -> None:
                    if end == record.record_bytes:
                        proxy.cut()

                target = np.zeros(record.record_bytes, np.uint8)
                await link.fetch(record, target, on_piece)
                assert np.array_equal(target, owner.bytes_of(meta))
                assert np.array_equal(await fetch_verified(link, record), target)


async def test_a_connection_that_always_breaks_is_an_error() -> None:
    def cut(number: int, passed: int, data: bytearray) -> None:
        if passed > MIB:
            raise ConnectionError

    async with owner_node() as owner:
        meta = await owner.store("one")
        with Proxy(owner.address, cut) as proxy:
            async with link_to(proxy.address, limits=LinkLimits(deadline_s=20, resumes_max=1)) as link:
                record = await find_record(link, owner, meta)
                with pytest.raises(UnavailableError, match="broke"):
                    await fetch_verified(link, record)
        assert np.count_nonzero(owner.bytes_of(meta))


# Wrong bytes


async def test_a_byte_that_turned_on_the_way_is_corrupt_and_not_served() -> None:
    turned: list[int] = []

    def turn(number: int, passed: int, data: bytearray) -> None:  # in the middle of a frame of 2 MiB
        if passed > 3 * MIB and not turned:
            turned.append(passed)
            data[17] ^= 4

    async with owner_node() as owner:
        meta = await owner.store("one")
        with Proxy(owner.address, turn) as proxy:
            async with link_to(proxy.address) as link:
                record = await find_record(link, owner, meta)
                with pytest.raises(CorruptError):
                    await fetch_verified(link, record)
                assert link.is_answering, "it answers, if with rubbish"
                assert np.array_equal(await fetch_verified(link, record), owner.bytes_of(meta))


@pytest.mark.parametrize("seed", range(12))
async def test_a_byte_that_turned_in_an_answer_finds_nothing_wrong(seed: int) -> None:
    """Anywhere in the heads of a found record or in the frame around them."""
    rng = np.random.default_rng(seed)

    def turn(number: int, passed: int, data: bytearray) -> None:
        if passed > 150 and len(data) > 400:
            data[int(rng.integers(0, len(data)))] ^= 1 << int(rng.integers(0, 8))

    async with owner_node() as owner:
        meta = await owner.store("one")
        with Proxy(owner.address, turn) as proxy:
            async with link_to(proxy.address, limits=HASTY) as link:
                await link.ping()
                try:
                    (finding,) = await find(link, owner.identity, make_query(meta))
                except KVServiceError:
                    return
                if finding.record is None:
                    assert finding.miss_reason is not MissReason.NONE
                else:  # it hit what is not part of the record, such as the lease
                    assert finding.record.head.meta == meta


# Silence


class Tap:
    """Holds back all answers behind so many bytes of one connection, until it is opened."""

    def __init__(self, after: int) -> None:
        self.opened = threading.Event()
        self.is_reached = threading.Event()
        self._after = after

    def __call__(self, number: int, passed: int, data: bytearray) -> None:
        if passed >= self._after and not self.opened.is_set():
            self.is_reached.set()
            self.opened.wait(30)


async def test_sixteen_keys_of_a_silent_node_cost_one_deadline() -> None:
    """Whatever time their bytes would have on a slow link."""
    tap = Tap(MIB)
    async with owner_node() as owner:
        meta = await owner.store("one")
        with Proxy(owner.address, tap) as proxy:
            async with link_to(proxy.address, limits=replace(HASTY, bytes_per_s_min=1.0)) as link:
                record = await find_record(link, owner, meta)
                for _ in range(16):
                    with pytest.raises(UnavailableError):
                        await fetch_verified(link, record)
                assert link.counters.expired == 1
                assert not link.is_answering
                with pytest.raises(UnavailableError, match="left alone"):
                    await find(link, owner.identity, make_query(meta))
                tap.opened.set()
                assert np.array_equal(await fetched_at_last(link, record), owner.bytes_of(meta))


async def test_sixteen_keys_at_once_end_together() -> None:
    tap = Tap(MIB)
    async with owner_node() as owner:
        meta = await owner.store("one")
        with Proxy(owner.address, tap) as proxy:
            async with link_to(proxy.address, limits=HASTY) as link:
                record = await find_record(link, owner, meta)
                results = await asyncio.gather(
                    *(fetch_verified(link, record) for _ in range(16)), return_exceptions=True
                )
                tap.opened.set()
                assert all(isinstance(one, UnavailableError) for one in results)
                assert link.breaker.opened >= 1


async def test_who_waits_is_told_of_silence_and_of_its_end() -> None:
    changes: list[Facts | None] = []
    tap = Tap(0)
    async with owner_node() as owner:
        with Proxy(owner.address, tap) as proxy:
            async with link_to(proxy.address, limits=HASTY, on_change=changes.append) as link:
                with pytest.raises(UnavailableError):
                    await link.ping()
                await settled(lambda: changes == [None])
                tap.opened.set()
                await settled(lambda: link.is_answering)
                assert changes[-1] == owner.facts


async def test_a_node_that_is_not_there_costs_no_deadline_and_is_found_when_it_comes() -> None:
    with socket.create_server((LOCALHOST, 0)) as taken:
        address = Address(LOCALHOST, taken.getsockname()[1])
    async with link_to(address, limits=PATIENT) as link:
        for _ in range(16):
            with pytest.raises(UnavailableError):
                await link.ping()
        assert link.counters.expired == 0
        assert link.breaker.opened >= 1


async def test_a_call_that_is_given_up_leaves_the_callers_memory_alone() -> None:
    tap = Tap(2 * MIB)
    async with owner_node() as owner:
        meta = await owner.store("one")
        with Proxy(owner.address, tap) as proxy:
            async with link_to(proxy.address) as link:
                record = await find_record(link, owner, meta)
                target = np.zeros(record.record_bytes, np.uint8)
                task = asyncio.create_task(link.fetch(record, target, lambda start, end: None))
                await asyncio.to_thread(tap.is_reached.wait, 30)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                before = target.copy()
                tap.opened.set()
                await fetch_verified(link, record)
                assert np.array_equal(target, before)
                assert link.is_answering


async def test_what_the_caller_raises_ends_the_fetch() -> None:
    def refuse(start: int, end: int) -> None:
        if start > MIB:
            raise CorruptError("no more")

    async with owner_node() as owner, link_to(owner.address) as link:
        meta = await owner.store("one")
        record = await find_record(link, owner, meta)
        with pytest.raises(CorruptError, match="no more"):
            await link.fetch(record, np.zeros(record.record_bytes, np.uint8), refuse)
        assert np.array_equal(await fetch_verified(link, record), owner.bytes_of(meta))


# Slow ones are cut off by the node


def greeted(address: Address) -> socket.socket:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect(address)
    message = wire.PeerHello(facts=encode_facts(make_facts("slow"))).SerializeToString()
    sock.sendall(pack_opening() + pack_header(Kind.HELLO, 1, len(message)) + message)
    sock.recv(len(pack_opening()), socket.MSG_WAITALL)
    header = parse_header(sock.recv(HEADER.size, socket.MSG_WAITALL))
    assert header.kind is Kind.WELCOME
    sock.recv(header.message_bytes, socket.MSG_WAITALL)
    return sock


async def ask(sock: socket.socket, kind: Kind, request: int, message: wire.PeerFetch | wire.PeerStore) -> None:
    data = message.SerializeToString()
    await asyncio.to_thread(sock.sendall, pack_header(kind, request, len(data)) + data)


IMPATIENT = ServerLimits(slow_s=0.15, watch_interval_s=0.02)


async def test_who_stops_reading_is_cut_off(caplog: pytest.LogCaptureFixture) -> None:
    async with owner_node(limits=IMPATIENT) as owner:
        meta = await owner.store("one")
        cache = owner.cache(meta)
        with await asyncio.to_thread(greeted, owner.address) as sock:
            fetch = wire.PeerFetch(
                identities=[owner.identity.canonical_json()],
                namespace=meta.namespace,
                key=encode_key(meta.key),
                generation=cache.generation,
            )
            await ask(sock, Kind.FETCH, 2, fetch)
            await settled(lambda: cache.holds == 1)
            await settled(lambda: owner.server.connections == 0)
        assert "waiting for a slow reader" in caplog.text
        await settled(lambda: not cache.holds)


async def test_what_was_sent_is_held_until_it_is_confirmed() -> None:
    """The kernel may still read it from the arena: a lease that ran out must not free it."""
    async with owner_node() as owner:
        meta = await owner.store("s", history=["x"])
        cache = owner.cache(meta)
        with await asyncio.to_thread(greeted, owner.address) as sock:
            fetch = wire.PeerFetch(
                identities=[owner.identity.canonical_json()],
                namespace=meta.namespace,
                key=encode_key(meta.key),
                generation=cache.generation,
                start=cache.record_bytes - 100,
            )
            await ask(sock, Kind.FETCH, 2, fetch)
            got = await asyncio.to_thread(sock.recv, HEADER.size + 100, socket.MSG_WAITALL)
            assert len(got) == HEADER.size + 100
            assert cache.holds == 1
            await asyncio.to_thread(sock.sendall, pack_header(Kind.GOT, 2))
            await settled(lambda: not cache.holds)


async def test_who_stops_writing_is_cut_off_and_its_room_given_back(caplog: pytest.LogCaptureFixture) -> None:
    async with owner_node(limits=IMPATIENT) as owner:
        meta = peer_process.meta()
        with await asyncio.to_thread(greeted, owner.address) as sock:
            store = wire.PeerStore(
                identities=[owner.identity.canonical_json()],
                namespace=meta.namespace,
                key=encode_key(meta.key),
                record_bytes=MIB,
            )
            await ask(sock, Kind.STORE, 2, store)
            await settled(lambda: len(owner.world.node.store.open) == 1)
            await asyncio.to_thread(sock.sendall, pack_header(Kind.DATA, 2, 0, 1000) + bytes(500))
            await settled(lambda: owner.server.connections == 0)
        await settled(lambda: not owner.world.node.store.open)
        assert "waiting for a slow writer" in caplog.text


@pytest.mark.parametrize(
    ("frame", "said"),
    [
        (pack_header(Kind.DATA, 2, 0, 2 * MIB), "to byte 2097152 where data"),
        (pack_header(Kind.DATA, 3, 0, 1000), "should be"),
        (pack_header(Kind.COMMIT, 2), "COMMIT frame"),
        (pack_header(Kind.PING, 2), "PING frame"),
    ],
)
async def test_a_wrong_frame_in_a_record_ends_the_connection(
    frame: bytes, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with owner_node() as owner:
        meta = peer_process.meta()
        with await asyncio.to_thread(greeted, owner.address) as sock:
            store = wire.PeerStore(
                identities=[owner.identity.canonical_json()],
                namespace=meta.namespace,
                key=encode_key(meta.key),
                record_bytes=MIB,
            )
            await ask(sock, Kind.STORE, 2, store)
            await asyncio.to_thread(sock.sendall, frame)
            await settled(lambda: owner.server.connections == 0)
        assert said in caplog.text
        await settled(lambda: not owner.world.node.store.open)


# Other processes


@pytest.fixture
def other() -> Iterator[tuple[subprocess.Popen[str], Address]]:
    command = [sys.executable, "-m", "tests.peers.peer_process"]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=process_environment({"PYTHONPATH": str(ROOT)}),
    )
    assert process.stdout is not None
    try:
        yield process, Address(LOCALHOST, int(process.stdout.readline()))
    finally:
        process.kill()
        process.communicate(timeout=60)


async def test_a_stopped_node_costs_one_deadline_and_comes_back(other: tuple[subprocess.Popen[str], Address]) -> None:
    process, address = other
    meta = peer_process.meta()
    async with link_to(address, limits=HASTY) as link:
        record = await record_there(link, meta)
        freeze(process.pid)
        for _ in range(16):
            with pytest.raises(UnavailableError):
                await fetch_verified(link, record)
        assert link.breaker.opened == 1
        os.kill(process.pid, signal.SIGCONT)
        assert np.count_nonzero(await fetched_at_last(link, record))


async def record_there(link: PeerLink, meta: CacheMeta) -> PeerRecord:
    (finding,) = await find(link, make_identity(BIG), make_query(meta))
    assert finding.record is not None
    return finding.record


async def test_a_node_that_dies_in_the_middle_of_a_record(other: tuple[subprocess.Popen[str], Address]) -> None:
    process, address = other
    meta = peer_process.meta()

    def kill(number: int, passed: int, data: bytearray) -> None:
        if passed > MIB:
            process.kill()
            raise ConnectionError

    with Proxy(address, kill) as proxy:
        async with link_to(proxy.address) as link:
            record = await record_there(link, meta)
            with pytest.raises(UnavailableError):
                await fetch_verified(link, record)
            process.wait(60)
            with pytest.raises(UnavailableError):
                await link.ping()


# Nothing is left behind


async def test_descriptors_and_threads_come_back() -> None:
    async def once() -> None:
        async with owner_node() as owner:
            meta = await owner.store("one")
            async with link_to(owner.address) as link:
                await fetch_verified(link, await find_record(link, owner, meta))

    await once()
    threads, descriptors = threading.active_count(), len(opened_for_good())
    for _ in range(6):
        await once()
    assert threading.active_count() <= threads + 8, "but for the executor's of asyncio"
    assert len(opened_for_good()) <= descriptors + 2


async def test_connections_for_records_end_when_idle_whatever_is_asked_on_others() -> None:
    """Else a node that is pinged keeps them for good, and on this host the memory of a node that died with them."""
    async with owner_node() as owner, link_to(owner.address, limits=replace(PATIENT, idle_s=0.3)) as link:
        meta = await owner.store("one")
        await fetch_verified(link, await find_record(link, owner, meta))
        assert owner.server.connections == 2
        for _ in range(100):
            await link.ping()
            if owner.server.connections == 1:
                break
            await asyncio.sleep(0.05)
        assert owner.server.connections == 1
        assert np.array_equal(await fetch_verified(link, await find_record(link, owner, meta)), owner.bytes_of(meta)), (
            "and are opened again"
        )
