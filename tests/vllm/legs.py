"""What the tests on the real vLLM share: a service in a process of its own, engines in theirs, prompts."""

import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

from tests.vllm.engine_leg import MARK, ROUND_MARK

ROOT = Path(__file__).resolve().parent.parent.parent
LEG_TIMEOUT_S = 240
START_TIMEOUT_S = 60
HOST_BYTES = 128 << 20
BLOCK = 32
CHUNK = 64

Prompts = list[list[int]]
HISTORY = "The lighthouse keeper wrote every evening what the sea had brought him. " * 12
TEXTS = [
    HISTORY + "He counts: 1, 2, 3, 4, 5, 6, 7,",
    HISTORY + "His week is Monday, Tuesday, Wednesday,",
    HISTORY + "He writes a, b, c, d, e, f,",
]
"""Prompts with one likely continuation: what is loaded is exact, but vLLM's matrix products round by the number of
rows in a call, and fewer rows are left to compute after a load; a tie between two words would fall either way."""
SAID = ("8, 9", "Thursday", "g, h")


def make_prompts(count: int = 4, *, tokens: int = 200, shared: int = 100, seed: int = 0) -> Prompts:
    """Prompts of the tiny model's token ids that begin alike."""
    generator = random.Random(seed)
    head = [generator.randrange(3, 1024) for _ in range(shared)]
    return [head + [generator.randrange(3, 1024) for _ in range(tokens - shared)] for _ in range(count)]


@dataclass
class ServiceProcess:
    """`kvservice serve`, with its files in a folder of its own."""

    folder: Path
    options: tuple[str, ...] = ()
    process: "subprocess.Popen[str] | None" = None

    @property
    def address(self) -> str:
        return f"unix:{self.folder}/kv.sock"

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def start(self) -> None:
        command = [sys.executable, "-m", "kvservice", "serve", "--socket", f"{self.folder}/kv.sock"]
        command += ["--host-bytes", str(HOST_BYTES), "--grpc-port", "-1", "--http-port", "-1", *self.options]
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=environment())
        assert self.process.stdout is not None
        if "unix:" not in self.process.stdout.readline():
            self.stop()
            raise AssertionError(f"the service did not start: {command}")

    def stop(self, number: int = signal.SIGTERM) -> None:
        if self.process is not None:
            self.process.send_signal(number)
            self.process.wait(START_TIMEOUT_S)
            assert self.process.stdout is not None
            self.process.stdout.close()
            self.process = None

    def restart(self, number: int = signal.SIGTERM) -> None:
        self.stop(number)
        self.start()


@contextmanager
def running_service(*options: str) -> Iterator[ServiceProcess]:
    """A service; its socket's path is short, since the system allows 107 characters."""
    folder = Path(tempfile.mkdtemp(prefix="kvs-", dir="/tmp"))
    service = ServiceProcess(folder, options)
    service.start()
    try:
        yield service
    finally:
        service.stop()
        shutil.rmtree(folder, ignore_errors=True)


def with_ssd(folder: Path) -> tuple[str, ...]:
    """Options of a service with an SSD tier that writes at once."""
    return ("--ssd-folder", str(folder), "--ssd-bytes", str(256 << 20), "--ssd-free-floor-bytes", "0")


@dataclass
class Result:
    """What a leg printed."""

    tokens: list[list[int]]
    counts: dict[str, float]
    metrics: dict[str, float]
    runs: list[dict[str, Any]]
    leases: int
    log: str = field(repr=False)

    def metric(self, name: str) -> float:
        """One of ours, as vLLM's /metrics has it."""
        return self.metrics[f"vllm:kvservice_{name}"]


def environment(*, is_multiprocess: bool = False) -> dict[str, str]:
    """Of every process of these tests: no network, one thread, and the engine in one process unless asked otherwise."""
    return {
        "PATH": "/usr/bin:/bin",
        "HOME": "/tmp",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(is_multiprocess)),
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONSAFEPATH": "1",
    }


def run_leg(
    model: Path,
    prompts: Prompts | list[str] | None = None,
    *,
    is_multiprocess: bool = False,
    variables: Mapping[str, str] = MappingProxyType({}),
    **leg: Any,
) -> Result:
    """One engine in a process of its own, from start to end. ``variables``: of its environment."""
    spec = {"model": str(model), "prompts": prompts, **leg}
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("engine_leg.py"), json.dumps(spec)],
        capture_output=True,
        text=True,
        timeout=LEG_TIMEOUT_S,
        check=False,
        cwd=ROOT,
        env={**environment(is_multiprocess=is_multiprocess), **variables},
    )
    return _result(done.stdout, done.stderr)


@contextmanager
def stepwise_leg(model: Path, rounds: Sequence[Prompts], **leg: Any) -> Iterator["Stepwise"]:
    """An engine that waits before each round until it is told to go on."""
    spec = {"model": str(model), "rounds": rounds, "is_stepwise": True, **leg}
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("engine_leg.py"), json.dumps(spec)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            cwd=ROOT,
            env=environment(),
        )
        try:
            yield Stepwise(process, log)
        finally:
            if process.poll() is None:
                process.kill()
            process.communicate()


class Stepwise:
    """A leg that runs round by round."""

    def __init__(self, process: "subprocess.Popen[str]", log: IO[str]) -> None:
        self._process = process
        self._log = log
        self._lines: list[str] = []

    def wait(self) -> None:
        """Return when the engine waits for the next round."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.append(line)
            if line.startswith(ROUND_MARK):
                return
        self._log.seek(0)
        raise AssertionError(self._log.read()[-3000:])

    def go_on(self) -> None:
        """Let it run the round."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def result(self) -> Result:
        """Wait for the end."""
        out, _ = self._process.communicate(timeout=LEG_TIMEOUT_S)
        self._log.seek(0)
        return _result("".join(self._lines) + out, self._log.read())


def _result(out: str, log: str) -> Result:
    lines = [line for line in out.splitlines() if line.startswith(MARK)]
    assert lines, (out + log)[-4000:]
    found = json.loads(lines[0][len(MARK) :])
    leases = int(found["idle"]["leases"])
    return Result(found["tokens"], found["counts"], found["metrics"], found["runs"], leases, out + log)
