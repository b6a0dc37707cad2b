"""Sessions over every transport: what they hold, how they end, what is left when they are lost."""

import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvservice.app import LocalNode, Service
from kvservice.client import Client, Session, SharedMemoryTransport
from kvservice.config import process_environment
from kvservice.model.errors import (
    InvalidIdentityError,
    KVServiceError,
    LeaseExpiredError,
    LimitError,
    StaleEpochError,
    UnavailableError,
    UnknownSessionError,
)
from kvservice.wire.v1 import cache_pb2 as wire
from tests.client.builders import ARENA_BYTES, Engine, make_identity, make_prompt, make_settings
from tests.client.conftest import Connect

IDENTITY = make_identity()
PROMPT = make_prompt(IDENTITY)
DEADLINE_S = 10.0


def store(client: Client) -> None:
    engine = Engine(IDENTITY.geometry)
    client.store(PROMPT, engine.planes, engine.allocate(PROMPT.token_count))


def handles(client: Client) -> dict[str, Any]:
    document: Any = client.stats()
    return dict(document["handles"])


def wait_until(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline_s, "not in time"
        threading.Event().wait(0.01)


def test_plans_release_their_lease(connect: Connect) -> None:
    client = connect(IDENTITY)
    store(client)
    with client.lookup([PROMPT]) as plans:
        assert handles(client)["leases"] == 1
        assert client.session.leases_held == 1
        plans.check()
    assert handles(client)["leases"] == 0
    assert client.session.leases_held == 0
    plans.close()
    with pytest.raises(LeaseExpiredError):
        plans.check()


def test_a_lookup_that_finds_nothing_holds_nothing(connect: Connect) -> None:
    client = connect(IDENTITY)
    with client.lookup([PROMPT]) as plans:
        assert client.session.leases_held == 0
        plans.check()
    assert handles(client)["leases"] == 0


def test_closing_a_session_frees_all_that_it_held(connect: Connect) -> None:
    client, watcher = connect(IDENTITY), connect(IDENTITY)
    store(client)
    client.lookup([PROMPT])
    client.session.reserve([_reserve_item()])
    assert handles(watcher)["leases"] == handles(watcher)["reservations"] == 1
    client.close()
    client.close()
    wait_until(lambda: handles(watcher)["sessions"] == 1)
    assert handles(watcher)["leases"] == handles(watcher)["reservations"] == 0


def test_identities_are_registered_while_the_session_is_open(connect: Connect) -> None:
    client = connect(IDENTITY)
    other = make_identity(tenant="other")
    assert client.session.register(other) == client.session.register(other) == other.namespace()
    with client.lookup([make_prompt(other)]) as plans:
        assert plans.hit_tokens == 0


def test_a_session_needs_an_identity() -> None:
    with pytest.raises(InvalidIdentityError):
        Session(SharedMemoryTransport("unix:/nowhere"), [])


def test_a_round_larger_than_the_nodes_limit_is_refused(local: Connect) -> None:
    client = local(IDENTITY)
    client.session.limits.lookup_segments_max = 4
    with pytest.raises(LimitError, match="5 segments"):
        client.lookup([PROMPT])


def test_reservations_go_out_in_as_many_calls_as_needed(local: Connect) -> None:
    client = local(IDENTITY)
    client.session.limits.reserve_items_max = 2
    store(client)
    with client.lookup([PROMPT]) as plans:
        assert plans.hit_tokens == PROMPT.token_count


def test_reservations_are_given_back_in_as_many_calls_as_needed(
    local: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = local(IDENTITY)
    keys = [PROMPT.key(index) for index in range(5)]
    names = [wire.CacheKey(segment=key.segment, context=key.context) for key in keys]
    items = [wire.ReserveItem(namespace=IDENTITY.namespace(), key=name, record_bytes=100) for name in names]
    reserved = [outcome.reserved.id for outcome in client.session.reserve(items)]
    client.session.limits.reserve_items_max = 2
    call, sent = Session._call, list[int]()

    def count_aborts(session: Session, name: str, request: Any, *arguments: Any) -> Any:
        if name == "Abort":
            sent.append(len(request.reservation_ids))
        return call(session, name, request, *arguments)

    monkeypatch.setattr(Session, "_call", count_aborts)
    assert client.session.abort(reserved) == 5
    assert sent == [2, 2, 1]
    assert handles(client)["reservations"] == 0


def test_leases_are_renewed_while_they_are_held(service: Service, tmp_path: Path) -> None:
    with Client.connect(f"unix:{service.addresses.socket}", IDENTITY, lease_ttl_s=0.2) as client:
        store(client)
        with client.lookup([PROMPT]) as plans:
            first = client.session._leases.deadline_s(plans.lease.id)
            assert first is not None
            wait_until(lambda: (client.session._leases.deadline_s(plans.lease.id) or 0) > first + 0.2)
            plans.check()
            with client.lookup([PROMPT]) as others:  # a lookup ends the leases whose time has come
                assert handles(client)["leases"] == 2
                assert others.lease.id != plans.lease.id
    assert not [thread for thread in threading.enumerate() if thread.name == "kvservice-leases"]


def test_a_lease_that_the_node_ended_is_noticed(local: Connect, local_node: LocalNode) -> None:
    client = local(IDENTITY)
    store(client)
    plans = client.lookup([PROMPT])
    reference = client.session._reference()
    local_node.call("Release", wire.ReleaseRequest(session=reference, lease_ids=[plans.lease.id]))
    keeper = client.session._leases
    keeper._book.add(plans.lease.id, 30.0, time.monotonic() - 20.0)  # a renewal is due
    keeper.renew_due()
    with pytest.raises(LeaseExpiredError):
        plans.check()


def test_nobody_at_an_address_is_unavailable(tmp_path: Path) -> None:
    for address in (f"unix:{tmp_path}/none.sock", "127.0.0.1:1"):
        with pytest.raises(UnavailableError, match="kvservice serve"):
            Client.connect(address, IDENTITY)


def test_a_server_that_does_not_answer_is_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvservice.client.session_stream.OPEN_TIMEOUT_S", 0.2)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "silent.sock"))
        silent.listen()
        with pytest.raises(UnavailableError, match="did not answer"):
            Client.connect(f"unix:{tmp_path}/silent.sock", IDENTITY)


def test_a_connection_closed_right_before_a_call_is_unavailable(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Client.connect(f"unix:{service.addresses.socket}", IDENTITY) as client:
        transport = client.session._transport
        assert isinstance(transport, SharedMemoryTransport)
        stream = transport._open().stream
        monkeypatch.setattr(stream, "check_open", stream._channel.close)  # another thread's reconnect, after the check
        with pytest.raises(UnavailableError, match="open a new session"):
            stream.call("Stats", wire.StatsRequest())
        client.reconnect()
        assert handles(client)["sessions"] >= 1


def test_an_identity_that_the_node_refuses_is_named(service: Service) -> None:
    transport = SharedMemoryTransport(f"unix:{service.addresses.socket}")
    with pytest.raises(InvalidIdentityError):
        transport.open_session(wire.Hello(identities=["{}"]))
    with pytest.raises(UnavailableError, match="open one first"):
        transport.call("Stats", wire.StatsRequest())


def test_a_lost_session_does_not_hand_out_bytes_to_write(tmp_path: Path) -> None:
    """What it had reserved may be another's by now."""
    settings = make_settings(tmp_path)
    with Service(settings):
        client = Client.connect(f"unix:{settings.socket}", IDENTITY)
        assert len(client.session.write_view(wire.Extent(offset=0, length=64))) == 64
    with pytest.raises(UnavailableError, match="open a new session"):
        client.lookup([PROMPT])
    with pytest.raises(UnavailableError, match="open a new session"):
        client.session.write_view(wire.Extent(offset=0, length=64))
    client.close()


def test_a_lost_session_says_so_and_a_new_one_works(tmp_path: Path) -> None:
    settings = make_settings(tmp_path)
    with Service(settings):
        client = Client.connect(f"unix:{settings.socket}", IDENTITY)
        store(client)
        plans = client.lookup([PROMPT])
        epoch = client.session.boot_epoch
    with pytest.raises(UnavailableError, match="open a new session"):
        client.lookup([PROMPT])
    with pytest.raises(UnavailableError, match="cannot be reached"):
        client.reconnect()
    with Service(settings), client:
        with pytest.raises(UnavailableError):
            client.lookup([PROMPT])
        client.reconnect()
        assert client.session.boot_epoch > epoch
        engine = Engine(IDENTITY.geometry)
        slots = engine.allocate(PROMPT.token_count)
        with pytest.raises(StaleEpochError, match="look up again"):
            client.restore(plans, engine.planes, [slots])
        with pytest.raises(StaleEpochError):
            client.store(PROMPT, engine.planes, slots, base=plans[0])
        plans.close()
        store(client)
        with client.lookup([PROMPT]) as again:
            client.restore(again, engine.planes, [slots]).wait()


def test_reconnecting_to_the_same_node_voids_what_was_held(connect: Connect) -> None:
    client = connect(IDENTITY)
    store(client)
    plans = client.lookup([PROMPT])
    client.reconnect()
    assert client.session.leases_held == 0
    with pytest.raises(StaleEpochError):
        plans.check()
    wait_until(lambda: handles(client)["sessions"] == 1)
    assert handles(client)["leases"] == 0
    with client.lookup([PROMPT]) as again:
        assert again.hit_tokens == PROMPT.token_count


def test_handles_of_another_session_are_refused_by_the_node(local: Connect, local_node: LocalNode) -> None:
    client = local(IDENTITY)
    stale = wire.SessionRef(session_id=b"x" * 16, boot_epoch=client.session.boot_epoch)
    with pytest.raises(UnknownSessionError):
        local_node.call("Lookup", wire.LookupRequest(session=stale))
    stale.boot_epoch -= 1
    with pytest.raises(StaleEpochError):
        local_node.call("Lookup", wire.LookupRequest(session=stale))


CRASHING_WRITER = """
import sys
from kvservice.client import Session, SharedMemoryTransport
from kvservice.model.identity import identity_from_json
from kvservice.wire.v1 import cache_pb2 as wire

identity = identity_from_json(sys.argv[2])
session = Session(SharedMemoryTransport(sys.argv[1]), [identity])
query = wire.PromptQuery.FromString(bytes.fromhex(sys.argv[3]))
session.lookup([query])
item = wire.ReserveItem.FromString(bytes.fromhex(sys.argv[4]))
(outcome,) = session.reserve([item])
session.write_view(outcome.reserved.extent)[:100] = 255
assert "torch" not in sys.modules
print("reserved", flush=True)
sys.stdin.read()
"""


def test_a_client_killed_between_reserve_and_commit_leaves_nothing(service: Service) -> None:
    address = f"unix:{service.addresses.socket}"
    with Client.connect(address, IDENTITY) as watcher:
        store(watcher)
        before = host(watcher)
        child = start_crashing_writer(address)
        assert handles(watcher)["leases"] == handles(watcher)["reservations"] == 1
        assert host(watcher)["used_bytes"] > before["used_bytes"]
        os.kill(child.pid, signal.SIGKILL)
        child.communicate()
        wait_until(lambda: handles(watcher)["sessions"] == 1)
        assert handles(watcher)["leases"] == handles(watcher)["reservations"] == 0
        assert host(watcher) == before


def host(client: Client) -> dict[str, Any]:
    document: Any = client.stats()
    return dict(document["host"])


def start_crashing_writer(address: str) -> "subprocess.Popen[bytes]":
    segment = PROMPT.segments[0]
    query = wire.SegmentQuery(segment=segment.id, accepted_contexts=[PROMPT.key(0).context], tokens=len(segment.tokens))
    prompt = wire.PromptQuery(namespace=PROMPT.namespace, segments=[query])
    messages = [message.SerializeToString().hex() for message in (prompt, _reserve_item())]
    command = [sys.executable, "-c", CRASHING_WRITER, address, IDENTITY.canonical_json(), *messages]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=process_environment())
    assert child.stdout is not None
    ready, _, _ = select.select([child.stdout], [], [], 3 * DEADLINE_S)
    assert ready, "the child did not get so far"
    assert child.stdout.readline() == b"reserved\n"
    return child


def _reserve_item() -> wire.ReserveItem:
    key = make_prompt(IDENTITY, seed=77).key(0)
    return wire.ReserveItem(
        namespace=IDENTITY.namespace(),
        key=wire.CacheKey(segment=key.segment, context=key.context),
        record_bytes=ARENA_BYTES // 4,
    )


def test_extents_outside_the_arena_are_refused(local: Connect) -> None:
    client = local(IDENTITY)
    with pytest.raises(KVServiceError, match="of an arena of"):
        client.session.write_view(wire.Extent(offset=ARENA_BYTES - 10, length=20))


def test_the_library_is_importable_without_torch() -> None:
    code = "import sys, kvservice.client, kvservice.client.session; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
