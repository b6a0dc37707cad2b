"""The access file: what it says is what is read, and whatever is wrong in it is named."""

import subprocess
import sys
from pathlib import Path

import pytest

from kvservice.access.access_file import read_access_file
from kvservice.access.principal import LOCAL, CallLimits, Role
from kvservice.access.quotas import Quota
from kvservice.model.errors import ConfigError
from tests.access.files import digest, write

GOOD = f"""
[local]
role = "engine"
tenants = ["acme", "own"]

[[principal]]
name = "engine-a"
role = "engine"
tenants = ["acme"]
tokens = [{{ blake3 = "{digest("old")}", expires = 2027-01-01T00:00:00Z }}, {{ sha256 = "{"ab" * 32}" }}]
certificates = ["engine-a.example"]
calls_per_s = 100
bytes_per_s = "1MiB"
sessions_max = 3

[[principal]]
name = "peer"
role = "node"
tenants = ["*"]
certificates = ["peer.example"]

[tenant.acme]
host_bytes = "4MiB"
ssd_bytes = 1000

[any_tenant]
remote_bytes = 7
"""


def test_a_good_file_is_read_as_it_stands(tmp_path: Path) -> None:
    table = read_access_file(write(tmp_path / "access.toml", GOOD))
    assert (table.local.name, table.local.role) == ("local", Role.ENGINE)
    assert table.local.tenants == frozenset({"acme", "own"})
    first, second = table.tokens
    assert (first.hash, first.digest.hex(), first.principal.expires_s) == ("blake3", digest("old"), 1798761600.0)
    assert (second.hash, second.principal.proof) == ("sha256", "sha256 abababababab")
    assert first.principal.limits == CallLimits(100.0, 1 << 20, 3)
    assert table.certificates["engine-a.example"].name == "engine-a"
    peer = table.certificates["peer.example"]
    assert peer.is_node
    assert peer.may("anybody")
    assert table.quotas.of("acme") == Quota(4 << 20, 1000)
    assert table.quotas.of("other") == Quota(remote_bytes=7)


def test_an_empty_file_lets_in_nobody_but_who_is_local(tmp_path: Path) -> None:
    table = read_access_file(write(tmp_path / "access.toml", ""))
    assert (table.local, table.tokens, table.certificates, table.quotas.is_empty) == (LOCAL, (), {}, True)


PRINCIPAL = '[[principal]]\nname = "a"\nrole = "engine"\ntenants = ["t"]\n'
TOKEN = f'tokens = [{{ blake3 = "{"0" * 64}" }}]\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("principal = 5", "principal must be tables"),
        ("owner = 1", "unknown keys owner"),
        (PRINCIPAL, "given tokens or certificates"),
        (PRINCIPAL.replace("engine", "king") + TOKEN, "one of engine, node, viewer, admin"),
        (PRINCIPAL.replace('"a"', '"a b"') + TOKEN, "1 to 64 letters"),
        (PRINCIPAL.replace('"a"', '"local"') + TOKEN, "not taken"),
        (PRINCIPAL.replace('tenants = ["t"]', "") + TOKEN, "given tenants"),
        (PRINCIPAL.replace('["t"]', '["t", "*"]') + TOKEN, "alone"),
        (PRINCIPAL.replace('["t"]', '"t"') + TOKEN, "list of texts"),
        (PRINCIPAL + 'tokens = [{ blake3 = "secret" }]', "never write the token itself"),
        (PRINCIPAL + "tokens = [{}]", "one digest"),
        (PRINCIPAL + TOKEN.replace("}]", ", expires = 2027-01-01T00:00:00 }]"), "with its zone"),
        (PRINCIPAL + TOKEN.replace("}]", ', expires = "soon" }]'), "with its zone"),
        (PRINCIPAL + TOKEN + "calls_per_s = -1", "calls_per_s"),
        (PRINCIPAL + TOKEN + 'bytes_per_s = "lots"', "bytes_per_s"),
        (PRINCIPAL + TOKEN + "speed = 1", "unknown keys speed"),
        (PRINCIPAL + TOKEN + PRINCIPAL + TOKEN, "not taken"),
        (PRINCIPAL + TOKEN + PRINCIPAL.replace('"a"', '"b"') + TOKEN, "another token than a"),
        ("[tenant.t]\nhost_bytes = true", "host_bytes"),
        ("[tenant.t]\ngpu_bytes = 1", "unknown keys gpu_bytes"),
        ("[any_tenant]\nhost_bytes = -1", "host_bytes"),
        ("[local]\nname = 'x'", "unknown keys name"),
        ("= 5", "no TOML"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path / "access.toml", text)
    with pytest.raises(ConfigError, match=message) as caught:
        read_access_file(path)
    assert str(path) in str(caught.value)


def test_no_message_holds_what_stands_for_a_token(tmp_path: Path) -> None:
    path = write(tmp_path / "access.toml", PRINCIPAL + 'tokens = [{ blake3 = "my secret token" }]')
    with pytest.raises(ConfigError) as caught:
        read_access_file(path)
    assert "my secret token" not in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.toml"):
        read_access_file(tmp_path / "missing.toml")


def test_the_command_makes_a_token_and_the_lines_for_its_file(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvservice.access", "engine-b"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    token = done.stderr.split()[-1]
    (proof,) = read_access_file(write(tmp_path / "access.toml", done.stdout)).tokens
    assert (proof.principal.name, proof.digest.hex()) == ("engine-b", digest(token))
    assert token not in done.stdout
