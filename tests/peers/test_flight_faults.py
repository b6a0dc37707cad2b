"""What breaks between two nodes that speak Arrow Flight: a miss in bounded time, nothing wrong, and it mends itself."""

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
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvservice.config import process_environment
from kvservice.model.cache import CacheMeta
from kvservice.model.errors import CorruptError, UnavailableError, UnknownSessionError
from kvservice.peers import flight_calls
from kvservice.peers.flight_calls import Piece
from kvservice.peers.flight_client import FlightLink
from kvservice.peers.flight_runner import Moving
from kvservice.peers.flight_sessions import FlightLimits
from kvservice.peers.flight_words import PREFIX
from kvservice.peers.frames import Kind
from kvservice.peers.member import Address, Facts, FlightAddress
from kvservice.peers.routes import Router
from kvservice.peers.routes_log import Medium
from kvservice.peers.streams_client_calls import PeerRecord
from kvservice.peers.streams_limits import LinkLimits
from kvservice.peers.streams_messages import encode_facts, encode_key
from kvservice.sharing.place import Question
from kvservice.sharing.routed import RoutedPlace
from kvservice.wire.v1 import cache_pb2
from kvservice.wire.v1 import peer_pb2 as wire
from tests.freezing import freeze
from tests.peers import peer_process
from tests.peers.flight_world import (
    FlightOwner,
    fetch_verified,
    fetched_at_last,
    find,
    find_record,
    flight_node,
    flight_to,
)
from tests.peers.stream_world import (
    BIG,
    HASTY,
    LOCALHOST,
    PATIENT,
    Proxy,
    arrival_of,
    link_to,
    make_caller,
    make_facts,
    make_query,
    settled,
)
from tests.server.builders import make_identity

MIB = 1 << 20
ROOT = Path(__file__).resolve().parents[2]


class Tap:
    """Holds back all answers behind so many bytes of one connection, until it is opened."""

    def __init__(self, after: int) -> None:
        self.after = after
        self.opened = threading.Event()
        self.is_reached = threading.Event()

    def __call__(self, number: int, passed: int, data: bytearray) -> None:
        if passed >= self.after and not self.opened.is_set():
            self.is_reached.set()
            self.opened.wait(30)


# A connection that breaks


async def test_a_record_is_taken_up_where_it_broke_off() -> None:
    broken: list[int] = []

    def cut_once(number: int, passed: int, data: bytearray) -> None:
        if passed > 2 * MIB and not broken:
            broken.append(number)
            raise ConnectionError

    async with flight_node() as owner:
        meta = await owner.store("one")
        with Proxy(owner.flight_address, cut_once) as proxy:
            async with flight_to(proxy.address) as link:
                got = await fetch_verified(link, await find_record(link, owner.identity, meta))
                assert np.array_equal(got, owner.bytes_of(meta))
                assert broken
                assert (link.counters.resumed, link.counters.failed, link.is_answering) == (1, 0, True)


async def test_a_stream_that_breaks_in_the_middle_goes_on_over_flight() -> None:
    def cut(number: int, passed: int, data: bytearray) -> None:
        if passed > 2 * MIB:
            raise ConnectionError

    caller = make_caller(make_facts("caller"))
    async with flight_node() as owner:
        meta = await owner.store("one")
        identity = owner.identity.canonical_json()
        with Proxy(owner.address, cut) as proxy:
            async with (
                link_to(proxy.address, caller=caller, limits=LinkLimits(deadline_s=20, resumes_max=0)) as stream,
                flight_to(owner.flight_address, caller=caller, identity_of=lambda _: identity) as flight,
            ):
                router = Router(asyncio.get_running_loop().time)
                place = RoutedPlace(router, {Medium.STREAM: stream, Medium.FLIGHT: flight})
                record = await find_record(stream, owner.identity, meta)
                target, told = np.zeros(record.record_bytes, np.uint8), list[tuple[int, int]]()
                arrival = arrival_of(record, target)

                def on_piece(start: int, end: int) -> None:
                    told.append((start, end))
                    arrival.arrived(start, end)

                await place.fetch(record, target, on_piece)
                assert np.array_equal(target, owner.bytes_of(meta))
                assert arrival.layers == len(record.head.section_checksums)
                assert MIB < flight.counters.fetched_bytes < record.record_bytes, "only the rest"
                assert sum(end - start for start, end in told) == record.record_bytes, "nothing came twice"
                assert [(one.medium, one.has_failed) for one in router.log.last(2)] == [
                    (Medium.FLIGHT, False),
                    (Medium.STREAM, True),
                ]


