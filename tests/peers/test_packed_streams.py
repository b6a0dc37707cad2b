"""Rows as 8 bits between two nodes over real sockets: the same bits for half the bytes, and only for who asks."""

import asyncio
import socket
import ssl
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvservice.model.cache import CacheMeta
from kvservice.model.errors import CapacityError, CorruptError, UnavailableError
from kvservice.peers import (
    packing,
    streams_client_calls,
    streams_local_dialler,
    streams_local_server,
    streams_server_connection,
)
from kvservice.peers.frames import HEADER, Kind, pack_header, parse_header
from kvservice.peers.packing_kernels import KERNELS, Kernels
from kvservice.peers.streams_client import PeerLink
from kvservice.peers.streams_client_calls import PeerRecord, StoreCall
from kvservice.peers.streams_local_channel import LocalChannel
from kvservice.peers.streams_messages import encode_key
from kvservice.peers.streams_packed import PackedStream
from kvservice.sharing.place import Parcel, Question
from kvservice.storage.buffer import Bytes
from kvservice.storage.record import RecordReader
from kvservice.storage.remote.contract import RemoteName
from kvservice.store import WriteRequest
from kvservice.wire.v1 import cache_pb2
from kvservice.wire.v1 import peer_pb2 as wire
from tests.access.certificates import Authority
from tests.peers.local_world import local_link, met_beside
from tests.peers.packed_world import (
    HALF,
    lossy,
    lossy_node,
    rounded_master,
    rounded_mirror,
    rounded_planes,
    store_rounded,
)
from tests.peers.stream_world import (
    BIG,
    BIG_ARENA_BYTES,
    HASTY,
    Owner,
    Proxy,
    arrival_of,
    find,
    find_record,
    link_to,
    make_caller,
    make_query,
    owner_node,
    settled,
)
from tests.peers.test_stream_faults import ask, greeted
from tests.peers.test_stream_frames import babbling, framed
from tests.server.builders import GatedWorker, World
from tests.server.ssd_world import SsdWorld, leave_host, written

MIB = 1 << 20


@pytest.fixture(autouse=True, scope="module")
def _kernels() -> None:
    KERNELS.load()


async def fetch_packed(link: PeerLink, record: PeerRecord, start: int = 0) -> Bytes:
    """The record's bytes from ``start`` on; all of it is verified as it came."""
    target = np.zeros(record.record_bytes, np.uint8)
    arrival = arrival_of(record, target)

    def on_piece(first: int, last: int) -> None:
        if not start:
            arrival.arrived(first, last)

    await PackedStream(link).fetch(record, target, on_piece, start)
    assert start or arrival.layers == len(record.head.section_checksums)
    return target


async def is_packed(link: PeerLink, owner: Owner) -> bool:
    """Did anything come or go packed? Both sides must say the same: the owner counts what it has sent."""
    ours, theirs = link.counters, owner.server

    def is_equal() -> bool:
        said = theirs.counters
        return (ours.packed_bytes, ours.packed_wire_bytes) == (said.packed_bytes, said.packed_wire_bytes)

    await settled(is_equal)
    return ours.packed_bytes > 0


# Fetching


@pytest.mark.parametrize("geometry", [BIG, HALF], ids=["bfloat16", "float16"])
async def test_a_rounded_master_comes_for_half_its_bytes(geometry: object) -> None:
    identity = lossy(BIG if geometry is BIG else HALF)
    async with lossy_node(identity) as owner, link_to(owner.address) as link:
        meta = await store_rounded(owner)
        record = await find_record(link, owner, meta)
        assert np.array_equal(await fetch_packed(link, record), owner.bytes_of(meta))
        assert await is_packed(link, owner)
        counters, said = link.counters, owner.server.counters
        dense = record.record_bytes - counters.packed_bytes
        assert dense + counters.packed_wire_bytes <= 0.53 * record.record_bytes
        assert (counters.fetched_bytes, said.sent_bytes) == (record.record_bytes, record.record_bytes)


