"""HTTP from the network, and the admin's socket: who reads what, and that verbs are nowhere else."""

import os
import ssl
import stat
import urllib.error
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvservice.client.security import NO_SECURITY
from kvservice.wire.v1 import cache_pb2 as wire
from tests.access.certificates import Authority
from tests.access.files import EVERYBODY, TOKENS, section, write
from tests.access.guarded import ACME, RIVAL, Guarded, ask_admin, guarded
from tests.server.builders import encode_key, make_meta

PATHS = ("/", "/stats", "/metrics", "/plan", "/curves", "/families", "/log.arrow", "/access", "/nowhere")


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Guarded]:
    with guarded(tmp_path) as world:
        yield world


def admin_socket(world: Guarded) -> Path:
    return Path(world.service.addresses.socket + ".admin")


def test_health_is_for_all(world: Guarded) -> None:
    assert world.get("/healthz") == (200, {"status": "ok"})


@pytest.mark.parametrize("token", ["", "wrong"])
def test_nobody_else_reads_anything(world: Guarded, token: str) -> None:
    answers = {repr(world.get(path, token=token)) for path in PATHS}
    assert len(answers) == 1
    assert world.get("/stats", token=token)[0] == 401


def test_an_engine_hears_the_same_of_every_path(world: Guarded) -> None:
    answers = {repr(world.get(path, token=TOKENS["acme"])) for path in PATHS}
    assert len(answers) == 1
    status, answer = world.get("/stats", token=TOKENS["acme"])
    assert (status, answer["error"]) == (403, "FORBIDDEN")
    assert world.get("/explain", token=TOKENS["acme"], body=b"{}") == (status, answer)


@pytest.mark.parametrize("name", ["eyes", "boss"])
def test_viewers_and_admins_read_all(world: Guarded, name: str) -> None:
    status, document = world.get("/stats", token=TOKENS[name])
    assert (status, document["handles"]["sessions"]) == (200, 0)
    assert b"kvservice_" in world.get("/metrics", token=TOKENS[name])[1]


def test_a_certificate_is_enough_for_a_browser(tmp_path: Path) -> None:
    callers = Authority(tmp_path / "callers")
    access = EVERYBODY + section("two", "", role="viewer", token="two", more='certificates = ["eyes.example"]')
    with guarded(tmp_path, access=access, tls_client_ca=str(callers.cert)) as world:
        assert world.get("/stats", pair=callers.issue("eyes.example"))[0] == 200
        assert world.get("/stats", pair=callers.issue("other.example"))[0] == 401
        with pytest.raises((urllib.error.URLError, ssl.SSLError, OSError)):
            world.get("/healthz")
        with pytest.raises((urllib.error.URLError, ssl.SSLError, OSError)):
            world.get("/healthz", pair=callers.issue("eyes.example", is_expired=True, file="old"))


def test_a_new_certificate_is_used_by_the_next_connection(world: Guarded, tmp_path: Path) -> None:
    other = Authority(tmp_path / "other")
    new = other.issue("node")
    (tmp_path / "ca" / "node.key").write_bytes(new.key.read_bytes())
    (tmp_path / "ca" / "node.pem").write_bytes(new.cert.read_bytes())
    world.on_loop(world.guard.look)
    with pytest.raises(urllib.error.URLError, match="certificate verify failed"):
        world.get("/healthz")


def test_http_rates_are_the_callers(world: Guarded) -> None:
    world.allow(section("eyes", "", role="viewer", more="calls_per_s = 2"))
    statuses = [world.get("/stats", token=TOKENS["eyes"])[0] for _ in range(8)]
    assert statuses[0] == 200
    assert 429 in statuses


def test_plaintext_on_loopback_asks_nobody_but_takes_no_wrong_token(tmp_path: Path) -> None:
    import urllib.request

    with guarded(tmp_path, tls_cert="", tls_key="") as world:
        url = f"http://127.0.0.1:{world.service.addresses.http_port}/stats"
        with urllib.request.urlopen(url, timeout=5) as reply:
            assert reply.status == 200
        request = urllib.request.Request(url, headers={"Authorization": "Bearer wrong"})
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request, timeout=5)
        caught.value.close()
        assert (caught.value.code, caught.value.headers["WWW-Authenticate"].split()[0]) == (401, "Basic")


# The admin's socket


def test_the_admins_socket_is_this_users_alone(world: Guarded) -> None:
    mode = admin_socket(world).stat().st_mode
    assert stat.S_ISSOCK(mode)
    assert stat.S_IMODE(mode) == 0o600
    assert mode
    assert os.getuid() == admin_socket(world).stat().st_uid


@pytest.mark.parametrize("verb", ["reload", "delete-namespace", "drain"])
def test_no_verb_is_reached_over_the_network(world: Guarded, verb: str) -> None:
    assert world.get(f"/{verb}", token=TOKENS["boss"], body=b"")[0] == 404


def test_verbs(world: Guarded, tmp_path: Path) -> None:
    with world.session() as session:
        item = wire.ReserveItem(namespace=ACME.namespace(), key=encode_key(make_meta(ACME).key), record_bytes=5000)
        session.reserve([item])
        write(tmp_path / "access.toml", EVERYBODY + "[tenant.acme]\nhost_bytes = 65536\n")
        assert ask_admin(admin_socket(world), "reload") == (200, {"problem": ""})
        status, document = ask_admin(admin_socket(world), "access", "GET")
        assert status == 200
        assert document["tenants"]["acme"]["host"] == {"taken_bytes": 8192, "limit_bytes": 65536}
        write(tmp_path / "access.toml", "nonsense = 1")
        status, answer = ask_admin(admin_socket(world), "reload")
        assert "nonsense" in answer["problem"]
        name = ACME.namespace().hex()
        assert ask_admin(admin_socket(world), f"delete-namespace?namespace={name}") == (200, {"deleted": 0})
        for bad in ("", "zz", RIVAL.namespace().hex()):
            status, answer = ask_admin(admin_socket(world), f"delete-namespace?namespace={bad}")
            assert (status, answer["error"]) == (400, "INVALID_INPUT")
        assert ask_admin(admin_socket(world), "reload", "GET")[0] == 405
        assert world.on_loop(lambda: len(world.node.sessions.open)) == 1


def test_a_node_without_an_access_file_has_the_socket_too(tmp_path: Path) -> None:
    with guarded(tmp_path, tls_cert="", tls_key="", access_file="") as world:
        assert ask_admin(admin_socket(world), "access", "GET")[1]["tenants"] == {}
        with world.session(NO_SECURITY, ACME, RIVAL):
            pass
    assert not admin_socket(world).exists()
