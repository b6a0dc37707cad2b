"""Calls over the data socket: the same calls, replies and errors as over gRPC, and nothing left by who gives up."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from kvservice.control_socket import _REQUESTS
from kvservice.data_socket import DataSocket
from kvservice.limits import NodeLimits
from kvservice.model.frames import ANSWER, CALL, CALLS_MAGIC, HELLO, WELCOME, pack_call
from kvservice.model.limits import MESSAGE_BYTES_MAX
from kvservice.node import Node
from kvservice.wire.v1 import cache_pb2 as wire
from tests.server.builders import (
    Client,
    GatedWorker,
    World,
    encode_key,
    make_identity,
    make_meta,
    make_planes,
    query,
    until_parked,
)

META = make_meta(make_identity())
RESERVE_ITEM = wire.ReserveItem(namespace=META.namespace, key=encode_key(META.key), record_bytes=4096)


class Caller:
    """A connection of a session, used without any of the client's code."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def of(cls, path: Path, client: Client) -> "Caller":
        caller = cls(*await asyncio.open_unix_connection(path))
        caller.writer.write(HELLO.pack(CALLS_MAGIC, client.id, client.ref.boot_epoch))
        assert len(await caller.reader.readexactly(WELCOME.size)) == WELCOME.size
        return caller

    def send(self, name: str, request: Any, *, is_post: bool = False) -> None:
        self.writer.write(pack_call(name, request.SerializeToString(), is_post=is_post))

    async def answer(self) -> tuple[str, bytes]:
        async with asyncio.timeout(5):
            message_bytes, code_bytes = ANSWER.unpack(await self.reader.readexactly(ANSWER.size))
            code = await self.reader.readexactly(code_bytes)
            return code.decode(), await self.reader.readexactly(message_bytes)

    async def call(self, name: str, request: Any) -> tuple[str, bytes]:
        self.send(name, request)
        return await self.answer()

    async def is_closed(self) -> bool:
        """Wait for the other end to close."""
        async with asyncio.timeout(5):
            return await self.reader.read() == b""

    def close(self) -> None:
        self.writer.close()