async def test_a_session_that_ends_in_the_middle_of_a_record_goes_on_behind_what_came(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    receive, ended = flight_calls._receive, list[int]()

    def end_once(reader: Any, total: int, piece: Piece, moving: Moving) -> None:
        def read_chunk() -> Any:
            if moving.at > MIB and not ended:
                ended.append(moving.at)
                raise UnknownSessionError("it ran out")
            return reader.read_chunk()

        receive(SimpleNamespace(read_chunk=read_chunk), total, piece, moving)

    monkeypatch.setattr(flight_calls, "_receive", end_once)
    async with flight_node() as owner, flight_to(owner.flight_address) as link:
        meta = await owner.store("one")
        record = await find_record(link, owner.identity, meta)
        target, told = np.zeros(record.record_bytes, np.uint8), list[tuple[int, int]]()
        await link.fetch(record, target, lambda start, end: told.append((start, end)))
        assert np.array_equal(target, owner.bytes_of(meta))
        assert ended
        assert [start for start, _ in told] == [0, *(end for _, end in told[:-1])], "nothing came twice"


def question_of(owner: FlightOwner, meta: CacheMeta) -> Question:
    space = owner.client.session.spaces[meta.namespace]
    asked = cache_pb2.SegmentQuery(
        segment=meta.key.segment, accepted_contexts=[meta.key.context], position=meta.position, tokens=meta.tokens
    )
    return Question(space, meta.key.segment, asked, b"")


async def test_where_the_stream_is_refused_flight_carries_everything() -> None:
    with socket.create_server((LOCALHOST, 0)) as taken:
        nowhere = Address(LOCALHOST, taken.getsockname()[1])
    async with (
        flight_node() as owner,
        link_to(nowhere) as stream,
        flight_to(owner.flight_address) as flight,
    ):
        place = RoutedPlace(Router(lambda: 0.0), {Medium.STREAM: stream, Medium.FLIGHT: flight})
        meta = await owner.store("one")
        question = question_of(owner, meta)
        (offer,) = await place.find([question])
        assert offer is not None
        target = np.zeros(offer.record.record_bytes, np.uint8)
        await place.fetch(offer.record, target, lambda start, end: None)
        assert np.array_equal(target, owner.bytes_of(meta))
        cache = owner.cache(meta)
        assert cache.holds == 1
        place.let_go([offer.record])
        await settled(lambda: not cache.holds)
        assert await place.delete(question.space, [meta.key]) == 1


# Wrong bytes


async def test_bytes_that_are_wrong_at_the_node_are_corrupt_and_not_served() -> None:
    async with flight_node() as owner, flight_to(owner.flight_address) as link:
        meta = await owner.store("one")
        record = await find_record(link, owner.identity, meta)
        owner.bytes_of(meta)[3 * MIB] ^= 4
        with pytest.raises(CorruptError):
            await fetch_verified(link, record)
        assert link.is_answering, "it answers, if with rubbish"
        owner.bytes_of(meta)[3 * MIB] ^= 4
        assert np.array_equal(await fetch_verified(link, record), owner.bytes_of(meta))


async def test_a_byte_that_turned_on_the_way_is_not_served() -> None:
    """In the payload it is corrupt; in a frame of HTTP/2 the connection ends, and the record is asked for again."""
    turned: list[int] = []

    def turn(number: int, passed: int, data: bytearray) -> None:
        if passed > 2 * MIB and not turned:
            turned.append(passed)
            data[len(data) // 2] ^= 4

    async with flight_node() as owner:
        meta = await owner.store("one")
        with Proxy(owner.flight_address, turn) as proxy:
            async with flight_to(proxy.address) as link:
                record = await find_record(link, owner.identity, meta)
                try:
                    got = await fetch_verified(link, record)
                except (CorruptError, UnavailableError):
                    got = await fetched_at_last(link, record)
                assert turned
                assert np.array_equal(got, owner.bytes_of(meta))


async def test_what_the_caller_raises_ends_the_fetch() -> None:
    def refuse(start: int, end: int) -> None:
        if start > MIB:
            raise CorruptError("no more")

    async with flight_node() as owner, flight_to(owner.flight_address) as link:
        meta = await owner.store("one")
        record = await find_record(link, owner.identity, meta)
        with pytest.raises(CorruptError, match="no more"):
            await link.fetch(record, np.zeros(record.record_bytes, np.uint8), refuse)
        assert np.array_equal(await fetch_verified(link, record), owner.bytes_of(meta))


# Silence


async def test_sixteen_keys_of_a_silent_node_cost_one_deadline() -> None:
    """Whatever time their bytes would have on a slow link."""
    tap = Tap(MIB)
    async with flight_node() as owner:
        meta = await owner.store("one")
        with Proxy(owner.flight_address, tap) as proxy:
            async with flight_to(proxy.address, limits=replace(HASTY, bytes_per_s_min=1.0)) as link:
                record = await find_record(link, owner.identity, meta)
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
    async with flight_node() as owner:
        meta = await owner.store("one")
        with Proxy(owner.flight_address, tap) as proxy:
            async with flight_to(proxy.address, limits=HASTY) as link:
                record = await find_record(link, owner.identity, meta)
                results = await asyncio.gather(
                    *(fetch_verified(link, record) for _ in range(16)), return_exceptions=True
                )
                tap.opened.set()
                assert all(isinstance(one, UnavailableError) for one in results)
                assert link.breaker.opened >= 1


async def test_a_peer_that_is_doubted_costs_a_part_of_a_deadline() -> None:
    """It was lost over its stream just now. All that ask meanwhile wait for one ping."""
    tap = Tap(0)
    async with flight_node() as owner:
        with Proxy(owner.flight_address, tap) as proxy:
            async with flight_to(proxy.address) as link:
                tap.opened.set()
                await link.ping()
                link.doubt()
                await link.ping()
                assert link.counters.calls == 3, "and one to settle the doubt"
                tap.opened.clear()
                link.doubt()
                link.limits = HASTY
                link._runner._limits = HASTY
                results = await asyncio.gather(*(link.ping() for _ in range(16)), return_exceptions=True)
                assert all(isinstance(one, UnavailableError) for one in results)
                assert (link.counters.expired, link.counters.calls) == (1, 4)
                tap.opened.set()


async def test_who_waits_is_told_of_silence_and_of_its_end() -> None:
    changes: list[Facts | None] = []
    tap = Tap(0)
    async with flight_node() as owner:
        with Proxy(owner.flight_address, tap) as proxy:
            async with flight_to(proxy.address, limits=HASTY, on_change=changes.append) as link:
                with pytest.raises(UnavailableError):
                    await link.ping()
                await settled(lambda: changes == [None])
                tap.opened.set()
                await settled(lambda: link.is_answering)
                assert changes[-1] == owner.facts


async def test_a_node_that_is_not_there_costs_no_deadline() -> None:
    with socket.create_server((LOCALHOST, 0)) as taken:
        address = Address(LOCALHOST, taken.getsockname()[1])
    async with flight_to(address, limits=PATIENT) as link:
        for _ in range(16):
            with pytest.raises(UnavailableError):
                await link.ping()
        assert link.counters.expired == 0
        assert link.breaker.opened >= 1


async def test_a_call_that_is_given_up_leaves_the_callers_memory_alone() -> None:
    tap = Tap(2 * MIB)
    async with flight_node() as owner:
        meta = await owner.store("one")
        with Proxy(owner.flight_address, tap) as proxy:
            async with flight_to(proxy.address) as link:
                record = await find_record(link, owner.identity, meta)
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


async def test_a_record_is_held_until_grpc_has_let_go_of_its_bytes() -> None:
    """The call has ended and its lease too: what lies in gRPC's hands must not become another record's bytes."""
    tap = Tap(MIB)
    async with flight_node() as owner:
        meta = await owner.store("one")
        cache = owner.cache(meta)
        with Proxy(owner.flight_address, tap) as proxy:
            async with flight_to(proxy.address) as link:
                record = await find_record(link, owner.identity, meta)
                task = asyncio.create_task(link.fetch(record, np.zeros(record.record_bytes, np.uint8), lambda *_: None))
                await asyncio.to_thread(tap.is_reached.wait, 30)
                link.let_go([record])
                await owner.client.delete(meta)
                assert cache.holds >= 1
                tap.opened.set()
                await task
                await settled(lambda: not cache.holds)


async def test_who_brings_nothing_loses_its_room(caplog: pytest.LogCaptureFixture) -> None:
    from pyarrow import flight

    limits = FlightLimits(slow_s=0.15)
    async with flight_node(flight_limits=limits) as owner:
        meta = peer_process.meta()
        client = flight.FlightClient(f"grpc://{LOCALHOST}:{owner.flight_address.port}")
        options = flight.FlightCallOptions(timeout=30)
        hello = wire.PeerHello(facts=encode_facts(make_facts("slow"))).SerializeToString()
        action = flight.Action(f"{PREFIX}hello", hello)
        (answer,) = await asyncio.to_thread(lambda: list(client.do_action(action, options)))
        session = wire.PeerWelcome.FromString(answer.body.to_pybytes()).session
        store = wire.PeerStore(
            identities=[owner.identity.canonical_json()],
            namespace=meta.namespace,
            key=encode_key(meta.key),
            record_bytes=MIB,
        )
        descriptor = flight.FlightDescriptor.for_command(bytes([Kind.STORE]) + store.SerializeToString())
        named = flight.FlightCallOptions(timeout=30, headers=[(b"kvservice-session", session.hex().encode())])
        writer, reader = client.do_exchange(descriptor, named)
        await asyncio.to_thread(reader.read_chunk)
        await settled(lambda: not owner.world.node.store.open and "waiting for a slow writer" in caplog.text)
        reader.cancel()
        with pytest.raises(flight.FlightError):
            writer.close()


# Other processes


@pytest.fixture
def other() -> Iterator[tuple[subprocess.Popen[str], FlightAddress]]:
    command = [sys.executable, "-m", "tests.peers.peer_process", "flight"]
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
        yield process, FlightAddress(LOCALHOST, int(process.stdout.readline()))
    finally:
        process.kill()
        process.communicate(timeout=60)


async def record_there(link: FlightLink, meta: CacheMeta) -> PeerRecord:
    for _ in range(50):
        try:
            return await find_record(link, make_identity(BIG), meta)
        except UnavailableError:
            await settled(lambda: link.is_answering)
    raise AssertionError("it does not answer")


async def test_a_stopped_node_costs_one_deadline_and_comes_back(
    other: tuple[subprocess.Popen[str], FlightAddress],
) -> None:
    process, address = other
    meta = peer_process.meta()
    async with flight_to(address, limits=HASTY) as link:
        record = await record_there(link, meta)
        freeze(process.pid)
        before = link.counters.expired
        for _ in range(16):
            with pytest.raises(UnavailableError):
                await fetch_verified(link, record)
        assert link.counters.expired == before + 1
        os.kill(process.pid, signal.SIGCONT)
        assert (await fetched_at_last(link, record)).any()


async def test_a_killed_node_is_an_error_at_once(other: tuple[subprocess.Popen[str], FlightAddress]) -> None:
    process, address = other
    meta = peer_process.meta()
    async with flight_to(address) as link:
        record = await record_there(link, meta)
        process.kill()
        process.wait(30)
        for _ in range(16):
            with pytest.raises(UnavailableError):
                await fetch_verified(link, record)
        assert link.counters.expired == 0
