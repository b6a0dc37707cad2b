"""The shared-memory transport: light calls beside gRPC, and an arena that nobody else writes while it is mapped."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvservice.app import LocalNode, Service
from kvservice.client import Client, SharedMemoryTransport
from kvservice.client.call_sockets import CONNECTIONS_MAX, CallSocket
from kvservice.model.errors import StaleEpochError, UnavailableError
from kvservice.model.lease import LeaseId
from kvservice.wire.v1 import cache_pb2 as wire
from tests.client.builders import Engine, make_identity, make_prompt, make_settings
from tests.client.test_session import handles, host, store, wait_until

IDENTITY = make_identity()
PROMPT = make_prompt(IDENTITY)


@pytest.fixture
def client(service: Service) -> Iterator[Client]:
    with Client.connect(f"unix:{service.addresses.socket}", IDENTITY) as client:
        yield client


@pytest.fixture
def watcher(service: Service) -> Iterator[Client]:
    with Client.connect(f"unix:{service.addresses.socket}", IDENTITY) as client:
        yield client


def transport_of(client: Client) -> SharedMemoryTransport:
    transport = client.session._transport
    assert isinstance(transport, SharedMemoryTransport)
    return transport


def grpc_calls(client: Client, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the calls that go over gRPC from here on."""
    stream, names = transport_of(client)._open().stream, list[str]()
    honest = stream.call

    def call(name: str, *arguments: Any) -> Any:
        names.append(name)
        return honest(name, *arguments)

    monkeypatch.setattr(stream, "call", call)
    return names


class Gate:
    """Holds up one kind of call inside the node, in the event loop's time or in the loop's stead."""

    def __init__(self, service: Service, name: str) -> None:
        self._loop = service._thread.loop
        self.entered = threading.Semaphore(0)
        self._table = service._servers._calls._by_name
        self._name, self._honest = name, self._table[name]
        self._opened = asyncio.Event()
        self._table[name] = self._wait

    async def _wait(self, request: Any) -> Any:
        self.entered.release()
        await self._opened.wait()
        return await self._honest(request)

    def open(self) -> None:
        self._table[self._name] = self._honest
        self._loop.call_soon_threadsafe(self._opened.set)


@contextmanager
def busy_loop(service: Service) -> Iterator[None]:
    """A node whose event loop does nothing."""
    entered, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        entered.set()
        assert go_on.wait(10)

    service._thread.loop.call_soon_threadsafe(wait)
    assert entered.wait(10)
    try:
        yield
    finally:
        go_on.set()


def in_loop(service: Service, work: Callable[[], Any]) -> None:
    """Run ``work`` in the node's loop and wait for it."""

    async def run() -> None:
        work()

    service._thread.run(run(), 10)


def close_call_connections(service: Service) -> None:
    """The node closes all connections that carried a call."""

    def close() -> None:
        for one in list(service._servers._data._connections):
            if one._buffer.room_bytes:
                one._transport.abort()  # type: ignore[union-attr]

    in_loop(service, close)


