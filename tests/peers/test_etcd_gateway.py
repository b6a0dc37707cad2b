"""What answers at etcd's address may be anything: each is an error of ours, in time, and bounded."""

import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from kvservice.model.errors import KVServiceError, UnavailableError
from kvservice.peers import etcd_gateway
from kvservice.peers.etcd_gateway import EtcdGateway, KeyEvent, prefix_end
from kvservice.peers.etcd_place import parse_etcd_url
from tests.peers.etcd_process import encoded, free_port

Handler = Callable[[web.Request], object]


@asynccontextmanager
async def answering(status: int, *lines: bytes, deadline_s: float = 5.0) -> AsyncIterator[EtcdGateway]:
    """A gateway to a server that gives this for an answer, whatever is asked."""

    async def answer(_: web.Request) -> web.StreamResponse:
        return web.Response(status=status, body=b"\n".join(lines))

    application = web.Application()
    application.router.add_post("/{path:.*}", answer)
    runner, port = web.AppRunner(application), free_port()
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    gateway = EtcdGateway(parse_etcd_url(f"http://127.0.0.1:{port}"), deadline_s=deadline_s)
    try:
        yield gateway
    finally:
        await gateway.close()
        await runner.cleanup()


@pytest.mark.parametrize(
    ("status", "body"),
    [
        *((200, b""), (200, b"not json"), (200, b"[]"), (200, b"[" * 100_000), (404, b"404 page not found")),
        *((302, b""), (500, b'{"error": "boom"}'), (503, b'{"error": {"grpc_code": "x"}}')),
        (200, b'{"header": []}'),
        (200, b'{"header": {"revision": "many"}}'),
        (200, b'{"header": {"revision": "1"}, "kvs": 5}'),
        (200, b'{"header": {"revision": "1"}, "kvs": [{"key": 5}]}'),
        (200, b'{"header": {"revision": "1"}, "kvs": [{"value": "AAAA"}]}'),
    ],
)
async def test_what_is_not_etcd_is_unavailable_in_so_many_words(status: int, body: bytes) -> None:
    async with answering(status, body) as gateway:
        with pytest.raises(UnavailableError, match="etcd"):
            await gateway.list_keys(b"/")


async def test_an_answer_without_end_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(etcd_gateway, "ANSWER_BYTES_MAX", 1000)
    async with answering(200, b"x" * 5000) as gateway:
        with pytest.raises(UnavailableError, match="more than 1000 bytes"):
            await gateway.list_keys(b"/")
        with pytest.raises(UnavailableError, match="more than 1000 bytes"):
            async for _ in gateway.watch(b"/", 1):
                pass


@pytest.mark.parametrize(
    "line",
    [
        *(b"garbage", b"[]", b'{"result": 5}', b'{"result": {"events": 5}}', b'{"result": {"events": [{"kv": 5}]}}'),
        b'{"result": {"canceled": true, "cancel_reason": "why not"}}',
        b'{"error": {"grpc_code": 14, "message": "stopping"}}',
    ],
)
async def test_a_watch_that_says_what_it_should_not_is_an_error(line: bytes) -> None:
    async with answering(200, line) as gateway:
        with pytest.raises(KVServiceError):
            async for _ in gateway.watch(b"/", 1):
                pass


async def test_events_are_read_from_lines_that_come_in_pieces_until_the_server_ends_it() -> None:
    put = {"kv": {"key": encoded("/a"), "value": encoded("v"), "mod_revision": "7"}}
    gone = {"type": "DELETE", "kv": {"key": encoded("/b"), "mod_revision": "8"}}
    lines = [json.dumps({"result": one}).encode() for one in ({"created": True}, {"events": [put, gone]})]
    async with answering(200, *lines, b"") as gateway:
        seen = []
        with pytest.raises(UnavailableError, match="the watch broke off"):  # noqa: PT012
            async for events in gateway.watch(b"/", 1):
                seen += events
    assert seen == [KeyEvent(b"/a", b"v"), KeyEvent(b"/b", None)]


async def test_a_server_that_never_answers_costs_one_deadline() -> None:
    server = socket.create_server(("127.0.0.1", 0))  # the kernel connects, nobody answers
    port = server.getsockname()[1]
    gateway = EtcdGateway(parse_etcd_url(f"http://127.0.0.1:{port}"), deadline_s=0.1)
    with pytest.raises(UnavailableError, match=r"within 0\.1 s"):
        await gateway.list_keys(b"/")
    with pytest.raises(UnavailableError, match="the watch broke off"):
        async for _ in gateway.watch(b"/", 1):
            pass
    await gateway.close()
    server.close()


def test_a_prefix_ends_before_the_next_one() -> None:
    assert prefix_end(b"/kvservice/members/") == b"/kvservice/members0"
