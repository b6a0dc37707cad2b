"""``kvservice serve`` in a process of its own: SIGHUP, and what a start refuses."""

import os
import signal
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvservice.client.security import Security
from kvservice.client.session import Session
from kvservice.client.shared_memory import SharedMemoryTransport
from kvservice.config import process_environment
from kvservice.model.errors import UnauthenticatedError
from tests.access.certificates import Authority
from tests.access.files import EVERYBODY, TOKENS, section, write
from tests.access.guarded import ACME

LINES_MAX = 200


class Serving:
    """One process. Its log goes to the same pipe as what it prints."""

    def __init__(self, folder: Path, *flags: str) -> None:
        command = [sys.executable, "-m", "kvservice", "serve", "--socket", str(folder / "kv.sock")]
        sizes = ["--host-bytes", "4MiB", "--grpc-port", "0", "--http-port", "0"]
        self.process = subprocess.Popen(
            [*command, *sizes, *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=process_environment(),
        )

    def until(self, text: str) -> str:
        """The next line that holds ``text``."""
        assert self.process.stdout is not None
        for _ in range(LINES_MAX):
            line = self.process.stdout.readline()
            if text in line:
                return line
            assert line, f"it ended before it said {text!r}"
        raise AssertionError(text)

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(30)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def authority(folder: Path) -> Authority:
    return Authority(folder / "ca")


@pytest.fixture
def serving(folder: Path, authority: Authority) -> Iterator[Serving]:
    own = authority.issue("node")
    tls = ("--tls-cert", str(own.cert), "--tls-key", str(own.key))
    one = Serving(folder, *tls, "--access-file", str(write(folder / "access.toml", EVERYBODY)))
    yield one
    one.stop()


def port_of(line: str, kind: str) -> int:
    return int(line.partition(f"{kind} port ")[2].partition(",")[0])


def test_sighup_reads_a_new_file_and_keeps_the_old_rules_when_it_is_wrong(
    folder: Path, authority: Authority, serving: Serving
) -> None:
    address = f"localhost:{port_of(serving.until('gRPC port'), 'gRPC')}"

    def open_session(token: str) -> None:
        Session(SharedMemoryTransport(address, Security(token, str(authority.cert))), [ACME]).close()

    open_session(TOKENS["acme"])
    write(folder / "access.toml", "[[principal]]\nname = 7\n")
    os.kill(serving.process.pid, signal.SIGHUP)
    assert "name" in serving.until("the old access rules stay in force")
    open_session(TOKENS["acme"])
    write(folder / "access.toml", section("acme", '"acme"', token="new"))
    os.kill(serving.process.pid, signal.SIGHUP)
    serving.until("new rules are in force")
    open_session("new")
    with pytest.raises(UnauthenticatedError):
        open_session(TOKENS["acme"])


def test_a_changed_file_is_noticed_without_a_signal(folder: Path, serving: Serving) -> None:
    serving.until("gRPC port")
    write(folder / "access.toml", section("acme", '"acme"', token="new"))
    began_s = time.monotonic()
    serving.until("new rules are in force")
    assert time.monotonic() - began_s < 30


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--tls-cert", "missing.pem", "--tls-key", "missing.key"), "cannot be used: No such file"),
        (("--access-file", "missing.toml"), "cannot read the access file missing.toml"),
        (("--host", "0.0.0.0"), "a loopback address, or else set tls_cert"),
        (("--tls-cert", "x"), "given together with tls_cert"),
    ],
)
def test_a_start_that_cannot_guard_itself_is_refused(folder: Path, flags: tuple[str, ...], message: str) -> None:
    one = Serving(folder, *flags)
    assert "CONFIG" in one.until(message)
    assert one.process.wait(30) == 1
    one.stop()


def test_a_certificate_and_a_key_that_do_not_fit_are_named(folder: Path, authority: Authority) -> None:
    cert, key = authority.issue("node").cert, authority.issue("other").key
    one = Serving(folder, "--tls-cert", str(cert), "--tls-key", str(key))
    assert str(key) in one.until("cannot be used")
    one.stop()


def test_insecure_plaintext_listens_everywhere_and_warns(folder: Path) -> None:
    one = Serving(folder, "--host", "0.0.0.0", "--insecure-plaintext", "true")
    one.until("insecure_plaintext is set: who is on the way")
    port = port_of(one.until("gRPC port"), "HTTP")
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/stats", timeout=5) as reply:
        assert reply.status == 200
    one.stop()


def test_beyond_loopback_with_tls_everybody_is_asked(folder: Path, authority: Authority) -> None:
    own = authority.issue("node")
    flags = ("--tls-cert", str(own.cert), "--tls-key", str(own.key))
    access = ("--access-file", str(write(folder / "access.toml", EVERYBODY)))
    one = Serving(folder, "--host", "0.0.0.0", *flags, *access)
    port = port_of(one.until("gRPC port"), "HTTP")
    context = ssl.create_default_context(cafile=str(authority.cert))
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(f"https://localhost:{port}/stats", timeout=5, context=context)
    assert caught.value.code == 401
    caught.value.close()
    one.stop()
