"""A cache node in a process of its own, for as long as the demo runs."""

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

from kvservice.model.errors import UnavailableError

STOP_TIMEOUT_S = 10.0


class ServiceProcess:
    """``with ServiceProcess(host_bytes) as service``: a running node on a private socket and a free HTTP port."""

    def __init__(self, host_bytes: int) -> None:
        self._host_bytes = host_bytes

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix="kvservice-demo-")
        self.socket = Path(self._folder.name) / "kvservice.sock"
        flags = {"socket": self.socket, "grpc-port": -1, "http-port": 0, "host-bytes": self._host_bytes}
        command = [sys.executable, "-P", "-m", "kvservice", "serve"]
        command += [f"--{name}={value}" for name, value in flags.items()]
        command += ["--is-prefaulted=true"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # noqa: S603  our own program
        try:
            self.announcement = self._announced()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _announced(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if not line:
            raise UnavailableError(f"the node did not start: exit status {self._process.wait(STOP_TIMEOUT_S)}")
        return line

    @property
    def address(self) -> str:
        """Where a client connects."""
        return f"unix:{self.socket}"

    @property
    def http_port(self) -> int:
        """The port of /stats."""
        found = re.search(r"HTTP port (\d+)", self.announcement)
        assert found, self.announcement
        return int(found[1])

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._folder.cleanup()
