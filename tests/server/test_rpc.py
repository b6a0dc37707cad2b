"""The gRPC edge: a session lives as long as its stream, and every error has a status and a code."""

import asyncio
import json
import logging
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from kvservice.model.errors import BY_CODE, StaleEpochError
from kvservice.model.explanation import Reason
from kvservice.node import Node
from kvservice.rpc import ERROR_KEY, add_to_server, status_of
from kvservice.storage.record import master_layout
from kvservice.wire.v1 import cache_pb2 as wire
from kvservice.wire.v1.cache_pb2_grpc import CacheServiceStub
from kvservice.worker import ThreadWorker
from tests.server.builders import (
    EPOCH,
    World,
    encode_key,
    make_identity,
    make_meta,
    make_planes,
    query,
    write_record,
)

IDENTITY = make_identity()
META = make_meta(IDENTITY)
HELLO = wire.SessionRequest(
    hello=wire.Hello(client_name="test", wants_write=True, identities=[IDENTITY.canonical_json()])
)


class Wire:
    """A served node and a client's channel to it."""

    def __init__(self, world: World, path: Path) -> None:
        self.world = world
        self.address = f"unix:{path}"
        self.server = grpc.aio.server()
        add_to_server(world.calls, self.server)
        self.server.add_insecure_port(self.address)
        self.channel = grpc.aio.insecure_channel(self.address)
        self.stub: Any = CacheServiceStub(self.channel)  # type: ignore[no-untyped-call]

    async def open(self) -> tuple[Any, wire.SessionRef]:
        """A session's stream, and what its calls refer to it by."""
        stream = self.stub.OpenSession()
        await stream.write(HELLO)
        welcome = (await stream.read()).welcome
        return stream, wire.SessionRef(session_id=welcome.session_id, boot_epoch=welcome.boot_epoch)

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(10):
            while not condition():  # noqa: ASYNC110  what it waits for has no event
                await asyncio.sleep(0.001)


@pytest.fixture
async def wired(tmp_path: Path) -> AsyncIterator[Wire]:
    found = Wire(World(worker=ThreadWorker(2)), tmp_path / "grpc.sock")
    await found.server.start()
    found.world.node.start()
    yield found
    await found.channel.close(None)
    await found.server.stop(0)
    await found.world.node.stop()
    found.world.check()
    assert found.world.is_empty_handed()


async def store(wired: Wire, ref: wire.SessionRef) -> wire.CommitOutcome:
    item = wire.ReserveItem(
        namespace=META.namespace, key=encode_key(META.key), record_bytes=master_layout(META).record_bytes
    )
    reserved = (await wired.stub.Reserve(wire.ReserveRequest(session=ref, items=[item]))).outcomes[0].reserved
    checksum = write_record(wired.world.view(reserved.extent), META, make_planes())
    commit = wire.CommitItem(reservation_id=reserved.id, header_checksum=checksum)
    outcome: wire.CommitOutcome = (await wired.stub.Commit(wire.CommitRequest(session=ref, items=[commit]))).outcomes[0]
    return outcome


