"""First layers come with the answer to a question: which, how much, and what becomes of what held them."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from kvservice.model.cache import CacheMeta
from kvservice.model.errors import UnavailableError
from kvservice.model.segment import SegmentId
from kvservice.peers import streams_server_connection
from kvservice.peers.ahead_buffers import AheadBuffers
from kvservice.peers.frames import Kind
from kvservice.peers.host_loop import NodeLoop
from kvservice.peers.streams_channel import Channel
from kvservice.peers.streams_client import PeerLink
from kvservice.peers.streams_client_calls import PeerFinding, PeerRecord
from kvservice.peers.streams_limits import LinkLimits
from kvservice.peers.streams_messages import encode_found
from kvservice.storage.buffer import Bytes
from kvservice.wire.v1 import peer_pb2 as wire
from tests.peers.local_world import local_link, met_node
from tests.peers.stream_world import BIG_TOKENS, HASTY, Owner, link_to, make_query, owner_node, settled
from tests.peers.test_stream_ssd import owner_on_ssd, release
from tests.peers.test_streams import store_mirror
from tests.server.builders import GatedWorker

MIB = 1 << 20
LAYER_BYTES = BIG_TOKENS * 1024
Linked = Callable[[], AbstractAsyncContextManager[tuple[Owner, PeerLink]]]


@pytest.fixture(params=["stream", "shared memory"])
def linked(request: pytest.FixtureRequest, tmp_path: Path) -> Linked:
    """A node and a link to it."""

    @asynccontextmanager
    async def over_stream() -> AsyncIterator[tuple[Owner, PeerLink]]:
        async with owner_node() as owner, link_to(owner.address) as link:
            yield owner, link

    @asynccontextmanager
    async def over_memory() -> AsyncIterator[tuple[Owner, PeerLink]]:
        async with met_node(tmp_path) as met, local_link(met) as link:
            yield met.owner, link

    return over_stream if request.param == "stream" else over_memory


async def ask(link: PeerLink, owner: Owner, metas: Sequence[CacheMeta], ahead_bytes: int) -> list[PeerFinding]:
    texts = {owner.identity.namespace(): owner.identity.canonical_json()}
    return await link.find_all([make_query(meta) for meta in metas], texts, ttl_s=30.0, ahead_bytes=ahead_bytes)


def ahead_of(record: PeerRecord | None) -> Bytes:
    assert record is not None
    assert record.ahead is not None
    return record.ahead


async def is_let_go(owner: Owner, link: PeerLink, findings: Sequence[PeerFinding]) -> None:
    """Nothing is held once the leases are gone, though nothing was fetched."""
    link.let_go(record for one in findings for record in (one.master, one.record) if record is not None)
    await settled(lambda: not owner.world.node.catalog.held)


async def test_the_first_layer_comes_with_the_answer(linked: Linked) -> None:
    async with linked() as (owner, link):
        meta = await owner.store("one")
        (finding,) = await ask(link, owner, [meta], MIB)
        ahead = ahead_of(finding.record)
        assert finding.record is not None
        assert len(ahead) == finding.record.head.layout.section_offsets[1]
        assert np.array_equal(ahead, owner.bytes_of(meta)[: len(ahead)])
        await is_let_go(owner, link, [finding])


async def test_the_rest_is_fetched_behind_it(linked: Linked) -> None:
    async with linked() as (owner, link):
        meta = await owner.store("one")
        (finding,) = await ask(link, owner, [meta], MIB)
        ahead, record = ahead_of(finding.record), finding.record
        assert record is not None
        target, pieces = np.zeros(record.record_bytes, np.uint8), list[tuple[int, int]]()
        target[: len(ahead)] = ahead
        await link.fetch(record, target, lambda *piece: pieces.append(piece), len(ahead))
        assert min(pieces)[0] == len(ahead)
        assert np.array_equal(target, owner.bytes_of(meta))


@pytest.mark.parametrize("ahead_bytes", [0, 1, LAYER_BYTES])
async def test_what_is_asked_for_is_never_passed(linked: Linked, ahead_bytes: int) -> None:
    """A layer and the head before it are a little more than a layer."""
    async with linked() as (owner, link):
        meta = await owner.store("one")
        (finding,) = await ask(link, owner, [meta], ahead_bytes)
        assert finding.record is not None
        assert finding.record.ahead is None
        assert (await link.ping()) >= 0


async def test_of_several_records_as_many_as_fit(linked: Linked) -> None:
    async with linked() as (owner, link):
        metas = [await owner.store(name) for name in ("one", "two", "three")]
        findings = await ask(link, owner, metas, 2 * LAYER_BYTES + MIB // 4)
        assert [one.record is not None and one.record.ahead is not None for one in findings] == [True, True, False]
        for meta, finding in zip(metas[:2], findings, strict=False):
            ahead = ahead_of(finding.record)
            assert np.array_equal(ahead, owner.bytes_of(meta)[: len(ahead)])
        await is_let_go(owner, link, findings)


async def test_a_master_comes_before_its_mirror_and_once(linked: Linked) -> None:
    async with linked() as (owner, link):
        first, mirror = await store_mirror(owner)
        findings = await ask(link, owner, [mirror, first], MIB)
        for record, meta in ((findings[0].master, first), (findings[0].record, mirror)):
            ahead = ahead_of(record)
            assert np.array_equal(ahead, owner.bytes_of(meta)[: len(ahead)])
        assert findings[1].record is not None
        assert findings[1].record.ahead is None, "it came already"
        await is_let_go(owner, link, findings)


async def test_a_miss_brings_nothing(linked: Linked) -> None:
    async with linked() as (owner, link):
        meta = await owner.store("one")
        query = make_query(meta, segment=bytes(32))
        (finding,) = await link.find_all([query], {meta.namespace: owner.identity.canonical_json()}, ahead_bytes=MIB)
        assert finding.record is None
        assert not owner.world.node.catalog.held


async def test_from_ssd_the_layer_comes_as_soon_as_it_was_read() -> None:
    reads = GatedWorker()
    async with owner_on_ssd(reads) as (owner, meta, _), link_to(owner.address) as link:
        asking = asyncio.ensure_future(ask(link, owner, [meta], MIB))
        await release(reads)
        (finding,) = await asking
        ahead = ahead_of(finding.record)
        assert np.array_equal(ahead, owner.bytes_of(meta)[: len(ahead)])
        assert owner.cache(meta) in owner.world.node.catalog.arriving
        for _ in range(2):
            await release(reads)
        await settled(lambda: owner.cache(meta) not in owner.world.node.catalog.arriving)


# Buffers


def test_a_buffer_that_is_given_back_is_used_again_and_by_one_alone() -> None:
    buffers = AheadBuffers()
    first = buffers.take(100_000)
    second = buffers.take(100_000)
    assert not np.shares_memory(first, second)
    buffers.give_back(first)
    buffers.give_back(first)
    again = buffers.take(100_000)
    buffers.give_back(first)
    assert np.shares_memory(first, again)
    assert not np.shares_memory(again, buffers.take(10))
    buffers.give_back(again)
    third, fourth = buffers.take(50_000), buffers.take(50_000)
    assert (len(third), np.shares_memory(first, third)) == (50_000, True)
    assert not any(np.shares_memory(one, fourth) for one in (first, second))


def test_of_a_buffer_that_is_too_short_a_new_one_is_made() -> None:
    buffers = AheadBuffers()
    first = buffers.take(1000)
    buffers.give_back(first)
    assert len(buffers.take(MIB)) == MIB


def test_memory_of_others_is_not_taken_over() -> None:
    buffers, foreign = AheadBuffers(), np.zeros(1000, np.uint8)
    for one in (None, foreign, foreign[:10]):
        buffers.give_back(one)
    assert not np.shares_memory(buffers.take(10), foreign)


async def test_a_record_that_is_let_go_of_gives_its_buffer_back(linked: Linked) -> None:
    async with linked() as (owner, link):
        meta = await owner.store("one")
        places = []
        for _ in range(3):
            (finding,) = await ask(link, owner, [meta], MIB)
            places.append(ahead_of(finding.record).ctypes.data)
            link.let_go([finding.record] if finding.record else [])
        assert len(set(places)) == 1


# What goes wrong


async def test_a_caller_who_goes_in_the_middle_leaves_nothing_held(monkeypatch: pytest.MonkeyPatch) -> None:
    async with owner_node() as owner:
        send, cut = Channel.send_data, list[Channel]()

        def cut_off(self: Channel, request: int, source: object, start: int, end: int) -> None:
            if not cut:
                cut.append(self)
                self.shut()
            send(self, request, source, start, end)  # type: ignore[arg-type]

        meta = await owner.store("one")
        monkeypatch.setattr(Channel, "send_data", cut_off)
        async with link_to(owner.address) as link:
            (finding,) = await ask(link, owner, [meta], MIB)
            assert cut, "the first connection broke"
            ahead = ahead_of(finding.record)
            assert np.array_equal(ahead, owner.bytes_of(meta)[: len(ahead)])
            await is_let_go(owner, link, [finding])


async def test_a_caller_who_does_not_read_is_cut_off_and_holds_nothing() -> None:
    """What it was being sent is held meanwhile, whatever becomes of its lease."""
    async with owner_node() as owner, link_to(owner.address, limits=HASTY) as link:
        meta = await owner.store("one")
        receive, reads = Channel.receive_piece, asyncio.Event()

        def freeze(self: Channel, target: memoryview) -> None:
            loop.call_soon_threadsafe(reads.set)
            receive(self, target)
            raise OSError("the process is gone")

        loop = asyncio.get_running_loop()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Channel, "receive_piece", freeze)
            with pytest.raises(UnavailableError):
                await ask(link, owner, [meta], MIB)
        assert reads.is_set()
        await settled(lambda: not owner.world.node.catalog.held)


@pytest.mark.parametrize("parts", [2, 4])
async def test_many_questions_and_long_answers_do_not_wait_for_each_other(
    monkeypatch: pytest.MonkeyPatch, parts: int
) -> None:
    """Who answers the first one reads no other meanwhile; with buffers as small as a new connection's."""
    honest = Channel.__init__

    def narrow(self: Channel, sock: socket.socket, **words: bool) -> None:
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, 64 << 10)
        honest(self, sock, **words)

    monkeypatch.setattr(Channel, "__init__", narrow)
    async with owner_node() as owner, link_to(owner.address, limits=LinkLimits(deadline_s=5.0)) as link:
        metas = [await owner.store(name) for name in ("one", "two")]
        texts = {owner.identity.namespace(): owner.identity.canonical_json()}
        await link.find_all([make_query(metas[0])], texts)
        absent = make_query(metas[0], marks=bytes(256))
        queries = [make_query(meta) for meta in metas]
        queries += [absent._replace(segment=SegmentId(bytes(28) + n.to_bytes(4, "big"))) for n in range(512 * parts)]
        found = await link.find_all(queries, texts, ttl_s=30.0, ahead_bytes=4 * MIB)
        assert [one.record is not None for one in found[:3]] == [True, True, False]
        assert link.counters.expired == 0


