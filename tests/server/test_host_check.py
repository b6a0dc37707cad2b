"""Who is answered over HTTP on loopback."""

import pytest
from aiohttp import ClientSession
from aiohttp.test_utils import TestServer

from kvservice.app import build_application
from kvservice.stats.asking import is_loopback
from tests.server.builders import World


@pytest.mark.parametrize(
    ("host", "bound", "status"),
    [
        ("127.0.0.1", "127.0.0.1", 200),
        ("localhost:50152", "127.0.0.1", 200),
        ("[::1]:50152", "127.0.0.1", 200),
        ("rebound.example", "127.0.0.1", 421),
        ("rebound.example:50152", "localhost", 421),
        ("127.0.0.1.rebound.example", "127.0.0.1", 421),
        ("cache-7.example", "10.0.0.7", 200),
    ],
)
async def test_a_node_on_loopback_answers_to_its_own_names_alone(host: str, bound: str, status: int) -> None:
    async with TestServer(build_application(World().node, bound)) as server, ClientSession() as session:
        for path in ("/stats", "/", "/healthz"):
            async with session.get(server.make_url(path), headers={"Host": host}) as reply:
                assert reply.status == status, path
                if status != 200:
                    assert "ask for http://127.0.0.1" in (await reply.json())["message"]


def test_names_of_this_machine() -> None:
    assert [is_loopback(one) for one in ("127.0.0.1", "127.8.8.8", "::1", "[::1]", "localhost")] == [True] * 5
    assert [is_loopback(one) for one in ("0.0.0.0", "10.0.0.1", "localhost.example", "")] == [False] * 4