class Served:
    """A node and a client of it, whose calls go over sockets."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.worker = GatedWorker()
        self.world = World(worker=self.worker, limits=NodeLimits(lookup_slice=1))
        self.server = DataSocket(path, self.world.arena.bytes, self.world.calls, lambda _: -1)
        self.client = self.world.client()
        self.callers: list[Caller] = []

    async def open(self, client: Client | None = None) -> Caller:
        caller = await Caller.of(self.path, client or self.client)
        self.callers.append(caller)
        return caller

    async def store(self) -> None:
        storing = asyncio.create_task(self.client.store(META, make_planes()))
        await until_parked(self.worker)
        self.worker.release()
        await storing


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(5):
        while not holds():  # noqa: ASYNC110  what it waits for has no event
            await asyncio.sleep(0.001)


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    found = Served(tmp_path / "d.sock")
    found.server.start()
    yield found
    for caller in found.callers:
        caller.close()
    await found.server.stop()
    await found.world.node.stop()
    found.world.check()
    assert found.world.is_empty_handed()
    assert not found.world.node.store.strays


def reserve(client: Client) -> wire.ReserveRequest:
    return wire.ReserveRequest(session=client.ref, items=[RESERVE_ITEM])


def lookup(client: Client) -> wire.LookupRequest:
    return wire.LookupRequest(session=client.ref, prompts=[query(META)])


async def leased(caller: Caller, client: Client) -> int:
    code, message = await caller.call("Lookup", lookup(client))
    assert not code, message
    return wire.LookupReply.FromString(message).lease.id


async def test_a_reply_is_the_one_that_every_other_way_gives(served: Served) -> None:
    await served.store()
    caller = await served.open()
    code, message = await caller.call("Lookup", lookup(served.client))
    expected = await served.client.lookup(query(META))
    found = wire.LookupReply.FromString(message)
    assert code == ""
    assert list(found.prompts) == list(expected.prompts)
    assert (found.lease.ttl_s, found.lease.id + 1) == (expected.lease.ttl_s, expected.lease.id)


async def test_every_call_of_the_node_can_be_made_by_its_name(served: Served) -> None:
    caller = await served.open()
    for name in served.world.calls._by_name:
        request: Any = _REQUESTS[name]()
        if "session" in request.DESCRIPTOR.fields_by_name:
            request.session.CopyFrom(served.client.ref)
        code, message = await caller.call(name, request)
        assert b"there is no call" not in message, (name, code)


@pytest.mark.parametrize("name", ["Nonsense", "OpenSession", "", "_by_name"])
async def test_what_is_no_call_is_refused_by_name(served: Served, name: str) -> None:
    caller = await served.open()
    code, message = await caller.call(name, wire.StatsRequest())
    assert code == "INVALID_INPUT"
    assert b"Lookup" in message
    assert (await caller.call("Stats", wire.StatsRequest()))[0] == ""


async def test_an_error_comes_with_its_code_and_text_and_the_connection_goes_on(served: Served) -> None:
    caller = await served.open()
    stale = wire.SessionRef(session_id=served.client.id, boot_epoch=1)
    code, message = await caller.call("Lookup", wire.LookupRequest(session=stale))
    assert code == "STALE_EPOCH"
    assert b"restarted" in message
    assert (await caller.call("Lookup", lookup(served.client)))[0] == ""


async def test_bytes_that_are_no_request_are_refused(served: Served) -> None:
    caller = await served.open()
    caller.writer.write(pack_call("Lookup", b"\xff" * 20))
    code, message = await caller.answer()
    assert code == "INVALID_INPUT"
    assert b"no request of Lookup" in message


async def test_what_nobody_foresaw_is_logged_and_answered_internal(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: Node) -> None:
        raise ZeroDivisionError("a secret of the service")

    monkeypatch.setattr(Node, "stats_document", fail)
    caller = await served.open()
    with caplog.at_level(logging.ERROR):
        assert await caller.call("Stats", wire.StatsRequest()) == ("INTERNAL", b"Stats failed inside the service")
    assert "ZeroDivisionError" in caplog.text


async def test_a_call_on_another_session_is_refused_and_changes_nothing(served: Served) -> None:
    caller, other = await served.open(), served.world.client()
    code, _ = await caller.call("Reserve", reserve(other))
    assert code == "NOT_OWNED"
    assert not served.world.node.store.open


async def test_calls_of_a_session_that_has_ended_are_refused(served: Served) -> None:
    caller = await served.open()
    served.client.close()
    assert (await caller.call("Lookup", lookup(served.client)))[0] == "UNKNOWN_SESSION"


async def test_a_frame_that_is_too_long_ends_its_connection_only(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    caller, other = await served.open(), await served.open()
    with caplog.at_level(logging.WARNING):
        caller.writer.write(CALL.pack(MESSAGE_BYTES_MAX + 1, 6, 0) + b"Lookup")
        assert await caller.is_closed()
    assert "the limit is" in caplog.text
    assert (await other.call("Stats", wire.StatsRequest()))[0] == ""


async def test_calls_sent_without_waiting_are_answered_one_by_one_in_order(served: Served) -> None:
    await served.store()
    caller = await served.open()
    prompts = [wire.LookupRequest(session=served.client.ref, prompts=[query(META)] * count) for count in (5, 1, 3)]
    for request in prompts:
        caller.send("Lookup", request)
    answers = [wire.LookupReply.FromString((await caller.answer())[1]) for _ in prompts]
    assert [len(answer.prompts) for answer in answers] == [5, 1, 3]


async def test_who_does_not_read_answers_holds_up_nobody_else(served: Served) -> None:
    greedy, other = await served.open(), await served.open()
    greedy.writer.transport.pause_reading()  # type: ignore[attr-defined]
    prompt = wire.PromptQuery(namespace=META.namespace, segments=[*query(META).segments] * 2000)
    many = wire.LookupRequest(session=served.client.ref, prompts=[prompt])
    for _ in range(40):
        greedy.send("Lookup", many)
    await until(lambda: any(one._is_reader_slow for one in served.server._connections))
    answered = served.world.node.counters.lookups.calls
    for _ in range(20):
        assert (await other.call("Stats", wire.StatsRequest()))[0] == ""
    assert served.world.node.counters.lookups.calls == answered < 40
    greedy.writer.transport.resume_reading()  # type: ignore[attr-defined]
    for _ in range(40):
        assert (await greedy.answer())[0] == ""


async def test_a_post_gets_no_answer_and_comes_before_what_follows(served: Served) -> None:
    await served.store()
    caller = await served.open()
    lease = await leased(caller, served.client)
    caller.send("Release", wire.ReleaseRequest(session=served.client.ref, lease_ids=[lease]), is_post=True)
    renew = wire.RenewRequest(session=served.client.ref, lease_ids=[lease])
    assert await caller.call("Renew", renew) == ("", wire.RenewReply(renewed=[False]).SerializeToString())


async def test_a_post_that_fails_loses_nothing_that_follows(served: Served) -> None:
    caller = await served.open()
    for request in (wire.ReleaseRequest(session=served.client.ref, lease_ids=[1]), wire.ReleaseRequest()):
        caller.send("Release", request, is_post=True)
    caller.send("Reserve", reserve(served.client), is_post=True)  # nobody could know what it gave
    assert (await caller.call("Stats", wire.StatsRequest()))[0] == ""
    assert not served.world.node.store.open


# Who gives up


async def test_what_was_reserved_is_taken_back_when_nobody_reads_the_answer(served: Served) -> None:
    giving_up, other = await served.open(), served.world.client()
    giving_up.send("Reserve", reserve(served.client))
    await until(lambda: served.world.node.store.open)
    giving_up.close()
    await until(lambda: not served.world.node.store.open)
    assert (await other.reserve(META, 4096)).WhichOneof("outcome") == "reserved"


async def test_what_was_reserved_for_a_client_that_had_gone_already_is_taken_back(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call is read after its connection was closed: the loop was busy meanwhile."""
    giving_up = await served.open()
    (connection,) = served.server._connections
    calls: list[bytes] = []
    honest = connection.buffer_updated

    def late(nbytes: int) -> None:
        giving_up.writer.transport.abort()
        calls.append(b"")
        honest(nbytes)

    monkeypatch.setattr(connection, "buffer_updated", late)
    giving_up.send("Reserve", reserve(served.client))
    await until(lambda: not served.client.session.connections)
    assert calls
    assert served.world.node.counters.reserved <= 1
    assert not served.world.node.store.open


