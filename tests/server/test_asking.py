"""Command lines ask a node over HTTP and HTTPS: whom they believe, what they show and to whom, and what they say."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from kvservice.__main__ import main
from kvservice.app import Service
from kvservice.config import Settings
from kvservice.model.errors import InvalidInputError, UnavailableError
from kvservice.stats.asking import HttpNode, is_loopback
from tests.access.certificates import Authority
from tests.access.files import EVERYBODY, TOKENS
from tests.access.guarded import Guarded, guarded

NOBODY = "http://127.0.0.1:1"


def without_proxy_exceptions(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, NOBODY)
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)


def test_loopback_is_asked_without_a_proxy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without_proxy_exceptions(monkeypatch)
    settings = Settings(socket=str(tmp_path / "k.sock"), grpc_port=-1, http_port=0, host_bytes=1 << 22, log_segments=10)
    with Service(settings) as service:
        address = f"127.0.0.1:{service.addresses.http_port}"
        assert main(["stats", "--http", address]) == 0
        assert "Tiers" in capsys.readouterr().out
        assert main(["plan", "--http", f"http://{address}/"]) == 1
        assert "no traffic yet" in capsys.readouterr().out
        assert main(["top", "--http", address, "--once"]) == 0
        assert main(["log", "export", "--http", address, str(tmp_path / "log.arrow")]) == 0
        assert (tmp_path / "log.arrow").stat().st_size > 0


def test_another_machine_is_asked_through_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    without_proxy_exceptions(monkeypatch)
    with pytest.raises(UnavailableError, match="refused"):
        HttpNode("192.0.2.1:9").answer("/plan", 5.0)
    assert not is_loopback("192.0.2.1")


# TLS and tokens, against a real node


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    with guarded(tmp_path_factory.mktemp("guarded"), log_segments=10) as made:
        for name, token in TOKENS.items():
            (made.folder / name).write_text(f"{token}\n")
        yield made


def flags(world: Guarded, name: str = "eyes", **changes: str) -> list[str]:
    values = {
        "http": f"https://localhost:{world.service.addresses.http_port}",
        "ca": str(world.authority.cert),
        "token": f"file:{world.folder / name}",
    } | changes
    return [part for flag, value in values.items() if value for part in (f"--{flag.replace('_', '-')}", value)]


COMMANDS = {
    "stats": (["stats", "--json"], 0),
    "top": (["top", "--once"], 0),
    "plan": (["plan", "--json"], 1),  # there is no traffic yet
}


@pytest.mark.parametrize("name", COMMANDS)
def test_over_tls_with_a_viewers_token_a_command_answers(
    world: Guarded, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command, status = COMMANDS[name]
    assert main([*command, *flags(world)]) == status
    said = capsys.readouterr()
    assert said.err == ""
    assert said.out.startswith("kvservice top localhost:" if name == "top" else "{")


def test_the_log_is_exported_over_tls(world: Guarded, tmp_path: Path) -> None:
    file = tmp_path / "log.arrow"
    assert main(["log", "export", str(file), *flags(world)]) == 0
    assert file.stat().st_size > 0


def test_a_token_may_come_from_the_environment(
    world: Guarded, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("THE_TOKEN", TOKENS["boss"])
    assert main(["stats", "--json", *flags(world, token="env:THE_TOKEN")]) == 0
    assert json.loads(capsys.readouterr().out)["handles"]["sessions"] == 0


def test_a_renewed_token_is_read_anew(world: Guarded, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("old")
    node = HttpNode(flags(world)[1], str(world.authority.cert), f"file:{file}")
    with pytest.raises(Exception, match="does not take the token"):
        node.answer("/stats", 5.0)
    file.write_text(TOKENS["eyes"])
    assert "host" in node.answer("/stats", 5.0)


@pytest.mark.parametrize(
    ("changes", "status", "words"),
    [
        ({"ca": ""}, 1, "name its authority with --ca"),
        ({"token": ""}, 1, "localhost:{port} asks who calls: give --token file:PATH"),
        ({"name": "acme"}, 1, "localhost:{port}: acme may not read figures of all tenants"),
        ({"http": "localhost:{port}", "ca": ""}, 1, "With tls_cert it is asked as https://"),
        ({"ca": "/nowhere"}, 2, "--ca /nowhere cannot be used: No such file"),
        ({"token": "file:/nowhere"}, 2, "--token file:/nowhere cannot be read: No such file"),
        ({"token": "env:NO_SUCH_NAME"}, 2, "--token env:NO_SUCH_NAME holds no token"),
        ({"token": "secret"}, 2, "--token is file:PATH or env:NAME"),
        ({"client_cert": "/nowhere"}, 2, "--client-cert /nowhere cannot be used: No such file"),
        ({"client_key": "/nowhere"}, 2, "--client-key without --client-cert"),
        ({"http": "localhost:{port}"}, 2, "are for TLS: ask https://localhost:{port}"),
        ({"http": "ftp://localhost:{port}"}, 2, "write HOST:PORT or https://HOST:PORT"),
        ({"http": "https://me:secret@localhost:{port}"}, 2, "write HOST:PORT or https://HOST:PORT"),
        ({"http": "https://localhost:{port}/stats"}, 2, "write HOST:PORT or https://HOST:PORT"),
        ({"http": "https://localhost:port"}, 2, "write HOST:PORT"),
    ],
)
@pytest.mark.parametrize("command", ["stats", "top --once", "plan", "log export {folder}/x.arrow"])
def test_what_is_wrong_is_said_with_what_to_do(
    world: Guarded, command: str, changes: dict[str, str], status: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    port = world.service.addresses.http_port
    given = {name: value.replace("{port}", str(port)) for name, value in changes.items()}
    arguments = command.replace("{folder}", str(world.folder)).split()
    assert main([*arguments, *flags(world, given.pop("name", "eyes"), **given)]) == status
    said = capsys.readouterr()
    assert said.out == ""
    assert words.replace("{port}", str(port)) in said.err
    assert "secret" not in said.err
    assert not (world.folder / "x.arrow").exists()


def test_another_authority_is_not_trusted_and_the_token_is_not_sent(world: Guarded, tmp_path: Path) -> None:
    other, refused = Authority(tmp_path / "ca"), world.guard.gate.refused
    with pytest.raises(UnavailableError, match="is not trusted: unable to get local issuer certificate"):
        HttpNode(flags(world)[1], str(other.cert), f"file:{world.folder / 'acme'}").answer("/stats", 5.0)
    assert world.guard.gate.refused == refused


def test_a_certificate_of_another_name_is_told(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "names")
    own = authority.issue("elsewhere.example", is_client=True)
    with guarded(tmp_path, own=own) as world:
        address = f"https://localhost:{world.service.addresses.http_port}"
        with pytest.raises(UnavailableError, match=r"Hostname mismatch.*ask by a name that the certificate has"):
            HttpNode(address, str(authority.cert)).answer("/stats", 5.0)


def test_who_asks_plaintext_over_tls_is_told(tmp_path: Path) -> None:
    settings = Settings(socket=str(tmp_path / "k.sock"), grpc_port=-1, http_port=0, host_bytes=1 << 22)
    with Service(settings) as service, pytest.raises(UnavailableError, match="does not speak TLS"):
        HttpNode(f"https://127.0.0.1:{service.addresses.http_port}").answer("/stats", 5.0)


def test_a_client_certificate_opens_what_asks_for_one(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "clients")
    pair = authority.issue("eyes.example", is_client=True)
    access = EVERYBODY.replace('name = "eyes"', 'name = "eyes"\ncertificates = ["eyes.example"]')
    with guarded(tmp_path, access=access, tls_client_ca=str(authority.cert)) as world:
        address, ca = f"https://localhost:{world.service.addresses.http_port}", str(world.authority.cert)
        for shown in ({"client_cert": str(pair.both)}, {"client_cert": str(pair.cert), "client_key": str(pair.key)}):
            assert "host" in HttpNode(address, ca, **shown).answer("/stats", 5.0)
        with pytest.raises(UnavailableError, match=r"no TLS with .*show a certificate with --client-cert"):
            HttpNode(address, ca).answer("/stats", 5.0)


# What must never leave


@pytest.mark.parametrize("address", ["192.0.2.1:9", "http://kv.example:50152", "127.0.0.1.example:1"])
def test_a_token_in_the_clear_is_refused_before_anything_is_asked(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def connect(*_: Any, **__: Any) -> None:
        raise AssertionError("it was asked")

    monkeypatch.setattr("socket.create_connection", connect)
    (tmp_path / "token").write_text("secret")
    assert main(["stats", "--http", address, "--token", f"file:{tmp_path / 'token'}"]) == 2
    said = capsys.readouterr().err
    assert "would cross the network in the clear: ask https://" in said
    assert "secret" not in said


class Elsewhere(BaseHTTPRequestHandler):
    """Leads on to another port, and remembers who came."""

    target: ClassVar[str] = ""
    seen: ClassVar[list[tuple[str, str | None]]] = []

    def do_GET(self) -> None:
        self.seen.append((self.path, self.headers["Authorization"]))
        self.send_response(302)
        self.send_header("Location", self.target)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing."""


@contextmanager
def serving(kind: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), kind)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_no_redirection_is_followed(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret")
    with serving(Elsewhere) as address:
        Elsewhere.target, Elsewhere.seen = f"http://{address}/elsewhere", []
        with pytest.raises(UnavailableError, match="HTTP status 302"):
            HttpNode(address, token=f"file:{tmp_path / 'token'}").answer("/stats", 5.0)
    assert Elsewhere.seen == [("/stats", "Bearer secret")]


@pytest.mark.parametrize("content", ["", "two\nlines", "caf\u00e9", "x" * 5000])
def test_what_cannot_be_a_token_is_not_sent(content: str, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(content)
    with pytest.raises(InvalidInputError, match="holds no token"):
        HttpNode("127.0.0.1:1", token=f"file:{tmp_path / 'token'}").answer("/stats", 5.0)