async def test_a_rounded_mirror_comes_with_its_master() -> None:
    async with lossy_node() as owner, link_to(owner.address) as link:
        identity, planes = owner.identity, rounded_planes(seed=3)
        first = await store_rounded(owner)
        await owner.client.delete(first)
        reference = await owner.client.store(first, planes)
        mirror, moved, runs = rounded_mirror(identity, first, planes, reference)
        await owner.client.store(mirror, moved, runs)
        (finding,) = await find(link, identity, make_query(mirror))
        assert finding.record is not None
        assert finding.master is not None
        assert np.array_equal(await fetch_packed(link, finding.master), owner.bytes_of(first))
        before = link.counters.packed_bytes
        assert np.array_equal(await fetch_packed(link, finding.record), owner.bytes_of(mirror))
        assert link.counters.packed_bytes > before


@pytest.mark.parametrize("start", [1_000_000, 1_000_001])
async def test_a_packed_fetch_may_begin_at_any_byte(start: int) -> None:
    async with lossy_node() as owner, link_to(owner.address) as link:
        meta = await store_rounded(owner)
        got = await fetch_packed(link, await find_record(link, owner, meta), start)
        assert not got[:start].any()
        assert np.array_equal(got[start:], owner.bytes_of(meta)[start:])
        assert await is_packed(link, owner)


async def plain_fetch(link: PeerLink, owner: Owner, meta: CacheMeta) -> None:
    record = await find_record(link, owner, meta)
    target = np.zeros(record.record_bytes, np.uint8)
    await link.fetch(record, target, lambda *_: None)
    assert np.array_equal(target, owner.bytes_of(meta))


async def test_who_does_not_ask_gets_rows_as_they_lie() -> None:
    async with lossy_node() as owner, link_to(owner.address) as link:
        await plain_fetch(link, owner, await store_rounded(owner))
        assert not await is_packed(link, owner)


async def test_rows_of_a_namespace_that_keeps_every_bit_are_not_looked_at() -> None:
    """Rounded or not: nobody there expects them to be."""
    async with owner_node() as owner, link_to(owner.address) as link:
        meta = await store_rounded(owner)
        assert np.array_equal(await fetch_packed(link, await find_record(link, owner, meta)), owner.bytes_of(meta))
        assert not await is_packed(link, owner)


class Unaware(LocalChannel):
    """Over it one would pack."""

    lends = False