async def test_what_was_reserved_stays_once_a_later_call_shows_that_the_answer_was_read(served: Served) -> None:
    caller = await served.open()
    await caller.call("Reserve", reserve(served.client))
    caller.writer.write(pack_call("", b"", is_post=True))  # a farewell
    caller.close()
    await until(lambda: not served.client.session.connections)
    assert len(served.world.node.store.open) == 1


async def test_a_commit_that_nobody_waits_for_is_cancelled_and_its_bytes_are_freed(served: Served) -> None:
    caller = await served.open()
    id_, checksum = await served.client.begin(META, make_planes())
    item = wire.CommitItem(reservation_id=id_, header_checksum=checksum)
    caller.send("Commit", wire.CommitRequest(session=served.client.ref, items=[item]))
    await until(lambda: served.worker.parked)
    caller.close()
    await until(lambda: not served.world.node.store.open)
    served.worker.parked.clear()
    assert served.world.node.tier.used_bytes == 0


async def test_a_call_that_waits_holds_up_its_own_connection_only(served: Served) -> None:
    waiting, other = await served.open(), await served.open()
    id_, checksum = await served.client.begin(META, make_planes())
    item = wire.CommitItem(reservation_id=id_, header_checksum=checksum)
    waiting.send("Commit", wire.CommitRequest(session=served.client.ref, items=[item]))
    await until(lambda: served.worker.parked)
    waiting.send("Stats", wire.StatsRequest())
    assert (await other.call("Lookup", lookup(served.client)))[0] == ""
    served.worker.release()
    assert wire.CommitReply.FromString((await waiting.answer())[1]).outcomes[0].generation
    assert wire.StatsReply.FromString((await waiting.answer())[1]).json


async def test_stopping_waits_for_what_is_under_way_and_frees_it(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = served.worker.run

    async def run(function: Callable[[], Any]) -> Any:
        try:
            return await honest(function)
        finally:
            for _ in range(20):  # as a thread would, it ends in its own time
                await asyncio.sleep(0)

    monkeypatch.setattr(served.worker, "run", run)
    caller = await served.open()
    id_, checksum = await served.client.begin(META, make_planes())
    item = wire.CommitItem(reservation_id=id_, header_checksum=checksum)
    caller.send("Commit", wire.CommitRequest(session=served.client.ref, items=[item]))
    await until(lambda: served.worker.parked)
    await served.server.stop()
    served.worker.parked.clear()
    assert not served.world.node.store.open
    assert not served.client.session.connections
    assert await caller.is_closed()