async def test_more_than_was_asked_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def boast(found: object) -> wire.PeerFound:
        message = encode(found)  # type: ignore[arg-type]
        message.answers[0].record.ahead_bytes = 2 * MIB
        return message

    encode = encode_found
    monkeypatch.setattr(streams_server_connection, "encode_found", boast)
    async with owner_node() as owner, link_to(owner.address) as link:
        meta = await owner.store("one")
        with pytest.raises(UnavailableError, match="2097152 bytes come with an answer, 1048576 were asked for"):
            await ask(link, owner, [meta], MIB)


async def test_less_than_was_said_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another answer in the place of promised bytes."""
    monkeypatch.setattr(streams_server_connection.PeerConnection, "_send_bytes", _say_hello)
    async with owner_node() as owner, link_to(owner.address, limits=HASTY) as link:
        meta = await owner.store("one")
        with pytest.raises(UnavailableError, match="PONG frame where DATA should be"):
            await ask(link, owner, [meta], MIB)
        await settled(lambda: not owner.world.node.catalog.held)


def _say_hello(self: streams_server_connection.PeerConnection, request: int, *_: object) -> None:
    self._channel.send(Kind.PONG, request, wire.PeerFacts())


async def test_a_question_that_finds_its_answer_too_late_gives_it_back() -> None:
    """The thread has gone when the loop comes to it."""
    loop, undone = NodeLoop(asyncio.get_running_loop()), list[int]()
    begun, goes = asyncio.Event(), asyncio.Event()

    async def find() -> int:
        begun.set()
        try:
            await goes.wait()
        except asyncio.CancelledError:
            return 7  # it was over just then
        return 3

    asking = asyncio.ensure_future(asyncio.to_thread(loop.wait_for, find(), 0.05, undone.append))
    await begun.wait()
    with pytest.raises(UnavailableError, match="did not come to it"):
        await asking
    await settled(lambda: undone == [7])


async def test_what_never_began_is_no_complaint() -> None:
    """A loop that comes to it when the caller has gone."""
    other = asyncio.new_event_loop()
    loop = NodeLoop(other)
    asking = asyncio.ensure_future(asyncio.to_thread(loop.wait_for, asyncio.sleep(0), 0.05))
    with pytest.raises(UnavailableError):
        await asking
    await asyncio.to_thread(other.run_until_complete, asyncio.sleep(0.01))
    other.close()
