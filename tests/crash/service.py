"""The service as a child process: started, killed, stopped, and asked how it stands. Ends only what it started."""

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvservice.app import SERVICE_NAME
from kvservice.model.errors import UnavailableError
from kvservice.wire.v1 import cache_pb2 as wire
from kvservice.wire.v1 import cache_pb2_grpc
from tests.crash.oracle import BrokenError

START_TIMEOUT_S = 60.0
END_TIMEOUT_S = 60.0
CALL_TIMEOUT_S = 20.0
BAD_LINES = (" ERROR ", " CRITICAL ", "Traceback (most recent call last)", "Please report this")
LOG_TAIL = 4000

Settings = dict[str, str]
"""Names and values as they stand in a settings file."""


class ServiceProcess:
    """One start of ``kvservice serve``. Its log goes to ``log``, which later starts append to.

    ``was_killed``, ``was_terminated``: by us, while it ran.
    """

    def __init__(self, settings: Settings, log: Path) -> None:
        self.settings = settings
        self.socket = settings["socket"]
        self.was_killed = self.was_terminated = False
        self._log, self._log_start = log, log.stat().st_size if log.exists() else 0
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
        command = [sys.executable, "-P", "-m", "kvservice", "serve", *flags]
        self.started_s = time.monotonic()
        with log.open("ab") as stream:
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stream)
        self.pid = self._process.pid

    def is_healthy(self, timeout_s: float = START_TIMEOUT_S) -> bool:
        """Wait until it says that it is healthy; False if it ended before."""
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], timeout_s)
        if not ready:
            raise BrokenError(f"the service is not healthy after {timeout_s:g} s")
        return b"host arena" in self._process.stdout.readline()

    def is_running(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        if self.is_running():
            os.kill(self.pid, signal.SIGKILL)
            self.was_killed = True
        self.wait()

    def terminate(self) -> None:
        """SIGTERM."""
        if self.is_running():
            os.kill(self.pid, signal.SIGTERM)
            self.was_terminated = True

    def wait(self, timeout_s: float = END_TIMEOUT_S) -> int:
        """The exit status; negative: ended by that signal."""
        try:
            status = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise BrokenError(f"the service did not end within {timeout_s:g} s") from None
        assert self._process.stdout is not None
        self._process.stdout.close()
        return status

    def is_gone_within(self, timeout_s: float) -> bool:
        """Wait for an end that is not asked for here."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def log_text(self) -> str:
        """What this start has logged."""
        with self._log.open("rb") as stream:
            stream.seek(self._log_start)
            return stream.read().decode(errors="replace")

    def require_quiet_log(self) -> None:
        """Nothing in the log asks to be reported."""
        text = self.log_text()
        if any(bad in text for bad in BAD_LINES):
            raise BrokenError(f"the service logged an error:\n{text[-LOG_TAIL:]}")

    # What it says of itself

    def health(self) -> int:
        """See grpc.health.v1; 1 is SERVING."""
        with grpc.insecure_channel(f"unix:{self.socket}") as channel:
            request = health_pb2.HealthCheckRequest(service=SERVICE_NAME)
            try:
                return int(health_pb2_grpc.HealthStub(channel).Check(request, timeout=CALL_TIMEOUT_S).status)
            except grpc.RpcError as error:
                raise UnavailableError(f"no health: {error}") from error

    def stats(self) -> dict[str, Any]:
        """The stats document. Raises UnavailableError when nobody answers."""
        with grpc.insecure_channel(f"unix:{self.socket}") as channel:
            stub: Any = cache_pb2_grpc.CacheServiceStub(channel)  # type: ignore[no-untyped-call]
            try:
                document: dict[str, Any] = json.loads(stub.Stats(wire.StatsRequest(), timeout=CALL_TIMEOUT_S).json)
            except grpc.RpcError as error:
                raise UnavailableError(f"no stats: {error}") from error
        return document


def pause(seconds: float) -> None:
    """Let time go by: for the moment of a kill and between two looks, never to wait for a result."""
    threading.Event().wait(seconds)