def test_calls_of_a_client_on_the_same_host_do_not_go_over_grpc(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    over_grpc = grpc_calls(client, monkeypatch)
    store(client)
    engine = Engine(IDENTITY.geometry)
    with client.lookup([PROMPT]) as plans:
        client.restore(plans, engine.planes, [engine.allocate(PROMPT.token_count)]).wait()
    client.commit_round("r", [])
    client.delete()
    assert over_grpc == []


def test_a_thread_that_is_alone_uses_one_connection(client: Client, service: Service) -> None:
    store(client)
    for _ in range(20):
        client.lookup([PROMPT]).close()
    client.stats()
    assert len(service._servers._data._connections) == 2, "one that holds the arena, one for calls"


def test_the_nodes_error_is_the_same_over_either_way(client: Client) -> None:
    request = wire.ReleaseRequest(session=client.session._reference(), lease_ids=[LeaseId(1)])
    connected = transport_of(client)._open()
    for call in (transport_of(client).call, connected.stream.call):
        with pytest.raises(StaleEpochError, match="lease 1 is from before"):
            call("Release", request)


def test_a_commit_that_waits_does_not_hold_up_a_lookup(client: Client, service: Service) -> None:
    gate = Gate(service, "Commit")
    storing = threading.Thread(target=store, args=(client,))
    storing.start()
    assert gate.entered.acquire(timeout=10)
    assert not client.lookup([PROMPT]).hit_tokens
    gate.open()
    storing.join()
    with client.lookup([PROMPT]) as plans:
        assert plans.hit_tokens == PROMPT.token_count


def test_calls_for_which_no_connection_is_free_go_over_grpc(
    client: Client, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(service, "Stats")
    with ThreadPoolExecutor(CONNECTIONS_MAX) as pool:
        waiting = [pool.submit(client.stats) for _ in range(CONNECTIONS_MAX)]
        for _ in waiting:
            assert gate.entered.acquire(timeout=10)
        over_grpc = grpc_calls(client, monkeypatch)
        client.lookup([PROMPT]).close()
        assert over_grpc == ["Lookup"]
        gate.open()
        assert all(one.result()["handles"] for one in waiting)
    client.lookup([PROMPT]).close()
    assert over_grpc == ["Lookup"]


def test_a_release_for_which_no_connection_is_free_arrives_too(client: Client, service: Service) -> None:
    store(client)
    plans, gate = client.lookup([PROMPT]), Gate(service, "Stats")
    with ThreadPoolExecutor(CONNECTIONS_MAX) as pool:
        waiting = [pool.submit(client.stats) for _ in range(CONNECTIONS_MAX)]
        for _ in waiting:
            assert gate.entered.acquire(timeout=10)
        plans.close()
        wait_until(lambda: not service._servers._node.leases.live)
        gate.open()


def test_threads_get_their_own_answers(client: Client) -> None:
    store(client)
    prompts = [make_prompt(IDENTITY, shared=(6,) * count) for count in range(1, 7)]

    def look_up(number: int) -> bool:
        prompt = prompts[number % len(prompts)]
        with client.lookup([prompt] * (1 + number % 3)) as plans:
            return [len(one.plan.segments) for one in plans] == [len(prompt.segments)] * (1 + number % 3)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(look_up, range(400)))
    wait_until(lambda: handles(client)["leases"] == 0)


# Who gives up, and what is lost


def test_a_reserve_that_was_given_up_leaves_nothing_and_later_calls_are_well(
    client: Client, watcher: Client, service: Service
) -> None:
    item = wire.ReserveItem(namespace=IDENTITY.namespace(), key=_wire_key(), record_bytes=4096)
    request = wire.ReserveRequest(session=client.session._reference(), items=[item])
    client.stats()
    with busy_loop(service), pytest.raises(UnavailableError, match=r"did not answer Reserve within 0\.05 s"):
        transport_of(client).call("Reserve", request, 0.05)
    wait_until(lambda: service._servers._node.counters.reserved == 1)
    wait_until(lambda: handles(watcher)["reservations"] == 0)
    (outcome,) = client.session.reserve([item])
    assert outcome.WhichOneof("outcome") == "reserved"


def test_a_late_answer_is_never_taken_for_another_calls(client: Client, service: Service) -> None:
    client.stats()
    with busy_loop(service), pytest.raises(UnavailableError, match="did not answer"):
        transport_of(client).call("Stats", wire.StatsRequest(), 0.05)
    assert client.lookup([PROMPT]).hit_tokens == 0


def test_a_call_broken_off_half_way_leaves_no_answer_behind(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    client.stats()
    monkeypatch.setattr(CallSocket, "_receive", interrupt)
    with pytest.raises(KeyboardInterrupt):
        client.stats()
    monkeypatch.undo()
    assert client.lookup([PROMPT]).hit_tokens == 0


def test_a_lost_connection_is_unavailable_and_the_next_call_opens_another(client: Client, service: Service) -> None:
    client.stats()
    close_call_connections(service)
    with pytest.raises(UnavailableError, match="cannot be reached for Stats"):
        client.stats()
    assert handles(client)["sessions"] == 1


def test_an_answer_is_read_later_while_other_calls_go_on(client: Client, service: Service) -> None:
    gate = Gate(service, "Stats")
    pending = transport_of(client).begin("Stats", wire.StatsRequest())
    assert gate.entered.acquire(timeout=10)
    assert client.lookup([PROMPT]).hit_tokens == 0
    gate.open()
    assert pending.reply().json
    pending.give_up()
    assert len(transport_of(client)._open().calls._idle) == 2, "both are there for the next calls"


def test_a_call_that_is_given_up_leaves_no_answer_behind(client: Client, service: Service) -> None:
    calls = transport_of(client)._open().calls
    for _ in range(2 * CONNECTIONS_MAX):
        transport_of(client).begin("Stats", wire.StatsRequest()).give_up()
    assert (calls._count, calls._idle, calls._busy) == (0, [], set())
    assert client.lookup([PROMPT]).hit_tokens == 0


def test_a_call_for_which_no_connection_is_free_is_made_when_its_answer_is_wanted(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport, over_grpc = transport_of(client), grpc_calls(client, monkeypatch)
    pending = [transport.begin("Stats", wire.StatsRequest()) for _ in range(CONNECTIONS_MAX + 1)]
    assert not over_grpc
    assert all(one.reply().json for one in reversed(pending))
    assert over_grpc == ["Stats"]


def test_an_answer_that_does_not_come_in_time_is_unavailable(client: Client, service: Service) -> None:
    client.stats()
    with busy_loop(service):
        pending = transport_of(client).begin("Stats", wire.StatsRequest())
        with pytest.raises(UnavailableError, match=r"did not answer Stats within 0\.05 s"):
            pending.reply(0.05)
    assert client.lookup([PROMPT]).hit_tokens == 0


def test_plans_are_closed_without_waiting_for_the_node(client: Client, service: Service) -> None:
    store(client)
    plans = client.lookup([PROMPT])
    with busy_loop(service):
        plans.close()
        assert service._servers._node.leases.live
    assert handles(client)["leases"] == 0, "the release comes before what follows it"


def test_a_release_that_cannot_be_sent_is_no_error_and_loses_no_later_call(client: Client, service: Service) -> None:
    store(client)
    plans = client.lookup([PROMPT])
    close_call_connections(service)
    plans.close()
    assert handles(client)["leases"] == 1, "until it runs out, or its session ends"


def test_plans_may_be_closed_after_the_node_in_this_process_has_ended(tmp_path: Path) -> None:
    with LocalNode(make_settings(tmp_path)) as node:
        client = Client.in_process(node, IDENTITY)
        store(client)
        plans = client.lookup([PROMPT])
    plans.close()
    client.session._leases.close()


# Who may still write


def test_a_closed_client_leaves_no_connection(client: Client, service: Service, watcher: Client) -> None:
    store(client)
    client.session.reserve([_reserve_item()])
    client.close()
    wait_until(lambda: len(service._servers._data._connections) <= 2)
    assert handles(watcher)["sessions"] == 1
    assert not service._servers._node.allocation.unpublished


def test_bytes_being_written_when_the_stream_is_lost_go_to_nobody_else(
    client: Client, watcher: Client, service: Service
) -> None:
    (first,) = client.session.reserve([_reserve_item()])
    view = client.session.write_view(first.reserved.extent)
    transport_of(client)._open().stream._channel.close()
    wait_until(lambda: handles(watcher)["sessions"] == 1)
    (second,) = watcher.session.reserve([_reserve_item()])
    assert second.WhichOneof("outcome") == "reserved", "the key is free again"
    assert second.reserved.extent.offset != first.reserved.extent.offset
    view[:] = 1
    with pytest.raises(UnavailableError):
        client.session.write_view(first.reserved.extent)
    client.close()
    used_bytes = host(watcher)["used_bytes"]
    del view
    wait_until(lambda: host(watcher)["used_bytes"] < used_bytes)
    assert not service._servers._node.store.strays


def test_a_session_closed_under_a_writer_keeps_its_bytes_until_the_writer_is_done(
    client: Client, watcher: Client, service: Service
) -> None:
    (outcome,) = client.session.reserve([_reserve_item()])
    view = client.session.write_view(outcome.reserved.extent)
    client.close()
    wait_until(lambda: handles(watcher)["sessions"] == 1)
    assert service._servers._node.store.strays
    view[:] = 1
    del view
    wait_until(lambda: not service._servers._node.allocation.unpublished)


def test_what_was_reserved_stays_when_only_its_connection_for_calls_is_closed(client: Client, service: Service) -> None:
    client.session.reserve([_reserve_item()])
    transport_of(client)._open().calls.close()
    wait_until(lambda: len(service._servers._data._connections) == 1)
    assert len(service._servers._node.store.open) == 1


def test_a_failed_reconnect_unmaps_the_arena_all_the_same(
    client: Client, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise UnavailableError("for a test")

    client.session.reserve([_reserve_item()])
    with monkeypatch.context() as patch:
        patch.setattr("kvservice.client.session_stream.SessionStream.open", fail)
        with pytest.raises(UnavailableError, match="for a test"):
            client.reconnect()
    wait_until(lambda: not service._servers._node.allocation.unpublished)


def test_reconnecting_unmaps_the_arena_of_before(client: Client, service: Service) -> None:
    client.session.reserve([_reserve_item()])
    client.reconnect()
    wait_until(lambda: not service._servers._node.allocation.unpublished)
    assert handles(client)["sessions"] == 1


def _wire_key() -> wire.CacheKey:
    key = make_prompt(IDENTITY, seed=77).key(0)
    return wire.CacheKey(segment=key.segment, context=key.context)


def _reserve_item() -> wire.ReserveItem:
    return wire.ReserveItem(namespace=IDENTITY.namespace(), key=_wire_key(), record_bytes=4096)
