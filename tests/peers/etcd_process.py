"""A real etcd for tests, on free loopback ports, ended by its pid."""

import base64
import json
import shutil
import signal
import socket
import subprocess
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from threading import Event
from typing import Any, Self
from urllib.error import HTTPError

import pytest

from tests.freezing import freeze

START_S = 20.0


def require_etcd(request: pytest.FixtureRequest) -> str:
    """The program; skips the test where it is not installed, unless servers are required."""
    program = shutil.which("etcd")
    if program is None:
        if request.config.getoption("--require-servers", default=False):
            pytest.fail("etcd is not installed and --require-servers was given: apt-get install etcd-server")
        pytest.skip("etcd is not installed: apt-get install etcd-server etcd-client")
    return program


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class EtcdProcess:
    """One member, one folder. It may be killed, stopped and started again on its data, or without it."""

    def __init__(self, program: str, folder: Path, tls: Sequence[str] = ()) -> None:
        self._program, self._folder, self._tls = program, folder, tls
        self.port, self._peer_port = free_port(), free_port()
        self._scheme = "https" if tls else "http"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """As a setting, without a prefix."""
        return f"{self._scheme}://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        """Start it and wait until it takes connections and, without TLS, has a leader."""
        peer = f"http://127.0.0.1:{self._peer_port}"
        self._folder.mkdir(exist_ok=True)
        command = [
            *(self._program, "--name", "one", "--data-dir", str(self._folder / "data"), "--log-level", "error"),
            *("--listen-client-urls", self.url, "--advertise-client-urls", self.url),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"one={peer}"),
            *("--heartbeat-interval", "50", "--election-timeout", "500", "--unsafe-no-fsync", *self._tls),
        ]
        if "--unsafe-no-fsync" not in _help_of(self._program):
            command.remove("--unsafe-no-fsync")
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        pause = Event()
        for _ in range(int(START_S / 0.05)):
            if self._process.poll() is None and self._answers():
                return
            pause.wait(0.05)
        raise AssertionError(f"etcd did not start: {(self._folder / 'log').read_text()[-2000:]}")

    def _answers(self) -> bool:
        with suppress(OSError, ValueError):
            if self._tls:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return True
            try:
                self.call("kv/range", {"key": encoded("x")})
            except HTTPError as error:  # it wants a login: it answers
                error.close()
                return error.code == 400
            return True
        return False

    def kill(self) -> None:
        """End it at once. Safe to call twice."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        assert self._process is not None
        freeze(self._process.pid)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def forget(self) -> None:
        """Lose all data; only while it is down."""
        shutil.rmtree(self._folder / "data")

    def call(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """One call from outside the code under test."""
        request = urllib.request.Request(f"{self.url}/v3/{path}", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=2) as answer:
            found: dict[str, Any] = json.load(answer)
            return found


def encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


_helps: dict[str, str] = {}


def _help_of(program: str) -> str:
    if program not in _helps:
        found = subprocess.run((program, "--help"), capture_output=True, text=True, check=False)
        _helps[program] = found.stdout + found.stderr
    return _helps[program]
