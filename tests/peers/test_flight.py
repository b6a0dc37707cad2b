"""Records between two nodes over Arrow Flight: the same as over streams, and nothing left behind."""

import asyncio
import sys
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from kvservice.access.principal import Credentials, Principal, Role
from kvservice.model.cache import CacheMeta, MasterReference
from kvservice.model.errors import (
    CapacityError,
    ConfigError,
    CorruptError,
    ForbiddenError,
    InvalidInputError,
    LeaseExpiredError,
    LimitError,
    MasterGoneError,
    StaleEpochError,
    UnauthenticatedError,
)
from kvservice.model.plan import Match, MissReason
from kvservice.peers.flight_client import FlightLink
from kvservice.peers.flight_server import FlightServer
from kvservice.peers.flight_sessions import FlightLimits
from kvservice.peers.member import FlightAddress
from kvservice.peers.streams_limits import LinkLimits, ServerLimits
from kvservice.sharing.place import Parcel, Question
from kvservice.storage.remote.contract import RemoteName
from kvservice.store import WriteRequest
from kvservice.wire.v1 import cache_pb2 as wire
from tests.peers.flight_world import FlightOwner, fetch_verified, find, find_record, flight_node, flight_to
from tests.peers.stream_world import (
    BIG,
    BIG_TOKENS,
    LOCALHOST,
    link_to,
    make_caller,
    make_facts,
    make_query,
    make_record,
    only_tenant,
    settled,
)
from tests.server.builders import TOKENS, diff_of, make_identity, make_meta, make_planes, make_relative


async def test_a_master_comes_as_it_was_stored() -> None:
    async with flight_node() as owner, flight_to(owner.flight_address) as link:
        meta = await owner.store("one")
        record = await find_record(link, owner.identity, meta)
        assert (record.prefill_s, record.head.meta) == (0.5, meta)
        assert np.array_equal(await fetch_verified(link, record), owner.bytes_of(meta))
        assert (link.counters.fetched, link.counters.fetched_bytes) == (1, record.record_bytes)
        assert (owner.flight.counters.sent, owner.flight.counters.sent_bytes) == (1, record.record_bytes)
        assert link.facts == owner.facts


async def test_a_mirror_comes_with_its_master() -> None:
    async with flight_node() as owner, flight_to(owner.flight_address) as link:
        identity, planes = owner.identity, make_planes(BIG, TOKENS, seed=3)
        first, plain = make_meta(identity, "s", ["x"]), make_meta(identity, "s", ["x", "y"])
        mirror = replace(plain, master=await owner.client.store(first, planes))
        other = make_relative(identity, planes, first.position, plain.position, rows=[2, 5])
        await owner.client.store(mirror, other, diff_of(identity, planes, first.position, other, plain.position))
        (finding,) = await find(link, identity, make_query(mirror))
        assert finding.record is not None
        assert finding.master is not None
        assert finding.match is Match.EXACT
        assert finding.record.head.meta.master == MasterReference(first.key.context, finding.master.head.generation)
        for record, meta in ((finding.master, first), (finding.record, mirror)):
            assert np.array_equal(await fetch_verified(link, record), owner.bytes_of(meta))


async def test_pieces_are_told_as_they_arrive_so_that_early_layers_are_of_use() -> None:
    async with flight_node() as owner, flight_to(owner.flight_address) as link:
        meta = await owner.store("one")
        record = await find_record(link, owner.identity, meta)
        target, told = np.zeros(record.record_bytes, np.uint8), list[tuple[int, int]]()
        await link.fetch(record, target, lambda first, last: told.append((first, last)))
        assert (told[0][0], told[-1][1]) == (0, record.record_bytes)
        assert all(one[1] == two[0] for one, two in pairwise(told)), "in order, without gaps"
        assert len(told) >= 4
        start, again = 1_000_001, np.zeros(record.record_bytes, np.uint8)
        await link.fetch(record, again, lambda first, last: told.append((first, last)), start)
        assert not again[:start].any()
        assert np.array_equal(again[start:], owner.bytes_of(meta)[start:])


async def test_misses_say_why_and_a_long_list_is_split() -> None:
    async with (
        flight_node() as owner,
        flight_to(owner.flight_address, limits=LinkLimits(20, find_queries_max=2)) as link,
    ):
        meta = await owner.store("one")
        absent = make_query(make_meta(owner.identity, "absent", tokens=BIG_TOKENS))
        findings = await find(link, owner.identity, absent, make_query(meta), absent)
        assert [one.miss_reason for one in findings] == [
            MissReason.UNKNOWN_SEGMENT,
            MissReason.NONE,
            MissReason.UNKNOWN_SEGMENT,
        ]