async def failure(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    metadata: Any = caught.value.trailing_metadata()
    return caught.value.code(), dict(metadata)[ERROR_KEY]


async def test_the_plain_path_over_a_socket(wired: Wire) -> None:
    stream, ref = await wired.open()
    assert not (await store(wired, ref)).error.code
    reply = await wired.stub.Lookup(wire.LookupRequest(session=ref, prompts=[query(META)]))
    renewed = await wired.stub.Renew(wire.RenewRequest(session=ref, lease_ids=[reply.lease.id]))
    assert list(renewed.renewed) == [True]
    assert (await wired.stub.Release(wire.ReleaseRequest(session=ref, lease_ids=[reply.lease.id]))).released == 1
    await wired.stub.CommitRound(
        wire.CommitRoundRequest(session=ref, namespace=META.namespace, members=[encode_key(META.key)])
    )
    stats = json.loads((await wired.stub.Stats(wire.StatsRequest())).json)
    assert stats["lookups"]["exact"] == 1
    explained = await wired.stub.Explain(wire.ExplainRequest(session=ref, prompts=[query(META)]))
    assert explained.prompts[0].segments[0].reason == Reason.FOUND
    assert (await wired.stub.Delete(wire.DeleteRequest(session=ref, keys=[encode_key(META.key)]))).deleted == 1
    await stream.done_writing()


async def test_the_welcome_tells_all_a_client_needs(wired: Wire) -> None:
    stream = wired.stub.OpenSession()
    await stream.write(HELLO)
    welcome = (await stream.read()).welcome
    assert welcome.boot_epoch == EPOCH
    assert list(welcome.namespaces) == [IDENTITY.namespace()]
    assert (welcome.arena.bytes, welcome.arena.data_socket) == (wired.world.arena.bytes, "/nowhere")
    assert welcome.limits.record_bytes_max == wired.world.node.tier.capacity_bytes
    assert wired.world.node.session(welcome.session_id, EPOCH).may_write
    other = make_identity(tenant="other")
    await stream.write(wire.SessionRequest(register=wire.RegisterIdentities(identities=[other.canonical_json()])))
    assert list((await stream.read()).registered.namespaces) == [other.namespace()]


@pytest.mark.parametrize("ending", ["done", "cancelled", "broken"])
async def test_however_a_stream_ends_all_that_its_session_held_is_freed(wired: Wire, ending: str) -> None:
    stream, ref = await wired.open()
    await store(wired, ref)
    await wired.stub.Lookup(wire.LookupRequest(session=ref, prompts=[query(META)]))
    other = make_meta(IDENTITY, "other")
    item = wire.ReserveItem(namespace=META.namespace, key=encode_key(other.key), record_bytes=4096)
    await wired.stub.Reserve(wire.ReserveRequest(session=ref, items=[item]))
    assert wired.world.node.leases.live
    assert wired.world.node.store.open
    if ending == "done":
        await stream.done_writing()
    elif ending == "cancelled":
        stream.cancel()
    else:
        await wired.channel.close(None)
    await wired.until(lambda: not wired.world.node.sessions.open)
    assert wired.world.is_empty_handed()


@pytest.mark.parametrize(
    "first",
    [wire.SessionRequest(), wire.SessionRequest(register=wire.RegisterIdentities())],
    ids=["nothing", "a registration"],
)
async def test_a_stream_begins_with_a_hello(wired: Wire, first: wire.SessionRequest) -> None:
    stream = wired.stub.OpenSession()
    await stream.write(first)
    assert await failure(stream.read()) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_INPUT")
    assert not wired.world.node.sessions.open


async def test_a_second_hello_ends_the_session(wired: Wire) -> None:
    stream, _ = await wired.open()
    await stream.write(HELLO)
    assert await failure(stream.read()) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_INPUT")
    assert not wired.world.node.sessions.open


async def test_a_bad_identity_opens_no_session(wired: Wire) -> None:
    stream = wired.stub.OpenSession()
    await stream.write(wire.SessionRequest(hello=wire.Hello(identities=[IDENTITY.canonical_json(), "{"])))
    assert await failure(stream.read()) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_IDENTITY")
    assert not wired.world.node.sessions.open
    assert not wired.world.node.catalog.spaces


async def test_a_clients_name_is_bounded(wired: Wire) -> None:
    stream = wired.stub.OpenSession()
    await stream.write(wire.SessionRequest(hello=wire.Hello(client_name="x" * 257)))
    assert await failure(stream.read()) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "LIMIT")
    assert not wired.world.node.sessions.open


async def test_errors_come_with_their_code(wired: Wire) -> None:
    _, ref = await wired.open()
    unknown = wire.SessionRef(session_id=bytes(16), boot_epoch=EPOCH)
    stale = wire.SessionRef(session_id=ref.session_id, boot_epoch=EPOCH - 1)
    refused = grpc.StatusCode.FAILED_PRECONDITION
    assert await failure(wired.stub.Lookup(wire.LookupRequest(session=unknown))) == (refused, "UNKNOWN_SESSION")
    assert await failure(wired.stub.Lookup(wire.LookupRequest(session=stale))) == (refused, "STALE_EPOCH")
    assert await failure(wired.stub.Release(wire.ReleaseRequest(session=ref, lease_ids=[1]))) == (
        refused,
        StaleEpochError.code,
    )


