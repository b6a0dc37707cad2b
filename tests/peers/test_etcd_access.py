"""Who is let in by etcd: logins, TLS and client certificates against a real etcd; and URLs that cannot be right."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from time import time

import pytest

from kvservice.model.errors import ConfigError, NotOwnedError, UnavailableError
from kvservice.peers.etcd import EtcdRegistration, EtcdSource
from kvservice.peers.etcd_gateway import EtcdGateway
from kvservice.peers.etcd_place import parse_etcd_url
from kvservice.peers.member import SourceState
from tests.peers.etcd_process import EtcdProcess, encoded, require_etcd
from tests.peers.members import facts, place


@pytest.fixture
def etcd(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EtcdProcess]:
    with EtcdProcess(require_etcd(request), tmp_path / "etcd") as process:
        yield process


def close_to_strangers(etcd: EtcdProcess) -> None:
    """Users root:top and kv:p@ss, who may use /kvservice/ only; nobody else is let in."""
    for user, password in (("root", "top"), ("kv", "p@ss")):
        etcd.call("auth/user/add", {"name": user, "password": password})
        etcd.call("auth/role/add", {"name": user})
    keys = {"key": encoded("/kvservice/"), "range_end": encoded("/kvservice0"), "permType": "READWRITE"}
    etcd.call("auth/role/grant", {"name": "kv", "perm": keys})
    for user in ("root", "kv"):
        etcd.call("auth/user/grant", {"user": user, "role": user})
    etcd.call("auth/enable", {})


def url_of(etcd: EtcdProcess, login: str, prefix: str = "") -> str:
    return etcd.url.replace("://", f"://{login}@") + prefix


async def test_a_user_with_a_password_registers_and_logs_in_anew_after_a_restart(etcd: EtcdProcess) -> None:
    close_to_strangers(etcd)
    gateway = EtcdGateway(parse_etcd_url(url_of(etcd, "kv:p%40ss")))
    refused: list[Exception] = []
    node = EtcdRegistration(gateway, place(1), lambda: facts(1), clock=time, on_refused=refused.append)
    await node.start()
    assert node.is_registered
    source = EtcdSource(gateway, clock=time)
    assert len((await source.members()).listings) == 1
    etcd.kill()
    etcd.start()  # tokens of before are not known any more
    assert len((await source.members()).listings) == 1
    await node.stop()
    assert not refused


@pytest.mark.parametrize(
    ("login", "prefix", "message"),
    [
        ("kv:wrong", "", "refuses user 'kv'.*see user and password"),
        ("nobody:top", "", "refuses user 'nobody'"),
        ("", "", "refuses a client without a user"),
        ("kv:p%40ss", "/foreign", "refuses user 'kv'.*must read and write below /foreign/"),
    ],
)
async def test_who_is_not_let_in_is_told_at_the_start(etcd: EtcdProcess, login: str, prefix: str, message: str) -> None:
    close_to_strangers(etcd)
    url = url_of(etcd, login, prefix) if login else etcd.url + prefix
    gateway = EtcdGateway(parse_etcd_url(url))
    with pytest.raises(ConfigError, match=message) as refusal:
        await EtcdSource(gateway, clock=time).members()
    node = EtcdRegistration(gateway, place(1), lambda: facts(1), clock=time, on_refused=lambda _: None)
    with pytest.raises(ConfigError, match=message):
        await node.start()
    with pytest.raises(NotOwnedError, match=message):
        async for _ in gateway.watch(gateway.place.prefix.encode(), 1):
            pass
    assert "p@ss" not in str(refusal.value)
    await gateway.close()


# TLS


def openssl(folder: Path, *arguments: str) -> None:
    program = shutil.which("openssl")
    if program is None:
        pytest.skip("openssl is not installed: apt-get install openssl")
    subprocess.run((program, *arguments), cwd=folder, check=True, capture_output=True)


def make_authority(folder: Path, name: str) -> None:
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    out = ("-keyout", f"{name}.key", "-out", f"{name}.pem")
    openssl(folder, "req", "-x509", *key, *out, "-subj", f"/CN={name}", "-days", "2")


def make_certificate(folder: Path, authority: str, name: str) -> None:
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    openssl(folder, "req", *key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth\n")
    signer = ("-CA", f"{authority}.pem", "-CAkey", f"{authority}.key", "-CAcreateserial")
    out = ("-out", f"{name}.pem", "-days", "2", "-extfile", "names")
    openssl(folder, "x509", "-req", "-in", f"{name}.csr", *signer, *out)


@pytest.fixture
def tls_etcd(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EtcdProcess]:
    """An etcd that wants certificates of ca.pem; client.pem is one, stranger.pem is of other.pem."""
    program = require_etcd(request)
    for name in ("ca", "other"):
        make_authority(tmp_path, name)
    for authority, name in (("ca", "server"), ("ca", "client"), ("other", "stranger")):
        make_certificate(tmp_path, authority, name)
    files = {name: str(tmp_path / name) for name in ("server.pem", "server.key", "ca.pem")}
    own = ("--cert-file", files["server.pem"], "--key-file", files["server.key"])
    theirs = ("--client-cert-auth", "--trusted-ca-file", files["ca.pem"])
    with EtcdProcess(program, tmp_path / "etcd", (*own, *theirs)) as process:
        yield process


async def test_client_certificates_let_in_and_strangers_do_not_get_in(tls_etcd: EtcdProcess, tmp_path: Path) -> None:
    def options(ca: str, client: str) -> str:
        return f"?ca={tmp_path / ca}" + (f"&cert={tmp_path / client}.pem&key={tmp_path / client}.key" if client else "")

    gateway = EtcdGateway(parse_etcd_url(tls_etcd.url + options("ca.pem", "client")))
    node = EtcdRegistration(gateway, place(1), lambda: facts(1), clock=time, on_refused=lambda _: None)
    await node.start()
    assert node.is_registered
    assert (await EtcdSource(gateway, clock=time).members()).state is SourceState.LISTED
    await node.stop()
    wrong = {("other.pem", "client"): "CERTIFICATE_VERIFY_FAILED", ("ca.pem", ""): "", ("ca.pem", "stranger"): ""}
    for files, reason in wrong.items():
        gateway = EtcdGateway(parse_etcd_url(tls_etcd.url + options(*files)))
        with pytest.raises(UnavailableError, match=f"cannot be reached.*{reason}"):
            await gateway.list_keys(b"/")
        await gateway.close()


def test_certificates_that_cannot_be_used_stop_the_boot(tmp_path: Path) -> None:
    broken = tmp_path / "ca.pem"
    broken.write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    with pytest.raises(ConfigError, match=r"certificates.*cannot be used"):
        EtcdGateway(parse_etcd_url(f"https://127.0.0.1:1?ca={broken}"))
    with pytest.raises(ConfigError, match=r"certificates.*cannot be used"):
        EtcdGateway(parse_etcd_url(f"https://127.0.0.1:1?cert={broken}"))


# URLs


def test_a_url_says_all() -> None:
    place_ = parse_etcd_url("https://us%3Aer:pa%2Fss@a.test:1,[::1]:2/team/kv/")
    assert (place_.user, place_.password, place_.prefix) == ("us:er", "pa/ss", "/team/kv")
    assert str(place_) == "https://a.test:1,[::1]:2/team/kv"
    assert "pa/ss" not in repr(place_)
    assert parse_etcd_url("http://127.0.0.1:2379").prefix == "/kvservice"
    assert parse_etcd_url("http://u:p@localhost:2379").user == "u"


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("", "must begin with https"),
        ("127.0.0.1:2379", "must begin with https"),
        ("etcd://a:1", "must begin with https"),
        ("https://", "names 0 endpoints"),
        ("https://a", "is not an address"),
        ("https://a:1,b", "is not an address"),
        ("https://" + ",".join(["a:1"] * 17), "names 17 endpoints"),
        ("http://kv:secret@10.0.0.1:2379", "need https"),
        ("http://127.0.0.1:1?ca=/etc/hosts", "need https"),
        ("https://a:1?cafile=/x", "unknown options cafile"),
        ("https://a:1?ca=/absent/ca.pem", "files that are not there: /absent/ca.pem"),
        ("https://a:1?key=/etc/hosts", "a key without a cert"),
        ("https://kv:secret@a:1?x", "options that cannot be read"),
        ("https://kv:secret@[a:1", "cannot be read"),
    ],
)
def test_a_url_that_cannot_be_right_is_refused_without_its_password(url: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as refusal:
        parse_etcd_url(url)
    assert "secret" not in str(refusal.value)
