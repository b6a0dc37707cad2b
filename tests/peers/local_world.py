"""A node behind a peer port and the unix socket beside it, and links to it over both."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvservice.peers.host import Authorize
from kvservice.peers.host_node import NodeHost
from kvservice.peers.member import LocalAddress
from kvservice.peers.streams_client import PeerLink
from kvservice.peers.streams_limits import LinkLimits
from kvservice.peers.streams_local_channel import LocalChannel
from kvservice.peers.streams_local_server import LocalServer
from kvservice.peers.streams_server import everybody
from kvservice.storage.arena import Arena, AttachedArenas
from tests.peers.stream_world import BRISK, PATIENT, Owner, link_to, owner_node

OWN_BYTES = 16 << 20


class LocalOwner:
    """``owner``: the node; ``local``: its unix socket; ``arena``: of whoever calls."""

    def __init__(self, owner: Owner, local: LocalServer, path: Path, arena: Arena) -> None:
        self.owner = owner
        self.local = local
        self.path = path
        self.arena = arena
        self.address = LocalAddress(str(path), owner.facts.node)


@asynccontextmanager
async def met_node(folder: Path, *, authorize: Authorize = everybody, **changes: Any) -> AsyncIterator[LocalOwner]:
    """``authorize``: at the unix socket only. Checks at the end that nothing of it is left."""
    async with owner_node(**changes) as owner, met_beside(owner, folder, authorize) as met:
        yield met


@asynccontextmanager
async def met_beside(owner: Owner, folder: Path, authorize: Authorize = everybody) -> AsyncIterator[LocalOwner]:
    """The unix socket of a node that is there."""
    path, arena, node = folder / "kv.sock.peers", Arena(OWN_BYTES), owner.world.node
    host = NodeHost(node, asyncio.get_running_loop(), lambda: owner.facts)
    sessions = owner.server.sessions
    local = LocalServer(host, path, owner.world.arena, sessions=sessions, limits=BRISK, authorize=authorize)
    local.start()
    try:
        yield LocalOwner(owner, local, path, arena)
    finally:
        await asyncio.to_thread(local.stop)
        assert local.connections == 0
        assert not path.exists()
        arena.close()


@asynccontextmanager
async def local_link(met: LocalOwner, *, limits: LinkLimits = PATIENT, **changes: Any) -> AsyncIterator[PeerLink]:
    async with link_to(met.address, limits=limits, arena=met.arena, **changes) as link:
        yield link


@contextmanager
def ends(own: Arena) -> Iterator[tuple[LocalChannel, socket.socket]]:
    """A channel, and the bare socket of whoever is at its other end."""
    one, other = socket.socketpair()
    channel = LocalChannel(one, own, AttachedArenas())
    channel.set_timeout(20)
    try:
        yield channel, other
    finally:
        channel.close()
        other.close()


def memory(count: int, *, is_sealed: bool = True) -> int:
    """A descriptor of such a file as an arena is; the caller's to close."""
    if is_sealed:
        arena = Arena(count)
        try:
            return arena.read_only_descriptor()
        finally:
            arena.close()
    descriptor = os.memfd_create("test")
    os.ftruncate(descriptor, count)
    return descriptor


def no_bytes_over_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not read from the other side's arena fails the test."""

    def refuse(*_: object) -> None:
        raise AssertionError("payload came over a socket")

    monkeypatch.setattr("kvservice.peers.streams_channel.Channel.receive_piece", refuse)
