"""What the tests next to LMCache share: an `lmcache server` in a process of its own, and engines that use it."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.vllm.legs import LEG_TIMEOUT_S, ROOT, Prompts, Result, _result, environment

CHUNK = 64
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 30.0
MODULE = "kvservice.client.connectors.lmcache"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def lmcache_environment() -> dict[str, str]:
    own = str(Path(__file__).parent)  # where the plugins of these tests are
    return environment() | {"LMCACHE_TRACK_USAGE": "false", "PYTHONHASHSEED": "0", "PYTHONPATH": own}


@dataclass
class LMCacheServer:
    """`lmcache server` with our L2 adapter."""

    params: dict[str, object]
    folder: Path
    module: str = MODULE
    class_name: str = "KVServiceL2Adapter"
    port: int = field(default_factory=free_port)
    http_port: int = field(default_factory=free_port)
    process: "subprocess.Popen[bytes] | None" = None

    @property
    def connector(self) -> dict[str, object]:
        """Of vLLM's LMCacheMPConnector."""
        return {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": self.port}

    @property
    def log(self) -> str:
        return (self.folder / "lmcache.log").read_text(errors="replace")

    def command(self) -> list[str]:
        adapter = {
            "type": "plugin",
            "module_path": self.module,
            "class_name": self.class_name,
            "adapter_params": self.params,
            "shared": True,
        }
        ports = ["--port", str(self.port), "--http-host", "127.0.0.1", "--http-port", str(self.http_port)]
        return [
            str(Path(sys.executable).with_name("lmcache")), "server", "--host", "127.0.0.1", *ports,
            "--chunk-size", str(CHUNK), "--l1-size-gb", "0.25", "--eviction-policy", "LRU",
            "--supported-transfer-mode", "engine_driven", "--l2-adapter", json.dumps(adapter),
        ]  # fmt: skip

    def start(self) -> None:
        with (self.folder / "lmcache.log").open("ab") as log:
            self.process = subprocess.Popen(
                self.command(), cwd=ROOT, stdout=log, stderr=log, env=lmcache_environment(), start_new_session=True
            )
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline_s:
            try:
                self.process.wait(0.2)
            except subprocess.TimeoutExpired:
                if self._answers():
                    return
                continue
            break
        raise AssertionError(self.log[-4000:])

    def status(self) -> dict[str, Any]:
        """What the server says of our adapter."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.http_port}/status", timeout=30) as answer:
            document: dict[str, Any] = json.loads(answer.read())
        return _find(document, self.class_name)

    def stop(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(STOP_TIMEOUT_S)

    def restart(self) -> None:
        self.stop()
        self.start()

    def _answers(self) -> bool:
        try:
            self.status()
        except (OSError, AssertionError):
            return False
        return True


@contextmanager
def running_lmcache(params: dict[str, object], folder: Path, **more: Any) -> Iterator[LMCacheServer]:
    server = LMCacheServer(params, folder, **more)
    server.start()
    try:
        yield server
    finally:
        server.stop()


def run_lmcache_leg(model: Path, prompts: Prompts, connector: dict[str, object], **leg: Any) -> Result:
    """One engine with a connector of LMCache's, in a process of its own."""
    transfer = {"kv_connector": "LMCacheMPConnector", "kv_connector_module_path": None}
    spec = {"model": str(model), "prompts": prompts, "connector": connector, "transfer": transfer, "watch": False}
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("lmcache_leg.py"), json.dumps(spec | leg)],
        capture_output=True,
        text=True,
        timeout=LEG_TIMEOUT_S,
        check=False,
        cwd=ROOT,
        env=lmcache_environment() | leg.get("environment", {}),
    )
    return _result(done.stdout, done.stderr)


def _find(document: Any, class_name: str) -> dict[str, Any]:
    """Our adapter's status, wherever in the document it is."""
    waiting = [document]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict) and one.get("type") == class_name:
            return one
        waiting += one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
    raise AssertionError(f"no {class_name} in {document}")
