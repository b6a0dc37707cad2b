"""A real model behind vLLM's OpenAI server: a second server says the same, and loads instead of computing."""

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.client.builders import free_port
from tests.vllm.engine_leg import CONNECTOR
from tests.vllm.legs import ROOT, SAID, TEXTS, ServiceProcess, environment, running_service

START_TIMEOUT_S = 240


class Server:
    """One OpenAI server, and its answers."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self._url + path, timeout=60) as answer:
            text: str = answer.read().decode()
            return text

    def complete(self, prompt: str) -> str:
        body = {"model": "smol", "prompt": prompt, "max_tokens": 12, "temperature": 0}
        request = urllib.request.Request(
            self._url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            text: str = json.load(answer)["choices"][0]["text"]
            return text

    def metric(self, name: str) -> float:
        lines = [line for line in self.get("/metrics").splitlines() if line.startswith(f"vllm:kvservice_{name}_total")]
        assert lines, name
        return sum(float(line.rpartition(" ")[2]) for line in lines)


@contextmanager
def running_server(model: Path, service: ServiceProcess | None, log: Path) -> Iterator[Server]:
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--served-model-name", "smol", "--host", "127.0.0.1", "--port", str(port), "--max-model-len", "1024"]
    command += ["--enforce-eager", "--dtype", "bfloat16", "--block-size", "32"]
    command += ["--kv-cache-memory-bytes", str(128 << 20)]
    if service is not None:
        transfer = {**CONNECTOR, "kv_connector_extra_config": {"address": service.address, "chunk_tokens": 64}}
        command += ["--kv-transfer-config", json.dumps(transfer)]
    with log.open("w") as output:
        env = environment(is_multiprocess=True)
        process = subprocess.Popen(command, stdout=output, stderr=output, cwd=ROOT, env=env)
        try:
            yield _healthy(Server(port), process, log)
        finally:
            process.terminate()
            process.wait(60)


def _healthy(server: Server, process: "subprocess.Popen[bytes]", log: Path) -> Server:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        try:
            server.get("/health")
        except OSError:
            try:
                process.wait(0.5)
            except subprocess.TimeoutExpired:
                continue
            break
        return server
    raise AssertionError(log.read_text()[-4000:])


def answers(server: Server) -> list[str]:
    return [server.complete(question) for question in TEXTS]


def settled(server: Server, name: str) -> float:
    """A counter once it is not 0: the connector's figures travel with the engine's next step."""
    for _ in range(20):
        server.complete("Hello")
        if server.metric(name):
            break
    return server.metric(name)


@pytest.mark.slow
def test_a_second_server_says_the_same_and_loads(smollm2_model: Path, tmp_path: Path) -> None:
    said: dict[str, Any] = {}
    with running_server(smollm2_model, None, tmp_path / "plain.log") as server:
        said["plain"] = answers(server)
    with running_service() as service:
        with running_server(smollm2_model, service, tmp_path / "first.log") as server:
            assert server.metric("tokens_loaded") == 0
            said["first"] = answers(server)
            assert settled(server, "chunks_saved") > 0
        with running_server(smollm2_model, service, tmp_path / "second.log") as server:
            said["second"] = answers(server)
            assert settled(server, "tokens_loaded") > 100
            assert server.metric("loads_failed") == 0
    assert all(word in text for word, text in zip(SAID, said["plain"], strict=True))
    assert said["first"] == said["second"] == said["plain"]
