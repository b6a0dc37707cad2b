"""Command lines ask a node on this machine itself, whatever proxy the environment names."""

from pathlib import Path

import pytest

from kvservice.__main__ import main
from kvservice.app import Service
from kvservice.config import Settings
from kvservice.stats.asking import is_loopback, open_url


def test_loopback_is_asked_without_a_proxy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")  # where nobody listens
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    settings = Settings(socket=str(tmp_path / "k.sock"), grpc_port=-1, http_port=0, host_bytes=1 << 22, log_segments=10)
    with Service(settings) as service:
        address = f"127.0.0.1:{service.addresses.http_port}"
        assert main(["plan", "--http", address]) == 1
        assert "no traffic yet" in capsys.readouterr().out
        assert main(["top", "--http", address, "--once"]) == 0
        assert main(["log", "export", "--http", address, str(tmp_path / "log.arrow")]) == 0
        assert (tmp_path / "log.arrow").stat().st_size > 0


def test_another_machine_is_asked_through_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    with pytest.raises(OSError, match="refused"):
        open_url("http://192.0.2.1:9/plan", 5.0)
    assert not is_loopback("192.0.2.1")
