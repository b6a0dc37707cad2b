"""A node ends a peer's session in the middle of a record, as when its token ends: those bytes go to nobody else."""

import asyncio
import socket

import numpy as np

from kvservice.model.cache import CacheMeta
from kvservice.peers.frames import Kind
from kvservice.peers.streams_channel import Channel, Source
from kvservice.peers.streams_messages import encode_facts, encode_key
from kvservice.store import WriteRequest
from kvservice.wire.v1 import peer_pb2 as wire
from tests.peers.stream_world import (
    BIG,
    BIG_TOKENS,
    Owner,
    link_to,
    make_caller,
    make_facts,
    make_record,
    owner_node,
    settled,
)
from tests.server.builders import make_meta, make_planes

HALF = 1 << 20


def begin_to_give(owner: Owner, meta: CacheMeta, record_bytes: int) -> Channel:
    """A caller that was told to go on."""
    channel = Channel(socket.create_connection(owner.address))
    channel.send_opening()
    channel.receive_opening()
    channel.send(Kind.HELLO, 1, wire.PeerHello(facts=encode_facts(make_facts("slow"))))
    channel.receive_message(channel.receive_header(), wire.PeerWelcome())
    identities, namespace = [owner.identity.canonical_json()], owner.identity.namespace()
    key = encode_key(meta.key)
    asked = wire.PeerStore(identities=identities, namespace=namespace, key=key, record_bytes=record_bytes)
    channel.send(Kind.STORE, 2, asked)
    assert channel.receive_header().kind is Kind.GO
    return channel


async def test_what_a_thread_may_still_fill_goes_to_nobody_else() -> None:
    async with owner_node() as owner:
        node, text = owner.world.node, owner.identity.canonical_json()
        slow, quick = (make_meta(owner.identity, name, tokens=BIG_TOKENS) for name in ("slow", "quick"))
        records = [
            make_record(meta, make_planes(BIG, BIG_TOKENS, seed=seed)) for seed, meta in enumerate((slow, quick))
        ]
        (theirs, _), (ours, checksum) = records
        channel = await asyncio.to_thread(begin_to_give, owner, slow, len(theirs))
        await asyncio.to_thread(channel.send_data, 2, Source(theirs.data), 0, HALF)
        (session,) = [one for one in node.sessions.open.values() if one.reservations]
        node.close_session(session.id)
        taken = node.tier.used_bytes
        assert taken >= len(theirs), "still its thread's"
        async with link_to(owner.address, caller=make_caller(make_facts("quick"))) as link:
            request = WriteRequest(quick.namespace, quick.key, len(ours), None, 0.25)
            assert await link.give(request, ours, checksum, text)
            for start in range(HALF, len(theirs), HALF):
                end = min(start + HALF, len(theirs))
                await asyncio.to_thread(channel.send_data, 2, Source(theirs.data), start, end)
            channel.send(Kind.COMMIT, 2, wire.PeerCommit(header_checksum=0))
            assert (await asyncio.to_thread(channel.receive_header)).kind is Kind.ERROR
            np.testing.assert_array_equal(owner.bytes_of(quick), ours)
        channel.close()
        await settled(lambda: node.tier.used_bytes < taken + len(ours) // 2)
