"""``python -m tests.peers.peer_process``: a node with one record behind a peer port, in a process of its own.

With ``flight``: behind a Flight port; with ``local PATH``: at a unix socket, and for the node of ``LOCAL``. Prints the
port, then serves until its input ends. The record is the one of ``meta``.
"""

import asyncio
import sys
import uuid
from pathlib import Path

from kvservice.model.cache import CacheMeta
from kvservice.peers.flight_server import FlightServer
from kvservice.peers.host_node import NodeHost
from kvservice.peers.member import Facts, NodeId
from kvservice.peers.streams_local_server import LocalServer
from kvservice.peers.streams_server import StreamServer
from kvservice.worker import ThreadWorker
from tests.peers.stream_world import BIG, BIG_ARENA_BYTES, BIG_TOKENS, LOCALHOST
from tests.server.builders import World, make_identity, make_meta, make_planes

LOCAL = NodeId(uuid.UUID(int=1), 7)


def meta() -> CacheMeta:
    """The record that it holds."""
    return make_meta(make_identity(BIG), "one", tokens=BIG_TOKENS)


async def main() -> None:
    """Serve."""
    world = World(arena_bytes=BIG_ARENA_BYTES, worker=ThreadWorker(1))
    await world.client(make_identity(BIG)).store(meta(), make_planes(BIG, BIG_TOKENS))
    facts = Facts(LOCAL if "local" in sys.argv else NodeId(uuid.uuid4(), 7), "other process")
    host = NodeHost(world.node, asyncio.get_running_loop(), lambda: facts)
    if "local" in sys.argv:
        server: FlightServer | StreamServer = LocalServer(host, Path(sys.argv[-1]), world.arena)
    else:
        server = (FlightServer if "flight" in sys.argv else StreamServer)(host, (LOCALHOST, 0))
    sys.stdout.write(f"{server.start()}\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    await asyncio.to_thread(server.stop)


if __name__ == "__main__":
    asyncio.run(main())
