"""A whole node behind its sockets: starts healthy, answers everywhere, stops without a trace, and by signal."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvservice.app import SERVICE_NAME, LocalNode, Service
from kvservice.client.client import Client
from kvservice.client.doctor import doctor_identity
from kvservice.config import Settings
from kvservice.model.errors import CapacityError, InvalidIdentityError, UnknownSessionError
from kvservice.wire.v1 import cache_pb2 as wire
from kvservice.wire.v1 import cache_pb2_grpc


def make_settings(folder: Path, **changes: object) -> Settings:
    values: dict[str, object] = {
        "socket": str(folder / "k.sock"),
        "grpc_port": 0,
        "http_port": 0,
        "host_bytes": 1 << 22,
    }
    return Settings(**(values | changes))  # type: ignore[arg-type]


def test_health_and_reflection_answer_on_both_addresses(tmp_path: Path) -> None:
    with Service(make_settings(tmp_path)) as service:
        for address in (f"unix:{service.addresses.socket}", f"127.0.0.1:{service.addresses.grpc_port}"):
            with grpc.insecure_channel(address) as channel:
                request = health_pb2.HealthCheckRequest(service=SERVICE_NAME)
                assert health_pb2_grpc.HealthStub(channel).Check(request).status == 1
                asked = reflection_pb2.ServerReflectionRequest(list_services="")
                replies = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([asked]))
                names = {one.name for one in next(replies).list_services_response.service}
                assert SERVICE_NAME in names


def test_sockets_are_private_and_gone_after_the_stop(tmp_path: Path) -> None:
    settings = make_settings(tmp_path)
    with Service(settings):
        for path in (settings.socket_path, settings.data_socket_path):
            assert path.stat().st_mode & 0o077 == 0
    assert not settings.data_socket_path.exists()
    with socket.socket(socket.AF_UNIX) as probe, pytest.raises(OSError, match=r"refused|No such file"):
        probe.connect(str(settings.socket_path))


def test_a_second_node_on_the_same_socket_is_refused_and_harms_nothing(tmp_path: Path) -> None:
    settings = make_settings(tmp_path)
    with Service(settings) as service:
        with pytest.raises(FileExistsError, match="another server"), Service(settings):
            pass
        with grpc.insecure_channel(f"unix:{service.addresses.socket}") as channel:
            stats = cache_pb2_grpc.CacheServiceStub(channel).Stats(wire.StatsRequest())  # type: ignore[no-untyped-call]
            assert '"capacity_bytes": 4194304' in stats.json


def test_the_boot_epoch_rises_with_every_start(tmp_path: Path) -> None:
    epochs = []
    for _ in range(2):
        with LocalNode(make_settings(tmp_path)) as node:
            welcome = node.open_session(wire.Hello(client_name="t"))
            epochs.append(welcome.boot_epoch)
            node.close_session(welcome.session_id)
    assert epochs[0] < epochs[1]


def test_a_local_node_raises_our_errors(tmp_path: Path) -> None:
    with LocalNode(make_settings(tmp_path)) as node:
        welcome = node.open_session(wire.Hello(client_name="t"))
        stranger = wire.SessionRef(session_id=b"x" * 16, boot_epoch=welcome.boot_epoch)
        with pytest.raises(UnknownSessionError):
            node.call("Lookup", wire.LookupRequest(session=stranger))


def test_a_lookup_of_the_advertised_size_can_be_sent(tmp_path: Path) -> None:
    settings = make_settings(tmp_path)
    namespace = b"n" * 32
    with Service(settings), Client.connect(f"unix:{settings.socket_path}", doctor_identity()) as client:
        query = wire.SegmentQuery(
            segment=b"s" * 32, accepted_contexts=[b"c" * 32, b"d" * 32], position=1 << 20, tokens=256
        )
        prompt = wire.PromptQuery(namespace=namespace, segments=[query] * client.session.limits.lookup_segments_max)
        reply, _ = client.session.lookup([prompt])
        assert len(reply.prompts[0].segments) == client.session.limits.lookup_segments_max
        assert client.session.leases_held == 0


@pytest.mark.parametrize("identity", ["[" * 100_000, "9" * 5000, '{"tenant": 1}'])
def test_hostile_identities_leave_no_session(tmp_path: Path, identity: str) -> None:
    with LocalNode(make_settings(tmp_path)) as node:
        with pytest.raises(InvalidIdentityError):
            node.open_session(wire.Hello(client_name="t", identities=[identity]))
        welcome = node.open_session(wire.Hello(client_name="t"))
        stats = json.loads(node.call("Stats", wire.StatsRequest()).json)  # type: ignore[attr-defined]
        assert stats["handles"]["sessions"] == 1
        node.close_session(welcome.session_id)


def test_a_local_node_that_cannot_be_built_leaves_no_thread(tmp_path: Path) -> None:
    before = threading.active_count()
    with pytest.raises(CapacityError), LocalNode(make_settings(tmp_path, host_bytes=1 << 60)):
        pass
    assert threading.active_count() == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serve_announces_itself_and_ends_cleanly_on_a_signal(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-P", "-m", "kvservice", "serve", "--grpc-port=-1", "--http-port=0", "--host-bytes=1MiB"]
    command += [f"--socket={tmp_path / 'k.sock'}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert "host arena 1048576 bytes" in process.stdout.readline()
    os.kill(process.pid, number)
    _, errors = process.communicate(timeout=20)
    assert (process.returncode, errors) == (0, "")


def test_a_bad_setting_ends_the_command_with_a_message(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "kvservice", "serve", "--host=0.0.0.0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20, cwd=tmp_path)
    assert done.returncode == 1
    assert "CONFIG" in done.stderr
    assert "loopback" in done.stderr
