"""Real servers on free ports of loopback, started by a test and ended by process id."""

import contextlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from tests.freezing import freeze

START_S = 30.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def program(name: str) -> str | None:
    """Where a program is: next to this Python, or on the path."""
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.exists() else shutil.which(name)


def is_installed(name: str) -> bool:
    """Is there a library or a program of that name?"""
    return program(name) is not None or (name.isidentifier() and importlib.util.find_spec(name) is not None)


def require_program(request: pytest.FixtureRequest, name: str, remedy: str) -> str:
    """Where a program is. Skips without it; fails under --require-servers."""
    found = program(name)
    if found is None:
        give_up(request, f"{name} is not installed: {remedy}")
    return found


def require_module(request: pytest.FixtureRequest, name: str, remedy: str) -> None:
    """Skips where a library cannot be imported; fails under --require-servers."""
    if importlib.util.find_spec(name) is None:
        give_up(request, f"the library {name} is not installed: {remedy}")


def give_up(request: pytest.FixtureRequest, reason: str) -> NoReturn:
    if request.config.getoption("--require-servers", default=False):
        pytest.fail(reason)
    pytest.skip(reason)


class Server:
    """A process with a port. ``command`` is run again by ``restart``."""

    def __init__(self, command: list[str], port: int, log: Path, environment: dict[str, str] | None = None) -> None:
        self._command = command
        self._log = log
        self._environment = {**os.environ, **(environment or {})}
        self._process: subprocess.Popen[bytes] | None = None
        self.port = port

    def start(self, is_ready: Callable[[], bool] | None = None) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=self._environment
            )
        self._wait(is_ready or self._answers)

    def stop(self) -> None:
        """Freeze it: it keeps its connections and says nothing."""
        if self._process is not None:
            freeze(self._process.pid)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def restart(self) -> None:
        self.kill()
        self.start()

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1.0):
            return True
        return False

    def _wait(self, is_ready: Callable[[], bool]) -> None:
        pause = threading.Event()
        for _ in range(int(START_S / 0.05)):
            assert self._process is not None
            if self._process.poll() is not None:
                break
            if is_ready():
                return
            pause.wait(0.05)
        text = self._log.read_text(errors="replace")[-2000:]
        self.kill()
        raise AssertionError(f"{self._command[0]} did not start on port {self.port}:\n{text}")


@contextlib.contextmanager
def running(server: Server, is_ready: Callable[[], bool] | None = None) -> Iterator[Server]:
    server.start(is_ready)
    try:
        yield server
    finally:
        server.kill()


def redis_server(request: pytest.FixtureRequest, folder: Path, *options: str, port: int | None = None) -> Server:
    """A Redis that keeps nothing on disk."""
    program = require_program(request, "redis-server", "apt-get install redis-server")
    at = free_port() if port is None else port
    fixed = ["--port", str(at), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", str(folder)]
    return Server([program, *fixed, *options], at, folder / "redis.log")


def s3_server(request: pytest.FixtureRequest, folder: Path, **environment: str) -> Server:
    """moto's S3, a process of its own."""
    require_module(request, "moto", "pip install 'moto[server]'")
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    return Server(command, port, folder / "s3.log", environment)


def mooncake_master(request: pytest.FixtureRequest, folder: Path) -> Server:
    """A master without metadata service."""
    program = require_program(request, "mooncake_master", "pip install mooncake-transfer-engine-non-cuda")
    port, metrics = free_port(), free_port()
    options = [f"--rpc_port={port}", f"--metrics_port={metrics}", "--rpc_address=127.0.0.1"]
    return Server([program, *options, "--metrics_host=127.0.0.1", "--logtostderr"], port, folder / "master.log")


STORE = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[1]), 0, "tcp", "", sys.argv[2]) == 0
print("the store is ready", flush=True)
sys.stdin.read()
"""


def mooncake_store(master: Server, folder: Path, pool_bytes: int) -> Server:
    """A process that gives the pool its memory. Start it with ``is_ready=store_is_ready(folder)``."""
    command = [sys.executable, "-c", STORE, str(pool_bytes), f"127.0.0.1:{master.port}"]
    return Server(command, 0, folder / "store.log")


def store_is_ready(folder: Path, stores: int = 1) -> Callable[[], bool]:
    return lambda: (folder / "store.log").read_text(errors="replace").count("the store is ready") >= stores
