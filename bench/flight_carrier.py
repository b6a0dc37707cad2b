"""How fast do records go between two nodes over Arrow Flight, against the streams and a bare socket loop?

The same records, sides and rounds as ``bench/streams.py``, which may take ``FlightWay`` and ``FlightProcess`` among its
ways. Flight is for where only gRPC gets through: what it costs is asked, not whether it is the fastest.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.stream_servers import IDENTITY, LOCALHOST, SLOTS, ArenaHost, Server, make_meta, say
from bench.streams import IDENTITY_JSON, PATIENT, Bare, Figure, Memory, Stream, Way, figure, print_table, take_turns
from kvservice.peers.flight_client import FlightLink
from kvservice.peers.flight_server import FlightServer
from kvservice.peers.host import Query
from kvservice.peers.member import Address, Facts, FlightAddress, NodeId
from kvservice.peers.streams_client_calls import PeerRecord
from kvservice.peers.streams_client_dialler import Caller
from kvservice.store import WriteRequest

OUTPUT = Path("build/bench/flight_carrier.json")
ROOT = Path(__file__).resolve().parents[1]


class FlightProcess(Server):
    """The other side, in a process: bytes only, nothing is verified."""

    def __init__(self, mib: int) -> None:
        command = [sys.executable, "-m", "bench.flight_carrier", "--serve", str(mib)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        self.port = int(self._line())


class FlightWay:
    """See Way: a link over Flight. ``find`` first."""

    def __init__(self, memory: Memory, port: int) -> None:
        facts = Facts(NodeId(uuid.uuid4(), 1), "bench")
        self.link = FlightLink(FlightAddress(LOCALHOST, port), Caller(lambda: facts), limits=PATIENT)
        self._memory = memory
        self._records: list[PeerRecord] = []
        self._named: tuple[Any, int] | None = None

    async def find(self) -> None:
        """Ask once for the records that are fetched."""
        metas = [make_meta(number, self._memory.mib) for number in range(SLOTS)]
        queries = [Query(one.namespace, one.key.segment, [one.key.context], 0, one.tokens) for one in metas]
        found = await self.link.find_all(queries, {IDENTITY.namespace(): IDENTITY_JSON}, ttl_s=600)
        self._records = [one.record for one in found if one.record is not None]
        if len(self._records) != SLOTS:
            raise RuntimeError("the other side does not hold what it should")

    async def get(self, slot: int) -> None:
        """See Way."""
        await self.link.fetch(self._records[slot], self._memory.view(slot), lambda start, end: None)

    def prepare_put(self, slot: int) -> None:
        """Name the next record."""
        self._named = self._memory.renamed(slot)

    async def put(self, slot: int) -> None:
        """See Way."""
        assert self._named is not None
        meta, checksum = self._named
        request = WriteRequest(meta.namespace, meta.key, self._memory.record_bytes)
        await self.link.give(request, self._memory.view(SLOTS + slot), checksum, IDENTITY_JSON)


async def measure(mib: int, rounds: int) -> list[Figure]:
    """Flight, streams and the bare loop at one size, in turns."""
    with ExitStack() as stack:
        memory = Memory(mib)
        servers: dict[str, Server] = {
            "bare": Server("bare", mib),
            "stream": Server("stream", mib),
            "flight": FlightProcess(mib),
        }
        for server in servers.values():
            stack.callback(server.close)
        stream = Stream(memory, Address(LOCALHOST, servers["stream"].port))
        flight = FlightWay(memory, servers["flight"].port)
        bare = Bare(memory, servers["bare"].port, with_sendfile=False)
        ways: dict[str, Way] = {"bare": bare, "stream": stream, "flight": flight}
        await stream.find(range(SLOTS))
        await flight.find()
        measured = await take_turns(ways, servers, rounds)
        await stream.link.close()
        await flight.link.close()
    return [figure(way, direction, memory, measured) for way in ways for direction in ("get", "put")]


def serve(mib: int) -> None:
    """The other side: its port, then CPU seconds for every line."""
    server = FlightServer(ArenaHost(mib), (LOCALHOST, 0))
    say(server.start())
    for _ in sys.stdin:
        say(time.process_time())
    server.stop()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, print, write ``build/bench/flight_carrier.json``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--serve", type=int, default=0, help=argparse.SUPPRESS)
    parsed = parser.parse_args(arguments)
    if parsed.serve:
        serve(parsed.serve)
        return
    figures = [one for mib in (16, 64) for one in asyncio.run(measure(mib, parsed.rounds))]
    print_table(figures)
    parsed.output.parent.mkdir(parents=True, exist_ok=True)
    document = {"cpus": os.cpu_count(), "rounds": parsed.rounds, "figures": [asdict(one) for one in figures]}
    parsed.output.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