async def test_what_nobody_foresaw_is_logged_and_answered_internal(
    wired: Wire, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: Node) -> None:
        raise ZeroDivisionError("a secret of the service")

    monkeypatch.setattr(Node, "stats_document", fail)
    with caplog.at_level(logging.ERROR), pytest.raises(grpc.aio.AioRpcError) as caught:
        await wired.stub.Stats(wire.StatsRequest())
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in (caught.value.details() or "")
    assert "ZeroDivisionError" in caplog.text


def test_every_error_has_a_status_of_its_own() -> None:
    internal = {code for code, kind in BY_CODE.items() if status_of(kind("")) is grpc.StatusCode.INTERNAL}
    assert internal == {"INTERNAL"}


async def test_a_node_in_the_background_folds_and_expires(wired: Wire) -> None:
    _, ref = await wired.open()
    await store(wired, ref)
    world = wired.world
    meta = make_meta(IDENTITY, provenance="hkvd:0.02")
    item = wire.ReserveItem(
        namespace=META.namespace, key=encode_key(meta.key), record_bytes=master_layout(meta).record_bytes
    )
    reserved = (await wired.stub.Reserve(wire.ReserveRequest(session=ref, items=[item]))).outcomes[0].reserved
    checksum = write_record(world.view(reserved.extent), meta, make_planes())
    commit = wire.CommitItem(reservation_id=reserved.id, header_checksum=checksum)
    await wired.stub.Commit(wire.CommitRequest(session=ref, items=[commit]))
    await wired.until(lambda: world.node.counters.folds.folded == 1)
    await wired.stub.Lookup(wire.LookupRequest(session=ref, prompts=[query(META)]))
    world.clock.now_s += 31
    await wired.until(lambda: not world.node.leases.live)


@pytest.mark.parametrize("ending", ["cancelled", "deadline"])
async def test_what_was_reserved_is_taken_back_when_nobody_reads_the_reply(
    wired: Wire, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    """The loop is busy while the client gives up, so the service hears of it only after the work."""
    _, ref = await wired.open()
    honest = Node.reserve
    has_reserved, given_up = threading.Event(), threading.Event()

    def slow(*args: Any) -> Any:
        reservation = honest(*args)
        has_reserved.set()
        assert given_up.wait(10)
        threading.Event().wait(0.05)  # the cancellation comes through a socket; there is no event for its arrival
        return reservation

    monkeypatch.setattr(Node, "reserve", slow)
    item = wire.ReserveItem(namespace=META.namespace, key=encode_key(META.key), record_bytes=4096)
    request = wire.ReserveRequest(session=ref, items=[item])
    client = threading.Thread(target=give_up, args=(wired.address, request, ending, has_reserved, given_up))
    client.start()
    await wired.until(lambda: not client.is_alive())
    await wired.until(lambda: wired.world.node.counters.reserved == 1)
    monkeypatch.undo()
    await wired.until(lambda: not wired.world.node.store.open)
    assert (await wired.stub.Reserve(request)).outcomes[0].WhichOneof("outcome") == "reserved"


def give_up(
    address: str, request: wire.ReserveRequest, ending: str, has_reserved: threading.Event, given_up: threading.Event
) -> None:
    """A client, in a thread of its own, that does not wait for the answer."""
    with grpc.insecure_channel(address) as channel:
        stub: Any = CacheServiceStub(channel)  # type: ignore[no-untyped-call]
        call = stub.Reserve.future(request, timeout=0.5 if ending == "deadline" else 10)
        assert has_reserved.wait(10)
        if ending == "cancelled":
            call.cancel()
        try:
            call.result()
        except (grpc.RpcError, grpc.FutureCancelledError):
            given_up.set()