async def give(owner: FlightOwner, link: FlightLink, name: str = "pushed", **changes: object) -> CacheMeta:
    meta, planes = make_meta(owner.identity, name, tokens=BIG_TOKENS), make_planes(BIG, BIG_TOKENS, seed=9)
    view, checksum = make_record(meta, planes)
    request = replace(WriteRequest(meta.namespace, meta.key, len(view), None, 0.25), **changes)  # type: ignore[arg-type]
    identity = owner.identity.canonical_json()
    assert await link.give(request, view, checksum, identity)
    assert not await link.give(request, view, checksum, identity), "the first writer wins"
    assert np.array_equal(owner.bytes_of(meta), view)
    assert owner.cache(meta).prefill_s == 0.25
    return meta


async def test_a_record_is_given_away_once() -> None:
    async with flight_node() as owner, flight_to(owner.flight_address) as link:
        await give(owner, link)
        assert owner.flight.counters.taken == 1
        with pytest.raises(MasterGoneError):
            await give(owner, link, "other", master=MasterReference(make_meta(owner.identity, "m").key.context, 5))


async def test_wrong_bytes_are_not_published() -> None:
    async with flight_node() as owner, flight_to(owner.flight_address) as link:
        meta = make_meta(owner.identity, "wrong", tokens=BIG_TOKENS)
        view, checksum = make_record(meta, make_planes(BIG, BIG_TOKENS))
        view[len(view) // 2] ^= 1
        request = WriteRequest(meta.namespace, meta.key, len(view), None, 0.25)
        with pytest.raises(CorruptError):
            await link.give(request, view, checksum, owner.identity.canonical_json())
        (finding,) = await find(link, owner.identity, make_query(meta))
        assert finding.record is None
        assert link.is_answering


async def test_leases_hold_and_end() -> None:
    async with flight_node() as owner, flight_to(owner.flight_address) as link:
        meta = await owner.store("one")
        cache = owner.cache(meta)
        record = await find_record(link, owner.identity, meta)
        assert cache.holds == 1
        await owner.client.delete(meta)
        assert (await fetch_verified(link, record)).any()
        link.let_go([record])
        await settled(lambda: not cache.holds)
        with pytest.raises(LeaseExpiredError):
            await fetch_verified(link, record)


async def test_a_record_that_a_stream_leased_comes_over_flight_by_that_lease() -> None:
    """Even if it was deleted meanwhile: the lease's promise holds whatever way the bytes take."""
    facts = make_facts("caller")
    async with (
        flight_node() as owner,
        link_to(owner.address, caller=make_caller(facts)) as stream,
        flight_to(owner.flight_address, caller=make_caller(facts)) as link,
        flight_to(owner.flight_address, caller=make_caller(make_facts("stranger"))) as stranger,
    ):
        meta = await owner.store("one")
        record = await find_record(stream, owner.identity, meta)
        await owner.client.delete(meta)
        assert (await fetch_verified(link, record)).any()
        with pytest.raises(LeaseExpiredError):
            await fetch_verified(stranger, record)


async def test_a_session_ends_when_it_is_not_used_and_is_opened_anew() -> None:
    limits = FlightLimits(session_ttl_s=0.2)
    async with flight_node(flight_limits=limits) as owner, flight_to(owner.flight_address) as link:
        meta = await owner.store("one")
        cache = owner.cache(meta)
        record = await find_record(link, owner.identity, meta)
        assert (cache.holds, owner.flight.sessions.count) == (1, 1)
        await settled(lambda: not cache.holds and not owner.flight.sessions.count)
        assert np.array_equal(await fetch_verified(link, record), owner.bytes_of(meta)), "it is published still"
        assert (link.counters.failed, owner.flight.sessions.count) == (0, 1)


async def test_leases_end_with_the_link() -> None:
    async with flight_node() as owner:
        meta = await owner.store("one")
        cache = owner.cache(meta)
        async with flight_to(owner.flight_address) as link:
            await find_record(link, owner.identity, meta)
            assert cache.holds == 1
        await settled(lambda: not cache.holds and not owner.flight.sessions.count)


async def test_many_records_at_once() -> None:
    async with flight_node() as owner, flight_to(owner.flight_address) as link:
        metas = [await owner.store("x" * (index + 1)) for index in range(5)]
        findings = await find(link, owner.identity, *map(make_query, metas))
        records = [one.record for one in findings if one.record is not None]
        got = await asyncio.gather(*(fetch_verified(link, record) for record in records))
        for view, meta in zip(got, metas, strict=True):
            assert np.array_equal(view, owner.bytes_of(meta))
        assert owner.flight.sessions.count == 1


async def test_a_flight_link_is_a_carrier() -> None:
    """What the sharing of a node asks of it."""
    async with flight_node() as owner, flight_to(owner.flight_address) as link:
        meta = await owner.store("one")
        space = owner.client.session.spaces[meta.namespace]
        asked = wire.SegmentQuery(
            segment=meta.key.segment, accepted_contexts=[meta.key.context], position=meta.position, tokens=meta.tokens
        )
        absent = wire.SegmentQuery(segment=bytes(32), accepted_contexts=[meta.key.context], tokens=5)
        questions = [Question(space, meta.key.segment, asked, b""), Question(space, absent.segment, absent, b"")]  # type: ignore[arg-type]
        offer, nothing = await link.find(questions)
        assert nothing is None
        assert offer is not None
        assert offer.record.head.meta == meta
        link.let_go([offer.record])
        await settled(lambda: not owner.cache(meta).holds)
        view = owner.bytes_of(meta).copy()
        assert await link.delete(space, [meta.key]) == 1
        assert await link.delete(space, [meta.key]) == 0
        name = RemoteName(meta.namespace, meta.key.segment, meta.key.context)
        parcel = Parcel(space, name, view, offer.record.head.header_checksum, None, 0.5)
        assert await link.store(parcel)
        assert not await link.store(parcel)


# Who may


def authorize(credentials: Credentials) -> Principal:
    match credentials.token:
        case "right" | "other":
            return Principal(credentials.token, Role.NODE)
        case "engine":
            return Principal("some engine", Role.ENGINE)
        case _:
            raise UnauthenticatedError("not a caller that this node knows")


async def test_tokens(caplog: pytest.LogCaptureFixture) -> None:
    async with flight_node(authorize=authorize) as owner:
        async with flight_to(owner.flight_address, caller=make_caller(token="right")) as link:
            await link.ping()
        for token, kind in (("wrong", UnauthenticatedError), ("", UnauthenticatedError), ("engine", ForbiddenError)):
            async with flight_to(owner.flight_address, caller=make_caller(token=token)) as link:
                with pytest.raises(kind, match=r"refuses this node"):
                    await link.ping()
        assert caplog.text.count("is refused") == 3
        assert "wrong" not in caplog.text


async def test_a_session_of_one_caller_is_none_of_anothers() -> None:
    async with (
        flight_node(authorize=authorize) as owner,
        flight_to(owner.flight_address, caller=make_caller(token="right")) as link,
        flight_to(owner.flight_address, caller=make_caller(token="other")) as thief,
    ):
        await link.ping()
        await thief.ping()
        stolen, own = link._connection._session, thief._connection._session
        assert stolen is not None
        thief._connection._session = stolen
        await thief.ping()
        assert thief._connection._session is not stolen, "it is told that it has none, and opens its own"
        assert own is not None


async def test_who_is_let_in_no_more_is_refused_at_the_next_call() -> None:
    known = {"right"}

    def admit(credentials: Credentials) -> Principal:
        if credentials.token not in known:
            raise UnauthenticatedError("not a caller that this node knows")
        return authorize(credentials)

    caller = make_caller(token="right")
    async with flight_node(authorize=admit) as owner, flight_to(owner.flight_address, caller=caller) as link:
        await link.ping()
        known.clear()
        with pytest.raises(UnauthenticatedError):
            await link.ping()


async def test_a_namespace_that_may_not_be_seen_is_as_one_that_holds_nothing() -> None:
    async with flight_node(authorize=only_tenant("mine")) as owner, flight_to(owner.flight_address) as link:
        meta = await owner.store("one")  # of tenant test
        mine = make_identity(BIG, tenant="mine")
        absent = make_meta(mine, "one", tokens=BIG_TOKENS)
        texts = {one.namespace(): one.canonical_json() for one in (owner.identity, mine)}
        foreign, unknown = await link.find_all([make_query(meta), make_query(absent)], texts)
        assert foreign == unknown
        space = owner.client.session.spaces[meta.namespace]
        assert await link.delete(space, None) == 0
        with pytest.raises(ForbiddenError):
            await give(owner, link)
        owner.cache(meta)


async def test_two_nodes_with_one_uuid_and_a_zombie() -> None:
    async with flight_node() as owner:
        twin = make_facts("twin", id_=owner.facts.node.uuid, epoch=owner.facts.node.epoch + 1)
        for facts, said in ((twin, r"remove node\.json from the copy"), (owner.facts, "leave its address out")):
            async with flight_to(owner.flight_address, caller=make_caller(facts)) as link:
                with pytest.raises(ConfigError, match=said):
                    await link.ping()
        new = make_facts("late", epoch=9)
        old = make_facts("late", id_=new.node.uuid, epoch=8)
        async with (
            flight_to(owner.flight_address, caller=make_caller(old)) as first,
            flight_to(owner.flight_address, caller=make_caller(new)) as second,
        ):
            await first.ping()
            await second.ping()
            with pytest.raises(StaleEpochError, match="End this process"):
                await first.ping()


async def test_a_node_that_drains_takes_nothing_and_is_still_read() -> None:
    facts = replace(make_facts("leaving"), is_draining=True)
    async with flight_node(changes={"facts": facts}) as owner, flight_to(owner.flight_address) as link:
        meta = await owner.store("one")
        with pytest.raises(CapacityError, match="draining"):
            await give(owner, link)
        assert (await fetch_verified(link, await find_record(link, owner.identity, meta))).any()


# Limits


async def test_limits_are_looked_at_before_room_is_made() -> None:
    limits = ServerLimits(find_queries_max=2, watch_interval_s=0.02)
    async with flight_node(limits=limits) as owner, flight_to(owner.flight_address) as link:
        meta = await owner.store("one")
        with pytest.raises(LimitError, match="split it"):
            await find(link, owner.identity, *[make_query(meta)] * 3)
        with pytest.raises(CapacityError):
            await give(owner, link, record_bytes=1 << 40)
        with pytest.raises(InvalidInputError):
            await give(owner, link, "half", record_bytes=1 << 20)
        assert not owner.world.node.store.open


async def test_calls_and_sessions_are_limited() -> None:
    limits = FlightLimits(sessions_max=1, calls_max=0)
    async with (
        flight_node(flight_limits=limits) as owner,
        flight_to(owner.flight_address) as link,
        flight_to(owner.flight_address) as other,
    ):
        with pytest.raises(LimitError, match="under way"):
            await link.ping()
        with pytest.raises(LimitError, match="sessions are open"):
            await other.ping()


async def test_what_is_no_call_of_ours_is_refused() -> None:
    from pyarrow import flight

    async with flight_node() as owner:
        client = flight.FlightClient(f"grpc://{LOCALHOST}:{owner.flight_address.port}")

        def ask(name: str, body: bytes) -> None:
            list(client.do_action(flight.Action(name, body), flight.FlightCallOptions(timeout=10)))

        def exchange(command: bytes) -> None:
            descriptor = flight.FlightDescriptor.for_command(command)
            writer, reader = client.do_exchange(descriptor, flight.FlightCallOptions(timeout=10))
            with writer:
                writer.done_writing()
                reader.read_chunk()

        for work, argument in (
            (lambda body: ask("kvservice.hello", body), b"\xff\xff"),
            (lambda body: ask("kvservice.ping", body), b""),
            (lambda body: ask("kvservice.evil", body), b""),
            (lambda body: ask("hello", body), b""),
            (exchange, b""),
            (exchange, b"\x03\xff\xff"),
            (exchange, b"\x63"),
            (exchange, b"\x04"),
        ):
            with pytest.raises(flight.FlightServerError, match="kvservice: "):
                await asyncio.to_thread(work, argument)
        client.close()


async def test_a_port_that_is_taken_stops_the_start() -> None:
    async with flight_node() as owner:
        other = FlightServer(owner.server._host, (LOCALHOST, owner.address.port))
        with pytest.raises(ConfigError, match="set another port"):
            other.start()


async def test_without_pyarrow_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.flight", None)
    with pytest.raises(ConfigError, match=r"pip install 'kvservice\[flight\]'"):
        FlightLink(FlightAddress(LOCALHOST, 1), make_caller())
