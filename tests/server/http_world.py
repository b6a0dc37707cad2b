"""A node behind its HTTP side, in this process: what it answers to a path."""

import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from aiohttp import ClientSession
from aiohttp.test_utils import BaseTestServer, TestServer

from kvservice.app import build_application
from kvservice.node import Node


@dataclass(frozen=True, slots=True)
class Reply:
    """Status, headers and body of an answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Http:
    """Asks one node."""

    def __init__(self, server: BaseTestServer, session: ClientSession) -> None:
        self._server = server
        self._session = session

    async def get(self, path: str) -> Reply:
        async with self._session.get(self._server.make_url(path)) as reply:
            return Reply(reply.status, dict(reply.headers), await reply.read())

    async def post(self, path: str, body: bytes, kind: str = "application/json") -> Reply:
        headers = {"Content-Type": kind}
        async with self._session.post(self._server.make_url(path), data=io.BytesIO(body), headers=headers) as reply:
            return Reply(reply.status, dict(reply.headers), await reply.read())


@asynccontextmanager
async def http_of(node: Node) -> AsyncIterator[Http]:
    """The HTTP side of ``node``, until the end of the block."""
    async with TestServer(build_application(node)) as server, ClientSession() as session:
        yield Http(server, session)
