"""A node whose Flight port is open beside its peer port, and links to it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import numpy as np

from kvservice.access.tls import PemFiles
from kvservice.model.cache import CacheMeta
from kvservice.model.errors import UnavailableError
from kvservice.model.identity import Identity
from kvservice.peers.flight_client import FlightLink
from kvservice.peers.flight_server import FlightServer
from kvservice.peers.host import Query
from kvservice.peers.member import Address, FlightAddress
from kvservice.peers.streams_client import PeerLink
from kvservice.peers.streams_client_calls import PeerFinding, PeerRecord
from kvservice.peers.streams_client_dialler import Caller
from kvservice.peers.streams_limits import LinkLimits
from kvservice.storage.buffer import Bytes
from tests.peers.stream_world import (
    BRISK,
    LOCALHOST,
    PATIENT,
    Owner,
    arrival_of,
    make_caller,
    make_query,
    owner_node,
    settled,
)


class FlightOwner(Owner):
    """A node with both ports."""

    flight: FlightServer
    flight_address: FlightAddress


@asynccontextmanager
async def flight_node(
    *,
    changes: dict[str, Any] | None = None,
    tls: PemFiles | Callable[[], PemFiles] | None = None,
    **flight_changes: Any,
) -> AsyncIterator[FlightOwner]:
    """See owner_node; ``changes`` are of that, the others of the Flight port."""
    shown = tls if tls is None or callable(tls) else lambda: tls
    async with owner_node(**(changes or {})) as plain:
        owner = FlightOwner.__new__(FlightOwner)
        owner.__dict__.update(plain.__dict__)
        values: dict[str, Any] = {"limits": BRISK, "sessions": plain.server.sessions, "tls": shown} | flight_changes
        owner.flight = FlightServer(plain.server._host, (LOCALHOST, 0), **values)
        owner.flight_address = FlightAddress(LOCALHOST, owner.flight.start())
        try:
            yield owner
        finally:
            await asyncio.to_thread(owner.flight.stop)
            assert owner.flight.sessions.count == 0


@asynccontextmanager
async def flight_to(
    address: Address,
    *,
    limits: LinkLimits = PATIENT,
    caller: Caller | None = None,
    pem: PemFiles | Callable[[], PemFiles] | None = None,
    **changes: Any,
) -> AsyncIterator[FlightLink]:
    shown = pem if callable(pem) else lambda: pem
    link = FlightLink(FlightAddress(*address), caller or make_caller(), pem=shown, limits=limits, **changes)
    try:
        yield link
    finally:
        await link.close()


async def find(link: FlightLink | PeerLink, identity: Identity, *queries: Query) -> list[PeerFinding]:
    return await link.find_all(queries, {identity.namespace(): identity.canonical_json()})


async def find_record(link: FlightLink | PeerLink, identity: Identity, meta: CacheMeta) -> PeerRecord:
    finding = (await find(link, identity, make_query(meta)))[0]
    assert finding.record is not None, finding
    return finding.record


async def fetch_verified(link: FlightLink, record: PeerRecord) -> Bytes:
    """The record's bytes, verified as they came."""
    target = np.zeros(record.record_bytes, np.uint8)
    arrival = arrival_of(record, target)

    def on_piece(start: int, end: int) -> None:
        arrival.arrived(start, end)

    await link.fetch(record, target, on_piece)
    assert arrival.layers == len(record.head.section_checksums)
    return target


async def fetched_at_last(link: FlightLink, record: PeerRecord) -> Bytes:
    """The record once the node answers again; a machine that is busy may be late some times more."""
    for _ in range(50):
        await settled(lambda: link.is_answering)
        with suppress(UnavailableError):
            return await fetch_verified(link, record)
    raise AssertionError("it does not come back")