@pytest.mark.parametrize("side", [None, streams_local_dialler, streams_local_server])
async def test_what_is_lent_is_not_packed(side: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Either side sees to that."""
    if side is not None:
        monkeypatch.setattr(side, "LocalChannel", Unaware)
    async with lossy_node() as owner, met_beside(owner, tmp_path) as met, local_link(met) as link:
        meta = await store_rounded(owner)
        assert np.array_equal(await fetch_packed(link, await find_record(link, owner, meta)), owner.bytes_of(meta))
        given = await give_packed(owner, link)
        assert np.array_equal(owner.bytes_of(given[0]), given[1])
        assert (link.counters.packed_bytes, met.local.counters.packed_bytes) == (0, 0)


async def test_packed_frames_are_not_taken_where_bytes_are_lent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pieces = StoreCall._pieces
    monkeypatch.setattr(StoreCall, "_pieces", lambda self, channel, _: pieces(self, channel, True))
    monkeypatch.setattr(streams_local_dialler, "LocalChannel", Unaware)
    async with lossy_node() as owner, met_beside(owner, tmp_path) as met, local_link(met) as link:
        with pytest.raises(UnavailableError):
            await give_packed(owner, link)
        await settled(lambda: not owner.world.node.store.open)
        assert "PACKED frame" in caplog.text


@pytest.mark.parametrize("side", [streams_client_calls, streams_server_connection])
async def test_until_the_kernels_are_loaded_rows_come_and_go_as_they_lie(
    side: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    kernels = Kernels(gate.wait)
    monkeypatch.setattr(side, "KERNELS", kernels)
    async with lossy_node() as owner, link_to(owner.address) as link:
        meta = await store_rounded(owner)
        assert np.array_equal(await fetch_packed(link, await find_record(link, owner, meta)), owner.bytes_of(meta))
        given = await give_packed(owner, link)
        assert np.array_equal(owner.bytes_of(given[0]), given[1])
        assert not await is_packed(link, owner)
        gate.set()
        await settled(kernels.are_ready)
        await fetch_packed(link, await find_record(link, owner, meta))
        assert await is_packed(link, owner)


async def test_layers_are_sent_packed_while_later_ones_are_still_read() -> None:
    reads = GatedWorker()
    async with (
        SsdWorld(arena_bytes=24 * MIB, staging_bytes=8 * MIB, slab_bytes=32 * MIB, reads=reads) as world,
        lossy_node(world=world) as owner,
        link_to(owner.address) as link,
    ):
        meta = await store_rounded(owner)
        await written(world)
        await leave_host(world, meta)
        finding = asyncio.create_task(find_record(link, owner, meta))
        await settled(lambda: bool(reads.parked))
        reads.release()
        fetching = asyncio.create_task(fetch_packed(link, await finding))
        await settled(lambda: owner.server.counters.packed_bytes > MIB)
        assert not fetching.done()
        for _ in range(2):
            await settled(lambda: bool(reads.parked))
            reads.release()
        assert np.array_equal(await fetching, owner.bytes_of(meta))


# What breaks


async def test_a_packed_fetch_is_taken_up_where_it_broke_off() -> None:
    broken: list[int] = []

    def cut_once(number: int, passed: int, data: bytearray) -> None:
        if passed > MIB and not broken:
            broken.append(number)
            raise ConnectionError

    async with lossy_node() as owner:
        meta = await store_rounded(owner)
        with Proxy(owner.address, cut_once) as proxy:
            async with link_to(proxy.address) as link:
                record = await find_record(link, owner, meta)
                assert np.array_equal(await fetch_packed(link, record), owner.bytes_of(meta))
                assert broken
                assert (link.counters.resumed, link.counters.failed) == (1, 0)
                assert link.counters.packed_bytes > 0.9 * record.record_bytes, "before and behind the break"


async def test_a_bit_that_turned_in_a_packed_frame_is_corrupt() -> None:
    turned: list[int] = []

    def turn(number: int, passed: int, data: bytearray) -> None:
        at = len(data) // 2
        if passed > MIB and at > 64 and not turned and bytes([Kind.PACKED, 0, 0, 0]) not in data[at - 64 : at + 4]:
            turned.append(passed)
            data[at] ^= 4  # of a payload: a frame's header and message are not so long

    async with lossy_node() as owner:
        meta = await store_rounded(owner)
        with Proxy(owner.address, turn) as proxy:
            async with link_to(proxy.address) as link:
                record = await find_record(link, owner, meta)
                with pytest.raises(CorruptError):
                    await fetch_packed(link, record)
                assert link.counters.packed_bytes > 0
                assert np.array_equal(await fetch_packed(link, record), owner.bytes_of(meta))


async def test_want_of_memory_for_rows_ends_the_fetch_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: memoryview) -> None:
        raise CapacityError("no page")

    async with lossy_node() as owner, link_to(owner.address) as link:
        meta = await store_rounded(owner)
        record = await find_record(link, owner, meta)
        with monkeypatch.context() as patched:
            patched.setattr(packing, "prefault", refuse)
            with pytest.raises(CapacityError, match="no page"):
                await fetch_packed(link, record)
        assert link.is_answering
        assert np.array_equal(await fetch_packed(link, record), owner.bytes_of(meta))


ROWS = wire.PeerPacked(dtype="bfloat16", head_size=64, heads=2)
LIES = {
    "type": (wire.PeerPacked(dtype="int4", head_size=64, heads=2), 132),
    "size": (wire.PeerPacked(dtype="bfloat16", head_size=66, heads=2), 132),
    "heads": (wire.PeerPacked(dtype="bfloat16", head_size=64, heads=1 << 31), 132),
    "payload": (ROWS, 131),
    "no message": (None, 132),
    "no payload": (ROWS, 0),
}


def lying(lie: str, request: int) -> bytes:
    said, count = LIES[lie]
    message = b"" if said is None else said.SerializeToString()
    return framed(Kind.PACKED, message, bytes(count), request)


async def found_record(owner: Owner) -> PeerRecord:
    meta = await store_rounded(owner)
    async with link_to(owner.address) as link:
        return replace(await find_record(link, owner, meta), lease=None)


@pytest.mark.parametrize("lie", [*LIES, "odd", "too long", "not asked for"])
async def test_a_packed_frame_that_lies_is_an_unavailable_node(lie: str) -> None:
    async with lossy_node() as owner:
        record = await found_record(owner)
    total = record.record_bytes
    memory = np.full(total + 4096, 0xEE, np.uint8)
    start = {"odd": total - 1001, "too long": total - 254}.get(lie, total - 1000)
    answer = lying(lie, 1) if lie in LIES else framed(Kind.PACKED, ROWS.SerializeToString(), bytes(132))
    with babbling([answer]) as babbler:
        async with link_to(babbler.address, limits=HASTY) as link:
            with pytest.raises(UnavailableError, match="what cannot be"):
                await link.fetch(record, memory, lambda *_: None, start, packed=lie != "not asked for")
    assert (memory == 0xEE).all()


# Storing


async def give_packed(owner: Owner, link: PeerLink) -> tuple[CacheMeta, Bytes]:
    meta, view, checksum = rounded_master(owner.identity, "pushed", seed=9)
    request = WriteRequest(meta.namespace, meta.key, len(view), None, 0.25)
    assert await link.give(request, view, checksum, owner.identity.canonical_json(), packed=True)
    return meta, view


async def test_a_record_that_is_given_packed_is_committed_bit_for_bit() -> None:
    async with lossy_node() as owner, link_to(owner.address) as link:
        meta, view = await give_packed(owner, link)
        assert np.array_equal(owner.bytes_of(meta), view)
        assert await is_packed(link, owner)
        counters = link.counters
        assert counters.packed_wire_bytes <= 0.53 * counters.packed_bytes
        assert (counters.stored_bytes, owner.server.counters.taken_bytes) == (len(view), len(view))
        assert counters.packed_bytes > 0.99 * len(view)


async def test_what_came_packed_was_checked_as_it_came() -> None:
    """A commit waits for no worker."""
    worker = GatedWorker()
    world = World(arena_bytes=BIG_ARENA_BYTES, worker=worker)
    async with lossy_node(world=world) as owner, link_to(owner.address) as link:
        await give_packed(owner, link)
        assert await is_packed(link, owner)
        assert not worker.parked


async def test_rows_that_are_not_of_8_bits_are_given_as_they_lie() -> None:
    async with owner_node() as owner, link_to(owner.address) as link:
        meta = await owner.store("one")
        view, checksum = owner.bytes_of(meta).copy(), RecordReader(owner.bytes_of(meta)).header_checksum
        await owner.client.delete(meta)
        request = WriteRequest(meta.namespace, meta.key, len(view))
        assert await link.give(request, view, checksum, owner.identity.canonical_json(), packed=True)
        assert np.array_equal(owner.bytes_of(meta), view)
        assert not await is_packed(link, owner)


async def begin_store(owner: Owner, request: int, record_bytes: int) -> socket.socket:
    """A connection on which a record is about to be sent, by a caller that did not say that it packs."""
    sock = await asyncio.to_thread(greeted, owner.address)
    meta, _, _ = rounded_master(owner.identity, "raw", tokens=64)
    store = wire.PeerStore(
        identities=[owner.identity.canonical_json()],
        namespace=meta.namespace,
        key=encode_key(meta.key),
        record_bytes=record_bytes,
    )
    await ask(sock, Kind.STORE, request, store)
    return sock


@pytest.mark.parametrize("lie", [*LIES, "another request", "odd", "too long"])
async def test_a_packed_frame_that_lies_ends_the_connection_of_a_store(
    lie: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with lossy_node() as owner:
        sock = await begin_store(owner, 2, MIB if lie != "too long" else 254)
        frame = framed(Kind.PACKED, ROWS.SerializeToString(), bytes(132), 3 if lie == "another request" else 2)
        sent = pack_header(Kind.DATA, 2, 0, 1) + b"x" + frame if lie == "odd" else frame
        await settled(lambda: len(owner.world.node.store.open) == 1)
        before = owner.world.arena.view.copy()
        await asyncio.to_thread(sock.sendall, lying(lie, 2) if lie in LIES else sent)
        await settled(lambda: owner.server.connections == 0)
        sock.close()
        await settled(lambda: not owner.world.node.store.open)
        assert "is cut off" in caplog.text
        assert "please report it" not in caplog.text
        assert np.count_nonzero(owner.world.arena.view != before) == (lie == "odd")


async def test_packed_frames_of_who_did_not_say_so_are_refused_and_load_no_kernels(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "kvservice.kernels.cpu_int8", None)
    async with lossy_node() as owner:
        sock = await begin_store(owner, 2, MIB)
        frame = framed(Kind.PACKED, ROWS.SerializeToString(), bytes([0x80, 0x3F] * 2) + bytes([127] * 128), 2)
        await asyncio.to_thread(sock.sendall, frame)
        await settled(lambda: not owner.world.node.store.open)
        head = await asyncio.to_thread(sock.recv, HEADER.size)
        assert parse_header(head) == (Kind.GO, 2, 0, 0), "it was not told that they are welcome"
        sock.close()
        assert owner.server.counters.packed_bytes == 0
    assert "a PACKED frame" in caplog.text
    assert "please report it" not in caplog.text


# Under TLS, and as a carrier


async def test_packed_rows_come_and_go_under_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair = authority.issue("owner")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.cert, pair.key)
    caller = make_caller(tls=ssl.create_default_context(cafile=str(authority.cert)))
    async with lossy_node(tls=context) as owner, link_to(owner.address, caller=caller) as link:
        meta, view = await give_packed(owner, link)
        assert await is_packed(link, owner)
        assert np.array_equal(owner.bytes_of(meta), view)
        assert np.array_equal(await fetch_packed(link, await find_record(link, owner, meta)), view)
        assert await is_packed(link, owner)


async def test_a_packed_stream_is_a_carrier() -> None:
    async with lossy_node() as owner, link_to(owner.address) as link:
        carrier, meta = PackedStream(link), await store_rounded(owner)
        space = owner.client.session.spaces[meta.namespace]
        asked = cache_pb2.SegmentQuery(
            segment=meta.key.segment, accepted_contexts=[meta.key.context], position=meta.position, tokens=meta.tokens
        )
        (offer,) = await carrier.find([Question(space, meta.key.segment, asked, b"")])
        assert offer is not None
        carrier.let_go([offer.record])
        await settled(lambda: not owner.cache(meta).holds)
        view = owner.bytes_of(meta).copy()
        assert await carrier.delete(space, [meta.key]) == 1
        name = RemoteName(meta.namespace, meta.key.segment, meta.key.context)
        assert await carrier.store(Parcel(space, name, view, offer.record.head.header_checksum, None, 0.5))
        assert await is_packed(link, owner)
        assert np.array_equal(owner.bytes_of(meta), view)
        await carrier.close()
        assert await link.ping() > 0, "the link goes on"
        assert carrier.name == link.name
