"""The doctor: proves a round trip, and names what is wrong when there is none."""

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kvservice.app import Service
from kvservice.client.client import Client
from kvservice.client.doctor import RoundTrip, doctor_identity, run_doctor
from kvservice.config import Settings
from kvservice.data_socket import bind_private
from kvservice.wire.v1 import cache_pb2 as wire


def examine(socket: Path) -> tuple[int, str]:
    screen = Console(file=io.StringIO(), width=200)
    status = run_doctor(str(socket), screen)
    assert isinstance(screen.file, io.StringIO)
    return status, screen.file.getvalue()


def make_settings(folder: Path) -> Settings:
    return Settings(socket=str(folder / "k.sock"), grpc_port=-1, http_port=-1, host_bytes=1 << 22)


def test_a_well_node_passes_and_keeps_nothing(tmp_path: Path) -> None:
    settings = make_settings(tmp_path)
    with Service(settings):
        status, text = examine(settings.socket_path)
        assert status == 0, text
        assert "FAIL" not in text
        assert "bit for bit, in another place" in text
        with Client.connect(f"unix:{settings.socket_path}", doctor_identity()) as client:
            stats = client.stats()
    assert stats["host"]["used_bytes"] == 0  # type: ignore[index]
    assert stats["handles"]["leases"] == 0  # type: ignore[index]


def test_it_can_be_asked_again_and_again(tmp_path: Path) -> None:
    settings = make_settings(tmp_path)
    with Service(settings):
        assert [examine(settings.socket_path)[0] for _ in range(3)] == [0, 0, 0]


def test_two_at_once_do_not_disturb_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = make_settings(tmp_path)
    compare = RoundTrip._compare
    inner: list[int] = []

    def compare_after_another_run(self: RoundTrip, *arguments: Any) -> None:
        if not inner:
            inner.append(-1)
            inner[0] = examine(settings.socket_path)[0]
        compare(self, *arguments)

    monkeypatch.setattr(RoundTrip, "_compare", compare_after_another_run)
    with Service(settings):
        status, text = examine(settings.socket_path)
    assert (status, inner) == (0, [0]), text


def test_a_missing_node_is_named_with_what_to_do(tmp_path: Path) -> None:
    status, text = examine(tmp_path / "k.sock")
    assert status == 1
    assert "kvservice serve" in text


def test_a_file_that_is_no_socket_is_named(tmp_path: Path) -> None:
    (tmp_path / "k.sock").write_text("")
    status, text = examine(tmp_path / "k.sock")
    assert status == 1
    assert "it is no socket" in text


def test_a_stale_socket_is_named(tmp_path: Path) -> None:
    bind_private(tmp_path / "k.sock").close()
    status, text = examine(tmp_path / "k.sock")
    assert status == 1
    assert "stale socket" in text


def test_a_node_too_small_for_the_round_trip_is_named(tmp_path: Path) -> None:
    """The doctor's own caches take under a MiB; here another tenant's reservation leaves no room."""
    settings = make_settings(tmp_path)
    with Service(settings), Client.connect(f"unix:{settings.socket_path}", doctor_identity()) as client:
        key = wire.CacheKey(segment=b"s" * 32, context=b"c" * 32)
        size = settings.host_bytes - 4096
        client.session.reserve([wire.ReserveItem(namespace=client.namespace, key=key, record_bytes=size)])
        status, text = examine(settings.socket_path)
    assert status == 1
    assert "CAPACITY" in text
